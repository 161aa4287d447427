"""A tiktoken rank file becomes the same tokenizer in our format."""

import base64
import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triscale.config import TriScaleError
from triscale.data.published_tokenizer import KIMI_SPLIT, from_ranks, import_tokenizer, read_ranks, special_tokens
from triscale.data.tokenizer import StreamDecoder, byte_alphabet, train_tokenizer

SAMPLE = [
    "def function(self, value):\n    return self.value + 1234567 * value\n" * 3,
    "The quick brown fox doesn't jump; it's HTML5 and camelCaseWords, isn't it?\n" * 3,
    "月之暗面发布了模型。这个模型很好,模型很好。Kimi 是一个模型 abc模型def\n" * 3,
    "привет мир — naïve café ñandú 😀😀 ÄÖÜ  \t\n\n  x" * 3,
]


@cache
def ranks() -> dict[bytes, int]:
    """A small rank file: single bytes first, then merges, made by training on the sample."""
    trained = train_tokenizer(SAMPLE, 900)
    learned = [token for token in trained.token_bytes if len(token) > 1]
    singles = [bytes([byte]) for byte in byte_alphabet().values()]
    return {token: rank for rank, token in enumerate([*singles, *learned])}


@cache
def ours():
    return from_ranks(ranks(), special_tokens_of(len(ranks())))


def special_tokens_of(first: int) -> dict[str, int]:
    names = ["[BOS]", "[EOS]", "<|im_end|>", *(f"<|reserved_token_{first + i}|>" for i in range(3, 256))]
    return {name: first + i for i, name in enumerate(names)}


@cache
def theirs():
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("test", pat_str=KIMI_SPLIT, mergeable_ranks=ranks(), special_tokens={})


TEXT = st.text(alphabet=st.one_of(st.sampled_from("".join(set("".join(SAMPLE)))), st.characters(codec="utf-8")))


@given(st.one_of(TEXT, st.lists(st.sampled_from(SAMPLE[0].split() + SAMPLE[2].split())).map("".join)))
def test_ids_are_those_of_tiktoken(text):
    assert ours().encode(text) == theirs().encode_ordinary(text)
    assert ours().decode(ours().encode(text)) == text


def test_sample_uses_long_tokens():
    """The comparison above is of merges, not of single bytes."""
    ids = ours().encode("".join(SAMPLE))
    assert ids == theirs().encode_ordinary("".join(SAMPLE)) and len(ids) < len("".join(SAMPLE).encode()) / 2


def test_specials_never_come_from_text_and_have_published_ids():
    tokenizer, first = ours(), len(ranks())
    assert tokenizer.bos == first and tokenizer.eos == first + 1 and tokenizer.token_id("<|im_end|>") == first + 2
    assert tokenizer.vocabulary_size == first + 256
    assert max(tokenizer.encode("[BOS]<|im_end|>")) < first
    assert tokenizer.document_ends() == (first, first + 1)


def test_folder_is_read_and_the_result_can_be_saved(tmp_path):
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for token, rank in ranks().items()]
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    first = len(ranks())
    added = {str(first): {"content": "[BOS]"}, str(first + 1): {"content": "[EOS]"}, str(first + 7): {"content": "<x>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = import_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.special["<x>"] == first + 7 and len(tokenizer.special) == 256
    tokenizer.save(tmp_path / "tokenizer.json")
    again = import_tokenizer(tmp_path)  # now from tokenizer.json
    text = SAMPLE[2]
    assert again is not None and again.encode(text) == tokenizer.encode(text) == theirs().encode_ordinary(text)
    stream = StreamDecoder(again)
    assert "".join([stream.feed(i) for i in again.encode(text)]) + stream.flush() == text


def test_broken_rank_files_are_named(tmp_path):
    assert import_tokenizer(tmp_path) is None
    path = tmp_path / "tiktoken.model"
    path.write_bytes(b"YQ== 0\nnot a line\n")
    with pytest.raises(TriScaleError, match="line 2"):
        read_ranks(path)
    path.write_bytes(b"YQ== 0\nYg== 2\n")
    with pytest.raises(TriScaleError, match="each once"):
        read_ranks(path)
    path.write_bytes(b"YQ== 0\nYg== 1\n")
    with pytest.raises(TriScaleError, match="single bytes"):
        read_ranks(path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {}}}')
    with pytest.raises(TriScaleError, match="added_tokens_decoder"):
        special_tokens(tmp_path, 3)
