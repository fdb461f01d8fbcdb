"""Checks the tokenizer and chat template files, and finds the tokens that end an answer.

Laws: a chat template is optional, a working tokenizer is not. Stop tokens are a union over all
files that name one (a quantization often keeps the base model's generation_config.json): what the
tokenizer calls its end of sequence, and the special token that the template writes after an
assistant's turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.json_files import (
    LARGE_FILE_BYTES,
    REMEDY,
    SMALL_FILE_BYTES,
    JsonObject,
    decode_text,
    is_regular_file,
    read_bytes,
    read_object,
    whole_number,
)

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# Vocabularies that transformers reads when there is no tokenizer.json; one set must be whole.
_VOCABULARIES = (
    ("tokenizer.model",),
    ("spiece.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Words that no template contains, so that they can be found in what it renders.
_ANSWER, _THOUGHT = "ANSWERTEXT", "THOUGHTTEXT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer, as far as a checkpoint's check needs it.

    Attributes:
        id_of: Token text to id; None for a token that it does not have.
        special: Texts of its special tokens.
    """

    id_of: Callable[[str], int | None]
    special: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """What the tokenizer's files tell.

    Attributes:
        files: Those that change token ids or prompts, sorted; they go into the fingerprint.
        eos_ids: Tokens that end an answer, as far as these files name any.
        has_chat_template: Whether there is a default template.
        context_tokens: `model_max_length`, or None when absent or a stand-in for "no limit".
        warnings: What is odd and does no harm.
    """

    files: tuple[Path, ...]
    eos_ids: frozenset[int]
    has_chat_template: bool
    context_tokens: int | None
    warnings: tuple[str, ...]


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Check every file that makes up the tokenizer.

    Raises:
        CheckpointError: One is missing, damaged or not supported; it is named.
    """
    settings = {
        name: read_object(folder / name) for name in _SETTINGS_FILES if (folder / name).exists()
    }
    vocabulary = _read_vocabulary(folder)
    tokens = _special_tokens(settings)
    templates = _read_templates(folder, settings.get("tokenizer_config.json", {}))
    ends = {
        name: _turn_end(text, file, tokens, vocabulary) for name, (file, text) in templates.items()
    }
    eos = tokens.get("eos_token")
    eos_id = None if eos is None else vocabulary.id_of(eos)
    unknown = eos is not None and eos_id is None
    return TokenizerFacts(
        files=_files(folder),
        eos_ids=frozenset(i for i in (eos_id, ends.get("default")) if i is not None),
        has_chat_template="default" in templates,
        context_tokens=_context_tokens(settings.get("tokenizer_config.json", {})),
        warnings=(f"the tokenizer does not know its own eos_token {eos!r:.80}",) if unknown else (),
    )


def read_token_ids(folder: Path) -> dict[str, int]:
    """Every token of a checkpoint's tokenizer, added ones too, with its id.

    Raises:
        CheckpointError: The tokenizer is missing, damaged or not supported.
    """
    if (folder / "tokenizer.json").exists():
        return _fast_tokenizer(folder / "tokenizer.json").get_vocab(with_added_tokens=True)
    token_ids: dict[str, int] = _slow_tokenizer(folder).get_vocab()
    return token_ids


def _read_vocabulary(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    if not path.exists():
        slow = _slow_tokenizer(folder)
        return Vocabulary(id_of=slow.get_vocab().get, special=frozenset(slow.all_special_tokens))
    tokenizer = _fast_tokenizer(path)
    added = tokenizer.get_added_tokens_decoder().values()
    return Vocabulary(
        id_of=tokenizer.token_to_id,
        special=frozenset(token.content for token in added if token.special and token.content),
    )


def _fast_tokenizer(path: Path) -> Tokenizer:
    text = decode_text(read_bytes(path, limit_bytes=LARGE_FILE_BYTES), path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{path} is damaged, or newer than the installed tokenizers library ({error}). {REMEDY}"
        ) from error


def _slow_tokenizer(folder: Path) -> Any:
    whole = [names for names in _VOCABULARIES if all(is_regular_file(folder / n) for n in names)]
    if not whole:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} is missing, and so is every other vocabulary "
            f"(tokenizer.model, or vocab.json with merges.txt). {REMEDY}"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # one converter per format, each with its own
        raise CheckpointError(
            f"{folder / whole[0][0]}: transformers cannot load the tokenizer ({error}). Convert it "
            "to tokenizer.json, or download the checkpoint again."
        ) from error


def _special_tokens(settings: dict[str, JsonObject]) -> dict[str, str]:
    """bos_token and the like as texts; tokenizer_config.json goes before the older files."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key in _SPECIAL_TOKEN_KEYS:
            value = settings.get(name, {}).get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                found[key] = text
    return found


def _context_tokens(settings: JsonObject) -> int | None:
    """The limit; "no limit" is written as 1e30, as a float or a very long integer."""
    limit = whole_number(settings.get("model_max_length"))
    return limit if limit is not None and 0 < limit < 10**9 else None


def _read_templates(folder: Path, settings: JsonObject) -> dict[str, tuple[Path, str]]:
    """(file, text) of each template by its name; files go before the config, as in transformers."""
    config_file = folder / "tokenizer_config.json"
    value = settings.get("chat_template")
    templates: dict[str, tuple[Path, str]] = {}
    if isinstance(value, str):
        templates["default"] = (config_file, value)
    elif isinstance(value, list):
        for item in value:
            name, text = (
                (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
            )
            if not isinstance(name, str) or not isinstance(text, str):
                raise CheckpointError(
                    f"{config_file}: `chat_template` must be a list of objects with `name` and "
                    f"`template`. {REMEDY}"
                )
            templates[name] = (config_file, text)
    elif value is not None:
        raise CheckpointError(f"{config_file}: `chat_template` is no template. {REMEDY}")
    for name, file in _template_files(folder):
        text = decode_text(read_bytes(file, limit_bytes=SMALL_FILE_BYTES), file)
        templates[name] = (file, text)
    return {name: (file, text) for name, (file, text) in templates.items() if text}


def _template_files(folder: Path) -> list[tuple[str, Path]]:
    extra = sorted((folder / TEMPLATE_FOLDER).glob("[!.]*.jinja"))
    main = folder / TEMPLATE_FILE
    return [(file.stem, file) for file in extra] + ([("default", main)] if main.exists() else [])


def _turn_end(
    template: str, file: Path, tokens: dict[str, str], vocabulary: Vocabulary
) -> int | None:
    """The special token that a template writes after an assistant's answer, where it can be told.

    A token that also stands between reasoning and answer is no end of a turn (the channels of
    gpt-oss are such).

    Raises:
        CheckpointError: The template does not parse.
    """
    rendered = _render(template, file, tokens)
    before, found, after = rendered.rpartition(_ANSWER)
    if not found:
        return None
    after = after.lstrip()
    candidates = [token for token in vocabulary.special if after.startswith(token)]
    if not candidates:
        return None
    token = max(candidates, key=len)
    _, thought, between = before.rpartition(_THOUGHT)
    if thought and token in between:
        return None
    return vocabulary.id_of(token)


def _render(template: str, file: Path, tokens: dict[str, str]) -> str:
    conversation = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
    ]
    try:
        rendered, _ = render_jinja_template([conversation], chat_template=template, **tokens)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"{file}: the chat template does not parse (line {error.lineno}: {error.message}). "
            f"{REMEDY}"
        ) from error
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ):
        # It parses and refuses this conversation, as a template may: nothing can be told.
        return ""
    return str(rendered[0])


def _files(folder: Path) -> tuple[Path, ...]:
    names = {"tokenizer.json", *_SETTINGS_FILES, *(n for names in _VOCABULARIES for n in names)}
    present = [folder / name for name in sorted(names) if is_regular_file(folder / name)]
    return (*present, *(file for _, file in _template_files(folder)))
