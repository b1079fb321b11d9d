"""Every reported fault of other software that we know of is a test that names it, or a feature that is refused.

Reports about serving of the first collection are named by repository and number in `serve/test_reported_bugs.py`, which
counts them itself; those of the second have an id, in a test's name, docstring or parameters.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
SECOND = [
    "001 a decoder that eats spaces", "003 steps of a decoder that cross tokens", "004 add_bos against post-processor",
    "006 two BOS", "007 a last message of the assistant's", "009 no chat template", "010 end tokens of three files",
    "012 line separators in streams", "013 finish chunks of several choices", "016 scoring with echo and logprobs",
    "020 short prompts behind long ones", "021 a prompt that does not fit", "024 clients that leave at any moment",
    "026 hits of prompts of whole blocks", "027 parts of a split model", "029 padded vocabularies",
    "030 tensors of files that the index does not name", "031 links, pipes and odd names", "034 cores of a container",
    "036 output that is no terminal", "040 a full context in a chat", "042 every name of loopback",
    "043 preflights need no key", "047 fields of popular clients", "049 bundled first tokens",
    "050 prompts of an earlier run", "052 answers shorter than asked for", "053 data sets that are none",
    "055 caches that tensor parallelism does not split",
]  # fmt: skip


def named(path: Path) -> set[str]:
    """Ids in names, docstrings, and literals of the decorators of tests."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            texts = [node.name, ast.get_docstring(node) or "", *map(ast.unparse, node.decorator_list)]
            found.update(re.findall(r"t2[_-](\d{3})", " ".join(texts)))
    return found


def test_every_report_is_named_by_a_test() -> None:
    covered = set().union(*(named(path) for path in TESTS.rglob("test_*.py")))
    assert not [case for case in SECOND if case[:3] not in covered]
