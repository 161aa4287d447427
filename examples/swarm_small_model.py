"""A swarm whose sub-agents are a real small model, reading real documents: the manual pages of Python's own modules.

    python examples/serve_smollm2.py                                    # in another terminal
    python examples/swarm_small_model.py --out runs/small-model          # the orchestrator reads, sub-agents answer
    python examples/swarm_small_model.py --out runs/small-tools --tools  # the sub-agents must open the documents
    triscale swarm report runs/small-model

The orchestrator is a script, because a 135M model cannot plan. Each sub-agent names one thing that "its" module defines
and says what the module is for; the name is checked against the module itself.
"""

from __future__ import annotations

import argparse
import importlib
import pydoc
import re
from pathlib import Path

from triscale.swarm import clock
from triscale.swarm.client_http import HttpClient
from triscale.swarm.client_scripted import PolicyClient, act, call, say
from triscale.swarm.ledger import Ledger
from triscale.swarm.limits import Limits
from triscale.swarm.orchestrator import Swarm
from triscale.swarm.table_score import render_table
from triscale.swarm.tools import document_tools
from triscale.swarm.types import ModelReply, ModelRequest

MODULES = ["bisect", "calendar", "colorsys", "csv", "difflib", "fractions", "heapq", "json", "sched", "secrets",
           "shlex", "statistics", "textwrap", "uuid", "wave", "zipfile"]  # fmt: skip
QUESTION = "What is each of the documented Python modules for, and what is one thing that it defines?"
TASK = "Name one function or class of this module. Then say in one short sentence what the module is for."
EXCERPT = 1500


def write_documents(folder: Path) -> None:
    """The text of ``pydoc MODULE`` for each module."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODULES:
        text = pydoc.render_doc(importlib.import_module(name), renderer=pydoc.plaintext)
        text = text.partition("\nFILE\n")[0]  # the path of this machine's interpreter says nothing about the module
        text = re.sub(r"MODULE REFERENCE.*?(?=DESCRIPTION|CLASSES|FUNCTIONS)", "", text, flags=re.DOTALL)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def orchestrator(with_tools: bool):
    """Open every document, hand each to a sub-agent, put the answers into a table."""

    def policy(request: ModelRequest) -> ModelReply:
        results = [m.content for m in request.messages if m.role == "tool"]
        if not results and not with_tools:
            return act(*(call("open", {"document": f"{name}.txt"}) for name in MODULES))
        if len(results) in (0, len(MODULES)):
            if with_tools:
                prompts = [f"Read the document {name}.txt with the tool open. {TASK}" for name in MODULES]
            else:
                prompts = [f"Documentation of the Python module {name}:\n\n{text[:EXCERPT]}\n\n{TASK}"
                           for name, text in zip(MODULES, results, strict=True)]  # fmt: skip
            create = call(
                "create_subagent", {"name": "reader", "system_prompt": "You read documentation of Python modules."}
            )
            return act(create, *(call("assign_task", {"agent": "reader", "prompt": p}) for p in prompts))
        answers = results[-len(MODULES) :]
        rows = [{"module": n, "answer": a} for n, a in zip(MODULES, answers, strict=True)]
        return say(render_table(rows, ["module", "answer"]))

    return policy


def names_something_real(module: str, answer: str) -> bool:
    """Whether the answer holds a function or class that the module defines, other than one called like the module."""
    defined = {
        name
        for name, value in vars(importlib.import_module(module)).items()
        if callable(value) and (getattr(value, "__module__", "") or "").lstrip("_").split(".")[0] == module
    }
    public = {name for name in defined - {module} if not name.startswith("_")}
    return bool(public & set(re.findall(r"\w+", answer)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8011/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, default=Path("runs/small-model"))
    parser.add_argument("--tools", action="store_true", help="give the sub-agents tools instead of the text")
    arguments = parser.parse_args()
    documents = arguments.out.parent / "python-modules"
    write_documents(documents)
    tools = document_tools(documents, page_chars=4000)
    swarm = Swarm(
        client=PolicyClient(orchestrator(arguments.tools), name="script"),
        subagent_client=HttpClient.Config(model=arguments.model, base_url=arguments.base_url, context_window=8192).build(),
        tools=tools, subagent_tools=tools if arguments.tools else (), directory=arguments.out,
        limits=Limits(concurrent=4, subagent_steps=6, reply_tokens=120, model_seconds=120),
    )  # fmt: skip
    result = clock.run(swarm.run(QUESTION))
    ledger = Ledger.of_run(arguments.out)
    print(result.text)
    tasks = ledger.tasks()
    right = sum(names_something_real(m, t["result"] or "") for m, t in zip(MODULES, tasks, strict=True))
    calls = ledger.one("SELECT count(DISTINCT agent) AS n FROM tool_call WHERE agent != 'main'")["n"]
    print(f"\n{result.outcome}, {result.seconds:.1f} s, assignments {result.outcomes}")
    print(f"{right} of {len(MODULES)} answers hold a name that the module defines; {calls} sub-agents called a tool")


if __name__ == "__main__":
    main()
