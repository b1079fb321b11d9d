"""What every HTML page of ours must be."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from headway.report import page as pages


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.policies: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(named["content"])
        links = (named.get(name) for name in ("src", "href", "xlink:href", "data", "srcset"))
        self.fetched += [link for link in links if link and not link.startswith("#")]


def self_contained(text: str) -> Tags:
    """The page's tags; fails if it has a script, fetches something, or lacks the policy as its first word."""
    found = Tags(text)
    assert text.startswith("<!doctype html>")
    assert not re.search(r"""@import|url\((?!["']?(?:#|data:))""", text)
    assert "script" not in found.tags and not found.fetched
    assert found.policies == [pages.POLICY]
    assert found.tags.index("meta") < found.tags.index("title") < found.tags.index("style")
    return found
