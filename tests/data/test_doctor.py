"""The doctor finds every fault that data can have, all at once, and `train` refuses what it calls unsafe."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray

import voxscale.data.doctor
from conftest import Cli, Finished
from golden import assert_golden
from layouts import LAYOUTS
from voxscale.config.load import make_config
from voxscale.config.schema import Config
from voxscale.data.cases import Case
from voxscale.data.doctor import Diagnosis, examine_dataset
from voxscale.data.findings import ERROR, WARNING, Finding
from voxscale.data.formats import load_manifest
from voxscale.data.outcomes import target_strata
from voxscale.data.split import split_cases
from voxscale.launch.folder import check_task, prepare_cases, split_prepared

KEYS = {"level", "code", "case", "file", "found", "expected", "fix"}
SIZE = (16, 16, 16)

WriteConfig = Callable[..., Path]


def save(path: Path, voxels: NDArray[Any], affine: NDArray[Any] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine), path)
    return path


def make_image(seed: int, size: tuple[int, ...] = (*SIZE, 2)) -> NDArray[np.float32]:
    return np.random.default_rng(seed).integers(1, 200, size).astype(np.float32)


def make_label(size: tuple[int, ...] = SIZE) -> NDArray[np.uint8]:
    label = np.zeros(size, np.uint8)
    label[2:6, 2:6, 2:6], label[8:10, 8:10, 8:10] = 1, 2
    return label


class Task:
    """A Decathlon task of sound cases c0, c1 … with two modalities and two labels, for tests to damage."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.listed = [f"c{n}" for n in range(count)]
        for n, case in enumerate(self.listed):
            self.write(case, image=make_image(n), label=make_label())

    def image(self, case: str) -> Path:
        return self.folder / "imagesTr" / f"{case}.nii.gz"

    def label(self, case: str) -> Path:
        return self.folder / "labelsTr" / f"{case}.nii.gz"

    def write(
        self,
        case: str,
        image: NDArray[Any] | None = None,
        label: NDArray[Any] | None = None,
        affine: NDArray[Any] | None = None,
    ) -> None:
        if image is not None:
            save(self.image(case), image, affine)
        if label is not None:
            save(self.label(case), label, affine)

    def finish(self, **described: Any) -> Path:
        """Write dataset.json; returns the folder."""
        training = [
            {"image": f"./imagesTr/{case}.nii.gz", "label": f"./labelsTr/{case}.nii.gz"} for case in self.listed
        ]
        labels, modality = {"0": "background", "1": "organ", "2": "tumour"}, {"0": "T1w", "1": "T2w"}
        content = {"labels": labels, "modality": modality, "training": training, **described}
        (self.folder / "dataset.json").write_text(json.dumps(content))
        return self.folder


def config_of(folder: Path, **data: Any) -> Config:
    content = {
        "data": {"source": str(folder), **data},
        "patches": {"size": list(SIZE)},
        "model": {"name": "unet", "channels": [4, 8]},
    }
    return make_config(content, name="test", base=Path())


def diagnose(folder: Path, **data: Any) -> Diagnosis:
    return examine_dataset(config_of(folder, **data), folder.parent / "scratch", threads=2)


def by_code(findings: Sequence[Finding]) -> dict[str, Finding]:
    found = {finding.code: finding for finding in findings}
    assert len(found) == len(findings), [str(finding) for finding in findings]
    return found


def with_voxel(image: NDArray[Any], value: float) -> NDArray[Any]:
    image[3, 4, 5] = value
    return image


def damage(task: Task) -> dict[str, tuple[str, str, str, str]]:
    """Give each case of a task a fault of its own; returns what is to be found of it: level, code, file, words."""
    cut = task.image("c0").read_bytes()
    task.image("c0").write_bytes(cut[: len(cut) // 2])
    task.write("c1", image=with_voxel(make_image(1), np.nan))
    task.write("c2", image=with_voxel(make_image(2), -np.inf))
    task.write("c3", label=make_label() * 3)
    task.write("c4", label=make_label() * 0.5)
    task.write("c5", label=make_label()[:-1])
    save(task.label("c6"), make_label(), np.diag([1, 1, 2.0, 1]))
    task.write("c7", image=make_image(7, (*SIZE, 1)))
    task.label("c8").unlink()
    task.listed.append("c9")
    task.write("c10", label=np.zeros(SIZE, np.uint8))
    task.write("c11", image=np.full((*SIZE, 2), 7, np.float32))
    task.write("c12", image=make_image(12, (16, 16, 12, 2)), label=make_label((16, 16, 12)))
    return {
        "c0": (ERROR, "unreadable", "imagesTr/c0.nii.gz", "a damaged file"),
        "c1": (ERROR, "nan", "imagesTr/c1.nii.gz", "1 NaN or infinite voxels in channel 0"),
        "c2": (ERROR, "nan", "imagesTr/c2.nii.gz", "1 NaN or infinite voxels in channel 0"),
        "c3": (ERROR, "label-values", "labelsTr/c3.nii.gz", "labels [3, 6]"),
        "c4": (ERROR, "label-values", "labelsTr/c4.nii.gz", "label 0.5"),
        "c5": (ERROR, "shape", "labelsTr/c5.nii.gz", "shape (15, 16, 16)"),
        "c6": (ERROR, "affine", "labelsTr/c6.nii.gz", "another affine (its numbers differ by up to 1)"),
        "c7": (ERROR, "missing-modality", "imagesTr/c7.nii.gz", "1 channels"),
        "c8": (ERROR, "missing-file", "labelsTr/c8.nii.gz", "no such file"),
        "c9": (ERROR, "duplicate-case", "imagesTr/c9.nii.gz", "a second case of that name"),
        "c10": (WARNING, "empty-label", "labelsTr/c10.nii.gz", "no labelled voxel"),
        "c11": (WARNING, "constant", "imagesTr/c11.nii.gz", "7 in every voxel"),
        "c12": (WARNING, "small", "imagesTr/c12.nii.gz", "(16, 16, 12) voxels once prepared"),
    }


def test_every_fault_of_a_case_is_found_at_once(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 18)
    expected = damage(task)
    diagnosis = diagnose(task.finish())
    assert not diagnosis.is_safe
    found: dict[str, list[Finding]] = {}
    for finding in diagnosis.findings:
        assert all((finding.case, finding.file, finding.found, finding.expected, finding.fix)), finding
        found.setdefault(finding.case, []).append(finding)
    assert found.keys() == expected.keys(), "sound cases have no findings"
    for case, (level, code, file, words) in expected.items():
        assert {(f.level, f.code, f.file) for f in found[case]} == {(level, code, file)}
        assert words in found[case][0].found
    levels = [finding.level for finding in diagnosis.findings]
    assert levels == sorted(levels), "errors come first"
    assert diagnosis.fingerprint["cases"] == 9, "only cases without an error count"


def test_a_sound_dataset_has_no_findings_and_a_fingerprint(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 5)
    task.write("c4", image=make_image(4, (20, 16, 16, 2)), label=make_label((20, 16, 16)))
    diagnosis = diagnose(task.finish())
    assert diagnosis.findings == []
    assert diagnosis.is_safe
    print_ = diagnosis.fingerprint
    assert (print_["cases"], print_["channels"], print_["orientations"]) == (5, ["T1w", "T2w"], {"RAS": 5})
    assert print_["size"] == {"min": [16, 16, 16], "median": [16, 16, 16], "max": [20, 16, 16]}
    assert print_["spacing_mm"]["median"] == [1, 1, 1]
    tumour = print_["volumes_ml"]["2"]
    assert (tumour["name"], tumour["cases"], tumour["median"]) == ("tumour", 5, 0.008)
    assert 90 < print_["intensity"][0]["mean"] < 110
    assert print_["intensity"][1]["p0.5"] >= 1


def test_what_differs_between_cases_is_worth_a_look_unless_it_is_made_one(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 5)
    task.write("c0", image=make_image(0), label=make_label(), affine=np.diag([1, 1, 3.0, 1]))
    task.write("c1", image=make_image(1), label=make_label(), affine=np.diag([-1, 1, 1.0, 1]))
    folder = task.finish()
    spacing = by_code(diagnose(folder).findings)["spacing"]
    assert (spacing.level, spacing.case) == (WARNING, "")
    assert spacing.found == "spacings from [1.0, 1.0, 1.0] to [1.0, 1.0, 3.0] mm"
    assert spacing.fix == "set data.spacing, e.g. to the median [1.0, 1.0, 1.0]"
    assert str(spacing).startswith("data: found spacings")
    assert not diagnose(folder, spacing=[1, 1, 1]).findings
    assert by_code(diagnose(folder, orientation=None, size=[16, 16, 16]).findings)["orientation"].level == WARNING


def test_spacings_are_compared_in_the_axes_that_are_trained_on(tmp_path: Path) -> None:
    """The same thick slices, stored along another axis of the file."""
    task = Task(tmp_path / "task", 4)
    for case in task.listed:
        task.write(case, make_image(int(case[1])), make_label(), np.diag([1, 1, 3.0, 1]))
    task.write("c3", make_image(3), make_label(), np.diag([3, 1, 1.0, 1])[[1, 2, 0, 3]])
    diagnosis = diagnose(task.finish())
    assert diagnosis.findings == []
    assert diagnosis.fingerprint["spacing_mm"]["max"] == [1, 1, 3]


def test_a_channel_that_an_nnunet_case_lacks(tmp_path: Path) -> None:
    source = LAYOUTS["nnunet: the dataset"].make(tmp_path / "nnunet")
    (source / "imagesTr" / "a1_0001.nii.gz").unlink()
    missing = [f for f in diagnose(source).findings if f.code == "missing-modality"]
    assert [(f.level, f.case, f.file) for f in missing] == [(ERROR, "a1", "imagesTr/a1_0001.nii.gz")]


def test_a_case_with_fewer_channels_than_most_where_none_are_declared(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 4)
    task.write("c2", image=make_image(2, (*SIZE, 3)))
    (finding,) = diagnose(task.finish(modality={})).findings
    assert (finding.level, finding.code, finding.case) == (ERROR, "missing-modality", "c2")
    assert (finding.found, finding.expected) == ("3 channels", "2 as in most cases")


def write_table(folder: Path, rows: Sequence[tuple[str, str, str]], same: Sequence[tuple[str, str]] = ()) -> Path:
    """A table of (case, patient, split); each pair in `same` shares its voxels."""
    folder.mkdir()
    copies = dict(same)
    for n, (case, _, _) in enumerate(rows):
        save(folder / f"{case}.nii.gz", make_image(n, SIZE))
        save(folder / f"{case}_seg.nii.gz", make_label())
    for copy, original in copies.items():
        voxels = np.asarray(nib.load(folder / f"{original}.nii.gz").dataobj)
        save(folder / f"{copy}.nii.gz", voxels.astype(np.int16))  # other bytes, the same voxels
    with (folder / "cohort.csv").open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["case", "patient", "image", "label", "Fold_1"])
        writer.writerows((case, who, f"{case}.nii.gz", f"{case}_seg.nii.gz", role) for case, who, role in rows)
    return folder / "cohort.csv"


ROWS = [("a", "p1", "train"), ("b", "p2", "train"), ("c", "p3", "train"), ("d", "p4", "val"), ("e", "p5", "val")]
FOLD = {"column": "Fold_1"}


def test_one_image_in_two_parts_is_an_error_and_in_one_a_warning(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t", ROWS, same=[("b", "a"), ("d", "c")])
    findings = {finding.case: finding for finding in diagnose(table, split=FOLD).findings}
    assert findings.keys() == {"b", "d"}
    assert {finding.code for finding in findings.values()} == {"duplicate-image"}
    assert (findings["b"].level, findings["b"].found) == (WARNING, "the voxels of case a")
    assert (findings["d"].level, findings["d"].file) == (ERROR, "d.nii.gz")
    assert findings["d"].found == "the voxels of case c, which is in train"
    assert findings["d"].expected == "an image of its own in val"


def test_one_patient_in_two_parts_is_an_error(tmp_path: Path) -> None:
    rows = [*ROWS, ("f", "p1", "val"), ("g", "p5", "train")]
    findings = diagnose(write_table(tmp_path / "t", rows, same=[("b", "a")]), split=FOLD).findings
    assert [(f.level, str(f)) for f in findings if f.code == "split"] == [
        (
            ERROR,
            f"patient {name}: found in train ({one} at cohort.csv row {row}) and {rest}, expected in one split only",
        )
        for name, one, row, rest in (
            ("p1", "a", 2, "val (f at cohort.csv row 7)"),
            ("p5", "g", 8, "val (e at cohort.csv row 6)"),
        )
    ]
    assert "duplicate-image" in {finding.code for finding in findings}, "copies are named all the same"


def test_steps_that_leave_nothing_are_found_per_case(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 4)
    task.write("c1", image=make_image(1, (16, 16, 4, 2)), label=make_label((16, 16, 4)))
    findings = diagnose(task.finish(), slices={"z": [4, None]}).findings
    assert [(f.level, f.case) for f in findings if f.code == "grid"] == [(ERROR, "c1")]


def test_where_no_case_can_be_used_only_the_reasons_are_listed(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 2)
    for case in task.listed:
        task.label(case).unlink()
    diagnosis = diagnose(task.finish())
    assert {finding.code for finding in diagnosis.findings} == {"missing-file"}
    assert diagnosis.fingerprint == {"cases": 0}


def test_generated_data_is_generated_first(tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path / "made", synthetic={"cases": 4, "size": list(SIZE)})
    assert diagnosis.is_safe
    assert diagnosis.fingerprint["cases"] == 4


@pytest.fixture
def doctor(cli_here: Cli, write_config: WriteConfig) -> Callable[..., Finished]:
    def run(source: Path, *flags: str, verb: str = "doctor", **fields: Any) -> Finished:
        asked = {"data__regions": None, "data__split": None, **fields}
        return cli_here(verb, write_config(data__source=str(source), **asked), *flags)

    return run


def test_the_text_of_a_diagnosis(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task = Task(tmp_path / "task", 18)
    damage(task)
    done = doctor(task.finish())
    assert (done.code, done.err) == (3, "")
    assert_golden("doctor.txt", done.out)


def test_json_for_machines(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task = Task(tmp_path / "task", 18)
    expected = damage(task)
    done = doctor(task.finish(), "--json")
    assert done.code == 3
    assert done.json.keys() == {"findings", "fingerprint"}
    assert all(finding.keys() == KEYS for finding in done.json["findings"])
    assert all(isinstance(text, str) for finding in done.json["findings"] for text in finding.values())
    assert {finding["case"] for finding in done.json["findings"]} == expected.keys()
    assert done.json["fingerprint"]["cases"] == 9


def test_warnings_alone_do_not_stop_anyone(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task = Task(tmp_path / "task", 4)
    task.write("c1", label=np.zeros(SIZE, np.uint8))
    done = doctor(task.finish())
    assert done.code == 0
    assert "warning: case c1: labelsTr/c1.nii.gz: found no labelled voxel, expected at least one" in done.out
    assert done.out.endswith("4 cases read, 0 errors, 1 warnings: safe to train on\n")


def test_training_refuses_what_is_unsafe_and_names_it_all(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task = Task(tmp_path / "task", 18)
    expected = damage(task)
    task.listed = [case for case in dict.fromkeys(task.listed) if case != "c8"]  # faults of the list come before
    run = tmp_path / "run"
    done = doctor(task.finish(), "--run", str(run), "--devices", "1", verb="train")
    assert done.code == 3
    unsafe = [case for case, (level, *_) in expected.items() if level == ERROR and case not in ("c8", "c9")]
    for case in unsafe:
        _, _, file, words = expected[case]
        assert f"case {case}: {file}: found {words}" in done.err
    assert done.err.count("\n") >= len(unsafe) + 1
    assert "Traceback" not in done.err
    assert not run.exists()


def test_training_refuses_a_faulty_list_and_names_it_all(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task = Task(tmp_path / "task", 5)
    task.image("c1").unlink()
    task.label("c2").unlink()
    task.listed.append("c3")
    done = doctor(task.finish(), "--run", str(tmp_path / "run"), "--devices", "1", verb="train")
    assert done.code == 3
    for words in ("case c1: imagesTr/c1.nii.gz", "case c2: labelsTr/c2.nii.gz", "case c3: imagesTr/c3.nii.gz"):
        assert words in done.err


@pytest.mark.parametrize("same", [[("d", "c")], []], ids=["one image", "one patient"])
def test_training_refuses_a_leak(tmp_path: Path, doctor: Callable[..., Finished], same: list[tuple[str, str]]) -> None:
    rows = ROWS if same else [*ROWS, ("f", "p1", "val")]
    table = write_table(tmp_path / "t", rows, same)
    done = doctor(table, "--run", str(tmp_path / "run"), "--devices", "1", verb="train", data__split=FOLD)
    assert done.code == 3
    assert ("case d: d.nii.gz: found the voxels of case c, which is in train" in done.err) == bool(same)
    assert ("patient p1" in done.err) != bool(same)
    assert not (tmp_path / "run").exists()


HOSTILE = ["a\nerror: case c0: all is well", "b\x1b[2J\x1b[31m", "c\r\x07", "d\u202egpj", "e" * 240, "f\udcff", "g h"]


def test_hostile_names_do_not_break_the_output(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task = Task(tmp_path / "task", 3)
    for n, name in enumerate(HOSTILE):
        task.listed.append(name)
        task.write(name, image=make_image(10 + n), label=make_label() * 3)
    folder = task.finish(labels={"1": "x\n\x1b[31m" + "y" * 500, "2": "z"}, modality={"0": "T1\x1b[0m", "1": "T2\nT3"})
    done = doctor(folder)
    assert done.code == 3
    lines = done.out.splitlines()
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert sum(line.startswith("error: ") for line in lines) == len(HOSTILE)
    assert not any(line.startswith("error: case c0") for line in lines)
    named = doctor(folder, "--json").json["findings"]
    assert [finding["code"] for finding in named].count("bad-name") == len(HOSTILE) - 1
    assert [finding["case"] for finding in named if finding["code"] == "label-values"] == ["g h"]


def test_a_label_file_of_a_hostile_name_is_named_harmlessly(tmp_path: Path) -> None:
    task = Task(tmp_path / "task", 3)
    folder = task.finish()
    described = json.loads((folder / "dataset.json").read_text())
    described["training"][1]["label"] = "labelsTr/x\n\x1b[2J.nii.gz"
    (folder / "dataset.json").write_text(json.dumps(described))
    (folder / "labelsTr" / "x\n\x1b[2J.nii.gz").write_bytes(b"rubbish")
    (finding,) = diagnose(folder).findings
    assert finding.code == "unreadable"
    assert str(finding).isprintable()
    assert r"x\n\x1b[2J.nii.gz" in str(finding)


def test_what_the_task_refuses_of_outcomes_is_found_as_well(tmp_path: Path, cli_here: Cli) -> None:
    times = (100, 300, 500, 700, 900, 1100)
    rows = [f"c{n},c{n}.nii.gz,{time},1,{n},{'val' if n == 3 else 'train'}" for n, time in enumerate(times)]
    for n in range(len(rows)):
        save(tmp_path / f"c{n}.nii.gz", make_image(n, SIZE))
    rows[4] = rows[4].replace("900", "soon")
    (tmp_path / "t.csv").write_text("\n".join(["case,image,time,event,age,Fold_1", *rows]))
    data = {"source": str(tmp_path / "t.csv"), "split": FOLD, "columns": {"features": ["age"]}}
    refused = {"horizons": ["1y", "12m", "5y"], "metric": "auc/5m"}
    (tmp_path / "c.yaml").write_text(json.dumps({"task": "survival", "data": data, "validate": refused}))
    done = cli_here("doctor", tmp_path / "c.yaml", "--json")
    assert done.code == 3
    errors = [finding for finding in done.json["findings"] if finding["level"] == ERROR]
    assert sorted((finding["code"], finding["file"], finding["found"]) for finding in errors) == [
        ("bad-outcome", "t.csv row 6", "'soon' in 'time'"),
        ("task", "validate.horizons", "1y and 12m, which are the same time"),
        ("task", "validate.horizons", "5y, which is 1826.25 days"),
        ("task", "validate.metric", "'auc/5m'"),
    ]


def test_copies_are_looked_for_in_the_split_that_training_draws(tmp_path: Path) -> None:
    for n in range(12):
        save(tmp_path / f"c{n}.nii.gz", make_image(n // 2, SIZE))
    rows = [f"c{n},c{n}.nii.gz,{100 + n},{int(n < 5)}" for n in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["case,image,time,event", *rows]))
    for seed in range(5):
        data = {"source": str(tmp_path / "t.csv"), "split": {"val": 0.4, "seed": seed}}
        config = make_config({"task": "survival", "data": data}, name="doctor", base=tmp_path)
        cases = load_manifest(config.data, tmp_path).cases
        parts = {case.id: case.split for case in split_cases(cases, config.data.split, target_strata(config, cases))}
        torn = [f"c{n + 1}" for n in range(0, 12, 2) if parts[f"c{n}"] != parts[f"c{n + 1}"]]
        findings = examine_dataset(config, tmp_path, threads=2).findings
        assert sorted(f.case for f in findings if (f.level, f.code) == (ERROR, "duplicate-image")) == sorted(torn)


def mixed_labels(folder: Path) -> Path:
    """Ten pairs; every third case has the labels 1 and 2, the others 1; below z = 8 there is no 2."""
    for n in range(10):
        label = make_label()
        label[label == 2] = 0 if n % 3 else 2
        save(folder / f"img{n}.nii.gz", make_image(n, SIZE))
        save(folder / f"seg{n}.nii.gz", label)
    return folder


@pytest.mark.parametrize("slices", [None, {"z": [0, 8]}])
def test_the_split_is_the_one_that_training_draws(
    slices: dict[str, list[int]] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, judged = mixed_labels(tmp_path / "pairs"), list[dict[str, str]]()

    def split_and_note(*arguments: Any) -> list[Case]:
        split = split_cases(*arguments)
        judged.append({case.id: case.split for case in split})
        return split

    monkeypatch.setattr(voxscale.data.doctor, "split_cases", split_and_note)
    for seed in range(6):
        asked = {"slices": slices, "split": {"val": 0.3, "seed": seed}, "store": str(tmp_path / "store")}
        diagnose(source, **asked)
        config = config_of(source, **asked)
        manifest = load_manifest(config.data, tmp_path)
        trained = split_prepared(manifest.cases, config, prepare_cases(manifest, config, {}, threads=2))
        assert judged[-1] == {case.id: case.split for case in trained}


def refused_alike(doctor: Callable[..., Finished], source: Path, run: Path, **fields: Any) -> tuple[str, list[str]]:
    """What training says, and the codes of doctor's errors, for data that both refuse."""
    done = doctor(source, "--json", **fields)
    trained = doctor(source, "--run", str(run), "--devices", "1", verb="train", **fields)
    assert done.code == 3
    assert trained.code != 0
    assert not run.exists()
    return trained.err, [finding["code"] for finding in done.json["findings"] if finding["level"] == ERROR]


def test_a_class_without_a_training_case_is_unsafe(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    table = write_table(tmp_path / "t", ROWS)
    for case, *_ in ROWS[:-1]:
        save(tmp_path / "t" / f"{case}_seg.nii.gz", (make_label() == 1).astype(np.uint8))
    said, codes = refused_alike(doctor, table, tmp_path / "run", data__split=FOLD)
    assert "found class 2 (label 2) in no training case" in said
    assert codes == ["class-missing"]


def test_labels_that_preparing_leaves_out_are_missed(tmp_path: Path, doctor: Callable[..., Finished]) -> None:
    task, run = Task(tmp_path / "task", 4), tmp_path / "run"
    source, low = task.finish(), {"z": [0, 8]}
    said, codes = refused_alike(doctor, source, run, data__slices=low, data__regions={"both": [1, 2], "tumour": [2]})
    assert "label 2 stands in no case" in said
    assert codes == ["regions"]
    said, codes = refused_alike(doctor, source, run, data__slices={"z": [12, 16]})
    assert "no case has any labelled voxel" in said
    assert codes == ["class-missing"]


def test_a_class_is_not_missed_where_a_case_cannot_be_read(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t", ROWS)
    for case, *_ in ROWS[1:-1]:
        save(tmp_path / "t" / f"{case}_seg.nii.gz", (make_label() == 1).astype(np.uint8))
    assert "class-missing" not in {finding.code for finding in diagnose(table, split=FOLD).findings}
    (tmp_path / "t" / "a.nii.gz").write_bytes(b"rubbish")
    assert {finding.code for finding in diagnose(table, split=FOLD).findings} == {"unreadable"}


@pytest.mark.parametrize("keep", [False, True])
def test_test_cases_of_the_data_that_would_train_are_told_of(keep: bool, tmp_path: Path) -> None:
    source = LAYOUTS["tfrecord"].make(tmp_path / "shards")
    (source / "valid_0.tfrecord").rename(source / "test_0.tfrecord")
    asked = {"split": {"val": 0.3, "keep_test": keep}, "store": str(tmp_path / "store")}
    found = [finding for finding in diagnose(source, **asked).findings if finding.code == "test-used"]
    config = config_of(source, **asked)
    manifest = load_manifest(config.data, tmp_path)
    store = prepare_cases(manifest, config, {}, threads=2)
    warnings = check_task(config, store, split_prepared(manifest.cases, config, store))
    assert [finding for finding in warnings if finding.code == "test-used"] == found
    assert [(finding.level, "keep_test: true" in finding.fix) for finding in found] == [(WARNING, True)] * (not keep)
