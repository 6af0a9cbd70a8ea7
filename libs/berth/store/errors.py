"""What can go wrong between a process and its database, and who should act.

    StoreError
    ├── TransientError       nobody: run the whole batch again, from reading the inbox on
    │   ├── Unreachable      no connection to the server right now, or it was lost
    │   └── InboxConflict    another process took in one of the same events at the same moment
    ├── Deposed              this process: it leads no longer; stop writing and stand by
    ├── OutOfOrder           operator: an earlier message of the same entity is parked and comes first
    ├── NoSuchParked         operator: the parked message does not exist or is no longer parked
    └── MigrationRefused     operator: the schema is newer than this program

Every `TransientError` means "maybe done": a lost answer to a commit looks like a lost connection. Running the batch
again is safe because the inbox names the events that already had their effect.
"""


class StoreError(Exception):
    """Root of everything the store raises."""


class TransientError(StoreError):
    """Run the whole batch again."""


class Unreachable(TransientError):
    """The server is away, or the connection broke."""


class InboxConflict(TransientError):
    """An event of this batch was taken in elsewhere between looking and writing."""


class Deposed(StoreError):
    """The lease is at a later epoch than the one this process writes with."""


class OutOfOrder(StoreError):
    def __init__(self, parked_id: int, first_id: int, entity: str) -> None:
        super().__init__(f"parked message {parked_id} is behind {first_id} of the same entity {entity}")
        self.first_id = first_id


class NoSuchParked(StoreError):
    def __init__(self, parked_id: int) -> None:
        super().__init__(f"no parked message {parked_id}")


class MigrationRefused(StoreError):
    def __init__(self, schema: str, found: str, known: str) -> None:
        super().__init__(f"schema {schema} is at revision {found}, this program knows up to {known}")
