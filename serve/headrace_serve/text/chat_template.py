"""A checkpoint's chat template: messages in, the prompt's text out, refusals as our own error."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from headrace_replicas.contract.errors import CheckpointError, InvalidRequestError

TEMPLATE_PLACES = (
    "chat_template.jinja",
    "additional_chat_templates/",
    "`chat_template` in tokenizer_config.json",
    "chat_template.json",
)

# What running a template can raise: jinja's own errors and `raise_exception` (TemplateError),
# and those of the expressions inside it, down to endless nesting in a tool's schema.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

_ANSWER = "\ufdd2"
"""Stands for an answer when the template is asked how it ends one; a Unicode noncharacter."""


class ChatTemplate:
    """The template of one tokenizer that transformers loaded (which ships no types)."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        parameters = {*signature(loaded.apply_chat_template).parameters, "messages"}
        # Switches of the library, not of the template: a client's `chat_template`, for one,
        # would be a program of the client's.
        self._reserved = (parameters | {*loaded.special_tokens_map}) - {"tools", "documents"}

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a template."""
        return bool(self._loaded.chat_template)

    def check_syntax(self) -> None:
        """Refuses a template that does not parse, before anybody sends messages to it.

        Raises:
            CheckpointError: With the parser's message and line.
        """
        try:
            self._apply([{"role": "user", "content": ""}], add_generation_prompt=True)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"The chat template does not parse: {error.message} (line {error.lineno}). "
                f"Repair it; it is one of {', '.join(TEMPLATE_PLACES)}."
            ) from error
        except _FAILURES:
            return  # a template may well refuse these messages; requests will tell

    def render(self, messages: list[Any], switches: Mapping[str, Any] | None) -> str:
        """The prompt's text, with the opening of an answer.

        Raises:
            InvalidRequestError: There is no template, a switch is not the template's, or the
                template refuses the messages; then the message is the template's own.
        """
        if not self.exists:
            raise InvalidRequestError(
                "This model has no chat template, so it cannot chat. Looked for "
                f"{', '.join(TEMPLATE_PLACES)}. Use /v1/completions, or add a template.",
                "messages",
            )
        switches = switches or {}
        if taken := sorted(self._reserved & switches.keys()):
            raise InvalidRequestError(
                f"{taken[0]!r} is not a switch of the chat template. Leave it out.",
                f"chat_template_kwargs.{taken[0]}",
            )
        try:
            return self._apply(messages, add_generation_prompt=True, **switches)
        except _FAILURES as error:
            raise InvalidRequestError(
                f"The model's chat template refuses the messages: {error}", "messages"
            ) from error

    def text_after_answer(self) -> str:
        """What the template writes after an answer; empty when it does not say."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        if not self.exists:
            return ""
        try:
            return self._apply(turns, add_generation_prompt=False).rpartition(_ANSWER)[2].lstrip()
        except _FAILURES:
            return ""

    def _apply(self, messages: list[Any], **switches: Any) -> str:
        return str(self._loaded.apply_chat_template(messages, tokenize=False, **switches))
