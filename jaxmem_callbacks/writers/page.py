"""A page of HTML in one file: a document, its style sheet, and nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Callable

from jaxmem_callbacks.records.documents import Document, as_html, escape

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
