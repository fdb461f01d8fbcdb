"""One family of errors: each says what went wrong, what to do, and whether another try may help.

Ray carries an exception across processes by pickling it. Only exceptions whose fields are all
passed positionally to `super().__init__` survive that (Ray 2.60 turns any other into an
`UnserializableException`), so every class here keeps to one rule: the constructor takes exactly
the positional fields that it hands on. A test sends each subclass through a pickle.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """The base of all errors that headrace raises on purpose.

    Attributes:
        message: One or two sentences for a person, ending with the remedy where there is one.
        param: The request field or setting at fault, or None.
        code: A stable machine-readable name of the kind of error.
        http_status: The status with which the gateway answers.
        retryable: Whether the same request may succeed later or elsewhere.
    """

    code = "internal_error"
    error_type = "server_error"
    http_status = 500
    retryable = False

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(HeadraceError):
    """The request cannot be served as it is, whoever serves it."""

    code = "invalid_value"
    error_type = "invalid_request_error"
    http_status = 400


class UnsupportedParameterError(InvalidRequestError):
    """The request asks for something that would change the answer and is not built."""

    code = "unsupported_parameter"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and answer together do not fit into the model's context."""

    code = "context_length_exceeded"


class PoisonRequestError(HeadraceError):
    """The request was there at too many deaths of engines, and is refused for a while."""

    code = "poison_request"
    error_type = "invalid_request_error"
    http_status = 422


class InvalidApiKeyError(HeadraceError):
    """No API key, or one that is not known."""

    code = "invalid_api_key"
    error_type = "invalid_request_error"
    http_status = 401


class ModelNotFoundError(HeadraceError):
    """The request names a model that is not served."""

    code = "model_not_found"
    error_type = "invalid_request_error"
    http_status = 404


class RequestTooLargeError(HeadraceError):
    """The body is larger than the limit."""

    code = "request_too_large"
    error_type = "invalid_request_error"
    http_status = 413


class OverloadedError(HeadraceError):
    """Every place is taken; the client should come back."""

    code = "overloaded"
    error_type = "overloaded_error"
    http_status = 429
    retryable = True


class NoReplicaError(HeadraceError):
    """No replica can take the request now."""

    code = "no_replica_available"
    http_status = 503
    retryable = True


class DeadlineExceededError(HeadraceError):
    """The request's deadline passed before its answer was complete."""

    code = "deadline_exceeded"
    error_type = "timeout_error"
    http_status = 504
    retryable = True


class ReplicaLostError(HeadraceError):
    """The replica that served the request is gone, and the request may not move again."""

    code = "replica_lost"
    http_status = 502
    retryable = True


class EngineFaultError(HeadraceError):
    """The engine failed while it worked; the raw text of the failure is in the message."""

    code = "engine_fault"
    http_status = 500
    retryable = True


class WeightsMismatchError(HeadraceError):
    """The replica holds other weights, tokenizer or template than the request was made for."""

    code = "weights_mismatch"
    retryable = True


class CheckpointError(HeadraceError):
    """A checkpoint is broken or not supported; the message names the file or the tensor."""

    code = "checkpoint_invalid"


class ExpertReadError(HeadraceError):
    """An expert's bytes could not be read from the checkpoint's files; the message names the file.

    Another host's copy may be whole, so the request may go on there.
    """

    code = "expert_unreadable"
    retryable = True


class MemoryPlanError(HeadraceError):
    """The model does not fit into the host's memory; `param` is the setting to change, if any."""

    code = "does_not_fit"


class BackendMissingError(HeadraceError):
    """MLX has no backend on this machine; the message names the extra to install."""

    code = "backend_missing"


class SettingsError(HeadraceError):
    """A setting is unknown or has a wrong value; `param` is its dotted name."""

    code = "settings_invalid"


class HostBusyError(HeadraceError):
    """Every device of this host is held by another engine process."""

    code = "host_busy"
    retryable = True


class HostQuarantinedError(HeadraceError):
    """No engine may start on this host until a reboot or an operator allows it."""

    code = "host_quarantined"
    retryable = True


class LaunchError(HeadraceError):
    """A service that headrace starts did not come up; the message says where its log is."""

    code = "launch_failed"
