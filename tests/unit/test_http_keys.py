"""API keys: who is let in, and that no message repeats a key."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.errors import InvalidApiKeyError, SettingsError
from headrace_serve.http.keys import KeyRing, digest

RING = KeyRing((digest("sk-one"), digest("sk-two").upper()))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-one"},
        {"authorization": "bearer sk-one"},
        {"AUTHORIZATION": "BEARER   sk-two "},
        {"x-api-key": "sk-two"},
        {"X-Api-Key": " sk-one "},
        {"authorization": "Bearer wrong", "x-api-key": "sk-one"},
        {"authorization": "Basic eDp5", "x-api-key": "sk-one"},
    ],
)
def test_a_known_key_is_let_in_however_it_is_sent(headers: dict[str, str]) -> None:
    RING.check(headers)


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, "no API key"),
        ({"authorization": "Bearer"}, "no API key"),
        ({"authorization": "bearer "}, "no API key"),
        ({"authorization": ""}, "no API key"),
        ({"authorization": "Basic eDp5"}, "no API key"),
        ({"authorization": "sk-one"}, "no API key"),
        ({"x-api-key": " "}, "no API key"),
        ({"cookie": "sk-one"}, "no API key"),
        ({"authorization": "Bearer wrong"}, "not known"),
        ({"authorization": "Bearer sk-one sk-two"}, "not known"),
        ({"authorization": "Bearer SK-ONE"}, "not known"),
        ({"authorization": f"Bearer {digest('sk-one')}"}, "not known"),
        ({"x-api-key": "wrong"}, "not known"),
    ],
)
def test_anything_else_is_refused_with_401_and_the_way_to_send_a_key(
    headers: dict[str, str], says: str
) -> None:
    with pytest.raises(InvalidApiKeyError, match=says) as caught:
        RING.check(headers)
    assert caught.value.http_status == 401
    assert "Authorization: Bearer" in caught.value.message


@given(st.dictionaries(st.sampled_from(["authorization", "x-api-key"]), st.text()))
def test_an_empty_ring_lets_everybody_in(headers: dict[str, str]) -> None:
    assert KeyRing().is_open
    KeyRing().check(headers)


@given(st.text(st.characters(exclude_categories=())), st.sampled_from(["", "Bearer "]))
def test_any_other_header_value_is_refused_and_never_repeated(value: str, scheme: str) -> None:
    secret = f"{value}-secret-7c1"
    with pytest.raises(InvalidApiKeyError) as caught:
        RING.check({"authorization": scheme + secret, "x-api-key": secret})
    assert "secret-7c1" not in str(caught.value)


def test_a_key_beyond_latin_1_matches_as_text_and_as_the_bytes_on_the_wire() -> None:
    ring = KeyRing((digest("clé-ď"),))
    ring.check({"x-api-key": "clé-ď"})
    ring.check({"x-api-key": "clé-ď".encode().decode("latin-1")})


def test_a_digest_is_the_sha_256_of_the_key() -> None:
    assert digest("sk-one") == hashlib.sha256(b"sk-one").hexdigest()


@pytest.mark.parametrize("entry", ["sk-plain-key", "", "g" * 64, digest("a")[:-1]])
def test_a_setting_that_is_no_digest_is_refused_without_showing_it(entry: str) -> None:
    with pytest.raises(SettingsError) as caught:
        KeyRing((digest("a"), entry))
    assert caught.value.param == "gateway.api_keys[1]"
    assert "sk-plain-key" not in caught.value.message


def test_a_ring_does_not_show_its_digests() -> None:
    assert digest("sk-one") not in repr(RING)
    assert not RING.is_open
