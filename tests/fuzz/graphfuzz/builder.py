"""Typed insertion, after NNSmith: forwards, a statement on values that exist; backwards, a value of a wanted type.

Every statement is run as it is added (`shadow.Trial`), at several sizes: what means nothing on the values at hand is
taken back, and the generator goes on with something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from graphfuzz import draws
from graphfuzz.graphs import FLOATS, Graph, Leaf, Statement, Type, symbols_in
from graphfuzz.shadow import Meaningless, Trial
from graphfuzz.sizes import RANGES, Shape, Size, broadcast, product, text_of

T = TypeVar("T")
Exactness = Literal["moves", "ieee", "rounds"]
"""What a statement does to exact operands: gives exact values; does so in fp32 and fp64 only; or rounds."""

LARGEST = 4096
"""Elements of a value at its largest."""
STATIC = (1, 2, 3, 4, 5, 6, 8, 16, 17, 32, 40, 64)
FILLS = ("normal", "normal", "positive", "unit", "grid")


class Impossible(Exception):
    """A rule that cannot be applied to the graph as it is."""


@dataclass(frozen=True)
class Limits:
    """What a graph may hold."""

    dtypes: tuple[str, ...]
    statements: int
    special: bool = False
    quantised: bool = False
    empty: bool = False
    """Whether dims may be 0."""
    blocks: bool = False
    """Whether most statements are parts of layers."""


class Builder:
    """A graph under construction."""

    def __init__(self, source: draws.Draws, limits: Limits, trials: Sequence[Mapping[str, int]], seed: int) -> None:
        self.draws, self.limits, self.seed = source, limits, seed
        self.trials = [Trial(symbols, i, special=limits.special) for i, symbols in enumerate(trials)]
        self.leaves: list[Leaf] = []
        self.statements: list[Statement] = []
        self.types: dict[str, Type] = {}
        self.quant: dict[str, str] = {}
        self.written_states: list[Statement] = []
        self.rule = ""
        self._counter = 0

    # --- drawing ---

    def choose(self, options: Sequence[T]) -> T:
        if not options:
            raise Impossible
        return draws.choose(self.draws, options)

    def integer(self, low: int, high: int) -> int:
        if low > high:
            raise Impossible
        return self.draws.integer(low, high)

    def chance(self, percent: int) -> bool:
        return draws.chance(self.draws, percent)

    def number(self) -> float:
        return self.choose((0.5, 2.0, -1.0, 0.1, -0.25, 1.5, 3.0, 0.75))

    def float_dtype(self) -> str:
        return self.choose([d for d in self.limits.dtypes if d in FLOATS])

    # --- what there is ---

    def pick(self, fits: Callable[[Type], bool] = lambda _: True) -> str:
        """A value, mostly one of the last that fit. Impossible if there is none.

        Of every other entry of a dynamic dim, nothing more is made: torch.export guards on what `//` gives.
        """
        fit = [name for name, t in self.types.items() if fits(t) and not any("//" in str(s) for s in t.shape)]
        if not fit:
            raise Impossible
        back = 0
        while back < len(fit) - 1 and self.chance(55):
            back += 1
        return fit[-1 - back]

    def pick_float(self, rank: int = 0) -> str:
        """A value of floats with at least so many dims."""
        return self.pick(lambda t: t.is_float and t.rank >= rank)

    def type(self, name: str) -> Type:
        return self.types[name]

    def shape(self, name: str) -> Shape:
        return self.types[name].shape

    def is_exact(self, name: str) -> bool:
        return all(trial.known[name].exact for trial in self.trials)

    # --- what is added ---

    def fresh(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def leaf(self, type_: Type, fill: str | None = None, kind: str = "x") -> str:
        """A new input (`kind="x"`), parameter (`"p"`) or buffer (`"c"`)."""
        if product(type_.shape).high > LARGEST or type_.rank > 6:
            raise Impossible
        if kind == "x" and not all(size.is_static or str(size) in RANGES for size in type_.shape):
            raise Impossible
        if kind != "x" and not all(size.is_static for size in type_.shape):
            raise Impossible
        name = self.fresh(kind if kind == "x" else f"self.{kind}")
        leaf = Leaf(name, type_, fill or self.fill_for(type_.dtype), self.seed * 131 + self._counter)
        for trial in self.trials:
            trial.leaf(leaf)
        self.leaves.append(leaf)
        self.types[name] = type_
        return name

    def fill_for(self, dtype: str) -> str:
        if dtype == "bool":
            return "flag"
        if dtype not in FLOATS:
            return "integer"
        return "special" if self.limits.special and self.chance(70) else self.choose(FILLS)

    def emit(
        self,
        text: str,
        operands: Iterable[str],
        shape: Shape | Sequence[Shape],
        dtype: str | Sequence[str],
        exact: Exactness = "rounds",
        *,
        coarse: bool = False,
    ) -> str:
        """Adds `name = text` and returns the name; with several shapes, `n1, n2 = text`, and the names joined by ", ".

        Impossible, with nothing added, where the value would be too large, or means nothing at one of the sizes.
        """
        shapes: list[Shape] = [shape] if _is_shape(shape) else list(shape)  # type: ignore[arg-type, list-item]
        dtypes = [dtype] * len(shapes) if isinstance(dtype, str) else list(dtype)
        for each in shapes:
            if product(each).high > LARGEST or len(each) > 6 or any(size.low < 0 for size in each):
                raise Impossible
            if not self.limits.empty and any(size.low < 1 for size in each):
                raise Impossible
            if not all(size.is_traceable for size in each):
                raise Impossible
        told = {str(size) for leaf in self.leaves if leaf.is_input for size in leaf.type.shape}
        if not symbols_in([text]) <= told:
            raise Impossible  # no input tells the size
        types = tuple(Type(d, s) for d, s in zip(dtypes, shapes, strict=True))
        named = tuple(dict.fromkeys(operands))
        wide = all(t.dtype in ("float32", "float64") or not t.is_float for t in types)
        wide = wide and all(self.types[n].dtype in ("float32", "float64") or not self.types[n].is_float for n in named)
        sure = exact == "moves" or (exact == "ieee" and wide)
        names = tuple(self.fresh("v") for _ in types)
        statement = Statement(names, text, named, types, self.rule, sure, coarse)
        try:
            for trial in self.trials:
                trial.step(statement)
        except Meaningless as error:
            self._forget(names)
            raise Impossible(str(error)) from error
        self.statements.append(statement)
        self.types.update(zip(names, types, strict=True))
        return ", ".join(names)

    def _forget(self, names: Iterable[str]) -> None:
        for trial in self.trials:
            for name in names:
                trial.eager.pop(name, None)
                trial.known.pop(name, None)
                for env in trial.doubles:
                    env.pop(name, None)

    # --- backwards: a value of a wanted type ---

    def want(self, type_: Type, fill: str | None = None, depth: int = 2) -> str:
        """A value of this very type: one that exists, an input or parameter, or made by statements of inputs."""
        found = [name for name, t in self.types.items() if t == type_]
        if found and fill is None and self.chance(50):
            return self.choose(found)
        if fill is not None or depth == 0 or self.chance(50):
            return self.any_leaf(type_, fill)
        maker = self.choose((self._moved, self._cut, self._spread, self._converted, self._computed))
        try:
            return maker(type_, depth - 1)
        except Impossible:
            return self.any_leaf(type_, fill)

    def any_leaf(self, type_: Type, fill: str | None = None) -> str:
        """An input or, where the shape is fixed, perhaps a parameter; made from a shape where neither can be."""
        static = all(size.is_static for size in type_.shape)
        if static and self.chance(30):
            return self.leaf(type_, fill, "p")
        try:
            return self.leaf(type_, fill)
        except Impossible:
            if fill is not None or type_.dtype == "bool":
                raise
            number = self.integer(1, 3)
            text = f"torch.full(({text_of(type_.shape)},), {number}, dtype=torch.{type_.dtype})"
            return self.emit(text, [], type_.shape, type_.dtype, "moves")

    def _moved(self, type_: Type, depth: int) -> str:
        if type_.rank < 2:
            raise Impossible
        order = self.permutation(type_.rank)
        source = tuple(type_.shape[order.index(axis)] for axis in range(type_.rank))
        x = self.want(Type(type_.dtype, source), None, depth)
        return self.emit(f"{x}.permute({', '.join(map(str, order))})", [x], type_.shape, type_.dtype, "moves")

    def _cut(self, type_: Type, depth: int) -> str:
        """A slice along a fixed dim of something longer."""
        axis = self.choose([i for i, size in enumerate(type_.shape) if size.is_static])
        size = int(type_.shape[axis].static or 0)
        before, after, step = self.integer(0, 2), self.integer(0, 2), self.choose((1, 1, 2))
        longer = before + max((size - 1) * step + 1, 0) + after
        shape = (*type_.shape[:axis], Size.of(longer), *type_.shape[axis + 1 :])
        x = self.want(Type(type_.dtype, shape), None, depth)
        stop = longer - after
        cut = ", ".join([*([":"] * axis), f"{before}:{stop}" + (f":{step}" if step > 1 else "")])
        return self.emit(f"{x}[{cut}]", [x], type_.shape, type_.dtype, "moves")

    def _spread(self, type_: Type, depth: int) -> str:
        """A smaller value, expanded."""
        narrow = tuple(Size.of(1) if self.chance(50) else size for size in type_.shape)
        if self.chance(30) and narrow:
            narrow = narrow[1:]
        x = self.want(Type(type_.dtype, narrow), None, depth)
        return self.emit(
            f"{x}.expand(({text_of(type_.shape)},))".replace("(,)", "()"), [x], type_.shape, type_.dtype, "moves"
        )

    def _converted(self, type_: Type, depth: int) -> str:
        other = self.choose([d for d in self.limits.dtypes if d != type_.dtype])
        x = self.want(Type(other, type_.shape), None, depth)
        return self.cast(x, type_.dtype)

    def _computed(self, type_: Type, depth: int) -> str:
        if not type_.is_float:
            raise Impossible
        x = self.want(type_, None, depth)
        text = self.choose(("torch.tanh({x})", "torch.relu({x})", "-{x}", "{x} * 0.5", "torch.sigmoid({x})"))
        return self.emit(text.format(x=x), [x], type_.shape, type_.dtype)

    def partner(self, shape: Shape, dtype: str, fill: str | None = None) -> str:
        """A value of this dtype that broadcasts with `shape`, and does not grow it."""
        fit = [n for n, t in self.types.items() if t.dtype == dtype and broadcast(t.shape, shape) == shape]
        if fit and fill is None and self.chance(60):
            return self.choose(fit)
        narrow = shape
        if self.chance(50):
            narrow = tuple(Size.of(1) if self.chance(40) else size for size in shape)
            narrow = narrow[self.integer(0, len(narrow)) if self.chance(40) else 0 :]
        return self.want(Type(dtype, narrow), fill)

    # --- common statements ---

    def cast(self, x: str, dtype: str) -> str:
        source = self.types[x].dtype
        wide = dtype in ("float32", "float64") and source not in ("float64",)
        exact: Exactness = "moves" if wide or dtype not in FLOATS else "rounds"
        return self.emit(f"{x}.to(torch.{dtype})", [x], self.shape(x), dtype, exact)

    def to_dtype(self, x: str, dtype: str) -> str:
        return x if self.types[x].dtype == dtype else self.cast(x, dtype)

    def permutation(self, rank: int) -> list[int]:
        left, order = list(range(rank)), []
        while left:
            order.append(left.pop(self.integer(0, len(left) - 1)))
        return order

    def axis(self, x: str, fits: Callable[[Size], bool] = lambda _: True) -> int:
        return self.choose([i for i, size in enumerate(self.shape(x)) if fits(size)])

    def written(self, axis: int, rank: int) -> int:
        """An axis as a person may write it: from either end."""
        return axis - rank if self.chance(40) else axis

    def random_shape(self, rank: int) -> Shape:
        """Symbols and small fixed sizes. A symbol comes once: torch.export guards on strides of (b, b)."""
        sizes: list[Size] = []
        while len(sizes) < rank:
            symbol = Size.of(self.choose(tuple(RANGES)))
            if self.chance(45) and symbol not in sizes:
                sizes.append(symbol)
            elif self.limits.empty and self.chance(12):
                sizes.append(Size.of(0))
            else:
                sizes.append(Size.of(self.choose(STATIC[: 9 if sizes else 12])))
        return tuple(sizes)

    def write(self, buffer: str, value: str) -> None:
        """`buffer.copy_(value)`, at the end of the call: nothing after it may read the buffer."""
        assert self.types[buffer] == self.types[value]
        self.written_states.append(Statement((), f"{buffer}.copy_({value})", (buffer, value), (), self.rule, True))

    # --- the end ---

    def graph(self) -> Graph:
        """What was built: results that nothing reads are outputs, and a few that something reads."""
        read = {name for statement in self.statements for name in statement.operands}
        made = [name for statement in self.statements for name in statement.names]
        outputs = [name for name in made if name not in read or self.chance(12)]
        read_as_weights = {
            name
            for s in self.statements
            if "F.linear(" in s.text or "F.embedding(" in s.text
            for name in s.operands[1:2]
        }
        quant = {name: fmt for name, fmt in self.quant.items() if f"self.{name}" in read_as_weights}
        graph = Graph(
            tuple(self.leaves),
            (*self.statements, *self.written_states),
            tuple(outputs),
            tuple(quant.items()),
            self.limits.special,
        )
        return graph.without_dead_code()


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, Size) for size in shape)
