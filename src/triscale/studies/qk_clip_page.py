"""README.md and the figure of ``triscale study qk-clip``, from its results alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from triscale.ladder.statistics import Estimate, paired_t

from .page import pyplot, save_figure, table

Row = dict[str, Any]
NAMES = {"muon": "Muon", "muonclip": "MuonClip"}


def write(study: dict[str, Any], base: dict[str, Any], output: Path) -> str:
    """Write README.md and qk-clip.svg into ``output``; returns the tables and the verdict."""
    growth, retrieval = study["growth"], study["retrieval"]
    settings = study["settings"]
    tables = "\n\n".join([
        "## Growth", growth_table(growth, settings["threshold"]), "## Retrieval", retrieval_table(retrieval),
        "## Verdict", "\n".join(f"- {line}" for line in verdict(study)),
    ])  # fmt: skip
    model, train = base["model"], base["train"]
    page = [
        "# Does QK-Clip hold growing logits, and does it cost retrieval?", f"    {study['command']}",
        "![logits, loss and retrieval](qk-clip.svg)",
        f"**Growth.** A transformer without QK-norm (width {model['width']}, depth {model['depth']}; "
        f"{settings['tokens']:,} tokens of corpus {study['corpus'][:12]}, {train['batch_tokens']:,} a step, {train['precision']}), trained "
        f"with Muon and with MuonClip at threshold {settings['threshold']:g} from the same {len(settings['seeds'])} seeds, at "
        f"learning rates {', '.join(f'{r:g}' for r in settings['rates'])}; every step's largest logit is measured. The clip "
        "acts after a step, so the next forward pass may exceed the threshold by that step's growth: *steps above* counts "
        "these, *highest logit* says how far they went; *heads clipped* sums over steps.",
        f"**Retrieval.** Two layers read {settings['retrieval_facts']} facts and are asked for each of them, "
        f"{settings['retrieval_steps']} steps under each threshold, so that slower learning counts as a cost; accuracy is of fresh questions (chance "
        "0.125), by the number of facts in the context and by the distance to the fact.",
        tables,
        f"n = {len(settings['seeds'])} seeds; brackets: 95 % t-intervals of paired differences. Everything measured: "
        "[results.json](results.json); every step's loss and largest logit: [curves.json](curves.json).",
    ]  # fmt: skip
    (output / "README.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    _figure(study, output / "qk-clip.svg")
    return tables


def growth_table(rows: list[Row], limit: float) -> str:
    """One line a rate and arm, over its seeds."""
    lines = []
    for rate, arm, group in _groups(rows):
        losses = [row["loss"] for row in group if row["loss"] is not None]
        difference = NONE
        if arm == "muonclip":
            difference = _text(loss_difference(rows, rate))
        lines.append([
            f"{rate:g}", NAMES[arm], _range(row["max_logit"] for row in group), _range(row["last_logit"] for row in group),
            f"{_share_above(group, limit):.0%}",
            _range((row["clipped_heads"] for row in group), "{:d}"), str(sum(row["spikes"] for row in group)),
            f"{len(group) - len(losses)} of {len(group)}", f"{sum(losses) / len(losses):.4f}" if losses else NONE,
            difference,
        ])  # fmt: skip
    head = ["learning rate", "arm", "highest logit", "last logit", "steps above", "heads clipped", "loss spikes", "diverged",
            "held-out loss", "MuonClip - Muon"]  # fmt: skip
    return table(head, lines)


NONE = "-"


def loss_difference(rows: list[Row], rate: float) -> Estimate | None:
    """MuonClip's held-out loss minus Muon's in nats a token, paired by seed; None where no pair finished."""
    return _paired(rows, rate, "loss", "muonclip", "muon", "rate", "arm")


def _paired(rows: list[Row], where: Any, value: str, one: Any, other: Any, place: str, arm: str) -> Estimate | None:
    found = {(row[arm], row["seed"]): row[value] for row in rows if row[place] == where and row[value] is not None}
    pairs = [found[one, s] - found[other, s] for a, s in found if a == one and (other, s) in found]
    return paired_t(pairs) if pairs else None


def accuracy_difference(rows: list[Row], threshold: float) -> Estimate | None:
    """Accuracy under ``threshold`` minus without a clip, paired by seed."""
    marked = [row | {"place": "all"} for row in rows]
    return _paired(marked, "all", "accuracy", threshold, 0.0, "place", "threshold")


def retrieval_table(rows: list[Row]) -> str:
    """One line a threshold, means over seeds."""
    facts, far = (sorted(rows[0][key], key=_first_number) for key in ("by_facts", "by_distance"))
    lines = []
    for threshold in dict.fromkeys(row["threshold"] for row in rows):
        group = [row for row in rows if row["threshold"] == threshold]
        mean = lambda key, part, group=group: f"{sum(row[key][part] for row in group) / len(group):.3f}"
        lines.append([
            f"{threshold:g}" if threshold else "off", _range(row["max_logit"] for row in group),
            _range((row["clipped_heads"] for row in group), "{:d}"), *(mean("by_facts", n) for n in facts),
            *(mean("by_distance", d) for d in far),
            _text(accuracy_difference(rows, threshold), "+.3f") if threshold else NONE,
        ])  # fmt: skip
    head = ["threshold", "highest logit", "heads clipped", *(f"{n} facts" for n in facts),
            *(f"distance {d}" for d in far), "against off"]  # fmt: skip
    return table(head, lines)


def verdict(study: dict[str, Any]) -> list[str]:
    """Sentences that the numbers decide."""
    rows, limit = study["growth"], study["settings"]["threshold"]
    said = []
    for rate in dict.fromkeys(row["rate"] for row in rows):
        plain, clipped = ([r for r in rows if r["rate"] == rate and r["arm"] == arm] for arm in NAMES)
        over = sum((r["max_logit"] or math.inf) > limit for r in plain)
        diverged = sum(r["loss"] is None for r in plain)
        line = f"At {rate:g}, Muon's logits exceed {limit:g} in {over} of {len(plain)} runs"
        line += f" ({diverged} diverged)" if diverged else ""
        if not over:
            said.append(line + "; the clip has nothing to do" + (
                ", and the runs are the same to the last bit." if _same(plain, clipped) else "."))  # fmt: skip
            continue
        highest = max(r["max_logit"] or math.inf for r in clipped)
        above = _share_above(clipped, limit)
        gone = sum(r["loss"] is None for r in clipped)
        line += (f", up to {max(r['max_logit'] or math.inf for r in plain):.0f}; MuonClip's stay below {highest:.1f} "
                 f"({highest / limit:.2f} times the threshold, with {above:.0%} of steps above it)")  # fmt: skip
        line += f", and {gone} of {len(clipped)} diverged" if gone else ""
        estimate = loss_difference(rows, rate)
        if estimate is not None:
            line += f". Loss with the clip: {_text(estimate)} nats, {_judge(estimate, 'lower', 'higher')}"
        said.append(line + ".")
    said += _retrieval_verdict(study["retrieval"])
    return said


def _retrieval_verdict(rows: list[Row]) -> list[str]:
    free = [row for row in rows if not row["threshold"]]
    if not free:
        return []
    natural = max(row["max_logit"] for row in free)
    start = sum(row["accuracy"] for row in free) / len(free)
    said = [f"Retrieval without a clip: accuracy {start:.3f}, with logits up to {natural:.1f}."]
    for threshold in dict.fromkeys(row["threshold"] for row in rows if row["threshold"]):
        group = [row for row in rows if row["threshold"] == threshold]
        if not sum(row["clipped_heads"] for row in group):
            said.append(f"Threshold {threshold:g} never fires there.")
            continue
        estimate = accuracy_difference(rows, threshold)
        if estimate is not None:
            said.append(f"Threshold {threshold:g} changes accuracy by {_text(estimate, '+.3f')}: "
                        f"{_judge(estimate, 'worse', 'better')}.")  # fmt: skip
    return said


def _judge(estimate: Estimate, negative: str, positive: str) -> str:
    interval = estimate.interval
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "no difference detected"
    return negative if estimate.mean < 0 else positive


def _same(some: list[Row], others: list[Row]) -> bool:
    return [row["loss_curve"] for row in some] == [row["loss_curve"] for row in others]


def _share_above(rows: list[Row], limit: float) -> float:
    values = [value for row in rows for _, value in row["max_logit_curve"]]
    return sum(value is None or value > limit for value in values) / max(len(values), 1)


def _groups(rows: list[Row]) -> list[tuple[float, str, list[Row]]]:
    keys = dict.fromkeys((row["rate"], row["arm"]) for row in rows)
    return [(rate, arm, [r for r in rows if (r["rate"], r["arm"]) == (rate, arm)]) for rate, arm in keys]


def _first_number(text: str) -> int:
    return int(text.split()[0])


def _range(values: Any, form: str = "{:.1f}") -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    low, high = form.format(min(known)), form.format(max(known))
    return low if low == high else f"{low} to {high}"


def _text(estimate: Estimate | None, form: str = "+.4f") -> str:
    if estimate is None:
        return NONE
    interval = estimate.interval
    return f"{estimate.mean:{form}} " + (
        f"[{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "[no interval]"
    )


# -- figure ------------------------------------------------------------------------------------------------------------


def _figure(study: dict[str, Any], path: Path) -> None:
    """Largest logits, training losses, and accuracy over the threshold."""
    rows, limit = study["growth"], study["settings"]["threshold"]
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    colours = dict(zip(rates, ("#5b8fb9", "#e08e45", "#b0413e", "#5a9367", "#7d5ba6") * len(rates), strict=False))
    figure, axes = pyplot().subplots(1, 3, figsize=(12, 3.7), layout="constrained")
    for row in rows:
        style = {"color": colours[row["rate"]], "linestyle": "--" if row["arm"] == "muon" else "-", "lw": 1.0}
        axes[0].plot(*_points(row["max_logit_curve"]), **style)
        axes[1].plot(*_points(row["loss_curve"], smooth=True), **style)
    axes[0].axhline(limit, color="grey", linestyle=":", lw=1)
    axes[0].set(yscale="log", xlabel="optimizer step", ylabel="largest logit", title="dashed: Muon, solid: MuonClip")
    axes[1].set(xlabel="optimizer step", ylabel="training loss (nats/token)", title="training loss, running mean")
    late = [value for row in rows for _, value in row["loss_curve"][len(row["loss_curve"]) // 6 :] if value is not None]
    if late:
        axes[1].set_ylim(min(late) - 0.1, max(late) + 0.1)
    handles = [pyplot().Line2D([], [], color=colours[rate], label=f"lr {rate:g}") for rate in rates]
    axes[0].legend(handles=handles, frameon=False)
    _accuracy_panel(axes[2], study["retrieval"])
    save_figure(figure, path)


def _points(curve: list[tuple[int, float | None]], smooth: bool = False) -> tuple[list[int], list[float]]:
    known = [(step, value) for step, value in curve if value is not None]
    values = [value for _, value in known]
    if smooth:
        width = max(1, len(values) // 20)
        values = [sum(values[max(0, i - width + 1) : i + 1]) / len(values[max(0, i - width + 1) : i + 1])
                  for i in range(len(values))]  # fmt: skip
    return [step for step, _ in known], values


def _accuracy_panel(axis: Any, rows: list[Row]) -> None:
    thresholds = list(dict.fromkeys(row["threshold"] for row in rows))
    order = sorted(thresholds, key=lambda value: value or math.inf)
    for facts in sorted(rows[0]["by_facts"], key=_first_number):
        scores = [[row["by_facts"][facts] for row in rows if row["threshold"] == threshold] for threshold in order]
        means = [sum(group) / len(group) for group in scores]
        (line,) = axis.plot(range(len(order)), means, marker=".", label=f"{facts} facts")
        for place, group in enumerate(scores):
            axis.plot([place] * len(group), group, "o", ms=2.5, alpha=0.5, color=line.get_color())
    axis.set_xticks(range(len(order)), [f"{t:g}" if t else "off" for t in order])
    axis.set(xlabel="threshold", ylabel="accuracy", ylim=(0, 1.03), title="retrieval; dots: seeds")
    axis.legend(frameon=False)
