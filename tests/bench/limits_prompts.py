"""Prompts through the engine, resident and streamed, and what they choose."""

from collections.abc import Sequence

from headrace_replicas.contract.settings import EngineSettings
from tests.bench.first_tokens import First, FirstToken, PromptRouting, Serve
from tests.bench.limits_extent import SHARES, TARGET_SHARE, Extent, slots_for
from tests.bench.limits_models import Model
from tests.bench.limits_report import FIRST_HEAD, FirstRow, Verdicts
from tests.bench.routing import Trace, locality, misses
from tests.bench.seats import Seat


def first_tokens(model: Model, extent: Extent, verdicts: Verdicts) -> Trace:
    """Prompts through the engine, with a quarter of the experts and with all.

    Returns:
        What the longest prompt chose.
    """
    chunk_tokens = EngineSettings().prefill_chunk_tokens
    print(f"\n{FIRST_HEAD}", flush=True)
    longest: Trace | None = None
    with Seat(Serve(folder=model.folder, chunk_tokens=chunk_tokens)) as resident:
        for length in extent.prompts_within(model.context_tokens):
            prompt = model.text(length, length)
            found = resident.do(FirstToken(prompt=prompt))
            warm, longest = streamed_first(model, prompt, chunk_tokens, cold=False)
            cold = streamed_first(model, prompt, chunk_tokens, cold=True)[0]
            row = FirstRow(
                prompt_tokens=length,
                chunk_tokens=chunk_tokens,
                resident=found,
                warm=warm,
                cold=cold,
            )
            print(row, flush=True)
            judge_first(row, model, verdicts)
    assert longest is not None
    return longest


def streamed_first(
    model: Model, prompt: Sequence[int], chunk_tokens: int, *, cold: bool
) -> tuple[First, Trace]:
    """With an engine of its own, so that its slots are empty; and what the prompt chose."""
    slots = slots_for(model, TARGET_SHARE)
    with Seat(Serve(folder=model.folder, chunk_tokens=chunk_tokens, slots=slots)) as served:
        return served.do(FirstToken(prompt=prompt, cold=cold)), served.do(PromptRouting())


def judge_first(row: FirstRow, model: Model, verdicts: Verdicts) -> None:
    """A prompt's counts: experts read once for each chunk, and once in all where one chunk does."""
    name = f"{model.name}, prompt of {row.prompt_tokens}, chunks of {row.chunk_tokens}"
    verdicts.check(row.same, f"{name}: the first token and its log probabilities are equal")
    for first in (row.warm, row.cold):
        done = first.work
        verdicts.check(
            done.hits + done.misses == first.needed,
            f"{name}: {done.hits + done.misses} hits and misses, {first.needed} needed",
        )
        verdicts.check(
            done.read_bytes == done.misses * first.expert_bytes,
            f"{name}: {done.read_bytes} bytes read for {done.misses} misses",
        )
        if row.prompt_tokens <= row.chunk_tokens:
            verdicts.check(
                first.touched <= done.misses <= first.needed,
                f"{name}: {done.misses} experts read, {first.touched} chosen",
            )
    # Two decode steps belong to the first token, and may read what has left meanwhile.
    aim = f"{model.name}: prompt of {row.prompt_tokens}, expert bytes read by touched = 1.0"
    verdicts.target(row.read_ratio <= 1.05, aim, f"{row.read_ratio:.3f}")


def routing_lines(model: Model, trace: Trace) -> list[str]:
    """How the routing looks, and what caches make of it; to be compared with trained models."""
    found = locality(trace, model.experts)
    settling = len(trace) // 4
    hits = [misses(trace, slots=slots_for(model, share), settling=settling) for share in SHARES]
    usage = (
        f"routing of {len(trace)} tokens: entropy {found.entropy:.3f} of the most; of a token's "
        f"experts the token before used {found.kept:.1%} (by chance {found.by_chance:.1%}), one "
        f"of the 8 before {found.recent:.1%}"
    )
    return [
        usage,
        *(
            f"  slots for {share:.1%}: hits {counted.hit_ratio:.3f}, "
            f"the best policy (Belady) {counted.best_hit_ratio:.3f}"
            for share, counted in zip(SHARES, hits, strict=True)
        ),
    ]
