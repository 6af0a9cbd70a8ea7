"""Deliberate breaks: each is one line of the decisions gone wrong, which some scenario or test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Break:
    """rule: a ground rule of the scenarios' README, or a group of knobs. old must stand in the file once."""

    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()


D = "berth/decisions/"
LIFE = D + "lifecycle/"
PLACE = D + "placement/"

BREAKS: tuple[Break, ...] = (
    # ------------------------------------------------------------------------------------------------- ground rules
    Break("1 one holder", PLACE + "fleet.py", "            card.owner = owner", "            pass"),
    Break("2 gang whole", PLACE + "claim.py", "is_gang=spec.gang", "is_gang=False"),
    Break(
        "3 one live attempt",
        D + "health/core.py",
        "        if now < lost_at:",
        "        if False:",
    ),
    Break("4 within quota", D + "quota/book.py", "if room is None or needed <= room:", "if True:"),
    Break(
        "5 limits are inclusive",
        D + "quota/book.py",
        "if room is None or needed <= room:",
        "if room is None or needed < room:",
    ),
    Break(
        "6 order by priority",
        PLACE + "state.py",
        "return (-claim.priority, self.share(claim), submitted, job_id)",
        "return (claim.priority, self.share(claim), submitted, job_id)",
    ),
    Break(
        "6 order by first submission",
        PLACE + "state.py",
        "return (-claim.priority, self.share(claim), submitted, job_id)",
        "return (-claim.priority, self.share(claim), -submitted, job_id)",
    ),
    Break(
        "7 only as a last resort",
        PLACE + "round.py",
        'if settings.types.when_full == "preempt_first" and len(types) > 1:',
        "if len(types) > 1:",
    ),
    Break(
        "7 no more than needed",
        D + "preemption/choose.py",
        "            key.append(tuple(sorted((piece.priority for piece in pieces), reverse=True)))",
        "            key.append(-len(pieces))",
    ),
    Break("7 freed room is kept", PLACE + "ledger.py", "self.held_for[uuid] = job_id", "pass"),
    Break(
        "8 a reason for every wait",
        D + "explain/waits.py",
        "        reasons = waiting_reasons(state, job, now)",
        "        reasons = ()",
    ),
    Break(
        "8 one record each",
        LIFE + "book.py",
        "        if key not in run.stale:",
        "        if True:",
        ("tests/unit/decisions/lifecycle/test_core.py",),
    ),
    # ------------------------------------------------------------------------------------------------------- knobs
    Break("queue.discipline strict", PLACE + "turn.py", '.queue.discipline == "strict":', '.queue.discipline == "":'),
    Break(
        "queue.discipline backfill",
        D + "queueing/planned.py",
        'return submitted if queue.discipline == "backfill" else None',
        "return None",
    ),
    Break(
        "queue.reserve_after",
        D + "queueing/planned.py",
        "if queue.reserve_after is not None:",
        "if False:",
    ),
    Break("fair_share.basis", PLACE + "state.py", '.fair_share.basis == "none":', '.fair_share.basis != "":'),
    Break(
        "fair_share weight",
        D + "queueing/share.py",
        "weight = settings.weight if settings is not None else 1.0",
        "weight = 1.0",
    ),
    Break(
        "preemption.by_priority",
        D + "preemption/victims.py",
        'settings.by_priority == "any_tenant" or',
        'settings.by_priority == "" or',
    ),
    Break(
        "preemption.reclaim",
        D + "preemption/victims.py",
        'settings.reclaim == "borrowed"',
        'settings.reclaim == ""',
    ),
    Break("preemption.fair", D + "preemption/victims.py", 'settings.fair == "final_share"', 'settings.fair == ""'),
    Break("preemption.trim_elastic", D + "preemption/victims.py", "if trims and least is not None:", "if False:"),
    Break(
        "preemption.victim_order",
        D + "preemption/choose.py",
        "key.append(tuple(sorted((-piece.since for piece in pieces), reverse=True)))",
        "key.append(tuple(sorted((piece.since for piece in pieces), reverse=True)))",
    ),
    Break(
        "preemption.grace",
        LIFE + "core.py",
        "grace = plan.grace_seconds if asked is None else min(asked, plan.grace_seconds)",
        "grace = 0",
    ),
    Break(
        "preemption.min_runtime",
        D + "preemption/victims.py",
        "ready = job.since + settings.min_runtime * MICROSECONDS",
        "ready = 0",
    ),
    Break(
        "class_order",
        D + "preemption/victims.py",
        "return mine not in rank or theirs not in rank or rank[mine] <= rank[theirs]",
        "return True",
    ),
    Break(
        "protection reserved",
        PLACE + "turn.py",
        "if scene.keeper.keeps_anything and needed:",
        "if False:",
    ),
    Break(
        "protection windows",
        D + "quota/keep.py",
        "            if is_open(line.windows, now):",
        "            if True:",
    ),
    Break(
        "protection clear_before",
        D + "quota/keep.py",
        "                clear = opens - timedelta(seconds=line.clear_before)",
        "                clear = opens",
    ),
    Break(
        "protection max_preempt_share",
        PLACE + "state.py",
        "        if line.max_preempt_share is None:",
        "        if True:",
    ),
    Break("protection when_unmet", D + "quota/keep.py", 'line.when_unmet == "preempt_lower_class",', "False,"),
    Break("placement.strategy", PLACE + "turn.py", 'is_packed = settings.strategy == "pack"', "is_packed = False"),
    Break(
        "placement.keep_links_whole",
        PLACE + "turn.py",
        "keeps_links_whole=settings.keep_links_whole)",
        "keeps_links_whole=False)",
    ),
    Break(
        "types.when_full",
        PLACE + "round.py",
        'if settings.types.when_full == "preempt_first" and len(types) > 1:',
        "if False:",
    ),
    Break("mig.repartition", PLACE + "turn.py", 'recuts = settings.mig.repartition == "idle_room"', "recuts = False"),
    Break("idle.timeout", LIFE + "idle.py", "and idle >= rules.timeout:", "and idle >= 2 * rules.timeout:"),
    Break(
        "idle.warn_before",
        LIFE + "idle.py",
        "            dues.append(evidence.fresh_at + timedelta(seconds=left - rules.warn_before))",
        "            pass",
        ("tests/unit/decisions/lifecycle/test_idle.py",),
    ),
    Break(
        "idle.counts",
        LIFE + "idle.py",
        "if any(sign.value in rules.counts for sign in event.active):",
        "if False:",
    ),
    Break(
        "lifetime.extensions",
        LIFE + "idle.py",
        "    if run.extensions >= rules.extensions:",
        "    if False:",
    ),
    Break("lifetime.max", LIFE + "idle.py", "    if book.now >= ends_at:", "    if False:"),
    Break(
        "telemetry.stale_after",
        LIFE + "idle.py",
        "if stale_after is None or since <= stale_after:",
        "if True:",
    ),
    Break(
        "recovery.suspect_after",
        PLACE + "fleet.py",
        "self.changed.state is NodeState.READY and not self.changed.cordoned",
        "not self.changed.cordoned",
    ),
    Break("recovery.gang_grace", LIFE + "nodes.py", "if spec is None or not grace or", "if True or"),
    Break("recovery.max_restarts", LIFE + "retry.py", "    if charged >= allowed:", "    if charged > allowed:"),
    Break("recovery.backoff", LIFE + "retry.py", "        pause *= backoff.factor", "        pause *= 1"),
    Break(
        "recovery.quarantine",
        D + "health/core.py",
        "if len(record.start_failures) >= rules.failures:",
        "if False:",
    ),
    Break(
        "recovery.charge_job_for_node_faults",
        LIFE + "retry.py",
        "    if not rules.charge_job_for_node_faults:",
        "    if False:",
    ),
    Break(
        "health.fatal_xids",
        D + "health/core.py",
        "if xid not in self._policy.health.fatal_xids or",
        "if xid in self._policy.health.fatal_xids or",
    ),
    Break(
        "cleaning.wait",
        D + "health/model.py",
        "return GpuHealthState.NOT_CLEAN if self.unclean_mib else GpuHealthState.HEALTHY",
        "return GpuHealthState.HEALTHY",
    ),
    Break("quota_cut", D + "preemption/plan.py", 'if settings.quota_cut == "preempt":', "if False:"),
    Break(
        "never_fits",
        D + "admission.py",
        '.never_fits == "refuse":',
        '.never_fits == "":',
        ("tests/unit/decisions/test_admission.py",),
    ),
    Break(
        "limits",
        D + "admission.py",
        "if limit is not None and asked > limit:",
        "if False:",
        ("tests/unit/decisions/test_admission.py",),
    ),
    Break(
        "reservations",
        D + "quota/keep.py",
        "            if reservation.from_ <= now < reservation.to:",
        "            if False:",
    ),
    Break(
        "time_limit",
        LIFE + "core.py",
        "return run.running_since + timedelta(seconds=spec.time_limit)",
        "return None",
    ),
    Break(
        "service.scale_down_after",
        D + "serving/scaling.py",
        "down = _extreme(max, demand, now=now, window=spec.scale_down_after)",
        "down = _extreme(max, demand, now=now, window=0)",
    ),
    Break(
        "service.to_zero_after",
        D + "serving/core.py",
        "after = spec.scale_down_after if spec.to_zero_after is None else spec.to_zero_after",
        "after = 0",
    ),
    Break("service.ready_timeout", D + "serving/core.py", "        if limit is None:", "        if True:"),
    Break(
        "service.unavailable",
        D + "serving/core.py",
        "        least = service.wanted - service.unavailable",
        "        least = 0",
        ("tests/unit/decisions/serving/test_core.py",),
    ),
    Break(
        "fencing",
        LIFE + "reports.py",
        "    if worker is None or worker.fence != event.fence or worker.node != event.node:",
        "    if worker is None:",
        ("tests/unit/decisions/lifecycle/test_core.py",),
    ),
    Break(
        "cards are given back when released",
        LIFE + "attempts.py",
        "    if not all(worker.is_over for worker in run.workers):",
        "    if False:",
    ),
)
