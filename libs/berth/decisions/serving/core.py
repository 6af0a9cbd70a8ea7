"""The serving core: from load and wishes to replicas.

A replica is a job of its own: this core admits it and, when it is no longer wanted, asks for its end; placement, quota,
preemption and lifecycle treat it like any other. The service's job itself never holds anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, ClassVar

from pydantic import TypeAdapter

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    AttemptEnded,
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobFailed,
    JobPlaced,
    JobReclaimed,
    JobRequeued,
    JobSucceeded,
    PolicyActivated,
    RollbackRequested,
    RolloutFinished,
    RolloutRefused,
    RolloutRequested,
    RolloutSettingsChanged,
    RolloutStarted,
    RolloutWithdrawn,
    ServiceAdmitted,
    ServiceLoadReported,
    ServiceScaled,
    TelemetryStale,
    WorkerReady,
)
from berth.contracts.jobs import JobSpec, ServiceSpec
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.core import Core, Outbox, Record, Settled
from berth.decisions.policy.document import Policy
from berth.decisions.serving.model import Replica, ReplicaState, Rollout, Service
from berth.decisions.serving.scaling import follow, forget, needed, next_look

KEPT_LOADS = 10_000
LONGEST_PAUSE_SECONDS = 300
SERVICE_LABEL, VERSION_LABEL = "berth-service", "berth-version"
_SERVICE = TypeAdapter(Service)


class ServingCore(Core):
    """Says how many replicas a service has, and of which version."""

    NAME: ClassVar[str] = "serving"
    CONSUMES: ClassVar[tuple[type[Fact], ...]]

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self._specs: dict[str, JobSpec] = {}
        self._replica_of: dict[str, str] = {}
        self._early_loads: dict[str, ServiceLoadReported] = {}
        self._early_cancels: dict[str, str] = {}
        self._touched: dict[str, None] = {}
        self._looks: dict[str, datetime] = {}
        self._records: dict[tuple[str, str], Any] = {}
        self._policy = Policy()
        self._policy_version = 0
        self._out = Outbox()
        self._now = datetime.min
        self._cause = ""

    # ------------------------------------------------------------------------------------------------------- Core
    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one new event."""
        handler = _HANDLERS.get(type(event.data))
        if handler is not None:
            self._now, self._cause = now, event.id
            handler(self, event)

    def settle(self, *, now: datetime) -> Settled:
        """Look again at every service that something happened to or whose time has come."""
        self._now, self._cause = now, ""
        due = [job_id for job_id, at in self._looks.items() if at <= now]
        for job_id in sorted({*self._touched, *due}):
            service = self._services.get(job_id)
            if service is not None:
                self._look(service)
        self._touched = {}
        records, self._records = self._records, {}
        for body in records.values():
            if isinstance(body, Service):
                body.told = self._out.counters.get(body.job_id, 0)
        return Settled(self._out.drain(), [Record(k, key, body) for (k, key), body in records.items()], len(due))

    def next_timer(self) -> datetime | None:
        """When the first service is to be looked at again."""
        return min(self._looks.values(), default=None)

    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild the state."""
        self._now = now
        for kind, key, body in records:
            if kind == "policy":
                self._policy, self._policy_version = Policy.from_document(body["document"]), body["version"]
            elif kind == "spec":
                self._specs[key] = JobSpec.model_validate(body)
            elif kind == "service":
                service = self._services[key] = _SERVICE.validate_python(body)
                self._out.counters[key] = service.told
                for replica in service.replicas:
                    self._replica_of[replica] = key
                    self._out.counters[replica] = 1
        for job_id, service in self._services.items():
            self._set_look(service)
            self._touched[job_id] = None

    @property
    def policy_version(self) -> int:
        """Version of the policy in force here."""
        return self._policy_version

    def service(self, job_id: str) -> Service | None:
        """A service as it stands; to be read only."""
        return self._services.get(job_id)

    # ----------------------------------------------------------------------------------------------------- events
    def _on_admitted(self, event: Envelope[ServiceAdmitted]) -> None:
        data = event.data
        spec = data.spec.service
        if spec is None or data.job_id in self._services:
            return
        service = Service(
            job_id=data.job_id,
            tenant=event.tenant or data.spec.tenant,
            version=spec.version,
            trace=event.traceparent,
            wanted=spec.min,
            surge=spec.surge,
            unavailable=spec.unavailable,
            demand=[(self._now, spec.min)],
        )
        self._services[data.job_id] = service
        self._specs[data.job_id] = data.spec
        self._records["spec", data.job_id] = data.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
        self._touch(service)
        load = self._early_loads.pop(data.job_id, None)
        if load is not None:
            self._take_load(service, load)
        service.cancelled_by = self._early_cancels.pop(data.job_id, None)

    def _on_load(self, event: Envelope[ServiceLoadReported]) -> None:
        service = self._services.get(event.data.job_id)
        if service is not None:
            self._take_load(service, event.data)
            return
        self._early_loads[event.data.job_id] = event.data
        while len(self._early_loads) > KEPT_LOADS:
            del self._early_loads[next(iter(self._early_loads))]

    def _take_load(self, service: Service, report: ServiceLoadReported) -> None:
        """A reading whose stamp did not move on says nothing."""
        if service.load_stamp is not None and report.sampled_at <= service.load_stamp:
            return
        spec = self._spec(service)
        if service.is_stale:  # what was needed in the gap is not known; it counts as what is wanted now
            service.demand.append((self._now, max(service.wanted, spec.min)))
        service.load, service.load_stamp, service.load_at = report.in_flight, report.sampled_at, self._now
        service.is_stale = False
        number = needed(spec, report.in_flight)
        if not service.demand or service.demand[-1][1] != number:
            service.demand = [*forget(spec, service.demand, now=self._now), (self._now, number)]
        self._touch(service)

    def _on_cancel_requested(self, event: Envelope[JobCancelRequested]) -> None:
        service = self._services.get(event.data.job_id)
        if service is None:
            if event.service != self.NAME and event.data.job_id not in self._replica_of:
                self._early_cancels[event.data.job_id] = event.data.requested_by
                while len(self._early_cancels) > KEPT_LOADS:
                    del self._early_cancels[next(iter(self._early_cancels))]
        elif service.cancelled_by is None:
            service.cancelled_by = event.data.requested_by
            self._touch(service)

    def _on_placed(self, event: Envelope[JobPlaced]) -> None:
        found = self._found(event.data.job_id)
        if found is not None:
            service, replica = found
            replica.attempt, replica.holds_since = event.data.attempt, self._now
            if replica.state is ReplicaState.WAITING:
                replica.state = ReplicaState.STARTING
            self._touch(service)

    def _on_ready(self, event: Envelope[WorkerReady]) -> None:
        found = self._found(event.data.job_id)
        if found is None or event.data.attempt != found[1].attempt:
            return
        service, replica = found
        if replica.state is ReplicaState.STARTING and event.data.is_ready:
            replica.state = ReplicaState.READY
            service.failures, service.pause_until = 0, None
            service.idle_since = None
        elif replica.state is ReplicaState.READY and not event.data.is_ready:
            replica.state, replica.holds_since = ReplicaState.STARTING, self._now
        self._touch(service)

    def _on_attempt_ended(self, event: Envelope[AttemptEnded]) -> None:
        found = self._found(event.data.job_id)
        if found is not None and event.data.workers is None and event.data.attempt == found[1].attempt:
            service, replica = found
            replica.holds_since = None
            if replica.state is not ReplicaState.LEAVING:
                replica.state = ReplicaState.WAITING
            self._touch(service)

    def _on_requeued(self, event: Envelope[JobRequeued]) -> None:
        found = self._found(event.data.job_id)
        if found is not None:
            self._touch(found[0])

    def _on_over(self, event: Envelope[Any]) -> None:
        """A replica is gone. One that was not told to go is missed, and followed by another after a pause."""
        found = self._found(event.data.job_id)
        if found is None:
            return
        service, replica = found
        if replica.state is not ReplicaState.LEAVING:
            self._pause(service)
        del service.replicas[event.data.job_id]
        del self._replica_of[event.data.job_id]
        self._out.counters.pop(event.data.job_id, None)
        self._touch(service)

    def _on_policy(self, event: Envelope[PolicyActivated]) -> None:
        data = event.data
        if data.policy_version > self._policy_version:
            self._policy, self._policy_version = Policy.from_document(data.document), data.policy_version
            self._records["policy", "active"] = {"version": data.policy_version, "document": data.document}
            self._touched.update(dict.fromkeys(self._services))

    # ---------------------------------------------------------------------------------------------------- rollouts
    def _on_rollout_requested(self, event: Envelope[RolloutRequested]) -> None:
        data = event.data
        service = self._services.get(data.job_id)
        if service is None:
            return
        wrong = self._why_no_rollout(service, data.to_version)
        if wrong is not None:
            refused = RolloutRefused(job_id=data.job_id, request_id=data.request_id, to=data.to_version, reason=wrong)
            self._emit(service, refused, actor=data.requested_by)
            return
        service.rollout = Rollout(data.to_version, data.canary)
        started = RolloutStarted(
            job_id=data.job_id,
            request_id=data.request_id,
            from_=service.version,
            to=data.to_version,
            canary=data.canary,
        )
        self._emit(service, started, actor=data.requested_by)
        self._touch(service)

    def _why_no_rollout(self, service: Service, to: str) -> Reason | None:
        if service.cancelled_by is not None:
            return because(Code.CANCELLED)
        if service.rollout is not None and service.rollout.to != to:
            return because(Code.UNSUPPORTED, remedy="roll the present rollout back first", under_way=service.rollout.to)
        if service.rollout is None and service.version == to:
            return because(Code.UNSUPPORTED, remedy="nothing to do: the service has that version", version=to)
        if service.surge == 0 and service.unavailable == 0:
            return because(
                Code.UNSUPPORTED, remedy="allow a surge or an unavailable replica: neither one more nor one less is"
            )
        return None

    def _on_rollback_requested(self, event: Envelope[RollbackRequested]) -> None:
        service = self._services.get(event.data.job_id)
        if service is None:
            return
        if service.rollout is not None:
            self._withdraw(service, because(Code.ROLLED_BACK, by=event.data.requested_by))
        elif service.previous:
            reason = because(Code.ROLLED_BACK, by=event.data.requested_by)
            told = RolloutWithdrawn(job_id=service.job_id, from_=service.version, to=service.previous, reason=reason)
            self._emit(service, told, actor=event.data.requested_by)
            service.rollout, service.previous = Rollout(service.previous), ""
            self._touch(service)

    def _on_settings(self, event: Envelope[RolloutSettingsChanged]) -> None:
        service = self._services.get(event.data.job_id)
        if service is not None:
            if event.data.surge is not None:
                service.surge = event.data.surge
            if event.data.unavailable is not None:
                service.unavailable = event.data.unavailable
            self._touch(service)

    def _withdraw(self, service: Service, reason: Reason) -> None:
        if service.rollout is None:
            return
        told = RolloutWithdrawn(job_id=service.job_id, from_=service.rollout.to, to=service.version, reason=reason)
        service.rollout = None
        self._emit(service, told)
        self._touch(service)

    # -------------------------------------------------------------------------------------------------------- look
    def _look(self, service: Service) -> None:
        """Bring the number wanted up to date, then the replicas to the number."""
        if service.cancelled_by is not None:
            self._end(service)
            return
        self._withdraw_unready(service)
        self._note_staleness(service)
        if not service.is_stale:
            self._scale(service)
        self._renew(service)
        self._shrink(service)
        self._grow(service)
        self._finish_rollout(service)
        self._set_look(service)

    def _end(self, service: Service) -> None:
        for name, replica in list(service.replicas.items()):
            self._dismiss(service, name, replica)
        self._looks.pop(service.job_id, None)
        if not service.replicas:
            told = JobCancelled(job_id=service.job_id, requested_by=service.cancelled_by or "", ended_at=self._now)
            self._emit(service, told, actor=service.cancelled_by or "")
            del self._services[service.job_id], self._specs[service.job_id]
            self._out.counters.pop(service.job_id, None)
            self._records["service", service.job_id] = self._records["spec", service.job_id] = None

    def _scale(self, service: Service) -> None:
        spec = self._spec(service)
        wanted = min(max(service.wanted, spec.min), spec.max)
        wanted = follow(spec, service.demand, wanted=wanted, now=self._now)
        zero_at = self._zero_at(service, spec)
        if zero_at is not None and zero_at <= self._now:
            wanted = 0
        if wanted != service.wanted:
            told = ServiceScaled(job_id=service.job_id, from_=service.wanted, to=wanted, load=service.load)
            service.wanted = wanted
            self._emit(service, told)

    def _zero_at(self, service: Service, spec: ServiceSpec) -> datetime | None:
        """When the service goes to zero: its replicas have been ready and without requests for that long."""
        if spec.min > 0 or service.wanted == 0 or service.load > 0 or not service.ready:
            service.idle_since = None
            return None
        service.idle_since = service.idle_since or self._now
        after = spec.scale_down_after if spec.to_zero_after is None else spec.to_zero_after
        return service.idle_since + timedelta(seconds=after)

    def _note_staleness(self, service: Service) -> None:
        stale_after = self._policy.telemetry.stale_after
        if stale_after is None or service.load_at is None or service.is_stale:
            return
        if self._now - service.load_at >= timedelta(seconds=stale_after):
            service.is_stale = True
            self._emit(service, TelemetryStale(job_id=service.job_id, attempt=0, fresh_until=service.load_at))

    # ---------------------------------------------------------------------------------------------------- replicas
    def _withdraw_unready(self, service: Service) -> None:
        """A replica that holds GPUs and is not ready in time goes; so does the version it was to bring in."""
        limit = self._ready_timeout(service)
        if limit is None:
            return
        for name, replica in list(service.replicas.items()):
            if replica.state is not ReplicaState.STARTING or replica.holds_since is None:
                continue
            if self._now - replica.holds_since < limit:
                continue
            reason = because(Code.NOT_READY, version=replica.version, timeout=limit.total_seconds())
            if service.rollout is not None and replica.version == service.rollout.to:
                self._withdraw(service, reason)
            else:
                self._pause(service)
                self._dismiss(service, name, replica)

    def _ready_timeout(self, service: Service) -> timedelta | None:
        spec = self._specs[service.job_id]
        own = self._spec(service).ready_timeout
        seconds = own if own is not None else self._policy.for_class(spec.job_class).recovery.ready_timeout
        return None if seconds is None else timedelta(seconds=seconds)

    def _targets(self, service: Service) -> dict[str, int]:
        """Replicas wanted of each version, the newer first."""
        if service.rollout is None:
            return {service.version: service.wanted}
        new = service.wanted if service.rollout.canary is None else min(service.rollout.canary, service.wanted)
        return {service.rollout.to: new, service.version: service.wanted - new}

    def _renew(self, service: Service) -> None:
        """Let replicas of a version that is on its way out go, as far as enough others answer."""
        targets = self._targets(service)
        least = service.wanted - service.unavailable
        for name, replica in _latest_first(service):
            surplus = _count(service, replica.version) - targets.get(replica.version, 0)
            if surplus <= 0 or (service.rollout is None and replica.version == service.version):
                continue
            if replica.state is not ReplicaState.READY or service.ready - 1 >= least:
                self._dismiss(service, name, replica)

    def _shrink(self, service: Service) -> None:
        """Let what is too much of the present version go: what does not answer yet first, then the newest."""
        if service.rollout is not None:
            return
        for name, replica in _latest_first(service):
            if replica.version == service.version and _count(service, service.version) > service.wanted:
                self._dismiss(service, name, replica)

    def _grow(self, service: Service) -> None:
        """Add what is missing of each version, the new one no further than the surge allows."""
        if service.pause_until is not None and self._now < service.pause_until:
            return
        most = service.wanted + (service.surge if self._is_mixed(service) else 0)
        for version, target in self._targets(service).items():
            while _count(service, version) < target and len(service.staying) < most:
                self._create(service, version)

    def _is_mixed(self, service: Service) -> bool:
        return service.rollout is not None or any(r.version != service.version for r in service.staying)

    def _create(self, service: Service, version: str) -> None:
        service.created += 1
        name = f"{service.job_id}-r{service.created}"
        spec = self._specs[service.job_id]
        replica_spec = spec.model_copy(
            update={
                "name": f"{spec.name}-{service.created}",
                "service": None,
                "workers": 1,
                "labels": {**spec.labels, SERVICE_LABEL: service.job_id, VERSION_LABEL: version},
            }
        )
        service.replicas[name] = Replica(service.created, version)
        self._replica_of[name] = service.job_id
        admitted = JobAdmitted(
            job_id=name,
            spec=replica_spec,
            submitted_at=self._now,
            submitted_by=f"service:{self.NAME}",
            policy_version=self._policy_version,
        )
        self._out.emit(
            admitted,
            name,
            tenant=service.tenant,
            correlation=service.job_id,
            cause=self._cause,
            trace=service.trace,
        )
        self._touch(service)

    def _dismiss(self, service: Service, name: str, replica: Replica) -> None:
        if replica.state is ReplicaState.LEAVING:
            return
        replica.state = ReplicaState.LEAVING
        told = JobCancelRequested(job_id=name, requested_by=f"service:{self.NAME}", why="not wanted any more")
        self._out.emit(
            told, name, tenant=service.tenant, correlation=service.job_id, cause=self._cause, trace=service.trace
        )
        self._touch(service)

    def _pause(self, service: Service) -> None:
        service.failures += 1
        pause = min(2 ** min(service.failures, 16), LONGEST_PAUSE_SECONDS)
        service.pause_until = self._now + timedelta(seconds=pause)

    def _finish_rollout(self, service: Service) -> None:
        rollout = service.rollout
        if rollout is None or rollout.canary is not None:
            return
        if any(replica.version != rollout.to for replica in service.staying) or service.ready < service.wanted:
            return
        service.previous, service.version, service.rollout = service.version, rollout.to, None
        self._emit(service, RolloutFinished(job_id=service.job_id, version=rollout.to))

    # -------------------------------------------------------------------------------------------------------- rest
    def _set_look(self, service: Service) -> None:
        spec = self._spec(service)
        looks = [next_look(spec, service.demand, wanted=service.wanted, now=self._now)]
        limit, stale_after = self._ready_timeout(service), self._policy.telemetry.stale_after
        if limit is not None:
            starting = (r for r in service.replicas.values() if r.state is ReplicaState.STARTING)
            looks += [r.holds_since + limit for r in starting if r.holds_since is not None]
        if stale_after is not None and service.load_at is not None and not service.is_stale:
            looks.append(service.load_at + timedelta(seconds=stale_after))
        looks += [service.pause_until, self._zero_at(service, spec)]
        coming = [look for look in looks if look is not None and look > self._now]
        if coming:
            self._looks[service.job_id] = min(coming)
        else:
            self._looks.pop(service.job_id, None)

    def _touch(self, service: Service) -> None:
        self._touched[service.job_id] = None
        self._records["service", service.job_id] = service

    def _emit(self, service: Service, fact: Fact, *, actor: str = "") -> None:
        self._out.emit(fact, service.job_id, tenant=service.tenant, actor=actor, cause=self._cause, trace=service.trace)
        self._records["service", service.job_id] = service

    def _spec(self, service: Service) -> ServiceSpec:
        spec = self._specs[service.job_id].service
        assert spec is not None
        return spec

    def _found(self, job_id: str) -> tuple[Service, Replica] | None:
        service = self._services.get(self._replica_of.get(job_id, ""))
        return None if service is None else (service, service.replicas[job_id])


def _latest_first(service: Service) -> list[tuple[str, Replica]]:
    """Staying replicas in the order in which they may go: those that do not answer first, then the newest."""
    staying = [(n, r) for n, r in service.replicas.items() if r.state is not ReplicaState.LEAVING]
    weight = {ReplicaState.WAITING: 0, ReplicaState.STARTING: 1, ReplicaState.READY: 2}
    return sorted(staying, key=lambda entry: (weight[entry[1].state], -entry[1].number))


def _count(service: Service, version: str) -> int:
    return sum(replica.version == version for replica in service.staying)


_HANDLERS: dict[type[Fact], Callable[[ServingCore, Envelope[Any]], None]] = {
    ServiceAdmitted: ServingCore._on_admitted,
    ServiceLoadReported: ServingCore._on_load,
    JobCancelRequested: ServingCore._on_cancel_requested,
    JobPlaced: ServingCore._on_placed,
    WorkerReady: ServingCore._on_ready,
    AttemptEnded: ServingCore._on_attempt_ended,
    JobRequeued: ServingCore._on_requeued,
    JobSucceeded: ServingCore._on_over,
    JobFailed: ServingCore._on_over,
    JobCancelled: ServingCore._on_over,
    JobReclaimed: ServingCore._on_over,
    PolicyActivated: ServingCore._on_policy,
    RolloutRequested: ServingCore._on_rollout_requested,
    RollbackRequested: ServingCore._on_rollback_requested,
    RolloutSettingsChanged: ServingCore._on_settings,
}
ServingCore.CONSUMES = tuple(_HANDLERS)
