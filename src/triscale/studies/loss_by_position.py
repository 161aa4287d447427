"""How does loss fall with the token's position? An LSTM, a transformer and a Kimi Linear hybrid on real text.

Each arm trains with the ordinary trainer on the same batches; afterwards every held-out token's loss is filed under its
position in its document. A model that uses its context keeps improving along it. Intervals are 95 % over held-out rows
(of which positions are parts, so rows, not tokens, are the sample). Runs resume where they stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from triscale.config import from_dict, overlay, to_dict
from triscale.data.heldout import HeldoutRows
from triscale.data.prepare import PreparedData, prepare
from triscale.models import count_parameters
from triscale.models.decoder import Decoder
from triscale.train.config import RunConfig, Runtime
from triscale.train.evaluate import to_batch
from triscale.train.load import load_run
from triscale.train.loop import Trainer
from triscale.train.plan import plan as plan_run
from triscale.train.progress import Progress

from .page import command_line, defaults, header, pyplot, save_figure, table, write_page

QUESTION = "How does loss fall with the token's position?"
ARMS: dict[str, dict[str, Any]] = {
    "LSTM": {"kind": "lstm"},
    "transformer": {"kind": "grouped_query_attention", "heads": 4},
    "Kimi Linear": {
        "kind": "hybrid",
        "pattern": "3:1",
        "linear": {"kind": "delta_attention", "heads": 4},
        "full": {"kind": "latent_attention", "heads": 4},
    },
}
REFERENCE = "transformer"
BASE: dict[str, Any] = {
    "model": {"width": 128, "depth": 4},
    "data": {"vocabulary_size": 2048},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
    "schedule": {"warmup_length": 75},
    "train": {"row_length": 1024, "batch_tokens": 4096, "micro_batch_tokens": 4096, "tokens": 1_500_000},
}


def run(
    output: Path,
    arms: Sequence[str] = tuple(ARMS),
    seeds: Sequence[int] = (0, 1),
    rows: int = 128,
    overrides: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train ``arms`` x ``seeds`` and write results.json, README.md and the figure. ``overrides`` are laid over the
    run config of every arm; ``rows``: held-out rows evaluated."""
    settings = {"arms": tuple(arms), "seeds": tuple(seeds), "rows": rows, "overrides": overrides}
    output.mkdir(parents=True, exist_ok=True)
    where = from_dict(Runtime, runtime or {}, "runtime")
    tables: dict[str, list[np.ndarray]] = {}
    curves: dict[str, Any] = {}
    for arm in arms:
        tables[arm], parameters = [], 0
        for seed in seeds:
            config = _config(arm, seed, overrides)
            folder = output / "runs" / f"{arm.lower().replace(' ', '-')}-seed{seed}"
            with Progress(f"{folder.name}:") as progress:
                data = prepare(config.data, where.cache_dir, progress.preparing)
                Trainer(config, where, folder, listeners=(progress,), prepared=data).train()
            loaded = load_run(folder, where.device, trust_imports=True)  # of the config just trained
            parameters = count_parameters(loaded.model)["total"]
            tables[arm].append(losses_by_row(loaded.model, data, config.train.row_length, rows))
        curves[arm] = {"parameters": parameters, **summarise(tables[arm], config.train.row_length)}
        print(f"{arm:<12} loss {curves[arm]['loss'][0]:.3f} at the start, {curves[arm]['loss'][-1]:.3f} at the end",
              flush=True)  # fmt: skip
    reference = REFERENCE if REFERENCE in tables else next(iter(tables))
    result = {
        **header(QUESTION, command_line("loss-by-position", run, settings), settings),
        "corpus": data.report.corpus_hash,
        "config": to_dict(config),  # of the last run; the others differ in mixer and seed
        "curves": curves,
        "reference": reference,
        # rows are the same for all arms, so differences are paired by row
        "differences": {
            arm: summarise([own - other for own, other in zip(tables[arm], tables[reference], strict=True)],
                           config.train.row_length)
            for arm in tables if arm != reference
        },
    }  # fmt: skip
    write_page(output, result, _readme(result))
    _figure(result, output / "loss-by-position.svg")
    print("\n".join(verdict(result)))
    return result


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost; times one step of every arm."""
    chosen = defaults(run) | settings
    where, seeds = from_dict(Runtime, chosen["runtime"] or {}, "runtime"), len(chosen["seeds"])
    minutes = {arm: plan_run(_config(arm, 0, chosen["overrides"]), where).minutes for arm in chosen["arms"]}
    lines = [f"{arm:<14} {seeds} runs of about {value:.1f} minutes" for arm, value in minutes.items()]
    return "\n".join([*lines, f"together about {seeds * sum(minutes.values()):.0f} minutes on this machine"])


def _config(arm: str, seed: int, overrides: dict[str, Any] | None) -> RunConfig:
    return from_dict(RunConfig, overlay(overlay(BASE, {"model": {"mixer": ARMS[arm]}, "seed": seed}), overrides or {}))


@torch.no_grad()
def losses_by_row(model: Decoder, data: PreparedData, row_length: int, rows: int) -> np.ndarray:
    """Loss [rows, row_length] of each held-out token at its position in its document; NaN where a row has none."""
    heldout = HeldoutRows(data, row_length, rows)
    table = np.full((heldout.rows, row_length), np.nan)
    device, done = model.embedding.weight.device, 0
    for piece in heldout.batches(4):
        batch = to_batch(piece, device)
        nats = model(batch, output="token_losses").cpu().numpy().reshape(piece.tokens.shape)
        positions = batch.positions.cpu().numpy().reshape(piece.tokens.shape)
        for index in range(len(piece)):
            counted = piece.weights[index] > 0
            sums = np.bincount(positions[index][counted], nats[index][counted], row_length)
            hits = np.bincount(positions[index][counted], minlength=row_length)
            table[done + index] = np.where(hits > 0, sums / np.maximum(hits, 1), np.nan)
        done += len(piece)
    return table


def summarise(tables: list[np.ndarray], row_length: int) -> dict[str, list]:
    """Mean loss, half-width of its 95 % interval and number of rows per bin of positions (powers of two).

    Seeds are averaged inside a row first: rows are the sample.
    """
    edges = [0, 1, *(2**i for i in range(1, row_length.bit_length()) if 2**i < row_length), row_length]
    bins: dict[str, list] = {"start": [], "stop": [], "loss": [], "interval": [], "n": []}
    for start, stop in itertools.pairwise(edges):
        per_row = np.stack([_row_means(table[:, start:stop]) for table in tables]).mean(0)
        per_row = per_row[~np.isnan(per_row)]
        if not len(per_row):
            continue
        half = np.inf
        if len(per_row) > 1:
            half = stats.t.ppf(0.975, len(per_row) - 1) * per_row.std(ddof=1) / np.sqrt(len(per_row))
        for key, value in zip(bins, (start, stop, float(per_row.mean()), float(half), len(per_row)), strict=True):
            bins[key].append(value)
    return bins


def _row_means(table: np.ndarray) -> np.ndarray:
    hits = (~np.isnan(table)).sum(1)
    return np.where(hits > 0, np.nansum(table, 1) / np.maximum(hits, 1), np.nan)


def _readme(result: dict[str, Any]) -> str:
    curves, config, reference = result["curves"], result["config"], result["reference"]
    model, train, asked = config["model"], config["train"], result["settings"]
    others = list(result["differences"])
    first = curves[reference]
    parameters = "; ".join(f"{arm} {curve['parameters'] / 1e6:.2f}M" for arm, curve in curves.items())
    rows = []
    for i, (start, stop) in enumerate(zip(first["start"], first["stop"], strict=True)):
        cells = [_with_interval(curve, i) for curve in curves.values()]
        rows.append([f"{start} to {stop - 1}", *cells,
                     *(_with_interval(result["differences"][arm], i, "+.3f") for arm in others)])  # fmt: skip
    page = [
        f"# {QUESTION}", f"    {result['command']}", "![loss by position](loss-by-position.svg)",
        f"Each arm (parameters: {parameters}; width {model['width']}, depth {model['depth']}) trains on the same "
        f"{train['tokens']:,} tokens in rows of {train['row_length']:,}, corpus {result['corpus'][:12]}, optimizer "
        f"{config['optimizer']['kind']} at {config['optimizer']['lr']:g}. Then every held-out token's loss is filed under its "
        f"position in its document. Nats a token over {asked['rows']} held-out rows, {len(asked['seeds'])} seeds averaged inside "
        f"a row; ± is the 95 % interval over rows. Differences (minus {reference}) are paired by row.",
        table(["positions", *curves, *(f"{arm} - {reference}" for arm in others)], rows),
        "## Verdict", "\n".join(f"- {line}" for line in verdict(result)),
        "Rows are the sample, so intervals speak of other text, not of other seeds. Everything measured: "
        "[results.json](results.json).",
    ]  # fmt: skip
    return "\n\n".join(page) + "\n"


def _with_interval(curve: dict[str, Any], index: int, form: str = ".3f") -> str:
    return f"{curve['loss'][index]:{form}} ± {curve['interval'][index]:.3f}"


def verdict(result: dict[str, Any]) -> list[str]:
    """Sentences that the numbers decide."""
    said = []
    for arm, curve in result["curves"].items():
        start, stop = curve["start"][-1], curve["stop"][-1] - 1
        best = min(range(len(curve["loss"])), key=curve["loss"].__getitem__)
        text = f"{arm}: {curve['loss'][0]:.3f} at position 0, {curve['loss'][-1]:.3f} from {start} to {stop}"
        if best < len(curve["loss"]) - 1:
            text += f", lowest from {curve['start'][best]} to {curve['stop'][best] - 1}"
        said.append(text + ".")
    for arm, curve in result["differences"].items():
        parts: dict[str, list[str]] = {"below": [], "above": [], "not distinguishable from": []}
        for start, stop, mean, half in zip(*(curve[k] for k in ("start", "stop", "loss", "interval")), strict=True):
            side = "not distinguishable from" if abs(mean) <= half else "below" if mean < 0 else "above"
            parts[side].append(f"{start}" if stop == start + 1 else f"{start}-{stop - 1}")
        sides = [f"{side} it at {', '.join(spans)}" for side, spans in parts.items() if spans]
        said.append(f"{arm} against {result['reference']}: {'; '.join(sides)} "
                    f"(last: {_with_interval(curve, -1, '+.3f')}).")  # fmt: skip
    return said


def _figure(result: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 4))
    for arm, curve in result["curves"].items():
        x = np.sqrt(np.maximum(np.array(curve["start"]), 1) * np.array(curve["stop"]))
        loss, half = np.array(curve["loss"]), np.array(curve["interval"])
        (line,) = axis.plot(x, loss, marker="o", label=arm)
        axis.fill_between(x, loss - half, loss + half, alpha=0.2, color=line.get_color())
    axis.set(xscale="log", xlabel="position in the document (tokens)", ylabel="loss (nats a token)")
    axis.legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, path)
