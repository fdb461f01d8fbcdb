"""Builds tiny Qwen3-MoE checkpoints in MLX's layout, sound or broken on purpose.

python -m tests.support.checkpoints OUT [--random 7] [--break NAME ...] [--template NAME]
                                        [--layers 2] [--context 4096] [--bits 4]
python -m tests.support.checkpoints --list
"""

import argparse
import json
import shutil
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np

from tests.support.checkpoint_breaks import BREAKS
from tests.support.scripted_weights import (
    ENDLESS,
    EXPERT_WIDTH,
    EXPERTS,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    SCRIPTS,
    VOCAB,
    Array,
    Vocabulary,
    build_vocabulary,
    next_tokens,
    pack_experts,
    random_weights,
    scripted_weights,
)

TemplateName = Literal["plain", "strict_alternate", "text_only", "open_think"]

_TEXT: Final = (
    "m.content if m.content is string else "
    "(m.content | map(attribute='text') | join('') if m.content else '')"
)
_TEMPLATE: Final = (
    "{%- set ns = namespace(s='hello') -%}"
    "{%- for m in messages -%}"
    "{%- set t = %TEXT% -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + t -}}"
    "{%- if m.tool_calls -%}{%- for tool_call in m.tool_calls -%}{%- if tool_call.function -%}"
    "{%- set tool_call = tool_call.function -%}{%- endif -%}"
    '{{- \'<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' -}}'
    "{{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson "
    "-}}{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}"
    "{%- if m.role == 'user' -%}{%- for n in [%NAMES%] -%}{%- if ('[[' + n + ']]') in t -%}"
    "{%- set ns.s = n -%}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n<|s:' + ns.s + '|>' -}}%TAIL%{%- endif -%}"
)
_STRICT: Final = (
    "{%- for m in messages -%}{%- if m.role not in ['user','assistant','system','tool'] -%}"
    "{{- raise_exception('role ' + m.role + ' is not known') -}}{%- endif -%}"
    "{%- if m.role == 'system' and not loop.first -%}"
    "{{- raise_exception('system turn may only come first') -}}{%- endif -%}"
    "{%- if not loop.first and m.role == loop.previtem.role and m.role == 'user' -%}"
    "{{- raise_exception('turns must take turns') -}}{%- endif -%}{%- endfor -%}"
)


def make_checkpoint(
    folder: Path,
    *,
    random_seed: int | None = None,
    breaks: Sequence[str] = (),
    template: TemplateName = "plain",
    layers: int = 2,
    context: int = 4096,
    bits: Literal[4] | None = None,
) -> Path:
    """Write a checkpoint into `folder`, which is emptied first.

    Args:
        folder: Where it goes.
        random_seed: None gives the scripted weights, a number seeded noise.
        breaks: Names in `BREAKS`, applied in this order.
        template: How the chat template treats roles, content lists and thinking.
        layers: Decoder layers.
        context: `max_position_embeddings`, in tokens.
        bits: 4 packs the experts (affine, group size 64).

    Returns:
        `folder`.

    Raises:
        ValueError: A break is not known.
    """
    if unknown := [name for name in breaks if name not in BREAKS]:
        raise ValueError(f"no such break: {', '.join(unknown)}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocabulary = build_vocabulary()
    if random_seed is None:
        weights = scripted_weights(layers, next_tokens(vocabulary))
    else:
        weights = random_weights(layers, random_seed)
    packs = bool(bits) or bool({"bits1", "mode_unknown", "bits3_claim"} & set(breaks))
    if packs:
        weights = pack_experts(weights, bits=1 if "bits1" in breaks else 4)
    _write_weights(folder, weights, layers, breaks)
    _write_configs(folder, vocabulary, layers, context, packs=packs)
    _write_tokenizer(folder, vocabulary, context, template)
    for name in breaks:
        BREAKS[name].apply(folder)
    if random_seed is None:
        _write_texts(folder)
    return folder


def _write_weights(
    folder: Path, weights: dict[str, Array], layers: int, breaks: Sequence[str]
) -> None:
    if "single_file" in breaks:
        _save(folder / "model.safetensors", weights)
        return
    weight_map: dict[str, str] = {}
    for index in range(layers + 1):
        part = {
            name: array
            for name, array in weights.items()
            if (f"layers.{index}." in name if index < layers else "layers." not in name)
        }
        file = f"model-{index + 1:05d}-of-{layers + 1:05d}.safetensors"
        _save(folder / file, part, aligned="misaligned" not in breaks)
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in weights.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _save(path: Path, tensors: dict[str, Array], *, aligned: bool = True) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": "U32" if array.dtype == np.uint32 else "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    if aligned:
        text += b" " * (-len(text) % 8)
    elif len(text) % 4 == 0:
        text += b" "
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _write_configs(
    folder: Path, vocabulary: Vocabulary, layers: int, context: int, *, packs: bool
) -> None:
    end = vocabulary.special["<|im_end|>"]
    config: dict[str, object] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": EXPERT_WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": EXPERT_WIDTH,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "max_position_embeddings": context,
        "norm_topk_prob": True,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    if packs:
        config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    _write_json(folder / "config.json", config, indent=1)
    generation = {
        "eos_token_id": end,
        "other_eos": vocabulary.special["<|endoftext|>"],
        "do_sample": True,
        "temperature": 1.0,
    }
    _write_json(folder / "generation_config.json", generation)


def _write_tokenizer(
    folder: Path, vocabulary: Vocabulary, context: int, template: TemplateName
) -> None:
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    added = [
        {
            "id": token_id,
            "content": token,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "special": not token.startswith(("<think", "</think", "<tool", "</tool")),
        }
        for token, token_id in vocabulary.special.items()
    ]
    model: dict[str, object] = {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token")),
        **dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"), ""),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": vocabulary.pieces,
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding")),
        "added_tokens": added,
        "normalizer": None,
        **dict.fromkeys(("pre_tokenizer", "post_processor", "decoder"), level),
        "model": model,
    }
    _write_json(folder / "tokenizer.json", tokenizer, ascii_only=False)
    settings = {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": _chat_template(template),
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _chat_template(template: TemplateName) -> str:
    filled = (
        _TEMPLATE.replace("%TEXT%", "'' + m.content" if template == "text_only" else _TEXT)
        .replace("%NAMES%", ",".join(f"'{name}'" for name in SCRIPTS))
        .replace("%TAIL%", "{{- '<think>' -}}" if template == "open_think" else "")
    )
    return _STRICT + filled if template == "strict_alternate" else filled


def _write_texts(folder: Path) -> None:
    """What the model says, for tests in other languages."""
    pieces = {
        name: [piece.hex() if isinstance(piece, bytes) else piece for piece in script]
        for name, script in SCRIPTS.items()
        if name not in ENDLESS
    }
    _write_json(folder / "SCRIPTS.txt", {"texts_as_pieces": pieces}, indent=1, ascii_only=False)


def _write_json(
    path: Path, value: object, *, indent: int | None = None, ascii_only: bool = True
) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=ascii_only), "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build a tiny checkpoint.")
    parser.add_argument("out", nargs="?", type=Path, help="folder to write, emptied first")
    parser.add_argument("--random", type=int, metavar="SEED", help="noise instead of scripts")
    parser.add_argument("--break", dest="breaks", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--template", default="plain", choices=get_args(TemplateName))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096, help="tokens")
    parser.add_argument("--bits", type=int, choices=[4], help="experts as 4-bit affine, group 64")
    parser.add_argument("--list", action="store_true", help="what can be broken")
    options = parser.parse_args(arguments)
    if options.list or options.out is None:
        lines = [f"{name:22s} {broken.description}" for name, broken in BREAKS.items()]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    if unknown := [name for name in options.breaks if name not in BREAKS]:
        parser.error(f"no such break: {', '.join(unknown)}")
    folder = make_checkpoint(
        options.out,
        random_seed=options.random,
        breaks=options.breaks,
        template=options.template,
        layers=options.layers,
        context=options.context,
        bits=options.bits,
    )
    sys.stdout.write(f"{folder}: breaks: {' '.join(options.breaks) or 'none'}\n")


if __name__ == "__main__":
    main()
