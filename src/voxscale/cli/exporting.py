"""The verb that hands a trained run on."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from voxscale.cli.options import Debug, Json, Mirror, RunPath
from voxscale.command import answer


def export(
    run: RunPath,
    to: Annotated[Literal["bundle"], typer.Option(help="What to write: a MONAI bundle.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write it.")],
    checkpoint: Annotated[str, typer.Option(metavar="NAME", help="best, last or step-XXXXXXXX.")] = "best",
    mirror: Mirror = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a trained run as a MONAI bundle. MONAI loads and runs it to the same label maps, without voxscale.

    For segmentation with unet, segresnet, unetr, swin_unetr or dynunet.
    """
    from voxscale.export.bundle import export_bundle
    from voxscale.launch.given import given_runs, plain_name

    exported = export_bundle(given_runs(run), out, checkpoint=plain_name(checkpoint), mirror=mirror)
    words = "is there already" if exported.was_there else "written"
    use = f"cd {shlex.quote(str(out))} && python -m monai.bundle run --config_file configs/inference.json"
    use += " --dataset_dir IMAGES --output_dir PREDICTIONS"
    answer(as_json, exported.as_json(), f"{out}: {words}, of {exported.origin['checkpoint']}; run it with: {use}")
