"""Request fields that would change the answer and are not built: refused, never dropped silently.

A field counts as known when OpenAI's API, vLLM or mlx-lm documents it. A value that asks for what
happens anyway (`n: 1`, `tools: []`) is neutral and passes; anything else is an
`UnsupportedParameterError` that names the field, and a value that no server would take
(`n: 0`, an unknown `tool_choice`) is an `InvalidRequestError`. Unknown fields are not looked at.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace_replicas.contract.errors import UnsupportedParameterError
from headrace_serve.http.fields import is_integer, wrong

Predicate = Callable[[object], bool]


def only(*values: object) -> Predicate:
    """Whether a JSON value is one of these; 1.0 is 1, true is not."""
    return lambda value: any(
        value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
    )


def _anything(_: object) -> bool:
    return True


def _nothing(_: object) -> bool:
    return False


def _positive(value: object) -> bool:
    return is_integer(value) and value >= 1


def _is(kind: type) -> Predicate:
    return lambda value: isinstance(value, kind)


def _objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _of_type(*names: str) -> Predicate:
    return lambda value: isinstance(value, dict) and value.get("type") in names


def _named_or_object(*names: str) -> Predicate:
    return lambda value: isinstance(value, dict) or (isinstance(value, str) and value in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one field that is not built may still hold.

    Attributes:
        neutral: Whether a well-formed value asks for nothing else than what happens anyway.
        well_formed: Whether the value is one that the field's definition allows.
        wanted: What the field takes, to read after "must be".
        off_when: (field, value) that makes this field have no effect.
        remedy: What to do instead.
    """

    neutral: Predicate = _nothing
    well_formed: Predicate = _anything
    wanted: str = ""
    off_when: tuple[str, str] | None = None
    remedy: str = "Leave it out."


SHARED_RULES: Mapping[str, Rule] = {
    "n": Rule(
        neutral=only(1),
        well_formed=_positive,
        wanted="an integer of at least 1",
        remedy="Send one request for each answer.",
    ),
    "best_of": Rule(neutral=only(1), well_formed=_positive, wanted="an integer of at least 1"),
    "echo": Rule(neutral=only(False), well_formed=_is(bool), wanted="true or false"),
    "response_format": Rule(
        neutral=_of_type("text"),
        well_formed=_of_type("text", "json_object", "json_schema"),
        wanted="an object whose type is text, json_object or json_schema",
        remedy="The output is free text: leave it out.",
    ),
    # Names of vLLM.
    "allowed_token_ids": Rule(),
    "bad_words": Rule(neutral=only([])),
    "guided_choice": Rule(),
    "guided_grammar": Rule(),
    "guided_json": Rule(),
    "guided_regex": Rule(),
    "ignore_eos": Rule(neutral=only(False)),
    "include_stop_str_in_output": Rule(neutral=only(False)),
    "length_penalty": Rule(neutral=only(1)),
    "logits_processors": Rule(neutral=only([])),
    "min_tokens": Rule(neutral=only(0)),
    "prompt_logprobs": Rule(neutral=only(False)),
    "skip_special_tokens": Rule(neutral=only(True)),
    "stop_token_ids": Rule(neutral=only([])),
    "structured_outputs": Rule(),
    "truncate_prompt_tokens": Rule(),
    "use_beam_search": Rule(neutral=only(False)),
    # Names of mlx-lm.
    "adapters": Rule(),
    "repetition_context_size": Rule(
        remedy="The repetition penalty sees the whole prompt and output: leave it out."
    ),
    "xtc_probability": Rule(neutral=only(0)),
}

_TOOLS_REMEDY = 'Leave it out, or send tool_choice "none".'
_THINKING_REMEDY = "Set the template's own variable in chat_template_kwargs."

CHAT_RULES: Mapping[str, Rule] = {
    **SHARED_RULES,
    "tool_choice": Rule(
        neutral=only("none", "auto"),
        well_formed=_named_or_object("none", "auto", "required"),
        wanted="none, auto, required or an object",
        remedy=_TOOLS_REMEDY,
    ),
    "function_call": Rule(
        neutral=only("none", "auto"),
        well_formed=_named_or_object("none", "auto"),
        wanted="none, auto or an object",
        remedy="Leave it out.",
    ),
    "tools": Rule(
        neutral=only([]),
        well_formed=_objects,
        wanted="a list of objects",
        off_when=("tool_choice", "none"),
        remedy=_TOOLS_REMEDY,
    ),
    "functions": Rule(
        neutral=only([]),
        well_formed=_objects,
        wanted="a list of objects",
        off_when=("function_call", "none"),
    ),
    "modalities": Rule(
        neutral=only([], ["text"]), well_formed=_strings, wanted="a list of strings"
    ),
    "audio": Rule(well_formed=_is(dict), wanted="an object"),
    "prediction": Rule(well_formed=_is(dict), wanted="an object"),
    "web_search_options": Rule(well_formed=_is(dict), wanted="an object"),
    # Names of vLLM and of model vendors.
    "add_generation_prompt": Rule(neutral=only(True)),
    "chat_template": Rule(remedy="The model's own template is used: leave it out."),
    "continue_final_message": Rule(neutral=only(False)),
    "documents": Rule(neutral=only([])),
    "enable_thinking": Rule(remedy=_THINKING_REMEDY),
    "reasoning": Rule(remedy=_THINKING_REMEDY),
    "thinking": Rule(remedy=_THINKING_REMEDY),
    "thinking_budget": Rule(remedy=_THINKING_REMEDY),
    "thinking_token_budget": Rule(remedy=_THINKING_REMEDY),
}

COMPLETION_RULES: Mapping[str, Rule] = {
    **SHARED_RULES,
    "suffix": Rule(neutral=only(""), well_formed=_is(str), wanted="a string"),
}


def refuse_unbuilt(body: Mapping[str, object], rules: Mapping[str, Rule]) -> None:
    """Let a body pass only if none of its fields asks for something that is not built.

    Args:
        body: The request as it came; null is the same as leaving a field out.
        rules: What is not built for this kind of request.

    Raises:
        InvalidRequestError: A value that the field's definition does not allow.
        UnsupportedParameterError: A value that would change the answer.
    """
    for name, rule in rules.items():
        value = body.get(name)
        if value is None:
            continue
        if not rule.well_formed(value):
            raise wrong(name, rule.wanted, value)
        idle = rule.off_when is not None and body.get(rule.off_when[0]) == rule.off_when[1]
        if not idle and not rule.neutral(value):
            raise UnsupportedParameterError(
                f"{name} is not supported with this value. {rule.remedy}", name
            )
