"""Folders of safetensors shards: read tensor by tensor, written piece by piece, never a whole model in memory."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from triscale.config import TriScaleError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor as a file's header describes it."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardReader:
    """The tensors of a folder with ``model.safetensors``, or with shards and an index.

    Raises :class:`TriScaleError` when the index and the files disagree, or a file is missing or damaged.
    """

    def __init__(self, folder: str | Path, only: str | None = None):
        """only: read this one file of the folder, without looking for an index."""
        self.folder = Path(folder)
        files = [only] if only is not None else self._files()
        self.tensors: dict[str, Stored] = {}
        for file in files:
            for name, stored in read_header(self.folder / file).items():
                if name in self.tensors:
                    raise TriScaleError(f"{name} is in two files: {self.tensors[name].file} and {file}")
                self.tensors[name] = stored
        if only is None:
            self._check_index()
        self._open: tuple[str, safe_open] | None = None

    @classmethod
    def of_file(cls, path: Path) -> ShardReader:
        return cls(path.parent, only=path.name)

    def _files(self) -> list[str]:
        if (self.folder / INDEX).exists():
            files = sorted(set(_weight_map(self.folder / INDEX).values()))
        elif (self.folder / SINGLE).exists():
            files = [SINGLE]
        else:
            raise TriScaleError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")
        missing = [file for file in files if not (self.folder / file).exists()]
        if missing:
            raise TriScaleError(f"{self.folder} lacks {len(missing)} of {len(files)} shards: {', '.join(missing[:5])}")
        return files

    def _check_index(self) -> None:
        if not (self.folder / INDEX).exists():
            return
        listed = _weight_map(self.folder / INDEX)
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise TriScaleError(f"{INDEX} says {name} is in {file}, but it is not there")
        unlisted = sorted(self.tensors.keys() - listed.keys())
        if unlisted:
            raise TriScaleError(f"{len(unlisted)} tensors are missing from {INDEX}: {', '.join(unlisted[:5])}")

    def names_by_file(self) -> Iterator[str]:
        """All names, those of one file after those of another: the order in which reading keeps one file open."""
        return iter(sorted(self.tensors, key=lambda name: (self.tensors[name].file, name)))

    def read(self, name: str, part: tuple[int | slice, ...] = ()) -> Tensor:
        """A tensor, or the given part of it; a copy, so that the file can be let go."""
        file = self.tensors[name].file
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, safe_open(self.folder / file, framework="pt"))
        handle = self._open[1]
        if not part:
            return handle.get_tensor(name).clone()
        narrowed = tuple(slice(p, p + 1) if isinstance(p, int) else p for p in part)
        value = handle.get_slice(name)[narrowed]
        return value.reshape([n for n, p in zip(value.shape, part, strict=False) if not isinstance(p, int)]
                             + list(value.shape[len(part):])).clone()  # fmt: skip

    def close(self) -> None:
        if self._open is not None:
            self._open[1].__exit__(None, None, None)
            self._open = None

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _weight_map(path: Path) -> dict[str, str]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise TriScaleError(f"{path} is not a safetensors index ({error!r})") from error


def read_header(path: Path) -> dict[str, Stored]:
    """Names, shapes and dtypes of one safetensors file, without its data."""
    try:
        with safe_open(path, framework="pt") as handle:
            names = list(handle.keys())
            slices = {name: handle.get_slice(name) for name in names}
            return {n: Stored(path.name, tuple(s.get_shape()), DTYPES[s.get_dtype()]) for n, s in slices.items()}
    except KeyError as error:
        raise TriScaleError(f"{path} stores the dtype {error}, which is not supported") from error
    except (SafetensorError, OSError) as error:
        raise TriScaleError(f"{path} is not a readable safetensors file ({error})") from error


class SafetensorsWriter:
    """One safetensors file whose tensors arrive in any order and in pieces; appears under its name when complete.

    tensors: {name: (shape, dtype)}, all of them, in advance: the header is written first, each piece goes to its
    place, and :meth:`close` refuses a file with a gap.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]):
        self.path, self.temporary = path, path.with_name(f".{path.name}.tmp")
        self.tensors = tensors
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        self._start: dict[str, int] = {}
        # wide dtypes first, so that every tensor is aligned to its element size
        for name in sorted(tensors, key=lambda n: (-tensors[n][1].itemsize, n)):
            shape, dtype = tensors[name]
            end = offset + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            self._start[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._left = {name: math.prod(shape) for name, (shape, _) in tensors.items()}
        self._file = open(self.temporary, "wb")  # noqa: SIM115 - closed by close() or __exit__
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._data + offset)

    def write(self, name: str, value: Tensor, first: int = 0) -> None:
        """``value`` becomes the elements from ``first`` on of tensor ``name``, in row-major order."""
        dtype = self.tensors[name][1]
        if value.dtype != dtype:
            raise ValueError(f"{name} is declared {dtype}, got {value.dtype}")
        self._left[name] -= value.numel()
        self._file.seek(self._data + self._start[name] + first * dtype.itemsize)
        self._file.write(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        gaps = sorted(name for name, left in self._left.items() if left)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if gaps:
            self.temporary.unlink()
            raise ValueError(f"{self.path.name}: {len(gaps)} tensors were not written once: {', '.join(gaps[:5])}")
        self.temporary.replace(self.path)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        self._file.close()
        with suppress(FileNotFoundError):
            self.temporary.unlink()


def plan_shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut into shards of at most ``limit`` bytes (a larger tensor gets its own)."""
    shards: list[list[str]] = []
    filled = limit
    for name, size in sizes.items():
        if filled + size > limit or not shards:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """The index beside more than one shard; a single file needs none."""
    if len(shards) == 1:
        return
    weight_map = {name: shard_name(i, len(shards)) for i, names in enumerate(shards) for name in names}
    text = json.dumps(
        {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}, indent=2
    )
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")
