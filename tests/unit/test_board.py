"""What a gateway process knows of the replicas, from three sides and on several threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from headrace_replicas.contract.fleet import FleetView, ProbeResult, ReplicaState, ReplicaStatus
from headrace_replicas.contract.requests import GenerateRequest, SamplingParams
from headrace_serve import fleet
from headrace_serve.board import Board
from headrace_serve.routing import Candidate
from tests.support.fleet import Fleet, snapshot, verdict

READY, STARTING = ReplicaState.READY, ReplicaState.STARTING
SUSPECT, SUSPENDED = ReplicaState.SUSPECT, ReplicaState.SUSPENDED


def request(request_id: str = "q", attempt: int = 1, **changes: object) -> GenerateRequest:
    base = GenerateRequest(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(),
        seed=0,
        max_tokens=10,
        stop_ids=frozenset(),
        model="m",
        fingerprint="f",
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # names are the test's own


def status(
    replica_id: str,
    state: ReplicaState = READY,
    *,
    generation: int = 1,
    probe: ProbeResult | None = None,
) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id=replica_id,
        generation=generation,
        state=state,
        reason="the test says so",
        since_s=0.0,
        last_probe=probe,
        snapshot=None,
    )


def view(*statuses: ReplicaStatus, version: int = 1) -> FleetView:
    return FleetView(version=version, at_s=0.0, replicas=statuses)


def board_with(*names: str) -> Board:
    """A board on which these replicas are listed."""
    board = Board()
    board.members_seen(frozenset(names), [snapshot(name) for name in names])
    return board


def open_and_claim(board: Board, asked: GenerateRequest, replica_id: str) -> None:
    board.open(asked, lambda: None)
    board.claim(asked, replica_id, 0.0)


def candidate(board: Board, replica_id: str) -> Candidate:
    [found] = board.candidates([replica_id])
    return found


def states(board: Board) -> dict[str, ReplicaState]:
    return {one.replica_id: one.state for one in board.describe()}


def test_a_claim_counts_until_it_is_released() -> None:
    board = board_with("a")
    asked = request()
    board.open(asked, lambda: None)
    assert board.holder(asked) is None
    board.claim(asked, "a", 0.0)
    assert board.holder(asked) == "a"
    assert (candidate(board, "a").in_flight_requests, candidate(board, "a").in_flight_tokens) == (
        1,
        13,
    )
    board.release(asked, failed=False)
    assert board.holder(asked) is None
    assert candidate(board, "a").in_flight_requests == 0
    assert board.in_flight() == {}


def test_a_second_claim_of_an_attempt_replaces_the_first() -> None:
    """The router tries another replica when the first one has no room."""
    board = board_with("a", "b")
    asked = request()
    open_and_claim(board, asked, "a")
    board.claim(asked, "b", 0.0)
    assert board.in_flight() == {"b": 1}


@pytest.mark.parametrize("opened", [True, False])
def test_a_claim_for_an_attempt_that_has_ended_is_not_counted(*, opened: bool) -> None:
    """A router on another thread decides a moment after the client left."""
    board = board_with("a")
    if opened:
        board.open(request(), lambda: None)
        board.release(request(), failed=False)
    board.claim(request(), "a", 0.0)
    assert board.in_flight() == {}
    assert board.holder(request()) is None


def test_attempts_of_one_request_do_not_share_a_claim() -> None:
    board = board_with("a", "b")
    first, second, choice = request(), request(attempt=2), request(choice=1)
    open_and_claim(board, first, "a")
    open_and_claim(board, second, "b")
    open_and_claim(board, choice, "b")
    board.release(first, failed=True)
    assert board.in_flight() == {"b": 2}
    assert board.holder(second) == "b"


def test_only_a_failed_attempt_is_remembered_and_only_until_its_request_ends() -> None:
    board = board_with("a", "b")
    for attempt, (name, failed) in enumerate([("a", True), ("b", False)], start=1):
        asked = request(attempt=attempt)
        open_and_claim(board, asked, name)
        board.release(asked, failed=failed)
    assert board.failed_on("q") == {"a"}
    assert board.ask_for(request(attempt=3), 0.0).avoid == {"a"}
    assert board.failed_on("another") == frozenset()
    board.forget("q")
    assert board.failed_on("q") == frozenset()


def test_an_attempt_that_nobody_held_fails_on_nobody() -> None:
    board = board_with("a")
    board.open(request(), lambda: None)
    board.release(request(), failed=True)
    assert board.failed_on("q") == frozenset()


def test_what_is_asked_for_a_resumed_attempt_counts_the_replayed_output_as_prompt() -> None:
    asked = Board().ask_for(request(output_ids=(7, 8)), 5.0)
    assert (asked.prompt_tokens, asked.max_tokens, asked.now_s) == (5, 8, 5.0)


@pytest.mark.parametrize(
    ("probe", "cleared"),
    [
        (verdict("a", at_s=9.9), False),
        (verdict("a", at_s=10.0), False),
        (verdict("a", at_s=10.1), True),
        (verdict("a", at_s=10.1, passed=False), False),
        (verdict("a", at_s=10.1, kind="work"), True),
        (None, False),
    ],
)
def test_a_suspicion_is_cleared_by_a_later_passed_probe_alone(
    probe: ProbeResult | None, *, cleared: bool
) -> None:
    board = board_with("a", "b")
    board.suspect("a", "died", 10.0)
    board.publish(view(status("a", probe=probe), status("b", probe=verdict("b", at_s=99.0))))
    assert candidate(board, "a").suspected is not cleared
    assert not candidate(board, "b").suspected


def test_a_newer_suspicion_outlives_the_probe_that_cleared_the_older_one() -> None:
    board = board_with("a")
    board.suspect("a", "stalled", 10.0)
    board.suspect("a", "stalled", 20.0)
    board.publish(view(status("a", probe=verdict("a", at_s=15.0))))
    assert candidate(board, "a").suspected


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_replica_that_is_gone_leaves_no_suspicion(*, has_snapshot: bool) -> None:
    """Also when the attempt was lost a moment after the list forgot it. Ids never come back."""
    board = board_with("a", "b")
    board.suspect("b", "died", 1.0)
    board.members_seen(frozenset({"a"}), [snapshot("a")])
    board.suspect("b", "died", 2.0)
    board.members_seen(frozenset({"a"}), [snapshot("b")] if has_snapshot else [])
    assert not candidate(board, "b").suspected
    assert candidate(board, "b").snapshot is None


def test_an_older_snapshot_never_replaces_a_newer_one() -> None:
    board = board_with("a")
    for sequence in (5, 4, 5):
        told = snapshot("a", sequence=sequence, running=sequence)
        board.members_seen(frozenset({"a"}), [told])
    _members, [held] = board.members()
    assert (held.sequence, held.running) == (5, 5)


def test_people_see_the_controllers_verdict_with_the_newest_snapshot() -> None:
    board = board_with("a")
    board.publish(view(status("a", SUSPECT)))
    [shown] = board.describe()
    assert shown.state is SUSPECT
    assert shown.snapshot == snapshot("a")


def test_the_boards_version_is_the_controllers_even_when_it_starts_again() -> None:
    board = board_with("a")
    board.publish(view(status("a"), version=57))
    board.publish(view(status("a"), version=1))
    assert board.view.version == 1


def test_a_controller_that_starts_again_does_not_stop_serving() -> None:
    """Until it has proved a replica itself, the last verdict on it holds."""
    board = board_with("a", "b", "c", "d")
    board.publish(view(status("a"), status("b", SUSPECT), status("c", SUSPENDED), version=57))
    board.publish(view(version=0))
    assert states(board) == {"a": READY, "b": SUSPECT, "c": SUSPENDED}
    starting = [status(name, STARTING, generation=0) for name in "abcd"]
    board.publish(view(*starting, version=1))
    assert states(board) == {"a": READY, "b": SUSPECT, "c": STARTING, "d": STARTING}
    board.publish(view(status("a", SUSPENDED), *starting[1:], version=2))
    assert states(board)["a"] is SUSPENDED


def test_an_engine_that_starts_again_under_its_id_is_starting() -> None:
    board = board_with("a")
    board.publish(view(status("a")))
    board.publish(view(status("a", STARTING, generation=2), version=2))
    assert states(board) == {"a": STARTING}


def test_a_replica_that_is_gone_leaves_the_board_with_the_controllers_next_view() -> None:
    board = board_with("a", "b")
    board.publish(view(status("a"), status("b")))
    board.members_seen(frozenset({"a"}), [])
    board.publish(view(status("a"), version=2))
    assert states(board) == {"a": READY}


def test_a_real_controller_that_starts_again_bars_nobody_that_served() -> None:
    """Its first views, as `fleet.step` makes them, say `starting` of everybody."""
    old, new = Fleet(), Fleet()
    board = board_with("a", "b")
    for controller in (old, new):
        controller.members("a", "b")
    for name in "ab":
        old.says(name)
        old.answer(name)
    board.publish(fleet.view(old.state, old.now_s))
    assert set(states(board).values()) == {READY}
    assert {one.state for one in fleet.view(new.state, 0.0).replicas} == {STARTING}
    board.publish(fleet.view(new.state, new.now_s))
    assert set(states(board).values()) == {READY}


@pytest.mark.parametrize(
    ("listed", "state", "another"),
    [
        ("ab", READY, True),
        ("ab", SUSPECT, True),
        ("ab", SUSPENDED, False),
        ("ab", ReplicaState.DRAINING, False),
        ("ab", STARTING, False),
        ("a", READY, False),
    ],
)
def test_another_replica_is_one_that_routing_would_pick(
    listed: str, state: ReplicaState, *, another: bool
) -> None:
    board = board_with(*listed)
    board.publish(view(status("a"), status("b", state)))
    assert board.has_another(request(), "a", 0.0) is another
    assert board.has_another(request(), None, 0.0)


CHANGES: dict[str, Callable[[Board], None]] = {
    "claimed": lambda board: board.claim(request(), "a", 0.0),
    "listed": lambda board: board.members_seen(frozenset("abc"), []),
    "gone": lambda board: board.members_seen(frozenset("a"), []),
    "leaves": lambda board: board.members_seen(
        frozenset("ab"), [snapshot("b", sequence=2, state=ReplicaState.STOPPING)]
    ),
    "judged": lambda board: board.publish(view(status("b", SUSPENDED))),
}
REPETITIONS: dict[str, Callable[[Board], None]] = {
    "busy": lambda board: board.members_seen(
        frozenset("ab"), [snapshot("b", sequence=2, running=3)]
    ),
    "same verdict": lambda board: board.publish(view(version=9)),
    "another attempt": lambda board: board.claim(request(attempt=2), "a", 0.0),
}


@pytest.mark.parametrize(
    ("change", "stirs"), [*((c, 1) for c in CHANGES), *((c, 0) for c in REPETITIONS)]
)
def test_an_open_attempt_is_stirred_by_what_may_matter_to_it_and_by_nothing_else(
    change: str, stirs: int
) -> None:
    board, stirred = board_with("a", "b"), []
    board.open(request(), lambda: stirred.append(change))
    (CHANGES | REPETITIONS)[change](board)
    assert len(stirred) == stirs
    board.release(request(), failed=False)
    (CHANGES | REPETITIONS)[change](board)
    board.members_seen(frozenset(), [])
    assert len(stirred) == stirs


def test_whoever_is_stirred_may_ask_the_board() -> None:
    """The lock is free by then, or a stirred stream would wait for itself."""
    board, seen = board_with("a"), []
    board.open(request(), lambda: seen.append(board.holder(request())))
    board.claim(request(), "a", 0.0)
    assert seen == ["a"]


def test_threads_neither_lose_nor_leak_claims() -> None:
    """Streams end while routers still claim for them, and lists of replicas come and go."""
    board, names = board_with("a", "b"), "ab"
    start = threading.Barrier(4, timeout=10)

    def streams(prefix: str) -> None:
        start.wait()
        for number in range(300):
            asked = request(f"{prefix}{number}")
            open_and_claim(board, asked, names[number % 2])
            assert board.holder(asked) == names[number % 2]
            board.release(asked, failed=number % 3 == 0)
            board.forget(asked.request_id)

    def router() -> None:
        start.wait()
        for number in range(300):
            board.claim(request(f"x{number}"), "a", 0.0)
            board.candidates(["a", "b"])

    def lists() -> None:
        start.wait()
        for number in range(300):
            members = frozenset("ab") if number % 2 else frozenset("a")
            board.members_seen(members, [snapshot(name) for name in members])
            board.publish(view(status("a"), version=number))

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(streams, "x"), pool.submit(streams, "y")]
        work += [pool.submit(router), pool.submit(lists)]
        for thread in work:
            thread.result()
    assert board.in_flight() == {}
    assert all(board.failed_on(f"{who}{n}") == frozenset() for who in "xy" for n in range(300))
