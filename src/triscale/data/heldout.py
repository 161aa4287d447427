"""Evaluation rows: every held-out token once, with the bytes they stand for.

Loss over them is reported in nats per token and in bits per byte; the latter compares models with different
tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from ..config import ConfigError
from .packing import Packing, Piece, Rows, fill_rows, permutation
from .prepare import PreparedData
from .store import TokenStore
from .tokenizer import Tokenizer


class EvaluationRows:
    """A fixed set of rows over all documents of a store.

    max_rows: that many rows only, spread over the documents; None = all. The last row is filled up with tokens from
    the beginning that weigh nothing, so all rows have one length and no token counts twice.
    rows: number of rows. tokens: number of targets that count. bytes: text bytes behind them.
    """

    def __init__(
        self,
        store: TokenStore,
        tokenizer: Tokenizer,
        row_length: int,
        max_rows: int | None = None,
        documents: np.ndarray | None = None,
    ):
        if row_length < 1:
            raise ConfigError("row_length", f"{row_length} is not positive")
        if max_rows is not None and max_rows < 1:
            raise ConfigError("max_rows", f"{max_rows} is not positive", "Leave it out to evaluate on everything")
        documents = np.arange(len(store)) if documents is None else documents
        self._packing = Packing(store, documents[permutation(len(documents), 0)], row_length)
        self._bytes_of = np.asarray(tokenizer.byte_lengths, np.int64)
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
            place = first * self.row_length + np.arange(batch.weights.size).reshape(batch.weights.shape)
            yield replace(batch, weights=(place < self.tokens).astype(np.float32))

    def count_bytes(self, rows: Rows) -> int:
        """Text bytes of the targets that count in ``rows``."""
        return int(self._bytes_of[rows.targets[rows.weights > 0]].sum())

    def _full(self, number: int) -> list[Piece]:
        """The pieces of a row; behind the end of the store it goes on with its beginning."""
        pieces = self._packing.pieces(number)
        missing = self.row_length - sum(piece.length for piece in pieces)
        while missing:
            for piece in self._packing.pieces(0):
                taken = piece._replace(length=min(piece.length, missing))
                if taken.length:
                    pieces.append(taken)
                missing -= taken.length
        return pieces


class HeldoutRows(EvaluationRows):
    """The held-out split as rows, the same for every run on the same data. source: only that source of a mixture."""

    def __init__(self, prepared: PreparedData, row_length: int, max_rows: int | None = None, source: str | None = None):
        store = prepared.heldout
        documents = None if source is None else store.of_source(_number(prepared, source))
        super().__init__(store, prepared.tokenizer, row_length, max_rows, documents)


def text_rows(tokenizer: Tokenizer, texts: Mapping[str, str], row_length: int) -> EvaluationRows:
    """Rows over one's own texts ``{name: text}``."""
    return EvaluationRows(TokenStore.of_texts(tokenizer, texts), tokenizer, row_length)


def bits_per_byte(nats: float, bytes: int) -> float:
    """Bits per byte of a summed loss in nats over targets that stand for ``bytes`` bytes of text."""
    return nats / math.log(2) / bytes


def _number(prepared: PreparedData, name: str) -> int:
    names = [source.name for source in prepared.sources]
    if name not in names:
        raise ConfigError("source", f"no source is called {name!r}", f"Known: {', '.join(names)}")
    return names.index(name)
