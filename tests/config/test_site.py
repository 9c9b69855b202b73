"""Site profiles: read from where they are looked for, refused in words, written and read back the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from conftest import REPOSITORY
from voxscale.config.load import check_section, parse_yaml
from voxscale.config.site import (
    SITES,
    Container,
    Gpus,
    Interconnect,
    JobMemory,
    Mail,
    Site,
    find_site,
    read_site,
    seconds_of,
)
from voxscale.errors import ConfigError
from voxscale.launch.detect import FIELDS, render_site

SHIPPED = sorted(path.stem for path in SITES.glob("*.yaml"))


def complaint(content: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_section(Site, content, "site.yaml")
    assert caught.value.fix
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("12:00:00", 43200), ("2-0", 172800), ("1-02:03", 93780), ("1-00:00:01", 86401)],
)
def test_times_as_slurm_writes_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"partion": "gpu"}, "partion: unknown key; did you mean 'partition'?"),
        ({"partition": "a b"}, "partition: found 'a b', expected names of letters"),
        ({"partition": "a,,b"}, "partition: found 'a,,b'"),
        ({"account": "-x"}, "account: found '-x'"),
        ({"time": "12h"}, "time: found '12h', expected a time such as 30, 12:00:00 or 2-00:00:00"),
        ({"time": "٣٠"}, "time: found"),
        ({"time": 0}, "time: found '0', expected more than 0, which SLURM takes for no limit"),
        ({"time": "0-00:00"}, "time: found '0-00:00', expected more than 0"),
        ({"time": True}, 'time: found True, expected text, as "true"'),
        ({"account": 12345}, 'account: found 12345, expected text, as "12345"'),
        ({"env": {"NCCL_IB_DISABLE": True}}, 'env.NCCL_IB_DISABLE: found True, expected text, as "true"'),
        ({"memory": {"per_node": "64GB"}}, "expected a number with K, M, G or T, such as 64G"),
        ({"memory": {}}, "memory: expected one of per_node and per_device"),
        ({"conda": "a", "venv": "b"}, "conda and venv: expected one of them"),
        ({"conda": "-n"}, "conda: found '-n', expected no - at the beginning"),
        ({"extra": ["--mem=4G"]}, "extra '--mem=4G': this is set by memory"),
        ({"extra": ["-x"]}, "extra.0: found '-x', expected an option"),
        ({"extra": ["--part=short"]}, "extra '--part=short': this is set by partition"),
        ({"extra": ["--test-only"]}, "extra '--test-only': this is set by nobody"),
        ({"extra": ["--quiet"]}, "extra '--quiet': this is set by nobody"),
        ({"extra": ["--clusters=b"]}, "extra '--clusters=b': this is set by SLURM_CLUSTERS in your shell"),
        ({"output": "%u/x.out"}, "output: found '%u/x.out', expected a file of letters"),
        ({"env": {"A-B": "1"}}, "expected a variable's name"),
        ({"env": {"A": "1\n2"}}, "expected one line of printable characters"),
        ({"container": {}}, "container.image: missing"),
        ({"container": {"image": "x", "runtime": "docker"}}, "expected 'apptainer', 'singularity' or 'charliecloud'"),
        ("gpu", "expected a mapping of fields"),
    ],
)
def test_what_is_wrong_is_said(content: Any, words: str) -> None:
    assert words in complaint(content)


def test_whole_numbers_stand_for_themselves() -> None:
    site = check_section(Site, parse_yaml("env: {NCCL_IB_DISABLE: 1}\nmodules: [2023, cuda/12.4]\ntime: 30", "s"), "s")
    assert (site.env, site.modules, site.time) == ({"NCCL_IB_DISABLE": "1"}, ("2023", "cuda/12.4"), "30")


def test_everything_wrong_is_said_at_once() -> None:
    assert (
        complaint({"partition": "?", "qos": "?", "gpus": {"ask": "x"}, "cpus_per_device": 0}).count("site.yaml:") == 4
    )


def test_where_sites_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": str(tmp_path / "home")}
    assert read_site(None, environ) == Site()
    (tmp_path / "site.yaml").write_text("partition: here\n")
    assert read_site(None, environ).partition == "here"
    own = tmp_path / "home/.config/voxscale/sites"
    own.mkdir(parents=True)
    (own / "lab.yaml").write_text("partition: own\n")
    (own / "palmetto.yaml").write_text("partition: mine\n")
    assert read_site("lab", environ).partition == "own"
    assert read_site("palmetto", environ).partition == "mine", "one's own comes before a shipped one"
    assert read_site(str(own / "lab.yaml"), environ).partition == "own"
    assert find_site("lab", {"XDG_CONFIG_HOME": str(tmp_path / "home/.config")}) == own / "lab.yaml"
    with pytest.raises(ConfigError, match="--site nowhere: no such site; found cte_power, hipergator, lab, palmetto"):
        read_site("nowhere", environ)
    with pytest.raises(ConfigError, match="found characters that a name cannot have"):
        read_site("$(x)", environ)
    with pytest.raises(ConfigError, match="none.yaml: no such site"):
        read_site("none.yaml", environ)
    (own / "empty.yaml").write_text("")
    assert read_site("empty", environ) == Site()


def test_home_is_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("{venv: ~/v, container: {image: ~/i.sif, packages: ~/p, binds: [~/b:/b, /c]}}")
    site = read_site(str(file), {"HOME": "/home/me"})
    assert site.venv == "/home/me/v"
    expected = Container(image="/home/me/i.sif", packages="/home/me/p", binds=("/home/me/b:/b", "/c"))
    assert site.container == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sites_are_sound(name: str) -> None:
    site = read_site(name, {})
    assert site.gpus.ask != "none"
    assert site.gpus.per_node
    assert site.time


LINES = st.text(
    st.characters(exclude_categories=("C", "Zl", "Zp"), include_characters="'\"$#%:{}[]&*!|>\\~-,"), max_size=12
)
WORDS = LINES.filter(lambda text: text and text.isprintable() and not text.startswith("-"))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,8}", fullmatch=True)
MEMORY = st.from_regex(r"[1-9][0-9]{0,4}[KMGT]?", fullmatch=True)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "partition": NAMES,
        "account": NAMES | st.sampled_from(["1e4", "no", "0x1f", "null", "007", "1_000", "2001-01-01"]),
        "qos": maybe(NAMES),
        "constraint": st.sampled_from(["a&b", "[a*2|b*1]", "!x", "*"]),
        "gpus": st.fixed_dictionaries({"ask": st.sampled_from(["gres", "none"])}, optional={"type": NAMES}),
        "cpus_per_device": st.integers(1, 99),
        "memory": MEMORY.map(lambda text: {"per_node": text}) | MEMORY.map(lambda text: {"per_device": text}),
        "exclusive": st.booleans(),
        "time": st.sampled_from(["60", "12:00:00", "2-0", "190:59:59"]),
        "mail": st.fixed_dictionaries({"to": st.just("a@b.c")}, optional={"when": st.just(["ALL"])}),
        "extra": st.lists(st.sampled_from(["--licenses=b c", "--spread-job", "--comment='#"]), max_size=2),
        "output": st.sampled_from(["a b/%x", "launch/%x.%j.out", "%j"]),
        "modules": st.lists(st.sampled_from(["cuda/12.4", "1.10", "gcc"]), max_size=2),
        "conda": WORDS,
        "python": WORDS,
        "env": st.dictionaries(
            st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True), WORDS | st.just(""), max_size=3
        ),
        "container": st.fixed_dictionaries({"image": WORDS}, optional={"binds": st.lists(WORDS, max_size=2)}),
        "scratch": WORDS,
        "interconnect": st.fixed_dictionaries({}, optional={"latency_us": st.floats(1e-9, 1e30)}),
    },
)


@settings(max_examples=200, deadline=None)
@given(content=CONTENTS, notes=st.lists(st.text(max_size=20), max_size=2))
def test_a_written_site_reads_back_the_same(content: dict[str, Any], notes: list[str]) -> None:
    site = Site.model_validate(content)
    text = render_site(site, notes)
    assert check_section(Site, parse_yaml(text, "site") or {}, "site") == site


def test_a_written_site_shows_every_field() -> None:
    assert list(FIELDS) == list(Site.model_fields)
    for line in render_site(Site()).splitlines():
        if match := re.fullmatch(r"# (\w+: .+)", line):
            check_section(Site, parse_yaml(match[1], "example"), match[1])
        else:
            assert line == "" or line.startswith("# "), "only comments where all is at its default"


def rows() -> dict[str, str]:
    page = (REPOSITORY / "docs" / "sites.md").read_text()
    return dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", page, flags=re.MULTILINE))


def test_the_page_lists_every_field_with_its_default() -> None:
    expected = dict(_defaults("", Site))
    for name, section in (("gpus", Gpus), ("memory", JobMemory), ("mail", Mail), ("container", Container)):
        expected |= _defaults(f"{name}.", section)
    expected |= _defaults("interconnect.", Interconnect)
    assert rows() == expected


def _defaults(prefix: str, section: type[BaseModel]) -> dict[str, str]:
    return {
        prefix + name: "must be given" if field.is_required() else _shown(field.get_default(call_default_factory=True))
        for name, field in section.model_fields.items()
    }


def _shown(value: Any) -> str:
    """A default as the page has it."""
    if isinstance(value, BaseModel):
        return "see below"
    if value in (None, (), {}):
        return "none"
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def test_the_example_of_the_page_is_valid() -> None:
    page = (REPOSITORY / "docs" / "sites.md").read_text()
    (example,) = re.findall(r"^```yml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert check_section(Site, parse_yaml(example, "docs/sites.md"), "docs/sites.md").gpus.type == "a100"


def test_sites_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Site().partition = "x"  # type: ignore[misc]
