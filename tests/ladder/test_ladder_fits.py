"""Power laws over the rungs recovered from exact and noisy points, with errors that cover."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from triscale.ladder.fits import fit_power_law

BUDGETS = [3e5, 5e5, 8e5, 1.2e6, 2e6]


@given(st.floats(0.05, 0.8), st.floats(1.5, 8.0), st.integers(2, 5))
@settings(max_examples=40)
def test_an_exact_line_is_recovered(exponent, level, points):
    fit = fit_power_law({0: {d: level * (d / 1e6) ** -exponent for d in BUDGETS[:points]}})
    assert fit.exponent == pytest.approx(exponent, rel=1e-6)
    assert float(fit.loss(1e6)) == pytest.approx(level, rel=1e-6)
    assert fit.floor == 0.0


@given(st.floats(0.2, 0.7), st.floats(0.5, 2.0))
@settings(max_examples=30)
def test_an_exact_floor_is_identified(exponent, floor):
    fit = fit_power_law({0: {d: 2.0 * (d / 1e6) ** -exponent + floor for d in BUDGETS}})
    assert fit.floor == pytest.approx(floor, rel=1e-3)
    assert fit.exponent == pytest.approx(exponent, rel=1e-3)
    assert fit.scale == pytest.approx(2.0 * 1e6**exponent, rel=2e-2)


def test_a_floor_is_seldom_claimed_where_there_is_none():
    random = np.random.default_rng(1)
    claimed = 0
    for _ in range(300):
        noise = random.normal(0, 0.002, len(BUDGETS))
        fit = fit_power_law({0: {d: 3 * (d / 1e6) ** -0.2 * math.exp(e) for d, e in zip(BUDGETS, noise, strict=True)}})
        claimed += fit.floor > 0
    assert claimed <= 300 * 0.08


def test_one_budget_is_no_curve():
    assert fit_power_law({0: {1e6: 3.0}, 1: {1e6: 3.1}}) is None
    assert fit_power_law({}) is None


def test_two_points_and_one_seed_give_a_line_without_an_error():
    fit = fit_power_law({0: {1e6: 3.0, 2e6: 2.7}})
    assert fit.covariance is None and fit.exponent_interval is None and fit.band(np.array([1e6])) is None
    assert fit.exponent == pytest.approx(math.log(3.0 / 2.7) / math.log(2))


def test_the_error_of_one_seed_is_the_regressions():
    losses = [4.0, 3.5, 3.2, 2.9]
    fit = fit_power_law({0: dict(zip(BUDGETS, losses, strict=False))})
    line = stats.linregress(np.log(BUDGETS[:4]), np.log(losses))
    assert fit.source == "scatter" and fit.df == 2
    assert fit.exponent == pytest.approx(-line.slope)
    half = stats.t.ppf(0.975, 2) * line.stderr
    assert fit.exponent_interval == pytest.approx((-line.slope - half, -line.slope + half))


def test_two_budgets_take_the_error_from_the_seeds():
    slopes = [0.20, 0.24, 0.22]
    fit = fit_power_law({seed: {1e6: 3.0, 2e6: 3.0 * 2**-b} for seed, b in enumerate(slopes)})
    assert fit.source == "seeds" and fit.df == 2
    assert fit.exponent == pytest.approx(0.22)
    assert math.sqrt(fit.covariance[1, 1]) == pytest.approx(0.02 / math.sqrt(3))


def test_the_larger_error_is_taken():
    # The seeds agree to the last digit about a bent curve: only the scatter around the line shows the misfit.
    bent = dict(zip(BUDGETS, [3.0, 2.8, 2.75, 2.74, 2.735], strict=True))
    fit = fit_power_law({0: {d: bent[d] for d in BUDGETS[:3]}, 1: {d: bent[d] * 1.01 for d in BUDGETS[:3]}})
    assert fit.source == "scatter" and fit.covariance[1, 1] > 0


def test_a_seed_without_a_point_still_counts():
    full = {d: 3 * (d / 1e6) ** -0.2 for d in BUDGETS[:3]}
    fit = fit_power_law({0: full, 1: {d: full[d] for d in BUDGETS[:2]}})
    assert fit.exponent == pytest.approx(0.2) and fit.seeds == 2 and fit.points == 3


@pytest.mark.parametrize("points,seeds", [(2, 2), (3, 3), (4, 2)])
def test_exponent_intervals_cover_when_seeds_differ(points, seeds):
    """The larger of two errors is taken, so the interval covers at least as often as stated."""
    random = np.random.default_rng(points)
    budgets, covered, trials = BUDGETS[:points], 0, 400
    for _ in range(trials):
        losses = {}
        for seed in range(seeds):
            luck, slope = random.normal(0, 0.02), 0.2 + random.normal(0, 0.01)
            losses[seed] = {d: 3 * (d / 1e6) ** -slope * math.exp(luck + random.normal(0, 0.001)) for d in budgets}
        low, high = fit_power_law(losses).exponent_interval
        covered += low <= 0.2 <= high
    assert covered / trials > 0.92
