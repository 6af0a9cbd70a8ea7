"""The loop every stateful service runs: take what has arrived, decide, commit, publish, acknowledge.

    pull what is there (never wait to fill a batch)
      -> one transaction: leader epoch, inbox, decide, records, outbox, position, commit log
      -> publish the outbox, in order
      -> acknowledge

PostgreSQL is the truth; the bus is a durable transport that can be read again from any position. So the loop can be
killed between any two of these steps and the effect is as if each message came once: before the commit nothing has
happened, after it the next leader publishes what is left in the outbox, and what is delivered again is in the inbox.

What fails:

* the world (database or bus away): the state in memory is dropped and loaded anew, and the same batch is tried again;
* the leadership: the loop ends, the process stands by;
* a message (not readable, contradicts itself, or makes the decision code raise, found by trying messages one by one):
  it is parked with its reason in the same transaction, and later messages of its entity behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

import orjson

from berth.bus.connection import Connection, CoreMessage, Subscription
from berth.bus.errors import TransientError as BusTransientError
from berth.bus.message import Message
from berth.bus.provision import ensure_service_consumer
from berth.bus.publisher import Outgoing, Publisher
from berth.bus.puller import Puller
from berth.contracts import subjects
from berth.contracts.consumers import consumer_filters
from berth.contracts.envelope import HEADER_ID, HEADER_TRACE
from berth.decisions.core import Emission
from berth.decisions.recording import Note
from berth.runtime.emissions import EmissionEncoder, Encoded
from berth.runtime.faults import fault_point
from berth.store.batch import BatchTransaction, CommitEntry, ParkedMessage
from berth.store.database import Database
from berth.store.errors import Deposed
from berth.store.errors import TransientError as StoreTransientError
from berth.store.leader import Leadership
from berth.store.outbox import OutboxRow
from berth.store.parked import Parked
from berth.store.recorded import CHECKPOINT_EVERY
from berth.telemetry.logs import get_logger
from berth.telemetry.metrics import PipelineMetrics
from berth.telemetry.tracing import batch_span

BATCH: Final = 500
IDLE_SECONDS: Final = 1.0
PUBLISH_DEADLINE_SECONDS: Final = 5.0
FIRST_RETRY_SECONDS: Final = 0.05
LAST_RETRY_SECONDS: Final = 2.0
RENEW_AFTER: Final = CHECKPOINT_EVERY + timedelta(minutes=1)
PATIENCE_FOR_QUIET: Final = timedelta(hours=1)
BUSY_FROM: Final = 32
BUSY_GATHER_SECONDS: Final = 0.02
"""A batch of so many messages says that more are coming, and then it pays to let them gather: each batch costs a sync of
the database's disk and up to four of the bus's, however many messages are in it. An idle service never waits."""
OFF_LOOP_FROM: Final = 8
"""A pass over so many messages runs in a thread, so that leases and health are answered meanwhile; below, the hop would
cost more than the pass."""

Answered = TypeVar("Answered")


class PoisonMessage(Exception):
    """A message that can never be taken in as it is; the operator gets it with this reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a handler wants done with a batch. records: (kind, key, body bytes; None deletes)."""

    emissions: Sequence[Emission] = ()
    records: Sequence[tuple[str, str, bytes | None]] = ()
    timers: int = 0


class BatchHandler(ABC):
    """What a service does with a batch: a decision core (`core_handler.CoreHandler`) or a projection."""

    filters: Sequence[str]
    """Subjects it takes in."""
    decisions_version: str = ""
    is_heavy: bool = False
    """Whether `settle` may take long enough to be moved off the event loop."""
    gather_seconds: float = 0.0
    """How long to let more messages come before a batch is begun. Only for readers that nobody waits for: they leave
    the processor and the disk to those on a job's path, and a transaction then covers many events."""

    is_recorded: bool = False
    """Whether it is made anew once a day, with a checkpoint of its records, at which a replay can begin."""

    @abstractmethod
    async def load(self, database: Database, *, now: datetime) -> None:
        """Read the stored state; called on a fresh handler, once."""

    @abstractmethod
    def apply(self, message: Message, *, now: datetime) -> None:
        """Take in one message that is new.

        Raises:
            PoisonMessage: it cannot be taken in; the state is unchanged.
        """

    @abstractmethod
    def settle(self, *, now: datetime) -> Outcome:
        """Decide on what was applied and on timers that are due."""

    async def write(self, tx: BatchTransaction) -> None:  # noqa: B027 - most have nothing of their own
        """Statements of the service's own, in the same transaction."""

    def given(self) -> list[bytes]:
        """Events, as JSON, that calls of `change` handed in since the last call: recorded, so that replay has them."""
        return []

    @property
    def settings(self) -> dict[str, Any]:
        """What decisions depend on besides events and records; recorded with each start."""
        return {}

    def next_timer(self) -> datetime | None:
        """When to settle without a message; None: never."""
        return None

    @property
    def policy_version(self) -> str:
        """Policy the last outcome was decided on."""
        return ""


H = TypeVar("H", bound=BatchHandler)


@dataclass(slots=True)
class _Call(Generic[H]):
    """A change asked for by request, carried out in the next batch and answered after its commit."""

    work: Callable[[H, datetime], Any]
    answer: asyncio.Future[Any]
    result: Any = None


@dataclass(slots=True)
class _Taken:
    """A message of the batch at hand."""

    message: Message
    event_id: str
    entity: str
    trace: str | None


@dataclass(slots=True)
class _Committed:
    """What is left to do after a commit."""

    encoded: list[Encoded] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)


class EventService(Generic[H]):
    """Runs one handler as leader of its pool; `run` returns only by cancellation or failure.

    Args:
        service: names the consumer, the lease, the spans and the fault points.
        make_handler: a fresh handler with no state; called at each start of leadership and after each failed commit.
        answers: verb -> function of a request on `berth.req.<pool>.<service>.<verb>`, served while leading.
    """

    def __init__(
        self,
        *,
        service: str,
        pool: str,
        make_handler: Callable[[], H],
        database: Database,
        connection: Connection,
        make_leadership: Callable[[], Leadership],
        metrics: PipelineMetrics,
        on_leading: Callable[[bool], None] = lambda _: None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._service = service
        self._pool = pool
        self._make_handler = make_handler
        self._database = database
        self._bus = connection
        self._publisher = Publisher(connection)
        self._make_leadership = make_leadership
        self._lost = asyncio.Event()
        self._metrics = metrics
        self._on_leading = on_leading
        self._clock = clock
        self._encoder = EmissionEncoder(service=service, pool=pool)
        self._log = get_logger(service)
        self._handler: H | None = None
        self._loaded_at: datetime | None = None  # when the handler was made from its records; None: it has committed
        self._made_at = self._clock()
        self._calls: list[_Call[H]] = []
        self._answers: dict[str, Callable[[CoreMessage], Awaitable[bytes]]] = {}
        self._lock = asyncio.Lock()
        self._puller: Puller | None = None
        self._epoch = 0
        self._position = 0

    # --- asked from outside -----------------------------------------------------------------------------------------

    def serve(self, verb: str, answer: Callable[[CoreMessage], Awaitable[bytes]]) -> None:
        """Answer requests on `berth.req.<pool>.<service>.<verb>` while leading."""
        self._answers[verb] = answer

    async def query(self, ask: Callable[[H], Answered]) -> Answered:
        """Ask the handler something between two batches.

        Raises:
            BusTransientError: this process does not lead at the moment.
        """
        async with self._lock:
            if self._handler is None:
                raise BusTransientError(f"{self._service} is not leading")
            return ask(self._handler)

    async def change(self, work: Callable[[H, datetime], Answered]) -> Answered:
        """Have the handler carry out `work` as part of the next batch; returns its result once that is committed."""
        call: _Call[H] = _Call(work, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self.wake()
        result: Answered = await call.answer
        return result

    def now_unlocked(self) -> H | None:
        """The handler while leading, for input that is recorded by its consequences only (readings, leases)."""
        return self._handler

    def wake(self) -> None:
        """Look at timers and calls now, not only when the next message comes."""
        if self._puller is not None:
            self._puller.wake()

    # --- leading ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stand by, lead, and stand by again when deposed."""
        while True:
            leadership = self._make_leadership()
            self._epoch = epoch = await leadership.acquired()
            self._lost = leadership.lost
            self._metrics.lease_epoch.set(epoch)
            self._log.info("leading", epoch=epoch)
            try:
                await self._lead(leadership)
            except Deposed as deposed:
                self._log.warning("deposed", reason=str(deposed))
            finally:
                self._handler = None
                self._metrics.lease_epoch.set(0)
                self._on_leading(False)
                self._fail_calls()
                await leadership.release()

    async def _lead(self, leadership: Leadership) -> None:
        handler = await self._loaded()
        async with contextlib.AsyncExitStack() as stack:
            self._position = await self._database.position(self._service, subjects.EVENTS_STREAM)
            puller = Puller(
                self._bus,
                subjects.EVENTS_STREAM,
                self._service,
                batch=BATCH,
                contiguous=True,
                may_reset=leadership.confirmed,
                on_missing=self._make_consumer,
            )
            await self._make_consumer()
            await puller.open(after=self._position)
            stack.push_async_callback(puller.close)
            self._puller = puller
            stack.callback(self._forget_puller)
            lost = asyncio.ensure_future(self._lost.wait())
            lost.add_done_callback(lambda _: puller.halt())
            stack.callback(lost.cancel)
            self._handler = handler
            for verb, answer in self._answers.items():
                subject = subjects.request(self._pool, self._service, verb)
                subscription: Subscription = await self._bus.serve(subject, answer)
                stack.push_async_callback(subscription.unsubscribe)
            self._on_leading(True)
            while True:
                try:
                    messages = await puller.next(self._patience())
                    if messages and handler.gather_seconds and len(messages) < BATCH:
                        await asyncio.sleep(handler.gather_seconds)
                        if puller.waiting:  # else it might raise, and what was taken would be lost
                            messages += await puller.next(0.0)
                except BusTransientError as error:
                    self._log.warning("cannot take in events", reason=str(error))
                    await asyncio.sleep(LAST_RETRY_SECONDS)
                    messages = []
                if self._lost.is_set():
                    raise Deposed(self._service, self._epoch)
                async with self._lock:
                    await self._renew(is_idle=not messages)
                    await self._work(puller, messages)
                if len(messages) >= BUSY_FROM and puller.waiting < BATCH:
                    await asyncio.sleep(BUSY_GATHER_SECONDS)

    async def _renew(self, *, is_idle: bool) -> None:
        """Once a day make a recorded handler anew from its records, in a quiet moment if one comes within the hour."""
        if self._handler is None or not self._handler.is_recorded:
            return
        age = self._clock() - self._made_at
        if age > RENEW_AFTER + (timedelta(0) if is_idle else PATIENCE_FOR_QUIET):
            self._handler = await self._loaded()

    async def _make_consumer(self) -> None:
        """A bus that was restarted has no consumers; the position is ours, so a new one is as good."""
        filters = consumer_filters(self._pool).get(self._service, [])
        if await ensure_service_consumer(self._bus, self._service, filters):
            self._log.info("made the consumer anew")

    def _forget_puller(self) -> None:
        self._puller = None

    def _patience(self) -> float:
        """Seconds until something wants attention without a message."""
        if self._calls or self._database.parked_changed.is_set():
            return 0.0
        due = None if self._handler is None else self._handler.next_timer()
        if due is None:
            return IDLE_SECONDS
        return min(IDLE_SECONDS, max(0.0, (due - self._clock()).total_seconds()))

    async def _loaded(self) -> H:
        """A handler with the stored state, after everything that was committed has been published."""
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._publish_leftovers()
                handler = self._make_handler()
                now = self._clock()
                await handler.load(self._database, now=now)
                self._loaded_at = self._made_at = now
                return handler
            except StoreTransientError as error:
                self._log.warning("waiting for the database", reason=str(error))
            if self._lost.is_set():
                raise Deposed(self._service, self._epoch)
            await asyncio.sleep(delay)
            delay = min(delay * 2, LAST_RETRY_SECONDS)

    # --- one batch --------------------------------------------------------------------------------------------------

    async def _work(self, puller: Puller, messages: list[Message]) -> None:
        if not messages and not self._has_something_to_do():
            return
        calls, self._calls = self._calls, []
        try:
            await self._until_done(messages, calls)
        except BaseException:
            self._calls = calls + self._calls  # `_fail_calls` answers them
            raise
        await fault_point(f"{self._service}.between_publish_and_ack")
        puller.ack(messages)
        for call in calls:
            if not call.answer.done():
                call.answer.set_result(call.result)

    def _has_something_to_do(self) -> bool:
        if self._calls or self._database.parked_changed.is_set():
            return True
        due = None if self._handler is None else self._handler.next_timer()
        return due is not None and due <= self._clock()

    async def _until_done(self, messages: list[Message], calls: list[_Call[H]]) -> None:
        """Commit and publish; transient trouble is retried here, because a failed batch must never be skipped."""
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._once(messages, calls, parking="")
                return
            except StoreTransientError as error:
                self._metrics.commit_failures.labels("transient").inc()
                self._log.warning("batch will be tried again", reason=str(error), messages=len(messages))
                await asyncio.sleep(delay)
                delay = min(delay * 2, LAST_RETRY_SECONDS)
            except Deposed:
                raise
            except Exception as error:
                self._metrics.commit_failures.labels("defect").inc()
                self._log.error("batch failed", messages=len(messages), error=error)
                if not messages:
                    raise
                self._handler = await self._loaded()
                await self._one_by_one(messages, calls)
                return
            self._handler = await self._loaded()

    async def _one_by_one(self, messages: list[Message], calls: list[_Call[H]]) -> None:
        """Find the message that makes the decision code raise, and park it."""
        for index, message in enumerate(messages):
            last = index == len(messages) - 1
            delay = FIRST_RETRY_SECONDS
            parking = ""
            while True:
                try:
                    await self._once([message], calls if last else [], parking=parking)
                    break
                except StoreTransientError:
                    await asyncio.sleep(delay)
                    delay = min(delay * 2, LAST_RETRY_SECONDS)
                except Deposed:
                    raise
                except Exception as fault:
                    if parking:
                        raise
                    parking = f"{type(fault).__name__}: {fault}"
                self._handler = await self._loaded()

    async def _once(self, messages: list[Message], calls: list[_Call[H]], *, parking: str) -> None:
        handler = self._handler
        if handler is None:
            raise Deposed(self._service, self._epoch)
        taken = [_taken(message) for message in messages]
        span = batch_span(self._service, self._service, [item.trace for item in taken])
        with span:
            committed = await self._commit(handler, taken, calls, span, parking)
            await fault_point(f"{self._service}.between_commit_and_publish")
            await self._publish(committed)
        if messages:
            self._position = messages[-1].stream_seq
            self._metrics.batch_messages.observe(len(messages))

    async def _commit(
        self, handler: H, taken: list[_Taken], calls: list[_Call[H]], span: Any, parking: str
    ) -> _Committed:
        now = self._clock()
        started = perf_counter()
        async with self._database.batch() as tx:
            tx.check_epoch(self._service, self._epoch)
            replays = await tx.take_replays() if self._database.parked_changed.is_set() else []
            fresh = await tx.new_ids([item.event_id for item in taken]) if taken else set()
            causes: dict[str, tuple[str | None, str | None]] = {}
            note = Note(loaded=self._loaded_at, settings=handler.settings)
            for replay in replays:
                known = replay.message
                message = _replayed(replay)
                again = _Taken(message, known.event_id, known.entity, message.header(HEADER_TRACE))
                if self._apply(handler, tx, again, now, causes, ""):
                    note.before.append(replay.payload)
            took = []
            for item in taken:
                if item.event_id in fresh:
                    fresh.discard(item.event_id)
                    if self._apply(handler, tx, item, now, causes, parking):
                        took.append(item.message.stream_seq)
            note.took = None if len(took) == len(taken) else took
            for call in calls:
                call.result = call.work(handler, now)
            note.after = handler.given()
            outcome = await self._settle(handler, now, len(taken))
            encoded, tally = self._encoder.encode(outcome.emissions, now=now, causes=causes, batch=span)
            tx.upsert_records((kind, key, body) for kind, key, body in outcome.records if body is not None)
            tx.delete_records((kind, key) for kind, key, body in outcome.records if body is None)
            rows = [OutboxRow(e.event_id, e.subject, orjson.dumps(e.headers), e.payload) for e in encoded]
            tx.add_outbox(rows)
            if taken:
                tx.set_position(self._service, taken[-1].message.stream_seq, stream=subjects.EVENTS_STREAM)
            note.sums = tally.sums
            tx.log_commit(
                CommitEntry(
                    first_seq=taken[0].message.stream_seq if taken else self._position + 1,
                    last_seq=taken[-1].message.stream_seq if taken else self._position,
                    timers=outcome.timers,
                    clock=now,
                    emitted=len(encoded),
                    decisions_version=handler.decisions_version,
                    policy_version=handler.policy_version,
                    digest=tally.digest(),
                    events=note.to_json(),
                )
            )
            await handler.write(tx)
            await fault_point(f"{self._service}.before_commit")
        self._loaded_at = None
        self._metrics.commit_seconds.observe(perf_counter() - started)
        return _Committed(encoded, tx.outbox_ids)

    def _apply(
        self,
        handler: H,
        tx: BatchTransaction,
        item: _Taken,
        now: datetime,
        causes: dict[str, tuple[str | None, str | None]],
        parking: str,
    ) -> bool:
        """Let the handler take it in; False: it is parked instead."""
        message = item.message
        if tx.is_entity_parked(item.entity):
            self._park(tx, item, "an earlier message of this entity is parked")
            return False
        if parking:
            self._park(tx, item, parking)
            return False
        try:
            handler.apply(message, now=now)
        except PoisonMessage as poison:
            self._park(tx, item, str(poison))
            return False
        causes[item.event_id] = (item.trace, None)
        return True

    def _park(self, tx: BatchTransaction, item: _Taken, reason: str) -> None:
        message = item.message
        self._log.error("message parked", event=item.event_id, entity=item.entity, reason=reason)
        self._metrics.parked.labels("behind" if reason.startswith("an earlier") else "poison").inc()
        tx.park(
            ParkedMessage(
                entity=item.entity,
                event_id=item.event_id,
                subject=message.subject,
                headers=message.raw_headers or b"",
                payload=message.data,
                stream_seq=message.stream_seq,
                reason=reason,
            )
        )

    async def _settle(self, handler: H, now: datetime, messages: int) -> Outcome:
        started = perf_counter()
        if handler.is_heavy and messages >= OFF_LOOP_FROM:
            outcome = await asyncio.to_thread(handler.settle, now=now)
        else:
            outcome = handler.settle(now=now)
        self._metrics.settle_seconds.observe(perf_counter() - started)
        return outcome

    # --- publishing -------------------------------------------------------------------------------------------------

    async def _publish(self, committed: _Committed) -> None:
        if not committed.encoded:
            return
        started = perf_counter()
        items = [Outgoing(e.subject, e.payload, e.event_id, e.headers) for e in committed.encoded]
        await self._publish_until_stored(items)
        self._database.forget_outbox(committed.outbox_ids)
        self._metrics.publish_ack_seconds.observe(perf_counter() - started)

    async def _publish_leftovers(self) -> None:
        """What an earlier leader, or this one before a failure, committed and may not have published."""
        while rows := await self._database.unpublished(older_than_s=0.0):
            items = [Outgoing(r.subject, r.payload, r.event_id, orjson.loads(r.headers or b"{}")) for r in rows]
            self._log.info("publishing what was left in the outbox", rows=len(rows))
            await self._publish_until_stored(items)
            await self._database.mark_published([row.id for row in rows])

    async def _publish_until_stored(self, items: list[Outgoing]) -> None:
        """Publish in order and do not go on before all are stored: the outbox is the only way out."""
        while items:
            results = await self._publisher.publish(items, PUBLISH_DEADLINE_SECONDS)
            left = []
            for item, result in zip(items, results, strict=True):
                if result.is_stored:
                    continue
                if isinstance(result.error, BusTransientError):
                    left.append(item)
                else:
                    self._log.error("message can never be published", event=item.msg_id, reason=str(result.error))
                    raise RuntimeError(f"{item.msg_id} on {item.subject}: {result.error}")
            items = left
            if items:
                self._log.warning("publishing again", left=len(items))
                if self._lost.is_set():
                    raise Deposed(self._service, self._epoch)

    def _fail_calls(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(BusTransientError(f"{self._service} has lost its leadership"))


def _taken(message: Message) -> _Taken:
    tokens = message.subject.split(".", 5)
    entity = tokens[4] if len(tokens) > 5 else message.subject
    return _Taken(message, message.header(HEADER_ID) or _id_inside(message), entity, message.header(HEADER_TRACE))


def _id_inside(message: Message) -> str:
    """The event id of a message that came without the header; its place in the stream where it has none either."""
    try:
        envelope = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        envelope = None
    found = envelope.get("id") if isinstance(envelope, dict) else None
    return found if isinstance(found, str) and found else f"{message.subject}@{message.stream_seq}"


def _replayed(replay: Parked) -> Message:
    """A parked message as the handler sees it."""
    known = replay.message
    return Message(known.subject, replay.payload, known.stream_seq, 0, 1, known.headers, b"")
