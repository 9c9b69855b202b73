"""Archives: unpacked once and whole, nothing outside their folder, nothing but files and folders."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Cli
from layouts import LAYOUTS, mutants
from voxscale.config.data import Data
from voxscale.data.archive import ARCHIVES, extract_archive
from voxscale.data.formats import detect_format, find_cases
from voxscale.data.shelf import list_stores, prune_stores, render_stores
from voxscale.errors import DataError, InfrastructureError


def _member(name: str, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def _pack(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for member, content in members:
            if content:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if content else None)
    return path


def _leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*") if not path.name.endswith((".lock", ".in-use"))]


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz"])
@pytest.mark.parametrize("name", ["decathlon: the task", "decathlon: its parent", "nnunet: its parent", "tfrecord"])
def test_a_dataset_is_read_from_its_archive(name: str, ending: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    folder = layout.make(tmp_path / "Task09_Spleen")
    archive = tmp_path / f"Task09_Spleen{ending}"
    with tarfile.open(archive, "w" if ending == ".tar" else "w:gz") as tar:
        tar.add(folder, "./Task09_Spleen" if name == "decathlon: the task" else ".")
    (tmp_path / "scratch").mkdir()
    assert detect_format(archive) == "decathlon"
    for format in ("auto", layout.format):
        manifest = find_cases(Data.model_validate({"source": str(archive), "format": format}), tmp_path / "scratch")
        assert tuple(case.id for case in manifest.cases) == layout.ids
    assert len(_leftovers(tmp_path / "scratch" / "archives")) == 1


def test_unpacked_once_until_the_archive_changes(tmp_path: Path) -> None:
    tar = _pack(
        tmp_path / "a.tar", (_member("x/y"), b"one"), (_member("x/._y"), b"junk"), (_member("e", type=b"5"), b"")
    )
    folder = extract_archive(tar, tmp_path / "into")
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {"x", "x/y", "e"}
    (folder / "x" / "y").write_bytes(b"mark")
    assert extract_archive(tar, tmp_path / "into") == folder
    assert (folder / "x" / "y").read_bytes() == b"mark", "not unpacked again"
    again = extract_archive(_pack(tar, (_member("x/y"), b"another")), tmp_path / "into")
    assert again != folder
    assert (again / "x" / "y").read_bytes() == b"another"


REFUSED: dict[str, tuple[tarfile.TarInfo, bytes]] = {
    "'/etc/x'": (_member("/etc/x"), b"x"),
    "'../x'": (_member("../x"), b"x"),
    "'a/../../x'": (_member("a/../../x"), b"x"),
    "'a/..'": (_member("a/..", type=tarfile.DIRTYPE), b""),
    "'link'": (_member("link", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b""),
    "'hard'": (_member("hard", type=tarfile.LNKTYPE, linkname="x/y"), b""),
    "'dev'": (_member("dev", type=tarfile.CHRTYPE, devmajor=1, devminor=3), b""),
    "'disk'": (_member("disk", type=tarfile.BLKTYPE), b""),
    "'pipe'": (_member("pipe", type=tarfile.FIFOTYPE), b""),
}


def test_whatever_is_no_file_inside_is_refused_by_name(tmp_path: Path) -> None:
    tar = _pack(tmp_path / "bad.tar", (_member("x/y"), b"good"), *REFUSED.values(), (_member("z"), b"good"))
    with pytest.raises(DataError) as caught:
        extract_archive(tar, tmp_path / "into")
    lines = caught.value.message.splitlines()
    assert len(lines) == len(REFUSED)
    for line, name in zip(lines, REFUSED, strict=True):
        assert line.startswith(f"bad.tar: {name}: found ")
    assert _leftovers(tmp_path / "into") == []


@pytest.mark.parametrize("name", REFUSED)
def test_each_alone_is_refused_and_nothing_appears(name: str, tmp_path: Path) -> None:
    tar = _pack(tmp_path / "bad.tar", REFUSED[name])
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(DataError, match="found"):
        extract_archive(tar, tmp_path / "a" / "b")
    after = {path for path in tmp_path.rglob("*") if not path.name.endswith((".lock", ".in-use"))}
    assert after == before


def test_a_link_to_a_folder_cannot_carry_a_file_out(tmp_path: Path) -> None:
    link = _member("out", type=tarfile.SYMTYPE, linkname=str(tmp_path))
    tar = _pack(tmp_path / "bad.tar", (link, b""), (_member("out/stolen"), b"x"))
    with pytest.raises(DataError, match="'out': found a link"):
        extract_archive(tar, tmp_path / "into")
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize(
    "members",
    [[(_member("x"), b"1"), (_member("x"), b"2")], [(_member("x"), b"1"), (_member("x/y"), b"2")]],
    ids=["twice", "file and folder"],
)
def test_members_that_clash_are_refused(members: list[tuple[tarfile.TarInfo, bytes]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="stands in it twice, or both as a file and as a folder"):
        extract_archive(_pack(tmp_path / "bad.tar", *members), tmp_path / "into")
    assert _leftovers(tmp_path / "into") == []


def test_bombs_are_refused(tmp_path: Path) -> None:
    many = _pack(tmp_path / "many.tar", *((_member(f"f{n}"), b"") for n in range(11)))
    with pytest.raises(DataError, match="more than .* or 10 files"):
        extract_archive(many, tmp_path / "into", max_members=10)
    large = _pack(tmp_path / "large.tgz", (_member("zeros"), bytes(3_000_000)), mode="w:gz")
    assert large.stat().st_size < 10_000
    with pytest.raises(DataError, match="unpacks to more than 2000000 bytes"):
        extract_archive(large, tmp_path / "into", max_bytes=2_000_000)
    hidden = _pack(tmp_path / "hidden.tgz", (_member("._zeros"), bytes(3_000_000)), mode="w:gz")
    with pytest.raises(DataError, match="unpacks to more than 2000000 bytes"):
        extract_archive(hidden, tmp_path / "into", max_bytes=2_000_000)
    assert _leftovers(tmp_path / "into") == []


def test_a_header_cannot_ask_for_all_the_memory(tmp_path: Path) -> None:
    header = _member("x", type=tarfile.XHDTYPE, size=2**30).tobuf(tarfile.GNU_FORMAT)
    with gzip.open(tmp_path / "pax.tgz", "wb", compresslevel=1) as stream:
        stream.write(header + bytes(1 << 20))
    with pytest.raises(DataError, match="pax.tgz: damaged or cut off: a header asks for more"):
        extract_archive(tmp_path / "pax.tgz", tmp_path / "into")


@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_every_cut_is_found(ending: str, tmp_path: Path) -> None:
    tar = tmp_path / f"cut{ending}"
    members = [(_member(f"f{n}"), bytes([n]) * 700) for n in range(3)]
    sound = _pack(tar, *members, mode="w" if ending == ".tar" else "w:gz").read_bytes()
    end = sound.rstrip(b"\0") if ending == ".tar" else sound
    for length in range(0, len(end), max(1, len(end) // 60)):
        tar.write_bytes(sound[:length])
        with pytest.raises(DataError, match=f"cut{ending}: damaged or cut off: .") as caught:
            extract_archive(tar, tmp_path / "into")
        assert caught.value.fix == "download the archive again"
    assert _leftovers(tmp_path / "into") == []


@pytest.mark.parametrize("ending", [".tar", ".tgz"])
def test_damage_of_any_kind_never_gives_a_traceback(ending: str, tmp_path: Path) -> None:
    tar = tmp_path / f"x{ending}"
    members = [
        (_member("a/b" * 60, pax_headers={"comment": "x"}), b"1" * 40),
        (_member("c"), b"2"),
        (_member("d"), b"3"),
    ]
    sound = _pack(tar, *members, mode="w" if ending == ".tar" else "w:gz").read_bytes()
    sound = sound.rstrip(b"\0") + bytes(1024) if ending == ".tar" else sound
    contents = _contents(extract_archive(tar, tmp_path / "sound"))
    refused = 0
    for number, damaged in enumerate(mutants(sound, 150)):
        tar.write_bytes(damaged)
        into = tmp_path / f"into{number}"
        try:
            folder = extract_archive(tar, into)
            assert all(path.resolve().is_relative_to(folder) for path in folder.rglob("*"))
        except DataError as error:
            refused += 1
            assert error.fix
            assert _leftovers(into) == []
        else:
            assert ending == ".tar" or _contents(folder) == contents, "gzip has a checksum, which must be looked at"
    assert refused > 50


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    tar = _pack(tmp_path / "a.tar", (_member("x"), b"1"))
    folder = extract_archive(tar, tmp_path / "into")
    half = folder.rename(tmp_path / "into" / f".{folder.name}.0000.tmp")
    other = tmp_path / "into" / ".other-1.0000.tmp"
    other.mkdir()
    assert extract_archive(tar, tmp_path / "into") == folder
    assert (folder / "x").read_bytes() == b"1"
    assert not half.exists()
    assert other.exists(), "another archive's may be under way"


def test_several_processes_unpack_at_once(tmp_path: Path) -> None:
    tar = _pack(tmp_path / "a.tar", *((_member(f"x/{n}"), bytes(1000)) for n in range(200)))
    code = (
        "import sys; from pathlib import Path; from voxscale.data.archive import extract_archive as extract;"
        "print(len(list((extract(Path(sys.argv[1]), Path(sys.argv[2])) / 'x').iterdir())))"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, tar, tmp_path / "into"], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["200\n"] * 3
    assert len(_leftovers(tmp_path / "into")) == 1


@pytest.mark.parametrize(("name", "mode"), [("a.tar", "w:gz"), ("a.tgz", "w"), ("a.tar.gz", "w")])
def test_the_content_says_whether_it_is_compressed(name: str, mode: str, tmp_path: Path) -> None:
    folder = extract_archive(_pack(tmp_path / name, (_member("x"), b"1"), mode=mode), tmp_path / "into")
    assert (folder / "x").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["b.tar.bz2", "b.tar.XZ", "b.zip"])
@pytest.mark.parametrize("words", [["doctor"], ["train"], ["init"]], ids=str)
def test_archives_of_other_kinds_are_named_as_such(
    name: str, words: list[str], tmp_path: Path, cli_here: Cli, write_config: Callable[..., Path]
) -> None:
    (tmp_path / name).write_bytes(b"BZh9")
    out = ["--out", str(tmp_path / "c.yaml")] if words == ["init"] else []
    given = [tmp_path / name] if out else [tmp_path / name, write_config(data__source=str(tmp_path / name))]
    for each in given:
        done = cli_here(*words, each, *out)
        assert done.code == 3
        assert f"{name}: found an archive that is not unpacked here, expected .tar, .tar.gz, .tgz" in done.err
        assert "fix: unpack it" in done.err


def test_listed_and_pruned_unless_read(tmp_path: Path) -> None:
    tar = _pack(tmp_path / "a.tar", (_member("x"), bytes(1000)))
    (tmp_path / ARCHIVES / "mine-0123456789abcdef").mkdir(parents=True)
    reading = (
        "import sys; from pathlib import Path; from voxscale.data.archive import extract_archive as extract\n"
        "print(extract(Path(sys.argv[1]), Path(sys.argv[2])), flush=True); input()"
    )
    command = [sys.executable, "-c", reading, tar, tmp_path / ARCHIVES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        folder = Path(reader.stdout.readline().strip())
        assert [shelved.state for shelved in list_stores(tmp_path)] == ["in use"]
        assert prune_stores(tmp_path, idle_days=0) == []
        reader.communicate("\n", timeout=20)
    (shelved,) = list_stores(tmp_path)
    assert (shelved.key, shelved.source) == (f"{ARCHIVES}/{folder.name}", "a-tar")
    assert (shelved.state, shelved.cases, shelved.bytes) == ("archive", None, 1000)
    assert "      -        0.0    0.0 d  archive\n" in render_stores([shelved], tmp_path, "stores")
    assert prune_stores(tmp_path, idle_days=1) == [], "it was read a moment ago"
    assert prune_stores(tmp_path, idle_days=0) == [shelved]
    assert _leftovers(tmp_path / ARCHIVES) == ["mine-0123456789abcdef"]
    assert extract_archive(tar, tmp_path / ARCHIVES) == folder


@pytest.mark.parametrize("make", [lambda into: into.write_text(""), lambda into: into.symlink_to("/proc/nowhere")])
def test_no_place_to_unpack(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / "into")
    with pytest.raises(InfrastructureError, match="a.tar: cannot be unpacked below"):
        extract_archive(_pack(tmp_path / "a.tar", (_member("x"), b"1")), tmp_path / "into")
