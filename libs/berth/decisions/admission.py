"""Admission: may a job compete at all, and which policy is in force.

A job is refused for what no waiting could change: a tenant or card type nobody knows, a limit of the policy, more than
the installed cluster (all nodes ever registered, whatever their state) or the quota could ever give. Until a policy is
in force jobs are held. Cancel requests stick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobHeld,
    JobRefused,
    JobSubmitted,
    NodeChanged,
    PolicyActivated,
    PolicyApproved,
    PolicyHeld,
    PolicyProposed,
    PolicyRejected,
    PolicyWithdrawn,
    Receipt,
    ServiceAdmitted,
)
from berth.contracts.jobs import JobSpec
from berth.contracts.reasons import Code, Reason, because
from berth.contracts.requests import PolicyCheckAnswer
from berth.decisions.core import Core, Outbox, Record, Settled
from berth.decisions.placement.claim import claim_of, plain
from berth.decisions.placement.fleet import Fleet
from berth.decisions.placement.jobs import micros
from berth.decisions.placement.turn import fits_when_empty, never_reason
from berth.decisions.policy.approval import needs_approval
from berth.decisions.policy.check import SHORTEST_LOST_AFTER, check, warnings
from berth.decisions.policy.document import Policy
from berth.decisions.policy.problem import Problem
from berth.decisions.quota.book import QuotaBook
from berth.decisions.receipts import make_receipt

CANCELS_KEPT = timedelta(days=7)
"""How long a cancel request for an unknown job is kept: as long as the stream could still bring that job."""


class AdmissionCore(Core):
    """Policy versions, held jobs and the answer to each submission."""

    NAME: ClassVar[str] = "admission"
    CONSUMES: ClassVar[tuple[type[Fact], ...]] = (
        JobCancelRequested,
        JobCancelled,
        JobSubmitted,
        NodeChanged,
        PolicyApproved,
        PolicyProposed,
        PolicyWithdrawn,
    )

    def __init__(self, *, shortest_lost_after: int = SHORTEST_LOST_AFTER, runs_services: bool = False) -> None:
        """Without policy and nodes.

        shortest_lost_after: see `berth.decisions.policy.check.check`. runs_services: a serving part is there to make
        replicas; without it a service would be accepted and never start.
        """
        self._runs_services = runs_services
        self._shortest_lost_after = shortest_lost_after
        self.fleet = Fleet()
        self.policy = Policy()
        self._policy_version = 0
        self._state_version = 0
        self._quota = QuotaBook()
        self._held: dict[str, JobSubmitted] = {}
        self._held_trace: dict[str, str] = {}
        self._proposals: dict[str, PolicyProposed] = {}
        self._cancels: dict[str, tuple[int, str]] = {}
        self._out = Outbox()
        self._records: dict[tuple[str, str], Any] = {}
        self._now = datetime.fromtimestamp(0, UTC)
        self._handlers: dict[type[Fact], Callable[[Envelope[Any]], None]] = {
            JobCancelRequested: self._on_cancel_requested,
            JobCancelled: self._on_cancelled,
            JobSubmitted: self._on_submitted,
            NodeChanged: self._on_node_changed,
            PolicyApproved: self._on_approved,
            PolicyProposed: self._on_proposed,
            PolicyWithdrawn: self._on_withdrawn,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What its answers depend on besides events."""
        return {"shortest_lost_after": self._shortest_lost_after, "runs_services": self._runs_services}

    @property
    def policy_version(self) -> int:
        """Version of the policy in force; 0: none yet."""
        return self._policy_version

    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one event."""
        handler = self._handlers.get(type(event.data))
        if handler is not None:
            self._now = now
            handler(event)
            self._state_version += 1
            self._records["meta", "counters"] = {"state_version": self._state_version}

    def settle(self, *, now: datetime) -> Settled:
        """Hand over answers; decide about held jobs once a policy is in force."""
        self._now = now
        if self._policy_version and self._held:
            held, self._held = self._held, {}
            for job_id, submitted in held.items():
                self._records["held", job_id] = None
                self._answer(submitted, trace=self._held_trace.pop(job_id, ""), cause="")
        self._age_cancels(now)
        records = [Record(kind, key, body) for (kind, key), body in self._records.items()]
        self._records = {}
        emissions = self._out.drain()
        self._out.counters = {key: count for key, count in self._out.counters.items() if self._is_open(key)}
        return Settled(emissions, records)

    def _is_open(self, entity: str) -> bool:
        return entity in self._held or entity in self._proposals

    def next_timer(self) -> datetime | None:
        """Admission waits for events only."""
        return None

    def _age_cancels(self, now: datetime) -> None:
        old = micros(now - CANCELS_KEPT)
        for job_id in [job_id for job_id, (at, _) in self._cancels.items() if at <= old]:
            del self._cancels[job_id]
            self._records["cancel", job_id] = None

    # ------------------------------------------------------------------------------------------------ policy
    def _on_proposed(self, event: Envelope[Any]) -> None:
        data: PolicyProposed = event.data
        problems = self._faults(data)
        if problems:
            self._reject(data, problems, event)
        elif self._policy_version and needs_approval(self.policy, Policy.from_document(data.document)):
            self._hold_proposal(data, event)
        else:
            self._put_in_force(data, event)

    def _faults(self, data: PolicyProposed) -> list[Problem]:
        """Why a proposal may not come into force now."""
        if data.based_on is not None and data.based_on != self._policy_version:
            return [
                Problem(
                    "(document)",
                    f"it was made from version {data.based_on}, by now version {self._policy_version} is in force",
                    "look at what has changed (berth policy history), and propose it again",
                )
            ]
        # The first policy of a pool comes before its nodes: guarantees are compared from the second on.
        installed = self.fleet.installed() if self._policy_version else None
        return check(data.document, installed=installed, shortest_lost_after=self._shortest_lost_after)

    def _hold_proposal(self, data: PolicyProposed, event: Envelope[Any]) -> None:
        held = data.model_copy(update={"based_on": self._policy_version})
        self._proposals[data.proposal_id] = held
        self._tell_of(
            held,
            PolicyHeld(
                proposal_id=data.proposal_id,
                author=data.author,
                why=data.why,
                based_on=self._policy_version,
                required_for=self.policy.approval.required_for,
            ),
            event,
        )
        self._records["proposal", data.proposal_id] = {
            "proposed": held.model_dump(mode="json"),
            "n": self._out.counters[data.proposal_id],
        }

    def _on_approved(self, event: Envelope[Any]) -> None:
        data: PolicyApproved = event.data
        proposed = self._proposals.get(data.proposal_id)
        if proposed is None or proposed.author == data.approver:
            return
        self._close_proposal(data.proposal_id)
        problems = self._faults(proposed)
        if problems:
            self._reject(proposed, problems, event)
        else:
            self._put_in_force(proposed, event, approver=data.approver)

    def _on_withdrawn(self, event: Envelope[Any]) -> None:
        data: PolicyWithdrawn = event.data
        proposed = self._proposals.get(data.proposal_id)
        if proposed is None:
            return
        self._close_proposal(data.proposal_id)
        why = f": {data.why}" if data.why else ""
        problem = Problem(
            "(document)", f"{data.withdrawn_by} turned it down{why}", "talk to them, and propose it again"
        )
        self._reject(proposed, [problem], event)

    def _close_proposal(self, proposal_id: str) -> None:
        del self._proposals[proposal_id]
        self._records["proposal", proposal_id] = None

    def _reject(self, data: PolicyProposed, problems: Iterable[Problem], event: Envelope[Any]) -> None:
        rejected = PolicyRejected(
            proposal_id=data.proposal_id,
            problems=tuple(problem.to_json() for problem in problems),
            author=data.author,
        )
        self._tell_of(data, rejected, event)

    def _put_in_force(self, data: PolicyProposed, event: Envelope[Any], *, approver: str = "") -> None:
        self._activate(self._policy_version + 1, data.document)
        version = self._policy_version
        self._records["policy", "active"] = {"version": version, "document": data.document}
        self._records["version", f"{version:010d}"] = {
            "version": version,
            "document": data.document,
            "author": data.author,
            "approver": approver,
            "why": data.why,
            "proposal_id": data.proposal_id,
            "activated_at": self._now.isoformat(),
        }
        self._tell_of(
            data,
            PolicyActivated(
                policy_version=version,
                document=data.document,
                author=data.author,
                why=data.why,
                proposal_id=data.proposal_id,
                approver=approver,
            ),
            event,
        )
        for other in list(self._proposals.values()):
            self._close_proposal(other.proposal_id)
            self._reject(other, self._faults(other), event)

    def _tell_of(self, proposed: PolicyProposed, data: Fact, event: Envelope[Any]) -> None:
        self._out.emit(
            data,
            proposed.proposal_id,
            tenant=event.tenant,
            actor=event.actor or proposed.author,
            cause=event.id,
            trace=event.traceparent,
        )

    def _activate(self, version: int, document: dict[str, Any]) -> None:
        self.policy = Policy.from_document(document)
        self._policy_version = version
        self._quota.set_policy(self.policy)

    def check_policy(self, document: dict[str, Any], now: datetime) -> PolicyCheckAnswer:
        """Whether a document could be activated now, and what is hardly meant in it."""
        installed = self.fleet.installed()
        problems = check(document, installed=installed, shortest_lost_after=self._shortest_lost_after)
        doubtful = warnings(document, installed=installed, now=now)
        return PolicyCheckAnswer(
            is_valid=not problems,
            problems=tuple(problem.to_json() for problem in problems),
            warnings=tuple(problem.to_json() for problem in doubtful),
        )

    # -------------------------------------------------------------------------------------------------- jobs
    def _on_node_changed(self, event: Envelope[Any]) -> None:
        data: NodeChanged = event.data
        if self.fleet.change(data):
            self._records["node", data.node] = data.model_dump(mode="json", exclude_defaults=True)

    def _on_submitted(self, event: Envelope[Any]) -> None:
        data: JobSubmitted = event.data
        if self._policy_version or data.job_id in self._cancels:
            self._answer(data, trace=event.traceparent, cause=event.id)
            return
        self._held[data.job_id] = data
        self._held_trace[data.job_id] = event.traceparent
        reasons = (because(Code.NO_POLICY, remedy="propose a policy: `berth policy apply FILE`"),)
        self._emit(
            data,
            JobHeld(job_id=data.job_id, reasons=reasons, policy_version=0, receipt=self._receipt(data, "hold")),
            trace=event.traceparent,
            cause=event.id,
        )
        self._records["held", data.job_id] = {
            "submitted": data.model_dump(mode="json", by_alias=True, exclude_defaults=True),
            "trace": event.traceparent,
            "n": self._out.counters[data.job_id],
        }

    def _answer(self, data: JobSubmitted, *, trace: str, cause: str) -> None:
        cancel = self._cancels.pop(data.job_id, None)
        if cancel is not None:
            self._records["cancel", data.job_id] = None
            over = JobCancelled(job_id=data.job_id, requested_by=cancel[1], ended_at=self._now)
            self._emit(data, over, trace=trace, cause=cause)
            return
        reasons = self._refusals(data.spec)
        if reasons:
            refused = JobRefused(
                job_id=data.job_id,
                reasons=tuple(reasons),
                policy_version=self._policy_version,
                receipt=self._receipt(data, "refuse", ",".join(reason.code for reason in reasons)),
            )
            self._emit(data, refused, trace=trace, cause=cause)
            return
        # a service itself never competes: its replicas do, and serving admits them as they are wanted
        fact = JobAdmitted if data.spec.service is None else ServiceAdmitted
        admitted = fact(
            job_id=data.job_id,
            spec=data.spec,
            submitted_at=data.submitted_at,
            submitted_by=data.submitted_by,
            policy_version=self._policy_version,
            receipt=self._receipt(data, "admit"),
        )
        self._emit(data, admitted, trace=trace, cause=cause)

    def _receipt(self, job: JobSubmitted, outcome: str, detail: str = "") -> Receipt:
        return make_receipt(
            f"{outcome}|{job.job_id}|{detail}", policy_version=self._policy_version, state_version=self._state_version
        )

    def _emit(self, job: JobSubmitted, data: Fact, *, trace: str, cause: str) -> None:
        self._out.emit(data, job.job_id, tenant=job.spec.tenant, actor="service:admission", trace=trace, cause=cause)

    def _on_cancel_requested(self, event: Envelope[Any]) -> None:
        data: JobCancelRequested = event.data
        self._cancels[data.job_id] = (micros(self._now), data.requested_by)
        self._records["cancel", data.job_id] = [micros(self._now), data.requested_by]
        held = self._held.pop(data.job_id, None)
        if held is not None:
            self._records["held", data.job_id] = None
            self._answer(held, trace=self._held_trace.pop(data.job_id, ""), cause=event.id)

    def _on_cancelled(self, event: Envelope[Any]) -> None:
        if self._cancels.pop(event.data.job_id, None) is not None:
            self._records["cancel", event.data.job_id] = None

    def _refusals(self, spec: JobSpec) -> list[Reason]:
        """Everything that no waiting could change; empty: the job is admitted."""
        if spec.tenant not in self.policy.tenants:
            known = ", ".join(sorted(self.policy.tenants)) or "none"
            return [because(Code.UNKNOWN_TENANT, tenant=spec.tenant, remedy=f"use one of the pool's tenants: {known}")]
        if spec.service is not None and not self._runs_services:
            remedy = "submit the model server as an ordinary job: this pool does not run replicas yet"
            return [because(Code.UNSUPPORTED, field="service", remedy=remedy)]
        found = [*self._over_limits(spec), *self._unknown_types(spec)]
        if not found and self.policy.for_class(spec.job_class).never_fits == "refuse":
            found = self._never(spec)
        return found

    def _over_limits(self, spec: JobSpec) -> Iterable[Reason]:
        limits = self.policy.for_class(spec.job_class).limits
        for field, asked, limit in (
            ("gpus", spec.total_gpus, limits.gpus_per_job),
            ("workers", spec.total_workers, limits.workers_per_job),
            ("priority", spec.priority, limits.priority_max),
            ("name", len(spec.name), limits.name_length),
        ):
            if limit is not None and asked > limit:
                yield because(Code.OVER_LIMIT, field=field, asked=asked, limit=limit, remedy=f"ask for at most {limit}")

    def _unknown_types(self, spec: JobSpec) -> Iterable[Reason]:
        known = set(self.policy.card_types) | set(self.fleet.pools)
        for card_type in spec.types:
            if known and card_type not in known:
                yield because(
                    Code.UNKNOWN_CARD_TYPE,
                    field="types",
                    card_type=card_type,
                    remedy=f"use one of {', '.join(sorted(known))}",
                )

    def _never(self, spec: JobSpec) -> list[Reason]:
        """Why no emptying of the installed cluster, and no idleness of others, could let the job start."""
        shape = claim_of(spec).shape
        types = [t for t in (spec.types or sorted(self.fleet.pools)) if t in self.fleet.pools]
        if not self.fleet.nodes:
            return []
        reasons: list[Reason] = []
        for card_type in types:
            pool = self.fleet.pools[card_type]
            fits = shape.mix_types or fits_when_empty(shape, pool, self.fleet)
            ceiling = self._quota.ceiling(spec.tenant, card_type)
            if not fits:
                reasons.append(never_reason(shape, pool))
            elif ceiling is not None and shape.gpus > ceiling:
                reasons.append(
                    because(
                        Code.QUOTA_FULL,
                        card_type=card_type,
                        needed=shape.gpus,
                        quota=plain(ceiling),
                        tenant=spec.tenant,
                        remedy=f"ask for at most {plain(ceiling):g} GPUs, or for more quota",
                    )
                )
            else:
                return []
        if not types:
            return [
                because(
                    Code.NEVER_FITS,
                    needed=shape.gpus,
                    installed=0,
                    card_type=card_type,
                    remedy=f"no node has {card_type}; use one of {', '.join(sorted(self.fleet.pools))}",
                )
                for card_type in spec.types
            ]
        return reasons

    # ------------------------------------------------------------------------------------------------ records
    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild policy, nodes, held proposals, held jobs (in order of submission) and sticky cancels.

        Records of kind `version` are the history of the policy; they are kept for people and not read here.
        """
        held: list[tuple[JobSubmitted, dict[str, Any]]] = []
        cancels: list[tuple[int, str, str]] = []
        for kind, key, body in records:
            if kind == "policy":
                self._activate(body["version"], body["document"])
            elif kind == "node":
                self.fleet.change(NodeChanged.model_validate(body))
            elif kind == "held":
                held.append((JobSubmitted.model_validate(body["submitted"]), body))
            elif kind == "meta":
                self._state_version = body["state_version"]
            elif kind == "cancel":
                cancels.append((body[0], key, body[1]))
            elif kind == "proposal":
                self._proposals[key] = PolicyProposed.model_validate(body["proposed"])
                self._out.counters[key] = body["n"]
        for data, body in sorted(held, key=lambda entry: (entry[0].submitted_at, entry[0].job_id)):
            self._held[data.job_id] = data
            self._held_trace[data.job_id] = body["trace"]
            self._out.counters[data.job_id] = body["n"]
        self._cancels = {job_id: (at, by) for at, job_id, by in sorted(cancels)}
