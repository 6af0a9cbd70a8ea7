"""`python -m bench.launch HOME SETTINGS_JSON`: start a platform and leave, so that a tracer can be put in front."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from berth.embedded.commands import start
from berth.embedded.layout import Layout
from berth.embedded.supervisor import PlatformSettings


def main() -> None:
    """Exit status 0: it runs."""
    state = start(Layout(Path(sys.argv[1])), PlatformSettings(**json.loads(sys.argv[2])))
    sys.exit(0 if state.state == "running" else 1)


if __name__ == "__main__":
    main()
