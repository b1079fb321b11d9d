"""`headway plan audit FILE.csv`: which published speed claims break physics.

A claim is read leniently (many column names) and judged severely in its own favour: the fewest bytes its format can
have, all GPUs' bandwidth added up, the dense peak of the fastest format. What is still impossible is flagged, with the
likeliest explanation. A claim that cannot be checked is counted, with the reason, and never called fine.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers_lists import Audit, Claim
from headway.roofline.hardware import Hardware, find_hardware
from headway.roofline.utilisation import mbu, mfu
from headway.shape.catalogue import find_model, model_config
from headway.shape.formats import asked_for, known_format

COLUMNS = {  # what we need -> names it goes by
    "hardware": ("gpu", "hardware", "device", "system"), "gpus": ("gpu_count", "n_gpus", "gpus", "tp_size"),
    "model": ("model", "model_path"), "total_b": ("params_b", "parameters_b"), "active_b": ("active_b",),
    "quant": ("quant", "precision", "quantization"),
    "batch": ("batch", "batch_or_concurrency", "concurrency", "batch_size"),
    "input": ("prompt_tokens", "input_len", "isl"), "output": ("output_tokens", "output_len", "osl"),
    "tok_s": ("tok_s_out", "output_tok_s_total", "tokens_per_second", "tok_s"),
    "prefill": ("tok_s_prefill", "prefill_tok_s"), "ttft_ms": ("ttft_ms", "silicon_ttft_ms"),
    "tpot_ms": ("tpot_ms", "silicon_tpot_ms"), "engine": ("engine", "backend"), "peak": ("peak_tflops",),
}  # fmt: skip
SPARSE = 1.9  # a peak this many times the dense one is the 2:4-sparse figure
MOST_DRAFTS = 8  # tokens per step beyond which speculation is no explanation


def audit(file: Path) -> Audit:
    """Judge every row of a CSV of claims.

    Raises:
        BadInput: no such file, no header, or none of the columns a check needs.
    """
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened)
            names = reader.fieldnames or []
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput("FILE", f"cannot read {file}: {error}") from None
    for needed in ("hardware", "tok_s"):
        if not any(name in names for name in COLUMNS[needed]) and not (
            "tpot_ms" in names or "silicon_tpot_ms" in names
        ):
            accepted = ", ".join(COLUMNS[needed])
            raise BadInput("FILE", f"{file} has no column for {needed}; accepted: {accepted}")
    claims = [judge(number, row) for number, row in enumerate(rows, start=2)]
    flagged = [claim for claim in claims if claim.flags]
    return Audit(
        file=str(file), rows=len(claims), checked=sum(1 for claim in claims if not claim.unchecked),
        flagged=len(flagged), unchecked=dict(Counter(claim.unchecked for claim in claims if claim.unchecked)),
        claims=flagged, doubted=[claim for claim in claims if claim.doubt],
    )  # fmt: skip


def judge(number: int, row: Mapping[str, str]) -> Claim:
    """The verdict on one row (`number`: its line in the file)."""
    text = {key: next((row[name] for name in names if row.get(name)), "") for key, names in COLUMNS.items()}
    model, hardware = text["model"], text["hardware"]

    def verdict(flags: list[str], why: str = "", read: float | None = None, work: float | None = None) -> Claim:
        return Claim(number, model, hardware, read, work, tuple(flags), why)

    values = {key: _number(text[key]) for key in ("tok_s", "tpot_ms", "ttft_ms", "prefill", "input", "output", "peak")}
    negative = [key for key, value in values.items() if value is not None and value < 0]
    if negative:
        return verdict([f"{negative[0]} is negative"])
    try:
        device = find_hardware(re.sub(r"^\d+x", "", hardware.strip())) if hardware else None
    except BadInput:
        device = None
    if device is None:
        return verdict([], f"device {hardware!r} is not catalogued" if hardware else "no device named")
    size = _active(text)
    if size is None:
        return verdict([], "neither a size nor a catalogued model")
    width = fewest_bytes(text["quant"])
    if width is None:
        return verdict([], f"format {text['quant']!r} is not known" if text["quant"] else "no number format named")
    gpus, batch = int(_number(text["gpus"]) or 1), _number(text["batch"])
    if values["tok_s"] and not batch and not values["tpot_ms"]:
        return verdict([], "a throughput without a batch size")
    speculating = any(str(row.get(key, "")).lower() in ("true", "1", "yes") for key in ("spec", "mtp"))
    if values["tok_s"] is None and not values["tpot_ms"]:
        return verdict([], "no decode speed")
    flags = _peak_flags(device, values["peak"])
    flags += _consistency(values, batch, speculating) if batch else []
    read = _decode_mbu(values, batch, size * width, gpus * device.bandwidth)
    flags += _bandwidth_flags(read, batch, speculating)
    work = _worst_mfu(values, size, gpus, device)
    if work is not None and work > 1:
        sparse = "; it fits the 2:4-sparse figure only" if work <= 2 else ""
        flags.append(f"arithmetic at {work:.2f} times the dense peak (MFU > 1){sparse}")
    found = msgspec.structs.replace(verdict(flags, "", read, work), doubt=_doubt(device, gpus, _total(text), width))
    beyond = max(read / MOST_DRAFTS if speculating else read, work or 0.0)
    if not flags or beyond <= 1:
        return found
    claimed = values["tok_s"] or (batch or 1.0) * 1e3 / (values["tpot_ms"] or 1.0)
    return msgspec.structs.replace(found, claimed=claimed, possible=claimed / beyond)


def _decode_mbu(values: Mapping[str, float | None], batch: float | None, weights: float, bandwidth: float) -> float:
    """Share of the bandwidth that reading the active weights once per step takes."""
    steps = (values["tok_s"] or 0.0) / batch if batch else 0.0
    if values["tpot_ms"]:
        steps = max(steps, 1e3 / values["tpot_ms"])
    return mbu(weights, 1.0 / steps, bandwidth) if steps else 0.0


def _bandwidth_flags(read: float, batch: float | None, speculating: bool) -> list[str]:
    if read <= 1:
        return []
    if speculating:
        if read <= MOST_DRAFTS:
            return []
        return [f"needs {read:.1f} tokens per step even at full bandwidth (MBU {read:.2f}); drafts do not reach that"]
    guess = f"; possible only with speculation of {read:.1f} tokens per step or more, which the row denies"
    return [f"weights read at {read:.2f} times the memory bandwidth (MBU > 1){guess if batch == 1 else ''}"]


def _worst_mfu(values: Mapping[str, float | None], size: float, gpus: int, device: Hardware) -> float | None:
    """Highest share of the fastest dense peak that prefill or decode would need."""
    if not device.peaks:
        return None
    peak = gpus * max(device.peaks.values())
    rates = [rate for rate in (values["prefill"], values["tok_s"]) if rate]
    return max((mfu(2.0 * size, 1.0 / rate, peak) for rate in rates), default=None)


def _peak_flags(device: Hardware, claimed: float | None) -> list[str]:
    """A claimed peak that is the sparse figure of some format."""
    if claimed is None or not device.peaks:
        return []
    dense = max(peak for peak in device.peaks.values())
    if claimed * 1e12 >= SPARSE * dense:
        return [f"peak of {claimed:g} TFLOP/s is the sparse figure; the dense one is {dense / 1e12:g}"]
    return []


def _doubt(device: Hardware, gpus: int, total: float | None, width: float) -> str:
    """Weights that the devices cannot hold: no contradiction, for engines keep parts elsewhere; but then the figure is
    not this device's. A CPU's memory has any size."""
    need, most = (total or 0.0) * width, gpus * device.memory
    if device.kind == "cpu" or need <= most:
        return ""
    return f"does not fit: {need / 1e9:.0f} GB of weights in {most / 1e9:.0f} GB"


def _consistency(values: Mapping[str, float | None], batch: float, speculating: bool) -> list[str]:
    """Throughput that contradicts the row's own latencies; off by (in + out) / out: prompts were counted as output."""
    rate, tpot, output = values["tok_s"], values["tpot_ms"], values["output"]
    if not (rate and tpot and output) or speculating:
        return []
    seconds = (values["ttft_ms"] or 0.0) / 1e3 + output * tpot / 1e3
    implied = batch * output / seconds
    excess = rate / implied
    if excess <= 1.15:
        return []
    both = (output + (values["input"] or 0.0)) / output
    if abs(excess / both - 1) < 0.15 and both > 1.15:
        return [f"throughput is {excess:.2f} times what its latencies give: prompt and output tokens were both counted"]
    return [f"throughput is {excess:.2f} times what its own TTFT and TPOT give at batch {batch:g}"]


def _active(text: Mapping[str, str]) -> float | None:
    """Parameters read per token: of the catalogued model, else as stated."""
    if text["model"] and model_config(text["model"]) is not None:
        return find_model(text["model"]).n_body
    return _stated(_number(text["active_b"]) or _number(text["total_b"]))


def _total(text: Mapping[str, str]) -> float | None:
    """All parameters, in the same way."""
    if text["model"] and model_config(text["model"]) is not None:
        return find_model(text["model"]).n_params
    return _stated(_number(text["total_b"]))


def _stated(billions: float | None) -> float | None:
    """A whole number of billions was rounded, so half a billion less is assumed."""
    if billions is None or billions <= 0:
        return None
    return (billions - 0.5 if billions == int(billions) and billions > 1 else billions) * 1e9


def fewest_bytes(quant: str) -> float | None:
    """The fewest bytes per weight a named format can have; None if the name says nothing."""
    name = quant.strip().lower().removeprefix("ud-").replace("-", "_")
    base = re.match(r"(i?q[1-8]_(?:k|nl|xs|xxs|[01sm]))", name)
    if base:
        kind = {"iq2_m": "iq2_s", "iq3_m": "iq3_s"}.get(base[1], base[1])
        format = known_format(kind)
        return format.width if format else None
    format = asked_for(name)
    return format.nominal if format else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None
