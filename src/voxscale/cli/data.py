"""Verbs that look at data and prepare them."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from voxscale.cli.options import ConfigPath, Debug, Detach, Json, OfConfig, Overrides, SiteName, Where
from voxscale.command import answer

if TYPE_CHECKING:
    from voxscale.config.schema import Config
    from voxscale.config.site import Site


def init(
    data: Annotated[
        Path | None,
        typer.Argument(metavar="DATA", help="A data folder, archive, table or list file.", show_default=False),
    ] = None,
    overrides: OfConfig = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the config.")] = Path("config.yaml"),
    from_distmis: Annotated[
        Path | None,
        typer.Option(
            metavar="JSON",
            help="Carry over a config of DistMIS; DATA is then its record files or the Decathlon's task, "
            "by default data/distmis beside FILE.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a config for data. It has the format, patches that the volumes fill, and the data's own split.

    DATA is a Decathlon task (also as .tar), nnU-Net data, a MONAI list, a CSV or TSV table, TFRecord shards of DistMIS,
    CIFAR-10 in binary form, or a folder of image and label pairs or with a folder per class.
    """
    from voxscale.config.load import render_config
    from voxscale.errors import ConfigError
    from voxscale.files import write_text
    from voxscale.launch.given import config_or_data

    if out.exists():
        raise ConfigError(f"--out {out}: exists", fix="choose another name, or remove it")
    if from_distmis is not None:
        _init_from_distmis(from_distmis, data, overrides or [], out, as_json=as_json)
        return
    if data is None:
        raise ConfigError("init: found no DATA", fix="give the data, or a config of DistMIS with --from-distmis")
    if not data.exists():
        raise ConfigError(
            f"{data}: no such data", fix="give a folder, an archive, a table or a list file that is there"
        )
    said: list[str] = []
    config = config_or_data(data, overrides, os.environ, say=said.append)
    write_text(out, render_config(config))
    found = {"format": config.data.format, "source": config.data.source, "patch": config.patches.size}
    answer(
        as_json,
        {"config": str(out), **found, "said": said},
        "\n".join([*said, f"found {found['format']} data; wrote {out}; train with: voxscale train {out}"]),
    )


def _init_from_distmis(given: Path, data: Path | None, overrides: list[str], out: Path, *, as_json: bool) -> None:
    """Write the config, say on standard error what is left behind, and name the command that runs it."""
    from voxscale.config.distmis import carry_over, read_given
    from voxscale.config.load import make_config, render_config
    from voxscale.files import write_text
    from voxscale.launch.demo import read_recipe

    if data is not None and "=" in str(data) and not data.exists():  # no DATA, and this is the first override
        data, overrides = None, [str(data), *overrides]
    text = read_given(given)
    decathlon = data is not None and (data.suffix == ".tar" or (data / "dataset.json").is_file())
    carried = carry_over(text, str(given), read_recipe, decathlon=decathlon)
    carried.fields["data"]["source"] = str(data.resolve()) if data is not None else "data/distmis"
    config = make_config(carried.fields, overrides, name=str(given), base=out.parent)
    write_text(out, render_config(config))
    command = shlex.join(["voxscale", carried.verb, str(out), *carried.place])
    for line in [] if as_json else carried.left:
        typer.echo(f"not carried over: {line}", err=True)
    content = {"config": str(out), "source": config.data.source, "command": command}
    answer(as_json, {**content, "not_carried_over": carried.left}, f"wrote {out}; run it with: {command}")


def doctor(config: ConfigPath, overrides: OfConfig = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check every case. Lists all faults at once, and what the dataset is like.

    Reads each volume to its end. Exit code 3 if training on the data would be unsafe.
    """
    from voxscale.data.build import store_root
    from voxscale.data.doctor import examine_dataset
    from voxscale.launch.given import config_or_data
    from voxscale.launch.machine import look_at_machine
    from voxscale.report.diagnosis import render_diagnosis
    from voxscale.tasks import build_outcome_task

    settled = config_or_data(config, overrides, os.environ, strict=False)
    root = store_root(settled.data, os.environ)
    diagnosis = examine_dataset(settled, root, threads=look_at_machine().cpus, build_task=build_outcome_task)
    answer(as_json, diagnosis.as_json(), render_diagnosis(diagnosis))
    if not diagnosis.is_safe:
        raise typer.Exit(3)


def show(
    config: ConfigPath,
    overrides: OfConfig = None,
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
    from voxscale.launch.folder import load_cases, trained_patch
    from voxscale.launch.given import config_or_data
    from voxscale.launch.machine import look_at_machine

    settled = config_or_data(config, overrides, os.environ)
    manifest = load_cases(settled, os.environ, threads=1)
    chosen = choose_case(manifest, case, out)
    prepared = read_prepared(chosen, manifest, settled)
    if augmented:
        patch = trained_patch(manifest, settled, os.environ, threads=look_at_machine().cpus)
        pictures = draw_augmented(prepared, settled, patch)
    else:
        pictures = draw_case(prepared, manifest.channels)
    save_pictures(pictures, out)
    answer(
        as_json,
        {"case": chosen.id, "file": str(out), "shape": prepared.geometry.size},
        f"case {chosen.id}: wrote {out}",
    )


def prepare(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A config, or data.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every chunk; rebuild what is damaged.")] = False,
    list_them: Annotated[
        bool, typer.Option("--list", help="List prepared datasets and unpacked archives with their sizes.")
    ] = False,
    prune: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Delete those that were not used for so many days.")
    ] = None,
    on: Where = "local",
    site: SiteName = None,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where a job's files go; default: runs/ and the config's name.")
    ] = None,
    detach: Detach = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prepare the cases ahead of training. Lists and prunes what was prepared.

    An interrupted build goes on where it was. `voxscale train` does this by itself.
    """
    from voxscale.data.shelf import list_stores, prune_stores, render_stores
    from voxscale.errors import ConfigError
    from voxscale.launch.given import apart_from_site, default_run, placed

    asked = {"--verify": verify, "--list": list_them, "--prune": prune is not None}
    if len(given := [name for name, is_given in asked.items() if is_given]) > 1:
        raise ConfigError(f"{' and '.join(given)}: expected one of them", fix="give them one after the other")
    of_config, of_site = apart_from_site(overrides)
    place = placed(on, None, "1", site, of_site, os.environ, detach=detach)
    settled, root = _settled(config, of_config, place.site if place is not None else None)
    if list_them or prune is not None:
        found = prune_stores(root, idle_days=prune) if prune is not None else list_stores(root)
        done = "deleted" if prune is not None else "stores"
        answer(as_json, {"root": str(root), done: [item.as_json() for item in found]}, render_stores(found, root, done))
        return
    if settled is None or config is None:
        raise ConfigError("prepare: found no CONFIG", fix="give a config or data, or --list or --prune DAYS")
    if place is None:
        _prepare_here(settled, root, verify=verify, as_json=as_json)
        return
    from voxscale.launch.cluster_run import prepare_on_slurm

    words = [str(config.resolve()), *of_config, *(["--verify"] if verify else [])]
    jobs = prepare_on_slurm(settled, (run or default_run(config)).resolve(), words, os.environ, place)
    content = {"state": "submitted" if detach and jobs else "done", "jobs": [vars(job) for job in jobs]}
    answer(as_json, content, f"prepared by job {jobs[-1].id}" if jobs and not detach else str(content["state"]))


def _settled(config: Path | None, overrides: list[str], site: "Site | None") -> "tuple[Config | None, Path]":
    """The config, if one is given, and where stores are: as it says, else in the scratch of the site."""
    from voxscale.data.build import default_store, store_root
    from voxscale.launch.given import config_or_data
    from voxscale.launch.placing import site_store, with_scratch

    if config is None:
        return None, (site and site_store(site, os.environ)) or default_store(os.environ)
    settled = config_or_data(config, overrides, os.environ, site=site)
    if site is not None:
        settled = with_scratch(settled, site, os.environ)
    return settled, store_root(settled.data, os.environ)


def _prepare_here(config: "Config", root: Path, *, verify: bool, as_json: bool) -> None:
    """Prepare on this machine; with `verify` every chunk is looked at, and damaged cases are made anew."""
    from voxscale.data.build import rebuild_damaged
    from voxscale.launch.folder import load_cases, prepare_cases
    from voxscale.launch.machine import look_at_machine

    cpus = look_at_machine().cpus
    manifest = load_cases(config, os.environ, threads=cpus)
    store = prepare_cases(manifest, config, os.environ, threads=cpus)
    rebuilt = rebuild_damaged(store, root, threads=cpus) if verify else []
    if rebuilt:
        store = prepare_cases(manifest, config, os.environ, threads=cpus)
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
