"""The record of one thing that went wrong."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace_replicas.contract.fleet import Cause, Incident
from headrace_serve import incidents
from headrace_serve.incidents import EVIDENCE_CHARS, EVIDENCE_KEPT, TIMELINE_KEPT

times = st.floats(min_value=0.0, max_value=4e9)
texts = st.text(max_size=30)


def opened(at_s: float = 1000.0, text: str = "ActorDiedError: killed\nby signal 9") -> Incident:
    return incidents.open_(
        cause=Cause.REPLICA_DIED,
        host="m1",
        replica="MoEReplica#x/1",
        generation=3,
        text=text,
        at_s=at_s,
    )


def moved(incident: Incident, gap_s: float, at_s: float) -> Incident:
    return incidents.count_move(
        incident, request_id="q", to_replica="b", replayed_tokens=5, gap_s=gap_s, at_s=at_s
    )


@st.composite
def lives(draw: st.DrawFn) -> list[Incident]:
    """An incident after each of some random things, at random times, backwards too."""
    states = [opened(draw(times))]
    for _ in range(draw(st.integers(0, 40))):
        before, at_s, text = states[-1], draw(times), draw(texts)
        states.append(
            draw(
                st.sampled_from(
                    [
                        incidents.add_evidence(
                            before, cause=Cause.ENGINE_FAULT, text=text, at_s=at_s
                        ),
                        incidents.mitigate(before, how=text, at_s=at_s),
                        incidents.close(before, why=text, at_s=at_s),
                        incidents.reopen(before, cause=Cause.REPLICA_DIED, text=text, at_s=at_s),
                        moved(before, at_s / 1e6, at_s),
                    ]
                )
            )
        )
    return states


@given(lives())
def test_a_record_stays_true_to_itself(states: list[Incident]) -> None:
    """Id, cause and first evidence stay, counts only grow, and times are in order."""
    first = states[0]
    for before, after in pairwise(states):
        assert (after.id, after.cause, after.opened_s) == (first.id, first.cause, first.opened_s)
        assert after.evidence[0] == first.evidence[0]
        assert after.requests_moved >= before.requests_moved
        assert after.replayed_tokens >= before.replayed_tokens
        assert after.worst_gap_s >= before.worst_gap_s
        if after.mitigated_s is not None:
            assert after.mitigated_s >= after.opened_s
        if after.closed_s is not None:
            assert after.mitigated_s is not None
            assert after.closed_s >= after.mitigated_s


@given(lives())
def test_every_record_has_five_lines_for_a_person(states: list[Incident]) -> None:
    """The summary is five lines without a line break, whatever happened."""
    last = incidents.reopen(states[-1], cause=Cause.ENGINE_FAULT, text="a\nb", at_s=1.0)
    lines = incidents.summary(incidents.close(last, why="c\nd", at_s=2.0))
    assert [line.split(":")[0] for line in lines] == ["What", "Where", "Requests", "Time", "State"]
    assert all(len(line.splitlines()) == 1 for line in lines)


@given(st.lists(st.text(max_size=2 * EVIDENCE_CHARS), max_size=100))
def test_a_record_is_bounded(flood: list[str]) -> None:
    """However many and long the texts, the first and the newest are kept, cut to the limit."""
    incident = opened()
    for number, text in enumerate(flood):
        incident = incidents.add_evidence(
            incident, cause=Cause.ENGINE_FAULT, text=text, at_s=1000.0 + number
        )
    assert len(incident.evidence) <= EVIDENCE_KEPT
    assert len(incident.timeline) <= TIMELINE_KEPT
    assert all(len(text) <= EVIDENCE_CHARS for text in incident.evidence)
    if flood:
        assert incident.evidence[-1][:100] == flood[-1][:100]


def test_a_flood_keeps_the_first_and_the_newest() -> None:
    """With more texts than fit, the first stays and the oldest after it go."""
    incident = opened(text="first")
    for number in range(100):
        incident = incidents.add_evidence(
            incident, cause=Cause.ENGINE_FAULT, text=str(number), at_s=1000.0
        )
    newest = tuple(str(number) for number in range(100 - EVIDENCE_KEPT + 1, 100))
    assert incident.evidence == ("first", *newest)


@given(times, times)
def test_ids_sort_by_time_of_opening(one_s: float, other_s: float) -> None:
    """An earlier incident has the smaller id; the same symptom always has the same id."""
    assert opened(one_s).id == opened(one_s).id
    if one_s + 0.002 < other_s:
        assert opened(one_s).id < opened(other_s).id


def test_an_id_is_safe_in_a_file_name() -> None:
    """Whatever Ray calls a replica, the id has no separator of a path in it."""
    assert opened().id == "000000001000000-MoEReplica-x-1-g3"


@given(lives(), st.sampled_from(Cause))
def test_a_cause_gets_more_precise_and_never_less(states: list[Incident], cause: Cause) -> None:
    """A symptom's cause gives way to one that says what was behind it, once."""
    before = states[-1]
    after = incidents.refine(before, cause=cause, at_s=1.0)
    assert incidents.refine(after, cause=Cause.WRONG_OUTPUT, at_s=2.0).cause in (
        after.cause,
        Cause.WRONG_OUTPUT,
    )
    if after is not before:
        assert (before.cause, after.cause) == (Cause.REPLICA_DIED, cause)
        assert incidents.refine(after, cause=Cause.WRONG_OUTPUT, at_s=2.0) is after
        assert incidents.refine(after, cause=Cause.REPLICA_DIED, at_s=2.0) is after


def test_an_incident_of_a_host_names_no_replica() -> None:
    """Two places that go wrong at once have ids of their own."""
    one, other = (
        incidents.open_(
            cause=Cause.HOST_HELD,
            host="m1",
            replica="",
            generation=0,
            text="held",
            at_s=1.0,
            subject=f"m1-{device}-held",
        )
        for device in (0, 1)
    )
    assert one.id != other.id
    assert incidents.summary(one)[1] == "Where: host m1"


def test_closing_and_mitigating_twice_changes_nothing() -> None:
    """The first moment counts, and the same object comes back."""
    closed = incidents.close(opened(), why="well again", at_s=1010.0)
    assert incidents.close(closed, why="later", at_s=1020.0) is closed
    assert incidents.mitigate(closed, how="later", at_s=1020.0) is closed


def test_the_summary_tells_the_story() -> None:
    """What happened, where, what requests felt, how long, and how it stands."""
    incident = moved(opened(), 0.84, 1000.9)
    incident = incidents.mitigate(incident, how="lost", at_s=1000.1)
    assert incidents.summary(incident)[3].endswith("out of rotation after 0.10 s, not over yet")
    incident = incidents.close(incident, why="replica b2 took its place", at_s=1012.5)
    out = "out of rotation after 0.10 s, over after 12.50 s"
    assert incidents.summary(incident) == (
        "What: The replica died (replica_died): ActorDiedError: killed",
        "Where: replica MoEReplica#x/1, generation 3, host m1",
        "Requests: 1 moved, 5 tokens replayed, longest pause 0.84 s",
        f"Time: opened 1970-01-01T00:16:40.000+00:00, {out}",
        "State: closed; last entry: closed: replica b2 took its place",
    )
