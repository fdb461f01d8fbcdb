"""A replica with a fault, for tests of what stands in front of it (R10, R12).

`python -m tests.cases.procedures.fake_backend PORT MODE [ARGUMENT]`; the modes are in `Mode`.
"""

import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Event, Thread
from typing import Annotated, Any

import typer

PIECES = ("Hello", " from", " the", " scripted", " model", ".")


class Mode(StrEnum):
    """What the replica does to a chat request; ARGUMENT is n (or seconds for `slow`)."""

    OK = "ok"
    BLACKHOLE = "blackhole"  # accepts and never answers
    CLOSE0 = "close0"  # 200 and headers, then a clean end without an event
    CLOSE_N = "closeN"  # n pieces, then a clean end without a finish
    RESET_N = "resetN"  # n pieces, then a reset
    HANG_AFTER = "hang_after"  # n pieces, then silence
    GARBAGE = "garbage"  # 200 with a body that is no event stream
    ERR500 = "err500"
    BUSY503 = "busy503"
    E400 = "e400"
    SLOW = "slow"  # that many seconds before each piece
    FLIP = "flip"  # each n-th request as close0, the others as ok


_REFUSALS: dict[Mode, tuple[int, str, str | None, str]] = {
    Mode.ERR500: (500, "server_error", None, "boom"),
    Mode.BUSY503: (503, "overloaded", None, "queue full"),
    Mode.E400: (400, "invalid_request_error", "context_length_exceeded", "too long"),
}
_CUTS_WHOLE_ANSWERS = frozenset({Mode.CLOSE0, Mode.CLOSE_N, Mode.RESET_N})


@dataclass(slots=True)
class _Fault:
    mode: Mode
    argument: float
    requests: Iterator[int]

    def mode_now(self) -> Mode:
        """The mode for the next request."""
        number = next(self.requests)
        if self.mode is not Mode.FLIP:
            return self.mode
        return Mode.CLOSE0 if number % int(self.argument) == 0 else Mode.OK


class FaultyServer(ThreadingHTTPServer):
    """An HTTP server whose every chat request meets the same fault."""

    # A silent request lasts until `ending`; it must not keep an interrupted process alive.
    daemon_threads = True

    def __init__(self, port: int, mode: Mode, argument: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fault = _Fault(mode, argument, count(1))
        self.ending = Event()

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection that a reset may have taken away already."""
        if request.fileno() != -1:
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stays silent about clients that went away; says the rest."""
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Says nothing."""

    def finish(self) -> None:
        """Flushes, unless the connection was reset."""
        if self.connection.fileno() != -1:
            super().finish()

    def do_GET(self) -> None:
        """Lists one model, and is healthy."""
        model = {"id": "fake", "object": "model", "created": 1, "owned_by": "tests"}
        listing = {"object": "list", "data": [model]}
        self._send_json(200, listing if "models" in self.path else {"status": "ok"})

    def do_POST(self) -> None:
        """Answers a chat request with the fault."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        mode = self.server.fault.mode_now()
        if mode is Mode.BLACKHOLE:
            self.server.ending.wait()
        elif mode in _REFUSALS:
            status, kind, code, message = _REFUSALS[mode]
            error = {"message": message, "type": kind, "code": code, "param": None}
            self._send_json(status, {"error": error})
        elif body.get("stream"):
            self._stream(mode, body.get("model"))
        elif mode in _CUTS_WHOLE_ANSWERS:
            self._reset()
        else:
            self._send_json(200, _whole_answer(body.get("model")))

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _stream(self, mode: Mode, model: str | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if mode is Mode.GARBAGE:
            self._send_part(b"Traceback (most recent call last): boom\n")
        elif mode is not Mode.CLOSE0 and not self._pieces(mode, model):
            return
        self.wfile.write(b"0\r\n\r\n")

    def _pieces(self, mode: Mode, model: str | None) -> bool:
        """Sends the pieces; False when the connection is gone."""
        argument = self.server.fault.argument
        for number, piece in enumerate(PIECES):
            if number >= argument:
                if mode is Mode.CLOSE_N:
                    return True
                if mode is Mode.RESET_N:
                    self._reset()
                    return False
                if mode is Mode.HANG_AFTER:
                    self.server.ending.wait()
                    return True
            if mode is Mode.SLOW:
                time.sleep(argument)
            role = {"role": "assistant"} if number == 0 else {}
            self._send_event(_chunk(model, {**role, "content": piece}, None))
        self._send_event(_chunk(model, {}, "stop"))
        self._send_part(b"data: [DONE]\n\n")
        return True

    def _send_event(self, event: dict[str, Any]) -> None:
        self._send_part(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send_part(self, payload: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))
        self.wfile.flush()

    def _reset(self) -> None:
        """Ends the connection with RST: what a killed process leaves behind."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        # The read and write files share the descriptor, which closes with the last of them.
        self.rfile.close()
        self.wfile.close()
        self.connection.close()


def _chunk(model: str | None, delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    kind = "chat.completion.chunk"
    return {"id": "c", "object": kind, "created": 1, "model": model, "choices": [choice]}


def _whole_answer(model: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": "".join(PIECES)}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7},
    }


@contextmanager
def faulty_backend(mode: Mode, argument: float = 0.0) -> Iterator[str]:
    """Serves on a free port in a thread; yields the base address."""
    with FaultyServer(0, mode, argument) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.ending.set()
            server.shutdown()
            thread.join()


def _command(port: int, mode: Mode, argument: Annotated[float, typer.Argument()] = 0.0) -> None:
    """Serve with a fault until interrupted."""
    with FaultyServer(port, mode, argument) as server:
        server.serve_forever()


if __name__ == "__main__":
    typer.run(_command)
