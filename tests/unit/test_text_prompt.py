"""Message orders that a template refuses or drops, and the shapes that are tried instead."""

import shutil
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import InvalidRequestError
from headrace_serve.text.detokenizer import text_of
from headrace_serve.text.prompt import joined, render, shapes
from headrace_serve.text.tokenizer import TextTokenizer

DEMO = Path(str(files("headrace_replicas"))) / "demo_model"

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
STRICT = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant', 'system', 'tool'] %}"
    "{{ raise_exception('role ' + m.role + ' is not known') }}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system turn may only come first') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role and m.role == 'user' %}"
    "{{ raise_exception('turns must take turns') }}{% endif %}"
    "{% endfor %}" + TURNS
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role in ['system', 'developer'] %}"
    "{{ raise_exception('no system role') }}{% endif %}{% endfor %}" + TURNS
)
SILENT = (
    "{% for m in messages %}{% if loop.first and m.role == 'system' or m.role in ['user', "
    "'assistant'] %}[{{ m.role }}]{{ m.content | trim }}\n{% endif %}{% endfor %}[assistant]"
)
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}%BODY%{% endfor %}{% endfor %}"
WANTS_OBJECTS = CALLS.replace(
    "%BODY%", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
WANTS_TEXT = CALLS.replace("%BODY%", "{{ '<' + c.function.arguments + '>' }}")


def say(role: str, content: str = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.fixture
def prompt_of(tmp_path: Path) -> Any:
    """Renders messages with a template of the test's, as text."""

    def render_with(template: str, messages: object) -> str:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, tmp_path / name)
        (tmp_path / "chat_template.jinja").write_text(template)
        tokenizer = TextTokenizer.from_folder(tmp_path)
        return text_of(tokenizer, render(tokenizer, messages))

    return render_with


LATE = [say("user", "hi"), say("assistant", "ho"), say("system", "be brief"), say("user", "go")]


def test_late_system_stays_where_it_can(prompt_of: Any) -> None:
    """A template that takes a late system message gets it in its place."""
    assert (
        prompt_of(TURNS, LATE) == "[user]hi\n[assistant]ho\n[system]be brief\n[user]go\n[assistant]"
    )


@pytest.mark.parametrize("template", [STRICT, NO_SYSTEM, SILENT], ids=["strict", "none", "silent"])
def test_late_system_is_folded(prompt_of: Any, template: str) -> None:
    """Refused or dropped in silence, a late system message joins the user's turn in its place."""
    assert prompt_of(template, LATE) == "[user]hi\n[assistant]ho\n[user]be brief\n\ngo\n[assistant]"


def test_developer_as_it_is(prompt_of: Any) -> None:
    """A template that renders developer messages gets them as such."""
    messages = [say("developer", "be brief"), say("user", "go")]
    assert prompt_of(TURNS, messages) == "[developer]be brief\n[user]go\n[assistant]"


@pytest.mark.parametrize("template", [STRICT, SILENT], ids=["strict", "silent"])
def test_developer_becomes_system(prompt_of: Any, template: str) -> None:
    """Where developer is refused or dropped, the instruction comes as system."""
    messages = [say("developer", "be brief"), say("user", "go")]
    assert prompt_of(template, messages) == "[system]be brief\n[user]go\n[assistant]"


def test_system_and_developer_are_joined(prompt_of: Any) -> None:
    """A system and a developer message at the start become one where only one is allowed."""
    messages = [say("system", "be kind"), say("developer", "be brief"), say("user", "go")]
    assert prompt_of(STRICT, messages) == "[system]be kind\n\nbe brief\n[user]go\n[assistant]"


def test_no_system_role_at_all(prompt_of: Any) -> None:
    """A template without a system role gets the instruction before the user's words."""
    messages = [say("system", "be brief"), say("user", "go")]
    assert prompt_of(NO_SYSTEM, messages) == "[user]be brief\n\ngo\n[assistant]"


def test_instruction_that_repeats_other_text(prompt_of: Any) -> None:
    """A dropped instruction is noticed although its words stand elsewhere in the prompt."""
    messages = [say("user", "x"), say("assistant", "y"), say("system", "x"), say("user", "z")]
    assert prompt_of(SILENT, messages) == "[user]x\n[assistant]y\n[user]x\n\nz\n[assistant]"


def test_two_users(prompt_of: Any) -> None:
    """Two user turns in a row are kept where they may be, else joined."""
    messages = [say("user", "one"), say("user", "two")]
    assert prompt_of(TURNS, messages) == "[user]one\n[user]two\n[assistant]"
    assert prompt_of(STRICT, messages) == "[user]one\n\ntwo\n[assistant]"


def test_refused_in_every_shape(prompt_of: Any) -> None:
    """What no shape can mend is an invalid request with the template's first words."""
    template = "{{ raise_exception('I take ' + messages | length | string) }}"
    with pytest.raises(InvalidRequestError, match="I take 2") as caught:
        prompt_of(template, [say("user"), say("user")])
    assert caught.value.param == "messages"


def test_instruction_that_no_shape_keeps(prompt_of: Any) -> None:
    """A template that shows no message at all still renders; nothing better is to be had."""
    assert prompt_of("fixed", [say("system"), say("user")]) == "fixed"


def test_arguments_as_the_template_wants_them(prompt_of: Any) -> None:
    """Templates that walk over arguments get an object, those that join text get what came."""
    call = {"id": "c", "function": {"name": "f", "arguments": '{"city":"Bern"}'}}
    messages = [say("user"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prompt_of(WANTS_OBJECTS, messages) == "city=Bern"
    assert prompt_of(WANTS_TEXT, messages) == '<{"city":"Bern"}>'


def test_malformed_messages_keep_their_path(prompt_of: Any) -> None:
    """A fault of the messages themselves is reported as such, before any template runs."""
    with pytest.raises(InvalidRequestError) as caught:
        prompt_of(TURNS, [say("wizard")])
    assert caught.value.param == "messages[0].role"


def test_tool_messages_are_not_joined() -> None:
    """Each tool message answers its own call, so neighbours stay apart."""
    messages = [say("tool", "a"), say("tool", "b"), say("user", "c"), say("user", "d")]
    assert joined(messages) == [*messages[:2], say("user", "c\n\nd")]


def test_joining_keeps_calls_and_reasoning() -> None:
    """Joined assistant turns keep all their texts, calls and reasoning, in order."""
    first = {**say("assistant", "a"), "tool_calls": [1], "reasoning_content": "r", "name": "n"}
    second = {**say("assistant", ""), "tool_calls": [2], "reasoning_content": "s", "name": "m"}
    (message,) = joined([first, second])
    assert message == {
        "role": "assistant",
        "content": "a",
        "tool_calls": [1, 2],
        "reasoning_content": "r\n\ns",
        "name": "n",
    }


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])


@given(roles=st.lists(ROLES, min_size=1, max_size=8))
def test_every_shape_says_the_same(roles: list[str]) -> None:
    """No shape loses a text or changes the order, and the last has no instructing role left."""
    messages = [say(role, str(place)) for place, role in enumerate(roles)]
    for shape in shapes(messages):
        said = [part for message in shape for part in message["content"].split("\n\n")]
        assert said == [message["content"] for message in messages]
    assert not {message["role"] for message in shape} & {"system", "developer"}
    assert all(a["role"] != b["role"] or a["role"] == "tool" for a, b in pairwise(shape))
