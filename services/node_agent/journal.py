"""What the agent must still know after it was killed: commands it has answered, and reports nobody has confirmed.

One file for all nodes of the process, so that one fsync serves them all. A record is a line: CRC32 in hex, a space,
JSON. Records are gathered and written together: `flush()` before anything is done that must be remembered (a killed
process does not lose what is written), `durable()` before others are told (a power loss does not take it either).
A torn last line is dropped at load; a damaged line before it is an error.

The journal keeps entries, not history: the newest record of each (kind, key) counts, a record without value removes it.
Compaction writes the entries to a new file when the old one has grown to several times their size.
"""

import asyncio
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import orjson

Json = Mapping[str, object]

COMPACT_MIN_BYTES: Final = 4 * 1024 * 1024
COMPACT_FACTOR: Final = 4


class DamagedJournalError(Exception):
    """A line that is not the last does not match its checksum; an operator must look."""


class Journal:
    """Append-only file of entries. Belongs to one event loop; fsync runs in a thread.

    Args:
        path: the file; its directory exists.
        compact_min_bytes: below this size the file is never rewritten.
    """

    def __init__(self, path: Path, *, compact_min_bytes: int = COMPACT_MIN_BYTES) -> None:
        self._path = path
        self._compact_min_bytes = compact_min_bytes
        self._kinds: dict[str, dict[str, bytes]] = {}
        """kind -> key -> the newest record of the entry, as it stands in the file."""
        self._live_bytes = 0
        self._size = 0
        self._unwritten: list[bytes] = []
        self._written = 0
        """Records put since opening."""
        self._synced = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._syncing: asyncio.Task[None] | None = None
        self._fd = self._open()

    # -- reading

    def get(self, kind: str, key: str) -> Json | None:
        """The entry, or None."""
        line = self._kinds.get(kind, {}).get(key)
        return None if line is None else _value(line)

    def entries(self, kind: str, prefix: str = "") -> Iterator[tuple[str, Json]]:
        """All entries of one kind whose keys begin so, in the order they were first written."""
        for key, line in tuple(self._kinds.get(kind, {}).items()):
            if key.startswith(prefix):
                yield key, _value(line)

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    # -- writing

    def put(self, kind: str, key: str, value: object) -> None:
        """Set an entry: a mapping or dataclass of JSON values, as it is now."""
        self._append(kind, key, value)

    def remove(self, kind: str, key: str) -> None:
        """Drop an entry; nothing happens if there is none."""
        if key in self._kinds.get(kind, {}):
            self._append(kind, key, None)

    def flush(self) -> None:
        """Write what was put; a killed process does not lose it."""
        if self._unwritten:
            data = b"".join(self._unwritten)
            self._unwritten.clear()
            written = os.write(self._fd, data)
            while written < len(data):  # a nearly full disk
                written += os.write(self._fd, data[written:])
            self._size += len(data)

    async def durable(self) -> None:
        """Return when all that was put so far survives a power loss. Callers at the same time share one fsync."""
        if self._synced >= self._written:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._written, future))
        if self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync_until_done())
        await future

    async def close(self) -> None:
        """Sync and close."""
        await self.durable()
        os.close(self._fd)
        self._fd = -1

    def _append(self, kind: str, key: str, value: object | None) -> None:
        line = _line(kind, key, value)
        self._unwritten.append(line)
        self._written += 1
        self._apply(kind, key, line, is_removed=value is None)

    def _apply(self, kind: str, key: str, line: bytes, *, is_removed: bool) -> None:
        lines = self._kinds.setdefault(kind, {})
        self._live_bytes -= len(lines.get(key, b""))
        if is_removed:
            lines.pop(key, None)
        else:
            lines[key] = line
            self._live_bytes += len(line)

    async def _sync_until_done(self) -> None:
        try:
            while self._waiting:
                reached = self._written
                self.flush()
                if self._size > max(self._compact_min_bytes, COMPACT_FACTOR * self._live_bytes):
                    self._compact()
                else:
                    await asyncio.to_thread(os.fdatasync, self._fd)
                self._synced = reached
                while self._waiting and self._waiting[0][0] <= reached:
                    future = self._waiting.popleft()[1]
                    if not future.done():
                        future.set_result(None)
        except BaseException as error:
            for _, future in self._waiting:
                if not future.done():
                    future.set_exception(error if isinstance(error, OSError) else OSError(str(error)))
            self._waiting.clear()
            raise
        finally:
            self._syncing = None

    # -- the file

    def _open(self) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        good = self._load(self._path.read_bytes())
        os.ftruncate(fd, good)
        self._size = good
        return fd

    def _load(self, data: bytes) -> int:
        """Apply all records; returns the length of the part that is whole."""
        position = 0
        while position < len(data):
            end = data.find(b"\n", position)
            line = data[position : end + 1]
            record = _parsed(line) if end >= 0 else None
            if record is None:
                if end < 0 or end == len(data) - 1:
                    return position  # torn by a power loss: nobody was told of it
                raise DamagedJournalError(f"{self._path} byte {position}")
            kind, key, value = record
            self._apply(kind, key, line, is_removed=value is None)
            position = end + 1
        return position

    def _compact(self) -> None:
        """Write what counts to a new file and put it in place; blocks, for milliseconds, about once for each 4 MiB."""
        draft = self._path.with_suffix(".new")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o640)
        data = b"".join(line for lines in self._kinds.values() for line in lines.values())
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        os.close(self._fd)
        self._fd = fd
        self._size = self._live_bytes = len(data)


def _line(kind: str, key: str, value: object | None) -> bytes:
    body = orjson.dumps([kind, key, value])
    return b"%08x %b\n" % (zlib.crc32(body), body)


def _parsed(line: bytes) -> tuple[str, str, Json | None] | None:
    checksum, _, body = line[:-1].partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(body):
            return None
        kind, key, value = orjson.loads(body)
    except ValueError:
        return None
    return kind, key, value


def _value(line: bytes) -> Json:
    value: Json = orjson.loads(line[9:])[2]
    return value
