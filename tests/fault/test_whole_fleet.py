"""Gateway and controller together on virtual time: bad clients, breakers, and nobody left."""

import asyncio
from dataclasses import replace

import pytest

from headrace_replicas.contract.fleet import (
    FleetView,
    HostReported,
    HostState,
    Notice,
    ReplicaState,
)
from headrace_serve import fleet
from tests.support.fleet import Fleet, told_to_leave
from tests.support.gateway_scene import ASKED, GatewayScene
from tests.support.scripted_fleet import Fault, by_attempt
from tests.support.stream_scene import Scene, read, undisturbed
from tests.support.virtual_time import EPOCH_S, run

READY, SUSPECT, SUSPENDED = ReplicaState.READY, ReplicaState.SUSPECT, ReplicaState.SUSPENDED
NAMES = ("a", "b", "c", "d")
LAST = {"faults": 1, "fault_kind": "timeout", "fault_answer": "replace"}


def watched(names: str) -> Fleet:
    """A controller that knows these replicas as ready."""
    fleet_ = Fleet(now_s=EPOCH_S)
    fleet_.make_ready(*names)
    return fleet_


def test_a_client_that_sends_only_what_is_refused_opens_nothing() -> None:
    """Two hundred 400s, from the gateway itself and from engines: nobody is suspected."""
    scene = GatewayScene(by_attempt(Fault(kind="refuse_request")), guarded=True)
    controller = watched("abc")
    for number in range(100):
        assert scene.chat().status == 400
        assert scene.chat(temperature=-1 - number).status == 400
    for notice in scene.notices:
        controller.hear(notice)
    assert scene.notices == []
    assert scene.suspects() == ""
    assert controller.incidents == {}
    assert all(controller.state_of(name) is READY for name in "abc")


def test_suspects_serve_when_the_last_good_replica_really_dies() -> None:
    """A breaker that took out two and a death of the third together are no outage."""
    scene = Scene(by_attempt(Fault(kind="die", at=2)), guarded=True)
    controller = watched("abc")

    def tell(notice: Notice) -> None:
        scene.notices.append(notice)
        controller.hear(notice)
        scene.board.publish(fleet.view(controller.state, EPOCH_S))

    scene.parts = replace(scene.parts, tell=tell)
    for name in "ab":
        controller.lose_attempt(name, "stalled")
        scene.board.suspect(name, "stalled", EPOCH_S)
    scene.board.publish(fleet.view(controller.state, EPOCH_S))
    assert read(scene) == undisturbed("length")
    assert scene.holders[0] == "c"
    assert scene.holders[1] in "ab"


def report(fleet_: Fleet, name: str, **changes: object) -> None:
    said: dict[str, object] = {
        "host": f"host-{name}",
        "device": 0,
        "generation": 0,
        "state": HostState.BACKING_OFF,
        "at_s": fleet_.now_s,
    }
    fleet_.hear(HostReported(**{**said, **changes}))  # type: ignore[arg-type]


def retry_after(view: FleetView, at_s: float = 0.0) -> int:
    """What a client is told that asks a fleet of nobody with this board, so late."""
    scene = GatewayScene(names="", guarded=True)

    async def ask() -> int:
        scene.board.publish(view)
        await asyncio.sleep(at_s)
        reply = await scene.request("POST", "/v1/chat/completions", ASKED)
        assert (reply.status, reply.error["code"]) == (503, "no_replica_available")
        return int(reply.headers["retry-after"])

    return run(ask())


def test_a_fault_of_every_replica_sheds_and_never_restarts_all_at_once() -> None:
    """Each engine has its fault, then its end, within a minute; one device after the other returns.

    `Fleet.hear` checks at each notice that no more than `max_unavailable` are out by choice.
    """
    fleet_ = watched("abcd")
    left: list[str] = []
    for name in NAMES:
        left += told_to_leave(fleet_.says(name, **LAST))
        fleet_.now_s += 5.0
    assert left == ["a"]
    assert [fleet_.state_of(name) for name in NAMES[1:]] == [SUSPENDED] * 3
    assert fleet.view(fleet_.state, fleet_.now_s).ready_in_s is None, "a canary may still pass"
    for name in NAMES:
        fleet_.lose_attempt(name, "died")
        report(fleet_, name, until_s=fleet_.now_s + 40.0, reason="it died")
        fleet_.now_s += 5.0
    view = fleet.view(fleet_.state, fleet_.now_s)
    assert view.ready_in_s == 20.0
    assert fleet_.tick() == ()
    fleet_.now_s += 20.0
    report(fleet_, "a", generation=2, state=HostState.USABLE, total_bytes=100)
    fleet_.now_s += 10.0
    report(fleet_, "a", generation=2, state=HostState.USABLE, total_bytes=100, loaded_bytes=25)
    fleet_.members("a2")
    fleet_.says("a2", host="host-a", generation=2)
    fleet_.answer("a2", generation=2)
    assert fleet_.state_of("a2") is READY
    assert fleet.view(fleet_.state, fleet_.now_s).ready_in_s is None


@pytest.mark.parametrize(
    ("ready_in_s", "age_s", "wanted"),
    [(100.0, 0.0, 70), (100.0, 20.0, 50), (3.0, 0.0, 1), (5000.0, 0.0, 300), (None, 0.0, 5)],
)
def test_who_meets_nobody_is_told_when_somebody_may_be_there(
    ready_in_s: float | None, age_s: float, wanted: int
) -> None:
    """The client has waited its half minute for a replica before it is told."""
    view = FleetView(version=1, at_s=EPOCH_S, replicas=(), ready_in_s=ready_in_s)
    assert retry_after(view, age_s) == wanted


def test_a_load_says_when_it_will_be_through() -> None:
    fleet_ = watched("a")
    fleet_.lose_attempt("a", "died")
    loading = {"generation": 2, "state": HostState.USABLE, "total_bytes": 100}
    report(fleet_, "a", **loading, loaded_bytes=0)
    assert fleet.view(fleet_.state, fleet_.now_s).ready_in_s is None
    fleet_.now_s += 10.0
    report(fleet_, "a", **loading, loaded_bytes=20)
    assert fleet.view(fleet_.state, fleet_.now_s).ready_in_s == pytest.approx(40.0)
    assert fleet.view(fleet_.state, fleet_.now_s + 15.0).ready_in_s == pytest.approx(25.0)


def test_quarantined_hosts_promise_nothing() -> None:
    fleet_ = watched("a")
    fleet_.lose_attempt("a", "died")
    report(fleet_, "a", state=HostState.QUARANTINED, reason="reboot it")
    assert fleet.view(fleet_.state, fleet_.now_s).ready_in_s is None


def test_hosts_are_shown_beside_the_replicas() -> None:
    scene = GatewayScene(names="a")
    held = HostReported(
        host="m2",
        device=0,
        generation=0,
        state=HostState.BACKING_OFF,
        reason="3 deaths in 15 minutes",
        until_s=EPOCH_S + 60.0,
        at_s=EPOCH_S - 2.0,
    )
    scene.board.publish(FleetView(version=1, at_s=EPOCH_S, replicas=(), hosts=(held,)))
    (host,) = scene.get("/fleet/v1/replicas").json["hosts"]
    assert (host["host"], host["state"], host["reason"]) == (
        "m2",
        "backing_off",
        "3 deaths in 15 minutes",
    )
    assert (host["said_s_ago"], host["held_for_s"]) == (2.0, 60.0)
