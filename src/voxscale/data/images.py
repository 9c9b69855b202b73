"""2D images as volumes of one slice: files of the usual kinds, and records of CIFAR-10.

A picture is (x, y, 1), or (x, y, 1, 3) in colour, x being its width as it is shown: the axes of a volume with channels
last.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")

CIFAR10_EDGE = 32
CIFAR10_CLASSES = 10
CIFAR10_RECORD = 1 + 3 * CIFAR10_EDGE**2  # bytes: the class, then red, green and blue, row by row

_KINDS = ("PNG", "JPEG", "BMP", "TIFF")
_GREY, _DEEP_GREY = ("1", "L"), ("I;16", "I;16B", "I;16L", "I;16N", "I", "F")
_COLOURS = ("RGB", "P", "RGBX")
_WITH_ALPHA = ("LA", "PA", "RGBA", "La", "RGBa")
_PNG_SIGN = b"\x89PNG\r\n\x1a\n"
_ADAM7 = (  # the pictures that an interlaced one is made of: x and y of the first pixel, and how far it is to the next
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
_BLOCK = 1 << 20
_ONE_AT_A_TIME = threading.Lock()
logging.getLogger("PIL").addHandler(logging.NullHandler())  # Pillow prints what it finds in a header


def is_image(path: Path) -> bool:
    return path.name.lower().endswith(IMAGE_ENDINGS)


def read_image(path: Path) -> tuple[NDArray[Any], str]:
    """Return (pixels, what was left out of them in words, mostly nothing).

    Raises ValueError with the reason if the file is damaged, larger than Pillow's limit for bombs, or neither grey nor
    colour. An alpha channel that hides nothing is left out; what a transparent pixel shows is nobody's to say, so that
    is refused.
    """
    try:
        with path.open("rb") as file:
            _verify(file)
            with _open(file) as image:
                lost = _lost_depth(image)
                _load(image)
                pixels, dropped = _pixels(image)
    except UnidentifiedImageError:
        raise ValueError(
            f"no image of kind {', '.join(_KINDS)}"
        ) from None  # its own words name a place of this machine
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"more than {Image.MAX_IMAGE_PIXELS} pixels, as a decompression bomb has") from error
    except (LookupError, TypeError, AttributeError) as error:  # what a decoder stumbles over is no reason for users
        raise ValueError("its parts contradict each other, or some are missing") from error
    except Exception as error:  # a decoder of a damaged file may raise anything: struct.error, SyntaxError …
        raise ValueError(str(error) or type(error).__name__) from error
    return pixels.swapaxes(0, 1)[:, :, None], ", ".join(filter(None, (lost, dropped)))


def read_cifar10_record(path: Path, offset: int) -> NDArray[np.uint8]:
    """(x, y, 1, 3) of the record at a byte offset; raises ValueError if it is not there whole."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record = file.read(CIFAR10_RECORD)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(record) < CIFAR10_RECORD:
        raise ValueError(f"record at byte {offset}: found {len(record)} bytes, expected {CIFAR10_RECORD}")
    planes_cyx = np.frombuffer(record, np.uint8, offset=1).reshape(3, CIFAR10_EDGE, CIFAR10_EDGE)
    return planes_cyx.transpose(2, 1, 0)[:, :, None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Pillow's remarks on sloppy headers are not for users, and what is nearly a bomb is refused as bombs are.

    Filters of warnings are of the whole process, hence one thread at a time.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _open(file: BinaryIO) -> Image.Image:
    """The image's header, checked."""
    with _quiet():
        file.seek(0)
        image = Image.open(file, formats=_KINDS)
        _check_kind(image)
        return image


def _load(image: Image.Image) -> None:
    """Decode it, many at a time but for TIFF, whose remarks come only now; then turn it as a camera says."""
    if image.format != "TIFF":
        image.load()
    with _quiet():
        image.load()
        ImageOps.exif_transpose(image, in_place=True)


def _verify(file: BinaryIO) -> None:
    """The checksums of a PNG, which decoding passes over; afterwards the image has to be opened anew."""
    image = _open(file)
    if image.format == "PNG":
        image.verify()
        _check_rows(file)


def _check_rows(file: BinaryIO) -> None:
    """Refuse a PNG that packs other than as many bytes as its header promises: Pillow shows black for what is missing.

    Checksums cover each chunk, not whether all are there.
    """
    file.seek(len(_PNG_SIGN))
    found, expected, unpacker = 0, 0, zlib.decompressobj()
    while len(start := file.read(8)) == 8:
        length, name = struct.unpack(">I4s", start)
        content = file.read(length)
        file.seek(4, os.SEEK_CUR)
        if name == b"IHDR":
            expected = _num_bytes(*struct.unpack(">IIBBBBB", content[:13]))
        while name == b"IDAT" and content and found <= expected:
            found += len(unpacker.decompress(content, _BLOCK))
            content = unpacker.unconsumed_tail
    if found != expected:
        raise ValueError(
            f"holds {'more' if found > expected else 'less'} than the {expected} bytes its header promises"
        )


def _num_bytes(width: int, height: int, depth: int, kind: int, _: int, __: int, interlaced: int) -> int:
    """Of all rows, each of which begins with the number of its filter; interlaced they are those of seven pictures."""
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sizes = [(-((x - width) // dx), -((y - height) // dy)) for x, y, dx, dy in passes]
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if min(columns, rows) > 0)


def _check_kind(image: Image.Image) -> None:
    pages = getattr(image, "n_frames", 1) if image.format in ("TIFF", "PNG") else 1
    if pages > 1:
        raise ValueError(f"found {pages} pages, expected one image")
    if image.mode not in (*_GREY, *_DEEP_GREY, *_COLOURS, *_WITH_ALPHA):
        raise ValueError(f"found colours of kind {image.mode}, expected grey or RGB")


def _lost_depth(image: Image.Image) -> str:
    """Pillow keeps 16 bits of grey, but not of colours."""
    lost = image.mode not in _DEEP_GREY and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))
    return "16 bits per colour, of which 8 are kept" if lost else ""


def _pixels(image: Image.Image) -> tuple[NDArray[Any], str]:
    if image.mode in _DEEP_GREY:
        return np.asarray(image), ""
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        with_alpha = np.asarray(image.convert("LA" if image.mode in (*_GREY, "LA", "La") else "RGBA"))
        if (with_alpha[..., -1] < 255).any():
            raise ValueError("found transparent pixels, expected an image without an alpha channel")
        pixels = with_alpha[..., :-1]
        return pixels[..., 0] if pixels.shape[-1] == 1 else pixels, "an opaque alpha channel, which is dropped"
    return np.asarray(image.convert("L" if image.mode in _GREY else "RGB")), ""
