"""The picture of a trace shows what was exported."""

from tests.docs.trace import PICTURE, draw, kept
from tests.observability.collector import depths
from tests.observability.test_trace_of_an_order import TREE


def test_the_picture_of_a_trace_is_drawn_from_exported_spans() -> None:
    """Those of the demo; when the spans change, `./dev docs trace` draws it anew (OBS-2)."""
    spans = kept()
    assert draw(spans) == PICTURE.read_text()
    own = [span for span in spans if span.scope == "holdfast"]
    lines = [
        f"{'  ' * depth}{span.service}: {span.name}{' *' if span.failed else ''}"
        for depth, span in depths(own, key=lambda span: (span.name, span.start))
    ]
    assert lines == TREE
