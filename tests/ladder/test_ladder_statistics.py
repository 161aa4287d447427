"""The small-sample statistics against scipy and against hand-worked values."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from triscale.ladder import statistics as s

finite = st.floats(-5, 5, allow_nan=False)


def test_paired_interval_and_p_equal_scipy():
    a, b = np.array([3.1, 2.9, 3.3, 3.0]), np.array([3.0, 2.95, 3.1, 2.8])
    got, expected = s.paired_t(list(a - b)), stats.ttest_rel(a, b)
    assert got.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert got.interval == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-12)
    assert (got.n, got.df) == (4, 3)


def test_two_seeds_use_one_degree_of_freedom():
    got = s.paired_t([-0.03, -0.01])
    half = 12.706204736 * 0.02 / math.sqrt(2) / math.sqrt(2)  # t(0.975, 1) * sd / sqrt(n); sd = 0.02 / sqrt(2)
    assert got.interval == pytest.approx((-0.02 - half, -0.02 + half), rel=1e-9)


def test_one_pair_gives_no_interval_and_no_p():
    got = s.paired_t([-0.5])
    assert got.interval is None and got.p is None and s.smallest_detectable(got) is None


def test_identical_runs_are_no_evidence():
    same = s.paired_t([0.0, 0.0, 0.0], resolution=1e-7)
    assert same.p == 1.0
    last_bit = s.paired_t([1e-9, 1e-9, 1e-9], resolution=1e-7)
    assert last_bit.p > 0.9


def test_welch_satterthwaite_equals_scipy():
    a, b = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.7, 0.4, 0.9, 0.6])
    parts = [(a.var(ddof=1) / 3, 2.0), (b.var(ddof=1) / 5, 4.0)]
    got = s.combine(a.mean() - b.mean(), parts, 8)
    expected = stats.ttest_ind(a, b, equal_var=False)
    assert got.df == pytest.approx(expected.df) and got.p == pytest.approx(expected.pvalue)


def test_holm_by_hand():
    got = s.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5})
    assert got == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.5})


def test_holm_counts_the_arms_that_could_not_be_tested():
    assert s.holm({"a": 0.02, "b": None}) == {"a": 0.04, "b": None}


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_raw_and_bonferroni(p):
    adjusted = s.holm(p)
    for name, value in adjusted.items():
        assert min(p[name], 1) <= value <= min(1.0, len(p) * max(p.values()))
        assert value <= 1
    ranked = sorted(p, key=p.__getitem__)
    assert all(adjusted[a] <= adjusted[b] for a, b in itertools.pairwise(ranked))


@given(st.lists(finite, min_size=2, max_size=6), finite)
@settings(max_examples=60)
def test_shifting_all_pairs_shifts_the_interval(differences, shift):
    a, b = s.paired_t(differences, 1e-9), s.paired_t([d + shift for d in differences], 1e-9)
    assert b.mean == pytest.approx(a.mean + shift, abs=1e-9)
    assert b.se == pytest.approx(a.se, abs=1e-8)
    assert a.interval[0] <= a.mean <= a.interval[1]


@pytest.mark.parametrize("df", [1, 2, 3, 6, 30])
@pytest.mark.parametrize("shift", [0.0, 1.0, 3.0])
def test_power_equals_the_non_central_t(df, shift):
    critical = stats.t.ppf(0.975, df)
    expected = stats.nct.sf(critical, df, shift) + stats.nct.cdf(-critical, df, shift)
    assert s.power_of(shift, df) == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("df", [1, 2, 4, 20])
def test_the_detectable_shift_has_the_stated_power(df):
    for alpha in (0.05, 0.01):
        assert s.power_of(s.detectable_shift(df, alpha), df, alpha) == pytest.approx(0.8, abs=1e-4)


def test_detectable_effect_shrinks_with_seeds_and_grows_with_arms():
    few, many = s.paired_t([0.1, -0.1, 0.05]), s.paired_t([0.1, -0.1, 0.05] * 4)
    assert s.smallest_detectable(many) < s.smallest_detectable(few) < s.smallest_detectable(few, tests=5)


@pytest.mark.parametrize("noise,least,most", [((1, 1), 0.94, 0.96), ((1, 10), 0.975, 1.0)])
def test_intervals_over_two_rungs_of_two_seeds_cover_whatever_the_rungs_noise(noise, least, most):
    """8,000 ladders of 2 x 2 pairs: as stated with equal noise on both rungs, cautious with unequal noise."""
    random = np.random.default_rng(7)
    draws = random.normal(0, 1, size=(8000, 2, 2)) * np.array(noise)[None, :, None] + 0.5
    covered = 0
    for draw in draws:
        low, high = s.paired_t(draw.ravel()).interval
        covered += low <= 0.5 <= high
    assert least < covered / 8000 < most


def test_effects_that_differ_between_rungs_widen_the_interval():
    same, differ = s.paired_t([-0.2, -0.21, -0.2, -0.21]), s.paired_t([-0.3, -0.31, -0.1, -0.11])
    assert same.mean == pytest.approx(differ.mean) and differ.se > 5 * same.se
