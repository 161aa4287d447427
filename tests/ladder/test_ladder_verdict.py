"""Pairs, verdicts and everything that must not be dropped in silence."""

import math
from dataclasses import replace

import pytest

from triscale.events import EventWriter
from triscale.ladder.pairs import pair_rung
from triscale.ladder.records import LadderRecord, Rung, RunSummary, collect_runs, load_run, thin
from triscale.ladder.report import report_json
from triscale.ladder.verdict import analyse


def edit(record, change, **match):
    """``record`` with ``change`` (a dict or a function) applied to the runs whose fields equal ``match``."""
    hit = lambda run: all(getattr(run, k) == v for k, v in match.items())
    new = lambda run: change(run) if callable(change) else replace(run, **change)
    return replace(record, runs=tuple(new(run) if hit(run) else run for run in record.runs))


def verdicts(record):
    return {arm.name: arm.verdict for arm in analyse(record).arms}


def test_planted_effects_get_their_words(make_record):
    assert verdicts(make_record({"good": 1.4, "same": 1.0, "bad": 0.6})) == {
        "good": "better", "same": "no difference detected", "bad": "worse"}  # fmt: skip


def test_two_seeds_on_two_rungs_are_computed(make_record):
    arm = analyse(make_record({"kimi": 1.5}, seeds=(0, 1), rungs=("s", "m"))).arms[0]
    assert arm.verdict == "better" and arm.n == 4 and arm.pooled.df == 3
    assert arm.rungs[0].difference.df == 1
    low, high = arm.multipliers["tokens"].interval
    assert low < math.log(1.5) < high


def test_identical_arms_are_not_different(make_record):
    record = make_record({"twin": 1.0})
    losses = {(r.rung, r.seed): r.loss for r in record.runs if r.arm == "baseline"}
    record = edit(record, lambda run: replace(run, loss=losses[run.rung, run.seed]), arm="twin")
    arm = analyse(record).arms[0]
    assert arm.verdict == "no difference detected" and arm.pooled.mean == 0 and arm.p_holm == 1.0


def test_one_seed_detects_nothing_and_says_so(make_record):
    record = make_record({"huge": 3.0}, seeds=(0,), rungs=("s",))
    values = report_json(record)["arms"]["huge"]
    assert values["verdict"] == "no difference detected"
    assert values["mde"] is None and values["rungs"][0]["ci"] is None and values["rungs"][0]["n"] == 1


def test_an_arm_without_runs_has_no_verdict_but_a_row(make_record):
    record = make_record({"arm": 1.0})
    values = report_json(replace(record, arms=("arm", "later")))["arms"]["later"]
    assert values["verdict"] == "no difference detected" and values["n"] == 0
    assert [rung["missing_seeds"] for rung in values["rungs"]] == [[0, 1, 2]] * 3
    assert values["rungs"][0]["loss_diff"] is None


def test_missing_seeds_leave_the_other_pairs(make_record):
    record = make_record({"arm": 1.3})
    gone = {("arm", "s", 1), ("baseline", "m", 2)}
    record = replace(record, runs=tuple(run for run in record.runs if run.key not in gone))
    arm = analyse(record).arms[0]
    assert [item.pairs.missing for item in arm.rungs] == [(1,), (2,), ()]
    assert arm.n == 7 and arm.pooled.df == 6 and arm.verdict == "better"


def test_unequal_tokens_use_the_matching_budget_or_are_refused(make_record):
    record = make_record({"arm": 1.0}, rungs=("s",))
    shorter = edit(record, {"tokens": 700_000}, arm="arm")
    pair = pair_rung(shorter, "arm", shorter.rungs[0]).pairs[0]
    assert pair.baseline_cost.tokens == 700_000 and pair.baseline_loss > pair.baseline.loss
    refused = pair_rung(edit(record, {"tokens": 900_000}, arm="arm"), "arm", record.rungs[0])
    assert refused.pairs == () and len(refused.refused) == 3 and "900,000" in refused.refused[0]


def test_different_corpora_are_refused(make_record):
    record = edit(make_record({"arm": 2.0}), {"corpus_hash": "other"}, arm="arm")
    arm = analyse(record).arms[0]
    assert (
        arm.n == 0 and arm.verdict == "no difference detected" and "different corpora" in arm.rungs[0].pairs.refused[0]
    )


@pytest.mark.parametrize(
    "match,field", [("parameters", "parameters"), ("active", "parameters_active"), ("flops", "flops")]
)
def test_unmatched_compute_is_printed_then_refused(make_record, match, field):
    record = make_record({"arm": 1.3}, rungs=("s",))
    record = replace(record, rungs=(replace(record.rungs[0], match=match),))
    bigger = lambda ratio: lambda run: replace(run, **{field: type(run.flops if field == "flops" else 1)(
        ratio * (getattr(run, field) or run.parameters))})  # fmt: skip
    near = pair_rung(edit(record, bigger(1.01), arm="arm"), "arm", record.rungs[0])
    printed = pair_rung(edit(record, bigger(1.05), arm="arm"), "arm", record.rungs[0])
    refused = pair_rung(edit(record, bigger(1.5), arm="arm"), "arm", record.rungs[0])
    assert len(near.pairs) == 3 and not near.mismatch
    assert len(printed.pairs) == 3 and "x1.05" in printed.mismatch[0]
    assert not refused.pairs and "unmatched compute" in refused.refused[0]


def test_match_none_promises_nothing_and_hides_nothing(make_record):
    record = make_record({"arm": 1.3}, rungs=("s",), flops_ratio=1.5)
    record = replace(record, rungs=(replace(record.rungs[0], match="none"),))
    got = pair_rung(record, "arm", record.rungs[0])
    assert len(got.pairs) == 3 and got.mismatch == ("FLOPs x1.50",)


def test_a_diverged_run_is_charged_not_dropped(make_record):
    record = make_record({"wild": 1.6})
    broken = edit(record, {"loss": float("nan"), "diverged": True}, arm="wild", rung="s", seed=0)
    arm = analyse(broken).arms[0]
    assert verdicts(record)["wild"] == "better"
    assert arm.verdict != "better" and arm.diverged == 1 and arm.n == 9
    assert arm.rungs[0].pairs.pairs[0].arm_loss == 7.6
    assert len(arm.rungs[0].multiplier.logs["tokens"]) == 2
    assert any("diverged in 1 of 3" in note for note in report_json(broken)["arms"]["wild"]["notes"])


def test_an_arm_that_always_diverges_is_worse(make_record):
    record = edit(make_record({"wild": 1.6}), {"loss": None, "diverged": True}, arm="wild")
    arm = analyse(record).arms[0]
    assert arm.verdict == "worse" and arm.multipliers["tokens"] is None


def test_a_diverged_baseline_is_charged_too_and_leaves_the_curve(make_record):
    record = edit(make_record({"arm": 1.0}), {"loss": None, "diverged": True}, arm="baseline", rung="s", seed=0)
    result = analyse(record)
    assert result.curves["s"].seeds == 2
    assert result.arms[0].rungs[0].pairs.diverged_baseline == 1
    assert result.arms[0].verdict == "no difference detected"


def test_a_divergence_without_a_known_start_is_refused_aloud(make_record):
    record = edit(make_record({"arm": 1.0}, rungs=("s",)), lambda run: replace(run, curve=run.curve[-1:]))
    record = edit(record, {"loss": None, "diverged": True}, arm="arm", seed=1)
    pairs = pair_rung(record, "arm", record.rungs[0])
    assert len(pairs.pairs) == 2 and "diverged" in pairs.refused[0]


def test_more_arms_make_every_verdict_harder(make_record):
    alone = analyse(make_record({"arm": 1.05}, draw=3)).arms[0]
    record = make_record({"arm": 1.05}, draw=3)
    crowd = analyse(replace(record, arms=("arm", "b", "c", "d"))).arms[0]
    assert crowd.pooled == alone.pooled
    assert crowd.p_holm == pytest.approx(min(1, 4 * alone.p_holm)) and crowd.detectable > alone.detectable


def test_a_run_without_a_loss_must_say_that_it_diverged(make_summary):
    with pytest.raises(ValueError, match="arm/s/seed 0: the loss is missing"):
        make_summary("arm", "s", 0, float("nan"))


def test_records_refuse_doubles_and_strangers(make_record, make_summary):
    record = make_record({"arm": 1.0}, rungs=("s",))
    with pytest.raises(ValueError, match="twice"):
        replace(record, runs=(*record.runs, record.runs[0]))
    with pytest.raises(ValueError, match="no planned rung"):
        replace(record, runs=(make_summary("stranger", "s", 0, 3.0),))
    with pytest.raises(ValueError, match="match must be"):
        Rung(name="s", tokens=1, match="size")


def test_runs_are_collected_with_curves_from_their_events(make_summary, tmp_path):
    run = replace(make_summary("arm", "s", 4, 3.0, curves=False), grad_norm_curve=(), max_logit_curve=())
    folder = tmp_path / "deep" / "arm-s-4"
    run.save(folder / "summary.json")
    with EventWriter(folder / "events.jsonl", "arm-s-4") as events:
        for step in range(1, 6):
            events.write("step", step=step, loss=3.0, lr=1e-3, grad_norm=float(step), tokens=step * 100, flops=1.0,
                         seconds=1.0, tokens_per_s=100.0)  # fmt: skip
            events.write("logits", step=step, max_logits={"0": [1.0, step + 0.5], "3": [float("-inf"), 2.0]})
    LadderRecord(name="l", baseline="b", arms=("arm",), rungs=(Rung(name="s", tokens=1),), seeds=(4,)).save(
        tmp_path / "summary.json"
    )
    (found,) = collect_runs(tmp_path)
    assert load_run(folder / "summary.json") == run
    assert found.key == ("arm", "s", 4)
    assert found.train_loss_curve == tuple((100.0 * s, 3.0) for s in range(1, 6))
    assert found.grad_norm_curve == tuple((100.0 * s, float(s)) for s in range(1, 6))
    assert found.max_logit_curve[-1] == (500.0, 5.5)


def test_thinning_keeps_ends_and_spikes():
    points = [(float(i), 1.0) for i in range(5000)]
    points[3333] = (3333.0, 99.0)
    thinned = thin(points)
    assert len(thinned) <= 121 and thinned[0] == points[0] and thinned[-1] == points[-1]
    assert (3333.0, 99.0) in thinned
    means = thin([(float(i), float(i % 2)) for i in range(5000)], pick="mean")
    assert len(means) <= 121 and all(0.45 < y < 0.55 for _, y in means[1:-1])
    assert thin([(0.0, float("nan")), (1.0, 2.0)]) == ((1.0, 2.0),)


def test_summaries_are_strict():
    with pytest.raises(TypeError):
        RunSummary(arm="a", rung="s", seed=0)  # type: ignore[call-arg]
