"""Configs with damaged text, values of other kinds, keys that are none, and YAML that is meant to harm."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from chaos.report import Report
from fuzz.inputs import AS_STATED, REFUSED, UNCHANGED, Input, Wrong, mutated, try_inputs
from voxscale.config.load import make_config, parse_yaml, plain, read_config, render_config
from voxscale.config.schema import Config
from voxscale.errors import ConfigError

_RECIPES = Path(__file__).resolve().parent.parent.parent / "recipes"
_ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)
_MEGABYTE = 2**20
_ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3.7, -0.5, 1e-300, 1e300, 10**18, 10**30, -(2**63), float("nan"), float("inf")),
    *("", " ", "x", "auto", "none", "full", "unet", "1", "1e-3", "-1", "true", "nan", "1" * 400, "é", "😀", "a\nb"),
    *("../..", "~", "~nobody-of-that-name/x", "/dev/null", "{case}", "(", "(a", "(a{99999999999})", "(" * 3000, "%s"),
    *("\0", "\x1b[2J", "x" * 5000, [], {}, [[]], [1], [1, 2, 3], [0, 0, 0], [-1, 2, 3], ["a", "b"], [None], [[1], [2]]),
    *(
        [1] * 3000,
        {"name": "unet"},
        {"name": "nope"},
        {"name": None},
        {"name": []},
        {"name": 5},
        {"x": {"y": {"z": 1}}},
    ),
    *({"per_device": 0}, {"column": []}, {"column": "x", "fold": 3}, {1: 2}, {True: 1}, {"": 1}, [{"name": "flip"}]),
)
_ODD_TEXTS = (
    *(
        "",
        "[",
        "{",
        "}",
        "*a",
        "&a",
        "!!bool x",
        "!!int ''",
        "!!python/name:os.system ''",
        "\t",
        "\0",
        "- 1",
        "a: b: c",
    ),
    *("'", '"', "!!timestamp x", "!", "? [a]", "%x", "`", "@", "1e999", "{a: 1, a: 2}"),
)


def fuzz_configs(root: Path, *, inputs: int, seed: int) -> Report:
    sound_configs()  # once, not in each child
    return try_inputs("malformed configs", root, _make_config, inputs=inputs, seed=seed)


def _make_config(chance: random.Random, root: Path) -> Input:
    make = chance.choice([_odd_value, _odd_value, _odd_value, _odd_keys, _damaged_text, _odd_yaml, _odd_override])
    return make(chance, root / "fuzz.yaml")


@functools.cache
def sound_configs() -> list[tuple[str, str]]:
    """Recipes as they are written, and with every default written out."""
    texts = [path.read_text() for path in sorted(_RECIPES.glob("*.yaml"))]
    whole = [
        render_config(make_config(parse_yaml(text, "recipe"), name="recipe", base=Path("/data"))) for text in texts
    ]
    return list(zip(texts, whole, strict=True))


def _config(kind: str, path: Path, content: bytes, *, must: str = "", given: Any = None) -> Input:
    """`given` is the path and value that an accepted config holds."""
    path.write_bytes(content)

    def read() -> str:
        return _checked(read_config(path), given)

    return Input(kind, read, _named(path), ConfigError, must)


def _named(path: Path, more: str = "") -> str:
    """A line and column, a key, or what is wrong with the whole; `more` are further places that a message may name."""
    keys = r"(?!not valid|found |unknown key)\S.*: "
    whole = r"found .+, expected (a mapping|at most)|found key .+, expected text|cannot be read as text"
    return rf"^{re.escape(str(path))}(:\d+:\d+: not valid YAML: |: {keys}|: ({whole})){'|' + more if more else ''}"


def _checked(config: Config, given: tuple[tuple[Any, ...], Any] | None) -> str:
    """A config that was accepted can be written, read again as the same, and holds what was given."""
    again = make_config(parse_yaml(render_config(config), "again"), name="again", base=Path("/data"))
    if again != config:
        raise Wrong("is another one after it was written and read again")
    if given is None:
        return UNCHANGED
    held, (path, value) = plain(config), given
    try:
        for key in path:
            held = held[key]
    except (KeyError, IndexError, TypeError):
        return AS_STATED
    if path[:2] not in (("data", "source"), ("data", "store")) and not _is_same(value, held):
        raise Wrong(f"{'.'.join(map(str, path))} silently became {str(held)[:80]!r} from {str(value)[:80]!r}")
    return AS_STATED


def _is_same(given: Any, held: Any) -> bool:
    """Numbers may be written as text, and a truth as text or number; but a truth is no number, a number no text."""
    if given is None or isinstance(given, dict | list) or (given == held and type(given) is type(held)):
        return True
    if isinstance(held, bool):
        return str(given).lower() in (("1", "1.0", "true", "yes") if held else ("0", "0.0", "false", "no"))
    if isinstance(held, int | float) and not isinstance(given, bool):
        return str(given) == str(held) or float(given) == held
    return isinstance(held, list | dict)  # a name that stands for more


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, held in node.items() if isinstance(node, dict) else enumerate(node):
        yield *path, key
        if isinstance(held, dict | list):
            yield from _places(held, (*path, key))


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _dumped(content: Any) -> bytes:
    return yaml.safe_dump(content, allow_unicode=True, sort_keys=False).encode()


def _odd_value(chance: random.Random, path: Path) -> Input:
    content = parse_yaml(chance.choice(chance.choice(sound_configs())), "recipe")
    place = chance.choice(list(_places(content)))
    value = chance.choice(_ODD_VALUES)
    if chance.random() < 0.2:
        value = _at(content, chance.choice(list(_places(content))))
    _at(content, place[:-1])[place[-1]] = json.loads(json.dumps(value)) if isinstance(value, dict | list) else value
    kind = type(value).__name__
    return _config(f"value: {kind}", path, _dumped(content), given=(place, value))


def _odd_keys(chance: random.Random, path: Path) -> Input:
    content = parse_yaml(chance.choice(chance.choice(sound_configs())), "recipe")
    inner = [place for place in _places(content) if isinstance(_at(content, place), dict)]
    node = _at(content, chance.choice([(), *inner]))
    keys = list(node)
    kind, must = chance.choice(["renamed", "unknown", "number", "truth", "moved", "lost", "long"]), REFUSED
    name = chance.choice(keys) if keys else "x"
    match kind:
        case "renamed":
            node[str(name) + chance.choice("sx_ ")] = node.pop(name, 1)
            must = ""
        case "unknown":
            odd = chance.choice(["zzz", "", "a.b", "__class__", "model_config", "é", "x\ny", "\0"])
            node[odd] = chance.choice(_ODD_VALUES)
        case "number":
            node[chance.choice([1, -1, 2.5, 10**20])] = 1
        case "truth":
            node[chance.choice([True, False])] = 1
        case "moved":
            node[name] = {name: node.get(name)}
            must = ""
        case "long":
            node["k" * 100_000] = 1
        case _:
            node.pop(name, None)
            must = ""
    must = "" if "regions" in str(inner) else must  # whose keys are free
    return _config(f"key: {kind}", path, _dumped(content), must=must)


def _damaged_text(chance: random.Random, path: Path) -> Input:
    kind, content = mutated(chance.choice(chance.choice(sound_configs())).encode(), chance)
    return _config(f"text: {kind}", path, content)


def _odd_yaml(chance: random.Random, path: Path) -> Input:
    start, text = "data: {source: x}\n", chance.choice(chance.choice(sound_configs()))
    place = chance.choice(["track", "log", "task", "model", "augment", "loss", "train", "data", "search", "zzz"])
    odd = chance.choice(["''", "x", "[1]", "{a: 1}", "~", "1", "2001-99-99", "'\\xff'", "_", "-", "0x", "."])
    depth, long = chance.choice([50, 200, 400, 3000, 100_000]), chance.choice([_MEGABYTE, 10 * _MEGABYTE])
    tag = chance.choice(
        ["int", "float", "bool", "null", "timestamp", "binary", "set", "omap", "pairs", "str", "seq", "map"]
    )
    python = chance.choice(["object/apply:os.system [id]", "name:os.system", "object:os.PathLike {}", "module:os"])
    sections = "{" + ", ".join(f"k{n}: {n}" for n in range(5000)) + "}"
    made: dict[str, Callable[[], tuple[str | bytes, str]]] = {
        "a tag of Python": lambda: (f"{start}{place}: !!python/{python}\n", REFUSED),
        "a tag": lambda: (f"{start}train: {{epochs: !!{tag} {odd}}}\n", ""),
        "a tag of a key": lambda: (f"{start}!!{tag} {odd}: 1\n", ""),
        "an unknown tag": lambda: (f"{start}{place}: !{odd.strip(chr(39)) or 'x'} 1\n", REFUSED),
        "aliases of aliases": lambda: (f"{_ALIASES}{start}{place}: *a9\n", REFUSED),
        "a name of aliases": lambda: (
            f"{_ALIASES}{start}{chance.choice(['model', 'loss', 'optimizer'])}: {{name: *a9}}\n",
            REFUSED,
        ),
        "an alias within itself": lambda: (f"{start}{place}: &a [*a]\n", REFUSED),
        "an alias of nothing": lambda: (f"{start}{place}: *nothing\n", REFUSED),
        "a merge": lambda: (f"b: &b {{x: 1}}\n{start}train: {{<<: [*b, *b]}}\n", REFUSED),
        "a key twice": lambda: (f"{start}train: {{epochs: 1, epochs: 2}}\n", REFUSED),
        "a section twice": lambda: (text + "\n" + text, REFUSED),
        "a key that is a list": lambda: (f"{start}? [a, b]\n: 1\n", REFUSED),
        "a key that is null": lambda: (f"{start}~: 1\n", REFUSED),
        "deep lists": lambda: (f"{start}{place}: {'[' * depth}{']' * depth}\n", REFUSED),
        "deep mappings": lambda: (f"{start}{place}: {'{a: ' * depth}1{'}' * depth}\n", REFUSED),
        "deep blocks": lambda: (start + "".join(f"{' ' * n}k:\n" for n in range(min(depth, 3000))), REFUSED),
        "open brackets": lambda: (f"{start}{place}: " + "[" * depth, REFUSED),
        "a long text": lambda: (f"{start}track: {'x' * long}\n", REFUSED),
        "a long source": lambda: (f"data: {{source: {'x' * long}}}\n", ""),
        "a long quoted text": lambda: (f'{start}track: "{"x " * (long // 2)}"\n', REFUSED),
        "a long key": lambda: (f"{start}? {'x' * 100_000}\n: 1\n", REFUSED),
        "a long list": lambda: (f"{start}{place}: [{'1, ' * 20_000}]\n", REFUSED),
        "many keys": lambda: (f"{start}{place}: {sections}\n", REFUSED),
        "a huge number": lambda: (f"{start}train: {{epochs: {'9' * 5000}}}\n", REFUSED),
        "a huge exponent": lambda: (f"{start}train: {{epochs: 1e{'9' * chance.choice([3, 400])}}}\n", REFUSED),
        "an odd number": lambda: (
            f"{start}train: {{epochs: {chance.choice(['0x_', '0b_', '.nan', '-.inf', '0_'])}}}\n",
            REFUSED,
        ),
        "a tab": lambda: ("data:\n\tsource: x\n", REFUSED),
        "a control sign": lambda: (start + chance.choice("\x00\x07\x1b\x7f\x9f\ufffe") + "\n", REFUSED),
        "half a pair of signs": lambda: ('data: {source: "\\ud800"}\n', REFUSED),
        "a NUL written out": lambda: ('data: {source: "a\\0b"}\n', REFUSED),
        "someone's home": lambda: ("data: {source: ~nobody-of-that-name/x}\n", REFUSED),
        "two documents": lambda: (f"{start}---\n{start}", REFUSED),
        "a directive": lambda: (f"%YAML {chance.choice(['9.9', 'x', '1.1'])}\n---\n{start}", ""),
        "no mapping": lambda: (
            chance.choice(["", "# nothing", "[1, 2]", "text", "7", "~", "- data: 1", "true"]),
            REFUSED,
        ),
        "Latin-1": lambda: ("data: {source: für}\n".encode("latin-1"), REFUSED),
        "UTF-16": lambda: (start.encode("utf-16"), REFUSED),
        "with a mark of UTF-8": lambda: (b"\xef\xbb\xbf" + start.encode(), UNCHANGED),
        "JSON": lambda: (json.dumps({"data": {"source": "x"}}), UNCHANGED),
    }
    kind = chance.choice(list(made))
    if kind.startswith("a long") and chance.random() < 0.7:
        kind = "a tag"
    content, must = made[kind]()
    return _config(
        f"YAML: {kind}",
        path,
        content if isinstance(content, bytes) else content.encode(errors="surrogatepass"),
        must=must,
    )


def _odd_override(chance: random.Random, path: Path) -> Input:
    """What a command line may hold."""
    path.write_text(chance.choice(sound_configs())[0])
    key = chance.choice(
        ["train.epochs", "model", "model.name", "data.source", "data.store", "task", "track", "optimizer.lr"]
    )
    key = chance.choice([key, key, key + ".x", "zzz", "", ".", "a..b", "train.", "augment.0", "é.x", "data"])
    text = chance.choice(_ODD_TEXTS)
    value = chance.choice([text, json.dumps(chance.choice(_ODD_VALUES[:40]))])
    override = chance.choice([f"{key}={value}", f"{key}={value}", key, value, "=" + value])

    def read() -> str:
        return _checked(read_config(path, [override]), None)

    more = rf"^override {re.escape(key)}\b|^{re.escape(repr(override))}: expected key=value"
    return Input("override", read, _named(path, more), ConfigError)
