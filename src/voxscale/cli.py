"""The verbs, nothing else. Next to nothing is imported here: a login node answers at once."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from voxscale.command import answer, run_verb

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
Mirror = Annotated[
    bool | None,
    typer.Option("--mirror/--no-mirror", help="Average over mirror images; default: as the run validates."),
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
    overrides: Overrides = None,
    like: Annotated[
        Literal["brats", "btcv", "distmis"] | None,
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
    network is small.
    """
    from voxscale.launch.demo import make_plain_demo, render_scores, score_demo, score_threshold, write_demo
    from voxscale.launch.start import train_here
    from voxscale.report.listing import is_finished

    began = time.monotonic()
    out = (out or Path("runs") / (f"demo-{like}" if like else "demo")).resolve()
    config, root = write_demo(like, out, overrides or ()) if like else (make_plain_demo(out, overrides or ()), out)
    opened = train_here(config, root, os.environ, devices=devices, fresh=is_finished(root))
    scores = score_demo(opened) | ({} if like else {"threshold_dice": score_threshold(opened)})
    seconds = time.monotonic() - began
    answer(
        as_json,
        {"run": str(opened.run.root), **scores, "time_s": round(seconds, 1)},
        f"{render_scores(scores)}, {seconds:.0f} s, run folder {opened.run.root}",
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
    from voxscale.launch.given import config_or_data

    if out.exists():
        raise ConfigError(f"--out {out}: exists", fix="choose another name, or remove it")
    config = config_or_data(data, overrides, os.environ)
    write_text(out, render_config(config))
    found = {"format": config.data.format, "source": config.data.source, "patch": config.patches.size}
    answer(
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
    from voxscale.launch.given import config_or_data
    from voxscale.launch.machine import look_at_machine
    from voxscale.report.diagnosis import render_diagnosis

    settled = config_or_data(config, overrides, os.environ, strict=False)
    root = store_root(settled.data, os.environ)
    diagnosis = examine_dataset(settled, root, threads=look_at_machine().cpus)
    answer(as_json, diagnosis.as_json(), render_diagnosis(diagnosis))
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
    from voxscale.launch.given import config_or_data

    settled = config_or_data(config, overrides, os.environ)
    manifest = load_cases(settled, os.environ, threads=1)
    chosen = choose_case(manifest, case, out)
    prepared = read_prepared(chosen, manifest, settled)
    pictures = draw_augmented(prepared, settled) if augmented else draw_case(prepared, manifest.channels)
    save_pictures(pictures, out)
    answer(
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
    from voxscale.launch.given import config_or_data
    from voxscale.launch.machine import look_at_machine

    settled = config_or_data(config, overrides, os.environ) if config is not None else None
    root = store_root(settled.data, os.environ) if settled is not None else default_store(os.environ)
    if list_them or prune is not None:
        found = prune_stores(root, idle_days=prune) if prune is not None else list_stores(root)
        done = "deleted" if prune is not None else "stores"
        answer(as_json, {"root": str(root), done: [item.as_json() for item in found]}, render_stores(found, root, done))
        return
    if settled is None:
        raise ConfigError("prepare: found no CONFIG", fix="give a config or data, or --list or --prune DAYS")
    cpus = look_at_machine().cpus
    manifest = load_cases(settled, os.environ, threads=cpus)
    store = prepare_cases(manifest, settled, os.environ, threads=cpus)
    rebuilt = rebuild_damaged(store, root, threads=cpus) if verify else []
    if rebuilt:
        store = prepare_cases(manifest, settled, os.environ, threads=cpus)
    answer(
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
        Literal["all"] | None,
        typer.Option(help="Train every fold of data.split into DIR/fold-N; score all together."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, or continue an unfinished run.

    A data folder in place of CONFIG is init and train in one.
    """
    from voxscale.files import read_json
    from voxscale.launch.folds import fold_commands, train_folds
    from voxscale.launch.given import config_or_data
    from voxscale.launch.start import commands_for, train_here
    from voxscale.report.summary import render_folds

    settled = config_or_data(config, overrides, os.environ)
    root = (run or Path("runs") / (config.resolve().name if config.is_dir() else config.stem)).resolve()
    if dry_run or no_start:
        list_commands = fold_commands if folds is not None else commands_for
        commands = list_commands(settled, root, os.environ, devices=devices, fresh=fresh, write=no_start)
        text = "\n".join(f"# {purpose}\n{command}" for purpose, command in commands)
        answer(as_json, {"run": str(root), "commands": [command for _, command in commands]}, text)
        return
    if folds is not None:
        result = train_folds(settled, root, os.environ, devices=devices, fresh=fresh)
        answer(as_json, {"run": str(root), **result}, f"{render_folds(result)}\nrun folders in {root}")
        return
    opened = train_here(settled, root, os.environ, devices=devices, fresh=fresh)
    metrics = read_json(opened.run.metrics)
    best = metrics.get("best")
    score = f"best {best['metric']} {best['value']:.4f} at step {best['step']}, " if best else ""
    answer(
        as_json,
        {"run": str(opened.run.root), **metrics},
        f"done: {score}{metrics.get('wall_s', 0):.0f} s of training, run folder {opened.run.root}",
    )


@app.command()
def evaluate(
    run: RunPath,
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
    devices: Devices = "1",
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

    Writes one row per case, and their summary, to RUN/evaluations. A folder of folds is evaluated as one ensemble.
    """
    from voxscale.files import read_json
    from voxscale.launch.given import evaluation_name, given_runs, plain_name
    from voxscale.launch.local import evaluate_local
    from voxscale.launch.machine import look_at_machine
    from voxscale.plan.resources import choose_devices
    from voxscale.report.summary import render_summary
    from voxscale.runs import RunFolder

    out = RunFolder(run.resolve()).evaluation(
        plain_name(name) if name is not None else evaluation_name(split, data, checkpoint, mirror)
    )
    machine = look_at_machine()
    count, _ = choose_devices(devices, machine, machine.gpus or machine.cpus)
    evaluate_local(
        given_runs(run),
        count,
        os.environ,
        out=out,
        split=split or "val",
        checkpoint=plain_name(checkpoint),
        data=data,
        mirror=mirror,
    )
    metrics = read_json(out / "metrics.json")
    answer(as_json, {"evaluation": str(out), **metrics}, f"{render_summary(metrics['summary'])}\nwrote {out}")


@app.command()
def predict(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN... FILES", help="Run folders, then images, folders of images or a dataset."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the predictions go.")],
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
    """Predict images: label maps in each image's own shape, spacing and orientation.

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


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List runs: state, progress, best metric, age."""
    from voxscale.report.listing import list_runs, render_runs

    rows = list_runs(folder)
    answer(
        as_json,
        {"runs": [row.as_json() for row in rows]},
        render_runs(rows) if rows else f"no runs in {folder}",
    )


def main() -> None:
    run_verb(app)
