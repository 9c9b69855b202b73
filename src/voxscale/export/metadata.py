"""What a bundle says of itself: `metadata.json` after MONAI's schema, and `docs/README.md`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from voxscale.export.inference import Parts
from voxscale.infer.predict import BACKGROUND

_VERSION = version("voxscale")
_SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
_NEEDED = ("nibabel", "einops")
_EVALUATOR = {"pytorch-ignite": "0.4.11", "fire": "0.5.0"}  # of MONAI's own evaluator and command line


def make_metadata(parts: Parts, name: str, origin: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any]:
    """`origin` says which weights these are; `metrics` are those of the validation cases."""
    task = parts.task
    labels = "; ".join(f"{label}: {values}" for label, values in _classes(parts).items())
    shape = {"spatial_shape": list(parts.windows.size), "dtype": "float32", "value_range": [], "is_patch_data": True}
    channels = parts.network.arguments["in_channels"]
    return {
        "schema": _SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": "exported by voxscale"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {**{package: version(package) for package in _NEEDED}, **_EVALUATOR},
        "name": name,
        "task": f"Segmentation of volumes into {', '.join(task.classes)}",
        "description": f"{parts.network.name} trained with voxscale {_VERSION}; see docs/README.md",
        "authors": "not stated",
        "copyright": "not stated",
        "intended_use": "Research; not for diagnosis",
        "data_type": "nibabel",
        "label_classes": labels,
        "pred_classes": labels,
        "eval_metrics": metrics,
        "voxscale": {"version": _VERSION, **origin},
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "modality": "n/a",
                    "num_channels": channels,
                    **shape,
                    "channel_def": {str(index): f"channel {index}" for index in range(channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "image",
                    "format": "labels" if task.exclusive else "classes",
                    "num_channels": task.out_channels,
                    **shape,
                    "channel_def": {str(index): channel for index, channel in enumerate(_channels(parts))},
                }
            },
        },
    }


def _channels(parts: Parts) -> list[str]:
    return [*([BACKGROUND] if parts.task.exclusive else []), *parts.task.classes]


def _classes(parts: Parts) -> dict[str, str]:
    return {name: " and ".join(map(str, labels)) for name, labels in parts.task.classes.items()}


def render_readme(parts: Parts, name: str, metrics: dict[str, float]) -> str:
    channels = parts.network.arguments["in_channels"]
    classes = "\n".join(f"| {label} | {values} |" for label, values in _classes(parts).items())
    scores = "".join(
        f"\n{metric} over the validation cases of its run: {value:.4f}\n" for metric, value in metrics.items()
    )
    given = "one channel" if channels == 1 else f"{channels} channels, in a fourth dimension or as a list of files"
    output = "a label map" if parts.task.can_map is None else "a mask for each region, in a fourth dimension,"
    return f"""# {name}

A {parts.network.name} that segments volumes, trained with voxscale {_VERSION}. It runs with MONAI alone.

| class | labels |
|---|---|
{classes}
{scores}
## Run it
In this bundle's folder, with the packages that `configs/metadata.json` names:

```
python -m monai.bundle run --config_file configs/inference.json --meta_file configs/metadata.json \\
  --dataset_dir IMAGES --output_dir PREDICTIONS
```

`IMAGES` is a folder of NIfTI files with {given}. Each gives {output} in `PREDICTIONS`,
under its own name and on its own grid.
`--datalist "[['a_0000.nii.gz', 'a_0001.nii.gz']]"` names files instead, a list for each case.

`models/model.pt` holds the state of `network_def` and nothing else: `torch.load("models/model.pt", weights_only=True)`.
`scripts/transforms.py` has those transforms that MONAI has not, or not to the last bit; it is part of voxscale, under
Apache-2.0.
"""
