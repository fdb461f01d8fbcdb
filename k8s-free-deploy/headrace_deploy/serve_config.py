"""Renders the Ray Serve config from the settings.

The packaged template is a whole config by itself; rendering only fills in `args` and the HTTP
address. Ray Serve gets it by `serve deploy`, never by `serve.run`, which restarts every replica.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

import yaml

from headrace_replicas.contract.settings import Settings

APP_NAME: Final = "headrace"


def template_text() -> str:
    """The packaged Serve config, as it ships."""
    template = files("headrace_deploy") / "templates" / "serve.yaml"
    return template.read_text(encoding="utf-8")


def app_arguments(settings: Settings) -> Mapping[str, Any]:
    """What the application builder gets: all settings but those of the local Ray node."""
    return settings.model_dump(mode="json", exclude={"ray"})


def render(settings: Settings) -> Mapping[str, Any]:
    """The Serve config as a mapping.

    Args:
        settings: With a real port; Ray Serve would take 0 for a port number.
    """
    config: dict[str, Any] = yaml.safe_load(template_text())
    (app,) = config["applications"]
    app["args"] = app_arguments(settings)
    config["http_options"] |= {"host": settings.gateway.host, "port": settings.gateway.port}
    return config


def render_yaml(settings: Settings) -> str:
    """The Serve config as the text of a YAML file."""
    return yaml.safe_dump(dict(render(settings)), sort_keys=False)
