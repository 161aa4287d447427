"""What went wrong in a swarm, in sentences: serial collapse, parallel in name only, spurious spawning, lost results."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .contribution import Contributions
from .ledger import Ledger
from .metrics import Metrics, Paths, peak_concurrency, quantile

ALONE_SHARE = 0.8  # of assignments that were the only one of their turn
OWN_CALLS_WORTH_SPLITTING = 8
REDUNDANT_SHARE = 0.3
QUEUE_SHARE = 0.2  # of the makespan
STRAGGLER = 3.0  # times the median run time


@dataclass(frozen=True)
class Finding:
    """kind: a fixed name. level: ``problem`` (the answer or the money suffers) or ``note``. text: for people."""

    kind: str
    level: Literal["problem", "note"]
    text: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def find(ledger: Ledger, metrics: Metrics, contributions: Contributions | None = None) -> list[Finding]:
    """All findings of a run, problems first."""
    found = [
        *_outcomes(ledger, metrics), *_serial(ledger, metrics), *_in_name_only(ledger, metrics),
        *_spurious(ledger, metrics, contributions), *_waits(ledger, metrics), *_delivery(ledger),
    ]  # fmt: skip
    return sorted(found, key=lambda f: f.level != "problem")


def _outcomes(ledger: Ledger, metrics: Metrics) -> list[Finding]:
    found, run = [], ledger.run
    if run["outcome"] is None:
        found.append(Finding("unfinished", "problem", "The run has no result yet: it is under way or was killed. "
                             "`triscale swarm resume` goes on where it stopped."))  # fmt: skip
    elif run["outcome"] != "completed":
        found.append(Finding("incomplete", "problem", f"The run ended as {run['outcome']}: {run['reason']}. "
                             "Its answer is the best partial one."))  # fmt: skip
    reasons = Counter((t["outcome"], t["limit_name"] or t["reason"] or "") for t in ledger.tasks()
                      if t["outcome"] not in ("completed", None))  # fmt: skip
    for (outcome, reason), count in reasons.most_common():
        found.append(Finding("lost", "problem", f"{_n(count, 'assignment')} of {metrics.assigned} ended as {outcome}"
                             + (f" ({reason[:200]})" if reason else "") + "."))  # fmt: skip
    if metrics.lost_calls:
        found.append(Finding("lost_calls", "note", f"{_n(metrics.lost_calls, 'model call')} got no reply before the "
                             "run stopped; the provider may have charged for them, the ledger has not."))  # fmt: skip
    return found


def _serial(ledger: Ledger, metrics: Metrics) -> list[Finding]:
    """Serial collapse: could spawn, and worked one after the other."""
    run, tasks = ledger.run, [t for t in ledger.tasks() if t["owner"] == "main"]
    if run["mode"] != "swarm":
        return []
    if not tasks:
        own = ledger.one("SELECT count(*) AS n FROM tool_call WHERE agent = 'main'")["n"]
        if own < OWN_CALLS_WORTH_SPLITTING:
            return []
        return [Finding("serial_collapse", "problem", f"Nothing was delegated: the orchestrator made all {own} tool "
                        "calls itself, so the run is a single agent at a swarm's prompt.")]  # fmt: skip
    batches = Counter(t["turn"] for t in tasks)
    alone = [t for t in tasks if batches[t["turn"]] == 1]
    if len(tasks) < 3 or len(alone) < ALONE_SHARE * len(tasks):
        return []
    dependent = _dependent(tasks)
    if dependent >= len(alone) - 1:
        return [Finding("serial_chain", "note", f"{len(alone)} of {len(tasks)} assignments ran alone, and each uses "
                        "something an earlier result brought: a chain that sub-agents cannot shorten.")]  # fmt: skip
    return [Finding("serial_collapse", "problem", f"{len(alone)} of {len(tasks)} assignments were the only one of "
                    f"their turn, and {len(alone) - 1 - dependent} of them use nothing that an earlier result brought: "
                    "they could have run at the same time.")]  # fmt: skip


def _dependent(tasks: list[dict[str, Any]]) -> int:
    """Assignments whose prompt holds a word that first appeared in an earlier result."""
    count, said, brought = 0, set[str](), set[str]()
    for task in tasks:
        words = set(re.findall(r"\w{4,}", task["prompt"] or ""))
        count += bool(words & brought - said)
        said |= words
        brought |= set(re.findall(r"\w{4,}", task["result"] or "")) - said
    return count


def _in_name_only(ledger: Ledger, metrics: Metrics) -> list[Finding]:
    batches: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for task in ledger.tasks():
        if task["active_start"] is not None and task["active_end"] > task["active_start"]:
            batches[task["owner"], task["turn"]].append((task["active_start"], task["active_end"]))
    serial = [b for b in batches.values() if len(b) > 1 and peak_concurrency(b) == 1]
    if not serial:
        return []
    cause = (
        "the limit on concurrent sub-agents is 1" if metrics.concurrent == 1 else "nothing in the limits asks for it"
    )
    return [Finding("parallel_in_name_only", "problem", f"{_n(len(serial), 'batch', 'batches')} of assignments ran one "
                    f"after the other although issued together; {cause}.")]  # fmt: skip


def _spurious(ledger: Ledger, metrics: Metrics, contributions: Contributions | None) -> list[Finding]:
    """Spurious parallelism: agents that only cost."""
    found = []
    done = [t for t in ledger.tasks() if t["outcome"] == "completed"]  # to try a failed one again is no repetition
    prompts = Counter(" ".join((t["prompt"] or "").split()).casefold() for t in done)
    repeats = sum(n - 1 for n in prompts.values())
    if repeats:
        found.append(Finding("repeated_assignments", "problem", f"{_n(repeats, 'assignment')} repeat another one's "
                             "prompt word for word."))  # fmt: skip
    unused = ledger.rows("SELECT name FROM agent WHERE name NOT IN (SELECT agent FROM task)")
    if unused:
        found.append(Finding("idle_agents", "note", f"{_n(len(unused), 'sub-agent')} of {metrics.created} were created "
                             "and never given a task."))  # fmt: skip
    if contributions is not None and metrics.assigned > 1 and contributions.redundant_rate >= REDUNDANT_SHARE:
        wasted = [item for item in contributions.items if item.redundant]
        tokens = sum(item.tokens for item in wasted)
        how = ("taking all their results out does not lower the score" if contributions.method == "leave_one_out"
               else "by overlap of words and documents, a proxy")  # fmt: skip
        found.append(Finding("spurious_parallelism", "problem", f"{len(wasted)} of {len(contributions.items)} finished "
                             f"assignments are redundant ({how}); they took {tokens:,} tokens."))  # fmt: skip
    return found


def _waits(ledger: Ledger, metrics: Metrics) -> list[Finding]:
    found = []
    waits = ledger.one("SELECT coalesce(sum(queue_seconds), 0) AS s FROM model_call")["s"]
    shrinks = ledger.one("SELECT count(*) AS n FROM note WHERE kind = 'limiter' AND text LIKE '%: shrink %'")["n"]
    runs = 1 + metrics.assigned
    if shrinks or waits > QUEUE_SHARE * metrics.makespan * runs:
        found.append(Finding("rate_limit", "note", f"Agents waited {waits:,.1f} s in all for the rate limiter and for "
                             f"retries; it lowered its concurrency {_n(shrinks, 'time')}."))  # fmt: skip
    times = [t["slot_seconds"] for t in ledger.tasks() if t["slot_seconds"]]
    if len(times) >= 4:
        median, slow = quantile(times, 0.5), Paths(ledger).critical_chain()
        worst = max((t for t in ledger.tasks() if t["id"] in slow), key=lambda t: t["slot_seconds"], default=None)
        if worst is not None and median and worst["slot_seconds"] > STRAGGLER * median:
            found.append(Finding("straggler", "note", f"{worst['id']} ran {worst['slot_seconds']:,.1f} s, the median "
                                 f"{median:,.1f} s: it alone sets the length of its stage."))  # fmt: skip
    return found


def _delivery(ledger: Ledger) -> list[Finding]:
    cut = ledger.one("SELECT count(*) AS n FROM tool_call WHERE truncated AND task IS NOT NULL")["n"]
    if not cut:
        return []
    return [Finding("shortened", "note", f"{_n(cut, 'result')} did not fit the orchestrator's context and reached it "
                    "shortened; the whole texts are in the log and were readable by handle.")]  # fmt: skip


def _n(count: int, word: str, plural: str = "") -> str:
    return f"{count} {word if count == 1 else plural or word + 's'}"
