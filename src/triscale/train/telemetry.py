"""The logit sentinel: how the largest attention logits move, an early warning, and the count of loss spikes.

Logits grow before a run diverges. With QK-Clip on, every step is measured; without it, one step in ``every``.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import nn

from triscale.optim.qk_clip import collect


class LogitSentinel:
    """Watches one model. Call :meth:`arm` before a step's forward passes and :meth:`observe` after its update.

    every: steps between measurements when no optimizer clips (0 = never). limit: the logit that counts as dangerous.
    horizon: steps ahead for which the trend is extrapolated. window: measurements the trend is fitted to.
    spike_factor: a loss counts as a spike when it exceeds the mean of the last ``window`` losses by this many of
    their standard deviations and by 5 %.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 50,
        limit: float = 1000.0,
        horizon: int = 200,
        window: int = 20,
        spike_factor: float = 5.0,
    ):
        self.optimizer, self.every, self.limit = optimizer, every, limit
        self.horizon, self.window, self.spike_factor = horizon, window, spike_factor
        self.modules = {n: m for n, m in model.named_modules() if getattr(m, "max_logits", None) is not None}
        self.clips = getattr(optimizer, "qk_clip", None) is not None
        self.history: dict[str, deque[tuple[int, list[float]]]] = {n: deque(maxlen=window) for n in self.modules}
        self.losses: deque[float] = deque(maxlen=window)
        self.largest, self.spikes, self.clipped = -math.inf, 0, 0
        self.warned: set[str] = set()

    def arm(self, step: int) -> None:
        """Decide whether step ``step`` (0-based) is measured."""
        if not self.clips:
            due = bool(self.every) and step % self.every == 0
            for module in self.modules.values():
                module.record_max_logits = due  # type: ignore[assignment]

    def observe(self, step: int) -> dict[str, list[float]]:
        """The step's largest logit by layer and head, over micro-batches and ranks; {} if it was not measured."""
        if self.clips:
            report = getattr(self.optimizer, "clip_report", None)
            maxima = dict(report.max_logits) if report is not None else {}
            self.clipped += report.clipped if report is not None else 0
        elif any(getattr(module, "record_max_logits", False) for module in self.modules.values()):
            maxima = dict(zip(self.modules, collect(self.modules.values()), strict=True))
        else:
            return {}
        for name, heads in maxima.items():
            self.history[name].append((step, heads))
            self.largest = max([self.largest, *(h for h in heads if not math.isnan(h))])
        return maxima

    def warnings(self) -> list[str]:
        """A line for each layer whose trend reaches the limit within the horizon; each layer is named once."""
        found = []
        for name, points in self.history.items():
            if name in self.warned or len(points) < max(3, self.window // 4):
                continue
            for head, (value, slope) in enumerate(self._trends(points)):
                ahead = value + slope * self.horizon
                if slope > 0 and value > self.limit / 10 and ahead > self.limit:
                    found.append(f"attention logits of {name}, head {head}, are at {value:.0f} and grow by {slope:.2g} a "
                                 f"step: {self.limit:.0f} within {self.horizon} steps")  # fmt: skip
                    self.warned.add(name)
                    break
        return found

    def slopes(self) -> dict[str, list[float]]:
        """Growth a step of each head's largest logit, by least squares over the window."""
        return {name: [slope for _, slope in self._trends(p)] for name, p in self.history.items() if len(p) > 1}

    def _trends(self, points: deque[tuple[int, list[float]]]) -> list[tuple[float, float]]:
        steps = [float(step) for step, _ in points]
        middle = sum(steps) / len(steps)
        spread = sum((s - middle) ** 2 for s in steps) or 1.0
        trends = []
        for head in range(len(points[-1][1])):
            values = [heads[head] for _, heads in points]
            if not all(map(math.isfinite, values)):
                trends.append((values[-1], 0.0))
                continue
            slope = sum((s - middle) * v for s, v in zip(steps, values, strict=True)) / spread
            trends.append((values[-1], slope))
        return trends

    def spike(self, loss: float) -> bool:
        """Whether ``loss`` jumps out of the recent losses; the statistics then see the recent maximum instead."""
        past = list(self.losses)
        jumped = False
        if len(past) >= self.window // 2:
            mean = sum(past) / len(past)
            deviation = math.sqrt(sum((p - mean) ** 2 for p in past) / len(past))
            jumped = loss > max(mean + self.spike_factor * deviation, mean * 1.05)
        self.spikes += jumped
        self.losses.append(min(loss, max(past)) if jumped else loss)
        return jumped

    def state_dict(self) -> dict[str, Any]:
        """JSON only."""
        return {
            "history": {n: [[s, [_plain(v) for v in heads]] for s, heads in p] for n, p in self.history.items()},
            "losses": list(self.losses), "largest": _plain(self.largest), "spikes": self.spikes,
            "clipped": self.clipped, "warned": sorted(self.warned),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, points in state["history"].items():
            if name in self.history:
                self.history[name].extend((step, [_number(v) for v in heads]) for step, heads in points)
        self.losses.extend(state["losses"])
        self.largest, self.spikes, self.clipped = _number(state["largest"]), state["spikes"], state["clipped"]
        self.warned = set(state["warned"])


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _number(value: float | str) -> float:
    return float(value)
