"""Pages in a real browser: each kind opens without an error, asks the network for nothing, and does what it offers.

Screenshots are kept in the folder that REPORT_SCREENSHOTS names, else in build/screenshots.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from conftest import REPOSITORY, Cli
from lab.debian import require
from report.looking import FAINT, share_of_label
from report.pages import (
    HOSTILE,
    ended_after_a_step,
    killed_search,
    train_outcome,
    train_segmentation,
    with_hostile_names,
    write_folds,
    write_scale,
    write_search,
)
from voxscale.infer.previews import make_preview
from voxscale.report.write import write_report

sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.browser
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
FIRST_TINT = (86, 180, 233)


@dataclass
class Opened:
    """A page, and what it complained of or asked for."""

    page: sync_api.Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert not self.complaints
        assert [url for url in self.requests if not url.startswith(("file:", "data:"))] == []
        assert sum(url.startswith("file:") for url in self.requests) == 1


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    require(["chromium"], ["chromium"])
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: sync_api.Browser) -> Iterator[Open]:
    contexts = []

    def open_it(path: Path, *, size: str = "desktop", colours: str = "light") -> Opened:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)
        contexts.append(context)
        opened = Opened(context.new_page())
        opened.page.on("console", lambda said: opened.complaints.append(said.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(path.as_uri())
        opened.page.wait_for_selector("footer", state="attached")
        return opened

    yield open_it
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def segmented(cli_here: Cli, work: Path, dataset: Path) -> Path:
    return train_segmentation(cli_here, work, dataset, "balls")


@pytest.fixture(scope="module")
def pages(cli_here: Cli, work: Path, dataset: Path, segmented: Path) -> dict[str, Path]:
    """A page of each kind."""
    other = train_segmentation(cli_here, work, dataset, "faster", optimizer__lr=0.02, validate__previews=0)
    assert not (other / "previews").exists()
    search = write_search(work / "search", {0.002: segmented, 0.02: other})
    (work / "bad.py").write_text("raise SystemExit(3)")
    assert cli_here("launch", work / "bad.py", "--devices", 1, "--run", work / "script").code == 3
    evaluated = Path(shutil.copytree(segmented, work / "evaluated", symlinks=True))
    assert cli_here("evaluate", evaluated, "--name", "again").code == 0
    folders = {
        "script": [work / "script"],
        "evaluation": [evaluated],
        "killed-search": [killed_search(segmented, work / "killed-search")],
        "segmentation": [segmented],
        **{task: [train_outcome(cli_here, work, task)] for task in ("survival", "regression", "classification")},
        "comparison": [ended_after_a_step(segmented, work / "stopped-at-once"), segmented, other],
        "search": [search],
        "scale": [write_scale(work / "scale")],
        "folds": [write_folds(work / "folds", [segmented, segmented])],
        "failed": [ended_after_a_step(segmented, work / "failed")],
        "hostile": [with_hostile_names(segmented, work / "<img src=x onerror=alert(1)>")],
    }
    made = {}
    for kind, given in folders.items():
        out = work / f"{kind}.html"
        done = cli_here("report", *given, "--out", out, "--json")
        assert (done.code, done.json["report"]) == (0, str(out)), done.err
        made[kind] = out
    return made


HEADINGS = {
    "segmentation": [
        "Training loss",
        "Validation: dice",
        "Of the validation cases",
        "hd95 (mm) of the validation cases",
    ],
    "survival": [
        "Kaplan–Meier by predicted risk, validation cases",
        "Calibration, validation cases",
        "Time-dependent AUC, validation cases",
    ],
    "regression": ["age, validation cases", "calcium, validation cases"],
    "classification": ["Confusion, validation cases", "ROC, validation cases"],
    "comparison": ["Runs", "Validation: dice/mean", "Cases: dice/mean", "Validation over time: dice/mean"],
    "folds": ["All folds together", "Cases by the fold that held them out", "Runs"],
    "failed": ["Training loss", "Learning rate", "Seconds per step"],
    "search": ["Parallel coordinates", "dice/mean over optimizer.lr", "Trials", "Best config"],
    "scale": ["Speed-up over devices", "What a step is spent on", "All figures"],
    "hostile": ["Training loss"],
    "script": [],
    "evaluation": ["Evaluations", "again: validation cases", "Evaluation again"],
    "killed-search": ["Parallel coordinates", "dice/mean over optimizer.lr", "Trials"],
}
OF_RUNS = ["Where the time goes", "Peak memory", "Plan against measured", "Environment", "Cases"]


@pytest.mark.parametrize("kind", HEADINGS)
@pytest.mark.parametrize("size", SIZES)
def test_each_kind_opens_and_fits(kind: str, size: str, pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages[kind], size=size)
    opened.page.wait_for_timeout(150)  # for pictures to be unpacked
    headings = opened.page.locator("h2, h3").all_text_contents()
    of_run = OF_RUNS if kind in ("segmentation", "survival", "regression", "classification") else []
    assert set(HEADINGS[kind]) | set(of_run) <= set(headings), headings
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "the page scrolls sideways"
    whole = (
        "[...document.querySelectorAll('.plain .scroll')].every((node) => node.scrollHeight <= node.clientHeight + 1)"
    )
    assert opened.page.evaluate(whole), "a table of names is seen to its end"
    if kind not in ("regression", "script"):
        opened.page.wait_for_selector(".plot svg path.curve", state="attached")
    folder = Path(os.environ.get("REPORT_SCREENSHOTS") or REPOSITORY / "build" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    for colours in ("light", "dark"):
        opened.page.emulate_media(color_scheme=colours)
        assert opened.page.evaluate(FAINT) == []
        opened.page.screenshot(path=folder / f"{kind}-{size}-{colours}.png", full_page=True)
    opened.check()


def test_the_table_sorts_worst_cases_first_and_a_row_opens_its_case(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["segmentation"])
    table = opened.page.locator("table", has=opened.page.get_by_role("button", name="dice/mean"))
    headings = table.locator("th").all_text_contents()
    assert headings == ["case", "split", "dice/mean ↑", "dice/ball", "hd95/mean (mm)", "hd95/ball (mm)"]
    column = headings.index("dice/mean ↑")

    def values() -> list[float]:
        return [float(text) for text in table.locator(f"tbody td:nth-child({column + 1})").all_text_contents()]

    assert values() == sorted(values()) and len(set(values())) == 3
    table.get_by_role("button", name="dice/mean").click()
    assert values() == sorted(values(), reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1
    table.get_by_role("button", name="case").click()
    last = table.locator("tbody tr").last
    name = last.locator("td").first.text_content()
    shown = "name => document.querySelector('.viewer select').selectedOptions[0].text.startsWith(name)"
    last.click()
    opened.page.wait_for_function(shown, arg=name)
    opened.page.wait_for_function("document.querySelectorAll('tr[aria-current]').length === 1")
    assert table.locator("tr[aria-current] td").first.text_content() == name
    first = table.locator("tbody tr").first
    first.focus()
    opened.page.keyboard.press("Space")
    opened.page.wait_for_function(shown, arg=first.locator("td").first.text_content())
    opened.check()


@pytest.mark.parametrize("task", ["survival", "regression", "classification"])
def test_the_case_that_is_shown_first_is_the_first_of_the_table(
    task: str, pages: dict[str, Path], open_page: Open
) -> None:
    opened = open_page(pages[task])
    opened.page.wait_for_function("document.querySelectorAll('tr[aria-current]').length === 1")
    rows = opened.page.locator("tbody tr.opens")
    assert rows.count() > 2
    assert rows.first.get_attribute("aria-current") == "true"
    by = "risk" if task == "survival" else "error"
    order = opened.page.get_by_text("In the order of")
    assert order.text_content() == f"In the order of {by}, highest first."
    opened.page.get_by_role("button", name="case", exact=True).click()
    assert order.text_content() == "In the order of case, from the beginning."
    opened.check()


def test_numbers_that_stand_above_each_other_have_as_many_digits(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["segmentation"])
    cells = opened.page.locator("td.number:nth-child(3)").all_text_contents()
    assert len(cells) == 3 and {len(cell.partition(".")[2]) for cell in cells} == {3}, cells
    ends = opened.page.locator(".spread .ends").first.locator("span").all_text_contents()
    assert ends == ["0", "1"]
    opened.check()


def test_a_run_of_one_step_is_seen_and_steps_are_whole(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["failed"])
    plot = opened.page.locator(".plot").first
    assert plot.locator("circle.dot").count() == 1
    below = [text for text in plot.locator("text").all_text_contents() if text.isdigit()]
    assert below[:3] == ["0", "1", "2"]
    assert "the loss is nan" in opened.page.locator(".notice.failed").text_content()
    opened.check()


def test_slices_planes_and_overlay_by_key_wheel_and_button(
    pages: dict[str, Path], segmented: Path, open_page: Open
) -> None:
    opened = open_page(pages["segmentation"])
    page, panels, output = opened.page, opened.page.locator(".panels"), opened.page.locator("output")
    page.wait_for_function("document.querySelector('output').textContent.includes('/')")
    index = json.loads((segmented / "previews" / "index.json").read_text())
    shape = index["cases"][0]["shape"]

    def place() -> tuple[int, int]:
        at, count = output.text_content().split(" / ")
        return int(at), int(count)

    def canvas(number: int = 0) -> np.ndarray:
        url = page.locator(".panels canvas").nth(number).evaluate("node => node.toDataURL()")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))

    first, count = place()
    assert count == shape[2]
    panels.focus()
    page.keyboard.press("ArrowDown")
    assert place() == (first - 1, count)
    page.keyboard.press("ArrowUp")
    panels.hover()
    page.mouse.wheel(0, 120)
    page.wait_for_function("at => document.querySelector('output').textContent.startsWith(at)", arg=str(first + 1))
    page.keyboard.press("ArrowDown")
    assert place() == (first, count)

    taken = "keys => keys.filter((key) => !document.querySelector('.panels').dispatchEvent("
    taken += "new KeyboardEvent('keydown', { ...key, cancelable: true })))"
    own = [{"key": "p", "ctrlKey": True}, {"key": "o", "metaKey": True}, {"key": "ArrowLeft", "altKey": True}]
    assert page.evaluate(taken, own) == [], "the browser's shortcuts"
    assert place() == (first, count)

    for _ in range(count):
        page.keyboard.press("ArrowDown")
    assert place() == (1, count)
    scrolled = page.evaluate("scrollY")
    panels.hover()
    page.mouse.wheel(0, -120)
    page.wait_for_function("before => scrollY < before", arg=scrolled)  # it is at its end: the page goes on
    assert place() == (1, count)
    for _ in range(first - 1):
        page.keyboard.press("ArrowUp")

    page.locator("input[aria-label=Opacity]").evaluate(
        "node => { node.value = 1; node.dispatchEvent(new Event('input')); }"
    )
    shown = canvas()
    tinted = np.all(np.abs(shown.astype(int) - FIRST_TINT) < 3, axis=2).mean()
    assert tinted == pytest.approx(share_of_label(segmented, index["cases"][0], first - 1, shown.shape), rel=0.08)
    page.keyboard.press("o")
    assert not np.array_equal(canvas(), shown)
    overlay = page.get_by_role("button", name="Overlay")
    assert overlay.get_attribute("aria-pressed") == "false"
    overlay.click()
    assert np.array_equal(canvas(), shown)

    page.get_by_label("Plane").select_option("sagittal")
    assert place()[1] == shape[0]
    page.get_by_label("View").select_option("errors")
    assert page.locator(".panels figcaption").all_text_contents() == ["image", "errors"]
    panels.focus()
    plane = page.get_by_label("Plane")
    for name, axis, sides in (("axial", 2, "→ R ↑ A"), ("coronal", 1, "→ R ↑ S"), ("sagittal", 0, "→ A ↑ S")):
        page.keyboard.press("p")
        assert (plane.input_value(), place()[1]) == (name, shape[axis])
        assert page.locator(".sides").text_content() == sides
    at, count = place()
    page.keyboard.press("PageUp")
    assert place() == (at + 5, count)
    page.keyboard.press("PageDown")
    assert place() == (at, count)
    page.keyboard.press("PageDown")
    assert place() == (max(1, at - 5), count)
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.viewer select').value === '1'")
    opened.check()


def with_previews(run: Path, to: Path, label: np.ndarray, predicted: np.ndarray, **index: object) -> Path:
    """A copy of a run that shows one case, with these codes."""
    shutil.copytree(run, to, symlinks=True)
    preview = make_preview(np.zeros((1, *label.shape), np.float32), (label, predicted), (1.0, 1.0, 1.0))
    (to / "previews" / "one.jpg").write_bytes(preview.image)
    (to / "previews" / "one.png").write_bytes(preview.codes or b"")
    about = {**preview.about, "case": "one", "split": "val", "image": "one.jpg", "codes": "one.png"}
    about |= {"axes": index.pop("axes", "RAS")}
    (to / "previews" / "index.json").write_text(json.dumps({"schema": 1, **index, "cases": [about]}))
    return write_report([to])


def colours_of(page: sync_api.Page) -> set[tuple[int, ...]]:
    """In the last picture, with an overlay that hides what is below."""
    page.wait_for_function("document.querySelector('output').textContent.includes('/')")  # it is unpacked
    page.locator("input[aria-label=Opacity]").evaluate(
        "node => { node.value = 1; node.dispatchEvent(new Event('input')); }"
    )
    url = page.locator(".panels canvas").last.evaluate("node => node.toDataURL()")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))
    return {tuple(colour) for colour in np.unique(picture.reshape(-1, 3), axis=0).tolist()}


def test_errors_are_told_between_any_two_classes(segmented: Path, work: Path, open_page: Open) -> None:
    """Also between the 1st and the 32nd, whose bits fall together."""
    label, predicted = np.ones((12, 12, 6), np.uint8), np.ones((12, 12, 6), np.uint8)
    predicted[:6] = 32
    names = [f"c{number}" for number in range(40)]
    opened = open_page(with_previews(segmented, work / "many-classes", label, predicted, classes=names, exclusive=True))
    opened.page.get_by_label("View").select_option("errors")
    assert {(230, 159, 0), (0, 190, 140)} <= colours_of(opened.page), "missed, and right"
    opened.check()


def test_right_and_top_of_a_picture_lie_where_it_says(segmented: Path, work: Path, open_page: Open) -> None:
    """What is at the upper ends of all axes, R, A and S, is at the right and at the top in every plane."""
    label = np.zeros((12, 12, 12), np.uint8)
    label[8:, 8:, 8:] = 1
    opened = open_page(with_previews(segmented, work / "corner", label, label, classes=["a"], exclusive=True))
    colours_of(opened.page)
    for plane, sides in (("axial", "→ R ↑ A"), ("coronal", "→ R ↑ S"), ("sagittal", "→ A ↑ S")):
        opened.page.get_by_label("Plane").select_option(plane)
        assert opened.page.locator(".sides").text_content() == sides
        url = opened.page.locator(".panels canvas").first.evaluate("node => node.toDataURL()")
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))
        rows, columns = np.nonzero(np.all(np.abs(picture.astype(int) - FIRST_TINT) < 3, axis=2))
        assert rows.size and rows.max() < picture.shape[0] / 2 and columns.min() > picture.shape[1] / 2
    opened.check()


def test_pictures_that_are_damaged_are_said_and_the_others_shown(segmented: Path, work: Path, open_page: Open) -> None:
    run = Path(shutil.copytree(segmented, work / "damaged", symlinks=True))
    index = json.loads((run / "previews" / "index.json").read_text())
    first, _, third = index["cases"]
    for name in (first["image"], third["codes"]):
        (run / "previews" / name).write_bytes((run / "previews" / name).read_bytes()[:40])
    opened = open_page(write_report([run]))
    panels = opened.page.locator(".panels")
    said = opened.page.get_by_text("The pictures of this case are damaged.")
    said.wait_for()
    panels.focus()
    for key in ("p", "o", "ArrowUp"):
        opened.page.keyboard.press(key)
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft"):
        opened.page.keyboard.press(key)
        if opened.page.locator(".viewer select").first.evaluate("node => node.value") == "1":
            panels.locator("canvas").nth(1).wait_for()
            assert not said.is_visible()
        else:
            said.wait_for()
            assert panels.locator("canvas").count() == 0
    assert opened.page.locator("tr[aria-current] td").first.text_content() == first["case"]
    opened.check()


def test_of_overlapping_classes_those_that_no_picture_holds_are_said(
    segmented: Path, work: Path, open_page: Open
) -> None:
    label = np.full((12, 12, 6), 1, np.uint16)
    names = [f"region{number}" for number in range(11)]
    opened = open_page(
        with_previews(segmented, work / "regions", label, label, classes=names, exclusive=False, axes="SAR")
    )
    colours_of(opened.page)
    legend = opened.page.locator(".viewer .legend")
    assert legend.get_by_role("button").all_text_contents() == names[:8]
    assert "3 more are not in the pictures" in legend.text_content()
    planes = opened.page.get_by_label("Plane").locator("option").all_text_contents()
    assert planes == ["sagittal", "coronal", "axial"], "of a volume whose first axis leads upward"
    assert opened.page.locator(".sides").text_content() == "→ S ↑ A"
    opened.check()


def drawn_points(plot: sync_api.Locator) -> list[tuple[float, float]]:
    """The dots of a plot in the units of its axes, by its line from (0, 0) to (1, 1)."""
    guide = plot.locator("path.curve.guide").get_attribute("d")
    (x0, y0), (x1, y1) = [tuple(map(float, part.split())) for part in re.split("[ML]", guide)[1:]]
    dots = [[float(dot.get_attribute(name)) for name in ("cx", "cy")] for dot in plot.locator("circle.dot").all()]
    return [((x - x0) / (x1 - x0), (y - y0) / (y1 - y0)) for x, y in dots]


def card_of(opened: Opened, title: str) -> sync_api.Locator:
    return opened.page.locator("section.card", has=opened.page.get_by_role("heading", name=title, exact=True))


def test_what_is_drawn_of_outcomes_is_what_was_measured(pages: dict[str, Path], work: Path, open_page: Open) -> None:
    survival, metrics = open_page(pages["survival"]), json.loads((work / "survival" / "metrics.json").read_text())
    groups = [
        (group["predicted"], group["observed"])
        for groups in metrics["details"]["val"]["calibration"].values()
        for group in groups
        if group["observed"] is not None
    ]
    card = card_of(survival, "Calibration, validation cases")
    card.locator("circle.dot").first.wait_for(state="attached")
    assert len(groups) > 1
    assert np.allclose(drawn_points(card), groups, atol=2e-3)
    auc = {
        name.partition("/")[2]: entry["mean"] for name, entry in metrics["summary"].items() if name.startswith("auc/")
    }
    text = card_of(survival, "Time-dependent AUC, validation cases").text_content()
    assert auc
    for horizon, value in auc.items():
        assert re.search(rf"{horizon}.*{value:.3f}", text), (text, auc)
    survival.check()

    classified = open_page(pages["classification"])
    details = json.loads((work / "classification" / "metrics.json").read_text())["details"]["val"]["confusion"]
    card = card_of(classified, "Confusion, validation cases")
    assert card.locator("thead th").all_text_contents()[1:] == details["classes"]
    cells = [int(text) for text in card.locator("td b").all_text_contents()]
    assert cells == [count for row in details["cases"] for count in row]
    assert sum(cells) > 10
    classified.check()


def test_the_config_and_where_it_ran_are_told(pages: dict[str, Path], segmented: Path, open_page: Open) -> None:
    opened = open_page(pages["segmentation"])
    config = yaml.safe_load((segmented / "config.yaml").read_text())
    starts = [json.loads(line) for line in (segmented / "events.jsonl").read_text().splitlines()]
    environment = next(event["environment"] for event in starts if event["event"] == "start")
    shown = card_of(opened, "Environment").locator("tr").all()
    told = {cells[0]: cells[1] for row in shown if len(cells := row.locator("td").all_text_contents()) == 2}
    assert (told["torch"], told["starts of the run"]) == (environment["torch"], "1")
    rows = opened.page.locator("section.card", has_text="Differences from").locator("tbody tr").all()
    differ = {cells[0]: cells[1:] for row in rows if (cells := row.locator("td").all_text_contents())}
    assert differ["train.epochs"][1] == str(config["train"]["epochs"]) != differ["train.epochs"][0]
    opened.check()


def test_axes_have_units_and_curves_of_many_classes_differ(
    pages: dict[str, Path], segmented: Path, work: Path, open_page: Open
) -> None:
    survival = open_page(pages["survival"])
    assert survival.page.locator(".axis-name", has_text="time (days)").count() == 1
    survival.check()
    run = Path(shutil.copytree(segmented, work / "many", symlinks=True))
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for row in rows:
        row.update({f"dice/{number}": 0.05 * number for number in range(13) if row["event"] == "validate"})
    (run / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    many = open_page(write_report([run]))
    curves = many.page.locator(".plot").nth(1).locator("path.curve")
    looks = [
        (each.evaluate("node => node.style.stroke"), each.get_attribute("stroke-dasharray")) for each in curves.all()
    ]
    assert len(looks) == len(set(looks)) == 15
    many.check()


def test_a_run_has_one_colour_and_its_state_one_line(pages: dict[str, Path], open_page: Open) -> None:
    """Also where another run, before it, has nothing to draw."""
    compared = open_page(pages["comparison"])
    shown = []
    for plot in (0, 1):
        keys = compared.page.locator(".legend").nth(plot).get_by_role("button")
        paint = "node => node.firstChild.style.background"
        shown.append({key.text_content(): key.evaluate(paint) for key in keys.all()})
    assert len(shown[0]) == 3
    assert {name: shown[0][name] for name in shown[1]} == shown[1] and len(shown[1]) == 2
    states = compared.page.locator("table").first.locator("td:nth-child(2)")
    assert states.all_text_contents() == ["done", "done", "failed"]
    assert max(each.evaluate("node => node.getClientRects().length && node.clientHeight") for each in states.all()) < 40
    compared.check()


def test_a_comparison_says_why_a_run_failed_and_what_its_numbers_are(pages: dict[str, Path], open_page: Open) -> None:
    compared = open_page(pages["comparison"])
    table = compared.page.locator("table").first
    few = ["run ↑", "state", "best", "steps", "devices", "time (s)", "dice/mean", "hd95/mean (mm)", "why"]
    assert table.locator("th").all_text_contents() == few
    lost = table.locator("tr", has_text="stopped-at-once").locator("td").all_text_contents()
    assert (lost[5], lost[-1]) == ("–", "the loss is nan at step 2")
    assert table.evaluate("node => node.scrollWidth <= node.parentNode.clientWidth"), "nothing is cut"
    compared.page.get_by_role("button", name="All columns").click()
    assert "iou/mean" in table.locator("th").all_text_contents()
    compared.check()


def test_tables_of_searches_and_scaling_have_readable_headings(pages: dict[str, Path], open_page: Open) -> None:
    search, scale = open_page(pages["search"]), open_page(pages["scale"])
    headings = search.page.locator("table").first.locator("th").all_text_contents()
    assert headings[2:] == ["dice/mean ↓", "optimizer.lr", "train.batch", "steps", "time (s)", "why"]
    table = scale.page.locator("table").first
    headings = table.locator("th").all_text_contents()
    assert headings[:6] == ["nodes × devices ↑", "scaling", "batch", "step (s)", "patches/s", "speed-up"]
    assert table.evaluate("node => node.scrollWidth <= node.parentNode.clientWidth"), "nothing is cut"
    assert scale.page.locator(".fact b").nth(2).text_content() == "97.7"
    search.check()
    scale.check()


def test_rates_that_were_chosen_are_told_apart_in_the_table(segmented: Path, work: Path, open_page: Open) -> None:
    opened = open_page(write_report([write_search(work / "rates", {0.00123: segmented, 0.00148: segmented})]))
    cells = opened.page.locator("table").first.locator("td:nth-child(4)").all_text_contents()
    assert sorted(cells) == ["0.00123", "0.00148", "1"]
    opened.check()


def test_axes_of_choices_name_these_alone(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["search"])
    parallel, scatter = opened.page.locator(".plot").first, opened.page.locator(".plot").nth(2)
    shown = parallel.locator("text").all_text_contents()
    assert shown[shown.index("train.batch") + 1 : shown.index("dice/mean")] == ["2", "4"]
    assert scatter.locator("text").all_text_contents()[:2] == ["2", "4"]
    opened.check()


def test_curves_zoom_hide_and_tell(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["segmentation"])
    plot = opened.page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    ticks = plot.locator("text").all_text_contents
    before, box = ticks(), plot.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + box["width"] * 0.4, y)
    assert "loss" in opened.page.locator(".tip").text_content()
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=4)
    opened.page.mouse.up()
    assert ticks() != before
    assert plot.get_by_role("button", name="Show all").is_visible()
    plot.locator("svg").dblclick(position={"x": 100, "y": 60})
    assert ticks() == before

    plot.focus()
    opened.page.keyboard.press("+")
    nearer = ticks()
    assert nearer != before
    opened.page.keyboard.press("ArrowRight")
    assert ticks() != nearer
    for _ in range(2):
        opened.page.keyboard.press("-")
    assert ticks() == before
    assert not plot.get_by_role("button", name="Show all").is_visible()

    compared = open_page(pages["comparison"])
    curves = compared.page.locator(".plot").first.locator("path.curve")
    count = curves.count()
    compared.page.locator(".legend").first.get_by_role("button").first.click()
    assert curves.count() < count
    opened.check()
    compared.check()


def test_a_plot_is_zoomed_as_far_as_numbers_go(pages: dict[str, Path], open_page: Open) -> None:
    """A key that is held down; the page answers all the time."""
    opened = open_page(pages["survival"])
    opened.page.set_default_timeout(5000)
    plot = card_of(opened, "Kaplan–Meier by predicted risk, validation cases").locator(".plot")
    plot.locator("path.curve").first.wait_for(state="attached")
    all_shown = plot.locator("text").all_text_contents()
    plot.focus()
    for _ in range(70):
        opened.page.keyboard.press("+")
        assert plot.locator("text").count() < 40
    opened.page.keyboard.press("0")
    assert plot.locator("text").all_text_contents() == all_shown
    opened.check()


def test_the_theme_follows_the_system_and_the_button(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["scale"], colours="dark")

    def is_dark() -> bool:
        colour = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(colour.partition("(")[2].split(",")[0]) < 100

    assert is_dark()
    opened.page.get_by_role("button", name="Change to light colours").click()
    assert not is_dark()
    opened.page.get_by_role("button", name="Change to dark colours").click()
    assert is_dark()
    opened.check()


def test_hostile_names_stay_text(pages: dict[str, Path], open_page: Open) -> None:
    opened = open_page(pages["hostile"])
    assert opened.page.title().startswith("<img src=x onerror=alert(1)>")
    assert opened.page.locator("img, iframe, object, embed, [onerror], [onclick]").count() == 0
    assert opened.page.locator("script").count() == 2
    case = opened.page.locator("td", has_text="onerror").first
    assert case.evaluate("node => node.textContent") == HOSTILE
    policy = opened.page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert "default-src 'none'" in policy and "unsafe" not in policy
    opened.check()
    refused = opened.page.evaluate("fetch('https://example.invalid/').then(() => 'went', () => 'refused')")
    assert refused == "refused"
