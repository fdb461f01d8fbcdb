"""What `headrace bench stream` prints: every number at its place, and nothing claimed too much."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headrace_deploy.bench_report import Report, as_lines, as_plain
from headrace_deploy.run_progress import RunProgress
from headrace_deploy.settings_sources import load
from headrace_replicas.engine.experts.read_rates import ReadRate, ReadRates
from headrace_replicas.engine.stream_figures import Row, Timing
from headrace_replicas.engine.stream_sweep import Refusal, Sweep

GIB = 2**30
QUARTER = Row(
    setting="25%",
    slots=32,
    experts=128,
    schedule="layers",
    memory_bytes=3 * GIB,
    page_cache_bytes=9 * GIB,
    hit_ratio=0.875,
    least_read_bytes=60e6,
    warm=Timing(tokens_per_s=20.0, read_bytes=100e6, read_s=0.01, gate_s=0.02, passes=0.0),
    cold=Timing(tokens_per_s=8.0, read_bytes=100e6, read_s=0.09, gate_s=0.02, passes=0.0),
    all_hits_s=0.03,
    uncut_s=0.025,
)
ALL = Row(
    setting="all",
    slots=128,
    experts=128,
    schedule="resident",
    memory_bytes=9 * GIB,
    page_cache_bytes=3 * GIB,
    hit_ratio=1.0,
    least_read_bytes=0.0,
    warm=Timing(tokens_per_s=50.0, read_bytes=0.0, read_s=0.0, gate_s=0.0, passes=0.0),
    cold=None,
    all_hits_s=None,
    uncut_s=None,
)


def rate(at_once: int, bytes_per_s: float, cached_ratio: float | None) -> ReadRate:
    return ReadRate(
        at_once=at_once,
        bytes_per_s=bytes_per_s,
        read_bytes=2**28,
        runs=2**8,
        cached_ratio=cached_ratio,
    )


def reads(cached_ratio: float | None) -> ReadRates:
    return ReadRates(
        warm=rate(32, 4e9, None),
        cold=(rate(1, 0.5e9, cached_ratio), rate(32, 1e9, 0.0 if cached_ratio else cached_ratio)),
        how="posix_fadvise(DONTNEED)",
    )


SWEEP = Sweep(
    device="cpu",
    dtype="float32",
    rows=(QUARTER, ALL),
    refusals=(Refusal(setting="200GiB", reason="the model does not fit into memory"),),
    reads=reads(0.0),
    differing=(),
    tokens=80,
)
REPORT = Report(
    checkpoint="/models/x",
    prompt_tokens=40,
    sweep=SWEEP,
    names_schedule=False,
    load_average=0.1,
    cores=8,
)


def told(**changes: object) -> list[str]:
    """The lines of a report whose sweep is changed."""
    return list(as_lines(replace(REPORT, sweep=replace(SWEEP, **changes))))  # type: ignore[arg-type]


def test_the_table_has_a_line_for_each_row_and_no_ragged_column() -> None:
    header, quarter, everything = told()[:3]
    assert " ".join(header.split()) == (
        "slots experts schedule memory hits MB/token least warm tok/s of bound cold tok/s of bound "
        "held by"
    )
    assert [" ".join(line.split()) for line in (quarter, everything)] == [
        "25% 32/128 layers 3.00 GiB 0.875 100.00 60.00 20.00 0.50 8.00 0.80 reads",
        "all 128/128 resident 9.00 GiB 1.000 0.00 0.00 50.00 1.00 - - compute",
    ]
    for name in ("experts", "memory", "hits", "least", "warm tok/s", "cold tok/s"):
        end = header.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end] == " " for line in (quarter, everything))


def test_a_setting_that_was_not_measured_is_told_with_its_reason() -> None:
    assert "200GiB was not measured: the model does not fit into memory" in told()
    alone = told(rows=(), reads=None)
    assert alone == ["200GiB was not measured: the model does not fit into memory"]


def test_reads_are_told_for_each_depth() -> None:
    lines = told()
    assert (
        "experts from the SSD: 1 at once 0.50 GB/s, 32 at once 1.00 GB/s; 1.05 MB a read" in lines
    )
    assert "experts from the page cache: 4.00 GB/s" in lines
    assert "computing: 50.00 tok/s at most, with nothing to read" in lines


@pytest.mark.parametrize(
    ("cached_ratio", "says"),
    [
        (0.01, "cold by posix_fadvise(DONTNEED): 1.0% of the pages were still in memory"),
        (0.5, "NOT cold: 50.0% of the pages stayed in memory after posix_fadvise(DONTNEED)"),
        (None, "whether pages stayed in memory is not told here"),
    ],
)
def test_whether_cold_was_cold_is_told(cached_ratio: float | None, says: str) -> None:
    assert any(says in line for line in told(reads=reads(cached_ratio)))


def test_reads_that_were_not_cold_bound_nothing() -> None:
    """The disk's speed is not known then, and no share of it is claimed."""
    report = replace(REPORT, sweep=replace(SWEEP, reads=reads(0.5)))
    assert report.limits is not None
    assert report.limits.ssd_bytes_per_s is None
    assert list(as_lines(report))[1].split()[-3:] == ["8.00", "0.16", "reads"]


def test_without_cold_runs_nothing_is_said_of_the_disk() -> None:
    lines = told(rows=(replace(QUARTER, cold=None), ALL), reads=replace(reads(0.0), cold=()))
    assert not any("SSD" in line for line in lines)
    assert "experts from the page cache: 4.00 GB/s" in lines


def test_tokens_that_differ_are_an_error_on_the_cpu_and_told_on_a_gpu() -> None:
    same = "tokens: all 80 the same in every run"
    assert same in told()
    differing = ("slots 25%, layers, cold",)
    on_cpu = replace(REPORT, sweep=replace(SWEEP, differing=differing))
    on_gpu = replace(REPORT, sweep=replace(SWEEP, differing=differing, device="gpu"))
    assert [REPORT.is_sound, on_cpu.is_sound, on_gpu.is_sound] == [True, False, True]
    line = "tokens: NOT the same as in the first run: slots 25%, layers, cold"
    assert line in as_lines(on_cpu)
    assert any(one.startswith(line) and "On a GPU" in one for one in as_lines(on_gpu))


def test_nothing_measured_is_not_sound() -> None:
    nothing = replace(REPORT, sweep=replace(SWEEP, rows=(), reads=None))
    assert (nothing.is_sound, nothing.limits) == (False, None)
    assert as_plain(nothing)["recommended"] is None


@pytest.mark.parametrize("names_schedule", [False, True])
def test_the_recommendation_is_a_line_that_a_settings_file_takes(
    tmp_path: Path, names_schedule: bool
) -> None:
    """With its reason as a comment."""
    row = replace(QUARTER, schedule="speculate")
    report = replace(REPORT, sweep=replace(SWEEP, rows=(row,)), names_schedule=names_schedule)
    [line] = [line for line in as_lines(report) if line.startswith("engine:")]
    file = tmp_path / "fleet.yaml"
    file.write_text(line)
    settings = load(file, {}, {}).settings
    assert settings.engine.slots == "25%"
    assert settings.engine.schedule == ("speculate" if names_schedule else "auto")
    assert "# the best rate measured; leaves 9.00 GiB to the page cache" in line


def test_a_busy_machine_is_told() -> None:
    """Rows that shared their cores with others cannot be compared."""
    assert not any("busy" in line for line in as_lines(REPORT))
    busy = replace(REPORT, load_average=6.0)
    [line] = [line for line in as_lines(busy) if "busy" in line]
    assert "load average 6.0 on 8 cores" in line


def test_json_holds_what_the_table_is_made_of() -> None:
    shown = json.loads(json.dumps(as_plain(REPORT)))
    quarter, everything = shown["rows"]
    assert quarter["warm"]["tokens_per_s"] == 20.0
    assert quarter["warm_share"] == pytest.approx(0.5)
    assert quarter["cold_share"] == pytest.approx(0.8)
    assert quarter["held_by"] == "reads"
    assert sum(quarter["parts"].values()) == pytest.approx(1 / 8.0)
    assert everything["cold"] is everything["cold_share"] is None
    assert shown["limits"]["ssd_bytes_per_s"] == 1e9
    assert shown["reads"]["is_cold"] is True
    assert shown["recommended"]["slots"] == "all"
    assert shown["refused"][0]["setting"] == "200GiB"


def test_progress_is_a_line_for_each_part_where_nobody_looks() -> None:
    """Not one for each step."""
    written = io.StringIO()
    with RunProgress(Console(file=written)) as progress:
        for step in range(3):
            progress("slots [25%], warm", step, 3)
        progress("slots [25%], cold", 0, 3)
    assert written.getvalue() == "slots [25%], warm\nslots [25%], cold\n"


def test_progress_is_a_bar_on_a_terminal() -> None:
    """Gone when it is over."""
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=120)
    with RunProgress(terminal) as progress:
        progress("slots 25%: loading", 0, 0)
        progress("slots 25%, warm", 2, 3)
    assert "slots 25%, warm" in written.getvalue()
    assert "2/3" in written.getvalue()
