"""Where bytes lie, for whoever decides about reads or looks at the page cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileRange:
    """One contiguous range of a file.

    Attributes:
        file: Index into the reader's files.
        offset: First byte in the file.
        size_bytes: Its length.
    """

    file: int
    offset: int
    size_bytes: int
