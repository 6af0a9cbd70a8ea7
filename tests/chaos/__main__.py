"""`python -m tests.chaos --faults N --seed S`: a campaign of any length, and its report. Exit status 1: a promise broke."""

from __future__ import annotations

import argparse
import random
import sys
from itertools import islice

from tests.chaos.campaign import run_alone
from tests.chaos.faults import every_fault, short_list
from tests.chaos.users import Traffic


def main() -> None:
    """Run it as asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=0, help="how many, drawn by the seed; 0: the short list")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--jobs", type=int, default=200, help="at least so many")
    parser.add_argument("--flowing", type=int, default=60, help="jobs asked for and not over at any time")
    parser.add_argument("--shortest", type=float, default=2.0, help="seconds a program runs")
    parser.add_argument("--longest", type=float, default=10.0)
    asked = parser.parse_args()
    faults = list(islice(every_fault(random.Random(asked.seed)), asked.faults)) if asked.faults else short_list()
    traffic = Traffic(at_least=asked.jobs, flowing=asked.flowing, seconds=(asked.shortest, asked.longest))
    report = run_alone(faults, traffic, seed=asked.seed, say=lambda text: print(text, flush=True))
    print(report.text())
    sys.exit(1 if report.violations or report.missed else 0)


if __name__ == "__main__":
    main()
