"""Check every case before training does: all faults at once, and what the dataset is like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.orientations import aff2axcodes

from voxscale.config.load import with_fold
from voxscale.config.schema import Config
from voxscale.data.cases import TRAIN, VAL, Case, Manifest
from voxscale.data.classes import check_classes, classes_of
from voxscale.data.findings import ERROR, WARNING, Finding
from voxscale.data.formats import load_manifest
from voxscale.data.geometry import Geometry, make_geometry
from voxscale.data.outcomes import Outcomes, examine_outcomes, target_strata
from voxscale.data.room import bytes_of_case, refuse_beyond_memory, threads_with_room
from voxscale.data.split import check_test_cases, label_strata, num_folds, split_cases
from voxscale.data.synthetic import ensure_synthetic
from voxscale.data.volumes import RawCase, count_labels, examine_case, short_name
from voxscale.errors import ConfigError, DataError, VoxscaleError
from voxscale.memory import available_memory
from voxscale.terminal import progress

_BAD_OUTCOMES = ("bad-outcome", "bad-target", "bad-class")
BuildTask = Callable[[Config, Outcomes], object]

_STATISTICS = ("mean", "std", "p0.5", "p50", "p99.5")
_SAMPLES = 200_000  # voxels that an intensity statistic rests on, spread over the volume


@dataclass(frozen=True)
class Facts:
    """What is remembered of a case once it was read; sizes and spacings in the axes that are trained on."""

    case: str
    shape: tuple[int, ...]
    prepared: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    orientation: str
    channels: int
    intensity: tuple[tuple[float, ...], ...]  # per channel: mean, std, 0.5, 50 and 99.5 % of what is not zero
    volumes_ml: Mapping[int, float]
    labels: tuple[int, ...]  # that stand in it once prepared, background included
    image_sha256: bytes


@dataclass(frozen=True)
class Diagnosis:
    findings: list[Finding]
    fingerprint: dict[str, Any]

    @property
    def is_safe(self) -> bool:
        return not any(finding.level == ERROR for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"findings": [finding.as_json() for finding in self.findings], "fingerprint": self.fingerprint}


def examine_dataset(
    config: Config, scratch: Path, *, threads: int = 1, build_task: BuildTask | None = None, all_folds: bool = True
) -> Diagnosis:
    """Read every case in full; generated ones are generated first. `build_task` says what a task of outcomes refuses.

    A split is judged in every fold, or in the config's alone.

    Raises DataError only where the source as a whole cannot be used.
    """
    if config.data.synthetic is not None:
        ensure_synthetic(Path(config.data.source), config.data.synthetic, threads=threads)
    manifest = load_manifest(config.data, scratch)
    findings = list(manifest.findings)
    facts: list[Facts] = []
    threads = threads_with_room(manifest.cases, config.data, threads)
    with progress("checking cases", len(manifest.cases)) as advance, ThreadPoolExecutor(threads) as pool:

        def check(case: Case) -> tuple[Facts | None, list[Finding]]:
            try:
                return _check_case(case, manifest, config)
            except MemoryError:
                return None, [_beyond_memory(case, config)]
            finally:
                advance()

        for found, faults in pool.map(check, manifest.cases):
            findings += faults
            facts += [found] if found is not None else []
    findings += _compare_cases(facts, config)
    configs = (
        [with_fold(config, fold) for fold in range(1, num_folds(config.data.split) + 1)] if all_folds else [config]
    )
    findings += _check_split(manifest, facts, configs)
    findings += _check_regions(facts, config)
    if config.predicts_outcomes:
        is_whole = not any(finding.level == ERROR for finding in manifest.findings)
        findings += check_outcomes(manifest.cases, configs, build_task if is_whole else None)
    findings = list(dict.fromkeys(findings))
    order = {ERROR: 0, WARNING: 1}
    findings.sort(key=lambda finding: (order[finding.level], finding.case, finding.file))
    return Diagnosis(findings, make_fingerprint(facts, manifest))


def find_duplicates(cases: Sequence[Case], image_sha256: Mapping[str, bytes]) -> list[Finding]:
    """Images that stand in the data twice: an error where one trains and another validates, else worth a look."""
    by_image: dict[bytes, list[Case]] = {}
    for case in cases:
        if case.id in image_sha256:
            by_image.setdefault(image_sha256[case.id], []).append(case)
    findings = []
    for first, *copies in by_image.values():
        for copy in copies:
            leaks = copy.split != first.split
            findings.append(
                Finding(
                    ERROR if leaks else WARNING,
                    "duplicate-image",
                    copy.id,
                    short_name(copy, copy.images[0]) if copy.images else "",
                    f"the voxels of case {first.id}" + (f", which is in {first.split}" if leaks else ""),
                    f"an image of its own in {copy.split}" if leaks else "an image of its own",
                    "take one of the two out, or give both one patient",
                )
            )
    return findings


def make_fingerprint(facts: Sequence[Facts], manifest: Manifest) -> dict[str, Any]:
    """Sizes, spacings, intensities and class volumes over all cases that could be read."""
    if not facts:
        return {"cases": 0}
    labels = sorted({label for fact in facts for label in fact.volumes_ml} | set(manifest.labels) - {0})
    intensity = np.array([fact.intensity for fact in facts if fact.channels == facts[0].channels])
    names = manifest.channels if len(manifest.channels) == facts[0].channels else range(facts[0].channels)
    return {
        "cases": len(facts),
        "channels": [str(name) for name in names],
        "size": _spread([fact.shape for fact in facts]),
        "prepared_size": _spread([fact.prepared for fact in facts]),
        "spacing_mm": _spread([fact.spacing_mm for fact in facts]),
        "orientations": dict(sorted(_count([fact.orientation for fact in facts]).items())),
        "intensity": [
            dict(zip(_STATISTICS, np.median(channel, axis=0).round(4).tolist(), strict=True))
            for channel in intensity.swapaxes(0, 1)
        ],
        "volumes_ml": {
            str(label): {
                "name": manifest.labels.get(label, str(label)),
                "cases": len(volumes := [fact.volumes_ml[label] for fact in facts if label in fact.volumes_ml]),
                **({k: round(float(f(volumes)), 4) for k, f in _MIN_MEDIAN_MAX.items()} if volumes else {}),
            }
            for label in labels
        },
    }


def _beyond_memory(case: Case, config: Config) -> Finding:
    """The machine is too small for it; its files may well be sound."""
    found = f"too little memory to check it: {available_memory() >> 20} MB free"
    expected = f"about {bytes_of_case([case], config.data) >> 20} MB"
    return Finding(ERROR, "memory", case.id, "", found, expected, "use a machine, or a job, with more memory")


def _check_case(case: Case, manifest: Manifest, config: Config) -> tuple[Facts | None, list[Finding]]:
    raw, findings = examine_case(case, channels=len(manifest.channels), labels=manifest.labels)
    if raw is None:
        return None, findings
    try:
        geometry = make_geometry(raw.image_cxyz, raw.affine, config.data)
    except DataError as error:
        findings.append(Finding(ERROR, "grid", case.id, "", error.message, "a grid with voxels", error.fix))
        return None, findings
    refuse_beyond_memory(geometry, len(raw.image_cxyz))
    size = config.patches.size
    if size != "full" and any(n < edge for n, edge in zip(geometry.size, size, strict=True)):
        found, expected = f"{geometry.size} voxels once prepared", f"at least the patch {size}"
        fix = "it is padded with zeros; lower patches.size if many are"
        findings.append(Finding(WARNING, "small", case.id, short_name(case, case.images[0]), found, expected, fix))
    return _facts(case, raw, geometry), findings


def _facts(case: Case, raw: RawCase, geometry: Geometry) -> Facts:
    axes = list(geometry.axes)
    spacing = voxel_sizes(raw.affine)[axes]
    counts = count_labels(raw.label_xyz) if raw.label_xyz is not None else np.zeros(1, np.int64)
    ml = float(spacing.prod()) / 1000
    return Facts(
        case=case.id,
        shape=tuple(geometry.shape[axis] for axis in axes),
        prepared=geometry.size,
        spacing_mm=tuple(round(float(mm), 4) for mm in spacing),
        orientation="".join(aff2axcodes(raw.affine)),
        channels=len(raw.image_cxyz),
        intensity=tuple(_intensity(channel) for channel in raw.image_cxyz),
        volumes_ml={label: count * ml for label, count in enumerate(counts.tolist()) if label and count},
        labels=_prepared_labels(raw, geometry),
        image_sha256=bytes.fromhex(raw.image_sha256),
    )


def _prepared_labels(raw: RawCase, geometry: Geometry) -> tuple[int, ...]:
    """Slices, a crop or resampling can leave a label out."""
    if raw.label_xyz is None:
        return ()
    return tuple(np.unique(geometry.apply(raw.label_xyz, linear=False)).tolist())


def _intensity(channel: np.ndarray) -> tuple[float, ...]:
    values = channel.ravel()[:: max(1, channel.size // _SAMPLES)].astype(np.float64)
    values = values[values != 0] if values.any() else values
    return (float(values.mean()), float(values.std()), *np.percentile(values, (0.5, 50, 99.5)).tolist())


def _compare_cases(facts: Sequence[Facts], config: Config) -> list[Finding]:
    """What is wrong only in comparison with the other cases."""
    findings = []
    channels = _count([fact.channels for fact in facts])
    usual = max(channels, key=lambda count: channels[count], default=0)
    fix = "add the missing modality, save pictures all as grey or all as RGB, or take the case out"
    findings += [
        Finding(ERROR, "missing-modality", fact.case, "", f"{fact.channels} channels", f"{usual} as in most cases", fix)
        for fact in facts
        if fact.channels != usual
    ]
    if config.data.spacing is None and config.data.size is None and facts:
        spacings = np.array([fact.spacing_mm for fact in facts])
        if (spacings.max(axis=0) > 1.1 * spacings.min(axis=0)).any():
            low, high = spacings.min(axis=0).tolist(), spacings.max(axis=0).tolist()
            middle = np.median(spacings, axis=0).round(3).tolist()
            fix = f"set data.spacing, e.g. to the median {middle}"
            found = f"spacings from {low} to {high} mm"
            findings.append(Finding(WARNING, "spacing", "", "", found, "one spacing", fix))
    if config.data.orientation is None and len(turns := _count([fact.orientation for fact in facts])) > 1:
        fix = "set data.orientation, e.g. RAS"
        findings.append(Finding(WARNING, "orientation", "", "", f"orientations {turns}", "one orientation", fix))
    return findings


def _check_split(manifest: Manifest, facts: Sequence[Facts], configs: Sequence[Config]) -> list[Finding]:
    """Whether the cases can be split as asked for, in each fold, without a patient or an image in two parts."""
    if not manifest.cases:
        return []  # why there are none has been found already
    labels = {fact.case: fact.labels for fact in facts}
    strata = label_strata(labels)
    if configs[0].predicts_outcomes:
        strata = _strata_of_targets(manifest.cases, configs[0])
    images = {fact.case: fact.image_sha256 for fact in facts}
    findings: list[Finding] = []
    for config in configs:
        split, faults = _split(manifest.cases, config, strata)
        findings += [*faults, *find_duplicates(split or manifest.cases, images)]
        findings += check_test_cases(split, config.data.split)
        findings += [] if config.predicts_outcomes else _check_classes(split, labels, config)
    return list(dict.fromkeys(findings))


def _check_classes(split: Sequence[Case], labels: Mapping[str, tuple[int, ...]], config: Config) -> list[Finding]:
    """Classes that no case of a part has; not where a case could not be read, as that one might."""
    if not split or any(case.id not in labels for case in split):
        return []
    found = sorted({label for case in split for label in labels[case.id]} - {0})
    if not found:
        fix = "check that labels and images were not swapped, and what data.slices and data.size leave"
        return [Finding(ERROR, "class-missing", "", "", "no labelled voxel in any case", "at least one", fix)]
    classes = {name: of for name, of in classes_of(config.data.regions, found).items() if set(of) & set(found)}
    training, validation = ([labels[case.id] for case in split if case.split == part] for part in (TRAIN, VAL))
    return check_classes(classes, training, validation)


def _strata_of_targets(cases: Sequence[Case], config: Config) -> dict[str, str]:
    try:
        return target_strata(config, cases)
    except DataError:  # which `check_outcomes` names
        return {}


def _split(cases: Sequence[Case], config: Config, strata: Mapping[str, str]) -> tuple[list[Case], list[Finding]]:
    """(The cases as they are split, nothing) or (nothing, why they cannot be)."""
    try:
        return split_cases(cases, config.data.split, strata), []
    except DataError as error:
        return [], _as_findings(error, "split", "a split of these cases")


def check_outcomes(
    cases: Sequence[Case], configs: Sequence[Config], build_task: BuildTask | None = None
) -> list[Finding]:
    """What is wrong with what a table says of the cases: as each of the configs, which may differ in their fold, would
    split and train on them."""
    findings: list[Finding] = []
    try:
        for config in configs if cases else ():
            split, faults = _split(cases, config, target_strata(config, cases))
            findings += (
                [*faults, *_faults_of_any_split(config, cases)] if faults else examine_outcomes(config, split)[1]
            )
            findings += _check_task(config, split, findings, build_task) if split and build_task else []
    except DataError as error:
        findings += _as_findings(error, "columns", "one of that name")
    return list(dict.fromkeys(findings))


def _faults_of_any_split(config: Config, cases: Sequence[Case]) -> list[Finding]:
    """What is wrong with cells, however the cases are split: found as if all trained."""
    findings = examine_outcomes(config, [replace(case, split=TRAIN) for case in cases])[1]
    return [finding for finding in findings if finding.level == ERROR]


def _check_task(
    config: Config, split: Sequence[Case], known: Sequence[Finding], build_task: BuildTask
) -> list[Finding]:
    """What the task refuses of the config, for the cases whose outcome is sound; nothing where they cannot train."""
    faulty = {finding.case for finding in known if finding.level == ERROR and finding.code in _BAD_OUTCOMES}
    sound = [case for case in split if case.id not in faulty]
    if not sound or any(finding.level == ERROR and not finding.case for finding in known):
        return []
    outcomes, _ = examine_outcomes(config, sound)
    try:
        build_task(config, outcomes)
    except (ConfigError, DataError) as error:
        return _as_findings(error, "task", "another")
    return []


def _as_findings(error: VoxscaleError, code: str, otherwise: str) -> list[Finding]:
    """A finding for each line of an error: where, what was found, what was expected (unless it says, `otherwise`)."""
    findings = []
    for line in error.message.splitlines():
        stated, _, expected = line.partition(", expected ")
        where, _, found = stated.rpartition(": found ")
        findings.append(Finding(ERROR, code, "", where, found, expected or otherwise, error.fix))
    return findings


def _check_regions(facts: Sequence[Facts], config: Config) -> list[Finding]:
    found = sorted({label for fact in facts for label in fact.labels} - {0})
    unknown = sorted({label for labels in (config.data.regions or {}).values() for label in labels} - set(found))
    if not facts or not unknown:
        return []
    fix = "name labels that the data has in data.regions"
    return [Finding(ERROR, "regions", "", "", f"labels {found}", f"{unknown} as well, which data.regions names", fix)]


_MIN_MEDIAN_MAX: dict[str, Callable[..., Any]] = {"min": np.min, "median": np.median, "max": np.max}


def _spread(rows: Sequence[tuple[float, ...]]) -> dict[str, list[float]]:
    return {name: function(np.array(rows), axis=0).round(4).tolist() for name, function in _MIN_MEDIAN_MAX.items()}


def _count(values: Sequence[Any]) -> dict[Any, int]:
    return {value: list(values).count(value) for value in dict.fromkeys(values)}
