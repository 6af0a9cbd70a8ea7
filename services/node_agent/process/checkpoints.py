"""The files by which agent and program speak about checkpoints (protocol version 1).

The program's side is optional. A checkpoint is a folder with a `manifest.json`, written last; without one, or with a file
missing or short, it does not exist. A request is a file that appears in the control folder before any signal.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

MANIFEST = "manifest.json"
REQUEST = "request.json"
NOT_WORTH_SAVING = frozenset({"cancelled"})
"""Causes of a stop after which nobody resumes."""


def newest_manifest(root: Path, *, fence: int) -> tuple[Path, int] | None:
    """The valid manifest with the highest step below `root`, and that step; None when there is none.

    One written under a newer fence than ours is not ours to use: then we are the attempt that was given up.
    """
    best: tuple[int, Path] | None = None
    try:
        folders = list(os.scandir(root))
    except (FileNotFoundError, NotADirectoryError):
        return None
    for folder in folders:
        manifest = Path(folder.path, MANIFEST)
        step = _step(manifest, fence)
        if step is not None and (best is None or (step, manifest) > best):
            best = (step, manifest)
    return None if best is None else (best[1], best[0])


def _step(manifest: Path, fence: int) -> int | None:
    """The step of a valid manifest; None otherwise."""
    try:
        content = json.loads(manifest.read_text())
        whole = all((manifest.parent / name).stat().st_size == size for name, size in content["files"].items())
        return int(content["step"]) if whole and int(content.get("fence", 0)) <= fence else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def ask_to_save_and_exit(control: Path, *, request_id: str, reason: str, grace_seconds: float, fence: int) -> None:
    """Put the request in place, whole or not at all. A control folder that is gone means that nobody listens."""
    deadline = datetime.now(UTC) + timedelta(seconds=grace_seconds)
    content = {
        "id": request_id,
        "kind": "save_and_exit",
        "reason": reason,
        "deadline": deadline.isoformat(timespec="milliseconds"),
        "fence": fence,
    }
    draft = control / f".{REQUEST}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(content))
        draft.replace(control / REQUEST)
    except OSError:
        pass  # the signal says it too
