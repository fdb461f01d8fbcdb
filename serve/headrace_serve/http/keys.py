"""API keys: the server knows only their digests, and tells nobody which part of a key was wrong."""

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace_replicas.contract.errors import InvalidApiKeyError, SettingsError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_HOW = "Send `Authorization: Bearer KEY` or `x-api-key: KEY`."


def digest(key: str) -> str:
    """The SHA-256 of an API key in hex, as `gateway.api_keys` holds it."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys that are let in; an empty ring lets everybody in.

    Attributes:
        digests: SHA-256 digests of the keys, in hex.

    Raises:
        SettingsError: An entry is not a digest; the entry itself, which may be a key in plain
            text, stays out of the message.
    """

    digests: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        lowered = tuple(entry.strip().lower() for entry in self.digests)
        for index, entry in enumerate(lowered):
            if not _DIGEST.fullmatch(entry):
                param = f"gateway.api_keys[{index}]"
                message = (
                    f"{param} is not a SHA-256 digest of 64 hex digits. "
                    "Make one with: printf %s KEY | shasum -a 256"
                )
                raise SettingsError(message, param)
        object.__setattr__(self, "digests", lowered)

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return not self.digests

    def check(self, headers: Mapping[str, str]) -> None:
        """Let a request in, or raise. Header names and the scheme's name may be in any case.

        Raises:
            InvalidApiKeyError: No key, or none that is known; the key is not in the message.
        """
        if self.is_open:
            return
        offered = list(_offered(headers))
        if not offered:
            raise InvalidApiKeyError(f"The request has no API key. {_HOW}")
        if not any(self._knows(key) for key in offered):
            raise InvalidApiKeyError(f"The API key is not known to this server. {_HOW}")

    def _knows(self, key: bytes) -> bool:
        """Compare with every digest, so that the time says nothing about which one was near."""
        offered = hashlib.sha256(key).hexdigest()
        return sum(hmac.compare_digest(offered, known) for known in self.digests) > 0


def _offered(headers: Mapping[str, str]) -> Iterator[bytes]:
    """The keys that a request carries, as the bytes that the client sent."""
    for name, value in headers.items():
        if name.lower() == "x-api-key":
            key = value.strip()
        elif name.lower() == "authorization":
            scheme, _, rest = value.strip().partition(" ")
            key = rest.strip() if scheme.lower() == "bearer" else ""
        else:
            continue
        if key:
            yield _sent(key)


def _sent(key: str) -> bytes:
    """Undo the Latin-1 decoding of header values; a key with other characters came as text."""
    try:
        return key.encode("latin-1")
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogatepass")
