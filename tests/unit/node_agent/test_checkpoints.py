"""Which checkpoint a new attempt is given."""

import json
from pathlib import Path

from services.node_agent.process.checkpoints import newest_manifest


def a_checkpoint(root: Path, step: int, *, fence: int = 1, size: int = 3, claimed: int = 3) -> Path:
    folder = root / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "model").write_bytes(b"x" * size)
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"step": step, "files": {"model": claimed}, "fence": fence}))
    return manifest


def test_the_highest_step_is_resumed_from(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 90)
    newest = a_checkpoint(tmp_path, 100)
    assert newest_manifest(tmp_path, fence=2) == (newest, 100)


def test_what_is_not_whole_does_not_exist(tmp_path: Path) -> None:
    whole = a_checkpoint(tmp_path, 1)
    a_checkpoint(tmp_path, 2, size=2)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "manifest.json").write_text("{")
    (tmp_path / "a-file").touch()
    assert newest_manifest(tmp_path, fence=2) == (whole, 1)


def test_a_newer_attempts_checkpoint_is_not_ours(tmp_path: Path) -> None:
    ours = a_checkpoint(tmp_path, 1, fence=5)
    a_checkpoint(tmp_path, 2, fence=6)
    assert newest_manifest(tmp_path, fence=5) == (ours, 1)


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert newest_manifest(tmp_path / "nothing", fence=1) is None
