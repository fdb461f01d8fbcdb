"""`make faults`: every scenario of docs/faults.md on the real stack, under load; one table.

Exits non-zero when a row complains; see `faulty_fleet`.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from tests.e2e.fault_events import EVENTS, PLAYED, play_event
from tests.e2e.fault_scenarios import SCENARIOS
from tests.e2e.faulty_fleet import HEAD, FaultyFleet, Row
from tests.e2e.held_starts import ROWS, HeldRow, TroubledHost

SHORT: Final = ("E1a", "E3", "A1", "H2", "W1", "M4", "C2", "M1")
"""One row of each kind that takes no minutes, for every change."""


def main() -> int:
    """Print the table; 0 when every row is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="rows; all when none is named")
    parser.add_argument("--short", action="store_true", help="one row of each kind")
    options = parser.parse_args()
    names = SHORT if options.short else options.names
    known = (*(one.name for one in SCENARIOS), *PLAYED, *ROWS)
    unknown = set(names) - set(known)
    if unknown:
        parser.error(f"no row is called {', '.join(sorted(unknown))}; rows: {', '.join(known)}")
    chosen = [one for one in known if not names or one in names]
    rows: list[Row | HeldRow] = []
    played: Iterator[Row | HeldRow] = chain(_of_fleet(chosen), _of_host(chosen))
    for row in played:
        rows.append(row)
        print(row, flush=True)
    met = sum(not row.complaints for row in rows)
    lost = sum(row.total - row.good for row in rows)
    requests = sum(row.total for row in rows)
    print(
        f"{met} of {len(rows)} rows as they must be; {lost} of {requests} requests lost or changed"
    )
    return 0 if met == len(rows) else 1


def _of_fleet(chosen: Sequence[str]) -> Iterator[Row]:
    """The rows in which a fleet of three goes on."""
    by_name = {one.name: one for one in SCENARIOS}
    wanted = [name for name in chosen if name not in ROWS]
    if not wanted:
        return
    with (
        tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder,
        FaultyFleet.running(Path(folder), (*SCENARIOS, *EVENTS)) as fleet,
    ):
        print(HEAD, flush=True)
        for name in wanted:
            yield fleet.play(by_name[name]) if name in by_name else play_event(fleet, name)


def _of_host(chosen: Sequence[str]) -> Iterator[HeldRow]:
    """The rows in which a device must not get another engine."""
    wanted = [name for name in chosen if name in ROWS]
    if not wanted:
        return
    with TroubledHost.running() as host:
        for name in wanted:
            yield ROWS[name](host)


if __name__ == "__main__":
    sys.exit(main())
