"""A run as one OpenTelemetry trace, by the GenAI semantic conventions (status "development"), made from its ledger.

    invoke_workflow RUN
      invoke_agent orchestrator
        chat MODEL, create_agent NAME, execute_tool search ...
        execute_tool assign_task
          invoke_agent NAME
            chat MODEL, execute_tool ...

Token counts of an agent's span are those of its own model calls; the totals are on no span, so a backend that adds up
leaves counts each token once. Texts of messages and tools are left out unless asked for. Ids are hashes of the run's,
so exporting again gives the same trace.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

from ..config import TriScaleError, require
from .ledger import MAIN, Ledger
from .metrics import Paths

BATCH = 512  # spans of one request
_AGENT, _TOOL = "gen_ai.agent.", "gen_ai.tool."


def export_trace(ledger: Ledger, exporter: Any = None, *, content: bool = False) -> str:
    """Send the run's spans to ``exporter`` and return the trace id (32 hex digits).

    exporter: an OpenTelemetry ``SpanExporter``; None makes the OTLP/HTTP one, which reads the standard
    ``OTEL_EXPORTER_OTLP_*`` variables. content: include prompts, answers and tool texts. Raises
    :class:`TriScaleError` when the exporter reports failure.
    """
    return _Trace(ledger, exporter or _otlp(), content).send()


def _otlp() -> Any:
    module = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel", "the OpenTelemetry export")
    return module.OTLPSpanExporter()


class _Trace:
    def __init__(self, ledger: Ledger, exporter: Any, content: bool):
        self.sdk = require("opentelemetry.sdk.trace", "otel", "the OpenTelemetry export")
        self.api = require("opentelemetry.trace", "otel", "the OpenTelemetry export")
        resources = require("opentelemetry.sdk.resources", "otel", "the OpenTelemetry export")
        self.ledger, self.exporter, self.content = ledger, exporter, content
        self.run = ledger.run
        self.finished: list[Any] = []
        self.ids = self._id_generator(f"{self.run['name']} {self.run['started']}")
        resource = resources.Resource.create({"service.name": "triscale"})
        provider = self.sdk.TracerProvider(resource=resource, id_generator=self.ids, shutdown_on_exit=False)
        self.tracer = provider.get_tracer("triscale.swarm")
        self.paths = Paths(ledger)
        self.costs = {row["agent"]: row for row in ledger.rows("SELECT * FROM agent_cost")}

    def _id_generator(self, run: str) -> Any:
        class Ids(self.sdk.IdGenerator):  # type: ignore[misc,name-defined]
            key = ""

            def generate_trace_id(self) -> int:
                return int.from_bytes(hashlib.sha256(run.encode()).digest()[:16], "big") or 1

            def generate_span_id(self) -> int:
                return int.from_bytes(hashlib.sha256(f"{run} {self.key}".encode()).digest()[:8], "big") or 1

        return Ids()

    def send(self) -> str:
        run = self.run
        root = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": run["name"],
                "triscale.swarm.mode": run["mode"], "triscale.swarm.sessions": run["sessions"],
                "triscale.swarm.critical_steps": self.paths.critical_steps(MAIN, "turns")}  # fmt: skip
        with self._span("run", f"invoke_workflow {run['name']}", run["started"], run["ended"], root, run["outcome"]):
            self._agent(MAIN)
        batches = [self.finished[i : i + BATCH] for i in range(0, len(self.finished), BATCH)]
        sent = [self.exporter.export(batch) for batch in batches]
        self.exporter.shutdown()
        if any(getattr(result, "name", "SUCCESS") != "SUCCESS" for result in sent):
            raise TriScaleError("the OpenTelemetry exporter reported a failure; is a collector listening at the "
                                "address in OTEL_EXPORTER_OTLP_ENDPOINT?")  # fmt: skip
        return f"{self.ids.generate_trace_id():032x}"

    @contextlib.contextmanager
    def _span(
        self, key: str, name: str, start: float, end: float | None, attributes: dict[str, Any], outcome: str | None,
        kind: str = "INTERNAL",
    ):  # fmt: skip
        """One span around whatever is made inside; an end that is missing is the run's end."""
        self.ids.key = key
        values = {k: v for k, v in attributes.items() if v is not None}
        span = self.tracer.start_span(
            name, start_time=_ns(start), attributes=values, kind=getattr(self.api.SpanKind, kind)
        )
        with self.api.use_span(span, end_on_exit=False):
            yield span
        if outcome not in ("completed", None):
            span.set_attribute("error.type", str(outcome))
            span.set_status(self.api.Status(self.api.StatusCode.ERROR, str(outcome)))
        span.end(_ns(end if end is not None else self.run["ended"]))
        self.finished.append(span)

    def _agent(self, id: str) -> None:
        task = self.ledger.one("SELECT * FROM task WHERE id = ?", (id,))
        own, name = self.costs.get(id), "orchestrator" if id == MAIN else task["agent"]
        attributes = {"gen_ai.operation.name": "invoke_agent", _AGENT + "id": id, _AGENT + "name": name,
                      "gen_ai.conversation.id": id, "triscale.swarm.queue_seconds": task["queue_seconds"],
                      "triscale.swarm.steps": task["steps"], "triscale.swarm.outcome": task["outcome"],
                      "gen_ai.usage.input_tokens": own["tokens_in"] if own else 0,
                      "gen_ai.usage.output_tokens": own["tokens_out"] if own else 0}  # fmt: skip
        if self.content:
            attributes["gen_ai.input.messages"] = json.dumps([_text("user", task["prompt"])])
            attributes["gen_ai.output.messages"] = json.dumps([_text("assistant", task["result"])])
        start = task["started"] if task["started"] is not None else task["assigned"]
        with self._span(f"agent {id}", f"invoke_agent {name}", start, task["ended"], attributes, task["outcome"]):
            for call in self.ledger.rows("SELECT * FROM model_call WHERE agent = ? ORDER BY step", (id,)):
                self._chat(call)
                query = "SELECT * FROM tool_call WHERE agent = ? AND step = ? ORDER BY place"
                for tool in self.ledger.rows(query, (id, call["step"])):
                    self._tool(tool)

    def _chat(self, call: dict[str, Any]) -> None:
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
                      "gen_ai.request.model": call["model"], "gen_ai.usage.input_tokens": call["tokens_in"],
                      "gen_ai.usage.output_tokens": call["tokens_out"],
                      "gen_ai.usage.cache_read.input_tokens": call["tokens_cached"],
                      "triscale.swarm.attempts": call["attempts"], "triscale.swarm.cost": call["cost"]}  # fmt: skip
        if call["finish_reason"]:
            attributes["gen_ai.response.finish_reasons"] = [call["finish_reason"]]
        if self.content and call["content"]:
            attributes["gen_ai.output.messages"] = json.dumps([_text("assistant", call["content"])])
        name = f"chat {call['model'] or 'model'}"
        with self._span(call["id"], name, call["started"], call["ended"], attributes, call["outcome"], "CLIENT"):
            pass

    def _tool(self, tool: dict[str, Any]) -> None:
        if tool["name"] == "create_subagent":
            name = _argument(tool["arguments"], "name")
            attributes = {"gen_ai.operation.name": "create_agent", _AGENT + "name": name}
            with self._span(
                tool["id"], f"create_agent {name}", tool["started"], tool["ended"], attributes, tool["outcome"]
            ):
                return
        attributes = {"gen_ai.operation.name": "execute_tool", _TOOL + "name": tool["name"], _TOOL + "type": "function",
                      _TOOL + "call.id": tool["tool_call_id"]}  # fmt: skip
        if self.content:
            attributes |= {_TOOL + "call.arguments": tool["arguments"], _TOOL + "call.result": tool["content"]}
        outcome, child = tool["outcome"], self.ledger.rows("SELECT id FROM task WHERE call = ?", (tool["id"],))
        with self._span(
            tool["id"], f"execute_tool {tool['name']}", tool["started"], tool["ended"], attributes, outcome
        ):
            if child:
                self._agent(child[0]["id"])


def _ns(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # a virtual clock starts at 0, which exporters take for "not set"


def _text(role: str, text: str | None) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text or ""}]}


def _argument(arguments: str | None, name: str) -> str:
    try:
        return str(json.loads(arguments or "{}").get(name, ""))
    except (ValueError, AttributeError):
        return ""
