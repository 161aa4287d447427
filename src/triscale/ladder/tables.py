"""A ladder's results in words: numbers for people, the sentence in the talk's terms, tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
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
    return (f"{arm.detectable:.4f}" if arm.detectable >= 1e-4 else "<0.0001") + factor


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
        if result.multiplier.reason and pairs.pairs:
            lines.append(f"{where}: no multiplier, {result.multiplier.reason}")
    beyond = [result.rung.name for result in arm.rungs if result.multiplier.extrapolated]
    if beyond:
        lines.append(
            f"{arm.name}: the multiplier reaches beyond the baseline's token budgets on {', '.join(beyond)} (*)"
        )
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


VERDICTS = ("arm", "verdict", "n", "loss difference", "p (Holm)", "smallest detectable")
WORTH = ("x tokens", "x FLOPs", "x seconds")
COSTS = ("params", "tokens", "FLOPs", "time")
RESULTS = ("n", "loss", "difference", "x tokens")


def verdict_cells(arm: ArmResult) -> list[str]:
    """The cells of ``VERDICTS`` + ``WORTH`` for one arm, pooled over rungs."""
    p = NONE if arm.p_holm is None else ("<0.001" if arm.p_holm < 0.001 else f"{arm.p_holm:.3f}")
    factors = [factor_text(arm.multipliers[cost], arm.extrapolated) for cost in ("tokens", "flops", "seconds")]
    return [arm.name, arm.verdict, str(arm.n), difference_text(arm.pooled), p, detectable_text(arm), *factors]


def rung_cells(result: LadderResult, index: int) -> list[list[str]]:
    """The rows of rung ``index``: arm, then ``COSTS`` + ``RESULTS``; the baseline first."""
    record, rung = result.record, result.record.rungs[index]
    base = record.of(record.baseline, rung.name)
    rows = [[record.baseline, *cost_cells(base), str(len(base)), loss_cell(base), NONE, NONE]]
    for arm in result.arms:
        runs, item = record.of(arm.name, rung.name), arm.rungs[index]
        factor = factor_text(rung_factor(item), item.multiplier.extrapolated)
        rows.append([arm.name, *cost_cells(runs), str(len(item.pairs.pairs)), loss_cell(runs),
                     difference_text(item.difference), factor])  # fmt: skip
    return rows


def _table(title: str, columns: Sequence[str], left: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _verdict_tables(result: LadderResult, wide: bool) -> list[Table]:
    title = f"Ladder {result.record.name}: verdicts against {result.record.baseline}"
    rows = [verdict_cells(arm) for arm in result.arms]
    for row in rows:
        row[1] = {"better": "[green]better[/]", "worse": "[red]worse[/]"}.get(row[1], row[1])
    if wide:
        return [_filled(_table(title, (*VERDICTS, *WORTH), 2), [rows])]
    pick = lambda *columns: [[row[i] for i in columns] for row in rows]
    return [
        _filled(_table("Effects, pooled over rungs", ("arm", VERDICTS[3], VERDICTS[5]), 1), [pick(0, 3, 5)]),
        _filled(_table("What a part is worth", ("arm", *WORTH), 1), [pick(0, 6, 7, 8)]),
        _filled(_table(title, ("arm", VERDICTS[1], "n", VERDICTS[4], WORTH[0]), 2), [pick(0, 1, 2, 4, 6)]),
    ]


def _rung_tables(result: LadderResult, wide: bool) -> list[Table]:
    groups = [[[rung.name if i == 0 else "", *row] for i, row in enumerate(rung_cells(result, index))]
              for index, rung in enumerate(result.record.rungs)]  # fmt: skip
    if wide:
        return [_filled(_table("By rung", ("rung", "arm", *COSTS, *RESULTS), 2), groups)]
    costs = [[row[:6] for row in group] for group in groups]
    results = [[row[:2] + row[6:] for row in group] for group in groups]
    return [_filled(_table("Cost by rung", ("rung", "arm", *COSTS), 2), costs),
            _filled(_table("Loss by rung", ("rung", "arm", *RESULTS), 2), results)]  # fmt: skip


def _filled(table: Table, groups: Sequence[Sequence[Sequence[str]]]) -> Table:
    for group in groups:
        for row in group:
            table.add_row(*row)
        table.add_section()
    return table


def markdown(result: LadderResult) -> str:
    """The verdicts and the rungs as Markdown tables, for a README; the same cells as everywhere else."""
    verdicts = [verdict_cells(arm) for arm in result.arms]
    rungs = [[rung.name, *row] for index, rung in enumerate(result.record.rungs) for row in rung_cells(result, index)]
    parts = [(*VERDICTS, *WORTH), *verdicts], [("rung", "arm", *COSTS, *RESULTS), *rungs]
    blocks = []
    for head, *rows in parts:
        rule = ["---" if i < 2 else "---:" for i in range(len(head))]
        blocks.append("\n".join("| " + " | ".join(_escape(cell) for cell in row) + " |" for row in (head, rule, *rows)))
    lines = [note for arm in result.arms for note in notes(arm)]
    tail = [footnote(result), *(f"Note: {line}." for line in lines)]
    return "\n\n".join([*blocks, *tail]) + "\n"


def _escape(cell: str) -> str:
    return cell.replace("*", "\\*").replace("|", "\\|")


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
    """The tables, the talk's sentences and every note; fits a terminal of 90 columns, uses 175 if it has them."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE)
    wide = console.width >= WIDE
    for table in _rung_tables(result, wide) + _verdict_tables(result, wide):
        console.print(table)
    for arm in result.arms:
        console.print(talk(result, arm), highlight=False, markup=False)
    for line in [line for arm in result.arms for line in notes(arm)]:
        console.print(f"note: {line}", highlight=False, markup=False, style="yellow")
    console.print(footnote(result), highlight=False, markup=False, style="dim")


WIDE = 175


def footnote(result: LadderResult) -> str:
    level = f"{100 * (1 - result.alpha):g} %"
    return (
        f"n = seed pairs. Brackets: {level} t-intervals, each arm alone. Loss in nats per token; differences are arm minus "
        f"baseline. Verdicts: paired t-test over all pairs, Holm over {len(result.arms)} arm(s) at {result.alpha:g}. "
        f"Multipliers (x): cost the baseline needs for the same loss, divided by the arm's; * = beyond the baseline's "
        f"budgets. Smallest detectable: found with probability {result.power:g} or more by this design."
    )
