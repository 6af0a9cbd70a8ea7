"""The file of a record: JSON lines, compressed where its name ends in `.gz`, read in one pass in any case.

| line | holds |
| --- | --- |
| `header` | format, pool, what was asked for; for each deciding service the checkpoint it begins at |
| `state` | one record of a service's checkpoint |
| `event` | one event of the stream: its sequence, when it was recorded, its bytes as they travelled |
| `commit` | one batch of a service, behind all events up to the last one it took |
| `end` | how many events and commits there are; a file without it was cut off |

Events stand in stream order, commits of a service in theirs, and what a commit told behind the commit: a reader never has
to look ahead.
"""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

import orjson

from berth.decisions.recording import Note

FORMAT: Final = 1
_EVENT: Final = b',"event":'
_GZIP: Final = b"\x1f\x8b"


class BadRecord(ValueError):
    """The file is no record, of another format, or cut off; says where."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a service's replay begins: the records after commit `commit_id`, with the stream read up to `stream_seq`.

    last_commit_id: where it ends.
    """

    commit_id: int
    stream_seq: int
    last_commit_id: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    pool: str
    starts: Mapping[str, Start]
    made_at: str = ""
    since: str | None = None
    until: str | None = None


@dataclass(frozen=True, slots=True)
class State:
    """One record of a checkpoint."""

    service: str
    kind: str
    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event. type: as the header of the message named it. payload: its bytes."""

    seq: int
    type: str
    payload: bytes
    recorded_at: str = ""


@dataclass(frozen=True, slots=True)
class Commit:
    """One batch as the commit log has it."""

    service: str
    id: int
    first_seq: int
    last_seq: int
    timers: int
    clock: datetime
    emitted: int
    decisions_version: str
    policy_version: str
    digest: str
    note: Note = field(default_factory=Note)


@dataclass(frozen=True, slots=True)
class End:
    """The last line."""

    events: int
    commits: int


Line = Header | State | RecordedEvent | Commit | End


# ------------------------------------------------------------------------------------------------------------ writing
def event_line(event: RecordedEvent) -> bytes:
    """An event as a line. What is not JSON on one line goes in as text."""
    head: dict[str, Any] = {"line": "event", "seq": event.seq, "recorded_at": event.recorded_at, "type": event.type}
    payload = event.payload
    if _is_one_line_of_json(payload):
        return orjson.dumps(head)[:-1] + _EVENT + payload + b"}"
    return orjson.dumps({**head, "text": payload.decode(errors="replace")})


def _is_one_line_of_json(payload: bytes) -> bool:
    if b"\n" in payload or b"\r" in payload:
        return False
    try:
        return isinstance(orjson.loads(payload), dict)
    except orjson.JSONDecodeError:
        return False


def header_line(header: Header) -> bytes:
    """The first line."""
    starts = {name: asdict(start) for name, start in header.starts.items()}
    return orjson.dumps(
        {
            "line": "header",
            "format": FORMAT,
            "pool": header.pool,
            "made_at": header.made_at,
            "since": header.since,
            "until": header.until,
            "services": starts,
        }
    )


def state_line(service: str, kind: str, key: str, body: str) -> bytes:
    """A record of a checkpoint; its body as text, so that it is restored from the very bytes that were stored."""
    return orjson.dumps({"line": "state", "service": service, "kind": kind, "key": key, "body": body})


def commit_line(service: str, row: Mapping[str, Any]) -> bytes:
    """A row of a commit log, as the service answers it."""
    return orjson.dumps({"line": "commit", "service": service, **row})


def end_line(*, events: int, commits: int) -> bytes:
    """The last line."""
    return orjson.dumps({"line": "end", "events": events, "commits": commits})


@contextlib.contextmanager
def writing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write lines to; it has its name only once it is whole."""
    part = path.with_name(path.name + ".part")
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(part.open("wb"))
            if path.suffix == ".gz":
                packed = stack.enter_context(
                    gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3, mtime=0, filename="")
                )
                yield stack.enter_context(io.BufferedWriter(packed, 1 << 18))
            else:
                yield raw
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------ reading
def read(path: Path) -> Iterator[Line]:
    """The lines of a file, in order.

    Raises:
        BadRecord: as it says.
        OSError: it cannot be read.
    """
    with path.open("rb") as raw:
        is_packed = raw.read(2) == _GZIP
        raw.seek(0)
        lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if is_packed else raw
        try:
            yield from parse(lines)
        except (EOFError, gzip.BadGzipFile) as error:
            raise BadRecord(f"{path}: {error}") from error


def parse(lines: Iterable[bytes]) -> Iterator[Line]:
    """As `read`, from lines."""
    number, ended = 0, False
    for number, line in enumerate(lines, 1):
        if ended:
            raise BadRecord(f"line {number}: something behind the end")
        try:
            found = _line(line.rstrip(b"\n"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRecord(f"line {number}: {error if str(error) else type(error).__name__}") from error
        if isinstance(found, Header) != (number == 1):
            raise BadRecord(f"line {number}: the first line, and only that, is the header of a record of Berth")
        ended = isinstance(found, End)
        yield found
    if not ended:
        raise BadRecord(f"cut off behind line {number}" if number else "empty file")


def _line(line: bytes) -> Line:
    if line.startswith(b'{"line":"event"'):
        return _event(line)
    found = orjson.loads(line)
    what = found.get("line")
    if what == "commit":
        return _commit(found)
    if what == "state":
        return State(found["service"], found["kind"], found["key"], found["body"].encode())
    if what == "header":
        if found.get("format") != FORMAT:
            raise ValueError(f"format {found.get('format')}, this program reads {FORMAT}")
        starts = {
            name: Start(s["commit_id"], s["stream_seq"], s["last_commit_id"]) for name, s in found["services"].items()
        }
        return Header(found["pool"], starts, found.get("made_at", ""), found.get("since"), found.get("until"))
    if what == "end":
        return End(found["events"], found["commits"])
    raise ValueError(f"a line of kind {what!r}")


def _event(line: bytes) -> RecordedEvent:
    at = line.find(_EVENT)
    if at < 0:
        found = orjson.loads(line)
        return RecordedEvent(found["seq"], found["type"], found["text"].encode(), found["recorded_at"])
    head = orjson.loads(line[:at] + b"}")
    return RecordedEvent(head["seq"], head["type"], line[at + len(_EVENT) : -1], head["recorded_at"])


def _commit(found: dict[str, Any]) -> Commit:
    return Commit(
        service=found["service"],
        id=found["id"],
        first_seq=found["first_seq"],
        last_seq=found["last_seq"],
        timers=found["timers"],
        clock=datetime.fromisoformat(found["clock"]),
        emitted=found["emitted"],
        decisions_version=found["decisions_version"],
        policy_version=found["policy_version"],
        digest=found["digest"],
        note=Note.from_json(found.get("note") or {}),
    )
