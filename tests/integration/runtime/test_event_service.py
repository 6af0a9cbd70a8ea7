"""The event-service loop on real NATS and PostgreSQL, with a core small enough to see through."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime

import pytest

from berth.bus.publisher import Publisher
from berth.contracts.events import JobHeld
from berth.runtime import faults
from berth.runtime.core_handler import CoreHandler
from berth.store.parked import list_parked, request_replay
from tests.integration.runtime.rig import CountingCore, Crash, Rig


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.arm(None)


async def test_every_event_has_its_effect_once_though_it_comes_twice(rig: Rig) -> None:
    async with rig.running():
        await rig.submit(*(str(n) for n in range(40)))
        copy = rig.message("7", "j-7")
        # Without a message id the broker stores it again, as it does with one after its window: only the inbox can tell.
        await rig.gateway.publish_core(copy.subject, copy.data, headers=copy.headers)
        held = await rig.held(40)
    assert sorted(held) == sorted(f"j-{n}.1.JobHeld" for n in range(40))


@pytest.mark.parametrize("point", ["before_commit", "between_commit_and_publish", "between_publish_and_ack"])
async def test_a_process_killed_at_any_point_leaves_each_effect_once(rig: Rig, point: str) -> None:
    died = asyncio.Event()

    def die() -> None:
        died.set()
        raise Crash

    faults.arm(f"admission.{point}:1", action=die)
    async with rig.running():
        await rig.submit("a", "b", "c")
        await asyncio.wait_for(died.wait(), 10)
    faults.arm(None)
    async with rig.running() as service:
        await rig.submit("d")
        held = await rig.held(4)
        assert await service.query(lambda handler: handler.core.seen) == 4
    assert sorted(held) == [f"j-{name}.1.JobHeld" for name in "abcd"]


async def test_what_cannot_be_read_is_parked_with_its_reason_and_blocks_nobody_else(rig: Rig) -> None:
    bad = rig.message("x", "j-x")
    bad.data = b'{"not": "an envelope"}'
    foreign = rig.message("y", "j-y", source="placement")
    async with rig.running() as service:
        await Publisher(rig.gateway).publish([bad, foreign, rig.message("contradiction", "j-z")], 5)
        await rig.submit("fine")
        assert await rig.held(1) == ["j-fine.1.JobHeld"]
        parked = await list_parked(service._database)
    reasons = {row.message.entity: row.message.reason for row in parked}
    assert set(reasons) == {"j-x", "j-y", "j-z"}
    assert "not for placement to send" in reasons["j-y"]
    assert "contradicts itself" in reasons["j-z"]


async def test_later_messages_of_a_parked_entity_wait_behind_it_and_are_replayed_in_order(rig: Rig) -> None:
    async with rig.running() as service:
        await Publisher(rig.gateway).publish([rig.message("contradiction", "j-1")], 5)
        await Publisher(rig.gateway).publish([rig.message("second", "j-1", event_id="j-1.2.JobSubmitted")], 5)
        await rig.submit("other")
        assert await rig.held(1) == ["j-other.1.JobHeld"]
        first, second = await list_parked(service._database)
        assert (first.message.event_id, second.message.event_id) == ("j-1.1.JobSubmitted", "j-1.2.JobSubmitted")
        mended = rig.message("mended", "j-1").data
        await request_replay(service._database, first.id, payload=mended, note="by the operator")
        held = await rig.held(2)
        assert await list_parked(service._database) == []
    assert held == ["j-1.1.JobHeld", "j-1.2.JobHeld"]


async def test_a_message_that_makes_the_code_raise_is_found_and_parked_alone(rig: Rig) -> None:
    class Failing(CountingCore):
        fails_on = "trap"

    rig.core_class = Failing
    async with rig.running() as service:
        await rig.submit("one", "trap", "two")
        held = await rig.held(2)
        parked = await list_parked(service._database)
    assert sorted(held) == ["j-one.1.JobHeld", "j-two.1.JobHeld"]
    assert [row.message.entity for row in parked] == ["j-trap"]
    assert "KeyError" in parked[0].message.reason


async def test_timers_fire_without_a_message(rig: Rig) -> None:
    async with rig.running():
        await rig.submit("timer")
        assert await rig.held(2) == ["j-timer.1.JobHeld", "timer.1.JobHeld"]


async def test_a_change_is_answered_after_its_commit(rig: Rig) -> None:
    async with rig.running() as service:
        await rig.submit("a")
        await rig.held(1)

        def change(handler: CoreHandler[CountingCore], now: datetime) -> int:
            handler.core.outbox.emit(JobHeld(job_id="asked", reasons=(), policy_version=0), "asked")
            return handler.core.seen

        assert await service.change(change) == 1
        assert "asked.1.JobHeld" in await rig.held(1)
    async with rig.running() as service:
        await rig.submit("b")
        await rig.held(1)
        assert await service.query(lambda handler: handler.core.outbox.counters["asked"]) == 1
