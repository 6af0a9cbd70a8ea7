"""Reading the command consumers of many nodes in one process."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from berth.bus import Message, MultiPuller, Publisher
from berth.bus.permissions import PROVISIONER
from berth.bus.provision import (
    COMMANDS,
    consumer_names,
    consumer_state,
    delete_consumer,
    ensure_node_consumers,
    node_consumer,
)
from berth.embedded.nats import NatsServer
from berth.testing.servers import POOL, NatsPlatform, nats_platform
from tests.integration.bus.builders import a_command

NODES = [f"n{number}" for number in range(50)]
CONSUMERS = [node_consumer(POOL, node) for node in NODES]


async def take(puller: MultiPuller, count: int, *, timeout: float = 5.0) -> list[Message]:
    taken: list[Message] = []
    while len(taken) < count:
        messages = await puller.next(timeout)
        if not messages:
            break
        puller.ack(messages)
        taken += messages
    return taken


def node_of(message: Message) -> str:
    return message.subject.split(".")[3]


async def test_commands_of_all_nodes_come_from_one_reader_in_order_per_node(nats: NatsPlatform) -> None:
    await nats.add_nodes(NODES)
    publisher = Publisher(await nats.connect("lifecycle"))
    async with MultiPuller(await nats.connect("fleet"), COMMANDS, CONSUMERS) as puller:
        await publisher.publish([a_command(node, number) for number in range(10) for node in NODES], 10)

        messages = await take(puller, 500)

    assert Counter(map(node_of, messages)) == dict.fromkeys(NODES, 10)
    for node in NODES:
        ids = [message.header("Nats-Msg-Id") for message in messages if node_of(message) == node]
        assert ids == [f"{node}.{number}.launch" for number in range(10)]


async def test_node_with_more_commands_than_one_request_brings_gets_them_all(nats: NatsPlatform) -> None:
    await nats.add_nodes(["n1"])
    async with MultiPuller(await nats.connect("fleet"), COMMANDS, [node_consumer(POOL, "n1")], batch=8) as puller:
        await Publisher(await nats.connect("lifecycle")).publish([a_command("n1", number) for number in range(100)], 5)
        assert len(await take(puller, 100)) == 100


async def test_acknowledged_commands_are_not_sent_again(nats: NatsPlatform) -> None:
    await nats.add_nodes(["n1"])
    fleet = await nats.connect("fleet")
    async with MultiPuller(fleet, COMMANDS, [node_consumer(POOL, "n1")]) as puller:
        await Publisher(await nats.connect("lifecycle")).publish([a_command("n1")], 5)
        await take(puller, 1)
        await fleet.flush()

        state = await consumer_state(fleet, COMMANDS, node_consumer(POOL, "n1"))
    assert (state.pending, state.ack_pending) == (0, 0)


async def test_node_can_be_added_and_removed_while_reading(nats: NatsPlatform) -> None:
    await nats.add_nodes(["n1", "n2"])
    publisher = Publisher(await nats.connect("lifecycle"))
    async with MultiPuller(await nats.connect("fleet"), COMMANDS) as puller:
        assert await puller.next(0.05) == []
        puller.add(node_consumer(POOL, "n1"))
        puller.add(node_consumer(POOL, "n1"))
        await publisher.publish([a_command("n1"), a_command("n2")], 5)
        assert [node_of(message) for message in await take(puller, 1)] == ["n1"]

        puller.remove(node_consumer(POOL, "n1"))
        puller.add(node_consumer(POOL, "n2"))
        assert [node_of(message) for message in await take(puller, 1)] == ["n2"]
        assert puller.consumers == [node_consumer(POOL, "n2")]


async def test_missing_consumers_are_provisioned_while_the_others_go_on(nats: NatsPlatform) -> None:
    await nats.add_nodes(NODES)
    admin = await nats.connect(PROVISIONER)
    publisher = Publisher(await nats.connect("lifecycle"))
    asked: list[str] = []

    async def provision(missing: Sequence[str]) -> None:
        asked.extend(missing)
        await ensure_node_consumers(admin, POOL, ["n7"])

    fleet = await nats.connect("fleet")
    async with MultiPuller(fleet, COMMANDS, CONSUMERS, on_missing=provision) as puller:
        await fleet.flush()
        await delete_consumer(admin, COMMANDS, node_consumer(POOL, "n7"))
        await publisher.publish([a_command(node) for node in NODES], 5)

        messages = await take(puller, 50)

    assert Counter(map(node_of, messages)) == dict.fromkeys(NODES, 1)
    assert set(asked) == {node_consumer(POOL, "n7")}


async def test_all_nodes_resume_quickly_after_a_crash_on_new_consumers_and_get_again_what_is_kept(
    own_server: NatsServer,
) -> None:
    async with nats_platform(own_server) as nats:
        await nats.add_nodes(NODES)
        publisher = Publisher(await nats.connect("lifecycle"))
        inventory = await nats.connect("inventory")
        async with MultiPuller(await nats.connect("fleet"), COMMANDS, CONSUMERS) as puller:
            await publisher.publish([a_command(node, 1) for node in NODES], 5)
            unacknowledged: list[Message] = []
            while len(unacknowledged) < 50:
                unacknowledged += await puller.next(5)

            await own_server.kill()
            await own_server.start()
            started = time.monotonic()
            await inventory.wait_connected(5)
            assert len(await ensure_node_consumers(inventory, POOL, NODES)) == len(NODES)
            await publisher.publish([a_command(node, 2) for node in NODES], 10)
            again = await take(puller, 100)

        assert time.monotonic() - started < 2
        assert Counter(message.header("Nats-Msg-Id") for message in again) == {
            f"{node}.{number}.launch": 1 for node in NODES for number in (1, 2)
        }


async def test_making_hundreds_of_consumers_is_quick_and_making_them_again_is_nothing(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    nodes = [f"n{number}" for number in range(1300)]

    assert len(await ensure_node_consumers(admin, POOL, nodes)) == 1300
    assert await consumer_names(admin, COMMANDS) == {node_consumer(POOL, node) for node in nodes}
    async with asyncio.timeout(1):
        assert await ensure_node_consumers(admin, POOL, nodes) == []


async def test_wake_ends_a_wait(nats: NatsPlatform) -> None:
    async with MultiPuller(await nats.connect("fleet"), COMMANDS) as puller, asyncio.timeout(5):
        puller.wake()
        assert await puller.next(60) == []
