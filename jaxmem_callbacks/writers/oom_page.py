"""A report's record enters, one HTML page leaves: self-contained, no script, nothing fetched, every text escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxmem_callbacks.records.oom import OomReport, Remedy
from jaxmem_callbacks.writers.html_text import escape
from jaxmem_callbacks.writers.oom_tables import (
    OomTable,
    Section,
    first_thing,
    last_sections,
    remedy_facts,
    sections,
    when,
)
from jaxmem_callbacks.writers.report_page import POLICY
from jaxmem_callbacks.writers.report_style import STYLE

# Where a cell may end a line: behind a slash of a module's path and before a key of an array's; in no size, type or kind.
_BREAKS = (
    (re.compile(r"(?<=\w)/(?=\w)"), "/<wbr>"),
    (re.compile(r"\[(?=&#x27;)"), "<wbr>["),
    (re.compile(r"(\d[\d.]* (?:[KMGT]i)?B\b|\b\w+\[[\d,]+\]|\bparameters\b)"), r"<span>\1</span>"),
)
_STYLE = """
td span { white-space: nowrap; }
.remedy { border: 1px solid var(--rule); border-left: 4px solid var(--act-edge); border-radius: 4px; padding: 10px 14px;
  margin: 12px 0; break-inside: avoid; }
.remedy h4 { margin: 0 0 4px; font-size: 15px; } .remedy p { margin: 4px 0; }
.remedy pre { background: var(--band); border: 1px solid var(--rule); border-radius: 4px; padding: 8px 10px; margin: 8px 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.bar { min-width: 90px; width: 10%; }
.bar svg { display: block; width: 100%; height: 12px; margin-top: 5px; }
.bar rect { fill: var(--line-0); }
.text td { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; white-space: pre-wrap; }
"""


def oom_html(report: OomReport, *, chart: str = "", version: str) -> str:
    """The page.

    Args:
        report: The record.
        chart: Memory over time as marks of `report_chart`, or an empty text.
        version: Of this library.
    """
    parts = [
        f'<h1>Out of memory</h1><p class="lead">{escape(report.sentence)}</p><p class="soft">{escape(when(report))}.</p>',
        f'<p class="act">{escape(first_thing(report))} <a href="#remedies">All remedies</a></p>'
        if report.remedies
        else "",
        *(part for section in sections(report) for part in _section(section, chart)),
        '<h3 id="remedies">What to do, the best first</h3>',
        *(_remedy(number, remedy) for number, remedy in enumerate(report.remedies, start=1)),
        "" if report.remedies else "<p>Nothing is known that would save memory here.</p>",
        f'<p class="soft">{escape(report.planning)}</p>',
        *(part for section in last_sections(report) for part in _section(section, "")),
    ]
    foot = f"Written by jaxmem_callbacks {version} when the exception passed. Bytes are on one device; what is unknown says why."
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>Out of memory</title>'
        f"<style>{STYLE}{_STYLE}</style></head>\n<body><main>{''.join(parts)}<footer>{escape(foot)}</footer></main></body></html>\n"
    )


def _remedy(number: int, remedy: Remedy) -> str:
    lines = escape("\n".join(remedy.lines))
    facts = "".join(f"<p>{escape(each)}</p>" for each in remedy_facts(remedy))
    pasted = f"<pre>{lines}</pre>" if lines else ""
    return f'<article class="remedy"><h4>{number}. {escape(remedy.what)}</h4>{pasted}{facts}</article>'


def _section(section: Section, chart: str) -> Iterator[str]:
    yield f"<h3>{escape(section.title)}</h3>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in section.sentences)
    if chart and section.title.startswith("The monitor"):
        yield chart
    yield from map(_table, section.tables)


def _table(table: OomTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns) + (
        '<th class="bar"></th>' if table.bars else ""
    )
    bars = table.bars or (None,) * len(table.rows)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + _bar(bar) + "</tr>"
        for row, bar in zip(table.rows, bars, strict=True)
    )
    kind = "text" if table.columns == ("text",) else "facts" if len(table.columns) == 2 else ""  # noqa: PLR2004 - name and value
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(text: str) -> str:
    marked = escape(text)
    for pattern, instead in _BREAKS:
        marked = pattern.sub(instead, marked)
    return marked


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    return (
        '<td class="bar"><svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.1f}" height="12" rx="1"/></svg></td>'
    )
