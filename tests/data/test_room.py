"""Cases are read as many at a time as memory has room for, and one that is too large is named, not called damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from layouts import save_volume
from voxscale.config.data import Data
from voxscale.data.cases import Case
from voxscale.data.room import bytes_of_case, threads_with_room

ANY = Data(source=".")


def header_only(path: Path, shape: tuple[int, ...], spacing: float = 1.0) -> Path:
    """A volume without its voxels: nothing else than the header is to be read."""
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape(shape)
    header.set_zooms((spacing,) * 3 + (1.0,) * (len(shape) - 3))
    path.write_bytes(header.binaryblock + bytes(4))
    return path


def case_of(path: Path, record: int | None = None) -> Case:
    return Case(path.name, (path,), None, path.name, record=record)


def test_the_largest_header_counts(tmp_path: Path) -> None:
    small, large = (header_only(tmp_path / f"{n}.nii", (n, n, n, 4)) for n in (10, 100))
    large.write_bytes(large.read_bytes() + b"more")
    cases = [case_of(small)] * 20 + [case_of(large)]
    assert bytes_of_case(cases, ANY) == 100**3 * (4 * 20 + 32)
    room = 5 * bytes_of_case(cases, ANY)
    assert threads_with_room(cases, ANY, 64, available=room) == 5
    assert threads_with_room(cases, ANY, 3, available=room) == 3
    assert threads_with_room(cases, ANY, 64, available=0) == 1
    finer = ANY.model_copy(update={"spacing": (0.5, 0.5, 0.5)})
    assert bytes_of_case(cases, finer) == 100**3 * (8 * 4 * 20 + 32), "prepared, it is eight times as large"
    assert bytes_of_case(cases, ANY.model_copy(update={"size": (200, 100, 100)})) == 100**3 * (2 * 4 * 20 + 32)


def test_what_has_no_volumes_or_is_damaged_is_left_to_those_who_read_it(tmp_path: Path) -> None:
    Image.new("RGB", (50, 40)).save(tmp_path / "a.png")
    (tmp_path / "b.nii").write_text("no volume")
    (tmp_path / "c.tfrecord").write_bytes(bytes(3000))
    assert bytes_of_case([case_of(tmp_path / "a.png")], ANY) == 2000 * (3 * 20 + 32)
    assert bytes_of_case([case_of(tmp_path / "c.tfrecord", n) for n in range(3)], ANY) == 8000
    for lost in ([case_of(tmp_path / "b.nii")], [case_of(tmp_path / "gone.nii")], []):
        assert threads_with_room(lost, ANY, 7, available=0) == 7


@given(some.integers(1, 300), some.integers(0, 2**40), some.integers(0, 2**40))
def test_more_memory_never_means_fewer_at_a_time(threads: int, less: int, more: int) -> None:
    less, more = sorted((less, more))
    assert 1 <= _threads(threads, less) <= _threads(threads, more) <= threads


def _threads(threads: int, available: int) -> int:
    return threads_with_room([case_of(Path(__file__), 0)], ANY, threads, available=available)


LITTLE = """
import json, re, resource, sys
from pathlib import Path
from voxscale.config.load import make_config
from voxscale.data.build import prepare
from voxscale.data.doctor import examine_dataset
from voxscale.data.formats import find_cases
from voxscale.errors import InfrastructureError
root = Path(sys.argv[1])
config = make_config({"data": {"source": "data"}, "patches": {"size": [32, 32, 32]}}, name="c", base=root)
held = int(re.findall(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 128 * 2**20,) * 2)
findings = [finding.as_json() for finding in examine_dataset(config, root).findings]
try:
    prepare(find_cases(config.data, root), config.data, root / "store", patch=(32, 32, 32), threads=2)
except InfrastructureError as error:
    print(json.dumps([findings, error.as_text()]))
"""


def test_a_sound_case_that_is_too_large_is_named_and_not_called_damaged(tmp_path: Path) -> None:
    for name, edge in (("small", 32), ("large", 300)):
        voxels = np.zeros((edge, edge, edge), np.int16)
        voxels[2:5, 2:5, 2:5] = 1 + np.arange(3)
        save_volume(tmp_path / "data" / "images" / f"{name}.nii.gz", voxels)
        save_volume(tmp_path / "data" / "labels" / f"{name}.nii.gz", (voxels > 0).astype(np.uint8))
    environ = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
    }  # each of its threads would take a part of the little there is
    done = subprocess.run([sys.executable, "-c", LITTLE, tmp_path], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    findings, refused = json.loads(done.stdout)
    (finding,) = (each for each in findings if each["level"] == "error")
    assert (finding["code"], finding["case"]) == ("memory", "large")
    assert finding["found"].startswith("too little memory to check it: ")
    assert refused.startswith("error: case large: found too little memory to prepare it: ")
    assert "fix: use a machine, or a job, with more memory" in refused


FINE = """
import json, re, resource, sys
from pathlib import Path
from voxscale.config.load import make_config
from voxscale.data.build import prepare
from voxscale.data.doctor import examine_dataset
from voxscale.data.formats import find_cases
from voxscale.data.show import choose_case, read_prepared
from voxscale.errors import InfrastructureError
root = Path(sys.argv[1])
config = make_config({"data": {"source": "data", "spacing": [1, 1, 1]}}, name="c", base=root)
held = int(re.findall(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 512 * 2**20,) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = [finding.as_json() for finding in examine_dataset(config, root).findings if finding.level == "error"]
manifest = find_cases(config.data, root)
for do in (
    lambda: prepare(manifest, config.data, root / "store", patch=(32, 32, 32), threads=2),
    lambda: read_prepared(choose_case(manifest, "wrong", Path("c.png")), manifest, config),
):
    try:
        do()
    except InfrastructureError as error:
        said.append(error.as_text())
print(json.dumps([said, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""


def test_a_grid_without_room_is_refused_before_any_of_it_is_made(tmp_path: Path) -> None:
    """A header that says 30 mm for 1: the system would end whoever only tried, and name no case."""
    voxels = np.random.default_rng(0).integers(1, 100, (24, 24, 24)).astype(np.int16)
    for name, spacing in (("right", 1), ("wrong", 30)):
        for folder, content in (("images", voxels), ("labels", (voxels > 50).astype(np.uint8))):
            path = tmp_path / "data" / folder / f"{name}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(content, np.diag([spacing, spacing, spacing, 1])), path)
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FINE, tmp_path], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    (found, *refused), grown_kb = json.loads(done.stdout)
    assert (found["code"], found["case"]) == ("memory", "wrong")
    assert len(refused) == 2
    for text in refused:
        assert text.startswith("error: case wrong: found too little memory to prepare it: ")
        assert "a coarser data.spacing needs less" in text
    assert grown_kb < 100_000, "the first two of three axes alone take 200 MB"
