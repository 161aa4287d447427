"""Look-up worlds: generated document collections with a question, a gold table and exact times. No network.

``wide``: M attributes of N institutes, each stated in the institute's own document: N independent items.
``deep``: a chain; who oversees an institute is stated only in its own document, so hop k needs hop k-1.
``adversarial``: looks wide, and every institute has a document, but one register holds all current values while the
documents hold old ones. Spawning a sub-agent for each institute costs more and answers worse.

Everything is a function of the config: the documents, the gold table, the latency of each call. Tools are the real
``search`` and ``open`` over the documents, slowed by :class:`Latency`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import ConfigError, from_dict, parse_overrides
from .policies import Price, Scripted, ScriptedAgent
from .table_score import render_table, score_table
from .tools.documents import DocumentIndex
from .tools.search import document_tools
from .types import ModelClient, Tool, ToolContext, ToolResult
from .world_text import ATTRIBUTES, MOTTO, OVERSEER, Attribute, entity_names, filler

Kind = Literal["wide", "deep", "adversarial"]
KEY = "Institute"


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of each thing an agent waits for.

    model: of any model call, plus per_token_in for each prompt token that is not cached and per_token_out for each
    token of the reply. jitter: relative spread, fixed for each call by its content.
    """

    model: float = 1.0
    per_token_in: float = 0.0
    per_token_out: float = 0.0
    search: float = 0.5
    open: float = 0.5
    jitter: float = 0.0

    def of(self, seconds: float, what: str, seed: int) -> float:
        if not self.jitter:
            return seconds
        digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
        return seconds * (1.0 + self.jitter * (int.from_bytes(digest[:8], "big") / 2**63 - 1.0))


class LookupWorld:
    """One world; implements :class:`triscale.swarm.types.World`.

    gold: the answer's rows. documents: name -> Markdown text. columns: of the table that is asked for.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """entities: institutes asked for (hops + 1 of a chain). attributes: columns besides the key, at most 8.

        pages: documents each institute's facts are spread over. distractors: further institutes not asked for.
        words: filler words in a document. scripted: how the scripted orchestrator behaves. price: per million tokens.
        context_window: tokens the scripted models can read.
        """

        kind: Kind = "wide"
        entities: int = 10
        attributes: int = 3
        pages: int = 1
        distractors: int = 5
        words: int = 80
        seed: int = 0
        context_window: int = 262_144
        latency: Latency = field(default_factory=Latency)
        scripted: Scripted = field(default_factory=Scripted)
        price: Price = field(default_factory=Price)

        def __post_init__(self) -> None:
            for name, low, high in (("entities", 1, 100_000), ("attributes", 1, len(ATTRIBUTES)), ("pages", 1, 8),
                                    ("distractors", 0, 100_000), ("words", 0, 20_000)):  # fmt: skip
                value = getattr(self, name)
                if not low <= value <= high:
                    raise ConfigError(f"world.{name}", f"{value} is not between {low} and {high}")

        def build(self) -> LookupWorld:
            return LookupWorld(self)

    def __init__(self, config: LookupWorld.Config | None = None, **values: Any):
        self.config = config or LookupWorld.Config(**values)
        c = self.config
        self.name = f"{c.kind}-{c.entities}x{c.attributes}-seed{c.seed}"
        self.attributes: tuple[Attribute, ...] = ATTRIBUTES[: c.attributes]
        self.columns = [KEY, *(a.name for a in self.attributes)]
        rng = random.Random(f"triscale world {c.kind} {c.seed}")
        names = entity_names(rng, c.entities + c.distractors)
        self.entities = names[: c.entities]
        values_of = {e: {a.name: a.draw(rng) for a in self.attributes} for e in names}
        self.gold: list[dict[str, str]] = [{KEY: e, **values_of[e]} for e in self.entities]
        self.documents = _documents(c, rng, names, values_of, self.attributes)
        self.question = _question(c, self.entities, self.columns)

    @functools.cached_property
    def index(self) -> DocumentIndex:
        return DocumentIndex(self.documents)

    @functools.cached_property
    def tools(self) -> Sequence[Tool]:
        latency, seed = self.config.latency, self.config.seed
        waits = {"search": latency.search, "open": latency.open}
        return [SlowTool(t, waits[t.name], latency, seed) for t in document_tools(self.index, thread=False)]

    def scripted(self, role: Literal["orchestrator", "subagent", "single"]) -> ModelClient:
        c = self.config
        return ScriptedAgent(role, c.scripted, c.latency, c.price, seed=c.seed, context_window=c.context_window)

    def score(self, answer: str) -> dict[str, float]:
        """item and row F1 of WideSearch, precision and recall of items, and success (0 or 1)."""
        metrics = {a.name: a.metric for a in self.attributes}
        score = score_table(answer, self.gold, key=[KEY], metrics=metrics)
        return {"item_f1": score.item.f1, "row_f1": score.row.f1, "item_precision": score.item.precision,
                "item_recall": score.item.recall, "success": float(score.success)}  # fmt: skip

    def write(self, folder: str | Path) -> Path:
        """Write ``docs/``, ``question.txt`` and ``gold.md`` below ``folder``; returns the documents' folder."""
        root = Path(folder)
        for name, text in self.documents.items():
            path = root / "docs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (root / "question.txt").write_text(self.question + "\n", encoding="utf-8")
        (root / "gold.md").write_text(render_table(self.gold, self.columns) + "\n", encoding="utf-8")
        return root / "docs"


class SlowTool:
    """A tool that takes its time on the running loop's clock."""

    def __init__(self, inner: Tool, seconds: float, latency: Latency, seed: int):
        self.inner, self.seconds, self.latency, self.seed = inner, seconds, latency, seed
        self.name, self.description, self.parameters = inner.name, inner.description, inner.parameters
        self.timeout = inner.timeout

    async def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        await asyncio.sleep(self.latency.of(self.seconds, f"{self.name} {sorted(arguments.items())}", self.seed))
        return await self.inner.call(arguments, context)

    async def close(self) -> None:
        await self.inner.close()


def make_world(spec: str) -> LookupWorld:
    """A world from ``kind`` or ``kind:entities=100,seed=1,latency.model=2``; unknown names are refused."""
    kind, _, rest = spec.partition(":")
    values = parse_overrides(f"--{item.strip()}" for item in rest.split(",") if item.strip())
    return LookupWorld(from_dict(LookupWorld.Config, {"kind": kind, **values}, "world"))


def world_spec(world: LookupWorld) -> str:
    """The spec that :func:`make_world` turns back into ``world``; only what differs from the defaults."""

    def differences(value: Any, default: Any, path: str) -> list[str]:
        found = []
        for spec in dataclasses.fields(value):
            mine, other, name = getattr(value, spec.name), getattr(default, spec.name), path + spec.name
            if dataclasses.is_dataclass(mine):
                found += differences(mine, other, name + ".")
            elif mine != other and name != "kind":
                found.append(f"{name}={mine}")
        return found

    rest = differences(world.config, LookupWorld.Config(), "")
    return world.config.kind + (":" + ",".join(rest) if rest else "")


def _question(c: LookupWorld.Config, entities: Sequence[str], columns: Sequence[str]) -> str:
    table = f"Answer with one Markdown table with exactly the columns {', '.join(columns)}."
    if c.kind == "deep":
        steps = f"for {c.entities - 1} steps. List every institute of the chain, the first included."
        return f"Start at {entities[0]} and follow the chain of oversight (who oversees it, and on) {steps} {table}"
    note = " Give the values of the current register." if c.kind == "adversarial" else ""
    return f"Look up these institutes in the documents: {'; '.join(entities)}.{note} {table}"


def _documents(
    c: LookupWorld.Config, rng: random.Random, names: Sequence[str], values_of: Mapping[str, Mapping[str, str]],
    attributes: Sequence[Attribute],
) -> dict[str, str]:  # fmt: skip
    documents = {}
    for place, entity in enumerate(names):
        facts = [(a, _stated(c, rng, a, values_of[entity][a.name])) for a in attributes]
        sentences = [a.sentence(rng, entity, value) for a, value in facts]
        sentences.append(MOTTO.sentence(rng, entity, MOTTO.draw(rng)))
        if c.kind == "deep" and place + 1 < len(names):
            sentences.append(OVERSEER.sentence(rng, entity, names[place + 1]))
        rng.shuffle(sentences)
        for page in range(c.pages):
            slug = entity.split()[0].lower() + (f"-{page + 1}" if c.pages > 1 else "")
            body = [" ".join(sentences[page :: c.pages]), *filler(rng, c.words)]
            if c.kind == "adversarial":
                body.insert(0, "This page was written for an earlier survey. Later values are in the register.")
            documents[f"profiles/{slug}.md"] = f"# {entity}\n\n" + "\n\n".join(filter(None, body)) + "\n"
    if c.kind == "adversarial":
        rows = [{KEY: e, **values_of[e]} for e in names]
        table = render_table(rows, [KEY, *(a.name for a in attributes)])
        documents["register.md"] = f"# Current register of institutes\n\n{table}\n"
    return documents


def _stated(c: LookupWorld.Config, rng: random.Random, attribute: Attribute, value: str) -> str:
    """What an institute's own document says: the truth, except that half of the adversarial world's values are old."""
    if c.kind != "adversarial" or rng.random() < 0.5:
        return value
    while (old := attribute.draw(rng)) == value:
        pass
    return old
