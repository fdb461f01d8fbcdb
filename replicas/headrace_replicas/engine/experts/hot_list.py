"""The list of hot experts of one checkpoint, kept over restarts.

It lies below the state folder, `hot_lists/<first 16 digits of the fingerprint>.json`, and belongs
to the checkpoint, whatever the number of slots, the schedule or the device: it may be copied to
another host. (Not in the pack's own folder: `headrace pack` wants to put a link in that place.)

Laws: a list that is damaged, another checkpoint's or not there is ignored and never an error;
whoever reads sees a whole list; several engines of a host that write the same list add up.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_replicas.engine.durable_files import locked, write_whole
from headrace_replicas.engine.experts.popularity import Popularity, misfit, unknown, with_uses
from headrace_replicas.engine.experts.use_counts import UseCounts
from headrace_replicas.engine.json_files import SMALL_FILE_BYTES, first_complaint, is_regular_file

log = logging.getLogger("ray.serve.headrace.experts")

# Digits that a count is written with; more would say nothing and double the file.
_DIGITS: Final = 6

Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HotLayer(_Record):
    """The counts of one layer.

    Attributes:
        path: The layer, as mlx-lm names modules.
        uses: Decayed uses of each expert.
    """

    path: str
    uses: Annotated[tuple[Count, ...], Field(min_length=1)]


class HotListFile(_Record):
    """What is kept in the file.

    Attributes:
        format: Tells this file from others.
        version: Of the format; a reader ignores one that it does not know.
        fingerprint: Of the checkpoint whose experts were counted.
        layers: Those that have streamed.
    """

    format: Literal["headrace-hot-list"] = "headrace-hot-list"
    version: Literal[1] = 1
    fingerprint: str
    layers: tuple[HotLayer, ...]


def hot_list_path(state_dir: Path, fingerprint: str) -> Path:
    """Where the list of a checkpoint lies."""
    return state_dir / "hot_lists" / f"{fingerprint[:16]}.json"


class HotList:
    """The list of one checkpoint: read at the start, written now and then by one thread.

    Args:
        path: Where it lies.
        fingerprint: The checkpoint's.
        shapes: Experts of each layer that streams, in the order of `uses`.
        uses: What this engine counts; what it has counted before now is left out.

    Attributes:
        popularity: What is known of these layers at least, as of the start or the last save.
    """

    def __init__(
        self, path: Path, *, fingerprint: str, shapes: Mapping[str, int], uses: UseCounts
    ) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._shapes = dict(shapes)
        self._uses = uses
        self._saved = uses.read()
        self._has_failed = False
        self.popularity = unknown(self._shapes)
        try:
            held = read_hot_list(path, fingerprint, self._shapes)
        except FileNotFoundError:
            log.info("there is no list of hot experts yet: %s", path)
        except (OSError, ValueError) as error:
            log.warning("the list of hot experts is ignored: %s: %s", path, error)
        else:
            self.popularity = Popularity(layers={**self.popularity.layers, **held.layers})

    def save(self) -> bool:
        """Add what was counted since the last time to the file; it is on the disk on return.

        Returns:
            Whether it was written: not when nothing was counted, when another engine of this host
            is writing, or when the folder cannot be written (which is logged). Then the counts
            wait for the next time.
        """
        counts = self._uses.read()
        fresh = {
            path: [now - before for now, before in zip(*rows, strict=True)]
            for path, *rows in zip(self._shapes, counts, self._saved, strict=True)
        }
        if not any(map(any, fresh.values())):
            return False
        try:
            popularity = self._added(fresh)
        except OSError as error:
            if not self._has_failed:
                log.warning(
                    "the list of hot experts is not kept: %s: %s", self._path, error.strerror
                )
            self._has_failed = True
            return False
        if popularity is None:
            return False
        self.popularity, self._saved, self._has_failed = popularity, counts, False
        return True

    def _added(self, fresh: Mapping[str, list[int]]) -> Popularity | None:
        """What the file says now that fresh uses are in it; None when another engine writes.

        Raises:
            OSError: It cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._path.parent) as is_ours:
            if not is_ours:
                return None
            try:
                known = read_hot_list(self._path, self._fingerprint, self._shapes)
            except (OSError, ValueError):
                known = self.popularity  # the file went or broke meanwhile: it is made anew
            popularity = with_uses(known, fresh)
            write_whole(self._path, _encoded(popularity, self._fingerprint))
        return popularity


def read_hot_list(path: Path, fingerprint: str, shapes: Mapping[str, int]) -> Popularity:
    """The counts in a file.

    Args:
        path: The file.
        fingerprint: Of the checkpoint that they must belong to.
        shapes: Experts of each of its layers that streams.

    Raises:
        OSError: It is not there or cannot be read.
        ValueError: It is no list of this version, or another model's; says why.
    """
    if path.exists() and not is_regular_file(path):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        raw = file.read(SMALL_FILE_BYTES)
    try:
        held = HotListFile.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(
            f"it is damaged or of another version ({first_complaint(error)})"
        ) from None
    if held.fingerprint != fingerprint:
        raise ValueError("it belongs to another checkpoint")
    popularity = Popularity(layers={layer.path: layer.uses for layer in held.layers})
    problem = misfit(popularity, shapes)
    if problem is not None:
        raise ValueError(problem)
    return popularity


def _encoded(popularity: Popularity, fingerprint: str) -> bytes:
    layers = tuple(
        HotLayer(path=path, uses=tuple(float(f"{count:.{_DIGITS}g}") for count in uses))
        for path, uses in popularity.layers.items()
    )
    return HotListFile(fingerprint=fingerprint, layers=layers).model_dump_json().encode()
