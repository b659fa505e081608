"""docs/requirements.md names every requirement once, and the tests that prove it."""

from __future__ import annotations

from tests.docs.requirements import PAGE, promised, proofs, renewed

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    """What a test proves stands on the page."""
    assert renewed(TEXT) == TEXT, "run ./dev docs requirements"


def test_every_requirement_has_one_promise_and_one_proof() -> None:
    ids = promised(TEXT)
    assert len(ids) == len(set(ids)) > 60
    assert TEXT.count("\n  Proven by: ") == len(ids)


def test_tests_name_only_what_is_required() -> None:
    """A mistyped id would prove nothing."""
    assert set(proofs()) - set(promised(TEXT)) == set()


def test_proofs_are_renewed() -> None:
    """The promise stays as it was written."""
    known, unknown = f"RUN-{2}", f"ZZZ-{9}"  # not in one piece: this file proves neither
    page = f"- **{known}** One command\n  tests it.\n  Proven by: nothing\n- **{unknown}** None.\n  Proven by: old\n"
    [first, rest] = renewed(page).split(f"- **{unknown}**")
    assert first.startswith(f"- **{known}** One command\n  tests it.\n  Proven by: ")
    assert "[unit/test_dev](../tests/unit/test_dev.py)" in first
    assert rest == " None.\n  Proven by: not yet\n"
