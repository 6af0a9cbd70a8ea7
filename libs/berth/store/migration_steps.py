"""Steps that the migrations of several services share. Frozen like the migrations that call them."""

from alembic import op

from berth.store.common_v1 import common_statements


def create_common_tables(schema: str) -> None:
    """Revision 0001 of every service."""
    for statement in common_statements(schema):
        for part in _single_statements(statement):
            op.execute(part)


def _single_statements(script: str) -> list[str]:
    # The driver prepares what it executes, and a prepared statement is one statement. Functions hold semicolons.
    if "$berth$" in script:
        return [script]
    return [part.strip() for part in script.split(";\n") if part.strip()]
