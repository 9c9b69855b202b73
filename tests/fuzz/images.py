"""NIfTI images and labels with damaged bytes, headers that lie, and voxels that may not be."""

from __future__ import annotations

import functools
import gzip
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
from numpy.typing import NDArray

from chaos.report import Report
from fuzz.inputs import AS_STATED, REFUSED, UNCHANGED, Input, Wrong, mutated, try_inputs
from voxscale.config.data import Data
from voxscale.config.load import make_config
from voxscale.data.cases import Case
from voxscale.data.doctor import examine_dataset
from voxscale.data.findings import refuse_errors
from voxscale.data.room import beyond_memory
from voxscale.data.volumes import RawCase, read_case
from voxscale.errors import VoxscaleError

SHAPE = (6, 5, 4)
AFFINE = np.array([[-1.5, 0.1, 0, 40], [0.1, 1.5, 0, -30], [0, 0, 3, 12.5], [0, 0, 0, 1]])
DECLARED = {0: "background", 1: "liver", 2: "tumour"}
_VOXELS = np.random.default_rng(0).integers(0, 900, SHAPE)
_LABEL = np.random.default_rng(1).integers(0, 3, SHAPE).astype(np.uint8)
_ENDINGS = (".nii", ".nii.gz")
_NAMED = r"^case scan7: (.+: found .+|found too little memory .+), expected .+"
_PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 6, 5, 8, 0, 0, 0, 0)
_DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
_HEADER_FIELDS = (
    *(
        "dim",
        "dim",
        "datatype",
        "bitpix",
        "vox_offset",
        "scl_slope",
        "scl_inter",
        "pixdim",
        "pixdim",
        "affine",
        "magic",
    ),
    *("sform_code", "qform_code", "quatern_b", "qoffset_x", "sizeof_hdr", "xyzt_units", "any bit", "byte order"),
)
_ODD_NUMBERS = (0.0, -0.0, -1.0, 1e-45, 1e-12, 0.5, 1.0, 2.0, 3e38, float("nan"), float("inf"), float("-inf"))
_ODD_WHOLE = (0, 1, -1, 2, 3, 4, 5, 7, 8, 100, 255, -32768, 32767)


@dataclass(frozen=True)
class Volume:
    """A sound file: its bytes before compression, and what they hold."""

    content: bytes
    kind: Any
    voxels: NDArray[Any]

    @property
    def header(self) -> bytes:
        return self.content[: self.kind.header_class.sizeof_hdr]


@functools.cache
def sound_volume(dtype: str, kind: Any, slope: float = 1.0, *, label: bool = False) -> Volume:
    held = (_LABEL if label else _VOXELS).astype(dtype)
    content = rendered(held, kind=kind)
    if slope != 1:
        content = with_field(Volume(content, kind, held), "scl_inter", 4.0).content
        content = with_field(Volume(content, kind, held), "scl_slope", slope).content
        held = held * slope + 4.0
    return Volume(content, kind, held)


def rendered(voxels: NDArray[Any], affine: NDArray[Any] = AFFINE, kind: Any = nib.Nifti1Image) -> bytes:
    image = kind(voxels, affine, dtype=voxels.dtype)
    image.set_qform(affine, code=1)
    content: bytes = image.to_bytes()
    return content


def with_field(volume: Volume, name: str, value: Any, at: int | None = None) -> Volume:
    """The same bytes with another value in a field of the header, or in one place of it."""
    header = np.frombuffer(volume.header, volume.kind.header_class.template_dtype).copy()
    with np.errstate(all="ignore"):
        if at is None:
            header[name][0] = np.asarray(value).astype(header[name].dtype)
        else:
            header[name][0, at] = np.asarray(value).astype(header[name].dtype)
    return Volume(header.tobytes() + volume.content[len(header.tobytes()) :], volume.kind, volume.voxels)


def fuzz_images(root: Path, *, inputs: int, seed: int) -> Report:
    _write_sound_pairs(root / "pairs")
    return try_inputs("malformed images", root, _make_image, inputs=inputs, seed=seed)


def fuzz_labels(root: Path, *, inputs: int, seed: int) -> Report:
    return try_inputs("malformed labels", root, _make_label, inputs=inputs, seed=seed)


def _make_image(chance: random.Random, root: Path) -> Input:
    if chance.random() < 0.1:
        return _make_pair(chance, root / "pairs")
    kind = chance.choice([nib.Nifti1Image, nib.Nifti1Image, nib.Nifti2Image])
    volume = sound_volume(chance.choice(["i2", "f4", "u1", "f8"]), kind, chance.choice([1.0, 1.0, 2.0]))
    make = chance.choice([_damaged_gzip, _damaged_gzip, _odd_gzip, _odd_header, _odd_header, _odd_length, _odd_voxels])
    what, ending, content, must = make(volume, chance)
    image, label = root / f"image{ending}", root / "label.nii"
    image.write_bytes(content)
    label.write_bytes(sound_volume("u1", nib.Nifti1Image, label=True).content)
    has_label = make not in (_damaged_gzip, _odd_gzip) or chance.random() < 0.5

    def read() -> str:
        raw = _read(Case("scan7", (image,), label if has_label else None, "p7"))
        return _compared(raw, raw.image_cxyz[0], volume, content if make is _odd_header else b"")

    return Input(what, read, _NAMED, VoxscaleError, must=must)


def _write_sound_pairs(folder: Path) -> None:
    folder.mkdir(parents=True)
    label = sound_volume("u1", nib.Nifti1Image, label=True).content
    for number in range(3):
        (folder / f"scan{number}_image.nii").write_bytes(rendered(_VOXELS.astype("i2") + np.int16(number)))
        (folder / f"scan{number}_label.nii").write_bytes(label)


def _make_pair(chance: random.Random, folder: Path) -> Input:
    """Image and label say the same of their grid, whatever that is, so that only sense can tell; as `doctor` does."""
    kind = chance.choice([nib.Nifti1Image, nib.Nifti2Image])
    rows = AFFINE * chance.choice([1e-300, 1e-38, 1e-20, 1e-6, 1e-3, 1, 30, 1e4, 1e8, 1e19, 1e38, 1e150, 1e300])
    rows[chance.randrange(3), chance.randrange(4)] *= chance.choice([0, 1, -1, 1e-5, 1e5, 1e200])
    names = ("image", "label")
    for name, dtype in zip(names, ("i2", "u1"), strict=True):
        volume = sound_volume(dtype, kind, label=name == "label")
        (folder / f"scan7_{name}.nii").write_bytes(_with_affine(volume, rows).content)
    spacing = chance.choice([None, [1, 1, 1], [0.001, 1, 1000]])
    data = {"source": str(folder), "spacing": spacing, "orientation": chance.choice([None, "RAS", "LPS"])}

    def read() -> str:
        diagnosis = examine_dataset(make_config({"data": data}, name="fuzz", base=folder), folder / "scratch")
        json.dumps(diagnosis.as_json(), allow_nan=False)
        refuse_errors(diagnosis.findings)
        return AS_STATED

    return Input("pair: a grid", read, r"^case scan7: .*found .+, expected .+")


def _make_label(chance: random.Random, root: Path) -> Input:
    kind = chance.choice([nib.Nifti1Image, nib.Nifti1Image, nib.Nifti2Image])
    volume = sound_volume(chance.choice(["u1", "i2", "f4", "f8", "i8"]), kind, label=True)
    make = chance.choice([_odd_labels, _odd_labels, _odd_labels, _damaged_gzip, _odd_header, _odd_length])
    what, ending, content, must = make(volume, chance)
    image, label = root / "image.nii", root / f"label{ending}"
    image.write_bytes(sound_volume("i2", nib.Nifti1Image).content)
    label.write_bytes(content)

    def read() -> str:
        raw = _read(Case("scan7", (image,), label, "p7"))
        assert raw.label_xyz is not None
        return _compared(raw, raw.label_xyz, volume, content if make is _odd_header else b"")

    return Input(what, read, _NAMED, VoxscaleError, must=must)


def _read(case: Case) -> RawCase:
    """As `prepare` does. Memory may be short only where that was seen before any of it was taken."""
    try:
        return read_case(case, channels=1, labels=DECLARED)
    except MemoryError as error:
        if "are free" not in str(error):
            raise
        raise beyond_memory(case, Data(source=".")) from error


def _compared(raw: RawCase, voxels: NDArray[Any], volume: Volume, stated: bytes) -> str:
    """Whether what was read is what was there before or, for a file without a checksum, what its header says."""
    if not np.allclose(raw.affine, AFFINE, atol=2e-3):
        raise Wrong(f"silently another affine: {raw.affine.tolist()}")
    if voxels.shape == SHAPE and np.allclose(voxels, volume.voxels, rtol=1e-6):
        return UNCHANGED
    if stated and voxels.shape == SHAPE and np.allclose(voxels, _stated(stated, volume.kind), rtol=1e-5, atol=1e-3):
        return AS_STATED
    raise Wrong(f"silently other voxels: shape {voxels.shape}, from {voxels.min()} to {voxels.max()}")


def _stated(content: bytes, kind: Any) -> NDArray[Any]:
    """The voxels as the header has them, by the standard's own words; Wrong where it makes no sense."""
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    layout = kind.header_class.template_dtype
    order: Literal["=", ">"] = "=" if int.from_bytes(content[:4], "little") == kind.header_class.sizeof_hdr else ">"
    header = np.frombuffer(content, layout.newbyteorder(order), count=1)[0]
    dtype = np.dtype(_DTYPES[int(header["datatype"])]).newbyteorder(order)
    voxels = np.frombuffer(content, dtype, int(np.prod(SHAPE)), int(header["vox_offset"])).reshape(SHAPE, order="F")
    slope, shift = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or np.isnan(slope):
        return voxels
    if not np.isfinite([slope, shift]).all():
        raise Wrong(f"scl_slope {slope}, scl_inter {shift} went unnoticed")
    return voxels.astype(np.float64) * slope + shift


Made = tuple[str, str, bytes, str]  # kind, ending of the file, content, the only right outcome if there is one


def _damaged_gzip(volume: Volume, chance: random.Random) -> Made:
    kind, content = mutated(gzip.compress(volume.content, chance.choice([0, 1, 9]), mtime=0), chance)
    return f"gzip: {kind}", ".nii.gz", content, ""


def _odd_gzip(volume: Volume, chance: random.Random) -> Made:
    plain, packed = volume.content, gzip.compress(volume.content, mtime=0)
    crc, size = packed[-8:-4], packed[-4:]
    shorter, longer = plain[: -chance.randint(1, 200)], plain + chance.randbytes(chance.randint(1, 2000))
    wide = with_field(volume, "dim", [3, 2048, 2048, 400, 1, 1, 1, 1]).content
    made: dict[str, Callable[[], tuple[bytes, str]]] = {
        "wrong checksum": lambda: (
            packed[:-8] + struct.pack("<I", zlib.crc32(plain) ^ 1 << chance.randrange(32)) + size,
            REFUSED,
        ),
        "wrong length": lambda: (packed[:-8] + crc + struct.pack("<I", chance.randrange(2**32) | 1 << 31), REFUSED),
        "no checksum": lambda: (packed[: -chance.randint(1, 8)], REFUSED),
        "too short": lambda: (gzip.compress(shorter), REFUSED),
        "too long": lambda: (gzip.compress(longer), REFUSED),
        "rubbish behind": lambda: (packed + b"\x01" + chance.randbytes(chance.randint(1, 99)), REFUSED),
        "zeros behind": lambda: (packed + bytes(chance.randint(1, 999)), UNCHANGED),
        "in two members": lambda: (gzip.compress(plain[:400]) + gzip.compress(plain[400:]), UNCHANGED),
        "a second volume behind": lambda: (packed + packed, REFUSED),
        "packed twice": lambda: (gzip.compress(packed), REFUSED),
        "not packed": lambda: (plain, REFUSED),
        "nothing": lambda: (b"", REFUSED),
        "nothing, packed": lambda: (gzip.compress(b""), REFUSED),
        "text": lambda: (b"404 Not Found\n" * chance.randint(1, 200), REFUSED),
        "text, packed": lambda: (gzip.compress(b"404 Not Found\n" * chance.randint(1, 200)), REFUSED),
        "a PNG": lambda: (_PNG + chance.randbytes(500), REFUSED),
        "a PNG, packed": lambda: (gzip.compress(_PNG + chance.randbytes(500)), REFUSED),
        "a bomb": lambda: (bomb(plain, 64), REFUSED),
    }
    if chance.random() < 0.02:
        return "gzip: a bomb with a wide header", ".nii.gz", bomb(wide, 512), REFUSED
    kind = chance.choice(list(made))
    content, must = made[kind]()
    return f"gzip: {kind}", ".nii.gz", content, must


def bomb(content: bytes, megabytes: int) -> bytes:
    """The content and then so many megabytes of zeros, of which each takes a kilobyte; without an end."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH)
    return start + _packed_zeros() * megabytes


@functools.cache
def _packed_zeros() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)


def _odd_header(volume: Volume, chance: random.Random) -> Made:
    """A file without a checksum, or with the right one: only what contradicts itself, or the other file, is noticed."""
    field = chance.choice(_HEADER_FIELDS)
    number, whole = chance.choice(_ODD_NUMBERS), chance.choice(_ODD_WHOLE)
    must = ""
    match field:
        case "dim":
            at = chance.randrange(8)
            changed = with_field(volume, field, whole, at)
        case "datatype":
            changed = with_field(
                volume, field, chance.choice([*_DTYPES, 0, 1, 32, 128, 255, 1536, 1792, 2048, 2304, -1, 9999])
            )
        case "bitpix" | "sform_code" | "qform_code" | "xyzt_units" | "sizeof_hdr":
            changed = with_field(volume, field, whole)
        case "vox_offset":
            changed = with_field(
                volume, field, chance.choice([*_ODD_NUMBERS, 348.0, 351.0, 353.0, 368.0, 544.5, 2.0**24, 1e18])
            )
        case "scl_slope" | "scl_inter" | "quatern_b" | "qoffset_x":
            changed = with_field(volume, field, number)
        case "pixdim":
            changed = with_field(volume, field, number, chance.randrange(8))
            if chance.random() < 0.5:
                changed = with_field(changed, "sform_code", 0)
        case "affine":
            changed = _odd_affine(volume, chance)
            must = REFUSED
        case "magic":
            changed = with_field(volume, field, np.frombuffer(chance.randbytes(4), "S4")[0])
        case "byte order":
            header = np.frombuffer(volume.header, volume.kind.header_class.template_dtype)
            changed = Volume(header.byteswap().tobytes() + volume.content[header.nbytes :], volume.kind, volume.voxels)
        case _:
            bits = bytearray(volume.content)
            bits[chance.randrange(len(volume.header))] ^= 1 << chance.randrange(8)
            changed = Volume(bytes(bits), volume.kind, volume.voxels)
    ending = chance.choice(_ENDINGS)
    return f"header: {field}", ending, changed.content if ending == ".nii" else gzip.compress(changed.content), must


def _odd_affine(volume: Volume, chance: random.Random) -> Volume:
    """One that places no voxel, or not where the other file has it."""
    rows = AFFINE[:3].copy()
    match chance.choice(["singular", "an empty row", "not a number", "infinite", "huge", "elsewhere", "mirrored"]):
        case "singular":
            rows[1] = 2 * rows[0]
        case "an empty row":
            rows[chance.randrange(3), :3] = 0
        case "not a number":
            rows[chance.randrange(3), chance.randrange(4)] = np.nan
        case "infinite":
            rows[chance.randrange(3), chance.randrange(4)] = chance.choice([np.inf, -np.inf])
        case "huge":
            rows[:, :3] *= 1e38
        case "elsewhere":
            rows[chance.randrange(3), 3] += chance.choice([0.01, -1, 1000])
        case _:
            rows[0] *= -1
    return _with_affine(volume, rows)


def _with_affine(volume: Volume, rows: NDArray[Any]) -> Volume:
    for name, row in zip(("srow_x", "srow_y", "srow_z"), rows, strict=False):
        volume = with_field(volume, name, row)
    return volume


def _odd_length(volume: Volume, chance: random.Random) -> Made:
    kind = chance.choice(["cut off", "cut off", "bytes more", "nothing", "text", "a PNG", "packed"])
    cut = volume.content[: chance.randrange(len(volume.content))]
    content = {
        "cut off": cut,
        "bytes more": volume.content + chance.randbytes(chance.choice([1, 2, 16, 5000])),
        "nothing": b"",
        "text": b"id,age\n7,61\n" * chance.randint(1, 300),
        "a PNG": _PNG + chance.randbytes(900),
        "packed": gzip.compress(volume.content),
    }[kind]
    return f"plain: {kind}", ".nii", content, REFUSED


def _odd_voxels(volume: Volume, chance: random.Random) -> Made:
    """Whole files whose voxels are no image that could be trained on."""
    kind = chance.choice(["not a number", "infinite", "beyond floats", "complex", "colours", "too many axes", "flat"])
    voxels: NDArray[Any] = _VOXELS.astype("f8" if kind == "beyond floats" else "f4")
    match kind:
        case "not a number" | "infinite" | "beyond floats":
            odd = {"not a number": np.nan, "infinite": np.inf, "beyond floats": 1e300}[kind]
            voxels.flat[chance.sample(range(voxels.size), chance.choice([1, 5]))] = odd
        case "complex":
            voxels = voxels.astype("c8")
        case "colours":
            voxels = np.zeros(SHAPE, [("R", "u1"), ("G", "u1"), ("B", "u1")])
        case "too many axes":
            voxels = np.repeat(voxels[..., None, None], 2, axis=4)
        case _:
            voxels = voxels[:, :, 0]
    content = rendered(voxels)
    ending = chance.choice(_ENDINGS)
    return f"voxels: {kind}", ending, content if ending == ".nii" else gzip.compress(content), REFUSED


def _odd_labels(volume: Volume, chance: random.Random) -> Made:
    """Whole files that hold no label of this image, and a few that do."""
    at = chance.sample(range(_LABEL.size), chance.choice([1, 7]))
    values = {
        "not declared": (chance.choice([3, 4, 100, 255]), REFUSED),
        "a fraction": (chance.choice([0.5, 0.01, 1.99, 1e-2]), REFUSED),
        "not a number": (np.nan, REFUSED),
        "infinite": (chance.choice([np.inf, -np.inf]), REFUSED),
        "negative": (chance.choice([-1, -255, -256, -0.5]), REFUSED),
        "beyond a byte": (chance.choice([256, 257, 65536, 65537, 2**31, 2**40 + 1, 1e300]), REFUSED),
    }
    kind = chance.choice([*values, "another shape", "another affine", "nearly the affine", "channels", "one channel"])
    kind = chance.choice([kind, kind, "another type"]) if chance.random() < 0.2 else kind
    voxels, affine, must = _LABEL.astype("f8"), AFFINE.copy(), REFUSED
    match kind:
        case "another shape":
            voxels = chance.choice([voxels[:-1], voxels.transpose(1, 0, 2), voxels[..., 0], np.tile(voxels, (2, 1, 1))])
        case "another affine":
            affine[chance.randrange(3), chance.randrange(4)] += chance.choice([0.01, -0.02, 0.3, 5.0])
        case "nearly the affine":
            affine[chance.randrange(3), 3] += chance.choice([1e-5, -1e-4])
            must = UNCHANGED
        case "channels":
            voxels = np.stack([voxels, voxels], axis=3)
        case "one channel":
            voxels, must = voxels[..., None], UNCHANGED
        case "another type":
            voxels, must = voxels.astype(chance.choice(["i1", "u1", "i2", "u4", "u8", "f4"])), UNCHANGED
        case _:
            odd, must = values[kind]
            voxels.flat[at] = odd
            if float(odd).is_integer() and abs(odd) < 2**62 and chance.random() < 0.5:
                voxels = voxels.astype(np.int64)
    content = rendered(voxels, affine)
    ending = chance.choice(_ENDINGS)
    return f"label: {kind}", ending, content if ending == ".nii" else gzip.compress(content), must
