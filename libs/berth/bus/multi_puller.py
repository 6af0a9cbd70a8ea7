"""Pulls hundreds of durable consumers in one process: the commands of many nodes.

One subscription, one open request per consumer, one `next` for all. The subject of a message says whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from berth.bus import jsapi, wire
from berth.bus.connection import Connection, Subscription
from berth.bus.errors import BusError, ConsumerMissing, DeadlineExceeded, Disconnected, TransientError
from berth.bus.message import Message, read_message
from berth.bus.puller import Inbox

log = logging.getLogger(__name__)

_ANSWER_GRACE_S = 2.0
_RESETS_AT_ONCE = 32
_RESET_ATTEMPTS = 5


@dataclass(slots=True)
class MultiPullCounters:
    """Counts since the puller was opened, over all consumers."""

    messages: int = 0
    missing: int = 0
    lost_requests: int = 0
    resets: int = 0
    garbled: int = 0


class _Lane:
    """One consumer: its open request, or when to ask again."""

    __slots__ = ("consumer", "deadline", "is_missing", "is_open", "remaining", "retry_at", "retry_delay_s", "token")

    def __init__(self, consumer: str, token: bytes) -> None:
        self.consumer = consumer
        self.token = token
        self.is_open = False
        self.is_missing = False
        self.remaining = 0
        self.deadline = 0.0
        self.retry_at = 0.0
        self.retry_delay_s = 0.0

    def postpone(self, now: float) -> None:
        self.is_open = False
        self.retry_delay_s = min(max(self.retry_delay_s * 2, 0.1), 5.0)
        self.retry_at = now + self.retry_delay_s * random.uniform(0.5, 1.0)


class MultiPuller:
    """Pulls many consumers of one stream. One task calls `next`.

    Args:
        batch: most messages of one request, per consumer.
        expires_s: how long the server keeps a request open; jittered, so that hundreds do not expire together. A
            request that reaches the server while its consumer is being deleted is lost without an answer, and made
            again after this time.
        resets_on_reconnect: after a reconnect let the server send again what was not acknowledged, at once instead of
            after `ack_wait`. The reader must tolerate repeats.
        on_missing: called with the names of consumers that do not exist (with back-off); it should provision them.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumers: Iterable[str] = (),
        *,
        batch: int = 64,
        expires_s: float = 15.0,
        resets_on_reconnect: bool = True,
        on_missing: Callable[[Sequence[str]], Awaitable[None]] | None = None,
    ) -> None:
        self.stream = stream
        self.counters = MultiPullCounters()
        self._bus = connection
        self._batch = batch
        self._expires_s = expires_s
        self._resets_on_reconnect = resets_on_reconnect
        self._on_missing = on_missing
        self._inbox = Inbox()
        self._prefix = f"{connection.new_inbox()}.".encode()
        self._subject_prefix = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.".encode()
        self._by_name: dict[bytes, _Lane] = {}
        self._by_token: dict[bytes, _Lane] = {}
        self._lane_count = 0
        self._subscription: Subscription | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._repair: asyncio.Task[None] | None = None
        self._unregister: list[Callable[[], None]] = []
        self._is_open = False
        self._is_paused = False
        for consumer in consumers:
            self._add_lane(consumer)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        self._subscription = await self._bus.subscribe_raw(f"{self._prefix.decode()}*", self._on_message)
        self._unregister = [self._bus.on_reconnect(self._on_reconnect), self._bus.on_disconnect(self._on_disconnect)]
        self._is_open = True
        self._tick()

    async def close(self) -> None:
        """Stop pulling. What was delivered and not acknowledged comes again to the next reader."""
        self._is_open = False
        for unregister in self._unregister:
            unregister()
        if self._timer is not None:
            self._timer.cancel()
        if self._repair is not None:
            self._repair.cancel()
            await asyncio.gather(self._repair, return_exceptions=True)
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        self._inbox.wake()

    # -- for the owner

    @property
    def consumers(self) -> list[str]:
        return [lane.consumer for lane in self._by_token.values()]

    @property
    def missing(self) -> list[str]:
        """Consumers that did not exist when they were asked last."""
        return [lane.consumer for lane in self._by_token.values() if lane.is_missing]

    def add(self, consumer: str) -> None:
        """Pull `consumer` too; no effect when it is pulled already."""
        if consumer.encode() not in self._by_name:
            self._add_lane(consumer)
            self._top_up()

    def remove(self, consumer: str) -> None:
        """Stop pulling `consumer`. Its open request stays with the server until it expires; what it brings is dropped
        and comes again after `ack_wait` to whoever pulls it then."""
        lane = self._by_name.pop(consumer.encode(), None)
        if lane is not None:
            del self._by_token[lane.token]

    async def next(self, timeout: float, limit: int = 500) -> list[Message]:
        """What has arrived for all consumers, at most `limit`; waits up to `timeout` seconds only if there is nothing.

        In order per consumer. Empty when nothing came.
        """
        if not self._inbox.messages:
            await self._inbox.wait(timeout)
        return self._inbox.take(limit)

    def wake(self) -> None:
        """Make a waiting `next` return with what there is, or the next one not wait."""
        self._inbox.poke()

    def ack(self, messages: Sequence[Message]) -> None:
        """Acknowledge, without waiting for the server."""
        if messages:
            with contextlib.suppress(Disconnected):
                self._bus.write_nowait(wire.encode_acks([message.ack_subject for message in messages]))

    # -- pulling

    def _add_lane(self, consumer: str) -> None:
        self._lane_count += 1
        lane = _Lane(consumer, self._prefix + b"%d" % self._lane_count)
        self._by_name[consumer.encode()] = lane
        self._by_token[lane.token] = lane

    def _top_up(self) -> None:
        """Open a request for every consumer that has none and may be asked."""
        if not self._is_open or self._is_paused or not self._bus.is_connected:
            return
        now = asyncio.get_running_loop().time()
        blob = [
            self._request(lane, now) for lane in self._by_token.values() if not lane.is_open and lane.retry_at <= now
        ]
        if blob:
            self._bus.write_nowait(b"".join(blob))

    def _request(self, lane: _Lane, now: float) -> bytes:
        expires_s = self._expires_s * random.uniform(0.8, 1.2)
        lane.is_open = True
        lane.remaining = self._batch
        lane.deadline = now + expires_s + _ANSWER_GRACE_S
        body = b'{"batch":%d,"expires":%d}' % (self._batch, int(expires_s * 1e9))
        return wire.encode_publish(self._subject_prefix + lane.consumer.encode(), lane.token, b"", body)

    def _ask_again(self, lane: _Lane) -> None:
        lane.is_open = False
        if self._is_open and not self._is_paused and self._bus.is_connected:
            self._bus.write_nowait(self._request(lane, asyncio.get_running_loop().time()))

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        if subject.startswith(self._prefix):
            lane = self._by_token.get(subject)
            if lane is not None:
                self._on_status(lane, *wire.parse_status(raw_headers))
            return
        try:
            message = read_message(subject, reply, data, raw_headers)
        except ValueError:
            self.counters.garbled += 1
            return
        lane = self._by_name.get(message.consumer.encode())
        if lane is None:
            return
        lane.is_missing = False
        lane.retry_delay_s = 0.0
        lane.remaining -= 1
        if lane.remaining == 0:
            self._ask_again(lane)
        self.counters.messages += 1
        self._inbox.messages.append(message)
        self._inbox.wake()

    def _on_status(self, lane: _Lane, code: int, text: str) -> None:
        if code == 100:
            return
        now = asyncio.get_running_loop().time()
        if code == 503 or (code == 409 and "deleted" in text.lower()):
            self.counters.missing += 1
            lane.is_missing = True
            lane.postpone(now)
        elif code == 409:
            lane.postpone(now)
        else:
            lane.is_missing = False
            lane.retry_delay_s = 0.0
            self._ask_again(lane)

    # -- trouble

    def _tick(self) -> None:
        """Ask again for what is due, forget requests that were lost, have missing consumers provisioned."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        missing: list[str] = []
        for lane in self._by_token.values():
            if lane.is_open and lane.deadline < now:
                lane.is_open = False
                self.counters.lost_requests += 1
            elif lane.is_missing and not lane.is_open:
                missing.append(lane.consumer)
        if missing and self._on_missing is not None and self._bus.is_connected:
            self._start_repair(self._provision(missing))
        self._top_up()
        self._timer = loop.call_later(0.5, self._tick)

    async def _provision(self, missing: Sequence[str]) -> None:
        assert self._on_missing is not None
        try:
            await self._on_missing(missing)
        except BusError as error:
            log.warning("%s consumers of %s are missing: %s", len(missing), self.stream, error)

    def _start_repair(self, work: Awaitable[None]) -> None:
        if self._repair is None or self._repair.done():
            self._repair = asyncio.ensure_future(work)
        elif asyncio.iscoroutine(work):
            work.close()

    def _on_disconnect(self) -> None:
        self._is_paused = True
        if self._repair is not None:
            self._repair.cancel()
            self._repair = None

    def _on_reconnect(self) -> None:
        for lane in self._by_token.values():
            lane.is_open = False
            lane.retry_at = 0.0
        if self._resets_on_reconnect:
            self._start_repair(self._reset_all())
        else:
            self._is_paused = False
            self._top_up()

    async def _is_missing(self, lane: _Lane) -> bool:
        try:
            await jsapi.call(self._bus, f"CONSUMER.INFO.{self.stream}.{lane.consumer}", timeout=2.0)
        except ConsumerMissing:
            return True
        except BusError:
            return False
        return False

    async def _reset_all(self) -> None:
        limit = asyncio.Semaphore(_RESETS_AT_ONCE)

        async def reset(lane: _Lane) -> None:
            async with limit:
                for _ in range(_RESET_ATTEMPTS):
                    try:
                        await jsapi.call(self._bus, f"CONSUMER.RESET.{self.stream}.{lane.consumer}", timeout=1.0)
                        self.counters.resets += 1
                        return
                    except DeadlineExceeded:
                        if await self._is_missing(lane):
                            return  # a reset of a missing consumer gets no answer; the pull request finds out
                    except TransientError as error:
                        log.debug("reset of %s: %s", lane.consumer, error)
                        await asyncio.sleep(0.2)
                    except BusError as error:
                        log.warning("reset of %s is refused: %s", lane.consumer, error)
                        return

        await asyncio.gather(*(reset(lane) for lane in list(self._by_token.values())))
        self._is_paused = False
        self._top_up()
