"""Settings: who wins, where a value came from, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_deploy.settings_sources import fields, load, parse_text, value_of, variable
from headrace_replicas.contract.errors import SettingsError

WriteFile = Callable[[str], Path]
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@pytest.fixture
def write_file(tmp_path: Path) -> WriteFile:
    def write(text: str) -> Path:
        path = tmp_path / "fleet.yaml"
        path.write_text(text)
        return path

    return write


def test_nothing_given_means_defaults() -> None:
    """Without any source every field has its default and says so."""
    loaded = load(None, {}, {})
    assert loaded.settings.gateway.port == 8000
    assert set(loaded.origins) == set(fields())
    assert set(loaded.origins.values()) == {"default"}


def test_each_source_beats_the_next(write_file: WriteFile) -> None:
    """The command line beats the environment, which beats the file, which beats the default."""
    path = write_file("gateway:\n  port: 1\n  replicas: 2\n  max_ongoing_requests: 3\n")
    environ = {"HEADRACE_GATEWAY__PORT": "11", "HEADRACE_GATEWAY__REPLICAS": "12"}
    loaded = load(path, environ, {"gateway.port": 21})
    gateway = loaded.settings.gateway
    assert (gateway.port, gateway.replicas, gateway.max_ongoing_requests) == (21, 12, 3)
    assert loaded.origins["gateway.port"] == "command line"
    assert loaded.origins["gateway.replicas"] == "environment HEADRACE_GATEWAY__REPLICAS"
    assert loaded.origins["gateway.max_ongoing_requests"] == f"file {path}:4"
    assert loaded.origins["gateway.host"] == "default"


def test_sections_merge_by_field(write_file: WriteFile) -> None:
    """Setting one field of a section leaves the others of that section as they are."""
    loaded = load(
        write_file("engine: {max_batch: 4}\n"), {"HEADRACE_ENGINE__FLUSH_TOKENS": "2"}, {}
    )
    assert loaded.settings.engine.max_batch == 4
    assert loaded.settings.engine.flush_tokens == 2
    assert loaded.settings.engine.prefill_chunk_tokens == 512


@pytest.mark.parametrize("name", sorted(fields()))
def test_every_field_has_a_variable(name: str) -> None:
    """Every field can be set from the environment by its own name."""
    default = value_of(load(None, {}, {}).settings, name)
    text = "null" if default is None else "[]" if default == () else str(default)
    assert load(None, {variable(name): text}, {}).origins[name] == f"environment {variable(name)}"


def test_environment_takes_yaml_lists() -> None:
    """A list in an environment variable is read as a YAML list."""
    loaded = load(None, {"HEADRACE_MODEL__ALIASES": "[gpt-4o, local]"}, {})
    assert loaded.settings.model.aliases == ("gpt-4o", "local")


@pytest.mark.parametrize("text", ["1234567", "0x10", "1e3", "true", "2026-01-02", "a: b", "[x"])
def test_text_fields_take_text_as_it_is(text: str) -> None:
    """A revision that looks like a number, a date or a list stays text in the environment."""
    assert load(None, {"HEADRACE_MODEL__REVISION": text}, {}).settings.model.revision == text


@pytest.mark.parametrize("text", ["", "null", "~"])
def test_environment_can_say_null(text: str) -> None:
    """An empty variable and `null` mean None where None is allowed."""
    assert load(None, {"HEADRACE_MODEL__NAME": text}, {}).settings.model.name is None


def test_state_dir_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The state folder comes out absolute, with the home folder filled in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(None, {}, {}).settings.state_dir == tmp_path / ".headrace"
    assert load(None, {"HEADRACE_STATE_DIR": "~/x"}, {}).settings.state_dir == tmp_path / "x"
    assert load(None, {}, {"state_dir": Path("y")}).settings.state_dir == Path.cwd() / "y"


@pytest.mark.parametrize(
    ("text", "param", "says"),
    [
        ("gateway:\n  prot: 1\n", "gateway.prot", "fleet.yaml:2); did you mean gateway.port?"),
        ("gatway:\n  port: 1\n", "gatway.port", "fleet.yaml:2); did you mean gateway.port?"),
        ("\nport: 1\n", "port", "fleet.yaml:2); did you mean gateway.port?"),
        ("xyzzy: 1\n", "xyzzy", "fleet.yaml:1); `headrace config show` lists all"),
    ],
)
def test_unknown_keys_fail_by_name(write_file: WriteFile, text: str, param: str, says: str) -> None:
    """An unknown key in a file fails with its line and the closest known name."""
    with pytest.raises(SettingsError) as caught:
        load(write_file(text), {}, {})
    assert caught.value.param == param
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("HEADRACE_GATEWAY__PROT", "HEADRACE_GATEWAY__PORT"),
        ("HEADRACE_GATEWAY_PORT", "HEADRACE_GATEWAY__PORT"),
        ("HEADRACE_STATEDIR", "HEADRACE_STATE_DIR"),
        ("HEADRACE_API_KEYY", "HEADRACE_API_KEY"),
        ("HEADRACE_PORT", "HEADRACE_RAY__PORT"),
        ("HEADRACE_FLEET__PROBE_PERIOD", "HEADRACE_FLEET__PROBE_PERIOD_S"),
    ],
)
def test_unknown_variables_fail_by_name(name: str, closest: str) -> None:
    """An unknown variable of our form fails with the closest known one."""
    with pytest.raises(SettingsError, match=f"{name}; did you mean {closest}"):
        load(None, {name: "1"}, {})


@pytest.mark.parametrize("name", ["HEADRACE_BOGUS", "HEADRACE_", "HEADRACE_X__", "HEADRACE_zzz"])
def test_variables_like_none_of_ours_fail_too(name: str) -> None:
    """With our prefix nothing is passed over, even when it is empty."""
    for value in ("1", ""):
        with pytest.raises(SettingsError, match=rf"unknown environment variable {name};") as caught:
            load(None, {name: value}, {})
        assert caught.value.param == name


def test_a_home_that_is_not_there_is_refused() -> None:
    """`~name` of nobody has no meaning."""
    with pytest.raises(SettingsError, match="write the path in full") as caught:
        load(None, {"HEADRACE_STATE_DIR": "~no-such-person/x"}, {})
    assert caught.value.param == "state_dir"


def test_foreign_variables_pass() -> None:
    """Variables of other programs are none of ours, and the key of `serve` is no setting."""
    assert load(None, {"PATH": "/bin", "HEADRACE_API_KEY": "x"}, {}) == load(None, {}, {})


@pytest.mark.parametrize(
    ("text", "param", "says"),
    [
        ("gateway:\n  port: eight\n", "gateway.port", "'eight'"),
        ('gateway:\n  port: "8000"\n', "gateway.port", "'8000'"),
        ("gateway:\n  port: true\n", "gateway.port", "valid integer"),
        ("gateway:\n  port: 70000\n", "gateway.port", "65535"),
        ("gateway:\n  keepalive_s: -1\n", "gateway.keepalive_s", "greater than 0"),
        ("gateway:\n  keepalive_s: .inf\n", "gateway.keepalive_s", "finite"),
        ("gateway:\n  host: 1\n", "gateway.host", "valid string"),
        ("gateway:\n  host: {a: 1}\n", "gateway.host", "valid string"),
        ("model:\n  aliases: [1]\n", "model.aliases", "valid string"),
        ("engine:\n  device: tpu\n", "engine.device", "'auto', 'cpu' or 'gpu'"),
        ("#\nstate_dir: 1\n", "state_dir", "valid string"),
    ],
)
def test_wrong_values_name_field_value_and_place(
    write_file: WriteFile, text: str, param: str, says: str
) -> None:
    """A wrong value is refused with its field, what was expected, and its line."""
    with pytest.raises(SettingsError) as caught:
        load(write_file(text), {}, {})
    assert caught.value.param == param
    assert says in str(caught.value)
    assert "fleet.yaml:2)" in str(caught.value)


def test_wrong_environment_value_names_the_variable() -> None:
    """A wrong value from the environment is blamed on its variable."""
    with pytest.raises(SettingsError, match=r"\(environment HEADRACE_GATEWAY__PORT\)"):
        load(None, {"HEADRACE_GATEWAY__PORT": "eight"}, {})
    with pytest.raises(SettingsError, match="write a list as"):
        load(None, {"HEADRACE_GATEWAY__PORT": "[8"}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gateway: [", "fleet.yaml:1 is not valid YAML"),
        ("- a\n", "must be a mapping"),
        ("gateway: 8000\n", "gateway (file"),
        ("gateway:\n  port: 1\n  port: 2\n", "gateway.port is set twice, first on line 2"),
        ("[a]: 1\n", "a key must be a plain name"),
        ("gateway: *x\n", "not valid YAML"),
        ("gateway:\n  port: !!python/name:os.system ''\n", "not valid YAML"),
    ],
)
def test_broken_files_are_refused(write_file: WriteFile, text: str, says: str) -> None:
    """A file that is no mapping of sections is refused with the reason."""
    with pytest.raises(SettingsError) as caught:
        load(write_file(text), {}, {})
    assert says in str(caught.value)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A file that is not there is named, with a file to start from."""
    with pytest.raises(SettingsError, match=r"nowhere\.yaml.*fleet\.example\.yaml"):
        load(tmp_path / "nowhere.yaml", {}, {})


def test_binary_file_is_refused(tmp_path: Path) -> None:
    """A file that is no text is refused as such."""
    path = tmp_path / "fleet.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="UTF-8"):
        load(path, {}, {})


def test_empty_sections_mean_defaults(write_file: WriteFile) -> None:
    """A file whose entries are all commented out is a file of defaults."""
    path = write_file("gateway:\n#  port: 1\n")
    assert load(path, {}, {}) == load(None, {}, {})
    assert load(write_file("# nothing\n"), {}, {}) == load(None, {}, {})


def test_api_keys_must_be_digests_and_stay_hidden(write_file: WriteFile) -> None:
    """A key in clear text is refused, and no message repeats it."""
    assert load(None, {}, {"gateway.api_keys": (DIGEST,)}).settings.gateway.api_keys == (DIGEST,)
    for text in ("[sesame]", "[1234]", "sesame", f"[{DIGEST}, {DIGEST[:-1]}]"):
        with pytest.raises(SettingsError) as caught:
            load(write_file(f"gateway:\n  api_keys: {text}\n"), {}, {})
        assert str(caught.value.param).startswith("gateway.api_keys")
        assert "sesame" not in str(caught.value)
        assert "1234" not in str(caught.value)


def test_unknown_override_fails() -> None:
    """A dotted name from the command line must exist."""
    with pytest.raises(SettingsError, match=r"did you mean engine\.max_batch"):
        load(None, {}, {"engine.max_batsh": 1})
    with pytest.raises(SettingsError, match=r"did you mean engine\.max_batch"):
        parse_text("engine.max_batsh", "1", "command line")


@given(port=st.integers(-10, 70_000), replicas=st.integers())
def test_numbers_are_taken_or_refused_never_bent(port: int, replicas: int) -> None:
    """A number arrives exactly as given, or is refused with the field's name."""
    given_values: dict[str, object] = {"gateway.port": port, "replica.count": replicas}
    if 0 <= port <= 65535 and replicas >= 1:
        settings = load(None, {}, given_values).settings
        assert (settings.gateway.port, settings.replica.count) == (port, replicas)
    else:
        with pytest.raises(SettingsError) as caught:
            load(None, {}, given_values)
        assert caught.value.param in given_values


SWITCH = {"HEADRACE_INJECTION__ARMED": "true"}


def test_a_plan_of_faults_wants_the_switch_from_the_environment(
    write_file: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name the plan; its path is absolute for engines with another working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faults.yaml").write_text("faults: [{kind: short_read}]")
    settings = write_file("injection: {plan: faults.yaml}\n")
    with pytest.raises(SettingsError, match=r"injection\.plan.*set HEADRACE_INJECTION__ARMED=true"):
        load(settings, {}, {})
    loaded = load(settings, SWITCH, {})
    assert loaded.settings.injection.plan == tmp_path / "faults.yaml"
    assert loaded.settings.injection.armed


@pytest.mark.parametrize("source", ["file", "command line"])
def test_nothing_but_the_environment_arms_faults(write_file: WriteFile, source: str) -> None:
    """A settings file may be left behind or copied to another fleet."""
    path = write_file("injection: {armed: true}\n") if source == "file" else None
    overrides = {"injection.armed": True} if source == "command line" else {}
    with pytest.raises(SettingsError, match="HEADRACE_INJECTION__ARMED=true in the environment"):
        load(path, {}, overrides)


def test_a_plan_of_faults_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml cannot be read"):
        load(None, SWITCH, {"injection.plan": str(tmp_path / "none.yaml")})
