"""Pictures of cases: whole files, labels in colour where they are, nothing left behind by a failure."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from conftest import Cli, Finished
from voxscale.config.data import Data
from voxscale.config.schema import Config
from voxscale.data.geometry import make_geometry
from voxscale.data.preprocess import PreparedCase
from voxscale.data.show import COLOURS, draw_augmented, draw_case, save_pictures

PANEL = 224, 240  # width, height of one plane with its caption and border
EDGE, BORDER, CAPTION = 220, 2, 18


def prepared_case(label: NDArray[np.uint8] | None, image: NDArray[Any] | None = None) -> PreparedCase:
    if image is None:
        assert label is not None
        image = np.random.default_rng(0).normal(size=(1, *label.shape))
    image = image.astype(np.float32)
    return PreparedCase(image, label, make_geometry(image, np.eye(4), Data(source="x")))


def panel(picture: NDArray[np.uint8], row: int, column: int) -> NDArray[np.uint8]:
    """The slice in a panel, without caption and border; the volumes here are cubes, so slices fill their panels."""
    left, top = column * PANEL[0] + BORDER, row * PANEL[1] + CAPTION
    return picture[top : top + EDGE, left : left + EDGE]


def coloured(pixels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which pixels are no shade of grey."""
    return np.asarray(pixels.max(axis=-1).astype(int) - pixels.min(axis=-1) > 20)


def test_labels_are_in_colour_where_they_are_and_nowhere_else() -> None:
    """Two blocks of black voxels in noise, seen from all three sides: left is low, the second axis points up."""
    label = np.zeros((20, 20, 20), np.uint8)
    label[2:10, 4:16, 6:18], label[10:16, 4:16, 6:18] = 1, 3
    image = np.random.default_rng(0).uniform(50, 100, (1, 20, 20, 20))
    image[0][label > 0] = 0
    picture = next(draw_case(prepared_case(label, image), ["CT"]))
    assert picture.shape == (PANEL[1], 3 * PANEL[0], 3)
    step = EDGE // 20
    seen = panel(picture, 0, 2)  # a plane z: x to the right, y upwards
    middle = slice(EDGE - 11 * step, EDGE - 9 * step)
    for columns, value in ((slice(4 * step, 8 * step), 1), (slice(12 * step, 14 * step), 3)):
        assert np.allclose(seen[middle, columns], 0.45 * COLOURS[value - 1], atol=6)
    for column, (x, y) in enumerate(
        [(slice(4, 16), slice(6, 18)), (slice(2, 16), slice(6, 18)), (slice(2, 16), slice(4, 16))]
    ):
        tinted = coloured(panel(picture, 0, column))
        inside = np.zeros((EDGE, EDGE), bool)
        inside[EDGE - y.stop * step : EDGE - y.start * step, x.start * step : x.stop * step] = True
        near = np.zeros((EDGE, EDGE), bool)
        near[EDGE - (y.stop + 2) * step : EDGE - (y.start - 2) * step, (x.start - 2) * step : (x.stop + 2) * step] = (
            True
        )
        assert tinted[inside].mean() > 0.9
        assert not tinted[~near].any()


@pytest.mark.parametrize(
    "places", [[(3, 17, 9)], [(1, 2, 3), (22, 21, 20)], [(23, 0, 23)]], ids=["one voxel", "far apart", "a corner"]
)
def test_the_first_picture_passes_through_what_is_labelled(places: list[tuple[int, int, int]]) -> None:
    label = np.zeros((24, 24, 24), np.uint8)
    for place in places:
        label[place] = 1
    picture = next(draw_case(prepared_case(label), ["CT"]))
    assert all(coloured(panel(picture, 0, column)).any() for column in range(3))


def test_the_scroll_goes_from_end_to_end() -> None:
    """The first and last slices are coloured; the scroll begins and ends with them."""
    label = np.zeros((16, 16, 16), np.uint8)
    label[:, :, 0] = label[:, :, 15] = 1
    _, *scroll = draw_case(prepared_case(label), ["CT"])
    shows = [bool(coloured(panel(picture, 0, 2)).all()) for picture in scroll]
    assert shows[0]
    assert shows[-1]
    assert not all(shows)


def test_a_row_for_each_channel_whatever_it_is_called() -> None:
    label = np.zeros((8, 9, 10), np.uint8)
    case = prepared_case(label, np.random.default_rng(0).normal(size=(3, 8, 9, 10)))
    for names in ([], ["T1\n\x1b[2J", "→ 日本 \udcff", "x" * 500]):
        assert next(draw_case(case, names)).shape == (3 * PANEL[1], 3 * PANEL[0], 3)


def test_without_a_label_there_is_no_colour() -> None:
    case = prepared_case(None, np.random.default_rng(0).normal(size=(1, 12, 12, 12)))
    assert not any(coloured(picture).any() for picture in draw_case(case, ["CT"]))


def test_a_constant_image_can_be_drawn(tmp_path: Path) -> None:
    label = np.ones((4, 4, 4), np.uint8)
    save_pictures(draw_case(prepared_case(label, np.zeros((1, 4, 4, 4))), ["CT"]), tmp_path / "c.png")
    with Image.open(tmp_path / "c.png") as picture:
        assert coloured(np.asarray(picture)).any()


@pytest.fixture
def show(cli_here: Cli, write_config: Callable[..., Path], tmp_path: Path) -> Callable[..., Finished]:
    """`voxscale show` to a file in the folder `out`."""

    def run(name: str, *flags: str, **fields: Any) -> Finished:
        return cli_here("show", write_config(**fields), "--out", tmp_path / "out" / name, *flags)

    return run


@pytest.mark.parametrize("flags", [[], ["--augmented"]], ids=["case", "augmented"])
def test_a_png_is_written_whole(show: Callable[..., Finished], tmp_path: Path, flags: list[str]) -> None:
    done = show("deep/c.png", "--case", "3", *flags)
    assert (done.code, done.err) == (0, "")
    path = tmp_path / "out" / "deep" / "c.png"
    assert done.out == f"case 3: wrote {path}\n"
    with Image.open(path) as picture:
        picture.load()
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        assert picture.size == ((4 * PANEL[0], 3 * PANEL[1]) if flags else (3 * PANEL[0], PANEL[1]))
        assert coloured(np.asarray(picture)).any()
    assert [file.name for file in path.parent.iterdir()] == ["c.png"]


@pytest.mark.parametrize(("flags", "frames"), [([], 32), (["--augmented"], 16)], ids=["case", "augmented"])
def test_a_gif_scrolls(show: Callable[..., Finished], tmp_path: Path, flags: list[str], frames: int) -> None:
    """One frame for each of 32 places, or for each slice of a patch; equal neighbours may be one, shown for longer."""
    assert show("c.GIF", *flags).code == 0
    with GifImageFile(tmp_path / "out" / "c.GIF") as picture:
        assert picture.size == ((4 * PANEL[0], 3 * PANEL[1]) if flags else (3 * PANEL[0], PANEL[1]))
        shown_ms, colours = 0, False
        assert picture.n_frames > frames // 2
        for frame in range(picture.n_frames):
            picture.seek(frame)
            shown_ms += picture.info["duration"]
            colours |= bool(coloured(np.asarray(picture.convert("RGB"))).any())
    assert shown_ms == 100 * frames
    assert colours


def test_json_says_what_was_drawn(show: Callable[..., Finished], tmp_path: Path) -> None:
    done = show("c.png", "--json", "--case", "7", data__size=[20, 18, 16])
    assert done.json == {"case": "7", "file": str(tmp_path / "out" / "c.png"), "shape": [20, 18, 16]}


def test_augmented_patches_are_those_of_the_seed(show: Callable[..., Finished], tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "none": {"augment": "none"}, "seed": {"train__seed": 5}}
    for name, fields in asked.items():
        assert show(f"{name}.png", "--augmented", **fields).code == 0
    first, again, plain, other = ((tmp_path / "out" / f"{n}.png").read_bytes() for n in asked)
    assert first == again
    assert len({first, plain, other}) == 3


def test_whole_volumes_can_be_augmented(show: Callable[..., Finished], tmp_path: Path) -> None:
    done = show("full.png", "--augmented", patches__size="full", patches__foreground=0.0)
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / "out" / "full.png").exists()


def test_whole_volumes_are_as_large_as_in_training(
    show: Callable[..., Finished], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest case decides, in whole strides, of whichever case is drawn."""
    folder, sizes = shutil.copytree(dataset, tmp_path / "copy"), list[tuple[int, ...]]()
    for kind, voxels in (("img", np.random.default_rng(0).normal(size=(24, 33, 16))), ("seg", np.ones((24, 33, 16)))):
        nib.save(nib.Nifti1Image(voxels.astype(np.int16), np.eye(4)), folder / f"{kind}large.nii.gz")

    def note(prepared: PreparedCase, config: Config, size: tuple[int, ...]) -> Iterator[NDArray[np.uint8]]:
        sizes.append(size)
        return draw_augmented(prepared, config, size)  # type: ignore[arg-type]

    monkeypatch.setattr("voxscale.data.show.draw_augmented", note)
    full = {"data__source": str(folder), "data__store": str(tmp_path / "store"), "patches__size": "full"}
    assert show("full.png", "--augmented", "--case", "3", **full).code == 0
    assert show("one.png", "--augmented", "--case", "3", **full, data__size=[16, 20, 16]).code == 0
    assert sizes == [(24, 34, 16), (16, 20, 16)]


def test_a_folder_is_no_picture(show: Callable[..., Finished], tmp_path: Path) -> None:
    (tmp_path / "out" / "c.png").mkdir(parents=True)
    done = show("c.png")
    assert done.code == 2
    assert f"--out {tmp_path / 'out' / 'c.png'}: found a folder, expected a file" in done.err
    assert not list((tmp_path / "out" / "c.png").iterdir())


def test_the_case_is_drawn_as_it_will_be_trained_on(tmp_path: Path, cli_here: Cli) -> None:
    """A file stored from left to right and from right to left gives one picture."""
    pictures = []
    for name, flip in (("a", 1), ("b", -1)):
        folder = tmp_path / name
        folder.mkdir()
        label = np.zeros((16, 16, 16), np.uint8)
        label[2:6, 3:9, 4:8] = 1
        image = np.random.default_rng(0).integers(1, 99, label.shape).astype(np.int16)
        affine = np.diag([flip, 1, 1, 1.0])
        affine[0, 3] = 0 if flip > 0 else 15
        for kind, voxels in (("img", image), ("seg", label)):
            nib.save(nib.Nifti1Image(voxels[::flip], affine), folder / f"{kind}1.nii.gz")
        assert cli_here("show", folder, "--out", tmp_path / f"{name}.png").code == 0
        pictures.append((tmp_path / f"{name}.png").read_bytes())
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize(
    ("name", "flags", "code", "words"),
    [
        ("c.png", ["--case", "33"], 3, ["--case 33: no such case among 12", "e.g. --case 3"]),
        ("c.png", ["--case", "3\n"], 3, ["no such case"]),
        ("c.jpg", [], 2, ["found .jpg, expected .png or .gif"]),
        ("c", [], 2, ["found no ending, expected .png or .gif"]),
        ("c.png.txt", ["--case", "33"], 2, ["expected .png or .gif"]),
        (
            "c.png",
            ["--augmented", "patches.size=full", "augment=[{name: rotate90, axes: [0, 2]}]"],
            2,
            ["rotate90 in axes [0, 2] needs equal patches.size there, found 24 and 16"],
        ),
        ("c.png", ["--augmented", "data.slices={z: [40, null]}"], 3, ["leaves nothing of 16 slices"]),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_nothing_written(
    show: Callable[..., Finished], tmp_path: Path, name: str, flags: list[str], code: int, words: list[str]
) -> None:
    done = show(name, *flags)
    assert done.code == code
    assert all(word in done.err for word in words), done.err
    assert "  fix: " in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [[], ["--augmented"]], ids=["case", "augmented"])
def test_a_damaged_case_is_refused_and_an_older_picture_kept(
    show: Callable[..., Finished], dataset: Path, tmp_path: Path, flags: list[str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(dataset, folder)
    damaged = folder / "img5.nii.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "c.png").write_bytes(b"older")
    done = show("c.png", "--case", "5", *flags, data__source=str(folder))
    assert done.code == 3
    assert "case 5: img5.nii.gz: found a damaged file" in done.err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["c.png"]
    assert (tmp_path / "out" / "c.png").read_bytes() == b"older"
    assert show("c.png", "--case", "4", *flags, data__source=str(folder)).code == 0, "the others can be drawn"


@pytest.mark.parametrize("pictures_drawn", [0, 1, 3])
def test_a_failure_while_drawing_leaves_nothing_behind(tmp_path: Path, pictures_drawn: int) -> None:
    def drawing() -> Iterator[NDArray[np.uint8]]:
        for _ in range(pictures_drawn):
            yield np.zeros((8, 8, 3), np.uint8)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        save_pictures(drawing(), tmp_path / "c.gif")
    assert list(tmp_path.iterdir()) == []
