"""Volumes as files have them: read whole and right, or refused with a reason; never silently wrong."""

from __future__ import annotations

import gzip
import random
import re
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

from layouts import mutants
from voxscale.data.cases import Case
from voxscale.data.findings import ERROR, WARNING
from voxscale.data.volumes import examine_case, read_case, read_volume, short_name
from voxscale.errors import DataError

AFFINE = np.array([[0, -2.0, 0, 5], [1.5, 0, 0, -7], [0, 0, 3, 2], [0, 0, 0, 1]])
VOXELS = np.random.default_rng(0).integers(-500, 500, (7, 6, 5)).astype(np.int16)

DIM, DATATYPE, VOX_OFFSET, SCL_SLOPE, SROW = 40, 70, 108, 112, 280  # where these stand in a header


def save(path: Path, voxels: NDArray[Any] = VOXELS, affine: NDArray[Any] = AFFINE, kind: Any = nib.Nifti1Image) -> Path:
    nib.save(kind(voxels, affine, dtype=voxels.dtype), path)
    return path


def patched(path: Path, offset: int, layout: str, *values: float) -> Path:
    """The uncompressed file with other values in its header."""
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, offset, *values)
    path.write_bytes(content)
    return path


def outcome(path: Path) -> str:
    """How reading ends: "same", "refused", or what should never be. Any exception but ValueError is a failure."""
    try:
        voxels, affine = read_volume(path)
    except ValueError as error:
        assert str(error), "a refusal gives its reason"
        return "refused"
    same = voxels.dtype == VOXELS.dtype and np.array_equal(voxels, VOXELS) and np.array_equal(affine, AFFINE)
    return "same" if same else "silently wrong"


def swaps_and_header_flips(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Two blocks exchanged, or bits of the gzip header (of ten bytes and a file name) flipped."""
    rng = random.Random(seed)
    for number in range(count):
        damaged = bytearray(content)
        if number % 2:
            length = rng.randrange(1, len(damaged) // 3)
            first = rng.randrange(len(damaged) - 2 * length)
            second = rng.randrange(first + length, len(damaged) - length + 1)
            blocks = slice(first, first + length), slice(second, second + length)
            damaged[blocks[0]], damaged[blocks[1]] = damaged[blocks[1]], damaged[blocks[0]]
        else:
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(20)] ^= 1 << rng.randrange(8)
        yield bytes(damaged)


def test_of_2000_damaged_files_none_is_silently_wrong(tmp_path: Path) -> None:
    content = save(tmp_path / "whole.nii.gz").read_bytes()
    path = tmp_path / "damaged.nii.gz"
    counts = {"same": 0, "refused": 0}
    slowest = 0.0
    for damaged in (*mutants(content, 1200, seed=1), *swaps_and_header_flips(content, 800, seed=2)):
        path.write_bytes(damaged)
        began = time.monotonic()
        counts[outcome(path)] += 1  # a KeyError here: silently wrong
        slowest = max(slowest, time.monotonic() - began)
    assert sum(counts.values()) == 2000
    assert counts["refused"] > 1500
    assert counts["same"] > 0, "the name and time in a gzip header do not matter"
    assert slowest < 5


@pytest.mark.parametrize("shape", [(800, 2621, 1), (130, 130, 130)], ids=["whole blocks", "part of a block"])
@pytest.mark.parametrize("from_end", [1, 8, 5000], ids=["length", "checksum", "voxels"])
def test_a_large_file_is_read_to_its_checksum(tmp_path: Path, shape: tuple[int, ...], from_end: int) -> None:
    """Larger than what is read at once; the first fills its last block to the byte."""
    voxels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "large.nii.gz"
    path.write_bytes(gzip.compress(save(tmp_path / "large.nii", voxels).read_bytes(), compresslevel=0))
    assert np.array_equal(read_volume(path)[0], voxels)
    content = bytearray(path.read_bytes())
    content[-from_end] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="CRC|length"):
        read_volume(path)


def test_rubbish_in_an_uncompressed_header_never_ends_otherwise_than_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """There is no checksum here: other values may be read, but only with a file as long as the header says."""
    content = save(tmp_path / "whole.nii").read_bytes()
    path, rng = tmp_path / "damaged.nii", random.Random(3)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 5)):
            damaged[rng.randrange(352)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            voxels, affine = read_volume(path)
        except ValueError as error:
            refused += 1
            assert str(error)
        else:
            assert voxels.size == VOXELS.size or voxels.nbytes == VOXELS.nbytes
            assert voxels.ndim in (3, 4)
            assert np.isfinite(affine).all()
    assert 100 < refused < 1000
    assert capfd.readouterr() == ("", ""), "nibabel's remarks are not for users"
    assert not [str(warned.message) for warned in recwarn if "nibabel" in warned.filename]


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
@pytest.mark.parametrize(
    "change", [lambda raw: raw[:-1], lambda raw: raw[:400], lambda raw: raw + b"\0", lambda raw: raw + raw],
    ids=["a byte short", "cut", "a byte long", "twice"],
)  # fmt: skip
def test_a_file_is_as_long_as_its_header_says(tmp_path: Path, ending: str, change: Callable[[bytes], bytes]) -> None:
    raw = change(save(tmp_path / "v.nii").read_bytes())
    path = tmp_path / f"changed{ending}"
    path.write_bytes(gzip.compress(raw) if ending.endswith("gz") else raw)
    with pytest.raises(ValueError, match="bytes"):
        read_volume(path)


@pytest.mark.parametrize("name", ["v.nii", "v.nii.gz"])
@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"rubbish" * 500, bytes(10_000), b"<html>404</html>"])
def test_what_is_no_nifti_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError):
        read_volume(tmp_path / name)


def test_a_missing_file_is_refused_without_the_places_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refusal:
        read_volume(tmp_path / "v.nii.gz")
    assert str(refusal.value) == "No such file or directory"


@pytest.mark.parametrize(
    ("voxels", "complaint"),
    [
        (np.zeros((4, 4), np.float32), r"found shape \(4, 4\)"),
        (np.zeros((2, 2, 2, 2, 2), np.float32), "expected three dimensions"),
        (np.zeros((4, 0, 4), np.float32), r"found shape \(4, 0, 4\)"),
        (np.zeros((4, 4, 4), np.complex64), "found voxels of type complex64, expected numbers"),
        (np.zeros((4, 4, 4), [("R", "u1"), ("G", "u1"), ("B", "u1")]), "expected numbers"),
    ],
    ids=["2D", "5D", "no voxels", "complex", "colours"],
)
def test_what_is_no_volume_of_numbers_is_refused(tmp_path: Path, voxels: NDArray[Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_volume(save(tmp_path / "v.nii", voxels))


@pytest.mark.parametrize(
    ("offset", "layout", "values", "complaint"),
    [
        (DIM, "<4h", (3, 16384, 8192, 8192), "more than"),  # 2**40 voxels
        (DIM, "<8h", (7, *[32767] * 7), "expected three dimensions"),
        (DIM, "<4h", (3, 7, -6, 5), "expected three dimensions"),
        (DIM, "<4h", (3, 7, 6, 4), "holds more than"),
        (DIM, "<4h", (3, 7, 6, 6), "found .* bytes, expected"),
        (DATATYPE, "<h", (999,), "data code 999"),
        (VOX_OFFSET, "<f", (0,), "voxels begin at byte 0"),
        (VOX_OFFSET, "<f", (float("nan"),), "voxels begin at byte nan"),
        (VOX_OFFSET, "<f", (1e30,), "voxels begin at byte"),
        (SROW, "<12f", (0,) * 12, "does not place voxels in space"),
        (SROW, "<12f", (1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0), "does not place voxels in space"),
        (SROW, "<12f", (1e6, 1e6, 0, 0, 0, 1e-11, 0, 0, 0, 0, 1, 0), "does not place voxels in space"),
        (SROW, "<f", (float("nan"),), "does not place voxels in space"),
        (SROW + 12, "<f", (float("inf"),), "does not place voxels in space"),
    ],
)
def test_headers_that_cannot_be_true_are_refused_at_once(
    tmp_path: Path, offset: int, layout: str, values: tuple[float, ...], complaint: str
) -> None:
    path = patched(save(tmp_path / "v.nii"), offset, layout, *values)
    began = time.monotonic()
    with pytest.raises(ValueError, match=complaint):
        read_volume(path)
    assert time.monotonic() - began < 2


def test_a_grid_in_metres_is_a_grid(tmp_path: Path) -> None:
    affine = np.diag([1e-5, 1e-5, 1e-5, 1])
    assert np.allclose(read_volume(save(tmp_path / "v.nii", affine=affine))[1], affine, atol=0)


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_both_byte_orders_and_versions_are_read_right(tmp_path: Path, kind: Any, order: str, ending: str) -> None:
    path = tmp_path / f"v{ending}"
    image = kind(VOXELS, AFFINE, header=kind.header_class(endianness=order))
    image.header.set_data_dtype(np.int16)
    nib.save(image, path)
    raw = path.read_bytes() if ending == ".nii" else gzip.decompress(path.read_bytes())
    assert struct.unpack_from(f"{order}i", raw) == (kind.header_class.sizeof_hdr,)
    voxels, affine = read_volume(path)
    assert np.array_equal(voxels, VOXELS)
    assert np.array_equal(affine, AFFINE)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i4", "u4", "i8", "f4", "f8"])
def test_voxels_of_every_type_of_number(tmp_path: Path, dtype: str) -> None:
    voxels = (VOXELS % 100).astype(dtype)
    found, _ = read_volume(save(tmp_path / "v.nii.gz", voxels))
    assert found.dtype == voxels.dtype
    assert np.array_equal(found, voxels)


def test_slope_and_intercept_are_applied(tmp_path: Path) -> None:
    path = patched(save(tmp_path / "v.nii"), SCL_SLOPE, "<2f", 0.5, -1024)
    assert np.array_equal(read_volume(path)[0], VOXELS * 0.5 - 1024)
    for no_slope in (0, float("nan")):
        assert np.array_equal(read_volume(patched(path, SCL_SLOPE, "<2f", no_slope, 7))[0], VOXELS)


def test_extensions_of_the_header_are_passed_over(tmp_path: Path) -> None:
    image = nib.Nifti1Image(VOXELS, AFFINE)
    image.header.extensions.append(nib.nifti1.Nifti1Extension(6, b"a remark" * 50))
    nib.save(image, tmp_path / "v.nii.gz")
    assert outcome(tmp_path / "v.nii.gz") == "same"


_READ_AND_SAY = (
    "import resource, sys; from pathlib import Path; from voxscale.data.volumes import read_volume\n"
    "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    "try: read_volume(Path(sys.argv[1]))\n"
    "except (ValueError, MemoryError) as error: print(error)\n"
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
)


def read_in_a_gigabyte(path: Path) -> str:
    """What is said of a file in a process that may have only 1 GiB, and takes next to nothing of it."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _READ_AND_SAY, path],
        capture_output=True, text=True, timeout=60, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30)),
    )  # fmt: skip
    said, grown_kb = done.stdout.splitlines()
    assert int(grown_kb) < 50_000
    assert time.monotonic() - began < 20
    return said


def test_a_decompression_bomb_is_refused_with_little_memory(tmp_path: Path) -> None:
    """4 GiB of zeros behind a header of 210 voxels."""
    header = save(tmp_path / "v.nii").read_bytes()[:352]
    member = gzip.compress(bytes(2**26))
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(header) + 64 * member)
    assert (tmp_path / "bomb.nii.gz").stat().st_size < 5_000_000
    assert read_in_a_gigabyte(tmp_path / "bomb.nii.gz") == "holds more than the 772 bytes that its header promises"


def test_an_honest_decompression_bomb_is_refused_with_little_memory(tmp_path: Path) -> None:
    """256 MiB of zeros, as promised, become five times as much once they are numbers to compute with."""
    header = nib.Nifti1Image(np.broadcast_to(np.uint8(0), (1024, 512, 512)), AFFINE).header
    header["vox_offset"] = 352
    zeros = gzip.compress(bytes(2**26))
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(header.binaryblock + bytes(4)) + 4 * zeros)
    assert (tmp_path / "bomb.nii.gz").stat().st_size < 300_000
    said = read_in_a_gigabyte(tmp_path / "bomb.nii.gz")
    assert re.fullmatch(r"its \(1024, 512, 512\) voxels take 1,342,177,280 bytes of memory, [0-9,]+ are free", said)


def test_a_header_cannot_promise_more_bytes_than_a_volume_may_have(tmp_path: Path) -> None:
    header = nib.Nifti1Header()
    header.set_data_dtype(np.float64)
    header.set_data_shape((2048, 1024, 1024))
    (tmp_path / "v.nii").write_bytes(header.binaryblock + bytes(4))
    with pytest.raises(ValueError, match="the header promises 17,179,869,184 bytes of voxels, more than 8,589,934,592"):
        read_volume(tmp_path / "v.nii")


def test_an_empty_label_packs_as_well_as_a_bomb_and_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v.nii.gz"
    path.write_bytes(gzip.compress(save(tmp_path / "v.nii", np.zeros((256, 256, 64), np.uint8)).read_bytes()))
    assert 2**22 / path.stat().st_size > 900, "nothing packs better: no ratio tells one from the other"
    assert not read_volume(path)[0].any()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Two channels and a label, all sound."""
    images = tuple(save(tmp_path / f"c_{n}.nii.gz", VOXELS + n) for n in range(2))
    return Case("c", images, save(tmp_path / "c.nii.gz", (VOXELS > 0).astype(np.uint8)), "c")


def test_a_case_comes_back_as_its_files_have_it(case: Case) -> None:
    raw, findings = examine_case(case, channels=2, labels={0: "background", 1: "tumour"})
    assert raw is not None
    assert findings == []
    assert raw.image_cxyz.dtype == np.float32
    assert np.array_equal(raw.image_cxyz, np.stack([VOXELS, VOXELS + 1]))
    assert raw.label_xyz is not None
    assert np.array_equal(raw.label_xyz, VOXELS > 0)
    assert np.array_equal(raw.affine, AFFINE)


def test_a_fourth_dimension_is_channels(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).normal(size=(3, 4, 5, 2)).astype(np.float32)
    raw = read_case(Case("c", (save(tmp_path / "v.nii", voxels),), None, "c"), channels=2)
    assert raw.label_xyz is None
    assert np.array_equal(raw.image_cxyz, np.moveaxis(voxels, 3, 0))


def test_the_hash_is_of_voxels_not_of_files(tmp_path: Path) -> None:
    def hashed(path: Path) -> str:
        return read_case(Case(path.name, (path,), None, "c")).image_sha256

    first = hashed(save(tmp_path / "a.nii.gz"))
    assert hashed(save(tmp_path / "b.nii", VOXELS.astype(np.float64), np.eye(4))) == first
    assert hashed(save(tmp_path / "c.nii.gz", VOXELS.reshape(6, 7, 5))) != first
    changed = VOXELS.copy()
    changed[3, 3, 3] += 1
    assert hashed(save(tmp_path / "d.nii.gz", changed)) != first


def test_everything_that_is_wrong_with_a_case_is_said_at_once(tmp_path: Path, case: Case) -> None:
    """A channel on another grid, another of another shape, a label that is damaged."""
    moved = AFFINE.copy()
    moved[0, 3] += 1
    images = (
        *case.images,
        save(tmp_path / "c_2.nii.gz", affine=moved),
        save(tmp_path / "c_3.nii.gz", VOXELS[1:]),
        save(tmp_path / "c_4.nii.gz", VOXELS[:, 1:]),
    )
    label = tmp_path / "cut.nii.gz"
    label.write_bytes((tmp_path / "c.nii.gz").read_bytes()[:-20])
    bad = Case("c", images, label, "c")
    raw, findings = examine_case(bad)
    assert raw is None
    assert {(finding.code, finding.file) for finding in findings} == {
        ("affine", "c_2.nii.gz"),
        ("shape", "c_3.nii.gz"),
        ("shape", "c_4.nii.gz"),
        ("unreadable", "cut.nii.gz"),
    }
    assert all(finding.level == ERROR and finding.case == "c" and finding.fix for finding in findings)
    with pytest.raises(DataError) as refusal:
        read_case(bad)
    assert len(refusal.value.message.splitlines()) == 4


@pytest.mark.parametrize(
    ("label", "code", "found"),
    [
        (np.where(VOXELS > 0, 1.5, 0), "label-values", "label 1.5"),
        (np.where(VOXELS > 0, np.nan, 0), "label-values", "label nan"),
        (np.where(VOXELS > 0, 256, 0).astype(np.int16), "label-values", "label 256"),
        (np.where(VOXELS > 0, -1, 0).astype(np.int16), "label-values", "label -1"),
        (np.where(VOXELS > 0, 4, 1).astype(np.uint8), "label-values", "labels [4]"),
        (np.zeros((7, 6, 4), np.uint8), "shape", "shape (7, 6, 4)"),
        (np.zeros((7, 6, 5, 2), np.uint8), "shape", "shape (7, 6, 5, 2)"),
    ],
)
def test_labels_that_cannot_be_trained_on(
    tmp_path: Path, case: Case, label: NDArray[Any], code: str, found: str
) -> None:
    bad = Case("c", case.images, save(tmp_path / "odd.nii.gz", label), "c")
    raw, findings = examine_case(bad, labels={0: "background", 1: "tumour"})
    assert raw is None
    first = next(finding for finding in findings if finding.level == ERROR)
    assert (first.code, first.file, first.found) == (code, "odd.nii.gz", found)


def test_whole_numbers_are_labels_whatever_type_holds_them(tmp_path: Path, case: Case) -> None:
    label = np.where(VOXELS > 0, 255.0, 0)[..., None]
    raw = read_case(Case("c", case.images, save(tmp_path / "f.nii.gz", label), "c"))
    assert raw.label_xyz is not None
    assert raw.label_xyz.dtype == np.uint8
    assert np.array_equal(raw.label_xyz, label[..., 0])


@pytest.mark.parametrize(("kind", "bytes_per_voxel"), [(np.uint8, 9), (np.int16, 10), (np.float32, 12)])
def test_a_case_is_checked_without_a_label_in_double_precision(tmp_path: Path, kind: Any, bytes_per_voxel: int) -> None:
    """Held are the files as they are, the image as numbers of 4 bytes, the label as one byte; more only by blocks."""
    voxels = np.random.default_rng(0).integers(-1000, 1000, (160, 160, 161)).astype(np.int16)
    label = (voxels > 900) * np.uint8(3)
    case = Case("c", (save(tmp_path / "v.nii", voxels),), save(tmp_path / "l.nii", label.astype(kind)), "c")
    tracemalloc.start()
    raw = read_case(case)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(raw.label_xyz, label)  # type: ignore[arg-type]
    assert peak < bytes_per_voxel * voxels.size + 2**23


@pytest.mark.parametrize("last", [1, 3000])
@pytest.mark.parametrize("odd", [0.5, 300, -1, np.nan])
def test_a_label_that_is_none_is_found_in_the_last_plane(tmp_path: Path, last: int, odd: float) -> None:
    label = np.zeros((20, 30, last), np.float32)
    label[-1, -1, -1] = odd
    image = save(tmp_path / "v.nii", np.arange(label.size, dtype=np.float32).reshape(label.shape))
    raw, (finding,) = examine_case(Case("c", (image,), save(tmp_path / "l.nii", label), "c"))
    assert (raw, finding.code, finding.found) == (None, "label-values", f"label {odd:g}")


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e300])
def test_voxels_that_are_no_finite_float32_are_counted(tmp_path: Path, odd: float) -> None:
    voxels = VOXELS.astype(np.float64)
    voxels[1, 2, 3] = voxels[4, 4, 4] = odd
    raw, (finding,) = examine_case(Case("c", (save(tmp_path / "v.nii", voxels),), None, "c"))
    assert raw is None
    assert (finding.level, finding.code, finding.found) == (ERROR, "nan", "2 NaN or infinite voxels in channel 0")


def test_what_is_only_worth_a_look_comes_back_with_the_case(tmp_path: Path) -> None:
    empty = np.zeros(VOXELS.shape, np.uint8)
    files = save(tmp_path / "v.nii", empty + 7), save(tmp_path / "l.nii", empty)
    raw, findings = examine_case(Case("c", files[:1], files[1], "c"))
    assert raw is not None
    assert [(finding.level, finding.code) for finding in findings] == [(WARNING, "constant"), (WARNING, "empty-label")]


def test_image_and_label_of_one_name_are_told_apart(tmp_path: Path) -> None:
    image, label = (tmp_path / folder / "a.nii.gz" for folder in ("imagesTr", "labelsTr"))
    assert short_name(Case("a", (image,), label, "a"), label) == "labelsTr/a.nii.gz"
    assert short_name(Case("a", (image,), label.with_name("b.nii.gz"), "a"), image) == "a.nii.gz"


@pytest.mark.parametrize(
    ("where", "named"),
    [("t.csv row 17", "t.csv row 17: cut.nii"), ("cat/cut.nii", "cut.nii"), ("cut.nii record 3", "cut.nii")],
)
def test_the_row_of_a_table_that_names_a_damaged_file_is_said(tmp_path: Path, where: str, named: str) -> None:
    path = save(tmp_path / "cut.nii")
    path.write_bytes(path.read_bytes()[:-20])
    _, findings = examine_case(Case("c", (path,), None, "c", where=where))
    assert [(finding.code, finding.file) for finding in findings] == [("unreadable", named)]
    assert str(findings[0]).startswith(f"case c: {named}: found a damaged file")
