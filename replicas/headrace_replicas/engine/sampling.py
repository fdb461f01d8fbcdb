"""Position-keyed sampling: a draw depends on (seed, choice, position, logits) and nothing else.

No generator keeps state between tokens, so a stream that moves to another engine in mid-answer
draws there exactly what it would have drawn here.
"""

from collections.abc import Callable

import mlx.core as mx

from headrace_replicas.contract.requests import GenerateRequest, SamplingParams

_MASK_64 = (1 << 64) - 1

Draw = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


def draw_key(seed: int, choice: int, position: int) -> mx.array:
    """The random key of one draw.

    The three numbers are folded by SplitMix64 (Steele, Lea, Flood 2014), whose finaliser spreads
    neighbouring positions and seeds over the whole 64-bit space.

    Returns:
        An MLX key, shape (2,), uint32.
    """
    state = seed & _MASK_64
    for part in (choice, position):
        state = _splitmix(state ^ _splitmix(part & _MASK_64))
    return mx.random.key(state)


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def greedy(logprobs: mx.array) -> mx.array:
    """The most likely token of each row; shape (batch, vocabulary) to (batch,)."""
    return mx.argmax(logprobs, axis=-1)


class Sampler:
    """Draws the tokens of one choice, in order, starting at an absolute output position.

    The generator calls it once for each output token. In `exact` resume the first calls return
    the tokens that were delivered before instead of drawing.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._by_decode = request.resume_mode == "exact"
        self._params = request.sampling
        self._seed = request.seed
        self._choice = request.choice
        self._position = 0 if self._by_decode else len(request.output_ids)
        self._forced = request.output_ids if self._by_decode else ()

    @property
    def replays_by_decode(self) -> bool:
        """Whether the request wants the bits of single decode steps."""
        return self._by_decode

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw one token from log probabilities of shape (1, vocabulary); shape (1,)."""
        token = self.draw_ahead(logprobs, 0)
        self._position += 1
        return token

    def draw_ahead(self, logprobs: mx.array, ahead: int) -> mx.array:
        """What the call after so many others would draw; nothing moves on."""
        position = self._position + ahead
        if position < len(self._forced):
            return mx.array([self._forced[position]], dtype=mx.uint32)
        if self._params.temperature == 0:
            return greedy(logprobs)
        kept = restrict(logprobs * (1.0 / self._params.temperature), self._params)
        return mx.random.categorical(kept, key=draw_key(self._seed, self._choice, position))


def foresee(sampler: Draw, logits: mx.array, ahead: int) -> mx.array:
    """A guess of the token that a sampler will draw, from the logits of a draft model.

    It uses the very random numbers of that draw, so that models which agree about the distribution
    agree about the token too, at any temperature.

    Args:
        sampler: `greedy` or a `Sampler`.
        logits: Shape (1, vocabulary).
        ahead: Draws before that one.

    Returns:
        Shape (1,).
    """
    return sampler.draw_ahead(logits, ahead) if isinstance(sampler, Sampler) else sampler(logits)


def restrict(logprobs: mx.array, params: SamplingParams) -> mx.array:
    """Set the log probability of every token outside top_k, top_p and min_p to minus infinity.

    The filters apply in that order, after the temperature, as vLLM and Hugging Face apply them.
    They are not compiled: `mx.compile` would build a new kernel for each value that a client
    sends. Ties at a threshold are all kept.

    Args:
        logprobs: Shape (1, vocabulary); need not be normalised.
        params: Which filters to apply.
    """
    vocabulary = logprobs.shape[-1]
    if 0 < params.top_k < vocabulary:
        weakest = mx.min(mx.topk(logprobs, params.top_k, axis=-1), axis=-1, keepdims=True)
        logprobs = mx.where(logprobs < weakest, -mx.inf, logprobs)
    if params.top_p < 1:
        ascending = mx.sort(logprobs, axis=-1)
        mass_up_to = mx.cumsum(mx.softmax(ascending, axis=-1), axis=-1)
        dropped = mx.sum(mass_up_to <= 1 - params.top_p, axis=-1, keepdims=True)
        weakest = mx.take_along_axis(ascending, mx.minimum(dropped, vocabulary - 1), axis=-1)
        logprobs = mx.where(logprobs < weakest, -mx.inf, logprobs)
    if params.min_p > 0:
        strongest = mx.max(logprobs, axis=-1, keepdims=True)
        floor = strongest + mx.log(mx.array(params.min_p))
        logprobs = mx.where(logprobs < floor, -mx.inf, logprobs)
    return logprobs


class Penalties:
    """Repetition, presence and frequency penalties of one choice.

    Presence and frequency look at the output alone, repetition at prompt and output, as in vLLM.
    Output that earlier attempts delivered counts as output.
    """

    def __init__(self, request: GenerateRequest, vocabulary: int) -> None:
        self._params = request.sampling
        replayed_by_prefill = request.output_ids if request.resume_mode == "fast" else ()
        self._counts = _histogram(replayed_by_prefill, vocabulary)
        self._in_prompt = _histogram(request.prompt_ids, vocabulary) > 0
        self._started = False

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        """Penalise logits of shape (1, vocabulary).

        Args:
            context: All token ids so far; on every call but the first its last one is the
                output token drawn before.
            logits: Shape (1, vocabulary).
        """
        if self._started:
            self._counts = self._counts.at[context[-1]].add(1)
        self._started = True
        params, seen = self._params, self._counts > 0
        if params.repetition_penalty != 1:
            scaled = mx.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = mx.where(mx.logical_or(seen, self._in_prompt), scaled, logits)
        return (
            logits - params.presence_penalty * seen - params.frequency_penalty * self._counts
        ).astype(logits.dtype)


def _histogram(token_ids: tuple[int, ...], vocabulary: int) -> mx.array:
    counts = mx.zeros((vocabulary,), dtype=mx.int32)
    return counts.at[mx.array(token_ids, dtype=mx.int32)].add(1) if token_ids else counts


def logits_processors(request: GenerateRequest, vocabulary: int) -> list[LogitsProcessor]:
    """What changes the logits of one choice before a token is drawn; empty for most requests."""
    params = request.sampling
    processors: list[LogitsProcessor] = []
    penalised = (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
    if penalised:
        processors.append(Penalties(request, vocabulary))
    if params.logit_bias:
        bias = mx.zeros((vocabulary,), dtype=mx.float32)
        token_ids, values = zip(*params.logit_bias, strict=True)
        bias = bias.at[mx.array(token_ids)].add(mx.array(values, dtype=mx.float32))
        processors.append(lambda _context, logits: logits + bias)
    return processors
