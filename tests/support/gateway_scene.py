"""The gateway's HTTP application over a scripted fleet, and a client that speaks ASGI to it."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from starlette.types import ASGIApp, Message, Scope

from headrace_replicas.contract.fleet import Incident
from headrace_replicas.contract.settings import GatewaySettings, ModelSettings, Settings
from headrace_replicas.engine.checkpoint import Checkpoint, read_checkpoint
from headrace_serve.http.routes import build_api
from headrace_serve.http.service import GatewayService
from headrace_serve.text.tokenizer import TextTokenizer
from tests.support.scripted_fleet import Pace, Plan, speaking_model
from tests.support.stream_scene import QUICK, SOUND, Scene
from tests.support.virtual_time import run

DEMO: Final = Path(str(files("headrace_replicas"))) / "demo_model"
ANSWER: Final = "Hello, wörld 🦊!\nThe END is near"
"""What the scripted model says; in the demo model's vocabulary several characters and words are
spread over tokens."""

ASKED: Final = {"messages": [{"role": "user", "content": "hi"}]}
"""The body of a chat request."""

PROMPTED: Final = {"prompt": "once"}
"""The body of a legacy completion."""


@cache
def demo_tokenizer() -> TextTokenizer:
    """The demo model's tokenizer; loading it takes seconds."""
    return TextTokenizer.from_folder(DEMO)


@cache
def demo_checkpoint() -> Checkpoint:
    """The demo model's checkpoint, without its weights' contents."""
    return read_checkpoint(DEMO)


@cache
def answer_ids() -> tuple[int, ...]:
    """The tokens of `ANSWER`."""
    return demo_tokenizer().encode(ANSWER)


@dataclass
class Reply:
    """One response, as it came over the wire.

    Attributes:
        parts: (virtual second, bytes) of each piece of the body.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    whole: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.parts)

    @property
    def json(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/json"
        held: dict[str, Any] = json.loads(self.body)
        return held

    @property
    def error(self) -> dict[str, Any]:
        """The error of an error response, which must have OpenAI's shape."""
        assert self.status >= 400
        assert self.json.keys() == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON objects of an event stream, without comments and [DONE]."""
        blocks = self.body.decode().split("\n\n")
        held = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
        return [json.loads(one) for one in held if one != "[DONE]"]

    async def take(self, message: Message) -> None:
        """ASGI's `send`, strict about the order of messages."""
        assert not self.whole, "something follows the end of the response"
        if message["type"] == "http.response.start":
            assert not self.status, "two responses to one request"
            self.status = message["status"]
            pairs = [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message["headers"]
            ]
            self.headers = dict(pairs)
            assert len(self.headers) == len(pairs), "a header is there twice"
            return
        assert message["type"] == "http.response.body"
        assert self.status, "a body before its status"
        if message.get("body"):
            self.parts.append((asyncio.get_running_loop().time(), message["body"]))
        self.whole = not message.get("more_body", False)


async def call(
    api: ASGIApp,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str],
    body: Iterable[bytes] = (),
    leaves_after_s: float | None = None,
) -> Reply:
    """Send one request as Ray Serve hands it on from uvicorn (ASGI 2.3).

    Args:
        api: The application.
        method: HTTP method.
        path: Path without a query.
        headers: Lower-case names.
        body: The pieces in which the body arrives.
        leaves_after_s: When the client disconnects; 0 before it has sent its body, None never.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
        "server": ("test", 80),
        "client": ("127.0.0.1", 1),
    }
    pieces, left, reply = list(body) or [b""], asyncio.Event(), Reply()

    async def receive() -> Message:
        if pieces and not left.is_set():
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        await left.wait()
        return {"type": "http.disconnect"}

    if leaves_after_s == 0:
        left.set()
    elif leaves_after_s is not None:
        asyncio.get_running_loop().call_later(leaves_after_s, left.set)
    await api(scope, receive, reply.take)
    assert reply.whole or left.is_set(), "the response has no end"
    return reply


class GatewayScene(Scene):
    """A gateway whose model says `ANSWER`.

    Args:
        plan: What goes wrong.
        pace: How fast the replicas work.
        names: The replicas.
        gateway: The gateway's settings.
        aliases: Other ids of the model.
        said: What the model says instead.
        guarded: Whether requests that engines die of are stopped.
    """

    def __init__(
        self,
        plan: Plan = SOUND,
        *,
        pace: Pace = QUICK,
        names: str = "abc",
        gateway: GatewaySettings = GatewaySettings(),  # noqa: B008  frozen
        aliases: tuple[str, ...] = (),
        said: tuple[int, ...] | None = None,
        guarded: bool = False,
    ) -> None:
        model = speaking_model(answer_ids() if said is None else said)
        super().__init__(plan, model=model, pace=pace, names=names, guarded=guarded)
        self.incidents: list[Incident] | Exception = []
        self.service = GatewayService(
            settings=Settings(gateway=gateway, model=ModelSettings(aliases=aliases)),
            checkpoint=demo_checkpoint(),
            tokenizer=demo_tokenizer(),
            streams=self.parts,
            board=self.board,
            clock=self.clock,
        )
        self.api = build_api(self.service, gateway, self._read_incidents)

    async def _read_incidents(self) -> tuple[Incident, ...]:
        if isinstance(self.incidents, Exception):
            raise self.incidents
        return tuple(self.incidents)

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        leaves_after_s: float | None = None,
    ) -> Reply:
        """Send one request; a body that is not bytes goes as JSON."""
        typed = {} if body is None else {"content-type": "application/json"}
        raw = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        return await call(
            self.api,
            method,
            path,
            headers=typed | dict(headers or {}),
            body=[raw],
            leaves_after_s=leaves_after_s,
        )

    def get(self, path: str, **headers: str) -> Reply:
        """One GET request on virtual time."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return run(self.request("GET", path, headers=named))

    def chat(self, *, headers: Mapping[str, str] | None = None, **fields: object) -> Reply:
        """One chat request on virtual time, and nothing left of it afterwards."""
        return self._ask("/v1/chat/completions", {**ASKED, **fields}, headers)

    def complete(self, *, headers: Mapping[str, str] | None = None, **fields: object) -> Reply:
        """One legacy completion on virtual time, and nothing left of it afterwards."""
        return self._ask("/v1/completions", {**PROMPTED, **fields}, headers)

    def _ask(self, path: str, body: object, headers: Mapping[str, str] | None) -> Reply:
        reply = run(self.request("POST", path, body, headers=headers))
        self.check_nothing_left()
        return reply
