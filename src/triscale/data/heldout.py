"""Held-out evaluation rows: every held-out token once, with the bytes they stand for.

Loss over them is reported in nats per token and in bits per byte; the latter compares models with different
tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..config import ConfigError
from .packing import Packing, Piece, Rows, fill_rows, permutation
from .prepare import PreparedData


class HeldoutRows:
    """A fixed set of rows of the held-out split, the same for every run on the same data.

    max_rows: evaluate on that many rows, spread over the documents; None = all. source: only that source of a
    mixture. The last row is filled up with tokens from the beginning that weigh nothing, so all rows have one length
    and no token counts twice. tokens: number of targets that count; bytes: text bytes behind them.
    """

    def __init__(self, prepared: PreparedData, row_length: int, max_rows: int | None = None, source: str | None = None):
        if row_length < 1 or (max_rows is not None and max_rows < 1):
            raise ConfigError("row_length", f"{row_length} (rows: {max_rows}) is not positive")
        store = prepared.heldout
        documents = np.arange(len(store)) if source is None else store.of_source(_number(prepared, source))
        self._packing = Packing(store, documents[permutation(len(documents), 0)], row_length)
        self._bytes_of = np.asarray(prepared.tokenizer.byte_lengths, np.int64)
        self.row_length = row_length
        everything = math.ceil(self._packing.inputs / row_length)
        self.rows = everything if max_rows is None else min(max_rows, everything)
        self.tokens = min(self.rows * row_length, self._packing.inputs)
        self.bytes = sum(self.count_bytes(rows) for rows in self.batches(64))

    def batches(self, rows: int) -> Iterator[Rows]:
        """All rows in order, ``rows`` at a time (the last batch may be smaller)."""
        for first in range(0, self.rows, rows):
            numbers = range(first, min(first + rows, self.rows))
            batch = fill_rows([(self._packing.store, self._full(number)) for number in numbers], self.row_length)
            weights = batch.weights.copy()
            weights[self.tokens - first * self.row_length <= np.arange(weights.size).reshape(weights.shape)] = 0.0
            yield replace(batch, weights=weights)

    def count_bytes(self, rows: Rows) -> int:
        """Text bytes of the targets that count in ``rows``."""
        return int(self._bytes_of[rows.targets[rows.weights > 0]].sum())

    def _full(self, number: int) -> list[Piece]:
        """The pieces of a row; behind the end of the split it goes on with its beginning."""
        pieces = self._packing.pieces(number)
        missing = self.row_length - sum(piece.length for piece in pieces)
        row = 0
        while missing:
            for piece in self._packing.pieces(row):
                taken = piece._replace(length=min(piece.length, missing))
                if taken.length:
                    pieces.append(taken)
                missing -= taken.length
            row = row + 1 if row < number else 0
        return pieces


def bits_per_byte(nats: float, bytes: int) -> float:
    """Bits per byte of a summed loss in nats over targets that stand for ``bytes`` bytes of text."""
    return nats / math.log(2) / bytes


def _number(prepared: PreparedData, name: str) -> int:
    names = [source.name for source in prepared.sources]
    if name not in names:
        raise ConfigError("source", f"no source is called {name!r}", f"Known: {', '.join(names)}")
    return names.index(name)
