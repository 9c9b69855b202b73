"""Summaries in a terminal."""

from __future__ import annotations

from typing import Any

from voxscale.report.summary import render_summary


def entry(mean: float) -> dict[str, Any]:
    return {"mean": mean, "ci95": [mean - 0.1, mean + 0.1]}


def test_metrics_of_the_cases_as_a_whole_stand_beside_those_of_classes() -> None:
    names = ["accuracy", "auroc/a", "auroc/b", "auroc/mean"]
    lines = render_summary({name: entry(0.1 * number) for number, name in enumerate(names, start=5)}).splitlines()
    assert [line.split() for line in lines] == [
        ["accuracy", "auroc"],
        ["a", "0.600"],
        ["b", "0.700"],
        ["mean", "0.800"],
        ["all", "0.500"],
        ["95", "%", "0.400–0.600", "0.700–0.900"],
    ]


def test_what_one_metric_lacks_stands_where_the_others_have_it() -> None:
    names = ["brier/2y", "brier/5y", "auc/1y", "auc/2y", "auc/5y"]
    lines = render_summary({name: entry(0.5) for name in names}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["1y", "2y", "5y"]
