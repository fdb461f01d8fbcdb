"""Bounds what this process keeps of the memory that it has freed.

A memory plan counts what is used, and one more thing: the cache of MLX's allocator, which has a
limit of its own. Below it, on MLX's CPU backend, lies the C library's allocator. glibc learns from
large blocks that are freed, puts later ones into its heap, and cannot give the heap back while
anything lives above them: requests whose KV cache grew to 120 MiB took 225 MiB at their peak. With
a fixed threshold a large block is the system's again the moment MLX lets go of it: 157 MiB.
"""

import ctypes
from typing import Final

from headrace_replicas.engine.backend import mx

# From malloc.h of glibc.
_M_MMAP_THRESHOLD: Final = -3
# Smaller blocks fill the heap's gaps well enough, and a system call for each would be felt.
_LARGE_BLOCK_BYTES: Final = 1024 * 1024


def bound_freed_memory(cache_limit_bytes: int) -> None:
    """Keep at most so much freed memory, for reuse; the rest goes back to the system.

    Args:
        cache_limit_bytes: What MLX's allocator keeps.
    """
    mx.set_cache_limit(cache_limit_bytes)
    # Only glibc has it; elsewhere large blocks are not kept in the first place.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def give_back_freed_memory() -> None:
    """Return what MLX's allocator keeps; only while nothing runs: it waits for the device."""
    mx.clear_cache()


def return_free_pages() -> None:
    """Let the C library give back what it keeps of freed memory.

    Smaller blocks lie in a heap with holes, whose pages glibc keeps unless it is told.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
