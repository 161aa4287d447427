"""What generated documents say: invented institutes, their attributes, and the sentences that state them.

A sentence and its reader come from the same phrase, so a scripted agent really reads what a document says.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

_ONSET = ["b", "br", "c", "d", "dr", "f", "g", "gl", "h", "k", "l", "m", "n", "p", "pr", "r", "s", "st", "t", "tr"]
_VOWEL = ["a", "e", "i", "o", "u", "ae", "io"]
_CODA = ["", "l", "n", "r", "s", "th", "x", "nd", "rk"]
_GIVEN = ["Ada", "Bruno", "Celia", "Dario", "Edda", "Farid", "Greta", "Hugo", "Irma", "Jonas", "Kaya", "Lev"]
_SCIENCE = ["tidal physics", "soil chemistry", "cold storage", "bird migration", "glass making", "deep drilling",
            "cloud optics", "fungal genetics", "river ice", "bridge design", "plant breeding"]  # fmt: skip
_FILLER = [
    "The library opens to visitors on two afternoons a week and lends its duplicates to schools nearby.",
    "A long gallery on the ground floor shows instruments that are no longer in use.",
    "Most of the roof was renewed after a storm, with slate from the old quarry.",
    "Guests are asked to announce themselves at the gate, which closes at dusk.",
    "The garden behind the main building is kept by volunteers and is known for its quince trees.",
    "Lectures are held in the round hall and printed in a small yearbook.",
    "The workshop repairs clocks and balances for other houses on request.",
    "Letters from the early years are kept in a dry cellar and are being copied by hand.",
]


def word(rng: random.Random, syllables: int) -> str:
    text = "".join(rng.choice(_ONSET) + rng.choice(_VOWEL) + rng.choice(_CODA) for _ in range(syllables))
    return text.capitalize()


@dataclass(frozen=True)
class Attribute:
    """One column: its metric, how a value is drawn, and the phrases that state it (``{e}`` entity, ``{v}`` value)."""

    name: str
    metric: str
    draw: Callable[[random.Random], str]
    phrases: tuple[str, ...]

    def sentence(self, rng: random.Random, entity: str, value: str) -> str:
        return rng.choice(self.phrases).format(e=entity, v=value)

    def read(self, text: str, entity: str) -> str | None:
        """The value that ``text`` states for ``entity``, or None."""
        ends = [p.format(e=entity, v="\0").split("\0") for p in self.phrases]
        for sentence in re.split(r"(?<=\.)\s+|\n+", text):
            if entity in sentence:
                for before, after in ends:
                    long_enough = len(sentence) > len(before) + len(after)
                    if long_enough and sentence.startswith(before) and sentence.endswith(after):
                        return sentence[len(before) : len(sentence) - len(after)]
        return None


def _date(rng: random.Random) -> str:
    return (datetime.date(1820, 1, 1) + datetime.timedelta(days=rng.randrange(70_000))).isoformat()


ATTRIBUTES = (
    Attribute("Founded", "number_near", lambda r: str(r.randrange(1700, 2000)),
              ("{e} was founded in {v}.", "The year {v} saw the founding of {e}.")),
    Attribute("Seat", "exact_match", lambda r: word(r, 3),
              ("{e} has its seat in {v}.", "The town of {v} is home to {e}.")),
    Attribute("Director", "exact_match", lambda r: f"{r.choice(_GIVEN)} {word(r, 2)}",
              ("The director of {e} is {v}.", "{v} is the director of {e}.")),
    Attribute("Staff", "number_near", lambda r: str(r.randrange(12, 900)),
              ("{e} employs {v} people.", "There are {v} people on the staff of {e}.")),
    Attribute("Field", "exact_match", lambda r: r.choice(_SCIENCE),
              ("The main field of {e} is {v}.", "{e} works on {v}.")),
    Attribute("Charter", "date_near", _date,
              ("The charter of {e} is dated {v}.", "{e} received its charter on {v}.")),
    Attribute("Budget", "number_near", lambda r: f"{r.randrange(100, 9000) * 1000:,}",
              ("The yearly budget of {e} is {v} crowns.", "{e} spends {v} crowns a year.")),
    Attribute("Website", "url_match", lambda r: f"https://www.{word(r, 3).lower()}.example/{word(r, 1).lower()}",
              ("{e} publishes at {v} for everyone.", "The site of {e} is {v} at present.")),
)  # fmt: skip
OVERSEER = Attribute("Overseer", "exact_match", lambda r: "", ("{e} is overseen by {v}.",))
MOTTO = Attribute("Motto", "exact_match", lambda r: word(r, 4), ("The motto of {e} reads {v}.",))


def entity_names(rng: random.Random, count: int) -> list[str]:
    """Distinct institute names; no name is a part of another."""
    names: list[str] = []
    seen: set[str] = set()
    while len(names) < count:
        stem = word(rng, 3)
        if len(stem) > 5 and stem not in seen:
            seen.add(stem)
            names.append(f"{stem} Institute")
    return names


def filler(rng: random.Random, words: int) -> list[str]:
    """Paragraphs of about ``words`` words in all that state nothing a task asks for."""
    paragraphs, count = [], 0
    while count < words:
        block = " ".join(rng.sample(_FILLER, 3))
        count += len(block.split())
        paragraphs.append(block)
    return paragraphs
