"""What lifecycle remembers, and what every rule needs of it: look up, emit, mark for storing, timers, restore."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from berth.contracts.base import JobClass
from berth.contracts.envelope import Envelope, Fact, Order
from berth.contracts.events import Receipt, StaleReportIgnored
from berth.contracts.jobs import JobSpec
from berth.decisions.core import Outbox, Record
from berth.decisions.lifecycle.model import Cancel, JobRun, Node
from berth.decisions.policy.document import ClassSettings, Policy
from berth.decisions.receipts import make_receipt

KEPT_ENDED = 20_000
"""Tombstones of ended jobs: enough to tell a late report from an unknown job while its repeats may still come."""
KEPT_FOR = timedelta(hours=2)
KEPT_CANCELS_FOR = timedelta(days=30)
DEFAULT_GRACE_SECONDS = 30

_RUN = TypeAdapter(JobRun)
_NODE = TypeAdapter(Node)
_CANCEL = TypeAdapter(Cancel)


class Book:
    """All that lifecycle knows, and the moment it works at."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRun] = {}
        self.specs: dict[str, JobSpec] = {}
        self.nodes: dict[str, Node] = {}
        self.cancels: dict[str, Cancel] = {}
        self.on_node: dict[str, dict[str, None]] = {}
        self.policy = Policy()
        self.policy_version = 0
        self.out = Outbox()
        self.now = datetime.min
        self.cause = ""
        self.state_version = 0
        self._owners: dict[str, tuple[str, str]] = {}
        self._ended: list[tuple[datetime, str]] = []
        self._timers: list[tuple[datetime, str]] = []
        self._records: dict[tuple[str, str], Any] = {}

    # ------------------------------------------------------------------------------------------------- the moment
    def begin(self, now: datetime, cause: str = "") -> None:
        """Work at `now` because of the event `cause` from here on."""
        self.now, self.cause = now, cause

    def count(self) -> None:
        """One more event was taken in."""
        self.state_version += 1
        self._records["meta", "counters"] = {"state_version": self.state_version}

    def after(self, seconds: float) -> datetime:
        """The moment so many seconds from now."""
        return self.now + timedelta(seconds=seconds)

    # --------------------------------------------------------------------------------------------------- emitting
    def emit(self, run: JobRun, fact: Fact, *, actor: str = "") -> None:
        """Tell a fact about a job."""
        self.out.emit(fact, run.job_id, tenant=run.tenant, actor=actor, cause=self.cause, trace=run.trace)
        self.mark(run)

    def receipt(self, run: JobRun, outcome: str) -> Receipt:
        """Of a decision about the attempt of a job."""
        return make_receipt(
            f"{outcome}|{run.job_id}/{run.attempt}/{run.fence}",
            policy_version=self.policy_version,
            state_version=self.state_version,
        )

    def order(self, node: Node, order: Order, run: JobRun | None = None) -> int:
        """Send a command to a node; its number on that node."""
        tenant, trace = (run.tenant, run.trace) if run else ("", "")
        correlation = run.job_id if run else ""
        self.out.emit(order, node.node, tenant=tenant, correlation=correlation, cause=self.cause, trace=trace)
        self._records["node", node.node] = node
        return self.out.counters[node.node]

    def ignore(self, run: JobRun, report: str, attempt: int, why: str) -> None:
        """Note a report that changes nothing, once for each kind and attempt."""
        key = f"{report}.{attempt}"
        if key not in run.stale:
            run.stale.append(key)
            self.emit(run, StaleReportIgnored(job_id=run.job_id, attempt=attempt, report=report, why=why))

    # ---------------------------------------------------------------------------------------------------- storing
    def mark(self, run: JobRun) -> None:
        """Store the job at the end of this batch."""
        self._records["job", run.job_id] = run

    def mark_node(self, node: Node) -> None:
        """Store the node at the end of this batch."""
        self._records["node", node.node] = node

    def records(self) -> list[Record]:
        """What changed since the last call."""
        changed, self._records = self._records, {}
        counters = self.out.counters
        for body in changed.values():
            if isinstance(body, JobRun):
                body.told = counters.get(body.job_id, 0)
            elif isinstance(body, Node):
                body.told = counters.get(body.node, 0)
        return [Record(kind, key, body) for (kind, key), body in changed.items()]

    # ------------------------------------------------------------------------------------------------------- jobs
    def know(self, event: Envelope[Any], job_id: str, spec: JobSpec) -> None:
        """Keep what a job is, until it has ended."""
        if job_id in self.specs or (job_id in self.jobs and self.jobs[job_id].state.is_final):
            return
        self.specs[job_id] = spec
        self._owners[job_id] = (event.tenant or spec.tenant, event.traceparent)
        body = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        self._records["spec", job_id] = {"spec": body, "tenant": self._owners[job_id][0], "trace": event.traceparent}

    def run_of(self, job_id: str) -> JobRun:
        """The job's run, made at its first placement."""
        run = self.jobs.get(job_id)
        if run is None:
            tenant, trace = self._owners.get(job_id, ("", ""))
            run = self.jobs[job_id] = JobRun(job_id, tenant, trace)
            cancel = self.cancels.pop(job_id, None)
            if cancel is not None:
                run.cancelled_by = cancel.by
                self._records["cancel", job_id] = None
            self.mark(run)
        return run

    def adopt(self, run: JobRun) -> None:
        """Give a run that was placed before its job was known the tenant and trace of the job."""
        run.tenant, run.trace = self._owners.get(run.job_id, (run.tenant, run.trace))

    def remember_cancel(self, job_id: str, by: str) -> None:
        """Keep a cancel request for when the job is placed."""
        if job_id not in self.cancels:
            self.cancels[job_id] = Cancel(by, self.now)
            self._records["cancel", job_id] = self.cancels[job_id]

    def forget_unplaced(self, job_id: str) -> None:
        """Drop what is known of a job that ended without being placed."""
        if self.cancels.pop(job_id, None) is not None:
            self._records["cancel", job_id] = None
        self._drop_spec(job_id)

    def bury(self, run: JobRun) -> None:
        """Keep only a tombstone of an ended job."""
        run.ended_at = self.now
        run.workers, run.stop, run.wake = [], None, None
        self._drop_spec(run.job_id)
        heapq.heappush(self._ended, (self.now, run.job_id))
        self.mark(run)

    def prune(self) -> None:
        """Drop the oldest tombstones beyond their number or age, and cancels that met no job."""
        oldest = self.now - KEPT_FOR
        while self._ended and (len(self._ended) > KEPT_ENDED or self._ended[0][0] < oldest):
            _, job_id = heapq.heappop(self._ended)
            self.jobs.pop(job_id, None)
            self.out.counters.pop(job_id, None)
            self._records["job", job_id] = None
        while self.cancels:
            job_id, cancel = next(iter(self.cancels.items()))
            if cancel.at >= self.now - KEPT_CANCELS_FOR:
                break
            del self.cancels[job_id]
            self._records["cancel", job_id] = None

    def settings(self, job_id: str) -> ClassSettings:
        """The policy in force for a job."""
        spec = self.specs.get(job_id)
        return self.policy.for_class(spec.job_class) if spec else self.policy.for_class(JobClass.GENERAL)

    def grace_seconds(self, job_id: str) -> int:
        """Time to stop: what the job asks for, at most what policy gives."""
        spec, allowed = self.specs.get(job_id), self.settings(job_id).preemption.grace
        asked = spec.stop_grace if spec else None
        if asked is None:
            return DEFAULT_GRACE_SECONDS if allowed is None else allowed
        return asked if allowed is None else min(asked, allowed)

    # ---------------------------------------------------------------------------------------------- nodes, places
    def node(self, name: str) -> Node | None:
        """A node that has registered."""
        return self.nodes.get(name)

    def place(self, run: JobRun, node: str) -> None:
        """Note that a worker of the job is on the node."""
        self.on_node.setdefault(node, {})[run.job_id] = None

    def vacate(self, run: JobRun, node: str) -> None:
        """Note that no worker of the job is on the node any more."""
        self.on_node.get(node, {}).pop(run.job_id, None)

    def runs_on(self, node: str) -> list[JobRun]:
        """Jobs with a worker on the node, in the order of their ids."""
        return [self.jobs[job_id] for job_id in sorted(self.on_node.get(node, ()))]

    # ----------------------------------------------------------------------------------------------------- timers
    def wake(self, run: JobRun, at: datetime) -> None:
        """Look at the job again at `at`, or earlier."""
        if run.wake is None or at < run.wake:
            run.wake = at
            heapq.heappush(self._timers, (at, run.job_id))
            self.mark(run)

    def due(self) -> JobRun | None:
        """The next job whose timer is due; its timer is gone then."""
        while self._timers and self._timers[0][0] <= self.now:
            at, job_id = heapq.heappop(self._timers)
            run = self.jobs.get(job_id)
            if run is not None and run.wake == at:
                run.wake = None
                self.mark(run)
                return run
        return None

    def next_timer(self) -> datetime | None:
        """When the first timer is due."""
        while self._timers:
            at, job_id = self._timers[0]
            run = self.jobs.get(job_id)
            if run is not None and run.wake == at:
                return at
            heapq.heappop(self._timers)
        return None

    # ---------------------------------------------------------------------------------------------------- restore
    def set_policy(self, version: int, document: dict[str, Any]) -> None:
        """Take a policy in force."""
        self.policy, self.policy_version = Policy.from_document(document), version

    def store_policy(self, version: int, document: dict[str, Any]) -> None:
        """Take a policy in force and store it."""
        self.set_policy(version, document)
        self._records["policy", "active"] = {"version": version, "document": document}

    def restore(self, records: Iterable[tuple[str, str, Any]]) -> None:
        """Rebuild everything from stored records."""
        for kind, key, body in records:
            if kind == "policy":
                self.set_policy(body["version"], body["document"])
            elif kind == "spec":
                self.specs[key] = JobSpec.model_validate(body["spec"])
                self._owners[key] = (body["tenant"], body["trace"])
            elif kind == "node":
                node = self.nodes[key] = _NODE.validate_python(body)
                self.out.counters[key] = node.told
            elif kind == "meta":
                self.state_version = body["state_version"]
            elif kind == "cancel":
                self.cancels[key] = _CANCEL.validate_python(body)
            elif kind == "job":
                self._restore_run(key, _RUN.validate_python(body))
        self.cancels = dict(sorted(self.cancels.items(), key=lambda item: (item[1].at, item[0])))

    def _restore_run(self, job_id: str, run: JobRun) -> None:
        self.jobs[job_id] = run
        self.out.counters[job_id] = run.told
        for worker in run.workers:
            if not worker.is_over:
                self.place(run, worker.node)
        if run.wake is not None:
            heapq.heappush(self._timers, (run.wake, job_id))
        if run.ended_at is not None:
            heapq.heappush(self._ended, (run.ended_at, job_id))

    def _drop_spec(self, job_id: str) -> None:
        self._owners.pop(job_id, None)
        if self.specs.pop(job_id, None) is not None:
            self._records["spec", job_id] = None
