"""Planned starts: when the first job that does not fit can start at the latest, by the time limits of what runs.

EASY backfill (Lifka, "The ANL/IBM SP Scheduling System", 1995): one planned start for each card type; others may start
if they are over by then, or take only what the planned job will not need.
"""

from __future__ import annotations

import numpy as np

from berth.decisions.placement.claim import Claim, Unit
from berth.decisions.placement.fit import number_workers, seat_shape
from berth.decisions.placement.fleet import Ints, TypePool
from berth.decisions.placement.jobs import MICROSECONDS
from berth.decisions.placement.ledger import Taken
from berth.decisions.placement.scene import ENDLESS, Scene, Shadow
from berth.decisions.placement.turn import options
from berth.decisions.policy.document import ClassSettings


def plans_from(settings: ClassSettings, submitted: int) -> int | None:
    """From when on (microseconds) a job that does not fit gets a planned start; None: never."""
    queue = settings.queue
    if queue.discipline == "strict":
        return None
    if queue.reserve_after is not None:
        return submitted + queue.reserve_after * MICROSECONDS
    return submitted if queue.discipline == "backfill" else None


def plan_start(claim: Claim, job_id: str, scene: Scene) -> tuple[str, Shadow] | None:
    """The card type and time at which the job can start first, if what runs has time limits at all.

    Only types without a planned start are looked at: one job for each type.
    """
    if claim.shape.unit is not Unit.WHOLE or claim.shape.mix_types:
        return None
    best: tuple[str, Shadow] | None = None
    for card_type in options(claim.shape, scene.books.fleet, scene.policy):
        pool = scene.books.fleet.pools.get(card_type)
        if pool is None or card_type in scene.shadows:
            continue
        shadow = _start_on(claim, job_id, scene, pool)
        if shadow is not None and (best is None or shadow.start < best[1].start):
            best = (card_type, shadow)
    return best


def _start_on(claim: Claim, job_id: str, scene: Scene, pool: TypePool) -> Shadow | None:
    ends = sorted(
        ((scene.end_of(job), job.id, job) for job in scene.running(pool.card_type)), key=lambda entry: entry[:2]
    )
    moments = sorted({end for end, _, _ in ends if end < ENDLESS})
    low, high = 0, len(moments)
    found: Shadow | None = None
    while low < high:
        middle = (low + high) // 2
        gone = [Taken(job) for end, _, job in ends if end <= moments[middle]]
        with scene.books.without(gone):
            spare = _spare(claim, scene, pool)
        if spare is None:
            low = middle + 1
        else:
            high, found = middle, Shadow(job_id, moments[middle], spare)
    return found


def _spare(claim: Claim, scene: Scene, pool: TypePool) -> Ints | None:
    """Free cards by row that are left once the job has its place; None where it has none."""
    if scene.books.quota.blocker(claim.tenant, pool.card_type, claim.shape.gpus) is not None:
        return None
    settings = scene.policy.for_class(claim.job_class).placement
    numbered = number_workers(claim.shape.kinds)
    seats = seat_shape(pool, claim.shape, numbered, pool.free, scene.books.fleet, is_packed=settings.strategy == "pack")
    if seats is None:
        return None
    spare: Ints = pool.free.copy()
    for seat in seats:
        spare[seat.row] -= seat.gpus * len(seat.workers)
    return np.maximum(spare, 0)
