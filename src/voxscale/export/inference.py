"""A run's way from a file to a label map as a MONAI config: `inference.json` of a bundle. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from voxscale.config.data import Data
from voxscale.data.build import stored_dtype
from voxscale.infer.windows import Windows
from voxscale.models.networks import Described
from voxscale.tasks.segmentation import Segmentation

Item = dict[str, Any]

_OWN = "scripts.transforms"
_AUTOCAST = {"bf16": "$torch.bfloat16", "fp16": "$torch.float16"}


@dataclass(frozen=True)
class Parts:
    """What of a run a bundle is made from."""

    network: Described
    task: Segmentation
    data: Data
    windows: Windows
    precision: str


def make_inference(parts: Parts) -> Item:
    """The config that `python -m monai.bundle run` takes."""
    return {
        "imports": ["$import glob", "$import torch", "$import numpy"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/predictions'",
        "datalist": "$sorted(glob.glob(@dataset_dir + '/*.nii*'))",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": {"_target_": parts.network.target, **parts.network.arguments},
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": make_preprocessing(parts.data)},
        "dataset": {
            "_target_": "Dataset",
            "data": "$[{'image': image} for image in @datalist]",
            "transform": "@preprocessing",
        },
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "shuffle": False},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": parts.windows.size,
            "sw_batch_size": 1,
            "overlap": parts.windows.overlap,
            "mode": parts.windows.weights,
        },
        "postprocessing": {"_target_": "Compose", "transforms": make_postprocessing(parts.task)},
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
                "map_location": "@device",
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
            **_autocast(parts.precision),
        },
        "run": ["$@evaluator.run()"],
    }


def make_preprocessing(data: Data) -> list[Item]:
    """Slices, orientation, crop, resampling, intensity, as `voxscale.data.preprocess` does them, and the rounding of
    the store."""
    load = [
        {"_target_": "LoadImaged", "keys": "image", "reader": "NibabelReader"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
    ]
    return [*load, *_slices(data), *_orientation(data), *_crop(data), *_resampling(data), *_intensity(data)]


def _slices(data: Data) -> list[Item]:
    if data.slices is None:
        return []
    kept = [getattr(data.slices, axis) or (0, None) for axis in "xyz"]
    ranges = ", ".join(f"slice({low}, {high})" for low, high in kept)
    return [{"_target_": "SpatialCropd", "keys": "image", "roi_slices": f"$[{ranges}]"}]


def _orientation(data: Data) -> list[Item]:
    if data.orientation is None:
        return []
    axes = [["L", "R"], ["P", "A"], ["I", "S"]]
    return [{"_target_": "Orientationd", "keys": "image", "axcodes": data.orientation, "labels": axes}]


def _crop(data: Data) -> list[Item]:
    if not data.crop_foreground:
        return []
    window = data.intensity.window
    select = "$lambda image: image != 0" if window is None else f"$lambda image: image > {window[0]!r}"
    return [{"_target_": "CropForegroundd", "keys": "image", "source_key": "image", "select_fn": select}]


def _resampling(data: Data) -> list[Item]:
    if not is_resampled(data):
        return []
    grid = {"spacing": data.spacing} if data.spacing is not None else {"size": data.size}
    return [{"_target_": f"{_OWN}.ResampleLinearlyd", "keys": "image", **grid}]


def is_resampled(data: Data) -> bool:
    return data.spacing is not None or data.size is not None


def _intensity(data: Data) -> list[Item]:
    intensity = data.intensity
    scaling: list[Item] = []
    if intensity.window is not None:
        low, high = intensity.window
        to = {"b_min": 0.0, "b_max": 1.0, "clip": True}
        scaling = [{"_target_": "ScaleIntensityRanged", "keys": "image", "a_min": low, "a_max": high, **to}]
    elif intensity.percentiles is not None:
        scaling = [{"_target_": f"{_OWN}.Normalised", "keys": "image", "percentiles": intensity.percentiles}]
    elif intensity.zscore is not None:
        scaling = [{"_target_": f"{_OWN}.Normalised", "keys": "image", "zscore": intensity.zscore}]
    if stored_dtype(data) == np.float16:
        types = ("$torch.float16", "$torch.float32")
        scaling += [{"_target_": "CastToTyped", "keys": "image", "dtype": dtype} for dtype in types]
    return scaling


def make_postprocessing(task: Segmentation) -> list[Item]:
    """A decision for each voxel, back on the image's own grid; then a label map, or masks where that cannot be."""
    return [
        {"_target_": f"{_OWN}.ToMasksd", "keys": "pred", "exclusive": task.exclusive},
        {
            "_target_": "Invertd",
            "keys": "pred",
            "transform": "@preprocessing",
            "orig_keys": "image",
            "nearest_interp": False,
            "to_tensor": True,
        },
        _labels(task),
        {
            "_target_": "SaveImaged",
            "keys": "pred",
            "output_dir": "@output_dir",
            "output_postfix": "",
            "output_ext": ".nii.gz",
            "output_dtype": "$numpy.uint8",
            "resample": False,
            "separate_folder": False,
        },
    ]


def _labels(task: Segmentation) -> Item:
    if task.can_map is not None:
        return {"_target_": f"{_OWN}.ToRegionsd", "keys": "pred"}
    painting = task.painting
    labels = [label for _, label in sorted(painting)]
    kind: Item = {"exclusive": True, "labels": [0, *labels]} if task.exclusive else {
        "exclusive": False, "labels": labels, "order": [index for index, _ in painting]
    }  # fmt: skip
    return {"_target_": f"{_OWN}.ToLabelsd", "keys": "pred", **kind}


def _autocast(precision: str) -> Item:
    """Half precision where the run has it and a GPU computes; MONAI's evaluator has none for CPUs."""
    return {"amp": True, "amp_kwargs": {"dtype": _AUTOCAST[precision]}} if precision in _AUTOCAST else {"amp": False}
