"""Settings from the command line, the environment, a file and the defaults, in that order.

Each value keeps its origin, and everything that cannot be meant is refused by name: an unknown
key, a wrong type, an API key in clear text.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from headrace_deploy.located_yaml import parse_scalar, read_sections
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.settings import Section, Settings
from headrace_replicas.injection.plan import read_plan
from headrace_serve.http.keys import KeyRing

_PREFIX: Final = "HEADRACE_"
KEY_VARIABLE: Final = "HEADRACE_API_KEY"
"""Keys that clients must send, in clear text; only `headrace serve` reads it."""
_SECRETS: Final = frozenset({"gateway.api_keys"})
_ARMED: Final = "injection.armed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings and where each comes from.

    Attributes:
        settings: The validated settings; `state_dir` and `injection.plan` are absolute.
        origins: Dotted field name -> `default`, `file NAME:LINE`, `environment NAME` or
            `command line`, for every field.
    """

    settings: Settings
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """One value that somebody set, and who."""

    value: object
    origin: str

    @property
    def from_environment(self) -> bool:
        """Whether an environment variable set it."""
        return self.origin.startswith("environment ")


def fields() -> Mapping[str, FieldInfo]:
    """Every field of the settings by its dotted name, in the order of the models."""
    found: dict[str, FieldInfo] = {}
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= {f"{name}.{inner}": info for inner, info in kind.model_fields.items()}
        else:
            found[name] = field
    return found


def value_of(settings: Settings, name: str) -> object:
    """The value of a field by its dotted name."""
    value: object = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def variable(name: str) -> str:
    """The environment variable that sets a field: `gateway.port` -> HEADRACE_GATEWAY__PORT."""
    return _PREFIX + name.upper().replace(".", "__")


def load(file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, object]) -> Loaded:
    """Merge all sources into validated settings.

    Args:
        file: A YAML file of settings; None reads none.
        environ: Environment variables; those that begin with HEADRACE_ count.
        overrides: Values from the command line by dotted name.

    Raises:
        SettingsError: A name is unknown or a value wrong; the message says where.
    """
    given = _from_file(file) if file is not None else {}
    given |= _from_environment(environ)
    given |= {name: _Given(value=value, origin="command line") for name, value in overrides.items()}
    for name, entry in given.items():
        if name not in fields():
            raise _unknown(name, entry.origin, fields())
    settings = _validate(given)
    _require_digests(settings, given)
    _require_switch(given)
    paths: dict[str, object] = {"state_dir": _absolute(settings.state_dir, "state_dir")}
    if settings.injection.plan is not None:
        plan = _absolute(settings.injection.plan, "injection.plan")
        read_plan(plan)  # refused here, and not minutes later where the engine runs
        paths["injection"] = settings.injection.model_copy(update={"plan": plan})
    origins = {name: given[name].origin if name in given else "default" for name in fields()}
    return Loaded(settings=settings.model_copy(update=paths), origins=origins)


def _absolute(path: Path, name: str) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise SettingsError(
            f"{name} = {path}: there is no such home folder; write the path in full", name
        ) from error


def parse_text(name: str, text: str, origin: str) -> object:
    """The value of a field from text, as an environment variable or `--set` gives it.

    A field that holds text takes it as it is, so that a revision like `1234567` needs no quotes;
    any other is read as a YAML scalar or list.

    Raises:
        SettingsError: The name is unknown or the text is no YAML.
    """
    field = fields().get(name)
    if field is None:
        raise _unknown(name, origin, fields())
    takes = _alternatives(field)
    try:
        value = parse_scalar(text)
    except yaml.YAMLError as error:
        if takes & {str, Path}:
            return text
        raise SettingsError(
            f"{name} ({origin}): {_shown(name, text)} is not a YAML value; write a list as [a, b]",
            name,
        ) from error
    if takes & {str, Path} and not isinstance(value, str):
        return None if value is None and type(None) in takes else text
    return value


def _alternatives(field: FieldInfo) -> frozenset[Any]:
    """The types that a field accepts: its annotation, or the members of its union."""
    if get_origin(field.annotation) is UnionType:
        return frozenset(get_args(field.annotation))
    return frozenset({field.annotation})


def _from_file(file: Path) -> dict[str, _Given]:
    sections = {name for name in Settings.model_fields if name not in fields()}
    given: dict[str, _Given] = {}
    for name, located in read_sections(file).items():
        origin = f"file {file}:{located.line}"
        if name in sections:
            if located.value is not None:
                raise SettingsError(f"{name} ({origin}) must be a mapping of settings", name)
            continue
        given[name] = _Given(value=located.value, origin=origin)
    return given


def _from_environment(environ: Mapping[str, str]) -> dict[str, _Given]:
    known = {variable(name): name for name in fields()}
    given: dict[str, _Given] = {}
    for key in sorted(environ):
        if not key.startswith(_PREFIX) or key == KEY_VARIABLE:
            continue
        if key not in known:
            raise _unknown_variable(key, [*known, KEY_VARIABLE])
        origin = f"environment {key}"
        value = parse_text(known[key], environ[key], origin)
        given[known[key]] = _Given(value=value, origin=origin)
    return given


def _validate(given: Mapping[str, _Given]) -> Settings:
    """Build the settings strictly: a number in quotes is text, and `yes` is no number."""
    nested: dict[str, Any] = Settings().model_dump(mode="json")
    for name, entry in given.items():
        section, _, field = name.rpartition(".")
        (nested[section] if section else nested)[field] = entry.value
    try:
        return Settings.model_validate_json(to_json(nested), strict=True)
    except ValidationError as error:
        raise _wrong_value(error, given) from error


def _wrong_value(error: ValidationError, given: Mapping[str, _Given]) -> SettingsError:
    """The first problem that pydantic found, with its value and place."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    name = next(candidate for candidate in (".".join(path[:2]), path[0]) if candidate in fields())
    expected = first["msg"][0].lower() + first["msg"][1:]
    meaning = fields()[name].description
    return SettingsError(
        f"{name} = {_shown(name, given[name].value)} ({given[name].origin}): {expected}. "
        f"The setting: {meaning}",
        name,
    )


def _require_digests(settings: Settings, given: Mapping[str, _Given]) -> None:
    """Refuse API keys in clear text; the value itself is not repeated."""
    try:
        KeyRing(settings.gateway.api_keys)
    except SettingsError as error:
        origin = given["gateway.api_keys"].origin
        raise SettingsError(f"{error} ({origin})", error.param) from error


def _require_switch(given: Mapping[str, _Given]) -> None:
    """Let nothing but the environment arm faults: a file may be left behind, or copied."""
    switch = given.get(_ARMED)
    if switch is not None and switch.value is not False and not switch.from_environment:
        raise SettingsError(
            f"{_ARMED} ({switch.origin}): faults are armed by {variable(_ARMED)}=true in the "
            "environment and nowhere else. Leave it out here.",
            _ARMED,
        )


def _shown(name: str, value: object) -> str:
    return "(hidden)" if name in _SECRETS else repr(value)


def _unknown(name: str, origin: str, known: Iterable[str]) -> SettingsError:
    """An unknown dotted name, with the closest one as the remedy."""
    names = list(known)
    same_field = [full for full in names if full.rpartition(".")[2] == name.rpartition(".")[2]]
    closest = same_field[0] if same_field else _closest(name, names, 0.5)
    advice = f"did you mean {closest}?" if closest else "`headrace config show` lists all settings"
    return SettingsError(f"unknown setting {name} ({origin}); {advice}", name)


def _unknown_variable(key: str, known: Iterable[str]) -> SettingsError:
    # Without the prefix, which makes every two of them alike.
    closest = _closest(key.removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in known], 0.5)
    advice = (
        f"did you mean {_PREFIX}{closest}?"
        if closest
        else "settings are HEADRACE_<SECTION>__<FIELD>, see `headrace config show`; unset any other"
    )
    return SettingsError(f"unknown environment variable {key}; {advice}", key)


def _closest(name: str, known: Iterable[str], ratio: float) -> str | None:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=ratio)
    return matches[0] if matches else None
