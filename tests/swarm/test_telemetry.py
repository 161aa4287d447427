import pytest
from swarm_logs import Log, run_world

from triscale.config import TriScaleError
from triscale.swarm.telemetry import export_trace

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def spans_of(ledger, **options):
    exporter = memory.InMemorySpanExporter()
    trace = export_trace(ledger, exporter, **options)
    return trace, exporter.get_finished_spans()


def test_a_run_is_one_trace_in_the_shape_of_its_tree(tmp_path):
    _, result, ledger = run_world("wide:entities=3", tmp_path)
    trace, spans = spans_of(ledger)
    by_id = {s.context.span_id: s for s in spans}
    assert len(by_id) == len(spans) and {f"{s.context.trace_id:032x}" for s in spans} == {trace}
    roots = [s for s in spans if s.parent is None]
    assert [s.name for s in roots] == ["invoke_workflow " + ledger.run["name"]]

    def lineage(span):
        names = [span.name.split()[0]]
        while span.parent is not None:
            span = by_id[span.parent.span_id]
            names.append(span.name.split()[0])
        return names

    readers = [s for s in spans if s.name == "invoke_agent reader"]
    assert len(readers) == 3
    assert all(lineage(s) == ["invoke_agent", "execute_tool", "invoke_agent", "invoke_workflow"] for s in readers)
    chats = [s for s in spans if s.name.startswith("chat ")]
    total = sum(s.attributes["gen_ai.usage.input_tokens"] for s in chats)
    assert total == result.usage.tokens_in, "leaves add up to the run"
    agents = [s for s in spans if s.name.startswith("invoke_agent")]
    assert sum(s.attributes["gen_ai.usage.input_tokens"] for s in agents) == result.usage.tokens_in
    for span in spans:
        if span.parent is not None:
            above = by_id[span.parent.span_id]
            assert above.start_time <= span.start_time <= span.end_time <= above.end_time
    assert [s.name for s in spans if s.name.startswith("create_agent")] == ["create_agent reader"]


def test_texts_are_left_out_unless_asked_for(tmp_path):
    world, _, ledger = run_world("wide:entities=2", tmp_path)
    secret = world.gold[0]["Director"]
    _, spans = spans_of(ledger)
    assert not any(secret in str(dict(s.attributes)) for s in spans)
    _, spans = spans_of(ledger, content=True)
    assert any(secret in str(dict(s.attributes)) for s in spans)


def test_exporting_again_gives_the_same_ids(tmp_path):
    _, _, ledger = run_world("wide:entities=2", tmp_path)
    ids = [[s.context.span_id for s in spans_of(ledger)[1]] for _ in range(2)]
    assert ids[0] == ids[1]


def test_failures_are_errors_and_unfinished_spans_end_with_the_run():
    log = Log().model("main", 1, calls=[("assign_task", "{}")]).add("tool.call", call="main#1.0", agent="main", step=1,
        index=0, name="assign_task", arguments="{}", tool_call_id="x").assign("t1.0", 1, 0).start("t1.0")  # fmt: skip
    log.model("t1.0", 1, outcome="timed_out").end("t1.0", "timed_out").at(9).add("warning", message="end")
    _, spans = spans_of(log.ledger())
    failed = {s.name: s.attributes.get("error.type") for s in spans}
    assert failed["invoke_agent a"] == "timed_out" and "ERROR" in str(next(s for s in spans if s.name == "chat m" and
           s.attributes.get("error.type")).status.status_code)  # fmt: skip
    assert next(s for s in spans if s.name == "invoke_agent orchestrator").end_time == 9_000_000_000


def test_a_collector_that_refuses_is_named(tmp_path):
    class Refusing(memory.InMemorySpanExporter):
        def export(self, spans):
            from opentelemetry.sdk.trace.export import SpanExportResult

            return SpanExportResult.FAILURE

    _, _, ledger = run_world("wide:entities=2", tmp_path)
    with pytest.raises(TriScaleError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
        export_trace(ledger, Refusing())


def test_the_wire_form_is_what_a_collector_reads(tmp_path, monkeypatch):
    """The OTLP exporter against a collector that decodes the request with OpenTelemetry's own protocol classes."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            import gzip

            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            received.append((self.path, service.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    _, _, ledger = run_world("wide:entities=2", tmp_path)
    trace = export_trace(ledger)
    server.shutdown()
    server.server_close()
    assert [path for path, _ in received] == ["/v1/traces"]
    spans = [s for _, r in received for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]
    assert {s.trace_id.hex() for s in spans} == {trace}
    assert len(spans) == len(spans_of(ledger)[1])
