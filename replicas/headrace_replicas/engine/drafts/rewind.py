"""Takes tokens at the end of a prompt cache back, and counts them again when they were right.

mlx-lm's caches of keys and values write behind an index. Moving it back keeps what is behind it
until the next tokens overwrite that, so that moving it forward again brings it back. A cache that
was joined with another one, cut, or written to has a new offset array: a mark of the offsets tells
whether what is behind the index is still what was written there.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_lm.models.cache import CacheList

Mark = tuple[Any, ...]


def has_room(cache: Iterable[Any], tokens: int) -> bool:
    """Whether so many tokens could be taken back after they were written.

    Recurrent states keep nothing of what was before. A window that has filled up drops its oldest
    tokens when new ones come.
    """
    return all(_takes_back(part, tokens) for part in _parts(cache))


def _takes_back(part: Any, tokens: int) -> bool:
    if not part.is_trimmable():
        return False
    window: int | None = getattr(part, "max_size", None)
    return window is None or part.size() + tokens < window


def take_back(cache: Iterable[Any], tokens: int) -> None:
    """Move the end of a cache back; needs `has_room` before the tokens were written."""
    for entry in cache:
        entry.trim(tokens)


def count_again(cache: Iterable[Any], tokens: int) -> None:
    """Undo `take_back` for the first of the tokens that it took, if the mark is still there.

    Raises:
        RuntimeError: This version of mlx-lm moves indexes otherwise.
    """
    for entry in cache:
        stood = entry.size()
        entry.trim(-tokens)
        if entry.size() != stood + tokens:
            name = type(entry).__name__
            raise RuntimeError(
                f"mlx-lm's {name} no longer moves forward over {tokens} tokens; set "
                "engine.draft_model to null"
            )


def mark(cache: Iterable[Any]) -> Mark:
    """What stays the same objects until somebody changes the cache."""
    return tuple(part.offset for part in _parts(cache))


def is_unchanged(cache: Iterable[Any], marked: Mark) -> bool:
    """Whether nobody changed the cache since it was marked."""
    now = mark(cache)
    same = (one is other for one, other in zip(now, marked, strict=False))
    return len(now) == len(marked) and all(same)


def _parts(cache: Iterable[Any]) -> Iterator[Any]:
    for entry in cache:
        if isinstance(entry, CacheList):
            yield from _parts(entry.caches)
        else:
            yield entry
