"""The tables that every service begins with."""

from berth.store.migration_steps import create_common_tables

revision = "0001"
down_revision = None


def upgrade() -> None:
    create_common_tables("placement")
