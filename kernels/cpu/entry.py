"""Entry points: each verified plan as one readable C++ function.

    // 3 on cpu.0: linear for encoder.layer.0.attention.self.query
    {
        void* const op[] = {at_2 + 0, at_0 + 36864, at_2 + 196608};
        const int64_t values[] = {n_0, n_1};
        qk_4(ctx, op, values);
        if (qc_failed(ctx, 4)) return ctx->error_code;
    }

Identifiers are numbers: of the kernel, arena or entry point in the plan, or of the symbol in the entry point. Names
from the plan only appear in comments, through `text.comment`. One CPU stream runs in order, so `record` and `wait` are
comments here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from qcompiler.errors import PlanError
from qcompiler.kernels.text import c_dim, comment, indent, needed
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.plan import (
    Buffer,
    Copy,
    EntryPoint,
    Launch,
    Plan,
    Record,
    Select,
    Step,
    TensorSig,
    TorchCall,
    View,
    Wait,
)
from qcompiler.plan.torch_regions import operators
from qcompiler.plan.view_regions import begin_of, nbytes_of


def function_name(plan: Plan, point: EntryPoint) -> str:
    """The exported C name of an entry point, or of the plan's `init`."""
    if point is plan.init:
        return "qe_init"
    for number, each in enumerate(plan.entries):
        if each is point:
            return f"qe_{number}"
    raise PlanError(f"the entry point '{point.name}' is not in the plan")


def kernel_name(number: int) -> str:
    """The exported C name of the kernel at this position in the plan."""
    return f"qk_{number}"


def entry_points(plan: Plan) -> tuple[EntryPoint, ...]:
    """`init` (if any) and the entry points."""
    return (*((plan.init,) if plan.init is not None else ()), *plan.entries)


def summary(plan: Plan) -> Iterator[str]:
    """One line per entry point, for the header comment of the source."""
    for point in entry_points(plan):
        name = f"{function_name(plan, point)} ({comment(point.name)})"
        yield f"{name}: {len(point.steps)} steps, {_signature(point)}"


def _signature(point: EntryPoint) -> str:
    def tensors(signatures: Sequence[TensorSig]) -> str:
        if len(signatures) > 6:
            return f"{len(signatures)} tensors"
        return ", ".join(f"{s.name} ({', '.join(str(d) for d in s.shape)}) {s.dtype}" for s in signatures)

    return comment(f"({tensors(point.inputs)}) -> ({tensors(point.outputs)})")


@dataclass
class _Emitter:
    """What the steps of one entry point refer to."""

    plan: Plan
    point: EntryPoint
    buffers: Mapping[str, Buffer]
    kernels: Mapping[str, tuple[int, KernelSpec]]
    arenas: dict[str, int] = field(default_factory=dict)  # the arenas in use and their numbers

    @cached_property
    def symbols(self) -> dict[str, str]:
        """The variable of each symbol."""
        return {each.name: f"n_{number}" for number, each in enumerate(self.point.symbols)}

    def address(self, view: View) -> str:
        """Where a view begins. A packed operand begins at its buffer's start."""
        buffer = self.buffers.get(view.buffer)
        if buffer is None:
            raise PlanError(f"entry point '{self.point.name}' uses the buffer '{view.buffer}', which the plan lacks")
        if buffer.arena not in self.arenas:
            self.arenas[buffer.arena] = [a.name for a in self.plan.arenas].index(buffer.arena)
        offset = begin_of(view) + buffer.offset
        return f"at_{self.arenas[buffer.arena]} + {c_dim(offset, self.symbols)}"

    def call(self, kernel: str) -> list[str]:
        """The call of one kernel with the operands in `op`."""
        if kernel not in self.kernels:
            raise PlanError(f"entry point '{self.point.name}' launches '{kernel}', which the plan lacks")
        number, spec = self.kernels[kernel]
        check = f"if (qc_failed(ctx, {number})) return ctx->error_code;"
        if not spec.symbols:
            return [f"{kernel_name(number)}(ctx, op, nullptr);", check]
        values = ", ".join(self.symbols[name] for name in spec.symbols)
        return [f"const int64_t values[] = {{{values}}};", f"{kernel_name(number)}(ctx, op, values);", check]

    def operands(self, views: Sequence[View]) -> str:
        addresses = ", ".join(self.address(view) for view in views)
        return f"void* const op[] = {{{addresses}}};"

    def serves(self, kernel: str) -> str:
        spec = self.kernels[kernel][1]
        return comment(f"{spec.template} for {spec.serves}" if spec.serves else spec.template)

    def step(self, number: int, step: Step) -> list[str]:
        match step:
            case Launch():
                call = self.call(step.kernel)
                head = f"// {number} on {comment(step.stream)}: {self.serves(step.kernel)}"
                return [head, "{", *indent([self.operands(step.operands), *call]), "}"]
            case Select():
                return self.select(number, step)
            case Copy():
                return self.copy(number, step)
            case Record():
                return [comment(f"// {number} on {step.stream}: record {step.event} (one stream, in order)")]
            case Wait():
                return [comment(f"// {number} on {step.stream}: wait for {step.event} (one stream, in order)")]
            case TorchCall():
                raise AssertionError("a torch call stands between segments")

    def select(self, number: int, step: Select) -> list[str]:
        lines = [self.operands(step.operands), f"const int64_t chooser = {c_dim(step.on, self.symbols)};"]
        for i, case in enumerate(step.cases):
            last = i == len(step.cases) - 1  # takes all remaining values; the verifier has checked that it may
            condition = "" if last else f" if (chooser <= {case.max})"
            word = "else" if i else ""
            lines.append(f"{word}{condition} {{".strip())
            lines += [*indent(self.call(case.kernel)), "}"]
        serves = self.serves(step.cases[0].kernel)
        head = comment(f"// {number} on {step.stream}: {serves}, by {step.on}")
        return [head, "{", *indent(lines), "}"]

    def copy(self, number: int, step: Copy) -> list[str]:
        source, target = step.source, step.target
        nbytes = c_dim(nbytes_of(source), self.symbols)
        head = comment(f"// {number} on {step.stream}: copy {source.buffer} to {target.buffer}")
        return [head, f"memcpy({self.address(target)}, {self.address(source)}, (size_t){nbytes});"]


def segments(point: EntryPoint) -> list[range | None]:
    """Splits the steps of an entry point at its torch calls: ranges of steps that one function runs, None for a
    call."""
    parts: list[range | None] = []
    begin = 0
    for place, step in enumerate(point.steps):
        if isinstance(step, TorchCall):
            parts += [range(begin, place), None] if place > begin else [None]
            begin = place + 1
    return [*parts, range(begin, len(point.steps))] if begin < len(point.steps) or not parts else parts


def emit_entry(plan: Plan, point: EntryPoint) -> str:
    """The functions of one entry point: ``int32_t qe_<number>(ctx, arenas, sym)``, which returns ctx->error_code.

    An entry point with torch calls has one function per run of steps between them, ``qe_<number>_<segment>``.
    """
    parts = segments(point)
    name = function_name(plan, point)
    if len(parts) == 1 and parts[0] is not None:
        return _function(plan, point, name, parts[0])
    return "\n".join(
        f"// {_torch_call(point, parts, number)}\n"
        if part is None
        else _function(plan, point, segment_name(name, number), part)
        for number, part in enumerate(parts)
    )


def segment_name(name: str, number: int) -> str:
    """The exported C name of one run of steps between torch calls."""
    return f"{name}_{number}"


def _torch_call(point: EntryPoint, parts: Sequence[range | None], number: int) -> str:
    calls = [step for step in point.steps if isinstance(step, TorchCall)]
    call = calls[sum(part is None for part in parts[:number])]
    names = ", ".join(dict.fromkeys(operators(call.region)))
    return comment(f"Here torch runs {names}" + (f" for {call.serves}" if call.serves else ""))


def _function(plan: Plan, point: EntryPoint, name: str, places: range) -> str:
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    kernels = {spec.name: (number, spec) for number, spec in enumerate(plan.kernels)}
    emitter = _Emitter(plan, point, buffers, kernels)
    steps = [line for number in places for line in emitter.step(number, point.steps[number])]
    symbols = [
        f"const int64_t n_{i} = sym[{i}];  // {comment(s.name)}, {s.min} to {s.max}"
        for i, s in enumerate(point.symbols)
    ]
    arenas = [
        f"char* const at_{i} = arenas[{i}];  // {comment(name)}"
        for name, i in sorted(emitter.arenas.items(), key=lambda each: each[1])
    ]
    body = indent([*needed(symbols, steps), *arenas, *steps, "return ctx->error_code;"])
    head = f'extern "C" int32_t {name}(qc_ctx* ctx, char* const* arenas, const int64_t* sym) {{'
    return "\n".join([f"// Entry point {comment(point.name)}: {_signature(point)}", head, *body, "}", ""])
