"""The streams and durable consumers, declared once and brought about idempotently.

Streams are made by the provisioning user only. What differs from the declaration is corrected where the server allows
it, and reported either way.

Consumers live in the server's memory. Their state is worth nothing to us on disk (a service stores its position with
its effects, an agent the commands it knows), and with `sync_interval: always` the server syncs it two or three times for
each acknowledgement: 3 of the 4 syncs that a job cost before. So a server that restarts has no consumers: each service
makes its own again (`ensure_service_consumer`), inventory those of the nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from berth.bus import jsapi
from berth.bus.connection import Connection
from berth.bus.errors import ConsumerMissing, NoStream, ProvisionError

EVENTS = "BERTH_EVENTS"
COMMANDS = "BERTH_COMMANDS"
PUBLIC_PREFIX = "berth.pub"
ACK_WAIT_S = 15.0
"""Its only job is to notice a crashed reader; others reset the consumer instead of waiting."""
BATCH = 500
MAX_ACK_PENDING = 4 * BATCH
NODE_MAX_ACK_PENDING = 256
SHARED_CONSUMERS = ("gateway",)
"""Services of which several instances read one consumer."""
MIN_API_LEVEL = 4
"""Of the server: consumer reset (2.14) and everything before it."""
_REQUESTS_AT_ONCE = 64
COMMANDS_KEPT_S = 120.0
"""Commands expire within a minute, and their sender asks again; there is no need to keep them for longer."""
_FIXED = ("ack_policy", "deliver_policy", "replay_policy", "mem_storage")
"""What the server never changes in an existing consumer."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream as it should be. Durations in seconds, sizes in bytes, -1 for no limit."""

    name: str
    subjects: tuple[str, ...]
    retention: str = "limits"
    max_age_s: float = 0.0
    max_bytes: int = -1
    max_consumers: int = -1
    duplicate_window_s: float = 120.0
    replicas: int = 1
    allow_atomic: bool = True
    republish: tuple[str, str] | None = None
    """Source pattern and destination of copies for external subscribers."""

    def config(self) -> dict[str, Any]:
        """What the JetStream API wants."""
        config: dict[str, Any] = {
            "name": self.name,
            "subjects": list(self.subjects),
            "retention": self.retention,
            "storage": "file",
            "discard": "new",
            "max_age": _nanoseconds(self.max_age_s),
            "max_bytes": self.max_bytes,
            "max_msgs": -1,
            "max_msgs_per_subject": -1,
            "max_msg_size": -1,
            "max_consumers": self.max_consumers,
            "num_replicas": self.replicas,
            "duplicate_window": _nanoseconds(self.duplicate_window_s),
            "allow_direct": True,
            "allow_atomic": self.allow_atomic,
            "deny_delete": self.retention == "limits",
        }
        if self.republish is not None:
            config["republish"] = {"src": self.republish[0], "dest": self.republish[1]}
        return config


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A durable pull consumer as it should be; no filter means every subject of the stream."""

    stream: str
    name: str
    filter_subjects: tuple[str, ...] = ()
    ack_wait_s: float = ACK_WAIT_S
    max_ack_pending: int = MAX_ACK_PENDING
    ack_all: bool = False

    def config(self) -> dict[str, Any]:
        """What the JetStream API wants. Never gives up on a message: `max_deliver` -1."""
        config: dict[str, Any] = {
            "durable_name": self.name,
            "name": self.name,
            "deliver_policy": "all",
            "ack_policy": "all" if self.ack_all else "explicit",
            "ack_wait": _nanoseconds(self.ack_wait_s),
            "max_deliver": -1,
            "max_ack_pending": self.max_ack_pending,
            "replay_policy": "instant",
            "mem_storage": True,
        }
        if len(self.filter_subjects) == 1:
            config["filter_subject"] = self.filter_subjects[0]
        elif self.filter_subjects:
            config["filter_subjects"] = list(self.filter_subjects)
        return config


@dataclass(frozen=True, slots=True)
class Topology:
    """Everything that must exist before services start; streams first."""

    streams: tuple[StreamSpec, ...]
    consumers: tuple[ConsumerSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Drift:
    """One setting that was found different from its declaration."""

    kind: str
    name: str
    setting: str
    wanted: object
    found: object

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.setting} is {self.found!r}, declared {self.wanted!r}"


@dataclass(slots=True)
class ProvisionReport:
    """What `provision` found and did; `drift` is empty on a second run."""

    created: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """Consumers whose change needed a new one; they start from the beginning, or where their reader resets them."""
    drift: list[Drift] = field(default_factory=list)

    @property
    def has_changed(self) -> bool:
        return bool(self.created or self.updated or self.replaced)


def berth_topology(
    filters: Mapping[str, Sequence[str]],
    *,
    replicas: int = 1,
    events_max_bytes: int = 4 << 30,
    commands_max_bytes: int = 1 << 30,
) -> Topology:
    """The real streams, and one durable consumer per service on the events.

    Args:
        filters: service -> subjects it reads (`berth.evt.*.job.*.submitted`); empty reads everything. They may not
            overlap within one service.

    All but the gateway's consumer have one reader, which takes everything in order; there one acknowledgement counts
    for all before it, which saves about 6 us of processor time for each message.

    Commands are kept by time, not as a work queue: there each acknowledgement takes its message out of the file, which
    is a sync of its own. A node that gets one again (after a restart of the server) knows its id.
    """
    return Topology(
        streams=(
            StreamSpec(
                EVENTS,
                ("berth.evt.>",),
                max_age_s=7 * 24 * 3600,
                max_bytes=events_max_bytes,
                replicas=replicas,
                republish=("berth.evt.>", f"{PUBLIC_PREFIX}.>"),
            ),
            StreamSpec(
                COMMANDS,
                ("berth.cmd.>",),
                max_age_s=COMMANDS_KEPT_S,
                max_bytes=commands_max_bytes,
                max_consumers=8192,
                replicas=replicas,
            ),
        ),
        consumers=tuple(service_consumer(service, subjects) for service, subjects in filters.items()),
    )


def service_consumer(service: str, filters: Sequence[str]) -> ConsumerSpec:
    """A service's durable consumer on the events; no filters read everything."""
    return ConsumerSpec(EVENTS, service, tuple(filters), ack_all=service not in SHARED_CONSUMERS)


async def ensure_service_consumer(connection: Connection, service: str, filters: Sequence[str]) -> bool:
    """Make a service's own consumer where there is none; whether it was new. It begins at the start of the stream."""
    if await _consumer_config(connection, EVENTS, service) is not None:
        return False
    await _create_consumer(connection, service_consumer(service, filters), "create")
    return True


async def provision(connection: Connection, topology: Topology, *, corrects: bool = True) -> ProvisionReport:
    """Create what is missing and correct what differs; with `corrects` off only report the difference.

    Idempotent. Consumers that are not declared are left alone.

    Raises:
        ProvisionError: the server is too old, or refuses a change (a stream's retention and storage are fixed).
    """
    await _check_server(connection)
    report = ProvisionReport()
    for stream in topology.streams:
        await _provision_stream(connection, stream, report, corrects=corrects)
    await _all(_provision_consumer(connection, consumer, report, corrects=corrects) for consumer in topology.consumers)
    return report


def node_consumer(pool: str, node: str) -> str:
    """Name of a node's durable consumer; `=` occurs in no pool or node name, so two nodes never share one."""
    return f"{pool}={node}"


async def ensure_node_consumer(connection: Connection, pool: str, node: str) -> bool:
    """Make the node's consumer on the commands; whether it was new."""
    return bool(await ensure_node_consumers(connection, pool, [node]))


async def ensure_node_consumers(connection: Connection, pool: str, nodes: Iterable[str]) -> list[str]:
    """Make one durable consumer for each node on the commands; returns the nodes that had none.

    Costs about 1.5 ms per new consumer, and one request per 1,024 existing ones.
    """
    wanted = {node_consumer(pool, node): node for node in nodes}
    existing = (
        await consumer_names(connection, COMMANDS)
        if len(wanted) > 1
        else {name for name in wanted if await _consumer_config(connection, COMMANDS, name) is not None}
    )
    missing = [name for name in wanted if name not in existing]
    await _all(
        _create_consumer(
            connection,
            ConsumerSpec(
                COMMANDS,
                name,
                (f"berth.cmd.{pool}.{wanted[name]}.>",),
                max_ack_pending=NODE_MAX_ACK_PENDING,
            ),
            "create",
        )
        for name in missing
    )
    return [wanted[name] for name in missing]


async def delete_consumer(connection: Connection, stream: str, consumer: str) -> None:
    """Remove a consumer (a node that has left for good); no error when it is gone already."""
    try:
        await jsapi.call(connection, f"CONSUMER.DELETE.{stream}.{consumer}")
    except ConsumerMissing:
        return


async def consumer_names(connection: Connection, stream: str) -> set[str]:
    """Names of all consumers of a stream."""
    names: set[str] = set()
    while True:
        page = await jsapi.call(connection, f"CONSUMER.NAMES.{stream}", {"offset": len(names)})
        found = page.get("consumers") or []
        names.update(found)
        if not found or len(names) >= int(page["total"]):
            return names


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Where a consumer stands, for metrics and health."""

    pending: int
    """Stored messages it has not been sent yet."""
    ack_pending: int
    redelivered: int
    ack_floor: int
    """Stream sequence up to which everything is acknowledged."""


async def consumer_state(connection: Connection, stream: str, consumer: str) -> ConsumerState:
    """Ask the server where `consumer` stands."""
    info = await jsapi.call(connection, f"CONSUMER.INFO.{stream}.{consumer}")
    return ConsumerState(
        pending=int(info["num_pending"]),
        ack_pending=int(info["num_ack_pending"]),
        redelivered=int(info["num_redelivered"]),
        ack_floor=int(info["ack_floor"]["stream_seq"]),
    )


async def _check_server(connection: Connection) -> None:
    level = int((await jsapi.call(connection, "INFO")).get("api", {}).get("level", 0))
    if level < MIN_API_LEVEL:
        raise ProvisionError(0, f"JetStream API level {level} of the server is below {MIN_API_LEVEL}")


async def _provision_stream(
    connection: Connection, spec: StreamSpec, report: ProvisionReport, *, corrects: bool
) -> None:
    wanted = spec.config()
    try:
        found = (await jsapi.call(connection, f"STREAM.INFO.{spec.name}"))["config"]
    except NoStream:
        if corrects:
            await jsapi.call(connection, f"STREAM.CREATE.{spec.name}", wanted, timeout=10)
            report.created.append(f"stream {spec.name}")
        else:
            report.drift.append(Drift("stream", spec.name, "exists", True, False))
        return
    drift = _differences("stream", spec.name, wanted, found)
    report.drift += drift
    if drift and corrects:
        await jsapi.call(connection, f"STREAM.UPDATE.{spec.name}", wanted, timeout=10)
        report.updated.append(f"stream {spec.name}")


async def _provision_consumer(
    connection: Connection, spec: ConsumerSpec, report: ProvisionReport, *, corrects: bool
) -> None:
    found = await _consumer_config(connection, spec.stream, spec.name)
    if found is None:
        if corrects:
            await _create_consumer(connection, spec, "create")
            report.created.append(f"consumer {spec.name}")
        else:
            report.drift.append(Drift("consumer", spec.name, "exists", True, False))
        return
    wanted = {"filter_subject": "", "filter_subjects": [], **spec.config()}
    drift = _differences("consumer", spec.name, wanted, found)
    report.drift += drift
    if not (drift and corrects):
        return
    if any(change.setting in _FIXED for change in drift):
        await delete_consumer(connection, spec.stream, spec.name)
        await _create_consumer(connection, spec, "create")
        report.replaced.append(f"consumer {spec.name}")
    else:
        await _create_consumer(connection, spec, "update")
        report.updated.append(f"consumer {spec.name}")


async def _create_consumer(connection: Connection, spec: ConsumerSpec, action: str) -> None:
    body = {"stream_name": spec.stream, "config": spec.config(), "action": action}
    await jsapi.call(connection, f"CONSUMER.CREATE.{spec.stream}.{spec.name}", body, timeout=10)


async def _consumer_config(connection: Connection, stream: str, name: str) -> dict[str, Any] | None:
    try:
        config: dict[str, Any] = (await jsapi.call(connection, f"CONSUMER.INFO.{stream}.{name}"))["config"]
    except ConsumerMissing:
        return None
    return config


def _differences(kind: str, name: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[Drift]:
    """Settings whose found value is not the wanted one; the server leaves out what is zero, false or empty."""
    return [
        Drift(kind, name, setting, value, found.get(setting))
        for setting, value in wanted.items()
        if _comparable(found.get(setting)) != _comparable(value)
    ]


def _comparable(value: object) -> object:
    return sorted(value) if isinstance(value, list) and value else value or None


async def _all(calls: Iterable[Any]) -> None:
    """Run API calls, a bounded number at a time."""
    limit = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def bounded(call: Any) -> None:
        async with limit:
            await call

    await asyncio.gather(*(bounded(call) for call in calls))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
