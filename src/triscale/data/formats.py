"""One file in, documents out: plain text, JSON lines, Parquet. What cannot be used is counted, with its reason."""

from __future__ import annotations

import io
import json
import os
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import require

NAMES_KEPT = 20  # names printed per reason; the counts are always complete


@dataclass(frozen=True)
class Document:
    """One text. id: where it came from, unique inside its corpus. source: the name of its corpus."""

    id: str
    text: str
    source: str


@dataclass
class Skipped:
    """Input left out for one reason. bytes: size of the files or records, 0 where a format does not say."""

    count: int = 0
    bytes: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class CorpusReport:
    """What a corpus was made of.

    skipped: by reason, ``empty``, ``binary``, ``wrong_encoding``, ``truncated``, ``unreadable``, ``not_a_file``,
    ``hidden``, ``symlink``, ``not_json``, ``no_text_field``, ``duplicate``.
    """

    source: str = ""
    files: int = 0
    documents: int = 0
    bytes: int = 0
    skipped: dict[str, Skipped] = field(default_factory=dict)

    def skip(self, reason: str, name: str, size: int = 0) -> None:
        entry = self.skipped.setdefault(reason, Skipped())
        entry.count += 1
        entry.bytes += size
        if len(entry.names) < NAMES_KEPT:
            entry.names.append(name)

    def found(self, id: str, text: str) -> Document:
        """Count a usable document and return it."""
        self.documents += 1
        self.bytes += len(text.encode())
        return Document(id, text, self.source)

    def warnings(self) -> list[str]:
        """One line for each reason that speaks of damage; empty, hidden and duplicate input is no surprise."""
        harmless = {"empty", "hidden", "duplicate"}
        return [f"{self.source}: {self._line(reason)}" for reason in sorted(self.skipped.keys() - harmless)]

    def lines(self) -> list[str]:
        """The report for a reader: one line of totals and one per reason."""
        result = [f"{self.source}: {self.documents:,} documents, {self.bytes:,} bytes from {self.files:,} files"]
        return result + [f"  {self._line(reason)}" for reason in sorted(self.skipped)]

    def _line(self, reason: str) -> str:
        entry = self.skipped[reason]
        names = ", ".join(entry.names[:3]) + (f" and {entry.count - 3} more" if entry.count > 3 else "")
        return f"left out, {reason.replace('_', ' ')}: {entry.count} ({entry.bytes:,} bytes), {names}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_file(path: Path, name: str, report: CorpusReport, text_field: str) -> Iterator[Document]:
    """The documents of one file; its ending decides the format. Problems go to ``report``, never up."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # a pipe would block forever
            report.skip("not_a_file", name)
            return
        report.files += 1
        suffix = path.suffix.lower()
        if suffix in (".jsonl", ".ndjson"):
            yield from _read_jsonl(path, name, report, text_field)
        elif suffix == ".parquet":
            yield from _read_parquet(path, name, report, text_field)
        else:
            yield from _read_text(path, name, report)
    except OSError as error:
        report.skip("unreadable", f"{name} ({error.strerror or error})")


def _read_text(path: Path, name: str, report: CorpusReport) -> Iterator[Document]:
    data = path.read_bytes()
    encoding = "utf-8-sig"
    if path.suffix == ".py":
        try:  # a source file may declare its encoding in its first two lines
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        except SyntaxError:
            report.skip("wrong_encoding", name, len(data))
            return
    text = _decoded(data, encoding, name, report)
    if text is not None:
        yield report.found(name, text)


def _decoded(data: bytes, encoding: str, name: str, report: CorpusReport) -> str | None:
    """The text of ``data``, or None with the reason counted."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        report.skip("wrong_encoding", name, len(data))  # UTF-16: text, but not what was promised
    elif b"\0" in data:
        report.skip("binary", name, len(data))
    else:
        try:
            text = data.decode(encoding)
            text.encode("utf-8")
        except (UnicodeError, LookupError) as error:  # lookup: a declared codec that does not decode bytes to text
            cut = getattr(error, "reason", "") == "unexpected end of data"
            report.skip("truncated" if cut else "wrong_encoding", name, len(data))
            return None
        if text.strip():
            return text
        report.skip("empty", name, len(data))
    return None


def _read_jsonl(path: Path, name: str, report: CorpusReport, text_field: str) -> Iterator[Document]:
    """One JSON object a line; an unfinished last line is what an interrupted writer leaves behind."""
    number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{name}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                report.skip("wrong_encoding" if line.endswith(b"\n") else "truncated", where, len(line))
                continue
            except (ValueError, RecursionError):
                report.skip("not_json" if line.endswith(b"\n") else "truncated", where, len(line))
                continue
            text = record.get(text_field) if isinstance(record, dict) else None
            yield from _record(text, where, len(line), report)
    if number == 0:
        report.skip("empty", name)


def _read_parquet(path: Path, name: str, report: CorpusReport, text_field: str) -> Iterator[Document]:
    parquet = require("pyarrow.parquet", "data", "Reading Parquet files")
    arrow = require("pyarrow", "data", "Reading Parquet files")
    size = path.stat().st_size
    if size == 0:
        report.skip("empty", name)
        return
    try:
        with parquet.ParquetFile(path) as table:
            if text_field not in table.schema_arrow.names:
                report.skip("no_text_field", name, size)
                return
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
                for value in batch.column(0):
                    number += 1
                    yield from _cell(value, f"{name}:{number}", report)
            if number == 0:
                report.skip("empty", name, size)
    except (arrow.ArrowException, OSError) as error:  # a file cut short has lost its footer or some of its pages
        with open(path, "rb") as file:
            starts_right = file.read(4) == b"PAR1"
        report.skip("truncated" if starts_right else "binary", f"{name} ({str(error).splitlines()[0]})", size)


def _cell(value: Any, where: str, report: CorpusReport) -> Iterator[Document]:
    """A Parquet value; null is an empty text, and bytes that claim to be a string may not be UTF-8."""
    try:
        text = value.as_py()
    except UnicodeDecodeError:
        report.skip("wrong_encoding", where)
        return
    yield from _record("" if text is None else text, where, 0, report)


def _record(text: Any, where: str, size: int, report: CorpusReport) -> Iterator[Document]:
    if not isinstance(text, str):
        report.skip("no_text_field", where, size)
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        report.skip("wrong_encoding", where, size)
        return
    if not text.strip():
        report.skip("empty", where, size)
    else:
        yield report.found(where, text)
