"""The token hop over Ray Serve, and what its exceptions mean for an attempt."""

from collections.abc import AsyncGenerator
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from headrace_replicas.contract.errors import HeadraceError
from headrace_replicas.contract.requests import GenerateRequest, ProbeRequest, TokenChunk
from headrace_serve.failover import failure_of
from headrace_serve.token_stream import AttemptLostError


class RayReplicas:
    """Attempts over a Ray Serve deployment handle.

    The hop uses Serve's gRPC transport: a third of the CPU for each message of the default one.

    Args:
        handle: Of the MoEReplica deployment.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(stream=True, method_name="generate", _by_reference=False)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Run one attempt; see `Replicas.generate`."""
        stream = cast("DeploymentResponseGenerator[TokenChunk]", self._generate.remote(request))
        try:
            async for chunk in stream:
                yield chunk
        except HeadraceError as error:
            failure = failure_of(error)
            if failure is None:
                raise
            raise AttemptLostError(failure, str(error)) from error
        except RequestCancelledError as error:
            raise AttemptLostError(None, _first_line(error)) from error
        except RayActorError as error:
            raise AttemptLostError("died", _first_line(error)) from error
        except Exception as error:
            # Whatever else the hop raises, the attempt is lost; the engine itself has said nothing.
            raise AttemptLostError("ended_early", _first_line(error)) from error
        finally:
            # Over gRPC only an explicit cancel reaches the replica every time.
            stream.cancel()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


async def wake_router(handle: DeploymentHandle[Any]) -> None:
    """Make this process's router of a deployment start, before there is anything to route.

    Ray Serve builds a handle's router with the handle's first call, and the router is what
    learns of the replicas. The call goes to a replica that does not exist and is taken back.
    """
    nobody = ProbeRequest(replica_id="")
    response = handle.options(method_name="probe", _by_reference=False).remote(nobody)
    response.cancel()  # type: ignore[no-untyped-call]  # Ray leaves it unannotated
