"""Packed weights of the releases: MXFP4 (Kimi K3) and symmetric INT4 (K2.5) in groups of 32, fp8 in blocks (K2).

MXFP4 (OCP microscaling): E2M1 codes, two per byte with the low nibble first, and one power-of-two scale per group as
a byte (exponent + 127). INT4: codes 0..15 meaning -8..7, eight per int32 with the low nibble first, bf16 scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
FP8_BLOCK = 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits of the code; the fourth is the sign
LARGEST_E2M1_EXPONENT = 2  # 6.0 = 1.5 * 2^2


def unpack_mxfp4(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """uint8 codes [rows, columns / 2] and scales [rows, columns / 32] -> [rows, columns]; exact in bf16."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _check_groups("weight_scale", scale, rows, columns)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).view(rows, columns)
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float32, device=packed.device)
    values = table[codes.long()].view(rows, -1, GROUP)
    return (values * _power_of_two(scale)[..., None]).view(rows, columns).to(dtype)


def pack_mxfp4(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> (codes, scales). Values go to the nearest code, ties to the even one, beyond 6 to 6.

    scale: powers of two [rows, columns / 32]; None = the largest magnitude of a group decides, which keeps every
    weight that :func:`unpack_mxfp4` produced unchanged.
    """
    rows, columns = _check_columns(weight)
    groups = weight.float().view(rows, -1, GROUP)
    if scale is None:
        largest = groups.abs().amax(-1)
        exponent = torch.frexp(largest).exponent - 1 - LARGEST_E2M1_EXPONENT
        exponent = torch.where(largest > 0, exponent, 0)
    else:
        exponent = torch.frexp(scale.float()).exponent - 1
    byte = (exponent + 127).clamp(0, 254).to(torch.uint8)
    scaled = groups / _power_of_two(byte)[..., None]
    # 4-bit code = sign * 8 + position in the table; midpoints between positions round to the even position
    table = torch.tensor(E2M1, device=weight.device)
    middle = (table[1:] + table[:-1]) / 2
    magnitude = scaled.abs()
    below, at = (magnitude[..., None] > middle).sum(-1), (magnitude[..., None] == middle).any(-1)
    codes = torch.where(at & (below % 2 == 1), below + 1, below) + 8 * (scaled < 0)
    codes = codes.view(rows, columns).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), byte


def unpack_int4(packed: Tensor, scale: Tensor, shape: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """int32 [rows, columns / 8] and scales [rows, columns / 32] -> [rows, columns] = ``shape``."""
    rows, columns = (int(n) for n in shape)
    _check_groups("weight_scale", scale, rows, columns)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    codes = ((packed[..., None] >> shifts) & 15).view(rows, -1)[:, :columns] - 8
    values = codes.view(rows, -1, GROUP).to(scale.dtype) * scale[..., None]
    return values.view(rows, columns).to(dtype)


def pack_int4(weight: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, columns] -> (codes, scales, shape). scale: [rows, columns / 32]; None = a group's largest magnitude / 7.5
    in bf16. Values round to the nearest code, ties to the even one, and saturate at -8 and 7."""
    rows, columns = _check_columns(weight)
    groups = weight.float().view(rows, -1, GROUP)
    if scale is None:
        scale = (groups.abs().amax(-1) / 7.5).to(torch.bfloat16)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8
    nibbles = codes.view(rows, -1, 8) << torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    packed = nibbles.sum(-1, dtype=torch.int32)
    return packed, scale, torch.tensor([rows, columns], dtype=torch.int64)


def _power_of_two(scale: Tensor) -> Tensor:
    exponent = scale.to(torch.int32) - 127
    value = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return torch.where(scale == 255, torch.nan, value)  # the E8M0 code for "not a number"


def _check_columns(weight: Tensor) -> tuple[int, int]:
    rows, columns = weight.shape
    if columns % GROUP:
        raise ValueError(f"a weight of {columns} columns cannot be packed in groups of {GROUP}")
    return rows, columns


def _check_groups(name: str, scale: Tensor, rows: int, columns: int) -> None:
    if tuple(scale.shape) != (rows, columns // GROUP) or columns % GROUP:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; {rows} x {columns} weights in groups of {GROUP} "
                         f"need ({rows}, {columns // GROUP})")  # fmt: skip


def unpack_fp8_blocks(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """fp8 weights [rows, columns] with one fp32 scale per 128 x 128 block (DeepSeek-V3's and K2's released form)."""
    rows, columns = weight.shape
    if tuple(scale.shape) != (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)):
        raise ValueError(f"weight_scale_inv has shape {tuple(scale.shape)} for {rows} x {columns} weights")
    wide = scale.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return (weight.float() * wide).to(dtype)
