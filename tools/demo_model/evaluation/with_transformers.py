"""Accuracy per skill of an exported checkpoint with `transformers`, on held-out prompts.

The 4-bit codes are expanded to float32, so the weights are exactly those that MLX uses. Also
measures how the experts are used (`--experts`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tools.demo_model.evaluation import scoring
from tools.demo_model.evaluation.expert_use import expert_use
from tools.demo_model.generator.conversation import Dialog
from tools.demo_model.generator.held_out import evaluation_sets, unseen_words
from tools.demo_model.generator.material import load_material
from tools.demo_model.paths import MODEL_DIR
from tools.demo_model.training.quantisation import BITS, ROUTER_BITS, Packed, expand

_SHORT_PROMPT_TOKENS: Final = 600
_STORIES: Final = 10
_LONG_BATCH: Final = 4

Run = tuple[list[int], list[int]]
"""Prompt and answer in tokens."""


def _expanded(weights: dict[str, Tensor], name: str) -> Tensor:
    bits = ROUTER_BITS if name.endswith("mlp.gate") else BITS
    return expand(Packed(*(weights[f"{name}.{part}"] for part in Packed._fields)), bits)


def _state(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The tensors of a checkpoint in float32, under the names of `transformers`."""
    state: dict[str, Tensor] = {}
    for key, weight in weights.items():
        name, _, part = key.rpartition(".")
        if part != "weight" or ".switch_mlp." in name:
            continue
        is_quantised = f"{name}.scales" in weights
        state[key] = _expanded(weights, name) if is_quantised else weight.float()
    for i in range(layers):
        base = f"model.layers.{i}.mlp"
        gate, up, down = (
            _expanded(weights, f"{base}.switch_mlp.{part}_proj") for part in ("gate", "up", "down")
        )
        state[f"{base}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        state[f"{base}.experts.down_proj"] = down
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def load_model(path: Path) -> Qwen3MoeForCausalLM:
    """The model of a checkpoint folder, with its 4-bit weights in float32."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        weights |= load_file(shard)
    drop = ("architectures", "torch_dtype", "quantization", "quantization_config")
    kept = {key: value for key, value in config.items() if key not in drop}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**kept))
    model.load_state_dict(_state(weights, config["num_hidden_layers"]))
    return model.eval()


@torch.no_grad()
def _generate(
    model: Qwen3MoeForCausalLM, prompts: list[list[int]], limit: int, stop: list[int]
) -> list[list[int]]:
    """Greedy answers in tokens, without the token that ended them."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), stop[-1])
    mask = torch.zeros_like(ids)
    for r, prompt in enumerate(prompts):
        ids[r, width - len(prompt) :] = torch.tensor(prompt)
        mask[r, width - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop[-1],
    )
    rows = []
    for row in out[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in stop), len(row))
        rows.append(row[:end])
    return rows


class _Examiner:
    """Asks the questions of one skill after the other and keeps the report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
        config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
        self._stop: list[int] = config["eos_token_id"]
        self.model = load_model(options.model)
        self.report: dict[str, Any] = {"scores": {}, "failures": []}
        self.runs: list[Run] = []

    def examine(self, skill: str, dialogs: list[Dialog]) -> None:
        """Score one skill."""
        thinking = self._options.thinking
        cases = scoring.cases(skill, dialogs, self._encode, thinking=thinking)
        cases.sort(key=lambda case: len(case.prompt_ids))
        size = _LONG_BATCH if skill in scoring.LONG_SKILLS else self._options.batch
        limit = scoring.answer_limit_tokens(skill, thinking=thinking)
        right = 0
        for start in range(0, len(cases), size):
            part = cases[start : start + size]
            outs = _generate(self.model, [case.prompt_ids for case in part], limit, self._stop)
            right += sum(self._judge(case, out) for case, out in zip(part, outs, strict=True))
        self.report["scores"][skill] = [right, len(cases)]

    def write(self) -> None:
        """Write the report so far."""
        text = json.dumps(self.report, indent=1, ensure_ascii=False)
        self._options.out.write_text(text, encoding="utf-8")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _judge(self, case: scoring.Case, out: list[int]) -> bool:
        self.runs.append((case.prompt_ids, out))
        text = self._tokenizer.decode(out, skip_special_tokens=False)
        answer = scoring.without_thought(text)
        ok = scoring.is_right(case, answer)
        if not ok:
            self.report["failures"].append(scoring.answered(case, answer))
        return ok


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("model", type=Path, nargs="?", default=MODEL_DIR)
    add("--out", type=Path, required=True)
    add("--prompts", type=int, default=40)
    add("--long-prompts", type=int, default=16, help="prompts of skills with long ones")
    add("--batch", type=int, default=20)
    add("--thinking", action="store_true")
    add("--seconds", type=float, default=1e9, help="begin no new skill after this time")
    add("--skills", nargs="*", help="only these")
    add("--words", type=Path, help="file with words, for the row `unseen_words`")
    add("--experts", action="store_true", help="measure how the experts are used")
    return parser.parse_args()


def _sets(options: argparse.Namespace) -> dict[str, list[Dialog]]:
    """The conversations of each skill that is asked for."""
    material = load_material()
    sets = evaluation_sets(material, options.prompts)
    if options.words:
        words = options.words.read_text(encoding="utf-8").split()
        sets["unseen_words"] = unseen_words(material, words, options.prompts)
    most = dict.fromkeys(scoring.LONG_SKILLS, options.long_prompts) | {"story": _STORIES}
    return {
        skill: dialogs[: most.get(skill)]
        for skill, dialogs in sets.items()
        if not options.skills or skill in options.skills
    }


def main() -> None:
    """Print and write the accuracy of each skill."""
    options = _parsed()
    began_s = time.time()
    examiner = _Examiner(options)
    for skill, dialogs in _sets(options).items():
        if time.time() - began_s > options.seconds:
            break
        examiner.examine(skill, dialogs)
        print(skill, examiner.report["scores"][skill], round(time.time() - began_s), flush=True)
        examiner.write()
    if options.experts:
        short = [run for run in examiner.runs if len(run[0]) < _SHORT_PROMPT_TOKENS]
        examiner.report["experts"] = expert_use(examiner.model, short)
        for row in examiner.report["experts"]:
            print({name: round(value, 3) for name, value in row.items()}, flush=True)
        examiner.write()


if __name__ == "__main__":
    main()
