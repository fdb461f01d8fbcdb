"""Reads what Ray Serve says of an application.

Pure. The input is the JSON of `GET /api/serve/applications/`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# The first line of what an exception prints of itself: `module.SomeError: text`.
_ERROR_LINE: Final = re.compile(r"([A-Za-z_][\w.]*)?(Error|Exception|Exit|Interrupt)\b.*")
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentProgress:
    """How far one deployment is.

    Attributes:
        running: Replicas that Ray Serve counts as running.
        wanted: Replicas that there should be.
        message: Ray Serve's own words on its trouble; empty without any.
    """

    name: str
    running: int
    wanted: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStatus:
    """One application.

    Attributes:
        status: Ray Serve's word: NOT_STARTED, DEPLOYING, RUNNING, UNHEALTHY, DEPLOY_FAILED.
        message: Ray Serve's own words on its trouble; empty without any.
        deployments: In Ray Serve's order.
    """

    status: str
    message: str
    deployments: tuple[DeploymentProgress, ...]


def read_status(body: Mapping[str, Any], name: str) -> AppStatus | None:
    """The status of one application, or None while Ray Serve does not know it."""
    app = body.get("applications", {}).get(name)
    if app is None:
        return None
    deployments = tuple(_progress(one) for one in app.get("deployments", {}).values())
    return AppStatus(status=app["status"], message=app.get("message", ""), deployments=deployments)


def _progress(deployment: Mapping[str, Any]) -> DeploymentProgress:
    replicas = deployment.get("replicas", [])
    return DeploymentProgress(
        name=deployment["name"],
        running=sum(replica.get("state") == "RUNNING" for replica in replicas),
        wanted=deployment.get("target_num_replicas", 0),
        message=deployment.get("message", ""),
    )


def describe(status: AppStatus) -> str:
    """One line on how far the application is, with the first trouble if there is one."""
    parts = [f"{one.name} {one.running}/{one.wanted}" for one in status.deployments]
    line = ", ".join(parts) or status.status.lower().replace("_", " ")
    troubles = [one.message for one in status.deployments if "Error" in one.message]
    return f"{line} ({shorten(troubles[0], 160)})" if troubles else line


def failure(status: AppStatus) -> str:
    """Why an application failed, in a few hundred characters without a traceback."""
    messages = [status.message, *(one.message for one in status.deployments)]
    causes = [shorten(message, 400) for message in messages if "Traceback" in message]
    plain = [shorten(message, 400) for message in messages if message]
    return next(iter([*causes, *plain]), "Ray Serve gives no reason")


def last_words(log: str) -> str:
    """Why a program ended, by its log: its last exception, or else its last line."""
    if "Traceback" in log:
        return shorten(log, 400)
    lines = log.strip().splitlines()
    return shorten(lines[-1], 400) if lines else "it said nothing"


def shorten(message: str, limit: int) -> str:
    """The line that matters in a message with a traceback.

    Args:
        message: Text as Ray gives it: sentences, tracebacks of several processes, colours.
        limit: Characters to keep at most.

    Returns:
        The last exception's own line with what follows it, or the whole message on one line when
        it holds no traceback.
    """
    lines = [line.strip() for line in _ANSI.sub("", message).strip().splitlines()]
    starts = [
        index
        for index, line in enumerate(lines)
        if _ERROR_LINE.fullmatch(line) and "Traceback" in "".join(lines[:index])
    ]
    text = " ".join(filter(None, lines[starts[-1] :] if starts else lines))
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
