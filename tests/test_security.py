"""No way from a file we read to code: walk the syntax tree of every source file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from conftest import REPOSITORY

SOURCES = sorted((REPOSITORY / "src").rglob("*.py"))
BANNED_IMPORTS = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
BANNED_CALLS = {"eval", "exec", "extractall", "all_gather_object", "broadcast_object_list", "system", "popen"}


def names_called(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [
        (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", ""), call)
        for call in calls
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_pickle_no_eval_no_shell(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not imported & BANNED_IMPORTS
    for name, call in names_called(tree):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "eval":  # Module.eval() takes nothing, the built-in takes code
            assert isinstance(call.func, ast.Attribute)
            assert not call.args
            continue
        assert name not in BANNED_CALLS
        assert keywords.get("shell") != "True"
        assert keywords.get("weights_only") != "False"
        assert keywords.get("allow_pickle") != "True"
        assert ast.unparse(call.func) not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_torch_distributed_lives_in_parallel_alone(path: Path) -> None:
    if path.name == "parallel.py":
        assert "import torch.distributed" in path.read_text()
    elif path.name == "node.py":
        assert "torch.distributed.launcher" in path.read_text(), "it is torchrun, and knows nothing else of voxscale"
        assert "voxscale" not in {
            name.split(".")[0] for name in re.findall(r"^\s*(?:from|import) (\S+)", path.read_text(), re.M)
        }
    else:
        imported = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [line for line in imported if "torch.distributed" in line]


def test_tests_mirror_sources() -> None:
    """A test folder for every room."""
    rooms = {path.parent.name for path in SOURCES if path.parent.parent.name == "voxscale"} - {"formats"}
    assert rooms <= {path.name for path in (REPOSITORY / "tests").iterdir()}
