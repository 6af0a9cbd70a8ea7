"""What a database error means to a batch."""

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError

from berth.store.database import StoreSettings, store_errors
from berth.store.errors import Deposed, InboxConflict, TransientError, Unreachable
from berth.store.retry import as_store_error, is_retryable


def sql_error(state: str, message: str = "said the server") -> asyncpg.PostgresError:
    """The error that the driver makes of a server's answer."""
    error = asyncpg.PostgresError.new({"S": "ERROR", "C": state, "M": message})
    assert isinstance(error, asyncpg.PostgresError)
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "refused"),
        ConnectionResetError(),
        TimeoutError(),
        asyncpg.InterfaceError("connection is closed"),
        asyncpg.InternalClientError("cannot switch to state 12"),
        asyncpg.CannotConnectNowError("starting up"),
        asyncpg.AdminShutdownError("bye"),
        asyncpg.CrashShutdownError("bye"),
        asyncpg.IdleInTransactionSessionTimeoutError("bye"),
        asyncpg.ConnectionDoesNotExistError("gone"),
    ],
)
def test_a_server_that_is_away_or_goes_is_unreachable(error: Exception) -> None:
    assert isinstance(as_store_error(error), Unreachable)


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "57014", "53100", "53300"])
def test_what_passes_by_itself_is_retried(state: str) -> None:
    assert is_retryable(sql_error(state))
    assert not isinstance(as_store_error(sql_error(state)), Unreachable)


def test_refusals_of_the_commit_function_have_their_own_types() -> None:
    assert isinstance(as_store_error(sql_error("BE001")), Deposed)
    assert isinstance(as_store_error(sql_error("BE002")), InboxConflict)
    assert not is_retryable(sql_error("BE001"))


@pytest.mark.parametrize(
    "error",
    [
        sql_error("23505"),
        sql_error("42P01"),
        sql_error("22021"),
        asyncpg.exceptions._base.DataError("invalid input for query argument $1"),
        ValueError("ours"),
    ],
)
def test_defects_are_not_retried(error: Exception) -> None:
    assert as_store_error(error) is None


def test_sqlalchemy_wrappers_are_looked_through() -> None:
    driver = Exception("wrapped by the dialect")
    driver.__cause__ = sql_error("40001")
    assert is_retryable(DBAPIError("SELECT 1", None, driver))
    assert is_retryable(DBAPIError("SELECT 1", None, Exception("socket closed"), connection_invalidated=True))
    assert not is_retryable(DBAPIError("SELECT 1", None, Exception("syntax")))


def test_errors_are_turned_at_the_border_and_keep_their_cause() -> None:
    with pytest.raises(TransientError) as caught, store_errors():
        raise ConnectionResetError(104, "reset")
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    with pytest.raises(KeyError), store_errors():
        raise KeyError("ours")


@pytest.mark.parametrize("schema", ["", "Placement", "a;b", 'a"b', "1a", "a" * 60])
def test_a_schema_is_a_plain_name(schema: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        StoreSettings("postgresql://", schema)
