"""What must not be at any time: `never`, and the ground rules of every scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from berth.contracts.events import JobPlaced, PreemptionPlanned
from berth.contracts.jobs import JobState
from berth.sim.scenarios.checks import used
from berth.sim.scenarios.player import Stage
from berth.sim.scenarios.views import JobSeen

HOLDING = frozenset({JobState.STARTING, JobState.RUNNING, JobState.STOPPING, JobState.UNKNOWN})


class Watch:
    """Looks at the platform after everything that happens at one instant, and keeps what it found."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.found: list[str] = []
        self._reached: set[str] = set()
        self._launches = 0
        self._placed = 0
        self._used: dict[tuple[str, str], float] = {}
        self._read = 0
        self._keys: Counter[tuple[str, int, int, int]] = Counter()

    def settled(self) -> None:
        """Check what need only hold when everything that could follow has followed."""
        if not self.found:
            self.found += [f"ground rule: {what}" for what in self._waits_have_reasons()]

    def over(self) -> None:
        """Check what can only be said at the end."""
        if not self.found:
            self.found += [f"ground rule: {what}" for what in self._plans_were_for_somebody()]

    def look(self) -> None:
        """Check everything once."""
        stage = self.stage
        if not stage.is_on or self.found:
            return
        self.found += [f"never: {what}" for what in self._nevers()]
        self.found += [f"ground rule: {what}" for what in self._rules()]

    # ------------------------------------------------------------------------------------------------------- never
    def _nevers(self) -> Iterable[str]:
        for word, wanted in self.stage.scenario.never.items():
            check = getattr(self, f"_never_{word}", None)
            if check is None:
                yield f"nobody here can watch {word}"
            else:
                yield from check(wanted)

    def _never_preempted(self, names: Iterable[str]) -> Iterable[str]:
        return (f"{name} was preempted" for name in names if any(job.notices for job in self._all(name)))

    def _never_started(self, names: Iterable[str]) -> Iterable[str]:
        return (f"{name} was started" for name in names if any(job.starts for job in self._all(name)))

    def _never_stopped(self, names: Iterable[str]) -> Iterable[str]:
        return (f"{name} was stopped" for name in names if any(job.stopped_by_platform for job in self._all(name)))

    def _never_together(self, groups: Iterable[list[str]]) -> Iterable[str]:
        for group in groups:
            if all(any(job.holds for job in self._all(name)) for name in group):
                yield f"{group} held GPUs together"

    def _never_on_node(self, wanted: Mapping[str, Iterable[str]]) -> Iterable[str]:
        for name, nodes in wanted.items():
            on = {node for job in self._all(name) for node in job.nodes} & set(nodes)
            if on:
                yield f"{name} was on {sorted(on)}"

    def _never_started_before(self, wanted: Mapping[str, str]) -> Iterable[str]:
        for name, text in wanted.items():
            early = self.stage.platform.clock.now < self.stage.scenario.moment(text)
            if early and any(job.starts for job in self._all(name)):
                yield f"{name} was started before {text}"

    def _never_usage_over(self, wanted: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
        for tenant, types in wanted.items():
            for card_type, limit in types.items():
                was = used(self.stage, tenant, card_type)
                if was > limit + 1e-9:
                    yield f"{tenant} held {was} {card_type}, over {limit}"

    def _never_live_attempts_over(self, wanted: Mapping[str, int]) -> Iterable[str]:
        for name, limit in wanted.items():
            count = max((self._live_attempts(job.id) for job in self._all(name)), default=0)
            if count > limit:
                yield f"{name} had {count} live attempts"

    def _never_replicas_over(self, wanted: Mapping[str, int]) -> Iterable[str]:
        for name, limit in wanted.items():
            held = self.stage.service(name)["held"]
            if held > limit:
                yield f"{name} had {held} replicas, over {limit}"

    def _never_ready_under(self, wanted: Mapping[str, int]) -> Iterable[str]:
        return self._under("ready", wanted)

    def _never_replicas_under(self, wanted: Mapping[str, int]) -> Iterable[str]:
        return self._under("held", wanted)

    def _under(self, what: str, wanted: Mapping[str, int]) -> Iterable[str]:
        """Counts from the first time that the number was reached."""
        for name, limit in wanted.items():
            count = self.stage.service(name)[what]
            if count >= limit:
                self._reached.add(f"{what} {name}")
            elif f"{what} {name}" in self._reached:
                yield f"{name} had {count} {what}, under {limit}"

    def _never_split_over(self, wanted: Mapping[str, str]) -> Iterable[str]:
        agents = self.stage.platform.fleet.agents
        for name, level in wanted.items():
            for job in self._all(name):
                places = {agents[node].description.domain.get(level, node) for node in job.nodes}
                if len(places) > 1:
                    yield f"{name} was split over {level} {sorted(places)}"

    def _never_text(self, wanted: Iterable[str]) -> Iterable[str]:
        records = self.stage.platform.audit
        for record in records[self._read :]:
            text = record.event.to_json().decode()
            yield from (f"{hidden} stands in record {record.number}" for hidden in wanted if hidden in text)
        self._read = len(records)

    def _all(self, name: str) -> list[JobSeen]:
        job = self.stage.job(name)
        if job is None:
            return []
        return [job, *(other for other in self.stage.views.jobs.values() if other.service == job.id)]

    def _live_attempts(self, job_id: str) -> int:
        return len({worker.attempt for _, worker in self.stage.platform.fleet.running(job_id)})

    # -------------------------------------------------------------------------------------------------- ground rules
    def _rules(self) -> Iterable[str]:
        yield from self._one_holder()
        yield from self._gangs_whole()
        yield from self._launched_once()
        yield from self._within_quota()

    def _within_quota(self) -> Iterable[str]:
        """Whoever took more may hold it: own quota, what it may borrow, what others keep for themselves."""
        stage = self.stage
        placed = sum(job.starts for job in stage.views.jobs.values())
        if placed == self._placed:
            return
        self._placed = placed
        lines = stage.placement.quota(None, stage.platform.clock.now).lines
        used = {(line.tenant, line.card_type): line.used for line in lines}
        for (tenant, card_type), amount in used.items():
            if amount > self._used.get((tenant, card_type), 0) + 1e-9:
                limit = _ceiling(stage.in_force, used, tenant, card_type)
                if limit is not None and amount > limit + 1e-9:
                    yield f"{tenant} took {amount} {card_type}, and may hold {limit}"
        self._used = used

    def _waits_have_reasons(self) -> Iterable[str]:
        stage = self.stage
        waiting = [job for job in stage.views.jobs.values() if job.state is JobState.WAITING and not job.spec.service]
        for job in waiting:
            if not stage.placement.explain(job.id, stage.platform.clock.now).reasons:
                yield f"{job.spec.name} waits without a reason"

    def _plans_were_for_somebody(self) -> Iterable[str]:
        """Nobody was stopped for a job that then neither started nor stopped wanting the room."""
        stage = self.stage
        plans = [record for record in stage.platform.audit if isinstance(record.event.data, PreemptionPlanned)]
        for record in plans:
            plan = record.event.data
            job = stage.views.jobs.get(plan.preemptor)
            victims = [stage.views.jobs[victim.job_id] for victim in plan.victims]
            if job is None or any(victim.state is JobState.STOPPING for victim in victims):
                continue
            later = stage.platform.audit[record.number :]
            started = any(isinstance(r.event.data, JobPlaced) and r.event.data.job_id == job.id for r in later)
            if not started and not job.state.is_final:
                names = [victim.spec.name for victim in victims]
                yield f"{names} were stopped for {job.spec.name}, which never started"

    def _one_holder(self) -> Iterable[str]:
        whole: Counter[str] = Counter()
        milli: Counter[str] = Counter()
        for job in self.stage.views.jobs.values():
            for placed in job.workers.values():
                a = placed.assignment
                for gpu in a.gpus:
                    if a.slice is None and a.gpu_milli >= 1000:
                        whole[gpu] += 1
                    else:
                        milli[gpu] += 0 if a.slice else a.gpu_milli
        for gpu, count in whole.items():
            if count > 1:
                yield f"{gpu} has {count} holders"
            if gpu in milli:
                yield f"{gpu} is held whole and in part"
        for gpu, sum_ in milli.items():
            # thousandths are rounded for the wire; the exact sums are the ledger's
            if sum_ > 1000 + 16:
                yield f"{gpu} is shared out to {sum_} thousandths"

    def _gangs_whole(self) -> Iterable[str]:
        for job in self.stage.views.jobs.values():
            if job.state is JobState.WAITING and job.holds:
                yield f"{job.spec.name} waits and holds {job.nodes}"
            if job.state in HOLDING and job.spec.gang and job.state is not JobState.STOPPING:
                least = job.spec.min_workers or job.spec.total_workers
                if job.holds and len(job.workers) < least:
                    yield f"{job.spec.name} holds room for {len(job.workers)} of {least} workers"

    def _launched_once(self) -> Iterable[str]:
        launches = self.stage.platform.fleet.launches
        for job_id, attempt, fence, worker, _ in launches[self._launches :]:
            key = (job_id, attempt, fence, worker)
            self._keys[key] += 1
            if self._keys[key] > 1:
                yield f"worker {worker} of {self.stage.name_of(job_id)} was started twice under fence {fence}"
        self._launches = len(launches)


def _ceiling(
    document: Mapping[str, Any], used: Mapping[tuple[str, str], float], tenant: str, card_type: str
) -> float | None:
    """What a tenant may hold by the words of the policy, worked out anew and slowly; None: no limit."""
    tenants = document.get("tenants", {})
    me = tenants.get(tenant, {})
    quota = me.get("quota", {}).get(card_type)
    if quota is None:
        return None
    cohort = me.get("cohort")
    if cohort is None:
        return float(quota)
    others = {name: body for name, body in tenants.items() if name != tenant and body.get("cohort") == cohort}
    pot = float(document.get("cohorts", {}).get(cohort, {}).get("shared", {}).get(card_type, 0))
    for name, body in others.items():
        own = body.get("quota", {}).get(card_type)
        if own is None:
            continue
        holds = used.get((name, card_type), 0)
        unused = max(own - holds, 0)
        pot += min(unused, body.get("lend_limit", {}).get(card_type, own))
        pot -= max(holds - own, 0)
    limit = me.get("borrow_limit", {}).get(card_type)
    return float(quota) + max(pot if limit is None else min(pot, limit), 0)
