"""Deadlines, failures, clients who leave, and what the gateway says of the fleet."""

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_replicas.contract.fleet import (
    Cause,
    FleetView,
    Notice,
    ReplicaState,
    ReplicaStatus,
)
from headrace_replicas.contract.settings import GatewaySettings
from headrace_serve import incidents
from headrace_serve.http.sse import KEEPALIVE
from tests.support.fleet import snapshot, verdict
from tests.support.gateway_scene import (
    ANSWER,
    ASKED,
    GatewayScene,
    Reply,
    call,
)
from tests.support.scripted_fleet import Fault, FaultKind, Pace, by_attempt
from tests.support.virtual_time import EPOCH_S, run

CHAT = "/v1/chat/completions"
TYPED = {"content-type": "application/json"}
DEADLINE = {"x-request-timeout": "2.5"}


@pytest.mark.parametrize("kind", ["stall", "never_accept"])
@pytest.mark.parametrize("header", ["x-request-timeout", "x-request-timeout-seconds"])
def test_a_whole_answer_that_is_not_there_in_time_is_504(header: str, kind: FaultKind) -> None:
    async def story() -> float:
        begun_s = scene.clock.monotonic_s()
        reply = await scene.request("POST", CHAT, ASKED, headers={header: "2.5"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        assert reply.error["type"] == "timeout_error"
        return scene.clock.monotonic_s() - begun_s

    scene = GatewayScene(by_attempt(Fault(kind=kind, at=3)), names="a")
    assert run(story()) == pytest.approx(2.5, abs=1e-3)
    scene.check_nothing_left()


def test_a_stream_that_is_not_whole_in_time_ends_with_the_error_and_without_done() -> None:
    scene = GatewayScene(by_attempt(Fault(kind="stall", at=3)), names="a")
    reply = scene.chat(stream=True, headers=DEADLINE)
    assert reply.status == 200
    assert reply.events[-1]["error"]["code"] == "deadline_exceeded"
    assert b"[DONE]" not in reply.body
    assert reply.parts[-1][0] == pytest.approx(2.5, abs=1e-3)


def test_the_servers_own_limit_holds_for_a_client_that_asks_for_more() -> None:
    scene = GatewayScene(
        by_attempt(Fault(kind="stall", at=3)),
        names="a",
        gateway=GatewaySettings(request_timeout_s=4),
    )
    reply = scene.chat(stream=True, headers={"x-request-timeout": "1000"})
    assert reply.parts[-1][0] == pytest.approx(4, abs=1e-3)


def test_two_requests_with_one_id_do_not_share_anything_inside() -> None:
    """They run at the same time and both are answered; inside, each has an id of its own."""

    async def story() -> list[Reply]:
        same = {"x-request-id": "same"}
        return await asyncio.gather(
            *(scene.request("POST", CHAT, ASKED, headers=same) for _ in range(2))
        )

    scene = GatewayScene(by_attempt(Fault(kind="die", at=4)))
    replies = run(story())
    assert len({reply.json["id"] for reply in replies}) == 2
    assert len({attempt.request_id for _, attempt in scene.fleet.attempts}) == 2
    scene.check_nothing_left()


def status(state: ReplicaState, proved_s: float | None) -> ReplicaStatus:
    return ReplicaStatus(
        replica_id="a",
        generation=1,
        state=state,
        reason="the test says so",
        since_s=EPOCH_S - 10,
        last_probe=None if proved_s is None else verdict("a", at_s=proved_s),
        snapshot=snapshot("a"),
    )


@pytest.mark.parametrize(
    ("held", "ready"),
    [
        (None, False),
        (status(ReplicaState.READY, EPOCH_S - 59), True),
        (status(ReplicaState.READY, EPOCH_S - 61), False),
        (status(ReplicaState.READY, None), False),
        (status(ReplicaState.SUSPECT, EPOCH_S - 1), False),
        (status(ReplicaState.SUSPENDED, EPOCH_S - 1), False),
    ],
)
def test_ready_means_that_a_ready_replica_proved_it_lately(
    held: ReplicaStatus | None, *, ready: bool
) -> None:
    scene = GatewayScene()
    statuses = () if held is None else (held,)
    scene.board.publish(FleetView(version=1, at_s=EPOCH_S, replicas=statuses))
    reply = scene.get("/readyz")
    assert reply.status == (200 if ready else 503)
    assert reply.json["ready"] is ready
    assert len(reply.json["replicas"]) == len(statuses)
    assert reply.json["reason"]


def test_live_does_not_depend_on_the_fleet() -> None:
    assert GatewayScene(names="").get("/livez").json == {"alive": True}


def test_replicas_are_shown_with_their_process_and_their_work() -> None:
    scene = GatewayScene(names="a")
    scene.board.publish(
        FleetView(version=1, at_s=EPOCH_S, replicas=(status(ReplicaState.READY, EPOCH_S - 3),))
    )
    [shown] = scene.get("/fleet/v1/replicas").json["replicas"]
    assert (shown["replica_id"], shown["state"], shown["in_state_s"]) == ("a", "ready", 10)
    assert shown["proved_s_ago"] == 3
    assert shown["snapshot"]["pid"] == 1
    assert shown["snapshot"]["host"] == "host-a"


def test_incidents_are_shown_with_a_summary_each() -> None:
    scene = GatewayScene()
    opened = incidents.open_(
        cause=Cause.ENGINE_FAULT, host="h", replica="a", generation=1, text="boom", at_s=EPOCH_S
    )
    scene.incidents = [opened]
    body = scene.get("/fleet/v1/incidents").json
    assert body["incidents"][0]["id"] == opened.id
    assert body["incidents"][0]["cause"] == "engine_fault"
    assert len(body["summaries"][0]) == 5


class ForeignError(Exception):
    """An error of the layer below, which has no base in common with anything here."""


@pytest.mark.parametrize("error", [ForeignError("ray"), TimeoutError(), ValueError("no actor")])
def test_without_a_controller_incidents_are_503_and_serving_goes_on(error: Exception) -> None:
    scene = GatewayScene()
    scene.incidents = error
    reply = scene.get("/fleet/v1/incidents")
    assert reply.status == 503
    assert "Ask again" in reply.error["message"]
    assert scene.chat().status == 200


def broken(notice: Notice) -> None:
    raise ForeignError(f"secret of {notice}")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_unforeseen_failure_is_logged_under_an_id_and_tells_the_client_nothing_else(
    caplog: pytest.LogCaptureFixture, *, streamed: bool
) -> None:
    scene = GatewayScene(by_attempt(Fault(kind="die", at=3)))
    scene.service._streams = replace(scene.parts, tell=broken)
    with caplog.at_level(logging.ERROR, "ray.serve.headrace.gateway"):
        reply = scene.chat(stream=streamed)
    error = reply.events[-1]["error"] if streamed else reply.error
    assert reply.status == (200 if streamed else 500)
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert b"secret" not in reply.body
    assert b"[DONE]" not in reply.body
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ForeignError)
    log_id = record.getMessage().split(":")[0]
    assert log_id in error["message"]


@pytest.mark.parametrize("leaves_after_s", [0.001, 0.1, 0.35, 0.41, 1.0, 8.0])
@pytest.mark.parametrize("kind", ["pause", "stall", "die"])
def test_a_client_that_leaves_a_stream_frees_its_replica(
    kind: FaultKind, leaves_after_s: float
) -> None:
    async def story() -> Reply:
        reply = await scene.request(
            "POST", CHAT, {**ASKED, "stream": True}, leaves_after_s=leaves_after_s
        )
        await asyncio.sleep(0.1)
        return reply

    scene = GatewayScene(
        by_attempt(Fault(kind=kind, at=3, for_s=60)), names="a", pace=Pace(close_s=0.05, token_s=1)
    )
    reply = run(story())
    scene.check_nothing_left()
    assert b"[DONE]" not in reply.body
    assert ANSWER.startswith("".join(_content(event) for event in reply.events))


def _content(event: dict[str, Any]) -> str:
    return str(event["choices"][0]["delta"].get("content", ""))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("at_s", [0.0, 0.001, 0.2, 0.35, 0.41, 1.3])
def test_a_request_that_the_server_cancels_frees_its_replica(
    at_s: float, *, streamed: bool
) -> None:
    """Ray Serve does this when the client of a whole answer has left."""

    async def story() -> None:
        asking = asyncio.create_task(scene.request("POST", CHAT, {**ASKED, "stream": streamed}))
        await asyncio.sleep(at_s)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()
        await asyncio.sleep(0.1)

    scene = GatewayScene(pace=Pace(close_s=0.05, token_s=1))
    run(story())
    scene.check_nothing_left()
    assert scene.notices == []


def slow(scene: GatewayScene, write_s: float) -> ASGIApp:
    """The application behind a connection on which each write takes this long."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_slowly(message: Message) -> None:
            await asyncio.sleep(write_s)
            await send(message)

        await scene.api(scope, receive, send_slowly)

    return app


STREAMED = json.dumps({**ASKED, "stream": True}).encode()


def test_a_reader_who_takes_his_time_does_not_lose_anything() -> None:
    """Each write to him takes longer than a replica may be silent."""
    scene = GatewayScene()
    reply = run(call(slow(scene, 9), "POST", CHAT, headers=TYPED, body=[STREAMED]))
    assert "".join(_content(event) for event in reply.events) == ANSWER
    assert reply.body.endswith(b"[DONE]\n\n")
    assert KEEPALIVE not in reply.body
    assert scene.notices == []


@pytest.mark.parametrize("leaves_after_s", [5.0, 15.0, 25.0])
def test_a_client_that_leaves_while_it_is_written_to_frees_its_replica(
    leaves_after_s: float,
) -> None:
    """At once: nothing is left to the garbage collector."""
    scene = GatewayScene()
    leaving = {"headers": TYPED, "body": [STREAMED], "leaves_after_s": leaves_after_s}
    run(call(slow(scene, 9), "POST", CHAT, **leaving))  # type: ignore[arg-type]  # as named
    scene.check_nothing_left()
    assert scene.notices == []
