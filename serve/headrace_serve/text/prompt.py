"""A chat request's messages to prompt ids, for templates that take less than clients send.

Templates differ in the message orders they know. The rule, tried in this order; the first shape
that the template renders, with every instruction in it, is the prompt:

1. the messages as they came;
2. `developer` messages as `system` messages, in their places;
3. then neighbours of the same role joined to one message, a blank line between;
4. then system messages that come after another role as user messages, in their places;
5. then all system messages as user messages.

"With every instruction in it", because many templates drop a role that they do not know without a
word: each shape that has system or developer messages is rendered once with a unique sign in the
place of each, and the signs must all come out. A shape that loses one is used only when no
shape keeps all. Tool messages are never joined; each answers its own call.

In each shape the arguments of earlier tool calls are first given as objects, then as the text that
came, since some templates can only do the one and some only the other.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace_replicas.contract.errors import InvalidRequestError
from headrace_serve.text.messages import normalise
from headrace_serve.text.tokenizer import TextTokenizer

_INSTRUCTING = ("system", "developer")
_JOINED_TEXTS = ("content", "reasoning_content")

Messages = list[dict[str, Any]]


def render(
    tokenizer: TextTokenizer,
    messages: object,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Prompt ids of a chat request.

    Args:
        tokenizer: The model's tokenizer and template.
        messages: The parsed JSON value of the request's `messages`.
        template_kwargs: `tools` and the template's own switches.

    Raises:
        InvalidRequestError: The messages are malformed, or the template refuses every shape of
            them; then the message is what the template said to the messages as they came.
    """
    refusals: list[InvalidRequestError] = []
    lossy: list[Messages] = []
    for shape in _candidates(messages):
        try:
            if _keeps_instructions(tokenizer, shape, template_kwargs):
                return tokenizer.render_chat(shape, template_kwargs=template_kwargs)
        except InvalidRequestError as refusal:
            refusals.append(refusal)
        else:
            lossy.append(shape)
    if lossy:
        return tokenizer.render_chat(lossy[0], template_kwargs=template_kwargs)
    raise refusals[0]


def _candidates(messages: object) -> Iterator[Messages]:
    with_objects = normalise(messages)
    with_texts = normalise(messages, parse_arguments=False)
    before: list[Messages] = []
    for pair in zip(shapes(with_objects), shapes(with_texts), strict=True):
        for shape in pair:
            if shape not in before:
                before.append(shape)
                yield shape


def _keeps_instructions(
    tokenizer: TextTokenizer, messages: Messages, template_kwargs: Mapping[str, Any] | None
) -> bool:
    # Noncharacters: no client's text and no template holds these signs.
    signs = {
        place: f"\ufdd3{place}\ufdd4"
        for place, message in enumerate(messages)
        if message["role"] in _INSTRUCTING and message["content"].strip()
    }
    if not signs:
        return True
    probe = [
        {**message, "content": signs.get(place, message["content"])}
        for place, message in enumerate(messages)
    ]
    text = tokenizer.render_text(probe, template_kwargs=template_kwargs)
    return all(sign in text for sign in signs.values())


def shapes(messages: Messages) -> Iterator[Messages]:
    """The shapes of the rule, in its order; some may be equal."""
    yield messages
    system = [_as(message, "system", among=("developer",)) for message in messages]
    yield system
    yield joined(system)
    first_turn = next((i for i, m in enumerate(system) if m["role"] != "system"), len(system))
    late_as_user = [_as(message, "user", among=("system",)) for message in system[first_turn:]]
    yield joined([*system[:first_turn], *late_as_user])
    yield joined([_as(message, "user", among=("system",)) for message in system])


def _as(message: dict[str, Any], role: str, *, among: tuple[str, ...]) -> dict[str, Any]:
    return {**message, "role": role} if message["role"] in among else message


def joined(messages: Messages) -> Messages:
    """The messages with neighbours of the same role, tools apart, joined to one."""
    result: Messages = []
    for message in messages:
        if result and message["role"] == result[-1]["role"] != "tool":
            result[-1] = _join(result[-1], message)
        else:
            result.append(message)
    return result


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = {**second, **first}
    for key in _JOINED_TEXTS:
        texts = [message[key] for message in (first, second) if message.get(key)]
        if key in both:
            both[key] = "\n\n".join(texts)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        both["tool_calls"] = calls
    return both
