"""How an engine's last words lie in their file; stdlib only, because the watchdog reads them too.

One page of fixed fields, then text slots. A field that changes often is written with one machine
store, so that a reader in another process never sees half of it. A text slot has two buffers: the
writer fills the older one and then makes it the newest, and a checksum tells a reader whether it
caught a buffer in the middle.
"""

import mmap
import struct
import zlib
from dataclasses import dataclass
from typing import Final, get_args

from headrace_replicas.contract.flight import Phase

MAGIC: Final = b"HRWORDS1"
VERSION: Final = 1
PAGE_BYTES: Final = 4096

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
BUSY_PHASES: Final = frozenset[Phase]({"load", "prefill", "decode", "teardown"})
"""Phases in which the device may hang: without progress something is wrong."""

# Magic, version, process id, generation, the start by the wall clock (seconds) and by the monotonic
# one (nanoseconds), boot id.
WHO: Final = struct.Struct("@8sIIQdQ64s")
WHO_AT: Final = 0
# Marks of progress so far, and the monotonic clock at the newest of them in nanoseconds.
MARK: Final = struct.Struct("@QQ")
MARK_AT: Final = 128
# Index of the phase, whether it is a busy one, whether the device has completed work, whether the
# process has said that it ends.
FLAGS: Final = struct.Struct("@BBBB")
FLAGS_AT: Final = 160
# The monotonic clock at the newest heartbeat in nanoseconds, and how many there were.
BEAT: Final = struct.Struct("@QQ")
BEAT_AT: Final = 192

# Sequence number, length and checksum of a buffer; 0 is the sequence of an empty one.
_HEAD: Final = struct.Struct("@QII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a text lies.

    Attributes:
        at: Offset of the first buffer.
        room_bytes: The longest text.
    """

    at: int
    room_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Length of one buffer, a multiple of eight."""
        return (_HEAD.size + self.room_bytes + 7) // 8 * 8


DETAIL: Final = Slot(at=PAGE_BYTES, room_bytes=256)
IN_FLIGHT: Final = Slot(at=DETAIL.at + 2 * DETAIL.buffer_bytes, room_bytes=8 * 1024)
FAULT: Final = Slot(at=IN_FLIGHT.at + 2 * IN_FLIGHT.buffer_bytes, room_bytes=32 * 1024)
END: Final = Slot(at=FAULT.at + 2 * FAULT.buffer_bytes, room_bytes=4 * 1024)
ORIGIN: Final = Slot(at=END.at + 2 * END.buffer_bytes, room_bytes=4 * 1024)
FILE_BYTES: Final = -(-(ORIGIN.at + 2 * ORIGIN.buffer_bytes) // PAGE_BYTES) * PAGE_BYTES

View = mmap.mmap | bytes | bytearray


def write_slot(view: mmap.mmap | bytearray, slot: Slot, text: bytes) -> None:
    """Make a text the newest of its slot; what does not fit is cut off."""
    text = text[: slot.room_bytes]
    first, second = _head(view, slot, 0)[0], _head(view, slot, 1)[0]
    older = 0 if first <= second else 1
    at = slot.at + older * slot.buffer_bytes
    # Until the last line a reader takes the other buffer: this one's checksum is wrong.
    _HEAD.pack_into(view, at, 0, 0, 0)
    view[at + _HEAD.size : at + _HEAD.size + len(text)] = text
    _HEAD.pack_into(view, at, max(first, second) + 1, len(text), zlib.crc32(text))


def read_slot(view: View, slot: Slot) -> bytes | None:
    """The newest whole text of a slot; None when there is none."""
    found = [(_head(view, slot, number), number) for number in (0, 1)]
    for (sequence, length, checksum), number in sorted(found, reverse=True):
        if sequence == 0 or length > slot.room_bytes:
            continue
        at = slot.at + number * slot.buffer_bytes + _HEAD.size
        text = bytes(view[at : at + length])
        if zlib.crc32(text) == checksum:
            return text
    return None


def _head(view: View, slot: Slot, number: int) -> tuple[int, int, int]:
    sequence, length, checksum = _HEAD.unpack_from(view, slot.at + number * slot.buffer_bytes)
    return sequence, length, checksum
