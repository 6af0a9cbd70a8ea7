"""`python -m tests.mutants`: apply each deliberate break to a copy and see that scenarios or tests notice it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.breaks import BREAKS, Break

ROOT = Path(__file__).parents[2]
SCENARIOS = ("tests/scenarios", "tests/scenarios_more")


def is_noticed(broken: Break, *, timeout: int = 600) -> str | None:
    """What noticed it; None: nothing did."""
    with tempfile.TemporaryDirectory(prefix="berth-mutant-") as folder:
        libs = Path(folder) / "libs"
        shutil.copytree(ROOT / "libs", libs, ignore=shutil.ignore_patterns("__pycache__"))
        file = libs / broken.file
        text = file.read_text(encoding="utf-8")
        if text.count(broken.old) != 1:
            raise LookupError(f"{broken.rule}: {broken.file} has {text.count(broken.old)} times {broken.old!r}")
        file.write_text(text.replace(broken.old, broken.new), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": f"{libs}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        play = [sys.executable, "-m", "berth.sim.scenarios", "--first", *SCENARIOS]
        played = subprocess.run(play, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)
        if played.returncode:
            failed = [line for line in played.stdout.splitlines() if " fail: " in line]
            return failed[0].split(" ")[0] if failed else "the player broke"
        for path in broken.tests:
            # a configuration of its own: the repository's would put the whole libraries on the path
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-c", os.devnull, f"--rootdir={ROOT}", path]
            tested = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
            )
            if tested.returncode == 1:
                return path
    return None


def main() -> int:
    """Exit status 1 where a break went unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only breaks whose rule begins so")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    args = parser.parse_args()
    chosen = [broken for broken in BREAKS if broken.rule.startswith(args.only)]
    unnoticed = 0
    with ThreadPoolExecutor(args.at_once) as pool:
        for broken, found in zip(chosen, pool.map(is_noticed, chosen), strict=True):
            unnoticed += found is None
            print(f"{broken.rule:<40} {'NOT NOTICED' if found is None else found}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} breaks noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
