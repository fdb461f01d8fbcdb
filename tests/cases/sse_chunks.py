"""The rules of OpenAI's chunks, for chat and for completions.

Per choice: the role in the first delta and nowhere else, one finish_reason and nothing after it.
Per tool call: id and name in the first delta, an id that stays, indices that count up, arguments
that join to JSON. Over the stream: one id, model and object; usage only where `choices` is empty.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.cases.sse_report import ToolCall, is_json


@dataclass(slots=True)
class _GrowingCall:
    name: str | None
    call_id: str | None
    arguments: str = ""


@dataclass(slots=True)
class ChunkReader:
    """Takes chunks in order and remembers what the rules need."""

    problems: list[str]
    soft: set[str] = field(default_factory=set)
    text: str = ""
    reasoning: str = ""
    usage: dict[str, Any] | None = None
    usage_chunks: int = 0
    n_choices: int = 0
    logprobs: int = 0
    finishes: dict[int | None, str] = field(default_factory=dict)
    _identities: set[tuple[str, ...]] = field(default_factory=set)
    _started: set[int | None] = field(default_factory=set)
    _calls: dict[int, _GrowingCall] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any]) -> None:
        """Reads one chunk."""
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            self.problems.append("chunk has no choices list")
            return
        self._identities.add(tuple(repr(chunk.get(key)) for key in ("id", "model", "object")))
        if chunk.get("usage") is not None:
            self.usage = chunk["usage"]
            self.usage_chunks += 1
            if choices:
                self.problems.append("usage on a chunk whose choices is not empty")
        for choice in choices:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        self.n_choices = max(self.n_choices, (index or 0) + 1)
        if index in self.finishes:
            self.problems.append(f"choice {index}: chunk after its finish_reason")
        delta = choice.get("delta")
        if delta is None and "text" in choice:
            delta = {"content": choice["text"]}
        delta = delta or {}
        self._judge_role(index, delta, is_chat="delta" in choice)
        if index == 0:
            self.text += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or []:
            self._take_call(call)
        logprobs = choice.get("logprobs") or {}
        self.logprobs += len(logprobs.get("content") or logprobs.get("tokens") or [])
        if choice.get("finish_reason"):
            self.finishes[index] = choice["finish_reason"]

    def _judge_role(self, index: int | None, delta: dict[str, Any], *, is_chat: bool) -> None:
        if index in self._started:
            if delta.get("role"):
                self.soft.add("role on a later delta")
        elif is_chat and delta.get("role") != "assistant":
            self.problems.append("first delta has no role assistant")
        self._started.add(index)

    def _take_call(self, delta: dict[str, Any]) -> None:
        index = delta.get("index")
        if index is None:
            self.problems.append("tool delta without index")
            return
        function = delta.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            call = self._opened_call(index, delta, function)
        elif delta.get("id") and delta["id"] != call.call_id:
            self.problems.append(f"tool {index}: id changes")
        call.arguments += function.get("arguments") or ""

    def _opened_call(
        self, index: int, delta: dict[str, Any], function: dict[str, Any]
    ) -> _GrowingCall:
        if not delta.get("id") or not function.get("name"):
            self.problems.append("first tool delta lacks id or name")
        if index != len(self._calls):
            self.problems.append(f"tool index {index} out of order")
        call = _GrowingCall(name=function.get("name"), call_id=delta.get("id"))
        self._calls[index] = call
        return call

    @property
    def finish(self) -> str | None:
        """finish_reason of choice 0."""
        return self.finishes.get(0)

    @property
    def tools(self) -> tuple[ToolCall, ...]:
        """The tool calls in the order of their indices."""
        return tuple(
            ToolCall(name=call.name, arguments=call.arguments, call_id=call.call_id)
            for _, call in sorted(self._calls.items())
        )

    def judge_tools(self) -> None:
        """Judges the tool calls once they are whole; a cut answer may leave half a call."""
        for index, call in self._calls.items():
            if self.finish != "length" and not is_json(call.arguments or "{}"):
                self.problems.append(
                    f"tool {index} arguments are not JSON: {call.arguments[:60]!r}"
                )
        if len({call.call_id for call in self._calls.values()}) != len(self._calls):
            self.problems.append("two tool calls share an id")

    def judge_end(self) -> None:
        """Judges a stream that claims success."""
        if not self.finishes:
            self.problems.append("no finish_reason")
        if len(self._identities) > 1:
            seen = sorted(" ".join(identity) for identity in self._identities)
            self.problems.append(f"id/model/object vary over chunks: {seen[:2]}")
        if self._calls and self.finish not in {"tool_calls", "length"}:
            self.problems.append(f"tool calls but finish_reason {self.finish}")
