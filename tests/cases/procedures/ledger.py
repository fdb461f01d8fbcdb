"""How a request under load ended: pure.

Allowed ends: `ok`, `error_event`, `http_<status>`, `client_abort`, `connection_error`. Never
allowed: text that is wrong, comes twice or stops early without a word, and silence.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.cases.http_call import Answer
from tests.cases.view import View

FORBIDDEN = frozenset({"wrong_text", "duplicated_text", "truncated_silently", "hang", "fake_stop"})
_WINDOW_S = 5
_PREFIX_CHARS = 8


def end_of(answer: Answer, view: View, *, wanted: str, left: bool) -> str:
    """Names the end of one request.

    Args:
        answer: What came.
        view: How it reads.
        wanted: The whole text that a fault-free run gives.
        left: The client went away on purpose.

    Returns:
        A member of `FORBIDDEN` or one of the allowed ends.
    """
    if left:
        return "client_abort"
    if answer.status is None:
        return "hang" if answer.timed_out else "connection_error"
    if answer.status != 200:
        return f"http_{answer.status}"
    if view.error:
        return "error_event"
    return _end_of_text(answer, view, wanted)


def _end_of_text(answer: Answer, view: View, wanted: str) -> str:
    if view.text == wanted and view.finish == "stop" and not view.problems:
        return "ok"
    if answer.timed_out:
        return "hang"
    if wanted.startswith(view.text):
        # A part of the answer: with a finish_reason it claims to be the whole.
        return "truncated_silently" if view.finish is None else "fake_stop"
    if view.text.count(wanted[:_PREFIX_CHARS]) > 1:
        return "duplicated_text"
    return "wrong_text"


@dataclass(slots=True)
class Ledger:
    """All ends of one run.

    Attributes:
        ends: How often each end came.
        by_window: The same for each window of five seconds, by its start.
        ok_s: Seconds that the good answers took.
        examples: The first answer of each end that is not good.
    """

    ends: Counter[str] = field(default_factory=Counter)
    by_window: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    ok_s: list[float] = field(default_factory=list)
    examples: dict[str, str] = field(default_factory=dict)

    def record(self, end: str, answer: Answer, view: View, *, at_s: float) -> None:
        """Enters one end, `at_s` seconds into the run."""
        self.ends[end] += 1
        self.by_window[int(at_s) // _WINDOW_S * _WINDOW_S][end] += 1
        if end == "ok":
            self.ok_s.append(answer.total_s)
        elif end != "client_abort":
            seen = f"{answer.status} {answer.failure} {view.text[-60:]!r} {answer.body[-120:]!r}"
            self.examples.setdefault(end, seen)

    @property
    def forbidden_count(self) -> int:
        """Ends that must never be."""
        return sum(self.ends[end] for end in FORBIDDEN)

    def lines(self) -> list[str]:
        """The ledger for a person; its last line is the figure."""
        lines = [f"{at_s:4d} s {dict(ends)}" for at_s, ends in sorted(self.by_window.items())]
        lines += [f"  first {end}: {seen}" for end, seen in self.examples.items()]
        if self.ok_s:
            ordered = sorted(self.ok_s)
            lines.append(f"  ok p50 {ordered[len(ordered) // 2]:.2f} s, max {ordered[-1]:.2f} s")
        word = "BAD" if self.forbidden_count else "clean"
        return [*lines, f"load: {word}, {self.forbidden_count} forbidden ends of {dict(self.ends)}"]
