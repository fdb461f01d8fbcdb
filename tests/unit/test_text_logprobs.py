"""Log probabilities in the shapes of the OpenAI API."""

import json
import math
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.requests import TokenLogprob
from headrace_serve.text.detokenizer import Detokenizer, text_of
from headrace_serve.text.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from headrace_serve.text.tokenizer import TextTokenizer

DEMO = Path(str(files("headrace_replicas"))) / "demo_model"


@pytest.fixture(scope="module")
def demo() -> TextTokenizer:
    return TextTokenizer.from_folder(DEMO)


def entry(token_id: int, logprob: float = -1.0, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=logprob, top=top)


def offsets(tokenizer: TextTokenizer, start: int = 0) -> TextOffsets:
    return TextOffsets(Detokenizer(tokenizer), start=start)


def emoji_ids(tokenizer: TextTokenizer) -> list[int]:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(300)}
    return [by_bytes[bytes([byte])] for byte in "😀".encode()]


def test_chat_shape(demo: TextTokenizer) -> None:
    """Each token has its text, log probability, bytes and alternatives, best first."""
    (hello,), (world,) = demo.encode("Hello"), demo.encode(" blue")
    shaped = chat_logprobs(demo, [entry(hello, -0.5, (hello, -0.5), (world, -2.0))])
    own = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    other = {"token": " blue", "logprob": -2.0, "bytes": list(b" blue")}
    assert shaped == {"content": [{**own, "top_logprobs": [own, other]}], "refusal": None}


def test_chat_without_alternatives(demo: TextTokenizer) -> None:
    """Without alternatives the list is there and empty."""
    assert chat_logprobs(demo, [entry(300)])["content"][0]["top_logprobs"] == []
    assert chat_logprobs(demo, []) == {"content": [], "refusal": None}


def test_part_of_a_character(demo: TextTokenizer) -> None:
    """A part of an emoji is written as escaped bytes, and its bytes join to the emoji."""
    entries = [entry(token_id) for token_id in emoji_ids(demo)]
    content = chat_logprobs(demo, entries)["content"]
    assert [token["token"] for token in content] == ["\\xf0", "\\x9f", "\\x98", "\\x80"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "😀"
    legacy = completion_logprobs(demo, entries, offsets(demo))
    assert legacy["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]


@pytest.mark.parametrize("wild", [-math.inf, math.inf, math.nan])
def test_json_stays_finite(demo: TextTokenizer, wild: float) -> None:
    """What is not finite is -9999.0 in every place of both shapes."""
    entries = [entry(300, wild, (301, wild))]
    chat = chat_logprobs(demo, entries)
    legacy = completion_logprobs(demo, entries, offsets(demo))
    json.dumps([chat, legacy], allow_nan=False)
    assert chat["content"][0]["logprob"] == -9999.0
    assert chat["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
    assert legacy["token_logprobs"] == [-9999.0]
    assert set(legacy["top_logprobs"][0].values()) == {-9999.0}


def test_completion_shape(demo: TextTokenizer) -> None:
    """Tokens, log probabilities, alternatives with the chosen token, and offsets run in step."""
    (hello,), (world,) = demo.encode("Hello"), demo.encode(" blue")
    entries = [entry(hello, -0.5), entry(world, -2.0, (hello, -0.1))]
    assert completion_logprobs(demo, entries, offsets(demo, 7)) == {
        "tokens": ["Hello", " blue"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"Hello": -0.5}, {"Hello": -0.1, " blue": -2.0}],
        "text_offset": [7, 12],
    }


def test_same_text_keeps_the_likeliest(demo: TextTokenizer) -> None:
    """Of alternatives that read the same, the likeliest is reported."""
    unknown = [(9000, -0.1), (9001, -3.0)]
    legacy = completion_logprobs(demo, [entry(300, -4.0, *unknown)], offsets(demo))
    assert legacy["top_logprobs"][0][""] == -0.1


@given(ids=st.lists(st.integers(0, 6143), max_size=30), cut=st.integers(0, 30))
def test_offsets_over_chunks(demo: TextTokenizer, ids: list[int], cut: int) -> None:
    """Over any cut each offset is the length of the complete text before the token."""
    counter = offsets(demo)
    found = counter.add(ids[:cut]) + counter.add(ids[cut:])
    before = [Detokenizer(demo).add(ids[:place]) for place in range(len(ids))]
    assert found == [len(text) for text in before]
    assert all(text_of(demo, ids).startswith(text) for text in before)
