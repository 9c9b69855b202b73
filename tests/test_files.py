"""Files appear whole or not at all; locks die with their owner."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from syncs import DiskLog
from voxscale.files import (
    hold,
    locked,
    point,
    publish,
    read_csv,
    remove_temporaries,
    write_bytes,
    write_csv,
    write_text,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), publish(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_is_told_of_with_the_file(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full:
        write_bytes(small_disk / "a", bytes(200_000))
    assert full.value.filename == str(small_disk / "a")
    assert not list(small_disk.iterdir())


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with publish(tmp_path / "f") as temporary:
        temporary.mkdir()
        (temporary / "x").write_text("1")
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f" / "x").read_text() == "1"


def test_content_is_on_disk_before_its_name_is_and_that_before_anything_else(tmp_path: Path, disk_log: DiskLog) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    write_text(file, "new")
    with publish(folder) as temporary:
        (temporary / "inner").mkdir(parents=True)
        (temporary / "inner" / "x").write_text("1")
    point(link, folder.name)
    for path in (file, folder, link):
        disk_log.expect_published(path)


def test_folders_that_are_made_on_the_way_are_on_disk_too(tmp_path: Path, disk_log: DiskLog) -> None:
    write_text(tmp_path / "outer" / "inner" / "file", "new")
    synced = {path: content for kind, path, content in disk_log.entries if kind == "sync"}
    assert synced[tmp_path] == ["outer"]
    assert synced[tmp_path / "outer"] == ["inner"]


def test_what_need_not_last_is_not_waited_for(tmp_path: Path, disk_log: DiskLog) -> None:
    write_text(tmp_path / "file", "soon replaced", durable=False)
    assert [kind for kind, *_ in disk_log.entries] == ["rename"]


def test_killed_writer_leaves_only_a_temporary_that_the_owner_removes(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from voxscale.files import publish\n"
        "with publish(Path(sys.argv[1])) as t:\n t.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
    assert len(os.listdir(tmp_path)) == 1
    remove_temporaries(tmp_path)
    assert os.listdir(tmp_path) == []


def test_link_is_replaced_in_one_move(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        point(tmp_path / "last", name)
        assert (tmp_path / "last").resolve().name == name


def test_cells_cannot_act_as_formulas_and_read_back(tmp_path: Path) -> None:
    rows = [{"case": "=HYPERLINK(1)", "x": -1.5}, {"case": '-a,"b"\n', "x": 2.0}, {"case": "plain"}, {"case": "'=x"}]
    write_csv(tmp_path / "t.csv", ("case", "x"), rows)
    text = (tmp_path / "t.csv").read_text()
    assert "\n=" not in text
    assert "\n'=HYPERLINK(1),-1.5\n" in text
    assert [row["case"] for row in read_csv(tmp_path / "t.csv")] == [row["case"] for row in rows]
    assert read_csv(tmp_path / "t.csv")[2]["x"] == ""


def test_numbers_are_no_formulas(tmp_path: Path) -> None:
    """Classes called -1 and +1 stay so for whoever reads the table."""
    names = ["-1", "+1", "-0.5", "-1e-3", "-1+1", "--1", "-1\n", "+", "'-1", "-a"]
    write_csv(tmp_path / "t.csv", ("class",), [{"class": name} for name in names])
    with (tmp_path / "t.csv").open(newline="") as lines:
        written = [row[0] for row in csv.reader(lines)][1:]
    assert written == ["-1", "+1", "-0.5", "-1e-3", "'-1+1", "'--1", "'-1\n", "'+", "'-1", "'-a"]
    assert [row["class"] for row in read_csv(tmp_path / "t.csv")] == names


def test_a_lock_is_exclusive_and_dies_with_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from voxscale.files import locked\n"
        "with locked(Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pass
        owner.kill()
    with locked(path, wait=False):
        pass


def test_a_wait_for_a_lock_is_told_and_ends_with_the_lock(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from voxscale.files import locked\n"
        "with locked(Path(sys.argv[1]), told='waiting'):\n print('held', flush=True); input()"
    )
    pipes: dict[str, Any] = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, **pipes) as owner:
        assert owner.stdout.readline() == "held\n"
        with subprocess.Popen(command, **pipes) as second:
            assert second.stderr.readline() == "waiting\n"
            assert second.poll() is None
            assert owner.communicate("\n", timeout=20) == ("", ""), "who need not wait is told nothing"
            assert second.communicate("\n", timeout=20) == ("held\n", "")


def test_what_is_held_twice_is_held_until_both_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "in-use"
    path.touch()

    def is_held() -> bool:
        code = "import sys; from pathlib import Path; from voxscale.files import is_locked\n"
        code += "print(is_locked(Path(sys.argv[1])))"
        asked = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
        return asked.stdout == "True\n"

    first, second = hold(path), hold(path)
    assert is_held()
    del first
    assert is_held()
    del second
    assert not is_held()
    assert hold(tmp_path / "absent") is None
