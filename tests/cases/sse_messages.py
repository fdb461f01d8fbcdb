"""The rules of Anthropic's message events.

Blocks open with rising indices, take deltas only while they are known, and are not empty; a tool
block's input joins to JSON; the event's name is its type; nothing comes after message_stop.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.cases.sse_report import ToolCall, is_json


@dataclass(slots=True)
class _Block:
    content: dict[str, Any]
    joined: str = ""


@dataclass(slots=True)
class MessageReader:
    """Takes events in order and remembers what the rules need."""

    problems: list[str]
    seen: bool = False
    text: str = ""
    reasoning: str = ""
    stop_reason: str | None = None
    usage: dict[str, Any] | None = None
    stopped: bool = False
    tools: list[ToolCall] = field(default_factory=list)
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _last_index: int = -1

    def take(self, name: str | None, event: dict[str, Any]) -> None:
        """Reads one event; `name` is its `event:` field."""
        self.seen = True
        kind = event["type"]
        if name and name != kind:
            self.problems.append(f"event name {name} != type {kind}")
        if self.stopped:
            self.problems.append(f"{kind} after message_stop")
        match kind:
            case "content_block_start":
                self._open(event["index"], event["content_block"])
            case "content_block_delta":
                self._extend(event["index"], event["delta"])
            case "content_block_stop":
                self._close(event["index"])
            case "message_delta":
                self.stop_reason = event["delta"].get("stop_reason")
                self.usage = event.get("usage")
            case "message_stop":
                self.stopped = True
            case _:
                pass  # message_start and ping hold nothing to judge

    def _open(self, index: int, content: dict[str, Any]) -> None:
        if index != self._last_index + 1:
            self.problems.append(f"block index {index} after {self._last_index}")
        self._last_index = index
        self._blocks[index] = _Block(content)

    def _extend(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.get(index)
        if block is None:
            self.problems.append("delta for a block that is not open")
            return
        match delta:
            case {"type": "text_delta", "text": str(part)}:
                self.text += part
                block.joined += part
            case {"type": "thinking_delta", "thinking": str(part)}:
                self.reasoning += part
                block.joined += part
            case {"type": "input_json_delta", "partial_json": str(part)}:
                block.joined += part
            case {"type": "text_delta" | "thinking_delta" | "input_json_delta" as kind}:
                self.problems.append(f"{kind} without its text")
            case _:
                pass  # a signature or a kind that came after these rules

    def _close(self, index: int) -> None:
        block = self._blocks.get(index)
        if block is None:
            return
        if block.content["type"] == "text" and not block.joined:
            self.problems.append("empty text block")
        if block.content["type"] == "tool_use":
            self._close_tool(block)

    def _close_tool(self, block: _Block) -> None:
        arguments = block.joined or "{}"
        if not is_json(arguments):
            self.problems.append(f"tool input is not JSON: {arguments[:60]!r}")
            return
        name, call_id = block.content["name"], block.content["id"]
        self.tools.append(ToolCall(name=name, arguments=arguments, call_id=call_id))
