"""The official client, unmodified, against the real stack."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.endpoint}/v1", api_key="none", timeout=60) as connected:
        yield connected


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 9 + 9?"}], temperature=0
    )
    assert answer.choices[0].message.content == "9 + 9 = 18"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 9 + 9?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "9 + 9 = 18"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_and_its_stream_agree(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nCount from 1 to 9.<|im_end|>\n<|im_start|>assistant\n"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=40)
    stream = client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=40, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.choices[0].text == "1, 2, 3, 4, 5, 6, 7, 8, 9"


def test_the_model_list_names_what_is_served(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_an_unknown_model_is_the_clients_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])


def test_logprobs_and_seeds(client: openai.OpenAI) -> None:
    def sample(seed: int) -> tuple[str | None, int]:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me a story about a cat."}],
            temperature=1.0,
            seed=seed,
            max_tokens=30,
            logprobs=True,
            top_logprobs=2,
        )
        entries = answer.choices[0].logprobs
        assert entries is not None
        assert entries.content is not None
        return answer.choices[0].message.content, len(entries.content)

    assert sample(1) == sample(1)
    assert sample(1)[0] != sample(2)[0]
    assert sample(1)[1] == 30
