"""The `berth` command as a user calls it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Berth:
    """Commands against the platform of one home. prefix: what stands before the interpreter, as `setpriv ...`."""

    home: Path
    prefix: tuple[str, ...] = ()

    def __call__(self, *arguments: str, stdin: str = "", expect: int = 0, seconds: float = 120) -> str:
        """Standard output of `berth ARGUMENTS`; fails when the exit code is another than expected."""
        done = subprocess.run(
            [*self.prefix, sys.executable, "-m", "berth.client.cli.main", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env=self.environment(),
            cwd=self.home.parent,
        )
        assert done.returncode == expect, f"berth {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *arguments: str, stdin: str = "", expect: int = 0) -> Any:
        """As a program reads it."""
        return json.loads(self(*arguments, "--json", stdin=stdin, expect=expect))

    def environment(self) -> dict[str, str]:
        """Nothing of Berth's but the home."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        path = os.pathsep.join((str(ROOT / "libs"), str(ROOT)))
        return {
            **kept,
            "BERTH_HOME": str(self.home),
            "PYTHONPATH": path,
            "HOME": str(self.home.parent),
            "NO_COLOR": "1",
        }
