"""Publishes to streams: all or nothing in batches, in order, with a deadline, and safe to repeat.

With `sync_interval: always` a stream syncs the disk once per atomic batch instead of once per message, which makes
batches ten times faster from about 16 messages on; fewer are sent one by one without waiting in between. nats-py's
`publish_async` is not used: its futures hang when the connection breaks or the stream is full.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from berth.bus import jsapi, wire
from berth.bus.connection import Connection, Reply
from berth.bus.errors import (
    BusError,
    DeadlineExceeded,
    Disconnected,
    NoStream,
    PermissionDenied,
    PublishRefused,
    ServerBusy,
    TransientError,
)

log = logging.getLogger(__name__)

ATOMIC_FROM = 16
"""So many messages make an atomic batch cheaper than single ones (an atomic batch costs about 3 ms of disk)."""
BATCH_LIMIT = 1000
"""The server's limit of messages in one atomic batch."""
_BATCH_BYTES = 8 << 20
_WINDOW = 256
_SINGLE_TIMEOUT_S = 2.0
_BATCH_TIMEOUT_S = 5.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 1.0
_BATCH_FIELDS = 120
"""Bytes that the three batch headers may add to a message."""


@dataclass(slots=True)
class Outgoing:
    """A message to store. `msg_id` makes repeats harmless; it is the event id."""

    subject: str
    data: bytes
    msg_id: str
    headers: Mapping[str, str] | None = None


@dataclass(slots=True)
class PubResult:
    """What became of one message: stored (`error` is None), or why it is not known to be."""

    stream: str = ""
    seq: int = 0
    """Position in the stream; of the first copy when `is_duplicate`."""
    is_duplicate: bool = False
    error: BusError | None = None

    @property
    def is_stored(self) -> bool:
        return self.error is None


@dataclass(slots=True)
class PublishCounters:
    """Counts since the publisher was made."""

    stored: int = 0
    duplicates: int = 0
    batches: int = 0
    batch_duplicates: int = 0
    """Batches the server refused because it knew one of the ids (10201)."""
    retries: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Item:
    """A message being published."""

    subject: str
    fields: bytes
    data: bytes
    result: PubResult
    is_done: bool = False
    error: BusError | None = None
    """Why the last attempt did not succeed."""

    def store(self, stream: str, seq: int, is_duplicate: bool = False) -> None:
        self.result.stream, self.result.seq, self.result.is_duplicate = stream, seq, is_duplicate
        self.is_done = True

    def refuse(self, error: BusError) -> None:
        self.result.error = error
        self.is_done = True


@dataclass(slots=True)
class _Lane:
    """The messages for one stream, in order."""

    prefix: str
    items: list[_Item] = field(default_factory=list)


class Publisher:
    """Publishes over one connection; calls may overlap, order holds within one call and stream.

    Args:
        streams: subject prefixes, one per stream, in the order in which streams are sent to (facts before commands).
        atomic_from: smallest number of messages for one stream that is sent as atomic batch.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        streams: Sequence[str] = ("berth.evt.", "berth.cmd."),
        atomic_from: int = ATOMIC_FROM,
    ) -> None:
        self.counters = PublishCounters()
        self._bus = connection
        self._prefixes = tuple(streams)
        self._atomic_from = atomic_from
        self._without_atomic: set[str] = set()

    async def publish(self, items: Sequence[Outgoing], deadline_s: float) -> list[PubResult]:
        """Store `items`; results are in their order. Transient trouble is retried until `deadline_s` seconds passed.

        A message whose result is a `TransientError` may still have been stored: publish it again with the same id.
        A message that can never be stored (`PublishRefused`, `PermissionDenied`) does not hold up the others.
        While a window of fewer than `atomic_from` messages meets a full stream, a later one may be stored before an
        earlier one is; readers compare entity versions. Atomic batches and broken connections keep order.
        """
        deadline = asyncio.get_running_loop().time() + deadline_s
        results: list[PubResult] = []
        lanes: dict[str, _Lane] = {}
        for outgoing in items:
            result = PubResult()
            results.append(result)
            item = self._prepare(outgoing, result)
            if item is not None:
                prefix = next((p for p in self._prefixes if outgoing.subject.startswith(p)), "")
                lane = lanes.get(prefix)
                if lane is None:
                    lane = lanes[prefix] = _Lane(prefix)
                lane.items.append(item)
        ordered = [lanes[prefix] for prefix in (*self._prefixes, "") if prefix in lanes]
        if len(ordered) == 1:
            await self._publish_lane(ordered[0], deadline)
        elif ordered:
            await asyncio.gather(*(self._publish_lane(lane, deadline) for lane in ordered))
        self._count(results)
        return results

    def _prepare(self, outgoing: Outgoing, result: PubResult) -> _Item | None:
        subject = outgoing.subject
        try:
            headers = {"Nats-Msg-Id": outgoing.msg_id, **outgoing.headers} if outgoing.headers else None
            fields = wire.encode_headers(headers if headers is not None else {"Nats-Msg-Id": outgoing.msg_id})
        except ValueError as error:
            result.error = PublishRefused(0, str(error))
            return None
        size = len(fields) + len(outgoing.data) + _BATCH_FIELDS
        if not wire.is_publishable(subject):
            result.error = PublishRefused(0, f"bad subject {subject!r}")
        elif size > self._bus.max_payload_bytes:
            result.error = PublishRefused(0, f"{outgoing.msg_id} has {size} bytes, limit {self._bus.max_payload_bytes}")
        else:
            return _Item(subject, fields, outgoing.data, result)
        return None

    def _count(self, results: Sequence[PubResult]) -> None:
        for result in results:
            if result.error is not None:
                self.counters.failed += 1
            else:
                self.counters.stored += 1
                self.counters.duplicates += result.is_duplicate

    # -- one stream

    async def _publish_lane(self, lane: _Lane, deadline: float) -> None:
        """Chunk after chunk, so that nothing overtakes; what is left at the deadline fails with its last error."""
        for chunk in _chunks(lane.items):
            await self._publish_chunk(lane, chunk, deadline)

    async def _publish_chunk(self, lane: _Lane, chunk: list[_Item], deadline: float) -> None:
        loop = asyncio.get_running_loop()
        atomic = len(chunk) >= self._atomic_from and lane.prefix not in self._without_atomic
        delay_s = _FIRST_RETRY_S
        while chunk:
            left_s = deadline - loop.time()
            if left_s <= 0:
                for item in chunk:
                    item.refuse(item.error or DeadlineExceeded("deadline passed before it could be sent"))
                return
            try:
                if not self._bus.is_connected:
                    await self._bus.wait_connected(left_s)
                if atomic:
                    atomic = await self._try_batch(lane, chunk, deadline)
                else:
                    await self._try_singly(chunk, deadline)
            except TransientError as error:
                for item in chunk:
                    item.error = error
            remaining = [item for item in chunk if not item.is_done]
            if len(remaining) == len(chunk):
                self.counters.retries += 1
                await asyncio.sleep(min(delay_s * random.uniform(0.5, 1.0), max(deadline - loop.time(), 0)))
                delay_s = min(delay_s * 2, _LAST_RETRY_S)
            chunk = remaining
            atomic = atomic and len(chunk) >= self._atomic_from

    async def _try_batch(self, lane: _Lane, chunk: list[_Item], deadline: float) -> bool:
        """Send `chunk` as one atomic batch; whether to try it as a batch again if it was not stored.

        Error 10201 says that the server knows at least one id: usually an earlier attempt of this very batch, whose
        answer was lost, or the sweeper. Which of the ids is not said, so all are sent singly; what is stored already
        answers `duplicate` without touching the disk.
        """
        reply, answer = self._bus.replies.expect("")
        denied: set[str] = set()

        def on_denied(subject: str) -> None:
            if any(item.subject.lower() == subject for item in chunk):
                denied.add(subject)
                if not answer.done():
                    answer.set_exception(PermissionDenied(subject))

        unregister = self._bus.on_permission_error(on_denied)
        try:
            await self._bus.write(_encode_batch(chunk, reply))
            acknowledgement = _read_ack(await _within(answer, _BATCH_TIMEOUT_S, deadline))
        except PermissionDenied:
            await self._bus.flush()  # more refusals may be on their way
            for item in chunk:
                if item.subject.lower() in denied:
                    item.refuse(PermissionDenied(item.subject))
            return True
        finally:
            unregister()
            self._bus.replies.forget(reply)
        if isinstance(acknowledgement, PublishRefused):
            if acknowledgement.code == jsapi.BATCH_HAS_DUPLICATE:
                self.counters.batch_duplicates += 1
            elif acknowledgement.code == jsapi.ATOMIC_DISABLED:
                self._without_atomic.add(lane.prefix)
            await self._try_singly(chunk, deadline)
            return False
        if isinstance(acknowledgement, BusError):
            raise acknowledgement
        stream, last_seq, _ = acknowledgement
        self.counters.batches += 1
        for seq, item in enumerate(chunk, last_seq - len(chunk) + 1):
            item.store(stream, seq)
        return True

    async def _try_singly(self, chunk: list[_Item], deadline: float) -> None:
        """Send each message with its own acknowledgement, a window at a time without waiting in between."""
        for start in range(0, len(chunk), _WINDOW):
            window = [item for item in chunk[start : start + _WINDOW] if not item.is_done]
            await self._try_window(window, deadline)
            if any(not item.is_done for item in window):
                return  # what follows must not overtake

    async def _try_window(self, window: list[_Item], deadline: float) -> None:
        waiting: list[tuple[_Item, bytes, asyncio.Future[Reply]]] = []
        blob: list[bytes] = []
        for item in window:
            reply, answer = self._bus.replies.expect(item.subject)
            waiting.append((item, reply, answer))
            blob.append(wire.encode_publish(item.subject.encode(), reply, item.fields, item.data))
        try:
            await self._bus.write(b"".join(blob))
            left_s = deadline - asyncio.get_running_loop().time()
            await asyncio.wait([answer for _, _, answer in waiting], timeout=max(min(_SINGLE_TIMEOUT_S, left_s), 0))
        finally:
            for _, reply, _ in waiting:
                self._bus.replies.forget(reply)
        for item, _, answer in waiting:
            _settle(item, answer)


def _chunks(items: list[_Item]) -> list[list[_Item]]:
    """Split into atomic batches by count and bytes."""
    chunks: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        size += len(item.data) + len(item.fields)
        if len(chunks[-1]) == BATCH_LIMIT or (size > _BATCH_BYTES and chunks[-1]):
            chunks.append([])
            size = len(item.data) + len(item.fields)
        chunks[-1].append(item)
    return chunks


def _encode_batch(chunk: Sequence[_Item], reply: bytes) -> bytes:
    """Protocol lines of one atomic batch (ADR-50); only the last asks for an answer and commits."""
    # A new id each time, because the server may still hold half of the last attempt; short, because it is stored with
    # every message.
    batch_id = secrets.token_urlsafe(9).encode()
    last = len(chunk)
    lines = []
    for number, item in enumerate(chunk, 1):
        commit = b"Nats-Batch-Commit: 1\r\n" if number == last else b""
        fields = b"Nats-Batch-Id: %b\r\nNats-Batch-Sequence: %d\r\n%b%b" % (batch_id, number, commit, item.fields)
        lines.append(wire.encode_publish(item.subject.encode(), reply if commit else b"", fields, item.data))
    return b"".join(lines)


async def _within(answer: asyncio.Future[Reply], attempt_s: float, deadline: float) -> Reply:
    left_s = deadline - asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(max(min(attempt_s, left_s), 0)):
            return await answer
    except TimeoutError:
        raise DeadlineExceeded("no acknowledgement in time") from None


def _read_ack(reply: Reply) -> tuple[str, int, bool] | BusError:
    """Stream, sequence and whether it was known already; or what the answer says went wrong."""
    if wire.parse_status(reply.raw_headers)[0] == 503:
        return NoStream("no stream answers for the subject")
    try:
        body = orjson.loads(reply.data)
        if "error" in body:
            return jsapi.publish_error(body["error"])
        return str(body["stream"]), int(body["seq"]), bool(body.get("duplicate", False))
    except (ValueError, KeyError, TypeError):
        return ServerBusy(f"unreadable acknowledgement {reply.data[:80]!r}")


def _settle(item: _Item, answer: asyncio.Future[Reply]) -> None:
    if not answer.done():
        answer.cancel()
        item.error = DeadlineExceeded("no acknowledgement in time")
        return
    error = answer.exception()
    if error is not None:
        if isinstance(error, TransientError):
            item.error = error
        else:
            item.refuse(error if isinstance(error, BusError) else Disconnected(str(error)))
        return
    acknowledgement = _read_ack(answer.result())
    if isinstance(acknowledgement, TransientError):
        item.error = acknowledgement
    elif isinstance(acknowledgement, BusError):
        item.refuse(acknowledgement)
    else:
        item.store(*acknowledgement)
