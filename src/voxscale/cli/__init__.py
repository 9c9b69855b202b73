"""The verbs, nothing else. Next to nothing is imported here: a login node answers at once.

Annotations are objects in this room, not texts: typer would evaluate these twice for every option of every verb.
"""

from typing import Annotated

import typer

from voxscale.cli.cluster import cancel, runs, sites, watch
from voxscale.cli.data import doctor, init, prepare, show
from voxscale.cli.exporting import export
from voxscale.cli.images import image as images
from voxscale.cli.launching import PASS_ON, launch
from voxscale.cli.planning import plan, scale
from voxscale.cli.reporting import report
from voxscale.cli.searching import search
from voxscale.cli.training import demo, evaluate, predict, train
from voxscale.command import run_verb

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train 3D medical-imaging models from one config, unchanged from a laptop to a cluster.",
)


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


for verb in (demo, init, doctor, show, prepare, plan, train, search, evaluate, predict):
    app.command()(verb)
app.command(context_settings=PASS_ON)(scale)
app.command(context_settings=PASS_ON)(launch)
app.command()(runs)
app.command()(watch)
app.command()(report)
app.command()(cancel)
app.command()(export)
app.add_typer(sites, name="site")
app.add_typer(images, name="image")


def main() -> None:
    run_verb(app)
