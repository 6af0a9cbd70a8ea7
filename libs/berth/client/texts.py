"""Reasons as a person would say them. Text is made at the edge only: here, for gateway and command line alike.

Works on plain mappings (the JSON of `Reason`), so that the command line needs no models to print one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Words:
    """A code in words: what is the matter, and the smallest thing that would help."""

    sentence: str
    remedy: str


WORDS: Final[Mapping[str, Words]] = {
    # waits: quota
    "quota_full": Words(
        "the tenant's quota is in use", "wait for a job of yours to end, or ask for more quota: berth quota"
    ),
    "borrow_limit": Words(
        "the tenant has borrowed as much as it may", "wait for a job of yours to end, or ask for a higher borrow limit"
    ),
    "lend_limit": Words(
        "the other tenants of the cohort lend no more", "wait for lent GPUs to come back, or ask for more quota"
    ),
    "nothing_to_borrow": Words(
        "the cohort has nothing left to borrow", "wait for GPUs of the cohort to become free, or ask for more quota"
    ),
    # waits: GPUs
    "no_free_gpus": Words(
        "not enough GPUs are free", "wait for running jobs to end, ask for fewer GPUs, or allow another card type"
    ),
    "fragmented": Words(
        "enough GPUs are free, but not together on one node",
        "ask for fewer GPUs for each worker and more workers, or wait",
    ),
    "topology": Words(
        "enough GPUs are free, but not in one domain", "make the topology preferred instead of required, or wait"
    ),
    "type_unavailable": Words(
        "no card of the wanted type can be used now", "allow another card type, or wait for nodes to return: berth gpus"
    ),
    "memory_full": Words("no shared card has so much memory left", "ask for less memory, or wait"),
    "slice_unavailable": Words("no slice of this kind is free", "ask for another slice, or wait"),
    "node_unhealthy": Words(
        "the nodes that would fit are not healthy", "wait for them to return, or tell an operator: berth nodes"
    ),
    "gpu_not_clean": Words(
        "a card that would fit still holds memory of an earlier program",
        "wait for it to be cleaned, or tell an operator",
    ),
    # waits: order and rights
    "behind_in_queue": Words("other jobs are served first", "wait; a higher priority would move it forward"),
    "would_delay_reserved_job": Words(
        "starting now would delay a job with a planned start", "give it a shorter time_limit, so that it fits in before"
    ),
    "held_for_preemptor": Words("the free GPUs are kept for a job of higher claim", "wait until that job has started"),
    "waiting_for_victims": Words("the jobs that make room are still stopping", "wait; their grace runs out by itself"),
    "reserved_window": Words("the GPUs are reserved for a window", "wait for the window to end, or ask for fewer GPUs"),
    "protection_line": Words(
        "the free GPUs are protected for another class", "wait for the line's window to end, or use that class"
    ),
    "preempt_share_used_up": Words(
        "no more jobs may be stopped in this period", "wait for the next period, or for running jobs to end"
    ),
    "min_runtime": Words(
        "the jobs that could make room have only just started", "wait until they have run long enough"
    ),
    "fair_share": Words("tenants that have used less are served first", "wait; the shares even out"),
    "class_order": Words("higher classes are served first", "wait, or submit it in a higher class"),
    # waits: the job itself
    "backoff": Words("it pauses after a failure", "wait for the pause to end; see why it failed: berth logs"),
    "telemetry_stale": Words(
        "readings of the cards are too old to go by", "wait for fresh readings, or tell an operator: berth nodes"
    ),
    "gate_pending": Words("its data or model is not ready yet", "make ready what the gate waits for"),
    "budget_exhausted": Words("the tenant's budget is used up", "ask for more budget, or wait for the next period"),
    "approval_pending": Words("it needs an approval", "ask for the approval"),
    # refusals
    "never_fits": Words(
        "not even the empty pool could hold it", "ask for fewer GPUs or workers, or for another card type: berth gpus"
    ),
    "unknown_tenant": Words("the tenant is not in the policy", "name another tenant: berth tenants"),
    "unknown_card_type": Words("the pool has no such card type", "use a card type of the pool: berth gpus"),
    "over_limit": Words("it is above a limit of the policy", "ask for less, or have an operator raise the limit"),
    "unsupported": Words("it asks for what this pool cannot do", "leave it out"),
    "no_policy": Words("the pool has no policy yet", "have an operator apply one: berth policy apply"),
    # ends
    "program_failed": Words("the program failed", "see its output: berth logs"),
    "start_refused": Words("the program could not be started", "look at command, workdir and image: berth logs"),
    "time_limit": Words("its time limit ran out", "give it a longer time_limit, and checkpoints to go on from"),
    "cancelled": Words("it was cancelled", "submit it again if that was a mistake"),
    "preempted": Words("a job of higher claim needed its GPUs", "nothing to do; it goes on when there is room"),
    "reclaim": Words("its GPUs were taken back by their owner", "nothing to do; it goes on when there is room"),
    "idle": Words("it did not use its GPUs", "submit it again when there is work to do"),
    "lifetime": Words("its lifetime ran out", "submit it again, or extend it in time"),
    "node_lost": Words("a node it ran on was lost", "nothing to do; it is tried again"),
    "worker_lost": Words("a worker was found gone", "nothing to do; it is tried again"),
    "gpu_fault": Words("a card it ran on is faulty", "nothing to do; it is tried again elsewhere"),
    "command_refused": Words("a node refused the order", "nothing to do; it is tried again"),
    "quota_cut": Words("the tenant's quota was cut", "ask for more quota"),
    "tenant_removed": Words("the tenant was removed from the policy", "submit it for another tenant"),
    "not_ready": Words("it was not ready in time", "look at its output, or give it a longer ready_timeout: berth logs"),
    "rolled_back": Words("its version was rolled back", "submit a corrected version"),
    # commands refused by a node
    "wrong_epoch": Words("the order was for another session of the node", "nothing to do; it is sent again"),
    "old_fence": Words("the order was older than what the node runs", "nothing to do"),
    "expired": Words("the order came too late", "nothing to do; it is sent again"),
    "not_reconciled": Words("the node had not compared its work with the platform yet", "nothing to do"),
    "unknown_worker": Words("the node does not know the worker", "nothing to do"),
    "gpu_busy": Words("the card was still in other hands", "nothing to do; it is tried again"),
}

_LABELS: Final[Mapping[str, str]] = {
    "needed": "needs",
    "largest_on_one_node": "largest on one node",
    "largest_in_domain": "largest in one domain",
    "can_borrow": "can borrow",
    "card_type": "type",
    "exit_code": "exit code",
    "max_restarts": "restarts allowed",
}


def sentence(reason: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    """One reason in one line: what is the matter, with its numbers, and who holds what is missing.

    names: job id -> name, for those the reader may know.
    """
    code = str(reason.get("code", ""))
    words = WORDS.get(code)
    text = words.sentence if words is not None else code.replace("_", " ")
    facts = numbers(reason.get("facts") or {})
    if facts:
        text += f" ({facts})"
    blocked_by: Sequence[str] = reason.get("blocked_by") or ()
    if blocked_by:
        known = names or {}
        shown = [f"{known[job]} ({job})" if job in known else job for job in blocked_by[:3]]
        more = f" and {len(blocked_by) - 3} more" if len(blocked_by) > 3 else ""
        text += f"; held by {', '.join(shown)}{more}"
    return text


def remedy(reason: Mapping[str, Any]) -> str:
    """What would help: the reason's own remedy, or the usual one of its code."""
    own = str(reason.get("remedy") or "")
    if own:
        return own
    words = WORDS.get(str(reason.get("code", "")))
    return words.remedy if words is not None else ""


def numbers(facts: Mapping[str, Any]) -> str:
    """Facts in a row: `needs 8, free 2, type H100-80G`."""
    return ", ".join(f"{_LABELS.get(key, key.replace('_', ' '))} {_fact(value)}" for key, value in facts.items())


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    if isinstance(value, (list, tuple)):
        return " ".join(_fact(item) for item in value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_fact(item)}" for key, item in value.items())
    return str(value)


def summary(job: Mapping[str, Any]) -> str:
    """One line on where a job stands: `waits because …`, `runs on …`, `never fits: …`. Takes the JSON of `JobView`."""
    state = str(job.get("state", ""))
    reasons: Sequence[Mapping[str, Any]] = job.get("reasons") or ()
    first = sentence(reasons[0]) if reasons else ""
    nodes = ", ".join(job.get("nodes") or ()) or "no node"
    cancelling = ", cancel requested" if job.get("cancel_requested") else ""
    if state == "submitted":
        return f"submitted; not judged yet{cancelling}"
    if state == "waiting":
        return f"waits{f' because {first}' if first else ' for its turn'}{cancelling}"
    if state == "starting":
        return f"starts on {nodes}{cancelling}"
    if state == "running":
        return f"runs on {nodes}{cancelling}"
    if state == "unknown":
        return f"ran on {nodes}, of which nothing is heard{cancelling}"
    if state == "stopping":
        return f"stops{f' because {first}' if first else ''}"
    if state == "refused":
        never = any(reason.get("code") == "never_fits" for reason in reasons)
        return f"never fits: {first}" if never else f"refused{f': {first}' if first else ''}"
    if state == "succeeded":
        return f"succeeded on {nodes}"
    if state in {"failed", "reclaimed", "cancelled"}:
        return f"{state}{f': {first}' if first and state != 'cancelled' else ''}"
    return state


def duration(seconds: float | None) -> str:
    """A span of time, two units at most: `45s`, `3m05s`, `2h10m`, `4d03h`."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for upper, unit, lower_unit in ((86400, "d", "h"), (3600, "h", "m"), (60, "m", "s")):
        if whole >= upper:
            lower = {"h": 3600, "m": 60, "s": 1}[lower_unit]
            return f"{whole // upper}{unit}{whole % upper // lower:02d}{lower_unit}"
    return f"{whole}s"


def moment(text: str | None) -> datetime | None:
    """The time in an ISO text; None for none."""
    return datetime.fromisoformat(text) if text else None
