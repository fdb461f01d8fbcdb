"""The request cases under `http/`: what one file holds, read strictly.

A file is one fixture and a list of steps; a step is one request (or `parallel` equal ones) and
what its answer must be. In bodies and paths `$MODEL` stands for the served model's id; in bodies
`{"$repeat": [text, n]}` stands for the text n times over, and `{"$join": [part, ...]}` for its
parts in a row, so that large inputs stay readable.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

HTTP_CASES = Path(__file__).parent / "http"
SCRIPTED_CASES = Path(__file__).parent / "scripted"


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


class _Strict(BaseModel):
    """Immutable, and an unknown key is an error: a mistyped expectation must not pass."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Expect(_Strict):
    """What an answer must be; what is not named is not judged.

    Attributes:
        status: The HTTP statuses allowed.
        error_shape: Of an answer with status 400 or above. `any` takes OpenAI's shape.
        error_code: The error object's `code`.
        sse: The answer is an event stream that the strict check finds sound.
        strict: Findings that most clients forgive count as well (with `sse`).
        usage_chunk: True wants exactly one chunk with usage, False none.
        text: The whole text, exactly.
        no_fffd: No replacement character in the text.
        finish_reason: The reasons allowed, None among them where no reason is right.
        stop_reason: As `finish_reason`, for the Anthropic API.
        n_choices_or_400: As `n_choices`, unless the request was refused.
        headers: Header name (lower case) to a part of its value.
        max_seconds: Bound on the whole answer, seconds.
        max_header_seconds: Bound on status line and headers, seconds.
        tool_args: The parsed arguments of all tool calls, in order.
        not_plain_prose: A 200 whose text is no JSON must at least say that it was cut.
        logprobs_len_matches: One log probability per completion token; the end token may lack.
        cached_at_least: Prompt tokens that the prefix cache must have given.
        same_text_as: Name of an earlier step of the same file.
        differs_from: Name of an earlier step of the same file.
        same_usage_as: Name of an earlier step with the same token counts.
    """

    status: Annotated[tuple[int, ...], BeforeValidator(_as_list)] = ()
    error_shape: Literal["openai", "anthropic", "any"] | None = None
    error_code: str | None = None
    sse: bool = False
    strict: bool = False
    usage_chunk: bool | None = None
    text: str | None = None
    text_contains: tuple[str, ...] = ()
    text_not_contains: tuple[str, ...] = ()
    no_fffd: bool = False
    reasoning_contains: str | None = None
    finish_reason: Annotated[tuple[str | None, ...], BeforeValidator(_as_list)] = ()
    stop_reason: str | None = None
    n_choices: int | None = None
    n_choices_or_400: int | None = None
    completion_tokens: int | None = None
    headers: dict[str, str] = {}
    max_seconds: float | None = None
    max_header_seconds: float | None = None
    tool_args: list[Any] | None = None
    not_plain_prose: bool = False
    json_content: bool = False
    logprobs_len_matches: bool = False
    cached_at_least: int | None = None
    body_contains: str | None = None
    same_text_as: str | None = None
    differs_from: str | None = None
    same_usage_as: str | None = None


class Choice(_Strict):
    """Another sensible answer, and why it is one."""

    reason: str = Field(min_length=1)
    expect: Expect


class Step(_Strict):
    """One request of a case, sent `parallel` times at once.

    Attributes:
        headers: Sent beside the content type and the key; None takes a header away.
        body: Sent as JSON.
        raw: Sent as it stands, in UTF-8.
        raw_hex: Sent as these bytes.
        raw_size: Sent as a chat request whose only message has this many bytes.
        timeout: Seconds without a byte after which the client gives up.
        abort_after: The client leaves once it has more than this many body bytes.
    """

    name: str
    method: str = "POST"
    path: str = "/v1/chat/completions"
    headers: dict[str, str | None] = {}
    body: Any = None
    raw: Any = None
    raw_hex: str | None = None
    raw_size: int | None = None
    parallel: int = Field(default=1, ge=1)
    timeout: float = Field(default=60.0, gt=0)
    abort_after: int | None = Field(default=None, ge=1)
    expect: Expect = Expect()
    choice: Choice | None = None


class CaseFile(_Strict):
    """One request case: steps that run one after the other against one fixture."""

    case: str
    fixture: str
    note: str = ""
    steps: tuple[Step, ...] = Field(min_length=1)


def load_case(path: Path) -> CaseFile:
    """Reads one file of `http/`.

    Raises:
        pydantic.ValidationError: A key is unknown or a value has the wrong type.
    """
    return CaseFile.model_validate(json.loads(path.read_text(encoding="utf-8")))


def expand(value: Any, model: str) -> Any:
    """Puts in the model's id and writes out `$repeat` and `$join`."""
    match value:
        case {"$repeat": [str(text), int(times)], **rest} if not rest:
            return text * times
        case {"$join": [*parts], **rest} if not rest:
            return "".join(expand(part, model) for part in parts)
        case dict():
            return {key: expand(part, model) for key, part in value.items()}
        case list():
            return [expand(part, model) for part in value]
        case str():
            return value.replace("$MODEL", model)
        case _:
            return value
