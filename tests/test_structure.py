"""The house rules of the source tree: imports only go down, and the pure floors stay pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headway"
FLOORS = {
    "core": 1, "shape": 1,
    "roofline": 2, "report": 2, "cache": 2, "scheduling": 2, "ops": 2, "sampling": 2, "speculation": 2, "text": 2,
    "traffic": 2, "metrics": 2, "routing": 2,
    "model": 3, "executor": 4, "engine": 5, "measure": 6, "client": 6,
    "serve": 7, "plan": 7, "simulate": 7, "bench": 7, "cluster": 7,
    "lab": 8, "cli": 8,
}  # fmt: skip
SIBLINGS = {"serve", "plan", "simulate", "bench", "cluster"}  # what two of them need goes down a floor
PURE = ("core", "cache", "scheduling", "routing")
BANNED_IN_PURE = {"numpy", "torch", "time", "random", "datetime", "secrets"}
COUNTING = {"shape", "roofline"}  # who computes cache bytes, weight bytes and FLOPs; all others ask them
COUNTED = {  # fields of a shape that are of no use but to compute those
    "dtype_bytes", "layer_row_bytes", "reading_layers", "decode_flops", "prefill_flops", "expert_params",
    "n_routed",
}  # fmt: skip
SIZES = {  # counts and widths of a model: a product with one of them is bytes or FLOPs in the making
    "n_params", "n_active", "n_body", "head_params", "params", "stored", "numel", "d_model", "hidden_size",
    "intermediate_size", "vocab", "vocab_size", "key_width", "value_width", "head_width", "head_dim", "q_width",
    "kv_heads", "nominal",
}  # fmt: skip
WIDTHS = {
    "model/config.py",
    "ops/recording.py",
}  # multiply counts by widths: how wide a matrix is, in numbers
ANSWERS = "an answer of `headway plan`, beside what it is about"
SHARED_NAMES = {  # of public classes that mean two things all the same, and why
    **dict.fromkeys(
        ("Answer", "Capacity", "Counted", "Explained", "Frontier", "Model", "Rejected", "Served", "Step",
         "Verdict"), ANSWERS,
    ),
    **dict.fromkeys(("Message", "Options", "Document"), "an API's body has the API's name for it"),
    "Call": "a recorded operation; an API's body has the API's name for it",
    "Choice": "what the engine says of a choice of a request, and what a server has sent of it",
    "Cutter": "three ways to cut text into the pieces of a GGUF file's tokenizer, chosen by what it names",
    "Drawing": "the drawing of a token, and of a plot",
    "Endpoint": "a route that is served, and the one that a bench asks",
    "Format": "how numbers are stored, and how an API writes answers",
    "Header": "what an event file begins with, and a GGUF file",
    "Request": "asked of an engine, and of the planner's levers",
    "Sampling": "fields of a body, and a page of the lab",
    "Text": "a paragraph of a document, and the text side of a served model",
    "Traffic": "a load to plan for has means, one to simulate has arrivals",
}  # fmt: skip
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.parent != SOURCE)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield f"{node.module}.{node.names[0].name}" if node.module == "headway" else str(node.module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_never_reach_up_and_pure_floors_stay_pure(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "headway" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS[parts[1]] <= FLOORS[room], f"{room} (floor {FLOORS[room]}) imports {name}"
            assert not {room, parts[1]} <= SIBLINGS or room == parts[1], f"{room} imports its sibling: {name}"
        if room in PURE:
            assert parts[0] not in BANNED_IN_PURE, f"{room} must not import {name}"
        if parts[0] == "torch":
            assert room == "cluster" or path.relative_to(SOURCE).parts[:2] == ("ops", "cuda"), f"torch in {path}"


def test_every_folder_has_a_floor() -> None:
    rooms = {path.relative_to(SOURCE).parts[0] for path in FILES}
    assert rooms <= FLOORS.keys()


def test_one_word_is_one_thing() -> None:
    """Public classes have names of their own."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    twice = {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_NAMES}
    assert not twice, "rename one, or say in SHARED_NAMES why both are called so"


def test_no_room_imports_one_that_imports_it() -> None:
    below: dict[str, set[str]] = {}
    for path in FILES:
        room = path.relative_to(SOURCE).parts[0]
        found = {name.split(".")[1] for name in imports(path) if name.startswith("headway.")}
        below.setdefault(room, set()).update(found & FLOORS.keys() - {room})
    while below:  # take away rooms that import none of those left, until none is left
        bare = {room for room, others in below.items() if not others & below.keys()}
        assert bare, f"rooms import each other in a circle: {sorted(below)}"
        below = {room: others for room, others in below.items() if room not in bare}


def counted(tree: ast.Module) -> Iterator[str]:
    """Where a file does the counting floors' work: reads a field that only they need, or multiplies sizes of a model,
    be it through a name that it gave to one. What is added up by hand from bare numbers cannot be seen."""
    named = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr in SIZES
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COUNTED:
            yield f"line {node.lineno} reads {node.attr}"
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
            for side in sides:
                size = side.attr if isinstance(side, ast.Attribute) else side.id if isinstance(side, ast.Name) else ""
                if size in SIZES if isinstance(side, ast.Attribute) else size in named:
                    yield f"line {node.lineno} multiplies {size}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nobody_else_computes_cache_bytes_weight_bytes_or_flops(path: Path) -> None:
    name = path.relative_to(SOURCE)
    if name.parts[0] not in COUNTING and str(name) not in WIDTHS:
        assert not list(counted(ast.parse(path.read_text()))), f"{name}: ask `shape` or `roofline` instead"


@pytest.mark.parametrize(
    "line",
    [
        "size = 2 * len(group.layers) * group.heads * group.key_width * 2", "flops = 2 * shape.n_active * tokens",
        "total = shape.params.total\nn = shape.n_params\nbytes = 0.5 * n", "x = group.dtype_bytes",
        "size = 4 * (tokens * (6 * config.hidden_size))", "seconds = group.decode_flops / peak",
    ],
)  # fmt: skip
def test_the_law_sees_such_lines(line: str) -> None:
    assert list(counted(ast.parse(line)))
