"""Runs recorded decisions again with the very cores and compares what each batch led to.

Each core gets what its service had: the same events in the same batches, the same clock, the same input that came on no
stream, and a rebuild from stored records where the service was started anew. Then each batch must tell the same, byte
for byte; and every recorded event of a service that is replayed must be what its replay told.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from berth.contracts.envelope import Fact, UnknownTypeError, decode
from berth.decisions.core import DECISIONS_VERSION, Core, Emission
from berth.decisions.recording import Tally, emission_body, event_id, stored_body
from berth.replay.record_file import BadRecord, Commit, End, Header, Line, RecordedEvent, State

CoreFactory = Callable[..., Core]
_DATA = b',"data":'
SHOWN_BYTES = 600


def deciding_cores() -> dict[str, CoreFactory]:
    """The services whose decisions are recorded, by name."""
    from berth.decisions.admission import AdmissionCore
    from berth.decisions.lifecycle import LifecycleCore
    from berth.decisions.placement.core import PlacementCore
    from berth.decisions.serving import ServingCore

    cores: tuple[type[Core], ...] = (AdmissionCore, ServingCore, PlacementCore, LifecycleCore)
    return {core.NAME: core for core in cores}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that came out otherwise.

    what: in words. commit: its number in the service's log, with its clock; None: it is about an event alone. event_id:
    the event that led to it, or that it is about. place: which emission of the batch, from 1. expected, actual: id and
    data as they travel; empty: there is none. expected_sum: where the record does not hold what was told (commands are
    on no record), the sum it had.
    """

    service: str
    what: str
    commit: int | None = None
    clock: str = ""
    seq: int | None = None
    event_id: str = ""
    place: int | None = None
    expected: str = ""
    actual: str = ""
    expected_sum: int | None = None

    def lines(self) -> list[str]:
        """For people."""
        head = f"first difference: {self.service}"
        if self.commit is not None:
            head += f", commit {self.commit} at {self.clock}"
        if self.seq is not None:
            head += f", stream sequence {self.seq}"
        found = [f"{head}: {self.what}"]
        if self.event_id:
            found.append(f"  event     {self.event_id}")
        if self.place is not None:
            found.append(f"  emission  {self.place} of the batch")
            lost = (
                "nothing" if self.expected_sum is None else f"not in the record of events (sum {self.expected_sum:08x})"
            )
            found.append(f"  expected  {_cut(self.expected) or lost}")
            found.append(f"  actual    {_cut(self.actual) or 'nothing'}")
        return found


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_BYTES else text[:SHOWN_BYTES] + " …"


@dataclass(slots=True)
class Verdict:
    """What a replay found. events: read; applied: handed to a core, each core counted."""

    events: int = 0
    commits: int = 0
    applied: int = 0
    emissions: int = 0
    restarts: int = 0
    policies: int = 0
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether everything came out as recorded."""
        return self.difference is None


@dataclass(slots=True)
class _Seat:
    """One service in replay: its core, what it stored, and events that are not applied yet."""

    make: CoreFactory
    read_to: int
    last_commit: int
    core: Core | None = None
    records: dict[tuple[str, str], bytes] = field(default_factory=dict)
    waiting: deque[RecordedEvent] = field(default_factory=deque)

    def rebuild(self, now: datetime, settings: dict[str, Any]) -> Core:
        """A fresh core from what was stored, in the order in which the database gives it."""
        self.core = self.make(**settings)
        self.core.restore([(k, key, orjson.loads(self.records[k, key])) for k, key in sorted(self.records)], now=now)
        return self.core


class _Differs(Exception):
    """Carries the first difference out."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.what)
        self.difference = difference


def replay(lines: Iterable[Line], *, cores: Mapping[str, CoreFactory] | None = None) -> Verdict:
    """Run a record again up to its first difference. Where that is, `explain_difference` may know more.

    Raises:
        BadRecord: as `record_file.read`, or lines that cannot follow each other.
    """
    rerun = Rerun(deciding_cores() if cores is None else cores)
    try:
        for line in lines:
            rerun.take(line)
    except _Differs as differs:
        rerun.verdict.difference = differs.difference
    return rerun.verdict


class Rerun:
    """One replay, line by line."""

    def __init__(self, cores: Mapping[str, CoreFactory]) -> None:
        self.verdict = Verdict()
        self._cores = cores
        self._seats: dict[str, _Seat] = {}
        self._takers: dict[str, list[_Seat]] = {}
        self._told: dict[str, tuple[int, Emission, Commit]] = {}
        self._seen: set[str] = set()
        self._commit_lines = 0
        self._begins_empty: dict[str, bool] = {}
        self._last_commits: dict[str, int] = {}
        self._seq = 0
        self._policies: set[tuple[str, str]] = set()
        self._versions: set[str] = set()

    def take(self, line: Line) -> None:
        """The next line."""
        if isinstance(line, RecordedEvent):
            self._event(line)
        elif isinstance(line, Commit):
            self._commit_lines += 1
            self._commit(line)
        elif isinstance(line, State):
            seat = self._seats.get(line.service)
            if seat is not None:
                seat.records[line.kind, line.key] = line.body
        elif isinstance(line, Header):
            self._header(line)
        else:
            self._end(line)

    def _header(self, header: Header) -> None:
        for name, start in header.starts.items():
            make = self._cores.get(name)
            if make is None:
                self.verdict.notes.append(f"{name} is not replayed: this program does not know it")
                continue
            seat = self._seats[name] = _Seat(make, start.stream_seq, start.commit_id)
            self._begins_empty[name] = start.commit_id == 0
            self._last_commits[name] = start.last_commit_id
            for fact in make().CONSUMES:
                self._takers.setdefault(fact.TYPE, []).append(seat)

    # ------------------------------------------------------------------------------------------------------- events
    def _event(self, event: RecordedEvent) -> None:
        if event.seq <= self._seq:
            raise BadRecord(f"event {event.seq} behind event {self._seq}")
        self._seq = event.seq
        self.verdict.events += 1
        self._was_told(event)
        for seat in self._takers.get(event.type, ()):
            if event.seq > seat.read_to:
                seat.waiting.append(event)

    def _was_told(self, event: RecordedEvent) -> None:
        """An event of a replayed service must be what its replay has told before."""
        at = event.payload.find(_DATA)
        try:
            head = orjson.loads(event.payload[:at] + b"}") if at > 0 else {}
        except orjson.JSONDecodeError:
            head = {}
        service = str(head.get("source", "")).rpartition("/")[2]
        if service not in self._seats:
            return
        id_ = str(head.get("id", ""))
        told = self._told.pop(id_, None)
        if told is None:
            is_repeat = id_ in self._seen  # an outbox that was published again, later than the broker remembers
            if self._begins_empty[service] and self._is_under_way(service) and not is_repeat:
                raise _Differs(
                    Difference(service, "an event is recorded that was never decided", None, "", event.seq, id_)
                )
            return
        self._seen.add(id_)
        sum_, emission, commit = told
        body = event.payload[at + len(_DATA) : -1]
        if zlib.crc32(body, zlib.crc32(id_.encode())) != sum_:
            raise _Differs(
                Difference(
                    service,
                    "the recorded event is not what was decided",
                    commit.id,
                    commit.clock.isoformat(),
                    event.seq,
                    id_,
                    1 + commit.note.sums.index(sum_),
                    f"{id_} {body.decode(errors='replace')}",
                    _shown(emission),
                )
            )

    def _is_under_way(self, service: str) -> bool:
        """Whether commits of a service are still to come; behind its last one stands what later ones told."""
        return self._seats[service].last_commit < self._last_commits[service]

    # ------------------------------------------------------------------------------------------------------ commits
    def _commit(self, commit: Commit) -> None:
        seat = self._seats.get(commit.service)
        if seat is None:
            return
        if commit.id <= seat.last_commit:
            raise BadRecord(f"{commit.service}: commit {commit.id} behind commit {seat.last_commit}")
        seat.last_commit = commit.id
        note, now = commit.note, commit.clock
        core = seat.core
        if core is None or note.loaded is not None:
            core = seat.rebuild(note.loaded or now, note.settings)
            self.verdict.restarts += 1
        for payload in note.before:
            self._apply(core, commit, payload, None)
        for event in self._taken(seat, commit):
            self._apply(core, commit, event.payload, event)
        for payload in note.after:
            self._apply(core, commit, payload, None)
        settled = core.settle(now=now)
        for record in settled.records:
            body = stored_body(record)
            if body is None:
                seat.records.pop((record.kind, record.key), None)
            else:
                seat.records[record.kind, record.key] = body
        self._compare(commit, settled.emissions, settled.timers, str(core.policy_version))
        self.verdict.commits += 1
        self.verdict.emissions += len(settled.emissions)

    def _taken(self, seat: _Seat, commit: Commit) -> list[RecordedEvent]:
        took = None if commit.note.took is None else set(commit.note.took)
        taken = []
        while seat.waiting and seat.waiting[0].seq <= commit.last_seq:
            event = seat.waiting.popleft()
            if event.seq < commit.first_seq:
                what = "an event it consumes was passed over"
                raise _Differs(_about(commit, what, seq=event.seq, id_=_id_in(event.payload)))
            if took is None or event.seq in took:
                taken.append(event)
        if took is not None and len(taken) != len(took):
            missing = min(took.difference(event.seq for event in taken))
            raise _Differs(_about(commit, "an event it took is not in the record", seq=missing))
        return taken

    def _apply(self, core: Core, commit: Commit, payload: bytes, event: RecordedEvent | None) -> None:
        seq = None if event is None else event.seq
        try:
            envelope = decode(payload, None if event is None else event.type)
        except (UnknownTypeError, ValueError) as error:
            first = str(error).replace("\n", " ")[:200]
            raise _Differs(_about(commit, f"an event it took cannot be read: {first}", seq=seq)) from error
        try:
            core.apply(envelope, now=commit.clock)
        except ValueError as error:
            what = f"an event it took is refused now: {error}"
            raise _Differs(_about(commit, what, seq=seq, id_=envelope.id)) from error
        self.verdict.applied += 1

    def _compare(self, commit: Commit, emissions: Sequence[Emission], timers: int, policy_version: str) -> None:
        tally = Tally()
        for emission in emissions:
            id_ = event_id(emission)
            tally.add(id_, emission_body(emission))
            if isinstance(emission.data, Fact):
                self._told[id_] = (tally.sums[-1], emission, commit)
        if tally.digest().hex() != commit.digest:
            raise _Differs(_differing(commit, emissions, tally.sums))
        if timers != commit.timers:
            raise _Differs(_about(commit, f"{commit.timers} timers had fired, now {timers}"))
        if policy_version != commit.policy_version:
            raise _Differs(_about(commit, f"it stood on policy {commit.policy_version}, now on {policy_version}"))
        self._policies.add((commit.service, policy_version))
        self.verdict.policies = len({version for _, version in self._policies})
        if commit.decisions_version != DECISIONS_VERSION and commit.decisions_version not in self._versions:
            self._versions.add(commit.decisions_version)
            self.verdict.notes.append(
                f"recorded with decisions {commit.decisions_version}, run again with {DECISIONS_VERSION}"
            )

    def _end(self, end: End) -> None:
        if end.events != self.verdict.events:
            raise BadRecord(f"{self.verdict.events} events, {end.events} were written")
        if end.commits != self._commit_lines:
            raise BadRecord(f"{self._commit_lines} commits, {end.commits} were written")


def _about(commit: Commit, what: str, *, seq: int | None = None, id_: str = "") -> Difference:
    return Difference(commit.service, what, commit.id, commit.clock.isoformat(), seq, id_)


def _differing(commit: Commit, emissions: Sequence[Emission], sums: Sequence[int]) -> Difference:
    """The first emission whose sum is not the recorded one."""
    recorded = commit.note.sums
    place = next(
        (at for at, (old, new) in enumerate(zip(recorded, sums, strict=False)) if old != new),
        min(len(recorded), len(sums)),
    )
    actual = emissions[place] if place < len(emissions) else None
    if commit.emitted != len(sums):
        what = f"the batch told {commit.emitted}, now {len(sums)}"
    elif actual is None:
        what = "the digest of the batch differs"
    else:
        what = "an emission differs"
    return Difference(
        commit.service,
        what,
        commit.id,
        commit.clock.isoformat(),
        event_id="" if actual is None else actual.cause,
        place=place + 1,
        actual="" if actual is None else _shown(actual),
        expected_sum=recorded[place] if place < len(recorded) else None,
    )


def explain_difference(difference: Difference, lines: Iterable[Line]) -> Difference:
    """Look in a second pass over the record for the event that was expected, by its sum."""
    if difference.expected_sum is None or difference.expected:
        return difference
    mark = f'/{difference.service}"'.encode()
    for line in lines:
        if not isinstance(line, RecordedEvent) or mark not in line.payload:
            continue
        at = line.payload.find(_DATA)
        id_, body = _id_in(line.payload), line.payload[at + len(_DATA) : -1]
        if zlib.crc32(body, zlib.crc32(id_.encode())) == difference.expected_sum:
            return Difference(
                difference.service,
                difference.what,
                difference.commit,
                difference.clock,
                line.seq,
                difference.event_id or _cause_in(line.payload),
                difference.place,
                f"{id_} {body.decode(errors='replace')}",
                difference.actual,
                difference.expected_sum,
            )
    return difference


def _shown(emission: Emission) -> str:
    return f"{event_id(emission)} {emission_body(emission).decode(errors='replace')}"


def _field(payload: bytes, name: str) -> str:
    try:
        found: Any = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return ""
    return str(found.get(name, "")) if isinstance(found, dict) else ""


def _id_in(payload: bytes) -> str:
    return _field(payload, "id")


def _cause_in(payload: bytes) -> str:
    return _field(payload, "causationid")
