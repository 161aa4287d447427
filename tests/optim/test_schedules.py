"""Schedules: bounds, phases, and the branch that WSD exists for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triscale.config import ConfigError, from_dict, to_dict
from triscale.optim import SCHEDULES

CASES = [("constant", {}), ("cosine", {"warmup": 0.1}), ("wsd", {"warmup": 0.1}), ("wsd", {"shape": "sqrt"}),
         ("wsd", {"shape": "cosine", "minimum": 0.1})]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), CASES)
@given(total=st.floats(1, 1e12), share=st.floats(-0.5, 1.5))
def test_factor_lies_between_zero_and_one(kind, values, total, share):
    schedule = from_dict(SCHEDULES.config_class(kind, "schedule"), values).build(total)
    assert 0 <= schedule(share * total) <= 1
    assert schedule.phase(share * total) in ("warmup", "stable", "decay")


@pytest.mark.parametrize(("kind", "values"), CASES)
def test_rises_then_never_rises_again(kind, values):
    schedule = from_dict(SCHEDULES.config_class(kind, "schedule"), values).build(1000)
    factors = [schedule(step) for step in range(1001)]
    peak = factors.index(max(factors))
    assert factors[0] == 0 and factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert max(factors) == 1


def test_ends_at_the_minimum():
    for kind in ("cosine", "wsd"):
        schedule = from_dict(SCHEDULES.config_class(kind, "schedule"), {"minimum": 0.1}).build(200)
        assert schedule(200) == pytest.approx(0.1) and schedule(400) == pytest.approx(0.1)


def test_runs_of_different_length_share_the_wsd_trunk():
    """A run branched from the trunk at its decay start has had exactly the rates of a run planned that long."""
    config = from_dict(SCHEDULES.config_class("wsd", "schedule"), {"warmup_length": 50, "decay": 0.25})
    short, long = config.build(400), config.build(1000)
    assert short.decay_start == 300 and short.phase(300) == "stable" and short.phase(301) == "decay"
    assert [short(step) for step in range(301)] == [long(step) for step in range(301)]
    assert short(350) < long(350) == 1


def test_configs_round_trip_and_refuse():
    for kind, values in CASES:
        cls = SCHEDULES.config_class(kind, "schedule")
        assert from_dict(cls, to_dict(from_dict(cls, values))) == from_dict(cls, values)
    for values in ({"warmup": 0.9, "decay": 0.2}, {"minimum": 2.0}, {"warmup_length": -1.0}, {"shape": "steep"}):
        with pytest.raises(ConfigError):
            from_dict(SCHEDULES.config_class("wsd", "schedule"), values)
