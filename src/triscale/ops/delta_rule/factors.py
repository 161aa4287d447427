"""Inside a chunk: everything that depends on q, k and the gates alone, for many chunks at once.

Per chunk of C tokens (q already scaled, G_ij the sum of g over (j, i]):

    P_ij = sum_d q_id k_jd exp(G_ij,d)   i >= j        A_ij = sum_d k_id k_jd exp(G_ij,d)   i > j
    Qe_i = q_i exp(sum of g over [0, i])               Ke_i = k_i exp(the same)
    Kd_i = k_i exp(sum of g over (i, C))               decay = exp(sum of g over [0, C))

Two ways to the same numbers, both matrix products of factors that cannot overflow:

- **anchored**: exp(G_ij) = exp(X_i) exp(-X_j) with sums X counted from the middle of the chunk. Allowed while every
  |X| is at most LIMIT. One product for the whole chunk.
- **halved**: the chunk is split in halves again and again; a pair (i, j) is computed at the level where i lies in the
  second and j in the first half, as exp(sum from the half's start to i) * exp(sum from j to the half's end), both
  at most 1. Exact for any gate. The last levels (inside 16 tokens) are replaced by an anchored product in those
  16-token tiles whose sums allow it.

Legend: n chunks times rows, C chunk, K key width. Tensors [n, C, K]; q and k travel stacked as qk [n, 2, C, K].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .constants import centred


class Factors(NamedTuple):
    pa: Tensor  # [n, 2, C, C]: P with its diagonal, A strictly lower
    qke: Tensor  # [n, 2, C, K]: Qe, Ke
    kd: Tensor  # [n, C, K]
    decay: Tensor  # [n, K]


def vanishing(dtype: torch.dtype) -> float:
    """A log decay at which exp is exactly zero in ``dtype``, as it is for everything below it (minus infinity too)."""
    return -110.0 if dtype == torch.float32 else -760.0


class Anchored:
    """Factors with one anchor per chunk, forward and backward by hand."""

    def __init__(self, qk: Tensor, g: Tensor, exponents: Tensor):
        n, _, size, width = qk.shape
        half = size // 2
        self.qk, self.size = qk, size
        self.grow = exponents.exp()  # [n, C, K]
        self.qkm = qk * self.grow.unsqueeze(1)
        self.kn = qk[:, 1] / self.grow
        self.into = g[:, :half].sum(1).exp()  # [n, K]
        self.out = g[:, half:].sum(1).exp()
        pa = (self.qkm.view(n, 2 * size, width) @ self.kn.transpose(1, 2)).view(n, 2, size, size)
        pa.tril_(-1)
        pa[:, 0].diagonal(dim1=1, dim2=2).copy_((qk[:, 0] * qk[:, 1]).sum(-1))
        self.factors = Factors(pa, self.qkm * self.into[:, None, None], self.kn * self.out[:, None],
                               self.into * self.out)  # fmt: skip

    def backward(self, dpa: Tensor, dqke: Tensor, dkd: Tensor, ddecay: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (dqk [n, 2, C, K], dg [n, C, K]); ``dpa`` [n, 2, C, C] is consumed."""
        n, _, size, width = self.qk.shape
        diagonal = dpa[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()  # P_ii has no gate
        strict = dpa.tril_(-1).view(n, 2 * size, size)
        dqkm = dqke * self.into[:, None, None]
        dkn = dkd * self.out[:, None]
        # log-gradients of the two half-chunk sums, from the state's factors
        reads, writes = (self.qkm * dqkm).sum((1, 2)), (self.kn * dkn).sum(1)
        whole = self.factors.decay * ddecay
        dqkm.view(n, 2 * size, width).baddbmm_(strict, self.kn)
        dkn.baddbmm_(strict.transpose(1, 2), self.qkm.view(n, 2 * size, width))
        weighted = self.qkm * dqkm
        dx = torch.addcmul(weighted[:, 0] + weighted[:, 1], self.kn, dkn, value=-1)
        dg = centred(size, dx.dtype, dx.device).T @ dx
        dg[:, : size // 2] += (reads + whole).unsqueeze(1)
        dg[:, size // 2 :] += (writes + whole).unsqueeze(1)
        dqk = dqkm.mul_(self.grow.unsqueeze(1))
        dqk[:, 1].addcdiv_(dkn, self.grow)
        dqk[:, 0].addcmul_(self.qk[:, 1], diagonal)
        dqk[:, 1].addcmul_(self.qk[:, 0], diagonal)
        return dqk, dg
