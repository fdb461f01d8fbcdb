"""A chat request over a bare socket, for clients that leave whenever they like."""

import json
import socket
import struct
from typing import Any

from tests.cases.http_call import Target


def post(target: Target, body: dict[str, Any], *, timeout_s: float) -> socket.socket:
    """Sends a chat request and returns the socket, with nothing read yet."""
    payload = json.dumps(body).encode()
    host, port = target.address
    lines = [
        f"POST {target.url_path('/v1/chat/completions')} HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
    ]
    if target.key is not None:
        lines.append(f"Authorization: Bearer {target.key}")
    connection = socket.create_connection((host, port), timeout=timeout_s)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + payload)
    return connection


def reset(connection: socket.socket) -> None:
    """Closes with RST in place of FIN: what a crashed client looks like."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
