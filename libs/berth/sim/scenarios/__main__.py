"""`python -m berth.sim.scenarios PATH...`."""

import sys

from berth.sim.scenarios.command import main

sys.exit(main(sys.argv[1:]))
