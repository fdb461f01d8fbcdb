"""What the local Ray node is started with, and that nothing of it stays behind."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from headrace_deploy.leash import LeashOrder, order_arguments, parse_order
from headrace_deploy.node_plan import (
    TEMP_DIR_MAX_BYTES,
    NodePlan,
    host_label,
    node_environment,
    require_short,
    start_command,
)
from headrace_deploy.ports import free_ports, is_free, reachable, require_free, with_real_ports
from headrace_deploy.session import Member, alive, kill_all, members
from headrace_replicas.contract.clock import SystemClock
from headrace_replicas.contract.errors import LaunchError, SettingsError
from headrace_replicas.contract.settings import GatewaySettings, RaySettings, Settings
from tests.support.waiting import comes_true

PLAN = NodePlan(
    host="m1",
    metal=2,
    cpus=4,
    port=20_001,
    dashboard_port=20_002,
    client_port=20_003,
    temp_dir=Path("/tmp/hr-x/ray"),  # noqa: S108 - a name in a command line, nothing is written
    object_store_bytes=150_000_000,
    token_file=Path("/tmp/hr-x/token"),  # noqa: S108 - as above
)
# A child in a process group of its own, as Ray's workers are, that does not heed SIGTERM.
STUBBORN = (
    "import os, signal, time; os.setpgid(0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(60)"
)
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_ray_knows_each_option_of_the_command() -> None:
    """Every option that the head is started with exists in the installed Ray."""
    from ray.scripts.scripts import start

    known = {name for parameter in start.params for name in parameter.opts}
    used = {part.partition("=")[0] for part in start_command(Path("ray"), PLAN)[2:]}
    assert used <= known


def test_command_keeps_to_loopback_and_to_its_ports() -> None:
    """The head listens on loopback, on the planned ports, with the planned resources."""
    command = start_command(Path("/venv/bin/ray"), PLAN)
    assert command[:4] == ["/venv/bin/ray", "start", "--head", "--block"]
    options = dict(part.split("=", 1) for part in command if "=" in part)
    assert options["--node-ip-address"] == options["--dashboard-host"] == "127.0.0.1"
    assert options["--port"] == "20001"
    assert options["--labels"] == "host=m1"
    assert json.loads(options["--resources"]) == {"metal": 2}


def test_environment_is_safe_whatever_the_caller_has() -> None:
    """Authentication and loopback cannot be switched off, and no other cluster is joined."""
    environ = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "stolen",
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_REDIS_ADDRESS": "10.0.0.1:6379",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "RAY_worker_niceness": "5",
        "no_proxy": "intern",
        "PATH": "/bin",
    }
    made = node_environment(environ, PLAN.token_file)
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == str(PLAN.token_file)
    assert made["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert not {"RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAY_REDIS_ADDRESS"} & set(made)
    assert made["RAY_worker_niceness"] == "5"
    assert made["no_proxy"] == "intern,127.0.0.1,localhost"
    assert made["NO_PROXY"] == "127.0.0.1,localhost"
    assert made["PATH"] == "/bin"


@pytest.mark.parametrize(
    ("hostname", "label"),
    [
        ("m1.local", "m1.local"),
        ("Vera's MacBook", "Vera-s-MacBook"),
        ("-_-", "localhost"),
        ("", "localhost"),
        ("a" * 62 + ".b", "a" * 62),
    ],
)
def test_host_labels_are_ones_that_ray_takes(hostname: str, label: str) -> None:
    """Any hostname becomes a label value of plain characters that Ray accepts."""
    from ray._private.label_utils import validate_label_value

    assert host_label(hostname) == label
    validate_label_value(label)


def test_long_session_folders_are_refused() -> None:
    """A session folder in which sockets do not fit is refused with the limit."""
    require_short(Path("/" + "x" * (TEMP_DIR_MAX_BYTES - 1)))
    with pytest.raises(SettingsError, match=f"leave {TEMP_DIR_MAX_BYTES}"):
        require_short(Path("/" + "x" * TEMP_DIR_MAX_BYTES))


def test_taken_ports_are_refused_with_their_holder(listener: socket.socket) -> None:
    """A taken port is refused, with the process that holds it and the setting to change."""
    port = listener.getsockname()[1]
    assert not is_free(port)
    with pytest.raises(LaunchError, match=rf"{port} \(gateway\.port\): process {os.getpid()} "):
        require_free(port, "127.0.0.1", "gateway.port")
    with pytest.raises(LaunchError, match=r"ray\.dashboard_port"):
        with_real_ports(
            Settings(gateway=GatewaySettings(port=0), ray=RaySettings(port=0, dashboard_port=port))
        )


def test_foreign_addresses_are_refused() -> None:
    """An address that is not this machine's is refused, though its port is free."""
    with pytest.raises(LaunchError, match="address is refused"):
        require_free(next(free_ports()), "192.0.2.99", "gateway.port")


def test_port_zero_becomes_a_free_one() -> None:
    """Each port 0 becomes another free port; settings that name a port keep it."""
    fixed = next(free_ports())
    settings = with_real_ports(
        Settings(gateway=GatewaySettings(port=0), ray=RaySettings(port=fixed, dashboard_port=0))
    )
    ports = (settings.gateway.port, settings.ray.port, settings.ray.dashboard_port)
    assert settings.ray.port == fixed
    assert all(is_free(port) for port in ports)
    assert settings.gateway.port != settings.ray.dashboard_port
    assert len(set(islice(free_ports(), 20))) == 20


@pytest.mark.parametrize(
    ("bound", "address"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("m1", "m1")],  # noqa: S104
)
def test_wildcard_addresses_are_reached_on_loopback(bound: str, address: str) -> None:
    """A server on all addresses is asked on loopback, any other where it listens."""
    assert reachable(bound) == address


def test_leash_order_survives_the_command_line() -> None:
    """The leash reads from its command line the order that was written there."""
    for remove in (None, Path("/x y")):
        order = LeashOrder(command=("ray", "--block", "-v"), grace_s=2.5, remove=remove)
        arguments = order_arguments(order)
        assert parse_order(arguments[arguments.index("headrace_deploy.leash") + 1 :]) == order


@pytest.fixture
def leash(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A leash on a parent with a stubborn child, both up; the folder is `tmp_path / "folder"`."""
    (tmp_path / "folder").mkdir()
    order = LeashOrder(
        command=(sys.executable, "-c", PARENT), grace_s=0.5, remove=tmp_path / "folder"
    )
    with subprocess.Popen(
        order_arguments(order),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            kill_all(process.pid, (), os.getpid(), time.monotonic() + 5, SystemClock())


def assert_gone(known: frozenset[Member]) -> None:
    assert len(known) == 3
    assert alive(known) == frozenset()


def test_leash_ends_everything_when_its_owner_lets_go(
    leash: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """When its standard input closes, all processes of the session end and the folder goes."""
    known = members(leash.pid)
    assert leash.stdin is not None
    leash.stdin.close()
    leash.wait(10)
    assert_gone(known)
    assert not (tmp_path / "folder").exists()


def test_leash_ends_everything_on_sigterm(leash: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """SIGTERM to the leash ends all processes of the session and removes the folder."""
    known = members(leash.pid)
    leash.terminate()
    leash.wait(10)
    assert_gone(known)
    assert not (tmp_path / "folder").exists()


def test_leash_ends_when_its_command_dies(leash: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """When the command dies, the rest of the session ends too, and the folder stays to be read."""
    known = members(leash.pid)
    (command,) = [one for one in known if one.parent == leash.pid]
    os.kill(command.pid, signal.SIGKILL)
    assert leash.wait(10) == signal.SIGKILL
    assert_gone(known)
    assert (tmp_path / "folder").exists()


def test_leash_goes_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    """An owner killed with SIGKILL leaves no process behind."""
    mark = secrets.token_hex(8)
    command = (sys.executable, "-c", "import time; time.sleep(60)", mark)
    order = LeashOrder(command=command, grace_s=5.0, remove=tmp_path / "none")
    owner_code = (
        "import subprocess, sys, time; "
        f"subprocess.Popen({order_arguments(order)!r}, stdin=subprocess.PIPE, "
        "start_new_session=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", owner_code]) as owner:
        wait_until(lambda: len(marked(mark)) == 2)
        owner.kill()
    wait_until(lambda: not marked(mark))


def marked(mark: str) -> list[int]:
    """Processes that carry the mark as an argument of their own."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    assert comes_true(is_true, patience_s=20, every_s=0.05), "did not come true in 20 s"


def test_killing_a_session_spares_strangers() -> None:
    """What is ended is the session and nothing else."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        subprocess.Popen(sleep, start_new_session=True) as ours,
        subprocess.Popen(sleep, start_new_session=True) as stranger,
    ):
        try:
            clock = SystemClock()
            rest = kill_all(ours.pid, (), os.getpid(), clock.monotonic_s() + 10, clock)
            assert rest == frozenset()
            assert ours.wait(5) == -signal.SIGKILL
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_reused_pid_is_another_process() -> None:
    """A process with the pid of a known one and another start is not taken for it."""
    (me,) = [one for one in members(os.getsid(0)) if one.pid == os.getpid()]
    other = Member(pid=me.pid, started_s=me.started_s - 100, parent=me.parent, session=me.session)
    assert alive([me, other]) == {me}
