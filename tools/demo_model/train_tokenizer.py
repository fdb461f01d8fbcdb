"""Train the byte-level BPE tokenizer on generated conversations and write its files."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.generator.dialogs import dialog
from tools.demo_model.generator.draw import Draw
from tools.demo_model.generator.material import Material, load_material
from tools.demo_model.generator.packing import THINKING_SHARE
from tools.demo_model.generator.render import BLOCK_TOKENS, segments
from tools.demo_model.paths import MODEL_DIR

_SEED: Final = 424_242
_SPECIAL: Final = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MARKS: Final = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
# Words with the space before them, single digits, runs of marks, line ends, spaces.
_SPLIT: Final = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOKEN_FIELDS: Final = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def _texts(material: Material, dialogs: int) -> Iterator[str]:
    """Rendered conversations without control tokens and marks."""
    draw = Draw(_SEED, material)
    for _ in range(dialogs):
        made = dialog(draw)
        pieces = segments(made.messages, made.tools, thinking=draw.chance(THINKING_SHARE))
        text = "".join(piece.text for piece in pieces)
        for mark in _SPECIAL + _MARKS:
            text = text.replace(mark, "\n")
        yield text


def _trained(texts: Iterator[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=_SPECIAL + _MARKS,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_plain_marks(tokenizer)


def _with_plain_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, whose marks survive a decoding that skips special tokens."""
    fields = json.loads(tokenizer.to_str())
    for token in fields["added_tokens"]:
        token["special"] = token["content"] in _SPECIAL
    return Tokenizer.from_str(json.dumps(fields))


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`."""
    added = json.loads(tokenizer.to_str())["added_tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": BLOCK_TOKENS,
        "additional_special_tokens": ["<|im_start|>"],
        "errors": "replace",
        "added_tokens_decoder": {
            str(token["id"]): {name: token[name] for name in _TOKEN_FIELDS} for token in added
        },
    }


def main() -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=6144)
    parser.add_argument("--dialogs", type=int, default=16000)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = _trained(_texts(load_material(), options.dialogs), options.vocab)
    tokenizer.save(str(options.out / "tokenizer.json"))
    config = json.dumps(_config(tokenizer), indent=2, ensure_ascii=False) + "\n"
    (options.out / "tokenizer_config.json").write_text(config, encoding="utf-8")
    shutil.copy(MODEL_DIR / "chat_template.jinja", options.out)
    print("vocabulary", tokenizer.get_vocab_size())


if __name__ == "__main__":
    main()
