"""TFRecord shards: read as TensorFlow's own formats define them, damage of any kind named."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT, DT_HALF, DT_INT32, DT_STRING, DT_UINT8
from tensorboard.summary.writer.record_writer import RecordWriter

from layouts import example_bytes, field, frame, mutants, small_example, tensor_bytes, write_shard
from voxscale.config.data import Data
from voxscale.data.formats import load_manifest
from voxscale.data.tfrecord import read_record, scan_records
from voxscale.errors import DataError

TYPES = {"<f4": DT_FLOAT, "<f8": DT_DOUBLE, "<f2": DT_HALF, "<i4": DT_INT32, "|u1": DT_UINT8}
VALUES = {"<f4": "float_val", "<f8": "double_val", "<f2": "half_val", "<i4": "int_val", "|u1": "int_val"}


def _oracle_tensor(voxels: NDArray[np.generic], *, as_content: bool) -> bytes:
    """The tensor as protobuf's own classes serialise it."""
    proto = TensorProto(dtype=TYPES[voxels.dtype.str])
    for n in voxels.shape:
        proto.tensor_shape.dim.add(size=n)
    if as_content:
        proto.tensor_content = voxels.tobytes()
    else:
        flat = voxels.ravel().view(np.uint16) if voxels.dtype.str == "<f2" else voxels.ravel()
        getattr(proto, VALUES[voxels.dtype.str]).extend(flat.tolist())
    return proto.SerializeToString()


def _oracle_shard(path: Path, contents: list[bytes]) -> None:
    """The framing as tensorboard's own writer does it."""
    with path.open("wb") as stream:
        writer = RecordWriter(stream)
        for content in contents:
            writer.write(content)
        writer.flush()


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(sorted(TYPES)),
    as_content=st.booleans(),
    shape=st.tuples(*[st.integers(1, 5)] * 3),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_records_of_the_original_writers_are_read(
    dtype: str,
    as_content: bool,
    shape: tuple[int, int, int],
    channels: int,
    seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rng = np.random.default_rng(seed)
    image = (rng.normal(size=(channels, *shape)) * 100).clip(0 if dtype == "|u1" else -1e4, 255).astype(dtype)
    label = rng.integers(0, 200, shape).astype(dtype)
    path = tmp_path_factory.getbasetemp() / "oracle.tfrecord"
    content = example_bytes(
        img=_oracle_tensor(image, as_content=as_content), label=_oracle_tensor(label, as_content=as_content)
    )
    _oracle_shard(path, [b"before", content])
    assert path.read_bytes() == frame(b"before") + frame(content), "our test writer frames as the original does"
    (_, first), (offset, length) = scan_records(path)
    assert (first, length) == (len(b"before"), len(content))
    image_cxyz, label_xyz = read_record(path, offset)
    assert image_cxyz.dtype == np.float32
    np.testing.assert_array_equal(image_cxyz, image.astype(np.float32))
    np.testing.assert_array_equal(label_xyz, label)


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ((4, 6, 5, 3), (6, 5, 3)),
        ((4, 6, 5, 3), (1, 6, 5, 3)),
        ((4, 6, 5, 3), (6, 5, 3, 1)),
        ((6, 5, 3, 4), (6, 5, 3)),
        ((6, 5, 3, 4), (1, 6, 5, 3)),
        ((6, 5, 3, 4), (6, 5, 3, 1)),
        ((6, 5, 3), (6, 5, 3)),
        ((1, 6, 5, 1), (1, 6, 5, 1)),
    ],
)
def test_channels_come_first_wherever_they_were(image: tuple[int, ...], label: tuple[int, ...], tmp_path: Path) -> None:
    voxels = np.arange(np.prod(image), dtype=np.float32).reshape(image)
    truth = np.arange(np.prod(label), dtype=np.uint8).reshape(label)
    write_shard(tmp_path / "s", [example_bytes(label=tensor_bytes(truth), img=tensor_bytes(voxels))])
    image_cxyz, label_xyz = read_record(tmp_path / "s", 0)
    assert image_cxyz.shape[1:] == label_xyz.shape
    assert label_xyz.shape in ((6, 5, 3), (6, 5, 1))
    last = len(image) == 4 and image[:3] == label_xyz.shape
    np.testing.assert_array_equal(image_cxyz, np.moveaxis(voxels, 3, 0) if last else voxels.reshape(image_cxyz.shape))
    np.testing.assert_array_equal(label_xyz.ravel(), truth.ravel())


F4 = np.zeros((2, 3, 2, 2), np.float32)
GOOD = tensor_bytes(F4)
SHAPE = b"".join(field(2, field(1, n)) for n in F4.shape)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "found features none, expected 'img' and 'label'"),
        (example_bytes(image=GOOD, label=GOOD), "found features 'image', 'label'"),
        (example_bytes(img=GOOD, label=GOOD), r"img of shape \(2, 3, 2, 2\) and label of shape \(2, 3, 2, 2\)"),
        (example_bytes(img=GOOD, label=b""), "label: found voxels of TensorFlow's type 0"),
        (example_bytes(img=field(1, DT_STRING) + field(2, SHAPE), label=GOOD), "img: found voxels of .* type 7"),
        (example_bytes(img=field(1, 1) + field(2, SHAPE) + field(4, b"123"), label=GOOD), "do not fill its shape"),
        (example_bytes(img=field(1, 1) + field(2, SHAPE) + field(5, b"1234"), label=GOOD), "do not fill its shape"),
        (example_bytes(img=field(1, 1) + field(2, field(2, field(1, 2**40)) * 3), label=GOOD), "found shape"),
        (example_bytes(img=field(1, 1) + field(2, field(2, field(1, 65535)) * 4), label=GOOD), "do not fill its shape"),
        (example_bytes(img=field(1, 1) + field(2, field(2, field(1, 2)) * 5), label=GOOD), "found shape"),
        (example_bytes(img=field(1, 1) + field(2, 5), label=GOOD), "found a number, expected bytes"),
        (field(1, 7), "found a number, expected bytes"),
        (b"\x0a\xff\xff\xff\xff\x7f", "a field reaches .* bytes beyond its message"),
        (b"\xff" * 30, "a number is cut off or longer"),
        (b"\x0b", "its content is no protobuf message"),
        (field(9, 1) * (2**20 + 1), "a message has more than 1048576 fields"),
        (
            field(1, field(1, field(1, b"img") + field(2, field(1, field(1, GOOD) * 2))))
            + field(1, field(1, field(1, b"label"))),
            "img: found 2 byte strings",
        ),
    ],
)
def test_sound_frames_with_odd_content_are_named(content: bytes, match: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "train_0.tfrecord", [content])
    with pytest.raises(DataError, match=f"train_0.tfrecord: record at byte 0: .*{match}") as caught:
        read_record(tmp_path / "train_0.tfrecord", 0)
    assert caught.value.fix


def test_unpacked_numbers_are_read_too(tmp_path: Path) -> None:
    values = b"".join(struct.pack("<Bf", 5 << 3 | 5, n) for n in range(8))
    shape = field(2, b"".join(field(2, field(1, 2)) for _ in range(3)))
    content = example_bytes(img=field(1, 1) + shape + values, label=field(1, 4) + shape + field(7, 1) * 8)
    write_shard(tmp_path / "s", [content])
    image_cxyz, label_xyz = read_record(tmp_path / "s", 0)
    assert image_cxyz.ravel().tolist() == list(range(8))
    assert label_xyz.ravel().tolist() == [1] * 8


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path, sound = tmp_path / "train_0.tfrecord", frame(small_example())
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"train_0.tfrecord: record (at byte )?0: "):
            read_record(path, *[offset for offset, _ in scan_records(path)])


def test_every_cut_is_found_by_the_headers_alone(tmp_path: Path) -> None:
    path, record = tmp_path / "train_0.tfrecord", frame(small_example())
    for length in (*range(1, 13), len(record) - 1, len(record) + 1, 2 * len(record) - 1):
        path.write_bytes((record * 2)[:length])
        number = length // len(record)
        with pytest.raises(DataError, match=f"train_0.tfrecord: record {number}: cut off"):
            scan_records(path)


def test_mutated_content_under_right_checksums_is_read_or_named(tmp_path: Path) -> None:
    """What the checksums cannot find: the reader itself must hold."""
    path, content, read = tmp_path / "s", small_example(), 0
    for damaged in mutants(content[:120], 1500):
        path.write_bytes(frame(damaged + content[120:]))
        try:
            image_cxyz, label_xyz = read_record(path, 0)
            assert image_cxyz.shape[1:] == label_xyz.shape
            read += 1
        except DataError as error:
            assert error.message.startswith("s: record at byte 0: ")
    assert 0 < read < 1400


def test_rubbish_under_right_checksums_is_named(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(500):
        (tmp_path / "s").write_bytes(frame(rng.randbytes(rng.randrange(200))))
        with pytest.raises(DataError, match="s: record at byte 0: "):
            read_record(tmp_path / "s", 0)


@pytest.mark.parametrize("length", [2**63, 2**40, 2**33])
def test_a_huge_length_allocates_nothing(length: int, tmp_path: Path) -> None:
    header = frame(b"")[:0] + struct.pack("<Q", length)
    path = tmp_path / "s"
    path.write_bytes(header + frame(header)[12 + len(header) :])  # the checksum of the length is right
    start = time.perf_counter()
    with pytest.raises(DataError, match="s: record 0: (its length is|cut off: 0 bytes are left)"):
        scan_records(path)
    assert time.perf_counter() - start < 1


def test_roles_records_and_lost_shards(tmp_path: Path) -> None:
    for name, count in {"train_0": 2, "train_2": 1, "valid_0": 1, "test_0": 0, "other": 1}.items():
        write_shard(tmp_path / f"{name}.tfrecord", [small_example(n) for n in range(count)])
    manifest = load_manifest(Data(source=str(tmp_path)), tmp_path)
    assert [(case.id, case.role) for case in manifest.cases] == [
        ("train_0-00000", "train"),
        ("train_0-00001", "train"),
        ("train_2-00000", "train"),
        ("valid_0-00000", "val"),
    ]
    second = manifest.cases[1]
    assert second.record is not None
    assert second.files == (tmp_path / "train_0.tfrecord",)
    expected = np.random.default_rng(1).normal(size=(2, 4, 3, 5)).astype(np.float32)
    np.testing.assert_array_equal(read_record(second.images[0], second.record)[0], expected)
    assert {(finding.level, finding.code, finding.file) for finding in manifest.findings} == {
        ("error", "stray-file", "other.tfrecord"),
        ("warning", "empty-shard", "test_0.tfrecord"),
        ("warning", "missing-shard", "train_1.tfrecord"),
    }


def test_offsets_that_are_no_record_are_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "s", [small_example()])
    for offset in (-1, 1, 10**9):
        with pytest.raises(DataError, match=f"record at byte {offset}: "):
            read_record(tmp_path / "s", offset)
    for read in (lambda: scan_records(tmp_path / "gone"), lambda: read_record(tmp_path, 0)):
        with pytest.raises(DataError, match="cannot be read: "):
            read()
