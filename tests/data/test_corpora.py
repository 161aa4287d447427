"""Corpora: everything unusable is counted by its reason, everything missing is an error, the order is fixed."""

import json
import os
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from triscale.config import ConfigError, MissingExtraError, TriScaleError, dump_toml, from_dict, read_toml, to_dict
from triscale.data.corpora import FilesCorpus, MixtureCorpus, PythonCorpus, corpus_hash, ingredients
from triscale.data.formats import NAMES_KEPT, CorpusReport
from triscale.data.prepare import DataConfig


def read(*paths, **settings):
    report = CorpusReport()
    config = FilesCorpus.Config(paths=tuple(map(str, paths)), **settings)
    return list(config.build().documents(report)), report


def reasons(report):
    return {reason: entry.count for reason, entry in report.skipped.items()}


def write_parquet(path, texts, name="text"):
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), name: texts}), path)


def test_hostile_folder_is_counted_by_reason(tmp_path):
    folder = tmp_path / "text"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / ".secret").write_text("hidden")
    (folder / "b.txt").write_text("good b")
    (folder / "sub" / "a.md").write_text("good a")
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (folder / "crlf.txt").write_bytes(b"one\r\ntwo")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "blank.txt").write_text(" \n\t\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0")
    (folder / "latin.txt").write_bytes("Grüße und so".encode("latin-1"))
    (folder / "utf16.txt").write_bytes("text".encode("utf-16"))
    (folder / "cut.txt").write_bytes("text 你".encode()[:-1])
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'Köln'\n".encode("latin-1"))
    (folder / "lies.py").write_bytes(b"# coding: no-such-codec\n")
    (folder / "rot.py").write_bytes(b"# coding: rot13\nprint(1)\n")
    (folder / "escape.py").write_bytes(b"# coding: unicode_escape\n'\\ud800'\n")
    os.mkfifo(folder / "pipe")  # opening it would wait forever
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder)
    documents, report = read(folder)
    assert [document.id.removeprefix(f"{folder}/") for document in documents] == [
        "b.txt", "bom.txt", "crlf.txt", "latin.py", "sub/a.md"
    ]  # fmt: skip
    texts = {document.id.rsplit("/", 1)[1]: document.text for document in documents}
    assert texts["bom.txt"] == "with a mark" and texts["crlf.txt"] == "one\r\ntwo" and "Köln" in texts["latin.py"]
    assert reasons(report) == {
        "empty": 2, "binary": 1, "wrong_encoding": 5, "truncated": 1, "not_a_file": 1, "unreadable": 1, "hidden": 2,
        "symlink": 1,
    }  # fmt: skip
    assert report.documents == 5 and report.bytes == sum(len(text.encode()) for text in texts.values())
    for reason in reasons(report):
        assert any(reason.replace("_", " ") in line for line in report.lines())
    assert any("cut.txt" in line for line in report.lines())
    json.dumps(report.to_dict())


def test_unreadable_folder_is_counted(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def guarded(path):
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    documents, report = read(tmp_path)
    assert len(documents) == 1 and reasons(report) == {"unreadable": 1}
    assert "closed" in report.skipped["unreadable"].names[0]


def test_counts_stay_complete_when_names_are_cut(tmp_path):
    for i in range(NAMES_KEPT + 30):
        (tmp_path / f"{i:03}.txt").write_text("")
    (tmp_path / "z.txt").write_text("text")
    _, report = read(tmp_path)
    assert reasons(report) == {"empty": NAMES_KEPT + 30}
    assert len(report.skipped["empty"].names) == NAMES_KEPT
    assert "and 47 more" in report.lines()[1]


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".JSONL"])
def test_json_lines(tmp_path, ending):
    path = tmp_path / f"data{ending}"
    lines = [
        json.dumps({"text": "one"}), "", json.dumps({"text": "zwei 你"}, ensure_ascii=False), "{broken",
        json.dumps({"body": "x"}), json.dumps(["text"]), json.dumps({"text": 3}), json.dumps({"text": " "}),
        '{"text": "\\ud800"}', "[" * 100_000, json.dumps({"text": "five"}),
    ]  # fmt: skip
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n{"text": "cut of')
    documents, report = read(path)
    assert [(d.id.rsplit(":", 1)[1], d.text) for d in documents] == [("1", "one"), ("3", "zwei 你"), ("11", "five")]
    assert reasons(report) == {"not_json": 2, "no_text_field": 3, "empty": 1, "wrong_encoding": 2, "truncated": 1}
    assert report.skipped["truncated"].names == [f"{path}:13"]


def test_a_last_line_without_line_end_counts(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "whole"}')  # and a byte order mark is no error
    assert [document.text for document in read(tmp_path)[0]] == ["whole"]


def test_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", None, "", "zwei 你"])
    write_parquet(tmp_path / "b.parquet", ["other"], name="body")
    write_parquet(tmp_path / "c.parquet", [])
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "e.parquet").write_bytes(b"")
    (tmp_path / "f.parquet").write_bytes(b"hello, not columns at all")
    write_parquet(tmp_path / "g.parquet", [1, 2])
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"\xffok")]
    )
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "h.parquet")
    documents, report = read(tmp_path)
    assert [(Path(d.id).name, d.text) for d in documents] == [
        ("a.parquet:1", "one"), ("a.parquet:4", "zwei 你"), ("h.parquet:2", "ok")
    ]  # fmt: skip
    assert reasons(report) == {"empty": 4, "no_text_field": 3, "truncated": 1, "binary": 1, "wrong_encoding": 1}
    documents, _ = read(tmp_path / "b.parquet", text_field="body")
    assert [document.text for document in documents] == ["other"]


def test_parquet_damaged_in_the_middle_keeps_what_was_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"text {i} " * 50 for i in range(4000)]})
    parquet.write_table(table, path, row_group_size=1000, compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    group = parquet.ParquetFile(path).metadata.row_group(2).column(0)
    start = group.data_page_offset
    data[start : start + 200] = b"\xff" * 200
    path.write_bytes(data)
    documents, report = read(path)
    assert 0 < len(documents) < 4000
    assert [document.text for document in documents] == table["text"].to_pylist()[: len(documents)]
    assert reasons(report) == {"truncated": 1}


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ["one"])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"triscale\[data\]"):
        read(tmp_path)


def test_missing_input_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for missing in (tmp_path / "no.txt", tmp_path / "*.parquet", tmp_path / "no" / "**"):
        with pytest.raises(ConfigError, match="does not exist"):
            read(tmp_path / "a.txt", missing)
    with pytest.raises(ConfigError, match="no path"):
        FilesCorpus.Config(paths=())


def test_nothing_usable_is_an_error_that_says_why(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    with pytest.raises(ConfigError, match=r"no_text_field 2.*text_field"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file"):
        read(tmp_path / "empty")


@pytest.mark.parametrize("first", [0, 1])
def test_a_missing_shard_is_an_error(tmp_path, first):
    for i in range(first, first + 4):
        (tmp_path / f"train-{i:05}-of-00004.jsonl").write_text(json.dumps({"text": f"shard {i}"}))
    assert len(read(tmp_path)[0]) == 4
    gone = tmp_path / f"train-{first + 2:05}-of-00004.jsonl"
    gone.unlink()
    with pytest.raises(ConfigError, match=rf"{gone.name} are missing"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="missing"):
        read(tmp_path / "train-*.jsonl")
    assert len(read(tmp_path, partial_shards=True)[0]) == 3


def test_order_and_overlap(tmp_path):
    for name in ("b/2.txt", "b/10.txt", "a/1.txt", "B/3.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    names = [document.text for document in read(tmp_path)[0]]
    assert names == ["B/3.txt", "a/1.txt", "b/10.txt", "b/2.txt"]
    # a file that several paths name is read once, where it is named first
    again = [document.text for document in read(tmp_path / "b" / "2.txt", tmp_path, tmp_path / "*" / "*.txt")[0]]
    assert again == ["b/2.txt", "B/3.txt", "a/1.txt", "b/10.txt"]
    (tmp_path / "link.txt").symlink_to(tmp_path / "a" / "1.txt")
    same = (tmp_path / "a" / "1.txt", tmp_path / "b" / ".." / "a" / "1.txt", tmp_path / "link.txt")
    assert [document.text for document in read(*same)[0]] == ["a/1.txt"]
    (tmp_path / "link.txt").unlink()
    assert [d.text for d in read(tmp_path / "b", tmp_path / "a")[0]] == ["b/10.txt", "b/2.txt", "a/1.txt"]
    (tmp_path / "b" / ".hidden").write_text("x")
    documents, report = read(tmp_path / "**")
    assert [document.text for document in documents] == names and reasons(report) == {"hidden": 1}


def test_corpus_hash_is_of_contents_not_order():
    assert corpus_hash([b"a" * 32, b"b" * 32]) == corpus_hash([b"b" * 32, b"a" * 32])
    assert corpus_hash([b"a" * 32]) != corpus_hash([b"a" * 32, b"b" * 32])


def test_python_corpus_is_the_library_without_its_tests():
    report = CorpusReport()
    documents = list(PythonCorpus().documents(report))
    ids = [document.id for document in documents]
    assert ids == sorted(ids) and len(set(ids)) == len(ids)
    assert {"json/decoder.py", "argparse.py", "asyncio/tasks.py", "pydoc_data/topics.py"} <= set(ids)
    assert not [i for i in ids if {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(i.split("/"))]
    assert not [i for i in ids if i.startswith("_sysconfigdata")]  # made by this machine's build
    assert 9e6 < report.bytes < 15e6
    assert report.source == "python"


def test_python_corpus_without_sources_says_what_to_do(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("x = 1")
    with pytest.raises(TriScaleError, match=r"corpus\.kind=files"):
        list(PythonCorpus(tmp_path).documents(CorpusReport()))
    assert PythonCorpus().root == Path(sysconfig.get_path("stdlib"))


def test_config_round_trips_through_toml(tmp_path):
    tree = {
        "corpus": {
            "kind": "mixture",
            "sources": [
                {"corpus": {"kind": "python"}, "weight": 2.0},
                {"corpus": {"kind": "files", "paths": ["a", "b/*.txt"], "text_field": "body"}, "name": "mine"},
            ],
        },
        "vocabulary_size": 512,
    }
    config = from_dict(DataConfig, tree, "data")
    (tmp_path / "c.toml").write_text(dump_toml(to_dict(config)))
    assert from_dict(DataConfig, read_toml(tmp_path / "c.toml"), "data") == config
    assert from_dict(DataConfig, to_dict(DataConfig()), "data") == DataConfig()
    parts = ingredients(config.corpus.build())
    assert [(name, round(weight, 3)) for name, weight, _ in parts] == [("python", 0.667), ("mine", 0.333)]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"heldout_fraction": 0.0}, "heldout_fraction"),
        ({"heldout_fraction": 1.0}, "heldout_fraction"),
        ({"heldout_fraction": float("nan")}, "heldout_fraction"),
        ({"vocabulary_size": 100}, "vocabulary_size"),
        ({"tokenizer_sample_bytes": 0}, "tokenizer_sample_bytes"),
        ({"corpus": {"kind": "file"}}, "Did you mean 'files'"),
        ({"corpus": {"kind": "files"}}, "paths: this field is required"),
        ({"corpus": {"kind": "mixture", "sources": []}}, "at least one source"),
        ({"corpus": {"kind": "mixture", "sources": [{"corpus": {"kind": "python"}, "weight": 0.0}]}}, "positive"),
        ({"corpus": {"kind": "mixture", "sources": [{"weight": 1.0}]}}, "corpus: this field is required"),
    ],
)
def test_bad_settings_are_named(tree, problem):
    with pytest.raises(ConfigError, match=problem):
        from_dict(DataConfig, tree, "data")


def test_a_mixture_of_mixtures_is_refused():
    inner = {"kind": "mixture", "sources": [{"corpus": {"kind": "python"}}]}
    with pytest.raises(ConfigError, match="another mixture"):
        from_dict(MixtureCorpus.Config, {"sources": [{"corpus": inner}]}, "data.corpus")
