"""The site: where jobs run and what they have to ask for there. A config says what to train, a site says where.

Whatever stands here ends up in an sbatch file. So names are allow-listed, and no text may hold a line break: what is
quoted for the shell stays one word, and what stands behind #SBATCH stays one option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from voxscale.config.base import Positive, Section
from voxscale.config.load import apply_override, check_section, parse_yaml
from voxscale.errors import ConfigError

SITES = Path(__file__).parent.parent / "sites"  # those that are shipped


def _allowed(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise ValueError(f"found {text!r}, expected {expected}")
        return text

    return AfterValidator(check)


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"found {text!r}, expected one line of printable characters")
    return text


def _no_option(text: str) -> str:
    if text.startswith("-"):
        raise ValueError(f"found {text!r}, expected no - at the beginning, which would make it an option")
    return text


def _as_text(value: Any) -> Any:
    """YAML reads 30 as a number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def seconds_of(time: str) -> int:
    """SLURM's way to write a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _some_time(time: str) -> str:
    if seconds_of(time) == 0:
        raise ValueError(f"found {time!r}, expected more than 0, which SLURM takes for no limit")
    return time


_TIME = r"\d{1,7}(:\d{1,2}){0,2}|\d{1,5}-\d{1,2}(:\d{1,2}){0,2}"
Name = Annotated[str, _allowed(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*", "letters, digits and . _ @ + -")]
Names = Annotated[
    str,
    _allowed(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*(,[A-Za-z0-9][A-Za-z0-9_.@+-]*)*", "names of letters, digits and . _ @ + -"),
]
Features = Annotated[str, _allowed(r"[A-Za-z0-9_.,:@+*&|()\[\]!-]+", "features joined with & | , and no spaces")]
Module = Annotated[
    str, BeforeValidator(_as_text), _allowed(r"[A-Za-z0-9_][A-Za-z0-9_.+/@:-]*", "a module's name such as cuda/12.4")
]
Variable = Annotated[str, _allowed(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name")]
Interface = Annotated[str, _allowed(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,14}", "an interface's name such as ib0")]
Memory = Annotated[
    str, BeforeValidator(_as_text), _allowed(r"[1-9]\d{0,9}[KMGT]?", "a number with K, M, G or T, such as 64G")
]
Time = Annotated[
    str,
    BeforeValidator(_as_text),
    _allowed(_TIME, "a time such as 30, 12:00:00 or 2-00:00:00"),
    AfterValidator(_some_time),
]
OneLine = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
Word = Annotated[OneLine, AfterValidator(_no_option)]
Pattern = Annotated[
    str,
    _allowed(
        r"([A-Za-z0-9_.+=,@/ -]*/)?([A-Za-z0-9_.+=,@ -]|%[xj%])+",
        "a file of letters, digits and . _ + = , @ -, in whose own name %x is the job's name and %j its number",
    ),
]
_OPTION = r'--[a-z][a-z0-9-]*(=[^"\\\x00-\x1f\x7f]*)?'
Option = Annotated[
    str, AfterValidator(_one_line), _allowed(_OPTION, 'an option such as --licenses=matlab:1, without " and \\')
]

# What render_sbatch writes itself; a second one would silently win or lose.
OWN_OPTIONS = {
    "job-name": "the run folder's name",
    "nodes": "--nodes",
    "ntasks": "--nodes",
    "ntasks-per-node": "--nodes",
    "cpus-per-task": "cpus_per_device",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "constraint": "constraint",
    "gres": "gpus",
    "gpus-per-node": "gpus",
    "mem": "memory",
    "time": "time",
    "mail-user": "mail",
    "mail-type": "mail",
    "exclusive": "exclusive",
    "output": "output",
    "error": "error",
    "open-mode": "output",
    "requeue": "requeue",
    "no-requeue": "requeue",
    "signal": "signal_s",
    "array": "--folds all",
    "dependency": "--after",
    **dict.fromkeys(("mem-per-cpu", "mem-per-gpu"), "memory"),
    **dict.fromkeys(("cpus-per-gpu", "gpus", "gpus-per-task"), "gpus and cpus_per_device"),
    **dict.fromkeys(("chdir", "export", "export-file", "uid", "gid"), "voxscale, for the job to find its way"),
    "clusters": "SLURM_CLUSTERS in your shell, for all of SLURM's programs",
    **dict.fromkeys(
        ("quiet", "wrap", "wait", "test-only", "parsable", "help", "usage", "version"), "nobody: it is no job's"
    ),
}


class Gpus(Section):
    """How GPUs are asked for: `--gres=gpu:a100:4`, `--gpus-per-node=a100:4`, or not at all."""

    ask: Literal["gres", "gpus-per-node", "none"] = "none"
    type: Name | None = None
    per_node: Positive | None = None


class JobMemory(Section):
    """What a job asks of each node, stated for the node or for each of its devices."""

    per_node: Memory | None = None
    per_device: Memory | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.per_node is None) == (self.per_device is None):
            raise ValueError("expected one of per_node and per_device")
        return self


class Mail(Section):
    to: Annotated[str, _allowed(r"[A-Za-z0-9_.+-]+(@[A-Za-z0-9.-]+)?", "a mail address")]
    when: tuple[Annotated[str, _allowed(r"[A-Z_0-9]+", "SLURM's words such as END, FAIL")], ...] = ("END", "FAIL")


class Container(Section):
    """The image that the ranks run in. Data, run, store and project are bound by themselves, at the same paths."""

    runtime: Literal["apptainer", "singularity", "charliecloud"] = "apptainer"
    image: Word
    binds: tuple[Word, ...] = ()
    nv: Literal["auto"] | bool = "auto"
    packages: Word | None = None
    options: tuple[OneLine, ...] = ()
    cache: Word | None = None

    @property
    def is_reference(self) -> bool:
        """Whether the image is fetched by the runtime rather than a file or folder here."""
        return re.match(r"[a-z]+://|(docker|oci)-[a-z]+:|oci:", self.image) is not None


class Interconnect(Section):
    """Figures of the network between nodes, for the plan."""

    bandwidth_gb_s: Annotated[float, Field(gt=0)] | None = None
    latency_us: Annotated[float, Field(gt=0)] | None = None


class Site(Section):
    """A cluster as its users have to know it."""

    partition: Names | None = None
    account: Name | None = None
    qos: Name | None = None
    reservation: Names | None = None
    constraint: Features | None = None
    gpus: Gpus = Gpus()
    cpus_per_device: Positive = 4
    memory: JobMemory | None = None
    exclusive: bool = False
    time: Time | None = None
    signal_s: Annotated[int, Field(ge=10, le=65535)] = 300
    requeue: bool = True
    mail: Mail | None = None
    extra: tuple[Option, ...] = ()
    output: Pattern = "launch/%x.%j.out"
    error: Pattern | None = None
    modules: tuple[Module, ...] = ()
    conda: Word | None = None
    venv: Word | None = None
    python: Word | None = None
    env: dict[Variable, Annotated[str, BeforeValidator(_as_text), AfterValidator(_one_line)]] = Field(
        default_factory=dict
    )
    container: Container | None = None
    scratch: Word | None = None
    interface: Interface | None = None
    interconnect: Interconnect = Interconnect()

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.conda is not None and self.venv is not None:
            raise ValueError("conda and venv: expected one of them")
        for option in self.extra:
            name = option.removeprefix("--").partition("=")[0]
            if own := [each for each in OWN_OPTIONS if each.startswith(name)]:  # SLURM takes abbreviations
                raise ValueError(f"extra {option!r}: this is set by {OWN_OPTIONS[name if name in own else own[0]]}")
        return self


def find_site(name: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file of a site: `name` is a file or the name of one; without it, site.yaml in the current folder if any."""
    if name is None:
        return Path("site.yaml") if Path("site.yaml").is_file() else None
    if "/" in name or name.endswith((".yaml", ".yml", ".json")):
        return Path(name).expanduser()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(
            f"--site {name!r}: found characters that a name cannot have", fix="use letters, digits, . _ -"
        )
    for folder in (sites_folder(environ), SITES):
        if (found := folder / f"{name}.yaml").is_file():
            return found
    known = sorted({path.stem for folder in (sites_folder(environ), SITES) for path in folder.glob("*.yaml")})
    raise ConfigError(
        f"--site {name}: no such site; found {', '.join(known)}",
        fix=f"write {sites_folder(environ) / name}.yaml with `voxscale site detect --name {name}`, or give a file",
    )


def sites_folder(environ: Mapping[str, str]) -> Path:
    """Where a user's own sites are kept."""
    base = environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".config"
    return Path(base) / "voxscale" / "sites"


def read_site(name: str | None, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> Site:
    """The site that `--site` names, checked; without one and without site.yaml, all is left to the cluster."""
    path = find_site(name, environ)
    try:
        content = parse_yaml(path.read_text(), str(path)) if path is not None else {}
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such site", fix="write one with `voxscale site detect`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}", fix="give a readable YAML file") from error
    content = {} if content is None else content
    for override in overrides if isinstance(content, dict) else ():
        apply_override(content, override)
    return _at_home(check_section(Site, content, str(path or "site")), environ)


def _at_home(site: Site, environ: Mapping[str, str]) -> Site:
    """The site with ~/ filled in: in a job's file it is quoted, and the shell leaves it alone."""

    def fill(text: str) -> str:
        return f"{environ.get('HOME') or Path.home()}{text[1:]}" if text.startswith("~/") else text

    paths = {name: fill(value) for name in ("conda", "venv", "python") if (value := getattr(site, name)) is not None}
    if site.container is None:
        return site.model_copy(update=paths)
    images = f"{environ.get('XDG_CACHE_HOME') or fill('~/.cache')}/voxscale/images"
    kept = {"cache": images} if site.container.is_reference else {}
    names = ("image", "packages", "cache")
    own = kept | {name: fill(value) for name in names if (value := getattr(site.container, name)) is not None}
    container = site.container.model_copy(update={**own, "binds": tuple(map(fill, site.container.binds))})
    return site.model_copy(update={**paths, "container": container})
