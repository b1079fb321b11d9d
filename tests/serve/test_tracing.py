"""OpenTelemetry: the spans that a collector gets, which go on from the caller's trace."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.serve.tracing import Tracer
from tests.serve.conftest import Server

proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
Start = Callable[..., Server]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP, and keeps spans by name."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                for resource in proto.ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans |= {span.name: span for span in scope.spans}
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.server.shutdown()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_span_per_request_goes_on_from_the_callers_trace(start: Start, collector: Collector) -> None:
    server = start(otlp_traces_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine-1"}
    chat = {"messages": [{"role": "user", "content": "say:hello"}], "max_tokens": 9, "temperature": 0.5, "stop": "!"}
    begin = time.time_ns()
    answer = server.post("/v1/chat/completions", chat, headers=headers).json()
    stream = {"prompt": "say:hi", "max_tokens": 3, "stream": True}
    assert server.post("/v1/completions", stream).text.endswith("[DONE]\n\n")
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 10**6}).status_code == 400
    assert server.stop() == 0, "what is left is sent before the server ends"
    span, other = collector.spans["chat scripted"], collector.spans["text_completion scripted"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert not other.parent_span_id and other.trace_id != span.trace_id
    told = attributes(span)
    usage = answer["usage"]
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == "scripted"
    assert told["gen_ai.response.id"] == answer["id"] and told["headway.request_id"] == "mine-1"
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.request.max_tokens"] == 9 and told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.request.stop_sequences"] == ["!"]
    assert told["gen_ai.response.finish_reasons"] == [answer["choices"][0]["finish_reason"]]
    assert attributes(other)["gen_ai.response.finish_reasons"] == ["stop"]
    names = [event.name for event in span.events]
    assert names == ["headway.queued", "headway.admitted", "headway.first_token", "headway.last_token"]
    times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano]
    assert times == sorted(times) and 0 <= span.start_time_unix_nano - begin < 30e9


def test_a_request_that_fails_says_why(start: Start, collector: Collector) -> None:
    server = start(otlp_traces_endpoint=collector.url, engine={"seconds": 0.05, "max_rows": 1})
    late = server.post("/v1/completions", {"prompt": "count", "max_tokens": 500}, headers={"x-request-timeout": "0.2"})
    assert late.status_code == 503
    server.stop()
    span = collector.spans["text_completion scripted"]
    assert span.status.code == 2 and attributes(span)["error.type"] == "deadline_exceeded"


def test_without_it_nothing_of_opentelemetry_is_imported_and_what_is_no_url_is_refused() -> None:
    code = "import sys, headway.serve.lifecycle; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    with pytest.raises(BadInput, match="--otlp-traces-endpoint: 'localhost:4317' is no URL"):
        Tracer("localhost:4317")


def test_a_collector_that_is_away_costs_nothing_but_spans(start: Start) -> None:
    server = start(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    assert server.post("/v1/completions", {"prompt": "say:hi", "max_tokens": 2}).status_code == 200
    assert server.stop() == 0
