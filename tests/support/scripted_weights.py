"""Weights and vocabulary of a tiny Qwen3-MoE that speaks fixed texts.

The experts hold a table "token -> next token": the last layer says the next token of the script,
the layers before it only pass a permuted token on. Any wrong, missing or zeroed expert byte
therefore changes the text. The script is picked by `[[name]]` in the last user message, or by a
prompt that ends in the token `<|s:name|>`. The tokenizer has no merges.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Piece = str | bytes

VOCAB: Final = 512
HIDDEN: Final = 512
EXPERTS: Final = 8
EXPERT_WIDTH: Final = 64
HEADS: Final = 4
HEAD_WIDTH: Final = 32


def _raw(text: str) -> list[Piece]:
    """One piece per byte."""
    return [bytes([byte]) for byte in text.encode()]


# Texts that end, as pieces; a bytes piece is a token of one raw byte.
SCRIPTS: Final[dict[str, list[Piece]]] = {
    "hello": ["Hello", " from", " the", " scripted", " model", "."],
    "count": ["Count:", *(f" {number}" for number in range(1, 81))],
    "loop": ["la ", "li ", "lo "],
    "dice": list("12345678"),
    "emoji": ["Face ", *_raw("😀"), " ok"],
    "cjk": ["CN:", *_raw("中文"), "!"],
    "czech": ["cz ", *_raw("ď"), "ábel"],
    "combine": [
        *("caf", "e", "\u0301", " love", "❤", "\ufe0f", " flag ", "🇨", "🇭"),
        *(" dev ", "👩", "\u200d", "💻", " done"),
    ],
    "badutf8": ["bad ", b"\xe2", " next", " tail"],
    "cututf8": ["cut ", b"\xf1", b"\x82"],
    "think": ["<think>"],
    "tool": ["<tool_call>"],
    "empty": [],
    "fence": ["alpha ", "beta", " gam", "ma", " delta", " eps"],
}
# These two never end: `loop` goes round, `dice` draws each face with equal probability.
ENDLESS: Final = ("loop", "dice")
# Reached by a special token, whoever emits it.
CHAINS: Final[dict[str, list[Piece]]] = {
    "<think>": ["Let me ", "see: six ", "times seven", " is", " forty-two.", "</think>"],
    "</think>": ["\n\n", "The answer", " is: 42."],
    "<tool_call>": [
        *('\n{"name": ', '"get_weather"', ', "arguments"', ': {"city": ', '"Z'),
        *("ürich", '", "days": ', "3}}", "\n", "</tool_call>"),
    ],
}
SPECIAL: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token ids.

    Attributes:
        pieces: Byte-level spelling of each ordinary token.
        special: The added tokens, `<|s:name|>` among them.
    """

    pieces: dict[str, int]
    special: dict[str, int]

    def id_of(self, piece: Piece) -> int:
        """The token that a script's piece stands for."""
        if isinstance(piece, str) and piece in self.special:
            return self.special[piece]
        return self.pieces[_spelling(piece)]


def _byte_letters() -> dict[int, str]:
    """GPT-2's table: every byte as one printable letter."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


_LETTERS: Final = _byte_letters()


def _spelling(piece: Piece) -> str:
    raw = piece if isinstance(piece, bytes) else piece.encode()
    return "".join(_LETTERS[byte] for byte in raw)


def build_vocabulary() -> Vocabulary:
    """One token per byte, one per piece of every script, then the added tokens."""
    pieces = {_LETTERS[byte]: byte for byte in range(256)}
    for script in (*SCRIPTS.values(), *CHAINS.values()):
        for piece in script:
            if piece not in SPECIAL:
                pieces.setdefault(_spelling(piece), len(pieces))
    added = [*SPECIAL, *(f"<|s:{name}|>" for name in SCRIPTS)]
    special = {token: len(pieces) + rank for rank, token in enumerate(added)}
    if len(pieces) + len(special) > VOCAB:
        raise ValueError(f"{len(pieces) + len(special)} tokens do not fit into {VOCAB}")
    return Vocabulary(pieces=pieces, special=special)


def next_tokens(vocabulary: Vocabulary) -> dict[int, list[int]]:
    """Which tokens may follow each token."""
    end = vocabulary.special["<|im_end|>"]
    starts = {f"<|s:{name}|>": script for name, script in SCRIPTS.items()} | CHAINS
    following: dict[int, list[int]] = {}
    for start, script in starts.items():
        tokens = [vocabulary.special[start], *map(vocabulary.id_of, script)]
        for token, after in zip(tokens, _followers(start, script, tokens, end), strict=False):
            if following.setdefault(token, after) != after:
                raise ValueError(f"two scripts disagree about what follows token {token}")
    return {token: following.get(token, [end]) for token in range(VOCAB)}


def _followers(start: str, script: list[Piece], tokens: list[int], end: int) -> list[list[int]]:
    """What follows the start token and each piece; none where another chain takes over."""
    if start == "<|s:dice|>":
        return [tokens[1:]] * len(tokens)
    last = tokens[1] if start == "<|s:loop|>" else end
    taken_over = bool(script) and script[-1] in CHAINS
    return [[token] for token in tokens[1:]] + ([] if taken_over else [[last]])


def scripted_weights(layers: int, following: dict[int, list[int]]) -> dict[str, Array]:
    """Weights that speak the scripts; attention adds nothing."""
    weights: dict[str, Array] = {"model.embed_tokens.weight": np.eye(VOCAB, HIDDEN, dtype="f4")}
    spoken = list(range(VOCAB))  # what stands for each token when a layer begins
    for layer in range(layers):
        passed_on = [(5 * token + 3) % VOCAB for token in spoken]
        is_last = layer == layers - 1
        table = {
            spoken[token]: following[token] if is_last else [passed_on[token]]
            for token in range(VOCAB)
        }
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = np.zeros(
                (HEADS * HEAD_WIDTH, HIDDEN), "f4"
            )
        weights[f"{prefix}self_attn.o_proj.weight"] = np.zeros((HIDDEN, HEADS * HEAD_WIDTH), "f4")
        weights |= _table_experts(prefix, table, loudness=16.0**layer / 16)
        spoken = passed_on
    return weights | _norms(layers, final=4)  # 4 makes even the dice sharp


def _table_experts(prefix: str, table: dict[int, list[int]], loudness: float) -> dict[str, Array]:
    """Token t goes to expert t % EXPERTS, whose row t // EXPERTS answers it."""
    router = np.zeros((EXPERTS, HIDDEN), "f4")
    gate = np.zeros((EXPERTS, EXPERT_WIDTH, HIDDEN), "f4")
    up = np.zeros((EXPERTS, EXPERT_WIDTH, HIDDEN), "f4")
    down = np.zeros((EXPERTS, HIDDEN, EXPERT_WIDTH), "f4")
    for token, answers in table.items():
        row, expert = divmod(token, EXPERTS)
        router[expert, token] = 2
        gate[expert, row, token] = up[expert, row, token] = 1
        down[expert, answers, row] = loudness
    return {
        f"{prefix}mlp.gate.weight": router,
        f"{prefix}mlp.switch_mlp.gate_proj.weight": gate,
        f"{prefix}mlp.switch_mlp.up_proj.weight": up,
        f"{prefix}mlp.switch_mlp.down_proj.weight": down,
    }


def random_weights(layers: int, seed: int) -> dict[str, Array]:
    """Noise that depends on the whole context, so that cache and batch faults show."""
    generator = np.random.default_rng(seed)

    def noise(*shape: int, scale: float = 0.08) -> Array:
        return (generator.standard_normal(shape) * scale).astype("f4")

    weights = {"model.embed_tokens.weight": noise(VOCAB, HIDDEN, scale=1.0)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = noise(
                HEADS * HEAD_WIDTH, HIDDEN, scale=0.05
            )
        weights[f"{prefix}self_attn.o_proj.weight"] = noise(HIDDEN, HEADS * HEAD_WIDTH, scale=0.4)
        weights[f"{prefix}mlp.gate.weight"] = noise(EXPERTS, HIDDEN)
        experts = f"{prefix}mlp.switch_mlp."
        weights[f"{experts}gate_proj.weight"] = noise(EXPERTS, EXPERT_WIDTH, HIDDEN)
        weights[f"{experts}up_proj.weight"] = noise(EXPERTS, EXPERT_WIDTH, HIDDEN)
        weights[f"{experts}down_proj.weight"] = noise(EXPERTS, HIDDEN, EXPERT_WIDTH, scale=0.3)
    return weights | _norms(layers, final=1)


def _norms(layers: int, final: int) -> dict[str, Array]:
    widths = {
        "self_attn.q_norm": HEAD_WIDTH,
        "self_attn.k_norm": HEAD_WIDTH,
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
    }
    norms: dict[str, Array] = {
        f"model.layers.{layer}.{name}.weight": np.ones(width, "f4")
        for layer in range(layers)
        for name, width in widths.items()
    }
    return norms | {"model.norm.weight": np.full(HIDDEN, final, "f4")}


def pack_experts(weights: dict[str, Array], bits: int, group: int = 64) -> dict[str, Array]:
    """The experts in MLX's affine packing (low bits first); exact for the scripted weights."""
    packed: dict[str, Array] = {}
    for name, weight in weights.items():
        if ".switch_mlp." not in name:
            packed[name] = weight
            continue
        groups = weight.reshape(*weight.shape[:-1], -1, group)
        low, high = groups.min(-1), groups.max(-1)
        levels = 2**bits - 1
        scales = np.where(high > low, (high - low) / levels, 1).astype("f4")
        steps = np.clip(np.rint((groups - low[..., None]) / scales[..., None]), 0, levels)
        words = steps.astype("u4").reshape(*weight.shape[:-1], -1, 32 // bits)
        shifts = bits * np.arange(32 // bits, dtype="u4")
        packed[name] = (words << shifts).sum(-1, dtype="u4")
        packed[name.replace(".weight", ".scales")] = scales
        packed[name.replace(".weight", ".biases")] = low.astype("f4")
    return packed
