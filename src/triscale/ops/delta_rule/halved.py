"""Factors of a chunk by halving: exact for any gate. See :mod:`.factors` for what is computed.

A chunk is n_t tiles of 16 tokens. Between tiles, at span s (1, 2, 4 tiles), the rows of the second s tiles of a block
meet the columns of the first s: rows decay from the middle of the block, columns decay to it, both factors at most 1.
Inside a tile either one anchored product (allowed while no exponential leaves its range) or the same halving continued
down to single tokens (:class:`HalvedTiles`).

Every gradient of a log decay is collected at the exponent it enters, as factor times gradient of the factor: terms that
do not depend on a decay never reach it, so tiny gradients under strong decay keep their relative accuracy.

Legend: n chunks, t tiles per chunk, m = n * t, K key width. Tiles carry q and k as rows: [m, 2, 16, K].
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .constants import centred, halving, prefix_and_suffix
from .factors import Factors

TILE = 16
# Largest |exponent| of an anchored product: far from overflow, and small enough that its rounding (|exponent| eps, a
# relative error of the factors) stays a few units in the last place of the result.
LIMIT = 40.0


def flushed_exp(x: Tensor) -> Tensor:
    """exp(x) for x <= 0, with results below the smallest normal number set to zero.

    Far below underflow the vectorised exponential of a CPU falls back to a path ten times slower; strong decays live
    there.
    """
    tiny = torch.finfo(x.dtype).tiny
    return F.threshold(x.clamp_min(math.log(tiny) + 1e-3).exp_(), tiny * 1.01, 0.0, inplace=True)


class Halved:
    """Factors of n chunks, forward and backward by hand."""

    def __init__(self, qk: Tensor, g: Tensor):
        n, _, size, width = qk.shape
        self.tiles = size // TILE
        self.g = g.view(-1, TILE, width)
        self.qk = torch.empty(n, self.tiles, 2, TILE, width, dtype=qk.dtype, device=qk.device)
        self.qk.copy_(self._by_tile(qk))
        sums = (prefix_and_suffix(TILE, g.dtype, g.device) @ self.g).view(n, self.tiles, 2, TILE, width)
        self.total = sums[:, :, 0, -1]  # [n, t, K]
        self.near = flushed_exp(sums)
        self.rows = self.qk * self.near[:, :, :1]  # decayed from the tile's start [n, t, 2, 16, K]
        self.columns = self.qk[:, :, 1] * self.near[:, :, 1]  # decayed to the tile's end [n, t, 16, K]
        self.pa = torch.zeros(n, 2, self.tiles, TILE, self.tiles, TILE, dtype=qk.dtype, device=qk.device)
        self.leaf = tile_products(self.qk.view(-1, 2, TILE, width), self.g)
        inside = self.leaf.product.view(n, self.tiles, 2, TILE, TILE)
        for tile in range(self.tiles):
            self.pa[:, :, tile, :, tile] = inside[:, tile]
        span = 1
        while span < self.tiles:
            rows, columns, _, _ = self._level(span)
            product = torch.bmm(rows.flatten(1, 2), columns.flatten(1, 2).transpose(1, 2))
            for second, first, block in self._corners(span):
                self.pa[:, :, second, :, first] = self._by_chunk(product, block, span)
            span *= 2
        pa = self.pa.view(n, 2, size, size)
        pa[:, 0].diagonal(dim1=1, dim2=2).copy_((qk[:, 0] * qk[:, 1]).sum(-1))
        self.into = flushed_exp(_spans(self.tiles, self.tiles, True, g.dtype, g.device) @ self.total)  # [n, t, K]
        self.out = flushed_exp(_spans(self.tiles, self.tiles, False, g.dtype, g.device) @ self.total)
        qke = torch.empty_like(qk)
        torch.mul(self.rows, self.into[:, :, None, None], out=self._by_tile(qke))
        kd = (self.columns * self.out.unsqueeze(2)).view(n, size, width)
        self.factors = Factors(pa, qke, kd, flushed_exp(self.total.sum(1)))

    def _by_tile(self, x: Tensor) -> Tensor:
        """[n, 2, C, K] as a view [n, t, 2, 16, K]."""
        return x.view(x.shape[0], 2, self.tiles, TILE, x.shape[-1]).transpose(1, 2)

    def _level(self, span: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Rows [b, s, 32, K] and columns [b, s, 16, K] of the b blocks of 2 s tiles, with their shifts [b, s, 1, K]."""
        width = self.g.shape[-1]
        rows = self.rows.view(-1, 2, span, 2 * TILE, width)[:, 1]
        columns = self.columns.view(-1, 2, span, TILE, width)[:, 0]
        if span == 1:
            return rows, columns, None, None
        tables = (_spans(self.tiles, span, start, self.g.dtype, self.g.device) for start in (True, False))
        late, early = (flushed_exp(table @ self.total).view(-1, 2, span, 1, width) for table in tables)
        return rows * late[:, 1], columns * early[:, 0], late[:, 1], early[:, 0]

    def _corners(self, span: int):
        """(row tile slice, column tile slice, block) of each corner at this span."""
        for block in range(self.tiles // (2 * span)):
            start = 2 * span * block
            yield slice(start + span, start + 2 * span), slice(start, start + span), block

    def _by_chunk(self, product: Tensor, block: int, span: int) -> Tensor:
        """Corner ``block`` of every chunk out of [b, s * 32, s * 16], as [n, 2, s, 16, s, 16]."""
        blocks = self.tiles // (2 * span)
        view = product.view(-1, blocks, span, 2, TILE, span, TILE)[:, block]
        return view.transpose(1, 2)

    def backward(self, dpa: Tensor, dqke: Tensor, dkd: Tensor, ddecay: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (dqk [n, 2, C, K], dg [n, C, K])."""
        n, _, size, width = dqke.shape
        qk, g = self.qk, self.g
        diagonal = dpa[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone()
        dpa = dpa.view(n, 2, self.tiles, TILE, self.tiles, TILE)
        drows = self._by_tile(dqke) * self.into[:, :, None, None]
        drows = drows.contiguous()
        dcolumns = dkd.view(n, self.tiles, TILE, width) * self.out.unsqueeze(2)
        before = (self.rows * drows).sum((2, 3))  # log-gradients of ``into`` and ``out`` [n, t, K]
        after = (self.columns * dcolumns).sum(2)
        dtotal = (ddecay * self.factors.decay).unsqueeze(1) + _pull(self.tiles, self.tiles, before, after)
        span = 1
        while span < self.tiles:
            dtotal = self._level_backward(span, dpa, drows, dcolumns, dtotal)
            span *= 2
        dsums = torch.empty(n * self.tiles, 2 * TILE, width, dtype=g.dtype, device=g.device)
        torch.sum(self.rows * drows, dim=2, out=dsums[:, :TILE].view(n, self.tiles, TILE, width))
        torch.mul(self.columns, dcolumns, out=dsums[:, TILE:].view(n, self.tiles, TILE, width))
        dg = prefix_and_suffix(TILE, g.dtype, g.device).T @ dsums
        dg += dtotal.reshape(-1, 1, width)
        dinside = torch.stack([dpa[:, :, tile, :, tile] for tile in range(self.tiles)], dim=1)
        dqk, dg_inside = self.leaf.backward(dinside.view(-1, 2 * TILE, TILE))
        dqk = dqk.view(qk.shape)
        dqk.addcmul_(drows, self.near[:, :, :1])
        dqk[:, :, 1].addcmul_(dcolumns, self.near[:, :, 1])
        diagonal = diagonal.view(n, self.tiles, 1, TILE, 1)
        dqk.addcmul_(qk.flip(2), diagonal)  # P_ii = q_i . k_i has no gate
        result = torch.empty_like(dqke)
        self._by_tile(result).copy_(dqk)
        return result, dg.add_(dg_inside).view(n, size, width)

    def _level_backward(self, span: int, dpa: Tensor, drows: Tensor, dcolumns: Tensor, dtotal: Tensor) -> Tensor:
        """Adds one span's gradients to ``drows`` and ``dcolumns`` in place; returns the grown ``dtotal``."""
        n, width = drows.shape[0], drows.shape[-1]
        rows, columns, late, early = self._level(span)
        corners = [dpa[:, :, second, :, first].transpose(1, 2) for second, first, _ in self._corners(span)]
        dproduct = torch.stack(corners, dim=1).view(-1, span * 2 * TILE, span * TILE)
        dr = torch.bmm(dproduct, columns.flatten(1, 2)).view(rows.shape)
        dc = torch.bmm(dproduct.transpose(1, 2), rows.flatten(1, 2)).view(columns.shape)
        target = drows.view(-1, 2, span, 2 * TILE, width)[:, 1], dcolumns.view(-1, 2, span, TILE, width)[:, 0]
        if late is None or early is None:
            target[0].add_(dr)
            target[1].add_(dc)
            return dtotal
        logs = torch.zeros(2, n * self.tiles // (2 * span), 2, span, width, dtype=dr.dtype, device=dr.device)
        torch.sum(rows * dr, dim=2, out=logs[0, :, 1])
        torch.sum(columns * dc, dim=2, out=logs[1, :, 0])
        target[0].addcmul_(dr, late)
        target[1].addcmul_(dc, early)
        before, after = logs.view(2, n, self.tiles, width)
        return dtotal + _pull(self.tiles, span, before, after)


@lru_cache(maxsize=64)
def _spans(tiles: int, span: int, start: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[t, t]: row i sums the tiles before (``start``) or after tile i inside its block of ``span`` tiles."""
    i, j = torch.arange(tiles)[:, None], torch.arange(tiles)[None, :]
    return ((i // span == j // span) & (j < i if start else j > i)).to(dtype).to(device)


def _pull(tiles: int, span: int, before: Tensor, after: Tensor) -> Tensor:
    """Gradient [n, t, K] of the tile totals from those of the sums :func:`_spans` makes of them."""
    late, early = (_spans(tiles, span, start, before.dtype, before.device).T for start in (True, False))
    return late @ before + early @ after


class AnchoredTiles:
    """Strictly lower products inside tiles with one anchor each; ``g`` must keep the exponents inside the limit."""

    def __init__(self, qk: Tensor, exponents: Tensor):
        self.grow = exponents.exp().unsqueeze(1)  # [m, 1, 16, K]
        self.rows = qk * self.grow
        self.columns = qk[:, 1] / self.grow[:, 0]
        m, _, _, width = qk.shape
        self.product = torch.bmm(self.rows.view(m, 2 * TILE, width), self.columns.transpose(1, 2))
        self.product.view(m, 2, TILE, TILE).tril_(-1)

    def backward(self, dproduct: Tensor) -> tuple[Tensor, Tensor]:
        """(dqk [m, 2, 16, K], dg [m, 16, K])."""
        m, _, _, width = self.rows.shape
        strict = dproduct.reshape(m, 2, TILE, TILE).tril(-1).view(m, 2 * TILE, TILE)
        drows = torch.bmm(strict, self.columns).view(self.rows.shape)
        dcolumns = torch.bmm(strict.transpose(1, 2), self.rows.view(m, 2 * TILE, width))
        weighted = self.rows * drows
        dx = torch.addcmul(weighted[:, 0] + weighted[:, 1], self.columns, dcolumns, value=-1)
        dqk = drows.mul_(self.grow)
        dqk[:, 1].addcdiv_(dcolumns, self.grow[:, 0])
        return dqk, centred(TILE, dx.dtype, dx.device).T @ dx


class HalvedTiles:
    """Strictly lower products inside tiles for any gate: four levels, every factor at most 1, each level masked."""

    def __init__(self, qk: Tensor, g: Tensor):
        m, _, _, width = qk.shape
        self.sums, masks = halving(TILE, g.dtype, g.device)
        self.levels = len(self.sums)
        self.masks = masks.unsqueeze(1)  # [levels, 1, 16, 16]
        self.factor = flushed_exp(self.sums.view(-1, TILE) @ g).view(m, self.levels, 1, TILE, width)
        self.scaled = qk.unsqueeze(1) * self.factor  # [m, levels, 2, 16, K]
        rows, columns = self._operands()
        product = torch.bmm(rows, columns.transpose(1, 2)).view(m, self.levels, 2, TILE, TILE)
        self.product = (product * self.masks).sum(1).view(m, 2 * TILE, TILE)

    def _operands(self) -> tuple[Tensor, Tensor]:
        scaled = self.scaled.view(-1, 2, TILE, self.scaled.shape[-1])
        return scaled.flatten(1, 2), scaled[:, 1]

    def backward(self, dproduct: Tensor) -> tuple[Tensor, Tensor]:
        m, width = self.scaled.shape[0], self.scaled.shape[-1]
        rows, columns = self._operands()
        masked = (dproduct.reshape(m, 1, 2, TILE, TILE) * self.masks).view(-1, 2 * TILE, TILE)
        dscaled = torch.bmm(masked, columns).view(-1, 2, TILE, width)
        dscaled[:, 1] += torch.bmm(masked.transpose(1, 2), rows)
        dscaled = dscaled.view(self.scaled.shape)
        dx = (self.scaled * dscaled).sum(2).view(m, self.levels * TILE, width)
        dg = self.sums.view(-1, TILE).T @ dx
        return dscaled.mul_(self.factor).sum(1), dg


class MixedTiles:
    """Anchored products where the gates allow them, halving for the tiles ``index`` whose decay is too strong."""

    def __init__(self, qk: Tensor, g: Tensor, exponents: Tensor, strong: Tensor, index: Tensor):
        self.strong, self.index = strong[:, None, None], index
        self.anchored = AnchoredTiles(qk, exponents.masked_fill(self.strong, 0.0))
        self.halved = HalvedTiles(qk[index], g[index])
        self.product = self.anchored.product.index_copy_(0, index, self.halved.product)

    def backward(self, dproduct: Tensor) -> tuple[Tensor, Tensor]:
        dqk, dg = self.anchored.backward(dproduct.masked_fill(self.strong, 0.0))
        dqk_strong, dg_strong = self.halved.backward(dproduct[self.index])
        return dqk.index_copy_(0, self.index, dqk_strong), dg.index_copy_(0, self.index, dg_strong)


def tile_products(qk: Tensor, g: Tensor) -> AnchoredTiles | HalvedTiles | MixedTiles:
    """The cheapest exact way for these tiles [m, 2, 16, K] and log decays [m, 16, K], decided from the data."""
    exponents = centred(TILE, g.dtype, g.device) @ g
    low, high = exponents.aminmax()
    if max(-float(low), float(high)) <= LIMIT:
        return AnchoredTiles(qk, exponents)
    strong = exponents.abs_().amax((1, 2)) > LIMIT
    index = strong.nonzero().squeeze(1)
    if 2 * len(index) > len(strong):
        return HalvedTiles(qk, g)
    return MixedTiles(qk, g, centred(TILE, g.dtype, g.device) @ g, strong, index)
