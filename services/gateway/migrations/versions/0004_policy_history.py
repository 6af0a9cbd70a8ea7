"""Who approved a policy version, and proposals that wait for a second operator."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute("ALTER TABLE gateway.policy ADD COLUMN approver text NOT NULL DEFAULT ''")
    # A row for each proposal from its event until admission's last word; is_held: it waits for an approval.
    op.execute(
        """
        CREATE TABLE gateway.open_proposal (
            proposal_id text COLLATE "C" PRIMARY KEY,
            document bytea NOT NULL,
            author text NOT NULL,
            why text NOT NULL,
            proposed_at timestamptz NOT NULL,
            based_on bigint NOT NULL DEFAULT 0,
            required_for text COLLATE "C" NOT NULL DEFAULT '',
            is_held boolean NOT NULL DEFAULT false
        )
        """
    )
