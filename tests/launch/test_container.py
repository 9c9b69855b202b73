"""Containers: words that hold, images that are checked and fetched, and real jobs in Charliecloud and Apptainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from conftest import RECIPES, REPOSITORY, Cli, tiny_config
from lab.containers import Apptainer, with_program, write_archive
from lab.slurm import SlurmLab, until
from lab.trained import LONG
from voxscale.config.data import Synthetic
from voxscale.config.load import check_section, make_config, read_config
from voxscale.config.site import Container, Site, read_site
from voxscale.data.synthetic import ensure_like
from voxscale.errors import ConfigError, InfrastructureError
from voxscale.launch import needs
from voxscale.launch.batch import binds_of
from voxscale.launch.cluster_run import binds_for
from voxscale.launch.container import (
    all_binds,
    check_container,
    folders_of,
    image_path,
    is_of_image,
    outermost,
    render_container,
    render_passed_on,
)
from voxscale.launch.definition import Recipe, pinned, render_definition
from voxscale.launch.image import fetch_image, make_ready
from voxscale.launch.needs import is_at_least, lacking
from voxscale.launch.script_job import named_folders

NOBODY = 65534
PACKAGES = Path(sysconfig.get_path("purelib"))
# Look-ups of names wait for a server that the nodes of the lab cannot reach.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
DROPPING = ["--cleanenv", "--containall"]


def container(**fields: Any) -> Container:
    return check_section(Container, {"image": "/i.sif", **fields}, "container")


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(lambda names: Path("/none", *names))


@given(st.lists(PATHS, max_size=8))
def test_outermost_folders_hold_all_and_not_each_other(folders: list[Path]) -> None:
    kept = outermost(folders)
    assert all(any(folder.is_relative_to(other) for other in kept) for folder in folders)
    assert not any(one != other and one.is_relative_to(other) for one in kept for other in kept)
    assert set(kept) <= set(folders)


def test_the_run_that_training_begins_with_is_bound_as_long_as_it_is_there(tmp_path: Path) -> None:
    root, first = tmp_path / "runs" / "tuned", tmp_path / "elsewhere" / "first"
    config = make_config({"data": {"source": "d"}, "train": {"init_from": "elsewhere/first"}}, name="c", base=tmp_path)
    without = binds_of(config, root, {"HOME": "/home/me"})
    assert root.parent in without and first not in without
    first.mkdir(parents=True)
    assert binds_of(config, root, {"HOME": "/home/me"}) == [*without, first]


def test_what_links_lead_to_is_bound_too(tmp_path: Path) -> None:
    """Datasets are often folders of links into an archive, and home folders links to a file server."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "1.nii").touch()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "1.nii").symlink_to(tmp_path / "archive" / "1.nii")
    assert folders_of([tmp_path / "set" / "1.nii"]) == [tmp_path / "archive", tmp_path / "set"]
    (tmp_path / "link").symlink_to(tmp_path / "set")
    assert outermost([tmp_path / "link"]) == [tmp_path / "link", tmp_path / "set"]


@given(st.lists(PATHS, max_size=5), PATHS, PATHS)
def test_what_a_site_binds_is_not_bound_over(folders: list[Path], host: Path, inside: Path) -> None:
    """Every folder is visible, and at and below a site's own bind only that decides, with its :ro."""
    given = f"{host}:{inside}:ro"
    binds = all_binds(container(binds=[given]), folders)
    assert binds[-1] == given
    automatic = [Path(bind) for bind in binds if ":" not in bind]
    assert not any(folder.is_relative_to(inside) for folder in automatic)
    assert all(any(folder.is_relative_to(each) for each in (inside, *automatic)) for folder in folders)


def test_a_folder_bound_by_the_site_is_not_refused_as_one_of_ours() -> None:
    assert check_container(container(image="/usr/..", binds=["/usr/share"]), [Path("/usr/share")]) == []


@pytest.mark.parametrize(
    "folder", ["/", "/usr", "/usr/bin", "/usr/lib/python3", "/etc/x", "/opt", "/var", "/usr/local"]
)
def test_what_an_image_runs_by_is_its_own(folder: str) -> None:
    assert is_of_image(Path(folder))


@pytest.mark.parametrize("folder", ["/srv", "/home/me", "/opt/data", "/dev/shm/x", "/usr/local/data", "/b"])  # noqa: S108
def test_other_folders_can_be_bound(folder: str) -> None:
    assert not is_of_image(Path(folder))


def test_scratch_is_bound_wherever_the_store_is(write_config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    config = read_config(write_config(data__store=str(tmp_path / "store")))
    site = check_section(Site, {"container": {"image": "/i.sif"}, "scratch": "$HERE/scratch"}, "site")
    binds = binds_for(config, tmp_path / "runs" / "run", {"HERE": str(tmp_path)}, site)
    assert {tmp_path / "scratch", tmp_path / "store", tmp_path / "runs"} <= set(binds)
    (tmp_path / "scratch").rmdir()
    assert tmp_path / "scratch" not in binds_for(config, tmp_path / "run", {"HERE": str(tmp_path)}, site)


def test_a_script_has_its_own_search_path() -> None:
    """A user's script is not told of voxscale, and what the site says stays behind what we add."""

    def words(is_own: bool, **fields: Any) -> list[str]:
        return render_container(
            container(**fields), [], gpus=False, python="python3", is_own=is_own, search="/site/a:/site/b"
        )

    assert "PYTHONPATH=/opt/voxscale:/site/a:/site/b" in words(True)
    assert "PYTHONPATH=/more:/site/a:/site/b" in words(False, packages="/more")
    assert not any(word.startswith("PYTHONPATH") or "/opt/voxscale" in word for word in words(False))


def test_folders_of_what_a_script_is_told_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, data, archive = tmp_path / "a" / "here", tmp_path / "D", tmp_path / "archive"
    for folder in (here, data, archive, data / "e=q"):
        folder.mkdir(parents=True)
    (archive / "1.nii").touch()
    (data / "1.nii").symlink_to(archive / "1.nii")
    (here / "link").symlink_to(archive)
    monkeypatch.chdir(here)
    assert named_folders("../../D/not/yet") == [data]
    assert named_folders(f"--data={data}/e=q/f") == [data / "e=q", here]
    assert named_folders(f"{data}/e=q/f") == [data / "e=q", here]
    assert named_folders(f"{data}/1.nii") == [data, archive]
    assert named_folders("link") == [here / "link", archive]
    assert named_folders("--epochs=3") == named_folders("word") == []
    assert named_folders("/nosuch/folder") == [Path("/")]
    assert named_folders("a/" + "x" * 5000) == [here]


VERSIONS = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda numbers: ".".join(map(str, numbers)))


@given(VERSIONS, VERSIONS, st.sampled_from(["", "+cpu", ".post1"]))
def test_versions_are_compared_as_packaging_does(found: str, least: str, ending: str) -> None:
    assert is_at_least(found + ending, least) == (Version(found + ending) >= Version(least))


def test_all_that_is_lacking_is_named_with_what_is_there() -> None:
    assert lacking(["numpy>=1.26", "nosuch>=1", "pyyaml>=99.1", "typer"]) == {
        "nosuch>=1": "not there",
        "pyyaml>=99.1": f"found {yaml.__version__}",
    }
    assert is_at_least("2.11.0a0+git1", "2.11"), "a vendor's early build counts as the release"


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
@pytest.mark.parametrize(
    ("nv", "gpus", "given"), [("auto", True, True), ("auto", False, False), (True, False, True), (False, True, False)]
)
def test_the_driver_is_inside_where_gpus_are_asked_for(runtime: str, nv: Any, gpus: bool, given: bool) -> None:
    words = render_container(container(runtime=runtime, nv=nv), [], gpus=gpus, python="python3")
    assert words[:2] == [runtime, "exec"]
    assert ("--nv" in words) == given


def test_variables_are_kept_as_texts() -> None:
    """Real bash, and a value that Apptainer's own shell would otherwise evaluate."""
    keep = render_passed_on(container(), ["MINE", "PATH"])
    environ = {
        "PYTORCH_X": "2",
        "MINE": "$(touch canary) x",
        "SLURM_NODEID": "1",
        "OTHER": "no",
        "PATH": os.environ["PATH"],
    }
    done = subprocess.run(
        ["bash", "-c", keep, "node", "env"], env=environ, capture_output=True, text=True, timeout=10, check=True
    )
    kept = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith("APPTAINER"))
    assert kept["APPTAINERENV_MINE"] == "$(touch canary) x"
    assert kept["APPTAINERENV_SLURM_NODEID"] == "1"
    assert kept["APPTAINER_NO_EVAL"] == "1"
    assert kept["APPTAINERENV_PYTORCH_X"] == "2"
    assert not {"APPTAINERENV_OTHER", "APPTAINERENV_PATH"} & set(kept)
    assert render_passed_on(container(runtime="charliecloud")) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": "/nosuch.sif"}, "/nosuch.sif: no such file or folder"),
        ({"image": "rel.sif"}, "expected an absolute path"),
        ({"image": "FILE"}, "not an image; apptainer expects a .sif file or a folder"),
        ({"image": "FILE", "runtime": "charliecloud"}, "found a file; charliecloud expects an unpacked image"),
        ({"image": "FOLDER"}, "found a folder without programs"),
        ({"image": "docker-archive:/nosuch.tar"}, "/nosuch.tar is no file"),
        ({"image": "library://a/b", "runtime": "charliecloud"}, "charliecloud fetches docker://NAME only"),
        ({"binds": ["/nosuch:/data"]}, "/nosuch:/data: /nosuch does not exist"),
        ({"binds": ["data:/data"]}, "expected HOST, HOST:INSIDE or HOST:INSIDE:ro"),
        ({"binds": ["/usr:/a:/b:ro"]}, "expected HOST, HOST:INSIDE or HOST:INSIDE:ro"),
        ({"binds": ["/usr:/a,b"]}, "absolute paths without : and ,"),
        ({"binds": ["/usr:/a:ro"], "runtime": "charliecloud", "image": "SYSTEM"}, "charliecloud cannot bind with :ro"),
        ({"packages": "/nosuch"}, "container.packages /nosuch: no such folder"),
        ({"packages": "here"}, "container.packages here: expected an absolute path"),
    ],
)
def test_bad_input_is_said(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    (tmp_path / "FILE").write_text("#!/bin/sh\n")
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "SYSTEM" / "bin").mkdir(parents=True)
    given = {"image": "SYSTEM", **fields}
    if given["image"].isupper():
        given["image"] = str(tmp_path / given["image"])
    (finding,) = check_container(container(**given), [tmp_path])
    assert words in finding


def test_everything_is_said_at_once(tmp_path: Path) -> None:
    odd = [tmp_path / "a:b", tmp_path / "a,b", Path("/usr")]
    found = check_container(container(image="/nosuch", binds=["/no1", "/no2"], packages="/no3"), odd)
    assert len(found) == 7
    assert sum("a path with : or , cannot be bound" in finding for finding in found) == 2
    assert sum("would hide the image's own /usr" in finding for finding in found) == 1


def test_a_reference_has_its_place_in_the_cache() -> None:
    site = {"container": {"image": "docker://reg:5000/a/b@sha256:12"}}
    environ = {"XDG_CACHE_HOME": "/caches", "HOME": "/home/me"}
    own = read_site(None, environ, [f"container={json.dumps(site['container'])}"]).container
    assert own is not None
    assert image_path(own) == Path("/caches/voxscale/images/docker-reg-5000-a-b-sha256-12-aba8b913.sif")
    assert str(image_path(own)) in render_container(own, [], gpus=False, python="python3")
    assert not container(image="/a/docker-archive:x").is_reference
    assert image_path(container(image="docker://a/b-c")) != image_path(container(image="docker://a/b_c"))


def test_pins_are_complete() -> None:
    pins = dict(pin.split("==") for pin in pinned())
    assert {"torch", "monai", "numpy", "pydantic-core", "typing-extensions"} <= set(pins)
    assert "pytest" not in pins, "extras are not needed to train"
    assert not any("+" in version for version in pins.values())


def test_definitions_say_what_they_are_made_of() -> None:
    text = render_definition(Recipe("apptainer", "docker://python:3.11-slim", ("a==1",)))
    assert "Bootstrap: docker\nFrom: python:3.11-slim\n" in text
    assert "Bootstrap: localimage\nFrom: /b.sif\n" in render_definition(Recipe("singularity", "/b.sif", ("a==1",)))
    docker = render_definition(Recipe("charliecloud", "docker://python:3.11-slim", ("a==1",), Path("/w")))
    assert "\nFROM python:3.11-slim\n" in docker
    assert "--no-index --find-links /opt/wheels -r /opt/voxscale/requirements.txt" in docker


def test_a_definition_is_written_without_a_runtime(cli_here: Cli, tmp_path: Path) -> None:
    file = tmp_path / "my.def"
    done = cli_here("image", "build", "--no-build", "--definition", file, "--json")
    assert done.json["written"] == [str(file), f"{file}.context"]
    assert (tmp_path / "my.def.context" / "voxscale" / "launch" / "node.py").is_file()
    assert (tmp_path / "my.def.context" / "requirements.txt").read_text().splitlines() == list(pinned())
    again = cli_here("image", "build", "--no-build", "--definition", file)
    assert again.code == 2
    assert f"{file}: is there already" in again.err
    assert f"{file}.context: is there already" in again.err


@pytest.mark.parametrize("runtime", ["apptainer", "charliecloud"])
def test_a_definition_of_yours_is_not_overwritten(
    cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ("Dockerfile" if runtime == "charliecloud" else "voxscale.def")
    file.write_text("mine")
    for words in (["--no-build"], ["--definition", file.name]):
        done = cli_here("image", "build", "--runtime", runtime, *words)
        assert done.code == 2
        assert f"{file}: is there already" in done.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


HOSTILE = {
    "ch": "{victim}", "srv": "{victim}", "data": "../victim", "etc/hosts": "{victim}/1.txt", "ring": "ring",
    "inner": "usr/inner", "opt": "usr",
}  # fmt: skip


def test_links_in_an_image_lead_nowhere_else(tmp_path: Path) -> None:
    """What Charliecloud binds on is made in the image, through its links, and never on the host."""
    image, victim = tmp_path / "image", tmp_path / "victim"
    for folder in (image / "usr" / "inner", image / "etc", victim):
        folder.mkdir(parents=True)
    (victim / "1.txt").touch()
    for name, target in HOSTILE.items():
        (image / name).symlink_to(target.format(victim=victim))
    host = tmp_path / "host"
    host.mkdir()
    insides = ["/srv/a", "/data/b", "/ring/c", "/inner/d", "/../up", "/new/e"]
    own = container(runtime="charliecloud", image=str(image), binds=[f"{host}:{inside}" for inside in insides])
    site = Site(container=own)
    with pytest.raises(ConfigError) as caught:
        make_ready(site, [], {"PATH": ""})
    findings = caught.value.message.splitlines()
    refused = ["/srv/a", "/data/b", "/ring/c", "/../up", "/ch/environment", "/etc/hosts"]
    assert len(findings) == len(refused)
    assert all(path in finding for path, finding in zip(refused, findings, strict=True))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.parent in (victim, tmp_path)) == [
        "1.txt", "host", "image", "victim",
    ]  # fmt: skip
    assert (image / "usr" / "inner" / "d").is_dir()
    assert (image / "new" / "e").is_dir()
    assert (image / "usr" / "voxscale" / "voxscale").is_dir(), "a link within the image is followed"


def test_what_cannot_be_built_is_said_at_once(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "out.sif").touch()
    done = cli("image", "build", "--from", tmp_path / "no.sif", "--wheels", tmp_path, "--out", tmp_path / "out.sif")
    assert done.code == 2
    for words in ("no.sif: no such file", "no wheels there", "out.sif: is there already"):
        assert words in done.err
    done = cli("image", "build", "--out", tmp_path / "x.sif", env={"PATH": str(tmp_path)})
    assert done.code == 4
    assert "apptainer is not on this machine: nothing was built" in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.sif"]


# ---- with the real runtimes


@pytest.mark.slurm
def test_a_reference_is_fetched_once_and_whole(apptainer: Apptainer, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    write_archive(tmp_path / "small.tar", tmp_path / "small")
    environ = with_program(apptainer.program, APPTAINER_CACHEDIR=str(tmp_path / "own"))
    wanted = container(image=f"docker-archive:{tmp_path}/small.tar", cache=str(tmp_path / "cache"))
    with pytest.raises(InfrastructureError, match="apptainer is not here"):
        fetch_image(wanted, {"PATH": str(tmp_path)})
    code = (
        "import os, sys; from voxscale.config.site import Container; from voxscale.launch.image import fetch_image; "
        "print(fetch_image(Container(image=sys.argv[1], cache=sys.argv[2]), os.environ))"
    )
    words = [sys.executable, "-c", code, wanted.image, wanted.cache or ""]
    fetchers = [subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first = image_path(wanted)
    assert [fetcher.communicate(timeout=60)[0].strip() for fetcher in fetchers] == [str(first)] * 2
    (tmp_path / "small.tar").unlink()
    assert fetch_image(wanted, {"PATH": ""}) == first, "nothing is asked for a second time"
    assert not check_container(wanted, [])
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(b"nothing")
    broken = wanted.model_copy(update={"image": f"docker-archive:{damaged}"})
    with pytest.raises(InfrastructureError, match="could not be fetched"):
        fetch_image(broken, environ)
    assert [path for path in (tmp_path / "cache").iterdir() if path.name != ".lock"] == [first]


def write_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def image_with_pip(image_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image with pip, as stock images have it."""
    folder = tmp_path_factory.mktemp("pip") / "image"
    subprocess.run(["cp", "-a", image_folder, folder], check=True, timeout=120)
    shutil.copytree(PACKAGES / "pip", folder / "usr/lib/python3/dist-packages/pip", dirs_exist_ok=True)
    return folder


@pytest.mark.cluster
def test_an_image_is_built_and_has_what_was_pinned(apptainer: Apptainer, image_with_pip: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, "smallthing", "1.2.3")
    environ = with_program(apptainer.program)
    built = build_here(image_with_pip, "smallthing==1.2.3", wheels, tmp_path / "own.sif", environ)
    assert built.returncode == 0, built.stderr
    code = "import smallthing, voxscale; print(smallthing.version, voxscale.__file__)"
    run = [apptainer.program, "exec", "--containall", tmp_path / "own.sif"]
    said = subprocess.run(
        [*run, "python3", "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert said.split() == ["1.2.3", "/opt/voxscale/voxscale/__init__.py"]
    refused = build_here(image_with_pip, "nosuchthing==1", wheels, tmp_path / "no.sif", environ)
    assert "apptainer could not build the image" in refused.stderr
    assert "nosuchthing==1" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.sif", "wheels"]


def build_here(
    base: Path, requirement: str, wheels: Path, out: Path, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """`build_image` in a user namespace of its own, whose root has every capability: this machine's may not."""
    code = (
        "import os, sys; from pathlib import Path; from voxscale.launch.definition import Recipe, build_image; "
        "base, need, wheels, out = sys.argv[1:]; "
        "build_image(Recipe('apptainer', base, (need,), Path(wheels)), Path(out), os.environ)"
    )
    words = [sys.executable, "-c", code, str(base), requirement, str(wheels), str(out)]
    inside = ["unshare", "-U", "bash", "-c", 'read -r _; exec "$@"', "bash", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(inside, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        own, its = Path("/proc/self/ns/user"), Path(f"/proc/{child.pid}/ns/user")
        until(lambda: its.readlink() != own.readlink(), 10, lambda: "no namespace")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{name}").write_text("0 0 65536\n")
        out_text, err_text = child.communicate("\n", timeout=200)
    return subprocess.CompletedProcess(words, child.returncode, out_text, err_text)


@pytest.mark.cluster
@pytest.mark.parametrize("runtime", ["charliecloud", "apptainer"])
def test_the_fix_for_what_is_lacking_works(
    request: pytest.FixtureRequest, image_with_pip: Path, tmp_path: Path, runtime: str
) -> None:
    """The very command of the message, with a package instead of voxscale's own."""
    program = request.getfixturevalue(runtime)
    environ = with_program(program if runtime == "charliecloud" else program.program, USER="root")
    write_wheel(tmp_path, "smallthing", "1.2.3")
    own = container(runtime=runtime, image=str(image_with_pip))
    enter = {
        "charliecloud": f"ch-run --bind DIR {image_with_pip} --",
        "apptainer": f"apptainer exec --bind DIR {image_with_pip}",
    }
    (image_with_pip / str(tmp_path).lstrip("/")).mkdir(parents=True, exist_ok=True)

    def look(packages: Path | None) -> subprocess.CompletedProcess[str]:
        search = f"PYTHONPATH={packages or ''}"
        words = [*enter[runtime].replace("DIR", str(tmp_path)).split(), "env", search, "python3"]
        shutil.copy(needs.__file__, tmp_path / "needs.py")
        words += [str(tmp_path / "needs.py"), f"--enter={enter[runtime]}", "--json", "smallthing>=1.2"]
        return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)

    said = look(None)
    assert said.returncode == 4
    fix = json.loads(said.stdout)["fix"].replace("DIR", str(tmp_path))
    command = fix.partition(": ")[2].partition(";")[0]
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    subprocess.run(["bash", "-c", command], env={**environ, **offline}, capture_output=True, timeout=120, check=True)
    assert look(Path(fix.rpartition(" ")[2])).returncode == 0
    assert own.image in fix


# ---- as jobs on the real SLURM

PROBE = """
import json, os, sys
names = "SLURM_JOB_ID SLURM_NODEID CUDA_VISIBLE_DEVICES NCCL_DEBUG TORCH_X PYTORCH_X OMP_NUM_THREADS MINE".split()
print("PROBE", json.dumps({
    "uid": os.getuid(), "python": sys.executable, "has_image": os.path.exists("/image-mark"),
    "variables": {name: os.environ.get(name) for name in names},
    "mapped": os.path.exists("/mapped/1.txt"), "writable": os.access("/mapped/1.txt", os.W_OK),
    "named": [[os.access(word.partition("=")[2], how) for how in (os.R_OK, os.W_OK)] for word in sys.argv[1:]],
    "has_voxscale": os.path.exists("/opt/voxscale/voxscale/launch"), "search": os.environ.get("PYTHONPATH"),
}), flush=True)
"""


@pytest.fixture(scope="module")
def marked_image(image_folder: Path) -> Path:
    (image_folder / "image-mark").touch()
    own = container(runtime="charliecloud", image=str(image_folder))
    make_ready(Site(container=own), [], {"PATH": ""}, is_own=False)  # as its owner; others may not
    return image_folder


@pytest.fixture
def place(slurm: SlurmLab, marked_image: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Write a site with a container; returns (its file, the environment that has the runtime)."""

    def write(runtime: str, *, form: str = "sandbox", **fields: Any) -> tuple[Path, dict[str, str]]:
        environ, image = {}, marked_image
        if runtime == "charliecloud":
            request.getfixturevalue("charliecloud")
        else:
            lab: Apptainer = request.getfixturevalue("apptainer")
            environ, image = with_program(lab.program), lab.sif if form == "sif" else marked_image
            if runtime == "singularity":  # the same program by its older name
                (tmp_path / "bin").mkdir(exist_ok=True)
                (tmp_path / "bin" / "singularity").write_text(f'#!/bin/sh\nexec "{lab.program}" "$@"\n')
                (tmp_path / "bin" / "singularity").chmod(0o755)
                environ["PATH"] = f"{tmp_path}/bin:{environ['PATH']}"
        content = {
            "cpus_per_device": 1,
            "signal_s": 40,
            "env": QUICK_NAMES | fields.pop("env", {}),
            "gpus": fields.pop("gpus", {}),
            "container": {"runtime": runtime, "image": str(image), "packages": str(PACKAGES), **fields},
        }
        file = tmp_path / f"{runtime}.yaml"
        file.write_text(yaml.safe_dump(content))
        return file, {**environ, **slurm.environ}

    return write


def probe(cli: Cli, folder: Path, site: Path, environ: dict[str, str], *words: object) -> list[dict[str, Any]]:
    """What the ranks of a job see."""
    (folder / "probe.py").write_text(PROBE)
    run = folder / f"run-{site.stem}"
    done = cli("launch", folder / "probe.py", "--on", "slurm", "--site", site, "--run", run, *words, env=environ)
    assert done.code == 0, done.err
    return [json.loads(line.partition("PROBE ")[2]) for line in (done.out + done.err).splitlines() if "PROBE" in line]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("runtime", "options"),
    [
        ("apptainer", ["-eC"]),
        pytest.param("singularity", ["--compat"], marks=pytest.mark.cluster),
        ("charliecloud", []),
    ],
)
def test_ranks_see_what_they_need(
    place: Callable[..., Any],
    cli: Cli,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runtime: str,
    options: list[str],
) -> None:
    (tmp_path / "mapped").mkdir()
    (tmp_path / "mapped" / "1.txt").touch()
    kept, archive = tmp_path_factory.mktemp("kept"), tmp_path_factory.mktemp("archive")
    for folder in (kept, archive):
        (folder / "1.txt").touch()
    (tmp_path / "link").symlink_to(archive / "1.txt")
    is_read_only = runtime != "charliecloud"
    ending = ":ro" if is_read_only else ""
    site, environ = place(
        runtime,
        options=options,
        packages=None,
        binds=[f"{tmp_path}/mapped:/mapped{ending}", f"{kept}:{kept}{ending}"],
        env={"NCCL_DEBUG": "WARN", "TORCH_X": "$(touch canary)", "PYTORCH_X": "1", "MINE": "a b", "PYTHONPATH": "/own"},
        gpus={"ask": "gres", "type": "a100"},
    )
    named = [f"--kept={kept}/1.txt", f"--link={tmp_path}/link"]
    (seen,) = probe(cli, tmp_path, site, {**environ, "OMP_NUM_THREADS": "3"}, "--plain", *named)
    assert seen["named"] == [[True, not is_read_only], [True, True]]
    assert seen["search"] == "/own"
    assert not seen["has_voxscale"]
    assert seen["python"] == "/usr/bin/python3"
    assert seen["has_image"]
    assert seen["mapped"]
    assert seen["writable"] == (not is_read_only)
    variables = seen["variables"]
    assert variables.pop("SLURM_JOB_ID").isdigit()
    assert variables == {
        "SLURM_NODEID": "0", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "WARN", "TORCH_X": "$(touch canary)",
        "PYTORCH_X": "1", "OMP_NUM_THREADS": "3", "MINE": "a b",
    }  # fmt: skip
    assert not list(tmp_path.rglob("canary"))


@pytest.mark.slurm
@pytest.mark.parametrize("runtime", [pytest.param("apptainer", marks=pytest.mark.cluster), "charliecloud"])
def test_an_ordinary_user_is_the_same_inside(place: Callable[..., Any], slurm: SlurmLab, runtime: str) -> None:
    """With the system's Python, which every user may run."""
    folder = Path(tempfile.mkdtemp(prefix="voxscale-nobody-"))
    try:
        os.chown(folder, NOBODY, NOBODY)
        site, environ = place(runtime, packages=None)
        shutil.copy(site, folder / "site.yaml")
        (folder / "probe.py").write_text(PROBE)
        words = ["launch", "probe.py", "--plain", "--on", "slurm", "--run", folder / "run"]
        own = {"HOME": str(folder), "PATH": environ.get("PATH", os.environ["PATH"]), "XDG_CACHE_HOME": f"{folder}/c"}
        own["PYTHONPATH"] = f"{REPOSITORY / 'src'}:{PACKAGES}"
        prefix = ["env", *(f"{name}={value}" for name, value in own.items())]
        done = slurm.run(*prefix, "/usr/bin/python3", "-m", "voxscale", *words, user=NOBODY, cwd=folder, timeout=60)
        (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "PROBE" in line]
        assert json.loads(line.partition("PROBE ")[2])["uid"] == NOBODY
    finally:
        shutil.rmtree(folder)


@pytest.mark.slurm
def test_a_script_among_programs_is_refused(place: Callable[..., Any], cli: Cli, tmp_path: Path) -> None:
    site, environ = place("charliecloud")
    words = ["--plain", "--on", "slurm", "--site", site, "--run", "/usr/nosuch", "--dry-run"]
    done = cli("launch", "/usr/bin/env", *words, env=environ, cwd=Path("/etc"))
    assert done.code == 2
    for folder in ("/usr", "/etc"):  # what lies in /usr is not said twice
        assert f"would hide the image's own {folder};" in done.err


@pytest.fixture
def tiny(dataset: Path, tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_config(dataset, train__epochs=1)))
    return file


@pytest.mark.slurm
def test_what_an_image_lacks_is_said_before_a_job_waits(place: Callable[..., Any], cli: Cli, tiny: Path) -> None:
    site, environ = place("charliecloud", packages=None)
    done = cli("train", tiny, "--on", "slurm", "--site", site, "--run", tiny.parent / "run", env=environ)
    assert done.code == 4
    for words in ("torch>=2.11: not there", "monai>=1.6.1: not there", "tensorboard>=2.16: not there", "image build"):
        assert words in done.err
    assert not (tiny.parent / "run" / "launch" / "jobs.json").exists()
    assert "submitted" not in done.err


@pytest.mark.slurm
def test_where_the_runtime_is_not_here_the_job_says_it(
    place: Callable[..., Any], cli: Cli, tiny: Path, slurm: SlurmLab
) -> None:
    """As with a runtime that only the modules of nodes bring: here the job's own line adds it to PATH."""
    site, environ = place("apptainer", packages=None)
    content = yaml.safe_load(site.read_text())
    content["env"]["PATH"] = environ["PATH"]
    site.write_text(yaml.safe_dump(content))
    run = tiny.parent / "run"
    done = cli("train", tiny, "--on", "slurm", "--site", site, "--run", run, "--devices", 1, env=slurm.environ)
    assert done.code == 4, done.err
    assert "warning: apptainer is not on this machine" in done.err
    assert "torch>=2.11: not there" in done.err


@pytest.mark.slurm
@pytest.mark.parametrize("runtime", ["charliecloud", pytest.param("apptainer", marks=pytest.mark.cluster)])
def test_two_nodes_train_as_they_do_without_a_container(
    place: Callable[..., Any],
    cli: Cli,
    undisturbed: Callable[[int], Path],
    networks_folder: Path,
    write_config: Callable[..., Path],
    tmp_path: Path,
    runtime: str,
) -> None:
    """With a network of the user's own, whose folder is bound too."""
    site, environ = place(runtime)
    words = ["--on", "slurm", "--nodes", 2, "--devices", 1, "--site", site, "--run", tmp_path / "inside"]
    own = {**environ, "PYTHONPATH": str(networks_folder)}
    done = cli("train", write_config(**LONG), *words, env=own)
    assert done.code == 0, done.err
    tables = [(run / "cases.csv").read_text() for run in (tmp_path / "inside", undisturbed(2))]
    assert tables[0] == tables[1]


EXAMPLES = {
    "synthetic_unet": [
        "data.synthetic={cases: 6, size: [32, 32, 32], seed: 0}", "patches.size=[16,16,16]", "patches.per_case=2",
        "model.channels=[4,8,16]", "train.epochs=2", "train.batch={per_device: 2}",
    ],
    "brats_segresnet": [
        "patches.size=[32,32,32]", "model.channels=[8,16]", "model.blocks_down=[1,1]", "model.blocks_up=[1]",
        "train.epochs=2", "validate.every=1", "validate.window=[32,32,32]",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipes, with BraTS-like data where the recipe looks for them."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(RECIPES, folder / "recipes")
    ensure_like(folder / "brats", "brats", Synthetic(cases=6, size=(40, 40, 32)))
    (folder / "data").mkdir()
    (folder / "brats" / "Task01_BrainTumour").rename(folder / "data" / "Task01_BrainTumour")
    return folder


@pytest.mark.cluster
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize(("runtime", "form"), [("charliecloud", "sandbox"), ("apptainer", "sif")])
def test_the_examples_of_row_0(
    place: Callable[..., Any],
    cli: Cli,
    examples: Path,
    tmp_path: Path,
    runtime: str,
    form: str,
    example: str,
    nodes: int,
) -> None:
    site, environ = place(runtime, form=form, options=[] if runtime == "charliecloud" else DROPPING)
    config = examples / "recipes" / f"{example}.yaml"
    words = ["--on", "slurm", "--nodes", nodes, "--devices", 1, "--site", site, "--run", tmp_path / "run"]
    done = cli("train", config, "track=none", "train.threads=1", *EXAMPLES[example], *words, env=environ)
    assert done.code == 0, done.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["state"] == "done"
    assert metrics["world_size"] == nodes
    assert len((tmp_path / "run" / "cases.csv").read_text().splitlines()) >= 2
