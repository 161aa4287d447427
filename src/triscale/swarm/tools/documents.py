"""A folder of documents as a search index: text extraction for text, Markdown, HTML and PDF, and BM25 over passages.

The index is SQLite's FTS5 (BM25 ranking) in memory or in a file beside the documents. A document whose size or
modification time changed is read again; one that cannot be read is left out and named in ``problems``.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from ...config import ConfigError, require

TEXT_SUFFIXES = frozenset({".txt", ".md", ".markdown", ".rst", ".csv", ".tsv", ".json", ".jsonl", ".log", ".text"})
HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
PDF_SUFFIXES = frozenset({".pdf"})
PASSAGE_WORDS = 180
COMMIT_EVERY = 500  # documents
_TOKENIZER = "porter unicode61 remove_diacritics 2"


@dataclass(frozen=True)
class Hit:
    """One passage found: the document, the character offset of the passage, BM25 score (more is better)."""

    document: str
    title: str
    offset: int
    text: str
    score: float


class DocumentIndex:
    """BM25 search over named documents. ``documents`` maps a name to its text; ``from_folder`` reads a folder.

    Safe to use from several threads: one connection behind a lock.
    """

    def __init__(self, documents: Mapping[str, str] | None = None, *, path: str | Path | None = None):
        self.problems: dict[str, str] = {}
        self._lock = threading.Lock()
        self._base = sqlite3.connect(str(path) if path else ":memory:", check_same_thread=False)
        try:
            self._base.executescript(f"""
                CREATE TABLE IF NOT EXISTS document(name TEXT PRIMARY KEY, title TEXT, text TEXT, size INT, mtime REAL,
                    first INT, last INT);
                CREATE VIRTUAL TABLE IF NOT EXISTS passage USING fts5(
                    document UNINDEXED, title, text, start UNINDEXED, tokenize='{_TOKENIZER}');
            """)
        except sqlite3.OperationalError as error:
            raise ConfigError(
                "sqlite",
                f"this Python's SQLite {sqlite3.sqlite_version} cannot index text ({error})",
                "Use a Python built with the FTS5 extension (python.org, conda and Debian have it)",
            ) from error
        self._next: int = self._base.execute("SELECT coalesce(max(last), 0) + 1 FROM document").fetchone()[0]
        with self._base:
            for name, text in (documents or {}).items():
                self._insert(name, text, "", -1, -1.0)

    @classmethod
    def from_folder(cls, folder: str | Path, *, path: str | Path | None = None) -> DocumentIndex:
        """Index every readable document below ``folder``; links that lead out of it are not followed."""
        index = cls(path=path)
        index.refresh(folder)
        return index

    def refresh(self, folder: str | Path) -> None:
        """Bring the index up to date with ``folder``: new and changed files are read, deleted ones removed."""
        root = Path(folder)
        if not root.is_dir():
            raise ConfigError("docs", f"{str(folder)!r} is not a folder", "Give a folder of documents")
        with self._lock:
            known = {n: (s, m) for n, s, m in self._base.execute("SELECT name, size, mtime FROM document")}
        seen: set[str] = set()
        progress = _Progress(root)
        for name, file in document_files(root):
            state = file.stat()
            progress.tell(len(seen))
            seen.add(name)
            if known.get(name) == (state.st_size, state.st_mtime):
                continue
            try:
                title, text = extract(file)
            except Exception as error:  # a broken document must not cost the user the other ones
                self.problems[name] = f"{type(error).__name__}: {error}"
                self.remove(name)
                continue
            with self._lock:
                self._insert(name, text, title, state.st_size, state.st_mtime)
                if len(seen) % COMMIT_EVERY == 0:
                    self._base.commit()
        for name in known.keys() - seen:
            self.remove(name)
        with self._lock:
            self._base.commit()

    def add(self, name: str, text: str, title: str = "") -> None:
        """Add or replace one document."""
        with self._lock, self._base:
            self._insert(name, text, title, -1, -1.0)

    def _insert(self, name: str, text: str, title: str, size: int, mtime: float) -> None:
        title = title or _title(text) or name
        self._delete(name)
        first = self._next
        rows = [(row, name, title, text, start) for row, (start, text) in enumerate(passages(text), first)]
        self._next += len(rows)
        self._base.executemany("INSERT INTO passage(rowid, document, title, text, start) VALUES (?, ?, ?, ?, ?)", rows)
        self._base.execute("INSERT INTO document VALUES (?, ?, ?, ?, ?, ?, ?)",
                           (name, title, text, size, mtime, first, first + len(rows) - 1))  # fmt: skip

    def remove(self, name: str) -> None:
        with self._lock, self._base:
            self._delete(name)

    def _delete(self, name: str) -> None:
        rows = self._base.execute("SELECT first, last FROM document WHERE name = ?", (name,)).fetchone()
        if rows is not None:  # by row: a search for the name would read the whole index
            self._base.execute("DELETE FROM passage WHERE rowid BETWEEN ? AND ?", rows)
            self._base.execute("DELETE FROM document WHERE name = ?", (name,))

    def names(self) -> list[str]:
        with self._lock:
            return [name for (name,) in self._base.execute("SELECT name FROM document ORDER BY name")]

    def __len__(self) -> int:
        with self._lock:
            return self._base.execute("SELECT count(*) FROM document").fetchone()[0]

    def text(self, name: str) -> str:
        """The full text of a document; raises ``KeyError`` for an unknown name."""
        with self._lock:
            row = self._base.execute("SELECT text FROM document WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise KeyError(name)
        return row[0]

    def search(self, query: str, limit: int = 5) -> list[Hit]:
        """The best passages for any words: all words together first, then any of them; one passage a document.

        Every character of ``query`` is plain text (no query syntax), so no query can raise an error.
        """
        words = re.findall(r"\w+", query)
        if not words or limit < 1:
            return []
        found: dict[str, Hit] = {}
        for joined in (" ".join(f'"{w}"' for w in words), " OR ".join(f'"{w}"' for w in words)):
            with self._lock:
                rows = self._base.execute(
                    "SELECT document, title, start, text, bm25(passage, 0.0, 2.0, 1.0) AS rank FROM passage "
                    "WHERE passage MATCH ? ORDER BY rank, document, start LIMIT ?",
                    (joined, limit * 8),
                ).fetchall()
            for document, title, start, text, rank in rows:
                found.setdefault(document, Hit(document, title, int(start), text, -rank))
            if len(found) >= limit or len(words) == 1:
                break
        return list(found.values())[:limit]

    def close(self) -> None:
        self._base.close()


class _Progress:
    """Says on stderr how far reading a folder is, from the second second on and then every five."""

    def __init__(self, root: Path):
        self.root, self.begin, self.next = root, time.monotonic(), 2.0

    def tell(self, done: int) -> None:
        passed = time.monotonic() - self.begin
        if passed >= self.next:
            self.next = passed + 5.0
            print(f"reading {self.root}: {done} documents after {passed:.0f} s", file=sys.stderr, flush=True)


def document_files(root: Path) -> Iterator[tuple[str, Path]]:
    """(name relative to root with forward slashes, path) of every document, sorted; hidden files are left out."""
    inside = root.resolve()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for file in sorted(files):
            path = Path(folder, file)
            known = path.suffix.lower() in TEXT_SUFFIXES | HTML_SUFFIXES | PDF_SUFFIXES
            if known and not file.startswith(".") and path.resolve().is_relative_to(inside) and path.is_file():
                yield path.relative_to(root).as_posix(), path


def extract(path: Path) -> tuple[str, str]:
    """(title, text) of one file by its suffix; undecodable bytes of text files become U+FFFD."""
    suffix = path.suffix.lower()
    if suffix in PDF_SUFFIXES:
        return _pdf(path)
    text = path.read_bytes().decode("utf-8-sig", "replace")
    return html_text(text) if suffix in HTML_SUFFIXES else (_title(text), text)


def html_text(source: str) -> tuple[str, str]:
    """(title, text) of an HTML page: scripts, styles and navigation go, block elements become line breaks."""
    reader = _PageText()
    reader.feed(source)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.pieces).splitlines())
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    return " ".join("".join(reader.title).split()), text


class _PageText(HTMLParser):
    SKIP = frozenset({"script", "style", "nav", "noscript", "template", "svg"})
    BLOCK = frozenset(
        {"p", "div", "section", "article", "header", "footer", "li", "ul", "ol", "tr", "table", "br", "hr"}
        | {"h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote", "dt", "dd"}
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.title: list[str] = []
        self._skipping: list[str] = []
        self._in_title = False

    def handle_starttag(self, tag, attrs):
        if tag in self.SKIP:
            self._skipping.append(tag)
        self._in_title = self._in_title or tag == "title"
        if tag in self.BLOCK:
            self.pieces.append("\n")
        elif tag in ("td", "th"):
            self.pieces.append(" | ")

    def handle_startendtag(self, tag, attrs):
        if tag in self.BLOCK:
            self.pieces.append("\n")

    def handle_endtag(self, tag):
        if tag in self._skipping:  # closes the elements inside it too, so an unclosed one cannot swallow the page
            while self._skipping.pop() != tag:
                pass
        if tag == "title":
            self._in_title = False
        if tag in self.BLOCK:
            self.pieces.append("\n")

    def handle_data(self, data):
        if self._in_title:
            self.title.append(data)
        elif not self._skipping:
            self.pieces.append(data)


def _pdf(path: Path) -> tuple[str, str]:
    pypdf = require("pypdf", "swarm", "reading PDF documents")
    reader = pypdf.PdfReader(str(path))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("the PDF needs a password")
    pages = [(page.extract_text() or "").strip() for page in reader.pages]
    if not any(pages):
        raise ValueError("no text in the PDF (scanned pictures?)")
    title = str((reader.metadata or {}).get("/Title") or "").strip()
    return title, "\n\n".join(f"[page {n}]\n{text}" for n, text in enumerate(pages, 1) if text)


def passages(text: str, words: int = PASSAGE_WORDS) -> Iterator[tuple[int, str]]:
    """(offset, text) of consecutive passages of about ``words`` words, cut at blank lines where there are any."""
    start, count = 0, 0
    for block in re.finditer(r"(?:[^\n]|\n(?!\s*\n))+", text):
        size = len(block.group().split())
        if count and count + size > words:
            yield start, text[start : block.start()].strip("\n")
            start, count = block.start(), 0
        while size > 2 * words:  # one block without a blank line: cut by words
            cut = _after_words(text, start, words)
            yield start, text[start:cut]
            start, size = cut, len(text[cut : block.end()].split())
            count = 0
        count += size
    if text[start:].strip():
        yield start, text[start:].strip("\n")


def _after_words(text: str, start: int, words: int) -> int:
    for number, match in enumerate(re.compile(r"\S+\s*").finditer(text, start), 1):
        if number == words:
            return match.end()
    return len(text)


def _title(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first.lstrip("#").strip()[:120] if len(first) <= 200 else ""
