"""One batch, one transaction: repeats, fence, records, outbox, positions, the commit log."""

import asyncio
from datetime import UTC, datetime

import asyncpg
import pytest

from berth.store.batch import BatchTransaction, CommitEntry
from berth.store.database import Database
from berth.store.errors import Deposed, InboxConflict
from berth.store.outbox import OutboxRow
from berth.testing.postgres import PostgresPlatform


def a_row(event_id: str, payload: bytes = b"{}") -> OutboxRow:
    return OutboxRow(event_id, f"berth.evt.p.job.{event_id}.placed", b"{}", payload)


async def rows_in(store: Database, table: str) -> int:
    async with store.reader() as connection:
        return int(await connection.fetchval(f"SELECT count(*) FROM {table}"))


async def make_lease(store: Database, epoch: int) -> None:
    async with store.reader() as connection:
        await connection.execute(
            "INSERT INTO lease (name, epoch) VALUES ('placement', $1) ON CONFLICT (name) DO UPDATE SET epoch = $1",
            epoch,
        )


# --- inbox ------------------------------------------------------------------------------------------------------------


async def test_an_id_given_twice_in_a_batch_counts_once(store: Database) -> None:
    async with store.batch() as tx:
        assert await tx.new_ids(["a", "b", "a"]) == {"a", "b"}
        assert await tx.new_ids(["b", "c"]) == {"c"}
    assert await rows_in(store, "inbox") == 3


async def test_an_id_of_an_earlier_batch_is_not_new(store: Database) -> None:
    async with store.batch() as tx:
        await tx.new_ids(["a"])
    async with store.batch() as tx:
        assert await tx.new_ids(["a", "b"]) == {"b"}


async def test_a_failed_batch_leaves_its_ids_new(store: Database) -> None:
    with pytest.raises(RuntimeError):
        async with store.batch() as tx:
            await tx.new_ids(["a"])
            tx.upsert_records([("job", "1", b"{}")])
            raise RuntimeError("decision failed")
    async with store.batch() as tx:
        assert await tx.new_ids(["a"]) == {"a"}
    assert await rows_in(store, "records") == 0


async def test_an_event_taken_in_elsewhere_meanwhile_refuses_the_whole_batch(
    store: Database, postgres: PostgresPlatform
) -> None:
    async with Database(postgres.settings("placement")) as other:
        with pytest.raises(InboxConflict):
            async with store.batch() as tx:
                assert await tx.new_ids(["a", "b"]) == {"a", "b"}
                tx.add_outbox([a_row("x")])
                async with other.batch() as elsewhere:
                    await elsewhere.new_ids(["b"])
    assert await rows_in(store, "inbox") == 1
    assert await rows_in(store, "outbox") == 0
    async with store.batch() as tx:  # the connection is still good
        assert await tx.new_ids(["a", "b"]) == {"a"}


# --- fence ------------------------------------------------------------------------------------------------------------


async def test_a_batch_of_the_current_epoch_commits(store: Database) -> None:
    await make_lease(store, 7)
    async with store.batch() as tx:
        tx.check_epoch("placement", 7)
        tx.upsert_records([("job", "1", b"{}")])
    assert await rows_in(store, "records") == 1


@pytest.mark.parametrize("explicit", [False, True])
async def test_a_deposed_leader_writes_nothing(store: Database, explicit: bool) -> None:
    await make_lease(store, 7)
    with pytest.raises(Deposed):
        async with store.batch() as tx:
            tx.check_epoch("placement", 6)
            if explicit:
                await (await tx.con()).execute("INSERT INTO inbox (event_id) VALUES ('own statement')")
            await tx.new_ids(["a"])
            tx.upsert_records([("job", "1", b"{}")])
            tx.add_outbox([a_row("x")])
            tx.set_position("placement", 5)
    for table in ("inbox", "records", "outbox", "outbox_pending", "position"):
        assert await rows_in(store, table) == 0, table


async def test_a_batch_in_flight_is_finished_before_the_epoch_can_rise(
    store: Database, postgres: PostgresPlatform
) -> None:
    await make_lease(store, 1)
    rival = await asyncpg.connect(postgres.settings("placement").dsn)
    try:
        async with store.batch() as tx:
            tx.check_epoch("placement", 1)
            connection = await tx.con()
            await connection.execute("SELECT 1 FROM placement.lease WHERE name = 'placement' FOR SHARE")
            rise = asyncio.create_task(rival.execute("UPDATE placement.lease SET epoch = epoch + 1"))
            await asyncio.sleep(0.05)
            assert not rise.done()
            tx.upsert_records([("job", "1", b"{}")])
        await rise
    finally:
        await rival.close()
    assert await rows_in(store, "records") == 1


# --- records ----------------------------------------------------------------------------------------------------------


async def test_records_are_stored_replaced_and_deleted_and_read_in_key_order(store: Database) -> None:
    async with store.batch() as tx:
        tx.upsert_records([("job", "b", b"1"), ("job", "a", b"1"), ("node", "n", b"1")])
    async with store.batch() as tx:
        tx.upsert_records([("job", "b", b"2")])
        tx.delete_records([("node", "n"), ("node", "never was")])
    assert [record async for record in store.records()] == [("job", "a", b"1"), ("job", "b", b"2")]
    assert [record async for record in store.records(["node"])] == []


async def test_the_last_word_on_a_key_wins_within_a_batch(store: Database) -> None:
    async with store.batch() as tx:
        tx.upsert_records([("job", "a", b"1"), ("job", "a", b"2"), ("job", "gone", b"1")])
        tx.delete_records([("job", "gone"), ("job", "back")])
        tx.upsert_records([("job", "back", b"1")])
    assert [record async for record in store.records()] == [("job", "a", b"2"), ("job", "back", b"1")]


async def test_large_and_binary_bodies_come_back_as_they_were(store: Database) -> None:
    body = bytes(range(256)) * 4000
    async with store.batch() as tx:
        tx.upsert_records([("plan", "p", body)])
    assert [record async for record in store.records()] == [("plan", "p", body)]


# --- positions and commit log -----------------------------------------------------------------------------------------


async def test_a_position_never_goes_back_in_a_batch_but_can_be_reset(store: Database) -> None:
    for sequence in (5, 3):
        async with store.batch() as tx:
            tx.set_position("placement", sequence)
    assert await store.position("placement", "BERTH_EVENTS") == 5
    await store.reset_position("placement", "BERTH_EVENTS", 0)
    assert await store.position("placement", "BERTH_EVENTS") == 0
    assert await store.position("nobody", "BERTH_EVENTS") == 0


async def test_the_commit_log_has_what_replay_needs(store: Database) -> None:
    entry = CommitEntry(3, 9, 2, datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), 4, "1", "12", b"\x00\xff", b"ids")
    async with store.batch() as tx:
        tx.log_commit(entry)
    async with store.reader() as connection:
        (row,) = await connection.fetch("SELECT * FROM commits")
    assert CommitEntry(*tuple(row)[1:]) == entry


# --- the block --------------------------------------------------------------------------------------------------------


async def test_statements_of_the_service_commit_with_the_batch(store: Database) -> None:
    async with store.batch() as tx:
        await tx.new_ids(["a"])
        await (await tx.con()).execute("INSERT INTO records (kind, key, body) VALUES ('own', 'k', 'v')")
    assert await rows_in(store, "records") == 1
    assert await rows_in(store, "inbox") == 1


@pytest.mark.parametrize("explicit", [False, True])
async def test_a_batch_rolled_back_leaves_no_trace(store: Database, explicit: bool) -> None:
    async with store.batch() as tx:
        if explicit:
            await tx.con()
        await tx.new_ids(["a"])
        tx.roll_back()
    assert await rows_in(store, "inbox") == 0


async def test_batches_of_one_process_run_one_after_the_other(store: Database) -> None:
    order: list[str] = []

    async def batch(name: str) -> None:
        async with store.batch() as tx:
            order.append(f"{name} in")
            await tx.new_ids([name])
        order.append(f"{name} out")

    await asyncio.gather(batch("a"), batch("b"))
    assert order in (["a in", "a out", "b in", "b out"], ["a in", "b in", "a out", "b out"])
    assert await rows_in(store, "inbox") == 2


async def test_a_cancelled_batch_leaves_the_store_usable(store: Database) -> None:
    started = asyncio.Event()

    async def slow(tx: BatchTransaction) -> None:
        connection = await tx.con()
        started.set()
        await connection.execute("SELECT pg_sleep(5)")

    async def batch() -> None:
        async with store.batch() as tx:
            await tx.new_ids(["a"])
            await slow(tx)

    task = asyncio.create_task(batch())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with store.batch() as tx:
        assert await tx.new_ids(["a"]) == {"a"}


async def test_plans_made_on_empty_tables_still_use_the_index_when_they_have_grown(store: Database) -> None:
    async with store.batch() as tx:
        await tx.new_ids(["first"])
    async with store.reader() as connection:
        await connection.execute("INSERT INTO inbox SELECT 'old-' || n FROM generate_series(1, 20000) n")
    async with store.batch() as tx:
        connection = await tx.con()
        plan = await connection.fetch("EXPLAIN SELECT event_id FROM inbox WHERE event_id = ANY ('{a,b}')")
    assert "Seq Scan" not in "\n".join(row[0] for row in plan)
