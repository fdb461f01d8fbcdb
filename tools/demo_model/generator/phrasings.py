"""The wordings of `phrasings.toml`, by their dotted names."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

_FILE: Final = Path(__file__).with_name("phrasings.toml")


def _flat(tables: dict[str, dict[str, list[str] | str]]) -> dict[str, list[str] | str]:
    """The entries of all tables under the names `table.entry`."""
    return {f"{table}.{name}": v for table, row in tables.items() for name, v in row.items()}


_ENTRIES: Final = _flat(tomllib.loads(_FILE.read_text(encoding="utf-8")))
_FORMS: Final = {name: entry for name, entry in _ENTRIES.items() if isinstance(entry, list)}
_SINGLE: Final = {name: entry for name, entry in _ENTRIES.items() if isinstance(entry, str)}


def forms(name: str) -> list[str]:
    """The wordings of one thing, in their fixed order.

    Raises:
        KeyError: `phrasings.toml` has no list of that name.
    """
    return _FORMS[name]


def only(name: str, /, **slots: object) -> str:
    """The one wording of a thing that has no others, with its slots filled.

    Raises:
        KeyError: `phrasings.toml` has no string of that name, or a slot is not given.
    """
    return _SINGLE[name].format(**slots)
