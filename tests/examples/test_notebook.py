"""The notebook runs from its first cell to its last, and is kept without outputs, which would name folders."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from conftest import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "ladder.ipynb"


@pytest.mark.ranks
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    resources = {"metadata": {"path": str(tmp_path)}}
    done = NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    said = "".join(output.get("text", "") for cell in done.cells for output in cell.get("outputs", ()))
    assert said.count("$ voxscale train") == 5
    assert "the losses differ by less than 1e-4" in said
