"""Pages of folders that are damaged, or in which little is yet: what is left is shown, what is left out is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import Cli
from report.looking import content_of, headings_of
from report.pages import killed_search, train_segmentation
from voxscale.report.page import render_page
from voxscale.report.run_page import run_page
from voxscale.report.write import write_report
from voxscale.runs import RunFolder

FILES = (
    *("events.jsonl", "cases.csv", "metrics.json", "plan.json", "previews/index.json"),
    *("logs/usage/rank-0000.json", "config.yaml"),
)
ODD = st.sampled_from([None, True, -1, 1e300, "", "<b>", [], [None], {}, {"a": None}])


@pytest.fixture(scope="module")
def trained(cli_here: Cli, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_segmentation(cli_here, tmp_path_factory.mktemp("trained"), dataset, "balls")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


def odd_somewhere(draw: st.DrawFn, content: Any) -> Any:
    """The same, with a part of it missing or another."""
    if isinstance(content, dict | list) and content and draw(st.integers(0, 4)):
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 3)):
            content[key] = odd_somewhere(draw, content[key])
        else:
            del content[key]
        return content
    return draw(ODD)


@st.composite
def damages(draw: st.DrawFn, run: Path) -> dict[str, str]:
    """New contents of some files: cut, with cells or lines lost, or with values that none expects."""
    found = {}
    for name in draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=3, unique=True)):
        text = (run / name).read_text()
        lines = text.splitlines()
        place = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["cut", "comma", "odd"]))
        if kind == "cut":
            text = text[: draw(st.integers(0, len(text)))]
        elif kind == "odd" and name.endswith(".json"):
            text = json.dumps(odd_somewhere(draw, json.loads(text)))
        elif kind == "odd" and name.endswith(".jsonl"):
            lines[place] = json.dumps(odd_somewhere(draw, json.loads(lines[place])))
            text = "\n".join(lines)
        else:
            lines[place] = lines[place].rpartition(draw(st.sampled_from(",:")))[0]
            text = "\n".join(lines)
        found[name] = text
    return found


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_keeps_a_page_from_being_written(data: st.DataObject, run: Path) -> None:
    whole = {name: (run / name).read_bytes() for name in FILES}
    try:
        for name, text in data.draw(damages(run)).items():
            (run / name).write_text(text)
        page = render_page(run_page(RunFolder(run)))
        assert "</html>" in page
    finally:
        for name, content in whole.items():
            (run / name).write_bytes(content)


def test_what_is_damaged_is_said(run: Path) -> None:
    with (run / "cases.csv").open("a") as lines:
        lines.write("short,row\n")
    with (run / "events.jsonl").open("a") as lines:
        lines.write('{"event":"train"}\n{"event":"train","step":11,"loss":0.5,"step_s":0.1}\n')
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps({**metrics, "summary": ["dice/mean"]}))
    page = write_report([run])
    content = content_of(page)
    assert content["about"] == "Damaged, and left out where it is so: cases.csv, events.jsonl."
    abouts = {section["title"]: section["about"] for section in content["sections"]}
    assert abouts["Quality"] == "Left out: what the folder says of this is damaged."
    assert {"Training loss", "Where the time goes", "Environment"} <= headings_of(page)
    (loss,) = [
        block["series"][0]
        for section in content["sections"]
        for block in section["blocks"]
        if block.get("title") == "Training loss"
    ]
    assert loss["x"][-1] == 11, "a step that has a number is drawn"


def _bars(page: Path) -> list[dict[str, Any]]:
    blocks = [block for section in content_of(page)["sections"] for block in section["blocks"]]
    return [block for block in blocks if block.get("title") == "Where the time goes"]


def test_what_nobody_has_measured_of_communication_is_not_nought(run: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    metrics = json.loads((run / "metrics.json").read_text())

    def bars(world_size: int, said: list[float | None] | None) -> dict[str, Any]:
        rows = [line for line in lines if line["event"] != "end"]
        rows += [{"event": "end", "step": 10, "epoch": 2, "communication_s": said}] if said is not None else []
        (run / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (run / "metrics.json").write_text(json.dumps({**metrics, "world_size": world_size}))
        (found,) = _bars(write_report([run]))
        return found

    def names(found: dict[str, Any]) -> list[str]:
        return [part["name"] for part in found["bars"][0]["parts"]]

    for world_size, said in ((2, None), (2, [0.001, None]), (4, [])):
        found = bars(world_size, said)
        assert names(found) == ["data", "computing"]
        assert found["note"] == "Communication is not known: it counts as computing."
    for world_size, said in ((1, None), (2, [0.001, 0.003])):
        found = bars(world_size, said)
        assert names(found) == ["data", "computing", "communication"]
        assert found["note"] == ""
    assert bars(2, [1e-4, 3e-4])["bars"][0]["parts"][2]["text"].startswith("0.0002 s")


def test_a_search_that_was_killed_shows_what_it_came_to(run: Path, tmp_path: Path) -> None:
    page = write_report([killed_search(run, tmp_path / "search")])
    content = content_of(page)
    assert (content["state"], content["kind"]) == ("interrupted", "search")
    assert headings_of(page) >= {
        *("Parallel coordinates", "dice/mean over optimizer.lr", "Trials", "Validation: dice/mean"),
    }
    facts = {fact["label"]: (fact["value"], fact["note"]) for fact in content["sections"][0]["blocks"][0]["facts"]}
    assert facts["best dice/mean"] == ("0.500", "trial 0")
    assert facts["trials"] == ("2", "1 done, 1 interrupted")
    assert facts["optimizer.lr"] == ("0.002", "of the best trial")
    (trials,) = [section["blocks"][0] for section in content["sections"] if section["title"] == "Trials"]
    names = [column["name"] for column in trials["columns"]]
    assert names == ["trial", "state", "dice/mean", "optimizer.lr", "steps", "time", "why"]
    assert trials["rows"] == [[0, "done", 0.5, 0.002, 10, 1.5, ""], [1, "interrupted", None, 0.02, 2, None, ""]]
