"""Where the coefficients of ``tight4`` come from: four quintic steps fitted to typical spectra.

Minimises the mean |p(s) - 1| over Gaussian spectra of several shapes and log-uniform ones (condition number 1e3 and
1e4, weighted more), after division by 1.01 times the Schatten 8-norm, with a penalty wherever an intermediate step
leaves [0, 1.2] for an input up to 1.02. Deterministic; takes about half a minute. Prints the coefficients and the mean
error by spectrum, next to five Jordan steps after division by the Frobenius norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triscale.ops.newton_schulz import JORDAN, METHODS, Triple

STEPS = 5000


def spectra() -> dict[str, tuple[Tensor, float]]:
    """name: (singular values, weight)."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, tuple[Tensor, float]] = {}
    for rows, columns in ((64, 256), (256, 256), (256, 512), (256, 768), (768, 768), (768, 2048)):
        x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        found[f"gaussian {rows}x{columns}"] = torch.linalg.svdvals(x), 1.0
    for size in (64, 256, 768):
        found[f"condition 1e3, {size}"] = torch.logspace(0, -3, size, dtype=torch.float64), 3.0
    found["condition 1e4, 256"] = torch.logspace(0, -4, 256, dtype=torch.float64), 2.0
    found["1/rank, 256"] = 1 / torch.arange(1, 257, dtype=torch.float64), 1.0
    return found


def apply(values: Tensor, coefficients: Tensor | tuple[Triple, ...]) -> Tensor:
    for a, b, c in coefficients:
        values = values * (a + b * values**2 + c * values**4)
    return values


def error(values: Tensor, coefficients: Tensor | tuple[Triple, ...]) -> Tensor:
    return (apply(values, coefficients) - 1).abs().mean()


def tight(values: Tensor) -> Tensor:
    return values / (1.01 * (values**8).sum() ** (1 / 8))


def fit(steps: int = STEPS) -> Tensor:
    coefficients = torch.tensor([JORDAN] * 4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([coefficients], lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    grid, data = torch.linspace(0, 1.02, 2001, dtype=torch.float64), spectra()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([weight * error(tight(s), coefficients) for s, weight in data.values()]).sum() / len(data)
        values = grid
        for step in coefficients:
            values = apply(values, step[None])
            loss = loss + 50 * ((values - 1.2).clamp(min=0).square().mean() + values.clamp(max=0).square().mean())
        loss.backward()
        optimizer.step()
        schedule.step()
    return coefficients.detach()


def main() -> None:
    torch.set_num_threads(1)
    fitted = fit()
    print("fitted:", [[round(v, 4) for v in step] for step in fitted.tolist()])
    print("in use:", [list(step) for step in METHODS["tight4"].coefficients])
    print(f"{'spectrum':<20} {'jordan5':>8} {'tight4':>8}")
    for name, (values, _) in spectra().items():
        jordan = error(values / values.norm(), METHODS["jordan5"].coefficients)
        print(f"{name:<20} {jordan:8.4f} {error(tight(values), METHODS['tight4'].coefficients):8.4f}")


if __name__ == "__main__":
    main()
