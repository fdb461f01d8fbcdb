"""What a start reads of its host: memory, the boot, the neighbours on the GPU."""

import plistlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.boot_id import linux_boot_id, read_boot_id
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import MemoryPlanError
from headrace_replicas.gpu_neighbours import (
    GpuUse,
    NoNeighbours,
    WatchedNeighbours,
    busy_ns_in,
    neighbours_here,
    told,
)
from headrace_replicas.host_memory import read_memory, wired_bytes_in
from headrace_replicas.mac_commands import output_of
from tests.support.waiting import comes_true

# As macOS 15 prints it on a Mac with Apple silicon.
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              184221.
Pages active:                           1405833.
Pages inactive:                         1388514.
Pages speculative:                        17030.
Pages throttled:                              0.
Pages wired down:                        949874.
Pages purgeable:                          29416.
"Translation faults":                1370241873.
Pages copy-on-write:                   47188374.
Pages stored in compressor:              210512.
Pages occupied by compressor:             74307.
Swapins:                                      0.
Swapouts:                                     0.
"""


def test_wired_memory_is_read_from_vm_stat() -> None:
    assert wired_bytes_in(VM_STAT) == 949_874 * 16_384


def test_a_mac_with_smaller_pages_counts_in_those() -> None:
    assert wired_bytes_in(VM_STAT.replace("16384", "4096")) == 949_874 * 4096


@pytest.mark.parametrize("text", ["", "vm_stat: no such thing", VM_STAT.replace("wired", "tired")])
def test_a_system_that_does_not_tell_is_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(MemoryPlanError, match=r"Does /usr/bin/vm_stat run\?"):
        wired_bytes_in(text)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_linux_tells_what_is_available() -> None:
    found = read_memory()
    assert found.available_bytes > 0
    assert found.wired_bytes is None


def test_a_boot_has_an_id(tmp_path: Path) -> None:
    assert linux_boot_id(tmp_path) == ""
    file = tmp_path / "proc/sys/kernel/random/boot_id"
    file.parent.mkdir(parents=True)
    file.write_text("3c5e6a7e-7d3b-4b0e-9a43-6f9d6a1f6c11\n")
    assert linux_boot_id(tmp_path) == "3c5e6a7e-7d3b-4b0e-9a43-6f9d6a1f6c11"
    assert read_boot_id() == read_boot_id()


def test_a_program_that_is_not_there_prints_nothing() -> None:
    assert output_of("/usr/bin/no-such-program-here") == b""
    assert output_of("/bin/sh", "-c", "echo half; exit 3") == b""
    assert output_of("/bin/sh", "-c", "echo all") == b"all\n"


def client(pid: int, name: str, *busy_ns: int) -> str:
    usage = "".join(
        f"<dict><key>API</key><string>Metal</string><key>accumulatedGPUTime</key>"
        f"<integer>{time}</integer><key>lastSubmittedTime</key><integer>98712340571</integer></dict>"
        for time in busy_ns
    )
    return f"""<dict>
      <key>AppUsage</key><array>{usage}</array>
      <key>CommandQueueCount</key><integer>1</integer>
      <key>IOClass</key><string>AGXDeviceUserClient</string>
      <key>IOObjectClass</key><string>AGXDeviceUserClient</string>
      <key>IOUserClientCreator</key><string>pid {pid}, {name}</string>
      <key>IORegistryEntryName</key><string>AGXDeviceUserClient</string>
    </dict>"""


def ioreg(*clients: str) -> bytes:
    """As `ioreg -a -r -c IOAccelerator -l -w0` prints it on an M2, shortened."""
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<plist version="1.0">
<array><dict>
  <key>IOClass</key><string>AGXAcceleratorG14X</string>
  <key>IOObjectClass</key><string>AGXAcceleratorG14X</string>
  <key>PerformanceStatistics</key><dict>
    <key>Device Utilization %</key><integer>43</integer>
    <key>In use system memory</key><integer>1290567680</integer>
    <key>recoveryCount</key><integer>0</integer>
  </dict>
  <key>IORegistryEntryChildren</key><array>
    {"".join(clients)}
    <dict><key>IOObjectClass</key><string>AGXDeviceUserClient</string></dict>
  </array>
</dict></array></plist>""".encode()


BEFORE = ioreg(
    client(533, "WindowServer", 7_000_000_000),
    client(81230, "Final Cut Pro", 4_000_000_000, 1_000_000_000),
    client(4711, "python3.11", 90_000_000_000),
)
AFTER = ioreg(
    client(533, "WindowServer", 7_100_000_000),
    client(81230, "Final Cut Pro", 4_800_000_000, 1_020_000_000),
    client(4711, "python3.11", 91_000_000_000),
    client(99, "Safari, helper", 60_000_000_000),
)


def use(raw: bytes, at_s: float) -> GpuUse:
    return GpuUse(at_s=at_s, busy_ns=busy_ns_in(raw))


def test_the_time_of_each_process_is_read_from_the_io_registry() -> None:
    assert busy_ns_in(AFTER) == {
        (533, "WindowServer"): 7_100_000_000,
        (81230, "Final Cut Pro"): 5_820_000_000,
        (4711, "python3.11"): 91_000_000_000,
        (99, "Safari, helper"): 60_000_000_000,
    }


def test_two_looks_name_the_neighbour_and_its_share() -> None:
    """Our own process, a little drawing, and who has only just come are not named."""
    found = told(use(BEFORE, 10.0), use(AFTER, 12.0), own_pids={4711})
    assert found == "Final Cut Pro (pid 81230) used 41 % of the GPU in the last 2 s"


def test_a_window_server_that_draws_a_lot_is_named() -> None:
    later = ioreg(client(533, "WindowServer", 8_000_000_000))
    found = told(use(BEFORE, 10.0), use(later, 12.0), own_pids=set())
    assert found == "WindowServer (pid 533) used 50 % of the GPU in the last 2 s"


def test_nobody_is_named_when_nobody_works() -> None:
    assert told(use(BEFORE, 10.0), use(BEFORE, 12.0), own_pids=set()) == ""
    assert told(use(BEFORE, 10.0), use(AFTER, 10.0), own_pids=set()) == ""


WORDS = st.sampled_from(["", "pid 1, x", "pid x, 1", "pid 999999999999999999999, y"])
ENTRIES = st.recursive(
    WORDS | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["IORegistryEntryChildren", "IOUserClientCreator", "AppUsage"]), inner
        )
    ),
)


@given(st.binary() | ENTRIES.map(plistlib.dumps) | st.sampled_from([BEFORE[:900], b"<plist>", b""]))
def test_whatever_is_printed_is_no_reason_to_fail(raw: bytes) -> None:
    busy_ns_in(raw)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac tells")
def test_linux_has_no_neighbours_to_tell_of() -> None:
    neighbours = neighbours_here(SystemClock())
    assert isinstance(neighbours, NoNeighbours)
    assert neighbours.look() == ""


def test_neighbours_are_looked_at_in_the_background() -> None:
    class Busier:
        looks = 0

        def look(self) -> str:
            self.looks += 1
            return f"look {self.looks}"

    watched = WatchedNeighbours(Busier(), period_s=0.01)
    assert comes_true(lambda: watched.look() >= "look 3")
    watched.close()
    seen = watched.look()
    assert watched.look() == seen
