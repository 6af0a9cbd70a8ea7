"""Publishing to real streams: batches, windows, repeats, refusals, back-pressure."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from berth.bus import (
    DeadlineExceeded,
    Disconnected,
    NoStream,
    PermissionDenied,
    Publisher,
    PublishRefused,
    Puller,
    StreamFull,
    jsapi,
)
from berth.bus.permissions import PROVISIONER
from berth.bus.provision import EVENTS, berth_topology, ensure_service_consumer, provision
from berth.embedded.nats import NatsServer
from berth.testing.servers import EVERYTHING, NatsPlatform, nats_platform
from tests.integration.bus.builders import a_command, an_event, entities, events, take


async def test_many_messages_are_stored_as_one_batch_in_order(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish(events(40), 5)

    assert [result.seq for result in results] == list(range(1, 41))
    assert {result.stream for result in results} == {EVENTS}
    assert publisher.counters.batches == 1


async def test_more_than_one_batch_is_stored_in_order(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish(events(2300), 10)

    assert [result.seq for result in results] == list(range(1, 2301))
    assert publisher.counters.batches == 3


async def test_few_messages_are_stored_without_a_batch_in_order(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish(events(15), 5)

    assert [result.seq for result in results] == list(range(1, 16))
    assert publisher.counters.batches == 0


async def test_facts_and_commands_go_to_their_streams_in_one_call(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish([a_command("n1"), an_event("j1"), a_command("n1", 1), an_event("j2")], 5)

    assert [(result.stream, result.seq) for result in results] == [
        ("BERTH_COMMANDS", 1),
        (EVENTS, 1),
        ("BERTH_COMMANDS", 2),
        (EVENTS, 2),
    ]


async def test_nothing_to_publish_is_no_work(nats: NatsPlatform) -> None:
    assert await Publisher(await nats.connect("lifecycle")).publish([], 5) == []


async def test_message_keeps_body_and_headers(nats: NatsPlatform) -> None:
    await Publisher(await nats.connect("lifecycle")).publish([an_event("j1", data="größer".encode())], 5)

    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        [message] = await take(puller, 1)

    assert message.data.decode() == "größer"
    assert message.header("Berth-Type") == "running.1"
    assert message.headers == {"Nats-Msg-Id": "j1.1.running", "Berth-Type": "running.1"}


async def test_repeated_window_answers_duplicate_with_the_first_place(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    first = await publisher.publish(events(5), 5)

    again = await publisher.publish(events(5), 5)

    assert [result.seq for result in again] == [result.seq for result in first]
    assert all(result.is_duplicate and result.is_stored for result in again)


async def test_repeated_batch_is_recognised_and_stores_nothing_twice(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    first = await publisher.publish(events(50), 5)

    again = await publisher.publish(events(50), 5)

    assert publisher.counters.batch_duplicates == 1
    assert [result.seq for result in again] == [result.seq for result in first]
    assert all(result.is_duplicate for result in again)


async def test_batch_with_one_known_message_stores_the_others_in_order(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    batch = events(30)
    await publisher.publish([batch[7]], 5)

    results = await publisher.publish(batch, 5)

    assert [result.is_duplicate for result in results] == [number == 7 for number in range(30)]
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        assert entities(await take(puller, 30)) == ["j7", *(f"j{number}" for number in range(30) if number != 7)]


async def test_the_same_message_twice_in_one_batch_is_stored_once(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish([*events(20), *events(1)], 5)

    assert all(result.is_stored for result in results)
    assert results[20].is_duplicate
    assert results[20].seq == results[0].seq


async def test_refused_subject_does_not_hold_up_the_rest_of_a_window(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish([an_event("j1"), an_event("n1", kind="node"), an_event("j2")], 5)

    assert [result.is_stored for result in results] == [True, False, True]
    assert isinstance(results[1].error, PermissionDenied)


async def test_refused_subject_does_not_hold_up_the_rest_of_a_batch(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    for place in (0, 15, 29):
        batch = [an_event(f"{place}-{number}") for number in range(30)]
        batch[place] = an_event(f"Node-{place}", kind="node")

        results = await publisher.publish(batch, 5)

        assert [number for number, result in enumerate(results) if not result.is_stored] == [place]
        assert isinstance(results[place].error, PermissionDenied)


async def test_unacceptable_messages_are_refused_alone(nats: NatsPlatform) -> None:
    bus = await nats.connect("lifecycle")
    bad = [
        replace(an_event("big"), data=b"x" * bus.max_payload_bytes),
        replace(an_event("star"), subject="berth.evt.default.job.*.running"),
        replace(an_event("gap"), subject="berth.evt.default..running"),
        replace(an_event("line"), subject="berth.evt.default.job.x\r\nPUB y"),
        replace(an_event("forged"), headers={"Berth-Type": "x\r\nNats-Msg-Id: other"}),
    ]

    results = await Publisher(bus).publish([*bad, an_event("good")], 5)

    assert [type(result.error) for result in results] == [PublishRefused] * 5 + [type(None)]


async def test_missing_stream_is_waited_for(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    await jsapi.call(admin, f"STREAM.DELETE.{EVENTS}")
    publisher = Publisher(await nats.connect("lifecycle"))

    few, many = await publisher.publish(events(3), 1.0), await publisher.publish(events(30), 1.0)
    assert all(isinstance(result.error, NoStream) for result in [*few, *many])

    waiting = asyncio.create_task(publisher.publish(events(30), 10))
    await provision(admin, berth_topology({}))
    assert [result.seq for result in await waiting] == list(range(1, 31))


async def test_full_stream_is_transient_and_goes_on_when_there_is_room(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    await provision(admin, berth_topology(EVERYTHING, events_max_bytes=20_000))
    publisher = Publisher(await nats.connect("lifecycle"))
    filling = [an_event(f"f{number}", data=b"x" * 3000) for number in range(8)]

    single = await publisher.publish(filling, 0.3)
    batch = await publisher.publish([an_event(f"b{number}", data=b"x" * 1000) for number in range(30)], 0.3)

    assert [result.is_stored for result in single] == [True] * 6 + [False] * 2
    assert all(isinstance(result.error, StreamFull) for result in [*single[6:], *batch])

    waiting = asyncio.create_task(publisher.publish(filling, 10))
    await asyncio.sleep(0.1)
    await provision(admin, berth_topology(EVERYTHING))
    assert all(result.is_stored for result in await waiting)


async def test_publisher_survives_a_crash_of_the_server_between_batches(own_server: NatsServer) -> None:
    async with nats_platform(own_server) as nats:
        publisher = Publisher(await nats.connect("lifecycle"))
        await publisher.publish(events(100), 5)
        await own_server.kill()

        publishing = asyncio.create_task(publisher.publish(events(200), 20))
        await own_server.start()
        results = await publishing

        assert [result.seq for result in results] == list(range(1, 201))
        assert [result.is_duplicate for result in results] == [True] * 100 + [False] * 100


async def test_no_message_is_lost_or_doubled_when_the_server_is_killed_again_and_again(own_server: NatsServer) -> None:
    async with nats_platform(own_server) as nats:
        publisher = Publisher(await nats.connect("lifecycle"))
        stop = asyncio.Event()
        expected: list[str] = []

        async def publish_all() -> None:
            number = 0
            while not stop.is_set():
                size = 300 if number % 3 else 7
                results = await publisher.publish(events(size, prefix=f"{number}-"), 30)
                assert all(result.is_stored for result in results)
                expected.extend(f"{number}-{item}" for item in range(size))
                number += 1

        publishing = asyncio.create_task(publish_all())
        for _ in range(5):
            await asyncio.sleep(0.25)
            await own_server.kill()
            await own_server.start()
        stop.set()
        await publishing

        audit = await nats.connect("audit")
        await ensure_service_consumer(audit, "audit", [])
        async with Puller(audit, EVENTS, "audit", contiguous=True) as puller:
            await puller.reset(0)
            assert entities(await take(puller, len(expected), timeout=2)) == expected
            assert await puller.next(0.1) == []


async def test_without_a_server_publishing_ends_at_its_deadline(own_server: NatsServer) -> None:
    async with nats_platform(own_server) as nats:
        bus = await nats.connect("lifecycle")
        await own_server.kill()
        async with asyncio.timeout(3):
            results = await Publisher(bus).publish(events(20), 0.5)

        assert all(isinstance(result.error, (Disconnected, DeadlineExceeded)) for result in results)


async def test_stream_without_atomic_batches_is_still_published_to(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    config = berth_topology({}).streams[0].config() | {"allow_atomic": False}
    await jsapi.call(admin, f"STREAM.UPDATE.{EVENTS}", config)
    publisher = Publisher(await nats.connect("lifecycle"))

    results = await publisher.publish(events(40), 5)

    assert [result.seq for result in results] == list(range(1, 41))
    assert publisher.counters.batches == 0


async def test_more_batches_at_once_than_the_server_keeps_open_are_all_stored(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("lifecycle"))
    results = await asyncio.gather(
        *(publisher.publish(events(20, prefix=f"{number}-"), 20) for number in range(150)),
    )
    assert all(result.is_stored for batch in results for result in batch)
    for batch in results:
        assert [result.seq for result in batch] == sorted(result.seq for result in batch)
