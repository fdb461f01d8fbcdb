"""Judges one answer by a step's expectation: pure, one short rule per kind of expectation.

Each rule yields one sentence per breach and nothing when its part of the expectation is not set,
so an empty expectation is met by every answer that arrived.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.cases.case_file import Expect
from tests.cases.http_call import Answer
from tests.cases.sse_report import is_json
from tests.cases.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One answer, how it reads, and the first answers of earlier steps by name."""

    answer: Answer
    view: View
    earlier: Mapping[str, View]

    @property
    def counted(self) -> Mapping[str, object]:
        """The usage object; empty when there is none."""
        return self.view.usage or {}


def judge(expect: Expect, evidence: Evidence) -> tuple[str, ...]:
    """The breaches of an expectation, in the order of the rules; empty when it is met."""
    return tuple(breach for rule in _RULES for breach in rule(expect, evidence))


def transport(evidence: Evidence) -> tuple[str, ...]:
    """What went wrong on the way, which no expectation can excuse."""
    failure = evidence.answer.failure
    malformed = evidence.view.malformed
    return (*((f"transport: {failure}",) if failure else ()), *((malformed,) if malformed else ()))


def _status(expect: Expect, evidence: Evidence) -> Iterator[str]:
    answer = evidence.answer
    if expect.status and answer.status not in expect.status:
        wanted = " or ".join(map(str, expect.status))
        yield f"status {answer.status} not {wanted}: {answer.body[:160]!r}"


def _error(expect: Expect, evidence: Evidence) -> Iterator[str]:
    answer, error = evidence.answer, evidence.view.error_object
    if expect.error_shape and answer.status is not None and answer.status >= 400:
        if expect.error_shape == "anthropic":
            is_shaped = bool(
                (evidence.view.json or {}).get("type") == "error"
                and error.get("type")
                and error.get("message")
            )
        else:
            is_shaped = isinstance(error.get("message"), str) and "type" in error
        if not is_shaped:
            name = "Anthropic" if expect.error_shape == "anthropic" else "OpenAI"
            yield f"not the {name} error shape: {answer.body[:160]!r}"
    if expect.error_code is not None and error.get("code") != expect.error_code:
        yield f"error.code {error.get('code')!r} not {expect.error_code!r}"


def _stream(expect: Expect, evidence: Evidence) -> Iterator[str]:
    view = evidence.view
    if expect.sse:
        if not view.is_stream:
            yield "not an event stream"
        yield from view.problems
        if expect.strict:
            yield from view.soft
    if expect.usage_chunk is not None:
        wanted = 1 if expect.usage_chunk else 0
        if (view.usage_chunks or 0) != wanted:
            yield f"usage chunks: {view.usage_chunks}"


def _text(expect: Expect, evidence: Evidence) -> Iterator[str]:
    text = evidence.view.text
    if expect.text is not None and text != expect.text:
        yield f"text {text[:90]!r} not {expect.text[:90]!r}"
    for part in expect.text_contains:
        if part not in text:
            yield f"{part!r} not in text {text[:90]!r}"
    for part in expect.text_not_contains:
        if part in text:
            yield f"{part!r} in text {text[:90]!r}"
    if expect.no_fffd and "\ufffd" in text:
        yield "U+FFFD in text"
    if expect.reasoning_contains and expect.reasoning_contains not in evidence.view.reasoning:
        yield f"reasoning {evidence.view.reasoning[:80]!r} lacks {expect.reasoning_contains!r}"


def _json_text(expect: Expect, evidence: Evidence) -> Iterator[str]:
    view = evidence.view
    if expect.json_content and not is_json(view.text):
        yield f"content is not JSON: {view.text[:80]!r}"
    if (
        expect.not_plain_prose
        and evidence.answer.status == 200
        and view.finish != "length"
        and not is_json(view.text)
    ):
        yield f"200 with prose, constraint ignored: {view.text[:60]!r}"


def _ending(expect: Expect, evidence: Evidence) -> Iterator[str]:
    view = evidence.view
    if expect.finish_reason and view.finish not in expect.finish_reason:
        yield f"finish_reason {view.finish!r} not one of {list(expect.finish_reason)}"
    if expect.stop_reason is not None and view.stop_reason != expect.stop_reason:
        yield f"stop_reason {view.stop_reason!r} not {expect.stop_reason!r}"


def _counts(expect: Expect, evidence: Evidence) -> Iterator[str]:
    view, counted = evidence.view, evidence.counted
    if expect.n_choices is not None and view.n_choices != expect.n_choices:
        yield f"{view.n_choices} choices, not {expect.n_choices}"
    wanted = expect.n_choices_or_400
    if wanted is not None and evidence.answer.status == 200 and view.n_choices != wanted:
        yield f"{view.n_choices} choices for n={wanted}"
    if (
        expect.completion_tokens is not None
        and counted.get("completion_tokens") != expect.completion_tokens
    ):
        yield f"completion_tokens not {expect.completion_tokens}: usage {view.usage}"
    if expect.cached_at_least is not None:
        details = counted.get("prompt_tokens_details")
        cached = details.get("cached_tokens", 0) if isinstance(details, dict) else 0
        if cached < expect.cached_at_least:
            yield f"fewer than {expect.cached_at_least} cached tokens: usage {view.usage}"
    if expect.logprobs_len_matches:
        tokens = counted.get("completion_tokens", 1)
        # The end token is counted but never shown, so one may lack.
        if view.logprobs == 0 or (isinstance(tokens, int) and view.logprobs < tokens - 1):
            yield f"{view.logprobs} log probabilities for usage {view.usage}"


def _tools(expect: Expect, evidence: Evidence) -> Iterator[str]:
    if expect.tool_args is None:
        return
    try:
        arguments = [json.loads(call.arguments) for call in evidence.view.tools]
    except (TypeError, ValueError):
        yield f"unparsable tool arguments {evidence.view.tools}"
        return
    if arguments != expect.tool_args:
        yield f"tool arguments {arguments} not {expect.tool_args}"


def _wire(expect: Expect, evidence: Evidence) -> Iterator[str]:
    answer = evidence.answer
    for name, part in expect.headers.items():
        if part.lower() not in answer.headers.get(name, "").lower():
            yield f"header {name}: {answer.headers.get(name)!r} lacks {part!r}"
    if expect.body_contains is not None and expect.body_contains.encode() not in answer.body:
        yield f"body lacks {expect.body_contains!r}"
    if expect.max_seconds is not None and answer.total_s > expect.max_seconds:
        yield f"took {answer.total_s:.1f} s, more than {expect.max_seconds} s"
    if expect.max_header_seconds is not None and (
        answer.headers_s is None or answer.headers_s > expect.max_header_seconds
    ):
        yield f"headers after {answer.headers_s} s, later than {expect.max_header_seconds} s"


def _earlier(expect: Expect, evidence: Evidence) -> Iterator[str]:
    view = evidence.view
    if expect.same_text_as is not None:
        same = evidence.earlier.get(expect.same_text_as)
        if same is None or view.text != same.text:
            other = None if same is None else same.text[:60]
            yield f"text {view.text[:60]!r} != step {expect.same_text_as} {other!r}"
    if expect.differs_from is not None:
        different = evidence.earlier.get(expect.differs_from)
        if different is not None and view.text == different.text:
            yield f"same text as step {expect.differs_from}: {view.text[:60]!r}"
    if expect.same_usage_as is not None:
        counted = evidence.earlier.get(expect.same_usage_as, View())
        if _totals(view) != _totals(counted):
            yield f"usage {view.usage} != step {expect.same_usage_as} {counted.usage}"


def _totals(view: View) -> list[object]:
    return [(view.usage or {}).get(name) for name in _TOTALS]


_TOTALS = ("prompt_tokens", "completion_tokens", "total_tokens")

_RULES = (
    _status,
    _error,
    _stream,
    _text,
    _json_text,
    _ending,
    _counts,
    _tools,
    _wire,
    _earlier,
)
