"""Reason codes: why something was refused, waits, or was stopped. Data; text is made at the edge."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from berth.contracts.base import Facts, Wire


class Code(StrEnum):
    """Why. The words are those of the glossary; the group comments say who uses them."""

    # waits: quota
    QUOTA_FULL = "quota_full"
    BORROW_LIMIT = "borrow_limit"
    LEND_LIMIT = "lend_limit"
    NOTHING_TO_BORROW = "nothing_to_borrow"
    # waits: GPUs
    NO_FREE_GPUS = "no_free_gpus"
    FRAGMENTED = "fragmented"
    TOPOLOGY = "topology"
    TYPE_UNAVAILABLE = "type_unavailable"
    MEMORY_FULL = "memory_full"
    SLICE_UNAVAILABLE = "slice_unavailable"
    NODE_UNHEALTHY = "node_unhealthy"
    GPU_NOT_CLEAN = "gpu_not_clean"
    # waits: order and rights
    BEHIND_IN_QUEUE = "behind_in_queue"
    WOULD_DELAY_RESERVED_JOB = "would_delay_reserved_job"
    HELD_FOR_PREEMPTOR = "held_for_preemptor"
    WAITING_FOR_VICTIMS = "waiting_for_victims"
    RESERVED_WINDOW = "reserved_window"
    PROTECTION_LINE = "protection_line"
    PREEMPT_SHARE_USED_UP = "preempt_share_used_up"
    MIN_RUNTIME = "min_runtime"
    FAIR_SHARE = "fair_share"
    CLASS_ORDER = "class_order"
    # waits: the job itself
    BACKOFF = "backoff"
    TELEMETRY_STALE = "telemetry_stale"
    GATE_PENDING = "gate_pending"
    BUDGET_EXHAUSTED = "budget_exhausted"
    APPROVAL_PENDING = "approval_pending"
    # refusals
    NEVER_FITS = "never_fits"
    UNKNOWN_TENANT = "unknown_tenant"
    UNKNOWN_CARD_TYPE = "unknown_card_type"
    OVER_LIMIT = "over_limit"
    UNSUPPORTED = "unsupported"
    NO_POLICY = "no_policy"
    # ends
    PROGRAM_FAILED = "program_failed"
    START_REFUSED = "start_refused"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    RECLAIM = "reclaim"
    IDLE = "idle"
    LIFETIME = "lifetime"
    NODE_LOST = "node_lost"
    WORKER_LOST = "worker_lost"
    GPU_FAULT = "gpu_fault"
    COMMAND_REFUSED = "command_refused"
    QUOTA_CUT = "quota_cut"
    TENANT_REMOVED = "tenant_removed"
    NOT_READY = "not_ready"
    ROLLED_BACK = "rolled_back"
    # commands refused by a node
    WRONG_EPOCH = "wrong_epoch"
    OLD_FENCE = "old_fence"
    EXPIRED = "expired"
    NOT_RECONCILED = "not_reconciled"
    UNKNOWN_WORKER = "unknown_worker"
    GPU_BUSY = "gpu_busy"


class Reason(Wire):
    """One blocker or cause.

    facts: numbers in GPUs (`needed`, `free`, `quota`, `used`, `can_borrow`, `largest_on_one_node`, `largest_in_domain`)
        or GiB where GiB were asked for, and what else the code needs (`card_type`, `tenant`, `until`).
    blocked_by: job ids that hold what is missing; the edge hides those the asker may not see.
    remedy: the smallest change that would help, in plain words; empty where none is known.
    """

    code: Code
    facts: Facts = Field(default_factory=dict)
    blocked_by: tuple[str, ...] = ()
    remedy: str = ""


def because(code: Code, *, blocked_by: tuple[str, ...] = (), remedy: str = "", **facts: object) -> Reason:
    """A reason from a code and its facts; facts without a value are left out."""
    return Reason(
        code=code, facts={k: v for k, v in facts.items() if v is not None}, blocked_by=blocked_by, remedy=remedy
    )
