"""CONTRIBUTING's lines lead to a format that passes the contract suite; what the other lines name is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY

FORMAT = '''"""A folder per case, with its scan and its mask."""

from __future__ import annotations

from pathlib import Path

from voxscale.config.data import Data
from voxscale.data.cases import Case, Manifest
from voxscale.data.findings import Finding
from voxscale.data.formats.sources import absent_files, is_hidden

LAYOUT = "a folder per case: NAME/scan_NAME.nii.gz + NAME/mask_NAME.nii.gz"


def detect(source: Path) -> bool:
    return source.is_dir() and any(any(path.exists() for path in _files(folder)) for folder in _folders(source))


def read_manifest(source: Path, data: Data) -> Manifest:
    cases: list[Case] = []
    findings: list[Finding] = []
    for folder in _folders(source):
        scan, mask = _files(folder)
        absent = absent_files(folder.name, (scan, mask), source, "restore it, or move the folder away")
        findings += absent
        if not absent:
            cases.append(Case(folder.name, (scan,), mask, folder.name))
    return Manifest(cases, findings=tuple(findings))


def _folders(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_dir() and not is_hidden(path))


def _files(folder: Path) -> tuple[Path, Path]:
    return folder / f"scan_{folder.name}.nii.gz", folder / f"mask_{folder.name}.nii.gz"
'''
LAYOUT = """

def _own(folder: Path) -> Path:
    for case in CASES:
        for kind in ("scan", "mask"):
            save_volume(folder / case / f"{kind}_{case}.nii.gz")
    return folder


LAYOUTS["own"] = Layout("own", _own)
"""


def steps(title: str) -> list[str]:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text().partition(f"## To add a {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d\. (.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("title", ["format", "model", "task", "launcher"])
def test_five_lines_name_what_is_there(title: str) -> None:
    """Every file of a line is there, and the names before it stand in it."""
    lines = steps(title)
    assert len(lines) == 5
    for line in lines:
        names: list[str] = []
        for span in re.findall(r"`([^`]+)`", line):
            if "/" not in span:
                names.append(span)
            elif "NAME" not in span:
                path = REPOSITORY / span
                assert path.exists(), span
                for name in names if path.is_file() and path.suffix == ".py" else ():
                    assert re.search(rf"\b{name.rpartition('.')[2]}\b", path.read_text()), (name, span)
                names = []


def enter(path: Path, before: str, text: str) -> None:
    content = path.read_text()
    assert content.count(before) == 1, (path, before)
    path.write_text(content.replace(before, text + before))


def test_a_format_is_added_by_its_lines(tmp_path: Path) -> None:
    """In a copy of the project: files and tables are those that the lines name."""
    for name in ("src", "tests", "pyproject.toml", "recipes", "sites"):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, tmp_path / name)
    write, table, name, layout, _ = steps("format")
    files = [re.findall(r"`((?:src|tests)/[\w/.]+)`", line)[0] for line in (write, table, name, layout)]
    module, formats, config, layouts = (tmp_path / file for file in files)
    for required in re.findall(r"`(\w+)(?:\(.*?\))?`", write.partition(" with ")[2]):
        assert re.search(rf"^(def )?{required}\b", FORMAT, re.MULTILINE), required
    module.with_name("own.py").write_text(FORMAT)
    enter(formats, '    "decathlon": decathlon,\n', '    "own": own,\n')
    enter(formats, "pairs, table, tfrecord\n", "own, ")
    enter(config, '"decathlon", "nnunet", ', '"own", ')
    layouts.write_text(layouts.read_text() + LAYOUT)

    suite = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contracts/test_formats.py", "-k", "own or complete"]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [sys.executable, *suite], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"\.{5,} +\[100%\]", done.stdout), "one for each promise of the suite"
