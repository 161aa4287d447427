"""The loader's row sequence: the same however it is asked for, resumed, or spread over ranks."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError, TriScaleError
from triscale.data.corpora import FilesCorpus, Ingredient, MixtureCorpus
from triscale.data.heldout import HeldoutRows, bits_per_byte
from triscale.data.loader import Loader
from triscale.data.packing import Packing, permutation
from triscale.data.prepare import DataConfig, prepare

LENGTH = 16


def write_texts(folder, count, word):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"{word} {i} " * (1 + i * 7 % 40))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    root = tmp_path_factory.mktemp("one")
    write_texts(root / "text", 60, "alpha")
    corpus = FilesCorpus.Config(paths=(str(root / "text"),))
    return prepare(DataConfig(corpus=corpus, vocabulary_size=300, heldout_fraction=0.2), root / "cache")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixed")
    write_texts(root / "a", 60, "alpha")
    write_texts(root / "b", 20, "beta")
    sources = (
        Ingredient(corpus=FilesCorpus.Config(paths=(str(root / "a"),)), weight=3.0, name="a"),
        Ingredient(corpus=FilesCorpus.Config(paths=(str(root / "b"),)), weight=1.0, name="b"),
    )
    corpus = MixtureCorpus.Config(sources=sources)
    return prepare(DataConfig(corpus=corpus, vocabulary_size=300, heldout_fraction=0.2), root / "cache")


def flat(batches):
    """Every field of a list of Rows, row by row."""
    return [
        (rows.tokens[i].tolist(), rows.targets[i].tolist(), rows.weights[i].tolist(), rows.boundaries[i],
         rows.document_ids[i])
        for rows in batches
        for i in range(len(rows))
    ]  # fmt: skip


@pytest.mark.parametrize("data", ["one", "mixed"])
@settings(max_examples=25, deadline=None)
@given(calls=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 2**63 - 1))
def test_rows_do_not_depend_on_how_many_are_asked_for(data, calls, seed, request):
    prepared = request.getfixturevalue(data)
    loader, whole = Loader(prepared, LENGTH, seed), Loader(prepared, LENGTH, seed)
    assert flat([loader.next(n) for n in calls]) == flat([whole.next(sum(calls))])
    assert loader.state_dict() == whole.state_dict()


@pytest.mark.parametrize("data", ["one", "mixed"])
@settings(max_examples=25, deadline=None)
@given(calls=st.lists(st.integers(1, 5), min_size=1, max_size=6), world=st.integers(1, 4))
def test_ranks_together_read_the_rows_of_one(data, calls, world, request):
    prepared = request.getfixturevalue(data)
    solo = flat([Loader(prepared, LENGTH, 5).next(sum(calls) * world)])
    ranks = [Loader(prepared, LENGTH, 5, rank, world) for rank in range(world)]
    parts = [flat([loader.next(n) for n in calls]) for loader in ranks]
    assert [row for rows in zip(*parts, strict=True) for row in rows] == solo
    assert len({str(loader.state_dict()) for loader in ranks}) == 1


@pytest.mark.parametrize("data", ["one", "mixed"])
@settings(max_examples=40, deadline=None)
@given(before=st.integers(0, 700), after=st.integers(1, 40), world=st.integers(1, 3))
def test_resumed_equals_straight_in_any_epoch_and_world(data, before, after, world, request):
    prepared = request.getfixturevalue(data)
    straight = Loader(prepared, LENGTH, 9)
    if before:
        straight.next(before)
    state = straight.state_dict()
    expected = flat([straight.next(after * world)])
    ranks = [Loader(prepared, LENGTH, 9, rank, world) for rank in range(world)]
    for loader in ranks:
        loader.load_state_dict(state)
    parts = [flat([loader.next(after)]) for loader in ranks]
    assert [row for rows in zip(*parts, strict=True) for row in rows] == expected


def test_an_epoch_reads_every_input_once_and_the_next_one_in_another_order(one):
    loader = Loader(one, LENGTH, 3)
    count = loader.rows_per_epoch[0]
    first, second = loader.next(count), loader.next(count)
    assert loader.epochs == [2.0]
    assert flat([first]) != flat([second])
    inputs = int((one.train.lengths - 1).sum())
    assert inputs - LENGTH < count * LENGTH <= inputs
    everything = np.concatenate([one.train.document(i)[:-1] for i in range(len(one.train))])
    counts = np.bincount(everything, minlength=300)
    for rows in (first, second):
        used = np.bincount(rows.tokens.ravel(), minlength=300)
        assert (used <= counts).all() and (counts - used).sum() == inputs - count * LENGTH


def test_documents_are_packed_anew_each_epoch(one):
    loader = Loader(one, LENGTH, 3)
    first, second = ({tuple(row) for row in loader.next(loader.rows_per_epoch[0]).tokens.tolist()} for _ in range(2))
    assert len(first & second) < len(first) // 2


def test_rows_of_a_long_document_are_scattered_and_scattered_anew(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(3000))))
    corpus = FilesCorpus.Config(paths=(str(tmp_path / "text.txt"),))
    prepared = prepare(DataConfig(corpus=corpus, vocabulary_size=300), tmp_path / "cache")
    loader = Loader(prepared, LENGTH, 0)
    in_place = Packing(prepared.train, np.arange(1), LENGTH)
    place = {tuple(prepared.train.document(*in_place.pieces(row)[0][:2])[:LENGTH].tolist()): row
             for row in range(in_place.full_rows)}  # fmt: skip
    assert len(place) == loader.rows_per_epoch[0] > 100
    epochs = [[place[tuple(row)] for row in loader.next(len(place)).tokens.tolist()] for _ in range(2)]
    for order in epochs:
        assert sorted(order) == list(range(len(place)))
        assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < len(place) // 10
    assert epochs[0] != epochs[1]


def test_another_seed_gives_another_order(one):
    assert flat([Loader(one, LENGTH, 1).next(8)]) != flat([Loader(one, LENGTH, 2).next(8)])


@pytest.mark.parametrize("row_length", [1, 2, 7, 16, 100])
def test_every_piece_is_a_run_of_its_document_with_true_targets(one, row_length):
    stored = {one.train.ids[i]: one.train.document(i).tolist() for i in range(len(one.train))}
    rows = Loader(one, row_length, 4).next(200)
    assert rows.tokens.dtype == rows.targets.dtype == np.int64 and rows.weights.dtype == np.float32
    for number in range(len(rows)):
        starts = rows.boundaries[number]
        assert starts[0] == 0 and len(starts) == len(rows.document_ids[number])
        for (begin, end), name in zip(pairwise([*starts, row_length]), rows.document_ids[number], strict=True):
            run = [*rows.tokens[number, begin:end].tolist(), int(rows.targets[number, end - 1])]
            assert rows.targets[number, begin:end].tolist() == run[1:]
            assert any(stored[name][i : i + len(run)] == run for i in range(len(stored[name])))
            assert begin == 0 or run[0] == one.tokenizer.bos  # only a row's first piece continues a document
    assert (rows.weights == 1).all()


def test_mixture_keeps_its_proportions_at_every_moment(mixed):
    loader = Loader(mixed, LENGTH, 0)
    small = 0
    for row in range(1, 401):
        small += "/b/" in loader.next(1).document_ids[0][0]
        assert abs(small - row / 4) <= 1
    epochs = loader.epochs
    assert epochs[1] > 1  # the small source has started over


def test_a_row_never_mixes_sources(mixed):
    for names in Loader(mixed, LENGTH, 0).next(300).document_ids:
        assert len({"/b/" in name for name in names}) == 1


def test_state_is_small_and_refuses_other_data_or_settings(one, mixed):
    loader = Loader(one, LENGTH, 3)
    loader.next(loader.rows_per_epoch[0] + 5)
    state = loader.state_dict()
    assert state["sources"] == [{"epoch": 1, "position": 5}]
    for other, what in ((Loader(one, LENGTH, 4), "seed"), (Loader(one, LENGTH + 1, 3), "row_length"),
                        (Loader(mixed, LENGTH, 3), "data")):  # fmt: skip
        with pytest.raises(TriScaleError, match=f"saved with {what} ="):
            other.load_state_dict(state)
    assert json.loads(json.dumps(state)) == state


def test_rows_longer_than_the_data_are_refused(one):
    with pytest.raises(ConfigError, match="Use shorter rows"):
        Loader(one, 10**7, 0)


@pytest.mark.parametrize("row_length", [1, 5, 16, 10_000])
@pytest.mark.parametrize("max_rows", [None, 1, 3])
def test_heldout_counts_every_target_once(one, row_length, max_rows):
    heldout = HeldoutRows(one, row_length, max_rows)
    batches = list(heldout.batches(4))
    assert sum(map(len, batches)) == heldout.rows
    assert sum(float(rows.weights.sum()) for rows in batches) == heldout.tokens
    assert sum(map(heldout.count_bytes, batches)) == heldout.bytes
    assert flat(batches) == flat(HeldoutRows(one, row_length, max_rows).batches(1))
    if max_rows is None:
        assert heldout.tokens == one.heldout.tokens - len(one.heldout)
        assert heldout.bytes == one.heldout.bytes


def test_heldout_of_one_source(mixed):
    both = [HeldoutRows(mixed, LENGTH, source=name) for name in ("a", "b")]
    assert sum(part.bytes for part in both) == HeldoutRows(mixed, LENGTH).bytes
    with pytest.raises(ConfigError, match="Known: a, b"):
        HeldoutRows(mixed, LENGTH, source="c")


def test_bits_per_byte():
    assert bits_per_byte(8 * np.log(2), 4) == pytest.approx(2.0)


def test_heldout_and_train_share_no_document(one):
    assert not set(one.train.ids) & set(one.heldout.ids)


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 500), keys=st.lists(st.integers(0, 2**64 - 1), max_size=4))
def test_permutation_is_one(count, keys):
    assert sorted(permutation(count, *keys).tolist()) == list(range(count))


def test_permutation_is_frozen():
    """Saved positions refer to this order: changing it would silently replay data in resumed runs."""
    assert permutation(10, 0).tolist() == [4, 8, 0, 1, 7, 6, 2, 5, 3, 9]


class FakeStore:
    """Lengths only: what packing needs to lay out rows."""

    def __init__(self, lengths):
        self.lengths = np.asarray(lengths, np.int64)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    row_length=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_packing_covers_each_input_once(lengths, row_length, seed):
    packing = Packing(FakeStore(lengths), permutation(len(lengths), seed), row_length)
    seen = []
    for row in range(packing.full_rows + 1):
        pieces = packing.pieces(row)
        width = sum(piece.length for piece in pieces)
        assert width == row_length or row == packing.full_rows
        seen += [(piece.document, i) for piece in pieces for i in range(piece.start, piece.start + piece.length)]
    assert sorted(seen) == [(d, i) for d, length in enumerate(lengths) for i in range(length - 1)]
