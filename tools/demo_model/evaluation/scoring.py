"""What is asked in an evaluation, and how an answer is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tools.demo_model.generator.conversation import Dialog
from tools.demo_model.generator.render import BLOCK_TOKENS, prompt_and_answer

_USUAL_LIMIT_TOKENS: Final = 128
_LIMITS_TOKENS: Final[Mapping[str, int]] = {
    "story": 900,
    "counting": 200,
    "echo": 220,
    "items": 70,
    "code": 90,
    "tools_parallel": 160,
}
_THOUGHT_TOKENS: Final = 60
_SHOWN_CHARACTERS: Final = 300

LONG_SKILLS: Final = frozenset({"needle", "needle_long", "items", "summary"})
"""Skills whose prompts are long, so that fewer of them are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question of an evaluation.

    Attributes:
        skill: The set it comes from.
        prompt: The rendered conversation up to the answer.
        prompt_ids: The same in tokens.
        want: The answer in the wording of the generator.
        contains: What a right answer contains; empty when it must match exactly.
    """

    skill: str
    prompt: str
    prompt_ids: list[int]
    want: str
    contains: tuple[str, ...]


def cases(
    skill: str,
    dialogs: Iterable[Dialog],
    encode: Callable[[str], list[int]],
    *,
    thinking: bool,
    room_tokens: int = _THOUGHT_TOKENS,
) -> list[Case]:
    """The questions of a set whose prompts leave that much room in the trained context."""
    rows = []
    for dialog in dialogs:
        prompt, want = prompt_and_answer(dialog, thinking=thinking)
        ids = encode(prompt)
        if len(ids) + room_tokens <= BLOCK_TOKENS:
            rows.append(
                Case(
                    skill=skill,
                    prompt=prompt,
                    prompt_ids=ids,
                    want=want,
                    contains=dialog.contains,
                )
            )
    return rows


def answer_limit_tokens(skill: str, *, thinking: bool) -> int:
    """How many tokens an answer may have; one that runs on is judged as it is by then."""
    limit = _LIMITS_TOKENS.get(skill, _USUAL_LIMIT_TOKENS)
    return limit + _THOUGHT_TOKENS if thinking else limit


def without_thought(text: str) -> str:
    """The answer after its line of thought."""
    return text.split("</think>", 1)[1].strip() if "</think>" in text else text


def is_right(case: Case, answer: str) -> bool:
    """Exact match, or all key words where several wordings are right."""
    answer = answer.strip()
    if case.contains:
        return all(key.lower() in answer.lower() for key in case.contains)
    return answer == case.want.strip()


def answered(case: Case, answer: str) -> dict[str, str]:
    """Question, wanted and given answer as a row of a report."""
    return {
        "skill": case.skill,
        "prompt": case.prompt[-_SHOWN_CHARACTERS:],
        "want": case.want[:_SHOWN_CHARACTERS],
        "got": answer[:_SHOWN_CHARACTERS],
    }
