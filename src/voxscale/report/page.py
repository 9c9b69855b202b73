"""One self-contained file out of a page's content: no network, and no text in it can become markup or code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from string import Template
from typing import Any

_SCRIPTS = ("elements.js", "plots.js", "rows.js", "tables.js", "parallel.js", "volumes.js", "viewer.js", "main.js")
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render_page(content: dict[str, Any]) -> str:
    """The whole HTML. Its policy lets run only the very script and style that stand in it, and fetch nothing."""
    style = _read("style.css")
    script = '(() => {\n"use strict";\n' + "\n".join(map(_read, _SCRIPTS)) + "\n})();\n"
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return Template(_read("page.html")).substitute(
        title=html.escape(str(content["title"])),
        policy=html.escape(policy, quote=True),
        style=style,
        script=script,
        data=as_script_data(content),
    )


def as_script_data(content: Any) -> str:
    """JSON that can stand inside <script>: no sign in it can end the element or begin another."""
    text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(_UNSAFE.get(sign, sign) for sign in text)


def _finite(value: Any) -> Any:
    """Numbers that JSON does not have become null."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, str):
        return value.encode(errors="replace").decode()  # halves of characters, of a name that is no text
    return value


def _read(name: str) -> str:
    return files("voxscale.report").joinpath("template", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
