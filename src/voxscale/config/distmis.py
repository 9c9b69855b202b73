"""DistMIS's JSON configs in our terms: the forms that its documents and its repository have.

num_replicas, batch_size_per_replica, num_epochs, debug                        data parallelism (TensorFlow)
batch_size_per_replica, num_epochs, debug                                      experiment parallelism
lr, epochs, verbose, nodes, gpus, batch_size, num_workers, use_gpu             data parallelism (PyTorch)
epochs, verbose, batch_size, num_samples, cpu_per_trial, gpu_per_trial         experiment parallelism
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from voxscale.config.search import LEAST_SHARE
from voxscale.errors import ConfigError

GPUS_PER_NODE = 4  # of the cluster DistMIS ran on: more replicas were more nodes
_LARGEST_BYTES = 2**20  # theirs have a few hundred
LEARNING_RATES = (1e-4, 1e-2)  # between which its PyTorch search draws


@dataclass(frozen=True)
class Carried:
    """A DistMIS config carried over: fields of ours, the command that runs them, and what is left behind, with why."""

    fields: dict[str, Any]
    verb: str
    place: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Value:
    """What a key may hold."""

    expected: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class _Form:
    """Keys that must be there, those that may, those that no other form has, and what becomes of them."""

    required: tuple[str, ...]
    carry: Callable[[Mapping[str, Any], Callable[[str], dict[str, Any]]], Carried]
    optional: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    reads_decathlon: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 99_999


def _is_share_of_gpus(value: Any) -> bool:
    return _is_number(value) and (LEAST_SHARE <= value < 1 or (0 <= value <= 99_999 and value == int(value)))


_COUNT = _Value("a whole number from 1 to 99999", _is_count)
_TRUTH = _Value("true or false", lambda value: isinstance(value, bool))
_RATE = _Value("a number above 0, up to 1000", lambda value: _is_number(value) and 0 < value <= 1000)
_VERBOSITY = _Value("0, 1 or 2", lambda value: value in (0, 1, 2) and type(value) is int)
_CPUS = _Value(
    f"a number from {LEAST_SHARE} to 99999", lambda value: _is_number(value) and LEAST_SHARE <= value <= 99_999
)
_GPUS = _Value("a whole number, or a share of one GPU such as 0.5", _is_share_of_gpus)

_VALUES = {
    **dict.fromkeys(("num_replicas", "batch_size_per_replica", "num_epochs", "epochs", "nodes", "gpus"), _COUNT),
    **dict.fromkeys(("batch_size", "num_workers", "num_samples"), _COUNT),
    **dict.fromkeys(("debug", "use_gpu", "multinode"), _TRUTH),
    "lr": _RATE,
    "verbose": _VERBOSITY,
    "cpu_per_trial": _CPUS,
    "gpu_per_trial": _GPUS,
}


def carry_over(
    text: str, name: str, read_recipe: Callable[[str], dict[str, Any]], *, decathlon: bool = False
) -> Carried:
    """Fields for a DistMIS config given as text; `read_recipe` gives the content of one of recipes/.

    `decathlon`: for the files that DistMIS's shards were made of, not for the shards. Everything that is wrong with the
    config is said at once, with `name` as the place it was found in. What is no key of DistMIS, nor like one, is left
    behind.
    """
    given = _parse(text, name)
    form = _recognise(given, name)
    findings = _find_faults(given, form)
    if findings:
        raise ConfigError.from_findings([f"{name}: {finding}" for finding in findings], fix="correct the keys above")
    carried = form.carry(given, read_recipe)
    left = [f"{_short(key)}: no key of this form of DistMIS's config" for key in given if key not in form.keys]
    if decathlon:
        carried = replace(carried, fields={**carried.fields, "data": {**carried.fields["data"], **_DECATHLON}})
    elif form.reads_decathlon:
        left.append(
            "the Decathlon's files, which this script reads: the config is for record files; give the task as DATA"
        )
    return replace(carried, left=(*carried.left, *left))


def read_given(path: Path) -> str:
    """The text of a config that a user gives. Raises ConfigError, and waits for nobody: a pipe is no such file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            why = "Is a directory" if path.is_dir() else "not a regular file"
        elif path.stat().st_size > _LARGEST_BYTES:
            why = f"larger than {_LARGEST_BYTES // 2**20} MiB"
        else:
            return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError:
        why = "not text"
    raise ConfigError(f"--from-distmis {path}: cannot be read: {why}", fix="give a config.json of DistMIS")


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise ConfigError(f"{where}: not valid JSON: {error.msg}", fix="give the config.json of DistMIS") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}", fix="give the config.json of DistMIS") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name}: found {type(content).__name__}, expected an object with DistMIS's keys",
            fix='e.g. {"num_replicas": 4, "batch_size_per_replica": 2, "num_epochs": 20, "debug": false}',
        )
    return content


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ValueError(f"key {', '.join(map(_short, repeated))} stands twice")
    return dict(pairs)


def _recognise(given: Mapping[str, Any], name: str) -> _Form:
    """The form whose own keys are there; else the one that shares most, the first of equals."""

    def likeness(form: _Form) -> tuple[int, int]:
        return sum(key in given for key in form.marks), sum(key in given for key in form.required)

    form = max(FORMS, key=likeness)
    if likeness(form) == (0, 0):
        forms = "; or ".join(", ".join(form.required) for form in FORMS)
        raise ConfigError(f"{name}: found no key of DistMIS's config", fix=f"expected {forms}")
    return form


def _find_faults(given: Mapping[str, Any], form: _Form) -> list[str]:
    missing = [key for key in form.required if key not in given]
    findings = [f"{key}: missing; expected {_VALUES[key].expected}" for key in missing]
    for key, value in given.items():
        if key not in form.keys:
            near = difflib.get_close_matches(key, [known for known in _VALUES if known not in given], n=1, cutoff=0.8)
            findings += [f"{_short(key)}: unknown key; did you mean {near[0]!r}?"] if near else []
        elif not _VALUES[key].fits(value):
            findings.append(f"{key}: found {_short(value)}, expected {_VALUES[key].expected}")
    place = ("nodes", "gpus", "num_workers")
    if all(key in form.required and _is_count(given.get(key)) for key in place):
        nodes, gpus, workers = (int(given[key]) for key in place)
        if workers != nodes * gpus:
            findings.append(f"num_workers: found {workers}, expected nodes × gpus, {nodes} × {gpus} = {nodes * gpus}")
    return findings


def _carry_replicas(given: Mapping[str, Any], read_recipe: Callable[[str], dict[str, Any]]) -> Carried:
    fields, replicas = read_recipe("distmis_unet"), given["num_replicas"]
    rate = fields["optimizer"]["lr"]
    fields["optimizer"]["lr"] = {"per_device": rate}
    fields["train"] |= {"batch": {"per_device": given["batch_size_per_replica"]}, "devices": replicas}
    left = [
        f"the 32 settings that DistMIS's script trains one after another, whatever the JSON says: this trains one, "
        f"lr {rate:g} × replicas; recipes/distmis_data_parallel.yaml has them all"
    ]
    nodes = 1
    if replicas > GPUS_PER_NODE and replicas % GPUS_PER_NODE == 0:
        nodes = replicas // GPUS_PER_NODE
        left.append(
            f"where num_replicas {replicas} are: placed as on DistMIS's cluster, {GPUS_PER_NODE} on each node; "
            "any nodes with as many devices in all train the same"
        )
    return Carried(_with_debug(fields, given), "train", _on_ray(nodes, replicas // nodes), tuple(left))


def _carry_grid(given: Mapping[str, Any], read_recipe: Callable[[str], dict[str, Any]]) -> Carried:
    fields = read_recipe("distmis_search")
    fields["train"]["batch"] = {"per_device": given["batch_size_per_replica"]}
    return Carried(_with_debug(fields, given), "search")


def _carry_workers(given: Mapping[str, Any], read_recipe: Callable[[str], dict[str, Any]]) -> Carried:
    """DistMIS gives this rate to the optimizer as it is, whatever the number of workers."""
    fields = read_recipe("distmis_unet")
    fields["optimizer"]["lr"] = given["lr"]
    fields["train"] |= {"batch": {"per_device": given["batch_size"]}, "devices": given["num_workers"]}
    place = _on_ray(given["nodes"], given["gpus"])
    return Carried(_with_verbosity(fields, given), "train", place, tuple(_left_of_gpus(given)))


def _carry_samples(given: Mapping[str, Any], read_recipe: Callable[[str], dict[str, Any]]) -> Carried:
    fields, gpus = read_recipe("distmis_unet"), given["gpu_per_trial"]
    fields["train"]["batch"] = {"per_device": given["batch_size"]}
    fields["search"] = {
        "sampler": "random",
        "trials": given["num_samples"],
        "per_trial": {"devices": gpus or 1, "cpus": given["cpu_per_trial"]},
        "space": {"optimizer.lr": {"loguniform": list(LEARNING_RATES)}},
    }
    low, high = LEARNING_RATES
    left = _left_of_gpus(given)
    if "lr" in given:
        left.append(
            f"lr {given['lr']:g}: DistMIS does not use it here; the search draws from {low:g} to {high:g} as it does"
        )
    if not gpus:
        left.append("gpu_per_trial 0: a trial has one device; it is a CPU process where there are no GPUs")
    if gpus > 1:
        left.append(
            f"gpu_per_trial {gpus:g}: DistMIS's trials used one GPU of these; here all of them train, each with a "
            f"batch of {given['batch_size']}"
        )
    nodes = given.get("nodes", 1)
    if given.get("multinode", False) and nodes == 1:
        left.append("multinode true: the number of nodes is not stated; add --on slurm --nodes N to the command")
    if "gpus" in given:
        left.append(f"gpus {given['gpus']}: a search takes the devices that its Ray cluster has")
    place = ("--on", "slurm", "--nodes", str(nodes)) if nodes > 1 else ()
    return Carried(_with_verbosity(fields, given), "search", place, tuple(left))


def _left_of_gpus(given: Mapping[str, Any]) -> list[str]:
    if given.get("use_gpu", True):
        return []
    return ["use_gpu false: a config is for GPUs and CPUs alike; hide GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs"]


def _on_ray(nodes: int, devices: int) -> tuple[str, ...]:
    return ("--on", "ray", "--nodes", str(nodes), "--devices", str(devices))


def _with_debug(fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    fields["train"]["epochs"] = given["num_epochs"]
    shown = {"log": "step", "track": "none"} if given["debug"] else {"log": "epoch", "track": "tensorboard"}
    return {**fields, **shown}


def _with_verbosity(fields: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    fields["train"]["epochs"] = given["epochs"]
    return {**fields, "log": ("quiet", "step", "epoch")[given["verbose"]]}


def _short(value: Any) -> str:
    text = reprlib.repr(value) if isinstance(value, str | list | dict) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


# As DistMIS cut and divided them into shards.
_DECATHLON = {
    "format": "decathlon",
    "regions": {"tumour": [1, 2, 3]},
    "slices": {"z": [2, -1]},
    "split": {"val": 0.15, "test": 0.15},
}

_OF_GRID = ("batch_size_per_replica", "num_epochs", "debug")
_OF_WORKERS = ("lr", "epochs", "verbose", "nodes", "gpus", "batch_size", "num_workers", "use_gpu")
_OF_SAMPLES = ("num_samples", "cpu_per_trial", "gpu_per_trial")

FORMS = (
    _Form(_OF_GRID, _carry_grid),
    _Form(("num_replicas", *_OF_GRID), _carry_replicas, marks=("num_replicas",)),
    _Form(_OF_WORKERS, _carry_workers, reads_decathlon=True),
    _Form(
        ("epochs", "verbose", "batch_size", *_OF_SAMPLES),
        _carry_samples,
        optional=("lr", "nodes", "gpus", "num_workers", "use_gpu", "multinode"),
        marks=_OF_SAMPLES,
        reads_decathlon=True,
    ),
)
