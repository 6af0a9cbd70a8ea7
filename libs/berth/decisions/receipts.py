"""Receipts: what a decision stood on, bounded, with a digest that a re-run must give again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from berth.contracts.events import Receipt
from berth.contracts.reasons import Reason
from berth.decisions.core import DECISIONS_VERSION

CANDIDATES = 8
REASONS = 8
"""Most of each that a receipt keeps; the first are those that weighed most."""


def make_receipt(
    outcome: str,
    *,
    policy_version: int,
    state_version: int,
    candidates: Iterable[dict[str, Any]] = (),
    filtered: dict[str, int] | None = None,
    reasons: Sequence[Reason] = (),
) -> Receipt:
    """The receipt of one decision.

    Args:
        outcome: inputs and result in few words, without clocks: the digest is over it, the versions and the reasons' codes.
        state_version: events that the service had applied before.
        reasons: only those that the event itself does not carry.
    """
    codes = ",".join(reason.code for reason in reasons)
    text = f"{policy_version}.{state_version}.{DECISIONS_VERSION}|{outcome}|{codes}"
    return Receipt(
        policy_version=policy_version,
        state_version=state_version,
        decisions_version=DECISIONS_VERSION,
        candidates=tuple(candidates)[:CANDIDATES],
        filtered=filtered or {},
        reasons=tuple(reasons)[:REASONS],
        digest=blake2b(text.encode(), digest_size=8).hexdigest(),
    )
