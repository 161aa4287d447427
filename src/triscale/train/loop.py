"""The training loop: one step, its bookkeeping, and the promise that stopping anywhere changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from triscale.config import ConfigError, TriScaleError
from triscale.data.heldout import HeldoutRows
from triscale.data.loader import Loader
from triscale.data.prepare import PreparedData, prepare
from triscale.data.tokenizer import Tokenizer
from triscale.events import EventWriter
from triscale.models import count_parameters
from triscale.models.decoder import Decoder
from triscale.nn.router import Router
from triscale.optim.base import local

from .checkpoint import (
    complete_checkpoints,
    load_checkpoint,
    pack_optimizer,
    prune,
    remove_unfinished,
    save_checkpoint,
    unpack_optimizer,
)
from .config import RunConfig, Runtime
from .device import matmul_peak, resolve_device, resolve_precision
from .distributed import World, whole
from .divergence import DivergedError, largest_activation
from .evaluate import autocast, corpus_name, heldout_loss, to_batch
from .interrupt import Interrupted, InterruptGuard
from .run_directory import RunDirectory
from .telemetry import LogitSentinel

Listener = Callable[[dict[str, Any]], None]


class Trainer:
    """One run. Build it, then :meth:`train`; the same directory resumes, a finished one returns its result."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        path: str | Path,
        *,
        listeners: tuple[Listener, ...] = (),
        prepared: PreparedData | None = None,
        keep_steps: tuple[int, ...] = (),
        init_from: Path | None = None,
    ):
        """keep_steps: steps whose checkpoints are always written and never pruned (branch points).

        init_from: a checkpoint folder whose weights (and nothing else) the run starts from.
        """
        if runtime.threads:
            torch.set_num_threads(runtime.threads)
        self.runtime, self.directory, self.keep_steps = runtime, RunDirectory(path), set(keep_steps)
        self.listeners, self.init_from = listeners, init_from
        self.world = World()
        self.device = self.world.join(resolve_device(runtime.device))
        self.share = self.world.share(config.train.rows)
        self.precision = resolve_precision(config.train.precision, self.device)
        precision: Literal["fp32", "bf16"] = "fp32" if self.precision == torch.float32 else "bf16"
        config = replace(config, train=replace(config.train, precision=precision))
        with self.world.in_turn():
            self.data = prepared or prepare(config.data, runtime.cache_dir)
        ids = self.data.tokenizer.vocabulary_size
        if config.model.vocabulary is None:
            config = replace(config, model=replace(config.model, vocabulary=ids))
        elif config.model.vocabulary < ids:
            raise ConfigError(
                "model.vocabulary",
                f"{config.model.vocabulary} is smaller than the tokenizer's {ids} ids",
                "Leave it out to take the tokenizer's size",
            )
        self.config = config
        self.corpus = corpus_name(self.data)

    def train(self) -> dict[str, Any]:
        """Run to the end (or to an interrupt) and return the result.

        Raises :class:`Interrupted` after saving when the user stops it, :class:`DivergedError` on a non-finite loss,
        :class:`RunBusyError` if another process trains this run, :class:`TriScaleError` when memory or disk run out.
        """
        if self.directory.finished and self.directory.result().get("steps") == self.config.train.steps:
            if self.world.first:
                self.directory.verify(self.config)
            self.world.leave()
            return self.directory.result()
        path = self.directory.events
        path = path if self.world.first else path.with_stem(f"events-rank{self.world.rank}")
        try:
            guard = InterruptGuard() if self.world.first else InterruptGuard("")  # one acknowledgement is enough
            with self._owned(), guard as self.guard, EventWriter(path, self.directory.name) as self.events:
                self.events.listeners.extend(self.listeners if self.world.first else ())
                self._build()
                self._resume()
                return self._loop()
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "memory" not in str(error).lower():
                raise
            raise TriScaleError(
                f"out of memory: lower --train.micro_batch_tokens (now {self.config.train.micro_batch_tokens}), "
                f"or set --model.checkpoint_activations=true ({error})"
            ) from error
        except OSError as error:
            raise TriScaleError(
                f"the run in {self.directory.path} stopped: {error}; once that is mended, the same command resumes it"
            ) from error
        finally:
            self.world.leave()

    @contextmanager
    def _owned(self) -> Iterator[None]:
        """The run folder, created or checked, and closed to other runs; the first rank does it for all."""
        with ExitStack() as stack:
            with self.world.in_turn():
                if self.world.first:
                    stack.enter_context(self.directory.exclusive())
                    self.directory.open(self.config, self.runtime)
                    self.data.tokenizer.save(self.directory.path / "tokenizer.json")
            yield

    def _build(self) -> None:
        config = self.config
        self.model: Decoder = config.model.build(seed=config.seed, device=self.device)
        self.counts = count_parameters(self.model)  # of whole tensors: before they are sharded
        self.world.shard(self.model, self.runtime.expert_parallel)
        self.model.train()
        self.optimizer = config.optimizer.build(self.model)
        self.schedule = config.schedule.build(config.train.steps)
        self.loader = Loader(self.data, config.train.row_length, seed=config.seed)
        rows = -(-config.train.eval_tokens // config.train.row_length)
        self.heldout = HeldoutRows(self.data, config.train.row_length, rows)
        self.forward = torch.compile(self.model) if self.runtime.compile else self.model
        self.names = {id(p): n for n, p in self.model.named_parameters()}
        self.flops_per_step = (
            3 * self.model.flops_per_token(config.train.row_length) * config.train.batch_tokens
            + int(getattr(self.optimizer, "flops_per_step", 0))
        )  # fmt: skip
        self.step, self.seconds = 0, 0.0
        self.curve: list[tuple[int, float]] = []
        self.sentinel = LogitSentinel(self.model, self.optimizer, every=self.runtime.log_logits_every)
        self.last_eval: dict[str, float] | None = None

    def _resume(self) -> None:
        with self.world.in_turn():
            removed = remove_unfinished(self.directory.checkpoints) if self.world.first else []
        if removed:
            self.events.write("warning", message=f"ignored unfinished checkpoints: {', '.join(removed)}")
        found = complete_checkpoints(self.directory.checkpoints)
        if not found:
            if self.init_from is not None:
                self._start_from(self.init_from)
            random.seed(self.config.seed)
            np.random.seed(self.config.seed)
            torch.manual_seed(self.config.seed)
            self.events.write(
                "run.start", steps=self.config.train.steps, parameters=self.counts, device=str(self.device),
                init_from=str(self.init_from) if self.init_from is not None else None,
            )  # fmt: skip
            report = self.data.report
            self.events.write("config", config=self.directory.read_config(), corpus=self.corpus, data=report.to_dict())
            for line in report.warnings():
                self.events.write("warning", message=line)
            return
        step, path = found[-1]
        self.load_state(*self._read(path))
        self.events.write("run.resume", step=step, steps=self.config.train.steps)

    def _read(
        self, path: Path, only: tuple[str, ...] = ()
    ) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """A checkpoint, sharded like the model."""
        return load_checkpoint(path, self.world, dict(self.model.named_parameters()), only)

    def _start_from(self, path: Path) -> None:
        """Take the weights of a checkpoint; all of them must fit, for a part that stays random would go unnoticed."""
        tensors, _ = self._read(path, ("model",))
        given, own = dict(tensors.get("model", {})), dict(self.model.state_dict())
        if self.config.model.tied_head:
            own.pop("head.weight")
        problems = [f"{name} is missing there" for name in own if name not in given]
        problems += [f"{name} has no place here" for name in given if name not in own]
        problems += [f"{name} is {tuple(given[name].shape)} there and {tuple(own[name].shape)} here"
                     for name in own if name in given and given[name].shape != own[name].shape]  # fmt: skip
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ConfigError("--init-from", f"the weights in {path} do not fit this model:\n  "
                              + "\n  ".join(problems[:8]) + more + "\n",
                              "Use the model settings of that run (triscale config show --run RUN)")  # fmt: skip
        self.model.load_state_dict(given, strict=False)  # all but the tied head, which is the embedding
        tokenizer = path.parent.parent / "tokenizer.json"
        if tokenizer.exists() and Tokenizer.load(tokenizer).hash != self.data.tokenizer.hash:
            self.events.write(
                "warning", message=f"the weights in {path} were trained with another tokenizer: their embeddings mean "
                f"other text; --data.tokenizer={tokenizer} uses theirs"
            )  # fmt: skip

    def state(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Everything that survives a step, as (sharded) tensors by file and JSON."""
        optimizer, packed = pack_optimizer(self.optimizer, self.names)
        model = dict(self.model.state_dict())
        if self.config.model.tied_head:
            model.pop("head.weight")
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "sentinel": self.sentinel.state_dict(),
            "loader": self.loader_state,
            "optimizer": packed,
            "corpus": self.corpus,
        }
        rng = {"torch": torch.get_rng_state()}
        return {"model": model, "optimizer": optimizer, "rng": rng}, state

    def load_state(self, tensors: dict[str, dict[str, torch.Tensor]], state: dict[str, Any]) -> None:
        if state["corpus"] != self.corpus:
            raise TriScaleError(
                f"the corpus changed since this run started ({state['corpus']} then, {self.corpus} now); "
                "bring the old one back or start a new run"
            )
        model = dict(tensors["model"])
        if self.config.model.tied_head:
            model["head.weight"] = model["embedding.weight"]
        self.model.load_state_dict(model)
        unpack_optimizer(self.optimizer, self.names, tensors.get("optimizer", {}), state["optimizer"])
        torch.set_rng_state(tensors["rng"]["torch"])
        self.loader.load_state_dict(state["loader"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], [tuple(c) for c in state["curve"]]
        self.sentinel.load_state_dict(state["sentinel"])

    def _loop(self) -> dict[str, Any]:
        train = self.config.train
        self.loader_state = self.loader.state_dict()
        last_save = time.monotonic()
        try:
            self._evaluate_if_due()
            while self.step < train.steps:
                self._one_step()
                self._evaluate_if_due()
                due = self.runtime.checkpoint_every and self.step % self.runtime.checkpoint_every == 0
                late = self._agree(time.monotonic() - last_save > self.runtime.checkpoint_seconds)
                if self.step == train.steps or self.step in self.keep_steps or due or late:
                    self._save()
                    last_save = time.monotonic()
        except (Interrupted, DivergedError) as stop:
            with suppress(DivergedError):  # broken weights are not saved
                self._save()
            outcome = "interrupted" if isinstance(stop, Interrupted) else "diverged"
            self.events.write("run.end", outcome=outcome, step=self.step, durable=True)
            raise
        return self._finish()

    def _one_step(self) -> None:
        started = time.perf_counter()
        train = self.config.train
        self.loader_state = self.loader.state_dict()
        lr = self.config.optimizer.lr * self.schedule(self.step + 0.5)  # a step has the rate of its middle
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rows = self.loader.next(train.rows)
        weight = float(rows.weights.sum()) or 1.0
        loss, (first, last) = 0.0, self.share
        self.optimizer.zero_grad(set_to_none=True)
        self.sentinel.arm(self.step)
        try:
            for start in range(first, last, train.micro_rows):
                self._check_interrupt()
                batch = to_batch(rows, self.device, slice(start, min(start + train.micro_rows, last)))
                scale = self.world.size / weight  # sharding averages gradients over ranks
                batch.memo["loss_scale"] = scale  # for auxiliary losses, which join inside the model
                with autocast(self.device, self.precision):
                    part = self.forward(batch)
                (part * scale).backward()
                loss = loss + float(part.detach()) / weight
                if self.world.size == 1 and not loss < float("inf"):
                    raise self._diverged("loss", rows, batch)
            loss = self.world.total(loss, self.device)
            if not loss < float("inf"):
                raise self._diverged("loss", rows, batch)
            self._check_interrupt()
            norm = float(whole(self._clip()))
            if not norm < float("inf"):  # applied, it would turn every weight into NaN
                raise self._diverged("gradient", rows, batch)
        except (Interrupted, DivergedError):
            self.loader.load_state_dict(self.loader_state)  # the step never happened
            raise
        self.optimizer.step()
        for module in self.model.modules():
            getattr(module, "after_optimizer_step", lambda process_group: None)(self.world.group)
        self.step += 1
        logits = self.sentinel.observe(self.step)
        self.loader_state = self.loader.state_dict()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self._record(loss, lr, norm, seconds, logits)

    def _check_interrupt(self) -> None:
        """Several processes stop together, or one would wait for the others for ever: what counts is what they agreed on,
        not a signal that came in the meantime."""
        if self._agree(self.guard.requested):
            raise Interrupted

    def _agree(self, flag: bool) -> bool:
        """Whether any process says so."""
        return self.world.agree(flag, self.device)

    def _clip(self) -> torch.Tensor:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        limit = self.config.train.grad_clip or float("inf")
        return torch.nn.utils.clip_grad_norm_(parameters, limit)

    def _record(self, loss: float, lr: float, norm: float, seconds: float, logits: dict[str, Any]) -> None:
        train = self.config.train
        rate = self.flops_per_step / seconds
        if self.sentinel.spike(loss):
            self.events.write("spike", step=self.step, loss=loss, count=self.sentinel.spikes)
        for line in self.sentinel.warnings():
            self.events.write("warning", message=line, step=self.step)
        if self.step % self.runtime.log_every == 0 or self.step == train.steps:
            self.events.write(
                "step", step=self.step, loss=loss, lr=lr, grad_norm=norm, tokens=self.step * train.batch_tokens,
                flops=self.step * self.flops_per_step, seconds=self.seconds,
                tokens_per_s=train.batch_tokens / seconds, mfu=rate / matmul_peak(self.device, self.precision),
            )  # fmt: skip
            if logits:
                self.events.write(
                    "logits", step=self.step, max_logits=logits, slopes=self.sentinel.slopes(),
                    clipped=self.sentinel.clipped, warned=sorted(self.sentinel.warned),
                )  # fmt: skip
            routers = {n: m.statistics() for n, m in self.model.named_modules() if isinstance(m, Router)}
            if routers:
                self.events.write("router", step=self.step, layers=routers)

    def _evaluate_if_due(self) -> None:
        """At the start, every ``eval_every`` steps and at the end; an interrupted evaluation is owed on resuming."""
        train = self.config.train
        end, every = self.step == train.steps, train.eval_every
        if end or self.step == 0 or (every and self.step % every == 0):
            known = bool(self.curve) and self.curve[-1][0] == self.step * train.batch_tokens
            if not known or (end and self.last_eval is None):
                self._evaluate()

    def _evaluate(self) -> None:
        result = heldout_loss(
            self.model, self.heldout, self.config.train.micro_rows, self.precision, self._check_interrupt
        )  # fmt: skip
        if not result["loss"] < float("inf"):
            raise DivergedError("held-out loss", self.step, [], "the weights of this step are the cause")
        tokens = self.step * self.config.train.batch_tokens
        self.curve = [*(point for point in self.curve if point[0] != tokens), (tokens, result["loss"])]
        self.last_eval = result
        self.events.write(
            "eval", step=self.step, tokens=tokens, eval_tokens=result["tokens"], loss=result["loss"],
            bits_per_byte=result["bits_per_byte"],
        )  # fmt: skip

    def _diverged(self, what: str, rows, batch) -> DivergedError:
        with autocast(self.device, self.precision):
            activation = largest_activation(self.model, batch)
        documents = sorted({name for row in rows.document_ids for name in row})
        return DivergedError(what, self.step, documents, activation)

    def _save(self) -> None:
        if self._agree(not all(bool(local(p).isfinite().all()) for p in self.model.parameters())):
            raise DivergedError("model", self.step, [], "its weights hold NaN; the checkpoint before them is kept")
        path = save_checkpoint(self.directory.checkpoints, self.step, *self.state(), self.world)
        if self.world.first:
            prune(self.directory.checkpoints, self.runtime.keep, self.keep_steps)
        self.events.write("checkpoint", step=self.step, path=path.name, durable=True)

    def _finish(self) -> dict[str, Any]:
        assert self.last_eval is not None, "a run ends with an evaluation"
        result = self.partial_result() | {
            "outcome": "completed",
            "loss": self.curve[-1][1],
            "bits_per_byte": self.last_eval["bits_per_byte"],
        }
        self.events.write("run.end", outcome="completed", durable=True, loss=result["loss"])
        if self.world.first:
            self.directory.write_result(result)
        return result

    def partial_result(self) -> dict[str, Any]:
        """What is known after any step: costs are those of the whole planned run, the loss is unknown."""
        train = self.config.train
        return {
            "steps": train.steps,
            "tokens": train.steps * train.batch_tokens,
            "flops": train.steps * self.flops_per_step,
            "seconds": self.seconds,
            "loss": None,
            "bits_per_byte": None,
            "curve": [list(point) for point in self.curve],
            "parameters": self.counts,
            "max_logit": self.sentinel.largest if self.sentinel.largest > float("-inf") else None,
            "spikes": self.sentinel.spikes,
            "corpus": self.corpus,
        }
