"""Extraction refuses, by name, what a launch program cannot express; handwritten host functions, no compiler."""

from __future__ import annotations

import re

import pytest

from aot.compile.host.ir import HostProgram, extract
from aot.compile.host.types import HostIRError
from runtime.device.launch import Launch
from runtime.errors import ProgramError
from runtime.program.arguments import Argument, ScalarArgument, StreamArgument, Symbol, TensorArgument
from runtime.program.program import Program

TREE: list[Argument] = [TensorArgument("x", "f32", ("m",), (1,), 16), StreamArgument("stream")]
SYMBOLS = {"m": Symbol(32, 1)}
CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
LAUNCH = """\
  %kp = "llvm.mlir.addressof"() <{global_name = @kernels_k}> : () -> !llvm.ptr
  %k = "llvm.load"(%kp) <{ordering = 0 : i64}> : (!llvm.ptr) -> !llvm.ptr
  %s = "llvm.call"(%config, %k, %params) <{callee = @_cudaLaunchKernelEx}> : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32"""


def host(body: str, grid: str = "%m", parameter: str = "i32", value: str = "%m", launch: str = LAUNCH) -> str:
    """A host function over x (m): `body` first, then one launch of kernel k on `grid` with one parameter."""
    fields = [(f"0, {i // 3}, {i % 3}", "i32", grid if i == 0 else "%one") for i in range(6)]
    fields += [("0, 2", "i64", "%wide"), ("0, 3", "!llvm.ptr", "%stream"), ("0, 5", "i32", "%zero")]
    stores = "\n".join(
        f'  %f{i} = "llvm.getelementptr"(%config) <{{elem_type = {CONFIG}, noWrapFlags = 0 : i32, '
        f"rawConstantIndices = array<i32: {path}>}}> : (!llvm.ptr) -> !llvm.ptr\n"
        f'  "llvm.store"({source}, %f{i}) <{{ordering = 0 : i64}}> : ({kind}, !llvm.ptr) -> ()'
        for i, (path, kind, source) in enumerate(fields)
    )
    return f"""\
"llvm.func"() <{{sym_name = "host"}}> ({{
^bb0(%x: !llvm.struct<(ptr<1>, struct<(i32)>)>, %stream: !llvm.ptr):
  %zero = "llvm.mlir.constant"() <{{value = 0 : i32}}> : () -> i32
  %one = "llvm.mlir.constant"() <{{value = 1 : i32}}> : () -> i32
  %wide = "llvm.mlir.constant"() <{{value = 0 : i64}}> : () -> i64
  %sixteen = "llvm.mlir.constant"() <{{value = 16 : i64}}> : () -> i64
  %p = "llvm.extractvalue"(%x) <{{position = array<i64: 0>}}> : (!llvm.struct<(ptr<1>, struct<(i32)>)>) -> !llvm.ptr<1>
  %m = "llvm.extractvalue"(%x) <{{position = array<i64: 1, 0>}}> : (!llvm.struct<(ptr<1>, struct<(i32)>)>) -> i32
  %address = "llvm.ptrtoint"(%p) : (!llvm.ptr<1>) -> i64
{body}
  %config = "llvm.alloca"(%one) <{{elem_type = {CONFIG}}}> : (i32) -> !llvm.ptr
{stores}
  %params = "llvm.alloca"(%one) <{{elem_type = !llvm.ptr}}> : (i32) -> !llvm.ptr
  %param = "llvm.alloca"(%one) <{{elem_type = {parameter}}}> : (i32) -> !llvm.ptr
  "llvm.store"({value}, %param) <{{ordering = 0 : i64}}> : ({parameter}, !llvm.ptr) -> ()
  "llvm.store"(%param, %params) <{{ordering = 0 : i64}}> : (!llvm.ptr, !llvm.ptr) -> ()
{launch}
  "llvm.return"(%zero) : (i32) -> ()
}}) : () -> ()
"""


def program(text: str) -> HostProgram:
    return extract(text, TREE, SYMBOLS)


def plan(text: str, m: int) -> Launch:
    return Program.from_json(program(text).program.to_json(), 1).plan([m])[0]


def test_a_launch_is_extracted() -> None:
    launch = plan(host(""), 7)
    assert launch.grid == (7, 1, 1)
    assert launch.parameters[:4] == (7).to_bytes(4, "little")


def test_a_pointer_becomes_a_slot() -> None:
    slot = plan(host("", parameter="!llvm.ptr<1>", value="%p"), 7).slots[0]
    assert (slot.offset, slot.tma, slot.pointer, slot.addend) == (0, False, 0, 0)


def test_a_pointer_with_an_addend_keeps_it() -> None:
    body = """\
  %mw = "llvm.sext"(%m) : (i32) -> i64
  %sum = "llvm.add"(%address, %mw) <{overflowFlags = 0 : i32}> : (i64, i64) -> i64"""
    assert plan(host(body, parameter="i64", value="%sum"), 7).slots[0].addend == 7


IF = """\
  "llvm.cond_br"(%c)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 0, 0>}> : (i1) -> ()
^bb1:
  "llvm.br"(%one)[^bb3] : (i32) -> ()
^bb2:
  "llvm.br"(%m)[^bb3] : (i32) -> ()
^bb3(%r: i32):"""
IS_ZERO = '  %c = "llvm.icmp"(%m, %zero) <{predicate = 0 : i64}> : (i32, i32) -> i1\n'


def test_a_run_time_condition_becomes_a_select() -> None:
    text = host(IS_ZERO + IF, grid="%r")
    assert [plan(text, m).grid[0] for m in (0, 5)] == [1, 5]


def test_a_run_time_loop_is_bounded() -> None:
    body = """\
  "llvm.br"(%one)[^bb1] : (i32) -> ()
^bb1(%i: i32):
  %c = "llvm.icmp"(%i, %m) <{predicate = 6 : i64}> : (i32, i32) -> i1
  "llvm.cond_br"(%c)[^bb2, ^bb3] <{operandSegmentSizes = array<i32: 1, 0, 0>}> : (i1) -> ()
^bb2:
  %next = "llvm.add"(%i, %one) <{overflowFlags = 0 : i32}> : (i32, i32) -> i32
  "llvm.br"(%next)[^bb1] : (i32) -> ()
^bb3:"""
    text = host(body, grid="%i")
    assert plan(text, 40).grid[0] == 40
    with pytest.raises(ProgramError, match="did not end"):
        plan(text, 1000)


def binary(op: str, a: str, b: str, width: str = "i64") -> str:
    return f'  %r = "llvm.{op}"({a}, {b}) <{{overflowFlags = 0 : i32}}> : ({width}, {width}) -> {width}'


POINTER_IF = """\
  %bit = "llvm.icmp"(%address, %wide) <{predicate = 0 : i64}> : (i64, i64) -> i1"""
LAUNCH_IF = (
    """\
  "llvm.cond_br"(%c)[^bb1, ^bb2] <{operandSegmentSizes = array<i32: 1, 0, 0>}> : (i1) -> ()
^bb1:
"""
    + LAUNCH
    + """
  "llvm.br"()[^bb2] : () -> ()
^bb2:"""
)

REFUSED = {
    "a pointer in the grid": (
        host('  %g = "llvm.trunc"(%address) : (i64) -> i32', grid="%g"),
        "host arithmetic on a tensor's address: trunc",
    ),
    "a comparison of pointers": (host(POINTER_IF), "compares pointers"),
    "a multiplied pointer": (host(binary("mul", "%address", "%sixteen")), "host arithmetic on a tensor's address: mul"),
    "a difference of pointers": (
        host(binary("sub", "%address", "%address")),
        "host arithmetic on a tensor's address: sub",
    ),
    "a masked pointer": (host(binary("and", "%address", "%sixteen")), "host arithmetic on a tensor's address: and"),
    "half a descriptor word": (
        host(binary("udiv", "%address", "%sixteen"), parameter="i64", value="%r"),
        "parameter 0 holds something that is no integer and no pointer",
    ),
    "a launch under a condition": (host(IS_ZERO, launch=LAUNCH_IF), "a launch under a run-time condition"),
    "no launch": (host("", launch=""), "launches nothing"),
    "a read of a tensor": (
        host('  %v = "llvm.load"(%p) <{ordering = 0 : i64}> : (!llvm.ptr<1>) -> i32'),
        "reads a tensor's memory",
    ),
    "a write to a tensor": (
        host('  "llvm.store"(%m, %p) <{ordering = 0 : i64}> : (i32, !llvm.ptr<1>) -> ()'),
        "writes to memory that is not its own",
    ),
    "an unknown operation": (
        host('  %v = "llvm.fadd"(%m, %m) : (i32, i32) -> i32'),
        "unknown host operation llvm.fadd",
    ),
    "another call": (
        host('  %v = "llvm.call"(%m) <{callee = @printf}> : (i32) -> i32'),
        "the host function calls printf",
    ),
    "an unknown flag": (
        host('  %r = "llvm.add"(%m, %m) <{overflowFlags = 8 : i32}> : (i32, i32) -> i32'),
        "unknown overflow flags 8",
    ),
    "an unknown type": (host('  %v = "llvm.mlir.poison"() : () -> tensor<4xf32>'), "type"),
    "text that is no operation": (host("  garbage"), "cannot read the operation"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_extraction_refuses(text: str, message: str) -> None:
    with pytest.raises(HostIRError, match=re.escape(message)):
        program(text)


def test_the_argument_tree_must_fit_the_signature() -> None:
    with pytest.raises(HostIRError, match="more arguments than the argument tree"):
        extract(host(""), TREE[:1], SYMBOLS)
    with pytest.raises(HostIRError, match="more inputs than the host function"):
        extract(host(""), [*TREE, ScalarArgument("eps", "f32")], SYMBOLS)
    with pytest.raises(HostIRError, match="bits wide"):
        extract(host(""), TREE, {"m": Symbol(64, 1)})
