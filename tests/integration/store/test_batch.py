from berth.store.database import Database
from berth.store.outbox import OutboxRow


async def test_one_in_one_out(store: Database) -> None:
    async with store.batch() as tx:
        assert await tx.new_ids(["a", "a", "b"]) == {"a", "b"}
        tx.add_outbox([OutboxRow("e1", "s", b"h", b"p"), OutboxRow("e2", "s", b"h", b"p")])
        tx.upsert_records([("job", "1", b"{}")])
        tx.set_position("c", 5)
    assert [r.id for r in tx.stored_outbox] == [1, 2]
    assert [r.event_id for r in await store.unpublished(older_than_s=0)] == ["e1", "e2"]
    store.forget_outbox([1, 2])
    assert await store.unpublished(older_than_s=0) == []
    async with store.batch() as tx:
        assert await tx.new_ids(["a", "c"]) == {"c"}
    async with store.reader() as con:
        assert await con.fetchval("select count(*) from outbox_pending") == 0
    assert [r async for r in store.records()] == [("job", "1", b"{}")]
    assert await store.position("c", "BERTH_EVENTS") == 5
