"""``triscale doctor``: what a bug report should contain."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import click

# package: (extra, what it is for)
OPTIONAL = {
    "matplotlib": ("report", "plots and HTML reports"),
    "pyarrow": ("data", "Parquet corpora"),
    "aiohttp": ("swarm", "agent swarms"),
    "mcp": ("swarm", "MCP tools"),
    "ray": ("ray", "sub-agents as Ray tasks"),
    "opentelemetry": ("otel", "trace export"),
    "fastapi": ("serve", "the HTTP server"),
    "transformers": ("hf", "Hugging Face models"),
    "tiktoken": ("hf", "published Kimi vocabularies"),
    "tensorboard": ("tensorboard", "the TensorBoard tracker"),
    "wandb": ("wandb", "the W&B tracker"),
    "trackio": ("trackio", "the trackio tracker"),
    "PIL": ("vision", "pictures"),
    "fla": ("gpu", "flash-linear-attention kernels"),
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(as_json: bool) -> None:
    """Print environment, devices and backends; say why a backend declines."""
    report = collect()
    if as_json:
        click.echo(json.dumps(report))
        return
    for section, content in report.items():
        click.echo(f"\n{section}")
        for name, value in content.items():
            click.echo(f"  {name:<24} {value}")


def collect() -> dict[str, dict[str, Any]]:
    """The report as sections of name and value."""
    import torch

    from triscale.train.device import has_fast_bf16, matmul_peak, resolve_device, resolve_precision
    from triscale.train.run_directory import environment

    found = environment()
    device = resolve_device("auto")
    precision = resolve_precision("auto", device)
    packages = {
        name: "installed" if importlib.util.find_spec(name) else f"missing: pip install 'triscale[{extra}]' ({purpose})"
        for name, (extra, purpose) in OPTIONAL.items()
    }
    return {
        "environment": {**{k: v for k, v in found.items() if k != "packages"}, **found["packages"]},
        "device": {
            "chosen": str(device),
            "cuda": torch.version.cuda or "not in this torch build",
            "fast bf16": "yes" if has_fast_bf16(device) else "no: training runs in fp32",
            "matmul peak fp32": f"{matmul_peak(device, torch.float32) / 1e9:.0f} GFLOP/s",
            f"matmul peak {str(precision)[6:]}": f"{matmul_peak(device, precision) / 1e9:.0f} GFLOP/s",
        },
        "backends": _backends(device),
        "optional packages": packages,
    }


def _backends(device) -> dict[str, str]:
    import torch

    from triscale.ops.delta_rule.flash_linear_attention import why_not
    from triscale.ops.delta_rule.inputs import normalise

    shape = (1, 64, 1, 64)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.zeros(shape, device=device, dtype=dtype)
    reason = why_not(normalise(q, q, q, q.float(), q[..., 0].float(), None, None, None), 64)
    return {
        "attention": "torch scaled_dot_product_attention",
        "delta rule, chunked": "available on any device",
        "delta rule, fla": f"declines: {reason}" if reason else "available",
        "compile": "available, off by default" if hasattr(torch, "compile") else "not in this torch build",
    }
