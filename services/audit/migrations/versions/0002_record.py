"""The record of events, hash-chained, and the use of GPUs derived from it."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE audit.record (
            number bigint PRIMARY KEY,
            stream_seq bigint NOT NULL,
            recorded_at timestamptz NOT NULL,
            event_id text COLLATE "C" NOT NULL,
            type text COLLATE "C" NOT NULL,
            entity text COLLATE "C" NOT NULL,
            tenant text NOT NULL,
            payload bytea NOT NULL,
            hash bytea NOT NULL
        ) WITH (toast_tuple_target = 8160)
        """
    )
    op.execute("CREATE INDEX record_entity ON audit.record (entity, number)")
    op.execute("CREATE INDEX record_recorded_at ON audit.record USING brin (recorded_at) WITH (pages_per_range = 32)")
    op.execute(
        """
        CREATE TABLE audit.use (
            job_id text COLLATE "C" NOT NULL,
            attempt integer NOT NULL,
            tenant text NOT NULL,
            class text COLLATE "C" NOT NULL,
            card_type text COLLATE "C" NOT NULL,
            gpu_milli bigint NOT NULL,
            waited_seconds double precision NOT NULL,
            taken_at timestamptz NOT NULL,
            released_at timestamptz,
            PRIMARY KEY (job_id, attempt, card_type)
        ) WITH (fillfactor = 80)
        """
    )
    op.execute("CREATE INDEX use_taken_at ON audit.use USING brin (taken_at) WITH (pages_per_range = 32)")
    op.execute(
        """
        CREATE TABLE audit.job (
            job_id text COLLATE "C" PRIMARY KEY,
            tenant text NOT NULL,
            class text COLLATE "C" NOT NULL,
            waits_since timestamptz NOT NULL
        ) WITH (fillfactor = 80)
        """
    )
