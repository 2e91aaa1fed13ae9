"""Documents: what a command prints or a report shows, built once and rendered as console text, Markdown, HTML or a whole page.

A document is a list of blocks. Each product builds its own; escaping, widths and alignment are the renderers' business.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from jaxmem_callbacks.records.terminal import console_width, shown

Side = Literal["left", "right"]


class Link(str):
    """A text that leads to the section of a name, where the medium can."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, text: str, name: str) -> Self:
        """The text with its name."""
        link = super().__new__(cls, text)
        link.name = name
        return link


@dataclass(frozen=True, slots=True)
class Table:
    """Cells in rows.

    Attributes:
        columns: Headings; empty for a table without.
        rows: Cells, as many in each.
        sides: For each column whether a console aligns it left or right; empty for all left.
        bars: A share from 0 to 1 for each row, drawn as a bar in HTML; empty for none.
        folded: Whether a console breaks the last column, of prose, at its width.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    sides: Sequence[Side] = ()
    bars: Sequence[float] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph that is more than its text.

    Attributes:
        text: One or more sentences.
        label: Stands before it in bold type.
        style: A class of the page's style sheet.
        link: Stands behind it in HTML.
    """

    text: str
    label: str = ""
    style: str = ""
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Bullets:
    """A list.

    Attributes:
        items: Each is a line of its own on a console.
        mark: What stands before each item there.
    """

    items: Sequence[str]
    mark: str = "-"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to paste, which no renderer breaks.

    Attributes:
        lines: As they are typed.
    """

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing; media other than HTML leave it out.

    Attributes:
        markup: Its HTML, in which its maker escaped what users gave.
    """

    markup: str


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what belongs to it.

    Attributes:
        title: The heading; empty for none.
        blocks: What stands below it.
        level: Of the heading in HTML, from 2; Markdown has one less.
        style: A class of the page's style sheet, for a section with a frame of its own.
        name: What a `Link` leads to.
    """

    title: str
    blocks: Sequence[Block] = ()
    level: int = 3
    style: str = ""
    name: str = ""


Block = str | Paragraph | Table | Bullets | Code | Figure | Section
_PROSE = (str, Paragraph, Code)  # one below the other on a console; a section's are indented as its tables are


@dataclass(frozen=True, slots=True)
class Document:
    """A whole text.

    Attributes:
        blocks: In order.
        title: The name of a page.
        summary: The whole in a sentence or two. Markdown has it as its heading.
        footer: Below everything on a page.
    """

    blocks: Sequence[Block]
    title: str = ""
    summary: str = ""
    footer: str = ""


def as_text(document: Document, *, width: int | None = None) -> str:
    """The blocks for a console: aligned tables, wrapped paragraphs, an empty line between unlike blocks.

    Args:
        document: What to render.
        width: Letters in a line; None for the console's.
    """
    return "\n".join(_text_lines(document.blocks, width or console_width()))


def _text_lines(blocks: Iterable[Block], width: int, indent: str = "") -> list[str]:
    lines: list[str] = []
    before: Block | None = None
    for block in blocks:
        is_prose = isinstance(block, _PROSE)
        here = _block_text(block, width - len(indent))
        if lines and here and not (is_prose and isinstance(before, _PROSE)):
            lines.append("")
        lines += [f"{indent}{line}" for line in here] if is_prose else here
        before = block if here else before
    return lines


def _block_text(block: Block, width: int) -> list[str]:  # noqa: PLR0911 - one a kind of block
    match block:
        case str():
            return _wrapped(block, width)
        case Paragraph():
            return _wrapped(f"{block.label} {block.text}".strip(), width)
        case Table():
            return aligned(block, width)
        case Bullets():
            return [f"{block.mark} {item}" for item in block.items]
        case Code():
            return [f"    {line}" for line in block.lines]
        case Section():
            return [block.title, *_text_lines(block.blocks, width, "  ")]
        case Figure():
            return []


def aligned(table: Table, width: int = 0) -> list[str]:
    """A table's lines for a console; ``width`` is that of a folded one."""
    rows = [table.columns, *table.rows] if table.columns else table.rows
    sides = table.sides or ["left"] * len(rows[0]) if rows else ()
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    lines: list[str] = []
    for row in rows:
        cells = [c.rjust(w) if side == "right" else c.ljust(w) for c, w, side in zip(row, widths, sides, strict=True)]
        line = ("  " + "  ".join(cells)).rstrip()
        indent = " " * sum(2 + width for width in widths[:-1]) + "  "
        lines += _filled(line, indent, width) if table.folded else [line]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """A paragraph's lines, those after the first indented. A line that begins with a space is code to paste, and stays whole."""
    return [
        part
        for line in text.split("\n")
        for part in ([line] if line.startswith(" ") else _filled(line, "  ", width) or [""])
    ]


def _filled(line: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def as_markdown(document: Document, *, escaped: bool = True) -> str:
    """The document as Markdown.

    Args:
        document: What to render.
        escaped: Whether characters of HTML are written as entities. Loggers that show the text as it is get them as they are.
    """
    blocks = [Section(document.summary, level=2), *document.blocks] if document.summary else document.blocks
    return "\n\n".join(part for block in blocks for part in _block_markdown(block, escaped=escaped))


def _block_markdown(block: Block, *, escaped: bool) -> Iterator[str]:
    def clean(text: str) -> str:
        return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;") if escaped else text

    match block:
        case str():
            yield clean(block)
        case Paragraph():
            yield f"**{clean(block.label)}** {clean(block.text)}" if block.label else clean(block.text)
        case Table():
            rows = [block.columns, ["---"] * len(block.columns), *block.rows]
            yield "\n".join("| " + " | ".join(_markdown_cell(clean(cell)) for cell in row) + " |" for row in rows)
        case Bullets():
            yield "\n".join(f"- {clean(item)}" for item in block.items)
        case Code():
            yield "\n".join(["```", *block.lines, "```"])
        case Section():
            yield f"{'#' * (block.level - 1)} {clean(block.title)}"
            for each in block.blocks:
                yield from _block_markdown(each, escaped=escaped)
        case Figure():
            pass


def _markdown_cell(text: str) -> str:
    """A bar or a new line in a cell does not end it."""
    return text.replace("|", "\\|").replace("\n", " ")


def as_html(document: Document, mark: Callable[[str], str] = str) -> str:
    """The document's title, summary and blocks as HTML, without the page around them.

    Args:
        document: What to render.
        mark: What puts tags into the escaped text of a cell, such as those of places where a line may end.
    """
    head = f"<h1>{escape(document.title)}</h1>" if document.title else ""
    lead = _block_html(Paragraph(document.summary, style="lead"), mark) if document.summary else ""
    return head + lead + "".join(_block_html(block, mark) for block in document.blocks)


def escape(text: str) -> str:
    r"""The text for an element or an attribute in double quotes; a character that shows nothing is written ``\u202e``."""
    return html.escape(shown(text))


def _block_html(block: Block, mark: Callable[[str], str]) -> str:  # noqa: PLR0911 - one a kind of block
    match block:
        case str():
            return f"<p>{escape(block)}</p>" if block else ""
        case Paragraph():
            label = f"<strong>{escape(block.label)}</strong> " if block.label else ""
            link = f" {_cell_html(block.link, mark)}" if block.link else ""
            return f"<p{_attribute('class', block.style)}>{label}{escape(block.text)}{link}</p>"
        case Table():
            return _table_html(block, mark)
        case Bullets():
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"
        case Code():
            return f"<pre>{escape(chr(10).join(block.lines))}</pre>"
        case Section():
            return _section_html(block, mark)
        case Figure():
            return block.markup


def _section_html(section: Section, mark: Callable[[str], str]) -> str:
    name = _attribute("id", section.name)
    heading = f"<h{section.level}{'' if section.style else name}>{escape(section.title)}</h{section.level}>"
    body = (heading if section.title else "") + "".join(_block_html(block, mark) for block in section.blocks)
    return f'<section class="{section.style}"{name}>{body}</section>' if section.style else body


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""


def _table_html(table: Table, mark: Callable[[str], str]) -> str:
    bars = table.bars or [None] * len(table.rows)
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns) + (
        '<th class="bar"></th>' if table.bars else ""
    )
    body = "".join(
        f"<tr>{''.join(f'<td>{_cell_html(cell, mark)}</td>' for cell in row)}{_bar(bar)}</tr>"
        for row, bar in zip(table.rows, bars, strict=True)
    )
    style = "text" if len(table.columns) == 1 else "facts" if len(table.columns) == 2 else ""  # noqa: PLR2004 - name and value
    return (
        f'<div class="scroll"><table{_attribute("class", style)}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell_html(text: str, mark: Callable[[str], str]) -> str:
    return f'<a href="#{escape(text.name)}">{escape(text)}</a>' if isinstance(text, Link) else mark(escape(text))


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    return (
        '<td class="bar"><svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.1f}" height="12" rx="1"/></svg></td>'
    )


# The page's promise, as the browser enforces it: no script, and nothing from anywhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c1f23; --soft: #59616b; --rule: #d5dae0; --band: #f4f6f8;
  --line-0: #1f6fb2; --line-1: #0b2f5e; --line-2: #7d9fbd; --line-3: #2a7d2e; --line-4: #9a9a9a; --host: #6b6b6b;
  --need: #8a5a00; --limit: #c02222;
  --event: #c02222; --act: #fff6e0; --act-edge: #c98a00; --link: #0b5cad; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171a; --ink: #e6e9ec; --soft: #a3acb6; --rule: #353c44; --band: #1d2227;
  --line-0: #6cb2eb; --line-1: #c3def5; --line-2: #7088a0; --line-3: #74c476; --line-4: #8a8a8a; --host: #a8a8a8;
  --need: #e0b050; --limit: #ff7b72;
  --event: #ff7b72; --act: #2b2415; --act-edge: #c98a00; --link: #79b8ff; } }
@media print { :root { color-scheme: light;
  --paper: #ffffff; --ink: #000000; --soft: #444444; --rule: #bbbbbb; --band: #ffffff;
  --line-0: #1f6fb2; --line-1: #0b2f5e; --line-2: #7d9fbd; --line-3: #2a7d2e; --line-4: #9a9a9a; --host: #6b6b6b;
  --need: #8a5a00; --limit: #c02222;
  --event: #c02222; --act: #ffffff; --act-edge: #888888; --link: #000000; }
  main { max-width: none; padding: 0; } a { text-decoration: none; }
  .scroll { overflow: visible; } table { font-size: 8.5pt; }
  figure, .event-card, tr { break-inside: avoid; } h2, h3 { break-after: avoid; } .run + .run { break-before: page; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 10px; } h2 { font-size: 20px; margin: 40px 0 6px; }
h3 { font-size: 16px; margin: 30px 0 8px; }
h1, h2, h3, p, li, td, dd { overflow-wrap: anywhere; }
a { color: var(--link); }
.lead { font-size: 17px; margin: 0 0 16px; max-width: 76ch; } .soft { color: var(--soft); }
.chart { margin: 18px 0; overflow-x: auto; }
.chart > svg { width: 100%; min-width: 600px; height: auto; display: block; }
.tick { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--rule); stroke-width: 1; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } .key line { stroke-width: 2.5; }
.line-0 { stroke: var(--line-0); } .line-1 { stroke: var(--line-1); } .line-2 { stroke: var(--line-2); }
.line-3 { stroke: var(--line-3); } .line-4 { stroke: var(--line-4); }
.line-host { stroke: var(--host); } .dot { stroke-width: 3; }
.need { stroke: var(--need); stroke-width: 1.6; stroke-dasharray: 2 4; }
.limit { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 8 5; }
.save { fill: var(--act-edge); stroke: var(--act-edge); stroke-width: 1; opacity: 0.25; }
.event { stroke: var(--event); stroke-width: 1.4; }
.limit-name { fill: var(--limit); font-size: 11.5px; } .need-name { fill: var(--need); font-size: 11.5px; }
.event-number { fill: var(--event); font-size: 12px; font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 6px 0 0; padding: 0; color: var(--soft);
  font-size: 13px; }
.key { width: 24px; height: 10px; vertical-align: middle; }
.event-card { border: 1px solid var(--rule); border-left: 4px solid var(--event); border-radius: 4px; padding: 10px 14px;
  margin: 12px 0; }
.event-card p { margin: 4px 0; } .event-card h4 { margin: 0; font-size: 15px; }
.act { background: var(--act); border-left: 3px solid var(--act-edge); padding: 6px 10px; }
.scroll { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
table.facts { width: auto; } table.facts td { padding-right: 28px; min-width: 7em; }
th, td { text-align: left; vertical-align: top; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; } td { font-variant-numeric: tabular-nums; }
tbody tr:nth-child(even) { background: var(--band); }
img.paper { background: #ffffff; max-width: 100%; height: auto; border-radius: 4px; }
footer { margin-top: 44px; border-top: 1px solid var(--rule); padding-top: 10px; color: var(--soft); font-size: 13px; }
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


def page_html(document: Document, mark: Callable[[str], str] = str) -> str:
    """The whole page; its title is the document's, and ``mark`` that of `as_html`."""
    footer = f"<footer>{escape(document.footer)}</footer>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(document.title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><main>{as_html(document, mark)}{footer}</main></body></html>\n"
    )
