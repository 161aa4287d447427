"""A ladder's verdict table as Markdown, for READMEs: numbers are pasted by program, never by hand."""

from __future__ import annotations

from . import tables
from .verdict import LadderResult


def markdown_table(result: LadderResult) -> str:
    """Two tables, by rung and by arm, with n, intervals and the smallest detectable effect."""
    rung_rows = [["rung", "arm", "parameters", "tokens", "FLOPs", "time", "n", "loss (nats/token)", "difference",
                  "multiplier (tokens)"]]  # fmt: skip
    for index, rung in enumerate(result.record.rungs):
        base = result.record.of(result.record.baseline, rung.name)
        rung_rows.append([rung.name, result.record.baseline, *tables.cost_cells(base), str(len(base)),
                          tables.loss_cell(base), tables.NONE, tables.NONE])  # fmt: skip
        for arm in result.arms:
            own, item = result.record.of(arm.name, rung.name), arm.rungs[index]
            factor = tables.factor_text(tables.rung_factor(item), item.multiplier.extrapolated)
            rung_rows.append([rung.name, arm.name, *tables.cost_cells(own), str(len(item.pairs.pairs)),
                              tables.loss_cell(own), tables.difference_text(item.difference), factor])  # fmt: skip
    arm_rows = [["arm", "verdict", "n", "loss difference, pooled", "p (Holm)", "tokens", "FLOPs", "seconds",
                 "smallest detectable"]]  # fmt: skip
    for arm in result.arms:
        p = tables.NONE if arm.p_holm is None else ("<0.001" if arm.p_holm < 0.001 else f"{arm.p_holm:.3f}")
        factors = [tables.factor_text(arm.multipliers[c], arm.extrapolated) for c in ("tokens", "flops", "seconds")]
        arm_rows.append([arm.name, f"**{arm.verdict}**", str(arm.n), tables.difference_text(arm.pooled), p, *factors,
                         tables.detectable_text(arm)])  # fmt: skip
    starred = any(arm.extrapolated for arm in result.arms)
    note = "\n\n\\* beyond the baseline's token budgets: an extrapolation of its fitted curve." if starred else ""
    return f"{_table(rung_rows)}\n\n{_table(arm_rows)}{note}"


def _table(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "---|" * len(rows[0])
    return "\n".join([head, rule, *body])
