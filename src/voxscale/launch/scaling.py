"""Measure how a config, or a user's own script, scales: short runs on one world after another."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from voxscale.config.load import plain
from voxscale.config.schema import Config, PerDevice
from voxscale.config.site import read_site
from voxscale.errors import ConfigError
from voxscale.files import TEMPORARY_SUFFIX, read_json, remove, write_json
from voxscale.launch.batch import MEASURE, OPEN, SCRIPT, refuse_if_queued
from voxscale.launch.cluster_run import draft_submission, measure_on_slurm
from voxscale.launch.folder import data_key, draft_run, open_run
from voxscale.launch.given import placed, placed_on_ray
from voxscale.launch.local import run_local
from voxscale.launch.machine import look_at_machine
from voxscale.launch.measuring import cost_identity, hash_of, machine_facts, measure_words, read_costs
from voxscale.launch.ray_access import given_address
from voxscale.launch.ray_run import RayPlacement, cpus_on_ray, measure_on_ray
from voxscale.launch.ray_script import launch_on_ray
from voxscale.launch.sbatch import Placement
from voxscale.launch.script import launch_here, make_script
from voxscale.launch.script_job import draft_script_job, launch_on_slurm
from voxscale.plan.costs import Costs
from voxscale.plan.plan import split_batch
from voxscale.plan.predict import Layout
from voxscale.plan.resources import with_threads
from voxscale.plan.scaling import Kind, Row, make_rows
from voxscale.runs import RunFolder

# Checks that a layout can be had, writing nothing. What it gives opens a run of the config in the folder and has its
# ranks run a module of ours, named first in the words.
Measure = Callable[[Config, Path, Layout], Callable[[Sequence[str]], None]]
# The same of a script, which it gives to be run to its end.
Launch = Callable[[Path, Layout], Callable[[], object]]
Say = Callable[[str], None]
_PLACE = "(local|slurm|ray)"
# What there is in a folder of measurements, and in no other: --fresh removes it.
_OWN = rf"(run-)?measured-{_PLACE}-.+|script-{_PLACE}-[0-9a-f]{{12}}-.+|scale\.json|speedup\.svg|report\.html"
_PART = rf"\.({_OWN})\.[0-9a-f]{{8}}\{TEMPORARY_SUFFIX}"  # of a file that was being written when this was killed
OWN_BATCH = "the script sets its own batch; where that grows with the ranks, its times do not compare like with like"


def parse_worlds(text: str) -> list[Layout]:
    """`1x1,1x2,2x2`: nodes × devices of each, in rising order of devices."""
    found = [re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"--worlds: found {text!r}, expected NODESxDEVICES, …", fix="e.g. --worlds 1x1,1x2,2x2")
    layouts = [Layout(int(match[1]), int(match[2])) for match in found if match is not None]
    return sorted(dict.fromkeys(layouts), key=lambda layout: (layout.world_size, layout.nodes))


def scale_config(
    config: Config,
    layouts: Sequence[Layout],
    folder: Path,
    measure: Measure,
    *,
    on: str,
    where: Sequence[Any],
    environ: Mapping[str, str],
    cpus: int | None,
    seconds: float,
    say: Say,
) -> list[Row]:
    """Measure each world twice: with the config's own batch, and with one that grows with the world.

    What is measured is kept in `folder`, so that a second start goes on where the first was stopped; `where` is what
    makes it another place, and what was measured in one says nothing of another. `cpus` are those
    of a node, shared out alike in every world; None where a site says how many a device has.
    """
    config = config.model_copy(update={"log": "quiet", "track": "none"})
    if cpus is not None:
        config = with_threads(config, cpus, devices=max(layout.devices for layout in layouts))
    kinds: tuple[Kind, ...] = ("strong", "weak")
    wanted = [(kind, each, _with_batch(config, kind, each, layouts[0])) for kind in kinds for each in layouts]
    for _, layout, its in wanted:
        split_batch(its.train.global_batch, layout.world_size, its.train.micro_batch)
    about = [*where, config.data.store, data_key(config, environ)]
    outs = [
        folder / f"measured-{on}-{layout}-{its.train.batch}-{hash_of([cost_identity(its), *about])[:12]}.json"
        for _, layout, its in wanted
    ]
    missing = {out: each for out, each in zip(outs, wanted, strict=True) if read_costs(out) is None}
    count = len(set(outs))  # the first world is the same with either batch
    if kept := count - len(missing):
        say(f"{kept} of {count} measurements: kept from earlier, as nothing has changed; --fresh measures them anew")
    for out in missing:
        _clear(_run_for(out), environ)
    drafted = {out: measure(its, _run_for(out), layout) for out, (_, layout, its) in missing.items()}
    for out, (_, layout, its) in missing.items():
        say(f"measuring {layout}, batch {its.train.batch}")
        _measure(out, drafted[out], seconds)
    return make_rows(
        [(kind, layout, Costs.from_record(read_json(out))) for out, (kind, layout, _) in zip(outs, wanted, strict=True)]
    )


def where_on(
    on: str, environ: Mapping[str, str], *, site: str | None, of_site: Sequence[str], address: str | None
) -> list[Any]:
    """What makes a place another one: its profile, its address, or what this machine has."""
    if on == "slurm":
        return [plain(read_site(site, environ, of_site))]
    if on == "ray" and (joined := given_address(address, environ)) is not None:
        return [joined]
    return machine_facts(look_at_machine(environ))


def _clear(root: Path, environ: Mapping[str, str]) -> None:
    """Remove what an earlier start has left, unless its job still works there."""
    refuse_if_queued(RunFolder(root), environ, (OPEN, MEASURE, SCRIPT))
    remove(root)


def _run_for(out: Path) -> Path:
    """Where the run is that is measured for a file of costs."""
    return out.with_name(f"run-{out.stem}")


def _measure(out: Path, measure: Callable[[Sequence[str]], None], seconds: float) -> None:
    root = _run_for(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = root / "costs.json"
    try:
        measure(measure_words(root, part, seconds))
        write_json(out, read_json(part))
    finally:
        remove(root)


def _with_batch(config: Config, kind: Kind, layout: Layout, first: Layout) -> Config:
    """Strong scaling shares one batch out; weak scaling gives each device as many patches as the first world's have."""
    batch = config.train.batch
    if isinstance(batch, PerDevice):
        grown = batch.per_device * (first if kind == "strong" else layout).world_size
    else:
        grown = batch if kind == "strong" else batch * layout.world_size // first.world_size
    return config.model_copy(update={"train": config.train.model_copy(update={"batch": grown})})


def cpus_on(on: str, layouts: Sequence[Layout], environ: Mapping[str, str], address: str | None) -> int | None:
    """CPUs of each node; None on SLURM, where a site says how many a device has. Raises where Ray has too few nodes."""
    if on == "slurm":
        return None
    if on == "ray" and given_address(address, environ) is not None:
        return cpus_on_ray(environ, RayPlacement(address, max(layout.nodes for layout in layouts)))
    return look_at_machine(environ).cpus


def measure_on(
    on: str, environ: Mapping[str, str], *, site: str | None, of_site: Sequence[str], address: str | None
) -> Measure:
    """How worlds are measured there."""

    def here(config: Config, root: Path, layout: Layout) -> Callable[[Sequence[str]], None]:
        machine = look_at_machine(environ)
        draft = draft_run(config, root, machine, devices=str(layout.devices))

        def measure(words: Sequence[str]) -> None:
            opened = open_run(draft, machine, environ)
            run_local(words, opened.run.logs, opened.devices)

        return measure

    def on_slurm(config: Config, root: Path, layout: Layout) -> Callable[[Sequence[str]], None]:
        place = Placement(read_site(site, environ, of_site), layout.nodes, str(layout.devices))
        draft = partial(draft_submission, config, root, environ, place, fresh=False)
        draft()
        return lambda words: measure_on_slurm(draft(), words, environ)  # data may have been prepared since

    def on_ray(config: Config, root: Path, layout: Layout) -> Callable[[Sequence[str]], None]:
        place = RayPlacement(address, layout.nodes, str(layout.devices))
        return partial(measure_on_ray, config, root, environ=environ, place=place)

    return {"local": here, "slurm": on_slurm, "ray": on_ray}[on]


def launch_on(
    on: str, words: Sequence[str], environ: Mapping[str, str], *, site: str | None, address: str | None, as_json: bool
) -> Launch:
    """How a script is run on a world there."""

    def draft(root: Path, layout: Layout) -> Callable[[], object]:
        devices = str(layout.devices)
        script = make_script(words[0], words[1:], plain=False, nodes=layout.nodes, python=None, output=None)
        if on == "ray":
            on_ray = RayPlacement(address, layout.nodes, devices)
            return partial(launch_on_ray, script, root, environ, on_ray, as_json=as_json)
        place = placed(on, layout.nodes, devices, site, (), environ)
        if place is None:
            return partial(launch_here, script, root, environ, devices=devices, as_json=as_json)
        job = draft_script_job(script, root, environ, place)
        return partial(launch_on_slurm, job, environ, place, as_json=as_json)

    return draft


def scale_script(
    words: Sequence[str],
    layouts: Sequence[Layout],
    folder: Path,
    launch: Launch,
    *,
    on: str,
    where: Sequence[Any],
    environ: Mapping[str, str],
    say: Say,
) -> list[dict[str, Any]]:
    """Run a script to its end on each world; its wall times, compared with the first's."""
    script = make_script(words[0], words[1:]).path
    content = hashlib.sha256(script.read_bytes()).hexdigest()  # a script that was changed is another one
    name = f"{on}-{hash_of([*words, content, *where])[:12]}"
    ends = {layout: folder / f"script-{name}-{layout}" / "metrics.json" for layout in layouts}
    missing = {layout: end.parent for layout, end in ends.items() if not end.exists() or not _is_done(end)}
    if kept := len(ends) - len(missing):
        same = "as script, arguments and place are the same"
        say(f"{kept} of {len(ends)} worlds: kept from earlier, {same}; --fresh runs them anew")
    drafted = {layout: launch(root, layout) for layout, root in missing.items()}
    for layout, root in missing.items():
        _clear(root, environ)
        say(f"running on {layout}")
        drafted[layout]()
    times = {layout: float(read_json(end)["wall_s"]) for layout, end in ends.items()}
    first, ranks = times[layouts[0]], layouts[0].world_size
    gains = {layout: first / seconds * ranks for layout, seconds in times.items()}
    return [
        {"world": str(each), "wall_s": times[each], "speedup": gains[each], "efficiency": gains[each] / each.world_size}
        for each in layouts
    ]


def _is_done(end: Path) -> bool:
    return bool(read_json(end)["state"] == "done")


def open_folder(folder: Path, *, fresh: bool) -> None:
    """Check that a folder holds nothing but what was measured before; `fresh` removes that."""
    found = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.exists() else []
    if others := [path.name for path in found if not re.fullmatch(f"{_OWN}|{_PART}", path.name)]:
        raise ConfigError(
            f"--run {folder}: found {', '.join(others[:3])}, expected a folder for what is measured alone",
            fix="choose a new folder with --run",
        )
    for path in found if fresh else ():
        remove(path)


def refuse_misplaced(
    on: str,
    layouts: Sequence[Layout],
    environ: Mapping[str, str],
    *,
    site: str | None,
    of_site: Sequence[str],
    address: str | None,
) -> None:
    """Refuse options that are for elsewhere, and more nodes where this machine is the only one."""
    placed_on_ray(on, address, None, "auto", site or of_site, debug_comm=False)
    placed(on, None, "auto", site, of_site, environ)
    alone = on == "local" or (on == "ray" and given_address(address, environ) is None)
    if alone and (more := [str(layout) for layout in layouts if layout.nodes > 1]):
        raise ConfigError(
            f"--worlds {', '.join(more)}: this machine is one node",
            fix="add --on slurm, or --on ray with --address, or leave it out",
        )
