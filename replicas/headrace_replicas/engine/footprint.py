"""What a model takes in memory and what a host gives, as numbers, and the arithmetic on them.

Pure: no files, no MLX. `model_sizes` measures a checkpoint, `memory_host` a host, and
`memory_plan` decides.

Laws: slots never take less memory when there are more of them; `slots_within` is the inverse of
`slot_bytes`; what is left for slots never shrinks when the host gives more.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final, Literal

PressureLevel = Literal["normal", "warn", "critical"]

# Prompt and answer of a usual chat request. Every place in the batch gets as much KV cache, and in
# any case one request of the whole context does.
_USUAL_REQUEST_TOKENS: Final = 2048
# mlx-lm's caches grow by this many tokens.
_CACHE_STEP_TOKENS: Final = 256
# A tenth of the limit stays free, or more where computing takes more: other processes grow too.
_HEADROOM_PARTS: Final = 10
# While experts stream another tenth is left to the page cache. Experts that fell out of their slots
# are read from there at memory speed, and public engines found that the largest cache that fits
# is slower than a smaller one, because it takes the page cache away.
_STREAMING_PARTS: Final = 5
# A layer's cache is copied when it grows and when a request joins the batch; one copy was measured,
# and MLX may be a layer ahead.
_CACHE_COPIES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayerSize:
    """The routed experts of one layer.

    Attributes:
        path: Where the layer is in the checkpoint (`model.layers.3.mlp`).
        experts: How many there are.
        read_bytes: What bringing one expert reads from the files.
        memory_bytes: What one expert takes in memory, in the type that the engine computes in.
    """

    path: str
    experts: int
    read_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The KV cache, in the type that the engine computes in.

    Attributes:
        token_bytes: For each token, in all layers that attend to everything.
        layer_token_bytes: The part of it that one layer keeps.
        window_token_bytes: For each token, in all layers that attend to a window.
        window_tokens: What such a layer keeps of a request at most.
        request_bytes: For each request, whatever its length: the state of recurrent layers.
    """

    token_bytes: int
    layer_token_bytes: int = 0
    window_token_bytes: int = 0
    window_tokens: int = 0
    request_bytes: int = 0

    def bytes_for(self, *, tokens: int, requests: int, context_tokens: int) -> int:
        """An upper bound for requests that decode together.

        Args:
            tokens: Of all requests together.
            requests: How many there are.
            context_tokens: Of one request at most.
        """
        window_tokens = min(context_tokens + _CACHE_STEP_TOKENS, self.window_tokens)
        return (
            tokens * self.token_bytes
            + requests * window_tokens * self.window_token_bytes
            + requests * self.request_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSize:
    """What computing takes beside weights and KV cache, at most.

    Attributes:
        process_bytes: The process itself, before it has loaded anything.
        load_bytes: While it loads: the largest tensor that is converted, as it lies in the file.
        token_bytes: For each token that is computed at a time: what a layer makes of it.
        context_bytes: For each token of the context, where attention unfolds what it has cached.
        pair_bytes: For each token that is computed and each of its context: attention scores.
        request_bytes: For each request that decodes: logits, and what sampling makes of them.
    """

    process_bytes: int = 0
    load_bytes: int = 0
    token_bytes: int = 0
    context_bytes: int = 0
    pair_bytes: int = 0
    request_bytes: int = 0

    def bytes_for(self, *, tokens: int, requests: int, context_tokens: int) -> int:
        """An upper bound for one step, and for the load before it.

        Args:
            tokens: Computed at a time: of a prompt, or one for each request.
            requests: How many decode together.
            context_tokens: Of one request at most.
        """
        step_bytes = (
            tokens * (self.token_bytes + context_tokens * self.pair_bytes)
            + context_tokens * self.context_bytes
            + requests * self.request_bytes
        )
        return self.process_bytes + max(step_bytes, self.load_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What one checkpoint takes.

    Attributes:
        file_bytes: All tensors in the files.
        unused_bytes: Those of them that are never read: towers for images and sound, and layers
            that only predict further tokens.
        resident_bytes: In memory: everything that is used and is no routed expert.
        lookup_bytes: The part of `resident_bytes` of which a token reads one row (an embedding).
        layers: The expert layers.
        top_k: Experts of a layer that one token uses.
        cache: The KV cache.
        working: What computing takes.
    """

    file_bytes: int
    unused_bytes: int
    resident_bytes: int
    lookup_bytes: int
    layers: tuple[ExpertLayerSize, ...]
    top_k: int
    cache: CacheSize
    working: WorkingSize = WorkingSize()

    @property
    def experts(self) -> int:
        """Experts of the layer that has most; 0 in a dense model."""
        return max((layer.experts for layer in self.layers), default=0)

    def slot_bytes(self, slots: int) -> int:
        """Memory of all layers with so many slots each; a layer takes no more than it has experts.

        Args:
            slots: Experts of a layer in memory at a time.
        """
        return sum(min(slots, layer.experts) * layer.memory_bytes for layer in self.layers)

    def slots_within(self, budget_bytes: int) -> int:
        """The most slots for each layer that fit into a budget; 0 when not even one fits."""
        fitting = bisect_right(range(self.experts + 1), budget_bytes, key=self.slot_bytes)
        return max(fitting - 1, 0)

    def missed_bytes(self, hit_ratio: float) -> float:
        """What a token reads from the files on average.

        Args:
            hit_ratio: Share of expert uses that find their expert in memory.
        """
        used = sum(min(self.top_k, layer.experts) * layer.read_bytes for layer in self.layers)
        return (1 - hit_ratio) * used

    @property
    def active_bytes(self) -> int:
        """What a token reads from memory at least: resident weights and its experts."""
        chosen = sum(min(self.top_k, layer.experts) * layer.memory_bytes for layer in self.layers)
        return self.resident_bytes - self.lookup_bytes + chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What a host can give to one engine.

    Attributes:
        limit_bytes: All of it that an engine may take now.
        total_bytes: The memory built in.
        source: What sets the limit, for a person.
        remedy: How to raise it; empty when it cannot be raised.
    """

    limit_bytes: int
    total_bytes: int
    source: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPressure:
    """How a host fares with its memory at one moment.

    Attributes:
        available_bytes: What this process could take now; pages of files that the system can take
            back are part of it.
        source: What sets that number, for a person.
        level: The system's own judgement, on a Mac; elsewhere always normal.
        swapped_bytes: Written to and read from swap since the host started; 0 where not known.
        stalled_s: Seconds since the host started in which some process waited for memory; 0 where
            not known.
    """

    available_bytes: int
    source: str
    level: PressureLevel = "normal"
    swapped_bytes: int = 0
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A model that is to run on a host; everything but the slots is settled.

    Attributes:
        sizes: What the model takes.
        host: What there is.
        context_tokens: Prompt and answer of one request, at most.
        max_batch: Requests that decode together.
        allocator_cache_bytes: Freed memory that MLX's allocator keeps.
        prefill_chunk_tokens: Of a prompt, computed at a time.
        draft: A draft model that is resident beside it, if there is one.
    """

    sizes: ModelSizes
    host: HostMemory
    context_tokens: int
    max_batch: int
    allocator_cache_bytes: int
    prefill_chunk_tokens: int = 512
    draft: ModelSizes | None = None

    @property
    def draft_bytes(self) -> int:
        """The draft model: all its weights, and the KV cache of the one request that it follows."""
        if self.draft is None:
            return 0
        cache_bytes = self.draft.cache.bytes_for(
            tokens=self.context_tokens, requests=1, context_tokens=self.context_tokens
        )
        weights_bytes = self.draft.resident_bytes + self.draft.slot_bytes(self.draft.experts)
        return weights_bytes + cache_bytes

    @property
    def kv_tokens(self) -> int:
        """The tokens that there is KV cache for; every request's part grows by whole steps."""
        batch = self.max_batch * _whole_steps(self.usual_tokens)
        return max(_whole_steps(self.context_tokens), batch)

    @property
    def usual_tokens(self) -> int:
        """The tokens of a usual request."""
        return min(self.context_tokens, _USUAL_REQUEST_TOKENS)

    @property
    def kv_bytes(self) -> int:
        """The KV cache."""
        return self.sizes.cache.bytes_for(
            tokens=self.kv_tokens, requests=self.max_batch, context_tokens=self.context_tokens
        )

    @property
    def working_bytes(self) -> int:
        """What computing takes at most: the process, a step, and a layer's cache as it grows."""
        step_bytes = self.sizes.working.bytes_for(
            tokens=max(min(self.prefill_chunk_tokens, self.context_tokens), self.max_batch),
            requests=self.max_batch,
            context_tokens=self.context_tokens,
        )
        return step_bytes + _CACHE_COPIES * self.kv_tokens * self.sizes.cache.layer_token_bytes

    @property
    def headroom_bytes(self) -> int:
        """What computing takes, and what stays free."""
        return max(self.host.limit_bytes // _HEADROOM_PARTS, self._headroom_floor_bytes)

    @property
    def page_cache_bytes(self) -> int:
        """What is left to the page cache on top while experts stream, if there is enough."""
        return max(self.host.limit_bytes // _STREAMING_PARTS - self.headroom_bytes, 0)

    @property
    def room_bytes(self) -> int:
        """What is left for slots; negative when not even the rest fits."""
        taken = self.sizes.resident_bytes + self.draft_bytes + self.kv_bytes + self.headroom_bytes
        return self.host.limit_bytes - taken

    @property
    def least_slots(self) -> int:
        """Slots that one token needs in a layer."""
        return min(self.sizes.top_k, self.sizes.experts)

    def total_bytes(self, slots: int) -> int:
        """Everything together, with so many slots in each layer."""
        return self.host.limit_bytes - self.room_bytes + self.sizes.slot_bytes(slots)

    def least_limit_bytes(self, slots: int) -> int:
        """The smallest limit of a host that so many slots fit below."""
        weights = self.sizes.resident_bytes + self.draft_bytes + self.kv_bytes
        weights += self.sizes.slot_bytes(slots)
        # The least L with L - L // parts >= weights.
        in_parts = (weights - 1) * _HEADROOM_PARTS // (_HEADROOM_PARTS - 1) + 1
        return max(in_parts, weights + self._headroom_floor_bytes)

    @property
    def _headroom_floor_bytes(self) -> int:
        return self.allocator_cache_bytes + self.working_bytes


def _whole_steps(tokens: int) -> int:
    return -(-tokens // _CACHE_STEP_TOKENS) * _CACHE_STEP_TOKENS
