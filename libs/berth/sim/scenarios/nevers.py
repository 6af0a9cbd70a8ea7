"""What must not be at any time: `never`, and the ground rules of every scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

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
        self._read = 0
        self._keys: Counter[tuple[str, int, int, int]] = Counter()

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
