from berth.testing.postgres import *  # noqa: F403
