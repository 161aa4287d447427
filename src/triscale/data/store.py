"""Token shards on disk: one memory-mapped file of ids per split, and an index of its documents.

A document is ``bos, tokens of the text, eos``. Ids are uint16 when the vocabulary allows it, else uint32.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..config import TriScaleError
from .tokenizer import Tokenizer


class TokenStore:
    """The documents of one split, read-only, on disk or in memory.

    ids: where each document came from. lengths, byte_counts, sources: int64 ``[documents]``: tokens of each document
    (bos and eos included), bytes of its text, and the number of its source. hash: sha256 of tokens and lengths.
    """

    def __init__(self, split: str, tokens: np.ndarray, table: np.ndarray, ids: list[str], hash: str):
        self.split, self._tokens, self.ids, self.hash = split, tokens, ids, hash
        self.lengths, self.byte_counts, self.sources = table

    @classmethod
    def open(cls, folder: str | Path, split: str) -> TokenStore:
        """The store that a :class:`StoreWriter` left in ``folder``; raises if its files do not fit together."""
        folder = Path(folder)
        with open(folder / f"{split}.json", encoding="utf-8") as file:
            index = json.load(file)
        table = np.load(folder / f"{split}.documents.npy", allow_pickle=False)
        path, dtype = folder / f"{split}.bin", np.dtype(index["dtype"])
        expected = int(table[0].sum()) * dtype.itemsize
        if len(index["ids"]) != table.shape[1] or path.stat().st_size != expected:
            raise TriScaleError(f"{path}: {path.stat().st_size} bytes do not fit the index, which expects {expected}")
        tokens = np.memmap(path, dtype, "r") if expected else np.zeros(0, dtype)
        return cls(split, tokens, table, index["ids"], index["hash"])

    @classmethod
    def of_texts(cls, tokenizer: Tokenizer, texts: Mapping[str, str]) -> TokenStore:
        """A store in memory of a few texts ``{id: text}``, for evaluating on one's own."""
        bos, eos = tokenizer.document_ends()
        documents = [[bos, *ids, eos] for ids in tokenizer.encode_batch(list(texts.values()))]
        tokens = np.asarray([i for document in documents for i in document], np.int64)
        rows = [(len(ids), len(text.encode()), 0) for ids, text in zip(documents, texts.values(), strict=True)]
        table = np.asarray(rows, np.int64).reshape(-1, 3).T.copy()
        digest = hashlib.sha256(tokens.tobytes() + table[0].tobytes()).hexdigest()
        return cls("texts", tokens, table, list(texts), digest)

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
        self._length = self._bytes = 0

    def extend(self, tokens: Sequence[int], byte_count: int) -> None:
        """More tokens of the document being written, and the bytes of text they stand for."""
        data = np.asarray(tokens, self.dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._length += len(tokens)
        self._bytes += byte_count

    def end_document(self, id: str, source: int) -> None:
        self._ids.append(id)
        self._rows.append((self._length, self._bytes, source))
        self._length = self._bytes = 0

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
