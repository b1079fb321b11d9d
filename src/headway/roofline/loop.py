"""Time per output token and time to first token of a closed loop, from physical quantities and named constants.

A replica with `c` requests in flight alternates steps that only decode with steps that also compute a piece of some
new prompt. Every request needs one prompt per `output` tokens, so over one request's life the other c - 1 put
(c - 1) * prompt / output prompt tokens beside each of its steps: that interference, not the bare decode step, is what
separates a textbook figure from a measured one. With f the share of a request's life spent decoding:

    b     = 1 + (c - 1) f                      requests decoding in a step (never more than the cache holds)
    q     = interference (c - 1) f prompt/output        prompt tokens per step
    phi   = min(1, q / chunk)                  share of steps that carry a chunk
    decode = matmuls(b) + cache reads + all-reduce + launches + host
    mixed  = matmuls(b + q/phi) + cache reads + prompt attention + ...      the chunk shares the weights' read
    apart  = decode + the chunk computed by itself                          engines that do not mix
    TPOT  = (1 - phi) decode + phi (overlap of mixed and apart)

TTFT = own prompt + waiting for a step, for other prompts, for the opening burst of the run, and for cache room.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headway.roofline.deployment import Columns

CHUNK = 8192.0  # prompt tokens per step: the default budget of all three engines on these devices
ROUNDS = 3  # of the fixed point between the decoding share f and the times it depends on


class Loop:
    """Evaluates one set of quantities under one set of constants (both columns of equal length)."""

    def __init__(self, q: Columns, k: Mapping[str, np.ndarray]) -> None:
        self.q, self.k = q, k
        parallel = q["gpus"] > 1
        self.n = q["gpus"]
        self.split = np.where((q["attention_dp"] > 1) | (q["expert_parallel"] > 1), self.n, 1.0)
        self.reduces = np.where(parallel, 2 * q["layers"], 0.0)
        self.hop = self.reduces * k["hop"] * (1 + k["hop_growth"] * np.log2(self.n))
        self.wire = self.reduces * 2 * (self.n - 1) / self.n * q["width"] * 2 / (q["link"] * k["link"])  # per token
        self.fixed = q["layers"] * k["layer"] + q["moe_layers"] * k["moe_layer"] + k["step"]

    def matmuls(self, tokens: np.ndarray, rows: np.ndarray | float) -> np.ndarray:
        """Seconds of every matrix of one step; `rows` of its tokens get logits."""
        q, k = self.q, self.k
        read = q["body_bytes"] / (q["bandwidth"] * k["stream"])
        work = 2 * (tokens * q["body_params"] / q["body_peak"] + rows * q["head_params"] / q["peak16"])
        body = soft_max(read, work / self.n / k["linear"], k["sharpness"])
        return body + np.where(q["experts"] > 1, self.routed(tokens), 0.0)

    def routed(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of the routed experts: touched experts are read (B8), and each is computed in whole tiles."""
        q, k = self.q, self.k
        one = np.minimum(q["active"] / q["experts"], 1 - 1e-12)  # share of the experts a single token touches
        touched = np.maximum(one, 1 - (1 - one) ** (tokens * k["spread"]))
        read = (q["expert_bytes"] * touched + 1) / (q["bandwidth"] * k["stream_experts"])
        padded = tokens * q["active"] / q["experts"] + touched * k["tile"]  # rows per expert, all experts
        work = 2 * padded * q["expert_params"] / q["expert_peak"] / self.n / k["expert_linear"]
        product = soft_max(read, work + 1e-12, k["expert_sharpness"])
        product = product * np.where(q["expert_parallel"] > 1, k["imbalance"], 1.0)
        moved = q["moe_layers"] * tokens * q["active"] * q["width"] * 2 / self.split  # bytes, one pass
        return product + moved * k["permute"] / q["bandwidth"]

    def reduce(self, tokens: np.ndarray) -> np.ndarray:
        """Two all-reduces a layer (B7); data-parallel attention exchanges only its own tokens, out and back."""
        share = np.where(self.q["attention_dp"] > 1, 2 / self.n, 1.0)
        return self.hop + self.wire * tokens * share

    def prompt_attention(self, tokens: np.ndarray) -> np.ndarray:
        return tokens * self.q["prefill_flops"] / (self.q["peak16"] * self.k["prefill_attention"])

    def solve(self) -> Columns:
        """Columns of seconds: `tpot`, `ttft`, the terms of a decode step, and the loop's state (`batch`, `held`)."""
        q, k = self.q, self.k
        prompt, output = q["prompt"], q["output"]
        held = np.minimum(q["concurrency"], q["capacity"])  # the rest waits for cache room
        chunk = np.minimum(prompt, CHUNK)
        eager = q["layers"] * k["eager"]  # a step with prompt tokens is launched kernel by kernel
        alone = self.matmuls(chunk, 1.0) + self.prompt_attention(chunk) + self.reduce(chunk) + self.fixed
        own = np.maximum(1, prompt / CHUNK) * soft_max(alone, eager, k["sharpness"])
        mixing = k["overlap"] / (1 + k["overlap"])
        share = np.ones_like(held)
        for _ in range(ROUNDS):
            batch = 1 + (held - 1) * share
            per_rank = np.maximum(batch / q["attention_dp"], 1)
            read = per_rank * q["cache_read"] / (q["bandwidth"] * k["stream_cache"])
            attend = per_rank * q["decode_flops"] / (q["peak16"] * k["attention"])
            cache = np.maximum(read, attend)
            rows = per_rank * k["row"]
            matmuls = self.matmuls(batch, batch)
            decode = matmuls + cache + self.reduce(batch) + self.fixed + rows
            arriving = k["interference"] * (held - 1) * share * prompt / output
            phi = np.minimum(1.0, arriving / chunk)
            piece = arriving / np.maximum(phi, 1e-9)
            work = self.matmuls(batch + piece, batch) + cache + self.prompt_attention(piece)
            mixed = soft_max(work + self.reduce(batch + piece) + self.fixed, eager, k["sharpness"]) + rows
            piece_alone = self.matmuls(piece, 1.0) + self.prompt_attention(piece) + self.reduce(piece) + self.fixed
            apart = decode + soft_max(piece_alone, eager, k["sharpness"])
            extra = phi * (mixing * mixed + (1 - mixing) * apart - decode) * (q["disaggregated"] == 0)
            tpot = decode + extra
            share = np.where(q["disaggregated"] > 0, 1.0, output * tpot / (output * tpot + own + decode))
        tpot = tpot * np.exp(-k["speculation"] * q["unrecorded"])
        ttft = self.first_token(own, decode, tpot, held)
        return {
            "tpot": tpot, "ttft": ttft, "batch": batch, "held": held, "decode": decode, "matmuls": matmuls,
            "cache": cache, "all_reduce": self.reduce(batch), "launch": self.fixed - k["step"],
            "host": k["step"] + rows, "prompts": extra,
        }  # fmt: skip

    def first_token(self, own: np.ndarray, decode: np.ndarray, tpot: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Own prompt, its share of the queue of prompts, the opening burst, the wait for cache room, the front end."""
        q, k = self.q, self.k
        life = q["output"] * tpot
        busy = np.minimum(held * own / (life + own), 0.95)
        queue = k["queue"] * own * busy / (2 * (1 - busy))
        burst = k["burst"] * (held - 1) * own / 2
        room = (q["concurrency"] - held) / held * life * k["admission"]
        return k["front"] + k["front_row"] * held + (1 + k["prompt_extra"]) * own + queue + burst + room + decode


def soft_max(a: np.ndarray, b: np.ndarray, sharpness: np.ndarray) -> np.ndarray:
    """Both rooflines at once: the larger where they differ, above both where they meet (no perfect overlap)."""
    return (a**sharpness + b**sharpness) ** (1 / sharpness)
