"""The demo model's tokenizer files, and small words for tests of the text layer."""

import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

from headrace_serve.text.detokenizer import text_of
from headrace_serve.text.tokenizer import TextTokenizer

DEMO = Path(str(files("headrace_replicas"))) / "demo_model"
END = 2


def copy_without_template(folder: Path) -> Path:
    """Copy the demo model's tokenizer into a folder, its template left out."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def user(content: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def shown(tokenizer: TextTokenizer, ids: tuple[int, ...]) -> str:
    """The text of token ids, control tokens included."""
    return text_of(tokenizer, ids, shown=tokenizer.special_ids)
