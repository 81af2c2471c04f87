"""The instructions of a CUDA kernel's hot loop, counted in the machine code (SASS) of a cubin.

`nvdisasm` comes as a wheel (`pip install nvidia-cuda-nvdisasm`) and needs neither a toolkit nor a GPU.

The count is defined as follows:

1. A kernel's instructions are cut into basic blocks at labels and branches; back edges (to a block that dominates
   their source) give the natural loops.
2. The hot loop is the innermost one that contains both the products (`PRODUCTS`) and the loads of weights: `LDG` of 16
   bytes with the modifier `NA`, which only `qc_load_stream_16` emits.
3. One path of that loop is counted: the one with the most products, then the most loads of weights, then the most
   copies to shared memory (`LDGSTS`), then the fewest instructions.  So the steady state of a full tile of aligned rows
   is counted.  The path that stages x again, and the paths for unaligned x and for fewer tokens, are not.  Inner loops
   without products count once.
4. An inner loop with products runs as often as the loaded weights require: a lane that loaded W weights must execute
   W * `products_per_weight` products.  SassError if that is not a whole number of iterations.
5. Instructions of the path divided by W are *instructions per weight*: issue slots of one warp lane.  Predicated
   instructions count, since they are issued; `NOP` does not.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from qcompiler.errors import MissingDependencyError, SassError

_INSTALL = "pip install nvidia-cuda-nvdisasm"

PRODUCTS = ("HGMMA", "HMMA", "IMMA", "IDP", "FFMA")
"""Opcodes that multiply weights with x: tensor cores (HGMMA: a warpgroup's), `dp4a`, fp32. The first kind that occurs
in a loop counts as its products, since decoding may use FFMA as well."""

CLASSES: Mapping[str, tuple[str, ...]] = {
    "products": ("HGMMA", "HMMA", "IMMA", "IDP"),
    "fp32": ("FADD", "FMUL", "FFMA", "FSEL", "FMNMX", "FSETP"),
    "packing": ("F2FP", "F2F", "I2F", "F2I", "HADD2", "HMUL2", "HFMA2"),
    "logic": ("LOP3", "PLOP3", "SHF", "PRMT", "LEA", "BFE", "SGXT"),
    "integer": ("IADD3", "IMAD", "VIADD", "IMNMX", "VIMNMX", "IABS", "UIADD3", "UIMAD", "ULEA", "USHF", "ULOP3"),
    "moves": ("MOV", "SEL", "CS2R", "S2R", "S2UR", "R2UR", "UMOV", "USEL", "LDC", "ULDC", "UPRMT", "P2R", "R2P"),
    "compare": ("ISETP", "UISETP", "VOTE", "VOTEU", "UPLOP3"),
    "shuffle": ("SHFL",),
    "shared": ("LDS", "STS", "LDSM"),
    "global": ("LDG", "STG", "LDGSTS", "LDGDEPBAR", "DEPBAR"),
    "control": (
        "BRA",
        "BSSY",
        "BSYNC",
        "BAR",
        "WARPSYNC",
        "WARPGROUP",
        "FENCE",
        "EXIT",
        "YIELD",
        "BREAK",
        "CALL",
        "RET",
        "BMOV",
    ),
}
"""Classes of instructions by purpose, the columns of a table. All others are "other"."""

_CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes}


@dataclass(frozen=True)
class Instruction:
    """One machine instruction. `target` is the label that a branch names."""

    address: int
    predicate: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: str
    target: str | None

    @property
    def loads_weights(self) -> bool:
        return self.opcode == "LDG" and "NA" in self.modifiers and "128" in self.modifiers

    @property
    def kind(self) -> str:
        return _CLASS_OF.get(self.opcode, "other")


@dataclass(frozen=True)
class Function:
    """A kernel's instructions in order; `labels` maps each label to the index of the next instruction."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


@dataclass(frozen=True)
class HotLoop:
    """The counted path of a hot loop: instructions by opcode for one warp lane, over `weights` of its weights."""

    opcodes: Mapping[str, int]
    weights: int

    @property
    def total(self) -> int:
        return sum(self.opcodes.values())

    @property
    def per_weight(self) -> float:
        return self.total / self.weights

    @property
    def classes(self) -> dict[str, float]:
        """Instructions per weight of each class, `CLASSES` first."""
        found = Counter[str]()
        for opcode, count in self.opcodes.items():
            found[_CLASS_OF.get(opcode, "other")] += count
        return {name: found[name] / self.weights for name in (*CLASSES, "other")}


# --- disassembly -----------------------------------------------------------------------------------------------------


@functools.cache
def disassembler() -> Path:
    """`nvdisasm` of the wheel, else of a toolkit on PATH. MissingDependencyError with the command that installs it."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:  # not even the package above it
        spec = None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (tool := Path(folder, "bin", "nvdisasm")).exists():
            return tool
    if found := shutil.which("nvdisasm"):
        return Path(found)
    raise MissingDependencyError(f"reading machine code needs nvdisasm, which is not installed; {_INSTALL}")


def disassemble(cubin: Path) -> dict[str, Function]:
    """The functions of a cubin by name. SassError where nvdisasm refuses the file."""
    return parse(_disassembly(cubin))


def listings(cubin: Path) -> dict[str, str]:
    """The machine code of each function of a cubin as text to read: its labels and instructions, one to a line.

    Raises the errors of `disassemble`.
    """
    found: dict[str, list[str]] = {}
    lines = list[str]()
    for line in _disassembly(cubin).splitlines():
        if section := _SECTION.match(line):
            lines = found.setdefault(section[1], [])
        elif _LABEL.match(line) or _LINE.match(line):
            lines.append(line.rstrip())
    return {name: "\n".join(body) + "\n" for name, body in found.items()}


def _disassembly(cubin: Path) -> str:
    done = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SassError(f"{cubin}: nvdisasm refused it: {(done.stderr or done.stdout).strip()[:400]}")
    return done.stdout


_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)")
_LABEL = re.compile(r"^(\.L\w+):")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L\w+)\)")


def parse(text: str) -> dict[str, Function]:
    """The functions in the output of `nvdisasm -c`."""
    bodies: dict[str, tuple[list[Instruction], dict[str, int]]] = {}
    instructions, labels = list[Instruction](), dict[str, int]()
    for line in text.splitlines():
        if section := _SECTION.match(line):
            instructions, labels = bodies.setdefault(section[1], ([], {}))
        elif label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            address, predicate, opcode, modifiers, operands = found.groups()
            target = _TARGET.search(operands)
            modified = tuple(modifiers.split(".")[1:])
            named = target[1] if target else None
            instructions.append(Instruction(int(address, 16), predicate or "", opcode, modified, operands, named))
    return {name: Function(name, tuple(body), places) for name, (body, places) in bodies.items()}


# --- blocks and loops ------------------------------------------------------------------------------------------------

_BRANCHES = ("BRA", "BRX", "JMP", "BREAK", "CALL")  # ptxas leaves some loops by CALL.REL.NOINC
_ENDS = ("EXIT", "RET", "BRA", "JMP", "KILL")


@dataclass(frozen=True)
class _Graph:
    """Basic blocks as ranges of instructions, and the successors of each."""

    function: Function
    blocks: tuple[range, ...]
    successors: tuple[tuple[int, ...], ...]

    def instructions(self, block: int) -> Iterable[Instruction]:
        return (self.function.instructions[i] for i in self.blocks[block])


def _graph(function: Function) -> _Graph:
    code = function.instructions
    branches = {i for i, each in enumerate(code) if each.opcode in (*_BRANCHES, "EXIT", "RET")}
    starts = sorted({0, *(i for i in function.labels.values() if i < len(code)), *(i + 1 for i in branches)})
    starts = [i for i in starts if i < len(code)]
    blocks = tuple(range(a, b) for a, b in zip(starts, [*starts[1:], len(code)], strict=True))
    of_start = {block.start: number for number, block in enumerate(blocks)}
    successors = []
    for number, block in enumerate(blocks):
        last = code[block[-1]]
        after = []
        diverged = "DIV" in last.modifiers  # to code for diverged lanes, which no kernel here has
        if (
            not diverged
            and last.opcode in _BRANCHES
            and last.target is not None
            and function.labels[last.target] < len(code)
        ):
            after.append(of_start[function.labels[last.target]])
        conditional = (
            diverged or bool(last.predicate) or (last.opcode in _BRANCHES and "P" in last.operands.split("`")[0])
        )
        if (last.opcode not in _ENDS or conditional) and number + 1 < len(blocks):
            after.append(number + 1)
        successors.append(tuple(dict.fromkeys(after)))
    return _Graph(function, blocks, tuple(successors))


def _predecessors(graph: _Graph) -> dict[int, list[int]]:
    """Predecessors of the blocks that can be reached from the first one; unreachable blocks dominate nothing."""
    found: dict[int, list[int]] = {0: []}
    todo = [0]
    while todo:
        block = todo.pop()
        for each in graph.successors[block]:
            if each not in found:
                found[each] = []
                todo.append(each)
            found[each].append(block)
    return found


def _dominators(before: Mapping[int, list[int]]) -> dict[int, set[int]]:
    found = {block: set(before) for block in before} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in sorted(before):
            if block == 0:
                continue
            new = set.intersection(*(found[each] for each in before[block])) | {block}
            if new != found[block]:
                found[block], changed = new, True
    return found


def _loops(graph: _Graph) -> dict[int, set[int]]:
    """The blocks of each natural loop by its header; loops with the same header are joined."""
    before = _predecessors(graph)
    dominators = _dominators(before)
    loops: dict[int, set[int]] = {}
    for block in sorted(before):
        for header in graph.successors[block]:
            if header not in dominators[block]:
                continue
            body = loops.setdefault(header, {header})
            todo = [block]
            while todo:
                if (each := todo.pop()) not in body:
                    body.add(each)
                    todo += before[each]
    return loops


# --- the hot loop ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cost:
    """The instructions of a path; `repeated` are those inside inner loops with products, counted once."""

    once: Counter[str]
    repeated: Counter[str]
    weight_loads: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.once + other.once, self.repeated + other.repeated, self.weight_loads + other.weight_loads)

    def rank(self, product: str) -> tuple[int, int, int, int]:
        total = self.once + self.repeated
        return total[product], self.weight_loads, total["LDGSTS"], -total.total()


def _path(graph: _Graph, loops: Mapping[int, set[int]], header: int, product: str) -> _Cost:
    """The counted path of one iteration of the loop at `header`."""
    body = loops[header]
    inner = {h: loop for h, loop in loops.items() if h != header and loop < body}
    outermost = {h: loop for h, loop in inner.items() if not any(loop < other for other in inner.values())}
    node_of = {block: h for h, loop in outermost.items() for block in loop}
    costs: dict[int, _Cost] = {}
    for block in body:
        node = node_of.get(block, block)
        if node not in costs:
            costs[node] = _inner(graph, loops, node, product) if node in outermost else _block(graph, node)
    after: dict[int, set[int]] = {node: set() for node in costs}
    for block in body:
        for each in graph.successors[block]:
            mine, its = node_of.get(block, block), node_of.get(each, each)
            if each in body and each != header and mine != its:
                after[mine].add(its)
    latches = {node_of.get(b, b) for b in body if header in graph.successors[b]}
    best: dict[int, _Cost] = {header: costs[header]}
    for node in _in_order(after, header):
        for each in after[node]:
            if node not in best:
                continue
            reached = best[node] + costs[each]
            if each not in best or reached.rank(product) > best[each].rank(product):
                best[each] = reached
    return max((best[node] for node in latches), key=lambda cost: cost.rank(product))


def _inner(graph: _Graph, loops: Mapping[int, set[int]], header: int, product: str) -> _Cost:
    cost = _path(graph, loops, header, product)
    if cost.once[product] + cost.repeated[product] == 0:
        return cost
    return _Cost(Counter(), cost.once + cost.repeated, cost.weight_loads)


def _block(graph: _Graph, block: int) -> _Cost:
    code = list(graph.instructions(block))
    counted = Counter(each.opcode for each in code if each.opcode != "NOP")
    return _Cost(counted, Counter(), sum(each.loads_weights for each in code))


def _in_order(after: Mapping[int, set[int]], start: int) -> list[int]:
    """The nodes reachable from `start`, each before its successors."""
    done, order = set[int](), list[int]()

    def visit(node: int) -> None:
        done.add(node)
        for each in sorted(after[node]):
            if each not in done:
                visit(each)
        order.append(node)

    visit(start)
    return order[::-1]


def nested_loops(function: Function, product: str) -> tuple[int, tuple[int, ...]]:
    """Instructions of one iteration of the outermost loop with the most `product`s, without those of its inner loops
    that have some, and of one iteration of each of these. SassError if the kernel has no such loop."""
    graph = _graph(function)
    loops = _loops(graph)
    products = {
        h: sum(i.opcode == product for block in body for i in graph.instructions(block)) for h, body in loops.items()
    }
    header = max(loops, key=lambda h: (products[h], len(loops[h])), default=None)
    if header is None or not products[header]:
        raise SassError(f"{function.name}: no loop holds {product}")
    inner = [h for h, body in loops.items() if body < loops[header] and products[h]]
    outside = _path(graph, loops, header, product).once.total()
    return outside, tuple(_path(graph, loops, h, product).once.total() for h in sorted(inner))


def hot_loop(function: Function, bits: int, products_per_weight: Fraction) -> HotLoop:
    """The hot loop of a kernel whose weights are stored `bits` wide in 16-byte loads (the width of a plane if codes
    are split into planes).  SassError if the kernel has no loop with loads of weights and products, or if products and
    weights do not agree."""
    graph = _graph(function)
    loops = _loops(graph)
    opcodes = {h: Counter(i.opcode for b in body for i in graph.instructions(b)) for h, body in loops.items()}
    loads = {h: sum(i.loads_weights for b in body for i in graph.instructions(b)) for h, body in loops.items()}
    both = [h for h in loops if loads[h] and any(opcodes[h][each] for each in PRODUCTS)]
    innermost = [h for h in both if not any(loops[other] < loops[h] for other in both)]
    if not innermost:
        raise SassError(f"{function.name}: no loop holds both loads of weights (LDG….NA.128) and products")
    header = max(innermost, key=lambda h: (loads[h], -h))
    product = next(each for each in PRODUCTS if opcodes[header][each])
    cost = _path(graph, loops, header, product)
    weights = cost.weight_loads * 128 // bits
    wanted, inside = products_per_weight * weights - cost.once[product], cost.repeated[product]
    times = wanted / inside if inside else Fraction(0)
    if times.denominator != 1 or times < 0 or (not inside and wanted):
        raise SassError(
            f"{function.name}: {cost.once[product]} + {inside} times some number of {product} cannot be the products "
            f"of {weights} weights of {bits} bits with {products_per_weight} each"
        )
    total = Counter(cost.once)
    for opcode, count in cost.repeated.items():
        total[opcode] += count * int(times)
    return HotLoop(dict(total), weights)
