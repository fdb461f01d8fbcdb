"""What a request to /v1/chat/completions or /v1/completions may hold.

Laws, for any bytes: the result is a body or a `HeadraceError` with a 4xx status; null is the same
as leaving a field out; unknown fields are ignored; a known field that would change the answer is
obeyed or refused (`unbuilt`), never dropped. Types are strict: "5" and true are not 5, and 1.0 is
no integer (as in OpenAI's API), while an integer is taken where a number is meant.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from headrace_replicas.contract.errors import InvalidRequestError
from headrace_serve.http import fields
from headrace_serve.http.raw_body import BodyLimits, load_object
from headrace_serve.http.unbuilt import CHAT_RULES, COMPLETION_RULES, refuse_unbuilt

Penalty = Annotated[float, Field(ge=-2, le=2)]
# No model has a window of two thousand million tokens: a larger limit is a mistake of the client.
TokenLimit = Annotated[int, Field(ge=1, le=2**31 - 1)]
# Beyond these bounds a float32 logit times or over the penalty may overflow, and a logit that is
# not finite is an engine fault: one request must not be able to cause one.
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]

_WANTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
    "too_short": "a list of at least {min_length}",
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: object) -> object:
        if isinstance(value, dict):
            return {name: held for name, held in value.items() if held is not None}
        return value


class StreamOptions(_Body):
    """What a stream carries besides the answer.

    Attributes:
        include_usage: One more chunk at the end, with the token counts and no choices.
        include_headrace: A `headrace` field in the last chunk: attempts, and how it resumed.
    """

    include_usage: bool = False
    include_headrace: bool = False


class SharedBody(_Body):
    """The fields that both endpoints take.

    Attributes:
        model: The id that the client asks for; None leaves the choice to the server.
        max_completion_tokens: Wins over `max_tokens`; both None leaves the rest of the window.
        top_k: 0 and -1 keep all tokens.
        logit_bias: (token id, added value) pairs by id; ids may lie beyond the vocabulary.
        seed: None lets the server choose one.
        stop: At most four strings; empty when the request names none.
    """

    model: str | None = None
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, le=2**31 - 1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(fields.biases)] = ()
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[tuple[str, ...], PlainValidator(fields.stops)] = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def limit_tokens(self) -> int | None:
        """The client's limit on output tokens; None when it names none."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatBody(SharedBody):
    """A request to /v1/chat/completions.

    Attributes:
        messages: At least one object each; their contents are checked where they are rendered.
        logprobs: Whether log probabilities are reported.
        top_logprobs: Alternatives to report with each token; None without `logprobs`.
        chat_template_kwargs: Variables for the model's chat template, as they came.
        reasoning_effort: Passed on to the template, which may know it or not.
    """

    messages: Annotated[list[dict[str, Any]], FailFast(), Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: Annotated[dict[str, object], PlainValidator(fields.template_kwargs)] = (
        Field(default_factory=dict)
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @property
    def template_variables(self) -> dict[str, object]:
        """All variables for the chat template; an explicit one wins over `reasoning_effort`."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return {**effort, **self.chat_template_kwargs}


class CompletionBody(SharedBody):
    """A request to /v1/completions.

    Attributes:
        prompt: A text, or token ids; not empty.
        logprobs: Alternatives to report with each token; None reports no log probabilities.
    """

    prompt: Annotated[str | tuple[int, ...], PlainValidator(fields.prompt)]
    logprobs: int | None = Field(default=None, ge=0, le=5)


BodyT = TypeVar("BodyT", ChatBody, CompletionBody)


def parse_chat(raw: bytes, limits: BodyLimits) -> ChatBody:
    """Parse the body of a chat request.

    Raises:
        RequestTooLargeError: More bytes than the limit.
        UnsupportedParameterError: It asks for something that is not built.
        InvalidRequestError: Anything else that is wrong with it; `param` says where.
    """
    body = load_object(raw, limits)
    parsed = _validated(ChatBody, body)
    _check_streaming(parsed)
    if parsed.top_logprobs is not None and not parsed.logprobs:
        message = "top_logprobs needs logprobs: send `logprobs: true` with it, or neither."
        raise InvalidRequestError(message, "top_logprobs")
    refuse_unbuilt(body, CHAT_RULES)
    return parsed


def parse_completion(raw: bytes, limits: BodyLimits) -> CompletionBody:
    """Parse the body of a legacy completion request.

    Raises:
        RequestTooLargeError: More bytes than the limit.
        UnsupportedParameterError: It asks for something that is not built.
        InvalidRequestError: Anything else that is wrong with it; `param` says where.
    """
    body = load_object(raw, limits)
    parsed = _validated(CompletionBody, body)
    _check_streaming(parsed)
    refuse_unbuilt(body, COMPLETION_RULES)
    return parsed


def _validated(kind: type[BodyT], body: Mapping[str, Any]) -> BodyT:
    try:
        return kind.model_validate(body)
    except ValidationError as problem:
        raise _refusal(problem) from None


def _check_streaming(body: SharedBody) -> None:
    """`include_usage` without a stream is met anyway: whole answers always carry their usage."""
    if body.stream_options.include_headrace and not body.stream:
        param = "stream_options.include_headrace"
        message = (
            f"{param} needs `stream: true`; a whole answer carries the same in its "
            "x-headrace-attempts and x-headrace-resume headers."
        )
        raise InvalidRequestError(message, param)


def _refusal(problem: ValidationError) -> InvalidRequestError:
    """Put pydantic's first complaint into the words of the API."""
    first = problem.errors(include_url=False)[0]
    param = fields.path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required.", param)
    known = _WANTED.get(first["type"])
    wanted = (
        first["msg"].removeprefix("Input should be ")
        if known is None
        else known.format(**first.get("ctx", {}))
    )
    return fields.wrong(param, wanted, first["input"])
