import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError
from triscale.swarm.policies import Task
from triscale.swarm.table_score import render_table
from triscale.swarm.types import Message, ModelRequest, ToolContext, World, spec_of
from triscale.swarm.worlds import make_world, world_spec

QUICK = "latency.model=0,latency.search=0,latency.open=0"


async def drive(world, role="single", turns=400):
    """The scripted agent with the world's real tools and no runtime: (answer, model calls)."""
    client, tools = world.scripted(role), {tool.name: tool for tool in world.tools}
    messages = [Message("system", "s"), Message("user", world.question)]
    for step in range(1, turns):
        request = ModelRequest(messages, [spec_of(t) for t in world.tools], step=step)
        reply = await client.complete(request)
        messages.append(reply.message)
        if not reply.tool_calls:
            return reply.content, step
        for call in reply.tool_calls:
            result = await tools[call.name].call(json.loads(call.arguments), ToolContext("main", call.id))
            messages.append(Message("tool", result.content, tool_call_id=call.id))
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("spec", "calls"),
    [
        ("wide", 21),
        ("wide:scripted.calls_per_turn=5", 5),
        ("wide:entities=4,attributes=8,pages=3,words=600", None),
        ("deep:entities=6,attributes=2", None),
        ("adversarial:entities=12", 3),
        ("adversarial:entities=150,attributes=8", None),
    ],
)
def test_a_single_scripted_agent_reads_the_whole_truth(spec, calls):
    world = make_world(f"{spec}{',' if ':' in spec else ':'}{QUICK}")
    assert isinstance(world, World)
    answer, made = asyncio.run(drive(world))
    assert world.score(answer) == {"item_f1": 1, "row_f1": 1, "item_precision": 1, "item_recall": 1, "success": 1}
    assert calls is None or made == calls


def test_facts_of_the_documents_cannot_be_had_from_the_question():
    world = make_world("wide")
    assert world.score(world.question)["item_f1"] == 0
    blank = render_table(
        [{c: row["Institute"] if c == "Institute" else "?" for c in row} for row in world.gold], world.columns
    )
    assert world.score(blank)["item_f1"] == pytest.approx(1 / len(world.columns))


def test_a_deep_world_states_each_hop_only_in_its_own_document():
    world = make_world("deep:entities=5")
    for place, entity in enumerate(world.entities[1:], 1):
        holders = [name for name, text in world.documents.items() if entity in text]
        assert len(holders) == 2, "its own document and the one it oversees"
        assert world.entities[place - 1].split()[0].lower() in "".join(holders)


def test_the_adversarial_world_baits():
    """Reading every institute's own document gives old values; the register has all of them right."""
    world = make_world(f"adversarial:entities=20,{QUICK}")
    baited = make_world(f"wide:entities=20,{QUICK}")
    rows = []
    for entity in world.entities:
        text = world.documents[f"profiles/{entity.split()[0].lower()}.md"]
        rows.append({"Institute": entity, **{a.name: a.read(text, entity) for a in world.attributes}})
    assert 0.4 < world.score(render_table(rows, world.columns))["item_f1"] < 0.9
    assert all(row[c] in world.documents["register.md"] for row in world.gold for c in row)
    assert "register.md" not in baited.documents


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["wide", "deep", "adversarial"]), st.integers(1, 30), st.integers(1, 8), st.integers(1, 4),
    st.integers(0, 50),
)  # fmt: skip
def test_worlds_are_a_function_of_their_spec_and_the_gold_table_scores_one(kind, entities, attributes, pages, seed):
    world = make_world(f"{kind}:entities={entities},attributes={attributes},pages={pages},seed={seed}")
    again = make_world(world_spec(world))
    assert (again.documents, again.gold, again.question) == (world.documents, world.gold, world.question)
    assert world.score(render_table(world.gold, world.columns))["success"] == 1
    assert len({row["Institute"] for row in world.gold}) == entities
    task = Task.read(world.question)
    assert task.columns == tuple(world.columns)
    if kind == "deep":
        assert (task.start, task.hops) == (world.entities[0], entities - 1)
    else:
        assert task.entities == tuple(world.entities)


def test_every_attribute_reads_back_what_its_sentences_say():
    import random

    from triscale.swarm.world_text import ATTRIBUTES, MOTTO, OVERSEER

    rng = random.Random(1)
    for attribute in (*ATTRIBUTES, MOTTO, OVERSEER):
        for phrase in attribute.phrases:
            value = attribute.draw(rng) or "Somewhere Institute"
            text = f"# X Institute\n\nA first one. {phrase.format(e='X Institute', v=value)} And another, 3.5 m long."
            assert attribute.read(text, "X Institute") == value
            assert attribute.read(text, "Y Institute") is None


def test_other_seeds_give_other_worlds():
    assert make_world("wide:seed=1").gold != make_world("wide:seed=2").gold


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("wyde", "wide"),
        ("wide:entitys=3", "Did you mean 'entities'"),
        ("wide:attributes=9", "attributes"),
        ("wide:scripted.style=parallel", "fan_out"),
        ("wide:scripted.chunk=0", "chunk"),
    ],
)
def test_wrong_specs_are_named(spec, problem):
    with pytest.raises(ConfigError, match=problem):
        make_world(spec)


def test_jitter_is_fixed_by_the_call_not_by_the_order():
    latency = make_world("wide:latency.jitter=0.5").config.latency
    first = [latency.of(2.0, what, 7) for what in ("a", "b", "c")]
    assert first == [latency.of(2.0, what, 7) for what in ("a", "b", "c")]
    assert len(set(first)) == 3 and all(1.0 <= value <= 3.0 for value in first)


def test_a_world_can_be_written_to_a_folder(tmp_path):
    world = make_world("adversarial:entities=3")
    docs = world.write(tmp_path)
    assert (docs / "register.md").read_text() == world.documents["register.md"]
    assert world.score((tmp_path / "gold.md").read_text())["success"] == 1
    assert (tmp_path / "question.txt").read_text().strip() == world.question
