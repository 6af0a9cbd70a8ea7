"""The import rules catch what they are there for: each planted violation makes the linter fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINTER = Path(sys.executable).with_name("lint-imports")

PLANTED = {
    "a service imports another service": ("services/gateway/planted.py", "from services.audit.chain import START\n"),
    "decisions read a socket": ("libs/berth/decisions/planted.py", "import socket\n"),
    "decisions import the bus": ("libs/berth/decisions/planted.py", "from berth.bus.errors import BusError\n"),
    "contracts import decisions": ("libs/berth/contracts/planted.py", "from berth.decisions.core import Core\n"),
    "the bus imports a service": ("libs/berth/bus/planted.py", "import services.audit\n"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the rules look at."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "versions")
    shutil.copytree(ROOT / "libs" / "berth", copy / "libs" / "berth", ignore=ignored)
    shutil.copytree(ROOT / "services", copy / "services", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def _lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINTER), "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tree / "libs"), str(tree)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_tree_as_it_is_keeps_the_rules(tree: Path) -> None:
    found = _lint(tree)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_caught(tree: Path, what: str) -> None:
    path, text = PLANTED[what]
    planted = tree / path
    planted.write_text(text)
    try:
        found = _lint(tree)
    finally:
        planted.unlink()
    assert found.returncode == 1, found.stdout
    assert "planted" in found.stdout
