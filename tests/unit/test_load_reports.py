"""How a load is told to the controller."""

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.fleet import HostReported, HostState
from headrace_replicas.controller_line import LoadReports

START = HostReported(host="m1", device=0, generation=3, state=HostState.USABLE, at_s=0.0)


class SetClock(SystemClock):
    at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


def test_a_load_is_told_once_a_second_and_at_its_end() -> None:
    clock = SetClock()
    told: list[HostReported] = []
    reports = LoadReports(START, told.append, clock)
    for done_bytes in range(1, 31):
        clock.at_s += 0.125
        reports(done_bytes, 30)
    assert [one.loaded_bytes for one in told] == [1, 9, 17, 25, 30]
    assert {(one.generation, one.total_bytes, one.state) for one in told} == {
        (3, 30, HostState.USABLE)
    }
    assert told[-1].at_s == clock.at_s
