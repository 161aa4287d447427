"""Byte-level BPE: round trips, specials that text cannot forge, streaming that never breaks a character."""

import json
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError, TriScaleError
from triscale.data.tokenizer import SPECIALS, StreamDecoder, Tokenizer, byte_alphabet, train_tokenizer

TEXT = [
    "def add(a, b):\n    return a + b\n\n" * 20,
    "The quick brown fox jumps over the lazy dog. 1234567 times!\r\n" * 20,
    "Grüße aus Köln, 你好世界, こんにちは 👩‍👩‍👧‍👦 🇩🇪 <|im_end|> text\n" * 20,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 600)


ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
CODE_LIKE = st.text(alphabet=" \t\n\r\x0b\x85\u2028\xa0\x1cab1.;{é你👩\u200d\u0301", max_size=80)
FORGED = st.lists(st.sampled_from([*SPECIALS[:6], "<|", "|>", "<think>", " ", "x", "<|bos|", "|bos|>"])).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=ANY_TEXT | CODE_LIKE | FORGED)
@example(text="")
@example(text="<|bos|><|eos|>")
def test_text_survives_and_never_yields_a_special(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.special.values())
    assert all(0 <= i < tokenizer.vocabulary_size for i in ids)
    assert sum(tokenizer.byte_lengths[i] for i in ids) == len(text.encode())


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(ANY_TEXT | CODE_LIKE | FORGED, max_size=6))
def test_batch_equals_one_by_one(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), show=st.booleans())
def test_streamed_equals_whole_for_any_ids(tokenizer, data, show):
    """Any ids, valid text or not: broken bytes, specials in the middle of a character, the end cut off."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocabulary_size - 1), max_size=40))
    stream = StreamDecoder(tokenizer, show_special=show)
    deltas = [stream.feed(i) for i in ids]
    assert "".join(deltas) + stream.flush() == tokenizer.decode(ids, show_special=show)
    assert stream.flush() == ""


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="a你👩\u200d👧🇩🇪é\u0301", max_size=20))
def test_no_broken_character_is_ever_shown(tokenizer, text):
    """Byte by byte, the worst a vocabulary can do: each prefix shown is a prefix of the text."""
    by_byte = {token: i for i, token in enumerate(tokenizer.token_bytes) if len(token) == 1}
    stream = StreamDecoder(tokenizer)
    shown = ""
    for byte in text.encode():
        shown += stream.feed(by_byte[bytes([byte])])
        assert text.startswith(shown)
    assert shown == text and stream.flush() == ""


def test_an_unfinished_character_comes_out_with_the_flush(tokenizer):
    ids = [i for i, token in enumerate(tokenizer.token_bytes) if token == b"\xf0"]
    stream = StreamDecoder(tokenizer)
    assert stream.feed(ids[0]) == ""
    assert stream.flush() == "\ufffd" == tokenizer.decode(ids[:1])
    assert stream.feed(tokenizer.encode("a")[0]) == "a"  # usable again


def test_our_decode_is_the_librarys(tokenizer):
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    for text in TEXT:
        ids = tokenizer.encode(text)
        assert inner.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) == text


def test_specials_have_fixed_ids_and_names(tokenizer):
    assert [tokenizer.special[name] for name in SPECIALS] == list(range(32))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2)
    assert tokenizer.decode([0, *tokenizer.encode("a"), 1]) == "a"
    assert tokenizer.decode([0, *tokenizer.encode("a"), 1], show_special=True) == "<|bos|>a<|eos|>"
    assert tokenizer.token_id("<|im_end|>") == SPECIALS.index("<|im_end|>")
    with pytest.raises(TriScaleError, match="no special token"):
        tokenizer.token_id("<|nope|>")


def test_save_and_load_keep_everything(tokenizer, tmp_path):
    path = tmp_path / "deep" / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.hash == tokenizer.hash and loaded.special == tokenizer.special
    assert loaded.token_bytes == tokenizer.token_bytes
    assert loaded.encode("<|bos|> x 你") == tokenizer.encode("<|bos|> x 你")
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]


def test_training_is_deterministic_across_processes():
    """Hash seeds and threads differ between processes; the merges may not."""
    script = (
        "from triscale.data.tokenizer import train_tokenizer\n"
        "import random\n"
        "draw = random.Random(0)\n"
        "words = [''.join(draw.choices('abcdef', k=5)) for _ in range(300)]\n"
        "print(train_tokenizer([' '.join(draw.choices(words, k=50)) for _ in range(100)], 500).hash)"
    )
    hashes = {subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
              for _ in range(3)}  # fmt: skip
    assert len(hashes) == 1


def test_vocabulary_size_is_a_limit_that_small_text_may_not_reach():
    assert train_tokenizer(["abab" * 100], 4096).vocabulary_size < 300
    assert train_tokenizer(TEXT, 320).vocabulary_size == 320
    with pytest.raises(ConfigError, match="at least 288"):
        train_tokenizer(TEXT, 287)


def test_no_text_at_all_still_gives_bytes():
    tokenizer = train_tokenizer([], 300)
    assert tokenizer.vocabulary_size == 288
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\udc69")) == "👩"
    assert tokenizer.encode_batch(["a\udc00"]) == [tokenizer.encode("a\ufffd")]


def test_ids_outside_the_vocabulary_are_named(tokenizer):
    for bad in (-1, tokenizer.vocabulary_size):
        with pytest.raises(TriScaleError, match=f"token id {bad}"):
            tokenizer.decode([bad])
        with pytest.raises(TriScaleError, match=f"token id {bad}"):
            StreamDecoder(tokenizer).feed(bad)


def test_bytes_per_token(tokenizer):
    text = TEXT[1]
    ids = tokenizer.encode(text)
    assert tokenizer.bytes_per_token(ids) == len(text.encode()) / len(ids) > 2
    assert tokenizer.bytes_per_token([]) == 0.0
    assert tokenizer.bytes_per_token([0, 1]) == 0.0  # specials stand for no text


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not json", '{"model": {"type": "BPE"}}'])
def test_broken_files_are_named(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TriScaleError, match=r"tokenizer\.json"):
        Tokenizer.load(path)
    with pytest.raises(TriScaleError, match="no such"):
        Tokenizer.load(tmp_path / "missing.json")


def test_a_vocabulary_that_is_not_byte_level_is_refused(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    inner.save(str(tmp_path / "t.json"))
    with pytest.raises(TriScaleError, match="not byte-level"):
        Tokenizer.load(tmp_path / "t.json")


def test_added_tokens_of_a_published_vocabulary(tokenizer, tmp_path):
    """Added tokens that are not special are ordinary text with their own ids."""
    document = json.loads(tokenizer.to_json())
    place = tokenizer.vocabulary_size
    document["added_tokens"].append({**document["added_tokens"][0], "id": place, "content": "héé", "special": False})
    (tmp_path / "t.json").write_text(json.dumps(document))
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert loaded.encode("ahééb") == [*loaded.encode("a"), place, *loaded.encode("b")]
    assert loaded.decode([place]) == "héé" and loaded.byte_lengths[place] == 5
    assert loaded.hash != tokenizer.hash


def test_byte_alphabet_is_the_librarys():
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_import_needs_no_torch_and_no_numpy():
    code = "import sys, triscale.data.tokenizer, triscale.data.needle; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
    code = "import sys, triscale.data.loader, triscale.data.heldout; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
