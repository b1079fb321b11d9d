"""One self-contained HTML page: it opens offline, has no script, and its policy forbids the browser to fetch anything.

Everything that goes in as text is escaped here; `parts` of a page are elements made by these functions or by `svg`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #d8dee6;vertical-align:top}
td:first-child,th:first-child{text-align:left}
pre{background:#f4f6f8;padding:1rem;overflow:auto}
svg{max-width:100%;height:auto}
.bad{color:#b3261e;font-weight:600}.warn{color:#8a5a00}.kind{font-weight:600}
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
    """`kind`: "bad", "warn", "kind", or none."""
    return f'<p class="{kind}">{safe(text)}</p>' if kind else f"<p>{safe(text)}</p>"


def preformatted(text: str) -> str:
    return f"<pre>{safe(text)}</pre>"


def details(summary: str, text: str) -> str:
    """Text that is folded away."""
    return f"<details><summary>{safe(summary)}</summary>{preformatted(text)}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Cells are shown by `cell`."""
    top = "".join(f"<th>{safe(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{safe(cell(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def table_of(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as a table; `columns`: key -> heading."""
    return table(list(columns.values()), [[row.get(key) for key in columns] for row in rows])


def cell(value: object) -> str:
    """Numbers to four figures, truth as yes and no, nothing as a dash."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)
