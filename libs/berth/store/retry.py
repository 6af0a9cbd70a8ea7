"""Which errors of the database mean "run the whole batch again", which mean "stop leading", and which are defects."""

import asyncpg

from berth.store.errors import Deposed, InboxConflict, StoreError, TransientError, Unreachable

DEPOSED = "BE001"  # raised by berth_commit
TAKEN_ELSEWHERE = "BE002"

_LOST = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03"})  # shutdown, crash, starting up, idle timeouts
_AGAIN = frozenset(
    {"40001", "40P01", "55P03", "57014"}
)  # serialization, deadlock, lock not available, statement timeout
_LOST_CLASS = "08"
_SHORT_OF_RESOURCES_CLASS = "53"  # disk full, out of memory, too many connections: passes, or an alarm tells


def as_store_error(error: BaseException) -> StoreError | None:
    """What `error` means to a batch; None for a defect of ours, and for what is a `StoreError` already.

    SQLAlchemy's wrappers are looked through. Client-side encoding errors are `InterfaceError` too, but no retry mends
    them.
    """
    wrapped = getattr(error, "orig", None)
    if isinstance(wrapped, BaseException):
        return as_store_error(wrapped.__cause__ or wrapped) or (
            Unreachable(str(wrapped)) if getattr(error, "connection_invalidated", False) else None
        )
    if isinstance(error, asyncpg.PostgresError):
        return _by_sqlstate(error)
    if isinstance(error, asyncpg.InterfaceError) and not isinstance(error, ValueError):
        return Unreachable(str(error))
    if isinstance(error, asyncpg.InternalClientError):
        # The server said goodbye while the connection was idle, and the driver has not read the end of it yet.
        return Unreachable(str(error))
    if isinstance(error, OSError):  # covers TimeoutError, refused and reset connections
        return Unreachable(str(error) or type(error).__name__)
    return None


def is_retryable(error: BaseException) -> bool:
    """Whether running the whole batch again can help."""
    return isinstance(error, TransientError) or isinstance(as_store_error(error), TransientError)


def _by_sqlstate(error: asyncpg.PostgresError) -> StoreError | None:
    state = error.sqlstate or ""
    if state in _LOST or state.startswith(_LOST_CLASS):
        return Unreachable(str(error))
    if state in _AGAIN or state.startswith(_SHORT_OF_RESOURCES_CLASS):
        return TransientError(f"{state} {error}")
    if state == TAKEN_ELSEWHERE:
        return InboxConflict(str(error))
    if state == DEPOSED:
        return Deposed(str(error))
    return None
