"""Do Attention Residuals help over recurrent layers too, and what do they cost?

Full, block and no Attention Residuals, crossed with pure softmax attention and the 3:1 delta hybrid, as two ladders
(each judged against its own plain-residual baseline) of matched parameters and equal tokens, paired seeds. Beside each
gain stand its costs: training time, peak memory of a training step, decode time. A figure shows the norms of hidden
states and of their gradients over depth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triscale.config import ConfigError, from_dict, to_dict
from triscale.data.heldout import HeldoutRows
from triscale.ladder import tables
from triscale.ladder.config import LadderConfig
from triscale.ladder.report import write_report
from triscale.ladder.run import LadderRunner
from triscale.ladder.verdict import LadderResult, analyse
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.train.config import Runtime
from triscale.train.evaluate import to_batch
from triscale.train.load import load_run
from triscale.train.progress import Progress

from .cost import ladder_cost
from .page import command_line, defaults, header, pyplot, save_figure, table, write_page

QUESTION = "Do Attention Residuals help over recurrent layers too, and what do they cost?"
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"kind": "latent_attention", "heads": 4, "rope_theta": 10000.0},
    "hybrid": {
        "kind": "hybrid",
        "pattern": "3:1",
        "linear": {"kind": "delta_attention", "heads": 4},
        "full": {"kind": "latent_attention", "heads": 4},
    },
}


def arms(block: int) -> dict[str, dict[str, Any]]:
    return {
        "none": {"kind": "standard"},
        "block": {"kind": "block_attention", "block": block},
        "full": {"kind": "attention"},
    }


def run(
    output: Path,
    width: int = 64,
    depth: int = 8,
    tokens: int = 400_000,
    seeds: Any = (0, 1, 2),
    block: int = 4,
    rate: float = 1.6e-2,
    optimizer: str = "muonclip",
    batch_tokens: int = 2048,
    row_length: int = 256,
    vocabulary: int = 1024,
    eval_tokens: int = 32768,
    budgets: Any = (1.0, 2.0),
    corpus: Any = "python",
    threads: int = 0,
) -> dict[str, Any]:
    """Run (or resume) both ladders below ``output``; write results.json, README.md, depth.svg and the ladders' reports.

    ``rate`` is shared by all arms: learning rates tuned per arm come from ``triscale ladder tune`` on the written
    ladder.json. ``budgets`` are multiples of ``tokens`` at which the baseline is also measured, for the multiplier.
    Raises :class:`~triscale.train.interrupt.Interrupted` when stopped, with everything resumable.
    """
    settings = {name: value for name, value in locals().items() if name != "output"}
    settings |= {"seeds": tuple(seeds), "budgets": tuple(budgets)}
    output.mkdir(parents=True, exist_ok=True)
    mixers = {name: _run_ladder(name, output, settings) for name in MIXERS}
    results = {**header(QUESTION, command_line("attnres", run, settings), settings), "mixers": mixers}
    write_page(output, results, _readme(results))
    _figure({name: mixer["profile"] for name, mixer in mixers.items()}, output / "depth.svg")
    print("\n".join([*(_table(mixers[name]) for name in mixers), *verdict(results)]))
    return results


def _run_ladder(name: str, output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One mixer's ladder, costs and norms over depth, as results.json keeps them."""
    ladder = _ladder(name, settings)
    runner = LadderRunner(ladder, output / name, Runtime(threads=settings["threads"]))
    with Progress() as progress:
        record = runner.run(progress)
    result = analyse(record)
    write_report(result, output / name / "report")
    rung = ladder.rungs[0]
    models = {arm.name: runner.matched(rung, arm).model for arm in ladder.arms}
    length, batch_tokens = settings["row_length"], settings["batch_tokens"]
    times = measure_times(models, length, batch_tokens)
    heldout = HeldoutRows(runner.data(rung, ladder.baseline), length, max_rows=4)
    batch = to_batch(next(heldout.batches(4)), torch.device("cpu"))
    runs = {arm: output / name / "size" / arm / f"seed{settings['seeds'][0]}" for arm in models}
    return {
        "ladder": to_dict(ladder),
        "precision": runner.precision,
        "corpus": runner.data(rung, ladder.baseline).report.corpus_hash,
        "costs": {arm: measure_memory(model, length, batch_tokens) | times[arm] for arm, model in models.items()},
        "profile": {arm: depth_profile(load_run(folder).model.cpu(), batch) for arm, folder in runs.items()},
        "arms": _summary(result),
    }


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost."""
    chosen = defaults(run) | settings
    return ladder_cost([_ladder(mixer, chosen) for mixer in MIXERS], Runtime(threads=chosen["threads"]))


def _ladder(mixer: str, s: dict[str, Any]) -> LadderConfig:
    if s["depth"] % 4:
        raise ConfigError("depth", f"{s['depth']} does not hold whole 3:1 groups", "Use a multiple of 4")
    model = {"width": s["width"], "depth": s["depth"], "mixer": MIXERS[mixer], "residual": {"kind": "standard"}}
    train = {"batch_tokens": s["batch_tokens"], "row_length": s["row_length"], "micro_batch_tokens": s["batch_tokens"],
             "eval_tokens": s["eval_tokens"]}  # fmt: skip
    data = {"corpus": s["corpus"], "vocabulary_size": s["vocabulary"]}
    return from_dict(
        LadderConfig,
        {
            "name": f"attnres-{mixer}",
            "seeds": list(s["seeds"]),
            "base": {"data": data, "model": model, "train": train, "schedule": {"kind": "wsd", "warmup_length": 40},
                     "optimizer": {"kind": s["optimizer"], "lr": s["rate"]}},
            "rungs": [{"name": "size", "tokens": s["tokens"], "match": "parameters", "budgets": list(s["budgets"])}],
            "arms": [{"name": name, "config": {"model": {"residual": part}}} for name, part in arms(s["block"]).items()],
        },
        "study",
    )  # fmt: skip


def measure_memory(config: Decoder.Config, row_length: int, batch_tokens: int) -> dict[str, float]:
    """Parameters, forward FLOPs a token and bytes kept for backward of one model."""
    model = config.build(seed=0).train()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(_random_batch(config, row_length, batch_tokens)).backward()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": model.flops_per_token(row_length),
        "bytes_kept_for_backward": sum(size for address, size in kept.items() if address not in parameters),
    }


def measure_times(
    configs: dict[str, Decoder.Config], row_length: int, batch_tokens: int, repeats: int = 9
) -> dict[str, dict[str, float]]:
    """Median seconds of a forward and backward pass and of 16 decoded tokens, all models in turn.

    The extra over the first model is the median of the ratios inside a turn, so that slow moments cancel.
    """
    tasks: dict[str, dict[str, Callable[[], Any]]] = {"training": {}, "decode": {}}
    for name, config in configs.items():
        model, batch = config.build(seed=0).train(), _random_batch(config, row_length, batch_tokens)
        tasks["training"][name] = partial(_train, model, batch)
        tasks["decode"][name] = _decoder(config.build(seed=0).eval())
    costs: dict[str, dict[str, float]] = {name: {} for name in configs}
    for task, runs in tasks.items():
        turns = [{name: _seconds(run) for name, run in runs.items()} for _ in range(repeats + 1)][1:]
        base = next(iter(configs))
        for name in configs:
            costs[name][f"{task}_seconds"] = statistics.median(turn[name] for turn in turns)
            costs[name][f"{task}_ratio"] = statistics.median(turn[name] / turn[base] for turn in turns)
    return costs


def _random_batch(config: Decoder.Config, row_length: int, batch_tokens: int) -> TokenBatch:
    tokens = torch.randint(0, config.vocabulary or 1, (max(1, batch_tokens // row_length), row_length))
    return TokenBatch.from_rows(tokens, None, tokens.roll(-1, 1), torch.ones(tokens.shape))


def _train(model: Decoder, batch: TokenBatch) -> None:
    model(batch).backward()


def _decoder(model: Decoder, steps: int = 16) -> Callable[[], None]:
    @torch.inference_mode()
    def decode() -> None:
        cache = model.new_cache(1, steps + 1)
        for _ in range(steps):
            batch = cache.batch([[0]], [0])
            model(batch, cache, "last_logits")
            cache.advance(batch)

    return decode


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def depth_profile(model: Decoder, batch: TokenBatch) -> dict[str, list[float]]:
    """RMS of every sublayer's output, of the state it joins, and of the loss's gradient on the output, over ``batch``.

    outputs, states, gradients: one number per sublayer (mixer, feed-forward, mixer, ...), mean over tokens; gradients
    are of the summed loss. The state is the residual stream, or with Attention Residuals the open block's sum.
    """
    outputs: list[Tensor] = []
    states: list[float] = []
    watching: list[Any] = []
    layers: list[Any] = list(model.layers)
    for layer in layers:
        for connection in (layer.mixer_residual, layer.feed_forward_residual):
            write = connection.write

            def watched(state: Any, output: Tensor, write: Any = write) -> Any:
                output.retain_grad()
                outputs.append(output)
                new = write(state, output)
                states.append(_rms(new.partial if hasattr(new, "partial") else new))
                return new

            watching.append(connection)
            connection.write = watched
    try:
        model(batch, output="loss").backward()
    finally:
        for connection in watching:
            del connection.write
        model.zero_grad(set_to_none=True)
    gradients = [_rms(output.grad) if output.grad is not None else 0.0 for output in outputs]
    return {"outputs": [_rms(output) for output in outputs], "states": states, "gradients": gradients}


def _rms(value: Tensor) -> float:
    return float(value.detach().float().square().mean(-1).sqrt().mean())


def _summary(result: LadderResult) -> dict[str, Any]:
    return {
        arm.name: {
            "verdict": tables.verdict_text(arm),
            "difference": tables.difference_text(arm.pooled),
            "token_multiplier": tables.factor_text(arm.multipliers["tokens"], arm.extrapolated),
            "seconds_multiplier": tables.factor_text(arm.multipliers["seconds"], arm.extrapolated),
            "n": arm.n,
            "notes": tables.notes(arm),
        }
        for arm in result.arms
    }


def _readme(results: dict[str, Any]) -> str:
    """README.md, from the results alone."""
    asked, mixers = results["settings"], results["mixers"]
    one = next(iter(mixers.values()))
    notes = dict.fromkeys(note for mixer in mixers.values() for arm in mixer["arms"].values() for note in arm["notes"])
    page = [
        f"# {QUESTION}", f"    {results['command']}", "![norms over depth](depth.svg)",
        f"Two ladders, over latent attention alone and over the 3:1 delta hybrid. In each, the plain residual (*none*), "
        f"Attention Residuals over blocks of {asked['block']} sublayers (*block*) and over every sublayer (*full*): width "
        f"{asked['width']}, depth {asked['depth']}, {asked['tokens']:,} tokens in rows of {asked['row_length']}, corpus "
        f"{one['corpus'][:12]}, {asked['optimizer']} at {asked['rate']:g} for all arms, {one['precision']}. Feed-forward widths "
        "are solved for equal parameters; the FLOPs column says how far FLOPs agree. A difference is the arm's held-out loss "
        f"minus the plain residual's over {len(asked['seeds'])} paired seeds (negative is better); *tokens worth* is the tokens "
        "the plain residual needs for the arm's loss over the arm's, *time worth* the same in seconds. Brackets: 95 %; a star: "
        "beyond the plain residual's measured budgets. Times are medians of ratios of neighbouring runs on one untrained model "
        "each; *kept* is what a training step keeps for backward.",
        *(f"## Over {'latent attention' if name == 'attention' else 'the 3:1 hybrid'}\n\n{_table(mixer)}"
          for name, mixer in mixers.items()),
        "## Verdict", "\n".join(f"- {line}" for line in verdict(results)),
        "Everything measured: [results.json](results.json). " + " ".join(f"{note}." for note in notes),
    ]  # fmt: skip
    return "\n\n".join(page).strip() + "\n"


def _table(mixer: dict[str, Any]) -> str:
    """Gain and cost of each arm over the plain residual."""
    costs = mixer["costs"]
    over = lambda name, key: f"x{costs[name][key] / costs['none'][key]:.3f}"
    rows = [
        [name, arm["difference"], arm["token_multiplier"], arm["seconds_multiplier"], arm["verdict"],
         over(name, "parameters"), over(name, "flops_per_token"), f"x{costs[name]['training_ratio']:.2f}",
         f"x{costs[name]['decode_ratio']:.2f}", over(name, "bytes_kept_for_backward")]
        for name, arm in mixer["arms"].items()
    ]  # fmt: skip
    head = ["residual", "loss difference", "tokens worth", "time worth", "verdict", "parameters", "FLOPs", "training time",
            "decode time", "kept"]  # fmt: skip
    return table(head, [[cell.replace("*", "\\*") for cell in row] for row in rows])


def verdict(results: dict[str, Any]) -> list[str]:
    """Sentences that the numbers decide."""
    said = []
    for name, mixer in results["mixers"].items():
        for arm, row in mixer["arms"].items():
            costs = mixer["costs"][arm]
            said.append(
                f"Over {name}, {arm}: {row['verdict']}, {row['difference']} nats; a training step takes "
                f"x{costs['training_ratio']:.2f} and a decoded token x{costs['decode_ratio']:.2f} the time."
            )
        growth = {arm: values["outputs"][-1] / values["outputs"][0] for arm, values in mixer["profile"].items()}
        gradients = {arm: max(v["gradients"]) / min(v["gradients"]) for arm, v in mixer["profile"].items()}
        said.append(
            f"Over {name}, the last sublayer's output is {_each(growth)} as large as the first's; the gradients of the "
            f"outputs differ by at most {_each(gradients)} over depth."
        )
    return said


def _each(values: dict[str, float]) -> str:
    return ", ".join(f"x{value:.2f} ({arm})" for arm, value in values.items())


def _figure(profiles: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    plt = pyplot()
    rows = {"outputs": "RMS of a sublayer's output", "states": "RMS of the state it joins",
            "gradients": "RMS of the output's gradient"}  # fmt: skip
    figure, axes = plt.subplots(len(rows), len(profiles), figsize=(9, 8), sharex=True, squeeze=False)
    for column, (mixer, profile) in enumerate(profiles.items()):
        for line, (key, title) in enumerate(rows.items()):
            axis = axes[line][column]
            for name, values in profile.items():
                axis.plot(range(1, len(values[key]) + 1), values[key], marker=".", label=name)
            axis.set(title=f"{mixer}: {title}", yscale="log")
            axis.grid(alpha=0.25)
        axes[-1][column].set_xlabel("sublayer")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    save_figure(figure, path)
