"""Who may do what on the bus, tried on a real server with the real accounts, also by those who mean harm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from berth.bus import (
    Connection,
    CoreMessage,
    DeadlineExceeded,
    NoResponders,
    Outgoing,
    PermissionDenied,
    Publisher,
    Puller,
    jsapi,
    wire,
)
from berth.bus.permissions import PROVISIONER, SERVICE_PUBLISH
from berth.bus.provision import (
    COMMANDS,
    EVENTS,
    consumer_state,
    delete_consumer,
    ensure_node_consumer,
    ensure_service_consumer,
    node_consumer,
)
from berth.embedded.nats import generate_credentials
from berth.testing.servers import POOL, NatsPlatform
from tests.integration.bus.builders import a_command, an_event, events, take

FACTS = {
    "job.x.submitted": {"gateway", "admission", "placement", "lifecycle"},
    "job.x.cancel_requested": {"gateway", "admission", "placement", "lifecycle"},
    "job.x.admitted": {"admission", "placement", "lifecycle"},
    "policy.x.proposed": {"gateway", "admission"},
    "policy.x.activated": {"admission"},
    "access.x.denied": {"gateway"},
    "node.x.cordon_requested": {"gateway", "inventory"},
    "node.x.lost": {"inventory"},
    "gpu.x.out": {"inventory"},
    "allocation.x.released": {"placement"},
    "plan.x.preemption_planned": {"placement"},
    "attempt.x.ended": {"lifecycle"},
    "audit.x.sealed": {"audit"},
    "worker.x.started": {"fleet"},
}


async def stored_count(nats: NatsPlatform, stream: str = EVENTS) -> int:
    async with Connection(nats.server.settings(PROVISIONER)) as admin:
        return int((await jsapi.call(admin, f"STREAM.INFO.{stream}"))["state"]["messages"])


@pytest.mark.parametrize("user", [*SERVICE_PUBLISH, "fleet"])
async def test_each_user_publishes_its_own_facts_only(nats: NatsPlatform, user: str) -> None:
    publisher = Publisher(await nats.connect(user))
    outgoing = [Outgoing(f"berth.evt.default.{fact}", b"{}", f"{user}.{fact}") for fact in FACTS]

    results = await publisher.publish(outgoing, 5)

    assert {fact for fact, result in zip(FACTS, results, strict=True) if result.is_stored} == {
        fact for fact, users in FACTS.items() if user in users
    }
    assert all(isinstance(result.error, PermissionDenied) for result in results if not result.is_stored)


@pytest.mark.parametrize("user", [*sorted(set(SERVICE_PUBLISH) - {"lifecycle"}), "fleet"])
async def test_commands_come_from_lifecycle_only(nats: NatsPlatform, user: str) -> None:
    [result] = await Publisher(await nats.connect(user)).publish([a_command("n1")], 5)
    assert isinstance(result.error, PermissionDenied)


async def test_refusals_are_counted_and_kept(nats: NatsPlatform) -> None:
    bus = await nats.connect("audit")
    await Publisher(bus).publish([an_event("j1")], 5)
    assert bus.counters.permission_errors == 1
    assert "berth.evt.default.job.j1.running" in bus.permission_errors[0]


@pytest.mark.parametrize("user", list(SERVICE_PUBLISH))
async def test_each_service_reads_resets_and_acknowledges_its_own_consumer(nats: NatsPlatform, user: str) -> None:
    await Publisher(await nats.connect("lifecycle")).publish(events(3), 5)
    bus = await nats.connect(user)
    async with Puller(bus, EVENTS, user, contiguous=True) as puller:
        await take(puller, 3)
        await puller.reset(1)
        await take(puller, 2)
        await bus.flush()

    assert (await consumer_state(bus, EVENTS, user)).ack_floor == 3
    assert bus.counters.permission_errors == 0


async def test_service_cannot_read_or_move_the_consumer_of_another(nats: NatsPlatform) -> None:
    bus = await nats.connect("gateway")
    for verb in ("MSG.NEXT", "INFO", "RESET", "DELETE"):
        with pytest.raises(PermissionDenied):
            await jsapi.call(bus, f"CONSUMER.{verb}.{EVENTS}.audit")


async def test_streams_are_made_and_removed_by_the_provisioner_only(nats: NatsPlatform) -> None:
    for user in (*SERVICE_PUBLISH, "fleet", "public"):
        bus = await nats.connect(user)
        for verb in (f"STREAM.DELETE.{EVENTS}", f"STREAM.PURGE.{EVENTS}", f"STREAM.UPDATE.{EVENTS}", "STREAM.CREATE.X"):
            with pytest.raises((PermissionDenied, NoResponders)):
                await jsapi.call(bus, verb)
    assert await stored_count(nats) == 0


async def test_inventory_makes_the_consumers_of_nodes_and_others_do_not(nats: NatsPlatform) -> None:
    assert await ensure_node_consumer(await nats.connect("inventory"), POOL, "n1")
    with pytest.raises(PermissionDenied):
        await ensure_node_consumer(await nats.connect("lifecycle"), POOL, "n2")


async def test_service_makes_its_own_consumer_again_and_no_other(nats: NatsPlatform) -> None:
    await delete_consumer(await nats.connect(PROVISIONER), EVENTS, "placement")
    bus = await nats.connect("placement")
    assert await ensure_service_consumer(bus, "placement", ["berth.evt.*.job.*.admitted"])
    assert not await ensure_service_consumer(bus, "placement", ["berth.evt.*.job.*.admitted"])
    with pytest.raises(PermissionDenied):
        await jsapi.call(bus, f"CONSUMER.CREATE.{EVENTS}.audit", {"stream_name": EVENTS, "config": {}})


async def test_nobody_reads_the_replies_of_another(nats: NatsPlatform) -> None:
    spy = await nats.connect("gateway")
    overheard: list[CoreMessage] = []
    for subject in ("_INBOX_admission.>", "_INBOX.>", ">", "berth.req.*.admission.>"):
        await spy.subscribe_core(subject, overheard.append)
    await spy.flush()

    await jsapi.call(await nats.connect("admission"), f"STREAM.INFO.{EVENTS}")
    await spy.flush()

    assert overheard == []
    assert spy.counters.permission_errors == 4


async def answer(request: CoreMessage) -> bytes:
    return b"from " + request.subject.encode()


async def test_services_ask_each_other(nats: NatsPlatform) -> None:
    placement, gateway = await nats.connect("placement"), await nats.connect("gateway")
    await placement.serve("berth.req.default.placement.explain", answer)
    await placement.flush()
    reply = await gateway.request("berth.req.default.placement.explain")
    assert reply.data == b"from berth.req.default.placement.explain"


async def test_nodes_are_asked_and_ask_what_they_may(nats: NatsPlatform) -> None:
    fleet, inventory, gateway = [await nats.connect(user) for user in ("fleet", "inventory", "gateway")]
    await fleet.serve("berth.req.default.node.n1.logs", answer)
    await inventory.serve("berth.req.default.inventory.register", answer)
    await gateway.serve("berth.req.default.gateway.secrets", answer)
    await gateway.serve("berth.req.default.gateway.tokens", answer)
    for bus in (fleet, inventory, gateway):
        await bus.flush()

    assert (await gateway.request("berth.req.default.node.n1.logs")).data
    assert (await fleet.request("berth.req.default.inventory.register")).data
    assert (await fleet.request("berth.req.default.gateway.secrets")).data
    for forbidden in ("gateway.tokens", "placement.explain"):
        with pytest.raises(PermissionDenied):
            await fleet.request(f"berth.req.default.{forbidden}")


async def test_telemetry_of_nodes_reaches_inventory_only(nats: NatsPlatform) -> None:
    fleet, inventory, gateway = [await nats.connect(user) for user in ("fleet", "inventory", "gateway")]
    frames: list[CoreMessage] = []
    overheard: list[CoreMessage] = []
    await inventory.subscribe_core("berth.tel.default.*", frames.append)
    await gateway.subscribe_core("berth.tel.default.*", overheard.append)
    await inventory.flush()

    await fleet.publish_core("berth.tel.default.n1", b"frame")
    await fleet.flush()
    await inventory.flush()

    assert [frame.data for frame in frames] == [b"frame"]
    assert overheard == []


async def test_reports_of_nodes_are_stored_singly_and_as_atomic_batch_across_accounts(nats: NatsPlatform) -> None:
    publisher = Publisher(await nats.connect("fleet"))
    few = await publisher.publish(events(3, prefix="w", kind="worker"), 5)
    many = await publisher.publish(events(600, prefix="v", kind="worker"), 10)
    again = await publisher.publish(events(600, prefix="v", kind="worker"), 10)

    assert [result.seq for result in few + many] == list(range(1, 604))
    assert publisher.counters.batches == 1
    assert all(result.is_duplicate for result in again)


async def test_node_that_pulls_with_an_invented_reply_subject_stores_nothing(nats: NatsPlatform) -> None:
    """Inside one account the server would publish the pulled message on the reply subject, past all permissions."""
    await nats.add_nodes(["n1"])
    await Publisher(await nats.connect("lifecycle")).publish([a_command("n1", number) for number in range(5)], 5)
    fleet = await nats.connect("fleet")
    target = f"$JS.API.CONSUMER.MSG.NEXT.{COMMANDS}.{node_consumer(POOL, 'n1')}".encode()

    for reply in (b"berth.evt.default.job.forged.admitted", b"berth.cmd.default.n2.launch", b"berth.pub.forged"):
        await fleet.write(wire.encode_publish(target, reply, b"", b'{"batch":1,"expires":100000000}'))
    await fleet.flush()

    assert await stored_count(nats, EVENTS) == 0
    assert await stored_count(nats, COMMANDS) == 5


async def test_node_that_asks_with_an_invented_reply_subject_is_not_answered(nats: NatsPlatform) -> None:
    fleet, gateway = await nats.connect("fleet"), await nats.connect("gateway")
    asked: list[CoreMessage] = []

    async def remember(request: CoreMessage) -> bytes:
        asked.append(request)
        return b"{}"

    await gateway.serve("berth.req.default.gateway.secrets", remember)
    await gateway.serve("berth.req.default.gateway.tokens", remember)
    admission = await nats.connect("admission")
    await gateway.flush()

    await admission.publish_core("berth.req.default.gateway.tokens", b"", reply="berth.evt.default.job.x.submitted")
    await fleet.publish_core("berth.req.default.gateway.secrets", b"", reply="berth.evt.default.worker.x.started")
    await admission.flush()
    await fleet.flush()
    await gateway.flush()

    assert all(request.reply.startswith("_R_.") for request in asked)
    assert {event.subject for event in await _events(nats)} <= {"berth.evt.default.worker.x.started"}


async def _events(nats: NatsPlatform) -> list[CoreMessage]:
    async with Puller(await nats.connect("audit"), EVENTS, "audit") as puller:
        return [CoreMessage(message.subject, message.data) for message in await take(puller, 10, timeout=0.2)]


async def test_external_subscriber_hears_copies_with_their_sequence_and_can_send_nothing(nats: NatsPlatform) -> None:
    public = await nats.connect("public")
    copies: list[CoreMessage] = []
    await public.subscribe_core("berth.pub.>", copies.append)
    await public.flush()
    await Publisher(await nats.connect("lifecycle")).publish(events(20), 5)
    await public.flush()

    assert [copy.subject for copy in copies] == [f"berth.pub.default.job.j{number}.running" for number in range(20)]
    assert [copy.header("Nats-Sequence") for copy in copies] == [str(number) for number in range(1, 21)]
    assert copies[0].header("Nats-Msg-Id") == "j0.1.running"

    before = await stored_count(nats)
    target = f"$JS.API.CONSUMER.MSG.NEXT.{EVENTS}.audit".encode()
    forged = wire.encode_publish(target, b"berth.evt.default.job.forged.admitted", b"", b'{"batch":1}')
    await public.write(forged)
    for subject in ("berth.evt.default.job.x.submitted", "berth.pub.x", "berth.req.default.gateway.tokens"):
        with pytest.raises((PermissionDenied, DeadlineExceeded)):
            await public.request(subject, timeout=0.5)
    assert await stored_count(nats) == before


async def test_unknown_key_is_refused_at_once(nats: NatsPlatform, tmp_path: Path) -> None:
    stranger = generate_credentials(tmp_path / "keys").settings("audit", nats.server.url)
    async with asyncio.timeout(5):
        with pytest.raises(PermissionDenied):
            await Connection(stranger).open()
