"""Which architectures of mlx-lm have experts that can be streamed, and what is tried of each.

Which these are is read from mlx-lm's sources: every model file that imports `SwitchGLU` or
`SwitchMLP`, and every one that builds its layers from such a file. A release of mlx-lm that brings
another one therefore shows as a gap, not as silence.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.streaming.model_configs import ARCHITECTURES, Architecture

__all__ = ["ARCHITECTURES", "NOT_ON_THE_SEAM", "Architecture", "by_module", "seam_modules"]

NOT_ON_THE_SEAM: Final[Mapping[str, str]] = {
    "dbrx": "keeps each expert as a module of its own and loops over them: it stays resident",
}
"""MoE architectures of mlx-lm that do not compute their experts in a switch layer."""

_SEAM: Final = "switch_layers"


def by_module(name: str) -> Architecture:
    """The architecture of one model file.

    Raises:
        KeyError: There is none.
    """
    return {one.module: one for one in ARCHITECTURES}[name]


@cache
def seam_modules() -> frozenset[str]:
    """Model files of the installed mlx-lm whose experts sit in switch layers."""
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    files = sorted((Path(spec.submodule_search_locations[0]) / "models").glob("*.py"))
    trees = {file.stem: ast.parse(file.read_text("utf-8")) for file in files}
    sources = {name: frozenset(_siblings(tree)) for name, tree in trees.items() if _is_model(tree)}
    found: frozenset[str] = frozenset()
    wanted = frozenset({_SEAM})
    while more := {name for name, used in sources.items() if used & wanted} - found:
        found |= more
        wanted = found
    return found


def _siblings(tree: ast.Module) -> Iterator[str]:
    """Files of the same folder that a file takes layers from."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level != 1:
            continue
        names = {alias.name for alias in node.names}
        if node.module is None:
            yield from names
        elif node.module != _SEAM or names & {"SwitchGLU", "SwitchMLP"}:
            yield node.module


def _is_model(tree: ast.Module) -> bool:
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {"Model", "ModelArgs"} <= defined | imported
