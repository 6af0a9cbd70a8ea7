"""What the programs wrote of themselves, read back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Run:
    """One life of one program. Times in nanoseconds; end and code are None where it was killed before it could say."""

    job: str
    attempt: int
    worker: int
    fence: int
    node: str
    pid: int
    gpus: tuple[str, ...]
    start_ns: int
    started_wall_ns: int
    end_ns: int | None = None
    ended_wall_ns: int | None = None
    code: int | None = None
    taken: str = ""
    """Which lock was not to be had, and who held it: a card that another program had, or an attempt that still ran."""

    @property
    def name(self) -> str:
        """As evidence names it."""
        return f"{self.job} attempt {self.attempt} worker {self.worker} fence {self.fence} pid {self.pid}"


def read_records(folder: Path) -> list[Run]:
    """Every run, in the order of their starts."""
    runs: list[Run] = []
    for path in sorted(folder.glob("*.log")):
        runs += runs_of(json.loads(line) for line in path.read_text().splitlines())
    return sorted(runs, key=lambda run: run.start_ns)


def runs_of(lines: Iterable[dict[str, Any]]) -> list[Run]:
    """The runs that the lines of one job tell of. A pid names a run within a job: no job runs for a whole turn of pids."""
    runs: dict[int, Run] = {}
    for line in lines:
        pid = int(line["pid"])
        if line["what"] == "start":
            runs[pid] = Run(
                job=line["job"],
                attempt=line["attempt"],
                worker=line["worker"],
                fence=line["fence"],
                node=line["node"],
                pid=pid,
                gpus=tuple(line["gpus"]),
                start_ns=line["ns"],
                started_wall_ns=line["wall_ns"],
            )
        elif line["what"] == "taken":
            runs[pid].taken = f"{line['lock']} held by {line['holder']}"
        elif line["what"] == "end":
            run = runs[pid]
            run.end_ns, run.ended_wall_ns, run.code = line["ns"], line["wall_ns"], line["code"]
    return list(runs.values())
