"""Each pattern by itself on a few lines of IR, and the driver that applies patterns."""

from __future__ import annotations

import pytest
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.pattern_rewriter import PatternRewriter, PatternRewriteWalker

from qcompiler.errors import FormatError, PassError
from qcompiler.ir.module import main_func, path_of
from qcompiler.ir.text import parse_module, print_module
from qcompiler.passes import canonicalize
from qcompiler.passes.loops import canonical as nests
from qcompiler.passes.rewriting import Pattern, pattern, rewrite
from qcompiler.passes.views import canonical, channels_last, view_rules

HEAD = """
builtin.module {
  func.func @main(%x: tensor<4x8xf32>, %cube: tensor<4x4x4xf32>, %row: tensor<8xf32>, %image: tensor<1x6x6x4xf32>,
                  %a: f32, %b: f32, %h: bf16, %n: i32, %c: i1) {
    %e = tensor.empty() : tensor<4x8xf32>
    %ec = tensor.empty() : tensor<4x4x4xf32>
    %ei = tensor.empty() : tensor<1x4x6x6xf32>
"""


def module_of(lines: str) -> ModuleOp:
    return parse_module(f"{HEAD}{lines}\n    func.return\n  }}\n}}")


def read(value: str, type_: str) -> str:
    return f'"test.op"({value}) : ({type_}) -> ()'


def transposed(result: str, source: str, order: str) -> str:
    return f"{result} = linalg.transpose ins({source} : {CUBE}) outs(%ec : {CUBE}) permutation = [{order}]\n"


def nest(result: str, inputs: str, types: str, maps: str, body: str) -> str:
    """A nest over 4 x 8: `body` computes from %0, %1, … and yields."""
    count = types.count(",") + 1
    arguments = ", ".join(f"%{n}: f32" for n in range(count + 1))
    return (
        f"{result} = linalg.generic {{indexing_maps = [{maps}, affine_map<(i, j) -> (i, j)>], "
        f'iterator_types = ["parallel", "parallel"]}} ins({inputs} : {types}) outs(%e : {X}) {{\n'
        f"^bb0({arguments}):\n{body}\n}} -> {X}\n"
    )


X, CUBE, ROW, IMAGE = "tensor<4x8xf32>", "tensor<4x4x4xf32>", "tensor<8xf32>", "tensor<1x6x6x4xf32>"
FLAT = "tensor<64xf32>"
STRAIGHT, BY_COLUMN = "affine_map<(i, j) -> (i, j)>", "affine_map<(i, j) -> (j)>"
SUM = "%3 = arith.addf %0, %1 : f32\nlinalg.yield %3 : f32"
COPY = "linalg.yield %0 : f32"
BROADCAST = f"%y = linalg.broadcast ins(%row : {ROW}) outs(%e : {X}) dimensions = [0]\n"
TWO_INPUTS = (f"{X}, {X}", f"{STRAIGHT}, {STRAIGHT}")
ORDER = "permutation = [0, 3, 1, 2]"
IMAGE_FIRST = f"%y = linalg.transpose ins(%image : {IMAGE}) outs(%ei : tensor<1x4x6x6xf32>) {ORDER}\n"

CASES: dict[str, tuple[Pattern, str, str]] = {
    # views
    "transposes that cancel": (
        canonical.join_transposes,
        transposed("%s", "%cube", "1, 2, 0") + transposed("%t", "%s", "2, 0, 1") + read("%t", CUBE),
        read("%cube", CUBE),
    ),
    "transposes in the order they apply": (
        canonical.join_transposes,
        transposed("%s", "%cube", "1, 2, 0") + transposed("%t", "%s", "0, 2, 1") + read("%t", CUBE),
        f"%made = tensor.empty() : {CUBE}\n%t = linalg.transpose ins(%cube : {CUBE}) outs(%made : {CUBE}) "
        "permutation = [1, 0, 2]\n" + read("%t", CUBE),
    ),
    "reshapes back to the source": (
        canonical.join_reshapes,
        f"%s = tensor.collapse_shape %x [[0, 1]] : {X} into tensor<32xf32>\n"
        f"%t = tensor.expand_shape %s [[0, 1]] output_shape [4, 8] : tensor<32xf32> into {X}\n" + read("%t", X),
        read("%x", X),
    ),
    "a reshape of a reshape": (
        canonical.join_reshapes,
        f"%s = tensor.collapse_shape %cube [[0, 1], [2]] : {CUBE} into tensor<16x4xf32>\n"
        f"%t = tensor.collapse_shape %s [[0, 1]] : tensor<16x4xf32> into {FLAT}\n" + read("%t", FLAT),
        f"%t = tensor.collapse_shape %cube [[0, 1, 2]] : {CUBE} into {FLAT}\n" + read("%t", FLAT),
    ),
    "a slice of everything": (
        canonical.drop_whole_slice,
        f"%s = tensor.extract_slice %x[0, 0] [4, 8] [1, 1] : {X} to {X}\n" + read("%s", X),
        read("%x", X),
    ),
    "a slice of a slice": (
        view_rules.join_slices,
        f"%s = tensor.extract_slice %x[1, 0] [3, 4] [1, 2] : {X} to tensor<3x4xf32>\n"
        "%t = tensor.extract_slice %s[1, 1] [2, 1] [1, 3] : tensor<3x4xf32> to tensor<2x1xf32>\n"
        + read("%t", "tensor<2x1xf32>"),
        f"%t = tensor.extract_slice %x[2, 2] [2, 1] [1, 6] : {X} to tensor<2x1xf32>\n" + read("%t", "tensor<2x1xf32>"),
    ),
    "a broadcast of a broadcast": (
        canonical.join_broadcasts,
        f"{BROADCAST}%made = tensor.empty() : tensor<4x4x8xf32>\n"
        f"%z = linalg.broadcast ins(%y : {X}) outs(%made : tensor<4x4x8xf32>) dimensions = [1]\n"
        + read("%z", "tensor<4x4x8xf32>"),
        "%made = tensor.empty() : tensor<4x4x8xf32>\n"
        f"%z = linalg.broadcast ins(%row : {ROW}) outs(%made : tensor<4x4x8xf32>) dimensions = [0, 1]\n"
        + read("%z", "tensor<4x4x8xf32>"),
    ),
    "a cast to the same type": (
        canonical.drop_same_type,
        f"%s = tensor.cast %x : {X} to {X}\n" + read("%s", X),
        read("%x", X),
    ),
    "a concatenation of one": (
        canonical.drop_concat_of_one,
        f"%s = tensor.concat dim(0) %x : ({X}) -> {X}\n" + read("%s", X),
        read("%x", X),
    ),
    "a transpose of units": (
        view_rules.reshape_for_transposed_units,
        "%u = tensor.extract_slice %x[0, 0] [1, 8] [1, 1] : tensor<4x8xf32> to tensor<1x8xf32>\n"
        "%eu = tensor.empty() : tensor<8x1xf32>\n"
        "%t = linalg.transpose ins(%u : tensor<1x8xf32>) outs(%eu : tensor<8x1xf32>) permutation = [1, 0]\n"
        + read("%t", "tensor<8x1xf32>"),
        "%u = tensor.extract_slice %x[0, 0] [1, 8] [1, 1] : tensor<4x8xf32> to tensor<1x8xf32>\n"
        "%s = tensor.collapse_shape %u [[0, 1]] : tensor<1x8xf32> into tensor<8xf32>\n"
        "%t = tensor.expand_shape %s [[0, 1]] output_shape [8, 1] : tensor<8xf32> into tensor<8x1xf32>\n"
        + read("%t", "tensor<8x1xf32>"),
    ),
    "a reshape of a fill": (
        view_rules.fold_view_of_fill,
        f"%f = linalg.fill ins(%a : f32) outs(%e : {X}) -> {X}\n"
        f"%t = tensor.collapse_shape %f [[0, 1]] : {X} into tensor<32xf32>\n" + read("%t", "tensor<32xf32>"),
        "%made = tensor.empty() : tensor<32xf32>\n"
        "%t = linalg.fill ins(%a : f32) outs(%made : tensor<32xf32>) -> tensor<32xf32>\n"
        + read("%t", "tensor<32xf32>"),
    ),
    # readers of views
    "a broadcast that a nest reads": (
        view_rules.fold_into_maps,
        BROADCAST + nest("%z", "%x, %y", *TWO_INPUTS, SUM) + read("%z", X),
        nest("%z", "%x, %row", f"{X}, {ROW}", f"{STRAIGHT}, {BY_COLUMN}",
             SUM) + read("%z", X),
    ),
    # images
    "a transpose to channels first and back": (
        channels_last.cancel_transposes,
        IMAGE_FIRST + f"%el = tensor.empty() : {IMAGE}\n"
        f"%z = linalg.transpose ins(%y : tensor<1x4x6x6xf32>) outs(%el : {IMAGE}) permutation = [0, 2, 3, 1]\n"
        + read("%z", IMAGE),
        read("%image", IMAGE),
    ),
    "a slice of an image that lies channels last": (
        channels_last.store_slice,
        IMAGE_FIRST + "%z = tensor.extract_slice %y[0, 0, 1, 2] [1, 2, 5, 4] [1, 1, 1, 1] : "
        "tensor<1x4x6x6xf32> to tensor<1x2x5x4xf32>\n" + read("%z", "tensor<1x2x5x4xf32>"),
        "%z = tensor.extract_slice %image[0, 1, 2, 0] [1, 5, 4, 2] [1, 1, 1, 1] : "
        "tensor<1x6x6x4xf32> to tensor<1x5x4x2xf32>\n%el = tensor.empty() : tensor<1x2x5x4xf32>\n"
        "%t = linalg.transpose ins(%z : tensor<1x5x4x2xf32>) outs(%el : tensor<1x2x5x4xf32>) "
        "permutation = [0, 3, 1, 2]\n"
        + read("%t", "tensor<1x2x5x4xf32>"),
    ),
    # scalars
    "narrowing what was widened": (
        nests.drop_widening,
        "%w = arith.extf %h : bf16 to f32\n%y = arith.truncf %w : f32 to bf16\n" + read("%y", "bf16"),
        read("%h", "bf16"),
    ),
    "one times a number": (
        nests.drop_neutral,
        "%one = arith.constant 1.0 : f32\n%y = arith.mulf %one, %a : f32\n" + read("%y", "f32"),
        read("%a", "f32"),
    ),
    "the larger of a number and minus infinity": (
        nests.drop_neutral,
        "%low = arith.constant 0xff800000 : f32\n%y = arith.maximumf %low, %a : f32\n" + read("%y", "f32"),
        read("%a", "f32"),
    ),
    "a choice between equals": (
        nests.decide_select,
        "%y = arith.select %c, %a, %a : f32\n" + read("%y", "f32"),
        read("%a", "f32"),
    ),
    "a choice by a constant": (
        nests.decide_select,
        "%no = arith.constant false\n%y = arith.select %no, %a, %b : f32\n" + read("%y", "f32"),
        read("%b", "f32"),
    ),
    "a sum of constants": (
        nests.fold_constants,
        "%p = arith.constant 3 : i32\n%q = arith.constant 4 : i32\n%y = arith.addi %p, %q : i32\n" + read("%y", "i32"),
        "%y = arith.constant 7 : i32\n" + read("%y", "i32"),
    ),
    "a function of a constant": (
        nests.fold_constants,
        "%p = arith.constant 4.0 : f32\n%y = math.sqrt %p : f32\n" + read("%y", "f32"),
        "%y = arith.constant 2.0 : f32\n" + read("%y", "f32"),
    ),
    # nests
    "an input that the body does not read": (
        nests.drop_unread_inputs,
        nest("%y", "%x, %row", f"{X}, {ROW}", f"{STRAIGHT}, {BY_COLUMN}",
             "%3 = arith.negf %0 : f32\nlinalg.yield %3 : f32") + read("%y", X),
        nest("%y", "%x", X, STRAIGHT, "%3 = arith.negf %0 : f32\nlinalg.yield %3 : f32") + read("%y", X),
    ),
    "a nest that copies": (
        nests.drop_copy,
        nest("%y", "%x", X, STRAIGHT, COPY) + read("%y", X),
        read("%x", X),
    ),
}  # fmt: skip

UNTOUCHED: dict[str, tuple[Pattern, str]] = {
    "one transpose": (canonical.join_transposes, transposed("%t", "%cube", "1, 2, 0") + read("%t", CUBE)),
    "a transpose that moves data": (
        view_rules.reshape_for_transposed_units, transposed("%t", "%cube", "1, 2, 0") + read("%t", CUBE)
    ),
    "a reshape that needs two ops": (
        canonical.join_reshapes,
        f"%s = tensor.collapse_shape %x [[0, 1]] : {X} into tensor<32xf32>\n"
        "%t = tensor.expand_shape %s [[0, 1]] output_shape [2, 16] : tensor<32xf32> into tensor<2x16xf32>\n"
        + read("%t", "tensor<2x16xf32>"),
    ),
    "a slice that leaves a row out": (
        canonical.drop_whole_slice,
        f"%s = tensor.extract_slice %x[0, 0] [3, 8] [1, 1] : {X} to tensor<3x8xf32>\n" + read("%s", "tensor<3x8xf32>"),
    ),
    "a fill with another reader": (
        view_rules.fold_view_of_fill,
        f"%f = linalg.fill ins(%a : f32) outs(%e : {X}) -> {X}\n"
        f"%t = tensor.collapse_shape %f [[0, 1]] : {X} into tensor<32xf32>\n"
        + read("%t", "tensor<32xf32>") + "\n" + read("%f", X),
    ),
    "widening what was narrowed": (
        nests.drop_widening,
        "%w = arith.truncf %a : f32 to bf16\n%y = arith.extf %w : bf16 to f32\n" + read("%y", "f32"),
    ),
    "narrowing to another type": (
        nests.drop_widening,
        "%w = arith.extf %h : bf16 to f32\n%y = arith.truncf %w : f32 to f16\n" + read("%y", "f16"),
    ),
    "a sum with plus zero, which turns -0.0 into 0.0": (
        nests.drop_neutral,
        "%zero = arith.constant 0.0 : f32\n%y = arith.addf %a, %zero : f32\n" + read("%y", "f32"),
    ),
    "the smaller of a number and minus infinity": (
        nests.drop_neutral,
        "%low = arith.constant 0xff800000 : f32\n%y = arith.minimumf %a, %low : f32\n" + read("%y", "f32"),
    ),
    "one over a number": (
        nests.drop_neutral,
        "%one = arith.constant 1.0 : f32\n%y = arith.divf %one, %a : f32\n" + read("%y", "f32"),
    ),
    "a sum of a constant and an argument": (
        nests.fold_constants,
        "%p = arith.constant 3 : i32\n%y = arith.addi %p, %n : i32\n" + read("%y", "i32"),
    ),
    "a nest that copies a row to every row": (
        nests.drop_copy, nest("%y", "%row", ROW, BY_COLUMN, COPY) + read("%y", X),
    ),
    "a nest that needs an unread input for its size": (
        nests.drop_unread_inputs,
        f"%z = linalg.generic {{indexing_maps = [{STRAIGHT}, {BY_COLUMN}], iterator_types = "
        f'["reduction", "parallel"]}} ins(%x : {X}) outs(%row : {ROW}) {{\n^bb0(%0: f32, %1: f32):\n'
        f"%2 = arith.addf %1, %1 : f32\nlinalg.yield %2 : f32\n}} -> {ROW}\n" + read("%z", ROW),
    ),
    "one broadcast": (canonical.join_broadcasts, BROADCAST + read("%y", X)),
    "a cast to another type": (
        canonical.drop_same_type,
        f"%s = tensor.cast %x : {X} to tensor<4x?xf32>\n" + read("%s", "tensor<4x?xf32>"),
    ),
    "a concatenation of two": (
        canonical.drop_concat_of_one,
        f"%s = tensor.concat dim(0) %x, %x : ({X}, {X}) -> tensor<8x8xf32>\n" + read("%s", "tensor<8x8xf32>"),
    ),
    "a choice by data": (
        nests.decide_select, "%y = arith.select %c, %a, %b : f32\n" + read("%y", "f32"),
    ),
}  # fmt: skip


def text_of(module: ModuleOp) -> str:
    """The module as text, without destinations that nothing reads."""
    module.verify()
    for op in list(main_func(module).body.block.ops):
        if op.name in ("tensor.empty", "arith.constant") and op.results[0].first_use is None:
            op.detach()
    for value in (value for op in module.walk() for value in op.results):
        value.name_hint = None
    return print_module(module)


@pytest.mark.parametrize("case", CASES)
def test_pattern(case: str) -> None:
    each, before, after = CASES[case]
    module = module_of(before)
    assert rewrite(main_func(module).body.block, [each]) == 1
    assert text_of(module) == text_of(module_of(after))


@pytest.mark.parametrize("case", UNTOUCHED)
def test_pattern_leaves_alone(case: str) -> None:
    each, lines = UNTOUCHED[case]
    module = module_of(lines)
    assert rewrite(main_func(module).body.block, [each]) == 0
    assert text_of(module) == text_of(module_of(lines))


@pytest.mark.parametrize("case", UNTOUCHED)
def test_xdsls_own_walker_applies_them_too(case: str) -> None:
    each, lines = UNTOUCHED[case]
    assert not PatternRewriteWalker(each).rewrite_module(module_of(lines))


def test_every_canonical_pattern_has_a_case_of_both_kinds() -> None:
    assert {each for each, _, _ in CASES.values()} >= set(canonicalize.PATTERNS)
    assert {each for each, _ in UNTOUCHED.values()} >= set(canonicalize.PATTERNS)


# --- the driver ------------------------------------------------------------------------------------------------------

CHAIN = """
    %p = arith.addf %a, %b {qc.path = "layer.0"} : f32
    %q = arith.addf %p, %b {qc.path = "layer.1"} : f32
    %r = arith.addf %q, %b {qc.path = "layer.2"} : f32
    "test.op"(%r) : (f32) -> ()
"""


@pattern
def add_to_multiply(op: arith.AddfOp, rewriter: PatternRewriter) -> SSAValue | None:
    return rewriter.insert(arith.MulfOp(op.lhs, op.rhs)).result


@pattern
def multiply_to_add(op: arith.MulfOp, rewriter: PatternRewriter) -> SSAValue | None:
    return rewriter.insert(arith.AddfOp(op.lhs, op.rhs)).result


def names(module: ModuleOp) -> list[str]:
    return [op.name for op in main_func(module).body.block.ops if op.name.startswith("arith")]


def test_what_a_pattern_inserts_carries_the_path_of_what_it_replaces() -> None:
    module = module_of(CHAIN)
    block = main_func(module).body.block
    assert rewrite(block, [add_to_multiply]) == 3
    assert [path_of(op) for op in block.ops if isinstance(op, arith.MulfOp)] == ["layer.0", "layer.1", "layer.2"]


def test_without_again_what_a_pattern_inserts_is_not_visited() -> None:
    module = module_of(CHAIN)
    block = main_func(module).body.block
    assert rewrite(list(block.ops), [add_to_multiply, multiply_to_add], again=False) == 3
    assert names(module) == ["arith.mulf"] * 3


def test_two_patterns_that_undo_each_other_are_an_error_that_names_the_op() -> None:
    with pytest.raises(PassError, match=r"undo each other at arith\.(add|mul)f of 'layer\.[012]'"):
        rewrite(main_func(module_of(CHAIN)).body.block, [add_to_multiply, multiply_to_add])


@pytest.mark.parametrize(("backward", "order"), [(False, ["p", "q", "r"]), (True, ["r", "q", "p"])])
def test_ops_are_visited_in_order_and_backward(backward: bool, order: list[str]) -> None:
    seen: list[str | None] = []

    @pattern
    def look(op: arith.AddfOp, rewriter: PatternRewriter) -> SSAValue | None:
        seen.append(op.result.name_hint)
        return None

    rewrite(list(main_func(module_of(CHAIN)).body.block.ops), [look], backward=backward)
    assert seen == order


def test_what_nobody_reads_after_a_rewrite_goes_and_is_not_visited() -> None:
    seen: list[str | None] = []

    @pattern
    def shortcut(op: arith.AddfOp, rewriter: PatternRewriter) -> SSAValue | None:
        seen.append(op.result.name_hint)
        return op.rhs if op.result.name_hint == "r" else None

    module = module_of(CHAIN)
    assert rewrite(list(main_func(module).body.block.ops), [shortcut], backward=True) == 1
    assert seen == ["r"]
    assert names(module) == []


def test_readers_of_what_was_replaced_are_visited_again() -> None:
    """%y becomes a copy of %x only once its operand is known to be one."""
    lines = "%one = arith.constant 1.0 : f32\n%w = arith.mulf %one, %one : f32\n%y = arith.mulf %a, %w : f32\n"
    module = module_of(lines + read("%y", "f32"))
    block = main_func(module).body.block
    assert rewrite(list(block.ops), [nests.drop_neutral], backward=True) == 2
    assert text_of(module) == text_of(module_of(read("%a", "f32")))


def test_the_first_pattern_that_applies_to_an_op_is_taken() -> None:
    module = module_of(CHAIN)
    rewrite(list(main_func(module).body.block.ops), [add_to_multiply, _to_subtraction], again=False)
    assert names(module) == ["arith.mulf"] * 3


@pattern
def _to_subtraction(op: arith.AddfOp, rewriter: PatternRewriter) -> SSAValue | None:
    return rewriter.insert(arith.SubfOp(op.lhs, op.rhs)).result


def test_an_error_of_a_pattern_keeps_its_class() -> None:
    @pattern
    def refuse(op: arith.AddfOp, rewriter: PatternRewriter) -> SSAValue | None:
        raise FormatError("no such format")

    with pytest.raises(FormatError, match="no such format"):
        rewrite(main_func(module_of(CHAIN)).body.block, [refuse])
