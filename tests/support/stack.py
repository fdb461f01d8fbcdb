"""The real stack for tests: a Ray node on free ports, the shipped Serve config, HTTP."""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from headrace_deploy.local import LocalNode
from headrace_deploy.ports import with_real_ports
from headrace_deploy.serve_config import render
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.settings import Settings
from tests.support.waiting import comes_true

MODEL = "headrace-demo"
READY_S = 180.0
_POLL_S = 0.1
_HTTP_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedAnswer:
    """What a client has at the end of a stream.

    Attributes:
        text: All content.
        finish_reasons: Every non-null one; exactly one in a sound answer.
        done: Whether `[DONE]` came.
        tokens: Tokens that the log probabilities counted.
        attempts: From the last chunk's `headrace` field.
        error: The error event's content, if one came.
        worst_gap_s: Longest time between two pieces of content, the first one not counted.
    """

    text: str
    finish_reasons: tuple[str, ...]
    done: bool
    tokens: int
    attempts: int
    error: Mapping[str, Any] | None
    worst_gap_s: float

    @property
    def whole(self) -> bool:
        """Whether the answer has its one ending."""
        return self.done and self.error is None and len(self.finish_reasons) == 1


@dataclass(slots=True)
class _Collector:
    on_tokens: Any
    pieces: list[str] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    done: bool = False
    tokens: int = 0
    attempts: int = 0
    error: Mapping[str, Any] | None = None
    heard_s: float | None = None
    worst_gap_s: float = 0.0

    def take(self, line: str) -> None:
        if not line.startswith("data: "):
            return
        content = line.removeprefix("data: ")
        if content == "[DONE]":
            self.done = True
            return
        chunk = json.loads(content)
        self.error = chunk.get("error", self.error)
        self.attempts = int(chunk.get("headrace", {}).get("attempts", self.attempts))
        for choice in chunk.get("choices", ()):
            self._take_choice(choice)

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        text = choice["delta"].get("content") or ""
        self.pieces.append(text)
        if choice["finish_reason"] is not None:
            self.finishes.append(choice["finish_reason"])
        new = len((choice["logprobs"] or {}).get("content") or ())
        if new:
            self.tokens += new
            now_s = time.monotonic()
            if self.heard_s is not None:
                self.worst_gap_s = max(self.worst_gap_s, now_s - self.heard_s)
            self.heard_s = now_s
            self.on_tokens(self.tokens)

    def answer(self) -> StreamedAnswer:
        return StreamedAnswer(
            text="".join(self.pieces),
            finish_reasons=tuple(self.finishes),
            done=self.done,
            tokens=self.tokens,
            attempts=self.attempts,
            error=self.error,
            worst_gap_s=self.worst_gap_s,
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """A running fleet on this machine.

    Attributes:
        endpoint: Base URL of the gateway.
        node: The Ray node; it knows which processes are its own.
        settings: What was deployed at first.
    """

    endpoint: str
    node: LocalNode
    settings: Settings

    def body(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """A chat request, sampled at temperature 0.8 with a seed unless `fields` say otherwise."""
        messages = [{"role": "user", "content": prompt}]
        sampled = {"temperature": 0.8, "seed": 7, "max_tokens": 120}
        return {"model": MODEL, "messages": messages, **sampled, **fields}

    def whole(self, body: Mapping[str, Any]) -> httpx.Response:
        """Send a request and wait for its whole answer."""
        url = f"{self.endpoint}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=_HTTP_S, trust_env=False)

    def stream(self, body: Mapping[str, Any], on_tokens: Any = lambda _n: None) -> StreamedAnswer:
        """Stream a request; `on_tokens` hears the number of tokens so far."""
        options = {"include_headrace": True}
        sent = {**body, "stream": True, "logprobs": True, "stream_options": options}
        url = f"{self.endpoint}/v1/chat/completions"
        collector = _Collector(on_tokens)
        with httpx.stream("POST", url, json=sent, timeout=_HTTP_S, trust_env=False) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                response.raise_for_status()
            for line in response.iter_lines():
                collector.take(line)
        return collector.answer()

    def get(self, path: str) -> Any:
        """A JSON answer of the gateway."""
        return httpx.get(f"{self.endpoint}{path}", timeout=_HTTP_S, trust_env=False).json()

    def replicas(self) -> list[dict[str, Any]]:
        """The fleet as the gateway lists it."""
        found: list[dict[str, Any]] = self.get("/fleet/v1/replicas")["replicas"]
        return found

    def ready(self) -> list[dict[str, Any]]:
        """Replicas that take work and have said which process they are."""
        return [one for one in self.replicas() if one["state"] == "ready" and "snapshot" in one]

    def holder(self) -> dict[str, Any]:
        """The replica that works on the gateway's only request."""
        holders = [one for one in self.replicas() if one["in_flight"] and "snapshot" in one]
        if len(holders) != 1:
            raise AssertionError(f"one replica should hold the request, not {holders}")
        return holders[0]

    def signal_replica(self, replica: Mapping[str, Any], number: signal.Signals) -> int:
        """Send a signal to an engine process of this fleet, and to no other; returns its pid."""
        pid = int(replica["snapshot"]["pid"])
        if not self.node.owns(pid):
            raise AssertionError(f"process {pid} does not belong to this fleet")
        os.kill(pid, number)
        return pid

    def wait_for_ready(self, count: int, without: frozenset[str] = frozenset()) -> None:
        """Wait until that many replicas are ready, none of them in `without`."""

        def enough() -> bool:
            return len([one for one in self.ready() if one["replica_id"] not in without]) >= count

        if not comes_true(enough, patience_s=READY_S, every_s=_POLL_S):
            raise AssertionError(f"not {count} ready replicas: {self.replicas()}")

    def deploy(self, **sections: Mapping[str, Any]) -> None:
        """Deploy again, with settings that differ by section."""
        given = self.settings.model_dump()
        for name, section in sections.items():
            given[name] = {**given[name], **section}
        self.node.deploy(render(Settings.model_validate(given)), _quiet)

    @classmethod
    @contextmanager
    def running(cls, state_dir: Path, **sections: Mapping[str, Any]) -> Iterator[Self]:
        """A fleet of two engines on the demo model, on MLX's CPU device.

        Args:
            state_dir: Where the fleet keeps its state.
            sections: Settings that differ, by section.
        """
        given: dict[str, Any] = {
            "engine": {"device": "cpu"},
            "replica": {"count": 2},
            "gateway": {"port": 0},
            "ray": {"port": 0, "dashboard_port": 0},
            # Tests kill many engines within minutes.
            "faults": {"back_off_s": 0.1, "back_off_max_s": 1.0, "breaker_deaths": 1000},
            "state_dir": state_dir,
        }
        for name, section in sections.items():
            given[name] = {**given.get(name, {}), **section}
        settings = with_real_ports(Settings.model_validate(given))
        metal = settings.replica.count
        clock = SystemClock()
        with LocalNode(settings, metal=metal, environ=os.environ, clock=clock) as node:
            node.start(_quiet)
            node.deploy(render(settings), _quiet)
            node.wait_ready(_quiet, READY_S)
            stack = cls(node.endpoint, node, settings)
            stack.wait_for_ready(metal)
            yield stack


def _quiet(_line: str) -> None:
    """The tests say what went wrong by themselves."""
