"""Copies of the records at which a replay can begin."""

from alembic import op

from berth.store.checkpoints_v1 import checkpoint_statements

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    for statement in checkpoint_statements("lifecycle"):
        op.execute(statement)
