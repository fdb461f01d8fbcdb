"""`headrace hosts`: where engines may not start, why, and how an operator ends that."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, assert_never

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace_deploy.command_line import JsonOption, SettingsFileOption, StateDirOption, endings
from headrace_deploy.folders import names_in, using_state_folder
from headrace_deploy.settings_sources import load
from headrace_replicas.boot_id import read_boot_id
from headrace_replicas.contract.clock import Clock, SystemClock
from headrace_replicas.contract.errors import SettingsError
from headrace_replicas.contract.fleet import HostState
from headrace_replicas.contract.settings import Settings
from headrace_replicas.device_claim import device_folder, host_folder, try_hold
from headrace_replicas.host_files import QuarantineFile
from headrace_replicas.host_record import StartsFile
from headrace_replicas.last_words import NAME, LastWords, read_last_words
from headrace_replicas.start_gate import Quarantine, Start, Wait, decide_start

hosts_app = typer.Typer(
    help="See where engines may not start on this machine, and release hosts.", no_args_is_help=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """What is known of a device.

    Attributes:
        host: The host's label.
        device: Index of the device.
        running: Whether a process holds it.
        generation: Of its newest engine; 0 when there was none.
        state: Whether an engine may start on it.
        reason: Why not; empty when it may.
        until_s: Wall-clock second until when; None for until a reboot or an operator.
        last_words: What its newest engine says, or left.
    """

    host: str
    device: int
    running: bool
    generation: int
    state: HostState
    reason: str
    until_s: float | None
    last_words: str


@hosts_app.command("list")
def hosts_list(
    state_dir: StateDirOption = None, file: SettingsFileOption = None, as_json: JsonOption = False
) -> None:
    """List the devices of this machine, whether engines may start there, and their last words."""
    clock = SystemClock()
    with endings(Console(stderr=True)):
        settings = _settings(state_dir, file)
        with using_state_folder(settings.state_dir):
            rows = [row for host in _hosts(settings) for row in _rows(settings, host, clock)]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    console = Console(highlight=False)
    if not rows:
        console.print("no engine has started on this machine")
        return
    table = Table("host", "device", "engine", "starts", "last words", box=None, pad_edge=False)
    for row in rows:
        engine = f"{row.generation}, {'running' if row.running else 'gone'}"
        shown = (row.host, str(row.device), engine, _starts(row, clock), row.last_words)
        table.add_row(*map(escape, shown))
    console.print(table)


@hosts_app.command("release")
def hosts_release(
    host: Annotated[str, typer.Argument(help="A host from the list.")],
    state_dir: StateDirOption = None,
) -> None:
    """Let engines start on a host again at once: ends its quarantine, its holds and its pauses."""
    clock = SystemClock()
    with endings(Console(stderr=True)):
        settings = _settings(state_dir, None)
        with using_state_folder(settings.state_dir):
            known = _hosts(settings)
            if host not in known:
                raise SettingsError(
                    f"no host {host!r} keeps its state in {settings.state_dir}: it knows "
                    f"{', '.join(known) or 'none'}. `headrace hosts list` shows them; run it on "
                    "the host itself, or name its folder with --state-dir"
                )
            was_quarantined = _release(settings, host, clock)
    ended = "its quarantine has ended, and " if was_quarantined else ""
    typer.echo(f"{host}: {ended}what became of earlier engines counts no more")


def _settings(state_dir: Path | None, file: Path | None) -> Settings:
    given: dict[str, object] = {} if state_dir is None else {"state_dir": state_dir}
    return load(file, os.environ, given).settings


def _hosts(settings: Settings) -> tuple[str, ...]:
    """The hosts on whose devices engines were started."""
    hosts = names_in(settings.state_dir / "hosts")
    return tuple(host for host in hosts if _devices(settings, host))


def _devices(settings: Settings, host: str) -> list[int]:
    names = names_in(host_folder(settings.state_dir, host) / "devices")
    return sorted(int(name) for name in names if name.isdecimal())


def _rows(settings: Settings, host: str, clock: Clock) -> Iterator[DeviceRow]:
    for device in _devices(settings, host):
        folder = device_folder(settings.state_dir, host, device)
        held = try_hold(settings.state_dir, host, device)
        if held is not None:
            held.let_go()
        words = read_last_words(folder / NAME)
        state, reason, until_s = _standing(settings, host, StartsFile(folder), clock)
        yield DeviceRow(
            host=host,
            device=device,
            running=held is None,
            generation=0 if words is None else words.generation,
            state=state,
            reason=reason,
            until_s=until_s,
            last_words=_words_of(words, running=held is None),
        )


def _words_of(words: LastWords | None, *, running: bool) -> str:
    if words is None:
        return ""
    return f"process {words.pid} is in {words.phase}" if running else words.story()


def _standing(
    settings: Settings, host: str, starts: StartsFile, clock: Clock
) -> tuple[HostState, str, float | None]:
    now_s, boot_id = clock.now_s(), read_boot_id()
    found = QuarantineFile(settings.state_dir, host).read(now_s=now_s, boot_id=boot_id)
    if found is not None:
        return HostState.QUARANTINED, found.reason, found.until_s
    decision = decide_start(
        starts.history(), now_s=now_s, boot_id=boot_id, settings=settings.faults, draw=0.0
    )
    match decision:
        case Start():
            return HostState.USABLE, "", None
        case Wait(until_s=until_s, reason=reason):
            return HostState.BACKING_OFF, reason, until_s
        case Quarantine(until_s=end_s, reason=reason):
            return HostState.QUARANTINED, reason, end_s
    assert_never(decision)


def _starts(row: DeviceRow, clock: Clock) -> str:
    if row.state is HostState.USABLE:
        return "allowed"
    if row.until_s is None:
        return f"{row.state}: {row.reason}"
    left_s = max(0.0, row.until_s - clock.now_s())
    return f"{row.state} for {left_s:.0f} s: {row.reason}"


def _release(settings: Settings, host: str, clock: Clock) -> bool:
    """Forgive all devices of a host; whether it was quarantined."""
    for device in _devices(settings, host):
        StartsFile(device_folder(settings.state_dir, host, device)).released(clock.now_s())
    return QuarantineFile(settings.state_dir, host).lift()
