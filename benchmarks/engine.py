"""The whole engine against llama-cpp-python on the same file, in the same run, taking turns.

    pip install '.[peers]' && python benchmarks/engine.py [--model FILE.gguf] [--rounds 3] [--json]

Per round, ours then theirs: tokens/s at 1, 8 and 32 sequences, and seconds to the first token of a 512-token prompt.
Medians over rounds, and the ratio pair by pair, because a shared machine drifts. The peer decodes one sequence through
its Python API; its server's batching is not part of that API, so its 8 and 32 are one after another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from headway import LLM, SamplingParams
from headway.engine.machine import usable_cores
from headway.model.source import DEFAULT_MODEL, resolve

SEQUENCES = (1, 8, 32)
NEW_TOKENS = 64
PROMPT_TOKENS = 32
LONG_PROMPT = 512

Figures = dict[str, float]  # tokens/s by number of sequences, and "ttft" in seconds


def prompt(number: int, length: int) -> list[int]:
    """Ids that share nothing with other prompts."""
    return [1000 + (number * 7919 + position * 104729) % 40000 for position in range(length)]


def ours(llm: LLM, salt: int) -> Figures:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    figures = {}
    for count in SEQUENCES:
        done = llm.generate([prompt(salt + number, PROMPT_TOKENS) for number in range(count)], params)
        choices = [completion.choices[0] for completion in done]
        begin, end = max(one.token_times[0] for one in choices), max(one.token_times[-1] for one in choices)
        figures[str(count)] = count * (NEW_TOKENS - 1) / (end - begin)
    (long,) = llm.generate([prompt(salt + 99, LONG_PROMPT)], SamplingParams(temperature=0, max_tokens=1))
    figures["ttft"] = long.choices[0].ttft or float("nan")
    return figures


def peer(model: str, threads: int) -> Callable[[int], Figures] | None:
    """llama-cpp-python's figures by salt; None if it is not installed."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    llama = Llama(model, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False)

    def decode(tokens: list[int], count: int) -> tuple[float, float]:
        """Seconds to the first of `count` tokens, and from there to the last."""
        llama.reset()
        times, begin = [], time.perf_counter()
        for _, _ in zip(llama.generate(tokens, temp=0.0), range(count), strict=False):
            times.append(time.perf_counter())
        return times[0] - begin, times[-1] - times[0]

    def figures(salt: int) -> Figures:
        made = {}
        for sequences in SEQUENCES:
            seconds = sum(decode(prompt(salt + n, PROMPT_TOKENS), NEW_TOKENS)[1] for n in range(sequences))
            made[str(sequences)] = sequences * (NEW_TOKENS - 1) / seconds
        made["ttft"] = decode(prompt(salt + 99, LONG_PROMPT), 1)[0]
        return made

    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    threads = usable_cores()
    theirs = peer(str(resolve(args.model)), threads)
    rounds: list[tuple[Figures, Figures | None]] = []
    with LLM(args.model, backend=args.backend, max_model_len=1024, max_rows=32) as llm:
        ours(llm, 0)  # warm-up
        for number in range(args.rounds):
            salt = 1000 * (number + 1)
            rounds.append((ours(llm, salt), theirs(salt) if theirs else None))
    report = [row(name, rounds) for name in (*map(str, SEQUENCES), "ttft")]
    if args.json:
        print(json.dumps({"threads": threads, "backend": args.backend, "rows": report}))
        return
    print(f"{'':<24}{'headway':>12}{'llama.cpp':>12}{'ratio':>8}")
    for one in report:
        theirs_text = "-" if one["peer"] is None else f"{one['peer']:.3g}"
        ratio_text = "-" if one["ratio"] is None else f"{one['ratio']:.2f}"
        print(f"{one['what']:<24}{one['ours']:>12.3g}{theirs_text:>12}{ratio_text:>8}")


def row(name: str, rounds: list[tuple[Figures, Figures | None]]) -> dict[str, float | str | None]:
    """Medians, and the median ratio, above 1 when we are ahead."""
    higher_is_better = name != "ttft"
    mine = [one[name] for one, _ in rounds]
    others = [other[name] for _, other in rounds if other]
    ratios = [a / b if higher_is_better else b / a for a, b in zip(mine, others, strict=False)]
    return {
        "what": f"tokens/s, {name} sequences" if higher_is_better else f"TTFT of {LONG_PROMPT}, s",
        "ours": statistics.median(mine),
        "peer": statistics.median(others) if others else None,
        "ratio": statistics.median(ratios) if ratios else None,
    }


if __name__ == "__main__":
    main()
