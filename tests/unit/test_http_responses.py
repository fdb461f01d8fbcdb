"""Answers have the shape that OpenAI's own client types accept, and streams keep their laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace_replicas.contract.requests import Usage
from headrace_serve.http.responses import (
    AnswerHead,
    ChatStream,
    ServedModel,
    TextStream,
    chat_completion,
    model_list,
    model_object,
    text_completion,
)

HEAD = AnswerHead(request_id="r1", created_s=1_700_000_000, model="demo")
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=8)
LOGPROBS = {
    "content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}],
    "refusal": None,
}
TEXT_LOGPROBS = {
    "tokens": ["a"],
    "token_logprobs": [-0.5],
    "top_logprobs": [{"a": -0.5}],
    "text_offset": [0],
}
MODEL = ServedModel(id="demo", created_s=1_700_000_000, context_tokens=4096)


def test_a_whole_chat_answer_is_read_by_openais_types() -> None:
    body = chat_completion(HEAD, content="a", finish_reason="stop", usage=USAGE, logprobs=LOGPROBS)
    answer = ChatCompletion.model_validate(body, strict=True)
    assert (answer.id, answer.object, answer.model) == ("chatcmpl-r1", "chat.completion", "demo")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "a")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].logprob == -0.5


def test_an_empty_answer_has_empty_content_and_its_finish_reason() -> None:
    body = chat_completion(HEAD, content="", finish_reason="length", usage=USAGE)
    choice = ChatCompletion.model_validate(body, strict=True).choices[0]
    assert (choice.message.content, choice.finish_reason, choice.logprobs) == ("", "length", None)


def test_usage_counts_add_up_and_name_the_cached_tokens() -> None:
    body = chat_completion(HEAD, content="", finish_reason="stop", usage=USAGE)
    assert body["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_whole_completion_is_read_by_openais_types() -> None:
    body = text_completion(
        HEAD, text="a", finish_reason="length", usage=USAGE, logprobs=TEXT_LOGPROBS
    )
    answer = Completion.model_validate(body, strict=True)
    assert (answer.id, answer.object, answer.choices[0].text) == ("cmpl-r1", "text_completion", "a")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 14


def test_a_model_names_its_context_length_under_both_known_names() -> None:
    body = model_object(MODEL)
    assert Model.model_validate(body, strict=True).id == "demo"
    assert body["context_length"] == body["max_model_len"] == 4096


def test_the_model_list_holds_each_model() -> None:
    assert model_list([MODEL]) == {"object": "list", "data": [model_object(MODEL)]}


@given(
    pieces=st.lists(st.text(max_size=5), max_size=5),
    include_usage=st.booleans(),
    include_headrace=st.booleans(),
)
def test_a_chat_stream_keeps_its_laws(
    pieces: list[str], include_usage: bool, include_headrace: bool
) -> None:
    stream = ChatStream(HEAD, include_usage=include_usage)
    said = {"attempts": 2} if include_headrace else None
    chunks = [stream.delta(piece) for piece in pieces]
    chunks += stream.end("stop", USAGE, headrace=said)

    read = [ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks]
    assert {(c.id, c.created, c.model, c.object) for c in read} == {
        ("chatcmpl-r1", 1_700_000_000, "demo", "chat.completion.chunk")
    }
    choices = [c.choices[0] for c in read if c.choices]
    assert [c.delta.role for c in choices] == ["assistant"] + [None] * len(pieces)
    assert [c.finish_reason for c in choices] == [None] * len(pieces) + ["stop"]
    assert "".join(c.delta.content or "" for c in choices) == "".join(pieces)
    assert [chunk.get("headrace") for chunk in chunks] == [None] * (len(chunks) - 1) + [said]
    if include_usage:
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(pieces) + 1)
        assert chunks[-1]["choices"] == []
        assert (
            chunks[-1]["usage"]
            == chat_completion(HEAD, content="", finish_reason="stop", usage=USAGE)["usage"]
        )
    else:
        assert all("usage" not in chunk for chunk in chunks)
        assert len(chunks) == len(pieces) + 1


def test_a_chunk_carries_the_logprobs_of_its_tokens() -> None:
    chunk = ChatStream(HEAD, include_usage=False).delta("a", LOGPROBS)
    read = ChatCompletionChunk.model_validate(chunk, strict=True)
    assert read.choices[0].logprobs is not None
    assert read.choices[0].logprobs.content is not None
    assert read.choices[0].logprobs.content[0].bytes == [97]


@given(pieces=st.lists(st.text(max_size=5), max_size=5), include_usage=st.booleans())
def test_a_completion_stream_keeps_its_laws(pieces: list[str], include_usage: bool) -> None:
    stream = TextStream(HEAD, include_usage=include_usage)
    chunks = [stream.delta(piece) for piece in pieces]
    chunks += stream.end("length", USAGE)
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        ("cmpl-r1", 1_700_000_000, "demo", "text_completion")
    }
    choices = [choice for c in chunks if isinstance(c["choices"], list) for choice in c["choices"]]
    assert "".join(choice["text"] for choice in choices) == "".join(pieces)
    assert [c["finish_reason"] for c in choices] == [None] * len(pieces) + ["length"]
    assert sum(c.get("usage") is not None for c in chunks) == include_usage
    assert len(chunks) == len(pieces) + 1 + include_usage


@pytest.mark.parametrize("kind", [ChatStream, TextStream])
def test_nothing_follows_the_end_of_a_stream(kind: type[ChatStream] | type[TextStream]) -> None:
    stream = kind(HEAD, include_usage=True)
    stream.end("stop", USAGE)
    with pytest.raises(RuntimeError, match="r1 has ended"):
        stream.delta("more")
    with pytest.raises(RuntimeError, match="r1 has ended"):
        stream.end("stop", USAGE)
