"""Claims of rows that have a fairness key: in turn over the keys (LSN-15)."""

from __future__ import annotations

import pytest

from tests.outbox import EVENT, HANDLER, Outbox
from tests.postgres.keyed import claim_fair, claim_ordered

pytestmark = pytest.mark.both_postgres

OTHER = "shipping.print_label"


@pytest.fixture(autouse=True)
async def subscribed(outbox: Outbox) -> None:
    await outbox.subscribe(HANDLER, EVENT, "order.paid")


async def test_one_event_does_not_wait_behind_the_many_of_another_key(outbox: Outbox) -> None:
    """With 20,000 events of one tenant the single event of another is in the next claim (LSN-15)."""
    await outbox.insert_many(20_000, fairness_key="'large'")
    (single,) = await outbox.insert_many(1, fairness_key="'small'")
    claim = await claim_fair(outbox, 100)
    assert single in {row["id"] for row in claim.rows}
    assert claim.keys.count("large") == 50
    assert claim.after == {HANDLER: None}


async def test_keys_take_turns_after_a_cursor(outbox: Outbox) -> None:
    """With more keys than room every key gets its turn (LSN-15)."""
    await outbox.insert_many(30, fairness_key="'t' || lpad((n % 10)::text, 2, '0')")
    claim = await claim_fair(outbox, 4)
    assert claim.keys == ["t00", "t01", "t02", "t03"]
    claim = await claim_fair(outbox, 4, after={HANDLER: claim.after[HANDLER] or ""})
    assert claim.keys == ["t04", "t05", "t06", "t07"]
    claim = await claim_fair(outbox, 4, after={HANDLER: claim.after[HANDLER] or ""})
    assert claim.keys == ["t08", "t08", "t09", "t09"]
    assert claim.after == {HANDLER: None}


async def test_within_a_key_what_is_due_first_comes_first(outbox: Outbox) -> None:
    """What is delayed or in flight is passed over (LSN-15)."""
    ids = await outbox.insert_many(3, fairness_key="'t'", available_at="now() + (2 - n) * interval '1 hour'")
    claim = await claim_fair(outbox, 2)
    assert {row["id"] for row in claim.rows} == {ids[1], ids[2]}
    assert claim.due_in[HANDLER] == pytest.approx(3600, abs=60)
    assert (await claim_fair(outbox, 2)).rows == []
    await outbox.expire_lease(ids[1])
    assert [row["id"] for row in (await claim_fair(outbox, 2)).rows] == [ids[1]]


async def test_a_limit_for_each_key_holds_over_claims(outbox: Outbox) -> None:
    """No more than so many of one key are in flight, whoever has them (LSN-15)."""
    await outbox.insert_many(20, fairness_key="'t' || n % 2")
    first = await claim_fair(outbox, 100, per_key=3)
    assert first.keys == ["t0"] * 3 + ["t1"] * 3
    assert (await claim_fair(outbox, 100, per_key=3)).rows == []
    await outbox.deliver(*first.held[:2])
    assert len((await claim_fair(outbox, 100, per_key=3)).rows) == 2


async def test_what_several_handlers_want_is_split_and_fair_for_each(outbox: Outbox) -> None:
    """Siblings keep the key (LSN-15, LSN-2)."""
    await outbox.subscribe(OTHER, EVENT)
    ids = set(await outbox.insert_many(6, fairness_key="'t' || n % 3"))
    handled: dict[str, list[object]] = {HANDLER: [], OTHER: []}
    for _ in range(6):
        claim = await claim_fair(outbox, limits={HANDLER: 3, OTHER: 3})
        for row in claim.rows:
            handled[row["handler"]].append(row["origin_id"])
        await outbox.deliver(*claim.held)
    assert {name: (len(found), set(found)) for name, found in handled.items()} == dict.fromkeys(handled, (6, ids))


async def test_a_fair_event_is_in_no_order_and_in_no_lane(outbox: Outbox) -> None:
    """Neither the lanes nor the ordering keys have it (LSN-15)."""
    await outbox.insert(fairness_key="t")
    assert await outbox.claim() == []
    assert (await claim_ordered(outbox)).rows == []
    assert await outbox.value("SELECT open FROM core.generation_open(0, 100)") == 1


async def test_a_replayed_event_keeps_its_fairness_key(outbox: Outbox) -> None:
    """Also from the archive (LSN-15)."""
    first, second = await outbox.insert_many(2, fairness_key="'t'")
    held = {each.id: each for each in (await claim_fair(outbox, 2)).held}
    await outbox.fail(held[first])
    await outbox.call(
        "outbox_archive", ids=[second], tokens=[held[second].token], handlers=[HANDLER],
        reasons=["retry_terminal"], errors=["boom"], signatures=["E:1"],
    )  # fmt: skip
    assert await outbox.replay(first) == await outbox.replay(second) == 1
    assert (await claim_fair(outbox, 2)).keys == ["t", "t"]


@pytest.mark.trust
@pytest.mark.parametrize("owned", [("shop",), ("shop", "bank")])
async def test_a_source_with_thousands_of_keys_has_one_share(outbox: Outbox, owned: tuple[str, ...]) -> None:
    """An event of a source with an owner is in the next claim, and the others go on with their turns (SEC-1,
    LSN-15).
    """
    for source in owned:
        await outbox.value("INSERT INTO core.sources VALUES ($1, 'postgres')", source)
    await outbox.insert_many(2_000, source="'bank'", fairness_key="'a' || lpad(n::text, 4, '0')")
    await outbox.insert_many(3, source="'shop'", fairness_key="'t' || n")
    claims = [await claim_fair(outbox, 10)]
    assert len(claims[0].rows) == 10
    assert any(row["source"] == "shop" for row in claims[0].rows)
    for _ in range(3):
        claims.append(await claim_fair(outbox, 10, after={HANDLER: claims[-1].after[HANDLER] or ""}))
    assert sum(row["source"] == "shop" for claim in claims for row in claim.rows) == 3
    assert len({row["id"] for claim in claims for row in claim.rows}) == 40


@pytest.mark.trust
async def test_the_keys_of_one_owner_take_turns_too(outbox: Outbox) -> None:
    """One at a time, neither those of an owner nor the others wait for ever (SEC-1, LSN-15)."""
    await outbox.value("INSERT INTO core.sources VALUES ('shop', 'postgres')")
    for source in ("bank", "shop"):
        await outbox.insert_many(8, source=f"'{source}'", fairness_key="'t' || n")
    found, after = set(), ""
    for _ in range(400):
        claim = await claim_fair(outbox, 1, after={HANDLER: after})
        after = claim.after[HANDLER] or ""
        found |= {row["id"] for row in claim.rows}
    assert len(found) == 16
