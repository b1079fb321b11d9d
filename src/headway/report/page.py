"""One self-contained HTML page: it opens offline, has no script, and its policy forbids the browser to fetch anything.

Everything that goes in as text is escaped here; `parts` of a page are elements made by these functions or by `svg`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
body{max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.55rem;letter-spacing:-.02em;font-weight:640}
h2,h3{font-weight:620;margin:1.6rem 0 .4rem}h3{font-size:1rem}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th{color:var(--muted);font-weight:500}
td,th{padding:.28rem .8rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
td:first-child,th:first-child,.left{text-align:left;white-space:normal}
@media(min-width:76rem){thead th:first-child{min-width:10rem}}
table.bars td{border:0;padding:.1rem .8rem}
table.bars td:last-child{width:24rem;text-align:left}
.bar{height:.8rem;background:var(--c1);border-radius:3px}
.heat{border-spacing:0}.heat td,.heat th{border:0;padding:0 1px;text-align:left;font-size:.8rem}
.heat td:first-child{padding-right:.6rem;white-space:nowrap}
.heat th span{writing-mode:vertical-rl;transform:rotate(180deg);white-space:pre;max-height:7rem;overflow:hidden}
.heat i{display:block;width:1.1rem;height:1rem;border-radius:2px;background:var(--c1)}
.scroll{overflow-x:auto}
pre{background:var(--sunken);padding:1rem;white-space:pre-wrap;overflow-wrap:anywhere;border-radius:var(--radius)}
ul{margin:.2rem 0}
svg{max-width:100%;height:auto;background:#fff;border:1px solid var(--line);border-radius:var(--radius);padding:.4rem}
.kind{font-weight:600}
"""
TOKENS = (Path(__file__).parent / "kit" / "tokens.css").read_text()


def page(title: str, parts: Sequence[str]) -> str:
    """The whole page."""
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{safe(title)}</title><style>{TOKENS}{STYLE}</style></head><body>",
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


def heat(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Shares from 0 to 1 as cells, the darker the more."""
    head = "".join(f"<th><span>{safe(name)}</span></th>" for name in ("", *columns))
    lines = [f"<tr><td>{safe(name)}</td>{''.join(map(_cell, shares))}</tr>" for name, shares in rows]
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table class="heat">{body}</table></div>'


def _cell(share: float) -> str:
    """The square root, so that small shares show."""
    return f'<td title="{share:.3f}"><i style="opacity:{max(0.0, share) ** 0.5:.2f}"></i></td>'
