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

from .constants import centred, halving, prefix_and_suffix

TILE = 16


class Factors(NamedTuple):
    pa: Tensor  # [n, 2, C, C]: P with its diagonal, A strictly lower
    qke: Tensor  # [n, 2, C, K]: Qe, Ke
    kd: Tensor  # [n, C, K]
    decay: Tensor  # [n, K]


def limit(dtype: torch.dtype) -> float:
    """Largest |X| allowed: far from overflow, and small enough that its rounding (|X| eps, a relative error of the
    factors) stays a few units in the last place of the result."""
    return 40.0


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


class Halved:
    """Factors for any gate; the gradient is autograd's, of expressions in which nothing can overflow."""

    def __init__(self, qk: Tensor, g: Tensor, with_grad: bool = False):
        self.inputs = (qk, g)
        with torch.set_grad_enabled(with_grad):
            if with_grad:
                self.inputs = (qk.detach().requires_grad_(), g.detach().requires_grad_())
            self.factors = halved_factors(*self.inputs)

    def backward(self, dpa: Tensor, dqke: Tensor, dkd: Tensor, ddecay: Tensor) -> tuple[Tensor, Tensor]:
        dqk, dg = torch.autograd.grad(self.factors, self.inputs, (dpa, dqke, dkd, ddecay))
        return dqk, dg


def make_factors(qk: Tensor, g: Tensor, with_grad: bool = False) -> Anchored | Halved:
    """The cheaper of the two ways that is exact for these gates (decided from the data; nothing is clipped)."""
    exponents = centred(g.shape[1], g.dtype, g.device) @ g
    low, high = exponents.aminmax()
    if max(-float(low), float(high)) <= limit(g.dtype):
        return Anchored(qk, g, exponents)
    return Halved(qk, g, with_grad)


def halved_factors(qk: Tensor, g: Tensor) -> Factors:
    """Factors [n, ...] by halving; ``qk`` [n, 2, C, K], ``g`` [n, C, K]."""
    n, _, size, width = qk.shape
    tiles = size // TILE
    gt = g.view(n * tiles, TILE, width)
    sums = (prefix_and_suffix(TILE, g.dtype, g.device) @ gt).view(n, tiles, 2, TILE, width)
    total = sums[:, :, 0, -1]  # [n, tiles, K]
    near = sums.exp()
    qkt = qk.view(n, 2, tiles, TILE, width)
    qkp = qkt * near[:, None, :, 0]  # decayed from the start of the tile
    ks = qkt[:, 1] * near[:, :, 1]  # decayed to the end of the tile
    blocks = {TILE: (qkp, ks)}
    before, after = _spans(total, tiles)
    half = 2 * TILE
    while half <= size:
        span = half // TILE
        blocks[half] = (qkp * before[span].exp()[:, None, :, None], ks * after[span].exp()[:, :, None])
        half *= 2
    pa = _tile_products(qk, g, qkt, gt)
    half = TILE
    while half < size:
        pairs, (rows, columns) = size // (2 * half), blocks[half]
        second = rows.view(n, 2, pairs, 2, half, width)[:, :, :, 1]
        first = columns.view(n, 1, pairs, 2, half, width)[:, :, :, 0]
        pa = _join(pa, second @ first.transpose(-1, -2))
        half *= 2
    pa = pa.squeeze(2)
    own = (qk[:, 0] * qk[:, 1]).sum(-1)
    pa = torch.stack([pa[:, 0] + torch.diag_embed(own), pa[:, 1]], dim=1)
    qke, kd = blocks[size]
    return Factors(pa, qke.reshape(n, 2, size, width), kd.reshape(n, size, width), total.sum(1).exp())


def _spans(total: Tensor, tiles: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Sums of whole tiles before and after each tile inside its block of 2, 4, ... tiles: {span: [n, tiles, K]}."""
    before: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    span = 2
    while span <= tiles:
        index, other = torch.arange(tiles)[:, None], torch.arange(tiles)[None, :]
        block = index // span == other // span
        for where, table in ((other < index, before), (other > index, after)):
            table[span] = (block & where).to(total) @ total
        span *= 2
    return before, after


def _join(diagonal: Tensor, corner: Tensor) -> Tensor:
    """[n, 2, 2m, h, h] and [n, 2, m, h, h] -> [n, 2, m, 2h, 2h], corners below the diagonal blocks."""
    n, two, count, half, _ = diagonal.shape
    pair = diagonal.view(n, two, count // 2, 2, half, half)
    top = torch.cat([pair[:, :, :, 0], torch.zeros_like(corner)], dim=-1)
    bottom = torch.cat([corner, pair[:, :, :, 1]], dim=-1)
    return torch.cat([top, bottom], dim=-2)


def _tile_products(qk: Tensor, g: Tensor, qkt: Tensor, gt: Tensor) -> Tensor:
    """Strictly lower products inside 16-token tiles: [n, 2, tiles, 16, 16]."""
    n, _, tiles, _, width = qkt.shape
    exponents = centred(TILE, g.dtype, g.device) @ gt  # [n * tiles, 16, K]
    strong = exponents.detach().abs().amax((1, 2)) > limit(g.dtype)
    index = strong.nonzero().squeeze(1)
    if len(index) < len(strong):
        exponents = exponents.masked_fill(strong[:, None, None], 0).view(n, 1, tiles, TILE, width)
        product = (qkt * exponents.exp()) @ (qkt[:, 1:] * (-exponents).exp()).transpose(-1, -2)
        product = product.tril(-1)
        if not len(index):
            return product
    tile_qk = qkt.transpose(1, 2).reshape(n * tiles, 2, TILE, width)
    if len(index) == len(strong):
        return _halved_tiles(tile_qk, gt).view(n, tiles, 2, TILE, TILE).transpose(1, 2).contiguous()
    exact = _halved_tiles(tile_qk[index], gt[index])
    flat = product.transpose(1, 2).reshape(n * tiles, 2, TILE, TILE).index_copy(0, index, exact)
    return flat.view(n, tiles, 2, TILE, TILE).transpose(1, 2).contiguous()


def _halved_tiles(qk: Tensor, g: Tensor) -> Tensor:
    """The four last levels for tiles [m, 2, 16, K]: every factor is at most 1, each level's product is masked."""
    m, _, size, width = qk.shape
    sums, masks = halving(size, g.dtype, g.device)
    levels = len(sums)
    factor = (sums.view(levels * size, size) @ g).exp().view(m, 1, levels, size, width)
    scaled = qk.unsqueeze(2) * factor  # [m, 2, levels, 16, K]
    product = scaled.reshape(m, 2, levels, size, width) @ scaled[:, 1:].transpose(-1, -2)
    return (product * masks).sum(2)
