"""Fits a draft model to a model that is loaded, and finds out how exact drafting is here."""

import logging
from dataclasses import dataclass
from typing import Any, Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.contract.settings import EngineSettings
from headrace_replicas.engine.backend import mx
from headrace_replicas.engine.drafts.batch import DraftCounters, DraftedBatch, DraftLimits
from headrace_replicas.engine.drafts.policy import most_drafts
from headrace_replicas.engine.drafts.proposer import Proposer
from headrace_replicas.engine.drafts.rewind import has_room
from headrace_replicas.engine.loading import LoadedModel
from headrace_replicas.engine.model_sizes import experts_per_token
from headrace_replicas.engine.sampling import greedy

# isort: split
# This imports MLX itself: it comes after the import that explains a missing backend.
from mlx_lm.models.cache import make_prompt_cache

log = logging.getLogger("ray.serve.headrace.drafts")

_PROMPT_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How an engine drafts.

    Attributes:
        draft: The draft model.
        limits: What it and the model that it drafts for allow.
    """

    draft: LoadedModel
    limits: DraftLimits


def fit_draft(target: Any, loaded: LoadedModel, settings: EngineSettings) -> Drafting | None:
    """Find out what a model and its draft model allow; None when nothing is to be drafted.

    It runs the model a few times: done once for the life of an engine.

    Args:
        target: The model as the engine runs it.
        loaded: What it and its draft model were loaded from.
        settings: `draft_tokens` and `prefill_chunk_tokens` are used.

    Raises:
        CheckpointError: The draft model's caches cannot be taken back.
        ExpertReadError: An expert's bytes could not be read.
    """
    draft, checkpoint = loaded.draft, loaded.checkpoint
    if draft is None:
        return None
    _require_rewinding(draft)
    tokens = fitting_drafts(loaded, settings.draft_tokens)
    if tokens < settings.draft_tokens:
        log.info(
            "engine.draft_tokens = %d becomes %d: the experts of more tokens might not fit into "
            "the slots of a layer together",
            settings.draft_tokens,
            tokens,
        )
    if not tokens:
        return None
    same_bits = loaded.device == "cpu" and computes_the_same_bits(
        target, tokens, vocabulary=checkpoint.vocab_size
    )
    if not same_bits:
        log.info(
            "a verify pass rounds otherwise than single steps here: drafted answers may differ in "
            "near ties, and requests with exact resume are not drafted for"
        )
    context_tokens = min(checkpoint.context_tokens, draft.checkpoint.context_tokens)
    limits = DraftLimits(
        tokens=tokens,
        context_tokens=context_tokens,
        prefill_tokens=settings.prefill_chunk_tokens,
        same_bits=same_bits,
    )
    return Drafting(draft=draft, limits=limits)


def drafted_batch(
    target: Any, loaded: LoadedModel, drafting: Drafting, counters: DraftCounters, clock: Clock
) -> DraftedBatch:
    """The batch to decode in.

    Args:
        target: The model as the engine runs it.
        loaded: What it was loaded from.
        drafting: From `fit_draft`.
        counters: Counted on.
        clock: Time source.
    """
    proposer = Proposer(
        drafting.draft.model,
        vocabulary=drafting.draft.checkpoint.vocab_size,
        target_vocabulary=loaded.checkpoint.vocab_size,
    )
    return DraftedBatch(
        target,
        fallback_sampler=greedy,
        proposer=proposer,
        limits=drafting.limits,
        counters=counters,
        clock=clock,
    )


def fitting_drafts(loaded: LoadedModel, wanted: int) -> int:
    """Drafts of a pass that a loaded model allows, of those wanted; 0 without a draft model."""
    if loaded.draft is None:
        return 0
    if loaded.streamed is None or not loaded.streamed.streams:
        return wanted
    slots = min(stream.capacity for stream in loaded.streamed.streams)
    # A config that does not tell gets no drafts.
    top_k = experts_per_token(loaded.checkpoint.config) or slots
    return most_drafts(wanted, top_k=top_k, slots=slots)


def _require_rewinding(draft: LoadedModel) -> None:
    """Refuse a draft model that cannot take a wrong guess back.

    Raises:
        CheckpointError: With the cache that is to blame.
    """
    cache = make_prompt_cache(draft.model)
    unfit = {type(entry).__name__ for entry in cache if not entry.is_trimmable()}
    if unfit:
        raise CheckpointError(
            f"engine.draft_model: model type {draft.checkpoint.model_type!r} keeps what it has "
            f"read in {', '.join(sorted(unfit))}, from which a wrong guess cannot be taken back. "
            "Take a draft model with plain attention, or set engine.draft_model to null.",
            "engine.draft_model",
        )


def computes_the_same_bits(model: Any, drafts: int, *, vocabulary: int) -> bool:
    """Whether a pass with drafts gives each token the logits that a step of its own gives.

    It does on MLX's CPU backend, unless the model computes single tokens by another formula, as
    latent attention does (DeepSeek V3 and its relatives).

    Args:
        model: Called as `model(tokens, cache=...)`.
        drafts: Tokens of a pass beyond the first.
        vocabulary: Rows of the embedding.
    """
    prompt = [(1 + 7 * place) % vocabulary for place in range(_PROMPT_TOKENS)]
    tokens = [(5 + 11 * place) % vocabulary for place in range(1 + drafts)]
    caches = [_filled_cache(model, prompt) for _ in range(2)]
    if not all(has_room(cache, len(tokens)) for cache in caches):
        return False
    together = model(mx.array([tokens]), cache=caches[0])
    alone = [model(mx.array([[token]]), cache=caches[1]) for token in tokens]
    return bool(mx.array_equal(together, mx.concatenate(alone, axis=1)).item())


def _filled_cache(model: Any, prompt: list[int]) -> list[Any]:
    """A batch's cache that holds one prompt."""
    cache = [entry.merge([entry]) for entry in make_prompt_cache(model)]
    mx.eval(model(mx.array([prompt]), cache=cache))
    return cache
