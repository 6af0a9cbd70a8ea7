"""Settings of inventory: those common to all services."""

from __future__ import annotations

from berth.runtime.settings import BerthSettings


class Settings(BerthSettings):
    """`BERTH_*` variables that inventory reads; see `python -m berth.runtime.settings`."""
