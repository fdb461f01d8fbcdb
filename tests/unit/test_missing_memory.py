"""Memory that is made to look as if it had not come back."""

from pathlib import Path

import pytest

from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.settings import InjectionSettings
from headrace_replicas.injection.missing_memory import missing_bytes


def test_it_is_missed_where_and_when_the_plan_says(tmp_path: Path) -> None:
    flag = tmp_path / "m1-0-2"
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"""
faults:
  - {{kind: stranded_memory, stranded_bytes: 5, host: "m*", device: 0, generation: 2}}
  - {{kind: stranded_memory, stranded_bytes: 70, device: 0,
      once_exists: "{tmp_path}/{{host}}-{{device}}-{{generation}}"}}
  - {{kind: abort}}
""")
    missing = missing_bytes(InjectionSettings(armed=True, plan=plan), "m1")
    assert [missing(0, 1), missing(0, 2), missing(1, 2)] == [0, 5, 0]
    flag.touch()
    assert [missing(0, 1), missing(0, 2), missing(1, 2)] == [0, 75, 0]
    flag.unlink()
    assert missing(0, 2) == 5


def test_without_a_plan_nothing_is_missed() -> None:
    assert missing_bytes(InjectionSettings(), "m1")(0, 2) == 0


def test_a_plan_that_is_none_is_refused(tmp_path: Path) -> None:
    settings = InjectionSettings(armed=True, plan=tmp_path / "none.yaml")
    with pytest.raises(SettingsError, match=r"injection\.plan"):
        missing_bytes(settings, "m1")
