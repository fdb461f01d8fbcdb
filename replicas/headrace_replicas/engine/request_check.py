"""What a request must hold so that it cannot fail inside a step and take its neighbours along."""

from headrace_replicas.contract.errors import InvalidRequestError, WeightsMismatchError
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.engine.loading import LoadedModel


def check_request(request: GenerateRequest, loaded: LoadedModel) -> None:
    """Refuse what would fail inside a step and take its neighbours along.

    Raises:
        WeightsMismatchError: The request was made for another checkpoint.
        InvalidRequestError: Token ids outside the vocabulary, nothing to prefill, or no limit.
    """
    checkpoint = loaded.checkpoint
    if request.fingerprint != loaded.identity.fingerprint:
        raise WeightsMismatchError(
            f"request {request.request_id} was made for checkpoint {request.fingerprint[:12]}, "
            f"this replica holds {loaded.identity.fingerprint[:12]}"
        )
    if not request.prompt_ids:
        raise InvalidRequestError("the prompt is empty; send at least one token", "prompt")
    if request.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", "max_tokens")
    biased = (token for token, _value in request.sampling.logit_bias)
    for param, ids in (("prompt", request.prompt_ids), ("logit_bias", biased)):
        if any(not 0 <= token < checkpoint.vocab_size for token in ids):
            raise InvalidRequestError(
                f"token ids must lie between 0 and {checkpoint.vocab_size - 1}", param
            )
