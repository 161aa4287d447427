"""Packing: documents laid end to end and cut into rows of one length, with the boundaries kept.

Every row is full: no padding, no token lost but the tail of an epoch that fills no row. A document longer than what is
left of a row goes on in the next row, as a *piece* of its own: rows are independent sequences. A document of n ids
gives n - 1 inputs (its eos is only ever a target), so each input has its true next token as target, in the last
column of a row too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .store import TokenStore


class Piece(NamedTuple):
    """Inputs ``start : start + length`` of one document, at the next free column of a row."""

    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Rows:
    """Some rows of L tokens, as numpy arrays.

    tokens, targets: int64 ``[R, L]``; a target is the next id of the same document. weights: float32 ``[R, L]``, the
    weight of each target in the loss. boundaries: per row the columns at which a document (or a piece of one) starts,
    the first always 0; nothing may attend or carry state across one. document_ids: per row the id of each piece.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    boundaries: list[list[int]]
    document_ids: list[list[str]]

    def __len__(self) -> int:
        return len(self.tokens)


class Packing:
    """Documents ``order`` of ``store``, end to end, cut into rows of ``row_length`` inputs."""

    def __init__(self, store: TokenStore, order: np.ndarray, row_length: int):
        self.store, self.row_length = store, row_length
        self.order = order
        self._ends = np.cumsum(store.lengths[order] - 1)

    @property
    def inputs(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def full_rows(self) -> int:
        return self.inputs // self.row_length

    def pieces(self, row: int) -> list[Piece]:
        """What fills ``row``; fewer inputs than ``row_length`` only in the row behind the last full one."""
        position, stop = row * self.row_length, min((row + 1) * self.row_length, self.inputs)
        place = int(np.searchsorted(self._ends, position, side="right"))
        result = []
        while position < stop:
            document, end = int(self.order[place]), int(self._ends[place])
            length = min(end, stop) - position
            start = int(self.store.lengths[document]) - 1 - (end - position)
            result.append(Piece(document, start, length))
            position += length
            place += 1
        return result


def fill_rows(rows: list[tuple[TokenStore, list[Piece]]], row_length: int) -> Rows:
    """Copy the pieces of each row out of its store; every row's pieces hold ``row_length`` inputs."""
    tokens = np.empty((len(rows), row_length), np.int64)
    targets = np.empty_like(tokens)
    boundaries: list[list[int]] = []
    ids: list[list[str]] = []
    for number, (store, pieces) in enumerate(rows):
        column, starts = 0, []
        for piece in pieces:
            known = store.document(piece.document, piece.start, piece.start + piece.length + 1)
            tokens[number, column : column + piece.length] = known[:-1]
            targets[number, column : column + piece.length] = known[1:]
            starts.append(column)
            column += piece.length
        if column != row_length:
            raise ValueError(f"pieces of row {number} hold {column} inputs, not {row_length}")
        boundaries.append(starts)
        ids.append([store.ids[piece.document] for piece in pieces])
    return Rows(tokens, targets, np.ones(tokens.shape, np.float32), boundaries, ids)


def permutation(count: int, *keys: int) -> np.ndarray:
    """A permutation of ``count`` that depends on ``keys`` alone: no library version may change the order of a run.

    Sorts the indices by a 64-bit mix (SplitMix64, Steele et al. 2014) of key and index.
    """
    with np.errstate(over="ignore"):
        state: Any = np.uint64(0)
        for key in keys:
            state = _mix(state ^ _mix(np.uint64(key & 0xFFFFFFFFFFFFFFFF)))
        return np.argsort(_mix(state + np.arange(count, dtype=np.uint64)), kind="stable")


def _mix(value: Any) -> Any:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
