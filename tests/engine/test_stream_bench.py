"""`headrace bench stream` on the demo model: its structure, its tokens, its end; never a speed."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_replicas.engine.bench_record import record_path
from headrace_replicas.engine.checkpoint import read_checkpoint
from headrace_replicas.engine.experts.schedule import SCHEDULES
from tests.support.engines import DEMO_FOLDER

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("clean_environment")]

TOKENS = 4
SETTLING = 1
PROMPT = "Tell me a story about a fox named Vera."
PATIENCE_S = 120
EXPERT_BYTES = 82_944  # of the demo model, in its files
LAYERS, TOP_K = 8, 4


def arguments(model: str | Path, slots: str, *more: str) -> list[str]:
    return [
        "bench", "stream", str(model), "--device", "cpu", "--slots", slots,
        "--tokens", str(TOKENS), "--prompt", PROMPT, *more,
    ]  # fmt: skip


def bench(model: str | Path, slots: str, *more: str) -> Result:
    return CliRunner().invoke(app, arguments(model, slots, *more))


def shown(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_sweep_measures_what_fits_and_tells_the_rest(tmp_path: Path) -> None:
    """One load after the other, each by every schedule; the memory comes back."""
    before = mx.get_active_memory()
    result = bench("demo", "1%,25%,all", "--schedule", "all", "--json")
    assert result.exit_code == 0, result.output
    found = shown(result)
    rows = found["rows"]
    assert [(row["setting"], row["slots"], row["schedule"]) for row in rows] == [
        ("25%", 8, "layers"),
        ("25%", 8, "overlap"),
        ("25%", 8, "speculate"),
        ("all", 32, "resident"),
    ]
    [refused] = found["refused"]
    assert refused["setting"] == "1%"
    assert "Set engine.slots to at least 12.5%" in refused["reason"]
    assert found["differing"] == []
    assert (found["tokens"], found["dtype"]) == (SETTLING + TOKENS, "float32")
    for row in rows[:3]:
        assert 0 < row["hit_ratio"] < 1
        assert 0 < row["least_read_bytes"] <= row["warm"]["read_bytes"]
        assert row["cold"]["read_bytes"] > 0
        assert row["warm_share"] > 0
        assert row["cold_share"] > 0
        assert row["uncut_s"] > 0
    by_layers = rows[0]
    misses = (1 - by_layers["hit_ratio"]) * LAYERS * TOP_K
    assert by_layers["warm"]["read_bytes"] == pytest.approx(misses * EXPERT_BYTES)
    assert by_layers["cold"]["read_bytes"] == by_layers["warm"]["read_bytes"]
    assert by_layers["warm"]["passes"] == 0
    assert rows[2]["warm"]["passes"] >= 1
    assert (rows[3]["hit_ratio"], rows[3]["cold"]) == (1.0, None)
    assert by_layers["memory_bytes"] < rows[3]["memory_bytes"]
    assert len(found["reads"]["cold"]) == 3
    assert found["recommended"]["slots"] in {"25%", "all"}
    assert mx.get_active_memory() - before < 2**22
    assert found["kept"] == str(
        record_path(tmp_path / ".headrace", read_checkpoint(DEMO_FOLDER).fingerprint)
    )


def test_a_plan_uses_what_a_sweep_kept(tmp_path: Path) -> None:
    """On the same machine, from the same state folder."""
    state = ("--state-dir", str(tmp_path / "state"))
    swept = bench("demo", "25%,all", "--schedule", "layers", "--json", *state)
    [streamed, _resident] = shown(swept)["rows"]
    plan = ("plan", "demo", "--device", "cpu", "--slots", "25%", "--json", *state)
    planned = json.loads(CliRunner().invoke(app, plan).stdout)
    assert planned["expected_hit_ratio"] == pytest.approx(streamed["hit_ratio"])
    assert planned["bound_tokens_per_s"] > 0
    assert planned["measured"]["hit_ratio"] == pytest.approx(streamed["hit_ratio"])


def test_the_table_goes_out_and_the_progress_does_not() -> None:
    """Without cold runs nothing is said of the disk."""
    result = bench("demo", "50%,all", "--schedule", "layers", "--no-cold")
    assert result.exit_code == 0, result.output
    header, half, everything, *rest = result.stdout.splitlines()
    assert header.split()[:3] == ["slots", "experts", "schedule"]
    assert half.split()[:3] == ["50%", "16/32", "layers"]
    assert everything.split()[:3] == ["all", "32/32", "resident"]
    assert f"tokens: all {SETTLING + TOKENS} the same in every run" in rest
    assert any(line.startswith("engine: {slots: ") for line in rest)
    assert not any("SSD" in line for line in rest)
    assert "slots 50%, layers, warm" in result.stderr.splitlines()
    assert "loading" not in result.stdout


def test_the_schedule_is_measured_where_nobody_names_one() -> None:
    """As an engine does when it starts; settings that mean the same are measured once."""
    result = bench("demo", "50%,11.25MiB", "--no-cold", "--json")
    found = shown(result)
    [row] = found["rows"]
    assert row["slots"] == 16
    assert row["schedule"] in SCHEDULES
    [refused] = found["refused"]
    assert refused["reason"] == "means 16 slots, which were measured as 50%"


def test_nothing_that_fits_ends_with_one() -> None:
    result = bench("demo", "1%,2%")
    assert result.exit_code == 1
    assert result.stdout.count("was not measured: ") == 2
    assert "engine:" not in result.stdout


def test_tokens_that_differ_end_with_one(tmp_path: Path) -> None:
    """A pack that does not hold the shards' bytes shows: what streams from it says other things."""
    folder = Path(shutil.copytree(DEMO_FOLDER, tmp_path / "model"))
    assert CliRunner().invoke(app, ["pack", str(folder)]).exit_code == 0
    for file in folder.glob("headrace.experts-*.bin"):
        content = bytearray(file.read_bytes())
        for place in range(0, len(content), 97):
            content[place] ^= 0x5A
        file.write_bytes(content)
    result = bench(folder, "all,50%", "--schedule", "layers", "--no-cold")
    assert result.exit_code == 1
    assert "tokens: NOT the same as in the first run: slots 50%, layers, first" in result.stdout
    shutil.rmtree(folder)


def test_an_interrupted_sweep_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """In the middle of a run, with reader threads alive."""
    command = [sys.executable, "-m", "headrace_deploy.entry", *arguments("demo", "25%,all")]
    command += ["--schedule", "layers"]
    command[command.index("--tokens") + 1] = "500"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as program:
            assert program.stderr is not None
            assert program.stdout is not None
            for line in program.stderr:
                if line.startswith("slots 25%") and line.rstrip().endswith("first"):
                    program.send_signal(signal.SIGINT)
                    break
            rest = program.stderr.read()
            assert program.wait(PATIENCE_S) == 130
            assert rest.splitlines()[-1] == "interrupted"
            assert "Traceback" not in rest
            assert program.stdout.read() == ""
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / ".headrace" / "bench").exists()
