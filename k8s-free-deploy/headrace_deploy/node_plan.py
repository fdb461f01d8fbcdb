"""How one local Ray head is started: its arguments and its environment.

Pure. Facts about Ray come from its 2.60 sources and from runs on Linux.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace_replicas.contract.errors import SettingsError

# A socket path ends at 103 bytes on macOS. Ray appends at most
# /session_<date>_<time>_<microseconds>_<7-digit pid>/sockets/dash_MetricsHead, 68 bytes.
TEMP_DIR_MAX_BYTES: Final = 103 - 68

_FORCED: Final[Mapping[str, str]] = {
    # Without clusters Ray takes 127.0.0.1 as its own address, on Linux as on macOS. Otherwise it
    # resolves even an explicit 127.0.0.1 to the network's address and listens on all interfaces.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Serve replicas take pickled calls on a port of all interfaces, whatever address the node has;
    # the token is what keeps strangers out.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Started by `uv run`, Ray would start each worker by `uv run` again, which looks at the project
    # in the present folder; the workers are this very environment's.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # On one host there is nowhere to drain to; 30 s of waiting at the end would be for nothing.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
_PREFERRED: Final[Mapping[str, str]] = {
    # Ray's default of 15 slows the engine below everything else on the machine.
    "RAY_worker_niceness": "0",
    # A model that fills the memory is no leak. Ray's monitor would kill the engine at 95 %.
    "RAY_memory_monitor_refresh_ms": "0",
    # Serve's logs go to its files (JSON lines); a second copy on stderr helps nobody.
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # transformers would say in each log that it misses PyTorch, which nothing here needs.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}
# What an outer Ray set for itself would lead ours astray.
_DROPPED: Final = frozenset(
    {
        "RAY_ADDRESS",
        "RAY_API_SERVER_ADDRESS",
        "RAY_AUTH_TOKEN",
        "RAY_DASHBOARD_ADDRESS",
        "RAY_JOB_ID",
        "RAY_REDIS_ADDRESS",
        "RAY_TMPDIR",
        "RAY_external_storage_namespace",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """Everything that `ray start` is told.

    Attributes:
        host: Value of the node's label `host`.
        metal: Engines that may run on the node, Ray's custom resource `metal`.
        cpus: CPUs that Ray counts with. It starts an idle worker (84 MB) for each, so this is
            what the deployments ask for, not what the machine has.
        port: Port of Ray's head.
        dashboard_port: Port of the dashboard and the REST interface.
        client_port: Port of Ray's client server, which cannot be left out.
        temp_dir: Ray's session folder.
        object_store_bytes: Size of Ray's object store.
        token_file: File with the secret that every call inside this cluster carries.
    """

    host: str
    metal: int
    cpus: int
    port: int
    dashboard_port: int
    client_port: int
    temp_dir: Path
    object_store_bytes: int
    token_file: Path


def start_command(ray: Path, plan: NodePlan) -> list[str]:
    """The command that runs the head in the foreground; `ray` is the program's path."""
    return [
        str(ray),
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--port={plan.port}",
        f"--ray-client-server-port={plan.client_port}",
        # Ray's own default is a range that collides with ports of others.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={plan.dashboard_port}",
        # Nobody reads the workers' output through a driver.
        "--include-log-monitor=false",
        # The autoscaler's process has nothing to do on one host.
        "--no-monitor",
        f"--num-cpus={plan.cpus}",
        # Engines are counted as `metal`; looking for GPUs runs system_profiler for seconds.
        "--num-gpus=0",
        f"--resources={json.dumps({'metal': plan.metal})}",
        f"--labels=host={plan.host}",
        f"--object-store-memory={plan.object_store_bytes}",
        f"--temp-dir={plan.temp_dir}",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]


def node_environment(environ: Mapping[str, str], token_file: Path) -> dict[str, str]:
    """The environment of the head and of everything that talks to it.

    Args:
        environ: The caller's environment, which goes through except for Ray's addresses.
        token_file: Where the cluster's secret lies.
    """
    kept = {name: value for name, value in environ.items() if name not in _DROPPED}
    loopback = {name: _with_loopback(kept.get(name, "")) for name in ("no_proxy", "NO_PROXY")}
    secret = {"RAY_AUTH_TOKEN_PATH": str(token_file)}
    return {**_PREFERRED, **kept, **_FORCED, **loopback, **secret}


def _with_loopback(no_proxy: str) -> str:
    """Loopback must not go through a company's HTTP proxy."""
    return ",".join([*filter(None, [no_proxy]), "127.0.0.1", "localhost"])


def host_label(hostname: str) -> str:
    """A hostname as a Ray label value: letters, digits, `-`, `_`, `.`, at most 63 of them."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", hostname)[:63].strip("-._")
    return plain or "localhost"


def require_short(temp_dir: Path) -> None:
    """Refuse a session folder in which Ray's sockets would not fit.

    Raises:
        SettingsError: The path is too long.
    """
    size = len(str(temp_dir).encode())
    if size > TEMP_DIR_MAX_BYTES:
        raise SettingsError(
            f"ray.temp_dir {temp_dir} has {size} bytes; socket paths leave {TEMP_DIR_MAX_BYTES}, "
            "so take a shorter one or leave it null",
            "ray.temp_dir",
        )
