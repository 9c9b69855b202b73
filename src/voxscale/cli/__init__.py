"""The verbs, nothing else. Next to nothing is imported here: a login node answers at once.

Annotations are objects in this room, not texts: typer would evaluate these twice for every option of every verb.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from voxscale.command import run_verb

# Where each verb is, and what `voxscale --help` says of it: the first sentence of its own help.
VERBS = {
    "demo": ("training", "Train on synthetic volumes: the first minute."),
    "init": ("data", "Write a config for data."),
    "doctor": ("data", "Check every case."),
    "show": ("data", "Draw a case as it will be trained on, labels in colour."),
    "prepare": ("data", "Prepare the cases ahead of training."),
    "plan": ("planning", "Say what a run will take before it is submitted."),
    "train": ("training", "Train, or continue an unfinished run."),
    "search": ("searching", "Search for the best config: many trials at once, on Ray."),
    "evaluate": ("training", "Evaluate a run on whole volumes."),
    "predict": ("training", "Predict images, or the outcomes of a table's cases."),
    "scale": ("planning", "Measure how training scales, and what holds it back."),
    "launch": ("launching", "Run your own script, unchanged, here or on a cluster."),
    "runs": ("cluster", "List runs: state, progress, best metric, age."),
    "watch": ("cluster", "Watch a run while it trains, wherever that is."),
    "report": ("reporting", "Write one page to look at."),
    "cancel": ("cluster", "Stop a run, in the queue, on nodes or on this machine."),
    "export": ("exporting", "Write a trained run as a MONAI bundle."),
    "site": ("cluster", "Write and check the profile of a cluster."),
    "image": ("images", "Container images for clusters."),
}
_OF_SCRIPTS = ("scale", "launch")  # options that they do not know are the script's


def make_app(named: str | None = None) -> typer.Typer:
    """All verbs. If one is named, only that one is loaded: to list the others, their options are not needed, and making
    these takes as long as all else."""
    made = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Train 3D medical-imaging models from one config, unchanged from a laptop to a cluster.",
    )
    made.callback()(_options)
    for name, (room, about) in VERBS.items():
        if named not in (None, name):
            made.command(name=name, help=about)(_listed)
            continue
        verb = getattr(import_module(f"voxscale.cli.{room}"), name)
        if isinstance(verb, typer.Typer):
            made.add_typer(verb, name=name)
        else:
            settings = {"ignore_unknown_options": True} if name in _OF_SCRIPTS else None
            made.command(name=name, context_settings=settings)(verb)
    return made


def _listed() -> None:
    """A verb that is not run."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from voxscale import __version__

        typer.echo(f"voxscale {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    return


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    return make_app()


def main() -> None:
    run_verb(make_app(next(iter(sys.argv[1:]), "")))
