"""Where the embedded platform keeps what: one folder, `.berth/` unless BERTH_HOME says otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SERVICES = ("gateway", "inventory", "admission", "placement", "lifecycle", "audit", "node_agent")
"""Processes of the platform, in the order in which they are shown."""
STATEFUL = ("gateway", "inventory", "admission", "placement", "lifecycle", "audit")
"""Those that own a database schema."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below a platform's home."""

    home: Path

    @property
    def run(self) -> Path:
        """Pids, ports, token, credentials."""
        return self.home / "run"

    @property
    def logs(self) -> Path:
        """One log for each process."""
        return self.home / "logs"

    @property
    def nodes(self) -> Path:
        """State of the node agents: journals, workers' logs and exit records."""
        return self.home / "nodes"

    @property
    def state_file(self) -> Path:
        """What the supervisor says of the platform: JSON, replaced whole."""
        return self.run / "platform.json"

    @property
    def lock_file(self) -> Path:
        """Held by the supervisor as long as it lives."""
        return self.run / "supervisor.lock"

    @property
    def token_file(self) -> Path:
        """The operator's token, readable by its owner only."""
        return self.run / "token"

    @property
    def internal_token_file(self) -> Path:
        """The token of the services themselves, for spans."""
        return self.run / "internal-token"

    def service_file(self, service: str) -> Path:
        """Pid and health port that a service has written."""
        return self.run / f"{service}.json"

    def log_file(self, process: str) -> Path:
        """Where a process's output goes."""
        return self.logs / f"{process}.log"

    def credentials_file(self, service: str) -> Path:
        """The bus user of a service."""
        return self.run / "credentials" / f"{service}.json"


def home_from_environment(home: Path | None = None) -> Path:
    """The platform's folder: the argument, BERTH_HOME, or `.berth` here."""
    if home is not None:
        return home.absolute()
    named = os.environ.get("BERTH_HOME")
    return Path(named).absolute() if named else Path.cwd() / ".berth"
