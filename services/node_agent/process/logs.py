"""Reading a worker's output across the pieces its supervisor keeps."""

import os
from pathlib import Path

from services.node_agent.process.runtime import LogChunk

TAIL_BYTES = 64 * 1024


def pieces(directory: Path) -> list[tuple[int, Path]]:
    """(bytes written before it, file), oldest first."""
    found = []
    for entry in os.scandir(directory):
        prefix, _, start = entry.name.partition(".")
        if prefix == "log" and start.isdigit():
            found.append((int(start), Path(entry.path)))
    return sorted(found)


def read_log(directory: Path, *, offset: int, max_bytes: int) -> LogChunk:
    """Up to `max_bytes` from `offset` on; a negative offset counts from the end.

    A reader that was too slow for the size limit is moved to the oldest byte still there. Raises FileNotFoundError when
    there is no such worker.
    """
    has_ended = (directory / "exit").exists()  # looked at first: what is written after it cannot be missed then
    found = pieces(directory)
    if not found:
        return LogChunk(b"", max(offset, 0), max(offset, 0), has_ended)
    last_start, last = found[-1]
    end = last_start + last.stat().st_size
    position = min(max(end + offset if offset < 0 else offset, found[0][0]), end)
    begin, wanted, data = position, max_bytes, bytearray()
    for index, (start, path) in enumerate(found):
        stop = found[index + 1][0] if index + 1 < len(found) else end
        if position >= stop or wanted <= 0:
            continue
        try:
            with path.open("rb") as piece:
                piece.seek(position - start)
                part = piece.read(min(wanted, stop - position))
        except FileNotFoundError:  # dropped since the listing
            if data:
                break
            position = begin = stop
            continue
        data += part
        position += len(part)
        wanted -= len(part)
    return LogChunk(bytes(data), begin, position, has_ended and position >= end)
