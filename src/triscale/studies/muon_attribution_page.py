"""README.md and the figure of ``triscale study muon-attribution``, from its results alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .page import pyplot, save_figure, table

HOW = {"step": "step from AdamW to MuonClip", "removed": "against Muon without it", "added": "against Muon"}


def write(study: dict[str, Any], output: Path) -> str:
    """Write README.md and attribution.svg into ``output``; returns the tables and the verdict."""
    ladder = study["ladder"]
    train = ladder["base"]["train"]
    sizes = "; ".join(
        f"{rung['name']}: width {rung['config'].get('model', {}).get('width', 'as given')}, {rung['tokens']:,} tokens"
        for rung in ladder["rungs"]
    )
    tables = "\n\n".join([
        "## Arms", arms_table(study), "## Ingredients", ingredients_table(study),
        "## Verdict", "\n".join(f"- {line}" for line in verdict(study)),
    ])  # fmt: skip
    page = [
        "# Which ingredient of MuonClip carries its gain over AdamW?", f"    {study['command']}",
        "![token multipliers of arms and ingredients](attribution.svg)",
        f"One ladder ({sizes}; {train['batch_tokens']:,} tokens a step, corpus {', '.join(c[:12] for c in study['corpus'])}), "
        f"{len(study['settings']['seeds'])} paired seeds. Each arm's learning rate was tuned on the smallest rung with seed "
        f"{ladder['seeds'][0]} over {', '.join(f'{r:g}' for r in ladder['rates'])}, further while the edge was best. AdamW "
        "decays by the same 0.1 as Muon; *adamw-rms* scales every matrix update to RMS 0.2; *muon-no-rms* uses Jordan's "
        "factor sqrt(max(1, rows / columns)); the clip's threshold is 100.",
        "A multiplier is the tokens AdamW needs for the arm's loss, over the arm's; an ingredient's factor is the ratio of two "
        "arms' multipliers on common seeds, its share the part of MuonClip's log multiplier (Fieller's interval). The three "
        "steps add up to 100 %. Brackets: 95 %; a star: beyond AdamW's measured budgets.",
        tables,
        "Everything measured: [results.json](results.json). These are runs of minutes: what shows only late in training, as "
        "the need for weight decay does, cannot show here.",
    ]  # fmt: skip
    (output / "README.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    _figure(study, output / "attribution.svg")
    return tables


def arms_table(study: dict[str, Any]) -> str:
    rungs = list(study["baseline"])
    rates = {arm["name"]: arm for arm in study["ladder"]["arms"]}
    inside = {name: row["inside"] for arms in study["tuning"].values() for name, row in arms.items()}
    rate = lambda name: f"{rates[name]['learning_rate']:g}" + ("" if inside[name] else " (edge)")
    base = study["ladder"]["arms"][0]["name"]
    rows = [[base, rate(base), *(_mean(study["baseline"][r]) for r in rungs), "-", "1", "-", "-"]]
    for name, arm in study["arms"].items():
        verdict = arm["verdict"] + (f" ({arm['diverged']} diverged)" if arm["diverged"] else "")
        logit = f"{arm['max_logit']:.1f}" if arm["max_logit"] is not None else "-"
        factor = _factor(arm["multiplier"], arm["interval"], "*" if arm["extrapolated"] else "")
        rows.append([name, rate(name), *(_mean(arm["losses"][r]) for r in rungs),
                     _interval(arm["loss_difference"], arm["loss_interval"]), factor, verdict, logit])  # fmt: skip
    head = ["arm", "learning rate", *(f"loss, {r}" for r in rungs), "loss difference", "token multiplier", "verdict",
            "highest logit"]  # fmt: skip
    return table(head, [[cell.replace("*", "\\*") for cell in row] for row in rows])


def ingredients_table(study: dict[str, Any]) -> str:
    rows = [
        [title, HOW[item["how"]], _factor(item["factor"], item["interval"]), _share(item), str(item["n"])]
        for title, item in study["ingredients"].items()
    ]
    return table(["ingredient", "how", "factor in tokens", "share of MuonClip's gain", "n"], rows)


def verdict(study: dict[str, Any]) -> list[str]:
    """Sentences that the numbers decide."""
    said = []
    whole = study["arms"].get("muonclip")
    if whole is not None:
        gain = _factor(whole["multiplier"], whole["interval"])
        said.append(f"MuonClip is worth {gain} times AdamW's tokens ({whole['verdict']}).")
    for title, item in study["ingredients"].items():
        if item["factor"] is None:
            continue
        name = title[0].upper() + title[1:]
        if item["factor"] == 1 and item["interval"] is not None and item["interval"][0] == item["interval"][1]:
            said.append(f"{name}: no effect at all, the two arms' losses are the same to the last bit.")
        elif item["interval"] is None:
            said.append(f"{name}: x{item['factor']:.2f}, without an interval.")
        elif item["interval"][0] <= 1 <= item["interval"][1]:
            said.append(f"{name}: no effect detected, x{_factor(item['factor'], item['interval'])}.")
        else:
            verb = "saves" if item["factor"] > 1 else "costs"
            said.append(
                f"{name} {verb} tokens: x{_factor(item['factor'], item['interval'])}, {_share(item)} of the gain."
            )
    return said


def _factor(value: float | None, interval: Any, mark: str = "") -> str:
    if value is None:
        return "-"
    if not interval:
        return f"{value:.2f}{mark} [no interval]"
    form = ".2f" if interval[1] < 100 else ".2g"
    return f"{value:.2f}{mark} [{interval[0]:{form}}, {interval[1]:{form}}]"


def _interval(value: float | None, interval: Any) -> str:
    if value is None:
        return "-"
    return f"{value:+.4f} " + (f"[{interval[0]:+.4f}, {interval[1]:+.4f}]" if interval else "[no interval]")


def _share(item: dict[str, Any]) -> str:
    if item["share"] is None:
        return "-"
    interval = item["share_interval"]
    if interval is None:
        return "unresolved: so is the gain"
    return f"{item['share']:.0%} [{interval[0]:.0%}, {interval[1]:.0%}]"


def _mean(losses: list[float | None]) -> str:
    known = [value for value in losses if value is not None]
    return f"{sum(known) / len(known):.4f}" if known else "-"


def _figure(study: dict[str, Any], path: Path) -> None:
    """Two forests: the arms' multipliers, the ingredients' factors."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    panels = (
        ("arm over AdamW", {name: (a["multiplier"], a["interval"]) for name, a in study["arms"].items()}),
        ("ingredient", {name: (i["factor"], i["interval"]) for name, i in study["ingredients"].items()}),
    )
    for axis, (title, rows) in zip(axes, panels, strict=True):
        known = {name: row for name, row in rows.items() if row[0] is not None}
        values = [value for value, _ in known.values()] or [1.0]
        ends = [end for _, interval in known.values() if interval for end in interval]
        low = max(min([1.0, *values, *ends]) / 1.1, min(values) / 3)
        high = min(max([1.0, *values, *ends]) * 1.1, max(values) * 3)
        for place, (value, interval) in enumerate(known.values()):
            if interval:
                axis.plot(np.clip(interval, low / 2, high * 2), [place, place], color="#5b8fb9", lw=1.6)
            axis.plot(value, place, "o", color="#2c5d8f", ms=5)
        axis.axvline(1, color="black", lw=0.8)
        axis.set(xscale="log", xlim=(low, high), ylim=(len(known) - 0.5, -0.5), title=title,
                 xlabel="tokens saved (factor, log scale, 95 %)")  # fmt: skip
        axis.set_yticks(range(len(known)), list(known))
        fine, coarse = (0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2), (0.1, 0.25, 0.5, 1, 2, 4, 8)
        ticks = [tick for tick in (fine if high < 3 * low else coarse) if low <= tick <= high]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_xticks([], minor=True)
    save_figure(figure, path)
