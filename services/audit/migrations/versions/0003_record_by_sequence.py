"""Reading the record by the sequence of the stream, as exports do."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("CREATE INDEX record_stream_seq ON audit.record (stream_seq)")
