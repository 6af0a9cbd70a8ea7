"""Writes the record of a running platform into one file: events from audit, and each deciding service's commit log."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from berth.client.errors import Unreachable
from berth.replay.record_file import (
    Header,
    RecordedEvent,
    Start,
    commit_line,
    end_line,
    event_line,
    header_line,
    state_line,
    writing,
)

if TYPE_CHECKING:
    from berth.client.transport import Transport

DECIDING: Final = ("admission", "placement", "lifecycle")
AUDIT_SECONDS: Final = 60.0
"""How long audit may take to record what services have taken in already."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What went into the file."""

    path: Path
    events: int
    commits: int
    first_seq: int
    last_seq: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Span:
    """What is asked of one service."""

    service: str
    start: Start
    last_seq: int


def export(
    api: Transport,
    path: Path,
    *,
    pool: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write everything decided between two instants, and what it takes to decide it again.

    Decisions in that range are complete, with all events they took; the file begins at the last checkpoint before
    `since` and so may reach further back. What is decided while this runs is left out. Memory does not grow with it.

    Raises:
        Refused: the token is not an operator's. Unreachable: the platform, or audit is far behind.
        OSError: the file cannot be written.
    """
    asked_since = None if since is None else since.isoformat()
    asked_until = None if until is None else until.isoformat()
    spans = [_span(api, service, asked_since, asked_until) for service in DECIDING]
    header = Header(
        pool,
        {span.service: span.start for span in spans},
        datetime.now(UTC).isoformat(timespec="seconds"),
        asked_since,
        asked_until,
    )
    events = commits = first = last = 0
    with writing(path) as file:
        file.write(header_line(header) + b"\n")
        for span in spans:
            for state in _checkpoint(api, span):
                file.write(state_line(span.service, state["kind"], state["key"], state["body"]) + b"\n")
        for seq, is_commit, line in _merged(api, spans, reads_on=until is None):
            file.write(line + b"\n")
            if is_commit:
                commits += 1
                continue
            events += 1
            first, last = first or seq, seq
            if events % 20_000 == 0:
                say(f"{events} events")
        file.write(end_line(events=events, commits=commits) + b"\n")
    return Exported(path, events, commits, first, last, path.stat().st_size)


def _span(api: Transport, service: str, since: str | None, until: str | None) -> _Span:
    found = api.call("GET", f"/v1/record/{service}/checkpoint", params={"since": since, "until": until})
    start = Start(found["commit_id"], found["stream_seq"], found["last_commit_id"])
    return _Span(service, start, found["last_seq"])


def _checkpoint(api: Transport, span: _Span) -> Iterator[dict[str, str]]:
    path = f"/v1/record/{span.service}/checkpoint/{span.start.commit_id}"
    behind = {"kind": "", "key": ""}
    while page := api.call("GET", path, params=behind):
        yield from page
        behind = {"kind": page[-1]["kind"], "key": page[-1]["key"]}


_Entry = tuple[int, int, bytes]
"""Place in the order (stream sequence), whether it is a commit, the line."""


def _merged(api: Transport, spans: list[_Span], *, reads_on: bool) -> Iterator[_Entry]:
    """Events and commits, each commit behind the last event it took. reads_on: also what the last commits told, as far
    as it is recorded by now."""
    first = min(span.start.stream_seq for span in spans)
    last = max(span.last_seq for span in spans)
    streams = [_commits(api, span) for span in spans]
    events = _events(api, first, last, reads_on=reads_on)
    yield from heapq.merge(events, *streams, key=lambda entry: (entry[0], entry[1]))


def _commits(api: Transport, span: _Span) -> Iterator[_Entry]:
    after, last = span.start.commit_id, span.start.last_commit_id
    while after < last:
        page: list[dict[str, Any]] = api.call("GET", f"/v1/record/{span.service}/commits", params={"after": after})
        for row in itertools.takewhile(lambda row: row["id"] <= last, page):
            yield row["last_seq"], 1, commit_line(span.service, row)
        if not page:
            return
        after = page[-1]["id"]


def _events(api: Transport, first: int, last: int, *, reads_on: bool) -> Iterator[_Entry]:
    after, deadline = first, time.monotonic() + AUDIT_SECONDS
    while True:
        page = api.call("GET", "/v1/record/events", params={"after": after})
        for row in page["events"]:
            if row["seq"] > last and not reads_on:
                return
            event = RecordedEvent(row["seq"], row["type"], row["payload"].encode(), row["recorded_at"])
            yield row["seq"], 0, event_line(event)
        if page["events"]:
            after, deadline = page["events"][-1]["seq"], time.monotonic() + AUDIT_SECONDS
            if after >= page["last_seq"] and after >= last:
                return
        elif page["last_seq"] >= last:
            return
        elif time.monotonic() > deadline:
            raise Unreachable(f"audit stands at {page['last_seq']}, services have read up to {last}")
        else:
            time.sleep(0.2)
