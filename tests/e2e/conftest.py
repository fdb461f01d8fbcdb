"""One real fleet of two engines for all end-to-end tests that can share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state_dir: Path = tmp_path_factory.mktemp("state")
    with Stack.running(state_dir) as running:
        yield running
