"""Small datasets of every format, written the way their own tools write them, and ways to damage them."""

from __future__ import annotations

import csv
import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from PIL import Image

CASES = ("b2", "a1", "c3")


def save_volume(path: Path, voxels: NDArray[Any] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.zeros((2, 2, 2), np.uint8) if voxels is None else voxels, np.eye(4)), path)


def varint(number: int) -> bytes:
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


def field(number: int, content: bytes | int) -> bytes:
    """One field of a protobuf message."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor_bytes(voxels: NDArray[Any]) -> bytes:
    """A TensorProto with tensor_content, as tf.io.serialize_tensor makes it."""
    number = {"f4": 1, "f8": 2, "i4": 3, "u1": 4, "f2": 19}[voxels.dtype.str[1:]]
    shape = b"".join(field(2, field(1, n)) for n in voxels.shape)
    return field(1, number) + field(2, shape) + field(4, voxels.tobytes())


def example_bytes(**features: bytes) -> bytes:
    """A tf.train.Example with one byte string per feature."""
    entries = [
        field(1, field(1, name.encode()) + field(2, field(1, field(1, held)))) for name, held in features.items()
    ]
    return field(1, b"".join(entries))


def frame(content: bytes) -> bytes:
    """A record: its length and content, each with its masked checksum."""
    length = struct.pack("<Q", len(content))
    return length + _masked(length) + content + _masked(content)


def write_shard(path: Path, contents: Sequence[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(frame, contents)))


def _masked(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def small_example(seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    image = rng.normal(size=(2, 4, 3, 5)).astype(np.float32)
    return example_bytes(img=tensor_bytes(image), label=tensor_bytes((image[:1] > 0).astype(np.float32)))


def _pairs(image: str, label: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for case in CASES:
            save_volume(folder / image.format(case))
            save_volume(folder / label.format(case))
        return folder

    return make


def _decathlon(prefix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        task = folder / prefix
        pairs = [(f"./imagesTr/{case}.nii.gz", f"./labelsTr/{case}.nii.gz") for case in CASES]
        for path in (path for pair in pairs for path in pair):
            save_volume(task / path)
        hidden = [("./imagesTr/._a1.nii.gz", "./labelsTr/._a1.nii.gz")]
        training = [{"image": image, "label": label} for image, label in [*pairs, *hidden]]
        content = {
            "labels": {"0": "background", "1": "spleen"},
            "modality": {"0": "CT"},
            "numTraining": 3,
            "training": training,
            "test": ["./imagesTs/d4.nii.gz"],
        }
        (task / "dataset.json").write_text(json.dumps(content))
        return folder

    return make


def _nnunet(prefix: str, ending: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        dataset = folder / prefix
        for case in CASES:
            for channel in (0, 1):
                save_volume(dataset / "imagesTr" / f"{case}_{channel:04d}{ending}")
            save_volume(dataset / "labelsTr" / f"{case}{ending}")
        content = {
            "channel_names": {"0": "T2", "1": "ADC"},
            "labels": {"background": 0, "PZ": 1, "TZ": 2},
            "numTraining": 3,
            "file_ending": ending,
        }
        (dataset / "dataset.json").write_text(json.dumps(content))
        return folder

    return make


def _list(*, as_file: bool) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        entries = []
        for case in CASES:
            entries.append({"image": f"imagesTr/img{case}.nii.gz", "label": f"labelsTr/label{case}.nii.gz"})
            for path in entries[-1].values():
                save_volume(folder / path)
        content = {
            "labels": {"0": "background", "1": "spleen"},
            "modality": {"0": "CT"},
            "test": ["imagesTs/img9.nii.gz"],
            "training": entries[:2],
            "validation": entries[2:],
        }
        (folder / "dataset_0.json").write_text(json.dumps(content))
        return folder / "dataset_0.json" if as_file else folder

    return make


def _table(ending: str, delimiter: str, header: tuple[str, str, str]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        with (folder / f"cohort{ending}").open("w", newline="") as lines:
            writer = csv.writer(lines, delimiter=delimiter)
            writer.writerow([*header, "age"])
            for case in CASES:
                writer.writerow([case, f"scans/{case}_image.nii.gz", f"scans/{case}_mask.nii.gz", 61])
                save_volume(folder / "scans" / f"{case}_image.nii.gz")
                save_volume(folder / "scans" / f"{case}_mask.nii.gz")
        return folder / f"cohort{ending}"

    return make


def _tfrecord(folder: Path) -> Path:
    write_shard(folder / "train_0.tfrecord", [small_example(0), small_example(1)])
    write_shard(folder / "valid_0.tfrecord", [small_example(2)])
    (folder / "info.json").write_text('{"total_size": 3}')
    return folder


def _classes(*places: str) -> Callable[[Path], Path]:
    """An image of each case below its folder; 2D ones are of one colour."""

    def make(folder: Path) -> Path:
        for place in places:
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".gz":
                save_volume(path)
            else:
                Image.new("L", (3, 2), 9).save(path)
        return folder

    return make


def _cifar10(prefix: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        inside = folder / prefix
        inside.mkdir(parents=True)
        for number, name in enumerate((*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")):
            (inside / f"{name}.bin").write_bytes(bytes([number]) + np.random.default_rng(number).bytes(3072))
        (inside / "batches.meta.txt").write_text("".join(f"kind{n}\n" for n in range(10)))
        return folder

    return make


@dataclass(frozen=True)
class Layout:
    """`make(folder)` returns the source; `manifest` is the file, if any, that the format leans on."""

    format: str
    make: Callable[[Path], Path]
    manifest: str | None = None
    ids: tuple[str, ...] = ("a1", "b2", "c3")

    @property
    def labelled(self) -> bool:
        """Whether a case has a label volume, rather than a class."""
        return self.format not in ("classes", "cifar10")


_CIFAR10 = (*(f"data_batch_{number}-00000" for number in range(1, 6)), "test_batch-00000")
LAYOUTS = {
    "decathlon: the task": Layout("decathlon", _decathlon("."), "dataset.json"),
    "decathlon: its parent": Layout("decathlon", _decathlon("Task09_Spleen"), "Task09_Spleen/dataset.json"),
    "nnunet: the dataset": Layout("nnunet", _nnunet(".", ".nii.gz"), "dataset.json"),
    "nnunet: its parent": Layout("nnunet", _nnunet("Dataset005_Prostate", ".nii"), "Dataset005_Prostate/dataset.json"),
    "list: the file": Layout("list", _list(as_file=True), "dataset_0.json", ("imga1", "imgb2", "imgc3")),
    "list: its folder": Layout("list", _list(as_file=False), "dataset_0.json", ("imga1", "imgb2", "imgc3")),
    "table: csv": Layout("table", _table(".csv", ",", ("case", "NIFTI path", "label")), "cohort.csv"),
    "table: semicolons": Layout("table", _table(".csv", ";", ("Case_ID", "Image Path", "SEG")), "cohort.csv"),
    "table: tsv": Layout("table", _table(".tsv", "\t", ("id", "file", "mask_path")), "cohort.tsv"),
    "tfrecord": Layout("tfrecord", _tfrecord, "train_0.tfrecord", ("train_0-00000", "train_0-00001", "valid_0-00000")),
    "pairs: row 0": Layout("pairs", _pairs("img{}.nii.gz", "seg{}.nii.gz")),
    "pairs: suffixes": Layout("pairs", _pairs("{}_image.nii", "{}_mask.nii")),
    "pairs: folders": Layout("pairs", _pairs("images/{}.nii.gz", "labels/{}.nii.gz")),
    "classes: images": Layout("classes", _classes("dog/c3.png", "cat/b2.jpg", "cat/a1.tif")),
    "classes: volumes": Layout("classes", _classes("dog/c3.nii.gz", "cat/b2.nii.gz", "cat/a1.nii.gz")),
    "classes: split": Layout("classes", _classes("train/dog/b2.png", "train/cat/a1.png", "val/cat/c3.png")),
    "cifar10: the folder": Layout("cifar10", _cifar10("."), "data_batch_1.bin", _CIFAR10),
    "cifar10: its parent": Layout(
        "cifar10", _cifar10("cifar-10-batches-bin"), "cifar-10-batches-bin/data_batch_3.bin", _CIFAR10
    ),
}

_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**40,
    1e308,
    "",
    "../x",
    "/etc/passwd",
    "\0",
    "a" * 5000,
    [],
    {},
    [[]],
    "é\n",
)


def mutants(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Damaged copies: cut off, flipped, deleted, doubled, with rubbish put in; JSON also with odd values in it."""
    rng = random.Random(seed)
    for number in range(count):
        damaged = bytearray(content)
        at, length = rng.randrange(len(damaged)), rng.randrange(1, 9)
        match number % 6:
            case 0:
                del damaged[at:]
            case 1:
                damaged[at] ^= 1 << rng.randrange(8)
            case 2:
                del damaged[at : at + length]
            case 3:
                damaged[at:at] = damaged[at : at + 40 * length]
            case 4:
                damaged[at:at] = rng.randbytes(length)
            case _ if content[:1] == b"{":
                damaged[:] = json.dumps(_with_odd_value(json.loads(content), rng)).encode()
            case _:
                damaged[at : at + length] = b"\xff" * length
        yield bytes(damaged)


def _with_odd_value(content: Any, rng: random.Random) -> Any:
    places = list(_places(content))
    node, key = rng.choice(places)
    node[key] = rng.choice(_ODD)
    return content


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key, held in node.items() if isinstance(node, dict) else enumerate(node):
        yield node, key
        if isinstance(held, dict | list):
            yield from _places(held)
