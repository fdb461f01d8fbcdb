"""JSON objects and small Python snippets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from tools.demo_model.generator import knowledge
from tools.demo_model.generator.conversation import Exchange
from tools.demo_model.generator.draw import Draw

Value = str | int | bool

_FIELDS: Final[dict[str, Callable[[Draw], Value]]] = {
    "name": lambda draw: draw.pick(knowledge.NAMES),
    "age": lambda draw: draw.rng.randint(1, 99),
    "city": lambda draw: draw.pick(knowledge.CITIES),
    "color": lambda draw: draw.pick(knowledge.COLOUR_NAMES),
    "pet": lambda draw: draw.pick(knowledge.ANIMALS),
    "fruit": lambda draw: draw.pick(knowledge.FRUITS),
    "id": lambda draw: draw.number(),
    "active": lambda draw: draw.chance(0.5),
    "title": lambda draw: " ".join(draw.word() for _ in range(2)),
    "price": lambda draw: draw.rng.randint(1, 500),
    "day": lambda draw: draw.pick(knowledge.DAYS),
    "email": lambda draw: f"{draw.pick(knowledge.NAMES).lower()}@example.com",
    "tag": lambda draw: draw.any_word(),
    "count": lambda draw: draw.rng.randint(0, 100),
    "item": lambda draw: draw.pick(knowledge.OBJECTS),
}


def _shown(value: Value) -> str:
    """The value as it is said in a sentence: a truth value as in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _fields(draw: Draw) -> dict[str, Value]:
    """Two to four fields with values."""
    keys = draw.rng.sample(list(_FIELDS), draw.rng.randint(2, 4))
    return {key: _FIELDS[key](draw) for key in keys}


def json_task(draw: Draw) -> Exchange:
    """JSON objects and arrays to write, and one key of an object to read."""
    kind = draw.rng.randrange(6)
    if kind <= 1:
        name = draw.pick(knowledge.NAMES) if draw.chance(0.6) else draw.pseudo().capitalize()
        age = draw.rng.randint(1, 99)
        question = draw.phrase("json.person", name=name, age=age)
        answer = _as_json({"name": name, "age": age})
        return Exchange(question, answer, "I fill the keys name and age.")
    if kind <= 3:
        fields = _fields(draw)
        parts = ", ".join(f"{key} {_shown(value)}" for key, value in fields.items())
        question = draw.phrase("json.object", parts=parts)
        return Exchange(question, _as_json(fields), "I write one key for each value.")
    if kind == 4:
        items = draw.items(2, 6)
        question = draw.phrase("json.list", shown=", ".join(items))
        answer = _as_json([_number_or_text(item) for item in items])
        return Exchange(question, answer, "I put the items in a JSON list.")
    fields = _fields(draw)
    key = draw.pick(list(fields))
    question = draw.phrase("json.read", key=key, object=_as_json(fields))
    return Exchange(question, _shown(fields[key]), f"I look for the key {key}.")


def _number_or_text(item: str) -> int | str:
    """A number where digits mean just that number (so not with leading zeros)."""
    return int(item) if item.isdigit() and str(int(item)) == item else item


_OPERATIONS: Final = (
    ("adds", "add", "a + b"),
    ("subtracts", "subtract", "a - b"),
    ("multiplies", "multiply", "a * b"),
    ("divides", "divide", "a / b"),
)
_HELLO: Final = "Hello, world!"
_FIBONACCI: Final = """\
def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a"""
_FACTORIAL: Final = """\
def factorial(n):
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result"""


def code(draw: Draw) -> Exchange:
    """A small Python snippet."""
    kind = draw.rng.randrange(9)
    question, snippet = _SNIPPETS[kind](draw)
    return Exchange(question, f"```python\n{snippet}\n```", "I write a short Python example.")


def _operation(draw: Draw) -> tuple[str, str]:
    verb, name, expression = draw.pick(_OPERATIONS)
    question = draw.phrase("code.operation", verb=verb, name=name)
    return question, f"def {name}(a, b):\n    return {expression}"


def _loop(draw: Draw) -> tuple[str, str]:
    n = draw.rng.randint(2, 30)
    return draw.phrase("code.loop", n=n), f"for i in range(1, {n + 1}):\n    print(i)"


def _print(draw: Draw) -> tuple[str, str]:
    text = draw.pick(draw.material.sentences) if draw.chance(0.5) else _HELLO
    text = text.replace('"', "")
    question = draw.phrase("code.hello" if text == _HELLO else "code.print", text=text)
    return question, f'print("{text}")'


def _list(draw: Draw) -> tuple[str, str]:
    items = draw.rng.sample(knowledge.FRUITS, draw.rng.randint(2, 5))
    return draw.phrase("code.list", shown=", ".join(items)), f"items = {json.dumps(items)}"


def _returns(draw: Draw) -> tuple[str, str]:
    name, value = draw.pick(draw.material.words), draw.pick(draw.material.words)
    question = draw.phrase("code.returns", name=name, value=value)
    return question, f'def {name}():\n    return "{value}"'


def _variable(draw: Draw) -> tuple[str, str]:
    name, value = draw.pick(draw.material.words), draw.rng.randint(0, 999)
    question = draw.phrase("code.variable", name=name, value=value)
    return question, f"{name} = {value}\nprint({name})"


def _is_even(draw: Draw) -> tuple[str, str]:
    return draw.phrase("code.is_even"), "def is_even(n):\n    return n % 2 == 0"


def _reverse(draw: Draw) -> tuple[str, str]:
    return draw.phrase("code.reverse"), "def reverse(text):\n    return text[::-1]"


def _series(draw: Draw) -> tuple[str, str]:
    question = draw.phrase("code.series")
    return question, _FIBONACCI if "ibonacci" in question else _FACTORIAL


_SNIPPETS: Final = (
    _operation,
    _loop,
    _print,
    _list,
    _returns,
    _variable,
    _is_even,
    _reverse,
    _series,
)
