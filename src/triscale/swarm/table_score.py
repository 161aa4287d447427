"""Scores of a table answer against a gold table: item and row precision, recall and F1 (WideSearch, arXiv 2508.07999).

The answer is one Markdown table. Rows are matched by their key columns. A matched row earns one point for every key
cell and the column's metric for every other cell:

    item: TP = sum of cell scores,                 P = TP / (predicted rows * columns), R = TP / (gold rows * columns)
    row:  TP = sum over rows of the lowest cell,   P = TP / predicted rows,             R = TP / gold rows
    F1 = 2PR / (P + R), and 0 when P + R <= 1e-9

Every column has exactly one metric, so precision cannot pass 1. Rows that repeat a key, before or after normalising,
are dropped on both sides (the first stays) and counted in ``duplicates``. By default the answer must have exactly the
gold columns, as the official scorer demands; ``allow_extra_columns`` accepts more, as RLinf does. The official scorer
also maps column names and keys with a language model: pass ``match_key`` for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from urllib.parse import urlsplit

from ..config import ConfigError

Metric = Callable[[str, str], float]
Row = Mapping[str, object]


def normalise(text: object) -> str:
    """Lower case, single spaces, no Markdown emphasis or code marks around the cell."""
    return " ".join(str(text).strip().strip("*`").split()).casefold()


def exact_match(answer: str, gold: str) -> float:
    return float(normalise(answer) == normalise(gold))


def number_near(tolerance: float = 0.0) -> Metric:
    """1 when both cells hold a number and they differ by at most ``tolerance`` (relative to the gold number)."""

    def score(answer: str, gold: str) -> float:
        a, g = _number(answer), _number(gold)
        if a is None or g is None:
            return exact_match(answer, gold)
        return float(abs(a - g) <= tolerance * abs(g) + 1e-9)

    return score


def date_near(days: int = 0) -> Metric:
    """1 when both cells are dates at most ``days`` apart."""

    def score(answer: str, gold: str) -> float:
        a, g = _date(answer), _date(gold)
        if a is None or g is None:
            return exact_match(answer, gold)
        return float(abs((a - g).days) <= days)

    return score


def url_match(answer: str, gold: str) -> float:
    """1 for the same host and path: scheme, ``www.``, a trailing slash and Markdown link syntax do not matter."""
    return float(_url(answer) == _url(gold))


METRICS: dict[str, Metric] = {
    "exact_match": exact_match,
    "number_near": number_near(),
    "date_near": date_near(),
    "url_match": url_match,
}


@dataclass(frozen=True)
class Score:
    """precision, recall, f1 of one kind (items or rows)."""

    precision: float
    recall: float
    f1: float

    @classmethod
    def of(cls, true_positive: float, predicted: float, gold: float) -> Score:
        precision = true_positive / predicted if predicted else 0.0
        recall = true_positive / gold if gold else 0.0
        total = precision + recall
        return cls(precision, recall, 0.0 if total <= 1e-9 else 2 * precision * recall / total)


@dataclass(frozen=True)
class TableScore:
    """item and row scores, success (the table is right in full), and why a table could not be scored."""

    item: Score
    row: Score
    success: bool
    duplicates: int = 0
    problem: str = ""
    cells: Mapping[tuple[str, ...], Mapping[str, float]] = field(default_factory=dict, repr=False)


def score_table(
    answer: str | Sequence[Row],
    gold: Sequence[Row],
    *,
    key: Sequence[str],
    metrics: Mapping[str, str | Metric] | None = None,
    allow_extra_columns: bool = False,
    match_key: Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], tuple[str, ...] | None] | None = None,
) -> TableScore:
    """Score ``answer`` (Markdown text or rows) against ``gold`` rows.

    key: the columns that identify a row. metrics: column -> a name of ``METRICS`` or a function (answer cell, gold
    cell) -> 0..1; the default is an exact match. match_key: maps a predicted key that matches nothing to a gold key.
    Raises :class:`ConfigError` for an empty gold table or a key column it lacks.
    """
    columns = _gold_columns(gold, key)
    metric_of = {column: _metric(column, (metrics or {}).get(column, "exact_match")) for column in columns}
    rows = parse_table(answer) if isinstance(answer, str) else [dict(row) for row in answer]
    if rows is None:
        return _nothing("no Markdown table in the answer")
    names = {normalise(column): column for column in columns}
    have = {normalise(column) for row in rows[:1] for column in row}
    missing, extra = sorted(set(names) - have), sorted(have - set(names))
    if rows and (missing or (extra and not allow_extra_columns)):
        return _nothing(f"columns differ from the gold table: missing {missing}, not asked for {extra}")
    table = [{names[normalise(c)]: str(v) for c, v in row.items() if normalise(c) in names} for row in rows]
    gold_rows, gold_repeats = _by_key(gold, key)
    if match_key is not None:
        table = [_mapped(row, key, gold_rows, match_key) for row in table]
    predicted, repeats = _by_key(table, key)
    return _score(predicted, gold_rows, columns, key, metric_of, repeats + gold_repeats)


def _score(predicted, gold_rows, columns, key, metric_of, duplicates) -> TableScore:
    cells = {}
    for row_key, row in predicted.items():
        if row_key in gold_rows:
            truth = gold_rows[row_key]
            cells[row_key] = {c: 1.0 if c in key else metric_of[c](str(row.get(c, "")), str(truth[c])) for c in columns}
    width = len(columns)
    item = Score.of(sum(sum(c.values()) for c in cells.values()), len(predicted) * width, len(gold_rows) * width)
    row = Score.of(sum(min(c.values()) for c in cells.values()), len(predicted), len(gold_rows))
    success = item.precision == item.recall == row.precision == row.recall == 1.0
    return TableScore(item, row, success, duplicates, "", cells)


def parse_table(text: str) -> list[dict[str, str]] | None:
    """The rows of the last Markdown table in ``text`` (a header line, a rule of dashes, lines with bars), or None.

    An escaped bar (``\\|``) belongs to its cell. Short rows are filled with empty cells; cells beyond the header go.
    """
    lines = text.splitlines()
    for index in range(len(lines) - 1, 0, -1):
        if "-" in lines[index] and "|" in lines[index] and re.fullmatch(r"\s*\|?[\s:|-]+\|?\s*", lines[index]):
            header = _cells(lines[index - 1])
            if "|" not in lines[index - 1] or not any(header):
                continue
            rows = []
            for line in lines[index + 1 :]:
                if "|" not in line:
                    break
                values = _cells(line)[: len(header)]
                rows.append(dict(zip(header, values + [""] * (len(header) - len(values)), strict=True)))
            return rows
    return None


def render_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A Markdown table; ``parse_table`` reads it back. Line breaks inside a cell become spaces."""

    def cell(value: object) -> str:
        return " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|")

    lines = [f"| {' | '.join(map(cell, columns))} |", "|" + " --- |" * len(columns)]
    lines += [f"| {' | '.join(cell(row.get(c, '')) for c in columns)} |" for row in rows]
    return "\n".join(lines)


def _cells(line: str) -> list[str]:
    body = line.strip().removeprefix("|")
    if "\\" not in body:
        return [cell.strip() for cell in body.removesuffix("|").split("|")]
    if re.search(r"(?<!\\)(\\\\)*\|$", body):
        body = body[:-1]
    parts, current, escaped = [], "", False
    for letter in body:
        if escaped:
            current += letter if letter in "\\|" else "\\" + letter
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter == "|":
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, (current + ("\\" if escaped else "")).strip()]


def _gold_columns(gold: Sequence[Row], key: Sequence[str]) -> list[str]:
    if not gold:
        raise ConfigError("gold", "the table has no rows", "A score needs at least one gold row")
    columns = list(gold[0])
    for name in key:
        if name not in columns:
            raise ConfigError("key", f"{name!r} is not a column of the gold table", f"Columns: {', '.join(columns)}")
    if not key:
        raise ConfigError("key", "no key column given", "Name the columns that identify a row")
    return columns


def _metric(column: str, metric: str | Metric) -> Metric:
    if callable(metric):
        return metric
    if metric not in METRICS:
        raise ConfigError(f"metrics.{column}", f"unknown metric {metric!r}", f"Known: {', '.join(METRICS)}")
    return METRICS[metric]


def _by_key(rows: Iterable[Row], key: Sequence[str]) -> tuple[dict[tuple[str, ...], Row], int]:
    found: dict[tuple[str, ...], Row] = {}
    repeats = 0
    for row in rows:
        row_key = tuple(normalise(row.get(column, "")) for column in key)
        repeats += row_key in found
        found.setdefault(row_key, row)
    return found, repeats


def _mapped(row: dict[str, str], key: Sequence[str], gold: Mapping[tuple[str, ...], Row], match_key) -> dict[str, str]:
    row_key = tuple(normalise(row.get(column, "")) for column in key)
    if row_key in gold:
        return row
    target = match_key(row_key, gold.keys())
    if target is None:
        return row
    return {**row, **{column: str(gold[tuple(target)][column]) for column in key}}


def _nothing(problem: str) -> TableScore:
    zero = Score(0.0, 0.0, 0.0)
    return TableScore(zero, zero, False, 0, problem)


def _number(text: str) -> float | None:
    match = re.search(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", normalise(text).replace("−", "-"))
    return float(match.group(0).replace(",", "")) if match else None


def _date(text: str) -> date | None:
    clean = " ".join(str(text).strip().strip("*`").replace(",", " ").split())
    for form in ("%Y-%m-%d", "%d %B %Y", "%B %d %Y", "%d %b %Y", "%b %d %Y", "%Y/%m/%d", "%d.%m.%Y"):
        try:
            return datetime.strptime(clean, form).date()
        except ValueError:
            continue
    return None


def _url(text: str) -> tuple[str, str]:
    link = re.search(r"\]\(([^)\s]+)\)", text)
    address = (link.group(1) if link else text.strip().strip("<>`*")).strip()
    parts = urlsplit(address if "//" in address else f"//{address}")
    return parts.netloc.casefold().removeprefix("www."), parts.path.rstrip("/")
