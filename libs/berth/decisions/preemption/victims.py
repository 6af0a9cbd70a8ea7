"""Who may be stopped for a job, and by which rule.

A victim is a whole job or single workers of an elastic gang. Some rules look at one victim only (priority), others at
all that are taken together (a tenant's own quota, final shares, a cap): `Judge` holds the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from berth.contracts.base import JobClass
from berth.contracts.reasons import Code
from berth.decisions.placement.claim import Amount, Claim
from berth.decisions.placement.jobs import MICROSECONDS, Job
from berth.decisions.placement.ledger import Crew, Taken
from berth.decisions.placement.scene import Scene
from berth.decisions.policy.document import ProtectionLine
from berth.decisions.policy.windows import is_open


class Rule(StrEnum):
    """By which rule a victim is taken, the least bound first."""

    PRIORITY = "priority"
    RECLAIM = "reclaim"
    FAIR = "fair"
    PROTECTION = "protection"
    UNMET = "unmet"
    WINDOW = "window"
    RESERVATION = "reservation"
    QUOTA_CUT = "quota_cut"


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing that can be taken. amount: GPUs of the card type wanted; total: of all types; lost: GPU seconds."""

    taken: Taken
    rule: Rule
    amount: Amount
    total: Amount
    is_borrowed: bool
    priority: int
    since: int
    lost: float
    class_rank: int

    @property
    def job(self) -> Job:
        """Whose it is."""
        return self.taken.job

    @property
    def is_whole(self) -> bool:
        """Whether the whole job is stopped."""
        return self.taken.workers is None


@dataclass(frozen=True, slots=True)
class Cap:
    """How much a class may still take under a line: in the share window that runs, or that would begin now."""

    line: ProtectionLine
    left: Amount


@dataclass(slots=True)
class Search:
    """All that could be taken for a claim on a card type, and what stands in the way of more."""

    pieces: list[Piece]
    blocked: dict[Code, int]
    """Why running jobs may not be taken: code -> when that ends by itself (0: not by itself)."""


def find_pieces(claim: Claim, card_type: str, scene: Scene, needed: Amount, caps: Sequence[Cap]) -> Search:
    """Every victim that some rule allows on its own.

    Cost: crews (tenant, class, priority), then the jobs of those crews that a rule allows.
    """
    search = Search([], {})
    for crew in sorted(scene.books.crews.get(card_type, {})):
        rule = rule_for(claim, card_type, scene, needed, crew, caps, search)
        if rule is None:
            continue
        for job in scene.books.crews[card_type][crew].values():
            _add_pieces(job, card_type, scene, rule, search)
    return search


def crew_of(job: Job) -> Crew:
    """Tenant, class and priority of a job."""
    return (job.claim.tenant, job.claim.job_class, job.claim.priority)


def class_allows(scene: Scene, mine: JobClass, theirs: JobClass) -> bool:
    """A lower class never preempts a higher one."""
    rank = scene.policy.class_rank
    return mine not in rank or theirs not in rank or rank[mine] <= rank[theirs]


def rule_for(
    claim: Claim,
    card_type: str,
    scene: Scene,
    needed: Amount,
    crew: Crew,
    caps: Sequence[Cap],
    search: Search,
) -> Rule | None:
    """By which rule, if any, jobs of a crew may be stopped for a claim, each on its own."""
    tenant, job_class, priority = crew
    settings = scene.policy.for_class(claim.job_class).preemption
    wanted: Rule | None = None
    if priority < claim.priority and (
        settings.by_priority == "any_tenant" or (settings.by_priority == "same_tenant" and tenant == claim.tenant)
    ):
        wanted = Rule.PRIORITY
    elif settings.reclaim == "borrowed" and _may_reclaim(claim, card_type, scene, needed, tenant):
        wanted = Rule.RECLAIM
    elif settings.fair == "final_share" and tenant != claim.tenant and _same_cohort(claim, card_type, scene, tenant):
        wanted = Rule.FAIR
    elif _is_lower(scene, claim.job_class, job_class) and _within_unmet(claim, card_type, scene, needed):
        wanted = Rule.UNMET  # what is missing to the reserve is no use of a cap
    elif any(job_class in cap.line.may_preempt for cap in caps):
        wanted = Rule.PROTECTION
        if all(cap.left <= 0 for cap in caps if job_class in cap.line.may_preempt):
            search.blocked.setdefault(Code.PREEMPT_SHARE_USED_UP, 0)
            wanted = None
    if wanted is None and _unmet(claim, card_type, scene) > 0 and _is_lower(scene, claim.job_class, job_class):
        wanted = Rule.UNMET
    if wanted is not None and not class_allows(scene, claim.job_class, job_class):
        search.blocked.setdefault(Code.CLASS_ORDER, 0)
        return None
    return wanted


def _same_cohort(claim: Claim, card_type: str, scene: Scene, tenant: str) -> bool:
    mine = scene.books.quota.of(claim.tenant, card_type).cohort
    return mine is not None and mine == scene.books.quota.of(tenant, card_type).cohort


def _may_reclaim(claim: Claim, card_type: str, scene: Scene, needed: Amount, tenant: str) -> bool:
    """Whether the claim stays within its tenant's own quota, and the other tenant holds more than its own."""
    if tenant == claim.tenant or not _same_cohort(claim, card_type, scene, tenant):
        return False
    mine = scene.books.quota.of(claim.tenant, card_type)
    theirs = scene.books.quota.of(tenant, card_type)
    return mine.quota is not None and mine.taken + needed <= mine.quota and theirs.borrowed > 0


def _is_lower(scene: Scene, mine: JobClass, theirs: JobClass) -> bool:
    rank = scene.policy.class_rank
    if mine == theirs:
        return False
    return mine not in rank or rank[mine] < rank.get(theirs, len(rank))


def _unmet(claim: Claim, card_type: str, scene: Scene) -> Amount:
    """What a line that takes from lower classes is short of, for this claim; what is on its way to its owners counts."""
    most: Amount = 0
    for keep in scene.keeper.active(card_type, scene.now):
        if keep.preempts_lower and keep.covers(claim.tenant, claim.job_class):
            have = scene.books.held_by(card_type, tenant=keep.tenant, job_class=keep.job_class)
            for plan in scene.plans.values():
                if keep.covers(plan.tenant, plan.job_class):
                    have += plan.needs.get(card_type, 0)
            most = max(most, keep.reserved - have)
    return most


def _within_unmet(claim: Claim, card_type: str, scene: Scene, needed: Amount) -> bool:
    """Whether all that others would have to give up is missing to the reserve."""
    unmet = _unmet(claim, card_type, scene)
    pool = scene.books.fleet.pools.get(card_type)
    return unmet > 0 and max(needed - (pool.free_total if pool is not None else 0), 0) <= unmet


def _add_pieces(job: Job, card_type: str, scene: Scene, rule: Rule, search: Search) -> None:
    if job.is_leaving or not job.claim.is_preemptible:
        return
    settings = scene.policy.for_class(job.claim.job_class).preemption
    ready = job.since + settings.min_runtime * MICROSECONDS
    if ready > scene.micros:
        known = search.blocked.get(Code.MIN_RUNTIME, 0)
        search.blocked[Code.MIN_RUNTIME] = min(known, ready) if known else ready
        return
    search.pieces += pieces_of(job, card_type, scene, rule, trims=settings.trim_elastic)


def pieces_of(job: Job, card_type: str, scene: Scene, rule: Rule, *, trims: bool) -> list[Piece]:
    """The whole job, and the workers that an elastic gang can do without, last first."""
    found: list[Piece] = []
    staying = [entry for entry in job.held if not job.leaves(entry.worker)]
    least = job.claim.shape.min_workers
    if trims and least is not None:
        for entry in sorted(staying, key=lambda e: -e.worker):
            if entry.card_type == card_type and len(staying) > least:
                found.append(_piece(Taken(job, frozenset({entry.worker})), card_type, scene, rule))
    return [_piece(Taken(job), card_type, scene, rule), *found]


def _piece(taken: Taken, card_type: str, scene: Scene, rule: Rule) -> Piece:
    job = taken.job
    held = [e for e in job.held if taken.workers is None or e.worker in taken.workers]
    total: Amount = sum(entry.amount for entry in held)
    ran = max(scene.micros - job.since, 0) / MICROSECONDS
    rank = scene.policy.class_rank
    return Piece(
        taken=taken,
        rule=rule,
        amount=sum(entry.amount for entry in held if entry.card_type == card_type),
        total=total,
        is_borrowed=scene.books.quota.of(job.claim.tenant, card_type).borrowed > 0,
        priority=job.claim.priority,
        since=job.since,
        lost=0.0 if job.claim.has_checkpoint else float(total) * ran,
        class_rank=rank.get(job.claim.job_class, len(rank)),
    )


class Judge:
    """Whether pieces may be taken together, by the rules that look at all of them."""

    def __init__(self, claim: Claim | None, card_type: str, scene: Scene, needed: Amount, caps: Sequence[Cap]) -> None:
        """claim None: a rule of the pool, not a job, wants the room; only floors and quotas of others bind it."""
        self._claim, self._type, self._scene, self._needed, self._caps = claim, card_type, scene, needed, caps
        pool = scene.books.fleet.pools.get(card_type)
        self._free: Amount = pool.free_total if pool is not None else 0
        self._lines = [
            line
            for line in scene.policy.protection
            if (line.reserved.get(card_type) or line.floor.get(card_type)) and is_open(line.windows, scene.now)
        ]
        self.blocked: dict[Code, int] = {}

    def allows(self, pieces: Sequence[Piece]) -> bool:
        """Whether these may be taken; otherwise `blocked` names the rule."""
        if not self._lines and all(piece.is_whole and piece.rule is Rule.PRIORITY for piece in pieces):
            return True
        return (
            _do_not_overlap(pieces)
            and self._keeps_gangs(pieces)
            and self._keeps_quotas(pieces)
            and self._keeps_shares(pieces)
            and self._keeps_caps(pieces)
            and self._keeps_lines(pieces)
        )

    def _keeps_gangs(self, pieces: Sequence[Piece]) -> bool:
        taken: dict[str, int] = {}
        for piece in pieces:
            if piece.taken.workers is not None:
                taken[piece.job.id] = taken.get(piece.job.id, 0) + len(piece.taken.workers)
        for piece in pieces:
            job = piece.job
            if job.id in taken:
                staying = sum(not job.leaves(entry.worker) for entry in job.held)
                if staying - taken[job.id] < (job.claim.shape.min_workers or staying):
                    return False
        return True

    def _by_tenant(self, pieces: Iterable[Piece], rule: Rule) -> dict[str, Amount]:
        found: dict[str, Amount] = {}
        for piece in pieces:
            if piece.rule is rule:
                tenant = piece.job.claim.tenant
                found[tenant] = found.get(tenant, 0) + piece.amount
        return found

    def _keeps_quotas(self, pieces: Sequence[Piece]) -> bool:
        for tenant, amount in self._by_tenant(pieces, Rule.RECLAIM).items():
            standing = self._scene.books.quota.of(tenant, self._type)
            if standing.quota is not None and standing.used - standing.leaving - amount < standing.quota:
                return False
        return True

    def _keeps_shares(self, pieces: Sequence[Piece]) -> bool:
        victims = self._by_tenant(pieces, Rule.FAIR)
        if not victims or self._claim is None:
            return True
        tenants = self._scene.policy.tenants
        mine = self._scene.books.quota.of(self._claim.tenant, self._type).taken + self._needed
        my_weight = tenants[self._claim.tenant].weight if self._claim.tenant in tenants else 1.0
        for tenant, amount in victims.items():
            standing = self._scene.books.quota.of(tenant, self._type)
            left = standing.used - standing.leaving - amount
            weight = tenants[tenant].weight if tenant in tenants else 1.0
            if float(mine) * weight > float(left) * my_weight:
                self.blocked.setdefault(Code.FAIR_SHARE, 0)
                return False
        return True

    def _keeps_caps(self, pieces: Sequence[Piece]) -> bool:
        wanted = [piece for piece in pieces if piece.rule is Rule.PROTECTION]
        if wanted:
            total = sum(piece.total for piece in wanted)
            classes = {piece.job.claim.job_class for piece in wanted}
            if not any(classes <= set(cap.line.may_preempt) and total <= cap.left for cap in self._caps):
                self.blocked.setdefault(Code.PREEMPT_SHARE_USED_UP, 0)
                return False
        unmet = sum(piece.amount for piece in pieces if piece.rule is Rule.UNMET)
        if unmet and self._claim is not None:
            # What is missing to the reserve may be taken, so the job may not need more from others than that.
            return max(self._needed - self._free, 0) <= _unmet(self._claim, self._type, self._scene)
        return True

    def _keeps_lines(self, pieces: Sequence[Piece]) -> bool:
        """No preemption may take a class or tenant below its own line."""
        for line in self._lines:
            least = max(line.reserved.get(self._type, 0), line.floor.get(self._type, 0))
            lost = sum(
                piece.amount
                for piece in pieces
                if line.tenant in (None, piece.job.claim.tenant)
                and line.job_class in (None, piece.job.claim.job_class)
                and not self._is_own(line, piece)
            )
            have = self._scene.books.held_by(self._type, tenant=line.tenant, job_class=line.job_class)
            if lost and have - lost < least:
                self.blocked.setdefault(Code.PROTECTION_LINE, 0)
                return False
        return True

    def _is_own(self, line: ProtectionLine, piece: Piece) -> bool:
        """Room that moves within the line's own class or tenant does not leave it."""
        claim = self._claim
        return claim is not None and line.tenant in (None, claim.tenant) and line.job_class in (None, claim.job_class)


def _do_not_overlap(pieces: Sequence[Piece]) -> bool:
    whole = {piece.job.id for piece in pieces if piece.is_whole}
    return len(whole) == sum(piece.is_whole for piece in pieces) and not any(
        piece.job.id in whole for piece in pieces if not piece.is_whole
    )
