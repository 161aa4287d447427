import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm_logs import Log, run_world

from triscale.swarm.metrics import Paths, Stage, critical_steps, measure, peak_concurrency


@pytest.mark.parametrize(
    ("stages", "steps"),
    [
        ([Stage(1)] * 5, 5),
        ([Stage(0, (3, 7, 4))], 8),
        ([Stage(0, (3, 7, 4)), Stage(0, (7, 2)), Stage(1), Stage(1)], 18),
        ([Stage(0)], 1),
    ],
)
@pytest.mark.parametrize("counting", ["turns", "calls"])
def test_worked_values_of_critical_steps(stages, steps, counting):
    assert critical_steps(stages, counting) == steps


def test_a_turn_with_several_direct_calls_is_where_the_countings_differ():
    assert critical_steps([Stage(4)], "turns") == 1 and critical_steps([Stage(4)], "calls") == 4
    assert critical_steps([Stage(2, (5,))], "turns") == 6 and critical_steps([Stage(2, (5,))], "calls") == 8


@pytest.mark.parametrize("counting", ["turns", "calls"])
@pytest.mark.parametrize(
    "spec",
    ["wide:entities=6", "wide:entities=6,scripted.style=serial", "deep:entities=4,scripted.style=serial",
     "wide:entities=6,scripted.style=direct,scripted.calls_per_turn=3", "wide:entities=4,scripted.calls_per_turn=2"],
)  # fmt: skip
def test_the_ledger_counts_critical_steps_like_the_runtime(tmp_path, spec, counting):
    _, result, ledger = run_world(spec, tmp_path, counting=counting)
    metrics = measure(ledger)
    ours = {"turns": metrics.critical_steps_turns, "calls": metrics.critical_steps_calls}[counting]
    assert ours == result.critical_steps
    stages = ledger.one("SELECT sum(critical_steps) AS n FROM stage WHERE agent = 'main'")["n"]
    assert ours == stages


def test_a_failed_sub_agent_counts_the_steps_it_took():
    log = Log().model("main", 1, calls=[("assign_task", "{}")]).assign("t1.0", 1, 0).start("t1.0")
    for step in (1, 2, 3):
        log.model("t1.0", step, calls=[("search", "{}")]).tool("t1.0", step, 0)
    log.model("t1.0", 4, outcome="timed_out").end("t1.0", "timed_out", steps=3).model("main", 2).result()
    assert measure(log.ledger()).critical_steps_turns == 1 + 3


def test_exact_times_of_a_wide_run(tmp_path):
    """Model 1 s, search and open 0.5 s: main 1 + (1 + 0.5 + 1 + 0.5 + 1) + 1 = 6 s whatever the width."""
    for width in (1, 4, 30):
        _, result, ledger = run_world(f"wide:entities={width}", tmp_path)
        metrics = measure(ledger)
        assert result.seconds == metrics.makespan == metrics.critical_path == metrics.lower_bound == pytest.approx(6.0)
        assert metrics.serial_seconds == pytest.approx(2 + 4 * width)
        assert metrics.peak_concurrency == width and metrics.bound == pytest.approx(1.0)
        assert metrics.efficiency == pytest.approx(1.0)


@pytest.mark.parametrize(("width", "slots", "seconds"), [(10, 5, 10), (10, 3, 18), (7, 7, 6), (7, 1, 30)])
def test_a_slot_limit_makes_waves(tmp_path, width, slots, seconds):
    _, _, ledger = run_world(f"wide:entities={width}", tmp_path, concurrent=slots)
    metrics = measure(ledger)
    assert metrics.makespan == pytest.approx(seconds)
    assert metrics.lower_bound == pytest.approx(2 + max(4, 4 * width / slots))
    assert metrics.lower_bound - 1e-9 <= metrics.makespan <= metrics.upper_bound + 1e-9
    assert metrics.peak_concurrency == min(width, slots)
    assert metrics.queue_seconds == pytest.approx(sum(4 * (i // slots) for i in range(width)))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99), st.sampled_from([0.0, 0.9]))
def test_any_run_lies_between_its_bounds(tmp_path_factory, width, slots, seed, jitter):
    spec = f"wide:entities={width},seed={seed},latency.jitter={jitter}"
    _, _, ledger = run_world(spec, tmp_path_factory.mktemp("w"), concurrent=slots)
    metrics = measure(ledger)
    assert metrics.critical_path <= metrics.lower_bound + 1e-9
    assert metrics.lower_bound - 1e-9 <= metrics.makespan <= metrics.upper_bound + 1e-9
    assert metrics.makespan <= metrics.serial_seconds + 1e-9
    assert 0 < metrics.utilisation <= 1 + 1e-9
    assert metrics.peak_concurrency <= min(slots, width)


def test_a_single_agent_is_its_own_critical_path(tmp_path):
    _, _, ledger = run_world("wide:entities=5", tmp_path, mode="single")
    metrics = measure(ledger)
    assert metrics.makespan == metrics.critical_path == metrics.serial_seconds == pytest.approx(5 * 3 + 1)
    assert (metrics.speed_up, metrics.utilisation, metrics.finish_rate) == pytest.approx((1, 1, 1))
    assert metrics.peak_concurrency == 0


def test_the_critical_chain_is_the_slowest_branch_of_each_stage():
    log = Log().model("main", 1, calls=[("assign_task", "{}")] * 2).assign("t1.0", 1, 0).assign("t1.1", 1, 1)
    log.start("t1.0").start("t1.1").model("t1.0", 1, seconds=2).end("t1.0")
    log.at(1).model("t1.1", 1, seconds=5).end("t1.1").model("main", 2).result()
    paths = Paths(log.ledger())
    assert paths.critical_chain() == {"t1.1"} and paths.critical_path("main") == pytest.approx(7)


def test_peak_concurrency_counts_touching_intervals_once():
    assert peak_concurrency([(0, 1), (1, 2), (1, 3)]) == 2
    assert peak_concurrency([]) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=12))
def test_peak_concurrency_is_the_fullest_moment(items):
    intervals = [(start, start + length) for start, length in items]
    slow = max((sum(a <= t < b for a, b in intervals) for t in range(30)), default=0)
    assert peak_concurrency(intervals) == slow


def test_nested_delegation():
    """main -> t1.0 -> two children of 2 and 3 steps; the middle agent's own CriticalSteps are its steps in main's stage."""
    log = Log(concurrent=2).model("main", 1, calls=[("assign_task", "{}")]).assign("t1.0", 1, 0).start("t1.0")
    log.model("t1.0", 1, calls=[("assign_task", "{}")] * 2)
    kids = [f"t1.0/t1.{i}" for i in (0, 1)]
    for place, kid in enumerate(kids):
        log.assign(kid, 1, place, owner="t1.0", depth=2).start(kid)
    begin = log.time
    for kid, steps in zip(kids, (2, 3), strict=True):
        log.at(begin)
        for step in range(1, steps):
            log.model(kid, step, calls=[("search", "{}")]).tool(kid, step, 0)
        log.model(kid, steps).end(kid, steps=steps)
    log.at(begin + 5).model("t1.0", 2).end("t1.0", steps=2).model("main", 2).result()
    metrics, paths = measure(log.ledger()), Paths(log.ledger())
    assert metrics.critical_steps_turns == 1 + ((1 + 3) + 1)
    assert metrics.critical_path == pytest.approx(1 + (1 + 5 + 1) + 1)
    assert metrics.makespan == pytest.approx(9) and metrics.bound == pytest.approx(1)
    assert paths.critical_chain() == {"t1.0", "t1.0/t1.1"}
    tree = log.ledger().tree()
    assert [c["id"] for c in tree["children"]] == ["t1.0"] and len(tree["children"][0]["children"]) == 2
