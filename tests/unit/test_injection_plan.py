"""A plan of injected faults: read strictly, armed only on purpose, and meant for some engines."""

import logging
from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.settings import InjectionSettings, Settings
from headrace_replicas.injection.arming import Armament, arm
from headrace_replicas.injection.plan import (
    ReadError,
    ShortRead,
    SlowRead,
    StalledRead,
    TruncatedFile,
    read_plan,
)

PLAN = """
seed: 7
faults:
  - {kind: slow_read, bytes_per_s: 50e6, file: "*.safetensors", device: 0}
  - {kind: stalled_read, stall_s: 60, from_read: 12, times: 1, once_exists: /tmp/now}
  - {kind: read_error, errno: ENODEV, host: "mac-*", generation: 1}
  - {kind: short_read, ratio: 0.25}
  - {kind: truncated_file, size_bytes: 1000, file: model-00002*}
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "faults.yaml"
    path.write_text(PLAN)
    return path


def armed_by(path: Path, host: str, device: int, generation: int) -> Armament | None:
    settings = Settings(injection=InjectionSettings(armed=True, plan=path))
    return arm(settings, host=host, device=device, generation=generation, clock=SystemClock())


def test_a_plan_says_kind_place_and_time_of_each_fault(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    assert plan.seed == 7
    assert plan.faults == (
        SlowRead(bytes_per_s=50e6, file="*.safetensors", device=0),
        StalledRead(stall_s=60, from_read=12, times=1, once_exists=Path("/tmp/now")),  # noqa: S108
        ReadError(errno="ENODEV", host="mac-*", generation=1),
        ShortRead(ratio=0.25),
        TruncatedFile(size_bytes=1000, file="model-00002*"),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("faults: []", "faults: Tuple should have at least 1 item"),
        ("", "the whole file: Input should be a valid dictionary"),
        ("faults: [{kind: slow_read}]", "faults.0.slow_read.bytes_per_s: Field required"),
        ("faults: [{kind: slow}]", "faults.0: Input tag 'slow' found using 'kind' does not match"),
        ("faults: [{stall_s: 3}]", "faults.0: Unable to extract tag"),
        ("faults: [{kind: short_read, tims: 3}]", "tims: Extra inputs are not permitted"),
        ("faults: [{kind: short_read, ratio: 0}]", "ratio: Input should be greater than 0"),
        ("faults: [{kind: read_error, errno: EPERM}]", "errno: Input should be 'EIO'"),
        ("seed: [", "is no YAML"),
        ("x" * (1024 * 1024 + 1), "longer than 1 MiB"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_plan(path)
    assert words in caught.value.message
    assert "remove injection.plan to inject nothing" in caught.value.message
    assert caught.value.param == "injection.plan"


def test_a_plan_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.yaml")


def test_a_plan_without_the_switch_is_refused(plan_file: Path) -> None:
    with pytest.raises(ValidationError, match="HEADRACE_INJECTION__ARMED=true"):
        Settings.model_validate({"injection": {"plan": plan_file}})


def test_the_switch_alone_injects_nothing() -> None:
    settings = Settings(injection=InjectionSettings(armed=True))
    assert arm(settings, host="h", device=0, generation=1, clock=SystemClock()) is None


def test_an_engine_gets_the_faults_that_are_meant_for_it(plan_file: Path) -> None:
    first = armed_by(plan_file, "mac-1", 0, 1)
    other = armed_by(plan_file, "linux", 1, 2)
    assert first is not None
    assert other is not None
    kinds = [one.split()[0] for one in first.summary.split("; ")]
    assert kinds == ["slow_read", "stalled_read", "read_error", "short_read", "truncated_file"]
    kinds = [one.split()[0] for one in other.summary.split("; ")]
    assert kinds == ["stalled_read", "short_read", "truncated_file"]


def test_an_engine_without_a_fault_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("faults: [{kind: short_read, device: 3}]")
    assert armed_by(path, "here", 0, 1) is None


def test_arming_is_told_loudly_and_in_full(
    plan_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    armament = armed_by(plan_file, "mac-1", 0, 1)
    assert armament is not None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "FAULT INJECTION IS ARMED" in record.message
    assert armament.summary in record.message
    assert "slow_read device=0 file=*.safetensors bytes_per_s=50000000.0" in armament.summary


def test_the_plan_in_the_docs_is_one(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[2] / "docs" / "streaming.md").read_text(encoding="utf-8")
    [block] = [part for part in docs.split("```yaml\n")[1:] if "faults:" in part]
    path = tmp_path / "faults.yaml"
    path.write_text(block.partition("```")[0])
    assert [fault.kind for fault in read_plan(path).faults] == [
        "slow_read",
        "stalled_read",
        "read_error",
        "read_error",
        "short_read",
        "truncated_file",
    ]


def test_a_path_to_wait_for_may_name_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(
        "faults: [{kind: device_error, once_exists: '/run/{host}-{device}-{generation}'}]"
    )
    [fault] = read_plan(path).faults
    meant = fault.meant_for(host="mac-1", device=2, generation=7)
    assert meant.once_exists == Path("/run/mac-1-2-7")


def test_faults_of_the_device_are_armed_apart_from_those_of_storage(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("faults: [{kind: hang, holds_gil: true}, {kind: slow_teardown, takes_s: 9}]")
    armed = armed_by(path, "mac-1", 0, 1)
    assert armed is not None
    assert armed.storage is None
    assert armed.device is not None
    assert [one.takes_s for one in armed.teardowns] == [9]
