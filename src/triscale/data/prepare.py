"""From a corpus to token shards: duplicates out, held-out documents aside, tokenizer trained, everything cached.

The cache folder of a data set is named by a hash of the documents and of every setting that changes the result, is
written under a temporary name and appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from ..config import ConfigError, TriScaleError, part
from .corpora import CORPORA, corpus_hash, ingredients
from .formats import CorpusReport, Document
from .store import StoreWriter, TokenStore, sync_and_close
from .tokenizer import BOS, EOS, SMALLEST_VOCABULARY, Tokenizer, train_tokenizer

Progress = Callable[[str, int, int], None]  # (stage, done, total) in bytes of text; total 0 = not known yet

FORMAT = 1  # part of the cache key: raise it when the files or the rules below change
BATCH_CHARACTERS = 1 << 20  # encoded per call: short enough for Ctrl-C and the progress line, and
PIECE_CHARACTERS = 1 << 16  # in pieces that occupy all cores, whether documents are many or one
TRAIN, HELDOUT, CUT, DROPPED = "train", "heldout", "cut", "dropped"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on.

    tokenizer: a ``tokenizer.json`` to use; empty = train one of ``vocabulary_size`` ids on about
    ``tokenizer_sample_bytes`` bytes of the train split. heldout_fraction: share of the documents kept for evaluation,
    chosen by a hash of their content, so that a document stays on its side when others are added.
    """

    corpus: Any = part(CORPORA, "python")
    vocabulary_size: int = 4096
    tokenizer: str = ""
    tokenizer_sample_bytes: int = 4_000_000
    heldout_fraction: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 < self.heldout_fraction < 1.0:
            raise ConfigError("data.heldout_fraction", f"{self.heldout_fraction} is not between 0 and 1",
                              "0.05 keeps 5 % of the documents for evaluation")  # fmt: skip
        if self.vocabulary_size < SMALLEST_VOCABULARY:
            raise ConfigError("data.vocabulary_size", f"{self.vocabulary_size} is too small",
                              f"Use at least {SMALLEST_VOCABULARY}")  # fmt: skip
        if self.tokenizer_sample_bytes < 1:
            raise ConfigError("data.tokenizer_sample_bytes", f"{self.tokenizer_sample_bytes} is not positive")


@dataclass(frozen=True)
class Source:
    """One ingredient of the data; weight: its share of the training rows."""

    name: str
    weight: float


@dataclass
class DataReport:
    """What stands beside every number measured on this data. weights: share of the training rows by source."""

    corpus_hash: str
    python: str
    sources: list[CorpusReport]
    weights: dict[str, float]
    notes: list[str] = field(default_factory=list)
    tokenizer_hash: str = ""
    vocabulary_size: int = 0
    splits: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self) -> list[str]:
        """What a user should know before trusting the run: damaged input, and splits made from too few documents."""
        return [line for source in self.sources for line in source.warnings()] + self.notes

    def lines(self) -> list[str]:
        """The report for a reader."""
        result = [line for source in self.sources for line in source.lines()] + self.notes
        if len(self.weights) > 1:
            shares = ", ".join(f"{weight:.1%} {name}" for name, weight in self.weights.items())
            result.append(f"training rows: {shares}")
        for split, size in self.splits.items():
            result.append(
                f"{split}: {size['documents']:,} documents, {size['tokens']:,} tokens, {size['bytes']:,} bytes"
            )
        result.append(f"corpus {self.corpus_hash[:16]}, Python {self.python}, "
                      f"tokenizer {self.tokenizer_hash[:16]} of {self.vocabulary_size:,} ids")  # fmt: skip
        return result


@dataclass(frozen=True)
class PreparedData:
    """Token shards ready to load. sources: their order is the source number used in the stores."""

    tokenizer: Tokenizer
    train: TokenStore
    heldout: TokenStore
    sources: tuple[Source, ...]
    report: DataReport
    folder: Path


@dataclass(slots=True)
class _Entry:
    """A document as listed by the first pass."""

    source: int
    id: str
    digest: bytes
    bytes: int
    split: str


def prepare(config: DataConfig, cache_dir: str | Path, progress: Progress | None = None) -> PreparedData:
    """Token shards for ``config``, from ``cache_dir`` when they are there, else built into it.

    Raises :class:`ConfigError` for missing input and :class:`TriScaleError` for text that changes while it is read.
    """
    tell = progress or (lambda stage, done, total: None)
    given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
    if given is not None and (given.bos is None or given.eos is None):
        raise ConfigError("data.tokenizer", f"{config.tokenizer} lacks the special tokens {BOS} and {EOS}")
    parts = ingredients(config.corpus.build())
    entries, report = _survey(config, parts, tell)
    key = _key(config, parts, entries, report, given)
    folder = Path(cache_dir) / f"tokens-{key[:24]}"
    sources = tuple(Source(name, weight) for name, weight, _ in parts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        prepared = _open(folder, sources, report)
        if prepared is None:
            _build(folder, config, parts, entries, given, tell)
            prepared = _open(folder, sources, report)
    if prepared is None:
        raise TriScaleError(f"{folder} was written and cannot be read back: check the disk it is on")
    return prepared


def _survey(config: DataConfig, parts: list, tell: Progress) -> tuple[list[_Entry], DataReport]:
    """First pass: hash every document, drop exact duplicates (the first one stays), assign the splits."""
    entries: list[_Entry] = []
    reports = []
    seen: set[bytes] = set()
    done = 0
    for number, (name, _, corpus) in enumerate(parts):
        report = CorpusReport(source=name)
        reports.append(report)
        for document in corpus.documents(report):
            data = document.text.encode()
            digest = hashlib.sha256(data).digest()
            split = HELDOUT if int.from_bytes(digest[:8], "big") < config.heldout_fraction * 2**64 else TRAIN
            if digest in seen:
                split = DROPPED
                report.documents -= 1
                report.bytes -= len(data)
                report.skip("duplicate", document.id, len(data))
            seen.add(digest)
            entries.append(_Entry(number, document.id, digest, len(data), split))
            done += len(data)
            tell("reading", done, 0)
    kept = [entry.digest for entry in entries if entry.split != DROPPED]
    weights = {name: weight for name, weight, _ in parts}
    summary = DataReport(corpus_hash(kept), platform.python_version(), reports, weights)
    for number, (name, _, _) in enumerate(parts):
        _settle(name, [e for e in entries if e.source == number and e.split != DROPPED], summary)
    return entries, summary


def _settle(name: str, kept: list[_Entry], report: DataReport) -> None:
    """Both splits of a source need text: with a handful of documents the hash may leave one of them without."""
    if not kept:
        raise ConfigError("data.corpus", f"every document of {name!r} is also in an earlier source",
                          "Remove one of the two")  # fmt: skip
    if len(kept) == 1:
        kept[0].split = CUT
        report.notes.append(f"{name}: one document only, so its last part is the held-out text")
    elif all(entry.split == TRAIN for entry in kept):
        min(kept, key=lambda entry: entry.digest).split = HELDOUT
        report.notes.append(f"{name}: {len(kept)} documents, one of them held out")
    elif all(entry.split == HELDOUT for entry in kept):
        max(kept, key=lambda entry: entry.digest).split = TRAIN
        report.notes.append(f"{name}: {len(kept)} documents, one of them trained on")


def _key(config: DataConfig, parts: list, entries: list[_Entry], report: DataReport, given: Tokenizer | None) -> str:
    listing = hashlib.sha256()
    for entry in entries:
        listing.update(entry.digest + json.dumps([entry.source, entry.id, entry.split]).encode())
    settings = {
        "format": FORMAT,
        "corpus": report.corpus_hash,
        "listing": listing.hexdigest(),
        "tokenizer": given.hash if given else [config.vocabulary_size, config.tokenizer_sample_bytes,
                                               [weight for _, weight, _ in parts], tokenizers.__version__],
        "heldout_fraction": config.heldout_fraction,
        "python": report.python,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _open(folder: Path, sources: tuple[Source, ...], report: DataReport) -> PreparedData | None:
    """The data set in ``folder``, or None if there is no complete one."""
    if not (folder / "COMPLETE").exists():
        return None
    try:
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        train, heldout = TokenStore.open(folder, TRAIN), TokenStore.open(folder, HELDOUT)
    except (TriScaleError, OSError, ValueError, KeyError):
        return None  # damaged after it was completed: built again
    report.tokenizer_hash, report.vocabulary_size = tokenizer.hash, tokenizer.vocabulary_size
    report.splits = {store.split: {"documents": len(store), "tokens": store.tokens, "bytes": store.bytes}
                     for store in (train, heldout)}  # fmt: skip
    return PreparedData(tokenizer, train, heldout, sources, report, folder)


def _build(
    folder: Path, config: DataConfig, parts: list, entries: list[_Entry], given: Tokenizer | None, tell: Progress
) -> None:
    """Write the data set beside ``folder`` and move it into place. The caller holds the lock."""
    for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)  # left by a process that was killed: the lock is ours
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.tmp-"))
    try:
        tokenizer = given or _train(config, parts, entries, tell)
        bos, eos = tokenizer.document_ends()
        tokenizer.save(work / "tokenizer.json")
        writers = {split: StoreWriter(work, split, tokenizer.vocabulary_size) for split in (TRAIN, HELDOUT)}
        total = sum(entry.bytes for entry in entries if entry.split != DROPPED)
        done = 0
        for batch in _batches(_placed(config, parts, entries)):
            for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
                writer = writers[piece.split]
                writer.extend([bos, *ids] if piece.first else ids, len(piece.text.encode()))
                if piece.last:
                    writer.extend([eos], 0)
                    writer.end_document(piece.id, piece.source)
                done += len(piece.text.encode())
            tell("encoding", done, total)
        for writer in writers.values():
            writer.close()
        with open(work / "COMPLETE", "w", encoding="utf-8") as file:
            sync_and_close(file)
        if folder.exists():  # incomplete or damaged
            shutil.rmtree(folder)
        os.replace(work, folder)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _again(parts: list, entries: list[_Entry]) -> Iterator[tuple[_Entry, Document]]:
    """Read the corpus once more, beside the listing of the first pass."""
    position = 0
    for name, _, corpus in parts:
        for document in corpus.documents(CorpusReport(source=name)):
            entry = entries[position] if position < len(entries) else None
            if entry is None or entry.digest != hashlib.sha256(document.text.encode()).digest():
                raise TriScaleError(f"{document.id} changed while it was being read; start again when it is at rest")
            position += 1
            yield entry, document
    if position != len(entries):
        raise TriScaleError(f"{entries[position].id} disappeared while the corpus was being read; start again")


def _placed(config: DataConfig, parts: list, entries: list[_Entry]) -> Iterator[tuple[str, Document, int]]:
    """(split, document, source number) of everything that is kept."""
    for entry, document in _again(parts, entries):
        if entry.split in (TRAIN, HELDOUT):
            yield entry.split, document, entry.source
        elif entry.split == CUT:
            head, tail = split_text(document.text, config.heldout_fraction)
            yield TRAIN, Document(f"{document.id}#train", head, document.source), entry.source
            yield HELDOUT, Document(f"{document.id}#heldout", tail, document.source), entry.source


class _Piece(NamedTuple):
    """A document or a part of one, on its way to a shard."""

    split: str
    id: str
    text: str
    source: int
    first: bool
    last: bool


def _batches(placed: Iterator[tuple[str, Document, int]]) -> Iterator[list[_Piece]]:
    """Pieces of the documents in order, about ``BATCH_CHARACTERS`` at a time."""
    batch: list[_Piece] = []
    size = 0
    for split, document, source in placed:
        texts = cut_long(document.text)
        for place, text in enumerate(texts):
            batch.append(_Piece(split, document.id, text, source, place == 0, place == len(texts) - 1))
            size += len(text)
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _train(config: DataConfig, parts: list, entries: list[_Entry], tell: Progress) -> Tokenizer:
    """Train on whole train documents, drawn by their hash, of each source according to its weight."""
    wanted = set()
    for number, (_, weight, _) in enumerate(parts):
        budget = weight * config.tokenizer_sample_bytes
        for entry in sorted((e for e in entries if e.source == number), key=lambda e: e.digest[8:]):
            if budget > 0 and entry.split in (TRAIN, CUT):
                wanted.add(entry.digest)
                budget -= entry.bytes
    sample = []
    for entry, document in _again(parts, entries):
        if entry.digest in wanted and entry.split != DROPPED:
            text = split_text(document.text, config.heldout_fraction)[0] if entry.split == CUT else document.text
            sample.append(text[: config.tokenizer_sample_bytes])
    total = sum(map(len, sample))
    tell("training the tokenizer", 0, total)
    tokenizer = train_tokenizer(sample, config.vocabulary_size)
    tell("training the tokenizer", total, total)
    return tokenizer


def split_text(text: str, fraction: float) -> tuple[str, str]:
    """Cut one text in two, the second about ``fraction`` of it, at a line end if there is one near, never empty."""
    if len(text) < 2:
        raise ConfigError("data.corpus", "one document of one character cannot be split", "Use more text")
    place = min(max(round(len(text) * (1 - fraction)), 1), len(text) - 1)
    line_end = text.rfind("\n", max(0, place - 2000), place) + 1
    place = line_end or place
    return text[:place], text[place:]


def cut_long(text: str, limit: int = PIECE_CHARACTERS) -> list[str]:
    """A very long text in pieces whose tokens, joined, are those of the whole.

    Cuts lie between a line end and a character that is not white space: there the splitting rule of the tokenizer
    always separates, so encoding in pieces changes nothing and a huge document neither blocks nor fills the memory.
    """
    pieces = []
    start = 0
    while len(text) - start > limit:
        cut = text.find("\n", start + limit) + 1
        while 0 < cut < len(text) and text[cut].isspace():
            cut = text.find("\n", cut) + 1
        if not 0 < cut < len(text):
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process builds a data set, the others wait for it (ranks of a run, shards of a ladder)."""
    try:
        import fcntl
    except ImportError:  # no advisory locks on this system: the rename still keeps readers safe
        yield
        return
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
