"""Which operating-system account runs a server that refuses to run as root, and which folders that account can reach.

PostgreSQL exits when started by root. People do start Berth as root (containers, notebooks), so the server is given to
an account without rights. Folders that are not ours keep their modes: opening `/root` to everybody so that a database
can live below it would be a hole in a machine that was lent to us.
"""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from berth.embedded.errors import NoUnprivilegedAccount

PREFERRED_ACCOUNTS = ("postgres", "nobody", "daemon")  # initdb looks its account up by name, so a bare number is no use


@dataclass(frozen=True, slots=True)
class Account:
    """An account by number, and its name for messages."""

    uid: int
    gid: int
    name: str


def current_account() -> Account:
    """The account this process runs under."""
    uid, gid = os.geteuid(), os.getegid()
    return Account(uid, gid, _name_of(uid))


def account_of(path: Path) -> Account:
    """The account that owns `path`."""
    found = path.stat()
    return Account(found.st_uid, found.st_gid, _name_of(found.st_uid))


def server_account() -> Account:
    """The account a new server runs under: our own, or an unprivileged one when we are root.

    Raises:
        NoUnprivilegedAccount: we are root and the machine knows none of `PREFERRED_ACCOUNTS`.
    """
    if os.geteuid() != 0:
        return current_account()
    for name in PREFERRED_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid, name)
    raise NoUnprivilegedAccount(PREFERRED_ACCOUNTS)


def can_reach(path: Path, account: Account) -> bool:
    """Whether `account` may walk through every folder on the way to `path`, judged by mode bits of what exists.

    Access lists are not looked at; a folder opened only by one counts as closed, which costs a copy and nothing else.
    """
    folders = [path, *path.parents] if path.is_dir() else list(path.parents)
    return all(_may_walk(folder, account) for folder in folders if folder.exists())


def _may_walk(folder: Path, account: Account) -> bool:
    if account.uid == 0:
        return True
    found = folder.stat()
    if found.st_uid == account.uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if found.st_gid == account.gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
