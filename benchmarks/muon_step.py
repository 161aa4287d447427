"""One optimizer step of MuonClip's Muon against torch.optim.Muon, interleaved, on the matrices of three models.

mix10m: a 10M-parameter Llama shape (width 320, 6 layers). mix100m: a 100M-parameter one (width 768, 12 layers).
experts: one stack of 64 experts of 512 x 256 (torch.optim.Muon takes only two dimensions and gets 64 matrices).
The peer runs five Jordan steps in bf16. Ours runs, in bf16 too, "tight4" (four steps after a tighter normalisation: a
ratio without a method's name) and the same five Jordan steps ("jordan5", the default of MuonClip).
error.*: mean |singular value - 1| of the update on Gaussian matrices and at condition number 1e3 (log-uniform singular
values), with the same bf16 arithmetic. peak: our share of the measured bf16 matrix-product rate on mix100m, counting
the products computed, each in full.
demo_step: one training step of the demo's largest model with MuonClip as the demo configures it; demo_optimizer: the
optimizer's part of it. optimizer_share, in meta, is the second over the first.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from _measure import arguments, interleave, matmul_peak, report
from triscale.ladder.config import load_ladder
from triscale.nn.batch import TokenBatch
from triscale.ops import orthogonalize
from triscale.ops.newton_schulz import product_flops
from triscale.optim import MuonClip

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95}
METHODS_RUN = ("tight4", "jordan5")
MIXES: dict[str, list[tuple[int, ...]]] = {
    "mix10m": [(320, 320)] * 24 + [(864, 320)] * 12 + [(320, 864)] * 6,
    "mix100m": [(768, 768)] * 48 + [(2048, 768)] * 24 + [(768, 2048)] * 12,
    "experts": [(64, 512, 256)],
}
ERROR_SHAPES = [(320, 320), (320, 864), (768, 768), (768, 2048), (256, 512), (64, 256)]


def parameters(shapes: list[tuple[int, ...]], split: bool) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        weight, grad = (torch.randn(shape, generator=generator) * scale for scale in (0.02, 1e-3))
        pieces = zip(weight, grad, strict=True) if split and len(shape) == 3 else [(weight, grad)]
        for w, g in pieces:
            parameter = nn.Parameter(w.clone())
            parameter.grad = g.clone()
            made.append(parameter)
    return made


def flops(shapes: list[tuple[int, ...]], method: str) -> int:
    """Matrix products of one step, each counted in full."""
    return sum((shape[0] if len(shape) == 3 else 1) * product_flops(*shape[-2:], method) for shape in shapes)


def hard(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    rank = min(rows, columns)
    u = torch.linalg.qr(torch.randn(rows, rank, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(columns, rank, generator=generator))[0]
    return (u * torch.logspace(0, -3, rank)) @ v.T


def errors() -> dict[str, dict[str, float]]:
    """Mean |singular value - 1| by input kind and method, averaged over shapes."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "gaussian": [torch.randn(shape, generator=generator) for shape in ERROR_SHAPES],
        "condition_1e3": [hard(*shape, generator) for shape in ERROR_SHAPES],
    }
    methods = {
        "torch": lambda x: _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7),
        **{m: lambda x, m=m: orthogonalize(x, m, dtype=torch.bfloat16) for m in METHODS_RUN},
    }
    deviation = lambda y: (torch.linalg.svdvals(y.double()) - 1).abs().mean().item()
    return {
        kind: {name: sum(deviation(run(x)) for x in xs) / len(xs) for name, run in methods.items()}
        for kind, xs in inputs.items()
    }


def demo_step(repeats: int) -> dict[str, float]:
    """Median seconds of a training step on the demo's largest rung, and of the optimizer in it."""
    ladder = load_ladder("demo")
    config = ladder.run_config(ladder.rungs[-1], ladder.arm("muonclip"), seed=0)
    model = replace(config.model, vocabulary=config.data.vocabulary_size).build(seed=0).train()
    optimizer = config.optimizer.build(model)
    rows = config.train.micro_batch_tokens // config.train.row_length
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {"demo_step": [], "demo_optimizer": []}
    for step in range(2 + 3 * repeats):
        tokens = torch.randint(0, model.config.vocabulary, (rows, config.train.row_length), generator=generator)
        batch = TokenBatch.from_rows(tokens, None, tokens.roll(-1, 1), torch.ones(tokens.shape))
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        (model(batch) / tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        middle = time.perf_counter()
        optimizer.step()
        if step >= 2:
            times["demo_step"].append(time.perf_counter() - start)
            times["demo_optimizer"].append(time.perf_counter() - middle)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    medians, ratios = demo_step(options.repeats), {}
    for mix, shapes in MIXES.items():
        peer = torch.optim.Muon(parameters(shapes, True), adjust_lr_fn="match_rms_adamw", **SETTINGS)
        steps = {"torch": peer.step}
        for method in METHODS_RUN:
            groups = [{"params": parameters(shapes, False), "algorithm": "muon"}]
            ours = MuonClip(groups, orthogonalizer=method, qk_clip_threshold=None, **SETTINGS)
            steps[method] = ours.step
        seconds = interleave(steps, options.repeats)
        medians |= {f"{mix}.{name}": value for name, value in seconds.items()}
        ratios |= {_named(mix, m): seconds["torch"] / seconds[m] for m in METHODS_RUN}
    peak = matmul_peak(torch.bfloat16)
    for method in METHODS_RUN:
        ratios[_named("peak", method)] = flops(MIXES["mix100m"], method) / medians[f"mix100m.{method}"] / peak
    for kind, values in errors().items():
        medians |= {f"error.{kind}.{name}": value for name, value in values.items()}
        ratios |= {_named(f"error.{kind}", m): values["torch"] / values[m] for m in METHODS_RUN}
    share = medians["demo_optimizer"] / medians["demo_step"]
    meta = {
        "peak_bf16_flops": peak,
        "optimizer_share": share,
        **{f"parameters.{m}": sum(map(_size, s)) for m, s in MIXES.items()},
    }
    report(meta, medians, ratios, options.json)


def _named(ratio: str, method: str) -> str:
    return ratio if method == METHODS_RUN[0] else f"{ratio}.{method}"


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


if __name__ == "__main__":
    main()
