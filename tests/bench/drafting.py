"""Decode with drafts beside decode without, in one run.

    python -m tests.bench.drafting [FOLDER] [--device gpu|cpu] [--tokens 96]

Without a folder the demo model is used. Prints, for each draft model, number of guesses, share of
experts in memory and schedule: the rate of tokens as a ratio of that without drafts (by CPU time
on the CPU), the share of guesses that were accepted, runs of the model a token, and the ratio when
drafting may stop itself.
The draft model `told` costs nothing and is always right: the most that drafts can give. `itself` is
the model again, and `noisy` the model with parameters that are a little off. Fails only when a
token differs from those without drafts (on the CPU, where the bits are the same).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_replicas.engine.drafts.batch import DraftCounters, DraftedBatch, DraftLimits
from headrace_replicas.engine.drafts.policy import Pace, most_drafts
from headrace_replicas.engine.drafts.proposer import Proposer
from headrace_replicas.engine.experts.schedule import Schedule, with_schedule
from headrace_replicas.engine.loading import DeviceChoice, LoadedModel, Streaming, load
from headrace_replicas.engine.model_sizes import experts_per_token, measure
from headrace_replicas.engine.sampling import Sampler, greedy
from headrace_replicas.engine.steady_batch import SteadyBatchGenerator
from tests.support.drafts import perturbed
from tests.support.engines import DEMO_FOLDER

ALWAYS = Pace(phase="drafting", left_tokens=10**9)
PROMPTS = 2
WORKERS = 12
CLOCK = SystemClock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row.

    Attributes:
        draft: `told`, `itself` or `noisy`.
        tokens: Guesses of a pass.
        share: Experts in memory.
        schedule: How missing ones are fetched.
    """

    draft: str
    tokens: int
    share: float = 1.0
    schedule: Schedule = "layers"


CASES = (
    *(Case(draft="told", tokens=tokens) for tokens in (1, 2, 3, 4)),
    *(Case(draft=draft, tokens=2) for draft in ("itself", "noisy")),
    *(
        Case(draft=draft, tokens=2, share=0.5, schedule=schedule)
        for draft in ("told", "noisy")
        for schedule in ("layers", "speculate")
    ),
)


class _Place:
    """The cache of a model that only needs to know where it is."""

    def __init__(self) -> None:
        self.offset = 0
        self.state: list[Any] = []

    def is_trimmable(self) -> bool:
        return True

    def trim(self, tokens: int) -> int:
        self.offset -= tokens
        return tokens


class Told:
    """A draft model that was told the answers.

    Args:
        vocabulary: How many tokens there are.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._texts: dict[GenerateRequest, tuple[int, ...]] = {}
        self._text: tuple[int, ...] = ()

    def tell(self, request: GenerateRequest, answer: Sequence[int]) -> None:
        """What is said to a request."""
        self._texts[request] = (*request.prompt_ids, *answer)

    def begin(self, request: GenerateRequest) -> None:
        """Which request comes next."""
        self._text = self._texts.get(request, request.prompt_ids)

    def make_cache(self) -> list[_Place]:
        """As mlx-lm's models do."""
        return [_Place()]

    def __call__(self, tokens: mx.array, cache: list[_Place]) -> mx.array:
        """Logits after the last token, shape (1, 1, vocabulary)."""
        cache[0].offset += tokens.shape[1]
        place = min(cache[0].offset, len(self._text) - 1)
        right = mx.arange(self._vocabulary) == self._text[place]
        return mx.where(right, 0.0, -mx.inf).reshape(1, 1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one way of decoding gave.

    Attributes:
        said: The tokens of each prompt.
        spent_s: Seconds of decoding.
    """

    said: tuple[tuple[int, ...], ...]
    spent_s: float


def prompts(checkpoint: Checkpoint, tokens: int) -> list[GenerateRequest]:
    """Seeded requests that nothing but their limit ends."""
    return [
        GenerateRequest(
            request_id=str(number),
            attempt=1,
            prompt_ids=tuple(1 + (7 * number + 13 * place) % 97 for place in range(24)),
            sampling=SamplingParams(temperature=0.8),
            seed=number,
            max_tokens=tokens,
            stop_ids=frozenset(),
            model="bench",
            fingerprint=checkpoint.fingerprint,
        )
        for number in range(PROMPTS)
    ]


def decode(model: Any, requests: Sequence[GenerateRequest], told: Told, batch: Any = None) -> Run:
    """One request after the other; prefill does not count, that of the draft model does."""
    device = mx.default_device()
    generator = SteadyBatchGenerator(
        model, max_batch=1, prefill_chunk_tokens=512, stream=mx.default_stream(device)
    )
    if batch is not None:
        generator.decode_in(batch)
    said, spent_s = [], 0.0
    for request in requests:
        generator.insert(
            [[*request.prompt_ids]],
            max_tokens=[request.max_tokens],
            samplers=[Sampler(request)],
        )
        told.begin(request)
        tokens: list[int] = []
        while len(tokens) < request.max_tokens:
            began_s = _now_s()
            _, responses = generator.next()
            tokens += [response.token for response in responses]
            spent_s += (_now_s() - began_s) if len(tokens) > 1 else 0.0
        said.append(tuple(tokens))
        told.tell(request, tokens)
    return Run(said=tuple(said), spent_s=spent_s)


def _now_s() -> float:
    """On the CPU the process's own CPU time, which the machine's other work disturbs less."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return time.process_time() if on_cpu else time.perf_counter()


def main() -> int:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_FOLDER)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    options = parser.parse_args()
    checkpoint = read_checkpoint(options.folder)
    loaded = {share: _loaded(checkpoint, options.device, share) for share in (1.0, 0.5)}
    told = Told(checkpoint.vocab_size)
    drafts: dict[str, Any] = {
        "told": told,
        "itself": loaded[1.0].model,
        "noisy": perturbed(_loaded(checkpoint, options.device, 1.0)).model,
    }
    print(
        f"{'draft':<7} {'guesses':>7} {'experts':>8} {'schedule':<10} {'of without':>10} "
        f"{'accepted':>9} {'runs a token':>13} {'by itself':>10}  same"
    )
    differing = 0
    for case in CASES:
        differing += _row(case, loaded[case.share], drafts[case.draft], told, options.tokens)
    print(f"drafting: {differing} tokens differ from those without drafts")
    return 1 if differing and options.device == "cpu" else 0


def _row(case: Case, loaded: LoadedModel, draft: Any, told: Told, tokens: int) -> int:
    model: Any = loaded.model
    if loaded.streamed is not None:
        model = with_schedule(model, loaded.streamed, case.schedule, 1 + case.tokens)
    requests = prompts(loaded.checkpoint, tokens)
    counters = DraftCounters()
    decode(model, requests[:1], told)  # warms up
    without = decode(model, requests, told)
    always = decode(model, requests, told, _batch(case, loaded, model, draft, counters, ALWAYS))
    again = decode(model, requests, told)
    chosen = _batch(case, loaded, model, draft, DraftCounters(), Pace())
    by_itself = decode(model, requests, told, chosen)
    steps = PROMPTS * tokens
    bare_s = (without.spent_s + again.spent_s) / 2
    same = sum(
        one == other
        for run in (always, by_itself)
        for said, wanted in zip(run.said, without.said, strict=True)
        for one, other in zip(said, wanted, strict=True)
    )
    print(
        f"{case.draft:<7} {case.tokens:>7} {case.share:>8.0%} {case.schedule:<10} "
        f"{bare_s / always.spent_s:>10.2f} {counters.acceptance_ratio:>9.2f} "
        f"{(steps - counters.accepted) / steps:>13.2f} {bare_s / by_itself.spent_s:>10.2f}  "
        f"{same} of {2 * steps}",
        flush=True,
    )
    return 2 * steps - same


def _batch(
    case: Case, loaded: LoadedModel, model: Any, draft: Any, counters: DraftCounters, pace: Pace
) -> DraftedBatch:
    vocabulary = loaded.checkpoint.vocab_size
    tokens = case.tokens
    if loaded.streamed is not None:
        top_k = experts_per_token(loaded.checkpoint.config) or 1
        tokens = most_drafts(tokens, top_k=top_k, slots=loaded.streamed.streams[0].capacity)
    return DraftedBatch(
        model,
        fallback_sampler=greedy,
        proposer=Proposer(draft, vocabulary=vocabulary, target_vocabulary=vocabulary),
        limits=DraftLimits(
            tokens=tokens,
            context_tokens=loaded.checkpoint.context_tokens,
            prefill_tokens=512,
            same_bits=True,
        ),
        counters=counters,
        clock=CLOCK,
        pace=pace,
    )


def _loaded(checkpoint: Checkpoint, device: DeviceChoice, share: float) -> LoadedModel:
    if share == 1:
        return load(checkpoint, device=device, dtype="auto")
    experts = measure(checkpoint, dtype="auto", on_gpu=device == "gpu").experts
    return load(
        checkpoint,
        device=device,
        dtype="auto",
        streaming=Streaming(
            slots=int(share * experts),
            workers=WORKERS,
            clock=CLOCK,
            on_progress=lambda: None,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
