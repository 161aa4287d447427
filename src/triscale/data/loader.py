"""The training loader: rows in a seeded order that does not depend on how they are asked for.

One global sequence of rows is defined by (data, row length, seed). Rank r of n takes rows r, r + n, r + 2n, ... of it,
and any number of rows per call walks the same sequence: 1 x 8 rows, 8 x 1 row, and 2 ranks x 4 rows are the same
eight rows. Each epoch shuffles documents, packs them, and shuffles the rows, all anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ConfigError, TriScaleError
from .packing import Packing, Piece, Rows, fill_rows, permutation
from .prepare import PreparedData
from .store import TokenStore

_DOCUMENTS, _ROWS = 1, 2  # salts: the two shuffles of an epoch must not be the same permutation


class _Source:
    """The endless row sequence of one source; only the current epoch is laid out."""

    def __init__(self, store: TokenStore, number: int, name: str, row_length: int, seed: int):
        self.store, self.row_length = store, row_length
        self._number, self._seed = number, seed
        self._documents = store.of_source(number)
        inputs = int((store.lengths[self._documents] - 1).sum())
        self.rows_per_epoch = inputs // row_length
        if self.rows_per_epoch == 0:
            raise ConfigError("row_length", f"{row_length} is more than the {inputs} training tokens of {name!r}",
                              "Use shorter rows or more text")  # fmt: skip
        self._epoch = -1

    def pieces(self, row: int) -> list[Piece]:
        epoch, place = divmod(row, self.rows_per_epoch)
        if epoch != self._epoch:
            self._lay_out(epoch)
        return self._packing.pieces(int(self._row_order[place]))

    def _lay_out(self, epoch: int) -> None:
        shuffled = permutation(len(self._documents), self._seed, self._number, epoch, _DOCUMENTS)
        self._packing = Packing(self.store, self._documents[shuffled], self.row_length)
        self._row_order = permutation(self.rows_per_epoch, self._seed, self._number, epoch, _ROWS)
        self._epoch = epoch


class Loader:
    """Rows of the train split, for one rank.

    All ranks call :meth:`next` equally often with the same number of rows. The state counts rows over all ranks, so a
    run may go on with another number of ranks.
    """

    def __init__(self, prepared: PreparedData, row_length: int, seed: int, rank: int = 0, world: int = 1):
        if row_length < 1:
            raise ConfigError("row_length", f"{row_length} is not positive")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside a world of {world}")
        self.prepared, self.row_length, self.seed = prepared, row_length, seed
        self.rank, self.world = rank, world
        self._sources = [_Source(prepared.train, number, source.name, row_length, seed)
                         for number, source in enumerate(prepared.sources)]  # fmt: skip
        self._weights = [source.weight for source in prepared.sources]
        self._taken = [0] * len(self._sources)

    @property
    def rows_taken(self) -> int:
        """Rows given out so far, over all ranks."""
        return sum(self._taken)

    @property
    def epochs(self) -> list[float]:
        """How often each source has been read so far."""
        return [taken / source.rows_per_epoch for taken, source in zip(self._taken, self._sources, strict=True)]

    @property
    def rows_per_epoch(self) -> list[int]:
        """Rows in one epoch of each source."""
        return [source.rows_per_epoch for source in self._sources]

    def next(self, rows: int) -> Rows:
        """The next ``rows`` rows of this rank; the position moves on by ``rows`` times the number of ranks."""
        picked: list[tuple[TokenStore, list[Piece]]] = []
        for place in range(rows * self.world):
            number = self._pick()
            if place % self.world == self.rank:
                source = self._sources[number]
                picked.append((source.store, source.pieces(self._taken[number])))
            self._taken[number] += 1
        return fill_rows(picked, self.row_length)

    def _pick(self) -> int:
        """The source of the next global row: the one furthest behind its share, the first of equals."""
        if len(self._sources) == 1:
            return 0
        row = self.rows_taken + 1
        behind = [weight * row - taken for weight, taken in zip(self._weights, self._taken, strict=True)]
        return int(np.argmax(behind))

    def state_dict(self) -> dict[str, Any]:
        """The position as a few integers (per source: epoch and row in it), with what they refer to."""
        places = [divmod(taken, source.rows_per_epoch)
                  for taken, source in zip(self._taken, self._sources, strict=True)]  # fmt: skip
        return {
            "seed": self.seed,
            "row_length": self.row_length,
            "data": self.prepared.train.hash,
            "weights": list(self._weights),
            "sources": [{"epoch": epoch, "position": position} for epoch, position in places],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; raises :class:`TriScaleError` if it belongs to other data or settings."""
        mine = self.state_dict()
        for name in ("seed", "row_length", "data", "weights"):
            if state[name] != mine[name]:
                raise TriScaleError(
                    f"the loader's position was saved with {name} = {state[name]}, and this run has {mine[name]}: "
                    "the rows would not be the ones that come next. Resume with the same data settings, or start a "
                    "new run"
                )
        self._taken = [place["epoch"] * source.rows_per_epoch + place["position"]
                       for place, source in zip(state["sources"], self._sources, strict=True)]  # fmt: skip
