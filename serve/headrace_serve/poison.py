"""Which requests engines may die of, and what becomes of those.

A request is marked when an engine is lost under it in a way that may be its fault. Requests that
were together at the same two losses cannot be told apart, so they run one at a time after that,
until one of them loses a third engine by itself.

Laws: a request is condemned only with two marks from different engines, the second of which got it
after the first was lost, and with two only if no other marked one was there at the second, as far
as a gateway can know that; one that was not the only suspect needs a third, at which no other
twice-marked one was there. A loss that blames nobody marks nobody. An answer that came to its end
takes all its marks away. Marks and verdicts end by themselves.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Final

from headrace_replicas.contract.faults import NEVER_BEGUN, STOPPED
from headrace_replicas.contract.fleet import AttemptFailure
from headrace_replicas.contract.requests import GenerateRequest
from headrace_replicas.faults import POLICIES, classify

# Of the newest losses and marks so many are remembered: a fleet that loses more has other trouble.
_KEPT_COUNT: Final = 2000
_DIGEST_BYTES: Final = 16
# Losses of one engine that are told so close together are one; an engine that lived on may have
# another fault later, under other requests.
_SAME_LOSS_S: Final = 5.0
# Silence, other weights and unreadable files say nothing of what the request asks for.
_BLAMING: Final = frozenset[AttemptFailure]({"died", "faulted"})


def fingerprint_of(request: GenerateRequest) -> str:
    """What makes two requests the same work: prompt and sampling, seed and limits aside.

    A digest: the prompt cannot be had from it.
    """
    digest = blake2b(array("q", request.prompt_ids).tobytes(), digest_size=_DIGEST_BYTES)
    digest.update(repr((request.model, request.constraint, request.sampling)).encode())
    return digest.hexdigest()


def blames(failure: AttemptFailure | None, raw_text: str) -> bool:
    """Whether a lost attempt may be its request's fault.

    A death mostly comes without words. Where there are some, and they name a fault that is the
    driver's or a neighbour's, they count. An engine that was stopped, or that had not begun with
    the request, blames nobody.
    """
    if raw_text.startswith((STOPPED, NEVER_BEGUN)):
        return False
    return failure in _BLAMING and POLICIES[classify(raw_text)].blames_request


class Verdict(StrEnum):
    """What becomes of a request that lost an engine.

    moves: nothing is special about it. alone: it goes on, but never beside another that is marked
    twice. condemned: it is ended and refused.
    """

    MOVES = "moves"
    ALONE = "alone"
    CONDEMNED = "condemned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One blaming loss that a request was there at.

    Attributes:
        began_s: When that engine got the request; by default after all other losses.
    """

    replica_id: str
    text: str
    at_s: float
    began_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """One engine that was lost.

    Attributes:
        marks: The requests that it worked on, and how many marks each had before.
    """

    marks: Mapping[str, int]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A condemned request's.

    Attributes:
        losses: One sentence for each of its marks, oldest first.
    """

    losses: tuple[str, ...]
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """All that a gateway knows of requests that engines may die of, by fingerprint or replica."""

    deaths: Mapping[str, Death] = field(default_factory=dict)
    marked: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict)
    sentences: Mapping[str, Sentence] = field(default_factory=dict)


def lost(
    suspects: Suspects,
    fingerprint: str,
    mark: Mark,
    *,
    present: Iterable[str],
    sees_all: bool,
    poison_for_s: float,
) -> tuple[Suspects, Verdict]:
    """Take a blaming loss of one request.

    Args:
        suspects: What is known before it.
        fingerprint: The request.
        mark: Where it happened, and how.
        present: All requests that this engine works on, as far as this gateway gave them to it.
        sees_all: Whether those are all there are: not if other gateways give it requests too.
        poison_for_s: How long marks and verdicts last.
    """
    suspects = _recent(suspects, mark.at_s, poison_for_s)
    death = suspects.deaths.get(mark.replica_id)
    if death is None or mark.at_s - death.at_s > _SAME_LOSS_S:
        counts = {one: len(suspects.marked.get(one, ())) for one in {*present, fingerprint}}
        death = Death(marks=counts, at_s=mark.at_s)
    held = suspects.marked.get(fingerprint, ())
    # Several clients may send the same prompt, and one may want several answers to it. What ran
    # side by side and is lost together, as with a host, is one loss.
    beside = any(mark.began_s < one.at_s for one in held)
    if not beside and all(one.replica_id != mark.replica_id for one in held):
        held = (*held, mark)
    suspects = replace(
        suspects,
        deaths={**suspects.deaths, mark.replica_id: death},
        marked={**suspects.marked, fingerprint: held},
    )
    if beside:
        return suspects, Verdict.MOVES if len(held) < 2 else Verdict.ALONE
    verdict = _verdict(fingerprint, len(held), death, sees_all=sees_all)
    if verdict is Verdict.CONDEMNED:
        sentence = Sentence(
            losses=tuple(f"replica {one.replica_id} {one.text}" for one in held),
            until_s=mark.at_s + poison_for_s,
        )
        suspects = replace(suspects, sentences={**suspects.sentences, fingerprint: sentence})
    return suspects, verdict


def _verdict(fingerprint: str, marks: int, death: Death, *, sees_all: bool) -> Verdict:
    if marks < 2:
        return Verdict.MOVES
    if marks == 2 and not sees_all:
        return Verdict.ALONE
    # At the second loss anybody with a mark may be it; at a later one only who has two.
    needed = 1 if marks == 2 else 2
    others = any(held >= needed for one, held in death.marks.items() if one != fingerprint)
    return Verdict.ALONE if others else Verdict.CONDEMNED


def completed(suspects: Suspects, fingerprint: str) -> Suspects:
    """After an answer that came to its end: whatever engines died of, it was not this."""
    if fingerprint not in suspects.marked:
        return suspects
    marked = {name: held for name, held in suspects.marked.items() if name != fingerprint}
    return replace(suspects, marked=marked)


def runs_alone(suspects: Suspects, fingerprint: str) -> bool:
    """Whether a request may not run beside another that is marked twice."""
    return len(suspects.marked.get(fingerprint, ())) >= 2


def sentence_of(suspects: Suspects, fingerprint: str, now_s: float) -> Sentence | None:
    """The sentence that a request stands under now, if any."""
    sentence = suspects.sentences.get(fingerprint)
    return None if sentence is None or sentence.until_s <= now_s else sentence


def _recent(suspects: Suspects, now_s: float, poison_for_s: float) -> Suspects:
    since_s = now_s - poison_for_s
    marked = {
        name: kept
        for name, held in suspects.marked.items()
        if (kept := tuple(one for one in held if one.at_s > since_s))
    }
    deaths = {name: one for name, one in suspects.deaths.items() if one.at_s > since_s}
    return Suspects(
        # Dicts keep the order in which things came.
        deaths=dict(list(deaths.items())[-_KEPT_COUNT:]),
        marked=dict(list(marked.items())[-_KEPT_COUNT:]),
        sentences={name: one for name, one in suspects.sentences.items() if one.until_s > now_s},
    )
