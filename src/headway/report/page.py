"""One self-contained HTML page: it opens offline, has no script, and its policy forbids the browser to fetch anything.

Everything that goes in as text is escaped here; `parts` of a page are elements made by these functions or by `svg`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #d8dee6;vertical-align:top;white-space:nowrap}
td:first-child,th:first-child,.left{text-align:left;white-space:normal}
table.bars td{border:0;padding:.1rem .8rem}
table.bars td:last-child{width:24rem;text-align:left}
.bar{height:.8rem;background:#2b6cb0}
pre{background:#f4f6f8;padding:1rem;white-space:pre-wrap;overflow-wrap:anywhere}
ul{margin:.2rem 0}
svg{max-width:100%;height:auto}
.bad{color:#b3261e;font-weight:600}.warn{color:#8a5a00}.kind{font-weight:600}.note{color:#5b6675}
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole page."""
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{safe(title)}</title><style>{STYLE}</style></head><body>",
        heading(title, 1), *parts, "</body></html>\n",
    ])  # fmt: skip


def safe(text: object) -> str:
    return html.escape(str(text))


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{safe(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """`kind`: "bad", "warn", "kind", "note", or none."""
    return f'<p class="{kind}">{safe(text)}</p>' if kind else f"<p>{safe(text)}</p>"


def listing(heading: str, lines: Sequence[str], kind: str = "") -> str:
    """Short lines under a heading."""
    items = "".join(f"<li>{safe(line)}</li>" for line in lines)
    return f'<div class="{kind}">{safe(heading)}:<ul>{items}</ul></div>'


def preformatted(text: str) -> str:
    return f"<pre>{safe(text)}</pre>"


def details(summary: str, text: str) -> str:
    """Text that is folded away."""
    return f"<details><summary>{safe(summary)}</summary>{preformatted(text)}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Columns named in `left` are words, aligned left as the first one is."""
    sides = [' class="left"' if name in left else "" for name in head]
    top = "".join(f"<th{side}>{safe(name)}</th>" for side, name in zip(sides, head, strict=True))
    lines = ["".join(f"<td{side}>{safe(value)}</td>" for side, value in zip(sides, row, strict=True)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def bars(rows: Sequence[tuple[str, str, float]]) -> str:
    """(name, figure, length of its bar as a share of the whole), one under the other."""
    lines = [
        f"<tr><td>{safe(name)}</td><td>{safe(figure)}</td>"
        f'<td><div class="bar" style="width:{100 * min(share, 1):.1f}%"></div></td></tr>'
        for name, figure, share in rows
    ]
    return f'<table class="bars"><tbody>{"".join(lines)}</tbody></table>'
