"""A ladder's results in words: numbers for people, the sentence in the talk's terms, tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .multiplier import as_factor, pool
from .statistics import Estimate
from .verdict import ArmResult, LadderResult, RungResult

NONE = "-"


def si(value: float) -> str:
    """1234567 -> 1.23M."""
    for limit, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    return f"[{interval[0]:{form}}, {interval[1]:{form}}]" if interval else "[no interval]"


def difference_text(estimate: Estimate | None) -> str:
    if estimate is None:
        return NONE
    return f"{estimate.mean:+.4f} {interval_text(estimate.interval, '+.4f')}"


def factor_text(estimate: Estimate | None, extrapolated: bool = False) -> str:
    """``x1.31 [1.26, 1.35]``, with a star when it reaches beyond the baseline's budgets."""
    value, interval = as_factor(estimate)
    if value is None:
        return NONE
    star = "*" if extrapolated else ""
    if interval and (interval[1] > 100 or interval[0] < 0.01):
        return f"x{value:.2f}{star} [{interval[0]:.2g}, {interval[1]:.2g}]"
    return f"x{value:.2f}{star} {interval_text(interval, '.2f')}"


def rung_factor(result: RungResult, cost: str = "tokens") -> Estimate | None:
    return pool([result.multiplier], cost)


def detectable_text(arm: ArmResult) -> str:
    """The smallest detectable effect in nats and, where the curves allow, as a multiplier."""
    if arm.detectable is None:
        return "unknown"
    factor = f" (x{arm.detectable_multiplier:.2f})" if arm.detectable_multiplier else ""
    return f"{arm.detectable:.4f}{factor}"


def verdict_text(arm: ArmResult) -> str:
    """The verdict; "no difference detected" always says what could have been detected."""
    if arm.verdict != "no difference detected":
        return arm.verdict
    if arm.detectable is None:
        return f"{arm.verdict} (n = {arm.n}: without repetition nothing can be detected)"
    return f"{arm.verdict} (smallest detectable: {detectable_text(arm)} nats)"


def notes(arm: ArmResult) -> list[str]:
    """All that qualifies an arm's numbers: missing, refused, diverged, unmatched, extrapolated, no multiplier."""
    lines = []
    for result in arm.rungs:
        pairs, where = result.pairs, f"{arm.name}, rung {result.rung.name}"
        if pairs.missing:
            lines.append(f"{where}: no finished pair for seed {', '.join(map(str, pairs.missing))}")
        lines += [f"{where}: refused, {reason}" for reason in pairs.refused]
        lines += [f"{where}: not matched in {text}" for text in pairs.mismatch]
        for side, count in (("the arm", pairs.diverged_arm), ("the baseline", pairs.diverged_baseline)):
            if count:
                lines.append(f"{where}: {side} diverged in {count} of {len(pairs.pairs)} pairs; the loss difference "
                             "charges it with the untrained model's, the multiplier leaves the pair out")  # fmt: skip
        if result.multiplier.extrapolated:
            lines.append(f"{where}: the multiplier reaches beyond the baseline's token budgets (*)")
        if result.multiplier.reason and pairs.pairs:
            lines.append(f"{where}: no multiplier, {result.multiplier.reason}")
    return lines


def talk(result: LadderResult, arm: ArmResult) -> str:
    """The finding in the talk's words."""
    value, interval = as_factor(arm.multipliers["tokens"])
    if value is None:
        return f"{arm.name}: no multiplier can be given."
    tokens = [r.rung.tokens for r in arm.rungs if r.multiplier.known]
    span = si(tokens[0]) if len(set(tokens)) == 1 else f"{si(min(tokens))} to {si(max(tokens))}"
    known = [r for r in arm.rungs if r.multiplier.known]
    n = sum(len(r.multiplier.logs["tokens"]) for r in known)
    error = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}" if interval else "no interval"
    tail = "; beyond the baseline's budgets" if arm.extrapolated else ""
    doubt = "" if arm.verdict != "no difference detected" else " That is not distinguishable from no effect."
    acts = f"act like {value:.2f} x D" if len(set(tokens)) > 1 else f"act like {si(tokens[0] * value)}"
    return (f"With {arm.name}, your D = {span} tokens {acts} (multiplier x{value:.2f}, {error}, n = {n} pairs on "
            f"{len(known)} rung{'s' * (len(known) > 1)}{tail}).{doubt}")  # fmt: skip


def verdict_table(result: LadderResult) -> Table:
    table = Table(title=f"Ladder {result.record.name}: verdicts against {result.record.baseline}", title_justify="left")
    for name in ("arm", "verdict", "n", "loss difference\n(nats/token, pooled)", "p (Holm)", "tokens", "FLOPs",
                 "seconds", "smallest\ndetectable"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("arm", "verdict") else "right")
    for arm in result.arms:
        style = {"better": "green", "worse": "red"}.get(arm.verdict, "")
        p = NONE if arm.p_holm is None else ("<0.001" if arm.p_holm < 0.001 else f"{arm.p_holm:.3f}")
        factors = [factor_text(arm.multipliers[c], arm.extrapolated) for c in ("tokens", "flops", "seconds")]
        table.add_row(arm.name, f"[{style}]{arm.verdict}[/]" if style else arm.verdict, str(arm.n),
                      difference_text(arm.pooled), p, *factors, detectable_text(arm))  # fmt: skip
    return table


def rung_table(result: LadderResult) -> Table:
    table = Table(title="By rung", title_justify="left")
    for name in ("rung", "arm", "params", "tokens", "FLOPs", "time", "n", "loss", "difference", "multiplier (tokens)"):
        table.add_column(name, justify="left" if name in ("rung", "arm") else "right")
    for index, rung in enumerate(result.record.rungs):
        runs = [run for run in result.record.of(result.record.baseline, rung.name)]
        table.add_row(rung.name, result.record.baseline, *cost_cells(runs), str(len(runs)), loss_cell(runs), NONE, NONE)
        for arm in result.arms:
            own, item = result.record.of(arm.name, rung.name), arm.rungs[index]
            table.add_row("", arm.name, *cost_cells(own), str(len(item.pairs.pairs)), loss_cell(own),
                          difference_text(item.difference),
                          factor_text(rung_factor(item), item.multiplier.extrapolated))  # fmt: skip
        table.add_section()
    return table


def cost_cells(runs) -> list[str]:
    """Parameters, tokens, FLOPs and seconds of a cell's runs, as text (means)."""
    if not runs:
        return [NONE] * 4
    mean = lambda name: sum(getattr(run, name) for run in runs) / len(runs)
    return [si(mean("parameters")), si(mean("tokens")), si(mean("flops")), duration(mean("seconds"))]


def loss_cell(runs) -> str:
    losses = [run.loss for run in runs if not run.diverged]
    text = f"{sum(losses) / len(losses):.4f}" if losses else NONE
    diverged = len(runs) - len(losses)
    return f"{text} ({diverged} diverged)" if diverged else text


def print_report(result: LadderResult, console: Console | None = None) -> None:
    """The verdict table, the table by rung, the talk's sentences and every note."""
    console = console or Console()
    console.print(rung_table(result))
    console.print(verdict_table(result))
    for arm in result.arms:
        console.print(talk(result, arm), highlight=False)
    lines = [line for arm in result.arms for line in notes(arm)]
    for line in lines:
        console.print(f"note: {line}", highlight=False, style="yellow")
    console.print(FOOTNOTE.format(alpha=result.alpha, arms=len(result.arms)), highlight=False, style="dim")


FOOTNOTE = (
    "n = seed pairs. Brackets: 95 % t-intervals, each arm alone. Verdicts: paired t-test pooled over rungs, Holm over "
    "{arms} arm(s) at {alpha}. Multipliers: cost the baseline needs for the same loss, divided by the arm's; * = "
    "beyond the baseline's budgets. Smallest detectable: found with probability 0.8 or more by this design."
)
