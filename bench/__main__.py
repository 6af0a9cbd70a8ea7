"""`python -m bench [NAME...]`: run benches one after the other, print one JSON line each; see bench/README.md."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from bench.errors import BenchFailed
from bench.options import Options, be_silent, say
from bench.pipeline.replay import replay
from bench.pipeline.start_latency import start_latency
from bench.pipeline.startup import platform
from bench.pipeline.throughput import pipeline, processes

BENCHES: Final[dict[str, Callable[[Options], dict[str, Any]]]] = {
    "pipeline": pipeline,
    "processes": processes,
    "start_latency": start_latency,
    "platform": platform,
    "replay": replay,
}


def main() -> int:
    """Exit status 1 when a bench could not run; the others are run all the same."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the whole platform.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHES)}; all without one")
    parser.add_argument(
        "--store", choices=("memory", "disk"), help="where the data lie; each bench has its own default"
    )
    parser.add_argument("--quick", action="store_true", help="smaller counts: for a look, not for figures")
    parser.add_argument("--json-only", action="store_true", help="no progress on standard error")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in BENCHES]:
        parser.error(f"there is no bench {unknown[0]!r}; there are {', '.join(BENCHES)}")
    if asked.json_only:
        be_silent()
    signal.signal(signal.SIGTERM, _leave)
    options = Options(store=asked.store, quick=asked.quick)
    failed = False
    for name in asked.names or BENCHES:
        say(f"bench {name}")
        try:
            print(json.dumps(BENCHES[name](options)), flush=True)
        except BenchFailed as why:
            failed = True
            print(f"bench {name}: {why}", file=sys.stderr, flush=True)
    return int(failed)


def _leave(number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: the platform at hand is stopped on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
