"""PNG, JPEG, BMP and TIFF with damaged bytes, headers that lie and kinds that are no picture to train on."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from chaos.report import Report
from fuzz.inputs import AS_STATED, REFUSED, UNCHANGED, Input, Wrong, mutated, try_inputs
from voxscale.data.cases import Case
from voxscale.data.volumes import read_case

_SIZE = (7, 5)  # width, height
_NAMED = r"^case scan7: .+: found .+, expected .+"
_ENDINGS = {"PNG": ".png", "JPEG": ".jpg", "BMP": ".bmp", "TIFF": ".tif"}
_GREY = np.random.default_rng(2).integers(0, 256, (_SIZE[1], _SIZE[0]), np.uint8)
_COLOURS = np.random.default_rng(3).integers(0, 256, (_SIZE[1], _SIZE[0], 3), np.uint8)
_EDGES = (0, 1, 3, 6, 8, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def fuzz_pictures(root: Path, *, inputs: int, seed: int) -> Report:
    return try_inputs("malformed pictures", root, _make_picture, inputs=inputs, seed=seed)


def _make_picture(chance: random.Random, root: Path) -> Input:
    make = chance.choice([_damaged, _damaged, _odd_png, _odd_kind])
    what, ending, content, must, expected = make(chance)
    path = root / f"picture{ending}"
    path.write_bytes(content)

    def read() -> str:
        pixels = read_case(Case("scan7", (path,), None, "p7")).image_cxyz[..., 0]
        if expected is None:
            return AS_STATED
        wanted = expected.T[None] if expected.ndim == 2 else np.transpose(expected, (2, 1, 0))
        if pixels.shape != wanted.shape or not np.array_equal(pixels, wanted):
            raise Wrong(f"silently other pixels: shape {pixels.shape}, from {pixels.min()} to {pixels.max()}")
        return UNCHANGED

    return Input(what, read, _NAMED, must=must)


Made = tuple[str, str, bytes, str, NDArray[Any] | None]  # kind, ending, content, the right outcome, the right pixels


@functools.cache
def sound_picture(kind: str, colours: bool) -> bytes:
    return _saved(Image.fromarray(_COLOURS if colours else _GREY), kind)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def _damaged(chance: random.Random) -> Made:
    """Of these only PNG has checksums, so only there another pixel must be noticed."""
    kind, colours = chance.choice(list(_ENDINGS)), chance.random() < 0.5
    what, content = mutated(sound_picture(kind, colours), chance)
    pixels = (_COLOURS if colours else _GREY) if kind == "PNG" else None
    return f"{kind}: {what}", _ENDINGS[kind], content, "", pixels


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png(header: tuple[int, ...], *chunks: tuple[bytes, bytes]) -> bytes:
    parts = [(b"IHDR", struct.pack(">IIBBBBB", *header)), *chunks, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in parts)


def _odd_png(chance: random.Random) -> Made:
    """Every checksum is right; what they cover is not."""
    width, height = _SIZE
    rows = b"".join(b"\0" + row.tobytes() for row in _GREY)
    data, plain = zlib.compress(rows), (width, height, 8, 0, 0, 0, 0)
    edge = chance.choice(_EDGES)
    made: dict[str, Callable[[], tuple[bytes, str]]] = {
        "as it should be": lambda: (_png(plain, (b"IDAT", data)), UNCHANGED),
        "another width": lambda: (_png((edge, *plain[1:]), (b"IDAT", data)), REFUSED),
        "another height": lambda: (_png((width, edge, *plain[2:]), (b"IDAT", data)), REFUSED if edge > 6 else ""),
        "a bomb": lambda: (_png((30_000, 30_000, *plain[2:]), (b"IDAT", zlib.compress(bytes(2**24)))), REFUSED),
        "another depth": lambda: (
            _png((*plain[:2], chance.choice([0, 3, 32, 255]), *plain[3:]), (b"IDAT", data)),
            REFUSED,
        ),
        "another kind": lambda: (_png((*plain[:3], chance.choice([1, 5, 7, 99]), 0, 0, 0), (b"IDAT", data)), REFUSED),
        "a palette that is not there": lambda: (_png((*plain[:3], 3, 0, 0, 0), (b"IDAT", data)), ""),
        "another compression": lambda: (_png((*plain[:4], 9, 0, 0), (b"IDAT", data)), ""),
        "no pixels": lambda: (_png(plain), REFUSED),
        "too few pixels": lambda: (_png(plain, (b"IDAT", zlib.compress(rows[: chance.randrange(len(rows))]))), REFUSED),
        "no zlib": lambda: (_png(plain, (b"IDAT", chance.randbytes(60))), REFUSED),
        "a filter that is none": lambda: (_png(plain, (b"IDAT", zlib.compress(b"\x09" + rows[1:]))), REFUSED),
        "a long text": lambda: (_png(plain, (b"zTXt", b"x\0\0" + zlib.compress(bytes(2**26))), (b"IDAT", data)), ""),
        "a huge chunk": lambda: (_png(plain)[:33] + struct.pack(">I", edge | 1 << 30) + b"IDAT" + data, REFUSED),
        "in two chunks": lambda: (_png(plain, (b"IDAT", data[:9]), (b"IDAT", data[9:])), UNCHANGED),
        "no end": lambda: (_png(plain, (b"IDAT", data))[:-12], ""),
    }
    what = chance.choice(list(made))
    content, must = made[what]()
    is_ours = what not in ("a palette that is not there", "another compression", "another height")
    return f"PNG: {what}", ".png", content, must, _GREY if is_ours else None


def _odd_kind(chance: random.Random) -> Made:
    """Whole files that are not one picture in grey or colours, or not what their name says."""
    colours, grey = Image.fromarray(_COLOURS), Image.fromarray(_GREY)
    deep = Image.fromarray(_GREY.astype(np.uint16) * 257)
    clear = Image.fromarray(np.dstack([_COLOURS, np.full(_GREY.shape, chance.choice([0, 128, 254]), np.uint8)]))
    opaque = Image.fromarray(np.dstack([_COLOURS, np.full(_GREY.shape, 255, np.uint8)]))
    numbers = _GREY.astype(np.float32)
    numbers[0, 0] = chance.choice([np.nan, np.inf, -np.inf])
    many = {"save_all": True, "append_images": [grey]}
    made: dict[str, Callable[[], tuple[str, bytes, str, NDArray[Any] | None]]] = {
        "a GIF": lambda: (".png", _saved(grey, "GIF"), REFUSED, None),
        "a WebP": lambda: (".jpg", b"RIFF\x24\0\0\0WEBPVP8 " + chance.randbytes(60), REFUSED, None),
        "an EPS": lambda: (".png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n", REFUSED, None),
        "a JPEG called PNG": lambda: (".png", _saved(grey, "JPEG"), "", None),
        "text": lambda: (chance.choice(list(_ENDINGS.values())), b"404 Not Found\n" * 9, REFUSED, None),
        "nothing": lambda: (chance.choice(list(_ENDINGS.values())), b"", REFUSED, None),
        "CMYK": lambda: (".jpg", _saved(colours.convert("CMYK"), "JPEG"), REFUSED, None),
        "transparent": lambda: (".png", _saved(clear, "PNG"), REFUSED, None),
        "opaque": lambda: (".png", _saved(opaque, "PNG"), UNCHANGED, _COLOURS),
        "a palette": lambda: (".png", _saved(grey.convert("P"), "PNG"), "", None),
        "16 bits": lambda: (".png", _saved(deep, "PNG"), UNCHANGED, _GREY.astype(np.float32) * 257),
        "pages": lambda: (".tif", _saved(grey, "TIFF", **many), REFUSED, None),
        "frames": lambda: (".png", _saved(grey, "PNG", **many), REFUSED, None),
        "not a number": lambda: (".tif", _saved(Image.fromarray(numbers), "TIFF"), REFUSED, None),
        "rubbish behind": lambda: (".png", sound_picture("PNG", False) + chance.randbytes(50), "", _GREY),
    }
    what = chance.choice(list(made))
    return f"kind: {what}", *made[what]()
