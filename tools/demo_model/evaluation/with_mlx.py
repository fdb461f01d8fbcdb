"""Accuracy per skill of an exported checkpoint with `mlx-lm`, on held-out prompts.

On MLX's CPU backend the model computes in float32: there its bfloat16 is several times slower.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import batch_generate

from tools.demo_model.evaluation import scoring
from tools.demo_model.generator.held_out import evaluation_sets
from tools.demo_model.generator.material import load_material
from tools.demo_model.paths import MODEL_DIR

_STORIES: Final = 8
_LONG_PROMPTS: Final = 20


class _Examiner:
    """The model, and the wrong answers that it gave."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._model, self._tokenizer = load(str(options.model))
        if mx.default_device().type == mx.DeviceType.cpu:
            self._model.set_dtype(mx.float32)
        self.failures: list[dict[str, str]] = []

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered prompt."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def right_answers(self, cases: list[scoring.Case]) -> int:
        """How many of the questions of one skill are answered right."""
        right = 0
        for start in range(0, len(cases), self._options.batch):
            part = cases[start : start + self._options.batch]
            limit = scoring.answer_limit_tokens(part[0].skill, thinking=self._options.thinking)
            prompts = [case.prompt_ids for case in part]
            answers = batch_generate(self._model, self._tokenizer, prompts, max_tokens=limit).texts
            right += sum(self._judge(*pair) for pair in zip(part, answers, strict=True))
        return right

    def _judge(self, case: scoring.Case, text: str) -> bool:
        answer = scoring.without_thought(text)
        ok = scoring.is_right(case, answer)
        if not ok:
            self.failures.append(scoring.answered(case, answer))
        return ok


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("model", type=Path, nargs="?", default=MODEL_DIR)
    add("--out", type=Path, required=True)
    add("--prompts", type=int, default=40)
    add("--batch", type=int, default=16)
    add("--thinking", action="store_true")
    add("--seconds", type=float, default=1e9, help="begin no new skill after this time")
    add("--skills", nargs="*", help="only these")
    return parser.parse_args()


def main() -> None:
    """Print and write the accuracy of each skill."""
    options = _parsed()
    examiner = _Examiner(options)
    began_s = time.time()
    scores: dict[str, dict[str, Any]] = {}
    most = dict.fromkeys(scoring.LONG_SKILLS, _LONG_PROMPTS) | {"story": _STORIES}
    for skill, dialogs in evaluation_sets(load_material(), options.prompts).items():
        if options.skills and skill not in options.skills:
            continue
        if time.time() - began_s > options.seconds:
            break
        asked = dialogs[: most.get(skill)]
        cases = scoring.cases(skill, asked, examiner.encode, thinking=options.thinking)
        right = examiner.right_answers(cases)
        seconds = round(time.time() - began_s)
        scores[skill] = {"right": right, "of": len(cases), "seconds": seconds}
        print(skill, scores[skill], flush=True)
        report = {"scores": scores, "failures": examiner.failures}
        text = json.dumps(report, indent=1, ensure_ascii=False)
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
