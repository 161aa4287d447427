"""Multipliers against values worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from triscale.ladder.multiplier import as_factor, pool, rung_multiplier
from triscale.ladder.pairs import pair_rung
from triscale.ladder.records import Budget, LadderRecord, Rung
from triscale.ladder.verdict import analyse, baseline_curve

B = 0.25


def line_record(make_summary, factors, *, budgets=(0.5, 1.0, 2.0), slopes=None, flops_ratio=1.0, seconds_ratio=1.0):
    """Baseline on exact lines L = k_s·D^-b; per seed, the arm at the loss of factors[seed] x tokens."""
    tokens, runs = 1_000_000, []
    for seed, factor in enumerate(factors):
        b, luck = (slopes or [B] * len(factors))[seed], 3.0 + 0.1 * seed
        ends = [Budget(tokens=int(tokens * f), flops=1e12 * f, seconds=100 * f, loss=luck * f**-b) for f in budgets]
        base = make_summary("baseline", "s", seed, luck, budgets=tuple(ends))
        runs.append(replace(base, flops=1e12, seconds=100.0))
        arm = make_summary("arm", "s", seed, luck * factor**-b)
        runs.append(replace(arm, flops=1e12 * flops_ratio, seconds=100.0 * seconds_ratio))
    return LadderRecord(name="line", baseline="baseline", arms=("arm",), rungs=(Rung(name="s", tokens=tokens),),
                        seeds=tuple(range(len(factors))), runs=tuple(runs))  # fmt: skip


def rung_of(record):
    rung = record.rungs[0]
    return rung_multiplier(pair_rung(record, "arm", rung), baseline_curve(record, rung))


@given(st.lists(st.floats(0.3, 3.0), min_size=2, max_size=4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_pair_gives_back_its_true_multiplier(make_summary, factors):
    got = rung_of(line_record(make_summary, factors))
    assert [math.exp(v) for v in got.logs["tokens"]] == pytest.approx(factors, rel=1e-6)
    assert got.fit_variance == pytest.approx(0, abs=1e-12)


def test_interval_over_pairs_is_the_log_t_interval(make_summary):
    factors = [1.2, 1.3, 1.45]
    estimate = pool([rung_of(line_record(make_summary, factors))], "tokens")
    expected = stats.ttest_1samp(np.log(factors), 0).confidence_interval(0.95)
    assert estimate.interval == pytest.approx(tuple(expected), rel=1e-4)
    assert as_factor(estimate)[0] == pytest.approx(math.exp(np.mean(np.log(factors))))


def test_a_dearer_arm_has_a_smaller_multiplier_in_flops_and_seconds(make_summary):
    got = rung_of(line_record(make_summary, [1.5, 1.5], flops_ratio=1.25, seconds_ratio=2.0))
    assert math.exp(np.mean(got.logs["flops"])) == pytest.approx(1.2, rel=1e-6)
    assert math.exp(np.mean(got.logs["seconds"])) == pytest.approx(0.75, rel=1e-6)


def test_the_curves_own_error_is_added(make_summary):
    """Two budgets, three seeds with slopes b_s: the error of the mean slope, sd/sqrt(3), reaches log m as log m / b."""
    slopes = [0.24, 0.25, 0.26]
    record = line_record(make_summary, [1.5] * 3, budgets=(0.5, 1.0), slopes=slopes)
    got = rung_of(record)
    expected = (np.mean(got.logs["tokens"]) / 0.25 * 0.01 / math.sqrt(3)) ** 2
    assert got.fit_variance == pytest.approx(expected, rel=1e-4) and got.fit_df == 2
    logs = np.array(got.logs["tokens"])
    estimate = pool([got], "tokens")
    assert estimate.se == pytest.approx(math.sqrt(logs.var(ddof=1) / 3 + expected), rel=1e-4)


def test_extrapolation_is_marked(make_summary):
    assert not rung_of(line_record(make_summary, [1.9, 1.9])).extrapolated
    assert rung_of(line_record(make_summary, [2.2, 2.2])).extrapolated
    assert rung_of(line_record(make_summary, [0.4, 0.4])).extrapolated


def test_without_a_curve_there_is_no_multiplier_and_the_reason_is_given(make_summary):
    assert "only one token budget" in rung_of(line_record(make_summary, [1.2, 1.2], budgets=(1.0,))).reason
    rising = rung_of(line_record(make_summary, [1.2, 1.2], slopes=[-0.1, -0.1]))
    assert "does not clearly fall" in rising.reason
    assert pool([rising], "tokens") is None


def test_one_seed_gives_a_multiplier_without_an_interval(make_summary):
    value, interval = as_factor(pool([rung_of(line_record(make_summary, [1.5]))], "tokens"))
    assert value == pytest.approx(1.5) and interval is None


def test_pooling_goes_over_all_pairs_and_stays_finite(make_record):
    result = analyse(make_record({"arm": 1.4}))
    arm = result.arms[0]
    logs = [log for item in arm.rungs for log in item.multiplier.logs["tokens"]]
    assert arm.multipliers["tokens"].mean == pytest.approx(np.mean(logs)) and len(logs) == 9
    wild = analyse(make_record({"arm": 1.4}, seeds=(0, 1), rungs=("s",), pair_sd=0.3, draw=4))
    assert all(math.isfinite(v) for v in as_factor(wild.arms[0].multipliers["tokens"])[1])
