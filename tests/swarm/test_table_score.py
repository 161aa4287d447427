from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triscale.config import ConfigError
from triscale.swarm.table_score import METRICS, number_near, parse_table, render_table, score_table

GOLD = [{"name": "Ada", "born": "1815", "town": "London"}, {"name": "Grace", "born": "1906", "town": "New York"}]


def test_the_worked_example():
    """Two gold rows of three columns; three predicted rows, two keys match, three of four other cells right."""
    answer = "\n".join(
        ["Here it is:", "", "| name | born | town |", "|---|---|---|", "| Ada | 1815 | London |"]
        + ["| Grace | 1906 | Boston |", "| Alan | 1912 | London |"]
    )
    score = score_table(answer, GOLD, key=["name"])
    assert score.item.precision == pytest.approx(float(Fraction(5, 9)))
    assert score.item.recall == pytest.approx(float(Fraction(5, 6)))
    assert score.item.f1 == pytest.approx(float(Fraction(2, 3)))
    assert score.row.precision == pytest.approx(float(Fraction(1, 3)))
    assert score.row.recall == pytest.approx(0.5)
    assert score.row.f1 == pytest.approx(0.4)
    assert not score.success


def test_a_full_table_is_a_success_whatever_the_order_and_the_case():
    grace, ada = ("new york", "GRACE", "1906"), ("London", "Ada", "1815")
    columns = ["Town", "NAME", "Born"]
    answer = render_table([dict(zip(columns, row, strict=True)) for row in (grace, ada)], columns)
    assert score_table(answer, GOLD, key=["name"]).success


def test_columns_must_be_the_asked_ones_unless_more_are_allowed():
    rows = [{**row, "extra": "x"} for row in GOLD]
    refused = score_table(rows, GOLD, key=["name"])
    assert refused.item.f1 == 0 and "extra" in refused.problem
    assert score_table(rows, GOLD, key=["name"], allow_extra_columns=True).success
    assert score_table([{"name": "Ada"}], GOLD, key=["name"], allow_extra_columns=True).item.f1 == 0


def test_an_answer_without_a_table_scores_nothing_and_says_so():
    score = score_table("I could not find it.", GOLD, key=["name"])
    assert (score.item.f1, score.row.f1, score.problem) == (0.0, 0.0, "no Markdown table in the answer")


def test_a_header_alone_scores_nothing():
    assert score_table("| name | born | town |\n|---|---|---|", GOLD, key=["name"]).item.f1 == 0


def test_repeated_keys_count_once_and_cannot_raise_precision_over_one():
    rows = [GOLD[0], GOLD[0], {**GOLD[0], "name": "ada "}, GOLD[1]]
    score = score_table(rows, GOLD, key=["name"])
    assert score.duplicates == 2 and score.item.precision == 1.0 and score.success


def test_metrics_of_a_column():
    gold = [{"k": "a", "n": "1,000", "d": "3 May 2001", "u": "https://www.x.org/a/"}]
    answer = [{"k": "a", "n": "1040", "d": "2001-05-03", "u": "[site](http://x.org/a)"}]
    metrics = {"n": number_near(0.05), "d": "date_near", "u": "url_match"}
    assert score_table(answer, gold, key=["k"], metrics=metrics).success
    assert not score_table(answer, gold, key=["k"], metrics={**metrics, "n": number_near(0.01)}).success
    assert METRICS["number_near"]("about 7 members", "7") == 1.0
    with pytest.raises(ConfigError, match=r"metrics\.n.*number_close"):
        score_table(answer, gold, key=["k"], metrics={"n": "number_close"})


def test_a_key_mapper_may_match_other_spellings():
    rows = [{**GOLD[0], "name": "Ada Lovelace"}, GOLD[1]]
    mapper = lambda key, known: next((k for k in known if key[0].startswith(k[0])), None)
    assert not score_table(rows, GOLD, key=["name"]).success
    assert score_table(rows, GOLD, key=["name"], match_key=mapper).success


def test_an_empty_gold_table_or_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match="no rows"):
        score_table("", [], key=["a"])
    with pytest.raises(ConfigError, match="nam"):
        score_table("", GOLD, key=["nam"])


def test_the_last_table_of_the_answer_counts_and_short_rows_are_filled():
    text = "| a |\n|---|\n| 1 |\n\nFinal:\n\n| a | b |\n| :-- | --: |\n| 2 |\n| 3 | 4 | 5 |\nthat was it"
    assert parse_table(text) == [{"a": "2", "b": ""}, {"a": "3", "b": "4"}]


cell = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Zs"]), max_size=12)
table = st.lists(st.tuples(cell.filter(str.strip), cell, cell), max_size=6)


@given(table)
def test_a_rendered_table_is_read_back(rows):
    written = [dict(zip("xyz", row, strict=True)) for row in rows]
    read = parse_table("words before\n\n" + render_table(written, "xyz"))
    assert read == [{k: " ".join(v.split()) for k, v in row.items()} for row in written]


@given(table.filter(bool), table)
def test_scores_stay_between_zero_and_one_and_a_table_equals_itself(gold_rows, rows):
    gold = [dict(zip("xyz", row, strict=True)) for row in gold_rows]
    answer = [dict(zip("xyz", row, strict=True)) for row in rows]
    score = score_table(answer, gold, key=["x"])
    for value in (score.item, score.row):
        assert 0 <= value.precision <= 1 and 0 <= value.recall <= 1 and 0 <= value.f1 <= 1
    assert score.row.f1 <= score.item.f1 + 1e-12
    assert score_table(gold, gold, key=["x"]).success


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser(text):
    parse_table(text)


def reference(answer, gold, key):
    """The definition, written out slowly for exact matches: (item TP, row TP, predicted rows, gold rows)."""
    plain = lambda row: {c: " ".join(str(v).split()).casefold() for c, v in row.items()}

    def distinct(rows):
        kept = []
        for row in map(plain, rows):
            if all(row[key] != other[key] for other in kept):
                kept.append(row)
        return kept

    predicted, true = distinct(answer), distinct(gold)
    pairs = [(p, g) for p in predicted for g in true if p[key] == g[key]]
    cells = [[float(p[c] == g[c]) for c in g] for p, g in pairs]
    return sum(map(sum, cells)), sum(map(min, cells)), len(predicted), len(true)


small = st.sampled_from(["a", "B", "b ", "c", "1"])


@given(
    st.lists(st.tuples(small, small, small), min_size=1, max_size=5),
    st.lists(st.tuples(small, small, small), max_size=5),
)
def test_scores_equal_the_slow_definition(gold_rows, rows):
    gold = [dict(zip("xyz", row, strict=True)) for row in gold_rows]
    answer = [dict(zip("xyz", row, strict=True)) for row in rows]
    item, row, predicted, true = reference(answer, gold, "x")
    score = score_table(answer, gold, key=["x"])
    assert score.item.precision == pytest.approx(item / (3 * predicted) if predicted else 0)
    assert score.item.recall == pytest.approx(item / (3 * true))
    assert score.row.precision == pytest.approx(row / predicted if predicted else 0)
    assert score.row.recall == pytest.approx(row / true)
