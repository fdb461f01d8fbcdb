"""From a response object to the bytes of its JSON: compact, and valid UTF-8 whatever it holds."""

import json
from collections.abc import Mapping

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def json_bytes(body: Mapping[str, object]) -> bytes:
    r"""Encode a response. Each lone surrogate becomes U+FFFD; two halves become their character.

    Line ends inside strings are escaped, so the result is always a single line.

    Raises:
        ValueError: A number is NaN or infinite, which JSON cannot say.
    """
    text = _encode(body)
    try:
        return text.encode()
    except UnicodeEncodeError:
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return whole.encode()
