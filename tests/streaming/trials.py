"""Everything that is tried, one checkpoint at a time, each by itself in a folder of its own."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.packing import pack_checkpoint
from tests.streaming.architectures import ARCHITECTURES, by_module
from tests.streaming.comparison import compare, compare_bytes, loaded
from tests.streaming.layouts import LAYOUTS, Layout, lay_out
from tests.streaming.model_configs import EXPERTS
from tests.streaming.tiny_checkpoints import MODES, SCALED, mode_named, write
from tests.streaming.verdicts import Verdict

QUICK_MODULES: Final = (
    *("gpt_oss", "kimi_vl", "llama4", "mixtral", "muse_spark", "nemotron_h", "phixtral"),
    "qwen3_vl_moe",
)
QUICK_MODES: Final = ("float32", "mixed")
SCALED_MODULE: Final = "qwen3_moe"
REFUSAL: Final = "cannot be read from the files as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What was said of a layout that cannot be streamed.

    Attributes:
        what: The layout.
        message: The error; empty when there was none.
    """

    what: str
    message: str

    @property
    def complaints(self) -> list[str]:
        """Everything that does not hold."""
        if REFUSAL in self.message:
            return []
        return [f"{self.what}: not refused as it should be: {self.message or 'it loaded'}"]


def modes_of(module: str, names: Sequence[str] = ()) -> list[str]:
    """The modes that an architecture can be saved in, of those named (all, if none are)."""
    possible = by_module(module).modes or tuple(mode.name for mode in MODES)
    return [name for name in possible if not names or name in names]


def try_architecture(module: str, names: Sequence[str] = ()) -> list[Verdict]:
    """One architecture as mlx-lm saves it, in each mode."""
    return [_try_mode(module, name) for name in modes_of(module, names)]


def _try_mode(module: str, name: str) -> Verdict:
    architecture, mode = by_module(module), mode_named(name)
    with tempfile.TemporaryDirectory(prefix="headrace-equality-") as folder:
        return compare(architecture, mode, write(Path(folder), architecture, mode))


def try_layout(title: str) -> Verdict:
    """A layout as it is published; it must stream."""
    layout = layout_titled(title)
    architecture, mode = by_module(layout.module), mode_named(layout.mode)
    with tempfile.TemporaryDirectory(prefix="headrace-equality-") as folder:
        written = lay_out(write(Path(folder), architecture, mode), layout)
        return compare(architecture, mode, written, title)


def try_refusal(title: str) -> Refusal:
    """A layout that loads resident and cannot be streamed; it must be refused in words."""
    layout = layout_titled(title)
    architecture, mode = by_module(layout.module), mode_named(layout.mode)
    with tempfile.TemporaryDirectory(prefix="headrace-equality-") as folder:
        written = lay_out(write(Path(folder), architecture, mode), layout)
        checkpoint = read_checkpoint(written.folder)
        with loaded(checkpoint, mode, None):
            pass
        try:
            with loaded(checkpoint, mode, EXPERTS // 2):
                return Refusal(what=title, message="")
        except CheckpointError as error:
            return Refusal(what=title, message=str(error))


def try_packed(title: str) -> Verdict:
    """The same layout once its experts are packed; it must stream."""
    layout = layout_titled(title)
    architecture, mode = by_module(layout.module), mode_named(layout.mode)
    with tempfile.TemporaryDirectory(prefix="headrace-equality-") as folder:
        written = lay_out(write(Path(folder), architecture, mode), layout)
        checkpoint = read_checkpoint(written.folder)
        pack_checkpoint(checkpoint, written.folder, workers=1, bar=_no_bar)
        return compare(architecture, mode, written, f"{title}, packed")


@contextmanager
def _no_bar(_title: str, _total_bytes: int) -> Iterator[Callable[[int], None]]:
    yield lambda _bytes: None


def layout_titled(title: str) -> Layout:
    """The layout of that title.

    Raises:
        KeyError: There is none.
    """
    return {layout.title: layout for layout in LAYOUTS}[title]


def published(modules: Sequence[str]) -> list[Callable[[], Verdict | Refusal]]:
    """Trials of the layouts that some architectures are published in."""
    wanted = [layout for layout in LAYOUTS if layout.module in modules]
    streaming = [layout.title for layout in wanted if layout.streams]
    refused = [layout.title for layout in wanted if not layout.streams]
    return [
        *(partial(try_layout, title) for title in streaming),
        *([try_scales] if SCALED_MODULE in modules else []),
        *(partial(try_packed, title) for title in refused),
        *(partial(try_refusal, title) for title in refused),
    ]


def try_scales() -> Verdict:
    """Scales of single experts; MLX computes with them on a GPU alone, so bytes are compared."""
    architecture = by_module(SCALED_MODULE)
    with tempfile.TemporaryDirectory(prefix="headrace-equality-") as folder:
        return compare_bytes(architecture, SCALED, write(Path(folder), architecture, SCALED))


STREAMING_LAYOUTS: Final = tuple(layout for layout in LAYOUTS if layout.streams)
REFUSED_LAYOUTS: Final = tuple(layout for layout in LAYOUTS if not layout.streams)
ALL_MODULES: Final = tuple(sorted(one.module for one in ARCHITECTURES))
