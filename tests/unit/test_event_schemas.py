"""The AsyncAPI document of an application's events, and the check that a release only adds to it."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, create_model

from holdfast import EventEnvelope, HandlerRegistry
from holdfast.cli import main
from holdfast.errors import ConfigurationError
from holdfast.schemas.asyncapi import document
from holdfast.schemas.changes import breaking_changes
from tests.docs.support import ROOT, blocks


class Line(BaseModel):
    sku: str
    count: int = 1


class Money(BaseModel):
    amount: Decimal


class Bill(BaseModel):
    total: Money


class Billed(Bill):
    event_type: ClassVar[str] = "bill.made"


class Paid(BaseModel):
    order_id: int


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    known: int


class OrderPlaced(BaseModel):
    event_type: ClassVar[str] = "order.placed"

    order_id: int
    lines: list[Line]
    note: str | None = None


def described(*classes: type[Any], registry: HandlerRegistry | None = None) -> dict[str, Any]:
    return document(registry or HandlerRegistry(), classes, title="shop", version="1.4.0")


def placed(**fields: Any) -> dict[str, Any]:
    """The document of an application whose order.placed has these fields."""
    model = create_model("OrderPlaced", **fields)
    model.event_type = "order.placed"  # type: ignore[attr-defined]
    return described(model)


def test_handlers_and_published_classes_are_in_one_document() -> None:
    """Payload models belong to the producer; a handler's own model describes what nobody here publishes (ENV-3)."""
    registry = HandlerRegistry()

    @registry.handler(OrderPlaced, name="billing.charge_card")
    async def charge_card(event: EventEnvelope[OrderPlaced]) -> None: ...

    @registry.handler("order.paid", name="mail.thank")
    async def thank(event: EventEnvelope, payload: Paid) -> None: ...

    found = described(OrderPlaced, registry=registry)
    assert found["asyncapi"] == "3.0.0"
    assert found["info"] == {"title": "shop", "version": "1.4.0"}
    assert set(found["channels"]) == {"order.placed", "order.paid"}
    assert found["operations"]["publish.order.placed"]["action"] == "send"
    assert found["operations"]["mail.thank"] == {"action": "receive", "channel": {"$ref": "#/channels/order.paid"}}
    message = found["channels"]["order.placed"]["messages"]["order.placed"]
    assert message["payload"]["properties"]["lines"]["items"] == {"$ref": "#/components/schemas/Line"}
    assert set(found["components"]["schemas"]) == {"Line"}


def test_a_class_that_is_read_otherwise_than_written_is_two_schemas() -> None:
    """A Decimal is written as text, and read from a number too."""
    registry = HandlerRegistry()

    @registry.handler("bill.paid", name="books.enter")
    async def enter(event: EventEnvelope, payload: Bill) -> None: ...

    assert set(described(Billed, registry=registry)["components"]["schemas"]) == {"Money", "Money-Input"}


def test_two_classes_of_one_name_are_refused() -> None:
    def order(line: type[BaseModel], event_type: str) -> type[Any]:
        model = create_model("Order", lines=(list[line], ...))  # type: ignore[valid-type]
        model.event_type = event_type  # type: ignore[attr-defined]
        return model

    other = create_model("Line", price=(int, ...))
    with pytest.raises(ConfigurationError, match="Line"):
        described(order(Line, "order.placed"), order(other, "order.changed"))


@pytest.mark.parametrize(
    "fields",
    [
        {"order_id": (int, ...)},
        {"order_id": (int, ...), "note": (str | None, None)},
        {"order_id": (int, ...), "lines": (list[Line], [])},
    ],
)
def test_additions_pass(fields: dict[str, Any]) -> None:
    """Producers only add (ENV-3)."""
    assert breaking_changes(placed(order_id=(int, ...)), placed(**fields)) == []


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((int, ...), None, "payload.it is gone"),
        ((int, ...), (str, ...), "was integer, and is string"),
        ((int, ...), (int, 1), "was always there, and may be missing"),
        ((int, ...), (int | None, ...), "may be null now"),
        (None, (int, ...), "is new and required"),
        ((Literal["a"], ...), (Literal["a", "b"], ...), "may be 'b' now"),
        ((str, Field(max_length=5)), (str, Field(max_length=6)), "had maxLength 5, and has 6"),
        ((list[int], ...), (list[str], ...), "payload.it[] was integer"),
        ((dict[str, int], ...), (dict[str, str], ...), "payload.it.* was integer"),
        ((dict[str, int], ...), (dict[str, Any], ...), "payload.it.* was integer"),
        ((tuple[int, str], ...), (tuple[int, int], ...), "payload.it[1] was string"),
        ((Strict, ...), (create_model("Strict", known=(int, ...), new=(int, 1)), ...), "payload.it.new is new, and"),
        ((list[Line], ...), (list[create_model("Line", sku=(int, ...), count=(int, 1))], ...), "it[].sku was string"),
    ],
)
def test_what_a_consumer_would_not_survive_is_named(before: Any, after: Any, told: str) -> None:
    """A breaking change is a new event type (ENV-3)."""
    always = {"order_id": (int, ...)}
    released = placed(**always, **({"it": before} if before else {}))
    current = placed(**always, **({"it": after} if after else {}))
    [change] = breaking_changes(released, current)
    assert told in str(change)
    assert str(change).startswith("order.placed: payload.it")


@pytest.mark.parametrize(
    ("before", "after"),
    [((float, ...), (int, ...)), ((int | None, ...), (int, ...)), ((Literal["a", "b"], ...), (Literal["a"], ...))],
)
def test_narrower_values_pass(before: Any, after: Any) -> None:
    assert breaking_changes(placed(it=before), placed(it=after)) == []


def test_an_event_type_that_is_gone_is_named() -> None:
    assert "is gone" in str(breaking_changes(described(OrderPlaced), described())[0])


def tree(**fields: Any) -> type[Any]:
    """A model that contains itself twice."""
    namespace = {"__annotations__": {"children": "list[Tree]", "parent": "Tree | None", **fields}}
    values = {"__module__": __name__, "event_type": "tree.grown", "children": [], "parent": None}
    annotations = {"event_type": "ClassVar[str]", **namespace["__annotations__"]}
    model = type("Tree", (BaseModel,), {**values, "__annotations__": annotations})
    model.model_rebuild(_types_namespace={"Tree": model, "ClassVar": ClassVar})
    return model


def test_a_model_that_contains_itself_is_compared_once() -> None:
    """However often it does: each definition is told in the place where it is met first."""
    assert breaking_changes(described(tree()), described(tree())) == []
    [change] = breaking_changes(described(tree(name="str")), described(tree(name="int")))
    assert str(change) == "tree.grown: payload.name was string, and is integer now"


def test_a_version_that_is_gone_is_named() -> None:
    class Second(OrderPlaced):
        event_version: ClassVar[int] = 2

    [change] = breaking_changes(described(OrderPlaced), described(Second))
    assert str(change) == "order.placed: version 1 is gone; keep it, with a deadline"


def released(payload: Any, **definitions: Any) -> dict[str, Any]:
    """A document of a release whose order.placed has this payload."""
    messages = {"order.placed": {"payload": payload}}
    return {
        "asyncapi": "3.0.0",
        "channels": {"order.placed": {"messages": messages}},
        "components": {"schemas": definitions},
    }


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    "definitions",
    [
        pytest.param({"A": {"anyOf": [reference("A"), TEXT]}}, id="refers to itself"),
        pytest.param({"A": {"anyOf": [reference("B"), TEXT]}, "B": {"anyOf": [reference("A")]}}, id="mutual"),
        pytest.param({"A": reference("B"), "B": {"anyOf": [reference("A"), TEXT]}}, id="through another name"),
        pytest.param(
            {"A": reference("A0"), "A22": TEXT}
            | {f"A{number}": {"anyOf": [reference(f"A{number + 1}")] * 2} for number in range(22)},
            id="doubled 22 times",
        ),
    ],
)
@pytest.mark.timeout(10)
def test_variants_that_come_again_are_counted_once(definitions: dict[str, Any]) -> None:
    """A document that names one definition for ever, or 4 million times, is the text that it stands for (S8)."""
    document = released(reference("A"), **definitions)
    assert breaking_changes(document, released(TEXT)) == []
    assert breaking_changes(released(TEXT), document) == []
    [change] = breaking_changes(document, released({"type": "integer"}))
    assert str(change) == "order.placed: payload was string, and is integer now"


@pytest.mark.timeout(10)
def test_models_that_contain_each_other_are_compared_in_time() -> None:
    """Of eight kinds of expressions, each may stand in each: pairs are compared once, not on every way to them."""
    kinds = [f"Kind{number}" for number in range(8)]

    def expressions(**fields: Any) -> dict[str, Any]:
        left = {"anyOf": [reference(kind) for kind in kinds]}
        return released(
            left,
            **{
                kind: {"type": "object", "properties": {"left": left, kind: TEXT, **fields}, "required": [kind]}
                for kind in kinds
            },
        )

    assert breaking_changes(expressions(), expressions(note=TEXT)) == []
    changes = breaking_changes(expressions(note=TEXT), expressions())
    assert {str(change) for change in changes} == {
        "order.placed: payload may be object now, in a way that it was not before"
    }


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = TEXT
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


APPLICATION = """
from typing import ClassVar

from pydantic import BaseModel

from holdfast import HandlerRegistry

registry = HandlerRegistry()


class Placed(BaseModel):
    event_type: ClassVar[str] = "order.placed"
    a: "Placed | None" = None
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("[" * 200_000, "cannot be read", id="JSON of 200,000 levels"),
        pytest.param(json.dumps(released(nested(450))), "is nested too deeply", id="schema of 450 levels"),
        pytest.param(
            json.dumps(released({"anyOf": [{"const": number} for number in range(1001)]})),
            "is not as holdfast schema export writes it",
            id="1,001 variants",
        ),
    ],
)
def test_a_document_that_cannot_be_compared_is_named(
    text: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines that name the file, and no traceback (S8)."""
    (tmp_path / "hostile_shop.py").write_text(APPLICATION)
    monkeypatch.syspath_prepend(tmp_path)
    document = tmp_path / "released.json"
    document.write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["schema", "check", "hostile_shop:registry", "--events", "hostile_shop", "--against", str(document)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert f"error: --against {document} {problem}" in error and "Traceback" not in error


RELEASES = {
    "1.4.0": "    total: Decimal",
    "an addition": "    total: Decimal\n    note: str | None = None",
    "a breaking change": "    total: Decimal = Decimal(0)\n    customer: int",
}


def test_the_check_of_the_page(tmp_path: Path) -> None:
    """What docs/payloads.md shows is what a build of the next release prints, and an addition passes (ENV-3)."""
    [block] = [each for each in blocks("text", pages=[ROOT / "docs" / "payloads.md"]) if "schema check" in each.text]
    command, *printed = block.text.splitlines()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "handlers.py").write_text(
        "from holdfast import HandlerRegistry\n\nregistry = HandlerRegistry()\n"
    )

    def run(release: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        fields = RELEASES[release]
        (tmp_path / "app" / "events.py").write_text(
            "from decimal import Decimal\nfrom typing import ClassVar\n\nfrom pydantic import BaseModel\n\n\n"
            f'class OrderPlaced(BaseModel):\n    event_type: ClassVar[str] = "order.placed"\n{fields}\n'
        )
        return subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    words = command.removeprefix("$ ").split()
    export = [*words[:2], "export", *words[3 : words.index("--against")]]
    (tmp_path / words[-1]).write_text(run("1.4.0", export).stdout)
    assert run("an addition", words).returncode == 0
    broken = run("a breaking change", words)
    assert (broken.returncode, broken.stdout.splitlines()) == (1, printed)
