"""What can go wrong with the servers that Berth starts itself.

EmbeddedError
├── NoUnprivilegedAccount   the operator: add an account, or do not start as root
├── BinariesMissing         the operator: install the `server` extra
├── ServerDidNotStart       the operator: read the log named in the message
└── ServerDidNotStop        the operator: the process is named in the message
"""

from collections.abc import Sequence
from pathlib import Path


class EmbeddedError(Exception):
    """A server that Berth runs by itself cannot be run."""


class NoUnprivilegedAccount(EmbeddedError):
    def __init__(self, wanted: Sequence[str]) -> None:
        super().__init__(f"started by root, and none of the accounts {', '.join(wanted)} exists to run the server")


class BinariesMissing(EmbeddedError):
    def __init__(self, package: str) -> None:
        super().__init__(f"no binaries of {package}; install berth-gpu[server]")


class ServerDidNotStart(EmbeddedError):
    def __init__(self, server: str, log: Path, tail: str) -> None:
        super().__init__(f"{server} did not start, log {log}:\n{tail}")


class ServerDidNotStop(EmbeddedError):
    def __init__(self, server: str, pid: int, waited_s: float) -> None:
        super().__init__(f"{server} process {pid} still runs {waited_s:.0f} s after it was told to stop")
