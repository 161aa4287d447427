"""A finished (or interrupted) run, loaded for use: model in eval mode and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from triscale.config import TriScaleError
from triscale.data.tokenizer import Tokenizer
from triscale.models.decoder import Decoder

from .checkpoint import complete_checkpoints, load_checkpoint
from .config import RunConfig
from .device import resolve_device
from .run_directory import RunDirectory


@dataclass
class LoadedRun:
    """step: the optimizer step of the weights. corpus: what they were trained on; None for imported weights."""

    config: RunConfig
    model: Decoder
    tokenizer: Tokenizer
    step: int
    directory: RunDirectory
    corpus: str | None = None


def load_run(path: str | Path, device: str = "auto", trust_imports: bool = False) -> LoadedRun:
    """Load the newest complete checkpoint of a run folder, or of the longest run inside a ladder cell.

    trust_imports: allow the run's config to import parts of the user's own. Raises :class:`TriScaleError` when there is
    no checkpoint.
    """
    directory = RunDirectory(find_run(Path(path)))
    config = directory.config(trust_imports)
    found = complete_checkpoints(directory.checkpoints)
    if not found:
        raise TriScaleError(f"{path} holds no complete checkpoint yet")
    step, folder = found[-1]
    tensors, state = load_checkpoint(folder, only=("model",))
    where = resolve_device(device)
    model = config.model.build(seed=None, device=where)
    weights = dict(tensors["model"])
    if config.model.tied_head:
        weights["head.weight"] = weights["embedding.weight"]
    model.load_state_dict(weights)
    tokenizer = Tokenizer.load(directory.path / "tokenizer.json")
    return LoadedRun(config, model.eval(), tokenizer, step, directory, state.get("corpus"))


def find_run(path: Path) -> Path:
    """A ladder cell holds one run folder per budget: take the one that kept its weights."""
    if (path / "config.toml").exists():
        return path
    kept = [p for p in path.glob("tokens*") if complete_checkpoints(p / "checkpoints")]
    if len(kept) == 1:
        return kept[0]
    raise TriScaleError(f"{path} is neither a run folder nor a finished ladder cell")


@torch.no_grad()
def sequence_nats(loaded: LoadedRun, ids: list[int], row_length: int) -> tuple[float, int]:
    """Summed loss in nats of ``ids`` read in rows of ``row_length``, and the number of predicted tokens."""
    from triscale.nn.batch import TokenBatch

    device = loaded.model.embedding.weight.device
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, row_length):
        piece = torch.tensor(ids[start : start + row_length + 1], device=device)
        inputs, targets = piece[:-1], piece[1:]
        weights = torch.ones(len(targets), device=device)
        batch = TokenBatch.from_lengths(inputs, [len(inputs)], targets=targets, loss_weights=weights)
        total += float(loaded.model(batch, output="loss"))
        count += len(targets)
    return total, count
