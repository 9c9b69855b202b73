"""Survival: a risk for each case, trained by Cox's partial likelihood, measured over the whole cohort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from voxscale.config.horizons import FollowUp, TimeUnit, same_spans, span_in
from voxscale.config.losses import CoxOptions
from voxscale.config.schema import Config
from voxscale.data.cases import TRAIN
from voxscale.data.outcomes import Outcomes
from voxscale.errors import ConfigError
from voxscale.tasks.brier import brier_metric, integrated_brier_metric, integration_times
from voxscale.tasks.calibration import calibration_metric, calibration_rows
from voxscale.tasks.choosing import metric_problems
from voxscale.tasks.concordance import auc_metric, harrell_metric, uno_metric
from voxscale.tasks.cox import Ties, cox_loss
from voxscale.tasks.hazard import BaselineHazard, CensoringCurve
from voxscale.tasks.own import OwnLoss
from voxscale.tasks.resampling import Metric, bootstrap
from voxscale.tasks.summary import Row, Summary, mean_row

Array = NDArray[np.float64]
_FOLLOWED = 0.95
_RISKS = "risks"  # of each of several runs; no column


class Survival:
    """`training` are (time, event) of the training cases: how they were followed weighs what others show.

    `horizons` maps names such as 1y to times in the table's unit.
    """

    out_channels = 1
    learns_from = True

    def __init__(
        self,
        training: Array,
        horizons: Mapping[str, float],
        *,
        ties: Ties = "efron",
        own: OwnLoss | None = None,
    ) -> None:
        self.horizons = dict(horizons)
        self._ties = ties
        self._own = own
        self.couples_samples = own is None or own.options.batch
        self._censoring = CensoringCurve.fit(training[:, 0], training[:, 1])
        self._baselines: tuple[BaselineHazard, ...] = ()
        # Later events would weigh too much: hardly anyone is followed that long.
        self._tau = max(self.horizons.values(), default=float(np.quantile(training[:, 0], _FOLLOWED)))

    @classmethod
    def build(cls, config: Config, outcomes: Outcomes) -> Survival:
        training = outcomes.of(TRAIN)
        unit = config.data.time_unit
        names = config.validation.horizons or ()
        horizons = {name: span_in(name, unit) for name in names}
        ties = config.loss.ties if isinstance(config.loss, CoxOptions) else "efron"
        task = cls(training, horizons, ties=ties, own=OwnLoss.of(config.loss))
        problems = [*_horizon_problems(names, training, unit), *metric_problems(task, config.validation.metric)]
        if problems:
            fixes = dict.fromkeys(fix for _, fix in problems)
            raise ConfigError.from_findings([problem for problem, _ in problems], fix="; ".join(fixes))
        return task

    def loss_rows(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            return self._own.rows(output, target)
        return torch.cat([output.double(), target.double()], dim=1)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        if self._own is not None:
            return self._own.loss(rows)
        return cox_loss(rows[:, 0], rows[:, 1], rows[:, 2], ties=self._ties)

    def columns(self, *, full: bool) -> tuple[str, ...]:
        return ("time", "event", "risk", *(self._survivals if full else ()))

    def metrics(self, *, full: bool) -> tuple[str, ...]:
        ranked = ("cindex/harrell", "cindex/uno", *(f"auc/{name}" for name in self.horizons))
        if not full:
            return ranked
        at = [f"{metric}/{name}" for metric in ("brier", "calibration") for name in self.horizons]
        return (*ranked, *at, "brier/integrated")

    def choosable(self) -> tuple[str, ...]:
        return self.metrics(full=False)

    def details(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Calibration: for each horizon, groups by predicted survival beside what Kaplan and Meier observe of them."""
        if not self._baselines or not rows:
            return {}
        time, event = _column(rows, "time"), _column(rows, "event")
        tables = {
            name: [asdict(group) for group in calibration_rows(horizon, time, event, _column(rows, f"survival/{name}"))]
            for name, horizon in self.horizons.items()
        }
        return {"calibration": tables} if tables else {}

    def prefers_low(self, metric: str) -> bool:
        return metric.startswith(("brier", "calibration"))

    def worth_a_look(self, row: Row) -> float:
        """The highest risks: how wrong one is cannot be said of a case alone."""
        return float(row["risk"])

    def predict(self, output: Array) -> Row:
        risk = float(output[0])
        if not self._baselines:
            return {"risk": risk}
        survival = self._baselines[0].survival(list(self.horizons.values()), [risk])[0].tolist()
        return {"risk": risk, **dict(zip(self._survivals, survival, strict=True))}

    def average(self, rows: Sequence[Row]) -> Row:
        """Each run's risk stays known: it means something on its own baseline alone."""
        each = {_RISKS: [row["risk"] for row in rows]} if len(rows) > 1 else {}
        return {**mean_row(rows), **each}

    def shown(self, row: Row) -> Row:
        return {name: value for name, value in row.items() if name != _RISKS}

    def known(self, target: Array) -> Row:
        return {"time": float(target[0]), "event": int(target[1])}

    def learn(self, rows: Sequence[Row]) -> None:
        """The baseline hazard, by Breslow, from the risks of the training cases."""
        self._baselines = (BaselineHazard.fit(*(_column(rows, name) for name in ("time", "event", "risk"))),)

    def learnt(self) -> dict[str, Any]:
        return {"baseline": self._baselines[0].as_json()} if self._baselines else {}

    def relearn(self, *contents: dict[str, Any]) -> None:
        self._baselines = tuple(BaselineHazard.from_json(content["baseline"]) for content in contents)

    def summarise(self, rows: Sequence[Row], *, full: bool) -> Summary:
        if not rows:
            return {}
        time, event, risk = (_column(rows, name) for name in ("time", "event", "risk"))
        metrics: dict[str, Metric] = {
            "cindex/harrell": harrell_metric(time, event, risk),
            "cindex/uno": uno_metric(time, event, risk, self._censoring, tau=self._tau),
        }
        for name, horizon in self.horizons.items():
            metrics[f"auc/{name}"] = auc_metric(horizon, time, event, risk, self._censoring)
        if full and self._baselines:
            metrics |= self._probability_metrics(rows)
        summary = bootstrap(metrics, len(rows))
        return {name: summary[name] for name in self.metrics(full=full) if name in summary}

    def _probability_metrics(self, rows: Sequence[Row]) -> dict[str, Metric]:
        time, event = _column(rows, "time"), _column(rows, "event")
        metrics: dict[str, Metric] = {}
        for column, (name, horizon) in zip(self._survivals, self.horizons.items(), strict=True):
            survival = _column(rows, column)
            metrics[f"brier/{name}"] = brier_metric(horizon, time, event, survival, self._censoring)
            metrics[f"calibration/{name}"] = calibration_metric(horizon, time, event, survival)
        known_to = min(self._censoring.known_to, *(baseline.follow_up for baseline in self._baselines))
        times = integration_times(time, known_to)
        if times is not None:
            over_time = self._curves(rows, times)
            metrics["brier/integrated"] = integrated_brier_metric(times, time, event, over_time, self._censoring)
        return metrics

    def _curves(self, rows: Sequence[Row], times: Array) -> Array:
        """(n, times) predicted survival: of several runs the mean, each from its own risks on its own baseline."""
        risks = np.array([row.get(_RISKS, [row["risk"]]) for row in rows], np.float64)
        curves = [baseline.survival(times, of_run) for baseline, of_run in zip(self._baselines, risks.T, strict=True)]
        mean: Array = np.mean(curves, axis=0)
        return mean

    @property
    def _survivals(self) -> tuple[str, ...]:
        return tuple(f"survival/{name}" for name in self.horizons)


def _column(rows: Sequence[Row], name: str) -> Array:
    return np.array([row[name] for row in rows], np.float64)


def _horizon_problems(names: Sequence[str], training: Array, unit: TimeUnit) -> list[tuple[str, str]]:
    """Outside of follow-up nothing is known: neither of events nor of those without."""
    follow_up = FollowUp.of(training)
    problems = [
        (
            f"validate.horizons: found {' and '.join(same)}, which are the same time, expected each time once",
            "leave one of them",
        )
        for same in same_spans(names)
    ]
    return problems + [
        (
            f"validate.horizons: found {name}, which is {span_in(name, unit):.6g} {unit}, expected between the first "
            f"event ({follow_up.first:.6g}) and the end of follow-up ({follow_up.last:.6g}) of the training cases",
            "take it out, or check data.time_unit",
        )
        for name in dict.fromkeys(names)
        if not follow_up.holds(span_in(name, unit))
    ]
