"""Request fields whose JSON shape no plain type can say, and the words for a field that is wrong.

The validators run inside pydantic, but raise `InvalidRequestError` themselves at the first fault:
a list with a million wrong entries costs one error, not a million.
"""

import json
import math
import re
from collections.abc import Iterable
from typing import TypeGuard

from headrace_replicas.contract.errors import InvalidRequestError, UnsupportedParameterError

MAX_STOPS = 4
"""Stop strings of one request, as in OpenAI's API."""

MAX_STOP_CHARACTERS = 1000
"""The matcher builds a node for each character. No limit of OpenAI's is known; this is ours."""

MAX_BIASED_TOKENS = 1024
"""Entries of `logit_bias`, as in OpenAI's API."""

MAX_TOKEN_ID = 2**31 - 1
"""Ids travel as 32-bit integers in MLX; the vocabulary's own end is checked with the tokenizer."""

RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of the rendering call itself: a client that set them would reach past the template."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_SHOWN_CHARACTERS = 40


def path(parts: Iterable[str | int]) -> str:
    """Name a place in the body the way OpenAI does: `stop[0]`, `stream_options.include_usage`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def wrong(param: str, wanted: str, value: object) -> InvalidRequestError:
    """The error for a field that holds something else than what it takes.

    Args:
        param: Path of the field.
        wanted: What the field takes, to read after "must be".
        value: What it holds; shown only as far as it is a short scalar.
    """
    return InvalidRequestError(f"{param} must be {wanted}; got {_shown(value)}.", param)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer (true and 1.0 are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def stops(value: object) -> tuple[str, ...]:
    """Take `stop`: a string, or a list of at most four; none of them empty."""
    if isinstance(value, str):
        return (_stop(value, "stop"),)
    if not isinstance(value, list):
        raise wrong("stop", "a string or a list of strings", value)
    if len(value) > MAX_STOPS:
        raise wrong("stop", f"a list of at most {MAX_STOPS} strings", value)
    return tuple(_stop(entry, f"stop[{index}]") for index, entry in enumerate(value))


def biases(value: object) -> tuple[tuple[int, float], ...]:
    """Take `logit_bias`: an object of token id (as a string) to a number from -100 to 100."""
    if not isinstance(value, dict):
        raise wrong("logit_bias", "an object of token ids and numbers", value)
    if len(value) > MAX_BIASED_TOKENS:
        raise wrong("logit_bias", f"an object of at most {MAX_BIASED_TOKENS} entries", value)
    return tuple(sorted(_bias(name, amount) for name, amount in value.items()))


def prompt(value: object) -> str | tuple[int, ...]:
    """Take `prompt`: one text or one list of token ids, also as the only entry of a list."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            message = "Several prompts in one request are not supported: send one request for each."
            raise UnsupportedParameterError(message, "prompt")
        return _one_prompt(value[0], "prompt[0]")
    return _one_prompt(value, "prompt")


def template_kwargs(value: object) -> dict[str, object]:
    """Take `chat_template_kwargs`: an object of variables for the model's chat template."""
    if not isinstance(value, dict):
        raise wrong("chat_template_kwargs", "an object", value)
    for name in value:
        if name in RESERVED_TEMPLATE_NAMES:
            param = f"chat_template_kwargs.{name}"
            message = f"{param} is not a variable of the chat template. Leave it out."
            raise InvalidRequestError(message, param)
    return value


def _stop(value: object, param: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARACTERS:
        wanted = f"a string of 1 to {MAX_STOP_CHARACTERS} characters"
        raise wrong(param, wanted, value)
    return value


def _bias(name: str, amount: object) -> tuple[int, float]:
    param = f"logit_bias.{name[:_SHOWN_CHARACTERS]}"
    if not _TOKEN_ID.fullmatch(name) or int(name) > MAX_TOKEN_ID:
        raise InvalidRequestError(f"{param}: a key of logit_bias must be a token id.", param)
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise wrong(param, "a number", amount)
    if not -100 <= amount <= 100:
        raise wrong(param, "from -100 to 100", amount)
    return int(name), float(amount)


def _one_prompt(value: object, param: str) -> str | tuple[int, ...]:
    if isinstance(value, str | list) and not value:
        message = f"{param} is empty. Send some text, or the id of the model's start token as [id]."
        raise InvalidRequestError(message, param)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(param, "a string or a list of token ids", value)
    for index, entry in enumerate(value):
        if not is_integer(entry) or not 0 <= entry <= MAX_TOKEN_ID:
            raise wrong(f"{param}[{index}]", "a token id", entry)
    return tuple(value)


def _shown(value: object) -> str:
    """Describe a JSON value without repeating more than a short scalar of it."""
    match value:
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case float() if not math.isfinite(value):
            return "a number too large for a float"
        case int() if abs(value) >= 10**_SHOWN_CHARACTERS:
            return "an integer of more than 40 digits"
        case str() if len(value) > _SHOWN_CHARACTERS:
            return f"a string of {len(value)} characters"
        case _:
            return json.dumps(value, ensure_ascii=False)
