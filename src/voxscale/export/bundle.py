"""A trained run as a MONAI bundle: a folder that MONAI loads and runs to the same output, without voxscale."""

from __future__ import annotations

import contextlib
import filecmp
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from voxscale.config.load import read_config
from voxscale.config.schema import Config
from voxscale.errors import ConfigError
from voxscale.export.inference import Parts, make_inference
from voxscale.export.metadata import make_metadata, render_readme
from voxscale.files import publish, read_json
from voxscale.models import build_model
from voxscale.models.networks import Described, describe_network
from voxscale.plan.plan import Plan
from voxscale.runs import RunFolder
from voxscale.tasks.segmentation import Segmentation
from voxscale.train.trained import find_trained, take_weights, windows_of

_UNTRAINED = ("norm_cross_attn", "skip_layers")  # weights that MONAI's network names and never uses, or names twice


@dataclass(frozen=True)
class Exported:
    out: Path
    origin: dict[str, Any]
    was_there: bool

    def as_json(self) -> dict[str, Any]:
        return {"bundle": str(self.out), **self.origin, "was_there": self.was_there}


def export_bundle(runs: Sequence[RunFolder], out: Path, *, checkpoint: str, mirror: bool | None) -> Exported:
    """Write a bundle to `out`, whole or not at all. Raises ConfigError with all that a bundle cannot hold."""
    run = _only(runs)
    config = read_config(run.config)
    refuse_what_no_bundle_holds(run, config, mirror=mirror)
    config, plan, folder = find_trained(run, checkpoint)
    task = Segmentation.build(config, plan)
    network = _described(config, plan, task)
    weights, digest = _weights(run, config, plan, task, network, folder)
    parts = Parts(network, task, config.data, windows_of(config, plan, mirror=mirror), config.train.precision)
    origin = {"run": run.name, "checkpoint": folder.name, "weights_sha256": digest}
    contents = _contents(parts, run, origin)
    if out.exists():
        _refuse_another(out, contents, weights)
        return Exported(out, origin, was_there=True)
    with publish(out) as temporary:
        _write(temporary, contents, weights)
    return Exported(out, origin, was_there=False)


def refuse_what_no_bundle_holds(run: RunFolder, config: Config, *, mirror: bool | None) -> None:
    """All that MONAI has no part for, at once."""
    problems: list[tuple[str, str]] = []
    if config.predicts_outcomes:
        problems.append(
            (
                f"task {config.task}: expected segmentation: MONAI has no parts for tables and what they encode",
                f"use `voxscale predict {run.root} TABLE.csv --out FILE.csv`",
            )
        )
    elif describe_network(config.model, 1, 1, (16, 16, 16)) is None:
        problems.append(
            (
                f"model {config.model.name}: is no network of MONAI",
                "train unet, segresnet, unetr, swin_unetr or dynunet to export it",
            )
        )
    if config.validation.mirror if mirror is None else mirror:
        problems.append(
            ("validate.mirror: MONAI's windows have no mirror images", "export with --no-mirror, without the average")
        )
    if problems:
        fixes = dict.fromkeys(fix for _, fix in problems)
        raise ConfigError.from_findings(
            [f"run {run.root}: cannot become a bundle: {problem}" for problem, _ in problems], fix="; ".join(fixes)
        )


def _only(runs: Sequence[RunFolder]) -> RunFolder:
    if len(runs) > 1:
        raise ConfigError(
            f"export: found {len(runs)} folds, expected one run: a bundle holds one network",
            fix=f"name one of them, e.g. {runs[0].root}",
        )
    return runs[0]


def _described(config: Config, plan: Plan, task: Segmentation) -> Described:
    described = describe_network(config.model, plan.channels, task.out_channels, plan.patch)
    assert described is not None  # noqa: S101 - refused before
    return described


def _weights(
    run: RunFolder, config: Config, plan: Plan, task: Segmentation, network: Described, folder: Path
) -> tuple[dict[str, torch.Tensor], str]:
    """(The state of the network as MONAI makes it, the digest of the run's weights)."""
    model = build_model(config.model, plan.channels, task.out_channels, patch=plan.patch, seed=config.train.seed)
    _, digest = take_weights(folder, model, run, config, torch.device("cpu"))
    plain = network.build()
    missing, unexpected = plain.load_state_dict(model.state_dict(), strict=False)
    strange = [*unexpected, *(name for name in missing if not any(known in name for known in _UNTRAINED))]
    if strange:
        raise ConfigError(
            f"run {run.root}: MONAI's {network.name} has other weights: {', '.join(strange[:3])}",
            fix="export with the version of MONAI that trained it",
        )
    return {name: tensor.detach().contiguous() for name, tensor in plain.state_dict().items()}, digest


def _contents(parts: Parts, run: RunFolder, origin: dict[str, Any]) -> dict[str, str]:
    metrics = _metrics(run)
    transforms = files("voxscale.export").joinpath("bundle_transforms.py").read_text()
    return {
        "configs/metadata.json": _as_json(make_metadata(parts, run.name, origin, metrics)),
        "configs/inference.json": _as_json(make_inference(parts)),
        "docs/README.md": render_readme(parts, run.name, metrics),
        "scripts/__init__.py": "",
        "scripts/transforms.py": transforms,
    }


def _metrics(run: RunFolder) -> dict[str, float]:
    """The best value of the metric that the run was judged by, if it has come to one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        best = read_json(run.metrics)["best"]
        return {str(best["metric"]): float(best["value"])}
    return {}


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _write(folder: Path, contents: dict[str, str], weights: dict[str, torch.Tensor]) -> None:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "models").mkdir()
    torch.save(weights, folder / "models" / "model.pt")


def _refuse_another(out: Path, contents: dict[str, str], weights: dict[str, torch.Tensor]) -> None:
    """What is there already must be the very bundle that would be written."""
    with tempfile.TemporaryDirectory() as temporary:
        _write(Path(temporary), contents, weights)
        names = [*contents, "models/model.pt"]
        same, _, _ = filecmp.cmpfiles(temporary, out, names, shallow=False)
    if differing := [name for name in names if name not in same]:
        raise ConfigError(
            f"{out}: exists, and is not this bundle: {', '.join(differing[:3])}",
            fix="choose another --out, or remove it",
        )
