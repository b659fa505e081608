"""Claims of rows that have an ordering key: heads alone, in turn over the keys (LSN-9)."""

from __future__ import annotations

import asyncio
import json

import asyncpg
import pytest

from tests.outbox import EVENT, HANDLER, Lane, Outbox, connect
from tests.postgres.keyed import claim_fair, claim_ordered, publish

pytestmark = pytest.mark.both_postgres

OTHER = "shipping.print_label"


@pytest.fixture(autouse=True)
async def subscribed(outbox: Outbox) -> None:
    await outbox.subscribe(HANDLER, EVENT, "order.paid")


async def test_only_the_head_of_each_key_is_claimed(outbox: Outbox) -> None:
    """The next event of a key begins when the one before it is settled; other keys flow (LSN-9)."""
    first, second, _ = await publish(outbox, "a", 3)
    (other,) = await publish(outbox, "b")
    claim = await claim_ordered(outbox)
    assert {row["id"] for row in claim.rows} == {first, other}
    assert (await claim_ordered(outbox)).rows == []
    assert await outbox.deliver(*claim.held) == []
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [second]


async def test_an_ordinary_claim_says_that_there_are_keys_and_takes_none(outbox: Outbox) -> None:
    """Without events that have a key nothing is asked for (LSN-9)."""
    plain = await outbox.insert()
    assert [row["id"] for row in await outbox.claim(keyed=True)] == [plain]
    await publish(outbox, "a")
    assert [(row["id"], row["route"]) for row in await outbox.claim(keyed=True)] == [(None, "ordered")]
    assert await outbox.claim() == []
    await outbox.insert(fairness_key="t")
    assert [(row["id"], row["route"]) for row in await outbox.claim(keyed=True)] == [(None, "fair")]


@pytest.mark.parametrize("way", ["retry", "release", "snooze", "lost"])
async def test_a_head_that_is_not_settled_keeps_its_key_back(outbox: Outbox, way: str) -> None:
    """A retry, a release, a snooze and a lost lease keep the order (LSN-9)."""
    first, second = await publish(outbox, "a", 2)
    (held,) = (await claim_ordered(outbox)).held
    match way:
        case "retry":
            await outbox.retry(held, delay=60)
        case "release":
            await outbox.release(held)
        case "snooze":
            await outbox.release(held, delay=60)
        case "lost":
            await outbox.expire_lease(first)
    claim = await claim_ordered(outbox)
    if way in ("retry", "snooze"):
        assert claim.rows == []
        due_in = claim.due_in[HANDLER]
        assert due_in is not None and 50 < due_in <= 60
        await outbox.connection.execute("UPDATE core.outbox SET available_at = now() WHERE id = $1", first)
        claim = await claim_ordered(outbox)
    assert [row["id"] for row in claim.rows] == [first]
    await outbox.deliver(*claim.held)
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [second]


async def test_order_holds_over_the_event_types_of_a_handler(outbox: Outbox) -> None:
    """A key's events of several types stand in several lanes, and are one sequence (LSN-9)."""
    ids = []
    for event_type in (EVENT, "order.paid", EVENT, "order.paid"):
        ids += await publish(outbox, "a", event_type=event_type)
    done = []
    while rows := (claim := await claim_ordered(outbox)).rows:
        assert len(rows) == 1
        done.append(rows[0]["id"])
        if len(done) == 2:
            await outbox.retry(*claim.held)  # and moves to the handler's own lane
            (row,) = (claim := await claim_ordered(outbox)).rows
            assert row["id"] == done[-1]
        await outbox.deliver(*claim.held)
    assert done == ids


async def test_a_type_that_the_code_no_longer_wants_keeps_its_key_back(outbox: Outbox) -> None:
    """What a handler is subscribed to and does not register is left alone, and so is what is behind it (LSN-9)."""
    await publish(outbox, "a", event_type="order.paid")
    await publish(outbox, "a")
    (other,) = await publish(outbox, "b")
    claim = await claim_ordered(outbox, wanted={HANDLER: [EVENT]})
    assert [row["id"] for row in claim.rows] == [other]


async def test_siblings_keep_the_order_for_each_handler(outbox: Outbox) -> None:
    """An event that several handlers want keeps its place for each of them (LSN-9, LSN-2)."""
    await outbox.subscribe(OTHER, EVENT)
    ids = [
        *await publish(outbox, "a"),
        *await publish(outbox, "a", event_type="order.paid"),
        *await publish(outbox, "a"),
    ]
    handled: dict[str, list[object]] = {HANDLER: [], OTHER: []}
    for _ in range(10):
        claim = await claim_ordered(outbox, limits={HANDLER: 10, OTHER: 10})
        assert len({row["handler"] for row in claim.rows}) == len(claim.rows)
        for row in claim.rows:
            handled[row["handler"]].append(row["origin_id"] or row["id"])
        await outbox.deliver(*claim.held)
    assert handled == {HANDLER: ids, OTHER: [ids[0], ids[2]]}


async def test_a_slow_handler_does_not_keep_another_back(outbox: Outbox) -> None:
    """Order is kept for each handler by itself (LSN-9)."""
    await outbox.subscribe(OTHER, EVENT)
    await publish(outbox, "a", 2)
    first = await claim_ordered(outbox, limits={HANDLER: 10})
    for _ in range(2):
        claim = await claim_ordered(outbox, limits={OTHER: 10})
        assert len(claim.rows) == 1
        await outbox.deliver(*claim.held)
    assert (await claim_ordered(outbox, limits={HANDLER: 10})).rows == []
    await outbox.deliver(*first.held)
    assert len((await claim_ordered(outbox, limits={HANDLER: 10})).rows) == 1


async def test_a_number_that_is_committed_late_waits_for_what_was_begun(outbox: Outbox, shared_dsn: str) -> None:
    """Two rows of a key are never in flight at once, also when they are committed in another order (LSN-9)."""
    producer = await connect(shared_dsn)
    try:
        late = producer.transaction()
        await late.start()
        smaller = await Outbox(producer).insert(ordering_key="a")
        begun, last = await publish(outbox, "a", 2)
        (held,) = (await claim_ordered(outbox)).held
        assert held.id == begun
        await late.commit()
        assert (await claim_ordered(outbox)).rows == []
        await outbox.retry(held)
        claim = await claim_ordered(outbox)
        assert [row["id"] for row in claim.rows] == [begun]
        for expected in (smaller, last):
            await outbox.deliver(*claim.held)
            claim = await claim_ordered(outbox)
            assert [row["id"] for row in claim.rows] == [expected]
    finally:
        await producer.close()


async def test_two_claims_at_once_never_take_two_rows_of_a_key(outbox: Outbox, shared_dsn: str) -> None:
    """A claim that saw the outbox before another one committed takes nothing that it must not (LSN-9)."""
    await outbox.insert_many(40, ordering_key="'k' || n % 8")
    others = [Outbox(await connect(shared_dsn)) for _ in range(4)]
    try:
        for _ in range(10):
            claims = await asyncio.gather(*(claim_ordered(each) for each in others))
            keys = [key for claim in claims for key in claim.keys]
            assert len(keys) == len(set(keys))
            for claim in claims:
                await outbox.deliver(*claim.held)
        assert await outbox.value("SELECT count(*) FROM core.outbox WHERE settled_at IS NULL") == 0
    finally:
        for each in others:
            await each.connection.close()


async def test_keys_take_turns_after_a_cursor(outbox: Outbox) -> None:
    """With more keys than room every key gets its turn (LSN-9)."""
    await outbox.insert_many(30, ordering_key="'k' || lpad((n % 15)::text, 2, '0')")
    claim = await claim_ordered(outbox, 5)
    assert claim.keys == ["k00", "k01", "k02", "k03", "k04"]
    assert claim.after == {HANDLER: "k04"}
    claim = await claim_ordered(outbox, 20, after={HANDLER: "k04"})
    assert claim.keys == [f"k{n:02}" for n in range(5, 15)]
    assert claim.after == {HANDLER: None}
    assert (await claim_ordered(outbox, 5, probes=5)).after == {HANDLER: "k04"}


async def test_a_key_is_gone_on_with_by_its_number(outbox: Outbox) -> None:
    """The worker that settled a head takes the next one without looking for it (LSN-9)."""
    await publish(outbox, "a", 3)
    await publish(outbox, "b", 1)
    (first, _) = (claim := await claim_ordered(outbox)).rows
    await outbox.deliver(*claim.held)
    claim = await claim_ordered(outbox, keys=[(HANDLER, "a", first["seq"])], discover=False)
    assert claim.keys == ["a"]
    await outbox.deliver(*claim.held)
    assert (await claim_ordered(outbox)).keys == ["a"]


@pytest.mark.parametrize("archive", [False, True])
async def test_a_dead_letter_blocks_its_key_until_it_is_replayed(outbox: Outbox, archive: bool) -> None:
    """A failed head blocks; a replay puts it where it was (LSN-9)."""
    first, second = await publish(outbox, "a", 2)
    (other,) = await publish(outbox, "b")
    await _fail(outbox, first, archive)
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [other]
    (blocked,) = await outbox.call("keys_blocked", handler=None, key=None, most=10, most_followers=100)
    assert (blocked["handler_name"], blocked["ordering_key"], blocked["head_id"]) == (HANDLER, "a", first)
    assert (blocked["followers"], blocked["archived"]) == (1, archive)
    assert await outbox.replay(first) == 1
    assert await outbox.call("keys_blocked", handler=None, key=None, most=10, most_followers=100) == []
    claim = await claim_ordered(outbox)
    assert [row["id"] for row in claim.rows] == [first]
    await outbox.deliver(*claim.held)
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [second]


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("way", ["discard", "release", "skip"])
async def test_a_key_goes_on_without_its_dead_letter(outbox: Outbox, way: str, archive: bool) -> None:
    """A discard, an operator and the policy `skip` let the key go on; a replay then takes a place at the end
    (LSN-9).
    """
    first, second, third = await publish(outbox, "a", 3)
    await _fail(outbox, first, archive, skip=way == "skip")
    if way == "discard":
        await outbox.call("outbox_discard", ids=[first], actor="ann", reason=None)
    elif way == "release":
        ((head,),) = await outbox.call("key_release", handler=HANDLER, key="a", actor="ann", reason="never mind")
        assert head == first
        assert await outbox.value("SELECT reason FROM core.audit WHERE action = 'key.release'") == "never mind"
    claim = await claim_ordered(outbox)
    assert [row["id"] for row in claim.rows] == [second]
    if way == "discard":
        await outbox.call("outbox_restore", ids=[first], actor="ann", reason=None)
    assert await outbox.replay(first) == 1
    done = []
    while claim.rows:
        done += [row["id"] for row in claim.rows]
        await outbox.deliver(*claim.held)
        claim = await claim_ordered(outbox)
    assert done == [second, third, first]


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
async def test_what_was_cancelled_or_has_expired_blocks_nothing(outbox: Outbox, reason: str) -> None:
    """These are no dead letters (LSN-9)."""
    _, second = await publish(outbox, "a", 2)
    (held,) = (await claim_ordered(outbox)).held
    await outbox.fail(held, reason=reason)
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [second]


async def test_a_corrected_event_takes_the_place_of_its_dead_letter(outbox: Outbox) -> None:
    """An edit unblocks the key, and comes before what waits (LSN-9)."""
    first, second = await publish(outbox, "a", 2)
    await _fail(outbox, first, False)
    new = "01900000-0000-7000-8000-000000000001"
    await outbox.call(
        "outbox_edit", id=first, new_id=new, payload=json.dumps({"v": 2}), new_generation=0, actor="ann", reason=None
    )
    claim = await claim_ordered(outbox)
    assert [str(row["id"]) for row in claim.rows] == [new]
    await outbox.deliver(*claim.held)
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [second]


async def test_order_holds_over_generations_and_channels(outbox: Outbox) -> None:
    """What an older generation holds comes first, and a move keeps the order (LSN-9, GEN-2)."""
    (old,) = await publish(outbox, "a", generation=1, channel="outbox_gen_1")
    (new,) = await publish(outbox, "a", generation=2, channel="outbox_gen_2")
    two = {"channel": "outbox_gen_2", "generation": 2}
    assert (await claim_ordered(outbox, **two)).rows == []
    moved = await outbox.call("generation_move", **{"from": 1, "to": 2}, most=10, actor="ann", reason=None)
    assert moved[0][0] == 1
    for expected in (old, new):
        claim = await claim_ordered(outbox, **two)
        assert [row["id"] for row in claim.rows] == [expected]
        await outbox.deliver(*claim.held)


async def test_lines_of_keys_that_are_over_are_swept(outbox: Outbox) -> None:
    """What is kept for each key goes with it, but not what blocks (LSN-9)."""
    await outbox.insert_many(5, ordering_key="'k' || n")
    claim = await claim_ordered(outbox)
    running, failed, *done = claim.held
    await outbox.deliver(*done)
    await outbox.fail(failed)
    (swept,) = await outbox.call("sweep_heads", handler="", key="", limit=2, actor=None, reason=None)
    assert swept["next_handler"] == HANDLER
    place = {"handler": swept["next_handler"], "key": swept["next_key"]}
    (rest,) = await outbox.call("sweep_heads", **place, limit=100, actor=None, reason=None)
    assert (swept["swept"] + rest["swept"], rest["next_key"]) == (3, None)
    left = await outbox.connection.fetch("SELECT head_id FROM core.ordering_heads")
    assert {row["head_id"] for row in left} == {running.id, failed.id}


async def test_foreign_writers_may_set_a_key_of_at_most_800_bytes(outbox: Outbox) -> None:
    """Columns of the table, checked like the others (LSN-9)."""
    await outbox.insert(ordering_key="k" * 800)
    for columns in ({"ordering_key": ""}, {"ordering_key": "k" * 801}, {"fairness_key": "", "ordering_key": None}):
        with pytest.raises(asyncpg.CheckViolationError):
            await outbox.insert(**columns)
    with pytest.raises(asyncpg.CheckViolationError):
        await outbox.insert(ordering_key="a", fairness_key="b")


async def test_events_without_a_key_are_not_in_the_way(outbox: Outbox) -> None:
    """Both kinds of events go to the same handler (LSN-9)."""
    plain = await outbox.insert()
    (keyed,) = await publish(outbox, "a")
    assert [row["id"] for row in await outbox.claim(Lane())] == [plain]
    assert [row["id"] for row in (await claim_ordered(outbox)).rows] == [keyed]


async def _fail(outbox: Outbox, id: object, archive: bool, skip: bool = False) -> None:
    claim = await claim_ordered(outbox, 1, skip=[HANDLER] if skip else [])
    (held,) = claim.held
    assert held.id == id
    if not archive:
        assert await outbox.fail(held) == []
        return
    values = {"ids": [held.id], "tokens": [held.token], "handlers": [HANDLER]}
    rows = await outbox.call(
        "outbox_archive", **values, reasons=["retry_terminal"], errors=["boom"], signatures=["E:1"]
    )
    assert rows == []


async def test_claims_by_key_keep_to_the_limits_of_a_handler(outbox: Outbox) -> None:
    """A limit for the fleet, and a pause, are for all events of a handler (LSN-9, LSN-12, LSN-15)."""
    await outbox.insert_many(6, ordering_key="'k' || n")
    await outbox.insert_many(6, fairness_key="'t' || n")
    change = "INSERT INTO core.handler_flow (handler_name, fleet_concurrency) VALUES ($1, 3)"
    await outbox.connection.execute(change, HANDLER)
    first = await claim_ordered(outbox)
    assert len(first.rows) == 3
    assert (await claim_fair(outbox)).rows == []
    await outbox.deliver(*first.held[:2])
    assert len((await claim_fair(outbox)).rows) == 2
    assert (await claim_ordered(outbox)).rows == []
