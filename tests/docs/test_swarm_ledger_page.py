"""The page on tools and the ledger is executed; its example of real sub-agents is played with others in their place."""

import importlib.util
import json

import pytest
from test_pages import ROOT, run_page

from triscale.swarm import clock
from triscale.swarm.client_scripted import PolicyClient, say
from triscale.swarm.orchestrator import Swarm
from triscale.swarm.tools import document_tools, read_mcp_config


def test_swarm_ledger_page(tmp_path):
    assert run_page(ROOT / "docs" / "swarm.md", tmp_path, tmp_path) >= 7
    assert set(read_mcp_config(tmp_path / "mcp.toml")) == {"tickets", "wiki"}
    data = json.loads((tmp_path / "runs" / "world" / "report" / "report.json").read_text())
    assert data["metrics"]["assigned"] == 100 and data["metrics"]["model_calls"] == 302
    assert 6.5 < data["metrics"]["makespan"] < 7


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("swarm_small_model", ROOT / "examples" / "swarm_small_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_tools", [False, True])
def test_the_example_gives_each_document_to_one_sub_agent(example, tmp_path, with_tools):
    example.write_documents(tmp_path / "docs")
    seen = []

    def reader(request):
        seen.append(request.messages[-1].content)
        return say("It defines TextWrapper.")

    tools = document_tools(tmp_path / "docs", page_chars=4000, thread=False)
    swarm = Swarm(
        client=PolicyClient(example.orchestrator(with_tools)), subagent_client=PolicyClient(reader), tools=tools
    )
    result = clock.run(swarm.run(example.QUESTION), virtual=True)
    assert result.outcomes == {"completed": 16} and result.text.count("It defines TextWrapper.") == 16
    named = {m for m in example.MODULES if any(m in text for text in seen)}
    assert named == set(example.MODULES) and all(example.TASK in text for text in seen)


def test_answers_are_checked_against_the_modules_themselves(example):
    assert example.names_something_real("textwrap", "It has TextWrapper for wrapping.")
    assert example.names_something_real("heapq", "Use heappush.")
    assert not example.names_something_real("fractions", "For rational numbers."), "imported names do not count"
    assert not example.names_something_real("shlex", "The module shlex."), "nor does the module's own name"
