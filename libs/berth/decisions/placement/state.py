"""Everything placement knows between two batches, and how it is told and recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from berth.contracts.base import JobClass
from berth.contracts.envelope import Fact
from berth.contracts.events import JobWaiting, Receipt
from berth.contracts.reasons import Reason
from berth.decisions.core import Outbox, Record
from berth.decisions.placement.claim import Amount, Claim
from berth.decisions.placement.considered import types_considered
from berth.decisions.placement.jobs import (
    MICROSECONDS,
    Job,
    Phase,
    held_from_json,
    held_to_json,
    micros,
)
from berth.decisions.placement.ledger import Ledger
from berth.decisions.placement.scene import Plan, Scene
from berth.decisions.policy.document import Policy, ProtectionLine
from berth.decisions.policy.windows import is_open
from berth.decisions.preemption.victims import Cap
from berth.decisions.queueing.share import Shares, Usage
from berth.decisions.queueing.waiting import Group, WaitingSet
from berth.decisions.quota.keep import Keeper
from berth.decisions.receipts import make_receipt

Order = tuple[int, float, int, str]
"""When a job has its turn: priority (negative), share, time of submission, id."""


@dataclass(slots=True)
class ShareWindow:
    """What a line has taken since `start`, of `base` GPUs that the others held then."""

    start: int
    base: Amount
    used: Amount = 0


@dataclass(slots=True)
class State:
    """The decision state; all of it follows from the records."""

    books: Ledger = field(default_factory=Ledger)
    waiting: WaitingSet = field(default_factory=WaitingSet)
    jobs: dict[str, Job] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    short: dict[str, Job] = field(default_factory=dict)
    """Gangs that lost workers and want them back: they have the first claim on room."""
    policy: Policy = field(default_factory=Policy)
    policy_version: int = 0
    keeper: Keeper = field(default_factory=lambda: Keeper(Policy()))
    shares: Shares = field(default_factory=Shares)
    share_windows: dict[str, ShareWindow] = field(default_factory=dict)
    open_windows: list[str] = field(default_factory=list)
    state_version: int = 0
    fence: int = 0
    plan_number: int = 0
    cuts_due: bool = False
    left: tuple[list[str], Order] | None = None
    """Where the last pass stopped looking for victims: card types that had changed, and the first claim not tried."""
    window_entities: dict[str, None] = field(default_factory=dict)
    now: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, UTC))
    cause: str = ""
    out: Outbox = field(default_factory=Outbox)
    fresh: dict[str, Job] = field(default_factory=dict)
    scene: Scene | None = None
    wakes: list[tuple[int, str]] = field(default_factory=list)
    """Jobs to be tried again at a time (microseconds), for the core's timers."""
    _meta: bool = False
    _touched: dict[str, None] = field(default_factory=dict)
    _records: dict[tuple[str, str], Any] = field(default_factory=dict)
    _claims: dict[Claim, Claim] = field(default_factory=dict)
    _facts: dict[JobClass, tuple[bool, bool]] = field(default_factory=dict)

    # ------------------------------------------------------------------------------------------------------ policy
    def set_policy(self, version: int, document: dict[str, Any], at: int) -> list[str]:
        """Switch to a policy; returns tenants seen for the first time."""
        self.policy = Policy.from_document(document)
        self.policy_version = version
        self.keeper = Keeper(self.policy)
        self.books.quota.set_policy(self.policy)
        self._facts = {}
        return self.shares.set_policy(self.policy, at)

    def preempts(self, job_class: JobClass) -> bool:
        """Whether jobs of a class may ever stop others."""
        return self._about(job_class)[0]

    def is_fair(self, job_class: JobClass) -> bool:
        """Whether what others hold decides whom jobs of a class may stop."""
        return self._about(job_class)[1]

    def _about(self, job_class: JobClass) -> tuple[bool, bool]:
        known = self._facts.get(job_class)
        if known is None:
            settings = self.policy.for_class(job_class).preemption
            lines = [
                line
                for line in self.policy.protection
                if line.job_class in (None, job_class)
                and (line.may_preempt or line.when_unmet == "preempt_lower_class")
            ]
            by_rule = settings.by_priority != "off" or settings.reclaim != "off" or settings.fair != "off"
            known = self._facts[job_class] = (by_rule or bool(lines), settings.fair != "off")
        return known

    @property
    def keeps_order(self) -> bool:
        """Whether any class has a discipline under which a waiting job bears on those behind it."""
        settings = [self.policy.for_class(job_class).queue for job_class in JobClass]
        return any(queue.discipline != "best_effort" or queue.reserve_after is not None for queue in settings)

    def caps(self, claim: Claim) -> list[Cap]:
        """Lines under which a job of this tenant and class may stop others, with what they may still take."""
        found = []
        for line in self.policy.protection:
            covers = line.tenant in (None, claim.tenant) and line.job_class in (None, claim.job_class)
            if line.may_preempt and covers and is_open(line.windows, self.now):
                found.append(Cap(line, self._cap_left(line)))
        return found

    def _cap_left(self, line: ProtectionLine) -> Amount:
        if line.max_preempt_share is None:
            return 1 << 40
        window = self.share_window(line)
        return int(Fraction(str(line.max_preempt_share)) * window.base) - window.used

    def share_window(self, line: ProtectionLine) -> ShareWindow:
        """The share window that runs, or the one that would begin now (not stored)."""
        window = self.share_windows.get(line.name)
        if window is None or window.start + line.share_window * MICROSECONDS <= micros(self.now):
            held = sum(
                self.books.held_by(card_type, job_class=other)
                for card_type in self.books.fleet.pools
                for other in line.may_preempt
            )
            window = ShareWindow(micros(self.now), held)
        return window

    def use_cap(self, line: ProtectionLine, amount: Amount) -> None:
        """Count what was taken under a line."""
        window = self.share_window(line)
        window.used += amount
        self.share_windows[line.name] = window
        self.record(
            "share", line.name, {"start": window.start, "base": _number(window.base), "used": _number(window.used)}
        )

    # ------------------------------------------------------------------------------------------------------- order
    def order(self, group: Group) -> Order:
        """When a group's first job has its turn."""
        claim = group.claim
        submitted, job_id = group.head
        return (-claim.priority, self.share(claim), submitted, job_id)

    def order_of(self, job: Job) -> Order:
        """When a job has its turn."""
        return (-job.claim.priority, self.share(job.claim), job.submitted, job.id)

    def share(self, claim: Claim) -> float:
        """The tenant's share, where the class orders by it."""
        if self.policy.for_class(claim.job_class).fair_share.basis == "none":
            return 0.0
        return self.shares.of(claim.tenant, claim.job_class, self.held_by_tenant(claim.tenant), micros(self.now))

    def held_by_tenant(self, tenant: str) -> Amount:
        """GPUs of all types that a tenant holds."""
        return sum(amount for (_, who, _), amount in self.books.class_held.items() if who == tenant)

    def new_scene(self) -> Scene:
        """A fresh view for a pass or a question."""
        return Scene(self.books, self.policy, self.keeper, self.waiting, self.plans, self.now)

    # ----------------------------------------------------------------------------------------------- plans (holds)
    def add_plan(self, plan: Plan) -> None:
        """Hold room for a job that others are stopped for."""
        self.plans[plan.job_id] = plan
        self._promise(plan, 1)
        self.books.hold(plan.job_id, plan.held)
        self.record(
            "plan",
            plan.job_id,
            {
                "tenant": plan.tenant,
                "class": plan.job_class.value,
                "held": [held_to_json(entry) for entry in plan.held],
                "needs": {card_type: _number(amount) for card_type, amount in plan.needs.items()},
                "victims": {job: None if w is None else list(w) for job, w in plan.victims.items()},
                "attempts": plan.attempts,
            },
        )

    def drop_plan(self, job_id: str) -> Plan | None:
        """Let the room go that is held for a job, if any."""
        plan = self.plans.pop(job_id, None)
        if plan is not None:
            self._promise(plan, -1)
            self.books.unhold(job_id, plan.held)
            self.record("plan", job_id, None)
        return plan

    def _promise(self, plan: Plan, sign: int) -> None:
        for card_type, amount in plan.needs.items():
            self.books.quota.of(plan.tenant, card_type).claimed += sign * amount
            self.books.quota.changed()

    # -------------------------------------------------------------------------------------------- tell and record
    def touch(self, job: Job) -> None:
        """Have a job's record written (or deleted, if the job is gone)."""
        self._touched[job.id] = None

    def record(self, kind: str, key: str, body: Any) -> None:
        """Have a record written; None deletes it."""
        self._records[kind, key] = body

    def touch_meta(self) -> None:
        """Have the counters written though nothing else changed."""
        self._meta = True

    def claim(self, claim: Claim) -> Claim:
        """The one object that stands for all equal claims."""
        return self._claims.setdefault(claim, claim)

    @property
    def claims(self) -> dict[Claim, Claim]:
        """All claims in use."""
        return self._claims

    def emit(self, job: Job, data: Fact) -> None:
        """Tell a fact about a job."""
        self.out.emit(
            data,
            job.id,
            tenant=job.claim.tenant,
            actor="service:placement",
            cause=job.cause or self.cause,
            trace=job.trace,
        )

    def tell_waiting(self, job: Job, reasons: tuple[Reason, ...]) -> None:
        """Tell why a job waits, where the set of codes is another than the last one told."""
        codes = tuple(sorted({reason.code for reason in reasons}))
        if job.told == codes:
            return
        job.told = codes
        self.touch(job)
        receipt = self.receipt(
            f"wait|{job.id}/{job.attempt}|{','.join(codes)}",
            candidates=types_considered(job.claim.shape, self.books.fleet, self.policy),
        )
        self.emit(job, JobWaiting(job_id=job.id, reasons=reasons, attempt=job.attempt, receipt=receipt))

    def receipt(
        self,
        outcome: str,
        *,
        candidates: Iterable[dict[str, Any]] = (),
        filtered: dict[str, int] | None = None,
        reasons: Sequence[Reason] = (),
    ) -> Receipt:
        """Of a decision made on the state of now."""
        return make_receipt(
            outcome,
            policy_version=self.policy_version,
            state_version=self.state_version,
            candidates=candidates,
            filtered=filtered,
            reasons=reasons,
        )

    def note_usage(self) -> None:
        """Bring the faded usage of tenants up to date whose holdings have changed."""
        at = micros(self.now)
        for tenant in self.books.dirty_tenants:
            self.shares.note(tenant, self.held_by_tenant(tenant), at)
            self.record_usage(tenant)
        self.books.dirty_tenants = {}

    def record_usage(self, tenant: str) -> None:
        """Have a tenant's usage written."""
        usage = self.shares.usage[tenant]
        seeded = tenant in self.shares.seeded
        self.record(
            "usage", tenant, {"past": usage.past, "at": usage.at, "held": _number(usage.held), "seeded": seeded}
        )

    def drain_records(self) -> list[Record]:
        """All that changed since the last call."""
        if not self._touched and not self._records and not self._meta:
            return []
        self._meta = False
        records = [Record(kind, key, body) for (kind, key), body in self._records.items()]
        for job_id in self._touched:
            job = self.jobs.get(job_id)
            if job is None:
                self.out.counters.pop(job_id, None)
                records.append(Record("job", job_id, None))
            else:
                job.cause = ""
                records.append(Record("job", job_id, job.to_json(self.out.counters.get(job_id, 0))))
        records.append(
            Record(
                "meta",
                "counters",
                {
                    "fence": self.fence,
                    "state_version": self.state_version,
                    "plan": self.plan_number,
                    "open": list(self.open_windows),
                    "left": None if self.left is None else [self.left[0], list(self.left[1])],
                    "windows": {k: self.out.counters[k] for k in self.window_entities},
                    "at": micros(self.now),
                },
            )
        )
        self._touched, self._records = {}, {}
        if len(self._claims) > 2 * len(self.jobs) + 1000:
            self._claims = {job.claim: job.claim for job in self.jobs.values()}
        return records

    # ----------------------------------------------------------------------------------------------------- restore
    def restore_plan(self, job_id: str, body: dict[str, Any]) -> None:
        """A held room, from its record; jobs and ledger are there already."""
        plan = Plan(
            job_id=job_id,
            tenant=body["tenant"],
            job_class=JobClass(body["class"]),
            held=[held_from_json(entry) for entry in body["held"]],
            needs={card_type: _amount(amount) for card_type, amount in body["needs"].items()},
            victims={job: None if w is None else tuple(w) for job, w in body["victims"].items()},
            attempts=dict(body["attempts"]),
        )
        self.plans[job_id] = plan
        self._promise(plan, 1)
        self.books.hold(job_id, plan.held)
        job = self.jobs[job_id]
        self.waiting.remove(job.claim, job.submitted, job.id)

    def restore_usage(self, tenant: str, body: dict[str, Any]) -> None:
        """A tenant's faded usage, from its record."""
        self.shares.usage[tenant] = Usage(body["past"], body["at"], _amount(body["held"]))
        if body["seeded"]:
            self.shares.seeded[tenant] = None

    def restore_share(self, line: str, body: dict[str, Any]) -> None:
        """A share window, from its record."""
        self.share_windows[line] = ShareWindow(body["start"], _amount(body["base"]), _amount(body["used"]))

    def is_waiting(self, job: Job) -> bool:
        """Whether a job competes, with or without room being made for it."""
        return job.phase is Phase.WAITING


def _number(amount: Amount) -> int | str:
    return amount if isinstance(amount, int) else str(amount) if amount.denominator != 1 else amount.numerator


def _amount(value: int | str) -> Amount:
    return value if isinstance(value, int) else Fraction(value)
