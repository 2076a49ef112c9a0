"""Parts of kernels as functions that can be launched alone: a spec, for `tests.ptx.compiled`.

Annotations are evaluated where they stand, as the DSL asks for them and what they name is imported within functions.
"""

from typing import Any

from aot.spec import Function, Scalar, Stream, Tensor

UNTOUCHED = -7777
TILES = 3  # of `quantised_tiles`
TOKENS = 8  # of a tile of groups


def add_up(masked: bool, pairs: bool) -> Any:
    """One warp adds up where rows and tiles of groups begin, or pairs of tiles, and writes all that is there of
    either."""
    import cutlass
    from cutlass import cute

    from aot.kernels import groups
    from aot.kernels.sm90.sizes import WARP

    @cute.kernel
    def kernel(
        ends: cute.Tensor, m: cutlass.Int32, across: cutlass.Int32, rows: cute.Tensor, tiles: cute.Tensor
    ) -> None:
        found = groups.allocate(cutlass.memory.SmemAllocator())
        lane = cute.arch.lane_idx()
        for i in cutlass.range(lane, cute.size(rows), WARP):
            found.rows[i], found.tiles[i] = cutlass.Int32(UNTOUCHED), cutlass.Int32(UNTOUCHED)
        cute.arch.sync_warp()
        groups.add_up(TOKENS, masked, found, ends, m, across, pairs)
        cute.arch.sync_warp()
        for i in cutlass.range(lane, cute.size(rows), WARP):
            rows[i], tiles[i] = found.rows[i], found.tiles[i]

    @cute.jit
    def launch(
        ends: cute.Tensor, m: cutlass.Int32, across: cutlass.Int32, rows: cute.Tensor, tiles: cute.Tensor, stream: Any
    ) -> None:
        kernel(ends, m, across, rows, tiles).launch(grid=[1, 1, 1], block=[WARP, 1, 1], stream=stream)

    return launch


def quantised_tiles() -> Any:
    """Both consumer warp groups quantise tiles of 64 x 128 one after the other, as an epilogue does."""
    import cutlass
    from cutlass import cute

    from aot.kernels.group_sizes import GROUPS_BYTES
    from aot.kernels.sm90.grouped.plan import plan_of
    from aot.kernels.sm90.persistent.epilogue_operands import EpilogueOperands
    from aot.kernels.sm90.persistent.form import Form
    from aot.kernels.sm90.persistent.output import EpilogueTile
    from aot.kernels.sm90.persistent.quantised_output import quantised
    from aot.kernels.sm90.persistent.scheduler import TileCoord

    options = {"schedule": "cooperative", "swap": False, "tile_m": 64, "tile_n": 128, "cluster_n": 1}
    plan = plan_of(options | {"overlap": "serial"}, Form("e4m3", "e4m3", scheduler_bytes=GROUPS_BYTES))

    @cute.kernel
    def kernel(x: cute.Tensor, end: cutlass.Int32, y: cute.Tensor, scale: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        largest = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(128), 16)
        extras = None, None, None, None, scale
        operands = EpilogueOperands.of(plan, (end, end), extras, largest.iterator, thread)
        columns = 64 * operands.group + operands.column
        for number in cutlass.range_constexpr(TILES):
            places = [
                (operands.row + 8 * half, columns + 8 * j + i) for j in range(8) for half in range(2) for i in range(2)
            ]
            coord = TileCoord(cutlass.Int32(0), cutlass.Int32(number), cutlass.Int32(0), cutlass.Int32(0), end)
            values = [x[number, row, column] for row, column in places]
            for (row, column), value in zip(
                places, quantised(operands, values, EpilogueTile(coord, 0, 0)), strict=True
            ):
                y[number, row, column] = value

    @cute.jit
    def launch(x: cute.Tensor, end: cutlass.Int32, y: cute.Tensor, scale: cute.Tensor, stream: Any) -> None:
        kernel(x, end, y, scale).launch(grid=[1, 1, 1], block=[256, 1, 1], stream=stream)

    return launch


functions = [
    Function(
        "add_up",
        [
            Tensor("ends", "i32", ("groups",)),
            Scalar("m", "i32"),
            Scalar("across", "i32"),
            Tensor("rows", "i32", ("room",), role="out"),
            Tensor("tiles", "i32", ("room",), role="out"),
            Stream(),
        ],
        make=add_up,
        variants={
            rows + of: {"masked": rows == "masked", "pairs": bool(of)}
            for rows in ("contiguous", "masked")
            for of in ("", "_pairs")
        },
    ),
    Function(
        "quantised_tiles",
        [
            Tensor("x", "f32", (TILES, 64, 128)),
            Scalar("end", "i32"),
            Tensor("y", "f32", (TILES, 64, 128), role="out"),
            Tensor("scale", "f32", (64, "columns"), role="out"),
            Stream(),
        ],
        make=quantised_tiles,
    ),
]
