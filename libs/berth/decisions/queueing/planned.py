"""Planned starts: when the first job that does not fit can start at the latest, by the time limits of what runs.

EASY backfill (Lifka, "The ANL/IBM SP Scheduling System", 1995): one planned start for each card type; others may start
if they are over by then, or take only what the planned job will not need.
"""

from __future__ import annotations

import numpy as np

from berth.decisions.placement.claim import Claim, Unit
from berth.decisions.placement.fit import number_workers, seat_shape
from berth.decisions.placement.fleet import Ints, TypePool
from berth.decisions.placement.jobs import MICROSECONDS, Job
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
    ends = _ends(scene, pool)
    moments = sorted({end for end, _, _ in ends})
    settings = scene.policy.for_class(claim.job_class).placement
    numbered = number_workers(claim.shape.kinds)
    low, high = 0, len(moments)
    found: Shadow | None = None
    while low < high:
        middle = (low + high) // 2
        free = pool.free.copy()
        for end, row, count in ends:
            if end <= moments[middle]:
                free[row] += count
        seats = seat_shape(pool, claim.shape, numbered, free, scene.books.fleet, is_packed=settings.strategy == "pack")
        if seats is None:
            low = middle + 1
            continue
        high = middle
        spare: Ints = free.copy()
        for seat in seats:
            spare[seat.row] -= seat.gpus * len(seat.workers)
        found = Shadow(job_id, moments[middle], np.maximum(spare, 0))
    return found


def _ends(scene: Scene, pool: TypePool) -> list[tuple[int, int, int]]:
    """When whole cards come back at the latest: (time, row, cards), for work with an end."""
    found: list[tuple[int, int, int]] = []
    for job in scene.running(pool.card_type):
        end = scene.end_of(job)
        if end < ENDLESS:
            found += _returns(job, end, scene, pool)
    return found


def _returns(job: Job, end: int, scene: Scene, pool: TypePool) -> list[tuple[int, int, int]]:
    found = []
    for entry in job.held:
        node = scene.books.fleet.nodes[entry.node]
        if entry.part is not None or entry.card_type != pool.card_type or not node.takes_work:
            continue
        cards = [node.by_uuid[uuid] for uuid in entry.gpus if uuid not in scene.books.held_for]
        count = sum(card.is_sound for card in cards)
        if count:
            found.append((end, node.rows[pool.card_type], count))
    return found
