"""A whole measurement: first contact, self-test, load, metrics.

models, prompt calibration -> self_test -> items -> run_load -> summarize (+ views, prediction, goodput)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headway.bench.client import BenchClient, Endpoint
from headway.bench.load import Progress, run_load
from headway.bench.options import Workload
from headway.bench.predict import predict
from headway.bench.recount import Recount, check_usage
from headway.bench.selftest import SelfTest, client_report, self_test
from headway.bench.server import ServerSide, metrics_between, read_log, scrape, server_report
from headway.bench.setup import BenchSetup
from headway.bench.transport import ExchangeFailed
from headway.bench.workload import Measure, WorkItem, check_prompts, measure_prompts, measure_texts
from headway.metrics import goodput
from headway.metrics.records import Failure, FailureKind, RequestRecord
from headway.metrics.run import Run
from headway.metrics.stability import stability_of
from headway.metrics.summary import messages, summarize
from headway.metrics.views import view
from headway.traffic.load import Load

SHORT_SHARE = 0.1  # of answers that end early: more is another workload
PASSING = (408, 429)  # statuses between 400 and 499 that another try may not get
CACHED_SHARE = 0.05  # of unique prompts


@dataclass
class Measurement:
    """Everything of one measurement: `summary` is the JSON, `run` has the records it was made from, `sides` the
    requests of the server's event log."""

    summary: dict[str, Any]
    run: Run
    endpoint: Endpoint
    sides: dict[str, ServerSide]
    unreachable: str = ""  # why nothing was sent: no connection could be made, or the first request was refused


@dataclass(frozen=True)
class Contact:
    """What the first contact told."""

    measure: Measure
    records: list[RequestRecord]
    warnings: list[str]
    seed: int

    @property
    def prompts(self) -> list[tuple[str, RequestRecord]]:
        """What was sent, and what came back."""
        return list(zip(measure_texts(self.seed), self.records, strict=False))

    @property
    def dead(self) -> Failure | None:
        """Why it makes no sense to go on: the endpoint does not answer at all, or refuses what it is asked."""
        last = self.records[-1]
        if last.failure is None or last.chunks:
            return None
        refused = 400 <= (last.status or 0) < 500 and last.status not in PASSING
        return last.failure if refused or last.failure.kind in (FailureKind.CONNECT, FailureKind.HUNG) else None


async def first_contact(client: BenchClient, seed: int) -> Contact:
    """Find the model's name if none was given, and learn how many tokens the endpoint makes of a word."""
    warnings = []
    if not client.model:
        try:
            client.model = await first_model(client)
        except (ExchangeFailed, ValueError) as error:
            client.model = "default"
            warnings.append(f'/v1/models gave no model name ({error}); asking for "default" (--model)')
    measure, records = await measure_prompts(client, seed)
    if not measure.known and records[-1].chunks:
        warnings.append(
            "the endpoint's prompt_tokens could not be calibrated; prompts are of one word per wanted token"
        )
    return Contact(measure, records, warnings, seed)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def first_model(client: BenchClient) -> str:
    """The first model the endpoint lists.

    Raises:
        ExchangeFailed, ValueError: no answer, or none that is a list of models.
    """
    status, body = await client.get(client.endpoint.path("/models"))
    if status != 200:
        raise ValueError(f"HTTP status {status}")
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.DecodeError:
        raise ValueError("not a list of models") from None
    if not models:
        raise ValueError("an empty list")
    return models[0].id


async def measure(
    setup: BenchSetup, announce: Callable[[str], None] = lambda _: None, progress: Progress | None = None
) -> Measurement:
    """Measure, predict, search: as far as asked for. The endpoint may fail in any way: the summary says how, and keeps
    what was measured.

    Raises:
        BadInput: what was asked for makes no sense (a missing file, an unknown host).
    """
    endpoint, load, workload = setup.endpoint, setup.load, setup.workload
    async with BenchClient(endpoint, setup.limits) as client:
        contact = await first_contact(client, workload.seed)
        client_test = await _announced_test(announce) if setup.test and contact.dead is None else None
        items = workload.items(contact.measure)
        before = await scrape(client) if contact.dead is None else None
        if contact.dead is not None:
            run = not_sent(load, items, contact)
        else:
            run = await run_load(client, load, items, workload.warmup, progress, keep_text=setup.recount is not None)
        after = await scrape(client) if before is not None else None
    summary = describe(setup, client.model, run, contact, client_test)
    if (distinct := len({id(item) for item in items})) < len(items):
        summary["warnings"].append(f"--dataset holds {distinct} requests; they were sent again to make {len(items)}")
    if load.kind != "closed" and contact.dead is None and not (kept_up := stability_of(run.records))["stable"]:
        summary["warnings"].append(kept_up["statement"])
    _check_usage(summary, run, items, contact, setup.recount)
    if before is not None and after is not None:
        summary["server"] = {"metrics": metrics_between(before, after)}
    sides: dict[str, ServerSide] = {}
    if setup.event_log is not None:
        sides, fault = read_log(setup.event_log)
        summary.setdefault("server", {})["events"] = server_report(run.records, sides)
        summary["warnings"] += [fault] if fault else []
    if setup.as_tool is not None:
        summary["as"] = view(setup.as_tool, run, endpoint.api)
    if setup.behind is not None:
        summary["prediction"] = predict(run, summary, setup.behind)
    if setup.search:
        summary["goodput"] = await search_goodput(setup, client.model, announce, progress)
    dead = contact.dead
    unreachable = dead.message if dead is not None and dead.kind is not FailureKind.HUNG else ""
    return Measurement(summary, run, endpoint, sides, unreachable)


def _check_usage(
    summary: dict[str, Any], run: Run, items: Sequence[WorkItem], contact: Contact, recount: Recount | None
) -> None:
    """Hold the endpoint's counts against what else can count; what is found is also a warning."""
    records = [record for record in run.records if not record.warmup]
    sent = zip(items, run.records, strict=True)
    texts = [(item.prompt, record) for item, record in sent if isinstance(item.prompt, str) and not record.warmup]
    summary["usage"] = check_usage(records, [*contact.prompts, *texts], contact.measure, recount)
    summary["warnings"] += summary["usage"]["findings"]
    for record in run.records:
        record.text = None  # counted; not kept


async def _announced_test(announce: Callable[[str], None]) -> SelfTest:
    found = await self_test()
    announce(
        f"client self-test: at least {found.ceiling:,.0f} streamed chunks/s; added time to first token "
        f"{found.added_p50_ms:.2f} ms p50, {found.added_p99_ms:.2f} ms p99 at 200 requests/s"
    )
    return found


def not_sent(load: Load, items: Sequence[WorkItem], contact: Contact) -> Run:
    """The run against an endpoint that did not answer the first contact: nothing is sent, everything failed."""
    assert contact.dead is not None
    records = [RequestRecord(index=i, intended=0, max_tokens=item.max_tokens) for i, item in enumerate(items)]
    records[0] = msgspec.structs.replace(contact.records[-1], index=0, warmup=False)  # its fate is the first request's
    for record in records[1:]:
        record.failure = Failure(FailureKind.NOT_SENT, f"not sent: the first contact failed: {contact.dead.message}")
    return Run(load, records, gave_up=f"the first contact failed: {contact.dead.message}")


def describe(setup: BenchSetup, model: str, run: Run, contact: Contact, test: SelfTest | None) -> dict[str, Any]:
    """The JSON object of a run."""
    measured = [record for record in run.records if not record.warmup]
    endpoint, workload = setup.endpoint, setup.workload
    summary: dict[str, Any] = {"url": endpoint.url, "api": endpoint.api, "model": model}
    summary |= summarize(run, setup.targets)
    summary["prompts"] = check_prompts(measured, contact.measure)
    summary["client"] = client_report(test, run)
    if "slo" in summary:
        seconds = summary["throughput"]["window_s"]
        good = summary["slo"]["good"] / seconds if seconds else None
        summary["goodput"] = goodput.single(summary["slo"], summary["load"].get("intended_rate"), good)
    warnings = list(contact.warnings)
    warnings += [f"first contact: {text}" for text in messages(contact.records).values()]
    if contact.dead is None and summary["prompts"]["verified"] is False:
        warnings.append(f"prompt lengths are not verified: {summary['prompts']['reason']}")
    if contact.dead is None and summary["load"].get("delivered") is False:
        warnings.append("the intended load was not delivered; see load")
    if any(record.completed and not record.usage_trusted for record in measured):
        warnings.append("some answers came without usage: their tokens are not counted (--count-chunks)")
    warnings += unexpected(measured, summary, workload, contact.measure)
    if endpoint.count_chunks:
        warnings.append("--count-chunks: where usage is missing, each chunk is taken for one token")
    summary["warnings"] = warnings
    summary["workload"] = {
        name: str(v) if isinstance(v, Path) else v for name, v in msgspec.structs.asdict(workload).items()
    }
    return summary


def unexpected(
    records: Sequence[RequestRecord], summary: dict[str, Any], workload: Workload, measure: Measure
) -> list[str]:
    """What makes a run one of another workload than the one that was asked for."""
    warnings = []
    answers = summary["answers"]
    if workload.dataset is None and answers["short"] > SHORT_SHARE * answers["counted"]:
        reasons = ", ".join(answers["finish_reasons"]) or "not told"
        warnings.append(
            f"{answers['short']} of {answers['counted']} answers are shorter than asked for (mean "
            f"{answers['mean']:.0f} of {answers['asked']:.0f} tokens; finish_reason {reasons}): throughput is of "
            "another workload; many servers make full answers with --extra '{\"ignore_eos\": true}'"
        )
    if workload.dataset is None and workload.trace is None and not workload.shared_prefix:
        done = [r for r in records if r.completed and r.prompt_tokens and r.cached_tokens is not None]
        cached = sum(max(0.0, (r.cached_tokens or 0) - measure.overhead) for r in done)
        share = cached / max(1, sum(r.prompt_tokens or 0 for r in done))
        if share > CACHED_SHARE:
            warnings.append(
                f"{share:.0%} of the prompt tokens came from the prefix cache though every prompt is new: this seed "
                "was sent before; leave --seed out"
            )
    return warnings


async def search_goodput(
    setup: BenchSetup, model: str, announce: Callable[[str], None], progress: Progress | None
) -> dict[str, Any]:
    """Search the goodput with this workload; a fifth of each batch is warm-up. See `goodput.search`."""
    workload, load, targets = setup.workload, setup.load, setup.targets
    assert targets is not None, "checked by BenchSetup"
    async with BenchClient(replace(setup.endpoint, model=model), setup.limits) as client:
        contact = await first_contact(client, workload.seed)
        if contact.dead is not None:
            return {"rate": None, "per_gpu": None, "searched": True, "trials": [], "reason": contact.dead.message}
        sent = 0

        async def batch(rate: float, requests: int, look: int) -> tuple[int, int]:
            nonlocal sent
            warmup = max(1, requests // 4)
            # Prompts unlike the run's before and every other batch's: repeating them would measure the prefix cache.
            sent += 1
            seed = workload.seed + sent
            fresh = msgspec.structs.replace(workload, requests=requests, warmup=warmup, seed=seed)
            shape = replace(load, rate=rate, seed=load.seed + sent)
            run = await run_load(client, shape, fresh.items(contact.measure), warmup, progress)
            counted = [record for record in run.records if not record.warmup]
            good = sum(targets.met_by(record) for record in counted)
            announce(
                f"goodput search: {rate:.3g} requests/s, look {look + 1}: {good} of {len(counted)} met all targets"
            )
            return good, len(counted)

        return await goodput.search(
            batch, load.rate, workload.requests, targets.attainment, setup.resolution, setup.gpus
        )
