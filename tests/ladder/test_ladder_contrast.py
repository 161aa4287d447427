"""Contrasts between arms: what they share cancels, and a ratio's interval covers."""

import numpy as np
import pytest

from triscale.ladder.contrast import Contrasts, contrasts
from triscale.ladder.verdict import analyse


def made(logs, errors=()):
    return Contrasts(("a", "b"), np.asarray(logs), tuple(errors), True)


def test_common_luck_cancels_in_a_difference():
    luck = np.array([0.3, -0.2, 0.1, 0.4])
    noise = np.array([0.01, -0.01, 0.02, 0.0])
    joint = made(np.stack([0.7 + luck + noise, 0.5 + luck], 1))
    difference = joint.estimate({"a": 1.0, "b": -1.0})
    assert difference.mean == pytest.approx(0.2 + noise.mean())
    assert difference.se == pytest.approx(noise.std(ddof=1) / 2) and difference.df == pytest.approx(3)
    assert difference.se < joint.estimate({"a": 1.0}).se / 10


def test_the_curve_error_of_equal_arms_cancels_too():
    error = (np.full((2, 2), 0.04), 5)
    joint = made([[0.5, 0.4], [0.6, 0.5]], [error])
    assert joint.estimate({"a": 1.0, "b": -1.0}).se == pytest.approx(0.0, abs=1e-9)
    alone = joint.estimate({"a": 1.0})
    assert alone.se == pytest.approx((np.var([0.5, 0.6], ddof=1) / 2 + 0.04) ** 0.5)


def test_fieller_covers_and_refuses_an_unresolved_denominator():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        shared = generator.normal(0, 0.1, 6)
        logs = np.stack([0.3 + shared + generator.normal(0, 0.05, 6), 0.9 + shared], 1)
        value, interval = made(logs).ratio({"a": 1.0}, {"b": 1.0})
        assert interval is not None and interval[0] <= value <= interval[1]
        hits += interval[0] <= 1 / 3 <= interval[1]
    assert 0.92 <= hits / 400 <= 0.98
    assert made([[0.1, 0.2], [0.1, -0.19]]).ratio({"a": 1.0}, {"b": 1.0})[1] is None
    assert made([[0.1, 0.2]]).ratio({"a": 1.0}, {"b": 1.0}) == (pytest.approx(0.5), None)


def test_against_the_baseline_it_is_the_arm_s_own_multiplier(make_record):
    result = analyse(make_record())
    arm = result.arms[0]
    joint = contrasts({arm.name: [rung.pairs for rung in arm.rungs]}, result.curves)
    own, again = arm.multipliers["tokens"], joint.estimate({arm.name: 1.0})
    assert (again.mean, again.se, again.df) == pytest.approx((own.mean, own.se, own.df), rel=1e-4)
