"""The classes of a segmentation, and whether the parts of a split have them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from voxscale.data.findings import ERROR, WARNING, Finding

Classes = Mapping[str, tuple[int, ...]]  # the label values that each consists of


def classes_of(regions: Classes | None, labels: Iterable[int]) -> Classes:
    """The config's regions or, without them, the labels found in the data, background left out."""
    return regions or {str(label): (label,) for label in labels if label > 0}


def check_classes(
    classes: Classes, training: Iterable[Collection[int]], validation: Iterable[Collection[int]]
) -> list[Finding]:
    """A class without a training case cannot be learnt; one without a validation case is not validated.

    A case is given by the labels that stand in it. Where there is no case, nothing is missed.
    """
    return [
        *(_missing(ERROR, "training", name, classes[name]) for name in _absent(classes, training)),
        *(_missing(WARNING, "validation", name, classes[name]) for name in _absent(classes, validation)),
    ]


def _absent(classes: Classes, cases: Iterable[Collection[int]]) -> list[str]:
    present = {label for labels in cases for label in (0, *labels)}
    return [name for name, labels in classes.items() if present and present.isdisjoint(labels)]


def _missing(level: str, part: str, name: str, labels: tuple[int, ...]) -> Finding:
    return Finding(
        level,
        "class-missing",
        case="",
        file="",
        found=f"class {name} (label {', '.join(map(str, labels))}) in no {part} case",
        expected="at least one",
        fix="choose another data.split.seed or fold, keep data.split.stratify on, or leave the class out",
    )
