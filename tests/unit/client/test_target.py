"""Address and token are found without setting anything, and what is missing is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from berth.client.errors import NotConfigured
from berth.client.settings import find_target


def platform(home: Path, *, url: str = "http://127.0.0.1:1234", token: str = "t") -> None:
    (home / "run").mkdir(parents=True)
    (home / "run" / "platform.json").write_text(json.dumps({"url": url}))
    (home / "run" / "token").write_text(token + "\n")


def test_a_platform_above_this_folder_is_found(tmp_path: Path) -> None:
    platform(tmp_path / ".berth")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    target = find_target(environment={}, folder=below)
    assert (target.url, target.token) == ("http://127.0.0.1:1234", "t")
    assert "t" not in repr(target).replace("target", "").replace("Target", "").replace("http", "")


def test_variables_come_before_files_and_arguments_before_variables(tmp_path: Path) -> None:
    platform(tmp_path / ".berth")
    file = tmp_path / "token"
    file.write_text("from-file\n")
    variables = {"BERTH_URL": "http://other/", "BERTH_TOKEN_FILE": str(file)}
    assert find_target(environment=variables, folder=tmp_path).url == "http://other"
    assert find_target(environment=variables, folder=tmp_path).token == "from-file"
    assert find_target(environment={**variables, "BERTH_TOKEN": "x"}, folder=tmp_path).token == "x"
    assert find_target(url="http://mine", token="y", environment=variables, folder=tmp_path).token == "y"
    elsewhere = tmp_path / "elsewhere"
    platform(elsewhere, url="http://home")
    assert find_target(environment={"BERTH_HOME": str(elsewhere)}, folder=tmp_path).url == "http://home"


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({}, "berth up"),
        ({"BERTH_URL": "http://x"}, "BERTH_TOKEN"),
        ({"BERTH_URL": "http://x", "BERTH_TOKEN_FILE": "/nowhere"}, "/nowhere"),
        ({"BERTH_HOME": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, variables: dict[str, str], word: str) -> None:
    with pytest.raises(NotConfigured, match=word):
        find_target(environment=variables, folder=tmp_path)
