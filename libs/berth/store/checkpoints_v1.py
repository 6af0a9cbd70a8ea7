"""The tables of checkpoints as the migrations of deciding services make them; frozen like `common_v1`.

`berth.store.recorded` reads and writes them.
"""

_TABLES = """
CREATE TABLE {s}.checkpoint (
    commit_id bigint PRIMARY KEY,
    taken_at timestamptz NOT NULL DEFAULT now(),
    stream_seq bigint NOT NULL
);
CREATE TABLE {s}.checkpoint_record (
    commit_id bigint NOT NULL REFERENCES {s}.checkpoint ON DELETE CASCADE,
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (commit_id, kind, key)
)
"""


def checkpoint_statements(schema: str) -> list[str]:
    """The statements that make the tables in `schema`, in order."""
    return _TABLES.format(s=schema).strip().split(";\n")
