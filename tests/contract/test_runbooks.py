"""Every cause of an incident has its page, and every page has its cause."""

from pathlib import Path

from headrace_replicas.contract.fleet import Cause

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"


def test_each_cause_has_a_runbook_page() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")}
    assert pages == {cause.value for cause in Cause}


def test_each_page_says_what_happened_what_headrace_did_and_what_to_do() -> None:
    for page in RUNBOOKS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for heading in ("## What it means", "## What headrace does", "## What to do"):
            assert heading in text, f"{page.name} lacks {heading!r}"
