"""What the gateway does with a parsed request, without HTTP and without Ray.

One request: admitted here, rendered to token ids, run as a `TokenStream` that survives the loss
of replicas, and turned back into text.
"""

import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Final

from headrace_replicas.contract.clock import Clock
from headrace_replicas.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    ModelNotFoundError,
)
from headrace_replicas.contract.fleet import ReplicaState, ReplicaStatus
from headrace_replicas.contract.requests import (
    FinishReason,
    GenerateRequest,
    ResumeMode,
    SamplingParams,
    Usage,
)
from headrace_replicas.contract.settings import Settings
from headrace_replicas.engine.checkpoint import Checkpoint
from headrace_serve.board import Board
from headrace_serve.http.bodies import ChatBody, CompletionBody
from headrace_serve.http.responses import ServedModel
from headrace_serve.http.sampling import sampling
from headrace_serve.poison import fingerprint_of
from headrace_serve.text.choice_text import ChoiceText, TextDelta
from headrace_serve.text.prompt import render
from headrace_serve.text.tokenizer import TextTokenizer
from headrace_serve.token_stream import StreamParts, TokenStream

_SEED_BITS: Final = 63
# Things may turn out better than they stand: no client should stay away for longer.
_LONGEST_RETRY_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A request that will get exactly one ending.

    Attributes:
        request: What the first attempt sends to a replica.
        stops: Stop strings, matched on the text.
        mid_text: Whether the answer goes on from a raw prompt's text.
        created_s: Wall-clock second of admission.
        poison_id: What makes it the same as another request.
    """

    request: GenerateRequest
    stops: tuple[str, ...]
    mid_text: bool
    created_s: int
    poison_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """The one ending of an answer.

    Attributes:
        attempts: Replicas that worked on it, one after the other.
        resume: How the last move replayed the output; None when it never moved in mid-answer.
    """

    finish_reason: FinishReason
    usage: Usage
    attempts: int
    resume: ResumeMode | None


class GatewayService:
    """Admission, answers and readiness of one gateway process.

    Args:
        settings: All settings.
        checkpoint: The validated checkpoint that the replicas serve.
        tokenizer: Its tokenizer.
        streams: How attempts reach replicas, and what they share.
        board: What this process knows of the fleet.
        clock: Time source.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        checkpoint: Checkpoint,
        tokenizer: TextTokenizer,
        streams: StreamParts,
        board: Board,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._tokenizer = tokenizer
        self._streams = streams
        self._board = board
        self._clock = clock
        self._name = model_name(settings)
        self._stop_ids = checkpoint.eos_ids | tokenizer.turn_end_ids
        self._context_tokens = min(
            checkpoint.context_tokens,
            settings.model.context_tokens or checkpoint.context_tokens,
        )
        self._served_since_s = int(clock.now_s())

    @property
    def tokenizer(self) -> TextTokenizer:
        """The served model's tokenizer."""
        return self._tokenizer

    def models(self) -> tuple[ServedModel, ...]:
        """What is served, the model's own id first and its aliases after it."""
        return tuple(
            ServedModel(
                id=name, created_s=self._served_since_s, context_tokens=self._context_tokens
            )
            for name in (self._name, *self._settings.model.aliases)
        )

    def model(self, name: str | None) -> ServedModel:
        """The served model that a client means; None means the only one.

        Raises:
            ModelNotFoundError: With the ids that are served.
        """
        served = {model.id: model for model in self.models()}
        if name is None:
            return served[self._name]
        if name not in served:
            known = ", ".join(served)
            raise ModelNotFoundError(
                f"The model {name[:100]!r} is not served here. Served: {known}.", "model"
            )
        return served[name]

    def admit_chat(self, body: ChatBody, request_id: str, timeout_s: float | None) -> Admitted:
        """Admit a chat request.

        Raises:
            ModelNotFoundError, InvalidRequestError, ContextLengthExceededError: As named.
            PoisonRequestError: Engines die of it.
        """
        self.model(body.model)
        self._refuse_hopeless(len(body.messages), _text_bytes(body.messages), "messages")
        prompt = render(self._tokenizer, body.messages, body.template_variables)
        return self._admit(body, prompt, request_id, timeout_s)

    def admit_completion(
        self, body: CompletionBody, request_id: str, timeout_s: float | None
    ) -> Admitted:
        """Admit a legacy completion.

        Raises:
            ModelNotFoundError, InvalidRequestError, ContextLengthExceededError: As named.
            PoisonRequestError: Engines die of it.
        """
        self.model(body.model)
        prompt = body.prompt
        self._refuse_hopeless(1, _text_bytes(prompt), "prompt")
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if any(token >= self._checkpoint.vocab_size for token in ids):
            raise InvalidRequestError(
                f"Token ids must be below {self._checkpoint.vocab_size}.", "prompt"
            )
        return self._admit(body, ids, request_id, timeout_s)

    def _refuse_hopeless(self, messages: int, text_bytes: int, param: str) -> None:
        """Refuse what cannot fit into the context before seconds are spent on encoding it.

        A message is at least one token, and a token stands for so many bytes at most.
        """
        most_bytes = self._context_tokens * self._tokenizer.longest_token_bytes
        if messages <= self._context_tokens and text_bytes <= most_bytes:
            return
        raise ContextLengthExceededError(
            f"{messages} messages with {text_bytes} bytes of text cannot fit into the model's "
            f"context window of {self._context_tokens} tokens. Shorten them.",
            param,
        )

    def _admit(
        self,
        body: ChatBody | CompletionBody,
        prompt_ids: tuple[int, ...],
        request_id: str,
        timeout_s: float | None,
    ) -> Admitted:
        params = sampling(body)
        self._check_bias(params)
        now_s = self._clock.now_s()
        limit_s = self._settings.gateway.request_timeout_s
        request = GenerateRequest(
            request_id=request_id,
            attempt=0,
            prompt_ids=prompt_ids,
            sampling=params,
            seed=secrets.randbits(_SEED_BITS) if body.seed is None else body.seed,
            max_tokens=self._limit(prompt_ids, body),
            stop_ids=self._stop_ids,
            model=self._name,
            fingerprint=self._checkpoint.fingerprint,
            deadline_s=now_s + min(limit_s, timeout_s or math.inf),
        )
        poison_id = fingerprint_of(request)
        if self._streams.guard is not None:
            self._streams.guard.check(poison_id)
        return Admitted(
            poison_id=poison_id,
            request=request,
            stops=body.stop,
            mid_text=isinstance(body, CompletionBody),
            created_s=int(now_s),
        )

    def _limit(self, prompt_ids: tuple[int, ...], body: ChatBody | CompletionBody) -> int:
        """Output tokens at most: what was asked for, as far as the context has room.

        An answer that the context cuts ends with `length`, as one cut by the client's own limit.
        """
        asked = body.limit_tokens
        room = self._context_tokens - len(prompt_ids)
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        if not prompt_ids:
            raise InvalidRequestError("The prompt is empty; send at least one token.", param)
        if room < 1:
            raise ContextLengthExceededError(
                f"The prompt has {len(prompt_ids)} tokens and the model's context window is "
                f"{self._context_tokens} tokens, which leaves no room for an answer. "
                "Shorten the prompt.",
                param,
            )
        return room if asked is None else min(asked, room)

    def _check_bias(self, params: SamplingParams) -> None:
        for token, _amount in params.logit_bias:
            if token >= self._checkpoint.vocab_size:
                raise InvalidRequestError(
                    f"Token id {token} does not exist; ids are below "
                    f"{self._checkpoint.vocab_size}.",
                    "logit_bias",
                )

    async def answer(self, admitted: Admitted) -> AsyncGenerator[TextDelta | AnswerEnd, None]:
        """The pieces of the answer, then its one ending.

        Raises:
            HeadraceError: The request cannot be completed; nothing follows.
        """
        text = ChoiceText(self._tokenizer, admitted.stops, mid_text=admitted.mid_text)
        stream = TokenStream(self._streams, admitted.request, admitted.poison_id)
        async with aclosing(stream.run()) as arriving:
            async for accepted in arriving:
                delta = text.add(accepted.ids, accepted.logprobs)
                finish = accepted.finish_reason
                if delta.text or delta.logprobs:
                    yield delta
                if finish is not None and not delta.stopped:
                    delta = text.finish()
                    if delta.text:
                        yield delta
                if delta.stopped or finish is not None:
                    stream.satisfied()
                    reason: FinishReason = "stop" if delta.stopped else finish or "stop"
                    yield self._ending(reason, text, stream, admitted.request)
                    return

    def _ending(
        self, reason: FinishReason, text: ChoiceText, stream: TokenStream, base: GenerateRequest
    ) -> AnswerEnd:
        usage = Usage(prompt_tokens=len(base.prompt_ids), completion_tokens=text.completion_tokens)
        return AnswerEnd(
            finish_reason=reason, usage=usage, attempts=stream.attempts, resume=stream.resume
        )

    def replicas(self) -> list[dict[str, Any]]:
        """Each replica with its state, this gateway's work on it, and its newest snapshot."""
        now_s = self._clock.now_s()
        in_flight = self._board.in_flight()
        return [
            _readiness(status, now_s)
            | {"in_flight": in_flight.get(status.replica_id, 0)}
            | ({} if status.snapshot is None else {"snapshot": asdict(status.snapshot)})
            for status in self._board.describe()
        ]

    def retry_after_s(self) -> float | None:
        """Seconds after which it is worth to ask again when nobody can serve; None: no idea."""
        view = self._board.view
        if view.ready_in_s is None:
            return None
        left_s = view.ready_in_s - (self._clock.now_s() - view.at_s)
        return min(_LONGEST_RETRY_S, max(0.0, left_s))

    def hosts(self) -> list[dict[str, Any]]:
        """What is known of places where no engine is ready: held, backing off, or loading."""
        now_s = self._clock.now_s()
        return [
            {
                **asdict(report),
                "said_s_ago": round(now_s - report.at_s, 3),
                "held_for_s": None
                if report.until_s is None
                else round(max(0.0, report.until_s - now_s), 3),
            }
            for report in self._board.view.hosts
        ]

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether a replica proved lately that it generates, and each replica's state and age."""
        now_s = self._clock.now_s()
        replicas = [_readiness(status, now_s) for status in self._board.describe()]
        window_s = self._settings.fleet.ready_window_s
        ready = any(
            entry["state"] == ReplicaState.READY
            and entry["proved_s_ago"] is not None
            and entry["proved_s_ago"] <= window_s
            for entry in replicas
        )
        reason = (
            "a replica passed a generation probe lately"
            if ready
            else f"no ready replica passed a generation probe in the last {window_s:.0f} s"
        )
        return ready, {"ready": ready, "reason": reason, "replicas": replicas}


def _text_bytes(value: object) -> int:
    """Bytes of all text in a JSON value, keys not counted."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return sum(_text_bytes(held) for held in value.values())
    if isinstance(value, list):
        return sum(_text_bytes(held) for held in value)
    return 0


def _readiness(status: ReplicaStatus, now_s: float) -> dict[str, Any]:
    probe, snapshot = status.last_probe, status.snapshot
    return {
        "replica_id": status.replica_id,
        "state": status.state.value,
        "reason": status.reason,
        "in_state_s": round(now_s - status.since_s, 3),
        "proved_s_ago": round(now_s - probe.at_s, 3) if probe and probe.passed else None,
    } | ({"injecting": snapshot.injecting} if snapshot and snapshot.injecting else {})


def model_name(settings: Settings) -> str:
    """The id under which clients ask for the model."""
    if settings.model.name is not None:
        return settings.model.name
    last = settings.model.path.rstrip("/").rsplit("/", 1)[-1]
    return "headrace-demo" if last == "demo" else last
