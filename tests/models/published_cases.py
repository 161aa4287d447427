"""The published test cases: tiny models of every family with the values a public implementation computes for them."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

PARITY = Path(__file__).parents[1] / "data" / "parity"
# case: (logits, per-layer values, gradients), the largest absolute difference of a correct fp32 implementation
TOLERANCE = {
    "deepseek_v3_tiny": (2e-4, 1e-4, 1e-5),
    "deepseek_v3_tiny_yarn": (2e-4, 1e-4, 1e-5),
    "deepseek_v3_tiny_moonlight": (2e-4, 1e-4, 1e-5),
    "kimi_linear_tiny": (1e-4, 2e-4, 2e-5),
    "kimi_k3_text_tiny": (2e-4, 2e-4, 2e-4),
}
FLOAT64 = 1e-10


def expected(case: str) -> dict[str, Tensor]:
    return load_file(PARITY / case / "io.safetensors")


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours.detach().double() - theirs.double()).abs().max())
