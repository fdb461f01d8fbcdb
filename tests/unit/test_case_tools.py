"""The tools that judge the field cases: each rule has an example that it finds at fault."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from tests.cases import catalogue, plan
from tests.cases.case_file import (
    HTTP_CASES,
    SCRIPTED_CASES,
    CaseFile,
    Expect,
    Step,
    expand,
    load_case,
)
from tests.cases.fixtures import FIXTURES
from tests.cases.http_call import Answer, Target, call, request_body, request_headers
from tests.cases.judge import Evidence, judge
from tests.cases.procedures.chat import SCRIPT_TEXTS, ask, chat_body, user
from tests.cases.procedures.fake_backend import Mode, faulty_backend
from tests.cases.procedures.h08_overload import end_of as overload_end
from tests.cases.procedures.ledger import FORBIDDEN, Ledger, end_of
from tests.cases.procedures.load import LoadPlan, parse_damage, run_load
from tests.cases.runner import CaseReport, StepReport, judge_step, run_case
from tests.cases.samples import (
    BAD_STREAMS,
    BLOCK_STOP,
    CALL,
    CALL_REST,
    JUDGED,
    MESSAGE_DELTA,
    MESSAGE_START,
    MESSAGE_STOP,
    ROLE,
    STOP,
    TEXT_BLOCK,
    TEXT_DELTA,
    TOOL_BLOCK,
    TOOL_STOP,
    USAGE,
    Chunk,
    chunk,
    input_delta,
    plain,
    refusal,
    tool_delta,
    whole,
    wire,
)
from tests.cases.sse_check import check
from tests.cases.view import View, read
from tests.support.checkpoint_breaks import BREAKS

HELLO = SCRIPT_TEXTS["hello"]
FILES = {path.name: load_case(path) for path in sorted(HTTP_CASES.glob("*.json"))}
CASES = list(catalogue.cases_of(catalogue.load_areas()))


def test_a_sound_chat_stream_has_no_problems_and_reads_whole() -> None:
    """Text, reasoning, usage and finish come out, and comments vanish."""
    body = b": keep-alive\n\n" + wire(
        ROLE,
        chunk({"reasoning_content": "why"}),
        chunk({"content": "a😀"}),
        chunk({"content": "b"}),
        STOP,
        USAGE,
    )
    report = check(body)
    assert (report.problems, report.soft) == ((), ())
    assert (report.text, report.reasoning, report.finish) == ("a😀b", "why", "stop")
    assert (report.usage, report.usage_chunks, report.n_choices) == ({"completion_tokens": 3}, 1, 1)


def test_a_sound_tool_call_reads_whole() -> None:
    """Arguments of several deltas join; two calls keep their order."""
    second = tool_delta(1, "t2", "g", "")
    report = check(wire(ROLE, *map(chunk, (CALL, CALL_REST, second)), TOOL_STOP))
    assert report.problems == ()
    assert [(c.name, c.arguments, c.call_id) for c in report.tools] == [
        ("f", '{"a": 1}', "t1"),
        ("g", "", "t2"),
    ]


def test_a_sound_completions_stream_needs_no_role() -> None:
    """The legacy shape has text in place of a delta."""
    choice = {"index": 0, "text": "x", "finish_reason": "stop", "logprobs": {"tokens": ["x"]}}
    report = check(wire({"id": "c", "object": "text_completion", "choices": [choice]}))
    assert (report.problems, report.text, report.logprobs) == ((), "x", 1)


def test_a_sound_message_stream_has_no_problems() -> None:
    """Anthropic's events: text, then a tool call, then the stop reason."""
    tool = {**TOOL_BLOCK, "index": 1}
    body = wire(
        MESSAGE_START,
        *(TEXT_BLOCK, TEXT_DELTA, BLOCK_STOP),
        *(tool, {**input_delta('{"a": 1}'), "index": 1}, {**BLOCK_STOP, "index": 1}),
        MESSAGE_DELTA,
        MESSAGE_STOP,
        done=False,
    )
    report = check(body)
    assert (report.problems, report.text, report.stop_reason) == ((), "hi", "end_turn")
    assert report.tools[0].arguments == '{"a": 1}'


def test_an_error_event_ends_a_stream_without_a_finish() -> None:
    """One error event and the end: nothing is missing, and the error is told."""
    report = check(wire(ROLE, {"error": {"message": "boom"}}, done=False))
    assert (report.problems, report.error) == ((), {"message": "boom"})


@pytest.mark.parametrize(("problem", "body"), BAD_STREAMS.items(), ids=list(BAD_STREAMS))
def test_a_breach_in_a_stream_is_found(problem: str, body: bytes) -> None:
    """Each rule of the strict check finds its breach."""
    assert any(problem in found for found in check(body).problems), check(body).problems


def test_a_role_on_each_delta_is_a_soft_breach() -> None:
    """Most clients forgive it, so only a strict expectation counts it."""
    body = wire(ROLE, ROLE, STOP)
    assert check(body).problems == ()
    assert check(body).soft == ("role on a later delta",)


def test_a_call_cut_by_length_may_be_half() -> None:
    """Half-built arguments are no breach when finish_reason says length."""
    assert check(wire(ROLE, chunk(CALL), chunk({}, "length"))).problems == ()


def breaches(expect: Chunk, answer: Answer) -> tuple[str, ...]:
    earlier = {"first": View(text="hi", usage={"completion_tokens": 3})}
    evidence = Evidence(answer=answer, view=read(answer), earlier=earlier)
    return judge(Expect.model_validate(expect), evidence)


@pytest.mark.parametrize(("expect", "good", "bad"), JUDGED, ids=[str(row[0]) for row in JUDGED])
def test_an_expectation_tells_a_good_answer_from_a_bad_one(
    expect: Chunk, good: Answer, bad: Answer
) -> None:
    """Each kind of expectation is met by one answer and broken by another."""
    assert breaches(expect, good) == ()
    assert breaches(expect, bad) != ()


def test_each_kind_of_expectation_has_an_example() -> None:
    """A new kind of expectation needs a row in the table above."""
    assert {name for expect, _, _ in JUDGED for name in expect} == set(Expect.model_fields)


def test_an_empty_expectation_is_met_by_any_answer_that_arrived() -> None:
    """What is not named is not judged."""
    assert all(breaches({}, answer) == () for _, *answers in JUDGED for answer in answers)


def test_a_mistyped_expectation_is_refused() -> None:
    """An unknown key must not pass in silence."""
    with pytest.raises(ValidationError, match="finish_reasons"):
        Expect.model_validate({"finish_reasons": "stop"})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(failure="TimeoutError: timed out"), "transport: TimeoutError"),
        (plain(200, {"choices": [5]}), "answer is malformed"),
        (plain(200, {"choices": [{"message": {"tool_calls": [{}]}}]}), "answer is malformed"),
    ],
)
def test_no_expectation_excuses_a_broken_answer(answer: Answer, problem: str) -> None:
    """A broken transport or a malformed answer is a problem of its own."""
    step = Step(name="s")
    assert any(problem in found for found in judge_step(step, answer, read(answer), {})[0])


def test_a_choice_excuses_only_the_answer_that_it_names() -> None:
    """The other sensible answer is taken and said; a third answer still fails."""
    choice = {"reason": "documented", "expect": {"status": 400, "error_shape": "openai"}}
    step = Step.model_validate({"name": "s", "expect": {"status": 200}, "choice": choice})
    assert judge_step(step, whole(), read(whole()), {}) == ((), None)
    assert judge_step(step, refusal(), read(refusal()), {}) == ((), "documented")
    crash = plain(500, {"error": "boom"})
    problems, reason = judge_step(step, crash, read(crash), {})
    assert reason is None
    assert problems != ()


def test_bodies_are_written_out() -> None:
    """Model, repetitions and joins are put in; raw forms are sent as they stand."""
    body = {"model": "$MODEL", "list": [{"$repeat": ["ab", 2]}], "n": None}
    assert expand(body, "m") == {"model": "m", "list": ["abab"], "n": None}
    assert expand({"$join": ["{", {"$repeat": ["[", 3]}]}, "m") == "{[[["
    assert request_body(Step(name="s", raw=""), "m") == b""
    assert request_body(Step(name="s", raw_hex="ff00"), "m") == b"\xff\x00"
    assert request_body(Step(name="s", body=None), "m") == b"null"
    assert request_body(Step(name="s"), "m") is None
    sized = request_body(Step(name="s", raw_size=5), "m")
    assert sized is not None
    assert json.loads(sized)["messages"][0]["content"] == "aaaaa"


def test_a_step_may_replace_or_take_away_the_key() -> None:
    """A header set to null is not sent."""
    assert request_headers(Step(name="s"), "k")["Authorization"] == "Bearer k"
    without = Step(name="s", headers={"Authorization": None, "Origin": "o"})
    assert request_headers(without, "k") == {"Content-Type": "application/json", "Origin": "o"}
    assert "Authorization" not in request_headers(Step(name="s"), None)


def test_an_address_without_a_scheme_is_refused() -> None:
    """The error says the form wanted."""
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        _ = Target(base="localhost:8000", model="m").address


HELLO_CASE = {
    "case": "X00",
    "fixture": "scripted",
    "steps": [
        {"name": "list", "method": "GET", "path": "/v1/models", "expect": {"status": 200}},
        {"name": "whole", "body": {"model": "$MODEL"}, "expect": {"text": HELLO}},
        {
            "name": "stream",
            "body": {"model": "$MODEL", "stream": True},
            "parallel": 3,
            "expect": {"sse": True, "strict": True, "same_text_as": "whole"},
        },
    ],
}


@pytest.mark.parametrize(
    ("mode", "failing"),
    [
        (Mode.OK, set()),
        (Mode.ERR500, {"whole", "stream"}),
        (Mode.CLOSE0, {"whole", "stream"}),
        (Mode.GARBAGE, {"stream"}),
    ],
)
def test_the_runner_fails_exactly_the_steps_that_went_wrong(mode: Mode, failing: set[str]) -> None:
    """A good server passes; each fault of a bad one is seen where it shows."""
    with faulty_backend(mode) as base:
        case = CaseFile.model_validate(HELLO_CASE)
        report = run_case(case, "x00.json", Target(base=base, model="fake"))
    assert {step.name for step in report.steps if step.problems} == failing
    assert [len(step.seen) for step in report.steps] == [1, 1, 3]


def test_a_skipped_step_is_not_run() -> None:
    """It has no report, neither good nor bad."""
    with faulty_backend(Mode.ERR500) as base:
        case = CaseFile.model_validate(HELLO_CASE)
        report = run_case(
            case, "x00.json", Target(base=base, model="fake"), skip={"whole", "stream"}
        )
    assert [step.name for step in report.steps] == ["list"]
    assert report.problems == ()


def test_a_silent_server_is_given_up() -> None:
    """The step's time limit ends the wait, and the answer says so."""
    with faulty_backend(Mode.BLACKHOLE) as base:
        answer = call(Target(base=base, model="fake"), Step(name="s", body={}, timeout=0.2))
    assert (answer.status, answer.timed_out) == (None, True)


# ---- the catalogue


def test_the_catalogue_holds_107_cases_with_unique_ids() -> None:
    """None is lost, none is there twice."""
    assert len(CASES) == len({case.id for case in CASES}) == 107


def test_each_input_exists_and_each_file_belongs_to_a_case() -> None:
    """No case points at nothing, and no input lies unused."""
    named = {
        kind: {item.name for case in CASES for item in case.inputs if item.kind == kind}
        for kind in ("http", "scripted", "procedure")
    }
    assert named["http"] == set(FILES)
    assert named["scripted"] == {path.name for path in SCRIPTED_CASES.glob("*.json")}
    library = {"__init__.py", "chat.py", "ledger.py", "raw_post.py"}
    programs = {path.name for path in catalogue.PROCEDURES.glob("*.*")} - library
    assert named["procedure"] == programs


def test_each_break_of_a_checkpoint_is_one_that_can_be_made() -> None:
    """A case names a break by the name under which it is made."""
    named = {item.name for case in CASES for item in case.inputs if item.kind == "checkpoint"}
    assert named <= BREAKS.keys()


def test_each_written_procedure_has_its_heading() -> None:
    """A case that points at PROCEDURES.md is found there under its id."""
    text = (catalogue.PROCEDURES / "PROCEDURES.md").read_text(encoding="utf-8")
    headings = {line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")}
    wanted = {case.id for case in CASES for item in case.inputs if item.name == "PROCEDURES.md"}
    assert wanted <= headings
    assert headings <= {case.id for case in CASES}


@pytest.mark.parametrize("name", FILES)
def test_a_request_file_is_consistent(name: str) -> None:
    """Its case and fixture exist, its steps have names of their own, references look back."""
    case_file = FILES[name]
    assert any(
        case.id == case_file.case and item.name == name for case in CASES for item in case.inputs
    )
    assert case_file.fixture in FIXTURES
    names = [step.name for step in case_file.steps]
    assert [step for step, times in Counter(names).items() if times > 1] == []
    for number, step in enumerate(case_file.steps):
        expect = step.expect
        references = {expect.same_text_as, expect.differs_from, expect.same_usage_as} - {None}
        assert references <= set(names[:number])


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTED_CASES.glob("*.json")))
def test_a_scripted_file_says_what_is_emitted_and_expected(name: str) -> None:
    """Each has the family of the model, its tools, the pieces and what must come out."""
    script = json.loads((SCRIPTED_CASES / name).read_text(encoding="utf-8"))
    assert script.keys() == {"case", "family", "tools", "emits", "expect", "note"}
    assert script["case"] in {case.id for case in CASES}
    assert script["emits"]
    assert all(isinstance(piece, str) for piece in script["emits"])


def test_an_active_case_is_held_by_a_request_file_or_a_test() -> None:
    """Active means that something would fail; the tests named exist."""
    root = catalogue.AREAS.parents[2]
    runs = plan.plan(catalogue.load_areas(), FILES)
    running = {run.case_id for run in runs if not run.is_waiting}
    for case in CASES:
        held = case.id in running or bool(case.proved_by)
        assert held or case.status.kind != "active", case.id
        assert all((root / test.partition("::")[0]).is_file() for test in case.proved_by), case.id


def test_a_step_with_its_own_status_exists() -> None:
    """A renamed step must not lose its status."""
    for case in CASES:
        for item in case.inputs:
            known = {step.name for step in FILES[item.name].steps} if item.kind == "http" else set()
            assert set(item.steps) <= known, case.id


@pytest.mark.parametrize("text", ["", "done", "pending", "pending:", "choice: ", "active: yes"])
def test_a_status_of_another_form_is_refused(text: str) -> None:
    """The error says the three forms."""
    with pytest.raises(ValueError, match="pending: FEATURE"):
        catalogue.parse_status(text)


@pytest.mark.parametrize(
    "item", [{}, {"http": "a", "scripted": "b"}, {"http": "a", "steps": {"s": "choice: x"}}]
)
def test_an_input_without_a_clear_kind_is_refused(item: dict[str, Any]) -> None:
    """Exactly one kind, and no choice for a single step."""
    with pytest.raises(ValidationError):
        catalogue.Input.model_validate(item)


def test_the_markdown_has_one_row_for_each_case() -> None:
    """Cells hold no bar that would start another column."""
    text = catalogue.markdown(catalogue.load_areas())
    rows = [line for line in text.splitlines() if line[2:5] in {case.id for case in CASES}]
    assert len(rows) == 107
    assert {row.replace("\\|", "").count("|") for row in rows} == {8}
    assert "all 107 cases" in catalogue.figures(catalogue.load_areas())


# ---- what the driver makes of a run

WAITING = {"whole": "tools"}


def planned(waiting: dict[str, str], choice: str | None = None) -> plan.PlannedRun:
    case_file = CaseFile.model_validate(HELLO_CASE)
    return plan.PlannedRun(
        case_id="X00", file="x00.json", case_file=case_file, waiting=waiting, choice=choice
    )


def report(chose: str | None = None, **steps: bool) -> CaseReport:
    reports = tuple(
        StepReport(name=name, problems=() if good else ("bad",), choice=chose, seen=())
        for name, good in steps.items()
    )
    return CaseReport(case="X00", file="x00.json", steps=reports)


ALL = dict.fromkeys(("list", "whole", "stream"), "tools")


@pytest.mark.parametrize(
    ("run", "came", "verdict"),
    [
        (planned({}), report(list=True, whole=True, stream=True), plan.Verdict.PASS),
        (planned({}), report(list=True, whole=False, stream=True), plan.Verdict.FAIL),
        (planned({}), report("why", list=True, whole=True, stream=True), plan.Verdict.CHOICE),
        (planned({}, "why"), report(list=True, whole=True, stream=True), plan.Verdict.CHOICE),
        (planned(WAITING), report(list=True, stream=True), plan.Verdict.PASS),
        (planned(WAITING), report(list=True, whole=False, stream=True), plan.Verdict.PASS),
        (
            planned(WAITING),
            report(list=True, whole=True, stream=True),
            plan.Verdict.UNEXPECTED_PASS,
        ),
        (planned(WAITING), report(list=False, whole=True, stream=True), plan.Verdict.FAIL),
        (planned(ALL), report(list=True, whole=False, stream=True), plan.Verdict.PENDING),
        (planned(ALL), report(list=True, whole=True, stream=True), plan.Verdict.UNEXPECTED_PASS),
    ],
)
def test_a_verdict_follows_from_the_active_steps(
    run: plan.PlannedRun, came: CaseReport, verdict: plan.Verdict
) -> None:
    """Only active steps fail; pending ones are told apart by whether they pass."""
    assert plan.row_of(run, came).verdict is verdict


def test_the_plan_takes_areas_and_ids() -> None:
    """Filters narrow the catalogue; every request file is in the plan when there are none."""
    areas = catalogue.load_areas()
    runs = plan.plan(areas, FILES)
    assert {run.file for run in runs} == set(FILES)
    assert {run.case_id for run in plan.plan(areas, FILES, only=["f05"])} == {"F05"}
    streaming = plan.plan(areas, FILES, area_words=["streaming"])
    assert {run.case_id[0] for run in streaming} == {"S"}
    assert plan.fixtures_of(plan.plan(areas, FILES, only=["C05", "F05", "F07"])) == (
        "no_template",
        "scripted",
    )


def test_a_file_that_did_not_run_is_not_called_passed() -> None:
    """Pending and unserved files say why."""
    assert plan.row_not_run(planned(ALL)).verdict is plan.Verdict.PENDING
    unserved = plan.row_not_served(planned({}), "no Ray")
    assert unserved.verdict is plan.Verdict.FAIL
    assert "no Ray" in unserved.remarks[0]
    assert "1 pending" in plan.figure([plan.row_not_run(planned(ALL))])


# ---- procedures


def ending(view: View, **answer: Any) -> str:
    return end_of(Answer(**{"status": 200, **answer}), view, wanted=HELLO, left=False)


@pytest.mark.parametrize(
    ("seen", "end"),
    [
        (lambda: ending(View(text=HELLO, finish="stop")), "ok"),
        (lambda: ending(View(text=HELLO, finish="stop", problems=("no [DONE]",))), "fake_stop"),
        (lambda: ending(View(text="Hello", finish="stop")), "fake_stop"),
        (lambda: ending(View(text="Hello")), "truncated_silently"),
        (lambda: ending(View(text="Hello"), timed_out=True), "hang"),
        (lambda: ending(View(), status=None, timed_out=True), "hang"),
        (lambda: ending(View(), status=None), "connection_error"),
        (lambda: ending(View(), status=503), "http_503"),
        (lambda: ending(View(text="Hello", error={"message": "m"})), "error_event"),
        (lambda: ending(View(text=HELLO + HELLO, finish="stop")), "duplicated_text"),
        (lambda: ending(View(text="Other", finish="stop")), "wrong_text"),
        (lambda: end_of(Answer(), View(), wanted=HELLO, left=True), "client_abort"),
    ],
)
def test_each_end_of_a_request_has_its_name(seen: Callable[[], str], end: str) -> None:
    """The ledger tells silence, lies and honest errors apart."""
    assert seen() == end


@pytest.mark.parametrize(
    ("mode", "argument", "end"),
    [
        (Mode.OK, 0, "ok"),
        (Mode.CLOSE0, 0, "truncated_silently"),
        (Mode.CLOSE_N, 3, "truncated_silently"),
        (Mode.RESET_N, 3, "truncated_silently"),
        (Mode.HANG_AFTER, 2, "hang"),
        (Mode.BLACKHOLE, 0, "hang"),
        (Mode.BUSY503, 0, "http_503"),
        (Mode.E400, 0, "http_400"),
        (Mode.SLOW, 0.001, "ok"),
    ],
)
def test_each_fault_of_the_fake_backend_shows_in_the_ledger(
    mode: Mode, argument: float, end: str
) -> None:
    """Over a real socket, every fault comes to the end that it stands for."""
    with faulty_backend(mode, argument) as base:
        target = Target(base=base, model="fake")
        body = chat_body(target, [user("[[hello]]")], max_tokens=20, stream=True)
        answer, view = ask(target, body, timeout_s=0.5)
    assert end_of(answer, view, wanted=HELLO, left=False) == end


def test_a_load_run_enters_every_request() -> None:
    """Every second request ends early without a word, and the ledger says so."""
    with faulty_backend(Mode.FLIP, 2) as base:
        load = LoadPlan(duration_s=0.2, concurrency=2, script="hello", deadline_s=5)
        ledger = run_load(Target(base=base, model="fake"), load, [parse_damage("0.01:exit 3")])
    assert set(ledger.ends) == {"ok", "truncated_silently"}
    assert ledger.forbidden_count == ledger.ends["truncated_silently"] > 0
    assert "BAD" in ledger.lines()[-1]


def test_a_clean_ledger_says_clean() -> None:
    """Honest errors are no breach."""
    ledger = Ledger()
    ledger.record("http_503", Answer(status=503), View(), at_s=7.0)
    assert "clean" in ledger.lines()[-1]
    assert ledger.by_window[5]["http_503"] == 1
    assert "http_503" not in FORBIDDEN


@pytest.mark.parametrize("text", ["10", ":kill", "10:", "soon:kill"])
def test_damage_of_another_form_is_refused(text: str) -> None:
    """SECONDS:COMMAND, and nothing else."""
    with pytest.raises(ValueError, match="SECONDS:COMMAND"):
        parse_damage(text)


def test_overload_wants_retry_after() -> None:
    """A shed request that does not say when to come back is a fault."""
    assert overload_end(Answer(status=200), leaves=False) == "200"
    assert overload_end(Answer(status=429, headers={"retry-after": "1"}), leaves=False) == "429"
    assert overload_end(Answer(status=429), leaves=False) == "429 without Retry-After"
    assert overload_end(Answer(), leaves=True) == "left early"
    assert "no answer" in overload_end(Answer(), leaves=False)
