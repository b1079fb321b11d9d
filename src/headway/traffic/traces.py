"""Recorded traffic: arrival times, lengths and shared prefixes, from the two public formats.

* Azure 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens): no prefix information, so every prompt is its own.
* Mooncake (JSON lines: timestamp ms, input_length, output_length, hash_ids): equal ids are equal blocks of 512 tokens,
  and a request shares a prefix with every other whose ids start the same. Its clock ticks every 3 s; arrivals of one
  tick are spread evenly at random over it, because a burst every 3 s never happened.
"""

from __future__ import annotations

import csv
import math
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from headway.core.clock import MAX_SECONDS
from headway.core.errors import BadInput

MOONCAKE_BLOCK = 512  # tokens per hash id
MOST_FACTOR = 1e6


@dataclass(frozen=True)
class TraceRow:
    """One recorded request.

    Attributes:
        at: arrival, seconds after the first one.
        input_tokens, output_tokens: lengths.
        blocks: ids of its prompt blocks, in order; equal ids hold equal text. Empty = nothing is shared.
        block_tokens: tokens of a block.
    """

    at: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, limit: int | None = None, seed: int = 0) -> list[TraceRow]:
    """The first `limit` requests of a trace file, format told by its suffix (.csv, .jsonl).

    Raises:
        BadInput: no such file, an unknown format, or a row that is not one; names the line.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise BadInput("--trace", f"{path} is neither .csv (Azure) nor .jsonl (Mooncake)")
    try:
        if path.exists() and not path.is_file():
            raise BadInput("--trace", f"{path} is not a regular file")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput("--trace", f"cannot read {path}: {error}") from None
    rows = _azure(path, lines) if path.suffix == ".csv" else _mooncake(path, lines)
    if any(abs(row.at) > MAX_SECONDS for row in rows):
        raise BadInput("--trace", f"{path} holds a time of more than {MAX_SECONDS:g} seconds")
    if path.suffix == ".jsonl":
        rows = _spread_ticks(rows, random.Random(seed))
    rows.sort(key=lambda row: row.at)
    if not rows:
        raise BadInput("--trace", f"{path} holds no request")
    return rows[:limit]


def scaled(rows: list[TraceRow], speed: float, lengths: float) -> list[TraceRow]:
    """The same traffic `speed` times faster, with all lengths (and blocks) multiplied by `lengths`, at least 1.

    Raises:
        BadInput: so fast, slow, long or short that nothing is left of it.
    """
    for option, factor in (("--speed", speed), ("--length-scale", lengths)):
        if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
            problem = f"{factor:g} is not a number above 0, from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}"
            raise BadInput(option, problem)

    def size(tokens: int) -> int:
        return max(1, round(tokens * lengths))

    return [
        TraceRow(row.at / speed, size(row.input_tokens), size(row.output_tokens), row.blocks, size(row.block_tokens))
        for row in rows
    ]


def _azure(path: Path, lines: list[str]) -> list[TraceRow]:
    reader = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    found = []
    try:
        if not wanted <= set(reader.fieldnames or ()):
            raise BadInput("--trace", f"{path} lacks the columns {', '.join(sorted(wanted))}")
        table = list(reader)
    except csv.Error as error:
        raise BadInput("--trace", f"{path} line {reader.line_num + 1}: {error}") from None
    for number, row in enumerate(table, 2):
        try:
            whole, _, fraction = row["TIMESTAMP"].partition(".")
            at = datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction or 0}")
            found.append((at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        except (ValueError, TypeError):
            raise BadInput("--trace", f"{path} line {number} is not a time and two lengths") from None
    start = min((at for at, _, _ in found), default=0.0)
    return [TraceRow(at - start, max(1, context), max(1, generated)) for at, context, generated in found]


def _mooncake(path: Path, lines: list[str]) -> list[TraceRow]:
    decoder, found = msgspec.json.Decoder(_Mooncake), []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise BadInput("--trace", f"{path} line {number} is not a Mooncake request: {error}") from None
        found.append(
            TraceRow(row.timestamp / 1000, max(1, row.input_length), max(1, row.output_length), tuple(row.hash_ids))
        )
    return found


def _spread_ticks(rows: list[TraceRow], noise: random.Random) -> list[TraceRow]:
    """Move each arrival to a random moment of its tick; the tick is the largest that divides every timestamp."""
    times = [round(row.at * 1000) for row in rows]
    tick = math.gcd(*(at - times[0] for at in times)) / 1000 if rows else 0
    if tick < 0.1:  # a real clock
        return rows
    spread = [TraceRow(row.at + tick * noise.random(), row.input_tokens, row.output_tokens, row.blocks) for row in rows]
    start = min(row.at for row in spread)
    return [TraceRow(row.at - start, row.input_tokens, row.output_tokens, row.blocks) for row in spread]
