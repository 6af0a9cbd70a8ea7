"""The command: plays files or folders and says how each went."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from berth.sim.scenarios.player import play
from berth.sim.scenarios.scenario import Scenario, load


def main(argv: Sequence[str]) -> int:
    """Play; the exit status is 1 when one failed, 2 when there was nothing to play."""
    parser = argparse.ArgumentParser(prog="berth scenarios", description="Play acceptance scenarios on the decisions.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders")
    parser.add_argument("--trace", metavar="ID", help="show every event of this one")
    parser.add_argument("--only", metavar="TEXT", help="only those whose id begins so")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    args = parser.parse_args(list(argv))
    files = [found for path in args.paths for found in _files(path)]
    scenarios = [load(file) for file in files]
    if args.trace:
        scenarios = [s for s in scenarios if s.id == args.trace or s.id.startswith(f"{args.trace}-")]
    if args.only:
        scenarios = [s for s in scenarios if s.id.startswith(args.only)]
    if not scenarios:
        print("nothing to play")
        return 2
    return _play_all(scenarios, trace=bool(args.trace), first=args.first)


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.yaml")) if path.is_dir() else [path]


def _play_all(scenarios: Sequence[Scenario], *, trace: bool, first: bool = False) -> int:
    passed = failed = skipped = 0
    for scenario in scenarios:
        if scenario.level == "service":
            skipped += 1
            print(f"{scenario.id} skipped: needs the running services")
            continue
        outcome = play(scenario, with_trace=trace)
        for line in outcome.trace:
            print(line)
        if outcome.has_passed:
            passed += 1
            print(f"{scenario.id} pass")
            continue
        failed += 1
        for failure in outcome.failures:
            print(f"{scenario.id} fail: step {failure.step} ({failure.at.isoformat()}), {failure.what}")
        if first:
            break
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0
