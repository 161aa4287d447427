"""Published vocabularies: ``tokenizer.json`` as it is, and tiktoken rank files (Kimi's ``tiktoken.model``).

A rank file lists byte strings by merge priority. The same tokenizer as byte-level BPE of the ``tokenizers`` library:
every way to join two tokens into a third is a merge with the third's rank, and a whole word that is a token is taken
without merging. No code of the publisher runs: the rule that cuts text into words is stated here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from ..config import TriScaleError
from .tokenizer import Tokenizer, byte_alphabet

RANK_FILES = ("tiktoken.model", "*.tiktoken")
KIMI_SPECIALS = 256  # ids behind the ranks, named or reserved

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Kimi's rule: runs of Han characters, words by case with one character before them, up to three digits, punctuation
# with the line ends behind it, white space.
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def import_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a published model folder; None if it has none.

    Raises :class:`TriScaleError` naming the file when one is there but cannot be read.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        return Tokenizer.load(folder / "tokenizer.json")
    found = [file for pattern in RANK_FILES for file in sorted(folder.glob(pattern))]
    if not found:
        return None
    ranks = read_ranks(found[0])
    return from_ranks(ranks, special_tokens(folder, len(ranks)))


def read_ranks(path: Path) -> dict[bytes, int]:
    """{byte string: rank} of a tiktoken file: a base64 string and a number on every line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TriScaleError(f"{path}, line {number}: not a base64 token and its rank ({line[:40]!r})") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TriScaleError(f"{path}: the ranks are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TriScaleError(f"{path}: {len(missing)} single bytes have no rank, so not every text can be encoded")
    return ranks


def special_tokens(folder: Path, first: int) -> dict[str, int]:
    """{text: id} of the ids behind the ranks: named in ``tokenizer_config.json``, the others reserved."""
    names = {i: f"<|reserved_token_{i}|>" for i in range(first, first + KIMI_SPECIALS)}
    file = folder / "tokenizer_config.json"
    if file.exists():
        try:
            added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
            names |= {int(i): entry["content"] for i, entry in added.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TriScaleError(f"{file}: its added_tokens_decoder cannot be read ({error!r})") from error
    return {text: i for i, text in sorted(names.items())}


def from_ranks(ranks: dict[bytes, int], special: dict[str, int], split: str = KIMI_SPLIT) -> Tokenizer:
    """Byte-level BPE with the tokens and priorities of ``ranks``."""
    letters = {byte: character for character, byte in byte_alphabet().items()}
    spell = lambda token: "".join(letters[byte] for byte in token)
    merges = [
        (rank, token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort(key=lambda merge: merge[0])
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    pairs = [(spell(left), spell(right)) for _, left, right in merges]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(_with_special(inner, special, len(ranks)))


def _with_special(inner: tokenizers.Tokenizer, special: dict[str, int], first: int) -> tokenizers.Tokenizer:
    """Added tokens get consecutive ids, so they are added in the order of the published ones."""
    ordered = sorted(special.items(), key=lambda item: item[1])
    if [i for _, i in ordered] != list(range(first, first + len(ordered))):
        raise TriScaleError(f"the special tokens' ids are not {first} to {first + len(ordered) - 1} without gaps")
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, _ in ordered])
    return inner
