"""Accuracy per skill of the PyTorch model, with and without the rounding of the exported file."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.evaluation import scoring
from tools.demo_model.generator.held_out import evaluation_sets
from tools.demo_model.generator.material import Material
from tools.demo_model.training.model import Model, causal

_STORIES: Final = 24
_ROW_TOKENS: Final = 65536
_RIGHT_EXAMPLES: Final = 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One pass over the skills.

    Attributes:
        name: What it is called in the results.
        rounding: Share of the 4-bit rounding, from 0 to 1.
        thinking: Whether the model writes a thought first.
        skipped: Skills that are left out.
    """

    name: str
    rounding: float
    thinking: bool = False
    skipped: tuple[str, ...] = ()


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    material: Material,
    plan: Evaluation,
    *,
    per_skill: int,
    examples: Path,
    deadline_s: float,
) -> dict[str, float]:
    """The share of right answers for each skill, those with short answers first.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        material: What the prompts are made of.
        plan: What to evaluate.
        per_skill: Prompts of each skill (fewer stories).
        examples: The file that gets the wrong answers and a few right ones.
        deadline_s: The clock time after which no new group of skills begins.
    """
    scores: dict[str, float] = {}
    log: list[dict[str, object]] = []
    for limit, cases in _by_limit(tokenizer, material, plan, per_skill).items():
        if time.time() > deadline_s:
            break
        answers = _answers(model, tokenizer, cases, limit, plan.rounding)
        scores |= _scores(cases, answers, log)
    lines = (json.dumps(row, ensure_ascii=False) for row in log)
    examples.write_text("\n".join(lines), encoding="utf-8")
    return scores


def _scores(
    cases: list[scoring.Case], answers: list[str], log: list[dict[str, object]]
) -> dict[str, float]:
    """The share of right answers by skill; adds rows to the log."""
    marks: dict[str, list[bool]] = {}
    for case, answer in zip(cases, answers, strict=True):
        ok = scoring.is_right(case, answer)
        marks.setdefault(case.skill, []).append(ok)
        if not ok or len(marks[case.skill]) <= _RIGHT_EXAMPLES:
            log.append({"ok": ok, **scoring.answered(case, answer)})
    return {skill: sum(values) / len(values) for skill, values in marks.items()}


def _by_limit(
    tokenizer: Tokenizer, material: Material, plan: Evaluation, per_skill: int
) -> dict[int, list[scoring.Case]]:
    """The questions by the length that their answers may have, the shortest first."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    groups: dict[int, list[scoring.Case]] = {}
    for skill, dialogs in evaluation_sets(material, per_skill).items():
        if skill in plan.skipped:
            continue
        limit = scoring.answer_limit_tokens(skill, thinking=plan.thinking)
        groups.setdefault(limit, []).extend(
            scoring.cases(
                skill,
                dialogs[: _STORIES if skill == "story" else per_skill],
                encode,
                thinking=plan.thinking,
                room_tokens=min(limit, 100),
            )
        )
    return dict(sorted(groups.items()))


def _answers(
    model: Model, tokenizer: Tokenizer, cases: list[scoring.Case], limit: int, rounding: float
) -> list[str]:
    stop = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
    share = torch.tensor(rounding, device=model.embed.device)
    prompts = [case.prompt_ids for case in cases]
    outputs: dict[int, list[int]] = {}
    for group in _groups(prompts, limit, model.shape.context):
        outputs |= _greedy(model, {i: prompts[i] for i in group}, limit, stop, share)
    texts = (tokenizer.decode(outputs[i], skip_special_tokens=False) for i in range(len(cases)))
    return [scoring.without_thought(text) for text in texts]


def _groups(prompts: list[list[int]], limit: int, context: int) -> list[list[int]]:
    """Numbers of prompts of about the same length whose rows fit together on the device."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    groups: list[list[int]] = []
    shortest = 0
    for i in order:
        length = len(prompts[i])
        width = min(max(length, shortest + 64) + limit, context)
        has_room = bool(groups) and (len(groups[-1]) + 1) * width <= _ROW_TOKENS
        if has_room and length <= min(shortest + 64, context) * 1.6 + 64:
            groups[-1].append(i)
        else:
            groups.append([i])
            shortest = length
    return groups


@torch.no_grad()
def _greedy(
    model: Model, prompts: dict[int, list[int]], limit: int, stop: set[int | None], share: Tensor
) -> dict[int, list[int]]:
    """Greedy continuations by number; the whole row is computed again for each token.

    Simple, and fast on a GPU.
    """
    tokens = {i: list(prompt) for i, prompt in prompts.items()}
    live = list(prompts)
    for _ in range(limit):
        width = -(-max(len(tokens[i]) for i in live) // 32) * 32
        if width > model.shape.context:
            break
        picked = _next_tokens(model, [tokens[i] for i in live], width, share)
        going = [(i, token) for i, token in zip(live, picked, strict=True) if token not in stop]
        for i, token in going:
            tokens[i].append(token)
        live = [i for i, _ in going]
        if not live:
            break
    return {i: row[len(prompts[i]) :] for i, row in tokens.items()}


def _next_tokens(model: Model, rows: list[list[int]], width: int, share: Tensor) -> list[int]:
    """The most likely next token of each row, padded to that width on the right."""
    device = model.embed.device
    batch = torch.zeros((len(rows), width), dtype=torch.int64)
    for r, row in enumerate(rows):
        batch[r, : len(row)] = torch.tensor(row)
    ends = torch.tensor([len(row) - 1 for row in rows], device=device)
    h, _ = model.hidden(batch.to(device), share, causal, grouped=device.type == "cuda")
    at_end = h[torch.arange(len(rows), device=device), ends]
    return [int(token) for token in model.logits(at_end, share).argmax(-1)]
