"""The annotated example is the reference of all settings, so it must be complete and true."""

from pathlib import Path

import pytest

from headrace_deploy.located_yaml import read_sections
from headrace_deploy.settings_sources import fields, load, value_of
from headrace_replicas.contract.settings import Settings

EXAMPLE = Path(__file__).parents[2] / "k8s-free-deploy" / "fleet.example.yaml"
DEFAULTS = Settings().model_dump(mode="json")


def default_of(name: str) -> object:
    value: object = DEFAULTS
    for part in name.split("."):
        assert isinstance(value, dict)
        value = value[part]
    return value


def test_example_names_every_setting_and_no_other() -> None:
    """The example holds exactly the fields of the models."""
    assert set(read_sections(EXAMPLE)) == set(fields())


@pytest.mark.parametrize("name", sorted(fields()))
def test_example_shows_the_default(name: str) -> None:
    """A value in the example is the default of its field."""
    assert read_sections(EXAMPLE)[name].value == default_of(name)


@pytest.mark.parametrize("name", sorted(fields()))
def test_example_explains_each_setting(name: str) -> None:
    """Right above each setting stands a comment of more than a few words."""
    lines = EXAMPLE.read_text().splitlines()
    above = read_sections(EXAMPLE)[name].line - 2
    comment: list[str] = []
    while lines[above].strip().startswith("#"):
        comment.insert(0, lines[above].strip(" #"))
        above -= 1
    assert len(" ".join(comment).split()) >= 4


@pytest.mark.parametrize(
    "name", sorted(name for name, field in fields().items() if field.default is None)
)
def test_example_says_what_null_means(name: str) -> None:
    """The comment of a setting that may be null says what null does."""
    lines = EXAMPLE.read_text().splitlines()
    line = read_sections(EXAMPLE)[name].line
    assert "null:" in " ".join(lines[line - 4 : line - 1])


def test_example_loads_as_the_defaults() -> None:
    """Serving with the example changes nothing, and each value comes from the file."""
    loaded = load(EXAMPLE, {}, {})
    defaults = load(None, {}, {})
    assert loaded.settings == defaults.settings
    assert all(origin.startswith("file ") for origin in loaded.origins.values())
    assert value_of(loaded.settings, "gateway.port") == 8000
