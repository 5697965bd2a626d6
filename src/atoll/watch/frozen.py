"""Freezes the page into one HTML file that holds its content and loads nothing."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from atoll.watch.serialise import to_json

_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:class|function|const) (\w+))", re.MULTILINE)
_POLICY: Final = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; base-uri 'none'; form-action 'none'"
)


def frozen_page(content: Mapping[str, Any], title: str) -> str:
    """Returns the page with its script, style and content inside.

    Args:
        content: as `Report`; parts that are left out are not shown.
        title: the title of the window, as plain text.
    """
    script, style = _script(), _text("style.css")
    policy = _POLICY.format(script=_digest(script), style=_digest(style))
    data = to_json(content).decode()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="atoll">
<link rel="icon" href="data:,">
<title>{html.escape(title)} - atoll</title>
<style>{style}</style>
</head>
<body>
<noscript><p>This page draws runs with JavaScript, which is switched off here.
Switch it on to see them.</p></noscript>
<script type="application/json" id="frozen">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _text(name: str) -> str:
    return (files("atoll.watch") / "page" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Returns the source expression of a content policy that allows exactly this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _script() -> str:
    """Returns the page's modules as one script: each is a function that returns its exports."""
    made: dict[str, str] = {}

    def add(name: str) -> None:
        if name in made:
            return
        text = _text(f"{name}.js")
        for _, other in _IMPORT.findall(text):
            add(other)
        exports = ", ".join(found for _, found in _EXPORT.findall(text))
        body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const { \1 } = _\2;\n", text))
        made[name] = f"const _{name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"

    add("app")
    return f'(() => {{\n"use strict";\n{"".join(made.values())}}})();\n'
