"""Byte-level BPE: trained offline, saved as one JSON file, streamed without broken characters.

The file is the ``tokenizer.json`` of the ``tokenizers`` library, so published byte-level vocabularies load as well.
Text given to :meth:`Tokenizer.encode` never yields a special token, whatever it contains: specials enter a sequence
only by id. Decoding works on bytes (each token is a fixed byte string), which is what makes the streamed and the
whole decode the same function.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from ..config import ConfigError, TriScaleError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# what published vocabularies call them, the first that exists counts
BOS_NAMES = (BOS, "[BOS]", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "<s>")
EOS_NAMES = (EOS, "[EOS]", "<|end_of_text|>", "<|end▁of▁sentence|>", "<|endoftext|>", "</s>")
PAD_NAMES = (PAD, "[PAD]", "<pad>")
CHAT_MARKERS = (
    "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>",
    "<|media_pad|>",
)  # fmt: skip
# A fixed block of 32 ids in front of the bytes; the reserved ones can be named later without moving any other id.
SPECIALS = (BOS, EOS, PAD, *CHAT_MARKERS, *(f"<|reserved_{i}|>" for i in range(32 - 3 - len(CHAT_MARKERS))))
SMALLEST_VOCABULARY = len(SPECIALS) + 256

# How text is cut before merging: a word with the space before it, up to three digits, a run of punctuation with the
# line ends behind it, and white space (so that indentation becomes one token and the last space joins the next word).
SPLIT = (
    r" ?\p{L}[\p{L}\p{M}]*|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary: {character: byte}."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet


class Tokenizer:
    """A byte-level BPE vocabulary with special tokens.

    special: {text: id} of every special token. bos, eos: the ids that open and close a document (a published
    vocabulary may lack them: then they are None). vocabulary_size: number of ids, special ones included.
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        self._inner = inner
        inner.encode_special_tokens = True  # text is text: "<|im_end|>" typed by a user is eleven characters
        inner.no_padding()
        inner.no_truncation()
        kinds = json.loads(inner.to_str())
        if not _is_byte_level(kinds.get("decoder")):
            raise TriScaleError("this tokenizer is not byte-level BPE; give one whose decoder is ByteLevel")
        added = inner.get_added_tokens_decoder()
        self.special: dict[str, int] = {token.content: i for i, token in sorted(added.items()) if token.special}
        self.bos, self.eos, self.pad = (
            next((self.special[name] for name in names if name in self.special), None)
            for names in (BOS_NAMES, EOS_NAMES, PAD_NAMES)
        )
        self.vocabulary_size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a ``tokenizer.json``; raises :class:`TriScaleError` that names the file."""
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise TriScaleError(f"{path}: no such tokenizer file") from error
        except TriScaleError as error:
            raise TriScaleError(f"{path}: {error}") from error
        except Exception as error:  # the library raises bare Exception for every kind of broken file
            raise TriScaleError(f"{path}: not a tokenizer file ({error})") from error

    def save(self, path: str | Path) -> None:
        """Write the one JSON file that :meth:`load` reads; an existing file is replaced in one step."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(self.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def to_json(self) -> str:
        return self._inner.to_str(pretty=False)

    @cached_property
    def hash(self) -> str:
        """sha256 (hex) of everything that decides how text becomes ids."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes each id stands for, by id; special tokens and unused ids stand for none."""
        alphabet = byte_alphabet()
        table = [b""] * self.vocabulary_size
        added = self._inner.get_added_tokens_decoder()
        for text, i in self._inner.get_vocab(with_added_tokens=True).items():
            if i in added:
                table[i] = b"" if added[i].special else text.encode()
            elif alphabet.keys() >= set(text):
                table[i] = bytes(alphabet[character] for character in text)
            else:
                raise TriScaleError(f"token {i} ({text!r}) is not a byte string: this tokenizer is not byte-level BPE")
        return tuple(table)

    @cached_property
    def byte_lengths(self) -> tuple[int, ...]:
        """Number of text bytes each id stands for: the denominators of bits per byte."""
        return tuple(map(len, self.token_bytes))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without any special token. A lone surrogate becomes U+FFFD."""
        return self._inner.encode(_encodable(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """``[encode(text) for text in texts]``, over all processor cores."""
        clean = [_encodable(text) for text in texts]
        return [encoding.ids for encoding in self._inner.encode_batch_fast(clean, add_special_tokens=False)]

    def decode(self, ids: Iterable[int], *, show_special: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD. ``show_special`` prints special tokens' names."""
        return b"".join(self._bytes_of(i, show_special) for i in ids).decode("utf-8", "replace")

    def bytes_per_token(self, ids: Sequence[int]) -> float:
        """Mean number of text bytes behind one token of ``ids`` (0 for none)."""
        return sum(self.byte_lengths[i] for i in ids) / len(ids) if len(ids) else 0.0

    def token_id(self, special: str) -> int:
        """The id of a special token by its text; raises :class:`TriScaleError` if this vocabulary has none."""
        if special not in self.special:
            raise TriScaleError(f"this tokenizer has no special token {special!r}; it has {', '.join(self.special)}")
        return self.special[special]

    def document_ends(self) -> tuple[int, int]:
        """The ids that open and close a document; raises :class:`TriScaleError` if this vocabulary lacks them."""
        if self.bos is None or self.eos is None:
            raise TriScaleError(f"this tokenizer lacks special tokens that open and close a document ({BOS}, {EOS})")
        return self.bos, self.eos

    def _bytes_of(self, i: int, show_special: bool) -> bytes:
        if show_special and i in self._special_names:
            return self._special_names[i].encode()
        if not 0 <= i < self.vocabulary_size:
            raise TriScaleError(f"token id {i} is outside the vocabulary of {self.vocabulary_size}")
        return self.token_bytes[i]

    @cached_property
    def _special_names(self) -> dict[int, str]:
        return {i: name for name, i in self.special.items()}

    def __len__(self) -> int:
        return self.vocabulary_size


class StreamDecoder:
    """Decodes ids one by one: the concatenated deltas and the flush equal ``tokenizer.decode`` of all ids.

    A character whose bytes are spread over several tokens comes out whole, with its last token.
    """

    def __init__(self, tokenizer: Tokenizer, *, show_special: bool = False):
        self._tokenizer, self._show_special = tokenizer, show_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, i: int) -> str:
        """The text that became certain with token ``i``, often empty."""
        return self._decoder.decode(self._tokenizer._bytes_of(i, self._show_special))

    def flush(self) -> str:
        """What an unfinished character at the end decodes to; the decoder starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train byte-level BPE on ``texts``.

    vocabulary_size: wanted number of ids, 32 special tokens and 256 bytes included; a small text may end with fewer,
    because no pair occurs twice. The same texts in the same order give the same tokenizer.
    """
    if vocabulary_size < SMALLEST_VOCABULARY:
        raise ConfigError("data.vocabulary_size", f"{vocabulary_size} is too small",
                          f"32 special tokens and 256 bytes need at least {SMALLEST_VOCABULARY}")  # fmt: skip
    inner = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(map(_encodable, texts), trainer)
    return Tokenizer(inner)


def _encodable(text: str) -> str:
    """``text`` as the library can take it: surrogates cannot be UTF-8, pairs are joined and lone ones replaced."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _is_byte_level(decoder: dict | None) -> bool:
    if decoder is None:
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(inner) for inner in decoder.get("decoders", []))
    return decoder.get("type") == "ByteLevel"
