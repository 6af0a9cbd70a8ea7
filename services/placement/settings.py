"""Settings of placement: those common to all services."""

from __future__ import annotations

from berth.runtime.settings import BerthSettings


class Settings(BerthSettings):
    """`BERTH_*` variables that placement reads; see `python -m berth.runtime.settings`."""
