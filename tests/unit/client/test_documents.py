"""What people write is read strictly, and remembers where it stood."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from berth.client.documents import DocumentError, path_text, read_jobs, read_json, read_yaml


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "[1, -2, 0o17, 0x1F, 1.5, 1e3, true, null, ~, no, on, 1:30, 2026-03-02, '7', 012]"
    [document] = read_yaml(text)
    expected = [1, -2, 15, 31, 1.5, 1000.0, True, None, None, "no", "on", "1:30", "2026-03-02", "7", 12]
    assert document.value == expected


@pytest.mark.parametrize("text", ["a: {b: [1, .nan]}", "a: {b: [1, -.inf]}", "a: {b: [1, 1e999]}"])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(DocumentError) as caught:
        read_yaml(text)
    assert (caught.value.code, caught.value.field) == ("not_finite", "a.b[1]")


def test_block_texts_and_quotes_are_kept() -> None:
    [document] = read_yaml('a: |\n  one\n  two\nb: >\n  x\n  y\nc: "t\\tab"\n? d\n: e')
    assert document.value == {"a": "one\ntwo\n", "b": "x y\n", "c": "t\tab", "d": "e"}


def test_places_of_values_are_known() -> None:
    [document] = read_yaml("a: 1\nb:\n- x\n- {c: 2}\n")
    assert document.mark_of(("b", 1, "c")) == (4, 4)
    assert document.mark_of(("b", 1, "unknown")) == (4, 3)
    assert path_text(("b", 1, "c")) == "b[1].c"


def test_a_mebibyte_is_read_in_reasonable_time() -> None:
    text = "jobs:\n" + "- {name: j, class: general, gpus: 1, command: [x]}\n" * 20_000
    started = time.process_time()
    assert len(read_yaml(text[: 1 << 20].rsplit("\n", 1)[0])[0].value["jobs"]) > 15_000
    assert time.process_time() - started < 5


def test_a_byte_order_mark_is_no_fault() -> None:
    assert read_json("\ufeff{}".encode()).value == {}
    assert read_yaml("\ufeffa: 1".encode())[0].value == {"a": 1}


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing\n", "null"])
def test_empty_documents_are_left_out(text: str) -> None:
    assert read_yaml(text) == []


def test_jobs_of_a_file_find_their_folder(tmp_path: Path) -> None:
    path = tmp_path / "jobs.yaml"
    path.write_text("name: a\nworkdir: ../b\n---\njobs:\n- {name: c, workdir: /abs}\n- {name: d}\n")
    jobs = read_jobs(path)
    assert [job["name"] for job in jobs] == ["a", "c", "d"]
    assert jobs[0]["workdir"] == str(tmp_path.parent / "b")
    assert jobs[1]["workdir"] == "/abs"


def test_json_files_are_read_as_json(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"name": "a", "name": "b"}')
    with pytest.raises(DocumentError) as caught:
        read_jobs(path)
    assert caught.value.code == "duplicate_key"
    with pytest.raises(DocumentError):
        read_jobs(None, text="[1]")
    with pytest.raises(DocumentError):
        read_jobs(None, text="")
