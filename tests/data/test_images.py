"""2D images: read as they are stored, or refused with a reason."""

from __future__ import annotations

import random
import struct
import threading
import warnings
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from layouts import mutants
from voxscale.data.cases import Case
from voxscale.data.images import read_image
from voxscale.data.volumes import examine_case, read_case

GREY = np.random.default_rng(0).integers(0, 256, (6, 9), dtype=np.uint8)  # 9 wide, 6 high
COLOUR = np.random.default_rng(1).integers(0, 256, (6, 9, 3), dtype=np.uint8)
DEEP = np.random.default_rng(2).integers(0, 65536, (6, 9), dtype=np.uint16)


def save(path: Path, pixels: NDArray[Any]) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def case_of(path: Path) -> Case:
    return Case("c", (path,), None, "c")


@pytest.mark.parametrize("ending", [".png", ".bmp", ".tif", ".PNG", ".tiff"])
@pytest.mark.parametrize("pixels", [GREY, COLOUR], ids=["grey", "colour"])
def test_a_picture_is_a_volume_of_one_slice_and_x_is_its_width(
    tmp_path: Path, ending: str, pixels: NDArray[Any]
) -> None:
    raw = read_case(case_of(save(tmp_path / f"i{ending}", pixels)))
    assert raw.image_cxyz.shape == (pixels.size // 54, 9, 6, 1)
    assert np.array_equal(raw.affine, np.eye(4))
    for y, x in ((0, 0), (0, 8), (5, 0), (2, 7)):
        assert np.array_equal(raw.image_cxyz[:, x, y, 0], np.atleast_1d(pixels[y, x]))


@pytest.mark.parametrize("ending", [".png", ".tif"])
def test_sixteen_bits_of_grey_are_kept(tmp_path: Path, ending: str) -> None:
    raw, findings = examine_case(case_of(save(tmp_path / f"i{ending}", DEEP)))
    assert raw is not None
    assert findings == []
    assert np.array_equal(raw.image_cxyz[0, :, :, 0], DEEP.T)


@pytest.mark.parametrize("ending", [".jpg", ".jpeg"])
@pytest.mark.parametrize("pixels", [GREY, COLOUR], ids=["grey", "colour"])
def test_photographs(tmp_path: Path, ending: str, pixels: NDArray[Any]) -> None:
    smooth = np.broadcast_to(
        np.linspace(0, 255, 9)[:, None] if pixels.ndim == 3 else np.linspace(0, 255, 9), pixels.shape
    )
    path = tmp_path / f"i{ending}"
    Image.fromarray(smooth.astype(np.uint8)).save(path, quality=95)
    pixels_read, lost = read_image(path)
    assert pixels_read.shape == (9, 6, 1, *pixels.shape[2:])
    assert lost == ""
    assert np.abs(pixels_read[:, 0, 0].T.astype(float) - np.linspace(0, 255, 9)).max() < 40


def test_palettes_and_single_bits(tmp_path: Path) -> None:
    few = COLOUR // 128 * 255
    Image.fromarray(few).convert("P", palette=Image.Palette.ADAPTIVE).save(tmp_path / "p.png")
    assert np.array_equal(read_image(tmp_path / "p.png")[0][:, :, 0], few.swapaxes(0, 1))
    Image.fromarray(GREY > 128).save(tmp_path / "b.png")
    assert np.array_equal(read_image(tmp_path / "b.png")[0][:, :, 0], (GREY > 128).T * 255)


@pytest.mark.parametrize("pixels", [GREY[..., None], COLOUR], ids=["grey", "colour"])
def test_an_alpha_channel_is_dropped_only_where_it_hides_nothing(tmp_path: Path, pixels: NDArray[Any]) -> None:
    alpha = np.full((6, 9, 1), 255, np.uint8)
    raw, (finding,) = examine_case(case_of(save(tmp_path / "a.png", np.concatenate([pixels, alpha], axis=2))))
    assert raw is not None
    assert np.array_equal(raw.image_cxyz[..., 0], pixels.transpose(2, 1, 0))
    assert (finding.level, finding.code, finding.file) == ("warning", "image-kind", "a.png")
    alpha[3, 3] = 254
    raw, (finding,) = examine_case(case_of(save(tmp_path / "t.png", np.concatenate([pixels, alpha], axis=2))))
    assert raw is None
    assert (finding.level, finding.file) == ("error", "t.png")
    assert "transparent" in finding.found


def test_a_transparent_colour_is_transparent(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "k.png", transparency=int(GREY[2, 2]))
    with pytest.raises(ValueError, match="transparent"):
        read_image(tmp_path / "k.png")


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *, interlaced: int = 0) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 7])
def test_rows_that_are_missing_are_not_shown_as_black(tmp_path: Path, rows: int) -> None:
    """Every checksum is right, and Pillow finds nothing wrong."""
    content = b"".join(b"\0" + row.tobytes() for row in [*GREY, GREY[0]][:rows])
    (tmp_path / "r.png").write_bytes(png(9, 6, 8, 0, content))
    with pytest.raises(ValueError, match=r"holds (less|more) than the 60 bytes its header promises|truncated"):
        read_image(tmp_path / "r.png")


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 2), (9, 6), (8, 8), (17, 5)])
def test_interlaced_pictures(tmp_path: Path, width: int, height: int) -> None:
    picture = np.random.default_rng(4).integers(0, 256, (height, width), dtype=np.uint8)
    starts = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    parts = [picture[y::dy, x::dx] for x, y, dx, dy in starts]
    rows = b"".join(b"\0" + row.tobytes() for part in parts if part.size for row in part)
    (tmp_path / "i.png").write_bytes(png(width, height, 8, 0, rows, interlaced=1))
    assert np.array_equal(read_image(tmp_path / "i.png")[0][:, :, 0], picture.T)
    (tmp_path / "i.png").write_bytes(png(width, height, 8, 0, rows[:-1], interlaced=1))
    with pytest.raises(ValueError, match=r"less than the \d+ bytes its header promises|truncated"):
        read_image(tmp_path / "i.png")


def test_a_picture_without_pixels_is_refused_in_words(tmp_path: Path) -> None:
    whole = png(9, 6, 8, 0, b"")
    (tmp_path / "n.png").write_bytes(whole[:33] + whole[-12:])
    with pytest.raises(ValueError, match="parts contradict each other, or some are missing|less than the 60 bytes"):
        read_image(tmp_path / "n.png")


def test_sixteen_bits_of_colour_are_said_to_be_cut(tmp_path: Path) -> None:
    deep = np.random.default_rng(3).integers(0, 65536, (6, 9, 3)).astype(">u2")
    (tmp_path / "d.png").write_bytes(png(9, 6, 16, 2, b"".join(b"\0" + row.tobytes() for row in deep)))
    raw, (finding,) = examine_case(case_of(tmp_path / "d.png"))
    assert raw is not None
    assert np.array_equal(raw.image_cxyz[..., 0], (deep >> 8).transpose(2, 1, 0))
    assert (finding.level, finding.found) == ("warning", "16 bits per colour, of which 8 are kept")


@pytest.mark.parametrize("edge", [10_000, 40_000], ids=["nearly a bomb", "a bomb"])
def test_a_bomb_is_refused_from_its_header_alone(tmp_path: Path, edge: int, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "b.png").write_bytes(png(edge, edge, 8, 0, bytes(1000)))
    _, (finding,) = examine_case(case_of(tmp_path / "b.png"))
    assert (finding.level, finding.code, finding.file) == ("error", "unreadable", "b.png")
    assert "bomb" in finding.found
    assert str(Image.MAX_IMAGE_PIXELS) in finding.found
    assert not [(str(each.message), each.filename, each.lineno) for each in recwarn]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB"])
def test_other_colours_are_refused(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (4, 4)).save(tmp_path / "c.tif")
    assert Image.open(tmp_path / "c.tif").mode == mode, "Pillow turned it into RGB by itself"
    with pytest.raises(ValueError, match=f"colours of kind {mode}"):
        read_image(tmp_path / "c.tif")


@pytest.mark.parametrize("kind", ["png", "jpg", "tif"])
def test_a_picture_stands_as_viewers_show_it(kind: str, tmp_path: Path) -> None:
    """Orientation 6: the camera was turned, so the picture is shown a quarter turn to the right."""
    half = np.zeros((16, 32), np.uint8)
    half[:, :16] = 255  # the left half, which is shown on top
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(half).save(tmp_path / f"t.{kind}", exif=exif)
    pixels, _ = read_image(tmp_path / f"t.{kind}")
    assert pixels.shape == (16, 32, 1)
    assert pixels[:, :16].min() > 200
    assert pixels[:, 16:].max() < 50


def test_several_pages_are_no_image(tmp_path: Path) -> None:
    pages = [Image.fromarray(GREY), Image.fromarray(GREY)]
    pages[0].save(tmp_path / "p.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match="found 2 pages"):
        read_image(tmp_path / "p.tif")


@pytest.mark.parametrize("name", ["i.png", "i.jpg", "i.bmp", "i.tif"])
@pytest.mark.parametrize("content", [b"", b"rubbish" * 100, bytes(5000), b"<html>404</html>", b"GIF89a" + bytes(50)])
def test_what_is_no_image_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    _, (finding,) = examine_case(case_of(tmp_path / name))
    assert (finding.code, finding.file) == ("unreadable", name)
    assert str(tmp_path) not in str(finding)


def test_of_600_damaged_pngs_none_is_silently_wrong(tmp_path: Path) -> None:
    smooth = np.clip(np.random.default_rng(4).normal(100, 5, (40, 50)), 0, 255).astype(np.uint8)
    content = save(tmp_path / "whole.png", smooth).read_bytes()
    path = tmp_path / "damaged.png"
    counts = {"same": 0, "refused": 0}
    for damaged in mutants(content, 600, seed=1):
        path.write_bytes(damaged)
        try:
            pixels, _ = read_image(path)
        except ValueError as error:
            counts["refused"] += 1
            assert str(error)
        else:
            assert np.array_equal(pixels[:, :, 0], smooth.T)
            counts["same"] += 1
    assert counts["refused"] > 500


@pytest.mark.parametrize("kind", ["jpg", "bmp", "tif"])
def test_cut_images_are_refused_and_rubbish_never_ends_otherwise_than_in_words(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """These have no checksum: other values may be read, but never half an image."""
    buffer = BytesIO()
    options = {"compression": "tiff_lzw"} if kind == "tif" else {}
    noise = np.random.default_rng(5).integers(0, 256, (40, 50), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format={"jpg": "JPEG", "bmp": "BMP", "tif": "TIFF"}[kind], **options)
    content, path, rng = buffer.getvalue(), tmp_path / f"d.{kind}", random.Random(6)
    for _ in range(80):
        path.write_bytes(content[: rng.randrange(len(content) - 100)])
        with pytest.raises(ValueError):
            read_image(path)
    for damaged in mutants(content, 200, seed=7):
        path.write_bytes(damaged)
        try:
            read_image(path)
        except ValueError as error:
            assert str(error)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == "" or kind == "tif", "libtiff alone speaks for itself"
    assert not [(str(each.message), each.filename, each.lineno) for each in recwarn]


def test_many_threads_leave_the_filters_of_warnings_as_they_were(tmp_path: Path) -> None:
    before = list(warnings.filters)
    path = save(tmp_path / "i.png", GREY)
    threads = [threading.Thread(target=lambda: [read_image(path) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before
