"""Whether a change of policy needs a second operator, by the policy that is in force when it is proposed."""

from __future__ import annotations

from berth.decisions.policy.document import Policy

GUARDED = ("protection", "reservations", "class_order", "approval")
"""Parts that `required_for: protection` is about; the setting itself is among them, or one operator could lift it."""


def needs_approval(old: Policy, new: Policy) -> bool:
    """Whether someone other than the author has to approve the step from `old` to `new`."""
    required = old.approval.required_for
    if required == "all":
        return old != new
    if required == "protection":
        return any(getattr(old, part) != getattr(new, part) for part in GUARDED)
    return False
