"""One Ray head on this machine, for as long as a `with` block lasts."""

import os
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import yaml

from headrace_deploy.folders import fresh_folder, open_log
from headrace_deploy.leash import LeashOrder, order_arguments
from headrace_deploy.node_plan import (
    NodePlan,
    host_label,
    node_environment,
    require_short,
    start_command,
)
from headrace_deploy.ports import free_ports, reachable
from headrace_deploy.progress import Report
from headrace_deploy.serve_config import APP_NAME
from headrace_deploy.serve_status import (
    AppStatus,
    describe,
    failure,
    last_words,
    read_status,
    shorten,
)
from headrace_deploy.session import Member, kill_all, members
from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import LaunchError
from headrace_replicas.contract.settings import Settings

# Measured on 2 cores: the head needs 8 to 15 s, and the end of it 2 s.
_START_S: Final = 120.0
_GRACE_S: Final = 10.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.25
# The first call of Ray's Serve interface loads Serve into the dashboard: 4 to 10 s.
_HTTP_S: Final = 60.0


class LocalNode:
    """A Ray head as a child process, on a leash: it ends with this process, whatever ends that.

    Args:
        settings: With real ports, see `with_real_ports`.
        metal: Engines that may run at a time.
        environ: The environment that the head starts from.
        clock: Where the time comes from.

    Attributes:
        host: The node's label `host`.
        endpoint: Base URL of the gateways.
        dashboard_url: Ray's dashboard, which asks for the secret in `token_file`.
        token_file: The secret of this cluster.
    """

    def __init__(
        self, settings: Settings, *, metal: int, environ: Mapping[str, str], clock: Clock
    ) -> None:
        if settings.ray.temp_dir is not None:
            require_short(settings.ray.temp_dir)
        self.host = host_label(socket.gethostname())
        self.endpoint = f"http://{reachable(settings.gateway.host)}:{settings.gateway.port}"
        self.dashboard_url = f"http://127.0.0.1:{settings.ray.dashboard_port}"
        self._settings = settings
        self._metal = metal
        self._clock = clock
        # Ray opens its session folder to everybody; this one around it stays closed.
        self._folder = fresh_folder("hr-", "/tmp")  # noqa: S108 - made by mkdtemp
        self.token_file = self._folder / "token"
        self._token = secrets.token_hex(32)
        self._environ = node_environment(environ, self.token_file)
        self._logs = settings.state_dir / "logs"
        self._leash: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log_file(self) -> Path:
        """What `ray start` prints."""
        return self._logs / f"ray-{self._settings.ray.port}.log"

    def start(self, report: Report) -> None:
        """Start the head and wait until its REST interface answers.

        Raises:
            LaunchError: It did not come up; the message says where its log is, or why not.
        """
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(self._token)
        command = start_command(_program("ray"), self._plan())
        order = LeashOrder(command=tuple(command), grace_s=_GRACE_S, remove=self._folder)
        with open_log(self._settings.state_dir, self.log_file) as log:
            self._leash = subprocess.Popen(  # noqa: S603 - our own module and Ray's program
                order_arguments(order),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )
        report(f"log: {self.log_file}")
        self._await(lambda: self._get("/api/version") is not None, _START_S, "Ray's head")

    def deploy(self, config: Mapping[str, Any], report: Report) -> None:
        """Hand a config to Ray Serve by `serve deploy`, which returns before anything runs.

        Raises:
            LaunchError: Ray Serve refused the config.
        """
        file = self._folder / "serve.yaml"
        file.write_text(yaml.safe_dump(dict(config), sort_keys=False))
        report("serve deploy")
        done = subprocess.run(  # noqa: S603 - Ray's program
            [str(_program("serve")), "deploy", "-a", self.dashboard_url, str(file)],
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_S,
        )
        if done.returncode != 0:
            self._require_head()
            text = shorten(done.stderr or done.stdout, 400)
            raise self._failed(f"`serve deploy` refused the config: {text}")

    def wait_ready(self, report: Report, deadline_s: float) -> None:
        """Wait until the application runs and /readyz says yes.

        Args:
            report: Hears of each change.
            deadline_s: Seconds to wait from now.

        Raises:
            LaunchError: The application failed, the head ended, or the time ran out.
        """
        last = ""

        def is_ready() -> bool:
            nonlocal last
            status = self._status()
            if status is not None and status.status == "DEPLOY_FAILED":
                raise self._failed(f"the application did not start: {failure(status)}")
            running = status is not None and status.status == "RUNNING"
            ready, why = self._readiness() if running else (False, "")
            line = why or (describe(status) if status is not None else "Ray Serve starts")
            if line != last and not ready:
                last = line
                report(line)
            return ready

        self._await(is_ready, deadline_s, "the application")

    def owns(self, pid: int) -> bool:
        """Whether a process is part of this node."""
        return any(member.pid == pid for member in self.processes())

    def processes(self) -> frozenset[Member]:
        """All processes of this node."""
        return frozenset() if self._leash is None else members(self._leash.pid)

    def wait(self) -> None:
        """Block until the head ends by itself.

        Raises:
            LaunchError: Always, when it has ended.
        """
        if self._leash is not None:
            self._leash.wait()
        self._require_head()

    def stop(self) -> None:
        """End what this node started and nothing else, and remove its folder.

        Raises:
            LaunchError: Some process survived SIGKILL.
        """
        leash, self._leash = self._leash, None
        rest: frozenset[Member] = frozenset()
        if leash is not None and leash.stdin is not None:
            known = members(leash.pid)
            leash.stdin.close()
            try:
                leash.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                leash.kill()
                leash.wait()
            give_up_s = self._clock.monotonic_s() + _GRACE_S
            rest = kill_all(leash.pid, known, os.getpid(), give_up_s, self._clock)
        shutil.rmtree(self._folder, ignore_errors=True)
        if rest:
            pids = " ".join(str(one.pid) for one in rest)
            raise LaunchError(f"processes {pids} do not end; the machine may need a restart")

    def _plan(self) -> NodePlan:
        settings = self._settings
        return NodePlan(
            host=self.host,
            metal=self._metal,
            # Ray Serve asks for one CPU where a deployment does not say otherwise.
            cpus=settings.replica.count + settings.gateway.replicas + 2,
            port=settings.ray.port,
            dashboard_port=settings.ray.dashboard_port,
            client_port=next(free_ports()),
            temp_dir=settings.ray.temp_dir or self._folder / "ray",
            object_store_bytes=settings.ray.object_store_bytes,
            token_file=self.token_file,
        )

    def _await(self, is_done: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Ask until it is done, the head ends or the time is up."""
        give_up_s = self._clock.monotonic_s() + deadline_s
        while not is_done():
            self._require_head()
            if self._clock.monotonic_s() >= give_up_s:
                raise self._failed(f"{what} did not come up in {deadline_s:.0f} s")
            time.sleep(_POLL_S)

    def _require_head(self) -> None:
        """Say why the head is gone, if it is, in the last words of its log."""
        if self._leash is None:
            raise LaunchError("Ray's head was not started")
        if self._leash.poll() is not None:
            words = last_words(self.log_file.read_text(errors="replace"))
            raise self._failed(f"Ray's head ended by itself: {words}")

    def _status(self) -> AppStatus | None:
        answer = self._get("/api/serve/applications/")
        return None if answer is None else read_status(answer.json(), APP_NAME)

    def _get(self, path: str) -> httpx.Response | None:
        """Ask Ray's REST interface; None while nobody answers there with 200."""
        secret = {"Authorization": f"Bearer {self._token}"}
        try:
            answer = httpx.get(
                self.dashboard_url + path, headers=secret, timeout=_HTTP_S, trust_env=False
            )
        except httpx.TransportError:
            return None
        return answer if answer.status_code == httpx.codes.OK else None

    def _readiness(self) -> tuple[bool, str]:
        """What /readyz says: whether the fleet is ready, and why not."""
        try:
            answer = httpx.get(f"{self.endpoint}/readyz", timeout=_HTTP_S, trust_env=False)
        except httpx.TransportError as error:
            return False, f"/readyz: {error}"
        if answer.status_code == httpx.codes.OK:
            return True, ""
        if answer.headers.get("content-type", "").startswith("application/json"):
            return (
                False,
                f"/readyz {answer.status_code}: {answer.json().get('reason', 'no reason')}",
            )
        return False, f"/readyz {answer.status_code}: {shorten(answer.text, 160)}"

    def _failed(self, message: str) -> LaunchError:
        """An error that names the logs, which are saved from the folder that goes away."""
        session_logs = (self._settings.ray.temp_dir or self._folder / "ray") / "session_latest/logs"
        places = str(self.log_file)
        if session_logs.is_dir():
            kept = self._logs / "failed-start"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(session_logs, kept, ignore=shutil.ignore_patterns("old"))
            places += f", {kept}"
        return LaunchError(f"{message}; logs: {places}")


def _program(name: str) -> Path:
    """A program of Ray's that was installed beside this Python.

    Raises:
        LaunchError: It is not there.
    """
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise LaunchError(f"{path} is missing; install headrace with its dependency ray[serve]")
    return path
