"""Finding free TCP ports, and saying who holds a taken one."""

import secrets
import socket
from collections.abc import Iterator
from typing import Final

import psutil

from headrace_replicas.contract.errors import LaunchError
from headrace_replicas.contract.settings import Settings

# Below the ranges from which Linux (32768) and macOS (49152) give ports to everybody who asks for
# any: between picking and binding, Ray itself asks dozens of times.
_FREE_RANGE: Final = range(20_000, 32_000)
_LOOPBACK: Final = "127.0.0.1"


def is_free(port: int, host: str = _LOOPBACK) -> bool:
    """Whether a server could listen on this port and nobody answers on it."""
    with socket.socket() as probe:
        # A server with SO_REUSEPORT would let a second one bind beside it, so ask both ways.
        probe.settimeout(1.0)
        if probe.connect_ex((_LOOPBACK, port)) == 0:
            return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
        except OSError:
            return False
    return True


def free_ports() -> Iterator[int]:
    """Different free ports, as many as are taken from here.

    Raises:
        LaunchError: Nothing in the range is free.
    """
    start = secrets.randbelow(len(_FREE_RANGE))
    for offset in range(len(_FREE_RANGE)):
        port = _FREE_RANGE[(start + offset) % len(_FREE_RANGE)]
        if is_free(port):
            yield port
    raise LaunchError(f"no free TCP port between {_FREE_RANGE.start} and {_FREE_RANGE.stop}")


def require_free(port: int, host: str, name: str) -> None:
    """Refuse a port that is taken.

    Args:
        port: The port.
        host: The address to listen on.
        name: The setting that chose the port.

    Raises:
        LaunchError: Somebody listens there, or the address is not this machine's.
    """
    if is_free(port, host):
        return
    holder = holder_of(port)
    raise LaunchError(
        f"cannot listen on {host}:{port} ({name}): {holder or 'the address is refused'}; "
        f"end that, or set {name} to another port (0 takes any free one)",
        name,
    )


def holder_of(port: int) -> str:
    """Who listens on a local port, as far as this user may know; empty when nobody does."""
    for process in psutil.process_iter():
        try:
            sockets = process.net_connections(kind="tcp")
            if any(one.laddr[1] == port and one.status == psutil.CONN_LISTEN for one in sockets):
                return f"process {process.pid} ({process.name()}) listens there"
        except psutil.Error:
            # Gone meanwhile, or another user's.
            continue
    return "" if is_free(port) else "another user's process listens there"


def with_real_ports(settings: Settings) -> Settings:
    """Replace each port 0 by a free one, and check the others.

    Raises:
        LaunchError: A port is taken; the message says by whom.
    """
    gateway, ray = settings.gateway, settings.ray
    for port, host, name in (
        (gateway.port, gateway.host, "gateway.port"),
        (ray.port, _LOOPBACK, "ray.port"),
        (ray.dashboard_port, _LOOPBACK, "ray.dashboard_port"),
    ):
        if port:
            require_free(port, host, name)
    free = free_ports()
    return settings.model_copy(
        update={
            "gateway": gateway.model_copy(update={"port": gateway.port or next(free)}),
            "ray": ray.model_copy(
                update={
                    "port": ray.port or next(free),
                    "dashboard_port": ray.dashboard_port or next(free),
                }
            ),
        }
    )


def reachable(host: str) -> str:
    """The address under which this machine reaches a server that is bound to `host`."""
    wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - no binding
    address = wildcards.get(host, host)
    return f"[{address}]" if ":" in address else address
