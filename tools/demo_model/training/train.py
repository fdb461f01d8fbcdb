"""Train the demo model on one GPU, then export and evaluate it.

The data is generated while training runs, so no text is seen twice. The last quarter of the run
trains with the 4-bit rounding of the exported file in the forward pass.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.evaluation.while_training import Evaluation, evaluate
from tools.demo_model.generator.material import Material, load_material
from tools.demo_model.paths import MODEL_DIR
from tools.demo_model.training import schedule
from tools.demo_model.training.batches import Batch, batches
from tools.demo_model.training.document_attention import fused_losses, plain_losses
from tools.demo_model.training.export import export
from tools.demo_model.training.model import Losses, Model
from tools.demo_model.training.shape import Shape

_CHECKPOINT_EVERY_S: Final = 200.0
_REPORTED_STEPS: Final = (1, 10, 50)
_REPORT_EVERY_STEPS: Final = 200
_PLANS: Final = (
    Evaluation("4-bit", rounding=1.0),
    Evaluation("4-bit thinking", rounding=1.0, thinking=True, skipped=("story",)),
    Evaluation("bf16", rounding=0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """One training run; the names are those of the command's options."""

    tokenizer: Path
    out: Path
    steps: int
    minutes: float
    batch: int
    lr: float
    workers: int
    seed: int
    balance: float
    eval_seconds: float
    tiny: bool

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU for a tiny model."""
        return torch.device("cpu" if self.tiny else "cuda")

    @property
    def tokenizer_file(self) -> Path:
        """The file that `tokenizers` reads."""
        return self.tokenizer / "tokenizer.json"


def _parsed() -> RunSettings:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tokenizer", type=Path, default=MODEL_DIR, help="folder with tokenizer and template")
    add("--out", type=Path, required=True)
    add("--steps", type=int, default=9000)
    add("--minutes", type=float, default=1e9, help="end the schedule by then, short of --steps")
    add("--batch", type=int, default=32, help="blocks of 2048 tokens in a step")
    add("--lr", type=float, default=2e-3)
    add("--workers", type=int, default=14, help="generating processes; the data depends on it")
    add("--seed", type=int, default=1000)
    add("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    add("--eval-seconds", type=float, default=100.0)
    add("--tiny", action="store_true", help="small model on the CPU, to try the program")
    args = vars(parser.parse_args())
    args |= {"tokenizer": args["tokenizer"].resolve(), "out": args["out"].resolve()}
    return RunSettings(**args)


class _Progress:
    """Prints and keeps a row of figures now and then."""

    def __init__(self, began_s: float) -> None:
        self.history: list[dict[str, float]] = []
        self.seen_tokens = 0
        self._began_s = began_s
        self._marked_s = time.time()
        self._marked_tokens = 0

    def count(self, tokens: int) -> None:
        self.seen_tokens += tokens

    def report(self, step: int, done: float, figures: dict[str, Tensor]) -> None:
        """Print the figures of a step.

        Raises:
            SystemExit: The loss is not a number any more.
        """
        now = time.time()
        fresh = self.seen_tokens - self._marked_tokens
        row = {"step": step, "done": round(done, 4)}
        row |= {name: figure.item() for name, figure in figures.items()}
        row |= {
            "ktok_s": fresh / 1000 / (now - self._marked_s),
            "mtok": self.seen_tokens / 1e6,
            "s": now - self._began_s,
        }
        self._marked_s, self._marked_tokens = now, self.seen_tokens
        self.history.append(row)
        print(" ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        if not math.isfinite(row["loss"]):
            sys.exit("the loss is not finite; try a smaller --lr")


class _Checkpoints:
    """A safety net: the model so far, exported every few minutes."""

    def __init__(self, model: Model, settings: RunSettings) -> None:
        self._model = model
        self._settings = settings
        self._saved_s = time.time()

    def save_when_due(self) -> None:
        if time.time() - self._saved_s <= _CHECKPOINT_EVERY_S:
            return
        try:
            export(self._model, self._settings.tokenizer, self._settings.out / "checkpoint")
        except OSError as error:  # a full disk now must not end the run
            print(f"no checkpoint was written: {error}", flush=True)
        self._saved_s = time.time()


def _optimizer(model: Model, settings: RunSettings) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, fused=not settings.tiny
    )


class _Trainer:
    """The model, its optimizer and the share of rounding."""

    def __init__(self, model: Model, settings: RunSettings) -> None:
        self.model = model
        self.settings = settings
        self.share = torch.zeros((), device=settings.device)
        self._optimizer = _optimizer(model, settings)
        self._loss_of = (
            plain_losses(model)
            if settings.tiny
            else fused_losses(model, settings.batch, settings.device)
        )

    def step(self, batch: Batch, step: int, done: float) -> dict[str, Tensor]:
        """Learn from one batch; returns the figures to report."""
        rate = schedule.learning_rate_factor(step=step, done=done)
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.lr * rate
        self.share.fill_(schedule.rounding_share(done))
        losses: Losses = self._loss_of(batch, self.share)
        (losses.weighted + self.settings.balance * losses.balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "loss": losses.weighted,
            "assistant": losses.assistant,
            "balance": losses.balance,
            "norm": norm,
            "mix": self.share,
        }


def _train(model: Model, stream: Iterator[Batch], settings: RunSettings, began_s: float) -> None:
    """Train until the steps are made or the time is over, and write `history.json`."""
    trainer = _Trainer(model, settings)
    progress, checkpoints = _Progress(began_s), _Checkpoints(model, settings)
    step = 0
    while True:
        minutes = (time.time() - began_s) / 60
        done = schedule.done_ratio(
            step=step, steps=settings.steps, minutes=minutes, most_minutes=settings.minutes
        )
        if done >= 1:
            break
        batch = Batch(*(t.to(settings.device, non_blocking=True) for t in next(stream)))
        figures = trainer.step(batch, step, done)
        progress.count(batch.tokens.numel())
        step += 1
        if step in _REPORTED_STEPS or step % _REPORT_EVERY_STEPS == 0:
            progress.report(step, done, figures)
        checkpoints.save_when_due()
    seconds = time.time() - began_s
    print(f"trained {step} steps, {progress.seen_tokens / 1e6:.0f}M tokens in {seconds:.0f} s")
    (settings.out / "history.json").write_text(json.dumps(progress.history))


def _evaluate(model: Model, material: Material, settings: RunSettings) -> None:
    """Write `scores.json` after each plan, so that a late failure costs no earlier result."""
    tokenizer = Tokenizer.from_file(str(settings.tokenizer_file))
    deadline_s = time.time() + settings.eval_seconds
    results: dict[str, dict[str, float]] = {}
    for plan in _PLANS:
        began_s = time.time()
        results[plan.name] = evaluate(
            model,
            tokenizer,
            material,
            plan,
            per_skill=2 if settings.tiny else 100,
            examples=settings.out / f"examples-{plan.name.replace(' ', '-')}.jsonl",
            deadline_s=deadline_s,
        )
        seconds = time.time() - began_s
        print(plan.name, f"{seconds:.0f} s", json.dumps(results[plan.name]), flush=True)
        (settings.out / "scores.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    """Train, export to `OUT/model`, then evaluate."""
    settings = _parsed()
    # The workers are forked after a tokenizer was used; its threads would not survive that.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings.out.mkdir(parents=True, exist_ok=True)
    began_s = time.time()
    material = load_material()
    vocab = Tokenizer.from_file(str(settings.tokenizer_file)).get_vocab_size()
    torch.manual_seed(settings.seed)
    model = Model(Shape.tiny(vocab) if settings.tiny else Shape(vocab=vocab)).to(settings.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"parameters {count / 1e6:.1f}M", flush=True)
    stream = batches(
        settings.tokenizer_file,
        material,
        batch=settings.batch,
        seed=settings.seed,
        workers=settings.workers,
        pinned=not settings.tiny,
    )
    _train(model, stream, settings, began_s)
    del stream  # ends the workers
    torch.save(model.state_dict(), settings.out / "state.pt")
    export(model, settings.tokenizer, settings.out / "model")
    (settings.out / "exported").touch()
    _evaluate(model, material, settings)
    (settings.out / "finished").touch()


if __name__ == "__main__":
    main()
