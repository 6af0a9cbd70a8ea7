"""What is committed gets published, also when the process dies in between; and then leaves."""

from datetime import timedelta

from berth.store.database import Database
from berth.store.housekeeping import prune
from berth.store.outbox import OutboxRow
from berth.testing.postgres import PostgresPlatform


async def stored(store: Database, *event_ids: str) -> list[int]:
    async with store.batch() as tx:
        tx.add_outbox([OutboxRow(event_id, "berth.evt.p.job.j.placed", b"h", b"p") for event_id in event_ids])
    return tx.outbox_ids


async def left(store: Database) -> list[str]:
    return [row.event_id for row in await store.unpublished(older_than_s=0)]


async def test_ids_rise_in_the_order_of_the_rows(store: Database) -> None:
    many = [f"e{n}" for n in range(300)]
    ids = await stored(store, *many)
    assert ids == sorted(ids)
    assert [(row.id, row.event_id) for row in await store.unpublished(older_than_s=0)] == list(
        zip(ids, many, strict=True)
    )


async def test_rows_stay_for_the_sweeper_when_the_process_dies_before_publishing(
    store: Database, postgres: PostgresPlatform
) -> None:
    async with Database(postgres.settings("placement")) as died:
        await stored(died, "e1", "e2")
    (first, second) = await store.unpublished(older_than_s=0)
    assert first == OutboxRow("e1", "berth.evt.p.job.j.placed", b"h", b"p", first.id)
    assert second.event_id == "e2"


async def test_fresh_rows_are_left_to_the_process_that_stored_them(store: Database) -> None:
    await stored(store, "e1")
    assert await store.unpublished(older_than_s=60) == []


async def test_published_rows_are_written_off_with_the_next_batch(store: Database, postgres: PostgresPlatform) -> None:
    ids = await stored(store, "e1", "e2")
    store.forget_outbox(ids)
    assert await left(store) == []
    async with Database(postgres.settings("placement")) as other:
        assert await left(other) == ["e1", "e2"]  # not a commit of its own
        await stored(store, "e3")
        assert await left(other) == ["e3"]


async def test_a_write_off_in_a_failed_batch_is_repeated(store: Database, postgres: PostgresPlatform) -> None:
    store.forget_outbox(await stored(store, "e1"))
    async with store.batch() as tx:
        await tx.new_ids(["a"])
        tx.roll_back()
    async with Database(postgres.settings("placement")) as other:
        assert await left(other) == ["e1"]
        async with store.batch() as tx:
            await tx.new_ids(["a"])
        assert await left(other) == []


async def test_the_sweeper_marks_rows_of_a_process_that_died_also_in_part(
    store: Database, postgres: PostgresPlatform
) -> None:
    async with Database(postgres.settings("placement")) as died:
        ids = await stored(died, "e1", "e2", "e3")
    await store.mark_published(ids[:2])
    assert await left(store) == ["e3"]
    await store.mark_published(ids[2:])
    assert await left(store) == []
    async with store.reader() as connection:
        assert await connection.fetchval("SELECT count(*) FROM outbox_pending") == 0
        assert await connection.fetchval("SELECT count(*) FROM outbox") == 3  # kept, to refill a broker


async def test_part_of_an_own_batch_can_be_marked_before_the_rest(store: Database) -> None:
    ids = await stored(store, "e1", "e2", "e3")
    await store.mark_published([ids[1]])
    assert await left(store) == ["e1", "e3"]
    store.forget_outbox([ids[0], ids[2]])
    await stored(store, "e4")
    assert await left(store) == ["e4"]


# --- pruning ----------------------------------------------------------------------------------------------------------


async def age_outbox(store: Database, *, slot: str) -> None:
    """Move all rows to another slot, as if they had been written at its time."""
    async with store.reader() as connection:
        await connection.execute(f"UPDATE outbox SET slot = {slot}; UPDATE outbox_pending SET slot = {slot}")


CURRENT = "((extract(epoch FROM now())::bigint / 300) % 5)"


async def test_the_oldest_slot_is_emptied_when_all_of_it_is_published(store: Database) -> None:
    ids = await stored(store, "e1")
    await age_outbox(store, slot=f"({CURRENT} + 1) % 5")
    assert (await prune(store))["outbox"] == 0  # still waits to be published
    assert await left(store) == ["e1"]
    await store.mark_published(ids)
    assert (await prune(store))["outbox"] == 1
    async with store.reader() as connection:
        assert await connection.fetchval("SELECT count(*) FROM outbox") == 0


async def test_younger_slots_are_kept(store: Database) -> None:
    ids = await stored(store, "e1")
    await store.mark_published(ids)
    for age in range(4):
        await age_outbox(store, slot=f"({CURRENT} + 5 - {age}) % 5")
        await prune(store)
    async with store.reader() as connection:
        assert await connection.fetchval("SELECT count(*) FROM outbox") == 1


async def test_old_inbox_rows_leave_and_young_ones_stay(store: Database) -> None:
    async with store.reader() as connection:
        await connection.execute(
            "INSERT INTO inbox VALUES ('old', now() - interval '9 days'), ('young', now() - interval '7 days')"
        )
    assert (await prune(store, inbox_kept=timedelta(days=8)))["inbox"] == 1
    async with store.batch() as tx:
        assert await tx.new_ids(["old", "young"]) == {"old"}
