"""Between a published model folder and a run folder, shard by shard.

The run folder that an import makes looks like a finished run of zero steps: ``config.toml``, ``tokenizer.json``, one
checkpoint, and ``published/`` with what our format has no place for (config.json, tokenizer files, vision tensors).
It can be prompted, trained from (``triscale train DST/config.toml --init-from DST``) and exported again bit for bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from triscale.config import ConfigError, TriScaleError, dump_toml, to_dict
from triscale.data.published_tokenizer import import_tokenizer
from triscale.data.tokenizer import Tokenizer
from triscale.models.decoder import Decoder
from triscale.models.published import Origin, family_of, load_family, read_config
from triscale.models.published.plan import ImportPlan, decoder_shapes, plan_import
from triscale.models.published.shards import SINGLE, SafetensorsWriter, ShardReader
from triscale.models.published.stream import SHARD_BYTES, Exporter, Pack, Report, stream_in, write_config

from .checkpoint import MARKER, checkpoint_path, is_checkpoint, load_checkpoint
from .load import find_run
from .run_directory import RunDirectory
from .sharded import is_sharded
from .start import find_weights

KEPT = "published"  # folder inside a run
VISION = "aside.safetensors"
WEIGHTS = "*.safetensors.index.json"
# what is carried along: descriptions and tokenizers, never code or other forms of the weights
CARRIED = ("*.json", "*.jinja", "*.txt", "*.md", "tiktoken.model", "*.tiktoken", "LICENSE*")


@dataclass
class Conversion:
    """What was done, for the reader."""

    family: str
    tensors: int
    lines: list[str]


def import_model(
    source: Path,
    target: Path,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    report: Report | None = None,
) -> Conversion:
    """Convert the published folder ``source`` into the run folder ``target``.

    dtype: of all tensors but those the family keeps in fp32; None keeps every tensor's own. Nothing is written unless
    every tensor is used exactly once. Raises :class:`TriScaleError` listing missing and left-over tensors.
    """
    if (target / "config.toml").exists():
        raise ConfigError(str(target), "already holds a run", "Give a new folder")
    published = read_config(source)
    with ShardReader(source) as reader:
        plan = plan_import(published, reader, load_family(family) if family else None)
        tokenizer = import_tokenizer(source)
        checkpoint = checkpoint_path(target / "checkpoints", 0)
        checkpoint.mkdir(parents=True, exist_ok=True)
        stream_in(plan, reader, checkpoint / SINGLE, dtype, report)
        _keep_the_rest(source, target / KEPT, plan, reader)
    if tokenizer is not None:
        tokenizer.save(target / "tokenizer.json")
    (checkpoint / "state.json").write_text(json.dumps({"step": 0, "imported": plan.family.name}, indent=1))
    _write_run_config(target, plan.config, tokenizer is not None)
    (checkpoint / MARKER).write_text("")
    return Conversion(plan.family.name, len(plan.sources), _import_lines(plan, tokenizer is not None))


def _keep_the_rest(source: Path, kept: Path, plan: ImportPlan, reader: ShardReader) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and any(map(file.match, CARRIED)) and not file.match(WEIGHTS):
            shutil.copy2(file, kept / file.name)
    (kept / "origin.json").write_text(json.dumps(asdict(plan.origin), indent=1, sort_keys=True))
    if plan.aside:
        aside = {n: (reader.tensors[n].shape, reader.tensors[n].dtype) for n in plan.aside}
        with SafetensorsWriter(kept / VISION, aside) as writer:
            for name in sorted(aside, key=lambda n: reader.tensors[n].file):
                writer.write(name, reader.read(name))


def _write_run_config(target: Path, model: Decoder.Config, tokenizer: bool) -> None:
    tree: dict[str, Any] = {"model": to_dict(model)}
    if tokenizer:
        tree["data"] = {"tokenizer": str((target / "tokenizer.json").resolve())}
    (target / "config.toml").write_text(dump_toml(tree), encoding="utf-8")


def _import_lines(plan: ImportPlan, tokenizer: bool) -> list[str]:
    lines = [f"{len(plan.sources):,} tensors of {plan.family.name}, each used once"]
    names = {"mxfp4": "MXFP4", "int4": "INT4", "fp8": "fp8 block"}
    lines += [f"{count:,} {names[form]} weights unpacked to bf16" for form, count in plan.forms.items()]
    if plan.aside:
        lines.append(f"{len(plan.aside)} vision tensors checked and kept as they are; the language model runs alone")
    if plan.skipped:
        lines.append(f"{len(plan.skipped)} tensors nothing needs left out: {', '.join(plan.skipped[:4])}")
    if not tokenizer:
        lines.append("no tokenizer file found: the model cannot be prompted with text")
    return lines


def export_model(
    source: Path,
    target: Path,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    pack: Pack | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Report | None = None,
    trust_imports: bool = False,
) -> Conversion:
    """Write a run folder, ladder cell or checkpoint as config.json and safetensors under published names.

    family: None = the one an imported run came from, else the first that can hold the model. Raises
    :class:`ConfigError` naming the part the family has no place for; nothing is written then. The weights of a run of
    several processes are put together first, and take as much memory.
    """
    if (target / "config.json").exists():
        raise ConfigError(str(target), "already holds a published model", "Give a new folder")
    checkpoint, directory = _locate(source)
    kept = directory.path / KEPT
    origin = _origin(kept)
    config = directory.config(trust_imports).model
    with _whole(checkpoint) as folder, ShardReader(folder) as reader:
        embedding = reader.tensors["embedding.weight"]
        chosen = _choose(config, family, origin)
        _check_weights(config, reader, checkpoint)
        same = origin is not None and origin.family == chosen.name
        exporter = Exporter(
            chosen, reader.tensors, reader.read, a_log=origin.a_log if same and origin else None, dtype=dtype, pack=pack,
            tied=config.tied_head,
        )  # fmt: skip
        target.mkdir(parents=True, exist_ok=True)
        carried = ShardReader.of_file(kept / VISION) if same and (kept / VISION).exists() else None
        count = exporter.write(target, shard_bytes, report, aside=carried)
        ids = _token_ids(directory)
        original = write_config(target, chosen, config, origin, dtype or embedding.dtype, pack, ids)
        if carried is not None:
            carried.close()
    lines = [f"{count:,} tensors of {chosen.name} written"]
    if config.multi_token is not None:
        lines.append("the multi-token prediction layer is left out: the published formats have no place for it")
    if original and origin is not None and "quantization_config" in origin.config and pack is None:
        lines.append("the routed experts were packed when imported; they are written as bf16 (see --pack)")
    lines += _copy_tokenizer(directory, kept, target)
    return Conversion(chosen.name, count, lines)


def _choose(config: Decoder.Config, family: str | None, origin: Origin | None):
    name = family or (origin.family if origin is not None else None)
    if name is None:
        return family_of(config)
    chosen = load_family(name)
    chosen.write(config)
    return chosen


def _locate(source: Path) -> tuple[Path, RunDirectory]:
    """The checkpoint folder, and the run it belongs to."""
    if is_checkpoint(source):
        return source, RunDirectory(source.parent.parent)
    directory = RunDirectory(find_run(source))
    return find_weights(directory.path), directory


@contextmanager
def _whole(checkpoint: Path) -> Iterator[Path]:
    """A folder with the checkpoint's weights in one file, whoever wrote it."""
    if not is_sharded(checkpoint):
        yield checkpoint
        return
    tensors, _ = load_checkpoint(checkpoint, only=("model",))
    with TemporaryDirectory() as folder:
        save_file(tensors.pop("model"), Path(folder) / SINGLE)
        yield Path(folder)


def _check_weights(config: Decoder.Config, reader: ShardReader, checkpoint: Path) -> None:
    expected = decoder_shapes(config)
    stored = {name: entry.shape for name, entry in reader.tensors.items()}
    if stored != expected:
        wrong = sorted(n for n in {*stored, *expected} if stored.get(n) != expected.get(n))
        raise TriScaleError(f"{checkpoint} does not hold the run's model: {', '.join(wrong[:5])}")


def _origin(kept: Path) -> Origin | None:
    file = kept / "origin.json"
    if not file.exists():
        return None
    saved = json.loads(file.read_text(encoding="utf-8"))
    a_log = tuple(saved["a_log"]) if saved["a_log"] is not None else None
    return Origin(saved["family"], saved["config"], a_log)


def _copy_tokenizer(directory: RunDirectory, kept: Path, target: Path) -> list[str]:
    """The publisher's own files where there are any, else our tokenizer.json (which transformers reads too)."""
    own = (
        [f for f in sorted(kept.iterdir()) if f.name not in ("config.json", "origin.json", VISION)]
        if kept.exists()
        else []
    )
    for file in own:
        shutil.copy2(file, target / file.name)
    ours = directory.path / "tokenizer.json"
    if not own and ours.exists():
        shutil.copy2(ours, target / "tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **_special_names(ours)}
        (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return [] if own or ours.exists() else ["this run has no tokenizer to export"]


def _special_names(file: Path) -> dict[str, str]:
    tokenizer = Tokenizer.load(file)
    names = {i: text for text, i in tokenizer.special.items()}
    ends = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos, "pad_token": tokenizer.pad}
    return {key: names[i] for key, i in ends.items() if i is not None}


def _token_ids(directory: RunDirectory) -> dict[str, int]:
    file = directory.path / "tokenizer.json"
    if not file.exists():
        return {}
    tokenizer = Tokenizer.load(file)
    ids = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.pad}
    return {name: i for name, i in ids.items() if i is not None}
