"""Patches per second, memory, disk and time to the first batch: ours beside MONAI's datasets and a bare blosc2 read.

    python bench/patches.py --data /tmp/brats-like --patch 128 128 128 --threads 1 --json

Pipelines take turns within one run, so that only their ratios count. All cut the same patches out of a Decathlon folder
(4 BraTS-shaped cases are made where there is none), flip them and scale their intensities; `full` adds our whole
augmentation.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SHAPE = (240, 240, 155)
ROUNDS = 12
DRAWS_OF_FULL = 8  # patches a turn: most of its cost lies in a third of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a Decathlon folder; made if absent")
    parser.add_argument("--patch", type=int, nargs=3, default=(128, 128, 128))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=("rank", "cache"), help=argparse.SUPPRESS)  # the parts run as processes
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    began = time.perf_counter() - _process_age_s()
    if options.only:
        print(
            json.dumps({"rank": first_batch_of_ours, "cache": first_batch_of_cache}[options.only](options, began)),
            flush=True,
        )
        sys.stdin.readline()
        os._exit(0)
    if not options.data.exists():
        make_dataset(options.data)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options, Path(scratch))
    print(json.dumps(result, indent=None if options.json else 2))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    import torch

    torch.set_num_threads(options.threads)
    config = make_config(options)
    store = prepare(config, scratch / "store")
    checked = time.perf_counter()
    for row in range(len(store)):
        store.verify(row)  # every chunk is checked when first read: paid once in a run, so timed by itself
    check_ms = (time.perf_counter() - checked) / len(store) * 1e3
    pipelines = {
        "ours.light": ours(config, store, options, "light"),
        "ours.light_host": ours(config, store, options, "light", in_memory=True),
        "ours.full": ours(config, store, options, "full"),
        **monai_pipelines(options, scratch),
        "blosc2.fp32": bare_read(options, scratch),
    }
    times = take_turns(pipelines, options.rounds)
    medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
    medians["ours.full"] = (
        statistics.fmean(times["ours.full"]) * 1e3
    )  # its patches differ in cost: the mean is what counts
    more = double_dataset(options.data, scratch / "more")
    doubled = argparse.Namespace(**{**vars(options), "data": more})
    prepare(make_config(doubled), scratch / "store")
    memory = measure_ranks(options, doubled, scratch / "store")
    first = {kind: start(doubled, scratch / "store", kind) for kind in ("rank", "cache")}
    reports = {kind: stop(process) for kind, process in first.items()}
    disk = json.loads((store.folder / "index.json").read_text())["bytes"] / len(store) / 1e6
    result: dict[str, Any] = {f"{name}_ms": round(value, 2) for name, value in medians.items()}
    result |= {
        "ratio.cache": round(medians["monai.cache"] / medians["ours.light"], 2),
        "ratio.cache_to_host": round(medians["monai.cache"] / medians["ours.light_host"], 2),
        "ratio.persistent": round(medians["monai.persistent"] / medians["ours.light"], 2),
        "ratio.light_to_bare": round(medians["ours.light"] / medians["blosc2.fp32"], 3),
        "ratio.full_to_bare": round(medians["ours.full"] / medians["blosc2.fp32"], 3),
        "first_read_ms_per_case": round(check_ms, 1),
        "disk_mb_per_case": round(disk, 1),
        **memory,
        "first_batch.ours_s": reports["rank"]["after_imports_s"],
        "first_batch.cache_s": reports["cache"]["after_imports_s"],
        "first_batch.ratio": round(reports["cache"]["after_imports_s"] / reports["rank"]["after_imports_s"], 1),
        "first_batch.ours_from_start_s": reports["rank"]["from_start_s"],
        "first_batch.cache_from_start_s": reports["cache"]["from_start_s"],
        "patch": list(options.patch),
        "threads": options.threads,
        "cases": len(store),
    }
    return result


def take_turns(pipelines: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds per patch of each pipeline, a few patches at a time; the slow ones get fewer."""
    times: dict[str, list[float]] = {name: [] for name in pipelines}
    for take in pipelines.values():
        for _ in range(3):
            take()  # warm up: page cache, buffers
    for turn in range(rounds):
        for name, take in pipelines.items():
            if name == "monai.plain" and turn % 4:
                continue
            for _ in range(DRAWS_OF_FULL if name == "ours.full" else 2):
                began = time.perf_counter()
                take()
                times[name].append(time.perf_counter() - began)
    return times


def make_config(options: argparse.Namespace) -> Any:
    from voxscale.config.load import make_config as build

    content = {
        "data": {"source": str(options.data), "format": "decathlon"},
        "patches": {"size": list(options.patch), "foreground": 0.0},
        "model": {"name": "unet", "channels": [8, 16]},
        "train": {"batch": 1},
    }
    return build(content, name="bench", base=Path())


def prepare(config: Any, root: Path) -> Any:
    from voxscale.data.build import prepare as build
    from voxscale.data.formats import find_cases

    return build(find_cases(config.data, root), config.data, root, patch=config.patches.size, threads=2)


def ours(
    config: Any, store: Any, options: argparse.Namespace, preset: str, *, in_memory: bool = False
) -> Callable[[], Any]:
    """One patch at a time, as training gets them: a loader's thread samples, reads and augments it into the batch.

    Nothing is read ahead, so a turn takes what it takes.

    `in_memory` holds the cases decompressed, as `data.cache.where: host` does, and as `CacheDataset` has them.
    """
    import numpy as np
    import torch

    from voxscale.config.training import AUGMENT_PRESETS
    from voxscale.data.cache import FromHost, FromStore
    from voxscale.data.loader import PatchLoader
    from voxscale.data.sampler import PatchSampler, Stream

    stream = Stream(0, len(store), 1, 1)
    rows = np.arange(len(store), dtype=np.int32)
    sampler = PatchSampler(stream, store, rows, config.patches.size, 0.0)
    source = FromHost(store, lambda _: rows, f"bench-{os.getpid()}") if in_memory else FromStore(store)
    atexit.register(source.close)
    loader = PatchLoader(
        sampler=sampler, store=store, source=source, size=config.patches.size,
        transforms=AUGMENT_PRESETS[preset], rank=0, world_size=1, micro_batch=1, device=torch.device("cpu"),
        workers=1, prefetch=0, pin_memory=False,
    )  # fmt: skip
    return partial(next, loader.steps(1, 10**9))


def monai_pipelines(options: argparse.Namespace, scratch: Path) -> dict[str, Callable[[], Any]]:
    import numpy as np
    from monai.data import CacheDataset, Dataset, PersistentDataset

    files, transforms = monai_parts(options)
    datasets = {
        "monai.plain": Dataset(files, transforms),
        "monai.cache": CacheDataset(files, transforms, progress=False, num_workers=1),
        "monai.persistent": PersistentDataset(files, transforms, cache_dir=scratch / "persistent"),
    }
    turns = {name: iter(np.random.default_rng(0).integers(len(files), size=10**6).tolist()) for name in datasets}
    for case in range(len(files)):
        datasets["monai.persistent"][case]  # fill its cache
    return {name: (lambda name=name: datasets[name][next(turns[name])]) for name in datasets}


def monai_parts(options: argparse.Namespace) -> tuple[list[dict[str, str]], Any]:
    from monai import transforms as monai

    listed = json.loads((options.data / "dataset.json").read_text())["training"]
    files = [{key: str(options.data / case[key]) for key in ("image", "label")} for case in listed]
    both = ("image", "label")
    steps = [
        monai.LoadImaged(both),
        monai.EnsureChannelFirstd(both),
        monai.NormalizeIntensityd("image", nonzero=True, channel_wise=True),
        monai.RandSpatialCropd(both, roi_size=tuple(options.patch), random_size=False),
        *(monai.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in range(3)),
        monai.RandScaleIntensityd("image", factors=0.1, prob=0.5),
    ]
    return files, monai.Compose(steps)


def bare_read(options: argparse.Namespace, scratch: Path) -> Callable[[], Any]:
    """`patch = array[slices]` of float32, LZ4, 64³ chunks, from the page cache."""
    import blosc2
    import numpy as np

    from voxscale.data.formats import find_cases
    from voxscale.data.preprocess import preprocess
    from voxscale.data.volumes import read_case

    blosc2.set_nthreads(1)
    config = make_config(options)
    arrays = []
    for case in find_cases(config.data, scratch).cases:
        image = preprocess(read_case(case), config.data).image_cxyz
        path = scratch / f"{case.id}.b2nd"
        fast = {"codec": blosc2.Codec.LZ4, "nthreads": 1}
        blosc2.asarray(image, urlpath=str(path), chunks=(1, 64, 64, 64), cparams=fast)
        arrays.append(blosc2.open(str(path), mode="r", mmap_mode="r", dparams={"nthreads": 1}))
    rng = np.random.default_rng(0)

    def take() -> Any:
        array = arrays[rng.integers(len(arrays))]
        starts = [int(rng.integers(max(0, n - p) + 1)) for n, p in zip(array.shape[1:], options.patch, strict=True)]
        return array[(slice(None), *(slice(at, at + p) for at, p in zip(starts, options.patch, strict=True)))]

    return take


def measure_ranks(options: argparse.Namespace, doubled: argparse.Namespace, store: Path) -> dict[str, float]:
    """What the first and the second rank on a node hold for themselves, and the second with twice the cases."""
    held = {}
    for name, chosen in (("", options), (".doubled", doubled)):
        ranks = [start(chosen, store, "rank") for _ in range(2)]
        reports = [stop(rank) for rank in ranks]
        held[f"memory.first_rank{name}_mb"] = reports[0]["private_mb"]
        held[f"memory.second_rank{name}_mb"] = reports[1]["private_mb"]
    held["memory.doubled_ratio"] = round(held["memory.second_rank.doubled_mb"] / held["memory.second_rank_mb"], 3)
    return held


def start(options: argparse.Namespace, store: Path, kind: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start a part as a process of its own, and wait for its report; it stays alive until `stop`."""
    command = [sys.executable, __file__, "--data", str(options.data), "--store", str(store), "--only", kind]
    command += ["--patch", *map(str, options.patch), "--threads", str(options.threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, json.loads(process.stdout.readline())  # type: ignore[union-attr]


def stop(started: tuple[subprocess.Popen[str], dict[str, Any]]) -> dict[str, Any]:
    process, report = started
    process.communicate("\n")
    return report


def first_batch_of_ours(options: argparse.Namespace, began: float) -> dict[str, float]:
    import torch

    import voxscale.data.loader  # noqa: F401
    from voxscale.data.build import store_key
    from voxscale.data.formats import find_cases
    from voxscale.data.store import open_store

    torch.set_num_threads(options.threads)
    config, before = make_config(options), _private_mb()
    imported = time.perf_counter()
    key = store_key(find_cases(config.data, options.store), config.data)  # as `voxscale train` finds its store
    store = open_store(options.store / key)
    take = ours(config, store, options, "light")
    take()
    done = time.perf_counter()
    for _ in range(2 * len(store)):
        take()  # every case, so that whatever is kept per case is kept
    return _report(began, imported, done) | {"private_mb": round(_private_mb() - before, 1)}


def first_batch_of_cache(options: argparse.Namespace, began: float) -> dict[str, float]:
    import torch
    from monai.data import CacheDataset

    torch.set_num_threads(options.threads)
    files, transforms = monai_parts(options)
    imported = time.perf_counter()
    CacheDataset(files, transforms, progress=False, num_workers=1)[0]
    return _report(began, imported, time.perf_counter())


def _report(began: float, imported: float, done: float) -> dict[str, float]:
    return {"after_imports_s": round(done - imported, 3), "from_start_s": round(done - began, 3)}


def _private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def _process_age_s() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def make_dataset(folder: Path, cases: int = 4) -> None:
    """Volumes like BraTS's: four modalities of smooth tissue with noise in a head, zero around it."""
    import nibabel as nib
    import numpy as np
    from scipy import ndimage

    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    grid = np.ogrid[tuple(slice(n) for n in SHAPE)]
    training = []
    for case in range(cases):
        rng = np.random.default_rng(case)
        radii = np.array([72, 88, 64]) * rng.uniform(0.9, 1.1, 3)
        head = sum(((axis - n / 2) / r) ** 2 for axis, n, r in zip(grid, SHAPE, radii, strict=True)) < 1
        centre = np.array(SHAPE) / 2 + rng.uniform(-25, 25, 3)
        distance = np.sqrt(sum((axis - c) ** 2 for axis, c in zip(grid, centre, strict=True)))
        label = np.select([distance < 8, distance < 14, distance < 24], [3, 1, 2], 0).astype(np.uint8) * head
        image = np.zeros((*SHAPE, 4), np.int16)
        for channel in range(4):
            tissue = ndimage.zoom(rng.normal(size=(24, 24, 16)), np.array(SHAPE) / (24, 24, 16), order=1)
            voxels = 600 + 150 * tissue + 60 * label + rng.normal(scale=6, size=SHAPE)
            image[..., channel] = np.where(head, np.clip(voxels, 1, 4000), 0)
        name = f"BRATS_{case:03}.nii.gz"
        nib.save(nib.Nifti1Image(image, np.eye(4)), folder / "imagesTr" / name)
        nib.save(nib.Nifti1Image(label, np.eye(4)), folder / "labelsTr" / name)
        training.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    modality = {"0": "FLAIR", "1": "T1w", "2": "T1gd", "3": "T2w"}
    labels = {"0": "background", "1": "edema", "2": "non-enhancing tumor", "3": "enhancing tumour"}
    (folder / "dataset.json").write_text(json.dumps({"modality": modality, "labels": labels, "training": training}))


def double_dataset(folder: Path, into: Path) -> Path:
    """The same cases twice, under other names; the files are links."""
    content = json.loads((folder / "dataset.json").read_text())
    doubled = []
    for case in content["training"]:
        for prefix in ("a", "b"):
            entry = {}
            for key in ("image", "label"):
                original = folder / case[key]
                link = into / Path(case[key]).parent / f"{prefix}{original.name}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(original.resolve())
                entry[key] = str(link.relative_to(into))
            doubled.append(entry)
    (into / "dataset.json").write_text(json.dumps({**content, "training": doubled}))
    return into


if __name__ == "__main__":
    main()
