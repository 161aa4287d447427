"""Preparation: the splits, the cache and what survives a kill; pieces of long texts."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError, TriScaleError, from_dict
from triscale.data import prepare as module
from triscale.data.corpora import FilesCorpus, Ingredient, MixtureCorpus
from triscale.data.heldout import text_rows
from triscale.data.prepare import DataConfig, cut_long, prepare, split_text
from triscale.data.store import TokenStore
from triscale.data.tokenizer import EOS, train_tokenizer


def write_texts(folder, count, word="word"):
    folder.mkdir(exist_ok=True)
    for i in range(count):
        (folder / f"{i:04}.txt").write_text(f"{word} number {i}\n" * (i % 9 + 1))
    return folder


def config_of(*paths, **settings):
    settings = {"vocabulary_size": 300, "heldout_fraction": 0.25, **settings}
    return DataConfig(corpus=FilesCorpus.Config(paths=tuple(map(str, paths))), **settings)


def contents(prepared):
    """{id: text} of both splits, read back from the shards."""
    result = {}
    for store in (prepared.train, prepared.heldout):
        for i in range(len(store)):
            ids = store.document(i).tolist()
            assert (ids[0], ids[-1]) == (prepared.tokenizer.bos, prepared.tokenizer.eos)
            text = prepared.tokenizer.decode(ids)
            assert len(text.encode()) == store.byte_counts[i]
            result[store.ids[i]] = text
    return result


def test_shards_hold_every_document_once(tmp_path):
    folder = write_texts(tmp_path / "text", 80)
    (folder / "copy.txt").write_text((folder / "0007.txt").read_text())
    prepared = prepare(config_of(folder), tmp_path / "cache")
    texts = contents(prepared)
    assert texts == {str(path): path.read_text() for path in sorted(folder.iterdir()) if path.name != "copy.txt"}
    report = prepared.report
    assert report.sources[0].skipped["duplicate"].count == 1
    assert report.sources[0].documents == 80
    assert report.splits["train"]["documents"] + report.splits["heldout"]["documents"] == 80
    assert report.splits["train"]["bytes"] + report.splits["heldout"]["bytes"] == report.sources[0].bytes
    assert report.corpus_hash[:16] in report.lines()[-1] and "duplicate" in report.lines()[1]
    assert 5 <= len(prepared.heldout) <= 35
    assert prepared.train.document(0).dtype == np.uint16


def test_a_document_stays_on_its_side_when_others_come_or_files_are_renamed(tmp_path):
    folder = write_texts(tmp_path / "text", 40)
    first = prepare(config_of(folder), tmp_path / "cache")
    write_texts(folder, 80)
    second = prepare(config_of(folder), tmp_path / "cache")
    assert set(first.train.ids) <= set(second.train.ids) and set(first.heldout.ids) <= set(second.heldout.ids)
    assert first.report.corpus_hash != second.report.corpus_hash
    for path in list(folder.iterdir()):
        path.rename(path.with_name(f"new-{path.name}"))
    third = prepare(config_of(folder), tmp_path / "cache")
    assert third.report.corpus_hash == second.report.corpus_hash
    assert third.train.hash == second.train.hash
    assert set(third.train.ids) == {i.replace("/text/", "/text/new-") for i in second.train.ids}


def test_cache_is_reused_and_keyed_by_everything_that_matters(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "text", 30)
    first = prepare(config_of(folder), tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_build", None)  # calling it would fail
        assert prepare(config_of(folder), tmp_path / "cache").folder == first.folder
    others = [
        prepare(config_of(folder, **change), tmp_path / "cache").folder
        for change in ({"vocabulary_size": 301}, {"heldout_fraction": 0.3}, {"tokenizer_sample_bytes": 500})
    ]
    (folder / "0000.txt").write_text("another text")
    others.append(prepare(config_of(folder), tmp_path / "cache").folder)
    assert len({first.folder, *others}) == 5
    leftover = [entry.name for entry in (tmp_path / "cache").iterdir() if ".tmp-" in entry.name]
    assert leftover == []


def test_the_cut_of_a_single_document_is_part_of_the_key(tmp_path):
    (tmp_path / "a.txt").write_text("one line of text\n" * 300)
    sizes = [prepare(config_of(tmp_path / "a.txt", heldout_fraction=fraction), tmp_path / "cache").heldout.bytes
             for fraction in (0.1, 0.4)]  # fmt: skip
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("damage", ["marker", "short", "long", "gone", "index", "tokenizer"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    folder = write_texts(tmp_path / "text", 30)
    first = prepare(config_of(folder), tmp_path / "cache")
    expected, place = contents(first), first.folder
    shards = place / "train.bin"
    if damage == "marker":
        (place / "COMPLETE").unlink()
    elif damage == "short":
        os.truncate(shards, shards.stat().st_size - 1)
    elif damage == "long":
        os.truncate(shards, shards.stat().st_size + 2)
    elif damage == "gone":
        (place / "heldout.documents.npy").unlink()
    elif damage == "index":
        (place / "train.json").write_text("{")
    else:
        (place / "tokenizer.json").write_text("{}")
    built = shards.stat().st_mtime_ns
    assert contents(prepare(config_of(folder), tmp_path / "cache")) == expected
    assert shards.stat().st_mtime_ns > built and (place / "COMPLETE").exists()


@pytest.mark.parametrize("where", ["reading", "training the tokenizer", "encoding"])
def test_an_interrupted_build_leaves_nothing_and_the_next_one_succeeds(tmp_path, where):
    folder = write_texts(tmp_path / "text", 30)

    def interrupt(stage, done, total):
        if stage == where:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config_of(folder), tmp_path / "cache", interrupt)
    assert [path.name for path in tmp_path.glob("cache/*") if path.suffix != ".lock"] == []
    assert len(contents(prepare(config_of(folder), tmp_path / "cache"))) == 30


def test_a_killed_build_leaves_nothing_readable_and_its_rest_is_removed(tmp_path):
    folder = write_texts(tmp_path / "text", 30)
    script = (
        "import os, signal, sys\n"
        "from triscale.data.corpora import FilesCorpus\n"
        "from triscale.data.prepare import DataConfig, prepare\n"
        "def kill(stage, done, total):\n"
        "    if stage == 'encoding': os.kill(os.getpid(), signal.SIGKILL)\n"
        "corpus = FilesCorpus.Config(paths=(sys.argv[1],))\n"
        "prepare(DataConfig(corpus=corpus, vocabulary_size=300, heldout_fraction=0.25), sys.argv[2], kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder), str(tmp_path / "cache")], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cache").glob(".*.tmp-*"))) == 1
    assert not list((tmp_path / "cache").glob("tokens-*"))
    prepared = prepare(config_of(folder), tmp_path / "cache")
    assert len(contents(prepared)) == 30
    assert not list((tmp_path / "cache").glob(".*.tmp-*"))


def _prepare_slowly(folder, cache, queue):
    builds = []

    def progress(stage, done, total):
        if stage == "encoding":
            builds.append(1)
            time.sleep(0.2)

    prepared = prepare(config_of(folder), cache, progress)
    queue.put((len(builds), prepared.train.hash))


def test_processes_that_need_the_same_data_build_it_once(tmp_path):
    folder = write_texts(tmp_path / "text", 30)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=_prepare_slowly, args=(folder, tmp_path / "cache", queue)) for _ in range(3)]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(builds > 0 for builds, _ in results) == [False, False, True]
    assert len({digest for _, digest in results}) == 1


def test_text_that_changes_while_it_is_read_is_an_error(tmp_path):
    folder = write_texts(tmp_path / "text", 30)

    def meddle(stage, done, total):
        if stage == "training the tokenizer":
            (folder / "0003.txt").write_text("changed")

    with pytest.raises(TriScaleError, match=r"0003\.txt changed while"):
        prepare(config_of(folder), tmp_path / "cache", meddle)

    def remove(stage, done, total):
        if stage == "training the tokenizer":
            (folder / "0029.txt").unlink(missing_ok=True)

    with pytest.raises(TriScaleError, match=r"0029\.txt disappeared"):
        prepare(config_of(folder), tmp_path / "cache", remove)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_few_documents_still_give_both_splits(tmp_path, count, fraction):
    folder = write_texts(tmp_path / "text", count)
    (folder / "0000.txt").write_text("first line of a long text\n" * 500)
    prepared = prepare(config_of(folder, heldout_fraction=fraction), tmp_path / "cache")
    assert len(prepared.train) and len(prepared.heldout)
    texts = contents(prepared)
    if count == 1:
        head, tail = texts[f"{folder}/0000.txt#train"], texts[f"{folder}/0000.txt#heldout"]
        assert head + tail == (folder / "0000.txt").read_text()
        assert "one document only" in "\n".join(prepared.report.lines())


def test_one_character_is_too_little(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match="cannot be split"):
        prepare(config_of(tmp_path / "a.txt"), tmp_path / "cache")


@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=2, max_size=300), fraction=st.floats(0.001, 0.999))
def test_split_text_loses_nothing(text, fraction):
    head, tail = split_text(text, fraction)
    assert head and tail and head + tail == text


def test_split_text_prefers_a_line_end():
    text = "line one\nline two\nline three\nline four\n"
    assert split_text(text, 0.3) == ("line one\nline two\nline three\n"[:18], text[18:])


TOKENIZER = train_tokenizer(["def f(x):\n    return x;\n\n\nclass A:\n  pass\r\n" * 30], 400)


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet=" \t\n\r\x0b\x0c\x1c\x85\u2028\xa0ab1.;é你\u0301", max_size=200) | st.text(max_size=200),
    limit=st.integers(1, 30),
)
def test_long_texts_in_pieces_give_the_tokens_of_the_whole(text, limit):
    pieces = cut_long(text, limit)
    assert "".join(pieces) == text
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert [i for piece in pieces for i in TOKENIZER.encode(piece)] == TOKENIZER.encode(text)


def test_cut_long_does_cut():
    assert cut_long("ab\ncd\n\n  ef\ngh\n", 2) == ["ab\n", "cd\n\n  ef\n", "gh\n"]
    assert cut_long("\n" * 10, 2) == ["\n" * 10]
    assert cut_long("", 2) == [""]


def test_long_documents_go_through_in_pieces(tmp_path, monkeypatch):
    folder = write_texts(tmp_path / "text", 10)
    (folder / "long.txt").write_text("".join(f"line {i} of it\n" for i in range(3000)))
    whole = prepare(config_of(folder), tmp_path / "one")
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(module, "cut_long", lambda text: cut_long(text, 300))
    pieces = prepare(config_of(folder), tmp_path / "two")
    assert (pieces.train.hash, pieces.heldout.hash) == (whole.train.hash, whole.heldout.hash)
    assert contents(pieces) == contents(whole)


def test_progress_goes_up_to_the_total(tmp_path):
    folder = write_texts(tmp_path / "text", 30)
    calls = []
    prepared = prepare(config_of(folder), tmp_path / "cache", lambda *call: calls.append(call))
    assert {stage for stage, _, _ in calls} == {"reading", "training the tokenizer", "encoding"}
    size = prepared.report.sources[0].bytes
    assert calls[-1] == ("encoding", size, size)
    assert [call for call in calls if call[0] == "reading"][-1] == ("reading", size, 0)


def test_a_given_tokenizer_is_used_as_it_is(tmp_path):
    folder = write_texts(tmp_path / "text", 30)
    TOKENIZER.save(tmp_path / "t.json")
    prepared = prepare(config_of(folder, tokenizer=str(tmp_path / "t.json")), tmp_path / "cache")
    assert prepared.tokenizer.hash == TOKENIZER.hash and len(contents(prepared)) == 30
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text().replace(EOS, "<|end|>"))
    with pytest.raises(ConfigError, match="lacks the special tokens"):
        prepare(config_of(folder, tokenizer=str(tmp_path / "t.json")), tmp_path / "cache")
    with pytest.raises(TriScaleError, match="no such tokenizer"):
        prepare(config_of(folder, tokenizer=str(tmp_path / "none.json")), tmp_path / "cache")


def mixture_of(*folders, **weights):
    sources = tuple(Ingredient(corpus=FilesCorpus.Config(paths=(str(folder),)), name=folder.name) for folder in folders)
    return DataConfig(corpus=MixtureCorpus.Config(sources=sources), vocabulary_size=300, heldout_fraction=0.25)


def test_mixture_removes_duplicates_across_sources_and_splits_each(tmp_path):
    a, b = write_texts(tmp_path / "a", 30, "alpha"), write_texts(tmp_path / "b", 12, "beta")
    shutil.copy(a / "0004.txt", b / "copy.txt")
    prepared = prepare(mixture_of(a, b), tmp_path / "cache")
    assert [report.source for report in prepared.report.sources] == ["a", "b"]
    assert prepared.report.sources[1].skipped["duplicate"].count == 1
    assert prepared.report.sources[1].documents == 12
    assert "training rows: 50.0% a, 50.0% b" in prepared.report.lines()
    for store in (prepared.train, prepared.heldout):
        for number, name in enumerate("ab"):
            documents = store.of_source(number)
            assert len(documents) and all(f"/{name}/" in store.ids[i] for i in documents)
    with pytest.raises(ConfigError, match="also in an earlier source"):
        prepare(mixture_of(a, a), tmp_path / "cache")


class OwnCorpus:
    """A user's corpus, found by its import path."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        count: int = 20

        def build(self):
            return OwnCorpus(self)

    name = "own"

    def __init__(self, config):
        self.count = config.count

    def documents(self, report):
        report.skip("unreadable", "gone")
        for i in range(self.count):
            yield report.found(f"made/{i}", f"made text number {i}")


def test_a_corpus_of_ones_own(tmp_path):
    corpus = {"kind": f"{__name__}:OwnCorpus", "count": 30}
    config = from_dict(DataConfig, {"corpus": corpus, "vocabulary_size": 300}, "data")
    prepared = prepare(config, tmp_path / "cache")
    assert len(contents(prepared)) == prepared.report.sources[0].documents == 30
    assert prepared.report.warnings()[0] == "own: left out, unreadable: 1 (0 bytes), gone"
    assert prepared.sources[0].name == prepared.report.sources[0].source == "own"


def test_wide_vocabularies_take_four_bytes(tmp_path):
    writer = module.StoreWriter(tmp_path, "train", 70_000)
    writer.extend([0, 69_999], 4)
    writer.extend([1], 0)
    writer.end_document("x", 0)
    writer.close()
    store = TokenStore.open(tmp_path, "train")
    assert store.document(0).dtype == np.uint32 and store.document(0).tolist() == [0, 69_999, 1]


def test_own_texts_as_rows():
    rows = text_rows(TOKENIZER, {"a": "hello there\n" * 9, "b": "你好", "c": ""}, 8)
    assert rows.bytes == 9 * 12 + 6
    (batch,) = rows.batches(10**6)
    assert {name for names in batch.document_ids for name in names} == {"a", "b", "c"}
    assert batch.weights.sum() == rows.tokens


def test_python_corpus_end_to_end(tmp_path):
    prepared = prepare(DataConfig(), tmp_path / "cache")
    assert prepared.tokenizer.vocabulary_size == 4096
    assert prepared.train.tokens > 2_500_000
    assert 0.01 < prepared.heldout.bytes / (prepared.train.bytes + prepared.heldout.bytes) < 0.12
    assert prepared.train.bytes / prepared.train.tokens > 2.8
