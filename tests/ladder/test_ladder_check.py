"""The whole chain on simulated ladders, and the number of seeds a plan asks for."""

import math

import numpy as np
import pytest
from scipy import stats

from triscale.config import ConfigError, TriScaleError
from triscale.ladder.check import NoiseModel, check_statistics
from triscale.ladder.plan_power import nats_of, observed_pair_sd, power_with, seeds_needed


def agrees(rate, expected):
    return stats.binomtest(rate.count, rate.trials, expected).pvalue > 0.005


@pytest.mark.parametrize("design", [
    {"arms": {"muonclip": 1.3, "attnres": 1.0}},
    {"arms": {"kimi": 1.3}, "rungs": ("s", "m"), "seeds": (0, 1), "fractions": (0.5, 1.0, 2.0)},
])  # fmt: skip
def test_false_verdicts_power_and_coverage_are_as_stated(make_record, design):
    result = check_statistics(make_record(**design, curves=False), trials=400, seed=11)
    assert 0.01 < result.false_verdicts.rate < 0.09, result.false_verdicts  # unequal noise on the rungs lowers it
    assert result.found.expected == pytest.approx(0.8, abs=1e-3)
    assert agrees(result.found, 0.8), result.found
    assert result.missed_sign.count == 0
    assert result.covered.trials == 400 and agrees(result.covered, 0.95), result.covered


def test_a_larger_effect_is_found_more_often(make_record):
    record = make_record({"kimi": 1.3}, rungs=("s", "m"), seeds=(0, 1), fractions=(0.5, 1.0), curves=False)
    weak = check_statistics(record, effect=1.03, trials=60, seed=1)
    strong = check_statistics(record, effect=1.3, trials=60, seed=1)
    assert weak.found.expected < 0.75 < 0.99 < strong.found.expected
    assert weak.found.rate < strong.found.rate == 1.0
    assert strong.effect_nats > weak.effect_nats > 0


def test_the_same_seed_gives_the_same_answer(make_record):
    record = make_record({"kimi": 1.3}, rungs=("s",), fractions=(0.5, 1.0), curves=False)
    assert check_statistics(record, trials=20, seed=3) == check_statistics(record, trials=20, seed=3)


def test_simulated_noise_has_the_recorded_spread(make_record):
    model = NoiseModel(make_record(curves=False))
    random = np.random.default_rng(0)
    logs = []
    for _ in range(150):
        record = model.draw(random, 1.0)
        losses = {run.key: run.loss for run in record.runs}
        logs += [math.log(loss / losses["baseline", rung, seed]) for (arm, rung, seed), loss in losses.items()
                 if arm == "attnres"]  # fmt: skip
    assert np.std(logs) == pytest.approx(math.sqrt(np.mean([v**2 for v in model.scale.values()])), rel=0.08)
    assert abs(np.mean(logs)) < 4 * np.std(logs) / math.sqrt(len(logs))


def test_a_record_without_repetition_cannot_be_checked(make_record):
    with pytest.raises(TriScaleError, match="two finished pairs"):
        check_statistics(make_record({"kimi": 1.3}, seeds=(0,)))
    with pytest.raises(TriScaleError, match="two token budgets"):
        check_statistics(make_record({"kimi": 1.3}, fractions=(1.0,)))


def test_seeds_needed_by_simulation():
    plan = seeds_needed(effect=0.02, pair_sd=0.015, rungs=2)
    random = np.random.default_rng(2)
    found, trials = 0, 2000
    for _ in range(trials):
        draws = random.normal(0.02, 0.015, size=(2, plan.seeds))
        found += stats.ttest_1samp(draws.ravel(), 0).pvalue < 0.05
    assert plan.reached >= 0.8 > power_with(plan.seeds - 1, 0.02, 0.015, 2)
    assert stats.binomtest(found, trials, plan.reached).pvalue > 0.005


def test_seeds_grow_with_arms_and_noise_and_shrink_with_effect_and_rungs():
    base = seeds_needed(0.02, 0.02).seeds
    assert seeds_needed(0.02, 0.02, arms=5).seeds > base
    assert seeds_needed(0.02, 0.04).seeds > base
    assert seeds_needed(0.04, 0.02).seeds < base
    assert seeds_needed(0.02, 0.02, rungs=3).seeds < base
    assert seeds_needed(1e-5, 0.02).seeds is None
    assert seeds_needed(5.0, 0.02).seeds == 2


def test_effects_as_multipliers():
    assert nats_of(2.0, 0.25, 3.0) == pytest.approx(3.0 * (1 - 2**-0.25))
    assert nats_of(1.0, 0.25, 3.0) == 0 and nats_of(0.5, 0.25, 3.0) < 0
    with pytest.raises(ConfigError, match="effect"):
        seeds_needed(0.0, 0.1)
    with pytest.raises(ConfigError, match="pair_sd"):
        seeds_needed(0.1, -1.0)


def test_observed_deviation_and_its_upper_limit(make_record):
    observed = observed_pair_sd(make_record({"arm": 1.2}, pair_sd=0.004, draw=5))
    assert observed.df == 6 and observed.pair_sd < observed.upper
    assert observed.upper == pytest.approx(observed.pair_sd * math.sqrt(6 / stats.chi2.ppf(0.05, 6)))
    assert 0.3 < observed.pair_sd / (0.004 * math.sqrt(2) * 2.9) < 2.0
    assert observed_pair_sd(make_record({"arm": 1.2}, seeds=(0,))) is None
