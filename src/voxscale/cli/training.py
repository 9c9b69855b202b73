"""Verbs that train, evaluate and predict."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from voxscale.cli.options import (
    After,
    Anywhere,
    ConfigPath,
    Debug,
    DebugComm,
    Detach,
    Devices,
    DryRun,
    Json,
    Mirror,
    Nodes,
    OfConfig,
    Overrides,
    RayAddress,
    Restarts,
    RunPath,
    SiteName,
    Where,
)
from voxscale.cli.telling import tell_commands, tell_submitted
from voxscale.command import answer

if TYPE_CHECKING:
    from voxscale.config.schema import Config
    from voxscale.launch.local import Evaluation
    from voxscale.launch.ray_run import RayPlacement
    from voxscale.launch.sbatch import Placement


def demo(
    overrides: OfConfig = None,
    like: Annotated[
        Literal["brats", "btcv", "distmis", "mace"] | None,
        typer.Option(help="Make data in the format of this dataset, and train the recipe for it.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The run folder, its data beside it; with --like a folder for data, config.yaml and run. "
            "Default: runs/demo, or runs/demo-LIKE.",
            show_default=False,
        ),
    ] = None,
    devices: Devices = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train on synthetic volumes: the first minute.

    Makes the volumes, prepares them, trains on the local devices, evaluates whole volumes, and prints the Dice on
    held-out cases beside what a threshold alone reaches. With --like the files are laid out as that dataset's, and the
    network is small; of mace, a table of patients with outcomes, it prints the C-index.
    """
    from voxscale.launch.demo import make_plain_demo, render_scores, score_demo, score_threshold, write_demo
    from voxscale.launch.start import train_here
    from voxscale.report.listing import is_finished
    from voxscale.report.write import refresh_report, reporting, seen_in

    began = time.monotonic()
    out = (out or Path("runs") / (f"demo-{like}" if like else "demo")).resolve()
    config, root = write_demo(like, out, overrides or ()) if like else (make_plain_demo(out, overrides or ()), out)
    with reporting(root):
        opened = train_here(config, root, os.environ, devices=devices, fresh=is_finished(root))
    page = refresh_report(opened.run.root)
    scores = score_demo(opened) | ({} if like else {"threshold_dice": score_threshold(opened)})
    seconds = time.monotonic() - began
    answer(
        as_json,
        {"run": str(opened.run.root), "report": str(page) if page else None, **scores, "time_s": round(seconds, 1)},
        f"{render_scores(scores)}, {seconds:.0f} s, run folder {opened.run.root}{seen_in(page)}",
    )


def train(
    config: ConfigPath,
    overrides: Overrides = None,
    on: Anywhere = "local",
    nodes: Nodes = None,
    devices: Devices = "auto",
    site: SiteName = None,
    address: RayAddress = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder; default: runs/ and the config's name.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a run that is there is moved aside.")] = False,
    dry_run: DryRun = False,
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Write the run folder and print the lines to start it by hand.")
    ] = False,
    folds: Annotated[
        Literal["all"] | None,
        typer.Option(help="Train every fold of data.split into DIR/fold-N; score all together."),
    ] = None,
    restarts: Restarts = None,
    detach: Detach = False,
    after: After = None,
    debug_comm: DebugComm = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace a few steps of each rank into DIR/profile, and say what cost most.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, or continue an unfinished run.

    A data folder in place of CONFIG is init and train in one. On a cluster the job is checked, submitted and followed;
    inside an allocation it runs there. On Ray it runs on the cluster that is there, or on one started here.
    """
    from voxscale.launch.given import apart_from_site, config_or_data, default_run, placed, placed_on_ray

    of_config, of_site = apart_from_site(overrides)
    root = (run or default_run(config)).resolve()
    for_jobs: dict[str, Any] = {"after": after, "detach": detach, "debug_comm": debug_comm}
    for_training: dict[str, Any] = {"restarts": restarts, "profile": profile}
    on_ray = placed_on_ray(
        on, address, nodes, devices, site or of_site, **for_jobs, **for_training, no_start=no_start
    )  # fmt: skip
    place = placed(on, nodes, devices, site, of_site, os.environ, **for_jobs, **for_training, no_start=no_start)
    there = place.site if place is not None else None
    settled = config_or_data(config, of_config, os.environ, site=there, say=partial(print, file=sys.stderr))
    if debug_comm and on == "local":
        _debug_communication()
    how: dict[str, Any] = {"fresh": fresh, "folds": folds is not None}
    here: dict[str, Any] = {"devices": devices, "profile": profile}
    if place is not None:
        if not _train_by_job(settled, root, place, **how, dry_run=dry_run, as_json=as_json):
            return
    elif dry_run or no_start:
        _tell_how(settled, root, on_ray, **how, **here, write=no_start, as_json=as_json)
        return
    else:
        _train_now(settled, root, on_ray, **how, **here, restarts=restarts or 0)
    _tell_training(root, folds=folds is not None, profile=profile, as_json=as_json)


def _debug_communication() -> None:
    """Make NCCL and torch say what they do, in this process and in the ranks that it starts."""
    from voxscale.launch.sbatch import DEBUG_COMMUNICATION

    os.environ.update(DEBUG_COMMUNICATION)


def _train_by_job(
    config: "Config", root: Path, place: "Placement", *, fresh: bool, folds: bool, dry_run: bool, as_json: bool
) -> bool:
    """Whether the training was waited for: else its jobs are printed, or submitted and left alone."""
    from voxscale.launch.cluster_run import draft_submission, train_on_slurm
    from voxscale.report.write import reporting

    submission = draft_submission(config, root, os.environ, place, fresh=fresh, folds=folds)
    if dry_run:
        texts = submission.as_texts()
        answer(as_json, {"run": str(root), "jobs": texts}, "\n".join(text for _, text in texts))
        return False
    with reporting(root):
        jobs = train_on_slurm(submission, os.environ, detach=place.detach)
    if place.detach and jobs:
        tell_submitted(as_json, "run", root, jobs)
        return False
    return True


def _tell_how(
    config: "Config",
    root: Path,
    on_ray: "RayPlacement | None",
    *,
    fresh: bool,
    folds: bool,
    devices: str,
    profile: bool,
    write: bool,
    as_json: bool,
) -> None:
    """Print the lines that would train; with `write` the run folder is written for them."""
    from voxscale.launch.folds import fold_commands
    from voxscale.launch.ray_run import commands_on_ray
    from voxscale.launch.start import commands_for

    if on_ray is not None:
        commands = commands_on_ray(config, root, os.environ, on_ray, fresh=fresh, folds=folds)
    else:
        commands = (fold_commands if folds else commands_for)(
            config, root, os.environ, devices=devices, fresh=fresh, write=write, profile=profile
        )
    tell_commands(as_json, root, commands)


def _train_now(
    config: "Config",
    root: Path,
    on_ray: "RayPlacement | None",
    *,
    fresh: bool,
    folds: bool,
    devices: str,
    profile: bool,
    restarts: int,
) -> None:
    """Train to the end, on this machine or on Ray."""
    from voxscale.launch.folds import train_folds
    from voxscale.launch.ray_run import train_on_ray
    from voxscale.launch.start import train_here
    from voxscale.report.write import reporting

    train_one = (
        partial(train_here, environ=os.environ, devices=devices, fresh=fresh, restarts=restarts, profile=profile)
        if on_ray is None
        else partial(train_on_ray, environ=os.environ, place=on_ray, fresh=fresh)
    )
    with reporting(root):
        if folds:
            train_folds(config, root, os.environ, train_one)
        else:
            train_one(config, root)


def _tell_training(root: Path, *, folds: bool, profile: bool, as_json: bool) -> None:
    """How a training went that has ended, and what its steps cost if that was asked for."""
    from voxscale.files import read_json
    from voxscale.report.summary import render_folds, render_training
    from voxscale.report.write import refresh_report, seen_in
    from voxscale.runs import runs_of

    metrics, page = read_json(root / "metrics.json"), refresh_report(root)
    text = (
        f"{render_folds(metrics)}\nrun folders in {root}" if folds else f"{render_training(metrics)}, run folder {root}"
    )
    traced = [each for each in runs_of(root) if each.top_costs.exists()] if profile else []
    where = {"profile": [str(each.top_costs.parent) for each in traced]} if profile else {}
    costs = [each.top_costs.read_text().rstrip() for each in traced]
    told: dict[str, Any] = {"run": str(root), "report": str(page) if page else None, **metrics, **where}
    answer(as_json, told, "\n\n".join([text + seen_in(page), *costs]))


def evaluate(
    run: RunPath,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="site.KEY=VALUE", help="Override fields of the cluster's profile.")
    ] = None,
    split: Annotated[
        Literal["val", "test", "train"] | None, typer.Option(help="Which cases; default: val.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DATA", help="Labelled data that the run has not seen, in any format.", show_default=False
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="best, last or step-XXXXXXXX.")] = "best",
    mirror: Mirror = None,
    on: Where = "local",
    nodes: Nodes = None,
    devices: Devices = "1",
    site: SiteName = None,
    detach: Detach = False,
    after: After = None,
    debug_comm: DebugComm = False,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Folder below RUN/evaluations; default: by what is evaluated.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate a run on whole volumes.

    Writes one row per case, and their summary, to RUN/evaluations. A folder of folds is evaluated as one ensemble. On a
    cluster it waits for the job that trains RUN.
    """
    from voxscale.launch.given import evaluation_name, given_runs, only_of_site, placed, plain_name
    from voxscale.launch.local import Evaluation
    from voxscale.runs import RunFolder

    out = RunFolder(run.resolve()).evaluation(
        plain_name(name) if name is not None else evaluation_name(split, data, checkpoint, mirror)
    )
    of_site = only_of_site(overrides)
    place = placed(on, nodes, devices, site, of_site, os.environ, after=after, debug_comm=debug_comm, detach=detach)
    choice = Evaluation(out, split or "val", plain_name(checkpoint), data, mirror)
    if place is None:
        if debug_comm:
            _debug_communication()
        _evaluate_here(run, choice, devices)
    else:
        from voxscale.launch.cluster_run import evaluate_on_slurm

        jobs = evaluate_on_slurm(given_runs(run), run.resolve(), choice, os.environ, place)
        if detach and jobs:
            submitted = {"evaluation": str(out), "state": "submitted", "jobs": [vars(job) for job in jobs]}
            answer(as_json, submitted, f"the evaluation will be in {out}")
            return
    _tell_evaluation(run, out, as_json=as_json)


def _evaluate_here(run: Path, choice: "Evaluation", devices: str) -> None:
    from voxscale.launch.given import given_runs
    from voxscale.launch.local import evaluate_local
    from voxscale.launch.machine import look_at_machine
    from voxscale.plan.resources import choose_devices

    machine = look_at_machine()
    count, _ = choose_devices(devices, machine, machine.gpus or machine.cpus)
    evaluate_local(given_runs(run), count, os.environ, choice)


def _tell_evaluation(run: Path, out: Path, *, as_json: bool) -> None:
    """What an evaluation found that has ended."""
    from voxscale.files import read_json
    from voxscale.report.summary import render_summary
    from voxscale.report.write import refresh_report, seen_in

    metrics, page = read_json(out / "metrics.json"), refresh_report(run)
    content: dict[str, Any] = {"evaluation": str(out), "report": str(page) if page else None, **metrics}
    answer(as_json, content, f"{render_summary(metrics['summary'])}\nwrote {out}{seen_in(page)}")


def predict(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN... FILES", help="Run folders, then images, folders of images or a dataset."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR|FILE", help="Where predictions go; of outcomes a .csv table.")],
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Write probabilities, 4D.")] = False,
    masks: Annotated[bool, typer.Option("--masks", help="Write a mask for each class, 4D.")] = False,
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="best, last or step-XXXXXXXX.")] = "best",
    mirror: Mirror = None,
    overlap: Annotated[
        float | None, typer.Option(metavar="SHARE", min=0, max=0.95, help="Of windows; default: as the run validates.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make anew what is there.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict images, or the outcomes of a table's cases. Label maps have each image's shape, spacing and orientation.

    Several runs, or a folder of folds, are averaged. Images are .nii or .nii.gz, with channels in a fourth dimension or
    as files CASE_0000, CASE_0001 and so on. What is done already is not done again.
    """
    from voxscale.errors import ConfigError
    from voxscale.launch.given import plain_name
    from voxscale.launch.machine import look_at_machine
    from voxscale.train.prediction import Choice, predict_paths

    if probabilities and masks:
        raise ConfigError("--probabilities and --masks: expected one of them", fix="run the command once for each")
    kind: Literal["probabilities", "masks", "labels"]
    kind = "probabilities" if probabilities else "masks" if masks else "labels"
    choice = Choice(kind, plain_name(checkpoint), overlap, mirror)
    cpus = look_at_machine().cpus
    outcome = predict_paths(paths, out, os.environ, choice=choice, overwrite=overwrite, threads=cpus)
    answer(as_json, {"out": str(out), **outcome.as_json()}, f"{outcome}, in {out}")
    if outcome.error is not None and not as_json:
        raise outcome.error
    if outcome.error is not None:
        raise typer.Exit(outcome.error.exit_code)
