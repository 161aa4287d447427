"""Orthogonalisation of matrices by Newton-Schulz iteration: an approximation of U V^T for X = U S V^T.

Each iteration maps the singular values through an odd quintic a s + b s^3 + c s^5, and the published methods differ in
the coefficients per step and in how the input is scaled. :func:`orthogonalize_reference` (singular value
decomposition) is what all of them approximate.

Shapes: matrices are [..., m, n], inside a batch [B, m, n]; p = min(m, n) is the side of the Gram matrix, X X^T for
wide matrices and X^T X for tall ones, so that neither is ever transposed in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triscale.config import ConfigError

Triple = tuple[float, float, float]
JORDAN: Triple = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Method:
    """One published iteration.

    coefficients: (a, b, c) per step; the last is repeated when more steps are asked for.
    scale, eps: the input is divided by ``scale * Frobenius norm + eps``.
    form: "product" iterates on X; "tight" does too, after dividing by a tighter bound of the largest singular value,
    and takes two steps at a time through the Gram matrix where X is oblong; "aol" replaces the norm by the diagonal
    scaling of Turbo-Muon; "gram" iterates on the Gram matrix alone and multiplies X once at the end.
    """

    coefficients: tuple[Triple, ...]
    scale: float = 1.0
    eps: float = 1e-7
    form: str = "product"


def _safe(coefficients: tuple[Triple, ...], safety: float) -> tuple[Triple, ...]:
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in coefficients)


METHODS: dict[str, Method] = {
    # Jordan 2024; Moonlight (arXiv 2502.16982, section 2.1)
    "jordan5": Method((JORDAN,) * 5),
    # You 2024: five different steps
    "you5": Method((
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )),
    # Polar Express, arXiv 2505.16932, five steps with safety factor 2e-2 and cushion 2
    "polar_express5": Method((
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ), scale=1.02, eps=1e-6),
    # The same to convergence, its safety factor folded in
    "polar_express8": Method((
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.875, -1.25, 0.375),
    )),
    "cans5": Method((
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    )),
    # Ten steps as used by DeepSeek-V4: eight Jordan steps, then two that converge
    "deepseek10": Method((JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2),
    # Turbo-Muon, arXiv 2512.04632: a better start saves one iteration
    "turbo4": Method((
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169),
    ), form="aol"),
    # Our own: the first step's Gram matrix S gives the Schatten 8-norm ||S^2||_F^(1/4) at no extra product, a bound far
    # tighter than the Frobenius norm, so four steps suffice. Coefficients: benchmarks/fit_orthogonalizer.py.
    "tight4": Method((
        (4.0138, -7.3437, 3.3504), (3.3612, -5.5460, 2.6265), (3.1391, -4.7944, 2.5558), (3.3923, -4.6338, 2.2107),
    ), form="tight"),
    # Gram Newton-Schulz with its Polar Express coefficients, safety 1.05
    "gram5": Method(_safe((
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    ), 1.05), form="gram"),
}  # fmt: skip

GRAM_MIN_ASPECT = 8
GRAM_RESTART = 2
PAIR_MIN_ASPECT = 1.6  # two steps through the Gram matrix cost 5 p^3 + 2 p^2 q products instead of 2 p^3 + 4 p^2 q


@torch.no_grad()
def orthogonalize(
    matrix: Tensor, method: str = "jordan5", steps: int | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise every matrix of ``matrix`` [..., m, n]; the result has the same shape.

    method: a key of :data:`METHODS`. steps: how many of its iterations, None = as published.
    dtype: of the arithmetic and of the result, None = that of ``matrix``. The input norm is always taken in at least
    fp32. A zero matrix stays zero. A stack gives bit for bit what its matrices give one by one. Not differentiable.

    Raises :class:`ConfigError` for an unknown method, for ``steps < 1``, for fewer than two dimensions, and where a
    method would lose its accuracy (see :func:`why_not`).
    """
    if matrix.ndim < 2:
        raise ConfigError("matrix", f"shape {list(matrix.shape)} has fewer than two dimensions")
    rule = METHODS.get(method)
    if rule is None:
        raise ConfigError("method", f"no orthogonaliser is called {method!r}", f"Known: {', '.join(METHODS)}")
    if steps is not None and steps < 1:
        raise ConfigError("steps", f"{steps} is not positive", "Use None for the published number")
    dtype = dtype or matrix.dtype
    rows, columns = matrix.shape[-2:]
    reason = why_not(method, rows, columns, dtype, matrix.device.type)
    if reason:
        raise ConfigError("method", f"{method!r} declines: {reason}", "Use 'polar_express5' for such matrices")
    if matrix.numel() == 0:
        return matrix.to(dtype)
    x = _divide(matrix.reshape(-1, rows, columns), rule, dtype)
    coefficients = _take(rule.coefficients, steps)
    if rule.form in ("product", "tight"):
        x = _by_pieces(x, coefficients, rule.form == "tight")
    else:
        oriented = x.mT if rows > columns else x
        result = _aol(oriented, coefficients) if rule.form == "aol" else _gram(oriented, coefficients)
        x = result.mT if rows > columns else result
    return x.reshape(matrix.shape)


def orthogonalize_reference(matrix: Tensor) -> Tensor:
    """The exact polar factor U V^T of ``matrix`` [..., m, n] by singular value decomposition (the definition).

    Singular values of zero (relative to the largest) stay zero, as they do under any odd polynomial.
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    limit = s.amax(-1, keepdim=True) * max(matrix.shape[-2:]) * torch.finfo(s.dtype).eps
    return (u * (s > limit).to(s.dtype).unsqueeze(-2)) @ vh


def why_not(method: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> str | None:
    """Why ``method`` cannot take such a matrix, or None if it can."""
    form = METHODS[method].form
    if form == "tight" and dtype == torch.float16:
        return "its fourth powers leave the range of float16"
    if form != "gram":
        return None
    aspect = max(rows, columns) / max(min(rows, columns), 1)
    if dtype == torch.bfloat16:
        return "the Gram iteration is unstable in bfloat16"
    if dtype == torch.float16:
        return None if device == "cuda" else "half precision needs a GPU"
    if aspect < GRAM_MIN_ASPECT:
        return f"aspect ratio {aspect:.1f} is below {GRAM_MIN_ASPECT}, where the Gram form saves nothing"
    return None


def product_flops(rows: int, columns: int, method: str, steps: int | None = None) -> int:
    """FLOPs of the matrix products that orthogonalising one matrix takes, each counted in full."""
    rule, p, q = METHODS[method], min(rows, columns), max(rows, columns)
    count = steps or len(rule.coefficients)
    if rule.form == "gram":  # a step computes Z, then updates the factor and the Gram matrix except at either end
        return 4 * p * p * q + 2 * p**3 * (count + (count - 1) + 2 * (count - 1))
    pairs = count // 2 if rule.form == "tight" and _oblong(p, q) else 0
    return pairs * (10 * p**3 + 4 * p * p * q) + (count - 2 * pairs) * (2 * p**3 + 4 * p * p * q)


def _take(coefficients: tuple[Triple, ...], steps: int | None) -> tuple[Triple, ...]:
    if steps is None or steps == len(coefficients):
        return coefficients
    return coefficients[:steps] + (coefficients[-1],) * (steps - len(coefficients))


def _divide(batch: Tensor, rule: Method, dtype: torch.dtype) -> Tensor:
    """A new contiguous tensor of ``dtype``: never the caller's memory, which may be a momentum buffer."""
    exact = batch if batch.dtype == torch.float64 else batch.float()
    norm = torch.linalg.vector_norm(exact, dim=(-2, -1), keepdim=True)
    out = torch.empty(batch.shape, dtype=dtype, device=batch.device)
    return torch.mul(exact, 1 / (rule.scale * norm + rule.eps), out=out)


LARGE = 1 << 19  # elements from which a matrix is multiplied alone: batched kernels are slower there
HALVES = 512  # side from which computing half of a symmetric product beats one plain call


def _by_pieces(batch: Tensor, coefficients: tuple[Triple, ...], tight: bool) -> Tensor:
    """Iterate on the batch at once, or on one matrix after the other if they are large.

    The size alone decides, not how many there are: the two kernels may round differently.
    """
    iterate = _iterate_tight if tight else _iterate
    if batch.device.type != "cpu" or batch[0].numel() < LARGE:
        return iterate(batch, coefficients)
    for matrix in batch:
        matrix.copy_(iterate(matrix, coefficients))
    return batch


def _iterate(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """The iteration X <- (a I + b S + c S^2) X on [B, m, n] or [m, n]; overwrites ``x``."""
    wide = x.shape[-2] <= x.shape[-1]
    gram, poly = _squares(x, 2)
    other = torch.empty_like(x)
    for a, b, c in coefficients:
        _symmetric(x, x.mT, gram) if wide else _symmetric(x.mT, x, gram)
        _symmetric(gram, gram, poly, gram, b, c)
        # a X is added to the product, not a I to the polynomial: in bf16 that would cost the published methods accuracy
        _matmul(*((poly, x) if wide else (x, poly)), other, x, a, 1.0)
        x, other = other, x
    return x


def _iterate_tight(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """The same with the first step scaled by the Schatten norm; overwrites ``x``.

    Oblong matrices take two steps for one update of X: the second step's Gram matrix is P S P with P the first step's
    polynomial. S is taken anew from X after each pair, so its rounding errors are never carried further than that.
    """
    wide = x.shape[-2] <= x.shape[-1]
    pairs = _oblong(*sorted(x.shape[-2:]))
    gram, poly, second, product = _squares(x, 4)
    other = torch.empty_like(x)
    index = 0
    while index < len(coefficients):
        _symmetric(x, x.mT, gram) if wide else _symmetric(x.mT, x, gram)
        _tight_polynomial(gram, poly, coefficients[index], first=index == 0)
        factor = poly
        if pairs and index + 1 < len(coefficients):
            index += 1
            _matmul(gram, poly, product, None, 0.0, 1.0)
            _symmetric(poly, product, gram)
            _tight_polynomial(gram, second, coefficients[index], first=False)
            factor = _symmetric(second, poly, product)
        _matmul(*((factor, x) if wide else (x, factor)), other, None, 0.0, 1.0)
        x, other = other, x
        index += 1
    return x


def _oblong(small: int, large: int) -> bool:
    return large >= PAIR_MIN_ASPECT * small


def _squares(x: Tensor, count: int) -> list[Tensor]:
    """Workspaces of the Gram matrix's shape."""
    side = min(x.shape[-2:])
    return [torch.empty(*x.shape[:-2], side, side, dtype=x.dtype, device=x.device) for _ in range(count)]


def _tight_polynomial(gram: Tensor, out: Tensor, triple: Triple, first: bool) -> None:
    """out = a I + b S + c S^2; the first step's S is divided by the square of the Schatten norm, and the result by it."""
    a, b, c = triple
    if first:
        _symmetric(gram, gram, out)
        _scaled_polynomial(gram, out, a, b, c)
    else:
        _symmetric(gram, gram, out, gram, b, c)
        out.diagonal(dim1=-2, dim2=-1).add_(a)


def _symmetric(
    left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """out = beta * plus + alpha * left @ right, known to be symmetric: a large one mirrors a quarter of itself."""
    if out.ndim == 2 and out.shape[-1] >= HALVES and out.device.type == "cpu":
        half = out.shape[-1] // 2
        for rows, columns in ((slice(None, half), slice(None, half)), (slice(half, None), slice(None))):
            corner = None if plus is None else plus[rows, columns]
            _matmul(left[rows], right[:, columns], out[rows, columns], corner, beta, alpha)
        out[:half, half:] = out[half:, :half].mT
    else:
        _matmul(left, right, out, plus, beta, alpha)
    return out


def _matmul(left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None, beta: float, alpha: float) -> None:
    """out = beta * plus + alpha * left @ right, by the kernel for the number of dimensions."""
    if plus is None:
        (torch.bmm if out.ndim == 3 else torch.mm)(left, right, out=out)
    else:
        (torch.baddbmm if out.ndim == 3 else torch.addmm)(plus, left, right, beta=beta, alpha=alpha, out=out)


def _scaled_polynomial(gram: Tensor, square: Tensor, a: float, b: float, c: float) -> None:
    """square <- (a I + b S / t^2 + c S^2 / t^4) / t with t = 1.01 ||S^2||_F^(1/4) >= the largest singular value."""
    precise = torch.float64 if gram.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True).to(precise)  # summed in fp32, then rounded
    # a unit Frobenius norm puts t above p^-1/2; smaller means an input below the method's eps, which is left small
    t = (1.01 * norm**0.25).clamp(min=1e-3)
    # in place: fresh memory costs more than the sums
    exact = square.to(precise).mul_(c / t**5).addcmul_(gram, b / t**3)
    exact.diagonal(dim1=-2, dim2=-1).add_((a / t).squeeze(-1))
    square.copy_(exact)


def _aol(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """Turbo-Muon: rescale rows so that the first Gram matrix is diagonally dominated; its product is reused."""
    gram = x @ x.mT
    total = gram.abs().sum(-1, keepdim=True, dtype=torch.promote_types(gram.dtype, torch.float32))
    scale = torch.where(total > torch.finfo(total.dtype).tiny, total, 1.0).rsqrt().to(x.dtype)
    x, gram = x * scale, gram * scale * scale.mT
    for index, (a, b, c) in enumerate(coefficients):
        if index:
            gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _gram(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    """Iterate on R = X X^T and the accumulated factor Q; half precision restarts from X because R drifts."""
    restart = x.dtype == torch.float16
    factor, gram = None, x @ x.mT
    for index, (a, b, c) in enumerate(coefficients):
        if restart and index == GRAM_RESTART and factor is not None:
            x = factor @ x
            factor, gram = None, x @ x.mT
        z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if factor is None:
            factor = z.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = torch.baddbmm(factor, factor, z, beta=a)
        if index + 1 < len(coefficients):
            product = torch.baddbmm(gram, gram, z, beta=a)
            gram = torch.baddbmm(product, z, product, beta=a)
    assert factor is not None
    return factor @ x
