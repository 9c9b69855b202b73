"""What describes a dataset, and what carries it: `dataset.json`, lists of cases, and archives, all malformed."""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from chaos.report import Report
from fuzz.images import rendered, sound_volume
from fuzz.inputs import AS_STATED, REFUSED, UNCHANGED, Input, Wrong, mutated, try_inputs
from voxscale.config.data import Data
from voxscale.data.cases import Manifest
from voxscale.data.formats import find_cases

_CASES = 3
_ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1.5,
        10**30,
        "",
        "x",
        "\0",
        "../..",
        "/etc/passwd",
        "é" * 300,
        [],
        {},
        [[]],
        {"a": 1},
        ["x"] * 3,
    ),
    *("imagesTr/scan0.nii.gz", "imagesTr", ".", "./imagesTr/../../x.nii.gz", "imagesTr\\scan0.nii.gz", "\ud800"),
)
_NAMED = (
    r"dataset\.json|list\.json|task\.tar|^data\.source \S+: (found|the folder|no such|cannot)"
    r"|^case .+: .+: found .+, expected .+"
)


def fuzz_lists(root: Path, *, inputs: int, seed: int) -> Report:
    return try_inputs("malformed lists and archives", root, _make_list, inputs=inputs, seed=seed)


def _make_list(chance: random.Random, root: Path) -> Input:
    folder = root / "Task99_Fuzz"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(root / "scratch", ignore_errors=True)
    _write_sound(folder)
    make = chance.choice([_damaged_json, _odd_json, _odd_json, _odd_json, _damaged_archive, _odd_archive])
    return make(chance, root, folder)


@functools.cache
def _volumes() -> dict[str, bytes]:
    label = gzip.compress(sound_volume("u1", nib.Nifti1Image, label=True).content, mtime=0)
    image = np.arange(120).reshape(6, 5, 4).astype("i2")
    images = {f"imagesTr/scan{n}.nii.gz": gzip.compress(rendered(image + np.int16(n)), mtime=0) for n in range(_CASES)}
    return {**images, **{name.replace("imagesTr", "labelsTr"): label for name in images}}


def sound_list() -> dict[str, Any]:
    entries = [{"image": f"./imagesTr/scan{n}.nii.gz", "label": f"./labelsTr/scan{n}.nii.gz"} for n in range(_CASES)]
    labels, channels = {"0": "background", "1": "liver", "2": "tumour"}, {"0": "CT"}
    return {"name": "Fuzz", "modality": channels, "labels": labels, "numTraining": _CASES, "training": entries}


def _write_sound(folder: Path) -> None:
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    for name, content in _volumes().items():
        (folder / name).write_bytes(content)
    (folder / "dataset.json").write_text(json.dumps(sound_list()))


def _checked(manifest: Manifest, folder: Path | None) -> str:
    """Every case is there once, with files that are there, inside of the folder."""
    names = [case.id for case in manifest.cases]
    if len(set(names)) != len(names):
        raise Wrong(f"silently cases twice: {names}")
    for case in manifest.cases:
        for path in case.files:
            if not path.is_file() or (folder is not None and not path.resolve().is_relative_to(folder.resolve())):
                raise Wrong(f"case {case.id}: {path} is no file of the dataset")
    if any(not isinstance(value, int) or not isinstance(name, str) for value, name in manifest.labels.items()):
        raise Wrong(f"labels {manifest.labels}")
    sound = (names, sorted(manifest.labels)) == ([f"scan{n}" for n in range(_CASES)], [0, 1, 2])
    return UNCHANGED if sound else AS_STATED


def _described(kind: str, folder: Path, content: bytes, must: str, chance: random.Random) -> Input:
    """The same content as a Decathlon task's, or as a list that is named itself."""
    source = folder
    if chance.random() < 0.4:
        (folder / "dataset.json").unlink()
        source = folder / "list.json"
    (source if source is not folder else folder / "dataset.json").write_bytes(content)

    def read() -> str:
        return _checked(find_cases(Data(source=str(source)), folder.parent / "scratch"), folder)

    return Input(kind, read, _NAMED, must=must)


def _damaged_json(chance: random.Random, root: Path, folder: Path) -> Input:
    what, content = mutated(json.dumps(sound_list(), indent=1).encode(), chance)
    return _described(f"JSON: {what}", folder, content, "", chance)


def _odd_json(chance: random.Random, root: Path, folder: Path) -> Input:
    content: Any = sound_list()
    at, odd = chance.randrange(_CASES), chance.choice(_ODD)
    what = chance.choice(
        [
            "a field",
            "a field lost",
            "an entry",
            "a path",
            "a label",
            "a channel",
            "a case twice",
            "deep",
            "no object",
            "text",
        ]
    )
    must, text = "", None
    match what:
        case "a field":
            content[chance.choice(["modality", "labels", "training", "numTraining", "name"])] = odd
        case "a field lost":
            del content[chance.choice(list(content))]
        case "an entry":
            content["training"][at] = odd
        case "a path":
            content["training"][at][chance.choice(["image", "label"])] = odd
        case "a label":
            content["labels"][chance.choice(["3", "-1", "256", "1.5", "x", "", "9" * 400])] = odd
        case "a channel":
            content["modality"][chance.choice(["1", "7", "x", ""])] = odd
        case "a case twice":
            content["training"].append(dict(content["training"][at]))
            must = REFUSED
        case "deep":
            text, must = '{"training": ' + "[" * 100_000, REFUSED
        case "no object":
            text, must = json.dumps(chance.choice([[], [1], 7, "x", None, True])), REFUSED
        case _:
            text, must = chance.choice(["", "\0", "NaN", "{", "404 Not Found", "\ufeff", '{"training": NaN}']), REFUSED
    held = json.dumps(content) if text is None else text
    return _described(f"JSON: {what}", folder, held.encode(errors="surrogatepass"), must, chance)


def _archive(members: list[tuple[tarfile.TarInfo, bytes]], *, packed: bool) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz" if packed else "w") as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def _sound_members() -> list[tuple[tarfile.TarInfo, bytes]]:
    files = {**_volumes(), "dataset.json": json.dumps(sound_list()).encode()}
    return [_member(f"Task99_Fuzz/{name}", content) for name, content in files.items()]


def _carried(kind: str, root: Path, content: bytes, packed: bool, must: str) -> Input:
    path = root / f"task.tar{'.gz' if packed else ''}"
    path.write_bytes(content)

    def read() -> str:
        scratch = root / "scratch"
        outside = sorted(child.name for child in root.iterdir())
        outcome = _checked(find_cases(Data(source=str(path)), scratch), scratch)
        if sorted({child.name for child in root.iterdir()} - {"scratch"}) != [
            name for name in outside if name != "scratch"
        ]:
            raise Wrong("wrote outside of its folder")
        return outcome

    return Input(kind, read, _NAMED, must=must)


def _damaged_archive(chance: random.Random, root: Path, folder: Path) -> Input:
    """A packed one has a checksum; a plain one has some for headers alone."""
    packed = chance.random() < 0.5
    what, content = mutated(_archive(_sound_members(), packed=packed), chance)
    return _carried(f"archive: {what}", root, content, packed, "")


def _odd_archive(chance: random.Random, root: Path, folder: Path) -> Input:
    packed, whole = chance.random() < 0.5, _sound_members()
    links = {
        "type": chance.choice([tarfile.SYMTYPE, tarfile.LNKTYPE]),
        "linkname": chance.choice(["/etc/passwd", "../x"]),
    }
    extra: dict[str, Callable[[], tuple[tarfile.TarInfo, bytes]]] = {
        "a path that leads out": lambda: _member(chance.choice(["../out", "/out", "Task99_Fuzz/../../out"]), b"x"),
        "a link": lambda: _member("Task99_Fuzz/imagesTr/scan9.nii.gz", **links),
        "a device": lambda: _member("Task99_Fuzz/zero", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        "a pipe": lambda: _member("Task99_Fuzz/pipe", type=tarfile.FIFOTYPE),
        "a member twice": lambda: _member("Task99_Fuzz/dataset.json", b"{}"),
        "a long name": lambda: _member("Task99_Fuzz/" + "x" * 300, b"x"),
    }
    what = chance.choice([*extra, "no end", "nothing", "a bomb", "text"])
    match what:
        case "no end":
            content, must = _archive(whole, packed=False)[:-10_240], REFUSED
            packed = False
        case "nothing":
            content, must = b"", REFUSED
        case "text":
            content, must = b"404 Not Found\n" * 100, REFUSED
        case "a bomb":
            content, must, packed = gzip.compress(bytes(2**27), 9), REFUSED, True
        case _:
            content, must = _archive([*whole, extra[what]()], packed=packed), REFUSED
    return _carried(f"archive: {what}", root, content, packed, must)
