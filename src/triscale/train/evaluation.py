"""Evaluations of a finished run, and the comparison of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from triscale.config import TriScaleError
from triscale.data.heldout import HeldoutRows, bits_per_byte
from triscale.data.needle import make_needle_examples
from triscale.data.prepare import prepare

from .config import describe_difference
from .evaluate import corpus_name, heldout_loss
from .generate import generate_ids
from .load import LoadedRun, load_run, sequence_nats
from .run_directory import RunDirectory

NEEDLES = 21  # prompts per length
NEEDLE_DEPTHS = (0.1, 0.5, 0.9)


def evaluate_run(
    path: Path,
    *,
    text: Path | None = None,
    needle: tuple[int, ...] = (),
    device: str = "auto",
    trust_imports: bool = False,
) -> dict[str, Any]:
    """``heldout`` always; ``text`` and ``needle`` when asked for. fp32, whatever the run trained in."""
    loaded = load_run(path, device, trust_imports)
    train = loaded.config.train
    data = prepare(loaded.config.data, loaded.directory.cache_dir)
    if loaded.corpus not in (None, corpus_name(data)):
        raise TriScaleError(
            f"{path} was trained on the corpus and tokenizer {loaded.corpus}, and {corpus_name(data)} is what is here "
            "now: its held-out documents and its token ids are others. Bring the old text (or Python version) back"
        )
    rows = HeldoutRows(data, train.row_length, -(-train.eval_tokens // train.row_length))
    result: dict[str, Any] = {
        "step": loaded.step,
        "heldout": heldout_loss(loaded.model, rows, train.micro_rows, torch.float32),
    }
    if text is not None:
        content = text.read_text(encoding="utf-8", errors="replace")
        ids = loaded.tokenizer.encode(content)
        if len(ids) < 2:
            raise TriScaleError(f"--text: {text} holds {len(ids)} tokens; at least 2 are needed to predict one")
        nats, count = sequence_nats(loaded, ids, train.row_length)
        size = len(content.encode())
        result["text"] = {"loss": nats / count, "bits_per_byte": bits_per_byte(nats, size), "tokens": count}
    if needle:
        result["needle"] = {str(length): needle_accuracy(loaded, length) for length in needle}
    return result


def needle_accuracy(loaded: LoadedRun, length: int, n: int = NEEDLES) -> dict[str, Any]:
    """Share of prompts of ``length`` tokens whose hidden value the model repeats greedily."""
    examples = [
        example
        for depth in NEEDLE_DEPTHS
        for example in make_needle_examples(loaded.tokenizer, length, depth, -(-n // len(NEEDLE_DEPTHS)), seed=0)
    ]
    right = 0
    for example in examples:
        answer = example.tokens[example.answer_start : example.answer_stop]
        right += tuple(generate_ids(loaded, list(example.prompt), len(answer), temperature=0.0)) == answer
    return {"accuracy": right / len(examples), "n": len(examples)}


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Config differences and the main numbers of two finished runs, in the order given."""
    pair = [RunDirectory(first), RunDirectory(second)]
    configs = [directory.read_config() for directory in pair]
    for directory in pair:
        if not directory.finished:
            raise TriScaleError(f"{directory.path} is not finished; the command that began it goes on with it")
    results = [directory.result() for directory in pair]
    names = ("loss", "bits_per_byte", "tokens", "flops", "seconds", "max_logit")
    numbers = {name: tuple(r[name] for r in results) for name in names}
    numbers["parameters"] = tuple(r["parameters"]["total"] for r in results)
    same = results[0]["corpus"] == results[1]["corpus"]
    remark = (
        "One pair of runs cannot tell luck from merit: `triscale ladder` repeats it over seeds and sizes."
        if same
        else "The runs were measured on different corpora or tokenizers: their losses cannot be compared."
    )
    difference = describe_difference(configs[0], configs[1])
    return {"config": difference, "numbers": numbers, "same_corpus": same, "remark": remark}
