"""How a page looks: what is too faint to read in it, and how much of a picture is labelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Texts with less contrast to what is behind them than WCAG's 4.5.
FAINT = """() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => (part <= 10 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found[3] > 250) return found;
    }
  };
  const isText = (node) => [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
  return [...document.querySelectorAll("body *:not(script)")]
    .filter((node) => isText(node) && node.getClientRects().length)
    .filter((node) => {
      const style = getComputedStyle(node);
      const two = [parts(node instanceof SVGElement ? style.fill : style.color), behind(node)].map(light);
      return Math.max(...two) / Math.min(...two) < 4.5;
    })
    .map((node) => node.textContent);
}"""


def share_of_label(run: Path, about: dict[str, object], slice_: int, shape: tuple[int, ...]) -> float:
    """Of the panel, as the PNG has it."""
    sheet = np.asarray(Image.open(run / "previews" / str(about["codes"])))
    x, y, _ = about["shape"]
    row, column = divmod(slice_, about["columns"])
    label = sheet[row * y : (row + 1) * y, column * x : (column + 1) * x]
    height, width, _ = shape
    side = min(width / x, height / y)
    return float((label > 0).sum()) * side * side / (height * width)


def content_of(page: Path) -> dict[str, Any]:
    """What a page says, before it is drawn."""
    text = page.read_text()
    content: dict[str, Any] = json.loads(text.partition('id="content">')[2].partition("</script>")[0])
    return content


def headings_of(page: Path) -> set[str]:
    """Of its parts and of the plots and tables in them."""
    sections = content_of(page)["sections"]
    return {each.get("title", "") for section in sections for each in (section, *section["blocks"])}
