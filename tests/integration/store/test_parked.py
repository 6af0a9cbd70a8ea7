"""Messages that could not have their effect wait for an operator, in order, and block nobody else."""

import asyncio

import pytest

from berth.store.database import Database
from berth.store.errors import NoSuchParked, OutOfOrder
from berth.store.parked import (
    Parked,
    ParkedMessage,
    ParkedStatus,
    drop_parked,
    list_parked,
    request_replay,
    show_parked,
)
from berth.testing.postgres import PostgresPlatform


def a_message(event_id: str, *, entity: str = "job-1", reason: str = "not JSON") -> ParkedMessage:
    return ParkedMessage(entity, event_id, "berth.evt.p.job.job-1.placed", b"headers", event_id.encode(), 7, reason)


async def park(store: Database, *messages: ParkedMessage) -> list[int]:
    async with store.batch() as tx:
        await tx.new_ids([message.event_id for message in messages])
        for message in messages:
            tx.park(message)
    ids = {parked.message.event_id: parked.id for parked in await list_parked(store)}
    return [ids[message.event_id] for message in messages]


async def replayed(store: Database) -> list[Parked]:
    async with store.batch() as tx:
        return await tx.take_replays()


async def test_a_parked_message_keeps_everything_and_its_id_is_taken(store: Database) -> None:
    message = a_message("e1", reason="bad\x00byte")
    (parked_id,) = await park(store, message)
    shown = await show_parked(store, parked_id)
    assert shown.message == a_message("e1", reason="badbyte")
    assert (shown.status, shown.payload) == (ParkedStatus.PARKED, b"e1")
    async with store.batch() as tx:
        assert await tx.new_ids(["e1"]) == set()


async def test_later_messages_of_the_entity_are_told_to_wait_others_are_not(
    store: Database, postgres: PostgresPlatform
) -> None:
    async with store.batch() as tx:
        assert not tx.is_entity_parked("job-1")
        tx.park(a_message("e1"))
        assert tx.is_entity_parked("job-1")
        assert not tx.is_entity_parked("job-2")
    async with store.batch() as tx:
        assert tx.is_entity_parked("job-1")
    async with Database(postgres.settings("placement")) as restarted, restarted.batch() as tx:
        assert tx.is_entity_parked("job-1")


async def test_an_entity_is_not_parked_when_the_batch_that_parked_it_failed(store: Database) -> None:
    async with store.batch() as tx:
        tx.park(a_message("e1"))
        tx.roll_back()
    async with store.batch() as tx:
        assert not tx.is_entity_parked("job-1")


async def test_a_replay_brings_all_messages_of_the_entity_in_order_once(store: Database) -> None:
    first, *_ = await park(store, a_message("e1"), a_message("x", entity="job-2"), a_message("e2"))
    await park(store, a_message("e3"))
    assert len(await request_replay(store, first)) == 3
    assert [parked.message.event_id for parked in await replayed(store)] == ["e1", "e2", "e3"]
    assert await replayed(store) == []
    async with store.batch() as tx:
        assert not tx.is_entity_parked("job-1")
        assert tx.is_entity_parked("job-2")
    assert [parked.message.event_id for parked in await list_parked(store)] == ["x"]
    assert len(await list_parked(store, include_closed=True, entity="job-1")) == 3


async def test_what_was_parked_behind_after_the_request_is_replayed_with_it(store: Database) -> None:
    (first,) = await park(store, a_message("e1"))
    await request_replay(store, first)
    await park(store, a_message("e2"))
    assert [parked.message.event_id for parked in await replayed(store)] == ["e1", "e2"]


async def test_a_mended_payload_is_replayed_and_the_original_kept(store: Database) -> None:
    (first,) = await park(store, a_message("e1"))
    await request_replay(store, first, payload=b"mended", note="comma added, ops")
    (parked,) = await replayed(store)
    assert (parked.payload, parked.message.payload, parked.note) == (b"mended", b"e1", "comma added, ops")


async def test_a_replay_that_fails_again_parks_it_and_what_follows_in_order(store: Database) -> None:
    first, _ = await park(store, a_message("e1"), a_message("e2"))
    await request_replay(store, first)
    async with store.batch() as tx:
        for parked in await tx.take_replays():
            assert tx.is_entity_parked("job-1") == (parked.message.event_id == "e2")
            tx.park(parked.message)
    async with store.batch() as tx:
        assert tx.is_entity_parked("job-1")
    assert [parked.message.event_id for parked in await list_parked(store)] == ["e1", "e2"]


async def test_a_failed_batch_replays_again(store: Database) -> None:
    (first,) = await park(store, a_message("e1"))
    await request_replay(store, first)
    with pytest.raises(RuntimeError):
        async with store.batch() as tx:
            assert len(await tx.take_replays()) == 1
            raise RuntimeError("decision failed")
    assert store.parked_changed.is_set()
    assert [parked.message.event_id for parked in await replayed(store)] == ["e1"]
    assert not store.parked_changed.is_set()


async def test_only_the_first_message_of_an_entity_can_be_replayed(store: Database) -> None:
    first, second = await park(store, a_message("e1"), a_message("e2"))
    with pytest.raises(OutOfOrder) as refused:
        await request_replay(store, second)
    assert refused.value.first_id == first
    await drop_parked(store, first, note="test data")
    assert await request_replay(store, second) == [second]


async def test_dropping_the_last_one_frees_the_entity(store: Database) -> None:
    (first,) = await park(store, a_message("e1"))
    await drop_parked(store, first, note="test data")
    assert (await show_parked(store, first)).status is ParkedStatus.DROPPED
    assert await replayed(store) == []
    async with store.batch() as tx:
        assert not tx.is_entity_parked("job-1")


async def test_what_is_closed_or_unknown_is_refused(store: Database) -> None:
    (first,) = await park(store, a_message("e1"))
    await drop_parked(store, first)
    for refused in (request_replay(store, first), drop_parked(store, first), show_parked(store, 999)):
        with pytest.raises(NoSuchParked):
            await refused


async def test_the_running_service_is_told_about_a_request_of_another_process(
    store: Database, postgres: PostgresPlatform
) -> None:
    (first,) = await park(store, a_message("e1"))
    await replayed(store)
    assert not store.parked_changed.is_set()
    async with Database(postgres.settings("placement")) as operator:
        await request_replay(operator, first)
    async with asyncio.timeout(2):
        await store.parked_changed.wait()
