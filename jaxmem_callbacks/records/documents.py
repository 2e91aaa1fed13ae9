"""Documents: what a command prints or a report shows, built once and rendered as console text, Markdown, HTML or plain data.

A document is a list of blocks. Each product builds its own; escaping, widths and alignment are the renderers' business.
"""

from __future__ import annotations

import html
import itertools
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from jaxmem_callbacks.records.terminal import console_width, is_terminal, put, shown

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
        sides: For each column whether a console or a page aligns it left or right; empty for all left.
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


Block = str | Paragraph | Table | Bullets | Code | Section
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


def put_document(*parts: Document | str, width: int | None = None) -> None:
    """Write documents to stdout as `as_text` renders them, an empty line between, in colours where stdout shows them.

    On a terminal a table that is wider than it is fitted: its widest texts are broken within their columns.

    Args:
        *parts: Documents, and texts that stay as they are; what is empty is left out.
        width: Letters in a line; None for the console's.

    Raises:
        OutputError, BrokenPipeError: as `put`.
    """
    letters, fits = width or console_width(), is_terminal(sys.stdout)
    texts = [[each] if isinstance(each, str) else _text_lines(each.blocks, letters, fits=fits) for each in parts]
    lines = [line for text in texts if any(text) for line in ("", *text)][1:]
    flat = [(part, line) for line in lines for part in line.split("\n")]
    styles = [line.style if isinstance(line, _Styled) else "" for _, line in flat]
    put("".join(f"{part}\n" for part, _ in flat), styles=styles)


class _Styled(str):
    """A line of a console with the numbers of its style."""

    __slots__ = ("style",)
    style: str

    def __new__(cls, text: str, style: str) -> Self:
        line = super().__new__(cls, text)
        line.style = style
        return line


_BOLD, _CYAN, _YELLOW = "1", "36", "33"


def _indented(line: str, indent: str) -> str:
    return _Styled(indent + line, line.style) if isinstance(line, _Styled) else indent + line


def _text_lines(blocks: Iterable[Block], width: int, indent: str = "", *, fits: bool = False) -> list[str]:
    lines: list[str] = []
    before: Block | None = None
    for block in blocks:
        is_prose = isinstance(block, _PROSE)
        here = _block_text(block, width - len(indent), fits=fits)
        if lines and here and not (is_prose and isinstance(before, _PROSE)):
            lines.append("")
        lines += [_indented(line, indent) for line in here] if is_prose else here
        before = block if here else before
    return lines


def _block_text(block: Block, width: int, *, fits: bool) -> list[str]:
    match block:
        case str():
            return _wrapped(block, width)
        case Paragraph():
            return _wrapped(f"{block.label} {block.text}".strip(), width)
        case Table():
            return aligned(block, width, fits=fits)
        case Bullets():
            items = [f"{block.mark} {item}" for item in block.items]
            return [_Styled(item, _YELLOW) for item in items] if block.mark == "!" else items
        case Code():
            return [_Styled(f"    {line}", _CYAN) for line in block.lines]
        case Section():
            return [_Styled(block.title, _BOLD), *_text_lines(block.blocks, width, "  ", fits=fits)]


def aligned(table: Table, width: int = 0, *, fits: bool = False) -> list[str]:
    """A table's lines for a console; ``width`` is that of a folded one, and with ``fits`` of every one."""
    rows = [table.columns, *table.rows] if table.columns else table.rows
    sides: Sequence[Side] = table.sides or (_LEFT * len(rows[0]) if rows else ())
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides))]
    if fits:
        fitted = _fitted(widths, sides, width)
        if fitted != widths:
            return [line for at, row in enumerate(rows) for line in _in_columns(row, fitted, sides, bold=not at)]
    lines: list[str] = []
    for row in rows:
        cells = [c.rjust(w) if side == "right" else c.ljust(w) for c, w, side in zip(row, widths, sides, strict=True)]
        line = ("  " + "  ".join(cells)).rstrip()
        indent = " " * sum(2 + width for width in widths[:-1]) + "  "
        lines += _filled(line, indent, width) if table.folded else [line]
    if table.columns and lines:
        lines[0] = _Styled(lines[0], _BOLD)
    return lines


_LEFT: tuple[Side, ...] = ("left",)
_NARROWEST = 12  # letters of a column whose texts are broken


def _fitted(widths: Sequence[int], sides: Sequence[Side], width: int) -> list[int]:
    """Widths of columns that fit into a line as far as texts, which stand left, can be broken; the widest are broken first."""
    found = list(widths)
    texts = [at for at, side in enumerate(sides) if side == "left"]
    while sum(found) + 2 * len(found) > width and max((found[at] for at in texts), default=0) > _NARROWEST:
        found[max(texts, key=found.__getitem__)] -= 1
    return found


def _in_columns(row: Sequence[str], widths: Sequence[int], sides: Sequence[Side], *, bold: bool) -> list[str]:
    """A row's lines, each cell broken within its column."""
    cells = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""] for cell, width in zip(row, widths, strict=True)
    ]
    lines: list[str] = []
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        padded = [
            c.rjust(w) if side == "right" else c.ljust(w) for c, w, side in zip(parts, widths, sides, strict=True)
        ]
        line = ("  " + "  ".join(padded)).rstrip()
        lines.append(_Styled(line, _BOLD) if bold else line)
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


def _markdown_cell(text: str) -> str:
    """A bar or a new line in a cell does not end it."""
    return text.replace("|", "\\|").replace("\n", " ")


def as_blocks(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The blocks as plain dictionaries, for the module that shows them in a page: what is empty is left out."""
    return [_block_plain(block) for block in blocks if block]


def _block_plain(block: Block) -> dict[str, Any]:
    match block:
        case str():
            return {"text": block}
        case Paragraph():
            link = {"link": _cell_plain(block.link)} if block.link else {}
            return {**_given(label=block.label), "text": block.text, **_given(style=block.style), **link}
        case Table():
            rows = [[_cell_plain(cell) for cell in row] for row in block.rows]
            return {
                "columns": list(block.columns),
                "rows": rows,
                **_given(sides=list(block.sides), bars=list(block.bars)),
            }
        case Bullets():
            return {"items": list(block.items)}
        case Code():
            return {"code": list(block.lines)}
        case Section():
            return {
                "title": block.title,
                "blocks": as_blocks(block.blocks),
                **_given(style=block.style, name=block.name),
            }


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _cell_plain(text: str) -> str | dict[str, str]:
    return {"text": str(text), "to": text.name} if isinstance(text, Link) else text


def as_html(document: Document) -> str:
    """The document's title, summary and blocks as HTML, without a page around them."""
    head = f"<h1>{escape(document.title)}</h1>" if document.title else ""
    lead = _block_html(Paragraph(document.summary, style="lead")) if document.summary else ""
    return head + lead + "".join(map(_block_html, document.blocks))


def escape(text: str) -> str:
    r"""The text for an element or an attribute in double quotes; a character that shows nothing is written ``\u202e``."""
    return html.escape(shown(text))


def _block_html(block: Block) -> str:
    match block:
        case str():
            return f"<p>{escape(block)}</p>" if block else ""
        case Paragraph():
            label = f"<strong>{escape(block.label)}</strong> " if block.label else ""
            link = f" {_cell_html(block.link)}" if block.link else ""
            return f"<p{_attribute('class', block.style)}>{label}{escape(block.text)}{link}</p>"
        case Table():
            return _table_html(block)
        case Bullets():
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"
        case Code():
            return f"<pre>{escape(chr(10).join(block.lines))}</pre>"
        case Section():
            return _section_html(block)


def _section_html(section: Section) -> str:
    name = _attribute("id", section.name)
    heading = f"<h{section.level}{'' if section.style else name}>{escape(section.title)}</h{section.level}>"
    body = (heading if section.title else "") + "".join(map(_block_html, section.blocks))
    return f'<section class="{section.style}"{name}>{body}</section>' if section.style else body


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""


def _table_html(table: Table) -> str:
    bars = table.bars or [None] * len(table.rows)
    sides = [_attribute("class", side if side == "right" else "") for side in table.sides]

    def cells(kind: str, texts: Sequence[str]) -> str:
        each = itertools.zip_longest(texts, sides[: len(texts)], fillvalue="")
        return "".join(f"<{kind}{side}>{_cell_html(text)}</{kind}>" for text, side in each)

    head = cells("th", table.columns) + ('<th class="bar"></th>' if table.bars else "")
    body = "".join(f"<tr>{cells('td', row)}{_bar(bar)}</tr>" for row, bar in zip(table.rows, bars, strict=True))
    style = "text" if len(table.columns) == 1 else "facts" if len(table.columns) == 2 else ""  # noqa: PLR2004 - name and value
    return (
        f'<div class="scroll"><table{_attribute("class", style)}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell_html(text: str) -> str:
    return f'<a href="#{escape(text.name)}">{escape(text)}</a>' if isinstance(text, Link) else escape(text)


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    return (
        '<td class="bar"><svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.1f}" height="12" rx="1"/></svg></td>'
    )
