"""The gated delta rule in chunks: matrix products inside and across chunks, one small scan over chunk states.

With the factors of :mod:`.factors`, S the state entering a chunk, and all sums over the chunk's C tokens:

    R  = V - Ke S                     what the incoming state does not yet predict
    Vt = (I + L)^-1 (beta * R)        L = beta_i A_ij, strictly lower: writes as later tokens see them
    O  = Qe S + P Vt
    S' = decay * S + Kd^T Vt

The work runs through segments of chunks that fit a CPU's cache. The backward pass recomputes a segment from its inputs
and the chunk states, so nothing but those states is kept.

Legend: c chunks of the segment, R rows (batch x heads), C chunk, K key width, V value width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import Source, make_factors
from .factors import Factors, vanishing
from .inputs import Inputs
from .plan import Plan, plan_packed, plan_rows

# Values of one [tokens, heads, width] tensor of a segment: what fits a CPU's cache, and what fills a GPU.
SEGMENT_ELEMENTS = 1 << 17
GPU_SEGMENT_ELEMENTS = 1 << 24


def chunked_from_inputs(inputs: Inputs, chunk_size: int, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    """``(o, final_state)``; the final state is None unless asked for."""
    batch, tokens = inputs.q.shape[:2]
    states = output_final_state or inputs.initial_state is not None
    if inputs.offsets is None:
        plan = plan_rows(batch, tokens, chunk_size)
    else:
        plan = plan_packed(inputs.offsets, chunk_size, states, inputs.q.device)
    out, final = ChunkedDeltaRule.apply(
        inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state, inputs.scale, plan,
        inputs.sequences, output_final_state, inputs.dtype,
    )  # fmt: skip
    return out, final


class ChunkedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, scale, plan, sequences, want_final, dtype):
        work = _Work(plan, (q, k, v, g, beta), scale, dtype)
        shape = (sequences, work.heads, work.key_width, work.value_width)
        initial = v.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
        keep = any(ctx.needs_input_grad)
        out, states, final = work.forward(work.slots(initial), keep, want_final)
        ctx.work_arguments = (plan, scale, dtype)
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.save_for_backward(q, k, v, g, beta, *states)
        ctx.set_materialize_grads(False)
        return out.view(v.shape), final.view(shape) if want_final else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None):
        q, k, v, g, beta, *states = ctx.saved_tensors
        plan, scale, dtype = ctx.work_arguments
        work = _Work(plan, (q, k, v, g, beta), scale, dtype)
        do = torch.zeros_like(v) if do is None else do
        dfinal = None if dfinal is None else work.slots(dfinal.to(dtype))
        with torch.autocast(do.device.type, enabled=False):
            grads, dinitial = work.backward(do, dfinal, states)
        grads = [d.view(x.shape) for d, x in zip(grads, (q, k, v, g, beta), strict=True)]
        if ctx.initial_dtype is None:
            dstate = None
        else:
            dstate = dinitial.view(-1, work.heads, work.key_width, work.value_width).to(ctx.initial_dtype)
        return (*grads, dstate, None, None, None, None, None)


class _Loaded(NamedTuple):
    """One segment in chunk layout; n = c * R."""

    qk: Tensor  # [n, 2, C, K], q scaled
    v: Tensor  # [n, C, V]
    g: Tensor  # [n, C, K]
    beta: Tensor  # [n, C]


class _Solved(NamedTuple):
    """Gate-dependent quantities of one segment after masking."""

    source: Source
    factors: Factors
    inverse: Tensor  # (I + L)^-1 [n, C, C]
    masks: tuple[Tensor, Tensor, Tensor, Tensor] | None


class _Work:
    """One call: views the tensors as ``plan`` says and walks the segments."""

    def __init__(self, plan: Plan, tensors: tuple[Tensor, ...], scale: float, dtype: torch.dtype):
        self.plan, self.scale, self.dtype = plan, scale, dtype
        self.q, self.k, self.v, self.g, self.beta = (x.reshape(plan.rows, -1, *x.shape[2:]) for x in tensors)
        self.rows, self.tokens, self.heads, self.key_width = self.q.shape
        self.value_width = self.v.shape[-1]
        budget = SEGMENT_ELEMENTS if self.q.device.type == "cpu" else GPU_SEGMENT_ELEMENTS
        per_row = self.heads * plan.chunk * max(self.key_width, self.value_width)
        self.group = max(1, min(self.rows, budget // per_row))  # batch rows worked on together
        self.span = max(1, budget // (per_row * self.group))  # chunks of a segment

    def slots(self, state: Tensor) -> Tensor:
        """[sequences, H, K, V] as [slots, rows * H, K, V]."""
        return state.reshape(self.plan.slots, -1, self.key_width, self.value_width)

    def _groups(self):
        return [(r, min(r + self.group, self.rows)) for r in range(0, self.rows, self.group)]

    def _segments(self):
        return [(c, min(c + self.span, self.plan.chunks)) for c in range(0, self.plan.chunks, self.span)]

    # --- layout -----------------------------------------------------------------------------------------------------

    def _take(self, x: Tensor, rows: tuple[int, int], segment: tuple[int, int]) -> Tensor:
        """Tokens of a segment as a view or copy [rows, c, C, H, ...]; padding is zero."""
        size, (first, last) = self.plan.chunk, segment
        start, stop = first * size, last * size
        if self.plan.gather is not None:
            assert self.plan.valid is not None
            piece = x.index_select(1, self.plan.gather[start:stop])
            piece[:, ~self.plan.valid[start:stop]] = 0
        else:
            piece = x[rows[0] : rows[1], start:stop]
            missing = stop - start - piece.shape[1]
            if missing:
                padding = piece.new_zeros(piece.shape[0], missing, *piece.shape[2:])
                piece = torch.cat([piece, padding], dim=1)
        return piece.view(piece.shape[0], last - first, size, *piece.shape[2:])

    def _load_one(self, x: Tensor, rows: tuple[int, int], segment: tuple[int, int], into: Tensor | None = None):
        piece = self._take(x, rows, segment)
        order = (1, 0, 3, 2, 4) if piece.dim() == 5 else (1, 0, 3, 2)
        piece = piece.permute(order)  # [c, rows, H, C, ...]
        if into is None:
            into = torch.empty(piece.shape, dtype=self.dtype, device=x.device)
        into.view(piece.shape).copy_(piece)
        return into.view(-1, *piece.shape[3:])

    def _load(self, rows: tuple[int, int], segment: tuple[int, int]) -> _Loaded:
        count = (segment[1] - segment[0]) * (rows[1] - rows[0])
        shape = (count, self.heads, 2, self.plan.chunk, self.key_width)
        qk = torch.empty(shape, dtype=self.dtype, device=self.q.device)
        for index, x in enumerate((self.q, self.k)):
            piece = self._take(x, rows, segment).permute(1, 0, 3, 2, 4)
            qk.view(*piece.shape[:3], *shape[2:])[:, :, :, index].copy_(piece)
        qk[:, :, 0].mul_(self.scale)
        g = self._load_one(self.g, rows, segment).clamp_min_(vanishing(self.dtype))
        return _Loaded(qk.view(-1, *shape[2:]), self._load_one(self.v, rows, segment), g,
                       self._load_one(self.beta, rows, segment))  # fmt: skip

    def _store(self, target: Tensor, value: Tensor, rows: tuple[int, int], segment: tuple[int, int]) -> None:
        """Write [n, C, ...] back into token layout [rows, tokens, H, ...]."""
        size, (first, last) = self.plan.chunk, segment
        shape = (last - first, rows[1] - rows[0], self.heads, size, *value.shape[2:])
        order = (1, 0, 3, 2, 4) if value.dim() == 3 else (1, 0, 3, 2)
        piece = value.view(shape).permute(order)  # [rows, c, C, H, ...]
        start, stop = first * size, last * size
        if self.plan.gather is not None:
            assert self.plan.valid is not None
            valid = self.plan.valid[start:stop]
            flat = piece.flatten(1, 2)[:, valid]
            target.index_copy_(1, self.plan.gather[start:stop][valid], flat.to(target.dtype))
            return
        whole = (min(stop, self.tokens) - start) // size
        target[rows[0] : rows[1], start : start + whole * size].unflatten(1, (whole, size)).copy_(piece[:, :whole])
        rest = min(stop, self.tokens) - start - whole * size
        if rest:
            target[rows[0] : rows[1], start + whole * size : start + whole * size + rest].copy_(piece[:, whole, :rest])

    # --- gate-dependent part ----------------------------------------------------------------------------------------

    def _masks(self, segment: tuple[int, int], heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """(same document [n, C, C], reads the state [n, C, 1], writes it [n, C, 1], state survives [n, 1])."""
        document, (first, last) = self.plan.document, segment
        if document is None or not any(self.plan.cut[first:last]):
            return None
        here = document[first:last]
        before = here.new_full((last - first,), -1)
        if first:
            before[0] = document[first - 1, -1]
        before[1:] = here[:-1, -1]
        masks = (here[:, :, None] == here[:, None, :], (here == before[:, None]).unsqueeze(-1),
                 (here == here[:, -1:]).unsqueeze(-1), (here[:, -1] == before).unsqueeze(-1))  # fmt: skip
        same, reads, writes, survives = (m.to(self.dtype).repeat_interleave(heads, dim=0) for m in masks)
        return same, reads, writes, survives

    def _solve(self, x: _Loaded, segment: tuple[int, int]) -> _Solved:
        source = make_factors(x.qk, x.g)
        factors = source.factors
        masks = self._masks(segment, self.heads)
        if masks is not None:
            same, reads, writes, survives = masks
            factors = Factors(factors.pa * same.unsqueeze(1), factors.qke * reads.unsqueeze(1), factors.kd * writes,
                              factors.decay * survives)  # fmt: skip
        lower = factors.pa[:, 1] * x.beta.unsqueeze(-1)
        identity = torch.eye(self.plan.chunk, dtype=self.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        return _Solved(source, factors, inverse, masks)

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, initial: Tensor, keep: bool, want_final: bool) -> tuple[Tensor, list[Tensor], Tensor]:
        """Outputs [rows, tokens, H, V], chunk states per row group [chunks, R, K, V], final states by slot."""
        out = torch.empty_like(self.v)
        final = initial.clone()
        kept = []
        for rows in self._groups():
            r0, r1 = rows[0] * self.heads, rows[1] * self.heads
            states = initial.new_empty(self.plan.chunks if keep else self.span, r1 - r0, *initial.shape[2:])
            state = initial.new_zeros(r1 - r0, *initial.shape[2:])
            for segment in self._segments():
                x = self._load(rows, segment)
                solved = self._solve(x, segment)
                here = states[segment[0] : segment[1]] if keep else states[: segment[1] - segment[0]]
                written, state = self._scan(x, solved, segment, state, here, initial[:, r0:r1], final[:, r0:r1])
                o = torch.bmm(solved.factors.qke[:, 0], here.view(-1, *here.shape[2:]))
                o.baddbmm_(solved.factors.pa[:, 0], written)
                self._store(out, o, rows, segment)
            if keep:
                kept.append(states)
        return out, kept, final

    def _scan(self, x, solved, segment, state, states, initial, final) -> tuple[Tensor, Tensor]:
        """The sequential part: fills ``states`` (entering each chunk) and returns Vt [n, C, V] and the last state."""
        count = segment[1] - segment[0]
        split = lambda t: t.view(count, -1, *t.shape[1:])
        mixer = split(solved.inverse * x.beta.unsqueeze(-2))
        ke, kd = split(solved.factors.qke[:, 1]), split(solved.factors.kd).transpose(2, 3)
        decay, v = split(solved.factors.decay).unsqueeze(-1), split(x.v)
        written = torch.empty_like(v)
        for c in range(count):
            chunk = segment[0] + c
            if chunk in self.plan.starts:
                state = initial[self.plan.starts[chunk]]
            states[c] = state
            residual = torch.baddbmm(v[c], ke[c], state, alpha=-1)
            torch.bmm(mixer[c], residual, out=written[c])
            state = torch.baddbmm(decay[c] * state, kd[c], written[c])
            if chunk in self.plan.ends:
                final[self.plan.ends[chunk]] = state
        return written.view(x.v.shape), state

    # --- backward ---------------------------------------------------------------------------------------------------

    def backward(self, do: Tensor, dfinal: Tensor | None, kept: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Gradients of (q, k, v, g, beta) in token layout and of the initial states by slot."""
        do = do.reshape(self.v.shape)
        grads = [torch.empty_like(x) for x in (self.q, self.k, self.v, self.g, self.beta)]
        rows_all = self.rows * self.heads
        dinitial = do.new_zeros(self.plan.slots, rows_all, self.key_width, self.value_width, dtype=self.dtype)
        if dfinal is not None:
            for slot in self.plan.empty:
                dinitial[slot] = dfinal[slot]
        for rows, states in zip(self._groups(), kept, strict=True):
            r0, r1 = rows[0] * self.heads, rows[1] * self.heads
            dstate = torch.zeros_like(states[0]) if len(states) else None
            for segment in reversed(self._segments()):
                x = self._load(rows, segment)
                here = states[segment[0] : segment[1]]
                ends = None if dfinal is None else dfinal[:, r0:r1]
                pieces, dstate = self._segment_backward(x, self._load_one(do, rows, segment), here, segment, dstate,
                                                        ends, dinitial[:, r0:r1])  # fmt: skip
                for target, piece in zip(grads, pieces, strict=True):
                    self._store(target, piece, rows, segment)
        return grads, dinitial

    def _segment_backward(self, x, do, states, segment, dstate, dfinal, dinitial):
        solved = self._solve(x, segment)
        f = solved.factors
        s = states.view(-1, *states.shape[2:])
        residual = torch.baddbmm(x.v, f.qke[:, 1], s, alpha=-1)
        written = solved.inverse @ (residual * x.beta.unsqueeze(-1))  # Vt
        dwritten = f.pa[:, 0].transpose(1, 2) @ do
        dwritten, dscaled, dafter, dstate = self._scan_backward(x, solved, do, dwritten, segment, dstate, dfinal,
                                                                dinitial)  # fmt: skip
        dv = dscaled * x.beta.unsqueeze(-1)
        dpa = torch.empty_like(f.pa)
        torch.bmm(do, written.transpose(1, 2), out=dpa[:, 0])
        dlower = torch.bmm(dscaled, written.transpose(1, 2)).neg_()
        dbeta = (dscaled * residual).sum(-1) + (dlower * f.pa[:, 1]).sum(-1)
        torch.mul(dlower, x.beta.unsqueeze(-1), out=dpa[:, 1])
        dqke = torch.empty_like(f.qke)
        torch.bmm(do, s.transpose(1, 2), out=dqke[:, 0])
        torch.bmm(dv, s.transpose(1, 2), out=dqke[:, 1]).neg_()
        dkd = written @ dafter.transpose(1, 2)
        ddecay = (s * dafter).sum(-1)
        if solved.masks is not None:
            same, reads, writes, survives = solved.masks
            dpa.mul_(same.unsqueeze(1))
            dqke.mul_(reads.unsqueeze(1))
            dkd.mul_(writes)
            ddecay.mul_(survives)
        dqk, dg = solved.source.backward(dpa, dqke, dkd, ddecay)
        return (dqk[:, 0] * self.scale, dqk[:, 1], dv, dg, dbeta), dstate

    def _scan_backward(self, x, solved, do, dwritten, segment, dstate, dfinal, dinitial):
        """Reverse scan. Returns dVt, its image under (I + L)^-T, the gradient of the state after each chunk and dS."""
        count = segment[1] - segment[0]
        split = lambda t: t.view(count, -1, *t.shape[1:])
        f = solved.factors
        ke, kd, decay = split(f.qke[:, 1]).transpose(2, 3), split(f.kd), split(f.decay).unsqueeze(-1)
        transposed, beta = split(solved.inverse).transpose(2, 3), split(x.beta).unsqueeze(-1)
        dread = split(f.qke[:, 0].transpose(1, 2) @ do)
        dwritten = split(dwritten)
        dscaled = torch.empty_like(dwritten)
        dafter = torch.empty_like(dread)
        for c in reversed(range(count)):
            chunk = segment[0] + c
            if chunk in self.plan.ends:
                dstate = dstate.zero_() if dfinal is None else dfinal[self.plan.ends[chunk]]
            dafter[c] = dstate
            dwritten[c].baddbmm_(kd[c], dstate)
            torch.bmm(transposed[c], dwritten[c], out=dscaled[c])
            dstate = torch.baddbmm(decay[c] * dstate + dread[c], ke[c], beta[c] * dscaled[c], alpha=-1)
            if chunk in self.plan.starts:
                dinitial[self.plan.starts[chunk]] = dstate
        flat = lambda t: t.view(-1, *t.shape[2:])
        return flat(dwritten), flat(dscaled), flat(dafter), dstate
