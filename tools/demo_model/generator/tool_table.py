"""The functions that conversations offer: those of `tool_table.toml`, and invented ones."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.phrasings import forms
from tools.demo_model.generator.tool_values import VALUES, ValueDraw, number, phrase_or_word


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function, and how a value for it is drawn."""

    name: str
    type: str
    about: str
    value: ValueDraw


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, and the wordings that call for it with `{parameter}` slots."""

    name: str
    description: str
    parameters: list[Parameter]
    ask: list[str]


def _parsed(row: dict[str, Any]) -> Tool:
    parameters = [
        Parameter(**(fields | {"value": VALUES[fields["value"]]})) for fields in row["parameters"]
    ]
    return Tool(**(row | {"parameters": parameters}))


_FILE: Final = Path(__file__).with_name("tool_table.toml")
TOOLS: Final = [_parsed(row) for row in tomllib.loads(_FILE.read_text(encoding="utf-8"))["tool"]]


def _identifier(draw: Draw) -> str:
    """A word that can be an identifier."""
    return draw.pick(draw.material.words if draw.chance(0.6) else draw.material.rare)


def invented_tool(draw: Draw) -> Tool:
    """A made-up function, so that names and arguments must be read from the prompt."""
    name = f"{draw.phrase('tools.invented_verb')}_{_identifier(draw)}"
    if draw.chance(0.15):
        name = _identifier(draw) + _identifier(draw).capitalize()
    count = draw.rng.randint(1, 3)
    keys = dict.fromkeys(_identifier(draw) for _ in range(count))
    parameters = [_invented_parameter(draw, key) for key in keys]
    joined = " and ".join(f"{key} {{{key}}}" for key in keys)
    plain = name.replace("_", " ")
    return Tool(
        name=name,
        description=f"{plain[0].upper() + plain[1:]}.",
        parameters=parameters,
        ask=[
            form.format(name=name, plain=plain, joined=joined)
            for form in forms("tools.invented_ask")
        ],
    )


def _invented_parameter(draw: Draw, key: str) -> Parameter:
    if draw.chance(0.35):
        return Parameter(name=key, type="integer", about=f"The {key}", value=number)
    return Parameter(name=key, type="string", about=f"The {key}", value=phrase_or_word)


def schema(draw: Draw, tool: Tool) -> dict[str, Any]:
    """The function as a chat API lists it, with the freedoms that clients take.

    Descriptions and `required` may be missing, and keys may come sorted.
    """
    properties = {p.name: _parameter_schema(draw, p) for p in tool.parameters}
    body: dict[str, Any] = {"type": "object", "properties": properties}
    if draw.chance(0.85):
        body["required"] = list(properties)
    function = {"name": tool.name, "description": tool.description, "parameters": body}
    if draw.chance(0.2):
        function = dict(sorted(function.items())) | {"parameters": dict(sorted(body.items()))}
    wrapped = {"type": "function", "function": function}
    return wrapped if draw.chance(0.85) else dict(sorted(wrapped.items()))


def _parameter_schema(draw: Draw, parameter: Parameter) -> dict[str, str]:
    fields = {"type": parameter.type}
    if draw.chance(0.8):
        fields["description"] = parameter.about
    return fields if draw.chance(0.85) else dict(sorted(fields.items()))
