"""Synthetic tasks of long memory (Kimi Linear, arXiv 2510.26692, section 5.1): palindrome, associative recall, stacks.

Each task draws rows of exactly ``length`` tokens from a seeded generator. Loss and accuracy count only the positions
whose answer is determined by the past (``weights`` 1); everything else is noise to carry it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from triscale.config import ConfigError


class TaskRows(NamedTuple):
    """tokens, targets int64 [R, L]: targets are the next tokens; weights fp32 [R, L]: 1 where the target is an answer."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class Task(Protocol):
    name: ClassVar[str]

    @property
    def vocabulary(self) -> int: ...

    def rows(self, count: int, length: int, generator: np.random.Generator) -> TaskRows: ...


def _shifted(sequence: np.ndarray, answers: np.ndarray) -> TaskRows:
    """Rows from sequences [R, L + 1] and the mask of the tokens that are answers."""
    return TaskRows(sequence[:, :-1], sequence[:, 1:], answers[:, 1:].astype(np.float32))


def _refuse_short(task: str, length: int, least: int) -> None:
    if length < least:
        raise ConfigError(f"tasks.{task}.length", f"{length} is too short", f"Use at least {least}")


@dataclass(frozen=True, kw_only=True)
class Palindrome:
    """Random tokens, a separator, the same tokens backwards: the model must keep all of them, in order."""

    alphabet: int = 32
    name: ClassVar[str] = "palindrome"

    @property
    def vocabulary(self) -> int:
        return self.alphabet + 2

    def rows(self, count: int, length: int, generator: np.random.Generator) -> TaskRows:
        """Half of ``length`` is read, half is answered; an even length leaves one padding token at the end."""
        _refuse_short(self.name, length, 3)
        half = length // 2
        separator, padding = self.alphabet, self.alphabet + 1
        sequence = np.full((count, length + 1), padding, np.int64)
        sequence[:, :half] = generator.integers(0, self.alphabet, (count, half))
        sequence[:, half] = separator
        sequence[:, half + 1 : 2 * half + 1] = sequence[:, half - 1 :: -1] if half > 1 else sequence[:, :1]
        answers = np.zeros(sequence.shape, bool)
        answers[:, half + 1 : 2 * half + 1] = True
        return _shifted(sequence, answers)


@dataclass(frozen=True, kw_only=True)
class AssociativeRecall:
    """Key-value pairs, a separator, then queries, each a key followed by its value (Arora et al. 2023).

    An eighth of the tokens are pairs with different keys; the rest are queries of random keys.
    """

    keys: int = 64
    values: int = 32
    name: ClassVar[str] = "associative-recall"

    @property
    def vocabulary(self) -> int:
        return self.keys + self.values + 2

    def rows(self, count: int, length: int, generator: np.random.Generator) -> TaskRows:
        pairs = max(1, length // 8)
        _refuse_short(self.name, length, 2 * pairs + 3)
        if pairs > self.keys:
            raise ConfigError("tasks.associative-recall.keys", f"{self.keys} is fewer than the {pairs} pairs of a row")
        separator, padding = self.keys + self.values, self.keys + self.values + 1
        queries = (length - 2 * pairs) // 2
        keys = np.argsort(generator.random((count, self.keys)), axis=1)[:, :pairs]
        values = self.keys + generator.integers(0, self.values, (count, pairs))
        asked = generator.integers(0, pairs, (count, queries))
        sequence = np.full((count, length + 1), padding, np.int64)
        sequence[:, 0 : 2 * pairs : 2], sequence[:, 1 : 2 * pairs : 2] = keys, values
        sequence[:, 2 * pairs] = separator
        start, stop = 2 * pairs + 1, 2 * pairs + 1 + 2 * queries
        sequence[:, start:stop:2] = np.take_along_axis(keys, asked, axis=1)
        sequence[:, start + 1 : stop : 2] = np.take_along_axis(values, asked, axis=1)
        answers = np.zeros(sequence.shape, bool)
        answers[:, start + 1 : stop : 2] = True
        return _shifted(sequence, answers)


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Interleaved stacks: (push, stack, token) and (pop, stack, token), where a pop's token is the last one pushed."""

    stacks: int = 8
    alphabet: int = 32
    name: ClassVar[str] = "stacks"

    @property
    def vocabulary(self) -> int:
        return self.alphabet + self.stacks + 3

    def rows(self, count: int, length: int, generator: np.random.Generator) -> TaskRows:
        _refuse_short(self.name, length, 6)
        push, pop = self.alphabet + self.stacks, self.alphabet + self.stacks + 1
        sequence = np.full((count, length + 1), pop + 1, np.int64)  # the last id pads
        answers = np.zeros(sequence.shape, bool)
        for row in range(count):
            held: list[list[int]] = [[] for _ in range(self.stacks)]
            for place in range(0, length - 1, 3):
                stack = int(generator.integers(self.stacks))
                popping = bool(held[stack]) and generator.random() < 0.5
                token = held[stack].pop() if popping else int(generator.integers(self.alphabet))
                if not popping:
                    held[stack].append(token)
                sequence[row, place : place + 3] = (pop if popping else push, self.alphabet + stack, token)
                answers[row, place + 2] = popping
        return _shifted(sequence, answers)


TASKS: dict[str, type] = {task.name: task for task in (Palindrome, AssociativeRecall, Stacks)}
