"""The connection: requests and answers, reconnects, and what it says about trouble."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from berth.bus import (
    Answer,
    BusSettings,
    Connection,
    CoreMessage,
    DeadlineExceeded,
    Disconnected,
    NoResponders,
    PublishRefused,
    RequestFailed,
)
from berth.embedded.nats import NatsServer
from berth.testing.servers import NatsPlatform

SUBJECT = "berth.req.default.audit.ask"


async def test_answer_carries_body_and_headers(nats: NatsPlatform) -> None:
    audit, gateway = await nats.connect("audit"), await nats.connect("gateway")

    async def answer(request: CoreMessage) -> Answer:
        return Answer(request.data.upper(), {"Seen": request.header("Asker") or ""})

    await audit.serve(SUBJECT, answer)
    await audit.flush()

    reply = await gateway.request(SUBJECT, b"hello", headers={"Asker": "gateway"})

    assert (reply.data, reply.header("Seen"), reply.headers) == (b"HELLO", "gateway", {"Seen": "gateway"})


async def test_error_of_the_serving_side_reaches_the_caller(nats: NatsPlatform) -> None:
    audit, gateway = await nats.connect("audit"), await nats.connect("gateway")

    async def refuse(request: CoreMessage) -> bytes:
        raise RequestFailed("no_such_job", "job j7 is not known")

    async def break_down(request: CoreMessage) -> bytes:
        raise KeyError("secret")

    await audit.serve(SUBJECT, refuse)
    await audit.serve("berth.req.default.audit.broken", break_down)
    await audit.flush()

    with pytest.raises(RequestFailed) as refused:
        await gateway.request(SUBJECT)
    with pytest.raises(RequestFailed) as broken:
        await gateway.request("berth.req.default.audit.broken")

    assert (refused.value.code, refused.value.text) == ("no_such_job", "job j7 is not known")
    assert broken.value.code == "internal"
    assert "secret" not in broken.value.text


async def test_request_nobody_serves_fails_at_once_and_a_slow_one_at_its_timeout(nats: NatsPlatform) -> None:
    audit, gateway = await nats.connect("audit"), await nats.connect("gateway")
    with pytest.raises(NoResponders):
        await gateway.request(SUBJECT, timeout=60)

    async def think(request: CoreMessage) -> bytes:
        await asyncio.sleep(60)
        return b""

    await audit.serve(SUBJECT, think)
    await audit.flush()
    with pytest.raises(DeadlineExceeded):
        await gateway.request(SUBJECT, timeout=0.1)


async def test_slow_request_does_not_hold_up_the_next(nats: NatsPlatform) -> None:
    audit, gateway = await nats.connect("audit"), await nats.connect("gateway")
    release = asyncio.Event()

    async def answer(request: CoreMessage) -> bytes:
        if request.data == b"slow":
            await release.wait()
        return request.data

    await audit.serve(SUBJECT, answer)
    await audit.flush()
    slow = asyncio.create_task(gateway.request(SUBJECT, b"slow", timeout=10))
    assert (await gateway.request(SUBJECT, b"quick")).data == b"quick"
    release.set()
    assert (await slow).data == b"slow"


async def test_one_of_a_queue_group_answers(nats: NatsPlatform) -> None:
    first, second, gateway = [await nats.connect(user) for user in ("audit", "audit", "gateway")]
    asked: list[bytes] = []

    async def answer(request: CoreMessage) -> bytes:
        asked.append(request.data)
        return b""

    for bus in (first, second):
        await bus.serve(SUBJECT, answer, queue="audit")
        await bus.flush()
    for number in range(20):
        await gateway.request(SUBJECT, b"%d" % number)

    assert asked == [b"%d" % number for number in range(20)]


async def test_flush_is_a_fence(nats: NatsPlatform) -> None:
    """What was subscribed before a flush is known to the server after it."""
    audit, gateway = await nats.connect("audit"), await nats.connect("gateway")

    async def answer(request: CoreMessage) -> bytes:
        return b""

    for number in range(50):
        subject = f"{SUBJECT}.{number}"
        await audit.serve(subject, answer)
        await audit.flush()
        await gateway.request(subject)


async def test_asynchronous_handler_gets_messages_in_order_and_late_ones_are_dropped_and_counted(
    nats: NatsPlatform,
) -> None:
    fleet, inventory = await nats.connect("fleet"), await nats.connect("inventory")
    frames: list[bytes] = []
    start, seen_last = asyncio.Event(), asyncio.Event()

    async def handle(message: CoreMessage) -> None:
        await start.wait()
        frames.append(message.data)
        if message.data == b"29":
            seen_last.set()

    await inventory.subscribe_core("berth.tel.>", handle, max_pending=10)
    await inventory.flush()
    for number in range(30):
        await fleet.publish_core("berth.tel.default.n1", b"%d" % number)
    await fleet.flush()
    await inventory.flush()
    start.set()
    async with asyncio.timeout(5):
        await seen_last.wait()

    assert frames[-10:] == [b"%d" % number for number in range(20, 30)]
    assert len(frames) + inventory.counters.dropped_messages == 30


async def test_handler_that_raises_gets_the_next_message(nats: NatsPlatform) -> None:
    fleet, inventory = await nats.connect("fleet"), await nats.connect("inventory")
    seen: list[bytes] = []

    def handle(message: CoreMessage) -> None:
        seen.append(message.data)
        raise ValueError(message.data)

    await inventory.subscribe_core("berth.tel.>", handle)
    await inventory.flush()
    for number in range(3):
        await fleet.publish_core("berth.tel.default.n1", b"%d" % number)
    await fleet.flush()
    await inventory.flush()

    assert seen == [b"0", b"1", b"2"]


async def test_unsubscribed_handler_hears_nothing(nats: NatsPlatform) -> None:
    fleet, inventory = await nats.connect("fleet"), await nats.connect("inventory")
    seen: list[CoreMessage] = []
    subscription = await inventory.subscribe_core("berth.tel.>", seen.append)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    await inventory.flush()
    await fleet.publish_core("berth.tel.default.n1", b"")
    await fleet.flush()
    await inventory.flush()
    assert seen == []


async def test_bad_subject_and_too_large_body_are_refused(nats: NatsPlatform) -> None:
    bus = await nats.connect("gateway")
    for subject in ("", "a b", "a..b", "a.*", "a.>", "a\r\nPUB b"):
        with pytest.raises(PublishRefused):
            await bus.publish_core(subject, b"")
    with pytest.raises(PublishRefused):
        await bus.publish_core("berth.req.x", b"x" * (bus.max_payload_bytes + 1))
    assert bus.is_connected


async def test_lost_connection_fails_requests_at_once_and_comes_back_by_itself(own_server: NatsServer) -> None:
    async with Connection(own_server.settings("audit")) as audit, Connection(own_server.settings("gateway")) as gateway:
        lost, back = asyncio.Event(), asyncio.Event()
        gateway.on_disconnect(lost.set)
        gateway.on_reconnect(back.set)

        async def think(request: CoreMessage) -> bytes:
            await asyncio.sleep(60)
            return b""

        await audit.serve(SUBJECT, think)
        await audit.flush()
        asking = asyncio.create_task(gateway.request(SUBJECT, timeout=60))
        await gateway.flush()

        await own_server.kill()
        async with asyncio.timeout(5):
            await lost.wait()
            with pytest.raises(Disconnected):
                await asking
        assert not gateway.is_connected
        with pytest.raises(Disconnected):
            await gateway.publish_core(SUBJECT, b"")
        with pytest.raises(Disconnected):
            await gateway.wait_connected(0.05)

        started = time.monotonic()
        await own_server.start()
        await back.wait()
        await audit.wait_connected(5)
        assert time.monotonic() - started < 2
        assert (gateway.counters.disconnects, gateway.counters.reconnects) == (1, 1)
        with pytest.raises(DeadlineExceeded):  # served again, without anybody's doing
            await gateway.request(SUBJECT, timeout=0.1)


async def test_removed_callback_is_not_called(own_server: NatsServer) -> None:
    async with Connection(own_server.settings("audit")) as audit:
        lost = asyncio.Event()
        audit.on_disconnect(lost.set)()
        await own_server.kill()
        await own_server.start()
        await audit.wait_connected(5)
        assert not lost.is_set()


async def test_frozen_server_is_noticed(own_server: NatsServer) -> None:
    async with Connection(replace(own_server.settings("audit"), probe_interval_s=0.3)) as audit:
        lost = asyncio.Event()
        audit.on_disconnect(lost.set)
        pid = own_server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                await lost.wait()
        finally:
            os.kill(pid, signal.SIGCONT)
        await audit.wait_connected(10)


async def test_no_server_is_reported_within_the_connect_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(Disconnected):
        await Connection(BusSettings(("nats://127.0.0.1:1",), "lonely", connect_timeout_s=0.4)).open()
    assert time.monotonic() - started < 3


async def test_closing_is_quick_and_says_so(nats: NatsPlatform) -> None:
    bus = Connection(nats.server.settings("audit"))
    await bus.open()
    async with asyncio.timeout(2):
        await bus.close()
        await bus.closed.wait()
    assert not bus.is_connected


async def test_closing_while_the_server_is_away_is_quick(own_server: NatsServer) -> None:
    bus = Connection(own_server.settings("audit"))
    await bus.open()
    await own_server.kill()
    async with asyncio.timeout(4):
        await bus.close()
