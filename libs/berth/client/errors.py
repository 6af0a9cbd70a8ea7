"""What a caller of the API may meet, and who should act.

BerthError
├── NotConfigured    the user: no address or token was given or found
├── Unreachable      nobody, or the operator: the platform does not answer; worth another try
├── Refused          the user: the request cannot be carried out as it is (4xx); says field, value and remedy
└── ServerFault      the operator: the platform failed (5xx)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class BerthError(Exception):
    """Root of everything the client raises."""


class NotConfigured(BerthError):
    """No address, or no token."""


class Unreachable(BerthError):
    """No answer. What was asked for may have been done; with an idempotency key it is safe to ask again."""


class _Answered(BerthError):
    """An answer that is a problem document."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        self.code = str(problem.get("code") or "unknown")
        self.detail = str(problem.get("detail") or problem.get("title") or f"status {status}")
        self.field: str | None = problem.get("field")
        self.value: str | None = problem.get("value")
        self.remedy = str(problem.get("remedy") or "")
        self.errors: Sequence[Mapping[str, Any]] = problem.get("errors") or ()
        super().__init__(f"{self.detail}{f'; {self.remedy}' if self.remedy else ''} ({status} {self.code})")


class Refused(_Answered):
    """4xx: ask differently."""


class ServerFault(_Answered):
    """5xx: the platform could not."""
