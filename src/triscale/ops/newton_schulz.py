"""Orthogonalisation of matrices by Newton-Schulz iteration: an approximation of U V^T for X = U S V^T.

Each iteration maps the singular values through an odd quintic a s + b s^3 + c s^5, and the published methods differ in
the coefficients per step and in how the input is scaled. :func:`orthogonalize_reference` (singular value
decomposition) is what all of them approximate.

Shapes: matrices are [..., m, n]; inside, a batch [B, p, q] with p <= q (the smaller side spans the Gram matrix).
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
    form: "product" iterates on X; "aol" replaces the norm by the diagonal scaling of Turbo-Muon; "gram" iterates on
    the Gram matrix alone and multiplies X once at the end.
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


def orthogonalize(
    matrix: Tensor, method: str = "jordan5", steps: int | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Orthogonalise every matrix of ``matrix`` [..., m, n]; the result has the same shape.

    method: a key of :data:`METHODS`. steps: how many of its iterations, None = as published.
    dtype: of the arithmetic and of the result, None = that of ``matrix``. The input norm is always taken in at least
    fp32. A zero matrix stays zero. A stack gives bit for bit what its matrices give one by one.

    Raises :class:`ConfigError` for an unknown method, for ``steps < 1``, for fewer than two dimensions, and where the
    Gram form would lose its accuracy (see :func:`why_not`).
    """
    if matrix.ndim < 2:
        raise ConfigError("matrix", f"shape {list(matrix.shape)} has fewer than two dimensions")
    rows, columns = matrix.shape[-2:]
    batch = matrix.reshape(-1, rows, columns)
    if rows > columns:
        batch = batch.mT
    flat = orthogonalize_batch(batch, method, steps, dtype=dtype or matrix.dtype)
    return (flat.mT if rows > columns else flat).reshape(matrix.shape)


def orthogonalize_batch(batch: Tensor, method: str, steps: int | None = None, *, dtype: torch.dtype) -> Tensor:
    """:func:`orthogonalize` for a batch [B, p, q] with p <= q; the result is contiguous and of ``dtype``."""
    rule = METHODS.get(method)
    if rule is None:
        raise ConfigError("method", f"no orthogonaliser is called {method!r}", f"Known: {', '.join(METHODS)}")
    if steps is not None and steps < 1:
        raise ConfigError("steps", f"{steps} is not positive", "Use None for the published number")
    if batch.numel() == 0:
        return batch.to(dtype)
    coefficients = _take(rule.coefficients, steps)
    exact = batch if batch.dtype == torch.float64 else batch.float()
    if rule.form == "aol":
        return _aol(_divide(exact, rule, dtype), coefficients)
    if rule.form == "gram":
        reason = why_not(method, batch.shape[-2], batch.shape[-1], dtype, batch.device.type)
        if reason:
            raise ConfigError("method", f"{method!r} declines: {reason}", "Use 'polar_express5' for such matrices")
        return _gram(_divide(exact, rule, dtype), coefficients, restart=dtype == torch.float16)
    return _product(_divide(exact, rule, dtype), coefficients)


def orthogonalize_reference(matrix: Tensor) -> Tensor:
    """The exact polar factor U V^T of ``matrix`` [..., m, n] by singular value decomposition (the definition).

    Singular values of zero (relative to the largest) stay zero, as they do under any odd polynomial.
    """
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    limit = s.amax(-1, keepdim=True) * max(matrix.shape[-2:]) * torch.finfo(s.dtype).eps
    return (u * (s > limit).to(s.dtype).unsqueeze(-2)) @ vh


def why_not(method: str, rows: int, columns: int, dtype: torch.dtype, device: str) -> str | None:
    """Why ``method`` cannot take such a matrix, or None if it can."""
    if METHODS[method].form != "gram":
        return None
    aspect = max(rows, columns) / max(min(rows, columns), 1)
    if dtype == torch.bfloat16:
        return "the Gram iteration is unstable in bfloat16"
    if dtype == torch.float16:
        return None if device == "cuda" else "half precision needs a GPU"
    if aspect < GRAM_MIN_ASPECT:
        return f"aspect ratio {aspect:.1f} is below {GRAM_MIN_ASPECT}, where the Gram form saves nothing"
    return None


def _take(coefficients: tuple[Triple, ...], steps: int | None) -> tuple[Triple, ...]:
    if steps is None or steps == len(coefficients):
        return coefficients
    return coefficients[:steps] + (coefficients[-1],) * (steps - len(coefficients))


def _divide(batch: Tensor, rule: Method, dtype: torch.dtype) -> Tensor:
    """A new contiguous tensor of ``dtype``: never the caller's memory, which may be a momentum buffer."""
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True)
    return (batch / (rule.scale * norm + rule.eps)).to(dtype, memory_format=torch.contiguous_format, copy=True)


def _product(x: Tensor, coefficients: tuple[Triple, ...]) -> Tensor:
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


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


def _gram(x: Tensor, coefficients: tuple[Triple, ...], restart: bool) -> Tensor:
    """Iterate on R = X X^T and the accumulated factor Q; half precision restarts from X because R drifts."""
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
