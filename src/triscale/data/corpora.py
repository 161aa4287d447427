"""Where text comes from: the standard library of this Python, any files, or a weighted mixture of both.

A corpus yields :class:`Document` in a deterministic order. Input that cannot be used (truncated, empty, binary,
wrongly encoded) is counted by reason in a :class:`CorpusReport` and left out; input that was *named* and is missing is
an error, because training on less data than asked for must not pass unnoticed.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..config import ConfigError, Parts, TriScaleError, part
from .formats import CorpusReport, Document, read_file

CORPORA = Parts(
    "corpus",
    {
        "python": "triscale.data.corpora:PythonCorpus",
        "files": "triscale.data.corpora:FilesCorpus",
        "mixture": "triscale.data.corpora:MixtureCorpus",
    },
)


class Corpus(Protocol):
    """What a corpus of one's own must be (``kind = "package.module:Class"``, beside its nested ``Config``).

    ``documents`` yields ``report.found(id, text)`` for every text, in the same order each time, and calls
    ``report.skip(reason, name, size)`` for what it leaves out; it is run up to three times.
    """

    name: str

    def documents(self, report: CorpusReport) -> Iterator[Document]: ...


def corpus_hash(document_hashes: Iterable[bytes]) -> str:
    """sha256 (hex) over the sorted sha256 of the documents: the same texts, in whatever files, give the same hash."""
    whole = hashlib.sha256()
    for digest in sorted(document_hashes):
        whole.update(digest)
    return whole.hexdigest()


class PythonCorpus:
    """Source and documentation of the running interpreter's standard library, without its tests.

    Always present, real and permissively licensed (PSF). Documentation is what ships with the source: docstrings stay
    where they are, and text files beside them are documents of their own. Files that the build of one machine
    generated are left out, so that the hash depends on the Python version and not on the machine.
    """

    EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})
    ENDINGS = (".py", ".txt", ".rst")

    @dataclass(frozen=True, kw_only=True)
    class Config:
        def build(self) -> PythonCorpus:
            return PythonCorpus()

    name = "python"

    def __init__(self, root: str | Path | None = None):
        self.root = Path(root or sysconfig.get_path("stdlib"))

    def documents(self, report: CorpusReport) -> Iterator[Document]:
        report.source = report.source or self.name
        usable = 0
        for path in self._paths():
            for document in read_file(path, path.relative_to(self.root).as_posix(), report, ""):
                usable += 1
                yield document
        if not usable:
            raise TriScaleError(
                f"no source of the standard library under {self.root} (this Python ships it compiled). "
                "Use your own text: --data.corpus.kind=files --data.corpus.paths='[\"FOLDER\"]'"
            )

    def _paths(self) -> list[Path]:
        found = []
        for folder, folders, names in os.walk(self.root):
            folders[:] = [name for name in folders if name not in self.EXCLUDED and not name.startswith("config-")]
            found += [Path(folder, name) for name in names
                      if name.endswith(self.ENDINGS) and not name.startswith("_sysconfigdata")]  # fmt: skip
        return sorted(found, key=lambda path: path.relative_to(self.root).as_posix())


class FilesCorpus:
    """Any text: folders, globs and files. ``.jsonl``/``.ndjson`` and ``.parquet`` by record, all else as plain text.

    The order is that of ``paths``, and by name inside each.
    """

    name = "files"
    _SHARD = re.compile(r"^(.*?)(\d{3,})-of-(\d{3,})(.*)$")

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """paths: folders (read whole), globs or files. text_field: the field of JSON lines and Parquet that holds the
        text. partial_shards: accept a set ``NAME-00000-of-00008`` of which some members are missing."""

        paths: tuple[str, ...]
        text_field: str = "text"
        partial_shards: bool = False

        def __post_init__(self) -> None:
            if not self.paths:
                raise ConfigError("data.corpus.paths", "no path is given", "Name a folder, a glob or a file")

        def build(self) -> FilesCorpus:
            return FilesCorpus(self)

    def __init__(self, config: Config):
        self.config = config

    def documents(self, report: CorpusReport) -> Iterator[Document]:
        report.source = report.source or self.name
        usable = 0  # counted here: the reader of this generator may take duplicates out of the report
        for path in self._paths(report):
            for document in read_file(path, path.as_posix(), report, self.config.text_field):
                usable += 1
                yield document
        if not usable:
            reasons = ", ".join(f"{key} {entry.count}" for key, entry in sorted(report.skipped.items()))
            raise ConfigError(
                "data.corpus.paths",
                f"no usable document in {', '.join(self.config.paths)} ({reasons or 'no file'})",
                f"Records are read from the field {self.config.text_field!r}: set data.corpus.text_field if yours "
                "has another name",
            )

    def _paths(self, report: CorpusReport) -> list[Path]:
        found: dict[str, Path] = {}  # by real path: a file named twice is read once
        for name in self.config.paths:
            for path in self._expand(name, report):
                found.setdefault(os.path.realpath(path), path)
        paths = list(found.values())
        if not self.config.partial_shards:
            self._check_shards(paths)
        return paths

    def _expand(self, name: str, report: CorpusReport) -> list[Path]:
        path = Path(name).expanduser()
        if path.is_dir():
            return _files_below(path, report)
        if path.exists():
            return [path]
        matches = sorted(filter(os.path.lexists, glob.glob(str(path), recursive=True)))  # "no/**" matches "no/"
        if not matches:
            raise ConfigError("data.corpus.paths", f"{name!r} does not exist and matches nothing",
                              f"Paths are relative to {Path.cwd()}")  # fmt: skip
        result: list[Path] = []
        folders: set[Path] = set()  # read whole: what else matched inside them is already there
        for match in map(Path, matches):
            if folders.isdisjoint(match.parents):
                if match.is_dir():
                    folders.add(match)
                result += _files_below(match, report) if match.is_dir() else [match]
        return result

    def _check_shards(self, paths: list[Path]) -> None:
        """Members of ``NAME-00000-of-00008`` must all be there (counting from 0 or from 1)."""
        sets: dict[tuple[str, str, str], set[int]] = {}
        for path in paths:
            if match := self._SHARD.match(path.name):
                head, number, total, tail = match.groups()
                sets.setdefault((str(path.parent / head), total, tail), set()).add(int(number))
        for (head, total, tail), have in sets.items():
            first = 0 if 0 in have or int(total) not in have else 1
            missing = sorted(set(range(first, first + int(total))) - have)
            if missing:
                names = ", ".join(f"{head}{number:0{len(total)}d}-of-{total}{tail}" for number in missing[:3])
                more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
                raise ConfigError("data.corpus.paths", f"the shards {names}{more} are missing",
                                  "Add them, or set data.corpus.partial_shards=true to train on the rest")  # fmt: skip


def _files_below(folder: Path, report: CorpusReport) -> list[Path]:
    """All files under ``folder`` by name; hidden entries and links to folders are counted, not followed."""
    found = []

    def unreadable(error: OSError) -> None:
        report.skip("unreadable", f"{error.filename}/ ({error.strerror})")

    for here, folders, names in os.walk(folder, onerror=unreadable):
        for name in sorted(folders):
            path = Path(here, name)
            if name.startswith("."):
                report.skip("hidden", path.as_posix() + "/")
            elif path.is_symlink():
                report.skip("symlink", path.as_posix())
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(here, name)
            if name.startswith("."):
                report.skip("hidden", path.as_posix())
            else:
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """One corpus of a mixture. weight: its share of the rows, relative to the other ingredients' weights."""

    corpus: Any = part(CORPORA)
    weight: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ConfigError("data.corpus.sources.weight", f"{self.weight} is not a positive number")


class MixtureCorpus:
    """Several corpora in fixed proportions of training rows; a small one starts over sooner than a large one."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        sources: tuple[Ingredient, ...]

        def __post_init__(self) -> None:
            if not self.sources:
                raise ConfigError("data.corpus.sources", "a mixture needs at least one source")
            if any(isinstance(source.corpus, MixtureCorpus.Config) for source in self.sources):
                raise ConfigError("data.corpus.sources", "a mixture cannot hold another mixture",
                                  "List all sources in one mixture")  # fmt: skip

        def build(self) -> MixtureCorpus:
            return MixtureCorpus(self)

    def __init__(self, config: Config):
        self.config = config


def ingredients(corpus: Corpus | MixtureCorpus) -> list[tuple[str, float, Corpus]]:
    """(name, weight, corpus) of each source, names made unique; a plain corpus is a mixture of one."""
    if not isinstance(corpus, MixtureCorpus):
        return [(corpus.name, 1.0, corpus)]
    total = sum(source.weight for source in corpus.config.sources)
    result: list[tuple[str, float, Corpus]] = []
    for place, source in enumerate(corpus.config.sources):
        built = source.corpus.build()
        name = source.name or built.name
        if name in (taken for taken, _, _ in result):
            name = f"{name}{place}"
        result.append((name, source.weight / total, built))
    return result
