"""What the event-service loop writes down is enough to decide again, whatever happened on the way."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from berth.bus.publisher import Publisher
from berth.bus.puller import Puller
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TYPE, decode
from berth.replay.record_file import (
    Header,
    Line,
    RecordedEvent,
    Start,
    commit_line,
    end_line,
    event_line,
    header_line,
    parse,
    state_line,
)
from berth.replay.rerun import Verdict, replay
from berth.runtime import event_service, faults
from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.store.database import Database
from berth.store.parked import list_parked, request_replay
from berth.store.recorded import checkpoint_page, commits_page, find_checkpoint, take_checkpoint
from tests.integration.runtime.rig import CountingCore, Crash, Rig


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.arm(None)


class RecordedHandler(CoreHandler[CountingCore]):
    """As a deciding service makes it."""

    def __init__(self, core: CountingCore, *, pool: str) -> None:
        super().__init__(core, pool=pool, recorded=True)


async def record_of(rig: Rig, database: Database, *, since: datetime | None = None) -> list[Line]:
    """The record of the service, as an export would write it."""
    found = await find_checkpoint(database, since=since)
    assert found is not None
    reader = await rig.nats.connect("audit")
    puller, messages = Puller(reader, subjects.EVENTS_STREAM, "audit"), []
    await puller.open(after=0)
    while batch := await puller.next(0.3):
        messages += batch
    await puller.close()
    entries: list[tuple[int, int, bytes]] = [
        (m.stream_seq, 0, event_line(RecordedEvent(m.stream_seq, m.header(HEADER_TYPE) or "", m.data)))
        for m in messages
        if m.stream_seq > found.stream_seq
    ]
    events, after = len(entries), found.commit_id
    while page := await commits_page(database, after=after):
        entries += [(row["last_seq"], 1, commit_line("admission", row)) for row in page]
        after = page[-1]["id"]
    states = [
        state_line("admission", row["kind"], row["key"], row["body"])
        for row in await checkpoint_page(database, found.commit_id, kind="", key="")
    ]
    lines = [
        header_line(Header("test", {"admission": Start(found.commit_id, found.stream_seq, found.last_commit_id)})),
        *states,
        *(line for _, _, line in heapq.merge(sorted(entries, key=lambda entry: entry[:2]))),
        end_line(events=events, commits=len(entries) - events),
    ]
    return list(parse(lines))


async def replayed(rig: Rig, service: EventService[CoreHandler[CountingCore]], **how: datetime) -> Verdict:
    verdict = replay(await record_of(rig, service._database, **how), cores={"admission": rig.core_class})
    assert verdict.difference is None, "\n".join(verdict.difference.lines())
    return verdict


async def test_repeats_parked_messages_and_what_an_operator_mended_are_decided_again(rig: Rig) -> None:
    rig.handler_class = RecordedHandler
    async with rig.running() as service:
        await rig.submit("a", "timer")
        copy = rig.message("a", "j-a")
        await rig.gateway.publish_core(copy.subject, copy.data, headers=copy.headers)
        await Publisher(rig.gateway).publish([rig.message("contradiction", "j-1")], 5)
        await Publisher(rig.gateway).publish([rig.message("second", "j-1", event_id="j-1.2.JobSubmitted")], 5)
        assert len(await rig.held(3)) == 3
        first, _ = await list_parked(service._database)
        await request_replay(service._database, first.id, payload=rig.message("mended", "j-1").data)
        assert len(await rig.held(2)) == 2
        given = decode(rig.message("given", "j-given").data)
        await service.change(lambda handler, now: handler.take_in(given, now=now))
        assert await rig.held(1) == ["j-given.1.JobHeld"]
        verdict = await replayed(rig, service)
    assert verdict.emissions == 6
    assert verdict.applied == 5


@pytest.mark.parametrize("point", ["before_commit", "between_commit_and_publish", "between_publish_and_ack"])
async def test_a_process_killed_at_any_point_leaves_a_record_that_holds(rig: Rig, point: str) -> None:
    died = asyncio.Event()

    def die() -> None:
        died.set()
        raise Crash

    rig.handler_class = RecordedHandler
    faults.arm(f"admission.{point}:1", action=die)
    async with rig.running():
        await rig.submit("a", "b", "c")
        await asyncio.wait_for(died.wait(), 10)
    faults.arm(None)
    async with rig.running() as service:
        await rig.submit("d")
        await rig.held(4)
        verdict = await replayed(rig, service)
    assert verdict.emissions == 4
    assert verdict.restarts == (1 if point == "before_commit" else 2)


async def test_a_batch_tried_message_by_message_is_decided_again_so(rig: Rig) -> None:
    class Failing(CountingCore):
        fails_on = "bad"

    rig.core_class, rig.handler_class = Failing, RecordedHandler
    async with rig.running() as service:
        await rig.submit("a", "bad", "b", "c")
        assert len(await rig.held(3)) == 3
        verdict = await replayed(rig, service)
    assert verdict.applied == 3


async def test_a_replay_begins_at_a_later_checkpoint(rig: Rig) -> None:
    rig.handler_class = RecordedHandler
    async with rig.running() as service:
        await rig.submit("a", "b")
        await rig.held(2)
    async with rig.running() as service:
        await service.change(lambda handler, now: None)  # leads
        database = service._database
        assert not await take_checkpoint(database, "admission")  # the first one is of today
        assert await take_checkpoint(database, "admission", every=timedelta(0))
        later = datetime.now(UTC)
        await rig.submit("c")
        await rig.held(1)
        whole, part = await replayed(rig, service), await replayed(rig, service, since=later)
    assert (whole.emissions, part.emissions) == (3, 1)


async def test_a_recorded_handler_is_made_anew_once_a_day(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.handler_class = RecordedHandler
    async with rig.running() as service:
        await rig.submit("a")
        await rig.held(1)
        before = service.now_unlocked()
        monkeypatch.setattr(event_service, "RENEW_AFTER", timedelta(0))
        await rig.submit("b")
        await rig.held(1)
        async with asyncio.timeout(5):
            while service.now_unlocked() is before:
                await asyncio.sleep(0.05)
        monkeypatch.undo()
        assert await service.query(lambda handler: handler.core.seen) == 2
        verdict = await replayed(rig, service)
    assert verdict.emissions == 2
