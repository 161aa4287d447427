import pytest
from swarm_logs import Log, run_world

from triscale.swarm import clock
from triscale.swarm.contribution import by_overlap, leave_one_out
from triscale.swarm.findings import find
from triscale.swarm.metrics import measure


def replay(ledger, world):
    return clock.run(leave_one_out(ledger, world.scripted("orchestrator"), world.score), virtual=True)


def kinds(ledger, contributions=None):
    return [f.kind for f in find(ledger, measure(ledger), contributions)]


def test_each_of_n_equal_parts_is_worth_what_its_rows_are(tmp_path):
    world, result, ledger = run_world("wide:entities=5", tmp_path)
    found = replay(ledger, world)
    assert found.method == "leave_one_out" and found.score == world.score(result.text)["item_f1"] == 1.0
    without_one = 2 * 1.0 * 0.8 / 1.8  # precision 1, recall 4/5
    assert [i.marginal for i in found.items] == pytest.approx([1 - without_one] * 5)
    assert found.redundant_rate == 0 and found.spawn_efficiency == 1
    assert found.replays == 6 and found.replay_usage.tokens > 0
    assert found.cost_per_quality == pytest.approx(ledger.totals()["cost"])
    assert ledger.totals()["cost"] == pytest.approx(result.usage.cost), "replays are not part of the run's cost"
    assert kinds(ledger, found) == []


@pytest.mark.parametrize("copies", [2, 3])
def test_copies_are_redundant_but_one_of_each_is_needed(tmp_path, copies):
    world, _, ledger = run_world(f"wide:entities=4,scripted.style=duplicate,scripted.copies={copies}", tmp_path)
    for found in (replay(ledger, world), by_overlap(ledger)):
        assert sum(not i.redundant for i in found.items) == 4
        assert found.redundant_rate == pytest.approx(1 - 1 / copies)
        assert found.spawn_efficiency == pytest.approx(1 / copies)
        assert {"repeated_assignments", "spurious_parallelism"} <= set(kinds(ledger, found))


def test_a_result_that_lowers_the_score_is_redundant_and_worth_less_than_nothing(tmp_path):
    world, _, ledger = run_world("wide:entities=3", tmp_path)
    wrong = f"| {' | '.join(world.columns)} |\n|{'---|' * len(world.columns)}\n| Nowhere Institute | 1 | 2 | 3 |"
    ledger.database.execute("UPDATE tool_call SET content = ? WHERE task = 't1.1'", (wrong,))
    world.question = world.question.replace(world.entities[1], "Nowhere Institute")
    ledger.database.execute("UPDATE model_call SET opening = json_array(json_object('role', 'user', 'content', ?)) "
                            "WHERE id = 'main#1'", (world.question,))  # fmt: skip
    found = {i.task: i for i in replay(ledger, world).items}
    assert found["t1.1"].marginal < 0 and found["t1.1"].redundant
    assert found["t1.0"].marginal > 0 and not found["t1.0"].redundant


def test_overlap_is_labelled_and_sees_documents_and_words():
    log = Log(task="Where was Ada born?").model("main", 1, calls=[("assign_task", "{}")] * 4)
    results = ["Ada was born in London in 1815.", "London, 1815.", "Her mother was Annabella Milbanke.", ""]
    for place, text in enumerate(results):
        log.assign(f"t1.{place}", 1, place, prompt="Find it").start(f"t1.{place}").model(f"t1.{place}", 1)
        log.end(f"t1.{place}", result=text)
    log.model("main", 2).result("Ada was born in London.")
    found = by_overlap(log.ledger())
    assert found.method == "overlap"
    assert [i.redundant for i in found.items] == [False, True, False, True]
    assert found.items[0].used == pytest.approx(1 / 2)  # London, not 1815; the question's own words do not count
    assert found.items[2].used == 0


def test_evidence_makes_a_result_new():
    log = Log().model("main", 1, calls=[("assign_task", "{}")] * 2)
    for place in (0, 1):
        task = f"t1.{place}"
        log.assign(task, 1, place).start(task).model(task, 1, calls=[("open", "{}")])
        log.tool(task, 1, 0, "open", evidence=[f"doc{place}"]).model(task, 2).end(task, result="Yes, confirmed.")
    assert [i.redundant for i in by_overlap(log.result().ledger()).items] == [False, False]


def test_failed_assignments_lower_spawn_efficiency_and_are_named():
    log = Log().model("main", 1, calls=[("assign_task", "{}")] * 2)
    log.assign("t1.0", 1, 0).assign("t1.1", 1, 1).start("t1.0").start("t1.1")
    log.model("t1.0", 1).end("t1.0", result="Paris").model("t1.1", 1, outcome="failed")
    log.end("t1.1", "failed", reason="HTTP 500").model("main", 2).result()
    ledger = log.ledger()
    found = by_overlap(ledger)
    assert len(found.items) == 1 and found.spawn_efficiency == 0.5
    texts = [f.text for f in find(ledger, measure(ledger), found) if f.kind == "lost"]
    assert texts == ["1 assignment of 2 ended as failed (HTTP 500)."]


@pytest.mark.parametrize(
    ("spec", "limits", "expected"),
    [
        ("wide:entities=8", {}, []),
        ("wide:entities=8,scripted.style=serial", {}, ["serial_collapse"]),
        ("wide:entities=8,scripted.style=direct", {}, ["serial_collapse"]),
        ("wide:entities=2,scripted.style=direct", {}, []),
        ("deep:entities=6,scripted.style=serial", {}, ["serial_chain"]),
        ("wide:entities=4", {"concurrent": 1}, ["parallel_in_name_only"]),
        ("wide:entities=4", {"total": 2}, ["lost"]),
    ],
)
def test_findings_of_known_behaviour(tmp_path, spec, limits, expected):
    _, _, ledger = run_world(spec, tmp_path, **limits)
    assert kinds(ledger) == expected


def test_a_single_agent_is_not_accused_of_serial_collapse(tmp_path):
    _, _, ledger = run_world("wide:entities=8", tmp_path, mode="single")
    assert kinds(ledger) == []


def test_idle_agents_stragglers_limits_and_killed_runs_are_named():
    log = Log().add("agent.create", agent="spare", name="spare", owner="main", turn=1)
    log.model("main", 1, calls=[("assign_task", "{}")] * 4)
    for place in range(4):
        log.assign(f"t1.{place}", 1, place, prompt=f"part {place}").start(f"t1.{place}")
    for place, seconds in enumerate((2, 2, 2, 40)):
        log.at(1).model(f"t1.{place}", 1, seconds=seconds).end(f"t1.{place}", result=f"Result{place}")
    log.add("limiter", endpoint="e", event="shrink", capacity=3, reason="429")
    found = kinds(log.ledger())
    assert found == ["unfinished", "idle_agents", "rate_limit", "straggler"]
