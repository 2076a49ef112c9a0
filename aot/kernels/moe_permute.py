"""Rows of tokens put in the order of their experts: a stable counting sort of ids, and a copy of rows by 16 bytes.

Schedule "one_launch": a block for each token compares its ids with all ids, which it stages in shared memory, and so
knows where its rows go; one block more counts, and writes `ends` and `positions`. That is O(T^2), for few tokens.
Schedule "two_launches": one block of 1024 threads counts and writes those, then a block for each token copies.

A row is copied as it is, or with `scaling` quantised once and written as often as the token has experts (`quantise`).
With weights each of them is the token times the assignment's weight, rounded as tokens are, and quantised after that.
Whatever ids are, nothing is written outside the outputs: ids that are no expert's get no row. With `overlap`, from
Hopper on, kernels start while the one before ends, and nothing is read or written before it has.
"""

from typing import Any

import cutlass
from cutlass import cute

from .moe_rows import copy_row, quantise_blocks, quantise_row
from .moe_sizes import MOST_EXPERTS, MOST_TOP_K
from .quantise import allocate_maxima

_WARP = 32
_BITS = MOST_EXPERTS.bit_length() - 1  # of an expert's number
_STAGED = 2048  # ids that a block compares its own with at a time
_RANKING_THREADS = 1024
_AHEAD = 4  # ids of a thread whose loads are under way together
_NOWHERE = -1
_NO_EXPERT = 1 << 30  # behind every expert in order


class MoePermute:
    """The kernels for blocks of `threads` threads, a multiple of the warp size; `scaling` is a word of
    `runtime.numbers.scaling`; with an expert map they are `mapped`, and many tokens have no expert here."""

    def __init__(
        self, schedule: str, threads: int, overlap: bool = False, scaling: str = "none", mapped: bool = False
    ) -> None:
        self.one_launch, self.threads, self.overlap = schedule == "one_launch", threads, overlap
        self.scaling, self.mapped = scaling, mapped

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        ids: cute.Tensor,
        expert_map: Any,
        weights: Any,
        rows: cute.Tensor,
        ends: cute.Tensor,
        positions: cute.Tensor,
        scale: Any,
        stream: Any,
    ) -> None:
        """Launch over x (T, K), ids (T, top_k), expert_map (global experts) or None, weights (T, top_k) or None, rows
        (T * top_k, K), ends (experts), positions (T, top_k), and scale (T * top_k, K/128) or (T * top_k), or None."""
        tokens = cute.size(x, mode=[0])
        if cutlass.const_expr(self.one_launch):
            self.rank_and_copy((x, weights), ids, expert_map, (rows, scale), ends, positions).launch(
                grid=[tokens + 1, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.overlap
            )
        else:
            self.rank(ids, expert_map, ends, positions).launch(
                grid=[1, 1, 1], block=[_RANKING_THREADS, 1, 1], stream=stream, use_pdl=self.overlap
            )
            self.copy((x, weights), (rows, scale), positions).launch(
                grid=[tokens, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.overlap
            )

    @cute.kernel
    def rank(self, ids: cute.Tensor, expert_map: Any, ends: cute.Tensor, positions: cute.Tensor) -> None:
        """One block: write `ends` and `positions`."""
        self._wait()
        _rank_all(_RANKING_THREADS // _WARP, _flat(ids), expert_map, ends, _flat(positions))

    @cute.kernel
    def copy(self, x: Any, rows: Any, positions: cute.Tensor) -> None:
        """Copy the row of the token that the block's index names, of tokens and weights, to where `positions` says, of
        rows and scales."""
        self._wait()
        token, _, _ = cute.arch.block_idx()
        self._write(_of_token(x, token), rows, positions[token, None], cutlass.memory.SmemAllocator())

    @cute.kernel
    def rank_and_copy(
        self,
        x: Any,
        ids: cute.Tensor,
        expert_map: Any,
        rows: Any,
        ends: cute.Tensor,
        positions: cute.Tensor,
    ) -> None:
        """Block 0: write `ends` and `positions`. Block t + 1: copy the row of token t, of tokens and weights, to where
        its assignments go, of rows and scales."""
        self._wait()
        block, _, _ = cute.arch.block_idx()
        if block == 0:
            _rank_all(self.threads // _WARP, _flat(ids), expert_map, ends, _flat(positions))
        else:
            smem = cutlass.memory.SmemAllocator()
            places = smem.allocate_tensor(cutlass.Int32, cute.make_layout(MOST_TOP_K), 16)
            staged = smem.allocate_tensor(cutlass.Int32, cute.make_layout(_STAGED), 16)
            top_k = cute.size(ids, mode=[1])
            _rank_of_token(self.threads, _flat(ids), expert_map, cute.size(ends), (block - 1, top_k), places, staged)
            own = cute.make_tensor(places.iterator, cute.make_layout(top_k))
            self._write(_of_token(x, block - 1), rows, own, smem)

    @cute.jit
    def _write(self, row: Any, rows: Any, places: cute.Tensor, smem: Any) -> None:
        """The block writes `row`, (K) and perhaps weights (top_k), to each of the rows that `places` names, but for
        those below 0; where all may be, it does not read it if they are."""
        to, scale = rows
        maxima: Any = None
        if cutlass.const_expr(self.scaling == "row_column"):
            maxima = allocate_maxima(self.threads, smem)
        last = cutlass.Int32(_NOWHERE if self.mapped else 0)
        if cutlass.const_expr(self.mapped):
            for j in cutlass.range(cute.size(places), unroll=4):
                last = cutlass.max(last, places[j])
        if last >= 0:
            if cutlass.const_expr(self.scaling == "none"):
                copy_row(self.threads, row, to, places)
            elif cutlass.const_expr(self.scaling == "block"):
                quantise_blocks(self.threads, row, to, scale, places)
            else:
                quantise_row(self.threads, row, (to, scale), places, maxima)

    @cute.jit
    def _wait(self) -> None:
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()


def _flat(tensor: cute.Tensor) -> cute.Tensor:
    """All elements of a contiguous tensor in one dimension."""
    return cute.make_tensor(tensor.iterator, cute.make_layout(cute.size(tensor)))


@cute.jit
def _of_token(x: Any, token: Any) -> Any:
    """One row of tokens, and of their weights, or None where they have none."""
    tokens, weights = x
    row: Any = (tokens[token, None], None)
    if cutlass.const_expr(weights is not None):
        row = (tokens[token, None], weights[token, None])
    return row


@cute.jit
def _expert(ids: cute.Tensor, index: Any, expert_map: Any, experts: Any) -> cutlass.Int32:
    """Which expert here has assignment `index`, or `_NOWHERE`; that too where there is no such assignment."""
    expert = cutlass.Int32(_NOWHERE)
    if index < cute.size(ids):
        expert = ids[index]
    if cutlass.const_expr(expert_map is not None):
        known = cutlass.Int32(_NOWHERE)
        if expert >= 0 and expert < cute.size(expert_map):
            known = expert_map[expert]
        expert = known
    if expert < 0 or expert >= experts:
        expert = cutlass.Int32(_NOWHERE)
    return expert


@cute.jit
def _experts_from(ids: cute.Tensor, index: Any, step: Any, expert_map: Any, experts: Any, found: cute.Tensor) -> None:
    """Fill `found` with what `_expert` says of assignments `index`, `index` + `step` and so on; no load waits for
    another but for the map's."""
    count = cute.size(ids)
    for i in cutlass.range_constexpr(_AHEAD):
        found[i] = ids[cutlass.min(index + i * step, count - 1)]
    if cutlass.const_expr(expert_map is not None):
        known = cute.make_rmem_tensor((_AHEAD,), cutlass.Int32)
        last = cute.size(expert_map) - 1
        for i in cutlass.range_constexpr(_AHEAD):
            known[i] = expert_map[cutlass.max(cutlass.min(found[i], last), 0)]
        for i in cutlass.range_constexpr(_AHEAD):
            is_known = (found[i] >= 0) & (found[i] <= last)
            found[i] = cutlass.select_(is_known, known[i], cutlass.Int32(_NOWHERE))
    for i in cutlass.range_constexpr(_AHEAD):
        is_here = (found[i] >= 0) & (found[i] < experts) & (index + i * step < count)
        found[i] = cutlass.select_(is_here, found[i], cutlass.Int32(_NOWHERE))


@cute.jit
def _rank_of_token(
    threads: cutlass.Constexpr,
    ids: cute.Tensor,
    expert_map: Any,
    experts: cutlass.Int32,
    token: Any,
    places: cute.Tensor,
    staged: cute.Tensor,
) -> None:
    """The block fills `places` with the rows of one token's assignments, or -1; `token` is its number, and top_k.

    An assignment's row is the number of those before it in the order of experts, then of assignments. Each warp counts
    for some of the token's, over all ids, `_STAGED` of them at a time."""
    thread, _, _ = cute.arch.thread_idx()
    number, top_k = token
    warp, lane = thread // _WARP, cute.arch.lane_idx()
    count, first_own = cute.size(ids), number * top_k
    others = cute.make_rmem_tensor((_AHEAD,), cutlass.Int32)
    for first in cutlass.range(0, count, _STAGED, unroll=1):
        cute.arch.sync_threads()  # the ids before were read
        staged_now = cutlass.min(count - first, _STAGED)
        for base in cutlass.range(thread, staged_now, threads * _AHEAD, unroll=1):
            _experts_from(ids, first + base, threads, expert_map, experts, others)
            for i in cutlass.range_constexpr(_AHEAD):
                if base + i * threads < staged_now:
                    staged[base + i * threads] = cutlass.select_(others[i] < 0, cutlass.Int32(_NO_EXPERT), others[i])
        cute.arch.sync_threads()
        for j in cutlass.range(warp, top_k, threads // _WARP, unroll=1):
            expert, before = _expert(ids, first_own + j, expert_map, experts), cutlass.Int32(0)
            for i in cutlass.range(lane, staged_now, _WARP, unroll=4):
                bound = cutlass.select_(first + i < first_own + j, expert + 1, expert)
                before += cutlass.select_(staged[i] < bound, cutlass.Int32(1), cutlass.Int32(0))
            before = cute.arch.warp_redux_sync(before, "add")
            if lane == 0:
                if first > 0:
                    before += places[j]
                places[j] = cutlass.select_(expert < 0, cutlass.Int32(_NOWHERE), before)
    cute.arch.sync_threads()


@cute.jit
def _rank_all(
    warps: cutlass.Constexpr, ids: cute.Tensor, expert_map: Any, ends: cute.Tensor, positions: cute.Tensor
) -> None:
    """The block, of so many warps, writes `ends` (experts) and `positions` (T * top_k).

    Each warp has some of the assignments that follow each other. It counts those of each expert; where each expert's
    rows begin, and in these each warp's, is added up; then it hands its assignments their rows, 32 at a time."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // _WARP, cute.arch.lane_idx()
    threads = warps * _WARP
    smem = cutlass.memory.SmemAllocator()
    next_row = smem.allocate_tensor(cutlass.Int32, cute.make_layout((MOST_EXPERTS, warps)), 16)
    experts, count = cute.size(ends), cute.size(ids)
    each = cute.ceil_div(cute.ceil_div(count, _WARP), warps) * _WARP
    first = warp * each
    last = cutlass.min(first + each, count)

    for expert in cutlass.range(thread, experts, threads):
        for other in cutlass.range_constexpr(warps):
            next_row[expert, other] = cutlass.Int32(0)
    cute.arch.sync_threads()
    found = cute.make_rmem_tensor((_AHEAD,), cutlass.Int32)
    for base in cutlass.range(first + lane, last, _WARP * _AHEAD, unroll=1):
        _experts_from(ids, base, _WARP, expert_map, experts, found)
        for i in cutlass.range_constexpr(_AHEAD):
            expert = found[i]
            if expert >= 0 and base + i * _WARP < last:
                cute.arch.atomic_add((next_row.iterator + (warp * MOST_EXPERTS + expert)).llvm_ptr, cutlass.Int32(1))
    cute.arch.sync_threads()
    _add_up(warps, next_row, ends, smem)
    cute.arch.sync_threads()

    for base in cutlass.range(first, last, _WARP * _AHEAD, unroll=1):
        _experts_from(ids, base + lane, _WARP, expert_map, experts, found)
        for i in cutlass.range_constexpr(_AHEAD):
            index = base + i * _WARP + lane
            # Behind the warp's assignments are others'.
            expert = cutlass.select_(index < last, found[i], cutlass.Int32(_NOWHERE))
            alike = _lanes_alike(expert)
            before = cute.arch.popc(alike & cute.arch.lanemask_lt())
            place = cutlass.Int32(_NOWHERE)
            if expert >= 0:
                place = next_row[expert, warp] + cutlass.Int32(before)
            cute.arch.sync_warp()
            if expert >= 0 and before == 0:
                next_row[expert, warp] = place + cutlass.Int32(cute.arch.popc(alike))
            cute.arch.sync_warp()
            if index < last:
                positions[index] = place


@cute.jit
def _lanes_alike(expert: cutlass.Int32) -> cutlass.Int32:
    """A bit for each lane of the warp that has the same expert; where this lane has none, nothing that matters.

    Bit by bit: an instruction that matches whole numbers takes as much longer as they differ more."""
    alike = cute.arch.vote_ballot_sync(expert >= 0)
    for bit in cutlass.range_constexpr(_BITS):
        is_set = (expert >> bit) & 1 != 0
        lanes = cute.arch.vote_ballot_sync(is_set)
        alike = alike & cutlass.select_(is_set, lanes, ~lanes)
    return alike


@cute.jit
def _add_up(warps: cutlass.Constexpr, next_row: cute.Tensor, ends: cute.Tensor, smem: Any) -> None:
    """From how many assignments each warp has of each expert to the first row of each, in `next_row` (experts, warps);
    and `ends`. Experts are added up 32 at a time, and then the sums of these."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // _WARP, cute.arch.lane_idx()
    experts = cute.size(ends)
    begins = smem.allocate_tensor(cutlass.Int32, cute.make_layout(MOST_EXPERTS), 16)
    lasts = smem.allocate_tensor(cutlass.Int32, cute.make_layout(MOST_EXPERTS), 16)
    sums = smem.allocate_tensor(cutlass.Int32, cute.make_layout(MOST_EXPERTS // _WARP), 16)
    for chunk in cutlass.range(warp, cute.ceil_div(experts, _WARP), warps, unroll=1):
        expert = chunk * _WARP + lane
        total = cutlass.Int32(0)
        if expert < experts:
            for other in cutlass.range_constexpr(warps):
                found = next_row[expert, other]
                next_row[expert, other] = total
                total += found
        end = total
        for step in cutlass.range_constexpr(5):
            lower = cute.arch.shuffle_sync_up(end, 1 << step)
            if lane >= 1 << step:
                end += lower
        if expert < experts:
            begins[expert], lasts[expert] = end - total, end
        if lane == _WARP - 1:
            sums[chunk] = end
    cute.arch.sync_threads()
    for expert in cutlass.range(thread, experts, warps * _WARP, unroll=1):
        before = cutlass.Int32(0)
        for chunk in cutlass.range(expert // _WARP, unroll=1):
            before += sums[chunk]
        ends[expert] = before + lasts[expert]
        for other in cutlass.range_constexpr(warps):
            next_row[expert, other] = next_row[expert, other] + before + begins[expert]
