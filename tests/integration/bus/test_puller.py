"""Reading one durable consumer: at once, in order, without gaps, through restarts and losses."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from berth.bus import ConsumerMissing, Message, Publisher, Puller, TransientError, jsapi
from berth.bus.permissions import PROVISIONER
from berth.bus.provision import (
    EVENTS,
    berth_topology,
    consumer_state,
    delete_consumer,
    ensure_service_consumer,
    provision,
)
from berth.embedded.nats import NatsServer
from berth.testing.servers import EVERYTHING, NatsPlatform, nats_platform, provision_anew
from tests.integration.bus.builders import an_event, entities, events, take

SECONDS_TO_RESUME = 2.0


async def test_next_returns_what_is_there_without_waiting_for_more(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        await publisher.publish(events(3), 5)

        started = time.monotonic()
        messages = await take(puller, 3)

        assert entities(messages) == ["j0", "j1", "j2"]
        assert time.monotonic() - started < 1


async def test_next_wakes_when_a_message_arrives(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        waiting = asyncio.create_task(puller.next(10))
        await asyncio.sleep(0)
        await publisher.publish(events(1), 5)

        started = time.monotonic()
        assert len(await waiting) == 1
        assert time.monotonic() - started < 1


async def test_next_is_empty_after_its_timeout(nats: NatsPlatform) -> None:
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        assert await puller.next(0.05) == []


async def test_wake_ends_a_wait_also_when_it_comes_first(nats: NatsPlatform) -> None:
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller, asyncio.timeout(5):
        waiting = asyncio.create_task(puller.next(60))
        await asyncio.sleep(0)
        puller.wake()
        assert await waiting == []

        puller.wake()
        assert await puller.next(60) == []


async def test_messages_carry_their_place_and_number_of_deliveries(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(3), 5)
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        messages = await take(puller, 3)

    assert [(m.stream_seq, m.consumer_seq, m.num_delivered) for m in messages] == [(1, 1, 1), (2, 2, 1), (3, 3, 1)]
    assert [m.pending for m in messages] == [2, 1, 0]
    assert {m.consumer for m in messages} == {"audit"}
    assert abs(messages[0].stored_at.timestamp() - time.time()) < 60


async def test_long_backlog_comes_in_order_in_batches_of_limited_size(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(3000), 20)
    async with Puller(await nats.connect("audit"), EVENTS, "audit", batch=200, contiguous=True) as puller:
        taken: list[str] = []
        while len(taken) < 3000:
            messages = await puller.next(5)
            assert 0 < len(messages) <= 200
            puller.ack(messages)
            taken += entities(messages)

    assert taken == [f"j{number}" for number in range(3000)]


async def test_slow_reader_is_not_sent_more_than_two_batches(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(500), 20)
    audit = await nats.connect("audit")
    async with Puller(audit, EVENTS, "audit", batch=50) as puller:
        first = await puller.next(5)
        await asyncio.sleep(0.2)

        state = await consumer_state(audit, EVENTS, "audit")
        assert state.ack_pending <= len(first) + 100
        assert state.pending >= 350


async def test_acknowledged_messages_do_not_come_again(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(10), 5)
    gateway = await nats.connect("gateway")
    async with Puller(gateway, EVENTS, "gateway") as puller:
        await take(puller, 10)
    await gateway.flush()

    state = await consumer_state(gateway, EVENTS, "gateway")
    assert (state.ack_pending, state.ack_floor, state.pending) == (0, 10, 0)


async def test_contiguous_reader_acknowledges_a_batch_with_its_last_message(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(20), 5)
    audit = await nats.connect("audit")
    async with Puller(audit, EVENTS, "audit", contiguous=True) as puller:
        messages: list[Message] = []
        while len(messages) < 20:
            messages += await puller.next(5)
        puller.ack(messages)
        await audit.flush()

    state = await consumer_state(audit, EVENTS, "audit")
    assert (state.ack_floor, state.ack_pending) == (20, 0)


@pytest.mark.parametrize("position", [0, 4, 9])
async def test_reset_goes_on_behind_the_position(nats: NatsPlatform, position: int) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(10), 5)
    async with Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True) as puller:
        await take(puller, 10)

        await puller.reset(position)

        assert [m.stream_seq for m in await take(puller, 10 - position)] == list(range(position + 1, 11))


async def test_unacknowledged_messages_come_at_once_to_the_next_reader_that_starts_at_a_position(
    nats: NatsPlatform,
) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    await publisher.publish(events(10), 5)
    crashed = Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True)
    await crashed.open(after=0)
    while crashed.last_received != 10:
        await crashed.next(5)
    await crashed.close()

    successor = Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True)
    started = time.monotonic()
    await successor.open(after=6)
    assert [m.stream_seq for m in await take(successor, 4)] == [7, 8, 9, 10]
    assert time.monotonic() - started < 2
    await successor.close()


async def test_reset_drops_what_waits_to_be_taken(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(10), 5)
    async with Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True) as puller:
        async with asyncio.timeout(5):
            while puller.last_received != 10:  # taking them is the event, and must not happen here
                await asyncio.sleep(0.01)
        await puller.reset(8)
        assert [m.stream_seq for m in await take(puller, 2)] == [9, 10]


async def test_position_at_the_end_of_the_stream_waits_for_what_comes(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    await publisher.publish(events(3), 5)
    async with Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True) as puller:
        await puller.reset(3)
        assert await puller.next(0.1) == []
        await publisher.publish([an_event("late")], 5)
        assert entities(await take(puller, 1)) == ["late"]


async def test_stream_that_was_made_anew_is_read_from_its_start(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    await publisher.publish(events(3), 5)
    async with Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True) as puller:
        await puller.reset(1000)
        assert entities(await take(puller, 3)) == ["j0", "j1", "j2"]


async def test_lost_delivery_is_healed_without_gap_or_repeat(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    audit = await nats.connect("audit")
    async with Puller(audit, EVENTS, "audit", contiguous=True) as puller:
        stolen = 0
        async with Puller(audit, EVENTS, "audit", batch=1) as thief:  # takes messages as a breaking connection would
            for number in range(20):
                await publisher.publish([an_event(f"j{number}")], 5)
                stolen += len(await thief.next(0.02))

        assert stolen
        await publisher.publish([an_event("last")], 5)
        assert [message.stream_seq for message in await take(puller, 21)] == list(range(1, 22))
        assert puller.counters.gaps >= 1


async def test_puller_resumes_quickly_after_a_crash_of_the_server(own_server: NatsServer) -> None:
    async with nats_platform(own_server) as nats:
        publisher = Publisher(await nats.connect("lifecycle"))
        for contiguous in (True, False):
            name = "audit" if contiguous else "gateway"
            bus = await nats.connect(name)
            made_anew = partial(ensure_service_consumer, bus, name, [])
            async with Puller(bus, EVENTS, name, contiguous=contiguous, on_missing=made_anew) as puller:
                await publisher.publish(events(20, prefix=f"{name}-a"), 5)
                seen: list[Message] = []
                while f"{name}-a19" not in entities(seen):
                    seen += await take(puller, 1)
                await own_server.kill()
                assert await puller.next(0.05) == []

                await own_server.start()
                started = time.monotonic()
                await publisher.publish(events(20, prefix=f"{name}-b"), 10)
                while f"{name}-b19" not in entities(seen):
                    seen += await take(puller, 1)

                assert time.monotonic() - started < SECONDS_TO_RESUME
                if contiguous:
                    assert entities(seen)[-20:] == [f"{name}-b{number}" for number in range(20)]


async def test_reader_of_a_shared_consumer_gets_everything_again_at_once_after_a_crash(
    own_server: NatsServer,
) -> None:
    async with nats_platform(own_server) as nats:
        await Publisher(await nats.connect("lifecycle")).publish(events(20), 5)
        bus = await nats.connect("gateway")
        made_anew = partial(ensure_service_consumer, bus, "gateway", [])
        async with Puller(bus, EVENTS, "gateway", on_missing=made_anew) as puller:
            seen: list[Message] = []
            while len(seen) < 20:
                seen += await puller.next(5)
            puller.ack(seen[:5])
            await own_server.kill()
            await own_server.start()

            started = time.monotonic()
            again = set(entities(await take(puller, 20)))
            assert again == {f"j{number}" for number in range(20)}
            assert time.monotonic() - started < SECONDS_TO_RESUME


async def test_contiguous_reader_sees_each_message_once_through_crashes_under_load(own_server: NatsServer) -> None:
    async with nats_platform(own_server) as nats:
        publisher = Publisher(await nats.connect("lifecycle"))
        stop = asyncio.Event()
        sent = 0

        async def publish_all() -> None:
            nonlocal sent
            while not stop.is_set():
                results = await publisher.publish(events(100, prefix=f"{sent}-"), 30)
                sent += len(results)

        publishing = asyncio.create_task(publish_all())
        seqs: list[int] = []
        bus = await nats.connect("audit")
        made_anew = partial(ensure_service_consumer, bus, "audit", [])
        async with Puller(bus, EVENTS, "audit", contiguous=True, on_missing=made_anew) as puller:

            async def read_all() -> None:
                while not (stop.is_set() and publishing.done() and len(seqs) >= sent):
                    messages = await puller.next(0.2)
                    seqs.extend(message.stream_seq for message in messages)
                    puller.ack(messages)

            reading = asyncio.create_task(read_all())
            for _ in range(4):
                await asyncio.sleep(0.3)
                await own_server.kill()
                await own_server.start()
            stop.set()
            async with asyncio.timeout(20):
                await asyncio.gather(publishing, reading)

        assert seqs == list(range(1, sent + 1))


async def test_missing_consumer_is_reported_after_the_grace_time(nats: NatsPlatform) -> None:
    await delete_consumer(await nats.connect(PROVISIONER), EVENTS, "audit")
    async with Puller(await nats.connect("audit"), EVENTS, "audit", missing_grace_s=0.2) as puller:
        with pytest.raises(ConsumerMissing):
            await puller.next(5)


@pytest.mark.parametrize("contiguous", [True, False])
async def test_deleted_consumer_is_provisioned_again_and_read_on(nats: NatsPlatform, contiguous: bool) -> None:
    admin = await nats.connect(PROVISIONER)

    async def provision_again() -> None:
        await provision(admin, berth_topology(EVERYTHING))

    publisher = Publisher(await nats.connect("lifecycle"))
    audit = await nats.connect("audit")
    async with Puller(audit, EVENTS, "audit", contiguous=contiguous, on_missing=provision_again) as puller:
        await publisher.publish(events(5), 5)
        await take(puller, 5)

        await delete_consumer(admin, EVENTS, "audit")
        await publisher.publish(events(5, prefix="k"), 5)

        taken = await take(puller, 5 if contiguous else 10)
        assert entities(taken)[-5:] == [f"k{number}" for number in range(5)]


async def test_deleted_consumer_stops_nobody_else(nats: NatsPlatform) -> None:
    await delete_consumer(await nats.connect(PROVISIONER), EVENTS, "audit")
    await Publisher(await nats.connect("lifecycle")).publish(events(5), 5)
    async with Puller(await nats.connect("gateway"), EVENTS, "gateway") as puller:
        assert len(await take(puller, 5)) == 5


async def test_opening_at_a_position_fails_while_the_consumer_is_missing(nats: NatsPlatform) -> None:
    await delete_consumer(await nats.connect(PROVISIONER), EVENTS, "audit")
    puller = Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True)
    with pytest.raises(TransientError):
        await puller.open(after=0)


async def test_filtered_consumer_gets_its_subjects_only(nats: NatsPlatform) -> None:
    await provision_anew(nats.server, {"audit": ["berth.evt.*.job.*.placed", "berth.evt.*.node.>"]})
    await Publisher(await nats.connect("lifecycle")).publish(
        [an_event("j1"), an_event("j2", fact="placed"), an_event("j3")], 5
    )
    await Publisher(await nats.connect("inventory")).publish([an_event("n1", kind="node")], 5)

    async with Puller(await nats.connect("audit"), EVENTS, "audit", contiguous=True) as puller:
        assert entities(await take(puller, 2)) == ["j2", "n1"]
        assert await puller.next(0.1) == []


async def test_request_lost_by_the_server_is_made_again(nats: NatsPlatform) -> None:
    """Leaves room for what no protocol answer tells: here, a consumer replaced behind the puller's back."""
    admin = await nats.connect(PROVISIONER)
    publisher = Publisher(await nats.connect("lifecycle"))
    async with Puller(await nats.connect("audit"), EVENTS, "audit", expires_s=0.3) as puller:
        await publisher.publish(events(3), 5)
        await take(puller, 3)
        await jsapi.call(admin, f"CONSUMER.RESET.{EVENTS}.audit", {"seq": 4})
        await publisher.publish(events(3, prefix="k"), 5)
        assert entities(await take(puller, 3)) == ["k0", "k1", "k2"]


async def test_reader_that_was_replaced_takes_nothing_from_its_successor(nats: NatsPlatform) -> None:
    async def was_replaced() -> bool:
        return False

    gateway, old_bus, new_bus = [await nats.connect(user) for user in ("gateway", "placement", "placement")]
    async with Puller(old_bus, EVENTS, "placement", contiguous=True, may_reset=was_replaced) as old:
        await Publisher(gateway).publish(events(3, fact="submitted"), 5)
        assert len(await old.next(5)) == 3  # never acknowledged: the reader stands still
        new = Puller(new_bus, EVENTS, "placement", contiguous=True)
        await new.open(after=0)
        try:
            await Publisher(gateway).publish(events(2, prefix="k", fact="submitted"), 5)
            old.halt()
            found: list[str] = []
            async with asyncio.timeout(30):
                while len(found) < 5:
                    found += entities(await new.next(1))
        finally:
            await new.close()
    assert found == ["j0", "j1", "j2", "k0", "k1"]


@pytest.mark.parametrize("comes_another", [True, False])
async def test_reader_notices_that_somebody_else_has_moved_its_consumer(
    nats: NatsPlatform, monkeypatch: pytest.MonkeyPatch, comes_another: bool
) -> None:
    monkeypatch.setattr("berth.bus.puller._QUIET_S", 0.3)
    gateway, reader, stranger = [await nats.connect(user) for user in ("gateway", "placement", "placement")]
    await Publisher(gateway).publish(events(3, fact="submitted"), 5)
    puller = Puller(reader, EVENTS, "placement", contiguous=True)
    monkeypatch.setattr(puller, "_top_up", lambda: None)  # asks for nothing until the stranger has done its work
    await puller.open(after=0)
    await jsapi.call(stranger, f"CONSUMER.RESET.{EVENTS}.placement", {"seq": 4})
    monkeypatch.undo()
    monkeypatch.setattr("berth.bus.puller._QUIET_S", 0.3)
    try:
        if comes_another:
            await Publisher(gateway).publish(events(1, prefix="k", fact="submitted"), 5)
        found: list[str] = []
        async with asyncio.timeout(10):
            while len(found) < 3 + comes_another:
                found += entities(await puller.next(1))
        assert puller.counters.foreign == 1
    finally:
        await puller.close()
    assert found == ["j0", "j1", "j2", *(["k0"] if comes_another else [])]


async def test_quiet_reader_is_not_troubled_by_what_its_filter_skips(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("berth.bus.puller._QUIET_S", 0.1)
    async with nats_platform(nats_server, {"placement": ["berth.evt.*.job.*.admitted"]}) as nats:
        publisher = Publisher(await nats.connect("lifecycle"))
        bus = await nats.connect("placement")
        async with Puller(bus, EVENTS, "placement", contiguous=True, expires_s=1) as puller:
            await puller.reset(0)
            await publisher.publish(events(3), 5)
            assert await puller.next(4) == []  # until the server has looked for something at a second request
            assert (puller.counters.foreign, puller.counters.resets) == (0, 1)
