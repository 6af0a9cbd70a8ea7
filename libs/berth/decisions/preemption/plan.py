"""Making room: for a job that cannot start otherwise, for a window that opens, or after a quota was cut.

Preemption is the last resort: a plan is made only if the job then starts, and takes nobody who could be spared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from berth.contracts.reasons import Code, Reason, because
from berth.decisions.placement.claim import Amount, Claim, Unit
from berth.decisions.placement.fit_parts import part_amount
from berth.decisions.placement.jobs import ALL, Held, Job, micros, moment
from berth.decisions.placement.ledger import Taken
from berth.decisions.placement.scene import Plan, Scene
from berth.decisions.placement.turn import Turn, options, take_turn
from berth.decisions.preemption.choose import Question, choose, order_key
from berth.decisions.preemption.victims import (
    Cap,
    Judge,
    Piece,
    Rule,
    Search,
    crew_of,
    find_pieces,
    pieces_of,
    rule_for,
)
from berth.decisions.quota.keep import Opening


@dataclass(slots=True)
class Making:
    """What came of looking for room: a plan with its victims (maybe none but those that leave anyway), or what is in
    the way of stopping anybody: code -> when that ends by itself (microseconds; 0: not by itself)."""

    plan: Plan | None = None
    pieces: list[Piece] = field(default_factory=list)
    considered: list[Piece] = field(default_factory=list)
    """All that some rule allowed to take."""
    blocked: dict[Code, int] = field(default_factory=dict)
    turn: Turn = field(default_factory=Turn)
    is_coming: bool = False
    """What leaves anyway is enough: nobody else is stopped."""


def make_room(job: Job, scene: Scene, caps: Sequence[Cap], *, types: Sequence[str] | None = None) -> Making:
    """Look for the least that must be stopped for a job to start; nothing is changed."""
    making = Making()
    claim = job.claim
    worker = None if claim.shape.is_gang else min(job.missing or (0,))
    for card_type in options(claim.shape, scene.books.fleet, scene.policy) if types is None else types:
        if card_type in scene.heads or (card_type, claim.tenant) in scene.tenant_heads:
            continue
        if card_type not in scene.books.fleet.pools or not scene.books.crews.get(card_type):
            continue
        pieces = _on_type(job, claim, card_type, scene, caps, making, worker)
        if pieces is None and making.is_coming:
            return making
        if pieces is not None:
            making.pieces = pieces
            making.plan = _plan(job, scene, making.turn, pieces)
            return making
    return making


def _least_needed(claim: Claim, card_type: str, scene: Scene, worker: int | None) -> Amount:
    shape = claim.shape
    count = 1 if worker is not None else (shape.min_workers or shape.workers)
    if shape.unit is not Unit.WHOLE:
        return part_amount(shape, scene.books.fleet.pools[card_type]) * count
    if worker is not None or shape.min_workers is not None:
        return min(kind.gpus for kind in shape.kinds) * count
    return shape.gpus


def _on_type(
    job: Job,
    claim: Claim,
    card_type: str,
    scene: Scene,
    caps: Sequence[Cap],
    making: Making,
    worker: int | None,
) -> list[Piece] | None:
    needed = _least_needed(claim, card_type, scene, worker)
    search = find_pieces(claim, card_type, scene, needed, caps)
    leaving = leaving_on(card_type, scene)
    if not search.pieces and not leaving:
        _note(making, search.blocked)
        return None
    with scene.books.without(leaving):
        fits = _try(job, claim, card_type, scene, worker)
    if fits is not None:
        # Enough is coming free. It is kept for the job only if it could have asked for it; else it waits in its order.
        making.turn = fits
        rules = [
            rule_for(claim, card_type, scene, needed, crew_of(scene.books.placed[owner]), caps, Search([], {}))
            for owner in owners_of(fits.held or [], scene)
        ]
        making.is_coming = True
        return [] if rules and all(rule is not None for rule in rules) else None
    with scene.books.without(leaving):
        judge = Judge(claim, card_type, scene, needed, caps)
        found: dict[int, Turn] = {}

        def enough(pieces: Sequence[Piece]) -> bool:
            with scene.books.without([piece.taken for piece in pieces]):
                turn = _try(job, claim, card_type, scene, worker)
            if turn is not None:
                found[id(pieces)] = turn
                making.turn = turn
            return turn is not None

        chosen = choose(search.pieces, _question(job, claim, card_type, scene, needed, judge, enough, search.pieces))
        if chosen is not None:
            making.considered = search.pieces
            with scene.books.without([piece.taken for piece in chosen]):
                making.turn = _try(job, claim, card_type, scene, worker) or making.turn
            return chosen
    _note(making, search.blocked)
    _note(making, judge.blocked)
    return None


def _note(making: Making, blocked: dict[Code, int]) -> None:
    for code, until in blocked.items():
        known = making.blocked.get(code, 0)
        making.blocked[code] = min(known, until) if known and until else known or until


def _try(job: Job, claim: Claim, card_type: str, scene: Scene, worker: int | None) -> Turn | None:
    joins = job if job.held or worker is not None else None
    turn = take_turn(claim, scene, types=[card_type], job=joins, worker=worker)
    return turn if turn.held is not None else None


def _question(
    job: Job,
    claim: Claim,
    card_type: str,
    scene: Scene,
    needed: Amount,
    judge: Judge,
    enough: object,
    pieces: Sequence[Piece],
) -> Question:
    settings = scene.policy.for_class(claim.job_class).preemption
    pool = scene.books.fleet.pools[card_type]
    shape = claim.shape
    unmet = any(piece.rule is Rule.UNMET for piece in pieces)

    def key(chosen: Sequence[Piece]) -> tuple[object, ...]:
        return order_key(chosen, settings.victim_order, trims=settings.trim_elastic, lowest_class_first=unmet)

    def node_short(node_name: str) -> Amount:
        node = scene.books.fleet.nodes[node_name]
        return shape.largest - int(pool.free[node.rows[card_type]])

    single = shape.unit is Unit.WHOLE and shape.workers == 1
    short = needed - pool.free_total if shape.unit is Unit.WHOLE else 0
    assert callable(enough)
    return Question(
        allowed=judge.allows,
        enough=enough,
        key=key,
        short=max(short, 0),
        node_short=node_short if single and short_of_room(shape.largest, pool.largest_free()) else None,
    )


def short_of_room(needed: int, largest: int) -> bool:
    """Whether no single node has room for the worker; otherwise a limit, not the nodes, is in the way."""
    return largest < needed


def leaving_on(card_type: str, scene: Scene) -> list[Taken]:
    """What was told to stop already: it counts as coming free."""
    found = []
    for members in scene.books.crews.get(card_type, {}).values():
        for job in members.values():
            if job.is_leaving:
                found.append(Taken(job))
            elif job.leaving:
                found.append(Taken(job, frozenset(job.leaving - {ALL})))
    return found


def _plan(job: Job, scene: Scene, turn: Turn, pieces: Sequence[Piece]) -> Plan:
    held = turn.held or []
    needs: dict[str, Amount] = {}
    for entry in held:
        needs[entry.card_type] = needs.get(entry.card_type, 0) + entry.amount
    victims: dict[str, tuple[int, ...] | None] = {}
    attempts: dict[str, int] = {}
    for piece in pieces:
        mine = victims.get(piece.job.id, ())
        if piece.taken.workers is None:
            victims[piece.job.id] = None
        elif mine is not None:
            victims[piece.job.id] = tuple(sorted({*mine, *piece.taken.workers}))
        attempts[piece.job.id] = piece.job.attempt
    for owner in owners_of(held, scene):
        if owner not in victims:
            victims[owner] = None
            attempts[owner] = scene.books.placed[owner].attempt
    # a part of a card that others share frees up in place; a card that a victim has as a whole is kept as a whole
    kept = [entry for entry in held if entry.part is None or owners_of([entry], scene)]
    return Plan(job.id, job.claim.tenant, job.claim.job_class, kept, needs, victims, attempts)


def owners_of(held: Sequence[Held], scene: Scene) -> list[str]:
    """Jobs that still hold the cards of a planned place."""
    found: dict[str, None] = {}
    for entry in held:
        node = scene.books.fleet.nodes[entry.node]
        for uuid in entry.gpus:
            card = node.by_uuid.get(uuid)
            if card is not None and card.owner in scene.books.placed:
                found[card.owner] = None
    return list(found)


def blocked_reasons(blocked: dict[Code, int], card_type: str | None, needed: int) -> list[Reason]:
    """Why nobody may be stopped for a job, as reasons."""
    remedies = {
        Code.MIN_RUNTIME: "wait until those that run have had their least running time",
        Code.FAIR_SHARE: "ask for fewer GPUs: the own share would be the larger one",
        Code.CLASS_ORDER: "wait: a lower class never preempts a higher one",
        Code.PREEMPT_SHARE_USED_UP: "wait for the next share window",
        Code.PROTECTION_LINE: "wait: what runs is protected",
    }
    return [
        because(
            code,
            card_type=card_type,
            needed=needed,
            until=moment(until).isoformat() if until else None,
            remedy=remedies.get(code, ""),
        )
        for code, until in sorted(blocked.items())
    ]


# ---------------------------------------------------------------------------------------- room for rules, not for jobs
def clear_for(opening: Opening, scene: Scene) -> tuple[list[Piece], int]:
    """Whom to stop so that a window's room is clear when it opens; and when a least running time that is in the way
    ends (0: none is)."""
    card_type, keep, at = opening.card_type, opening.keep, micros(opening.at)
    pool = scene.books.fleet.pools.get(card_type)
    if pool is None:
        return [], 0
    have = scene.books.held_by(card_type, tenant=keep.tenant, job_class=keep.job_class)
    free: Amount = pool.free_total
    candidates: list[Piece] = []
    ready: list[int] = []
    rule = Rule.RESERVATION if keep.code is Code.RESERVED_WINDOW else Rule.WINDOW
    for job in list(scene.running(card_type)):
        if keep.covers(job.claim.tenant, job.claim.job_class):
            continue
        settings = scene.policy.for_class(job.claim.job_class).preemption
        coming = sum(e.amount for e in job.held if e.card_type == card_type and job.leaves(e.worker))
        if scene.end_of(job) <= at or job.is_leaving:
            free += sum(entry.amount for entry in job.held if entry.card_type == card_type)
            continue
        free += coming
        since = job.since + settings.min_runtime * 1_000_000
        if since > scene.micros:
            ready.append(since)
        elif job.claim.is_preemptible:
            candidates += pieces_of(job, card_type, scene, rule, trims=settings.trim_elastic)
    short = keep.reserved - have - free
    if short <= 0:
        return [], 0
    chosen = _choose_for_rule(candidates, card_type, scene, short)
    return chosen, min(ready, default=0)


def cut_tenant(tenant: str, card_type: str, scene: Scene) -> list[Piece]:
    """Whom of a tenant to stop until what it holds is within its quota and what it may borrow."""
    over = scene.books.quota.excess(tenant, card_type)
    if over <= 0:
        return []
    candidates: list[Piece] = []
    for job in list(scene.running(card_type)):
        if job.claim.tenant == tenant and not job.is_leaving:
            settings = scene.policy.for_class(job.claim.job_class)
            if settings.quota_cut == "preempt":
                trims = settings.preemption.trim_elastic
                candidates += pieces_of(job, card_type, scene, Rule.QUOTA_CUT, trims=trims)
    return _choose_for_rule(candidates, card_type, scene, over)


def _choose_for_rule(candidates: list[Piece], card_type: str, scene: Scene, short: Amount) -> list[Piece]:
    """The best set that frees so much; all that may be taken where even that is too little."""
    settings = scene.policy.defaults.preemption
    judge = Judge(None, card_type, scene, 0, ())
    question = Question(
        allowed=judge.allows,
        enough=lambda pieces: sum(piece.amount for piece in pieces) >= short,
        key=lambda pieces: order_key(pieces, settings.victim_order, trims=settings.trim_elastic),
        short=short,
    )
    chosen = choose(candidates, question)
    if chosen is None:
        chosen = []
        for piece in sorted(candidates, key=lambda piece: question.key([piece])):
            if piece.is_whole and judge.allows([*chosen, piece]):
                chosen.append(piece)
    return chosen
