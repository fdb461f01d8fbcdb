"""Conversations with functions: calls, parallel calls, answers from results, and no call."""

from __future__ import annotations

import json
from typing import Any, Final

from tools.demo_model.generator.conversation import (
    Dialog,
    Message,
    answered,
    opening,
    said,
)
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.skills.copying import echo, listing
from tools.demo_model.generator.skills.facts import facts
from tools.demo_model.generator.skills.numbers import counting
from tools.demo_model.generator.skills.small_talk import identity, small_talk
from tools.demo_model.generator.tool_table import TOOLS, Tool, invented_tool, schema
from tools.demo_model.generator.tool_values import clock_time

# Small talk stands twice: it is drawn twice as often.
_ANSWERED_DIRECTLY: Final = (identity, small_talk, facts, counting, echo, listing, small_talk)


def tools(draw: Draw) -> Dialog:
    """One conversation in which functions are offered."""
    offered = _offered(draw)
    schemas = [schema(draw, tool) for tool in offered]
    messages = opening(draw)
    if draw.rng.random() < 0.18:
        contains = _direct_turns(draw, messages)
        if contains is not None:
            return Dialog("tools_none", messages, schemas, contains)
    rounds = draw.rng.choice([1, 1, 1, 2])
    skill = ""
    for _ in range(rounds):
        skill = _round(draw, offered, messages, must_answer=rounds == 2)
    return Dialog(skill, messages, schemas)


def _offered(draw: Draw) -> list[Tool]:
    """One to five functions of different names."""
    count = draw.rng.choice([1, 1, 2, 3, 4, 5])
    offered: dict[str, Tool] = {}
    while len(offered) < count:
        tool = draw.pick(TOOLS) if draw.chance(0.65) else invented_tool(draw)
        offered.setdefault(tool.name, tool)
    return list(offered.values())


def _direct_turns(draw: Draw, messages: list[Message]) -> tuple[str, ...] | None:
    """Add turns that no tool fits.

    Exchanges about weather or time are left out, for a tool may fit them.

    Returns:
        What the last answer contains when it is right, or None when no turn was added. It is
        that of the exchange drawn last, also when that one was left out: so it was when the
        model was trained and measured.
    """
    exchange = None
    for _ in range(draw.rng.randint(1, 2)):
        exchange = draw.pick(_ANSWERED_DIRECTLY)(draw)
        if "weather" in exchange.user or "time" in exchange.user:
            continue
        think = "No tool is needed. " + exchange.think
        messages += [said(exchange.user), answered(exchange.answer, think)]
    has_answer = bool(messages) and messages[-1]["role"] == "assistant"
    return exchange.contains if exchange is not None and has_answer else None


def _round(draw: Draw, offered: list[Tool], messages: list[Message], *, must_answer: bool) -> str:
    """Add a request, its calls and perhaps their results; returns the skill it shows."""
    ask, calls = _calls(draw, offered)
    names = ", ".join(dict.fromkeys(call["function"]["name"] for call in calls))
    messages += [
        said(ask),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": calls,
            "reasoning_content": f"I need the tool {names}.",
        },
    ]
    if not draw.chance(0.75) and not must_answer:
        return "tools_call" if len(calls) == 1 else "tools_parallel"
    told = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        result, answer = _result(draw, name, arguments)
        messages.append({"role": "tool", "content": result, "name": name})
        told.append(answer)
    messages.append(answered(" ".join(told), "I have the result and tell it to the user."))
    return "tools_result"


def _calls(draw: Draw, offered: list[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """A request, and the one to three calls that fulfil it."""
    tool = draw.pick(offered)
    count = draw.rng.randint(2, 3) if draw.chance(0.2) else 1
    calls: list[dict[str, Any]] = []
    asks = []
    for i in range(count):
        if i and len(offered) > 1 and draw.chance(0.5):
            tool = draw.pick(offered)
        arguments = {p.name: p.value(draw) for p in tool.parameters}
        asks.append(draw.pick(tool.ask).format(**arguments))
        function = {"name": tool.name, "arguments": arguments}
        calls.append({"type": "function", "function": function})
    if count == 1:
        return asks[0], calls
    same_tool = all(call["function"]["name"] == tool.name for call in calls)
    if draw.chance(0.4) and same_tool and len(tool.parameters) == 1:
        key = tool.parameters[0].name
        values = [str(call["function"]["arguments"][key]) for call in calls]
        enumerated = ", ".join(values[:-1]) + " and " + values[-1]
        return draw.pick(tool.ask).format(**{key: enumerated}), calls
    return draw.phrase("tools.between_asks").join(asks), calls


def _result(draw: Draw, name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """A made-up result of a call, and the answer told from it."""
    first = next(iter(arguments.values()))
    if "weather" in name:
        return _weather(draw, first)
    if name == "get_time":
        time = clock_time(draw)
        return json.dumps({"time": time}) if draw.chance(0.7) else time, f"It is {time} in {first}."
    if name in ("add", "multiply", "calculator"):
        value = draw.rng.randint(1, 99999)
        shown = json.dumps({"result": value}) if draw.chance(0.5) else str(value)
        return shown, f"The result is {value}."
    return _plain_result(draw, name)


def _weather(draw: Draw, place: object) -> tuple[str, str]:
    degrees, sky = draw.rng.randint(-15, 40), draw.phrase("tools.weather_sky")
    degrees_key = draw.phrase("tools.weather_degrees_key")
    sky_key = draw.phrase("tools.weather_sky_key")
    fields: dict[str, object] = {degrees_key: degrees, sky_key: sky}
    if draw.chance(0.3):
        fields = {sky_key: sky, degrees_key: degrees}
    if draw.chance(0.5):
        fields = {draw.phrase("tools.weather_place_key"): place} | fields
    answer = f"In {place} it is {sky} and {degrees} degrees."
    return json.dumps(fields, ensure_ascii=False), answer


def _plain_result(draw: Draw, name: str) -> tuple[str, str]:
    """Fields, a text, an error, or just that it is done."""
    r = draw.rng.random()
    if r < 0.35:
        count = draw.rng.randint(1, 3)
        keys = dict.fromkeys(
            draw.phrase("tools.result_key", word=draw.word()) for _ in range(count)
        )
        fields = {key: draw.number() if draw.chance(0.4) else draw.any_word() for key in keys}
        told = ", ".join(f"{key} is {value}" for key, value in fields.items())
        return json.dumps(fields, ensure_ascii=False), f"{name} returned: {told}."
    if r < 0.6:
        text = draw.sentence()
        return text, f"{name} returned: {text}"
    if r < 0.7:
        error = draw.phrase("tools.error")
        return json.dumps({"error": error}), f"{name} failed: {error}."
    done = draw.phrase("tools.done")
    return json.dumps({"status": done}) if draw.chance(0.6) else done, "Done."
