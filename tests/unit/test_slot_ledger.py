"""The account of slots finds each way in which a computation and its bytes can miss each other."""

from tests.support.slot_ledger import SlotLedger

A, B = (0, 3), (1, 3)


def bring(ledger: SlotLedger, *slots: tuple[int, int], count: int = 10) -> None:
    for slot in slots:
        ledger.promised(slot, count)
    ledger.read_begins(slots)
    ledger.read_ends((slot, count) for slot in slots)


def evaluate(ledger: SlotLedger, *graphs: int, waits: bool = True) -> None:
    newest = ledger.evaluation_took(graphs, ledger.evaluation_begins())
    if waits:
        ledger.evaluation_ends(newest)


def test_bytes_then_graph_then_evaluation_is_right() -> None:
    ledger = SlotLedger()
    for _ in range(3):
        bring(ledger, A, B)
        evaluate(ledger, ledger.built([A, B]))
    assert ledger.violations == []
    assert ledger.not_submitted == ()
    assert (ledger.totals.promised_bytes, ledger.totals.came_bytes) == (60, 60)
    assert (ledger.totals.graphs, ledger.totals.submitted, ledger.totals.evaluations) == (3, 3, 3)


def test_an_evaluation_before_its_bytes_is_found() -> None:
    ledger = SlotLedger()
    ledger.promised(A, 10)
    ledger.read_begins([A])
    ledger.read_ends([(A, 4)])
    evaluate(ledger, ledger.built([A, B]))
    assert ledger.violations == [f"an evaluation uses slot {A}, and 6 bytes are to come"]


def test_a_graph_may_be_built_before_its_bytes_come() -> None:
    ledger = SlotLedger()
    ledger.promised(A, 10)
    graph = ledger.built([A])
    ledger.evaluation_took([], ledger.evaluation_begins())
    ledger.read_begins([])
    ledger.read_ends([(A, 10)])
    evaluate(ledger, graph)
    assert ledger.violations == []


def test_an_evaluation_of_other_slots_may_run_beside_a_read() -> None:
    ledger = SlotLedger()
    bring(ledger, A)
    ledger.promised(B, 10)
    evaluate(ledger, ledger.built([A]), waits=False)
    ledger.read_begins([B])
    ledger.read_ends([(B, 10)])
    assert ledger.violations == []
    assert ledger.totals.reads_beside == 1


def test_a_slot_that_is_overwritten_before_its_use_is_over_is_found() -> None:
    for submitted in (False, True):
        ledger = SlotLedger()
        bring(ledger, A)
        graph = ledger.built([A])
        if submitted:
            evaluate(ledger, graph, waits=False)
        bring(ledger, A)
        assert ledger.violations == [f"slot {A} is overwritten before its use is over"]


def test_waiting_for_one_evaluation_does_not_end_those_after_it() -> None:
    ledger = SlotLedger()
    bring(ledger, A, B)
    first, second = ledger.built([A]), ledger.built([B])
    evaluate(ledger, first, waits=False)
    evaluate(ledger, second, waits=False)
    ledger.evaluation_ends(first)
    bring(ledger, A)
    assert ledger.violations == []
    bring(ledger, B)
    assert ledger.violations == [f"slot {B} is overwritten before its use is over"]
