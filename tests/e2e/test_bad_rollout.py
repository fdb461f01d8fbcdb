"""A rollout whose engines cannot start must not take the fleet down (as in ray #66290)."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.stack import Stack
from tests.support.waiting import comes_true

pytestmark = pytest.mark.e2e

STORY = "Tell me a story about a fox named Vera."


def test_a_rollout_that_cannot_start_leaves_healthy_engines_serving(tmp_path: Path) -> None:
    with Stack.running(tmp_path / "state") as stack:
        expected = stack.stream(stack.body(STORY, max_tokens=40)).text
        before = {int(one["snapshot"]["pid"]) for one in stack.ready()}
        # No Linux machine without a GPU can start such an engine, and every gateway can.
        stack.deploy(engine={"device": "gpu"})
        assert comes_true(lambda: "headrace[cuda13]" in refusal(stack), patience_s=120, every_s=0.5)
        # Ray Serve has given up or tries on; either way the rest of the old ones must stay.
        assert comes_true(lambda: answers(stack, expected), patience_s=60, every_s=0.5)
        left = {int(one["snapshot"]["pid"]) for one in stack.ready()}
        assert left
        assert left < before
        # A good rollout after it makes the fleet whole.
        stack.deploy()
        stack.wait_for_ready(2)
        assert answers(stack, expected)


def refusal(stack: Stack) -> str:
    """What Ray Serve says of its trouble."""
    status: Any = stack.node._status()
    words = [one.message for one in status.deployments] if status is not None else []
    return " ".join(words)


def answers(stack: Stack, expected: str) -> bool:
    try:
        return stack.stream(stack.body(STORY, max_tokens=40)).text == expected
    except httpx.HTTPError:
        return False  # the only gateway of this fleet is started again in a rollout
