"""Which chunks are computed with one anchor and which by halving, decided from the gates; nothing is clipped."""

from __future__ import annotations

from torch import Tensor

from .constants import centred
from .factors import Anchored, Factors
from .halved import LIMIT, Halved


class Split:
    """Factors of chunks of both kinds: strong decays are often a matter of few heads."""

    def __init__(self, qk: Tensor, g: Tensor, exponents: Tensor, mild: Tensor):
        self.indices = mild.nonzero().squeeze(1), (~mild).nonzero().squeeze(1)
        first, second = self.indices
        self.parts = Anchored(qk[first], g[first], exponents[first]), Halved(qk[second], g[second])
        self.factors = Factors(*(self._join(*pair) for pair in zip(*(p.factors for p in self.parts), strict=True)))

    def _join(self, first: Tensor, second: Tensor) -> Tensor:
        whole = first.new_empty(len(first) + len(second), *first.shape[1:])
        return whole.index_copy_(0, self.indices[0], first).index_copy_(0, self.indices[1], second)

    def backward(self, dpa: Tensor, dqke: Tensor, dkd: Tensor, ddecay: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (dqk [n, 2, C, K], dg [n, C, K])."""
        first, second = self.indices
        mild = self.parts[0].backward(dpa[first], dqke[first], dkd[first], ddecay[first])
        strong = self.parts[1].backward(dpa[second], dqke[second], dkd[second], ddecay[second])
        return self._join(mild[0], strong[0]), self._join(mild[1], strong[1])


Source = Anchored | Halved | Split


def make_factors(qk: Tensor, g: Tensor) -> Source:
    """The cheapest way that is exact for these chunks: qk [n, 2, C, K] and log decays g [n, C, K]."""
    exponents = centred(g.shape[1], g.dtype, g.device) @ g
    low, high = exponents.aminmax()
    if max(-float(low), float(high)) <= LIMIT:
        return Anchored(qk, g, exponents)
    mild = exponents.abs().amax((1, 2)) <= LIMIT
    if int(mild.sum()) * 4 < len(mild):
        return Halved(qk, g)
    return Split(qk, g, exponents, mild)
