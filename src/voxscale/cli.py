"""The verbs, nothing else. Only typer is imported here: a login node answers at once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from voxscale.config.schema import Config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train 3D medical-imaging models from one config, unchanged from a laptop to a cluster.",
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config (YAML or JSON), or data.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override fields, e.g. optimizer.lr=2e-4."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Devices = Annotated[
    str, typer.Option(metavar="N", help="Devices on this node; auto: all GPUs, or one process per CPU.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from voxscale import __version__

        typer.echo(f"voxscale {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    return


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run folder; its data goes beside it.")] = Path(
        "runs/demo"
    ),
    devices: Devices = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train on synthetic volumes: the first minute.

    Makes the volumes, prepares them, trains on the local devices, evaluates whole volumes, and prints the Dice on
    held-out cases beside what a threshold alone reaches.
    """
    from voxscale.config.load import make_config
    from voxscale.launch.demo import DEMO, score_demo
    from voxscale.launch.start import train_here

    began = time.monotonic()
    out = out.resolve()
    content = {**DEMO, "data": {**DEMO["data"], "source": f"{out.name}-data"}}
    config = make_config(content, name="demo", base=out.parent)
    opened = train_here(config, out, os.environ, devices=devices, fresh=_is_finished(out))
    scores = score_demo(opened)
    seconds = time.monotonic() - began
    result = {"run": str(opened.run.root), **scores, "time_s": round(seconds, 1)}
    _show(
        as_json,
        result,
        f"Dice on {scores['num_test']} held-out cases {scores['dice']:.3f}"
        f" (a threshold alone: {scores['threshold_dice']:.3f}), {seconds:.0f} s, run folder {opened.run.root}",
    )


@app.command()
def init(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A data folder, archive, table or list file.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the config.")] = Path("config.yaml"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a config for data: its format, patches that its volumes fill, its own split.

    DATA is a Decathlon task (also as .tar), nnU-Net raw data, a MONAI list file, a CSV or TSV table, DistMIS record
    files, or a folder of image and label pairs.
    """
    from voxscale.config.load import render_config
    from voxscale.errors import ConfigError
    from voxscale.files import write_text

    if out.exists():
        raise ConfigError(f"--out {out}: exists", fix="choose another name, or remove it")
    config = _config_or_data(data, overrides)
    write_text(out, render_config(config))
    found = {"format": config.data.format, "source": config.data.source, "patch": config.patches.size}
    _show(
        as_json,
        {"config": str(out), **found},
        f"found {found['format']} data; wrote {out}; train with: voxscale train {out}",
    )


@app.command()
def doctor(config: ConfigPath, overrides: Overrides = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check every case: all faults at once, and what the dataset is like.

    Reads each volume to its end. Exit code 3 if training on the data would be unsafe.
    """
    from voxscale.data.build import store_root
    from voxscale.data.doctor import examine_dataset
    from voxscale.launch.machine import look_at_machine
    from voxscale.report.diagnosis import render_diagnosis

    settled = _config_or_data(config, overrides, strict=False)
    root = store_root(settled.data, os.environ)
    diagnosis = examine_dataset(settled, root, threads=look_at_machine().cpus)
    _show(as_json, diagnosis.as_json(), render_diagnosis(diagnosis))
    if not diagnosis.is_safe:
        raise typer.Exit(3)


@app.command()
def show(
    config: ConfigPath,
    overrides: Overrides = None,
    case: Annotated[str | None, typer.Option(metavar="ID", help="Which case; default: the first.")] = None,
    augmented: Annotated[bool, typer.Option("--augmented", help="Draw augmented patches of it.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png, or a .gif that scrolls.")] = Path("case.png"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw a case as it will be trained on, labels in colour.

    A .png shows the slices through the middle of what is labelled, a .gif scrolls through the volume.
    """
    from voxscale.data.show import choose_case, draw_augmented, draw_case, read_prepared, save_pictures
    from voxscale.launch.folder import load_cases

    settled = _config_or_data(config, overrides)
    manifest = load_cases(settled, os.environ, threads=1)
    chosen = choose_case(manifest, case, out)
    prepared = read_prepared(chosen, manifest, settled)
    pictures = draw_augmented(prepared, settled) if augmented else draw_case(prepared, manifest.channels)
    save_pictures(pictures, out)
    _show(
        as_json,
        {"case": chosen.id, "file": str(out), "shape": prepared.geometry.size},
        f"case {chosen.id}: wrote {out}",
    )


@app.command()
def prepare(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A config, or data.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every chunk; rebuild what is damaged.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List prepared datasets and their sizes.")] = False,
    prune: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Delete those that were not used for so many days.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prepare the cases ahead of training; list and prune what was prepared.

    An interrupted build goes on where it was. `voxscale train` does this by itself.
    """
    from voxscale.data.build import default_store, rebuild_damaged, store_root
    from voxscale.data.shelf import list_stores, prune_stores, render_stores
    from voxscale.errors import ConfigError
    from voxscale.launch.folder import load_cases, prepare_cases
    from voxscale.launch.machine import look_at_machine

    settled = _config_or_data(config, overrides) if config is not None else None
    root = store_root(settled.data, os.environ) if settled is not None else default_store(os.environ)
    if list_them or prune is not None:
        found = prune_stores(root, idle_days=prune) if prune is not None else list_stores(root)
        done = "deleted" if prune is not None else "stores"
        _show(as_json, {"root": str(root), done: [item.as_json() for item in found]}, render_stores(found, root, done))
        return
    if settled is None:
        raise ConfigError("prepare: found no CONFIG", fix="give a config or data, or --list or --prune DAYS")
    cpus = look_at_machine().cpus
    manifest = load_cases(settled, os.environ, threads=cpus)
    store = prepare_cases(manifest, settled, os.environ, threads=cpus)
    rebuilt = rebuild_damaged(store, root, threads=cpus) if verify else []
    if rebuilt:
        store = prepare_cases(manifest, settled, os.environ, threads=cpus)
    _show(
        as_json,
        {
            "store": str(store.folder),
            "cases": len(store),
            "channels": store.channels,
            "labels": store.labels,
            **({"rebuilt": rebuilt} if verify else {}),
        },
        f"{len(store)} cases ready in {store.folder}"
        + (f"; {len(rebuilt)} were damaged and rebuilt" if rebuilt else ""),
    )


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    on: Annotated[Literal["local"], typer.Option(help="Where to train.")] = "local",
    devices: Devices = "auto",
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder; default: runs/ and the config's name.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; a run that is there is moved aside.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run; write nothing.")] = False,
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Write the run folder and print the lines to start it by hand.")
    ] = False,
    folds: Annotated[
        Literal["all"] | None, typer.Option(help="Train every fold of data.split, each into DIR/fold-N.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, or continue an unfinished run.

    A data folder in place of CONFIG is init and train in one.
    """
    from voxscale.files import read_json
    from voxscale.launch.start import train_folds, train_here

    settled = _config_or_data(config, overrides)
    root = (run or Path("runs") / (config.resolve().name if config.is_dir() else config.stem)).resolve()
    if dry_run or no_start:
        _show_commands(settled, root, devices=devices, fresh=fresh, write=no_start, as_json=as_json)
        return
    if folds is not None:
        result = train_folds(settled, root, os.environ, devices=devices, fresh=fresh)
        text = f"{result['metric']} over {len(result['folds'])} folds: {result['mean']:.4f} ± {result['std']:.4f}"
        _show(as_json, result, f"{text}, run folders in {root}")
        return
    opened = train_here(settled, root, os.environ, devices=devices, fresh=fresh)
    metrics = read_json(opened.run.metrics)
    best = metrics.get("best")
    score = f"best {best['metric']} {best['value']:.4f} at step {best['step']}, " if best else ""
    _show(
        as_json,
        {"run": str(opened.run.root), **metrics},
        f"done: {score}{metrics.get('wall_s', 0):.0f} s of training, run folder {opened.run.root}",
    )


@app.command()
def evaluate(
    run: RunPath,
    split: Annotated[Literal["val", "test", "train"], typer.Option(help="Which cases.")] = "val",
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="best, last or step-XXXXXXXX.")] = "best",
    devices: Devices = "1",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Folder below RUN/evaluations; default: the split.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate a run on whole volumes.

    Writes one row per case, and their summary, to RUN/evaluations.
    """
    from voxscale.errors import ConfigError
    from voxscale.files import read_json
    from voxscale.launch.local import evaluate_local
    from voxscale.launch.machine import look_at_machine
    from voxscale.plan.resources import choose_devices
    from voxscale.runs import RunFolder

    folder = RunFolder(run.resolve())
    if not folder.exists:
        raise ConfigError(f"{run}: not a run folder", fix="give a folder that `voxscale runs` lists")
    out = folder.evaluation(_plain_name(name or split))
    machine = look_at_machine()
    count, _ = choose_devices(devices, machine, machine.gpus or machine.cpus)
    evaluate_local(folder, count, os.environ, split=split, checkpoint=_plain_name(checkpoint), name=out.name)
    metrics = read_json(out / "metrics.json")
    lines = [
        f"{metric}  mean {row['mean']:.4f}  median {row['median']:.4f}" for metric, row in metrics["summary"].items()
    ]
    _show(as_json, {"evaluation": str(out), **metrics}, "\n".join([*lines, f"wrote {out}"]))


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs: state, progress, best metric, age."""
    from voxscale.report.listing import list_runs, render_runs

    rows = list_runs(folder)
    _show(
        as_json,
        {"runs": [row.as_json() for row in rows]},
        render_runs(rows) if rows else f"no runs in {folder}",
    )


def main() -> None:
    """Run the verb; every failure becomes one message and the exit code of its kind."""
    from voxscale.errors import ConfigError, InfrastructureError, StoppedEarly, VoxscaleError

    failure: VoxscaleError
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _raise_signalled)
    try:
        code = app(prog_name="voxscale", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except VoxscaleError as error:
        failure = error
    except KeyboardInterrupt:
        failure = StoppedEarly("interrupted", fix="start the same command again")
    except _Signalled as signalled:
        failure = StoppedEarly(f"stopped by {signalled} before the first step", fix="start the same command again")
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        failure = InfrastructureError(what, fix="check that the place exists and may be read and written")
        failure.__cause__ = error
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click and typer each have their own class of that name
            typer.echo(error.format_message(), err=True)  # type: ignore[attr-defined]
            sys.exit(2)
        if hasattr(error, "format_message"):  # a usage error
            failure = ConfigError(error.format_message(), fix="see `voxscale --help` or `voxscale VERB --help`")
        else:
            failure = VoxscaleError(f"unexpected {type(error).__name__}: {error}", fix="add --debug for the traceback")
            failure.__cause__ = error
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if "--debug" in sys.argv:
        import traceback

        traceback.print_exception(failure)
    if "--json" in sys.argv:
        typer.echo(json.dumps({"error": failure.as_json()}))
    else:
        typer.echo(failure.as_text(), err=True)
    sys.exit(failure.exit_code)


class _Signalled(BaseException):
    """A signal came before the training loop listens for signals itself. Libraries swallow what is an Exception."""


def _raise_signalled(number: int, frame: FrameType | None) -> None:
    raise _Signalled(signal.Signals(number).name)


def _config_or_data(path: Path, overrides: list[str] | None, *, strict: bool = True) -> Config:
    from pydantic import ValidationError

    from voxscale.config.load import given_fields, make_config, read_config
    from voxscale.data.build import default_store
    from voxscale.data.guess import guess_config, is_data

    if is_data(path):
        of_data = [override for override in overrides or () if override.startswith("data.")]
        others = [override for override in overrides or () if override not in of_data]
        given = given_fields(of_data, "data")
        try:
            content = guess_config(path, default_store(os.environ), given, strict=strict)
        except ValidationError:  # said in words by the same check of the whole
            content = {"data": {"source": str(path), **given}}
        return make_config(content, others, name=str(path), base=Path())
    return read_config(path, overrides or ())


def _show_commands(config: Config, root: Path, *, devices: str, fresh: bool, write: bool, as_json: bool) -> None:
    from voxscale.launch.folder import draft_run, open_run
    from voxscale.launch.local import render_commands
    from voxscale.launch.machine import look_at_machine

    machine = look_at_machine()
    draft = draft_run(config, root, machine, devices=devices, fresh=fresh)
    if write:
        open_run(draft, machine, os.environ)
    commands = render_commands(draft.run, draft.devices)
    text = "\n".join(f"# {purpose}\n{command}" for purpose, command in commands)
    _show(as_json, {"run": str(root), "commands": [command for _, command in commands]}, text)


def _is_finished(root: Path) -> bool:
    from voxscale.report.listing import describe_run
    from voxscale.runs import RunFolder

    run = RunFolder(root)
    return run.exists and describe_run(run).state in ("done", "failed")


def _plain_name(name: str) -> str:
    import re

    from voxscale.errors import ConfigError

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"{name!r}: found characters that a name cannot have", fix="use letters, digits, . _ -")
    return name


def _show(as_json: bool, content: dict[str, Any], text: str) -> None:
    typer.echo(json.dumps(content) if as_json else text)
