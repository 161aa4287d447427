import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_logs import Log, run_world

from triscale.config import ConfigError
from triscale.swarm.ledger import Ledger


def test_a_folder_without_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        Ledger.of_run(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"swarm\.start"):
        Ledger.of_run(tmp_path)


def test_totals_equal_the_runtimes_own_count(tmp_path):
    _, result, ledger = run_world("wide:entities=17,scripted.chunk=3", tmp_path)
    totals = ledger.totals()
    assert (totals["tokens_in"], totals["tokens_out"], totals["tokens_cached"]) == (
        result.usage.tokens_in, result.usage.tokens_out, result.usage.tokens_cached)  # fmt: skip
    assert totals["cost"] == pytest.approx(result.usage.cost)
    tree = ledger.tree()
    assert tree["total"]["tokens_in"] == result.usage.tokens_in
    assert len(tree["children"]) == len(ledger.tasks()) == 6
    assert tree["own"]["tokens_in"] + sum(c["own"]["tokens_in"] for c in tree["children"]) == result.usage.tokens_in


def test_a_call_lost_in_a_crash_counts_once_and_is_named():
    log = Log().add("model.call", call="main#1", agent="main", step=1).at(5)
    log.at(100).add("swarm.resume", session=2, spent={})
    log.model("main", 1, seconds=2.0, tokens=(7, 3, 1)).result()
    ledger = log.ledger()
    assert ledger.totals() == {"tokens_in": 7, "tokens_out": 3, "tokens_cached": 1, "cost": 0.0, "model_calls": 1,
                               "lost": 1, "tool_calls": 0}  # fmt: skip
    assert ledger.run["sessions"] == 2
    assert ledger.run["active"] == pytest.approx(2.0), "the pause before the resume is not work"


def test_a_clock_that_starts_again_gives_no_negative_time():
    log = Log().at(50).model("main", 1, seconds=10, calls=[("search", "{}")])
    log.at(0.0).add("swarm.resume", session=2, spent={}).tool("main", 1, 0, seconds=4)
    log.model("main", 2, seconds=1).result()
    assert log.ledger().run["active"] == pytest.approx(60 + 5)


def test_a_task_that_ends_twice_stands_once_with_its_last_outcome():
    log = Log().model("main", 1, calls=[("assign_task", "{}")]).assign("t1.0", 1, 0).start("t1.0")
    log.model("t1.0", 1).end("t1.0", "cancelled", reason="user")
    log.at(1000).add("swarm.resume", session=2, spent={}).start("t1.0", attempt=2).model("t1.0", 2).end("t1.0", steps=2)
    log.model("main", 2).result()
    ledger = log.ledger()
    (task,) = ledger.tasks()
    assert (task["outcome"], task["attempts"], task["steps"]) == ("completed", 2, 2)
    assert task["slot_seconds"] == pytest.approx(2.0)
    assert ledger.totals()["model_calls"] == 4


def test_an_unfinished_run_has_a_ledger_too():
    log = Log().model("main", 1, calls=[("assign_task", "{}")]).assign("t1.0", 1, 0).start("t1.0")
    log.add("model.call", call="t1.0#1", agent="t1.0", step=1).at(9)
    log.add("warning", message="slow")
    ledger = log.ledger()
    assert ledger.run["outcome"] is None and ledger.run["active"] == 9
    assert ledger.tasks()[0]["outcome"] is None and ledger.tasks()[0]["slot_seconds"] == pytest.approx(8)
    assert ledger.totals()["lost"] == 1


def test_the_ledger_is_an_ordinary_sqlite_file_made_anew(tmp_path):
    _, _, first = run_world("wide:entities=3", tmp_path)
    folder = next(tmp_path.iterdir())
    first.close()
    for _ in range(2):
        Ledger.of_run(folder, file=folder / "ledger.sqlite").close()
    with sqlite3.connect(folder / "ledger.sqlite") as database:
        assert database.execute("SELECT count(*) FROM task").fetchone() == (4,)


def test_the_conversation_is_rebuilt_with_every_result(tmp_path):
    world, result, ledger = run_world("wide:entities=4", tmp_path)
    messages = ledger.conversation()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", *["tool"] * 5, "assistant"]
    assert messages[1]["content"] == world.question and messages[-1]["content"] == result.text
    ids = [c["id"] for c in messages[2]["tool_calls"]]
    assert [m["tool_call_id"] for m in messages[3:8]] == ids
    assert [m["task"] for m in messages[3:8]] == [None, "t1.0", "t1.1", "t1.2", "t1.3"]


tree = st.recursive(st.integers(0, 50), lambda kids: st.lists(kids, max_size=4), max_leaves=20)


@settings(deadline=None)
@given(tree)
def test_every_token_of_any_tree_is_counted_once(shape):
    """A list is an agent that delegates, a number an agent that spends so many tokens."""
    log, spent, agents = Log(), 0, 1

    def play(id, node):
        nonlocal spent, agents
        tokens = node if isinstance(node, int) else 3
        spent += tokens
        kids = node if isinstance(node, list) else []
        log.model(id, 1, calls=[("assign_task", "{}")] * len(kids), tokens=(tokens, 0, 0))
        for place, kid in enumerate(kids):
            task = f"t1.{place}" if id == "main" else f"{id}/t1.{place}"
            agents += 1
            log.assign(task, 1, place, owner=id).start(task)
            play(task, kid)
            log.end(task, total_tokens=999)

    play("main", shape)
    ledger = log.result().ledger()
    nodes = []

    def walk(node):
        nodes.append(node["id"])
        assert node["total"]["tokens_in"] == node["own"]["tokens_in"] + sum(walk(c) for c in node["children"])
        return node["total"]["tokens_in"]

    assert walk(ledger.tree()) == spent == ledger.totals()["tokens_in"]
    assert len(nodes) == len(set(nodes)) == agents
