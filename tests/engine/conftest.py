"""One engine on the demo model for all tests of a module."""

from collections.abc import Callable, Iterator

import pytest

from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_replicas.engine.steps import Engine
from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.engines import DEMO_FOLDER, demo_checkpoint, start_engine
from tests.support.replicas import close_replicas


@pytest.fixture(scope="module", autouse=True)
def no_replica_outlives_its_module() -> Iterator[None]:
    """What a replica does beside requests would go on under the tests of other modules."""
    yield
    close_replicas()


@pytest.fixture(scope="package")
def checkpoint() -> Checkpoint:
    return demo_checkpoint()


@pytest.fixture(scope="package")
def engine(checkpoint: Checkpoint) -> Iterator[Engine]:
    running = start_engine(checkpoint)
    yield running
    running.stop()


@pytest.fixture(scope="package")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_folder(DEMO_FOLDER)


@pytest.fixture(scope="package")
def chat(tokenizer: TextTokenizer) -> Callable[[str], tuple[int, ...]]:
    """The prompt ids of a one-message conversation."""
    return lambda text: tokenizer.render_chat([{"role": "user", "content": text}])
