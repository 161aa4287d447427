"""The report's figures (matplotlib, extra ``report``), each as SVG for the page and PNG for other uses."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from triscale.config import require

from .multiplier import as_factor
from .records import RunSummary
from .statistics import paired_t
from .tables import rung_factor, si
from .verdict import LadderResult

COLOURS = ("#4c4c4c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b5a2b", "#7f3c8d")


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    caption: str
    svg: bytes
    png: bytes


def draw_plots(result: LadderResult) -> Iterator[Plot]:
    """Every figure for which the record has data, in the order of the page."""
    require("matplotlib", "report", "the report's plots")
    from matplotlib import rc_context

    style: dict[str, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
             "grid.alpha": 0.25, "svg.hashsalt": "triscale", "svg.fonttype": "path", "legend.frameon": False,
             "axes.titlesize": 10, "axes.titleweight": "bold"}  # fmt: skip
    with rc_context(style):  # type: ignore[arg-type]
        yield from filter(None, (make(result) for make in _FIGURES))


def colour_of(result: LadderResult) -> dict[str, str]:
    names = [result.record.baseline, *result.record.arms]
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _multipliers(result: LadderResult) -> Plot | None:
    """A forest plot: every arm's multiplier by rung and pooled."""
    rows: list[tuple[str, float, list[float] | None, str, bool]] = []
    colours = colour_of(result)
    for arm in result.arms:
        for item in arm.rungs:
            value, interval = as_factor(rung_factor(item))
            if value is not None:
                rows.append((f"{arm.name}, {item.rung.name} (n={len(item.pairs.completed)})", value, interval,
                             colours[arm.name], False))  # fmt: skip
        value, interval = as_factor(arm.multipliers["tokens"])
        if value is not None:
            rows.append((f"{arm.name}, all rungs", value, interval, colours[arm.name], True))
    if not rows:
        return None
    figure, axes = _figure(7.5, 0.9 + 0.27 * len(rows))
    low = min(min(v, *(i or [v])) if p else v for _, v, i, _, p in rows)
    high = max(max(v, *(i or [v])) if p else v for _, v, i, _, p in rows)
    low, high = max(min(low, 1) / 1.25, 0.05), min(max(high, 1) * 1.25, 20)
    for row, (_, value, interval, colour, pooled) in enumerate(rows):
        if interval:
            ends = np.clip(interval, low / 10, high * 10)  # the interval of two seeds may be absurdly wide: runs off
            axes.plot(ends, [row, row], color=colour, lw=2.2 if pooled else 1.2, solid_capstyle="butt")
        axes.plot(value, row, "D" if pooled else "o", color=colour, ms=6 if pooled else 4)
    axes.axvline(1, color="black", lw=0.8)
    axes.set(xscale="log", xlim=(low, high), ylim=(len(rows) - 0.5, -0.5), xlabel="token multiplier (log scale)")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    _plain_ticks(axes, low, high)
    axes.grid(axis="y", visible=False)
    caption = ("Tokens the baseline needs for the arm's loss, divided by the arm's tokens, with 95 % t-intervals. "
               "Right of 1: the part is worth more tokens. Intervals that leave the frame are that wide.")  # fmt: skip
    return _finish(figure, "multipliers", "What each arm is worth in tokens", caption)


def _scaling(result: LadderResult) -> Plot | None:
    """Loss over training FLOPs, each arm with its fit and interval."""
    record, colours = result.record, colour_of(result)
    if len(record.rungs) < 2:
        return None
    figure, axes = _figure(7.5, 4.4)
    fits = {record.baseline: result.scaling} | {arm.name: arm.scaling for arm in result.arms}
    for index, (name, fit) in enumerate(fits.items()):
        runs = [run for run in record.runs if run.arm == name and not run.diverged]
        aside = 1.035 ** (index - len(result.arms) / 2)  # arms of equal FLOPs side by side
        axes.plot([run.flops * aside for run in runs], [run.loss for run in runs], "o", color=colours[name], ms=3,
                  alpha=0.45, mew=0)  # fmt: skip
        _error_bars(axes, result, name, aside, colours[name])
        label = name
        if fit is not None:
            x = np.geomspace(fit.lowest / 1.15, fit.highest * 1.15, 80)
            label += f": $C^{{{-fit.exponent:.3f}}}$" + (f" + {fit.floor:.2f}" if fit.floor else "")
            axes.plot(x, fit.loss(x), color=colours[name], lw=1.4, label=label)
            band = fit.band(x)
            if band is not None and fit.df > 1:
                axes.fill_between(x, *band, color=colours[name], alpha=0.1, lw=0)
        else:
            axes.plot([], [], "o-", color=colours[name], label=label)
    losses = [run.loss for run in record.runs if not run.diverged and run.loss is not None]
    if not losses:
        return None
    margin = 0.06 * (max(losses) - min(losses)) + 0.01
    limits = (min(losses) - 2 * margin, max(losses) + 2 * margin)
    axes.set(xscale="log", yscale="log", ylim=limits, xlabel="training FLOPs", ylabel="held-out loss (nats/token)")
    _plain_ticks(axes, *limits, which="y")
    _log_ticks(axes, min(run.flops for run in record.runs) / 1.2, max(run.flops for run in record.runs) * 1.2)
    axes.legend()
    caption = ("Every dot is a run (arms of equal FLOPs are drawn side by side); bars: mean over seeds and its 95 % "
               "t-interval, which contains the luck a seed brings to all arms alike. Lines: L(C) = a·C^-b (plus a "
               "floor where the data show one); bands: their 95 % pointwise intervals, drawn where a fit has more than "
               "one degree of freedom.")  # fmt: skip
    return _finish(figure, "scaling", "Scaling over rungs", caption)


def _error_bars(axes, result: LadderResult, arm: str, aside: float, colour: str) -> None:
    for rung in result.record.rungs:
        runs = [run for run in result.record.of(arm, rung.name) if not run.diverged]
        if len(runs) < 2:
            continue
        estimate = paired_t([run.loss for run in runs if run.loss is not None])
        x = aside * sum(run.flops for run in runs) / len(runs)
        assert estimate.interval is not None
        axes.plot([x, x], estimate.interval, color=colour, lw=1)
        axes.plot(x, estimate.mean, "_", color=colour, ms=7)


def _budgets(result: LadderResult) -> Plot | None:
    """The baseline's L(D) per rung: the ruler of the multiplier."""
    rungs = [rung for rung in result.record.rungs if result.curves[rung.name] is not None]
    if not rungs:
        return None
    figure, panels = _panels(len(rungs))
    colours = colour_of(result)
    for axes, rung in zip(panels, rungs, strict=True):
        fit = result.curves[rung.name]
        assert fit is not None
        x = np.geomspace(fit.lowest / 1.1, fit.highest * 1.1, 60)
        axes.plot(x, fit.loss(x), color=COLOURS[0], lw=1.3)
        band = fit.band(x)
        if band is not None:
            axes.fill_between(x, *band, color=COLOURS[0], alpha=0.12, lw=0)
        for run in result.record.of(result.record.baseline, rung.name):
            ends = [(b.tokens, b.loss) for b in run.budgets if b.loss is not None]
            axes.plot(*zip(*ends, strict=True), ".", color=COLOURS[0], ms=4, alpha=0.6) if ends else None
        for arm in result.arms:
            for run in result.record.of(arm.name, rung.name):
                if not run.diverged:
                    axes.plot(run.tokens, run.loss, "x", color=colours[arm.name], ms=5)
        axes.set(xscale="log", title=rung.name, xlabel="tokens")
        shown = [line.get_ydata() for line in axes.lines]
        span = np.concatenate([np.ravel(y) for y in shown])
        pad = 0.08 * (span.max() - span.min()) + 1e-3
        axes.set_ylim(span.min() - pad, span.max() + pad)
        _log_ticks(axes, fit.lowest / 1.1, fit.highest * 1.1)
    panels[0].set_ylabel("held-out loss (nats/token)")
    _legend(figure, colours, baseline=result.record.baseline)
    caption = ("Dots: the ends of the baseline's complete schedules; line and band: L(D) fitted to them with its 95 % "
               "interval (for the mean over seeds). Crosses: the arms' runs. The multiplier is the horizontal distance from "
               "a cross to the line.")  # fmt: skip
    return _finish(figure, "budgets", "The baseline's loss over token budgets", caption)


def _curves(name: str, title: str, field: str, label: str, caption: str, log: bool) -> Callable:
    def make(result: LadderResult) -> Plot | None:
        have = [run for run in result.record.runs if len(getattr(run, field)) > 3]
        rungs = [rung.name for rung in result.record.rungs if any(run.rung == rung.name for run in have)]
        if not rungs:
            return None
        figure, panels = _panels(len(rungs))
        colours = colour_of(result)
        for axes, rung in zip(panels, rungs, strict=True):
            mine = [run for run in have if run.rung == rung]
            for run in mine:
                x, y = zip(*getattr(run, field), strict=True)
                axes.plot(x, y, color=colours[run.arm], lw=0.9, alpha=0.8, ls=":" if run.diverged else "-")
            axes.set(title=rung, xlabel="tokens", yscale="log" if log else "linear")
            axes.xaxis.set_major_formatter(lambda value, _: si(value) if value else "0")
            axes.xaxis.set_major_locator(_ticker().MaxNLocator(4))
            _zoom(axes, mine, field)
            if log:
                _log_values(axes, [y for run in mine for _, y in getattr(run, field)])
        panels[0].set_ylabel(label)
        _legend(figure, colours)
        return _finish(figure, name, title, caption)

    return make


def _zoom(axes, runs: list[RunSummary], field: str) -> None:
    """Loss curves are read at their end: cut off the first descent (never for gradient norms or logits)."""
    if field not in ("curve", "train_loss_curve"):
        return
    late = [y for run in runs if not run.diverged for x, y in getattr(run, field) if x >= 0.15 * run.tokens]
    if late:
        pad = 0.06 * (max(late) - min(late)) + 1e-3
        axes.set_ylim(min(late) - pad, max(late) + pad)


_FIGURES: tuple[Callable[[LadderResult], Plot | None], ...] = (
    _multipliers,
    _scaling,
    _budgets,
    _curves("train_loss", "Training loss", "train_loss_curve", "training loss (nats/token)",
            "One line a run, averaged over short stretches; the first 15 % may lie above the frame. Dotted: diverged.",
            False),
    _curves("loss", "Held-out loss during training", "curve", "held-out loss (nats/token)",
            "One line a run; the first 15 % of the descent may lie above the frame. Dotted: diverged.", False),
    _curves("max_logit", "Largest attention logit", "max_logit_curve", "max logit",
            "The largest attention logit over layers and heads, one line a run.", False),
    _curves("grad_norm", "Gradient norm", "grad_norm_curve", "gradient norm",
            "Gradient norm before clipping (log scale), one line a run; of each stretch the largest value.", True),
)  # fmt: skip


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _panels(count: int):
    from matplotlib.figure import Figure

    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(3.1 * columns, 4.5), 2.9 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in panels[count:]:
        unused.remove()
    return figure, list(panels[:count])


def _legend(figure, colours: dict[str, str], baseline: str | None = None) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, lw=2, label=name) for name, colour in colours.items()]
    if baseline is not None:
        for handle in handles:
            handle.set(marker="." if handle.get_label() == baseline else "x",
                       linestyle="-" if handle.get_label() == baseline else "")  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * len(figure.axes) + 1))


def _ticker():
    from matplotlib import ticker

    return ticker


def _plain_ticks(axes, low: float, high: float, which: str = "x") -> None:
    """A log axis over less than a decade or two, labelled with plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    if which == "x":
        narrow = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5)
        wide = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
        ticks = [t for t in (narrow if high / low < 6 else wide) if low <= t <= high]
    else:
        ticks = [t for t in _ticker().MaxNLocator(6).tick_values(low, high) if low <= t <= high]
    axis.set_major_locator(_ticker().FixedLocator(ticks))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(_ticker().NullLocator())


def _log_values(axes, values: list[float]) -> None:
    """A short log axis gets plain ticks; matplotlib's would overlap."""
    positive = [value for value in values if value > 0]
    if positive:
        low, high = min(positive) / 1.05, max(positive) * 1.05
        axes.set_ylim(low, high)
        if high / low < 5:
            _plain_ticks(axes, low, high, which="y")
        elif high / low < 1000:
            ticks = [m * 10.0**e for e in range(-9, 9) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
            axes.yaxis.set_major_locator(_ticker().FixedLocator(ticks))
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_locator(_ticker().NullLocator())


def _log_ticks(axes, low: float, high: float) -> None:
    some, more = (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)
    ticks = lambda heads: [m * 10.0**e for e in range(2, 30) for m in heads if low <= m * 10.0**e <= high]
    steps = ticks(some) if len(ticks(some)) > 2 else ticks(more)
    axes.xaxis.set_major_locator(_ticker().FixedLocator(steps))
    axes.xaxis.set_major_formatter(lambda value, _: si(value))
    axes.xaxis.set_minor_locator(_ticker().NullLocator())


def _finish(figure, name: str, title: str, caption: str) -> Plot:
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=150)
    return Plot(name, title, caption, svg.getvalue(), png.getvalue())
