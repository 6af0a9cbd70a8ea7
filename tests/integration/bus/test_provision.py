"""Streams and consumers: made once, corrected when they differ, never by halves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from berth.bus import ProvisionError, jsapi
from berth.bus.permissions import PROVISIONER
from berth.bus.provision import COMMANDS, EVENTS, ConsumerSpec, Topology, berth_topology, consumer_names, provision
from berth.testing.servers import NatsPlatform, provision_anew

FILTERS = {
    "gateway": ["berth.evt.*.job.>", "berth.evt.*.node.>"],
    "audit": [],
    "inventory": ["berth.evt.*.node.*.lost"],
}


async def test_second_run_changes_nothing(nats: NatsPlatform) -> None:
    await provision_anew(nats.server, FILTERS)
    report = await provision(await nats.connect(PROVISIONER), berth_topology(FILTERS))
    assert not report.has_changed
    assert report.drift == []


async def test_streams_are_as_the_design_wants_them(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    events = (await jsapi.call(admin, f"STREAM.INFO.{EVENTS}"))["config"]
    commands = (await jsapi.call(admin, f"STREAM.INFO.{COMMANDS}"))["config"]

    assert events["subjects"] == ["berth.evt.>"]
    assert (events["retention"], events["discard"], events["storage"]) == ("limits", "new", "file")
    assert events["max_age"] == 7 * 24 * 3600 * 10**9
    assert events["max_bytes"] > 0
    assert events["allow_atomic"] and events["allow_direct"] and events["deny_delete"]
    assert events["republish"] == {"src": "berth.evt.>", "dest": "berth.pub.>"}
    assert (commands["retention"], commands["max_consumers"]) == ("limits", 8192)
    assert commands["max_age"] == 120 * 10**9
    assert commands["allow_atomic"]


async def test_consumers_never_give_up_on_a_message(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    for service, policy in (("placement", "all"), ("gateway", "explicit")):
        config = (await jsapi.call(admin, f"CONSUMER.INFO.{EVENTS}.{service}"))["config"]
        assert config["max_deliver"] == -1
        assert (config["ack_policy"], config["ack_wait"], config["max_ack_pending"]) == (policy, 15 * 10**9, 2000)


async def test_drift_is_reported_and_corrected(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    changed = berth_topology({**FILTERS, "gateway": ["berth.evt.*.job.>"]}, events_max_bytes=1 << 30)
    await provision_anew(nats.server, FILTERS)

    seen = await provision(admin, changed, corrects=False)
    done = await provision(admin, changed)
    after = await provision(admin, changed)

    assert not seen.has_changed
    assert {(drift.name, drift.setting) for drift in seen.drift} == {
        (EVENTS, "max_bytes"),
        ("gateway", "filter_subject"),
        ("gateway", "filter_subjects"),
    }
    assert done.updated == [f"stream {EVENTS}", "consumer gateway"]
    assert after.drift == []


async def test_consumer_whose_change_needs_a_new_one_is_replaced(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    explicit = Topology((), (ConsumerSpec(EVENTS, "audit"),))

    assert (await provision(admin, explicit)).replaced == ["consumer audit"]
    assert (await provision(admin, explicit)).drift == []


async def test_missing_parts_are_reported_without_being_made_when_not_correcting(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    report = await provision(admin, Topology((), (ConsumerSpec(EVENTS, "serving"),)), corrects=False)
    assert [str(drift) for drift in report.drift] == ["consumer serving: exists is False, declared True"]
    assert "serving" not in await consumer_names(admin, EVENTS)


async def test_change_the_server_cannot_make_is_an_error(nats: NatsPlatform) -> None:
    topology = berth_topology({})
    with pytest.raises(ProvisionError):
        await provision(
            await nats.connect(PROVISIONER),
            replace(topology, streams=(replace(topology.streams[0], retention="workqueue"),)),
        )


async def test_undeclared_consumers_are_left_alone(nats: NatsPlatform) -> None:
    admin = await nats.connect(PROVISIONER)
    await provision(admin, Topology((), (ConsumerSpec(EVENTS, "serving"),)))
    await provision(admin, berth_topology(FILTERS))
    assert "serving" in await consumer_names(admin, EVENTS)
