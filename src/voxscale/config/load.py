"""Read a config, apply overrides, and say everything that is wrong with it at once."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import reprlib
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from voxscale.config.schema import Config
from voxscale.errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_MOST_CHARACTERS = 2**20
_DEEPEST = 64
_LONGEST_NAME = 100
_LONGEST_QUOTE = 300  # characters of each end of a message
Checked = TypeVar("Checked", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-4` is a number, `12:00:00` is none, and a repeated key is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012 PyYAML's own way
        sign: [
            (tag, re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)$") if tag == _INT else rule)
            for tag, rule in rules
        ]
        for sign, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"nested more than {_DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML's own constructors raise anything for what their tag does not fit."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            found = f"{_short_repr(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, found, node.start_mark) from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(None, None, f"{_short_repr(key)} is not a key", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {_short_repr(key)} stands twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML (so also JSON); `name` says in errors where the text came from."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(
            f"{name}: found {len(text)} characters, expected at most {_MOST_CHARACTERS}", fix="give a YAML file"
        )
    try:
        return _Loader(text).get_single_data()
    except yaml.reader.ReaderError as error:
        start = text[: error.position]
        where = f"{name}:{start.count(chr(10)) + 1}:{len(start) - start.rfind(chr(10))}"
        sign = ascii(text[error.position])
        raise ConfigError(f"{where}: not valid YAML: found the character {sign}", fix="correct that line") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem}", fix="correct that line") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {str(error).splitlines()[0]}", fix="correct the file") from error


def read_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a config file; its paths become absolute: what is relative is so to the file."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such config", fix="give a YAML file, a data folder, or one of recipes/*.yaml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: cannot be read as text, expected a config in YAML",
            fix="give one or, for data, the whole: a folder, a table, a list or a .tar",
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}", fix="give a readable YAML file") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict):
        found = "nothing" if content is None else type(content).__name__
        raise ConfigError(f"{path}: found {found}, expected a mapping of fields", fix="start with `data: {source: …}`")
    return make_config(content, overrides, name=str(path), base=path.parent)


def make_config(content: dict[str, Any], overrides: Sequence[str] = (), *, name: str, base: Path) -> Config:
    """Check a config given as plain data.

    `base` is what relative paths in it are relative to; those in overrides are so to the current folder, as on any
    command line.
    """
    for override in overrides:
        apply_override(content, override)
    config = check_section(Config, content, name)
    given = {override.partition("=")[0] for override in overrides}

    def absolute(field: str, path: str | None) -> str | None:
        here = not given.isdisjoint((field, field.partition(".")[0]))  # itself, or with its whole section
        return None if path is None else absolute_path(path, Path() if here else base, f"{name}: {field}")

    data, train = config.data, config.train
    paths = {"source": absolute("data.source", data.source), "store": absolute("data.store", data.store)}
    start = {"init_from": absolute("train.init_from", train.init_from)}
    sections = {"data": data.model_copy(update=paths), "train": train.model_copy(update=start)}
    return config.model_copy(update=sections)


def absolute_path(path: str, base: Path, where: str) -> str:
    """The path in full, `base` being what it is relative to; errors name the field as `where`."""
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:  # nobody's home, a loop of links, a NUL
        raise ConfigError(f"{where}: found {_short_repr(path)}, expected a path", fix="correct the path") from error


def check_section(kind: type[Checked], content: Any, name: str) -> Checked:
    """Plain data as a `kind` of section; every fault is said at once, with `name` as the place it was found in."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise ConfigError.from_findings(
            [f"{name}: {finding}" for finding in _findings(error, content, kind)], fix="correct the fields above"
        ) from None


def plain(config: BaseModel) -> dict[str, Any]:
    """The config as plain data with every default written out."""
    return config.model_dump(mode="json", by_alias=True)


def render_config(config: BaseModel) -> str:
    return render_fields(plain(config))


def render_fields(fields: dict[str, Any]) -> str:
    return str(yaml.dump(fields, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100))


def given_fields(overrides: Iterable[str], section: str) -> dict[str, Any]:
    """What the overrides say of one section."""
    content: dict[str, Any] = {}
    for override in overrides:
        if override.startswith(f"{section}."):
            apply_override(content, override)
    given: dict[str, Any] = content.get(section, {})
    return given


def with_fold(config: Config, fold: int) -> Config:
    """The same config for another fold of its cross-validation."""
    if config.data.split is None:
        return config
    split = config.data.split.model_copy(update={"fold": fold})
    return config.model_copy(update={"data": config.data.model_copy(update={"split": split})})


def differences(asked: Config, held: Config) -> list[str]:
    """Fields that could change the result and in which two configs differ, in words."""
    return [
        f"{path} is {_short(there)} there, {_short(here)} here"
        for path, here, there in _pairs(plain(asked), plain(held), "")
        if here != there and not path.startswith((*_FREE_TO_CHANGE, *_FREE_BUT_HASHED))
    ]


def identity(config: Config) -> str:
    """A hash of all fields that could change the result."""
    fields = [[path, value] for path, value, _ in _pairs(plain(config), plain(config), "")]
    kept = [
        [path, None if path in _FREE_BUT_HASHED else value]
        for path, value in fields
        if not path.startswith(_FREE_TO_CHANGE)
    ]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


_FREE_TO_CHANGE = (
    *("loader.", "checkpoint.", "log", "track", "data.store"),
    *("train.devices", "train.stop_after", "train.backend", "train.timeout_s", "validate.previews"),
)
_FREE_BUT_HASHED = ("data.stage",)  # as null, so that the hashes that runs have recorded hold


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _pairs(here: Any, there: Any, path: str) -> Iterable[tuple[str, Any, Any]]:
    if isinstance(here, dict) and isinstance(there, dict):
        for key in dict.fromkeys((*here, *there)):
            yield from _pairs(here.get(key), there.get(key), f"{path}.{key}".lstrip("."))
    else:
        yield path, here, there


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set the field that `path=value` names, in place."""
    path, separator, text = override.partition("=")
    if not separator or not all(path.split(".")):
        raise ConfigError(f"{override!r}: expected key=value", fix="e.g. optimizer.lr=2e-4")
    *parents, last = path.split(".")
    node = content
    for parent in parents:
        inner = node.get(parent)
        node[parent] = node = dict(inner) if isinstance(inner, dict) else {}
    node[last] = parse_yaml(text, f"override {path}")


def _findings(error: ValidationError, content: Any, kind: type[BaseModel]) -> list[str]:
    """A line per field; where each variant of a union has its own complaint, they become one line."""
    complaints: dict[tuple[str, str], list[str]] = {}
    for problem in error.errors():
        path = _path(problem["loc"], content, missing=problem["type"] == "missing")
        found, _, expected = _complaint(dict(problem), kind).partition(", expected ")
        complaints.setdefault((path, found), []).append(expected)
    findings: list[str] = []
    for (path, found), expected_any in complaints.items():
        text = f"{found}, expected {' or '.join(expected_any)}" if expected_any[0] else found
        findings.extend(f"{path}: {line}" if path else line for line in text.splitlines())
    return findings


def _complaint(problem: dict[str, Any], kind: type[BaseModel]) -> str:
    found = _short_repr(problem["input"])
    context = problem.get("ctx", {})
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown key{_nearest_key(problem['loc'], kind)}"
        case "invalid_key":
            return f"found key {found}, expected text"
        case "missing":
            return "missing; expected a value"
        case "union_tag_invalid":
            tag, tags = context["tag"], [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
            return f"found name {_short_repr(tag)}, expected {', '.join(tags)}{_did_you_mean(tag, tags)}"
        case "union_tag_not_found" | "model_type" | "model_attributes_type":
            return f"found {found}, expected a mapping of fields"
        case "tuple_type" | "list_type":
            return f"found {found}, expected a list in brackets{_as_list(problem['input'])}"
        case "string_type" if isinstance(problem["input"], bool | int | float):
            return f'found {found}, expected text, as "{found.lower()}"'
        case "value_error":
            return "\n".join(map(_shortened, str(context["error"]).splitlines()))
        case "literal_error":
            valid = re.findall(r"'([^']*)'", context["expected"])
            return f"found {found}, expected {context['expected']}{_did_you_mean(problem['input'], valid)}"
        case _:
            rule = re.sub(r"^(Input|Value|Tuple|String|List) should ", "", problem["msg"])
            return f"found {found}, expected {rule.removeprefix('be ').removeprefix('have ')}"


def _as_list(found: object) -> str:
    """How a single value would be a list."""
    return f", as [{found}]" if isinstance(found, str) and found.isalnum() and len(found) <= _LONGEST_NAME else ""


def _did_you_mean(found: object, valid: Sequence[str]) -> str:
    if not isinstance(found, str) or len(found) > _LONGEST_NAME:
        return ""
    close = difflib.get_close_matches(found, valid, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _path(location: tuple[int | str, ...], content: Any, *, missing: bool) -> str:
    """The path as the user wrote it: pydantic also names the variants of unions on the way, which are no keys."""
    keys = []
    for position, part in enumerate(location):
        if isinstance(content, dict) and part in content:
            content = content[part]
        elif isinstance(content, list | tuple) and isinstance(part, int):
            content = content[part] if part < len(content) else None
        elif not (missing and position == len(location) - 1):
            continue
        name = str(part)
        keys.append(name if name and name.isprintable() and len(name) <= _LONGEST_NAME else _short_repr(part))
    return ".".join(keys)


def _nearest_key(location: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """The valid name nearest to an unknown key, or all valid names of its section where none is near."""
    sections = [kind]
    for part in location[:-1]:
        fields = [
            field for section in sections for name, field in section.model_fields.items() if part in (field.alias, name)
        ]
        named = [section for section in sections if part == _variant_name(section)]
        sections = [inner for field in fields for inner in _sections(field.annotation)] or named or sections
    names = [field.alias or name for name, field in sections[0].model_fields.items()]
    return _did_you_mean(str(location[-1]), names) or f"; expected one of {', '.join(names)}"


def _variant_name(section: type[BaseModel]) -> Any:
    return section.model_fields["name"].default if "name" in section.model_fields else None


def _sections(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _sections(inner)


def _shortened(line: str) -> str:
    """Rules of our own quote what they found, however long that is: its beginning, and the rule at the end, suffice."""
    return line if len(line) <= 2 * _LONGEST_QUOTE else f"{line[:_LONGEST_QUOTE]} … {line[-_LONGEST_QUOTE:]}"


def _short_repr(value: Any) -> str:
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
