"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A config (YAML or JSON), or data.")]
OfConfig = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override fields, e.g. optimizer.lr=2e-4.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Override fields, e.g. optimizer.lr=2e-4, or site.time=2:00:00."),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Devices = Annotated[
    str, typer.Option(metavar="N", help="Devices on each node; auto: all GPUs, or one process per CPU.")
]
Where = Annotated[Literal["local", "slurm"], typer.Option(help="Where to run.")]
Anywhere = Annotated[Literal["local", "slurm", "ray"], typer.Option(help="Where to run.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="A Ray cluster that is there; default: RAY_ADDRESS, or one is started here.",
        show_default=False,
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Nodes; default: 1, or all of this shell's job.", show_default=False),
]
SiteName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The cluster's profile: a name or a file; default: site.yaml.", show_default=False
    ),
]
After = Annotated[
    list[int] | None,
    typer.Option(metavar="JOB", help="Begin only when this job has ended well; may be repeated.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run; write nothing.")]
Detach = Annotated[bool, typer.Option("--detach", help="Submit and return at once.")]
Restarts = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Start again from the last checkpoint after a rank was lost, at most so often; default: 0, on Ray 3.",
        show_default=False,
    ),
]
DebugComm = Annotated[
    bool, typer.Option("--debug-comm", help="Set the variables that make NCCL and torch say what they do.")
]
Mirror = Annotated[
    bool | None,
    typer.Option("--mirror/--no-mirror", help="Average over mirror images; default: as the run validates."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
