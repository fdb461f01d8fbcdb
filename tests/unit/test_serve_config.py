"""The Serve config that goes to Ray, and what Ray's answers come to."""

from importlib.resources import files
from typing import Any

import pytest
import yaml

from headrace_deploy.serve_config import APP_NAME, app_arguments, render, render_yaml, template_text
from headrace_deploy.serve_status import describe, failure, last_words, read_status, shorten
from headrace_deploy.settings_sources import load
from headrace_replicas.contract.settings import GatewaySettings, ReplicaSettings, Settings

TRACEBACK = (
    "Deploying app 'headrace' failed with exception:\n"
    "\x1b[36mTraceback (most recent call last):\x1b[39m\n"
    '  File "/x/application_state.py", line 1, in build_serve_application\n'
    "    app = call_user_app_builder_with_args_if_necessary(\n"
    "headrace_replicas.contract.errors.CheckpointError: config.json is missing; give a folder\n"
    "with a checkpoint\n"
)


def config_of(settings: Settings) -> dict[str, Any]:
    return dict(render(settings))


def test_template_is_a_whole_config() -> None:
    """The packaged template deploys the default settings as it stands."""
    config = yaml.safe_load(template_text())
    (app,) = config["applications"]
    assert app == {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": "headrace_serve.app:build",
        "args": {},
    }
    assert Settings.model_validate(app["args"]) == Settings()
    gateway = GatewaySettings()
    assert config["http_options"]["host"] == gateway.host == "127.0.0.1"
    assert config["http_options"]["port"] == gateway.port


def test_template_ships_with_the_package() -> None:
    """The template is package data, so that an installed wheel has it."""
    assert (files("headrace_deploy") / "templates" / "serve.yaml").is_file()


# Ray's schema module itself uses an old form of pydantic's Field.
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
def test_ray_accepts_template_and_rendering() -> None:
    """Ray Serve's own schema accepts the template and what is rendered from it."""
    from ray.serve.schema import ServeDeploySchema

    for config in (yaml.safe_load(template_text()), config_of(Settings())):
        schema = ServeDeploySchema.model_validate(config)
        assert schema.applications[0].import_path == "headrace_serve.app:build"
        assert schema.http_options.host == "127.0.0.1"
        # The gateway answers deadlines itself; a proxy that cuts streams would take that from it.
        assert schema.http_options.request_timeout_s is None
        assert schema.logging_config is not None
        assert schema.logging_config.encoding == "JSON"


def test_rendering_carries_the_settings() -> None:
    """The application gets the settings back as they were, and the proxies their address."""
    settings = Settings(
        gateway=GatewaySettings(host="0.0.0.0", port=9000, api_keys=("ab" * 32,)),  # noqa: S104
        replica=ReplicaSettings(count=3),
    )
    config = config_of(settings)
    assert Settings.model_validate(config["applications"][0]["args"]) == settings
    assert config["http_options"]["host"] == "0.0.0.0"  # noqa: S104 - what was asked for
    assert config["http_options"]["port"] == 9000


def test_arguments_leave_the_local_node_out() -> None:
    """Ports of the local Ray node are no business of the application, nor a reason to redeploy."""
    loaded = load(None, {}, {"ray.port": 7000}).settings
    assert app_arguments(loaded) == app_arguments(load(None, {}, {}).settings)


def test_rendered_yaml_reads_back() -> None:
    """The YAML text means what the mapping says."""
    settings = load(None, {}, {"model.name": "yes", "model.revision": "1234567"}).settings
    assert yaml.safe_load(render_yaml(settings)) == config_of(settings)


def status_body(status: str, message: str, *deployments: dict[str, Any]) -> dict[str, Any]:
    app = {
        "status": status,
        "message": message,
        "deployments": {one["name"]: one for one in deployments},
    }
    return {"applications": {APP_NAME: app}}


def test_progress_counts_running_replicas() -> None:
    """A line of progress says how many replicas of each deployment run."""
    replicas = {"name": "R", "target_num_replicas": 2, "replicas": [{"state": "RUNNING"}, {}]}
    status = read_status(status_body("DEPLOYING", "", replicas), APP_NAME)
    assert status is not None
    assert describe(status) == "R 1/2"


def test_progress_shows_the_first_trouble() -> None:
    """While Ray Serve tries again, the line of progress says why."""
    engines = {"name": "R", "target_num_replicas": 1, "message": TRACEBACK}
    status = read_status(status_body("DEPLOYING", "", engines), APP_NAME)
    assert status is not None
    assert describe(status).startswith("R 0/1 (headrace_replicas.contract.errors.CheckpointError:")


def test_unknown_application_has_no_status() -> None:
    """Before Ray Serve knows the application there is no status to read."""
    assert read_status({"applications": {}}, APP_NAME) is None
    assert read_status({}, APP_NAME) is None
    bare = read_status(status_body("NOT_STARTED", ""), APP_NAME)
    assert bare is not None
    assert describe(bare) == "not started"


@pytest.mark.parametrize("where", ["app", "deployment"])
def test_failure_is_the_last_exception_without_its_traceback(where: str) -> None:
    """A failed deployment is explained by its exception, wherever Ray Serve put it."""
    engines = {"name": "R", "message": TRACEBACK if where == "deployment" else ""}
    message = TRACEBACK if where == "app" else "The deployment failed to start 3 times in a row."
    status = read_status(status_body("DEPLOY_FAILED", message, engines), APP_NAME)
    assert status is not None
    assert failure(status) == (
        "headrace_replicas.contract.errors.CheckpointError: config.json is missing; give a folder "
        "with a checkpoint"
    )


def test_failure_without_traceback_is_told_as_it_is() -> None:
    """A failure without an exception is told in Ray Serve's words, and one without words too."""
    told = read_status(status_body("DEPLOY_FAILED", "no\nnode fits"), APP_NAME)
    silent = read_status(status_body("DEPLOY_FAILED", ""), APP_NAME)
    assert told is not None
    assert silent is not None
    assert failure(told) == "no node fits"
    assert failure(silent) == "Ray Serve gives no reason"


def test_shortening_keeps_to_its_limit() -> None:
    """A long message ends with an ellipsis at the limit."""
    assert shorten("x" * 50, 20) == "x" * 19 + "…"
    assert shorten("ValueError: said before any traceback", 80).startswith("ValueError")


def test_last_words_are_the_exception_or_the_last_line() -> None:
    """A log is summed up by its last exception, by its last line, or by its silence."""
    crash = "up\nTraceback (most recent call last):\n  File x\nException: The node timed out.\n"
    assert last_words(crash) == "Exception: The node timed out."
    assert last_words("one\ntwo\n\n") == "two"
    assert last_words("\n") == "it said nothing"
