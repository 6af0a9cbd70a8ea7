"""Views of jobs, idempotency keys, tokens, secrets, the policy in force, and spans."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # spec is written once, view at each event: kept apart so that an update rewrites little.
    op.execute(
        """
        CREATE TABLE gateway.job (
            job_id text COLLATE "C" PRIMARY KEY,
            tenant text NOT NULL,
            name text NOT NULL,
            class text COLLATE "C" NOT NULL,
            state text COLLATE "C" NOT NULL,
            is_final boolean NOT NULL DEFAULT false,
            priority integer NOT NULL,
            gpus bigint NOT NULL,
            workers integer NOT NULL,
            submitted_at timestamptz NOT NULL,
            submitted_by text NOT NULL,
            cancel_requested boolean NOT NULL DEFAULT false,
            trace_id text COLLATE "C" NOT NULL DEFAULT '',
            spec bytea NOT NULL,
            view bytea NOT NULL DEFAULT '{}',
            last_seq bigint NOT NULL DEFAULT 0
        ) WITH (fillfactor = 80)
        """
    )
    op.execute("CREATE INDEX job_tenant ON gateway.job (tenant, job_id)")
    op.execute("CREATE INDEX job_name ON gateway.job (name, job_id)")
    op.execute("CREATE INDEX job_live ON gateway.job (job_id) WHERE NOT is_final")
    op.execute(
        """
        CREATE TABLE gateway.idempotency (
            scope text NOT NULL,
            key text NOT NULL,
            digest bytea NOT NULL,
            job_ids text[] NOT NULL,
            expires_at timestamptz NOT NULL,
            PRIMARY KEY (scope, key)
        )
        """
    )
    op.execute("CREATE INDEX idempotency_expires_at ON gateway.idempotency (expires_at)")
    op.execute(
        """
        CREATE TABLE gateway.token (
            token_hash bytea PRIMARY KEY,
            token_id text COLLATE "C" NOT NULL UNIQUE,
            user_name text NOT NULL,
            tenant text,
            role text COLLATE "C" NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            created_by text NOT NULL DEFAULT '',
            revoked_at timestamptz
        )
        """
    )
    op.execute(
        """
        CREATE TABLE gateway.secret (
            job_id text COLLATE "C" NOT NULL,
            name text COLLATE "C" NOT NULL,
            value text NOT NULL,
            PRIMARY KEY (job_id, name)
        )
        """
    )
    op.execute(
        """
        CREATE TABLE gateway.policy (
            version bigint PRIMARY KEY,
            document bytea NOT NULL,
            author text NOT NULL,
            why text NOT NULL,
            activated_at timestamptz NOT NULL
        )
        """
    )
    op.execute(
        """
        CREATE TABLE gateway.proposal (
            proposal_id text COLLATE "C" PRIMARY KEY,
            policy_version bigint,
            problems bytea,
            answered_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute(
        """
        CREATE TABLE gateway.node (
            node text COLLATE "C" PRIMARY KEY,
            card_types text[] NOT NULL,
            last_seq bigint NOT NULL
        )
        """
    )
    # A trace is a comfort: not worth a sync of the disk, and gone after a crash of the server.
    op.execute(
        """
        CREATE UNLOGGED TABLE gateway.span (
            trace_id text COLLATE "C" NOT NULL,
            span_id text COLLATE "C" NOT NULL,
            received_at timestamptz NOT NULL DEFAULT now(),
            body bytea NOT NULL,
            PRIMARY KEY (trace_id, span_id)
        )
        """
    )
    op.execute("CREATE INDEX span_received_at ON gateway.span (received_at)")
