"""What makes `make bench` fail: work and equality, and never a speed."""

import pytest

from headrace_replicas.engine.decode_bench import Work
from headrace_replicas.engine.experts.read_rates import ReadRate, ReadRates
from tests.bench.decoding import Disk, Fed
from tests.bench.limits_report import DecodeRow, Pair, Verdicts
from tests.bench.routing import Misses

DISK = ReadRate(at_once=1, bytes_per_s=50.0, read_bytes=50, runs=1, cached_ratio=0.0)


def fed(work_s: float, logits: str, work: Work | None = None) -> Fed:
    return Fed(wall_s=2 * work_s, work_s=work_s, logits=tuple(logits), work=work or Work())


def row(*, cold: bool, streamed_s: float, read_bytes: int) -> DecodeRow:
    work = Work(hits=6, misses=2, read_bytes=read_bytes)
    pair = Pair(resident=fed(1.0, "abcd"), streamed=fed(streamed_s, "abxd", work))
    return DecodeRow(
        share=0.25,
        cold=cold,
        settling=pair,
        pairs=[pair],
        misses=Misses(needed=8, engine=2, least=1),
        disk=Disk(rates=ReadRates(warm=DISK, cold=(DISK,), how=""), expert_bytes=read_bytes // 2),
    )


def test_a_missed_target_is_printed_and_fails_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = Verdicts()
    verdicts.check(True, "two and two are four")
    verdicts.target(False, "as fast as light", "0.1")
    assert verdicts.print_all() == 0
    assert "NOT MET  as fast as light: 0.1" in capsys.readouterr().out


def test_a_count_that_does_not_hold_fails(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = Verdicts()
    verdicts.target(True, "as fast as sound", "1.0")
    verdicts.check(False, "two and two are five")
    assert verdicts.print_all() == 1
    assert "does not hold: two and two are five" in capsys.readouterr().out


def test_tokens_count_as_same_only_with_the_same_logits() -> None:
    assert row(cold=False, streamed_s=1.0, read_bytes=100).pairs[0].same == 3


def test_a_cold_row_is_held_against_the_disk_where_that_is_slower() -> None:
    """100 bytes at 50 a second take 2 s, the resident model 1 s: 4 s are half of the bound."""
    assert row(cold=True, streamed_s=4.0, read_bytes=100).bound_share == pytest.approx(0.5)
    assert row(cold=False, streamed_s=4.0, read_bytes=100).bound_share == pytest.approx(0.25)
    assert row(cold=True, streamed_s=4.0, read_bytes=10).bound_share == pytest.approx(0.25)
