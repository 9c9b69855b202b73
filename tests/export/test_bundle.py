"""MONAI bundles of trained runs: MONAI loads them and, with voxscale out of reach, comes to the same voxels."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray

from conftest import Cli, tiny_config
from voxscale.config.data import Data
from voxscale.config.load import make_config
from voxscale.data.geometry import make_geometry
from voxscale.data.preprocess import normalise
from voxscale.export.inference import make_preprocessing
from voxscale.models import build_model
from voxscale.models.networks import describe_network

REQUIRED = {  # by MONAI's schema of metadata
    *("schema", "version", "monai_version", "pytorch_version", "numpy_version", "required_packages_version", "task"),
    *("description", "authors", "copyright", "network_data_format"),
}
OF_TENSORS = {"type", "format", "num_channels", "spatial_shape", "dtype", "value_range"}
WITHOUT_VOXSCALE = """
import json, os, sys
sys.modules["voxscale"] = None  # whoever imports it fails
import torch
from monai.bundle import ConfigParser, run
bundle, images, out = sys.argv[1:]
os.chdir(bundle)
sys.path.insert(0, bundle)
torch.set_num_threads(1)
files = dict(config_file="configs/inference.json", meta_file="configs/metadata.json")
run(**files, dataset_dir=images, output_dir=out)
parser = ConfigParser()
parser.read_config(files["config_file"])
parser.update({"dataset_dir": images})
network = parser.get_parsed_content("network").eval()
network.load_state_dict(torch.load("models/model.pt", weights_only=True))
with torch.no_grad():
    for item in parser.get_parsed_content("dataset"):
        raw = parser.get_parsed_content("inferer")(item["image"][None], network)[0]
        name = os.path.basename(item["image"].meta["filename_or_obj"]).removesuffix(".nii.gz")
        torch.save(raw.as_tensor(), os.path.join(out, name + ".pt"))
"""
TRAINED: dict[str, dict[str, Any]] = {
    "regions on a grid of their own": {
        "data__regions": {"whole": [1, 2], "core": [2]},
        "data__spacing": [1.3, 0.9, 2.1],
        "data__crop_foreground": True,
        "validate__overlap": 0.6,
    },
    "exclusive classes, a window, other axes": {
        "data__regions": None,
        "data__intensity": {"window": [-0.2, 1.4]},
        "data__orientation": "LPI",
        "data__slices": {"z": [1, -2]},
        "data__size": [20, 26, 18],
        "model": {"name": "segresnet", "channels": [8, 16]},
        "validate__weights": "constant",
    },
    "masks of regions without a label of their own": {
        "data__regions": {"first": [1, 2], "second": [1, 2]},
        "data__intensity": {"percentiles": [2.0, 98.0]},
        "data__orientation": None,
        "model": {"name": "dynunet", "channels": [4, 8, 8], "deep_supervision": 1},
    },
}


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images with two channels and labels 1 and 2, of odd shapes, voxels and axes; background is zero."""
    folder = tmp_path_factory.mktemp("volumes")
    draw = np.random.default_rng(0)
    turned = np.diag([-0.8, 1.1, 1.7, 1.0])
    for number in range(6):
        shape = (21 + number, 25, 17)
        label = np.zeros(shape, np.uint8)
        label[4:14, 5:17, 4:12] = 1
        label[7:11, 8:13, 6:10] = 2
        image = np.stack([label * 1.0 + draw.normal(0, 0.3, shape), 1.5 - label + draw.normal(0, 0.3, shape)], axis=3)
        image[:2] = image[:, :, -1:] = 0
        affine = np.diag([1.0, 1.2, 0.7, 1.0]) if number % 2 else turned[:, [1, 0, 2, 3]]
        (folder / "images").mkdir(exist_ok=True)
        (folder / "labels").mkdir(exist_ok=True)
        nib.save(nib.Nifti1Image(image.astype(np.float32), affine), folder / "images" / f"c{number}.nii.gz")
        nib.save(nib.Nifti1Image(label, affine), folder / "labels" / f"c{number}.nii.gz")
    return folder


@pytest.fixture(scope="module")
def some_images(volumes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("some")
    for name in ("c0.nii.gz", "c3.nii.gz"):
        (folder / name).write_bytes((volumes / "images" / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def train(volumes: Path, cli_here: Cli, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def run(**fields: Any) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        fields = {"train__epochs": 4, "validate__every": 4, "optimizer": {"name": "adam", "lr": 2e-2}, **fields}
        (folder / "c.yaml").write_text(yaml.safe_dump(tiny_config(volumes, **fields)))
        done = cli_here("train", folder / "c.yaml", "--devices", "1", "--run", folder / "run")
        assert done.code == 0, done.err
        return folder / "run"

    return run


def read(path: Path) -> NDArray[Any]:
    return np.asanyarray(nib.load(path).dataobj)


@pytest.mark.parametrize("kind", TRAINED)
def test_monai_comes_to_the_same_voxels_without_voxscale(
    kind: str, train: Callable[..., Path], some_images: Path, cli_here: Cli, tmp_path: Path
) -> None:
    run = train(**TRAINED[kind])
    masks = ["--masks"] if kind.startswith("masks") else []
    assert cli_here("predict", run, some_images, "--out", tmp_path / "ours", *masks).code == 0
    exported = cli_here("export", run, "--to", "bundle", "--out", tmp_path / "bundle", "--json")
    assert exported.code == 0, exported.err
    words = [sys.executable, "-c", WITHOUT_VOXSCALE, tmp_path / "bundle", some_images, tmp_path / "theirs"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if masks:
        assert cli_here("predict", run, some_images, "--out", tmp_path / "sure", "--probabilities").code == 0
    for name in ("c0", "c3"):
        ours = nib.load(tmp_path / "ours" / f"{name}{'_masks' if masks else ''}.nii.gz")
        theirs = nib.load(tmp_path / "theirs" / f"{name}.nii.gz")
        assert np.array_equal(np.asanyarray(ours.dataobj), np.asanyarray(theirs.dataobj))
        assert np.allclose(ours.affine, theirs.affine, atol=1e-5)
        assert len(np.unique(np.asanyarray(theirs.dataobj))) > 1, "something was found"
        raw = torch.load(tmp_path / "theirs" / f"{name}.pt", weights_only=True)
        if masks:  # nothing was turned or resampled: probabilities lie on the same grid
            difference = np.abs(
                read(tmp_path / "sure" / f"{name}_probabilities.nii.gz") - raw.sigmoid().permute(1, 2, 3, 0).numpy()
            )
            assert difference.max() <= 1e-5


@pytest.fixture(scope="module")
def bundle(train: Callable[..., Path], cli_here: Cli, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(A run, its bundle)"""
    run, out = train(data__regions=None, train__epochs=1, validate__every=1), tmp_path_factory.mktemp("of") / "bundle"
    done = cli_here("export", run, "--to", "bundle", "--out", out, "--json")
    assert done.code == 0, done.err
    assert done.json["was_there"] is False
    return run, out


def test_the_bundle_has_what_monai_asks_for(bundle: tuple[Path, Path]) -> None:
    run, out = bundle
    metadata = json.loads((out / "configs" / "metadata.json").read_text())
    metrics = json.loads((run / "metrics.json").read_text())
    assert metadata.keys() >= REQUIRED
    for side, name in (("inputs", "image"), ("outputs", "pred")):
        assert metadata["network_data_format"][side][name].keys() >= OF_TENSORS
    assert metadata["network_data_format"]["inputs"]["image"]["num_channels"] == 2
    assert metadata["network_data_format"]["outputs"]["pred"]["channel_def"] == {"0": "background", "1": "1", "2": "2"}
    assert metadata["eval_metrics"] == {"dice/mean": pytest.approx(metrics["best"]["value"])}
    assert metadata["voxscale"]["weights_sha256"] == metrics["weights_sha256"]
    state = torch.load(out / "models" / "model.pt", weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    assert str(run.parent) not in "".join(path.read_text() for path in out.rglob("*.*") if path.suffix != ".pt")
    assert "import voxscale" not in (out / "scripts" / "transforms.py").read_text()


def test_monai_verifies_the_network_and_loads_it(bundle: tuple[Path, Path]) -> None:
    from monai.bundle import ConfigWorkflow, load, verify_net_in_out

    _, out = bundle
    files = {
        "config_file": str(out / "configs" / "inference.json"),
        "meta_file": str(out / "configs" / "metadata.json"),
    }
    verify_net_in_out(net_id="network_def", device="cpu", **files)
    workflow = ConfigWorkflow(workflow_type="infer", **files)
    workflow.initialize()
    network = workflow.network_def
    loaded = load("bundle", model=network, bundle_dir=str(out.parent), source="github", workflow_type="infer")
    assert type(loaded).__name__ == "UNet"


def test_a_bundle_is_written_whole_once(bundle: tuple[Path, Path], cli_here: Cli, tmp_path: Path) -> None:
    run, out = bundle
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = cli_here("export", run, "--to", "bundle", "--out", out, "--json")
    assert (again.code, again.json["was_there"]) == (0, True)
    assert (
        "--dataset_dir IMAGES --output_dir PREDICTIONS" in cli_here("export", run, "--to", "bundle", "--out", out).out
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine")
    refused = cli_here("export", run, "--to", "bundle", "--out", tmp_path / "else")
    assert (refused.code, "exists, and is not this bundle" in refused.err) == (2, True)
    assert [path.name for path in (tmp_path / "else").iterdir()] == ["notes.txt"]
    absent = cli_here("export", run, "--to", "bundle", "--out", tmp_path / "new", "--checkpoint", "step-00000001")
    assert (absent.code, "has no checkpoint" in absent.err) == (2, True)
    assert cli_here("export", tmp_path / "else", "--to", "bundle", "--out", tmp_path / "new").code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"model": {"name": "distmis_unet"}, "validate": {"mirror": True}},
            ["distmis_unet: is no network", "--no-mirror"],
        ),
        ({"model": {"name": "mine:build"}}, ["model mine:build: is no network of MONAI"]),
        (
            {"task": "classification", "model": {"name": "resnet"}, "loss": {"name": "cross_entropy"}},
            ["task classification: expected segmentation: MONAI has no parts for tables", "use `voxscale predict "],
        ),
    ],
)
def test_what_no_bundle_holds_is_refused_at_once(
    fields: dict[str, Any], said: list[str], cli_here: Cli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump({"data": {"source": str(tmp_path)}, **fields}))
    (run / "plan.json").write_text("{}")
    done = cli_here("export", run, "--to", "bundle", "--out", tmp_path / "out")
    assert done.code == 2
    assert "cannot become a bundle" in done.err
    for text in said:
        assert text in done.err
    assert not (tmp_path / "out").exists()


MODELS = {
    "unet": {"channels": [4, 8]},
    "segresnet": {"channels": [8, 16], "dropout": 0.1},
    "unetr": {"feature_size": 4, "hidden": 24, "mlp": 32, "heads": 2},
    "swin_unetr": {"feature_size": 12, "depths": [1, 1, 1, 1]},
    "dynunet": {"channels": [4, 8, 8], "residual": True, "deep_supervision": 1},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_network_described_as_json_is_the_network_that_was_trained(name: str) -> None:
    """MONAI builds it from the plain description, takes its weights, and computes the same bits."""
    from monai.bundle import ConfigParser

    options = make_config(
        {"data": {"source": "d"}, "model": {"name": name, **MODELS[name]}}, name="c", base=Path()
    ).model
    patch = (64, 64, 64) if name == "swin_unetr" else (32, 32, 32)
    ours = build_model(options, 2, 3, patch=patch, seed=1).eval()
    described = describe_network(options, 2, 3, patch)
    assert described is not None
    plain = json.loads(json.dumps({"_target_": described.target, **described.arguments}))
    theirs = ConfigParser({"network": plain}).get_parsed_content("network").eval()
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert all("norm_cross_attn" in key or "skip_layers" in key for key in missing)
    image = torch.randn(1, 2, *patch, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(image), theirs(image))


@pytest.mark.parametrize(
    "intensity", [{"zscore": "nonzero"}, {"zscore": "all"}, {"percentiles": [1, 99]}, {"window": [0, 2]}, {}]
)
def test_images_are_prepared_to_the_same_bits(volumes: Path, intensity: dict[str, Any]) -> None:
    """With MONAI's transforms and those of the bundle; float16 for scaled voxels, as in the store."""
    from monai.bundle import ConfigParser

    data = Data(source="d", spacing=(1.0, 1.0, 1.0), crop_foreground=True, intensity=intensity)
    config = {"imports": ["$import torch"], "all": {"_target_": "Compose", "transforms": make_preprocessing(data)}}
    text = json.dumps(config).replace("scripts.transforms", "voxscale.export.bundle_transforms")
    prepare = ConfigParser(json.loads(text)).get_parsed_content("all")
    path = volumes / "images" / "c2.nii.gz"
    theirs = prepare({"image": str(path)})["image"]
    image = np.moveaxis(read(path), 3, 0)
    geometry = make_geometry(image, nib.load(path).affine, data)
    ours = normalise(geometry.apply(image, linear=True), data.intensity)
    expected = ours.astype(np.float16).astype(np.float32) if intensity else ours
    assert np.array_equal(theirs.numpy(), expected)
    assert np.allclose(theirs.affine.numpy(), geometry.prepared_affine)
