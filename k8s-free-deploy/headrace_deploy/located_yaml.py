"""Reads a settings file so that each value still knows its line.

Two departures from plain YAML 1.1 keep surprises out: a key given twice is refused, and dates stay
the text that they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from headrace_replicas.contract.errors import SettingsError

_TIMESTAMP_TAG: Final = "tag:yaml.org,2002:timestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A value and the line (from 1) of the key that names it."""

    value: object
    line: int


class _SettingsLoader(yaml.SafeLoader):
    """Safe YAML without timestamps."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute, replaced whole
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def parse_scalar(text: str) -> object:
    """The value of one YAML document, as in an environment variable.

    Raises:
        yaml.YAMLError: The text is no YAML.
    """
    return yaml.load(text, Loader=_SettingsLoader)  # noqa: S506 - a subclass of SafeLoader


def read_sections(path: Path) -> Mapping[str, Located]:
    """Read a file of sections into dotted names.

    Args:
        path: A YAML mapping whose values are plain values or mappings of plain values.

    Returns:
        `gateway.port` -> its value and line. A section without entries is left out, a value
        under the top level has a name without a dot.

    Raises:
        SettingsError: The file cannot be read, is no YAML, is no mapping or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"cannot read the settings file {path}: {error.strerror}; fleet.example.yaml is a "
            "file to start from"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{path} is not UTF-8 text: {error.reason}; save it as UTF-8"
        ) from error
    loader = _SettingsLoader(text)
    try:
        root = loader.get_single_node()
        return {} if root is None else _flatten(loader, root, path)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise SettingsError(f"{path}:{line} is not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    finally:
        loader.dispose()


def _flatten(loader: _SettingsLoader, root: yaml.Node, path: Path) -> Mapping[str, Located]:
    """Dotted names over two levels."""
    if not isinstance(root, yaml.MappingNode):
        raise SettingsError(f"{path}:1 must be a mapping of sections, like `gateway:`")
    found: dict[str, Located] = {}
    for key, node in _entries(root, "", path):
        if isinstance(node, yaml.MappingNode):
            for inner, leaf in _entries(node, f"{key.value}.", path):
                _put(found, f"{key.value}.{inner.value}", loader, inner, leaf)
        else:
            _put(found, str(key.value), loader, key, node)
    return found


def _put(
    found: dict[str, Located],
    name: str,
    loader: _SettingsLoader,
    key: yaml.Node,
    node: yaml.Node,
) -> None:
    value = loader.construct_object(node, deep=True)
    found[name] = Located(value=value, line=key.start_mark.line + 1)


def _entries(
    node: yaml.MappingNode, prefix: str, path: Path
) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The (key, value) nodes of a mapping, each key once and a plain word."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise SettingsError(f"{path}:{line}: a key must be a plain name")
        if key.value in seen:
            name, first = f"{prefix}{key.value}", seen[key.value]
            raise SettingsError(
                f"{path}:{line}: {name} is set twice, first on line {first}; keep one", name
            )
        seen[key.value] = line
    return list(node.value)
