"""OpenTelemetry: one span per generating request, from its body to its last byte, sent on by OTLP over HTTP.

Names are those of the semantic conventions for generative AI (gen_ai.*, 2026-08); the span goes on from the caller's
`traceparent` (W3C). Spans are written when a request has ended, from the times it has anyway: nothing is measured
twice, and a server without `--otlp-traces-endpoint` imports none of this.
"""

from __future__ import annotations

import time
from typing import Any

from headway.core.errors import BadInput
from headway.engine.machine import wall_clock
from headway.serve.answer import Answer
from headway.serve.auth import Headers, header
from headway.serve.errors import ApiError

FLAG = "--otlp-traces-endpoint"
PS_PER_NS = 1000
SEND_SECONDS, FLUSH_MS = 2.0, 3000  # a server that ends does not wait long for its last spans
CARRIERS = ("traceparent", "tracestate")
SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


class Tracer:
    """Writes spans.

    Args:
        endpoint: URL that takes OTLP/HTTP, such as http://127.0.0.1:4318/v1/traces.

    Raises:
        BadInput: it is no URL, or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise BadInput(FLAG, f"{endpoint[:80]!r} is no URL such as http://127.0.0.1:4318/v1/traces")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise BadInput(FLAG, "needs OpenTelemetry: pip install 'headway[otel]'") from None
        self._kind, self._failed = SpanKind.SERVER, lambda why: Status(StatusCode.ERROR, why)
        self._context = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "headway"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=SEND_SECONDS)))
        self._tracer = self._provider.get_tracer("headway.serve")
        self._epoch = time.time_ns() - wall_clock().now() // PS_PER_NS  # of the engine's clock

    def write(self, answer: Answer, headers: Headers, request_id: str, error: BaseException | None = None) -> None:
        """The span of a request that has ended now.

        Args:
            headers: of the request.
            error: why it failed; None = it did not.
        """
        carried = {name: value.decode("latin-1") for name in CARRIERS if (value := header(headers, name.encode()))}
        span = self._tracer.start_span(
            f"{_operation(answer)} {answer.model}", self._context.extract(carried), self._kind,
            _attributes(answer) | {"headway.request_id": request_id},
            start_time=self._at(answer.arrival),
        )  # fmt: skip
        moments = {"queued": answer.arrival, "admitted": answer.admitted, "first_token": answer.first,
                   "last_token": answer.last}  # fmt: skip
        for name, moment in moments.items():
            if moment:
                span.add_event(f"headway.{name}", timestamp=self._at(moment))
        if error is not None:
            kind = error.code if isinstance(error, ApiError) and error.code else type(error).__name__
            span.set_attribute("error.type", kind)
            span.set_status(self._failed(str(error)))
        span.end()

    def close(self) -> None:
        """Send what is left, for a while."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _at(self, moment: int) -> int:
        """Unix nanoseconds of ps of the engine's clock."""
        return self._epoch + moment // PS_PER_NS


def _operation(answer: Answer) -> str:
    return "text_completion" if answer.query.messages is None else "chat"


def _attributes(answer: Answer) -> dict[str, Any]:
    params, prompts = answer.query.params, answer.prompts
    found: dict[str, Any] = {
        "gen_ai.operation.name": _operation(answer),
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": answer.model,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.id": answer.id,
        "gen_ai.request.choice.count": len(answer.choices),
        "gen_ai.request.stream": answer.query.stream,
        "gen_ai.usage.input_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "gen_ai.usage.output_tokens": answer.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(prompt.cached for prompt in prompts),
    }
    limits = {"max_tokens": answer.query.max_tokens} | {name: getattr(params, name) for name in SAMPLING}
    found |= {f"gen_ai.request.{name}": value for name, value in limits.items() if value is not None}
    if params.stop:
        found["gen_ai.request.stop_sequences"] = list(params.stop)
    reasons = [choice.finish.reason for choice in answer.choices if choice.finish is not None]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    for name, begin, end in (("queue", answer.arrival, answer.admitted), ("prefill", answer.admitted, answer.first),
                             ("decode", answer.first, answer.last)):  # fmt: skip
        if begin and end:
            found[f"headway.{name}_seconds"] = (end - begin) / 1e12
    return found
