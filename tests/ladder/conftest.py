"""A realistic ladder made of numbers: power-law losses, seed luck shared within a pair, small pair noise."""

import numpy as np
import pytest

from triscale.ladder.records import Budget, LadderRecord, Rung, RunSummary

RUNGS = {"s": (300_000, 1_000_000), "m": (1_000_000, 1_500_000), "l": (3_000_000, 2_000_000)}
UNTRAINED = 7.6


def true_loss(parameters: float, tokens: float) -> float:
    """Nats per token of the made-up world: falls with size and with tokens, over a floor."""
    return 1.6 + 6.0 * (parameters / 1e5) ** -0.25 * (tokens / 1e5) ** -0.35


def make_run(arm, rung, seed, loss, *, flops_ratio=1.0, seconds_ratio=1.0, budgets=(), curves=True) -> RunSummary:
    size, tokens = RUNGS[rung]
    grid = np.linspace(0, tokens, 24).tolist()
    falling = [(d, UNTRAINED if d == 0 else loss + 3.0 * float(np.exp(-6 * d / tokens))) for d in grid]
    return RunSummary(
        arm=arm, rung=rung, seed=seed, parameters=size, parameters_nonembedding=int(size * 0.7), tokens=tokens,
        flops=6.0 * size * tokens * flops_ratio, seconds=tokens / 9000 * seconds_ratio, loss=loss,
        bits_per_byte=loss / 2.5, curve=tuple(falling) if curves else ((0.0, UNTRAINED),), budgets=budgets,
        max_logit=22.0, corpus_hash="c0ffee" * 5, python="3.12.1", packages={"torch": "2.13.0"},
        config_hash=f"{arm}-{rung}", learning_rate=0.003,
        train_loss_curve=tuple((d, y + 0.05) for d, y in falling) if curves else (),
        grad_norm_curve=tuple((d, 1.0 + float(np.exp(-d / tokens))) for d in grid) if curves else (),
        max_logit_curve=tuple((d, 5.0 + 20 * d / tokens) for d in grid) if curves else (),
    )  # fmt: skip


def make_ladder(
    arms=None, *, rungs=("s", "m", "l"), seeds=(0, 1, 2), fractions=(0.35, 0.5, 0.7, 1.0, 1.4), seed_sd=0.02,
    pair_sd=0.004, branch_sd=0.001, draw=0, flops_ratio=1.0, seconds_ratio=1.3, curves=True,
) -> LadderRecord:  # fmt: skip
    """``arms``: name -> true token multiplier. Relative noise: seed_sd moves a whole seed, pair_sd one run, branch_sd
    one decay branch of the baseline."""
    arms = {"muonclip": 1.3, "attnres": 1.0} if arms is None else arms
    random = np.random.default_rng(draw)
    runs = []
    for rung in rungs:
        size, tokens = RUNGS[rung]
        for seed in seeds:
            luck = 1 + seed_sd * random.standard_normal()
            own = luck * (1 + pair_sd * random.standard_normal())
            ends = []
            for fraction in fractions:
                d = int(tokens * fraction)
                wobble = 1.0 if fraction == 1.0 else 1 + branch_sd * random.standard_normal()
                loss = true_loss(size, d) * own * wobble
                ends.append(Budget(tokens=d, flops=6.0 * size * d, seconds=d / 9000, loss=loss))
            loss = true_loss(size, tokens) * own
            runs.append(make_run("baseline", rung, seed, loss, budgets=tuple(ends), curves=curves))
            for name, multiplier in arms.items():
                loss = true_loss(size, tokens * multiplier) * luck * (1 + pair_sd * random.standard_normal())
                runs.append(make_run(name, rung, seed, loss, flops_ratio=flops_ratio, seconds_ratio=seconds_ratio,
                                     curves=curves))  # fmt: skip
    return LadderRecord(
        name="synthetic", baseline="baseline", arms=tuple(arms), seeds=tuple(seeds),
        rungs=tuple(Rung(name=r, tokens=RUNGS[r][1]) for r in rungs), runs=tuple(runs),
        ladder={"baseline": {"optimizer": "adamw"}, "seeds": list(seeds)}, environment={"cpu": "made up"},
    )  # fmt: skip


@pytest.fixture
def make_record():
    """The function that makes a synthetic ladder; see its arguments."""
    return make_ladder


@pytest.fixture
def make_summary():
    return make_run


@pytest.fixture
def world():
    return true_loss
