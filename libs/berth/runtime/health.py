"""Is this process alive, and may it be given work: named checks with reasons."""

import time
from collections.abc import Callable
from typing import Final


class Health:
    """The checks of one process.

    A check is either told (`set`) or asked (`probe`) at request time. A named check counts as failing, with the reason
    "starting", until it is first told otherwise, so a process is never ready by omission.
    """

    def __init__(self, service: str, *, checks: tuple[str, ...] = ()) -> None:
        self.service: Final = service
        self._started = time.monotonic()
        self._reasons: dict[str, str | None] = dict.fromkeys(checks, "starting")
        self._probes: dict[str, Callable[[], str | None]] = {}
        self._is_stopping = False

    def set(self, check: str, reason: str | None) -> None:
        """Report a check: None is good, anything else says why it is not."""
        self._reasons[check] = reason

    def probe(self, check: str, ask: Callable[[], str | None]) -> None:
        """Register a check that is asked whenever somebody wants to know; must answer at once."""
        self._probes[check] = ask
        self._reasons.pop(check, None)

    def stopping(self) -> None:
        """From now on not ready, whatever the checks say."""
        self._is_stopping = True

    def reasons(self) -> dict[str, str | None]:
        """Every check with its reason, None where it is good."""
        answers = dict(self._reasons)
        for check, ask in self._probes.items():
            try:
                answers[check] = ask()
            except Exception as error:  # a broken probe is a failing check, not a broken page
                answers[check] = f"{type(error).__name__}: {error}"
        if self._is_stopping:
            answers["running"] = "stopping"
        return answers

    def is_ready(self) -> bool:
        return all(reason is None for reason in self.reasons().values())

    def live_page(self) -> dict[str, object]:
        return {"status": "ok", "service": self.service, "uptime_seconds": round(time.monotonic() - self._started, 1)}

    def ready_page(self) -> tuple[bool, dict[str, object]]:
        """Whether ready, and the page that says why (not)."""
        reasons = self.reasons()
        is_ready = all(reason is None for reason in reasons.values())
        checks = {name: {"ok": reason is None, "reason": reason} for name, reason in sorted(reasons.items())}
        return is_ready, {"status": "ready" if is_ready else "not_ready", "service": self.service, "checks": checks}
