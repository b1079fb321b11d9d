"""What prompt lookup is worth on the built-in model: the same requests with and without drafts, turn by turn.

    python benchmarks/speculation.py repeat                  code, JSON, tables and edits, one request at a time
    python benchmarks/speculation.py mix --batches 1,2,4     all kinds of prompts, so many at once
    python benchmarks/speculation.py show                    the table of what was measured

Two engines live side by side and take turns, request by request, so that both see the same machine; a figure is the
median over rounds of the ratio of their seconds. Answers are greedy, and must be the same to the token. Results are
kept in benchmarks/data/speculation.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

from headway import LLM, SamplingParams
from headway.core.folds import Totals

RESULTS = Path(__file__).parent / "data" / "speculation.json"
RECORDS = json.dumps(
    [{"id": n, "name": f"user{n}", "active": n % 3 == 0, "roles": ["admin", "dev"]} for n in range(12)]
)
CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius * shape.radius
    if shape.kind == "square":
        return shape.side * shape.side
    if shape.kind == "rectangle":
        return shape.width * shape.height
    raise ValueError(shape.kind)


def perimeter(shape):
    if shape.kind == "circle":
        return 2 * 3.14159 * shape.radius
    if shape.kind == "square":
        return 4 * shape.side
    if shape.kind == "rectangle":
        return 2 * (shape.width + shape.height)
    raise ValueError(shape.kind)
"""
TABLE = "\n".join(f"| {n} | item {n} | {n * 3}.50 | in stock |" for n in range(1, 16))
REPEATING = {
    "code": f"Repeat this Python file exactly:\n```python\n{CODE}```\nThe same file again:\n```python\n",
    "JSON": f"Copy this JSON:\n{RECORDS}\nCopy:\n",
    "edit": f"```python\n{CODE}```\nThe same file, with `shape` renamed to `figure`:\n```python\n{CODE[:60]}",
    "table": f"| no | name | price | state |\n|---|---|---|---|\n{TABLE}\n| 16 |",
}
PLAIN = {
    "story": "Once upon a time, in a village by the sea,",
    "question": "The three most important causes of the French Revolution were",
    "letter": "Dear Sir or Madam,\n\nI am writing to",
    "list": "Ten things to do in Paris:\n1.",
}


def seconds(llm: LLM, prompts: list[str], tokens: int) -> tuple[float, list[list[int]]]:
    """Time of all prompts at once, and the answers."""
    clock = time.process_time if llm.options.threads == 1 else time.perf_counter
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    begin = clock()
    done = llm.generate(prompts, params, show_progress=False)
    return clock() - begin, [one.choices[0].tokens for one in done]


def compare(engines: dict[str, LLM], prompts: list[str], tokens: int, rounds: int, totals: Totals) -> dict[str, float]:
    """Both engines, in turns; the prompts' prefixes are cached, so that it is decoding that counts."""
    for llm in engines.values():
        seconds(llm, prompts, 2)
    before = (totals.drafted_tokens, totals.accepted_tokens, totals.emitted_tokens, totals.steps)
    ratios, plain = [], []
    for number in range(rounds):
        told = {}
        for name in ("off", "ngram") if number % 2 else ("ngram", "off"):
            told[name] = seconds(engines[name], prompts, tokens)
        assert told["off"][1] == told["ngram"][1], "answers differ"
        ratios.append(told["off"][0] / told["ngram"][0])
        plain.append(len(prompts) * tokens / told["off"][0])
    drafted, accepted, emitted, steps = (
        now - then
        for now, then in zip(
            (totals.drafted_tokens, totals.accepted_tokens, totals.emitted_tokens, totals.steps), before, strict=True
        )
    )
    return {
        "speedup": round(median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
        "tokens_per_second_off": round(median(plain), 1), "tokens_per_step": round(emitted / steps, 2),
        "drafted": drafted, "accepted": accepted,
    }  # fmt: skip


def keep(part: str, found: dict[str, dict[str, float]]) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known.setdefault(part, {}).update(found)
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def show() -> None:
    for part, lines in json.loads(RESULTS.read_text()).items():
        print(part)
        for name, line in sorted(lines.items(), key=lambda one: (len(one[0]), one[0])):
            print(f"  {name:10s} {line['speedup']:.2f}x ({line['least']:.2f} to {line['most']:.2f}), "
                  f"{line['tokens_per_step']:.2f} tokens per step, {line['tokens_per_second_off']:.0f} tokens/s off, "
                  f"{line['accepted']} of {line['drafted']} drafts accepted")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("repeat", "mix", "show"))
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of one thread: for a machine that others use")
    given = parser.parse_args()
    if given.part == "show":
        show()
        return
    totals = Totals()
    threads = 1 if given.cpu else None
    engines = {name: LLM(draft=name, max_model_len=2048, kv_cache_gib=1, threads=threads) for name in ("off", "ngram")}
    scheduler = engines["ngram"].engine.loop.scheduler
    assert scheduler._log is not None
    scheduler._log.subscribe(totals)
    found: dict[str, dict[str, float]] = {}
    part = given.part + (", CPU time of one thread" if given.cpu else "")
    if given.part == "repeat":
        for name, prompt in REPEATING.items():
            found[name] = compare(engines, [prompt], given.tokens, given.rounds, totals)
            keep(part, found)
    else:
        mix = [*REPEATING.values(), *PLAIN.values()]
        order = [mix[index // 2 + (index % 2) * len(REPEATING)] for index in range(len(mix))]  # each kind in turn
        for batch in map(int, given.batches.split(",")):
            groups = [order[first : first + batch] for first in range(0, len(order), batch)] if batch < 8 else []
            groups = groups or [[order[index % len(order)] for index in range(batch)]]
            lines = [compare(engines, group, given.tokens, given.rounds, totals) for group in groups]
            total = sum(1 / line["tokens_per_second_off"] for line in lines)
            with_drafts = sum(1 / line["tokens_per_second_off"] / line["speedup"] for line in lines)
            found[f"batch {batch}"] = {
                "speedup": round(total / with_drafts, 3), "least": min(line["least"] for line in lines),
                "most": max(line["most"] for line in lines),
                "tokens_per_second_off": round(len(lines) / total, 1),
                "tokens_per_step": round(sum(line["tokens_per_step"] for line in lines) / len(lines), 2),
                "drafted": sum(line["drafted"] for line in lines), "accepted": sum(line["accepted"] for line in lines),
            }  # fmt: skip
            print(f"batch {batch}", found[f"batch {batch}"], flush=True)
            keep(part, {f"batch {batch}": found[f"batch {batch}"]})
    for llm in engines.values():
        llm.close()
    show()


if __name__ == "__main__":
    main()
