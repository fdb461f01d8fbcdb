"""Pauses are measured while reads are waited for, and nowhere else."""

from tests.support.read_waits import ReadWaits


def test_a_pause_is_counted_while_reads_are_waited_for_and_the_stall_is_not() -> None:
    waits = ReadWaits(stall_s=50.0)
    waits._slept_s = [(10.0, 12.0), (11.0, 14.0), (20.0, 21.0), (30.0, 82.0)]
    assert waits.longest_pause_s([]) == 52.0
    waits._stalled_s = (31.0, 81.0)
    assert waits.longest_pause_s([]) == 4.0
    assert waits.longest_pause_s([11.0, 13.0]) == 2.0
    assert waits.longest_pause_s([11.0, 12.0, 13.0, 30.5, 81.5]) == 1.0
