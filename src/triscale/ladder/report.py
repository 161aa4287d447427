"""The report of a ladder: JSON for programs, a self-contained HTML page with plots for people."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from triscale.config import dump_toml, require

from . import tables
from .budget_curve import BudgetCurve
from .fits import PowerLaw
from .multiplier import as_factor, pool
from .records import LadderRecord, Rung
from .statistics import Estimate
from .verdict import ArmResult, LadderResult, RungResult, analyse


def report_json(record: LadderRecord | LadderResult) -> dict[str, Any]:
    """``{arms: {NAME: {rungs: [...], verdict, ...}}, baseline: {...}}``; losses in nats per token.

    ``ci`` belongs to ``loss_diff``, ``multiplier_ci`` to ``multiplier``; null = cannot be known from these runs.
    """
    result = record if isinstance(record, LadderResult) else analyse(record)
    record = result.record
    return {
        "name": record.name,
        "alpha": result.alpha,
        "corpus_hashes": sorted({run.corpus_hash for run in record.runs}),
        "baseline": {
            "name": record.baseline,
            "rungs": [_cell(record, record.baseline, rung.name) for rung in record.rungs],
            "curves": {rung.name: _curve_json(result.curves[rung.name], rung) for rung in record.rungs},
            "scaling": _fit_json(result.scaling),
        },
        "arms": {arm.name: _arm_json(result, arm) for arm in result.arms},
    }


def _arm_json(result: LadderResult, arm: ArmResult) -> dict[str, Any]:
    factors: dict[str, Any] = {}
    for cost, prefix in (("tokens", ""), ("flops", "flops_"), ("seconds", "seconds_")):
        factors[f"{prefix}multiplier"], factors[f"{prefix}multiplier_ci"] = as_factor(arm.multipliers[cost])
    return {
        "rungs": [_rung_json(result.record, arm.name, item) for item in arm.rungs],
        "verdict": arm.verdict,
        "pooled": {"loss_diff": arm.pooled.mean if arm.pooled else None, "ci": _interval(arm.pooled), **factors},
        "n": arm.n,
        "p": arm.pooled.p if arm.pooled else None,
        "p_holm": arm.p_holm,
        "mde": arm.detectable,
        "mde_multiplier": arm.detectable_multiplier,
        "extrapolated": arm.extrapolated,
        "diverged": arm.diverged,
        "scaling": _fit_json(arm.scaling),
        "talk": tables.talk(result, arm),
        "notes": tables.notes(arm),
    }


def _rung_json(record: LadderRecord, arm: str, item: RungResult) -> dict[str, Any]:
    values = _cell(record, arm, item.rung.name)
    values |= {"loss_diff": item.difference.mean if item.difference else None, "ci": _interval(item.difference)}
    for cost, prefix in (("tokens", ""), ("flops", "flops_"), ("seconds", "seconds_")):
        values[f"{prefix}multiplier"], values[f"{prefix}multiplier_ci"] = as_factor(pool([item.multiplier], cost))
    return values | {
        "n": len(item.pairs.pairs),
        "extrapolated": item.multiplier.extrapolated,
        "missing_seeds": list(item.pairs.missing),
        "refused": list(item.pairs.refused),
        "mismatch": list(item.pairs.mismatch),
        "match": item.rung.match,
    }


def _cell(record: LadderRecord, arm: str, rung: str) -> dict[str, Any]:
    """Means over an arm's finished runs at one rung; the loss over those that did not diverge."""
    runs = record.of(arm, rung)
    planned = next(r for r in record.rungs if r.name == rung)
    losses = [run.loss for run in runs if not run.diverged and run.loss is not None]
    bits = [run.bits_per_byte for run in runs if not run.diverged and run.bits_per_byte is not None]
    mean = lambda values: sum(values) / len(values) if values else None
    return {
        "rung": rung,
        "params": round(sum(r.parameters for r in runs) / len(runs)) if runs else None,
        "tokens": round(sum(r.tokens for r in runs) / len(runs)) if runs else planned.tokens,
        "flops": mean([r.flops for r in runs]),
        "seconds": mean([r.seconds for r in runs]),
        "loss_mean": mean(losses),
        "bits_per_byte": mean(bits),
        "runs": len(runs),
        "diverged": sum(r.diverged for r in runs),
        "spikes": sum(r.spikes for r in runs),
        "max_logit": max((r.max_logit for r in runs if r.max_logit is not None), default=None),
        "learning_rate": runs[0].learning_rate if runs else None,
    }


def _interval(estimate: Estimate | None) -> list[float] | None:
    interval = estimate.interval if estimate else None
    return list(interval) if interval else None


def _curve_json(curve: BudgetCurve | None, rung: Rung) -> dict[str, Any] | None:
    """The baseline's L(D): its loss and local exponent b at the rung's tokens."""
    if curve is None:
        return None
    interval = curve.exponent_interval(rung.tokens)
    return {"loss": float(curve.loss(rung.tokens)), "b": curve.exponent_at(rung.tokens),
            "b_ci": list(interval) if interval else None, "budgets": curve.points, "seeds": curve.seeds,
            "error_from": curve.source, "df": curve.df, "token_range": [curve.lowest, curve.highest]}  # fmt: skip


def _fit_json(fit: PowerLaw | None) -> dict[str, Any] | None:
    """L(x) = a·x^-b + floor."""
    if fit is None:
        return None
    interval = fit.exponent_interval
    return {"a": fit.scale, "b": float(fit.exponent), "b_ci": [float(v) for v in interval] if interval else None,
            "floor": float(fit.floor), "points": fit.points, "seeds": fit.seeds, "error_from": fit.source,
            "df": fit.df, "x_range": [fit.lowest, fit.highest], "largest_residual": fit.largest_residual}  # fmt: skip


def write_report(record: LadderRecord | LadderResult, folder: str | Path) -> Path:
    """Write ``folder/index.html`` (no other file needed to view it) one PNG a plot and ``tables.md``; returns the page's path.

    Raises :class:`MissingExtraError` without the extra ``report`` (matplotlib, jinja2).
    """
    jinja2 = require("jinja2", "report", "the HTML report")
    from .plots import draw_plots

    result = record if isinstance(record, LadderResult) else analyse(record)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plots = []
    for plot in draw_plots(result):
        (folder / f"{plot.name}.png").write_bytes(plot.png)
        uri = "data:image/svg+xml;base64," + base64.b64encode(plot.svg).decode("ascii")
        plots.append({"name": plot.name, "title": plot.title, "caption": plot.caption, "uri": uri})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    page = environment.get_template("report.html").render(_page(result) | {"plots": plots})
    (folder / "tables.md").write_text(tables.markdown(result), encoding="utf-8")
    path = folder / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _page(result: LadderResult) -> dict[str, Any]:
    record = result.record
    verdicts = [{"cells": tables.verdict_cells(arm), "verdict": arm.verdict, "talk": tables.talk(result, arm),
                 "notes": tables.notes(arm)} for arm in result.arms]  # fmt: skip
    return {
        "record": record,
        "verdicts": verdicts,
        "columns": {"verdicts": (*tables.VERDICTS, *tables.WORTH), "rungs": ("arm", *tables.COSTS, *tables.RESULTS)},
        "rungs": [
            {"name": rung.name, "match": rung.match, "rows": tables.rung_cells(result, index)}
            for index, rung in enumerate(record.rungs)
        ],
        "curves": _curve_rows(result),
        "fits": _fit_rows(result),
        "runs": sorted(record.runs, key=lambda r: (r.rung, r.arm, r.seed)),
        "si": tables.si,
        "duration": tables.duration,
        "planned": (1 + len(record.arms)) * len(record.rungs) * len(record.seeds),
        "corpora": sorted({run.corpus_hash for run in record.runs}),
        "pythons": sorted({run.python for run in record.runs}),
        "packages": _package_rows(record),
        "toml": dump_toml(record.ladder),
        "environment": record.environment,
        "footnote": tables.footnote(result),
    }


def _curve_rows(result: LadderResult) -> list[list[str]]:
    rows = []
    for rung in result.record.rungs:
        curve = result.curves[rung.name]
        if curve is None:
            rows.append([rung.name, "needs two budgets", "", "", ""])
            continue
        power = f"{curve.exponent_at(rung.tokens):.4f} {_text(curve.exponent_interval(rung.tokens))}"
        ends = f"{curve.exponent_at(curve.lowest):.4f} to {curve.exponent_at(curve.highest):.4f}"
        span = f"{tables.si(curve.lowest)} to {tables.si(curve.highest)}"
        rows.append([rung.name, span, power, ends, f"{curve.points} budgets, {curve.seeds} seed(s)"])
    return rows


def _fit_rows(result: LadderResult) -> list[list[str]]:
    rows = []
    for name, fit in [(result.record.baseline, result.scaling), *((arm.name, arm.scaling) for arm in result.arms)]:
        if fit is None:
            rows.append([name, "needs two rungs", "", "", ""])
            continue
        floor = f"{fit.floor:.3f}" if fit.floor else "not identifiable"
        power = f"{fit.exponent:.4f} {_text(fit.exponent_interval)}"
        rows.append([name, f"{fit.scale:.4g}", power, floor, f"{fit.points} rungs, {fit.seeds} seed(s)"])
    return rows


def _text(interval: tuple[float, float] | None) -> str:
    return tables.interval_text(interval, ".4f")


def _package_rows(record: LadderRecord) -> list[tuple[str, str]]:
    names = sorted({name for run in record.runs for name in run.packages})
    return [(name, ", ".join(sorted({run.packages[name] for run in record.runs if name in run.packages})))
            for name in names]  # fmt: skip
