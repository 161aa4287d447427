"""Token shards on disk: one memory-mapped file of ids per split, and an index of its documents.

A document is ``bos, tokens of the text, eos``. Ids are uint16 when the vocabulary allows it, else uint32.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..config import TriScaleError


class TokenStore:
    """The documents of one split, read-only.

    lengths, byte_counts, sources: int64 ``[documents]``: ids in each document (bos and eos included), bytes of its
    text, and the number of its source. ids: where each document came from. hash: sha256 of ids and lengths.
    """

    def __init__(self, folder: str | Path, split: str):
        folder = Path(folder)
        self.split = split
        with open(folder / f"{split}.json", encoding="utf-8") as file:
            index = json.load(file)
        self.ids: list[str] = index["ids"]
        self.hash: str = index["hash"]
        table = np.load(folder / f"{split}.documents.npy", allow_pickle=False)
        self.lengths, self.byte_counts, self.sources = table
        path, dtype = folder / f"{split}.bin", np.dtype(index["dtype"])
        expected = int(self.lengths.sum()) * dtype.itemsize
        if len(self.ids) != len(self.lengths) or path.stat().st_size != expected:
            raise TriScaleError(f"{path}: {path.stat().st_size} bytes do not fit the index, which expects {expected}")
        self._tokens: np.ndarray = np.memmap(path, dtype, "r") if expected else np.zeros(0, dtype)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """All ids of the split, bos and eos included."""
        return len(self._tokens)

    @property
    def bytes(self) -> int:
        return int(self.byte_counts.sum())

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 ``[documents + 1]``: where each document starts."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def document(self, number: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids ``start:stop`` of one document, as stored (bos first, eos last)."""
        begin, end = int(self.offsets[number]), int(self.offsets[number + 1])
        return self._tokens[begin + start : end if stop is None else begin + stop]

    def of_source(self, source: int) -> np.ndarray:
        """Numbers of the documents that came from one source."""
        return np.flatnonzero(self.sources == source)


class StoreWriter:
    """Writes the three files of a :class:`TokenStore`; nothing is readable before :meth:`close`."""

    def __init__(self, folder: Path, split: str, vocabulary_size: int):
        self.folder, self.split = folder, split
        self.dtype = np.dtype(np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)
        self._file = open(folder / f"{split}.bin", "wb")  # noqa: SIM115 - closed by close()
        self._hash = hashlib.sha256()
        self._ids: list[str] = []
        self._rows: list[tuple[int, int, int]] = []

    def add(self, id: str, tokens: Sequence[int], byte_count: int, source: int) -> None:
        data = np.asarray(tokens, self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._ids.append(id)
        self._rows.append((len(tokens), byte_count, source))

    def close(self) -> None:
        sync_and_close(self._file)
        table = np.asarray(self._rows, np.int64).reshape(-1, 3).T.copy()
        self._hash.update(table[0].tobytes())
        with open(self.folder / f"{self.split}.documents.npy", "wb") as file:
            np.save(file, table, allow_pickle=False)
            sync_and_close(file)
        index = {"dtype": self.dtype.name, "hash": self._hash.hexdigest(), "ids": self._ids}
        with open(self.folder / f"{self.split}.json", "w", encoding="utf-8") as file:
            json.dump(index, file)
            sync_and_close(file)


def sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
