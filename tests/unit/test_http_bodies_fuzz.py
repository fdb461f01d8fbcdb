"""Any bytes become a body whose sampling parameters are in range, or an error with a 4xx status."""

import json
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import HeadraceError
from headrace_serve.http.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from headrace_serve.http.raw_body import BodyLimits
from headrace_serve.http.sampling import sampling

LIMITS = BodyLimits(max_body_bytes=1_000_000)
MESSAGES = [{"role": "user", "content": "hi"}]
Parse = Callable[[bytes, BodyLimits], ChatBody | CompletionBody]
PARSERS: tuple[Parse, ...] = (parse_chat, parse_completion)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, 1, -1, 2**63, 10**400, 1e308, 1e-320, "", "1", "none", "auto", "text"])
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["type", "include_usage", "7"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
NAMES = sorted(
    {*ChatBody.model_fields, *CompletionBody.model_fields}
    | {"n", "best_of", "tools", "tool_choice", "functions", "response_format", "suffix", "echo"}
    | {"modalities", "audio", "metadata", "user", "thinking_budget", "min_tokens", "unknown"}
)
PLAUSIBLE = st.fixed_dictionaries(
    {"messages": st.just(MESSAGES), "prompt": st.just("hi")},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2**31 - 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.integers(-2, 2),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logit_bias": st.dictionaries(
            st.integers(0, 2**31 - 1).map(str), st.floats(-100, 100), max_size=5
        ),
        "stop": st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=4),
        "max_tokens": st.integers(1, 2**31 - 1),
    },
)


def outcome(parse: Parse, raw: bytes) -> ChatBody | CompletionBody | HeadraceError:
    """What becomes of these bytes; any other exception fails the test."""
    try:
        return parse(raw, LIMITS)
    except HeadraceError as error:
        return error


def check_laws(raw: bytes) -> int:
    """Both parsers give a body with sampling parameters in range, or a 4xx error."""
    parsed = 0
    for parse in PARSERS:
        body = outcome(parse, raw)
        if isinstance(body, HeadraceError):
            assert 400 <= body.http_status < 500
            assert body.message
            continue
        parsed += 1
        params = sampling(body)
        assert params.temperature == 0 or 1e-4 <= params.temperature <= 2
        assert 1e-6 <= params.top_p <= 1
        assert 0 <= params.top_k < 2**31
        assert 0 <= params.min_p <= 1
        assert 0.01 <= params.repetition_penalty <= 100
        assert abs(params.presence_penalty) <= 2
        assert abs(params.frequency_penalty) <= 2
        assert all(0 <= i < 2**31 and -100 <= b <= 100 for i, b in params.logit_bias)
        assert params.logprobs is None or 0 <= params.logprobs <= 20
        assert body.limit_tokens is None or body.limit_tokens >= 1
        assert all(body.stop)
    return parsed


@given(PLAUSIBLE, st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_any_mutated_body_is_parsed_or_refused_with_4xx(
    plausible: dict[str, object], mutation: dict[str, object]
) -> None:
    check_laws(json.dumps({**plausible, **mutation}).encode())


@given(PLAUSIBLE)
def test_every_plausible_body_is_parsed_by_both_endpoints(plausible: dict[str, object]) -> None:
    assert check_laws(json.dumps(plausible).encode()) == 2


@given(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=200))
def test_any_json_and_any_bytes_are_parsed_or_refused_with_4xx(raw: bytes) -> None:
    check_laws(raw)
