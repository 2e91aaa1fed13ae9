"""A report's record enters, its Markdown leaves: plain enough to be read as it is, in a terminal or an issue."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmem_callbacks.records.oom import OomReport
from jaxmem_callbacks.writers.markdown import markdown_table
from jaxmem_callbacks.writers.oom_tables import Section, first_thing, last_sections, remedy_facts, sections, when


def oom_markdown(report: OomReport) -> str:
    """The report as Markdown."""
    lines = [f"# {plain(report.sentence)}", "", f"{plain(when(report))}. {plain(first_thing(report))}".strip(), ""]
    for section in sections(report):
        lines += _section(section)
    lines += ["## What to do, the best first", ""]
    for number, remedy in enumerate(report.remedies, start=1):
        lines += [f"{number}. **{plain(remedy.what)}.** {plain(' '.join(remedy_facts(remedy)))}", ""]
        lines += ["   ```", *(f"   {line}" for line in remedy.lines), "   ```", ""] if remedy.lines else []
    if not report.remedies:
        lines += ["Nothing is known that would save memory here.", ""]
    lines += [plain(report.planning), ""]
    for section in last_sections(report):
        lines += _section(section)
    return "\n".join(lines)


def _section(section: Section) -> Iterator[str]:
    yield from (f"## {section.title}", "")
    for sentence in section.sentences:
        yield from (plain(sentence), "")
    for table in section.tables:
        rows = [[plain(cell) for cell in row] for row in table.rows]
        yield from (markdown_table(table.columns, rows), "")


def plain(text: str) -> str:
    """Text on one line in which nothing is taken for HTML."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
