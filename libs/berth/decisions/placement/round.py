"""One pass: everything that could have a new answer has its turn, in order.

Room that is being made, windows and gangs short of a worker come first; then the waiting jobs. A turn places the job,
plans room for it, or leaves it waiting with its reasons.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from typing import Any

from berth.contracts.base import JobClass
from berth.contracts.events import JobPlaced, PreemptionPlanned, Victim, WindowClosed, WindowOpened
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.placement.claim import Amount, Claim, Shape, plain
from berth.decisions.placement.considered import nodes_chosen, victims_considered
from berth.decisions.placement.jobs import Held, Job, Phase, micros
from berth.decisions.placement.scene import Plan, Scene
from berth.decisions.placement.state import Order, State
from berth.decisions.placement.turn import OWN_LIMITS, Turn, could_fit, options, take_turn, to_assignments
from berth.decisions.preemption.plan import (
    blocked_reasons,
    clear_for,
    cut_tenant,
    make_room,
    owners_of,
)
from berth.decisions.preemption.potential import Potential
from berth.decisions.preemption.victims import Piece, Rule
from berth.decisions.queueing.planned import plan_start, plans_from
from berth.decisions.queueing.waiting import Group

TOLD_PER_GROUP = 16
"""Jobs of one group that are told at once when the reasons of the whole group change."""

VICTIM_SEARCHES = 12
"""Claims for which one pass looks for victims in vain. Where more may have a new answer, the next pass goes on from
there: a long queue must not hold up what can start at once."""

MAX_SWEEPS = 100
"""More than any pass needs; a pass that goes on for longer goes round in a circle."""

_GROUP, _PLAN, _SHAPE = 0, 1, 2
"""What an entry of a sweep stands for: a group that is awake, room that is being made, the groups of a shape."""


class Round:
    """One pass over a state."""

    def __init__(self, state: State) -> None:
        """For one batch."""
        self._state = state
        self._scene = state.new_scene()
        self._freed = False
        self._searches = 0
        self._stopped_at: Order | None = None
        self._all_dirty: set[str] = set()
        self._placed = False
        self._was_fair = False
        self._passed: list[Group] = []
        self._answers: dict[Claim, tuple[Reason, ...]] = {}
        self._keeps_order = state.keeps_order
        self._lends = state.keeper.lends
        self._preempts = any(state.preempts(job_class) for job_class in JobClass)
        self._uses_shares = any(state.policy.for_class(job_class).fair_share.basis != "none" for job_class in JobClass)
        self._potential = Potential(self._scene)
        self.rule_wake = 0

    def run(self) -> None:
        """Decide everything that can be decided at this instant."""
        state = self._state
        if state.scene is not None:
            # Nothing may happen in this pass that changes who stands before whom.
            last = state.scene
            self._scene.shadows, self._scene.heads = last.shadows, last.heads
            self._scene.tenant_heads = last.tenant_heads
        state.scene = self._scene
        if state.policy_version == 0:
            return
        self._tell_windows()
        self._check_plans()
        self._clear_windows()
        self._cut_quotas()
        for _ in range(MAX_SWEEPS):
            self._restore_gangs()
            if not self._sweep():
                break
        self._tell_fresh()
        left = None if self._stopped_at is None else (sorted(self._all_dirty), self._stopped_at)
        if left != state.left:
            state.left = left
            state.touch_meta()
        state.waiting.awake = {}
        state.books.dirty_types = set()
        state.note_usage()

    # ------------------------------------------------------------------------------------------------------ sweep
    def _sweep(self) -> bool:
        """Give everything that is awake its turn; True where that may have changed earlier answers."""
        state = self._state
        dirty, shapes = self._wake()
        state.books.dirty_types = set()
        scene = self._scene
        if self._keeps_order and not state.waiting.awake and not dirty:
            return False
        scene.shadows, scene.heads, scene.tenant_heads = {}, {}, {}
        heap: list[tuple[Order, int, Any]] = [
            (state.order(group), _GROUP, group) for group in state.waiting.awake.values()
        ]
        heap += [(state.order_of(state.jobs[job_id]), _PLAN, job_id) for job_id in self._plans_on(dirty)]
        firsts = [state.waiting.first(shape) for shape in shapes]
        heap += [(_static(group), _SHAPE, group) for group in firsts if group is not None]
        heapq.heapify(heap)
        state.waiting.awake = {}
        self._passed, self._placed, self._was_fair = [], False, False
        while heap:
            order, kind, item = heapq.heappop(heap)
            following = self._turn(kind, item, order)
            if following is not None:
                heapq.heappush(heap, following)
        for group in self._passed:
            if group.jobs:
                state.waiting.queue(group)
        again = self._placed and self._was_fair
        if again:
            state.books.dirty_types.update(state.books.fleet.pools)
        return self._unheld() or again

    def _turn(self, kind: int, item: Any, order: Order) -> tuple[Order, int, Any] | None:
        """One entry's turn; returns the entry that follows from it."""
        state = self._state
        if kind == _PLAN:
            self._placed |= self._plan_turn(item)
            return None
        group: Group = item
        if kind == _SHAPE:
            following = self._shape_turn(group)
            return None if following is None else (_static(following), _SHAPE, following)
        if not group.jobs:
            return None
        now = state.order(group)
        if now > order:
            return (now, _GROUP, group)
        if self._has_same_answer(group):
            types = options(group.claim.shape, state.books.fleet, state.policy)
            self._bear_on_others(state.jobs[group.head[1]], types, set())
            return None
        if not self._group_turn(group):
            self._was_fair |= state.is_fair(group.claim.job_class)
            return None
        self._placed = True
        return (state.order(group), _GROUP, group) if group.jobs else None

    def _unheld(self) -> bool:
        freed, self._freed = self._freed, False
        return freed

    def _plans_on(self, dirty: Iterable[str]) -> list[str]:
        changed = set(dirty)
        return [job_id for job_id, plan in self._state.plans.items() if changed & set(plan.needs)]

    def _wake(self) -> tuple[list[str], list[Shape]]:
        """Something was freed or changed: wake those it may be enough for.

        Returns:
            The card types concerned, and shapes whose groups are to have their turns one by one while room lasts:
            where shares do not decide, their order is known without looking at all of them.
        """
        state = self._state
        dirty = sorted(state.books.dirty_types)
        self._all_dirty |= state.books.dirty_types
        if state.left is not None and not self._searches:
            self._go_on(*state.left)
        if self._keeps_order:
            if dirty or state.waiting.awake or state.fresh:
                state.waiting.wake_all()
            return dirty, []
        shapes: dict[Shape, None] = {}
        for card_type in dirty:
            for shape, groups in state.waiting.shapes(card_type):
                if could_fit(shape, state.books.fleet, state.policy):
                    if self._uses_shares:
                        state.waiting.wake(groups.values())
                    else:
                        shapes[shape] = None
                if self._preempts:
                    state.waiting.wake(
                        group
                        for group in groups.values()
                        if state.preempts(group.claim.job_class) and self._potential.could_do(group.claim)
                    )
        return dirty, list(shapes)

    def _go_on(self, types: Sequence[str], order: Order) -> None:
        """Wake those that the last pass left, where it looked for victims in vain for others."""
        state = self._state
        self._all_dirty.update(types)
        for card_type in types or sorted(state.books.fleet.pools):
            for _, groups in state.waiting.shapes(card_type):
                state.waiting.wake(
                    group
                    for group in groups.values()
                    if state.preempts(group.claim.job_class)
                    and state.order(group) >= order
                    and self._potential.could_do(group.claim)
                )

    def _shape_turn(self, group: Group) -> Group | None:
        """The turn of the first group of a shape; returns the group of that shape that follows, if room is left."""
        state = self._state
        shape = group.claim.shape
        if state.waiting.first(shape) is group:
            if not could_fit(shape, state.books.fleet, state.policy):
                return None
            if self._group_turn(group):
                self._placed = True
            elif state.waiting.first(shape) is group:
                state.waiting.take_first(shape)
                self._passed.append(group)
        return state.waiting.first(shape)

    def _has_same_answer(self, group: Group) -> bool:
        """Whether nothing that is free, or could be made free, is enough: then the answer stays what it was."""
        state = self._state
        claim = group.claim
        is_new = state.jobs[group.head[1]].told is None
        if is_new or could_fit(claim.shape, state.books.fleet, state.policy):
            return False
        return not state.preempts(claim.job_class) or not self._potential.could_do(claim)

    def _group_turn(self, group: Group) -> bool:
        """The first job's turn; True where the group's next job is to have its turn too."""
        state, scene = self._state, self._scene
        job = state.jobs[group.head[1]]
        claim = job.claim
        settings = state.policy.for_class(claim.job_class)
        if not claim.shape.is_gang:
            return self._loose_turn(group, job)
        types = options(claim.shape, state.books.fleet, state.policy)
        steps: list[Sequence[str] | None] = [None]
        if settings.types.when_full == "preempt_first" and len(types) > 1:
            steps = [[card_type] for card_type in types]
        turn = Turn()
        blocked: dict[Code, int] = {}
        for step in steps:
            tried = take_turn(claim, scene, types=step)
            if tried.held is not None:
                self.start(job, tried)
                return True
            turn.reasons += tried.reasons
            if state.preempts(claim.job_class) and self._potential.could_do(claim):
                if self._searches >= VICTIM_SEARCHES and not self._keeps_order:
                    self._stop_searching(group)
                    return False
                made, stops = self._make_room(job, step, tried.reasons)
                blocked.update(stops)
                if made:
                    return True
                self._searches += 1
        self._defer(group, job, turn, blocked)
        return False

    def _stop_searching(self, group: Group) -> None:
        """Leave this claim, and those behind it, to the next pass."""
        order = self._state.order(group)
        if self._stopped_at is None or order < self._stopped_at:
            self._stopped_at = order

    def _loose_turn(self, group: Group, job: Job) -> bool:
        """Independent workers: each starts where it fits; the others go on waiting."""
        state = self._state
        wanted = job.missing or tuple(range(job.claim.shape.workers))
        placed: list[Held] = []
        turn = Turn()
        for worker in wanted:
            turn = take_turn(job.claim, self._scene, job=job, worker=worker)
            if turn.held is None:
                break
            state.books.take(job, turn.held)
            placed += turn.held
        if placed:
            done = {entry.worker for entry in placed}
            job.missing = tuple(worker for worker in wanted if worker not in done)
            self._tell_placed(job, placed, turn)
        if turn.held is not None:
            state.waiting.remove(job.claim, job.submitted, job.id)
            state.fresh.pop(job.id, None)
            return True
        blocked: dict[Code, int] = {}
        if state.preempts(job.claim.job_class):
            made, blocked = self._make_room(job, None, turn.reasons)
            if made:
                return True
        self._defer(group, job, turn, blocked)
        return False

    def start(self, job: Job, turn: Turn) -> None:
        """Take the place a turn found."""
        assert turn.held is not None
        self._state.waiting.remove(job.claim, job.submitted, job.id)
        self._state.fresh.pop(job.id, None)
        self._state.books.take(job, turn.held)
        self._tell_placed(job, turn.held, turn)
        if self._lends:
            # What was kept because this job wanted it may be lent again.
            self._freed = True
            self._state.books.dirty_types.update(job.claim.shape.types or self._state.books.fleet.pools)
        for shadow in self._scene.shadows.get(turn.held[0].card_type, ()):
            if self._scene.ends(job.claim) > shadow.start:
                pool = self._state.books.fleet.pools[turn.held[0].card_type]
                for entry in turn.held:
                    row = self._state.books.fleet.nodes[entry.node].rows[pool.card_type]
                    shadow.spare[row] -= len(entry.gpus)

    def _tell_placed(self, job: Job, held: Sequence[Held], turn: Turn) -> None:
        """Number the placement, and tell it: a new attempt, or workers that join the one that lives."""
        state = self._state
        state.fence += 1
        if job.phase is not Phase.PLACED:
            job.phase, job.attempt, job.fence = Phase.PLACED, job.attempt + 1, state.fence
            job.placed_at, job.started_at, job.leaving = micros(state.now), 0, frozenset()
        job.told, job.wake_at = None, 0
        for entry in held:
            entry.fence = state.fence
            if entry.part is not None and entry.part.slice is not None:
                card = state.books.fleet.nodes[entry.node].by_uuid[entry.gpus[0]]
                state.record("cut", card.uuid, {"node": entry.node, "cut": dict(card.cut)})
        state.touch(job)
        inputs = ";".join(f"{h.worker}@{h.node}:{','.join(h.gpus)}" for h in held)
        receipt = state.receipt(
            f"place|{job.id}/{job.attempt}/{state.fence}|{inputs}",
            candidates=turn.candidates or nodes_chosen(held),
            filtered=turn.filtered,
        )
        state.emit(
            job,
            JobPlaced(
                job_id=job.id,
                attempt=job.attempt,
                fence=state.fence,
                assignments=to_assignments(held),
                receipt=receipt,
            ),
        )

    def _defer(self, group: Group, job: Job, turn: Turn, blocked: dict[Code, int]) -> None:
        """Keep the answer, tell the first jobs of the group where its codes have changed, and let it bear on others."""
        state, scene = self._state, self._scene
        claim = job.claim
        types = options(claim.shape, state.books.fleet, state.policy)
        reasons = turn.reasons + blocked_reasons(blocked, types[0] if types else None, claim.shape.gpus)
        answer = self._answers[claim] = tuple(reasons)
        for _, job_id in group.jobs[:TOLD_PER_GROUP]:
            state.tell_waiting(state.jobs[job_id], answer)
        soonest = min((until for until in blocked.values() if until), default=0)
        if Code.PREEMPT_SHARE_USED_UP in blocked:
            ends = [state.share_window(cap.line).start + cap.line.share_window * 1_000_000 for cap in state.caps(claim)]
            soonest = min([soonest, *ends]) if soonest else min(ends, default=0)
        if job.wake_at != soonest:
            job.wake_at = soonest
            state.touch(job)
            if soonest:
                state.wakes.append((soonest, job.id))
        if not self._keeps_order:
            return
        # Held back by nothing but the tenant's own limits, or by a job of the tenant that is.
        own = {r.facts.get("card_type") for r in turn.reasons if r.code in OWN_LIMITS}
        own |= {card_type for card_type in types if (card_type, claim.tenant) in scene.tenant_heads}
        own -= set(scene.heads)
        own -= {
            r.facts.get("card_type")
            for r in turn.reasons
            if r.code not in OWN_LIMITS and r.code is not Code.BEHIND_IN_QUEUE
        }
        self._bear_on_others(job, types, own)

    def _bear_on_others(self, job: Job, types: Sequence[str], own: Container[object]) -> None:
        """What a job that stays waiting means for those behind it: they may not overtake it, or not delay its start.

        own: card types on which nothing but its tenant's limits hold it back.
        """
        if not self._keeps_order:
            return
        state, scene, claim = self._state, self._scene, job.claim
        settings = state.policy.for_class(claim.job_class)
        if settings.queue.discipline == "strict":
            for card_type in types:
                if card_type in own:
                    scene.tenant_heads.setdefault((card_type, claim.tenant), job.id)
                else:
                    scene.heads.setdefault(card_type, job.id)
        since = plans_from(settings, job.submitted)
        if since is not None and since <= scene.micros and not all(card_type in own for card_type in types):
            planned = plan_start(claim, job.id, scene)
            if planned is not None:
                scene.shadows.setdefault(planned[0], []).append(planned[1])

    def _tell_fresh(self) -> None:
        """Every job that began to wait in this batch is told why."""
        state = self._state
        for job in list(state.fresh.values()):
            group = state.waiting.group(job.claim)
            if group is None or job.id in state.plans:
                continue
            answer = self._answers.get(job.claim)
            if answer is None:
                answer = self._answers[job.claim] = tuple(take_turn(job.claim, self._scene).reasons)
            state.tell_waiting(job, answer)
        state.fresh = {}

    # ------------------------------------------------------------------------------------------------ making room
    def _make_room(
        self, job: Job, types: Sequence[str] | None, reasons: Sequence[Reason]
    ) -> tuple[bool, dict[Code, int]]:
        """Stop others for a job, if that lets it start; otherwise what is in the way of it. reasons: why it does not
        start without."""
        state = self._state
        making = make_room(job, self._scene, state.caps(job.claim), types=types)
        if making.plan is None:
            return False, making.blocked
        plan = making.plan
        state.waiting.remove(job.claim, job.submitted, job.id)
        state.fresh.pop(job.id, None)
        self._notify(making.pieces, job, plan, considered=making.considered, reasons=reasons)
        state.add_plan(plan)
        job.wake_at = 0
        state.touch(job)
        state.tell_waiting(job, (waiting_for(plan, self._scene),))
        return True, {}

    def _notify(
        self,
        pieces: Sequence[Piece],
        job: Job | None,
        plan: Plan | None,
        *,
        considered: Sequence[Piece] = (),
        reasons: Sequence[Reason] = (),
    ) -> None:
        """Tell who is to be stopped, one plan for each rule."""
        state = self._state
        by_rule: dict[Rule, list[Piece]] = {}
        for piece in pieces:
            by_rule.setdefault(piece.rule, []).append(piece)
        for rule, taken in by_rule.items():
            state.plan_number += 1
            victims = _victims(taken)
            graces = [state.policy.for_class(piece.job.claim.job_class).preemption.grace for piece in taken]
            grace = max((g for g in graces if g is not None), default=0)
            if any(g is None for g in graces):
                grace = max([grace, *(piece.job.claim.stop_grace or 0 for piece in taken)])
            for piece in taken:
                state.books.mark_leaving(piece.job, piece.taken.workers)
                state.touch(piece.job)
            text = f"stop|{job.id if job else ''}|{rule}|" + ",".join(f"{v.job_id}/{v.attempt}" for v in victims)
            data = PreemptionPlanned(
                plan_id=f"plan-{state.plan_number}",
                preemptor=job.id if job is not None else "",
                preemptor_tenant=job.claim.tenant if job is not None else "",
                victims=tuple(victims),
                rule=_RULE_WORDS.get(rule, rule.value),
                grace_seconds=grace,
                receipt=state.receipt(
                    text,
                    candidates=victims_considered(taken, considered),
                    filtered={"spared": max(len(considered) - len(pieces), 0)},
                    reasons=reasons,
                ),
            )
            state.out.emit(
                data,
                data.plan_id,
                tenant=data.preemptor_tenant,
                actor="service:placement",
                correlation=job.id if job is not None else data.plan_id,
                cause=(job.cause if job is not None else "") or state.cause,
                trace=job.trace if job is not None else "",
            )
            state.out.counters.pop(data.plan_id, None)
            if rule is Rule.PROTECTION and job is not None:
                self._use_cap(job, taken)

    def _use_cap(self, job: Job, taken: Sequence[Piece]) -> None:
        classes = {piece.job.claim.job_class for piece in taken}
        total: Amount = sum(piece.total for piece in taken)
        for cap in self._state.caps(job.claim):
            if classes <= set(cap.line.may_preempt) and total <= cap.left:
                self._state.use_cap(cap.line, total)
                return

    def _check_plans(self) -> None:
        """Drop room that can no longer be used: its cards are broken, or somebody else's."""
        state = self._state
        for job_id in list(state.plans):
            plan = state.plans[job_id]
            if self._is_sound(plan):
                continue
            state.drop_plan(job_id)
            self._compete_again(state.jobs[job_id])

    def _compete_again(self, job: Job) -> None:
        state = self._state
        group = state.waiting.add(job.claim, job.submitted, job.id)
        state.waiting.wake([group])
        state.touch(job)

    def _is_sound(self, plan: Plan) -> bool:
        books = self._state.books
        for entry in plan.held:
            node = books.fleet.nodes[entry.node]
            if not node.takes_work:
                return False
            for uuid in entry.gpus:
                card = node.by_uuid.get(uuid)
                if card is None or not card.is_sound:
                    return False
                owner = books.placed.get(card.owner)
                if card.owner != f"hold:{plan.job_id}" and (owner is None or not owner.leaving):
                    return False
        return True

    def _plan_turn(self, job_id: str) -> bool:
        """Start a job whose room is complete, or that fits elsewhere by now."""
        state = self._state
        plan = state.plans.get(job_id)
        if plan is None:
            return False
        job = state.jobs[job_id]
        worker = None if job.claim.shape.is_gang else min(job.missing or (0,))
        joins = job if worker is not None else None
        is_complete = all(
            state.books.fleet.nodes[entry.node].by_uuid[uuid].owner == f"hold:{job_id}"
            for entry in plan.held
            for uuid in entry.gpus
        )
        state.drop_plan(job_id)
        limits = [state.books.quota.blocker(plan.tenant, t, amount) for t, amount in plan.needs.items()]
        turn = Turn(held=plan.held)
        has_parts = any(entry.part is not None for entry in plan.held)
        if not plan.held or not is_complete or has_parts or any(limits):
            turn = take_turn(job.claim, self._scene, job=joins, worker=worker)
        if turn.held is not None and not any(limits):
            self._freed = not is_complete or has_parts
            if worker is None:
                self.start(job, turn)
                return True
            state.books.take(job, turn.held)
            job.missing = tuple(w for w in (job.missing or range(job.claim.shape.workers)) if w != worker)
            self._tell_placed(job, turn.held, turn)
            if job.missing:
                self._compete_again(job)
                self._freed = True
            return True
        if (is_complete and plan.held) or self._victims_gone(plan):
            # Its room is there, yet a limit has been lowered meanwhile: it waits like others, and holds nothing.
            self._compete_again(job)
            self._freed = True
            return False
        state.add_plan(plan)
        return False

    def _victims_gone(self, plan: Plan) -> bool:
        placed = self._state.books.placed
        return all(job_id not in placed or placed[job_id].attempt != n for job_id, n in plan.attempts.items())

    # ---------------------------------------------------------------------------------------------- gangs short of one
    def _restore_gangs(self) -> None:
        """Gangs that lost workers have the first claim on room for them: nobody who waits stands before them."""
        state, scene = self._state, self._scene
        if not state.short:
            return
        waiting = scene.shadows, scene.heads, scene.tenant_heads
        scene.shadows, scene.heads, scene.tenant_heads = {}, {}, {}
        for job in sorted(state.short.values(), key=state.order_of):
            if job.is_leaving or not job.missing:
                continue
            turn = take_turn(job.claim, scene, job=job)
            if turn.held is None:
                continue
            state.books.take(job, turn.held)
            job.missing = ()
            del state.short[job.id]
            self._tell_placed(job, turn.held, turn)
        scene.shadows, scene.heads, scene.tenant_heads = waiting

    # ---------------------------------------------------------------------------------------------- windows and cuts
    def _tell_windows(self) -> None:
        state = self._state
        is_open = state.keeper.open_names(state.now)
        if is_open == state.open_windows:
            return
        for name in [name for name in is_open if name not in state.open_windows]:
            self._tell_window(WindowOpened(name=name, at=state.now, policy_version=state.policy_version))
        for name in [name for name in state.open_windows if name not in is_open]:
            self._tell_window(WindowClosed(name=name, at=state.now, policy_version=state.policy_version))
        state.open_windows = is_open
        state.touch_meta()

    def _tell_window(self, fact: WindowOpened | WindowClosed) -> None:
        from hashlib import blake2b

        entity = "w-" + blake2b(fact.name.encode(), digest_size=8).hexdigest()
        self._state.window_entities[entity] = None
        self._state.out.emit(fact, entity, actor="service:placement", cause=self._state.cause)

    def _clear_windows(self) -> None:
        state = self._state
        for opening in state.keeper.clearings(state.now):
            pieces, ready = clear_for(opening, self._scene)
            self._notify(pieces, None, None)
            if ready:
                self.rule_wake = min(self.rule_wake, ready) if self.rule_wake else ready

    def _cut_quotas(self) -> None:
        """After a change of policy: stop what the new limits leave no room for, where the policy says so."""
        state = self._state
        if not state.cuts_due:
            return
        state.cuts_due = False
        for tenant, card_type, _ in list(state.books.quota.used_lines()):
            self._notify(cut_tenant(tenant, card_type, self._scene), None, None)


def _static(group: Group) -> Order:
    """The order of a group where shares do not decide."""
    priority, submitted, job_id = group.key
    return (priority, 0.0, submitted, job_id)


_RULE_WORDS = {Rule.UNMET: "protection"}


def _victims(pieces: Iterable[Piece]) -> list[Victim]:
    found: dict[str, Victim] = {}
    for piece in pieces:
        job = piece.job
        known = found.get(job.id)
        workers = piece.taken.workers
        if known is not None and known.workers is not None and workers is not None:
            workers = frozenset({*known.workers, *workers})
        gpus = sum(entry.amount for entry in job.held if workers is None or entry.worker in workers)
        found[job.id] = Victim(
            job_id=job.id,
            attempt=job.attempt,
            tenant=job.claim.tenant,
            workers=None if workers is None else tuple(sorted(workers)),
            gpus=plain(gpus),
        )
    return list(found.values())


def waiting_for(plan: Plan, scene: Scene) -> Reason:
    """Why a job waits that room is being made for."""
    leaving = [job_id for job_id in plan.victims if job_id in scene.books.placed]
    still = owners_of(plan.held, scene) or leaving
    card_type = next(iter(plan.needs), None)
    pool = scene.books.fleet.pools.get(card_type or "")
    return because(
        Code.WAITING_FOR_VICTIMS,
        card_type=card_type,
        needed=plain(sum(plan.needs.values())),
        free=pool.free_total if pool is not None else 0,
        blocked_by=tuple(still),
        remedy="wait until those that were told to stop have left",
    )
