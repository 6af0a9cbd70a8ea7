"""Nodes of a simulation and their agents: the rules of the real agent, with programs that are only told about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

from berth.contracts.commands import LaunchWorkers, ReconcileNode, StopWorkers, WorkerPlan
from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    Activity,
    ActivityReported,
    CommandRefused,
    GpuConditionReported,
    WorkerExited,
    WorkerReady,
    WorkerReleased,
    WorkerStarted,
)
from berth.contracts.nodes import NodeAccepted, NodeDescription, RegisterNode, TelemetryFrame, WorkerReport
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.health import InventoryCore
from berth.sim.bus import SimBus
from berth.sim.clock import SimClock
from berth.sim.programs import Program, Progress

AGENT = "node_agent"
KILLED, TERMINATED = 137, 143
RELEASE_AFTER_REPORT_SECONDS = 1
ACTIVITY_EVERY_SECONDS = 60


class Stage(StrEnum):
    """How far a worker is on its node."""

    STARTING = "starting"
    RUNNING = "running"
    EXITED = "exited"


@dataclass(slots=True)
class SimWorker:
    """One worker on a node."""

    job_id: str
    tenant: str
    attempt: int
    fence: int
    number: int
    gpus: tuple[str, ...]
    stage: Stage = Stage.STARTING
    is_stopping: bool = False
    is_fenced: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Job and worker number."""
        return self.job_id, self.number


@dataclass(slots=True)
class SimAgent:
    """One node with its agent. reports: what it has yet to tell; orders: what has yet to reach it."""

    description: NodeDescription
    epoch: int = 0
    is_up: bool = True
    is_reachable: bool = True
    silences: int = 0
    is_reconciled: bool = False
    refuses_starts: bool = False
    clock_offset: timedelta = timedelta(0)
    workers: dict[tuple[str, int], SimWorker] = field(default_factory=dict)
    job_fences: dict[str, int] = field(default_factory=dict)
    stopped_fences: dict[str, int] = field(default_factory=dict)
    launched: set[tuple[str, int, int]] = field(default_factory=set)
    memory_gib: dict[str, float] = field(default_factory=dict)
    unclean: set[str] = field(default_factory=set)
    reports: list[tuple[Fact, str, str]] = field(default_factory=list)
    orders: list[Envelope[Any]] = field(default_factory=list)

    @property
    def node(self) -> str:
        """Its name."""
        return self.description.node

    @property
    def is_heard(self) -> bool:
        """Whether anything passes between it and the platform."""
        return self.is_up and self.is_reachable


class SimFleet:
    """All nodes. Programs are given by job id before the job starts; a job without one runs until it is stopped.

    launches: every program start ever, (job, attempt, fence, worker, node), for checks that nothing runs twice.
    """

    def __init__(self, clock: SimClock, bus: SimBus) -> None:
        self.clock = clock
        self.bus = bus
        self.agents: dict[str, SimAgent] = {}
        self.progress: dict[tuple[str, int], Progress] = {}
        self.launches: list[tuple[str, int, int, int, str]] = []
        self.clean_wait: float | None = None
        self.kill_unknown = False
        self.program_of: Callable[[str], Program] = lambda job_id: Program()
        self.works_alone: Callable[[str], bool] = lambda job_id: False
        self.is_healthy: Callable[[str], bool] = lambda job_id: True
        self.signals: dict[str, dict[str, Any]] = {}
        self.on_worker: Callable[[SimWorker, str], None] = lambda worker, what: None
        self._sequence = 0
        bus.on_order = self._on_order

    @property
    def inventory(self) -> InventoryCore:
        """The core that hears the agents."""
        core = self.bus.core(InventoryCore.NAME)
        assert isinstance(core, InventoryCore)
        return core

    # --------------------------------------------------------------------------------------------------------- nodes
    def add(self, description: NodeDescription, *, refuses_starts: bool = False) -> SimAgent:
        """Bring up a node; it registers at once."""
        agent = self.agents[description.node] = SimAgent(description, refuses_starts=refuses_starts)
        self._register(agent)
        return agent

    def beat(self) -> None:
        """Every agent that can be heard sends a frame: done before inventory judges, as if frames came all the time."""
        if not self.bus.is_up:
            return
        for agent in self.agents.values():
            if agent.is_heard and not agent.epoch:
                self._register(agent)
            elif agent.is_heard:
                renewed = self.inventory.heard(self._frame(agent), now=self.clock.now)
                if renewed.register_again:
                    self._register(agent)

    def silence(self, node: str) -> None:
        """No word passes between the node and the platform; its programs go on."""
        self.beat()
        agent = self.agents[node]
        agent.is_reachable = False
        agent.silences += 1
        silence = agent.silences
        deadline = self.clock.now + timedelta(seconds=self.inventory.lease_seconds + self.inventory.stop_seconds / 2)
        self.clock.at(deadline, lambda: self._fence(agent, silence))

    def _fence(self, agent: SimAgent, silence: int) -> None:
        """The lease has run out: a cut-off agent stops its work before anybody may give its cards away."""
        if agent.is_reachable or agent.silences != silence:
            return
        for worker in agent.workers.values():
            if worker.stage is not Stage.EXITED:
                worker.is_fenced = True
                self._leave(worker, is_saved=False)

    def back(self, node: str, *, running: Iterable[str] | None = None) -> None:
        """Word again. running: job ids that still run there; None: all. What does not has ended unseen."""
        agent = self.agents[node]
        agent.is_reachable = True
        kept = None if running is None else set(running)
        gone = [w for w in agent.workers.values() if (w.is_fenced if kept is None else w.job_id not in kept)]
        for worker in gone:
            self._vanish(agent, worker)
        for worker in agent.workers.values():
            if worker.is_fenced:  # whoever tells the story says that it goes on
                worker.is_fenced = False
                self._join(worker)
        if gone or self.inventory.heard(self._frame(agent), now=self.clock.now).register_again:
            self._register(agent)
        self.bus.batch(InventoryCore.NAME)
        self._flush(agent)

    def stop_agent(self, node: str) -> None:
        """The agent's process ends; programs go on."""
        self.beat()
        self.agents[node].is_up = False

    def start_agent(self, node: str) -> None:
        """The agent finds its programs again, and what ended meanwhile."""
        agent = self.agents[node]
        agent.is_up = True
        agent.epoch = 0
        if agent.is_reachable and self.bus.is_up:
            self._register(agent)
            self._flush(agent)

    def set_clock(self, node: str, offset: timedelta) -> None:
        """From now on the node's own clock is off by so much."""
        self.agents[node].clock_offset = offset

    def flush(self) -> None:
        """Agents that can be heard again tell what they kept."""
        for agent in self.agents.values():
            if agent.is_heard:
                self._flush(agent)

    # --------------------------------------------------------------------------------------------------------- cards
    def fault(self, node: str, index: int, xid: int) -> None:
        """The driver reports a fault code of a card."""
        self._condition(self.agents[node], self._uuid(node, index), xid=xid)

    def repaired(self, node: str, index: int) -> None:
        """The card passed its check."""
        self._condition(self.agents[node], self._uuid(node, index), passed_check=True)

    def memory(self, node: str, index: int, used_gib: float) -> None:
        """So much memory of a card is in use, whatever the books say."""
        agent, gpu = self.agents[node], self._uuid(node, index)
        agent.memory_gib[gpu] = used_gib
        held = any(gpu in worker.gpus for worker in agent.workers.values())
        if used_gib <= 0:
            if gpu in agent.unclean:
                agent.unclean.discard(gpu)
                self._condition(agent, gpu, memory_used_mib=0)
            for worker in [w for w in agent.workers.values() if w.stage is Stage.EXITED and gpu in w.gpus]:
                self._release(agent, worker)
        elif not held:
            self._unclean(agent, gpu, after_job=False)

    def _unclean(self, agent: SimAgent, gpu: str, *, after_job: bool) -> None:
        agent.unclean.add(gpu)
        self._condition(agent, gpu, memory_used_mib=round(agent.memory_gib[gpu] * 1024), after_job=after_job)
        if self.kill_unknown:
            self.clock.at(self.clock.now, lambda: self.memory(agent.node, self._index(agent, gpu), 0))

    # -------------------------------------------------------------------------------------------------------- programs
    def end(self, job_id: str, *, succeeded: bool, worker: int | None = None, message: str = "") -> int:
        """The program ends by itself, in one worker or in all; how many ended."""
        ended = [
            (agent, w)
            for agent in self.agents.values()
            for w in list(agent.workers.values())
            if w.job_id == job_id and w.stage is not Stage.EXITED and worker in (None, w.number)
        ]
        for agent, w in ended:
            self._exit(agent, w, code=0 if succeeded else 1, message=message, is_saved=succeeded)
        return len(ended)

    def running(self, job_id: str) -> list[tuple[str, SimWorker]]:
        """Workers of a job whose programs run: (node, worker)."""
        return [
            (agent.node, worker)
            for agent in self.agents.values()
            for worker in agent.workers.values()
            if worker.job_id == job_id and worker.stage is Stage.RUNNING and not worker.is_fenced
        ]

    def work_done(self, job_id: str) -> float:
        """Seconds of work the job has behind it."""
        return max((p.at(self.clock.now) for (job, _), p in self.progress.items() if job == job_id), default=0.0)

    # -------------------------------------------------------------------------------------------------------- activity
    def signal(self, job_id: str, what: Mapping[str, Any]) -> None:
        """From now on the job is seen doing this; told at once and every minute."""
        known = self.signals.get(job_id)
        signals = self.signals[job_id] = {**(known or {"fresh": True}), **what}
        if signals["fresh"] or known is None:
            self._sample(signals)
        if known is None:
            self.clock.at(self.clock.now, lambda: self._tell_activity_for_ever(job_id))
        else:
            self.clock.at(self.clock.now, lambda: self._tell_activity(job_id))

    def _sample(self, signals: dict[str, Any]) -> None:
        """A fresh stamp: two samples never have the same, however close they are."""
        last = signals.get("sampled_at")
        now = self.clock.now
        signals["sampled_at"] = now if last is None or last < now else last + timedelta(microseconds=1)

    def _tell_activity_for_ever(self, job_id: str) -> None:
        if self.signals[job_id]["fresh"]:
            self._sample(self.signals[job_id])
        self._tell_activity(job_id)
        again = self.clock.now + timedelta(seconds=ACTIVITY_EVERY_SECONDS)
        self.clock.at(again, lambda: self._tell_activity_for_ever(job_id))

    def _tell_activity(self, job_id: str) -> None:
        signals = self.signals[job_id]
        active = [
            sign
            for sign, is_on in (
                (Activity.KERNEL_BUSY, signals.get("kernel") == "busy"),
                (Activity.EXECUTION, bool(signals.get("execution"))),
                (Activity.TERMINAL_BUSY, signals.get("terminal") == "busy"),
            )
            if is_on
        ]
        for node, worker in self.running(job_id):
            agent = self.agents[node]
            self._tell(
                agent,
                ActivityReported(
                    **_ids(agent, worker),
                    active=tuple(active),
                    gpu_utilization=signals.get("gpu_util"),
                    sampled_at=signals["sampled_at"] + agent.clock_offset,
                ),
                worker.job_id,
                worker.tenant,
            )

    # -------------------------------------------------------------------------------------------------------- sessions
    def _register(self, agent: SimAgent) -> None:
        reports = [
            WorkerReport(job_id=w.job_id, attempt=w.attempt, fence=w.fence, worker=w.number, state=w.stage.value)
            for w in agent.workers.values()
        ]
        reports += [
            WorkerReport(job_id=f.job_id, attempt=f.attempt, fence=f.fence, worker=f.worker, state=Stage.EXITED.value)
            for f, _, _ in agent.reports
            if isinstance(f, WorkerReleased)
        ]
        request = RegisterNode(
            description=agent.description, workers=tuple(reports), sent_at=self.clock.now + agent.clock_offset
        )
        answer = self.inventory.register(request, now=self.clock.now)
        agent.is_reconciled = False
        if isinstance(answer, NodeAccepted):
            agent.epoch = answer.epoch
        self.bus.batch(InventoryCore.NAME)

    def _frame(self, agent: SimAgent) -> TelemetryFrame:
        self._sequence += 1
        return TelemetryFrame.model_construct(
            node=agent.node,
            epoch=agent.epoch,
            sequence=self._sequence,
            sent_at=self.clock.now + agent.clock_offset,
            gpus=(),
            workers=len(agent.workers),
            took_ms=0.0,
        )

    # ---------------------------------------------------------------------------------------------------------- orders
    def _on_order(self, order: Envelope[Any]) -> None:
        agent = self.agents.get(order.data.node)
        if agent is None:
            return
        agent.orders.append(order)
        if agent.is_heard:
            self._flush(agent)

    def _flush(self, agent: SimAgent) -> None:
        """Take the orders that wait for the agent, and tell what it kept."""
        while agent.orders and agent.is_heard:
            self._carry_out(agent, agent.orders.pop(0))
        reports, agent.reports = agent.reports, []
        for fact, entity, tenant in reports:
            self._tell(agent, fact, entity, tenant)

    def _carry_out(self, agent: SimAgent, order: Envelope[Any]) -> None:
        data = order.data
        reason = self._refusal(agent, data)
        if reason is not None:
            self._tell(
                agent,
                CommandRefused(
                    command_id=order.id,
                    command=data.VERB,
                    node=agent.node,
                    epoch=agent.epoch,
                    job_id=getattr(data, "job_id", ""),
                    attempt=getattr(data, "attempt", 0),
                    fence=getattr(data, "fence", 0),
                    reason=reason,
                ),
                getattr(data, "job_id", agent.node),
                order.tenant,
            )
        elif isinstance(data, ReconcileNode):
            self._reconcile(agent, data)
        elif isinstance(data, LaunchWorkers):
            for plan in data.workers:
                self._launch(agent, data, plan)
        elif isinstance(data, StopWorkers):
            self._stop(agent, data)

    def _refusal(self, agent: SimAgent, data: Any) -> Reason | None:
        if data.epoch != agent.epoch:
            return because(Code.WRONG_EPOCH, epoch=data.epoch, current=agent.epoch)
        if self.clock.now >= data.expires_at:
            return because(Code.EXPIRED)
        if isinstance(data, ReconcileNode):
            return None
        if not agent.is_reconciled:
            return because(Code.NOT_RECONCILED)
        if isinstance(data, LaunchWorkers):
            if data.fence < agent.job_fences.get(data.job_id, 0):
                return because(Code.OLD_FENCE, newest=agent.job_fences[data.job_id])
            if data.fence <= agent.stopped_fences.get(data.job_id, -1):
                return because(Code.OLD_FENCE, stopped=agent.stopped_fences[data.job_id])
            return self._busy(agent, data)
        return None

    def _busy(self, agent: SimAgent, data: LaunchWorkers) -> Reason | None:
        for plan in data.workers:
            if (data.job_id, data.fence, plan.worker) in agent.launched:
                continue
            for gpu in plan.gpus:
                if gpu in agent.unclean:
                    return because(Code.GPU_BUSY, gpu=gpu)
                if plan.gpu_milli < 1000 or plan.slice is not None:
                    continue
                holder = next((w for w in agent.workers.values() if gpu in w.gpus), None)
                if holder is not None and holder.key != (data.job_id, plan.worker):
                    return because(Code.GPU_BUSY, gpu=gpu, held_by=holder.job_id)
        return None

    def _reconcile(self, agent: SimAgent, data: ReconcileNode) -> None:
        keep = {(k.job_id, k.worker): k.fence for k in data.keep}
        for worker in list(agent.workers.values()):
            if worker.stage is not Stage.EXITED and keep.get(worker.key) != worker.fence:
                self._exit(agent, worker, code=KILLED, is_saved=False)
        agent.is_reconciled = True

    def _launch(self, agent: SimAgent, data: LaunchWorkers, plan: WorkerPlan) -> None:
        key = (data.job_id, data.fence, plan.worker)
        if key in agent.launched:
            return
        agent.launched.add(key)
        agent.job_fences[data.job_id] = max(data.fence, agent.job_fences.get(data.job_id, 0))
        worker = SimWorker(data.job_id, data.tenant, data.attempt, data.fence, plan.worker, plan.gpus)
        agent.workers[worker.key] = worker
        self.launches.append((data.job_id, data.attempt, data.fence, plan.worker, agent.node))
        progress = self._progress(worker, needed=int(data.env.get("BERTH_WORKERS", "1")))
        if agent.refuses_starts:
            self._exit(agent, worker, reason=because(Code.START_REFUSED, node=agent.node))
        elif progress.program.crash_as_refusal and progress.may_crash:
            self._refuse_later(agent, worker, progress)
        else:
            self._started(agent, worker)

    def _refuse_later(self, agent: SimAgent, worker: SimWorker, progress: Progress) -> None:
        progress.crashed += 1

        def refuse() -> None:
            if agent.workers.get(worker.key) is worker and worker.stage is Stage.STARTING:
                self._exit(agent, worker, reason=because(Code.START_REFUSED, node=agent.node))

        self.clock.at(self.clock.now + timedelta(seconds=progress.program.crash_after or 0), refuse)

    def _started(self, agent: SimAgent, worker: SimWorker) -> None:
        worker.stage = Stage.RUNNING
        self.on_worker(worker, "started")
        self._tell(
            agent,
            WorkerStarted(**_ids(agent, worker), started_at=self.clock.now + agent.clock_offset),
            worker.job_id,
            worker.tenant,
        )
        self._join(worker)
        cold_start = self._progress(worker).program.cold_start
        if cold_start is not None:
            self.clock.at(self.clock.now + timedelta(seconds=cold_start), lambda: self._check_health(agent, worker))

    def _check_health(self, agent: SimAgent, worker: SimWorker) -> None:
        """A replica that has loaded answers its health check, if its version works."""
        is_there = agent.workers.get(worker.key) is worker and worker.stage is Stage.RUNNING
        if is_there and not worker.is_fenced and self.is_healthy(worker.job_id):
            self._tell(agent, WorkerReady(**_ids(agent, worker)), worker.job_id, worker.tenant)

    def check_health(self, job_id: str) -> None:
        """The health of a replica may have changed: what its check says now."""
        for node, worker in self.running(job_id):
            agent = self.agents[node]
            fact = WorkerReady(**_ids(agent, worker), is_ready=self.is_healthy(job_id))
            self._tell(agent, fact, worker.job_id, worker.tenant)

    def _join(self, worker: SimWorker) -> None:
        """The worker takes part in the job's work, which goes on when all of them do."""
        progress = self._progress(worker)
        progress.members.add(worker.number)
        if progress.since is None and len(progress.members) >= progress.needed:
            progress.starts += 1
            progress.begin(self.clock.now)
            self._set_alarms(worker.job_id, progress)

    def _set_alarms(self, job_id: str, progress: Progress) -> None:
        run, members = progress.run, progress.members
        crash = progress.crashes_at()
        if crash is not None:
            self.clock.at(crash, lambda: self._crash(job_id, progress, run))
        end = progress.ends_at()
        if end is not None:
            self.clock.at(end, lambda: self._finish(job_id, progress, run, members))

    def _crash(self, job_id: str, progress: Progress, run: int) -> None:
        if progress.run == run:
            progress.crashed += 1
            for agent, worker in self._members(job_id, progress):
                self._exit(agent, worker, code=1, message="crashed", is_saved=False)

    def _finish(self, job_id: str, progress: Progress, run: int, members: set[int]) -> None:
        if progress.run == run:
            for agent, worker in self._members(job_id, progress):
                self._exit(agent, worker, code=0)

    def _members(self, job_id: str, progress: Progress) -> list[tuple[SimAgent, SimWorker]]:
        return [
            (agent, worker)
            for agent in self.agents.values()
            for worker in list(agent.workers.values())
            if worker.job_id == job_id and worker.number in progress.members and worker.stage is Stage.RUNNING
        ]

    def _stop(self, agent: SimAgent, data: StopWorkers) -> None:
        agent.stopped_fences[data.job_id] = max(data.fence, agent.stopped_fences.get(data.job_id, -1))
        chosen = [
            w
            for w in agent.workers.values()
            if w.job_id == data.job_id and w.fence == data.fence and (data.workers is None or w.number in data.workers)
        ]
        for worker in chosen:
            if worker.is_stopping or worker.stage is Stage.EXITED:
                continue
            worker.is_stopping = True
            progress = self._progress(worker)
            seconds = min(progress.program.stop_seconds, data.grace_seconds)
            in_time = progress.program.stop_seconds <= data.grace_seconds
            self._stop_later(agent, worker, seconds, in_time=in_time)

    def _stop_later(self, agent: SimAgent, worker: SimWorker, seconds: float, *, in_time: bool) -> None:
        progress = self._progress(worker)
        if in_time:
            progress.halt(self.clock.now, is_saved=True)

        def end() -> None:
            if agent.workers.get(worker.key) is worker and worker.stage is not Stage.EXITED:
                self._exit(agent, worker, code=TERMINATED if in_time else KILLED, is_saved=in_time)

        self.clock.at(self.clock.now + timedelta(seconds=seconds), end)

    def _exit(
        self,
        agent: SimAgent,
        worker: SimWorker,
        *,
        code: int | None = None,
        reason: Reason | None = None,
        message: str = "",
        is_saved: bool = True,
    ) -> None:
        worker.stage = Stage.EXITED
        self._leave(worker, is_saved=is_saved)
        self.on_worker(worker, "exited")
        self._tell(
            agent,
            WorkerExited(
                **_ids(agent, worker),
                exit_code=code,
                reason=reason,
                message=message,
                ended_at=self.clock.now + agent.clock_offset,
            ),
            worker.job_id,
            worker.tenant,
        )
        dirty = [gpu for gpu in worker.gpus if agent.memory_gib.get(gpu, 0) > 0]
        if not dirty or self.clean_wait is None:
            self._release(agent, worker)
            return

        def give_up() -> None:
            if agent.workers.get(worker.key) is not worker:
                return
            for gpu in dirty:
                if agent.memory_gib.get(gpu, 0) > 0:
                    self._unclean(agent, gpu, after_job=True)
            later = self.clock.now + timedelta(seconds=RELEASE_AFTER_REPORT_SECONDS)
            self.clock.at(later, lambda: self._release(agent, worker))

        self.clock.at(self.clock.now + timedelta(seconds=self.clean_wait), give_up)

    def _release(self, agent: SimAgent, worker: SimWorker) -> None:
        if agent.workers.get(worker.key) is worker:
            del agent.workers[worker.key]
            self._tell(agent, WorkerReleased(**_ids(agent, worker)), worker.job_id, worker.tenant)

    def _vanish(self, agent: SimAgent, worker: SimWorker) -> None:
        del agent.workers[worker.key]
        self._leave(worker, is_saved=False)
        self.on_worker(worker, "exited")

    def _leave(self, worker: SimWorker, *, is_saved: bool) -> None:
        progress = self._progress(worker)
        if worker.number in progress.members:
            progress.members.discard(worker.number)
            progress.halt(self.clock.now, is_saved=is_saved)

    def _progress(self, worker: SimWorker, *, needed: int | None = None) -> Progress:
        """The work a worker takes part in: one for a gang, one for each worker where it works alone."""
        key = (worker.job_id, worker.number if self.works_alone(worker.job_id) else -1)
        progress = self.progress.get(key)
        if progress is None:
            progress = self.progress[key] = Progress(self.program_of(worker.job_id))
        if needed is not None:
            progress.needed = 1 if key[1] >= 0 else needed
        return progress

    # ----------------------------------------------------------------------------------------------------------- tell
    def _tell(self, agent: SimAgent, fact: Fact, entity: str, tenant: str) -> None:
        if agent.is_heard:
            self.bus.tell(fact, entity, service=AGENT, tenant=tenant, actor=f"agent:{agent.node}")
        else:
            agent.reports.append((fact, entity, tenant))

    def _condition(self, agent: SimAgent, gpu: str, **what: Any) -> None:
        fact = GpuConditionReported(
            node=agent.node, epoch=agent.epoch, gpu=gpu, at=self.clock.now + agent.clock_offset, **what
        )
        self._tell(agent, fact, agent.node, "")

    def _uuid(self, node: str, index: int) -> str:
        return self.agents[node].description.gpus[index].uuid

    def _index(self, agent: SimAgent, gpu: str) -> int:
        return next(g.index for g in agent.description.gpus if g.uuid == gpu)


def _ids(agent: SimAgent, worker: SimWorker) -> dict[str, Any]:
    return {
        "job_id": worker.job_id,
        "attempt": worker.attempt,
        "fence": worker.fence,
        "worker": worker.number,
        "node": agent.node,
        "epoch": agent.epoch,
    }
