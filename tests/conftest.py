"""What all tests share."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine makes no law of the code false, so that no example has a deadline. Elsewhere every
# run tries new examples; where a change must land, the same ones each time.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For commands: no setting of the machine counts, and lines are long enough."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    # As `main` sets it: the first import of transformers writes a line of its own otherwise.
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for name in list(os.environ):
        if name.startswith("HEADRACE_"):
            monkeypatch.delenv(name)


_STATUS = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep what the run ends with."""
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End as an engine's process ends: at once.

    Engines live as long as their process. Where Python takes down its threads under MLX's, the
    process aborts, and a green run would end with 134.
    """
    if _STATUS in config.stash and "mlx.core" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_STATUS])
