"""What pages are made of: their curves against oracles, their size, and that nothing in them can become markup."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifelines import KaplanMeierFitter
from sklearn.metrics import roc_auc_score

from conftest import Cli
from report.looking import content_of
from report.pages import ended_after_a_step, train_segmentation, write_folds, write_search
from voxscale.files import read_csv, write_csv
from voxscale.infer.previews import TOTAL_BYTES, make_preview
from voxscale.report.forecast import duration
from voxscale.report.outcome_plots import roc_curve, survival_curve
from voxscale.report.page import as_script_data
from voxscale.report.private import without_places
from voxscale.report.reading import ReadRun, read_previews
from voxscale.report.search_page import ticks_of
from voxscale.report.write import refresh_report, write_report
from voxscale.runs import RunFolder

PAGE_LIMIT = 15_000_000


@pytest.fixture(scope="module")
def trained(cli_here: Cli, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_segmentation(cli_here, tmp_path_factory.mktemp("trained"), dataset, "balls")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run-copy", symlinks=True))


def test_survival_is_that_of_lifelines() -> None:
    random = np.random.default_rng(0)
    times, events = random.integers(1, 30, 80).astype(float), random.random(80) < 0.4
    x, y, at_risk = survival_curve(times.tolist(), events.tolist())
    expected = KaplanMeierFitter().fit(times, events)
    assert y == pytest.approx(expected.predict(x).tolist())
    assert at_risk[1:] == expected.event_table["at_risk"].tolist()[1:]


def test_roc_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(1)
    score, truth = random.integers(0, 12, 60) / 12, random.random(60) < 0.5
    x, y, area = roc_curve(truth.tolist(), score.tolist())
    assert area == pytest.approx(roc_auc_score(truth, score))
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)


@given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False), st.lists))
def test_no_sign_of_the_data_can_end_its_element(content: object) -> None:
    text = as_script_data(content)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == content


def test_numbers_that_are_none_and_names_that_are_no_text_can_stand_in_a_page() -> None:
    assert json.loads(as_script_data([float("nan"), float("inf"), "a\ud800b"])) == [None, None, "a?b"]


def test_the_page_of_twenty_cases_stays_small(run: Path) -> None:
    """Noise, which no format makes smaller, of several channels."""
    random = np.random.default_rng(2)
    noise = random.standard_normal((4, 100, 110, 90), np.float32)
    codes = (random.integers(0, 3, (100, 110, 90)).astype(np.uint8),) * 2
    preview = make_preview(noise, codes, (1.0, 1.0, 2.0))
    assert TOTAL_BYTES / 40 < preview.nbytes <= TOTAL_BYTES / 20
    about = {**preview.about, "split": "val", "image": "0000.jpg", "codes": "0000.png"}
    (run / "previews" / "0000.jpg").write_bytes(preview.image)
    (run / "previews" / "0000.png").write_bytes(preview.codes or b"")
    index = {"schema": 1, "classes": ["a"], "exclusive": True}
    index["cases"] = [{**about, "case": str(number)} for number in range(20)]
    (run / "previews" / "index.json").write_text(json.dumps(index))
    size = write_report([run]).stat().st_size
    assert 20 * preview.nbytes * 4 / 3 < size < PAGE_LIMIT


def test_a_link_among_the_previews_is_not_followed(run: Path, tmp_path: Path) -> None:
    """Whoever made the folder must not get at the files of who looks at it."""
    (tmp_path / "secret").write_bytes(b"not for others")
    index = json.loads((run / "previews" / "index.json").read_text())
    (run / "previews" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(run / "previews" / "pipe")
    for name in ("link", "pipe"):
        other = {**index, "cases": [{**index["cases"][0], "image": name, "codes": None}, index["cases"][0]]}
        (run / "previews" / "index.json").write_text(json.dumps(other))
        shown, _ = read_previews(RunFolder(run))
        assert shown is not None
        images = [base64.b64decode(each["image"]) for each in shown["cases"]]
        assert b"not for others" not in images


def test_of_a_preview_blocks_are_averaged_and_classes_sampled() -> None:
    image = np.zeros((1, 200, 4, 3), np.float32)
    image[0, 100:] = 1.0
    codes = np.zeros((200, 4, 3), np.uint8)
    codes[150:] = 2
    about = make_preview(image, (codes, codes), (0.5, 1.0, 2.0)).about
    assert (about["shape"], about["reduced"]) == ([67, 4, 3], [3, 1, 1])
    assert about["spacing_mm"] == [1.5, 1.0, 2.0]


@pytest.mark.ranks
def test_previews_do_not_depend_on_ranks(run: Path, cli_here: Cli) -> None:
    """Those that the training left, on one rank, are those of an evaluation on two."""
    assert cli_here("evaluate", run, "--devices", 2, "--name", "on-2").code == 0
    one, two = run / "previews", run / "evaluations" / "on-2" / "previews"
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    assert json.loads((one / "index.json").read_text())["cases"][0]["case"] == _worst(run)
    assert "Evaluation on-2" in (run / "report.html").read_text()


def _worst(run: Path) -> str:
    header, *rows = [line.split(",") for line in (run / "cases.csv").read_text().splitlines()]
    return min(rows, key=lambda row: float(row[header.index("dice/mean")]))[0]


def test_a_page_that_cannot_be_written_is_a_warning_at_the_end_of_work(run: Path, cli_here: Cli) -> None:
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    (run / "report.html" / "here").touch()
    done = cli_here("evaluate", run, "--json")
    assert (done.code, done.json["report"]) == (0, None)
    assert "warning: the report was not written" in done.err
    assert cli_here("report", run).code == 4


def test_a_page_takes_the_place_of_no_other_file(run: Path, cli_here: Cli) -> None:
    config = (run / "config.yaml").read_bytes()
    for out, found in ((run / "config.yaml", ".yaml"), (run, "no ending")):
        done = cli_here("report", run, "--out", out)
        assert (done.code, f"--out {out}: found {found}, expected .html" in done.err) == (2, True)
    assert (run / "config.yaml").read_bytes() == config
    assert cli_here("report", run, "--out", run / "elsewhere.html").code == 0


def test_what_is_damaged_or_unfinished_is_left_out(run: Path, cli_here: Cli) -> None:
    for name in ("metrics.json", "cases.csv", "previews/index.json", "plan.json"):
        (run / name).write_text('{"half')
    (run / "plan.json").write_text("{}")
    done = cli_here("report", run, "--json")
    assert done.code == 0, done.err
    text = Path(done.json["report"]).read_text()
    assert '"state":"interrupted"' in text and "the same command continues it" in text


def test_a_page_names_no_folders_and_no_patients(run: Path) -> None:
    (run / "cases.csv").write_text((run / "cases.csv").read_text().replace(",val", "-jane-doe,val"))
    text = write_report([run]).read_text()
    assert "jane-doe" not in text
    assert str(run.parent) not in text and "pairs" in text


def test_of_a_script_that_failed_neither_folders_nor_machines_are_named(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    run = tmp_path / "Jane Doe" / "bad"
    done = cli_here("launch", tmp_path / "bad.py", "--devices", 1, "--run", run)
    node = json.loads((run / "logs" / "local" / "node-0000.json").read_text())["node"]
    assert done.code == 3 and f"{node}: rank 0" in done.err and str(run) in done.err
    text = (run / "report.html").read_text()
    assert '"about":"node 0: rank 0 ended with exit code 3, see logs/local/rank-0000.log"' in text
    assert str(tmp_path) not in text and "Jane" not in text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("gpu-07: no folder /home/jane in /opt/image.sif", "node 1: no folder .../jane in .../image.sif"),
        ("2 of 3 nodes came (gpu-06, gpu-07): see RUN/logs", "2 of 3 nodes came (node 0, node 1): see logs"),
        ("its node may not see RUN", "its node may not see .../run"),
        ("No such file or directory: '/home/Jane Doe/a b.nii'", "No such file or directory: '.../a b.nii'"),
        ("/home/Jane M Doe/case.nii.gz: found 2 channels", ".../case.nii.gz: found 2 channels"),
        ("open(~jane/x.csv), file:///home/jane/y", "open(.../x.csv), file:.../y"),
        ("dice/mean fell by 1/2, see https://a.org/b/c", "dice/mean fell by 1/2, see https://a.org/b/c"),
        ("found <b>no</b> case", "found <b>no</b> case"),
        ("gpu-070: the loss is nan", "gpu-070: the loss is nan"),
    ],
)
def test_errors_are_told_without_folders_and_machines(said: str, told: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "of jane" / "run")
    reports = run.logs / "12-0"
    reports.mkdir(parents=True)
    for number, name in enumerate(("gpu-06", "gpu-07")):
        (reports / f"node-{number:04d}.json").write_text(json.dumps({"node": name}))
    (reports / "node-0002.json").write_text('{"half')
    assert without_places(said.replace("RUN", str(run.root)), run) == told


def test_why_a_trial_failed_is_told_without_folders(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    why = f"{folder}/trials/0001/logs is full; see /home/jane/notes"
    chosen = {"train.init_from": "/home/jane/runs/first"}
    text = write_report([write_search(folder, {0.002: run}, why=why, **chosen)]).read_text()
    assert "logs is full; see .../notes" in text
    assert '".../first"' in text, "a value that was searched for"
    assert str(tmp_path) not in text and "jane" not in text


def test_of_folds_all_that_was_held_out_is_shown_and_each_has_its_page(run: Path, tmp_path: Path) -> None:
    page = refresh_report(write_folds(tmp_path / "folds", [run, run]))
    assert page is not None
    text = page.read_text()
    summary = json.loads((run / "metrics.json").read_text())["summary"]["dice/mean"]
    assert f'"label":"dice/mean","value":"{summary["mean"]:.3f}","note":"95 %: {summary["ci95"][0]:.3f}' in text
    viewer = text[text.index('"type":"viewer"') :]
    worst = json.loads((run / "previews" / "index.json").read_text())["cases"][0]["case"]
    assert [f'"case":"{fold}-{worst}"' in viewer for fold in (1, 2, 3)] == [True, True, False]
    assert all("Learning rate" in (tmp_path / "folds" / f"fold-{n}" / "report.html").read_text() for n in (1, 2))


@pytest.mark.parametrize(
    ("values", "whole", "choices"),
    [
        ([4.0, 2.0], True, [2.0, 4.0]),
        ([float(number) for number in range(9)], True, None),
        ([0.1, 0.2, 0.1], False, [0.1, 0.2]),
        ([0.1, 0.2], False, None),
    ],
)
def test_axes_know_choices_and_whole_numbers(values: list[float], whole: bool, choices: list[float] | None) -> None:
    assert ticks_of(values) == {"whole": whole, "choices": choices}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "0 s"), (7.3e-5, "73 µs"), (9.99e-5, "99.9 µs"), (2e-4, "0.0002 s"), (35.0, "35 s"), (4800.0, "1 h 20 min")],
)
def test_times_are_told_as_people_read_them(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_time_that_is_not_known_is_not_nought(run: Path, tmp_path: Path) -> None:
    lost = ended_after_a_step(run, tmp_path / "lost")
    (lost / "metrics.json").write_text(json.dumps({"task": "segmentation", "state": "failed", "wall_s": 0.0}))
    assert '["lost","failed",null,2,1,null,' in write_report([run, lost], tmp_path / "two.html").read_text()


def test_of_folds_the_worst_case_of_all_is_shown_first(run: Path, tmp_path: Path) -> None:
    folds = write_folds(tmp_path / "folds", [run, run, run])
    rows = read_csv(folds / "cases.csv")
    for row, dice in zip(rows, ("0.5", "0.1", ""), strict=True):
        row["dice/mean"] = dice
    write_csv(folds / "cases.csv", list(rows[0]), rows)
    text = write_report([folds]).read_text()
    shown = re.findall(r'"case":"(\d)-', text[text.index('"type":"viewer"') :])
    assert shown == ["2", "1", "3"]
    assert re.search(r'"opens":\[1,0,2\]', text), "each row its own"


def test_runs_that_came_to_no_metric_are_compared(run: Path, tmp_path: Path) -> None:
    lost = [ended_after_a_step(run, tmp_path / name) for name in ("one", "two")]
    assert "Training loss" in write_report(lost, tmp_path / "lost.html").read_text()
    for each in lost:  # it chose no best model, but says by which metric it would have
        metrics = {"task": "segmentation", "state": "failed", "best": {"metric": "dice/mean", "value": None, "step": 0}}
        (each / "metrics.json").write_text(json.dumps(metrics))
    assert "Training loss" in write_report(lost, tmp_path / "lost.html").read_text()


def test_times_go_on_over_the_starts_of_a_run(run: Path) -> None:
    """Each start counts its seconds anew; a page adds them up."""
    rows = [("start", 0, 0.1), ("validate", 2, 5.0), ("resume", 2, 0.1), ("start", 2, 0.2), ("validate", 4, 3.0)]
    lines = [json.dumps({"event": event, "step": step, "time_s": time_s}) for event, step, time_s in rows]
    (run / "events.jsonl").write_text("\n".join([*lines, ""]))
    assert [at for at, _ in ReadRun(RunFolder(run)).timed("validate")] == [5.0, 8.0]


def test_a_single_class_is_not_drawn_twice(run: Path) -> None:
    text = write_report([run]).read_text()
    plots = [line for line in text.split('"type":') if line.startswith('"plot","title":"Validation: dice"')]
    assert len(plots) == 1 and plots[0].count('"name":') == 1
    assert '"metric":"hd95","low":true,"unit":"mm"' in text


def test_a_page_carries_no_files_from_elsewhere(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of somebody else")
    index = json.loads((run / "previews" / "index.json").read_text())
    for number, elsewhere in enumerate((str(tmp_path / "secret"), "../../secret")):
        index["cases"][number] |= {"image": elsewhere, "codes": elsewhere}
    index["cases"].append("no case")
    (run / "previews" / "index.json").write_text(json.dumps(index))
    text = write_report([run]).read_text()
    assert base64.b64encode(b"of somebody else").decode() not in text
    assert '"type":"viewer"' in text, "of the other cases"


def test_the_same_folder_gives_the_same_page(run: Path) -> None:
    assert write_report([run]).read_bytes() == write_report([run]).read_bytes()


def test_what_is_no_run_is_refused(tmp_path: Path, cli_here: Cli) -> None:
    done = cli_here("report", tmp_path, "--json")
    assert (done.code, done.json["error"]["code"]) == (2, "config")
    assert done.json["error"]["message"].endswith("not a run folder")


def test_runs_of_one_name_are_told_apart_and_compared(run: Path, tmp_path: Path, cli_here: Cli) -> None:
    """By as many of the folders above as that takes; the same run given twice by numbers."""
    runs = [Path(shutil.copytree(run, tmp_path / each / "runs" / "quick", symlinks=True)) for each in ("a", "b")]
    content = content_of(write_report([*runs, run, run], tmp_path / "all.html"))
    names = ["a/runs/quick", "b/runs/quick", "run-copy (1)", "run-copy (2)"]
    (cases,) = [section for section in content["sections"] if section["title"].startswith("Cases: dice/mean")]
    (table,) = cases["blocks"]
    assert [column["name"] for column in table["columns"]] == ["case", *names]
    rows = {row["case"]: float(row["dice/mean"]) for row in read_csv(run / "cases.csv")}
    assert {row[0]: row[1:] for row in table["rows"]} == {
        case: [pytest.approx(value, rel=1e-4)] * 4 for case, value in rows.items()
    }


def test_a_search_among_runs_says_how_it_can_be_shown(run: Path, tmp_path: Path, cli_here: Cli) -> None:
    search = write_search(tmp_path / "search", {0.002: run})
    done = cli_here("report", search, run)
    assert done.code == 2
    assert f"{search}: a search, whose runs are in {search}/trials" in done.err
    assert f"voxscale report {search}" in done.err
