"""Every error of the family survives the trip between two processes."""

import pickle

import pytest
from ray import cloudpickle

import headrace_serve.fleet_state  # noqa: F401  registers its subclasses
from headrace_replicas.contract.errors import HeadraceError


def family(root: type[HeadraceError] = HeadraceError) -> list[type[HeadraceError]]:
    return [root, *(found for kind in root.__subclasses__() for found in family(kind))]


@pytest.mark.parametrize("kind", family(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("through", [pickle, cloudpickle])
def test_an_error_comes_back_as_itself(kind: type[HeadraceError], through: object) -> None:
    sent = kind("what went wrong; what to do", "messages[0]")
    got = through.loads(through.dumps(sent))  # type: ignore[attr-defined]
    assert type(got) is kind
    assert (got.message, got.param, str(got)) == (sent.message, sent.param, str(sent))
    assert (got.code, got.http_status, got.retryable) == (
        kind.code,
        kind.http_status,
        kind.retryable,
    )


@pytest.mark.parametrize("kind", family(), ids=lambda kind: kind.__name__)
def test_an_error_survives_rays_own_wrapping(kind: type[HeadraceError]) -> None:
    """Ray pickles `RayTaskError(cause)` and hands the caller an instance of the cause's class."""
    from ray.exceptions import RayTaskError

    cause = kind("what went wrong", "param")
    wrapped = RayTaskError("f", "traceback", cause)  # type: ignore[no-untyped-call]
    got = pickle.loads(pickle.dumps(wrapped)).as_instanceof_cause()  # noqa: S301  our own bytes
    assert isinstance(got, kind)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in family() if "code" in vars(kind)]
    assert sorted(codes) == sorted(set(codes))
