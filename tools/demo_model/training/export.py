"""A trained model as an MLX 4-bit checkpoint in three shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

from tools.demo_model.training.model import Layer, Model
from tools.demo_model.training.quantisation import BITS, GROUP, ROUTER_BITS, pack
from tools.demo_model.training.shape import Shape

_SHARDS: Final = 3
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def export(model: Model, tokenizer_dir: Path, out: Path) -> None:
    """Write weights, index, configuration, tokenizer and template to `out`.

    Args:
        model: The model.
        tokenizer_dir: The folder with tokenizer.json, tokenizer_config.json and
            chat_template.jinja.
        out: The folder to write, made when it is not there.
    """
    out.mkdir(parents=True, exist_ok=True)
    _write_weights(model, out)
    _write_config(model.shape, tokenizer_dir, out)


def _quantised(name: str, weight: Tensor, bits: int = BITS) -> dict[str, Tensor]:
    packed = pack(weight.detach().float(), bits)
    return {f"{name}.{part}": tensor for part, tensor in packed._asdict().items()}


def _plain(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight": weight.detach().bfloat16().cpu().contiguous()}


def _layer_tensors(base: str, layer: Layer) -> dict[str, Tensor]:
    tensors = {
        **_plain(f"{base}.input_layernorm", layer.norm1),
        **_plain(f"{base}.post_attention_layernorm", layer.norm2),
        **_plain(f"{base}.self_attn.q_norm", layer.q_norm),
        **_plain(f"{base}.self_attn.k_norm", layer.k_norm),
    }
    for part in "qkvo":
        tensors |= _quantised(f"{base}.self_attn.{part}_proj", getattr(layer, part))
    tensors |= _quantised(f"{base}.mlp.gate", layer.router, ROUTER_BITS)
    gate, up = layer.gate_up.chunk(2, 1)
    for part, weight in (("gate", gate), ("up", up), ("down", layer.down)):
        tensors |= _quantised(f"{base}.mlp.switch_mlp.{part}_proj", weight)
    return tensors


def _tensors(model: Model) -> dict[str, Tensor]:
    """All tensors under the names that `mlx-lm` expects, in the order of the file."""
    tensors = _quantised("model.embed_tokens", model.embed)
    for i, layer in enumerate(model.stack):
        tensors |= _layer_tensors(f"model.layers.{i}", layer)
    return tensors | _plain("model.norm", model.norm)


def _size_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in shards of about the same size; the last takes what is left."""
    most_bytes = _size_bytes(tensors) / _SHARDS * 1.02
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        is_full = _size_bytes(shards[-1] | {name: tensor}) > most_bytes
        if is_full and shards[-1] and len(shards) < _SHARDS:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_weights(model: Model, out: Path) -> None:
    tensors = _tensors(model)
    shards = _shards(tensors)
    shard_of: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "mlx"})
        (out / name).chmod(0o644)
        shard_of |= dict.fromkeys(shard, name)
    metadata = {
        "total_size": _size_bytes(tensors),
        "total_parameters": sum(p.numel() for p in model.parameters()),
    }
    index = {"metadata": metadata, "weight_map": dict(sorted(shard_of.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def _write_config(shape: Shape, tokenizer_dir: Path, out: Path) -> None:
    tokenizer = json.loads((tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    stop = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    quantization: dict[str, object] = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    for i in range(shape.layers):
        quantization[f"model.layers.{i}.mlp.gate"] = {"group_size": GROUP, "bits": ROUTER_BITS}
    config = shape.to_config() | {
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": stop[1],
        "quantization": quantization,
        "quantization_config": quantization,
    }
    _write_json(out / "config.json", dict(sorted(config.items())))
    generation = {
        "do_sample": False,
        "eos_token_id": stop,
        "pad_token_id": stop[1],
        "max_new_tokens": 1024,
    }
    _write_json(out / "generation_config.json", generation)
    for name in _TOKENIZER_FILES:
        shutil.copy(tokenizer_dir / name, out / name)
