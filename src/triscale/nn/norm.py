"""Root-mean-square normalisation (Zhang and Sennrich 2019) with statistics in at least fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triscale.config import Role


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; the result has the dtype of ``x``."""

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)

    def parameter_roles(self) -> dict[str, Role]:
        return {"weight": Role(kind="norm", initial="ones")}

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
