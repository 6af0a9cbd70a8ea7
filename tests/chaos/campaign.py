"""One campaign: a platform, its users, faults one after another, and the verdict when everything is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

from berth.embedded.layout import STATEFUL
from berth.store.database import Database, StoreSettings
from berth.testing.platform import TestPlatform, embedded_platform
from services.audit.store.queries import verify_chain
from tests.chaos.faults import DidNotRecover, DidNotStrike, Fault, recovered
from tests.chaos.judge import Placed, Use, Violation, judge_ledger, judge_outside
from tests.chaos.records import Run, read_records
from tests.chaos.users import Api, Traffic, Users

FLEET: Final = (
    "h1=8xH100-80G:nvswitch,h2=8xH100-80G:nvswitch,h3=8xH100-80G:nvswitch,h4=8xH100-80G:nvswitch,a1=4xA100-40G:pcie"
)
TERMINAL: Final = [f"berth.job.{fact}.v1" for fact in ("refused", "succeeded", "failed", "cancelled", "reclaimed")]
END_SECONDS: Final = 120.0
SETTLE_SECONDS: Final = 30.0


@dataclass(slots=True)
class Report:
    """What happened, and what was wrong with it. violations empty: every promise was kept."""

    seed: int
    struck: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    jobs: int = 0
    runs: int = 0
    unanswered: int = 0
    states: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def text(self) -> str:
        """For a person."""
        lines = [
            f"seed {self.seed}: {len(self.struck)} faults on {self.jobs} jobs ({self.runs} program runs, "
            f"{self.unanswered} requests unanswered) in {self.seconds:.0f} s",
            f"outcomes {self.states}, restarts {self.restarts}",
            *(f"DID NOT STRIKE {missed}" for missed in self.missed),
            *(f"VIOLATION {violation}" for violation in self.violations),
        ]
        return "\n".join(lines)


async def run_campaign(
    platform: TestPlatform,
    faults: Iterable[Fault],
    traffic: Traffic,
    *,
    seed: int,
    records: Path,
    say: Any = lambda _: None,
    end_seconds: float = END_SECONDS,
) -> Report:
    """Strike a running platform and judge it; the platform goes on running."""
    began = time.monotonic()
    chance = random.Random(seed)
    report = Report(seed)
    api = Api(lambda: platform.url, platform.token)
    users = Users(api, traffic, records, random.Random(seed + 1))
    submitting = asyncio.create_task(users.run())
    try:
        for fault in faults:
            await _strike(fault, platform, users, report, say)
            if submitting.done():
                break  # a user was answered what no user should be; the verdict says it
            await asyncio.sleep(chance.uniform(0.0, 1.0))
        users.enough.set()
        async with asyncio.timeout(end_seconds):
            await submitting
        await users.until_all_final(end_seconds)
    except (DidNotRecover, TimeoutError, ExceptionGroup) as error:
        submitting.cancel()
        report.violations.append(Violation("the platform gets over it", f"{type(error).__name__}: {_leaves(error)}"))
    report.unanswered = api.unanswered
    say("judging")
    await _judge(platform, users, report)
    await api.close()
    report.seconds = time.monotonic() - began
    return report


async def _strike(fault: Fault, platform: TestPlatform, users: Users, report: Report, say: Any) -> None:
    began = time.monotonic()
    try:
        await fault.strike(platform, users)
        report.struck.append(fault.name)
    except DidNotStrike as error:
        report.missed.append(f"{fault.name}: {error}")
    await recovered(platform)
    took = time.monotonic() - began
    say(f"{fault.name}: over after {took:.1f} s; {len(users.asked)} jobs asked for, {len(users.final)} final")


async def _judge(platform: TestPlatform, users: Users, report: Report) -> None:
    views = await users.api.jobs()
    states = {job_id: str(job["state"]) for job_id, job in views.items()}
    runs = await asyncio.to_thread(read_records, users.records)
    book = await _read_book(platform, {job.job_id for job in users.asked if job.job_id})
    report.jobs, report.runs = len(users.asked), len(runs)
    report.states = dict(Counter(states.values()))
    report.restarts = dict(platform.state.restarts)
    report.violations += judge_outside(users.asked, runs, states, book.terminal)
    report.violations += judge_ledger(runs, book.uses, book.placed)
    report.violations += book.unsound
    report.violations += await _nothing_is_left(users, views, runs)


async def _nothing_is_left(users: Users, views: dict[str, dict[str, Any]], runs: list[Run]) -> list[Violation]:
    found = []
    nodes = await users.api.asked("GET", "/v1/nodes")
    for node in _rows(nodes, "nodes"):
        if node["state"] != "ready":
            found.append(Violation("every node is ready again", f"{node['node']} is {node['state']}"))
    gpus = await users.api.asked("GET", "/v1/gpus")
    for gpu in _rows(gpus, "gpus"):
        if gpu["held_by"]:
            states = [(job, views.get(job, {}).get("state")) for job in gpu["held_by"]]
            found.append(Violation("no card is held at the end", f"{gpu['uuid']} on {gpu['node']}: {states}"))
    for run in runs:
        if run.end_ns is None and _is_program(run):
            found.append(Violation("no program is left", run.name))
    return found


def _rows(body: Any, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = body[name] if isinstance(body, dict) else body
    return rows


def _is_program(run: Run) -> bool:
    try:
        return b"program.py" in Path(f"/proc/{run.pid}/cmdline").read_bytes()
    except OSError:
        return False


@dataclass(slots=True)
class _Book:
    """Berth's own record, straight from its database."""

    terminal: list[tuple[str, str]] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    unsound: list[Violation] = field(default_factory=list)


async def _read_book(platform: TestPlatform, jobs: set[str]) -> _Book:
    """Read it once audit has heard of everything, or has had the time for it."""
    dsn = platform.postgres.dsn()
    connection = await asyncpg.connect(dsn)
    try:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not await _is_settled(connection, jobs) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        book = _Book()
        rows = await connection.fetch("SELECT entity, type FROM audit.record WHERE type = ANY ($1)", TERMINAL)
        book.terminal = [(row[0], row[1]) for row in rows]
        rows = await connection.fetch("SELECT job_id, attempt, gpu_milli, taken_at, released_at FROM audit.use")
        book.uses = [
            Use(r[0], r[1], r[2] / 1000, r[3].timestamp(), None if r[4] is None else r[4].timestamp()) for r in rows
        ]
        rows = await connection.fetch("SELECT payload FROM audit.record WHERE type = 'berth.job.placed.v1'")
        for row in rows:
            data = json.loads(row[0])["data"]
            book.placed += [
                Placed(data["job_id"], data["attempt"], data["fence"], a["worker"], frozenset(a["gpus"]))
                for a in data["assignments"]
            ]
        book.unsound = await _unsound(connection)
    finally:
        await connection.close()
    async with Database(StoreSettings(dsn=dsn, schema="audit", application_name="chaos")) as database:
        chain = await verify_chain(database)
    if chain["broken_at"] is not None:
        book.unsound.append(Violation("the record's chain holds", f"broken at row {chain['broken_at']}"))
    return book


async def _is_settled(connection: asyncpg.Connection[asyncpg.Record], jobs: set[str]) -> bool:
    told = await connection.fetch("SELECT DISTINCT entity FROM audit.record WHERE type = ANY ($1)", TERMINAL)
    held = await connection.fetchval("SELECT count(*) FROM audit.use WHERE released_at IS NULL")
    if not jobs <= {row[0] for row in told} or held:
        return False
    return not await _not_recorded(connection)


async def _not_recorded(connection: asyncpg.Connection[asyncpg.Record]) -> list[str]:
    """Events that a service committed and the record does not have."""
    found = []
    for schema in STATEFUL:
        rows = await connection.fetch(
            f"SELECT event_id FROM {schema}.outbox WHERE subject LIKE 'berth.evt.%' "
            "AND NOT EXISTS (SELECT FROM audit.record r WHERE r.event_id = outbox.event_id)"
        )
        found += [f"{schema}: {row[0]}" for row in rows]
    return found


async def _unsound(connection: asyncpg.Connection[asyncpg.Record]) -> list[Violation]:
    found = []
    for schema in STATEFUL:
        for row in await connection.fetch(
            f"SELECT entity, event_id, reason FROM {schema}.parked WHERE status = 'parked'"
        ):
            found.append(
                Violation("nothing is parked", f"{schema}: {row['event_id']} of {row['entity']}: {row['reason']}")
            )
    twice = await connection.fetch("SELECT event_id, count(*) FROM audit.record GROUP BY 1 HAVING count(*) > 1 LIMIT 5")
    found += [Violation("every event is recorded once", f"{row[0]}: {row[1]} times") for row in twice]
    found += [Violation("every event is recorded", lost) for lost in await _not_recorded(connection)]
    return found


def _leaves(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_leaves(inner) for inner in error.exceptions)
    return str(error) or type(error).__name__


def run_alone(faults: Iterable[Fault], traffic: Traffic, *, seed: int, say: Any = print) -> Report:
    """A campaign on a platform of its own; what it leaves behind when it is stopped is a violation too."""
    with tempfile.TemporaryDirectory(prefix="berth-chaos-") as folder:
        Path(folder).chmod(0o755)
        with embedded_platform(FLEET, environment={"BERTH_FAULTS_ON_SIGNAL": "1"}) as platform:
            say(f"platform up at {platform.url} in {platform.layout.home}")
            report = asyncio.run(run_campaign(platform, faults, traffic, seed=seed, records=Path(folder), say=say))
            if report.violations:
                say(f"evidence in {keep_evidence(platform, Path(folder), report)}")
            platform.down()
            left = platform.processes()
            report.violations += [Violation("no process is left", f"{pid}: {what}") for pid, what in left.items()]
    return report


def keep_evidence(platform: TestPlatform, records: Path, report: Report) -> Path:
    """Copy logs and records of a failed campaign, and the whole story of every job that is named in a violation."""
    place = Path(tempfile.mkdtemp(prefix=f"berth-chaos-evidence-{report.seed}-"))
    shutil.copytree(platform.layout.logs, place / "logs")
    shutil.copytree(records, place / "records")
    for name in ("nats/nats.log", "postgres/postgres.log"):
        with contextlib.suppress(OSError):
            shutil.copy(platform.layout.home / name, place / "logs")
    (place / "report.txt").write_text(report.text())
    text = "\n".join(str(violation) for violation in report.violations)
    asyncio.run(_write_stories(platform, sorted(set(_JOB_ID.findall(text))), place))
    return place


async def _write_stories(platform: TestPlatform, jobs: list[str], place: Path) -> None:
    connection = await asyncpg.connect(platform.postgres.dsn())
    try:
        for job in jobs:
            rows = await connection.fetch(
                "SELECT number, recorded_at, event_id, payload FROM audit.record WHERE entity = $1 ORDER BY number", job
            )
            lines = [f"{r[0]:6} {r[1].time()} {r[2]:45} {json.dumps(json.loads(r[3])['data'])}" for r in rows]
            lines.append("--- records")
            for schema in STATEFUL:
                where = "key LIKE '%' || $1 || '%'"
                found = await connection.fetch(f"SELECT kind, key, body FROM {schema}.records WHERE {where}", job)
                lines += [f"{schema} {row[0]} {row[1]}: {bytes(row[2]).decode(errors='replace')}" for row in found]
            (place / f"{job}.txt").write_text("\n".join(lines))
    finally:
        await connection.close()


_JOB_ID: Final = re.compile(r"\b(?:j-)?[0-9a-hjkmnp-tv-z]{19}\b")
