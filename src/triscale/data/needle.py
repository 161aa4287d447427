"""Needle retrieval: a fact hidden in filler text, asked for at the end.

Prompt: filler, the sentence that states a passcode, more filler, and the same sentence up to the passcode. A model
that can look back over the distance continues with the digits. The filler is either sentences of the same form that
state other things about other names, or the caller's own tokens (held-out text, for instance).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ConfigError
from .tokenizer import Tokenizer

ADJECTIVES = (
    "amber", "brisk", "coral", "dusty", "early", "faint", "golden", "hollow", "icy", "jolly", "keen", "lunar", "misty",
    "noble", "olive", "plain", "quiet", "rapid", "silver", "tidy", "upper", "vivid", "warm", "young",
)  # fmt: skip
NOUNS = (
    "badger", "canyon", "dolphin", "engine", "falcon", "garden", "harbor", "island", "jacket", "kettle", "lantern",
    "meadow", "needle", "orchard", "pepper", "quarry", "river", "saddle", "tunnel", "valley", "window", "yacht",
)  # fmt: skip
PROPERTIES = ("height", "weight", "age", "width", "price", "depth")
DIGITS = 5


@dataclass(frozen=True)
class NeedleExample:
    """tokens: bos, filler, needle, filler, question, answer. answer_start, answer_stop: where the answer lies in
    tokens (it ends them). needle_start: where the needle begins. answer: its text."""

    tokens: tuple[int, ...]
    answer_start: int
    answer_stop: int
    needle_start: int
    answer: str

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the answer."""
        return self.tokens[: self.answer_start]


def make_needle_examples(
    tokenizer: Tokenizer, length: int, depth: float, n: int, seed: int, filler: Sequence[int] | None = None
) -> list[NeedleExample]:
    """``n`` examples of exactly ``length`` tokens, answer included.

    depth: where the needle lies in the filler, 0 = at the beginning, 1 = directly before the question. filler: token
    ids to hide it in, drawn from a random place and repeated as needed; None = made sentences. The same arguments
    give the same examples, and each example has its own name, passcode and filler. Raises :class:`ConfigError` for a
    length that has no room for needle and question.
    """
    if not 0.0 <= depth <= 1.0:
        raise ConfigError("needle.depth", f"{depth} is not between 0 and 1")
    if filler is not None and not len(filler):
        raise ConfigError("needle.filler", "no token is given", "Leave it out to use made sentences")
    return [_example(tokenizer, length, depth, random.Random(f"{seed}/{number}"), filler) for number in range(n)]


def _example(
    tokenizer: Tokenizer, length: int, depth: float, draw: random.Random, filler: Sequence[int] | None
) -> NeedleExample:
    name = f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"
    code = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    question = tokenizer.encode(f"# The passcode of the {name} is")
    answer = tokenizer.encode(f" {code}")  # encoded alone in the needle too: the same tokens must come back
    needle = [*question, *answer, *tokenizer.encode(".\n")]
    room = length - 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ConfigError("needle.length", f"{length} tokens are too few", f"This tokenizer needs {length - room}")
    hay = _sentences(tokenizer, room, name, code, draw) if filler is None else _stretch(filler, room, draw)
    before = round(depth * room)
    tokens = [tokenizer.document_ends()[0], *hay[:before], *needle, *hay[before:], *question, *answer]
    return NeedleExample(tuple(tokens), length - len(answer), length, 1 + before, code)


def _sentences(tokenizer: Tokenizer, room: int, name: str, code: str, draw: random.Random) -> list[int]:
    """``room`` tokens of sentences about other names, with other numbers; the last one may be cut."""
    ids: list[int] = []
    while len(ids) < room:
        other = f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}"
        number = str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        if other != name and number != code:
            ids += tokenizer.encode(f"# The {draw.choice(PROPERTIES)} of the {other} is {number}.\n")
    return ids[:room]


def _stretch(filler: Sequence[int], room: int, draw: random.Random) -> list[int]:
    start = draw.randrange(len(filler))
    return [int(filler[(start + i) % len(filler)]) for i in range(room)]
