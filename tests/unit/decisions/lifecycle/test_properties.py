"""Whatever agents, nodes and users do, and however often and late it is told: every end once, nothing runs twice.

The agent below is the smallest that keeps its own rules (epoch, fence, one effect per launch). Its reports arrive in any
order and any number of times. A second core, rebuilt from stored records before every step, must say exactly the same.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from berth.contracts.commands import LaunchWorkers, ReconcileNode, StopWorkers
from berth.contracts.envelope import Fact
from berth.contracts.events import (
    AttemptEnded,
    CommandRefused,
    JobCancelled,
    JobFailed,
    JobRequeued,
    JobSucceeded,
    NodeLost,
    PreemptionPlanned,
    Victim,
)
from berth.contracts.nodes import WorkerReport
from berth.contracts.reasons import Code, because
from berth.decisions.lifecycle import LifecycleCore
from tests.unit.decisions.desks import (
    Desk,
    a_spec,
    admitted,
    cancel,
    did_exit,
    did_release,
    did_start,
    placed,
    policy,
    registered,
)

NODES = ("n1", "n2")
Key = tuple[str, int, int, int]  # job, attempt, fence, worker


class Agent:
    """One node: what runs, what was ever launched, which orders wait, which reports are on their way."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.epoch = 0
        self.is_reconciled = False
        self.is_lost = False
        self.running: set[Key] = set()
        self.launched: Counter[Key] = Counter()
        self.stopped: dict[str, int] = {}
        self.orders: list[tuple[str, Any]] = []
        self.reports: list[Any] = []

    def ids(self, key: Key) -> dict[str, Any]:
        job, attempt, fence, worker = key
        return {"job_id": job, "attempt": attempt, "fence": fence, "worker": worker} | {
            "node": self.node,
            "epoch": max(self.epoch, 1),
        }

    def carry_out(self, order_id: str, order: Any) -> None:
        code = None
        if order.epoch != self.epoch:
            code = Code.WRONG_EPOCH
        elif not isinstance(order, ReconcileNode) and not self.is_reconciled:
            code = Code.NOT_RECONCILED
        elif isinstance(order, LaunchWorkers) and order.fence <= self.stopped.get(order.job_id, 0):
            code = Code.OLD_FENCE
        if code is not None:
            ids = {name: getattr(order, name, default) for name, default in (("job_id", ""), ("fence", 0))}
            refusal = CommandRefused(
                command_id=order_id, command=order.VERB, node=self.node, epoch=self.epoch, reason=because(code), **ids
            )
            self.reports.append(refusal)
        elif isinstance(order, ReconcileNode):
            keep = {(k.job_id, k.attempt, k.fence, k.worker) for k in order.keep}
            for key in self.running - keep:
                self.end(key, 137)
            self.is_reconciled = True
        elif isinstance(order, LaunchWorkers):
            for plan in order.workers:
                key = (order.job_id, order.attempt, order.fence, plan.worker)
                if not self.launched[key]:
                    self.launched[key] += 1
                    self.running.add(key)
                    self.reports.append(did_start(**self.ids(key)))
        elif isinstance(order, StopWorkers):
            self.stopped[order.job_id] = max(order.fence, self.stopped.get(order.job_id, 0))
            for key in {k for k in self.running if (k[0], k[2]) == (order.job_id, order.fence)}:
                self.end(key, 143)

    def end(self, key: Key, code: int) -> None:
        self.running.discard(key)
        self.reports += [did_exit(code=code, **self.ids(key)), did_release(**self.ids(key))]

    def report(self) -> tuple[WorkerReport, ...]:
        unsaid = {(r.job_id, r.attempt, r.fence, r.worker) for r in self.reports if hasattr(r, "worker")}
        return tuple(
            WorkerReport(
                job_id=k[0],
                attempt=k[1],
                fence=k[2],
                worker=k[3],
                state="running" if k in self.running else "exited",
            )
            for k in sorted(self.running | unsaid)
        )


class Histories(RuleBasedStateMachine):
    """Random histories of a few gangs on two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(LifecycleCore())
        self.twin = Desk(LifecycleCore())
        self.agents = {node: Agent(node) for node in NODES}
        self.attempts: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.fence = 0
        self.old: list[Any] = []

    def feed(self, *facts: Fact) -> None:
        self.twin.restart(LifecycleCore())
        told = self.desk.feed(*facts)
        assert self.twin.feed(*facts) == told
        self.take(told)

    def take(self, told: list[Any]) -> None:
        ids = iter(self.desk.ids[len(self.desk.ids) - len(told) :])
        for data in told:
            order_id = next(ids)
            if isinstance(data, JobRequeued):
                self.waiting.add(data.job_id)
            elif isinstance(data, LaunchWorkers | StopWorkers | ReconcileNode):
                self.agents[data.node].orders.append((order_id, data))

    @initialize()
    def begin(self) -> None:
        self.feed(policy(recovery={"max_restarts": 2, "backoff": {"first": 5}}))
        for node in NODES:
            self.register(node)

    @rule(size=st.integers(1, 3), gang=st.booleans())
    def admit(self, size: int, gang: bool) -> None:
        job = f"j{len(self.attempts) + 1}"
        if len(self.attempts) < 4:
            self.attempts[job] = 0
            self.feed(admitted(job, a_spec(job, workers=size, gang=gang)))
            self.waiting.add(job)
            self.sizes = {**getattr(self, "sizes", {}), job: size}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.waiting)))
        nodes = data.draw(st.lists(st.sampled_from(NODES), min_size=self.sizes[job], max_size=self.sizes[job]))
        self.waiting.discard(job)
        self.attempts[job] += 1
        self.fence += 1
        self.feed(placed(job, attempt=self.attempts[job], fence=self.fence, nodes=tuple(nodes)))

    @rule(node=st.sampled_from(NODES))
    def carry_out(self, node: str) -> None:
        agent = self.agents[node]
        if agent.orders and not agent.is_lost:
            agent.carry_out(*agent.orders.pop(0))

    @rule(data=st.data(), node=st.sampled_from(NODES), repeat=st.booleans())
    def deliver(self, data: st.DataObject, node: str, repeat: bool) -> None:
        agent = self.agents[node]
        if agent.reports and not agent.is_lost:
            at = data.draw(st.integers(0, len(agent.reports) - 1))
            report = agent.reports.pop(at)
            self.old.append(report)
            self.feed(report, report) if repeat else self.feed(report)

    @precondition(lambda self: self.old)
    @rule(data=st.data())
    def tell_again(self, data: st.DataObject) -> None:
        self.feed(data.draw(st.sampled_from(self.old)))

    @rule(data=st.data(), code=st.sampled_from([0, 0, 1]))
    def program_ends(self, data: st.DataObject, code: int) -> None:
        live = sorted((a.node, key) for a in self.agents.values() for key in a.running)
        if live:
            node, key = data.draw(st.sampled_from(live))
            self.agents[node].end(key, code)

    @rule(node=st.sampled_from(NODES))
    def register(self, node: str) -> None:
        agent = self.agents[node]
        agent.epoch += 1
        agent.is_reconciled = agent.is_lost = False
        self.feed(registered(node, epoch=agent.epoch, workers=agent.report()))

    @rule(node=st.sampled_from(NODES))
    def lose(self, node: str) -> None:
        agent = self.agents[node]
        if not agent.is_lost:
            agent.is_lost = True
            for key in set(agent.running):
                agent.end(key, 137)  # its lease has run out
            self.feed(NodeLost(node=node, epoch=agent.epoch, silent_seconds=300))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), kind=st.sampled_from(["cancel", "preempt"]))
    def disturb(self, data: st.DataObject, kind: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.attempts)))
        if kind == "cancel":
            if job in self.waiting:
                self.waiting.discard(job)  # placement holds it, and ends it
                self.feed(cancel(job), JobCancelled(job_id=job, ended_at=self.desk.now))
            else:
                self.feed(cancel(job))
            return
        victims = (Victim(job_id=job, attempt=self.attempts[job]),)
        self.feed(PreemptionPlanned(plan_id="p", victims=victims, rule="priority", grace_seconds=10))

    @rule(seconds=st.sampled_from([1, 30, 100]))
    def pass_time(self, seconds: int) -> None:
        self.twin.restart(LifecycleCore())
        told = self.desk.wait(seconds)
        assert self.twin.wait(seconds) == told
        self.take(told)

    @invariant()
    def every_end_is_told_once(self) -> None:
        ends = Counter(
            data.job_id for _, data in self.desk.told if isinstance(data, JobSucceeded | JobFailed | JobCancelled)
        )
        assert not [job for job, count in ends.items() if count > 1]
        whole = Counter((e.job_id, e.attempt) for e in self.desk.all(AttemptEnded) if e.workers is None)
        assert not [key for key, count in whole.items() if count > 1]

    @invariant()
    def nothing_runs_after_its_cards_are_given_back(self) -> None:
        over = {(e.job_id, e.attempt) for e in self.desk.all(AttemptEnded) if e.workers is None}
        for agent in self.agents.values():
            assert not [key for key in agent.running if key[:2] in over]

    @invariant()
    def no_event_id_is_used_twice(self) -> None:
        assert len(set(self.desk.ids)) == len(self.desk.ids)

    def teardown(self) -> None:
        """When everything has been told and carried out, nothing hangs: every job waits or has ended."""
        for _ in range(60):
            for node, agent in self.agents.items():
                if agent.is_lost:
                    self.register(node)
                while agent.orders:
                    agent.carry_out(*agent.orders.pop(0))
                for key in set(agent.running):
                    agent.end(key, 0)
                reports, agent.reports = agent.reports, []
                for report in reports:
                    self.feed(report)
            self.pass_time(100)
        for job in self.attempts:
            run = self.desk.core.job(job)
            assert run is None or not run.has_attempt, run


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
