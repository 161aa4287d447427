"""The baseline's loss over token budgets: recovered, read backwards, continued, and with errors that cover."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.ladder.budget_curve import fit_budget_curve

BUDGETS = [5e5, 7e5, 1e6, 1.4e6, 2e6]


def parabola(d, level=1.1, exponent=0.15, bend=-0.04):
    u = math.log(d / 1e6)
    return math.exp(level - exponent * u + bend * u**2)


@given(st.floats(0.05, 0.4), st.floats(-0.1, 0.1), st.integers(3, 5), st.floats(0.1, 30))
@settings(max_examples=80)
def test_a_parabola_is_recovered_and_read_backwards_anywhere(exponent, bend, points, factor):
    budgets = BUDGETS[:points]
    curve = fit_budget_curve({0: {d: parabola(d, 1.1, exponent, bend) for d in budgets}})
    for d in budgets:
        assert float(curve.loss(d)) == pytest.approx(parabola(d, 1.1, exponent, bend), rel=1e-9)
    if curve.resolved:
        d = factor * 1e6
        assert math.exp(curve.log_tokens_for(float(curve.loss(d)))) == pytest.approx(d, rel=1e-6)


def test_outside_the_budgets_it_goes_on_along_its_tangent():
    curve = fit_budget_curve({0: {d: parabola(d) for d in BUDGETS}})
    for end, far in ((2e6, 8e6), (5e5, 1e5)):
        slope = curve.exponent_at(end)
        assert float(curve.loss(far)) == pytest.approx(float(curve.loss(end)) * (far / end) ** -slope, rel=1e-9)
    assert curve.exponent_at(8e6) == curve.exponent_at(2e6) != curve.exponent_at(1e6)


def test_two_budgets_are_a_power_law_and_one_is_no_curve():
    curve = fit_budget_curve({0: {1e6: 3.0, 2e6: 2.7}})
    assert len(curve.parameters) == 2 and curve.covariance is None
    assert curve.exponent_at(1.5e6) == pytest.approx(math.log(3.0 / 2.7) / math.log(2))
    assert fit_budget_curve({0: {1e6: 3.0}, 1: {1e6: 3.1}}) is None


def test_a_straight_line_would_mislead_where_the_curve_bends():
    """Measured early in training the exponent grows with D; a line through the same points overstates what is ahead."""
    curve = fit_budget_curve({0: {d: parabola(d, bend=-0.08) for d in (5e5, 1e6, 2e6)}})
    true = parabola(1.6e6, bend=-0.08)
    assert math.exp(curve.log_tokens_for(true)) == pytest.approx(1.6e6, rel=1e-6)
    line = np.polyfit(np.log([5e5, 1e6, 2e6]), [math.log(parabola(d, bend=-0.08)) for d in (5e5, 1e6, 2e6)], 1)
    anchored = 1e6 * math.exp((math.log(true) - math.log(parabola(1e6, bend=-0.08))) / line[0])
    assert anchored > 1.65e6


def test_the_error_comes_from_the_seeds_and_from_the_scatter_only_if_there_is_one_seed():
    slopes = [0.14, 0.15, 0.16]
    curve = fit_budget_curve({s: {d: parabola(d, exponent=b) for d in BUDGETS} for s, b in enumerate(slopes)})
    assert curve.source == "seeds" and curve.df == 2
    low, high = curve.exponent_interval(1e6)
    assert (high - low) / 2 == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-4)
    alone = fit_budget_curve({0: {d: parabola(d) * (1.01 if d == 1e6 else 1) for d in BUDGETS}})
    assert alone.source == "scatter" and alone.df == 2 and alone.covariance[1, 1] > 0


def test_a_seed_that_lacks_a_budget_counts_where_it_has_one():
    full = {d: parabola(d) for d in BUDGETS[:3]}
    curve = fit_budget_curve({0: full, 1: {d: full[d] for d in BUDGETS[:2]}})
    assert curve.points == 3 and curve.seeds == 2 and curve.source == "none"
    assert float(curve.loss(7e5)) == pytest.approx(parabola(7e5))


def test_a_curve_that_does_not_clearly_fall_is_not_read():
    assert not fit_budget_curve({0: {1e6: 3.0, 2e6: 3.2}}).resolved
    assert not fit_budget_curve({0: {1e6: 3.0, 2e6: 2.6, 4e6: 2.9}}).resolved
    assert not fit_budget_curve({0: {1e6: 3.0, 2e6: 2.9}, 1: {1e6: 3.0, 2e6: 2.98}}).resolved
    assert fit_budget_curve({0: {1e6: 3.0, 2e6: 2.7, 4e6: 2.43}}).resolved


def test_the_band_covers_the_mean_curve():
    random = np.random.default_rng(3)
    covered, trials = np.zeros(3), 300
    for _ in range(trials):
        losses = {
            seed: {d: parabola(d, 1.1 + luck, 0.15 + tilt) for d in (5e5, 1e6, 2e6)}
            for seed, (luck, tilt) in enumerate(random.normal(0, [0.02, 0.01], size=(3, 2)))
        }
        low, high = fit_budget_curve(losses).band(np.array([5e5, 1e6, 2e6]))
        truth = np.array([parabola(d) for d in (5e5, 1e6, 2e6)])
        covered += (low <= truth) & (truth <= high)
    assert (np.abs(covered / trials - 0.95) < 0.04).all(), covered / trials
