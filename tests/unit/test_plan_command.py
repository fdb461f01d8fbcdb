"""`headrace plan`: the numbers, the words, and how it ends."""

import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headrace_deploy.cli import app
from headrace_deploy.node_plan import host_label
from headrace_deploy.one_machine import in_one_line
from headrace_deploy.plan_command import as_plain, as_table, shown_age
from headrace_replicas.engine.bench_record import (
    BenchRecord,
    MeasuredSlots,
    Origin,
    write_record,
)
from headrace_replicas.engine.footprint import CacheSize, ExpertLayerSize, HostMemory, ModelSizes
from headrace_replicas.engine.memory_plan import plan
from headrace_replicas.engine.safetensors_header import read_header
from tests.support.engines import DEMO_FOLDER, demo_checkpoint

pytestmark = pytest.mark.usefixtures("clean_environment")

GIB = 2**30
SIZES = ModelSizes(
    file_bytes=18 * GIB,
    unused_bytes=2 * GIB,
    resident_bytes=GIB,
    lookup_bytes=0,
    layers=(
        ExpertLayerSize(
            path="model.layers.0.mlp", experts=128, read_bytes=2**20, memory_bytes=2**21
        ),
    )
    * 40,
    top_k=8,
    cache=CacheSize(token_bytes=65_536),
)
HOST = HostMemory(limit_bytes=8 * GIB, total_bytes=12 * GIB, source="a host of the test's")


def headrace_plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_table_says_what_goes_where_and_why() -> None:
    """Every part, the limit, the experts, and the reasons."""
    result = headrace_plan("demo", "--device", "cpu")
    assert result.exit_code == 0
    for words in (
        "resident weights    2.0 MiB",
        "experts in slots    22.5 MiB",
        "KV cache            256.0 MiB (32768 tokens)",
        "headroom  ",
        "together  ",
        "limit of this host  ",
        "experts in memory   32 of 32 in each of 8 layers; one token uses 4",
        "bytes per expert    90.0 KiB",
        "- all 32 experts of 8 layers stay in memory",
        "- the limit is ",
    ):
        assert words in result.output
    assert "read per token" not in result.output


def test_json_holds_the_numbers() -> None:
    """In bytes, for a program."""
    result = headrace_plan("demo", "--device", "cpu", "--slots", "25%", "--json")
    shown = json.loads(result.output)
    assert (shown["slots_per_layer"], shown["experts_per_layer"], shown["streams"]) == (8, 32, True)
    assert shown["slot_bytes"] == 8 * 8 * 92_160
    assert shown["bytes_per_expert"] == 92_160
    parts = ("resident_bytes", "slot_bytes", "kv_bytes", "headroom_bytes")
    assert shown["total_bytes"] == sum(shown[part] for part in parts)
    assert shown["total_bytes"] <= shown["limit_bytes"]
    files = sum(
        entry.size_bytes
        for file in DEMO_FOLDER.glob("*.safetensors")
        for entry in read_header(file).tensors.values()
    )
    assert (shown["file_bytes"], shown["unused_bytes"]) == (files, 0)


def test_context_and_batch_size_the_kv_cache() -> None:
    """The checkpoint's own context is the longest that counts."""
    arguments = ("demo", "--device", "cpu", "--json")
    tokens = [
        json.loads(headrace_plan(*arguments, *more).output)["kv_tokens"]
        for more in (
            ("--context", "512", "--max-batch", "1"),
            ("--context", "512"),
            ("--context", "100000", "--max-batch", "2"),
        )
    ]
    assert tokens == [512, 16 * 512, 2 * 2048]


def test_settings_come_from_a_file_too(tmp_path: Path) -> None:
    """Options go before it."""
    file = tmp_path / "fleet.yaml"
    file.write_text("engine:\n  slots: 50%\n  max_batch: 1\n  device: cpu\n")
    from_file = json.loads(headrace_plan("demo", "--file", str(file), "--json").output)
    assert (from_file["slots_per_layer"], from_file["kv_tokens"]) == (16, 2048)
    option = json.loads(
        headrace_plan("demo", "--file", str(file), "--slots", "all", "--json").output
    )
    assert option["slots_per_layer"] == 32


def measured_here(tmp_path: Path, **changes: object) -> Path:
    """Figures of a bench, kept as if they had been measured on this machine two hours ago."""
    origin = Origin(
        fingerprint=demo_checkpoint().fingerprint,
        host=host_label(socket.gethostname()),
        device="cpu",
        dtype="auto",
    )
    record = BenchRecord(
        origin=origin.model_copy(update=changes),
        measured_s=time.time() - 7_300,
        compute_tokens_per_s=80.0,
        ssd_bytes_per_s=20e6,
        slots=(
            MeasuredSlots(slots=8, hit_ratio=0.5),
            MeasuredSlots(slots=16, hit_ratio=0.9),
            MeasuredSlots(slots=32, hit_ratio=1.0),
        ),
    )
    return write_record(tmp_path, record)


def test_what_was_measured_on_this_machine_is_used_and_named(tmp_path: Path) -> None:
    """The hit ratio between two measured ones, the bound, and where they come from."""
    measured_here(tmp_path)
    arguments = ("demo", "--device", "cpu", "--state-dir", str(tmp_path), "--slots", "37.5%")
    result = headrace_plan(*arguments)
    assert result.exit_code == 0
    read_bytes = 0.3 * 8 * 4 * 82_944
    for words in (
        "expected hit ratio  0.700, as measured",
        f"read per token      {read_bytes / 2**10:.1f} KiB on average, if the page cache is cold",
        f"one stream at most  {20e6 / read_bytes:.2f} tok/s",
        "- measured by headrace bench stream on ",
        " 2 hours ago: experts from the SSD at 0.02 GB/s, computing at most 80.00 tok/s",
    ):
        assert words in result.output
    shown = json.loads(headrace_plan(*arguments, "--json").output)
    assert shown["expected_hit_ratio"] == pytest.approx(0.7)
    assert shown["bound_tokens_per_s"] == pytest.approx(20e6 / read_bytes)
    assert shown["measured"]["host"] == host_label(socket.gethostname())
    assert 7_300 <= shown["measured"]["age_s"] < 7_500
    assert shown["measured"]["ssd_bytes_per_s"] == 20e6


def test_slots_that_were_not_measured_keep_the_careful_guess(tmp_path: Path) -> None:
    """The bound is made of it then."""
    measured_here(tmp_path)
    arguments = ("demo", "--device", "cpu", "--state-dir", str(tmp_path), "--slots", "12.5%")
    result = headrace_plan(*arguments)
    assert "expected hit ratio" not in result.output
    assert "at most on average, if the page cache is cold" in result.output
    assert "one stream at most" in result.output
    shown = json.loads(headrace_plan(*arguments, "--json").output)
    assert (shown["expected_hit_ratio"], shown["measured"]["hit_ratio"]) == (0.125, None)


def test_a_resident_plan_is_bound_by_computing(tmp_path: Path) -> None:
    measured_here(tmp_path)
    result = headrace_plan("demo", "--device", "cpu", "--state-dir", str(tmp_path))
    assert "one stream at most  80.00 tok/s" in result.output
    assert "expected hit ratio" not in result.output


def test_foreign_or_damaged_figures_are_ignored_with_a_line(tmp_path: Path) -> None:
    """And the plan is the one that it would be without them."""
    arguments = ("demo", "--device", "cpu", "--state-dir", str(tmp_path), "--slots", "25%")
    without = headrace_plan(*arguments)
    assert "ignored" not in without.output
    path = measured_here(tmp_path, host="m9")
    foreign = headrace_plan(*arguments)
    assert f"- ignored: {path} was measured on host m9, and this is " in foreign.output
    path.write_text("{")
    damaged = headrace_plan(*arguments)
    assert f"- ignored: {path} is no record of this headrace" in damaged.output
    for result in (foreign, damaged):
        assert result.exit_code == 0
        assert "tok/s" not in result.output
    assert json.loads(headrace_plan(*arguments, "--json").output)["measured"] is None


@pytest.mark.parametrize(
    ("age_s", "shown"),
    [
        (0.0, "0 minutes"),
        (61.0, "1 minute"),
        (3_599.0, "59 minutes"),
        (3_600.0, "1 hour"),
        (86_399.0, "23 hours"),
        (200_000.0, "2 days"),
    ],
)
def test_an_age_is_told_in_its_largest_unit(age_s: float, shown: str) -> None:
    assert shown_age(age_s) == shown


def test_a_draft_model_has_a_row_of_its_own(tmp_path: Path) -> None:
    """With its cache, and in the sum."""
    file = tmp_path / "fleet.yaml"
    file.write_text("engine:\n  device: cpu\n  draft_model: demo\n")
    # 24.5 MiB of weights, and keys and values of 2048 tokens.
    assert "draft model         40.5 MiB" in headrace_plan("demo", "--file", str(file)).output
    shown = json.loads(headrace_plan("demo", "--file", str(file), "--json").output)
    parts = ("resident_bytes", "draft_bytes", "slot_bytes", "kv_bytes", "headroom_bytes")
    assert shown["total_bytes"] == sum(shown[part] for part in parts)
    small = replace(SIZES, layers=())
    decided = plan(SIZES, HOST, "25%", context_tokens=4096, max_batch=4, draft=small)
    assert "draft model 1.25 GiB" in in_one_line(decided)


def test_what_does_not_fit_ends_with_one_and_the_numbers() -> None:
    """On standard error, with the setting to change."""
    too_few = headrace_plan("demo", "--device", "cpu", "--slots", "1%")
    assert too_few.exit_code == 1
    assert "Set engine.slots to at least 12.5% (2.8 MiB), or to auto." in too_few.stderr
    too_long = headrace_plan("demo", "--device", "cpu", "--max-batch", "100000000")
    assert too_long.exit_code == 1
    for words in ("resident weights 2.0 MiB", "KV cache", "headroom", "Set engine.max_batch to 1"):
        assert words in too_long.stderr
    assert too_long.stdout == ""


def test_a_setting_that_cannot_be_ends_with_two() -> None:
    """As everywhere."""
    assert headrace_plan("demo", "--slots", "half").exit_code == 2
    assert headrace_plan("demo", "--context", "0").exit_code == 2


def test_a_checkpoint_that_is_not_there_ends_with_one() -> None:
    """The message says what may be given."""
    result = headrace_plan("./nowhere")
    assert result.exit_code == 1
    assert "no such folder" in result.stderr


def test_the_command_explains_itself() -> None:
    """With all options."""
    result = headrace_plan("--help")
    assert result.exit_code == 0
    for option in ("--slots", "--context", "--json", "--max-batch"):
        assert option in result.output


def test_streaming_shows_what_a_token_reads_and_what_is_left_alone() -> None:
    """From the files, which may be smaller than what is in memory."""
    decided = plan(SIZES, HOST, "auto", context_tokens=4096, max_batch=4)
    rows = dict(zip(*(column.cells for column in as_table(SIZES, decided).columns), strict=True))
    assert decided.streams
    missed = (1 - decided.slots_per_layer / 128) * 40 * 8
    assert rows["read per token"].startswith(f"{missed:.1f} MiB at most")
    assert rows["bytes per expert"] == "2.0 MiB"
    assert rows["never read"] == "2.00 GiB of 18.00 GiB"
    assert rows["for the page cache"] == "819.2 MiB"
    assert as_plain(SIZES, decided)["expert_layers"] == 40


def test_a_dense_model_has_no_rows_about_experts() -> None:
    """There is nothing to say."""
    dense = ModelSizes(
        file_bytes=GIB,
        unused_bytes=0,
        resident_bytes=GIB,
        lookup_bytes=0,
        layers=(),
        top_k=0,
        cache=CacheSize(token_bytes=1),
    )
    decided = plan(dense, HOST, "auto", context_tokens=4096, max_batch=4)
    names = list(as_table(dense, decided).columns[0].cells)
    assert names == ["resident weights", "KV cache", "headroom", "together", "limit of this host"]
    assert as_plain(dense, decided)["bytes_per_expert"] == 0
    assert "slots" not in in_one_line(decided)


def test_one_line_tells_where_the_memory_goes() -> None:
    """What `serve` reports of a model that fits."""
    decided = plan(SIZES, HOST, "25%", context_tokens=4096, max_batch=4)
    assert in_one_line(decided) == (
        "resident 1.00 GiB, slots 2.50 GiB (32 of 128 experts), KV cache 512.0 MiB, limit 8.00 GiB"
    )
