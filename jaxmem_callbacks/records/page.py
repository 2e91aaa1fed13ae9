"""The memory page as a file that fetches nothing: its modules, its style and one model.

A model is one plain dictionary. Bytes are whole numbers, of one device but where a curve names all processes; times are seconds
since the epoch, and what is unknown is None or absent. docs/report.md lists the keys.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jaxmem_callbacks.records.documents import Block, Document, as_blocks, as_html, escape
from jaxmem_callbacks.records.terminal import shown

FORMAT = 1  # of a model
# Each after those that it imports.
_MODULES = ("draw.js", "peak.js", "time.js", "perfetto.js", "step.js", "plan.js", "heap.js", "page.js")
_IMPORT = re.compile(r"^import (\{[^}]*\}) from \"\./(\w+)\.js\";$", re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)
_MODEL = "memory-model"
_OPENED = f'$page.open(document.querySelector("main"), JSON.parse(document.getElementById("{_MODEL}").textContent));'


def _asset(name: str) -> str:
    return (importlib.resources.files("jaxmem_callbacks.records") / "assets" / name).read_text("utf-8")


@functools.cache
def page_style() -> str:
    """The style sheet."""
    return _asset("page.css")


@functools.cache
def page_script() -> str:
    """The modules as one, in the order of their imports, each in a scope of its own; nothing is called yet."""
    return "\n".join(map(_scoped, _MODULES))


def _scoped(name: str) -> str:
    """A module as a function that is called at once, and returns what the module exports."""
    text = _asset(name)
    exported = ", ".join(found for _, found in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = $\2;", text))
    return f"const ${name.removesuffix('.js')} = (() => {{\n{body}return {{ {exported} }};\n}})();"


@functools.cache
def tab_module() -> str:
    """The module that TensorBoard loads: it puts style and page into the document when ``render`` is called."""
    started = (
        f"const style = {json.dumps(page_style())};\n"
        "export async function render() {\n"
        '  const { el } = $draw, root = el("main", {});\n'
        '  document.head.append(el("style", {}, style));\n'
        "  document.body.append(root);\n"
        "  await $page.tab(root, import.meta.url);\n"
        "}\n"
    )
    return f"{page_script()}\n{started}"


def page_html(model: Mapping[str, Any]) -> str:
    """The page of a model, to be opened from anywhere.

    Args:
        model: What `writers.report.report_model` or `writers.oom_report.oom_model` gave.
    """
    title, summary = escape(str(model["title"])), escape(str(model.get("summary", "")))
    script = f"{page_script()}\n{_OPENED}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser enforces it: this one script and no other, and nothing from anywhere.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    data = json.dumps(model, separators=(",", ":"), ensure_ascii=False)
    for letter in "<>&\u2028\u2029":  # no text of a run ends the element
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{page_style()}</style></head>\n<body><main><h1>{title}</h1><p>{summary}</p>"
        "<noscript><p>The figures of this page are drawn by a script in it, which this browser does not run.</p></noscript>"
        f'</main>\n<script type="application/json" id="{_MODEL}">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body></html>\n'
    )


def document_html(document: Document) -> str:
    """A document as a page that fetches nothing and runs nothing. The browser decides whether it is dark, no script."""
    by_script = '@media screen {\n  :root[data-scheme="dark"]'
    by_browser = "@media screen and (prefers-color-scheme: dark) {\n  :root"
    style = page_style().replace(by_script, by_browser)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(document.title)}</title>'
        f"<style>{style}</style></head>\n<body><main>{as_html(document)}</main></body></html>\n"
    )


def framed(model: Mapping[str, Any], *, height: int, table: Document) -> str:
    """The page as a frame in a notebook's output, which reaches nothing outside of itself.

    Args:
        model: As that of `page_html`.
        height: In pixels.
        table: What stands below it, folded, for viewers that show no frames.
    """
    page = html.escape(page_html(model))
    style = f"width:100%;height:{height}px;border:0;color-scheme:light dark"
    frame = f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'
    return f"{frame}<details><summary>As a table</summary>{as_html(table)}</details>"


def program_page(title: str, summary: str, program: Mapping[str, Any], details: Sequence[Block] = ()) -> dict[str, Any]:
    """The model of the page of one program.

    Args:
        title: What it is.
        summary: A sentence.
        program: What `records.programs.program_model` gave, or at least its ``name``, ``bytes`` and ``peak``.
        details: What the page shows folded, last.
    """
    run = {"run": "program", "name": program["name"], "programs": [program], "details": as_blocks(details)}
    return clean({"format": FORMAT, "title": title, "summary": summary, "runs": [run], "footer": ""})


def clean(value: Any) -> Any:
    """A value whose texts, names too, hold no secrets and no control sequences."""
    known: Callable[[str], str] = functools.lru_cache(maxsize=4096)(shown)

    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return known(value)
        if isinstance(value, Mapping):
            return {known(str(name)): cleaned(each) for name, each in cast("Mapping[Any, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [cleaned(each) for each in cast("Sequence[Any]", value)]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return cleaned(value)
