"""Incidents on disk: one JSON object a line, the last line of an id is its newest state."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace_replicas.contract.fleet import Cause, Incident


class IncidentLog:
    """Appends incident states to `<state_dir>/hosts/<host>/incidents.jsonl`, each flushed to disk.

    Args:
        state_dir: The host's state folder.
        host: The label of the host that writes.
    """

    def __init__(self, state_dir: Path, host: str) -> None:
        self._path = state_dir / "hosts" / host / "incidents.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, incident: Incident) -> None:
        """Append one state and wait until the disk has it."""
        line = json.dumps(asdict(incident), ensure_ascii=False) + "\n"
        with self._path.open("a", encoding="utf-8") as log:
            log.write(line)
            log.flush()
            os.fsync(log.fileno())

    def read(self) -> tuple[Incident, ...]:
        """The newest state of each incident, oldest incident first.

        A line that a crash cut off is passed over: its incident's earlier state stands.
        """
        if not self._path.exists():
            return ()
        newest: dict[str, Incident] = {}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                incident = incident_of(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
            newest[incident.id] = incident
        return tuple(sorted(newest.values(), key=lambda incident: incident.opened_s))


def incident_of(record: Mapping[str, Any]) -> Incident:
    """An incident from its JSON form.

    Raises:
        ValueError, KeyError, TypeError: The record is not an incident.
    """
    fields = dict(record)
    fields["cause"] = Cause(fields["cause"])
    fields["evidence"] = tuple(fields["evidence"])
    fields["timeline"] = tuple((float(at_s), str(what)) for at_s, what in fields["timeline"])
    return Incident(**fields)
