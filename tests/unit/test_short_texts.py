"""What is remembered of texts."""

from holdfast.short_texts import remembering_short


def test_a_short_text_is_worked_on_once_and_a_long_one_each_time() -> None:
    worked_on: list[int] = []

    @remembering_short
    def length(text: str) -> int:
        worked_on.append(len(text))
        return len(text)

    assert [length(text) for text in ("storm", "storm", "x" * 501, "x" * 501)] == [5, 5, 501, 501]
    assert worked_on == [5, 501, 501]
