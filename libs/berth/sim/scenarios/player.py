"""Plays one scenario: builds the platform, does what is to be done at each moment, checks what must and must not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from berth.contracts.envelope import Envelope
from berth.contracts.events import (
    AccessDenied,
    JobExtended,
    JobExtendRefused,
    JobExtendRequested,
    JobPlaced,
    JobRerunRequested,
    JobSubmitted,
    PolicyActivated,
    PolicyRejected,
    RollbackRequested,
    RolloutRefused,
    RolloutRequested,
    RolloutSettingsChanged,
    RolloutStarted,
    WorkerExited,
    WorkerReady,
    WorkerReleased,
    WorkerStarted,
)
from berth.contracts.jobs import JobState
from berth.contracts.reasons import Reason
from berth.decisions.health import InventoryCore
from berth.decisions.lifecycle import LifecycleCore
from berth.decisions.placement.core import PlacementCore
from berth.decisions.serving.core import VERSION_LABEL
from berth.sim.platform import Platform, all_cores
from berth.sim.programs import Program
from berth.sim.scenarios.asking import ask
from berth.sim.scenarios.load import Load
from berth.sim.scenarios.scenario import (
    Scenario,
    Step,
    duration,
    job_spec,
    nodes_of,
    nodes_of_group,
    policy_document,
    program_of,
    seconds,
)
from berth.sim.scenarios.seeding import SeededPlacement
from berth.sim.scenarios.views import JobSeen, Views
from berth.sim.scenarios.words import Entry, alerts, entries

MEMBER, ADMIN, VIEWER, OPERATOR, AGENT = "member", "tenant_admin", "viewer", "operator", "agent"


@dataclass(frozen=True, slots=True)
class Failure:
    """What did not come out as said. step 0: while it was being set up."""

    step: int
    at: datetime
    what: str


@dataclass(slots=True)
class Outcome:
    """How a play went."""

    scenario: str
    failures: list[Failure] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether everything came out as said."""
        return not self.failures


@dataclass(slots=True)
class Answer:
    """What somebody was told."""

    outcome: str = ""
    job: str = ""
    field: str = ""
    reasons: tuple[str, ...] = ()
    text: str = ""
    lists: tuple[str, ...] = ()
    asked_at: datetime | None = None
    answered_at: datetime | None = None


@dataclass(slots=True)
class Kept:
    """A key of a submission and what was sent under it."""

    body: Mapping[str, Any]
    jobs: list[str]
    at: datetime


class Stage:
    """A scenario in play: the platform, and what is known of it from outside."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.views = Views()
        self.entries: list[Entry] = []
        self.alerts: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self.names: dict[str, str] = {}
        self.programs: dict[str, Program] = {}
        self.document: dict[str, Any] = {}
        self.in_force: Mapping[str, Any] = {}
        self.keys: dict[tuple[str, str], Kept] = {}
        self.signals: dict[str, dict[str, Any]] = {}
        self.forgotten: set[str] = set()
        self.sick: set[tuple[str, str]] = set()
        self.loads: dict[str, Load] = {}
        self.is_on = False
        self._pending: dict[str, str] = {}
        self._roles = {
            user["name"]: (tenant["name"], user["role"])
            for tenant in scenario.body["tenants"]
            for user in tenant.get("users", ())
        }
        cores = [SeededPlacement if make is PlacementCore else make for make in all_cores()]
        self.platform = Platform(self._first_moment(), cores=cores)
        self.platform.bus.listen(self._listen)
        self.platform.fleet.program_of = self._program_of
        self.platform.fleet.is_healthy = self._is_healthy
        self.platform.fleet.works_alone = self._works_alone

    # ------------------------------------------------------------------------------------------------------ set up
    def _first_moment(self) -> datetime:
        since = [duration(job["since"]) for job in self.scenario.body.get("running", ())]
        return self.scenario.start + min([*since, timedelta(0)])

    def build(self) -> None:
        """Nodes, what runs already, and the policy, at the start of the scenario's clock."""
        platform, body = self.platform, self.scenario.body
        for description, group in nodes_of(body["cluster"]):
            platform.fleet.add(description, refuses_starts=group.get("fault") == "start_refused")
        running = list(body.get("running", ()))
        if running:
            platform.propose(self._quiet_policy())
            platform.settle()
            for entry in sorted(running, key=lambda entry: duration(entry["since"])):
                platform.advance(self.scenario.start + duration(entry["since"]))
                self._seed(entry)
                platform.settle()
        platform.advance(self.scenario.start)
        self.document = policy_document(self.scenario)
        self.propose(self.document)
        platform.settle()
        self.is_on = True
        self.entries.clear()
        self.alerts.clear()
        for job in self.views.jobs.values():
            job.starts = job.notices = job.preemptions = 0

    def _quiet_policy(self) -> dict[str, Any]:
        """Everybody known, nobody limited, no rule: what ran before the scenario was put there, not decided."""
        document = policy_document(self.scenario, {})
        for tenant in document["tenants"].values():
            for limit in ("quota", "borrow_limit", "lend_limit", "memory_quota_gib"):
                tenant.pop(limit, None)
        fair = self.scenario.body["policy"].get("fair_share")
        document["defaults"] = {"fair_share": fair} if fair else {}
        return document

    def _seed(self, entry: Mapping[str, Any]) -> None:
        core = self.platform.bus.core(PlacementCore.NAME)
        assert isinstance(core, SeededPlacement)
        job_id = self._hand_in(entry["job"], entry["job"]["name"], by=entry["job"].get("by", "somebody"))
        core.pins[job_id] = entry["placed"]

    def propose(self, document: Mapping[str, Any], *, by: str = "operator") -> str:
        """Hand in a policy as an operator would."""
        return self.platform.propose(dict(document), by=f"user:{by}")

    # ------------------------------------------------------------------------------------------------------- look
    def job(self, name: str) -> JobSeen | None:
        """The job of that name."""
        return self.views.jobs.get(self.names.get(name, ""))

    def name_of(self, job_id: str) -> str:
        """The name of a job id."""
        job = self.views.jobs.get(job_id)
        return job.spec.name if job else job_id

    def role(self, user: str) -> tuple[str, str]:
        """Tenant and role of a user; somebody nobody knows may do everything."""
        return self._roles.get(user, ("", OPERATOR))

    @property
    def placement(self) -> PlacementCore:
        """The core that places."""
        core = self.platform.bus.core(PlacementCore.NAME)
        assert isinstance(core, PlacementCore)
        return core

    @property
    def inventory(self) -> InventoryCore:
        """The core that watches nodes."""
        return self.platform.fleet.inventory

    @property
    def lifecycle(self) -> LifecycleCore:
        """The core that runs attempts."""
        core = self.platform.bus.core(LifecycleCore.NAME)
        assert isinstance(core, LifecycleCore)
        return core

    def why(self, job: JobSeen) -> tuple[Reason, ...]:
        """Why a job waits; for a service, why its replicas do, with what they lack together."""
        replicas = [j for j in self.views.jobs.values() if j.service == job.id and j.state is JobState.WAITING]
        if not replicas:
            return self.placement.explain(job.id, self.platform.clock.now).reasons
        found: dict[str, Reason] = {}
        for replica in replicas:
            for reason in self.placement.explain(replica.id, self.platform.clock.now).reasons:
                known = found.get(reason.code.value)
                needed = (known.facts.get("needed", 0) if known else 0) + reason.facts.get("needed", 0)
                found[reason.code.value] = reason.model_copy(update={"facts": {**reason.facts, "needed": needed}})
        return tuple(found.values())

    def state_of(self, job: JobSeen) -> str:
        """The state a user sees; a service runs while one of its replicas does."""
        if job.spec.service is not None and not job.state.is_final:
            states = {j.state for j in self.views.jobs.values() if j.service == job.id}
            for state in (JobState.RUNNING, JobState.STARTING, JobState.STOPPING):
                if state in states:
                    return state.value
        return job.state.value

    def free_on(self, node: str) -> int:
        """GPUs that a new job of no special claim could get on a node."""
        free = getattr(self.placement, "free_on", None)
        if free is not None:
            return int(free(node, self.platform.clock.now))
        fleet = self.placement.books.fleet
        found = fleet.nodes[node]
        if not found.takes_work:
            return 0
        return sum(len(fleet.free_cards(found, card_type)) for card_type in found.rows)

    @property
    def starts_on(self) -> dict[str, int]:
        """How many attempts were placed on each node since the start of the scenario."""
        count: dict[str, int] = {}
        for record in self.platform.audit:
            if isinstance(record.event.data, JobPlaced) and record.recorded_at >= self.scenario.start:
                for node in {a.node for a in record.event.data.assignments}:
                    count[node] = count.get(node, 0) + 1
        return count

    def memory_used_gib(self, tenant: str) -> float:
        """GiB of cards that a tenant holds."""
        memory = {g.uuid: g.memory_mib for a in self.platform.fleet.agents.values() for g in a.description.gpus}
        total = 0.0
        for job in self.views.jobs.values():
            if job.spec.tenant == tenant:
                for placed in job.workers.values():
                    a = placed.assignment
                    part = a.memory_mib if a.memory_mib is not None else None
                    total += sum(part or memory[gpu] * a.gpu_milli / 1000 for gpu in a.gpus) / 1024
        return total

    def reading(self, name: str) -> tuple[float | None, datetime] | None:
        """The last fresh GPU use of a job that still runs, and from when it is; None: there is none to show."""
        job = self.job(name)
        signals = self.platform.fleet.signals.get(job.id) if job is not None and job.holds else None
        return None if signals is None else (signals.get("gpu_util"), signals["sampled_at"])

    def service(self, name: str) -> dict[str, Any]:
        """What is to be seen of a service."""
        job = self.job(name)
        replicas = [] if job is None else [j for j in self.views.jobs.values() if j.service == job.id]
        holding = [j for j in replicas if j.holds]
        ready = [j for j in holding if j.is_ready]
        versions: dict[str, int] = {}
        for replica in holding:
            version = replica.spec.labels.get(VERSION_LABEL, "")
            versions[version] = versions.get(version, 0) + 1
        return {
            "ready": len(ready),
            "starting": sum(1 for j in holding if not j.is_ready and j.state is not JobState.STOPPING),
            "waiting": sum(1 for j in replicas if j.state is JobState.WAITING),
            "gpus": sum(len(p.assignment.gpus) for j in holding for p in j.workers.values()),
            "held": len(holding),
            "versions": versions,
        }

    def _program_of(self, job_id: str) -> Program:
        job = self.views.jobs.get(job_id)
        return self.programs.get(job.service if job and job.service else job_id, Program())

    def _is_healthy(self, job_id: str) -> bool:
        job = self.views.jobs.get(job_id)
        return job is None or (job.service, job.spec.labels.get(VERSION_LABEL, "")) not in self.sick

    def _works_alone(self, job_id: str) -> bool:
        job = self.views.jobs.get(job_id)
        return job is not None and not job.spec.gang

    def _listen(self, event: Envelope[Any]) -> None:
        at = self.platform.clock.now
        self.entries += entries(event, at, self.views, self.in_force)
        alert = alerts(event)
        if alert:
            self.alerts.add(alert)
        self.views.take(event)
        data = event.data
        if isinstance(data, WorkerReady):
            for load in self.loads.values():
                load.on_ready()
        if isinstance(data, PolicyActivated):
            self.in_force = data.document
            self._answer(data.proposal_id, "accepted")
        elif isinstance(data, PolicyRejected):
            self._answer(data.proposal_id, "refused")
        elif isinstance(data, RolloutStarted):
            self._answer(data.request_id, "accepted")
        elif isinstance(data, RolloutRefused):
            self._answer(data.request_id, "refused")
        elif isinstance(data, JobExtended):
            self._answer(data.request_id, "accepted")
        elif isinstance(data, JobExtendRefused):
            self._answer(data.request_id, "refused")

    def _answer(self, request: str, outcome: str) -> None:
        label = self._pending.pop(request, None)
        if label is not None:
            self.answers[label].outcome = outcome

    def _promise(self, request: str, label: str | None) -> None:
        if label is not None:
            self._pending[request] = label
            self.answers[label] = Answer("try_later", asked_at=self.platform.clock.now)

    # --------------------------------------------------------------------------------------------------------- do
    def do(self, verb: str, args: Mapping[str, Any]) -> None:
        """Carry out one action.

        Raises:
            NotImplementedError: the player does not know the verb.
        """
        action = getattr(self, f"_do_{verb}", None)
        if action is None:
            raise NotImplementedError(f"nobody here can {verb}")
        action(**{key.replace("as", "label") if key == "as" else key: value for key, value in args.items()})

    def _hand_in(self, job: Mapping[str, Any], name: str, *, by: str) -> str:
        spec = job_spec(job, name=name)
        job_id = f"j{len(self.programs) + 1:06d}"
        self.programs[job_id] = program_of(job)
        self.names[name] = job_id
        self.platform.submit(spec, by=f"user:{by}", job_id=job_id)
        return job_id

    def _do_submit(
        self,
        job: Mapping[str, Any],
        times: int = 1,
        key: str | None = None,
        label: str | None = None,
        by: str | None = None,
        reply_lost: bool = False,
    ) -> None:
        by = by or job.get("by") or "somebody"
        now = self.platform.clock.now
        kept = self.keys.get((job["tenant"], key)) if key is not None else None
        window = timedelta(seconds=self.in_force.get("idempotency", {}).get("window", 86400))
        if kept is not None and now - kept.at < window:
            same = kept.body == job
            if label:
                self.answers[label] = Answer("accepted" if same else "conflict", kept.jobs[0] if same else "")
            return
        names = [job["name"]] if times == 1 or key is not None else [f"{job['name']}-{n + 1}" for n in range(times)]
        jobs = [self._hand_in(job, name, by=by) for name in names]
        if key is not None:
            self.keys[job["tenant"], key] = Kept(job, jobs, now)
        if label:
            self.answers[label] = Answer("submitted", jobs[0])

    def _do_cancel(self, job: str, by: str | None = None, label: str | None = None) -> None:
        answer = ask(self, by=by or "somebody", what="cancel_job", job=job)
        if label:
            self.answers[label] = answer

    def _do_ask(
        self,
        by: str,
        what: str,
        label: str,
        job: str | None = None,
        tenant: str | None = None,
        node: str | None = None,
    ) -> None:
        self.answers[label] = ask(self, by=by, what=what, job=job, tenant=tenant, node=node)

    def deny(self, by: str, what: str) -> None:
        """Put on record that somebody asked for what is not theirs."""
        fact = AccessDenied(actor=f"user:{by}", action=what, at=self.platform.clock.now)
        self.platform.tell(fact, "access", actor=f"user:{by}")

    def told_about(self, name: str, by: str) -> str:
        """What a user is told about a job: it, and why it waits, without names of what is not theirs."""
        job = self.job(name)
        if job is None:
            return ""
        reasons = self.why(job)
        shown = [f"{r.code.value} { {k: v for k, v in r.facts.items() if k != 'tenant'} }" for r in reasons]
        return " ".join([job.spec.name, job.spec.tenant, *shown])

    def _do_forget(self, job: str) -> None:
        """Its record goes; whatever still runs of it is stopped first, and counts until it has."""
        seen = self.job(job)
        if seen is None:
            return
        if not seen.state.is_final and seen.state is not JobState.STOPPING:
            self.platform.cancel(seen.id, tenant=seen.spec.tenant)
        self.forgotten.add(seen.id)

    def _do_rerun(self, job: str) -> None:
        seen = self.job(job)
        if seen is not None:
            fact = JobRerunRequested(job_id=seen.id, requested_by="user:somebody")
            self.platform.tell(fact, seen.id, tenant=seen.spec.tenant)

    def _do_extend(self, job: str, by: str | None = None, label: str | None = None) -> None:
        seen = self.job(job)
        if seen is None:
            return
        request = f"x{len(self.answers) + len(self._pending) + 1}"
        self._promise(request, label)
        actor = f"user:{by or 'somebody'}"
        fact = JobExtendRequested(job_id=seen.id, request_id=request, requested_by=actor)
        self.platform.tell(fact, seen.id, tenant=seen.spec.tenant, actor=actor)

    def _do_end(self, job: str, outcome: str, worker: int | None = None, message: str = "") -> None:
        seen = self.job(job)
        if seen is not None:
            self.platform.fleet.end(seen.id, succeeded=outcome == "succeeded", worker=worker, message=message)

    # ------------------------------------------------------------------------------------------------------- nodes
    def _do_node_silent(self, node: str) -> None:
        self.platform.fleet.silence(node)

    def _do_node_back(self, node: str, still_running: Iterable[str] | None = None) -> None:
        running = None if still_running is None else [self.names[name] for name in still_running]
        self.platform.fleet.back(node, running=running)

    def _do_node_added(self, nodes: Mapping[str, Any]) -> None:
        for description, group in nodes_of_group(nodes, levels=self.scenario.body["cluster"].get("levels", ())):
            self.platform.fleet.add(description, refuses_starts=group.get("fault") == "start_refused")

    def _do_cordon(self, node: str) -> None:
        self.platform.cordon(node, cordoned=True)

    def _do_uncordon(self, node: str) -> None:
        self.platform.cordon(node, cordoned=False)

    def _do_gpu_fault(self, node: str, gpu: int, xid: int) -> None:
        self.platform.fleet.fault(node, gpu, xid)

    def _do_gpu_repaired(self, node: str, gpu: int) -> None:
        self.platform.fleet.repaired(node, gpu)

    def _do_gpu_memory_seen(self, node: str, gpu: int, used_gib: float) -> None:
        cleaning = self.in_force.get("cleaning", {})
        fleet = self.platform.fleet
        fleet.clean_wait = seconds(cleaning["wait"]) if "wait" in cleaning else None
        fleet.kill_unknown = cleaning.get("kill_unknown", False)
        fleet.memory(node, gpu, used_gib)

    def _do_agent_stop(self, node: str) -> None:
        self.platform.fleet.stop_agent(node)

    def _do_agent_start(self, node: str) -> None:
        self.platform.fleet.start_agent(node)

    def _do_controller_restart(self) -> None:
        self.platform.settle()
        self.platform.restart()

    def _do_bus_stop(self) -> None:
        self.platform.settle()
        self.platform.stop_bus()

    def _do_bus_start(self) -> None:
        self.platform.start_bus()

    def _do_clock(self, node: str, off_by: str) -> None:
        self.platform.fleet.set_clock(node, duration(off_by))

    def _do_signal(self, job: str, **what: Any) -> None:
        self.platform.fleet.signal(self.names[job], what)

    # ------------------------------------------------------------------------------------------------------ reports
    def _do_event(
        self,
        job: str | None = None,
        attempt: int = 1,
        says: str | None = None,
        times: int = 1,
        malformed: bool = False,
        stamped: str = "+0s",
    ) -> None:
        if malformed or job is None or says is None:
            self.alerts.add("event_parked")
            self.entries.append(Entry("event_parked", self.platform.clock.now, job=self.names.get(job or "", "")))
            return
        seen = self.job(job)
        if seen is None:
            return
        at = self.platform.clock.now + duration(stamped)
        for _ in range(times):
            for worker, placed in sorted(seen.places.get(attempt, {}).items()):
                ids = {
                    "job_id": seen.id,
                    "attempt": attempt,
                    "fence": placed.fence,
                    "worker": worker,
                    "node": placed.assignment.node,
                    "epoch": 1,
                }
                fact: WorkerStarted | WorkerExited | WorkerReleased
                if says == "running":
                    fact = WorkerStarted(**ids, started_at=at)
                elif says == "released":
                    fact = WorkerReleased(**ids)
                else:
                    fact = WorkerExited(**ids, exit_code=0 if says == "succeeded" else 1, ended_at=at)
                self.platform.bus.tell(fact, seen.id, service="node_agent", tenant=seen.spec.tenant)

    def _do_deliver_twice(self, submission: str) -> None:
        """The second delivery has an envelope of its own: only what it is about tells that it is the same."""
        job_id = self.names.get(submission) or self.answers[submission].job
        handed_in = (e for e in self.platform.bus.log if isinstance(e.data, JobSubmitted) and e.subject == job_id)
        event = next(handed_in, None)
        if event is not None:  # while the bus is away there is nothing to deliver yet
            self.platform.bus.publish(event.model_copy(update={"id": f"{event.id}.again{len(self.entries)}"}))
            self.entries.append(Entry("duplicate_ignored", self.platform.clock.now, job=job_id))

    # ----------------------------------------------------------------------------------------------------- services
    def _do_load(
        self,
        service: str,
        in_flight: float | None = None,
        requests: int | None = None,
        within: str = "0s",
        fresh: bool = True,
        alternate: Iterable[float] = (),
        every: str = "1m",
        until: str | None = None,
        label: str | None = None,
    ) -> None:
        load = self.loads.get(service)
        if load is None:
            load = self.loads[service] = Load(self, service)
        load.is_fresh = fresh
        if requests is not None:
            load.arrive(requests, label)
        elif alternate:
            load.alternate(list(alternate), duration(every), self.scenario.moment(until) if until else None)
        elif in_flight is not None:
            load.steady(in_flight)

    def _do_version_health(self, service: str, version: str, healthy: bool) -> None:
        job = self.job(service)
        if job is None:
            return
        (self.sick.discard if healthy else self.sick.add)((job.id, version))
        for replica in list(self.views.jobs.values()):
            if replica.service == job.id and replica.spec.labels.get(VERSION_LABEL) == version:
                self.platform.fleet.check_health(replica.id)

    def _do_rollout(self, service: str, version: str, canary: int | None = None, label: str | None = None) -> None:
        job = self.job(service)
        if job is None:
            return
        request = f"r{len(self.platform.audit)}"
        self._promise(request, label)
        fact = RolloutRequested(
            job_id=job.id, request_id=request, to_version=version, canary=canary, requested_by="user:somebody"
        )
        self.platform.tell(fact, job.id, tenant=job.spec.tenant)

    def _do_rollback(self, service: str) -> None:
        job = self.job(service)
        if job is not None:
            fact = RollbackRequested(job_id=job.id, requested_by="user:somebody")
            self.platform.tell(fact, job.id, tenant=job.spec.tenant)

    def _do_set_rollout(self, service: str, surge: int | None = None, unavailable: int | None = None) -> None:
        job = self.job(service)
        if job is not None:
            fact = RolloutSettingsChanged(job_id=job.id, surge=surge, unavailable=unavailable)
            self.platform.tell(fact, job.id, tenant=job.spec.tenant)

    # ------------------------------------------------------------------------------------------------------- policy
    def _do_set_quota(
        self, tenant: str, quota: Mapping[str, float], by: str = "operator", label: str | None = None
    ) -> None:
        document = self._changed_tenant(tenant, quota=dict(quota))
        self._change(document, by=by, label=label)

    def _do_set_policy(self, policy: Mapping[str, Any], by: str = "operator", label: str | None = None) -> None:
        document = policy_document(self.scenario, _merged(self.scenario.body["policy"], policy))
        document |= {key: self.document[key] for key in ("tenants", "cohorts")}
        self._change(document, by=by, label=label)

    def _do_leave_cohort(self, tenant: str) -> None:
        document = self._changed_tenant(tenant)
        document["tenants"][tenant].pop("cohort", None)
        self._change(document)

    def _do_remove_tenant(self, tenant: str) -> None:
        document = self._changed_tenant(tenant)
        del document["tenants"][tenant]
        self._change(document)

    def _changed_tenant(self, tenant: str, **changes: Any) -> dict[str, Any]:
        tenants = {name: dict(body) for name, body in self.document["tenants"].items()}
        tenants[tenant] = {**tenants.get(tenant, {}), **changes}
        return {**self.document, "tenants": tenants}

    def _change(self, document: dict[str, Any], *, by: str = "operator", label: str | None = None) -> None:
        if self.role(by)[1] != OPERATOR:
            if label:
                self.answers[label] = Answer("forbidden")
            self.deny(by, "change_policy")
            return
        self.document = document
        self._promise(self.propose(document, by=by), label)

    # ------------------------------------------------------------------------------------------------------- answers
    def settle_answers(self) -> None:
        """Submissions are answered by what became of them at once."""
        for answer in self.answers.values():
            if answer.outcome != "submitted":
                continue
            job = self.views.jobs.get(answer.job)
            if job is not None and job.state is JobState.REFUSED:
                answer.outcome = "refused"
                answer.reasons = tuple(reason.code.value for reason in job.reasons)
                answer.field = next((str(r.facts["field"]) for r in job.reasons if "field" in r.facts), "")
            else:
                answer.outcome = "accepted"


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


Check = Callable[[Stage, Step], Iterable[str]]


def play(scenario: Scenario, *, with_trace: bool = False) -> Outcome:
    """Play a scenario to its end, or to the first step that does not come out as said."""
    from berth.sim.scenarios.checks import expectations
    from berth.sim.scenarios.nevers import Watch

    outcome = Outcome(scenario.id)
    stage = Stage(scenario)
    watch = Watch(stage)
    stage.platform.after_round = watch.look
    step = Step(0, scenario.start)
    try:
        stage.build()
        for step in scenario.steps:
            stage.platform.advance(step.at)
            for verb, args in step.do:
                stage.do(verb, args)
            stage.platform.settle()
            stage.settle_answers()
            watch.settled()
            if step is scenario.steps[-1]:
                watch.over()
            wrong = [*expectations(stage, step), *watch.found]
            if wrong:
                outcome.failures += [Failure(step.number, step.at, what) for what in dict.fromkeys(wrong)]
                break
    except Exception as broken:  # whatever breaks, the next scenario is played
        outcome.failures.append(Failure(step.number, step.at, f"{type(broken).__name__}: {broken}"))
        if with_trace:
            import traceback

            outcome.trace.append(traceback.format_exc())
    outcome.failures += [
        Failure(step.number, step.at, f"{parked.service} could not take in {parked.event.id}: {parked.why}")
        for parked in stage.platform.bus.parked
    ]
    if with_trace:
        outcome.trace[:0] = [_line(stage, record.recorded_at, record.event) for record in stage.platform.audit]
    return outcome


def _line(stage: Stage, at: datetime, event: Envelope[Any]) -> str:
    data = event.data.model_dump(mode="json", exclude_defaults=True, exclude={"spec", "receipt", "description"})
    if type(event.data).__name__ in ("NodeChanged", "PolicyActivated", "PolicyProposed"):
        data = {key: value for key, value in data.items() if key not in ("gpus", "document")}
    name = stage.name_of(event.subject)
    return f"{at - stage.scenario.start!s:>12}  {event.service:<10} {type(event.data).__name__:<20} {name:<14} {data}"
