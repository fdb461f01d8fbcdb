"""Memory that an engine frees is the system's again, but for what a setting lets it keep."""

import ctypes
import json
import subprocess
import sys

import mlx.core as mx
import pytest

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.steps import Engine
from tests.support.engines import load_on_cpu

pytestmark = pytest.mark.engine

MIB = 2**20
# Large blocks with small ones between them (10 MiB), as KV caches that grow leave them behind.
PROGRAM = """
import ctypes, json, sys
from tests.support.proc_status import status_bytes
from headrace_replicas.engine.allocators import bound_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "bound":
    bound_freed_memory(0)
def block(size):
    address = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 1, size)
    return address
libc.free(block(4 * 2**20))
before = status_bytes("RssAnon")
large = [(block(4 * 2**20), block(2**19))[0] for _ in range(20)]
taken = status_bytes("RssAnon") - before
for address in large:
    libc.free(address)
print(json.dumps([taken, status_bytes("RssAnon") - before]))
"""


def taken_and_kept(how: str) -> tuple[int, int]:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, how], check=True, capture_output=True
    )
    taken, kept = json.loads(ended.stdout)
    return taken, kept


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="only glibc keeps large blocks in its heap",
)
def test_large_blocks_go_back_to_the_system() -> None:
    """Left to itself, the C library would keep nearly all of them."""
    taken, kept = taken_and_kept("unbound")
    assert min(taken, kept) > 70 * MIB
    taken, kept = taken_and_kept("bound")
    assert taken > 70 * MIB > 20 * MIB > kept


def test_the_limit_of_mlxs_cache_holds_from_before_the_load(checkpoint: Checkpoint) -> None:
    """What a load frees on its way, the plan does not count."""
    limits: list[int] = []

    def load() -> LoadedModel:
        limits.append(mx.set_cache_limit(3 * MIB))
        mx.set_cache_limit(limits[0])
        return load_on_cpu(checkpoint)

    settings = EngineSettings(device="cpu", cache_limit_bytes=5 * MIB)
    engine = Engine(load=load, settings=settings, clock=SystemClock())
    engine.start()
    engine.stop()
    assert limits == [5 * MIB]
    assert mx.set_cache_limit(5 * MIB) == 5 * MIB
