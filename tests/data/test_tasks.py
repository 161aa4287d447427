"""The synthetic memory tasks: answers follow from the past, and from nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError
from triscale.data.tasks import TASKS, AssociativeRecall, Palindrome, Stacks


def rows_of(task, length, seed=0, count=4):
    return task.rows(count, length, np.random.default_rng(seed))


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(TASKS)), length=st.integers(8, 70), seed=st.integers(0, 5))
def test_shapes_shift_and_reproducibility(name, length, seed):
    task = TASKS[name]()
    tokens, targets, weights = rows_of(task, length, seed)
    assert tokens.shape == targets.shape == weights.shape == (4, length)
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    assert tokens.min() >= 0 and max(tokens.max(), targets.max()) < task.vocabulary
    again = rows_of(task, length, seed)
    assert all((a == b).all() for a, b in zip((tokens, targets, weights), again, strict=True))
    assert (rows_of(task, length, seed + 100)[0] != tokens).any()


@pytest.mark.parametrize("length", [3, 8, 21, 64])
def test_palindrome_answers_mirror_the_prefix(length):
    task = Palindrome()
    tokens, targets, weights = rows_of(task, length)
    half = length // 2
    assert (weights.sum(1) == half).all()
    for row in range(4):
        assert (targets[row][weights[row] > 0] == tokens[row, :half][::-1]).all()


@pytest.mark.parametrize("length", [16, 64, 101])
def test_recall_answers_are_the_values_of_their_keys(length):
    task = AssociativeRecall()
    tokens, targets, weights = rows_of(task, length)
    pairs = length // 8
    for row in range(4):
        table = dict(zip(tokens[row, 0 : 2 * pairs : 2], tokens[row, 1 : 2 * pairs : 2], strict=True))
        assert len(table) == pairs
        asked = np.flatnonzero(weights[row])
        assert len(asked) and all(table[tokens[row, i]] == targets[row, i] for i in asked)


@pytest.mark.parametrize("length", [30, 64])
def test_stack_answers_are_last_in_first_out(length):
    task = Stacks(stacks=3)
    tokens, targets, weights = rows_of(task, length)
    assert weights.sum() > 0
    for row in range(4):
        held = {}
        sequence = np.append(tokens[row], targets[row, -1])
        for place in range(0, length - 1, 3):
            action, stack, token = sequence[place : place + 3]
            if action == task.alphabet + task.stacks:
                held.setdefault(stack, []).append(token)
                assert weights[row, place + 1] == 0
            else:
                assert held[stack].pop() == token and weights[row, place + 1] == 1


def test_errors_name_the_field():
    with pytest.raises(ConfigError, match="too short"):
        rows_of(Palindrome(), 2)
    with pytest.raises(ConfigError, match="keys"):
        rows_of(AssociativeRecall(keys=4), 64)
