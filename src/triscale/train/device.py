"""Devices and number formats: what this machine has, and which precision is fast on it."""

from __future__ import annotations

import time
from functools import lru_cache

import torch

from triscale.config import ConfigError


def resolve_device(name: str) -> torch.device:
    """``auto`` = CUDA, then MPS, then CPU; raises :class:`ConfigError` if a named device is absent."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            "runtime.device", f"{name!r} is not a device", "Use auto, cpu, cuda, cuda:N or mps"
        ) from error
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(device.type, True)
    if not present:
        raise ConfigError("runtime.device", f"{name!r} is not available here", "Use --runtime.device=auto")
    return device


def has_fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()) or bool(
            getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        )
    return False


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """The autocast dtype: bfloat16, or float32 for no autocast."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    return torch.bfloat16 if name == "bf16" else torch.float32


@lru_cache(maxsize=4)
def matmul_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Measured FLOP/s of a large matrix product on this device: the yardstick of model FLOPs utilisation."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.randn(size, size, device=device).to(dtype)
    out = a @ a
    best, stop = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < stop:
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        _synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
