"""Stage `insert-qdq` for a graph of JAX: formats by the recipe, codes in the weight store, the ledger by pytree paths.

The same recipes, encoders and ledger as for models of torch. What differs is where weights come from: each matrix is a
view of an array of the first argument (weight_views.py), so `layers.w` of shape (L, in, out), scanned over, has the
rows `layers.w.0`, `layers.w.1`, … in the ledger.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.calibrate import gptq
from qcompiler.calibrate.chosen_codes import Moments, choose_codes
from qcompiler.config import Activations, QuantConfig, format_text, parse_format, resolve_format
from qcompiler.errors import FormatShapeError, FormatValueError, FrontendError, RecipeError, WeightsError
from qcompiler.formats import PackedTensor
from qcompiler.formats.int8_rows import clip_factors
from qcompiler.formats.integer_product import integer_product
from qcompiler.frontends.jax.activations import CODE, Input, as_floats, as_integers
from qcompiler.frontends.jax.exported import Arithmetic, Exported, Run, StaticScales
from qcompiler.frontends.jax.float_run import FloatRun, Values
from qcompiler.frontends.jax.graph import Value
from qcompiler.frontends.jax.weight_views import TYPES, Kind, Matrix, Uses, find_uses
from qcompiler.frontends.quantise.choose_formats import Described, FormatChooser
from qcompiler.frontends.quantise.lost_weights import describe, lost_share
from qcompiler.frontends.quantise.observers import InputStatistics
from qcompiler.frontends.weights.weight_files import Entry, InMemory, WeightFiles
from qcompiler.ledger import Ledger, LedgerRow
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import DTYPE_NAMES, NO_VALUES, NUMPY_DTYPES, Bytes, NoBytes, StoredTensor, WeightStore
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.progress import Progress
from qcompiler.units import counted

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Way:
    """How the products of a weight compute: the type of its elements (None: its own), and what quantises x."""

    compute: DType | None
    quantised: Input | None
    obstacle: str = ""
    """Why codes are not multiplied as integers."""


@dataclass
class Quantized:
    """The graph with the weights it reads as matrices, their storage, and the ledger."""

    exported: Exported
    uses: Uses
    keys: dict[int, str]
    """By `id` of a matrix: its key in the store."""
    weights: WeightStore
    ledger: Ledger
    valued: bool
    files: WeightFiles
    decisions: tuple[tuple[str, str, str], ...] = ()
    compute: DType | None = None
    """The type of the arithmetic of quantised linears and convolutions; None for the weight's own."""
    activations: Activations | None = None
    """How the inputs of quantised linears are quantised."""
    clips: Mapping[str, float] = field(default_factory=dict)
    """The magnitudes that become 127, by the keys of weights, for static scales."""

    def key(self, matrix: Matrix) -> str:
        return self.keys[id(matrix)]

    def way(self, matrix: Matrix) -> Way:
        """How linears of this weight compute."""
        stored = self.weights[self.key(matrix)]
        if stored.format is None:
            return Way(None, None)
        if self.activations is None:
            return Way(self.compute, None)
        clip = self.clips[self.key(matrix)] if self.activations.kind == "tensor" else 0.0
        obstacle = integer_product(resolve_format(format_text(stored.format)))
        if isinstance(obstacle, str):
            return Way(self.compute, as_floats(self.activations, clip), obstacle)
        return Way(None, as_integers(self.activations, clip))

    def way_of_convolution(self, matrix: Matrix) -> Way:
        """The same for convolutions, whose inputs stay in floating point."""
        return Way(None if self.weights[self.key(matrix)].format is None else self.compute, None)

    @property
    def module(self) -> Callable[..., Any]:
        """The function with its weights as the program has them, decoded, and in its arithmetic: jittable, and the
        accuracy oracle."""
        if not self.valued:
            raise WeightsError(NO_VALUES)
        wide = self._widened()
        leaves = [self.exported.leaf_of(array) for array in self._decoded(wide)]
        run = self._computed(wide)

        def oracle(*args: Any, **kwargs: Any) -> Any:
            return run(leaves, args, kwargs)

        return oracle

    def _computed(self, wide: Sequence[Value]) -> Run:
        """The function in the arithmetic of the recipe. FrontendError if there is no such oracle."""
        arithmetic, make = self._arithmetic(), self.exported.in_arithmetic
        if make is None and arithmetic:
            raise FrontendError(
                "the oracle of StableHLO and linalg computes in the arithmetic of the text, and this recipe's products "
                "in another one (`activations`, `compute`): leave it out to compare, or read the torch dialect"
            )
        if make is None or not (arithmetic or wide):
            return self.exported.run
        number = {leaf: i for i, leaf in enumerate(self.exported.graph.leaves)}
        return make(arithmetic, {number[leaf]: _DTYPES[leaf.type] for leaf in wide}, self._scales())

    def _arithmetic(self) -> dict[int, Arithmetic]:
        """The arithmetic of each leaf that linears and convolutions read, by its number, where it is not the function's
        own.

        FrontendError if it differs between the parts of a leaf.
        """
        number = {leaf: i for i, leaf in enumerate(self.exported.graph.leaves)}
        found: dict[int, Arithmetic] = {}
        for use in self.uses.uses.values():
            for matrix in use.matrices if use.kind in ("linear", "conv") else ():
                way = self.way(matrix) if use.kind == "linear" else self.way_of_convolution(matrix)
                bf16 = way.compute == "bf16"
                made = Arithmetic(self.activations if way.quantised is not None else None, bf16)
                if found.setdefault(number[matrix.leaf], made) != made:
                    raise FrontendError(
                        f"the oracle computes all parts of '{matrix.leaf.name}' in one way, and the recipe's rules "
                        "give its parts several: compare with a program whose rules name the whole array"
                    )
        plain = Arithmetic(None, bf16=False)
        return {leaf: made for leaf, made in found.items() if made != plain}

    def _scales(self) -> dict[int, StaticScales]:
        """The static scales of the parts of leaves, by the numbers of leaves."""
        found: dict[int, StaticScales] = {}
        for number, leaf in enumerate(self.exported.graph.leaves):
            matrices = [m for m in self.uses.matrices.values() if m.leaf is leaf and self.key(m) in self.clips]
            if matrices:
                parts = np.zeros(tuple(int(size) for size in leaf.shape), np.int32)
                for i, matrix in enumerate(matrices):
                    matrix.view.values(parts)[...] = i
                factors, scales = zip(*(clip_factors(self.clips[self.key(m)]) for m in matrices), strict=True)
                found[number] = StaticScales(parts, np.array(factors), np.array(scales))
        return found

    def _widened(self) -> list[Value]:
        """Leaves of 16 bits that the function widens to fp32 wherever it reads them: the program decodes to fp32."""
        types: dict[Value, set[str]] = {}
        for matrix in self.uses.matrices.values():
            types.setdefault(matrix.leaf, set()).add(matrix.dtype)
        return [leaf for leaf, found in types.items() if leaf.type in ("bf16", "f16") and found == {"f32"}]

    def _decoded(self, wide: Sequence[Value]) -> list[Array]:
        """The arrays of the first argument, each matrix replaced by what its codes decode to.

        Those of `wide` are in fp32.
        """
        arrays = {
            value: np.array(self.exported.values(leaf, value.name), np.float32 if value in wide else None)
            for value, leaf in zip(self.exported.graph.leaves, self.exported.leaves, strict=True)
        }
        for matrix in self.uses.matrices.values():
            stored = self.weights[self.key(matrix)]
            if stored.format is not None:
                fmt = resolve_format(format_text(stored.format))
                decoded = fmt.decode(PackedTensor(fmt, matrix.rows, matrix.cols, stored.data))
                view = matrix.view.values(arrays[matrix.leaf])
                view[...] = decoded.reshape(view.shape).astype(view.dtype)
        return list(arrays.values())

    def text(self) -> str:
        """The contents of the dump `01-insert-qdq.txt`."""
        rows = [
            f"{node.op}: {', '.join(self.key(m) for m in use.matrices)} ({use.kind})    {node.line}".rstrip()
            for node, use in self.uses.uses.items()
        ]
        return "\n".join([*rows, "", self.ledger.table()]) + "\n"


_NO_IMPORTANCE = (
    "only linears in formats that search for their scales take an importance of columns, such as q4_K and q4_0 (but "
    "not q8_0, nf4 and int4), and only activations='int8:static' takes ranges; algorithm='gptq' takes inputs. Leave "
    "`calibrate` out, or choose one"
)

_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
"""NumPy's and JAX's names."""


@dataclass
class _Weight:
    """One row of the ledger: a matrix, or a leaf that is kept."""

    path: str
    leaf: Value
    shape: tuple[int, ...]
    dtype: str
    matrix: Matrix | None = None
    format: str | None = None
    why: str = ""

    @property
    def kind(self) -> Kind:
        kinds = self.matrix.kinds if self.matrix is not None else set()
        return "embedding" if "embedding" in kinds else "conv" if "conv" in kinds else "linear"

    @property
    def is_linear(self) -> bool:
        """Whether a product reads it, and it is quantised."""
        return self.format is not None and self.matrix is not None and "linear" in self.matrix.kinds

    @property
    def takes_importance(self) -> bool:
        """Whether it is the weight of a linear, in a format that weights the errors of columns."""
        return self.is_linear and resolve_format(self.format or "").takes_importance

    @property
    def why_nearest(self) -> str:
        """Why its codes are not chosen by data: "" if they are."""
        assert self.matrix is not None
        if not self.is_linear:
            return "it is no linear"
        if "embedding" in self.matrix.kinds:
            return "it is an embedding, too"
        return gptq.why_not(resolve_format(self.format or ""), self.matrix.cols)

    @property
    def wide_bytes(self) -> int:
        """Bytes of its values in fp32, for progress."""
        return 4 * int(np.prod(self.shape))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.matrix.rows, self.matrix.cols) if self.matrix is not None else self.shape

    @property
    def plain_bytes(self) -> int:
        name = self.matrix.dtype if self.matrix is not None else self.leaf.dtype
        return int(np.prod(self.shape)) * NUMPY_DTYPES[name].itemsize

    @property
    def nbytes(self) -> int:
        if self.format is None:
            return self.plain_bytes
        return resolve_format(self.format).nbytes(*self.stored_shape)


def quantise(
    exported: Exported,
    quant: QuantConfig | str | None,
    *,
    valued: bool = True,
    files: WeightFiles | None = None,
    floats: FloatRun | None = None,
) -> Quantized:
    """Chooses formats by the recipe and encodes the weights, one at a time. With `floats`, the graph with float weights
    runs over the inputs of `calibrate` first.

    Errors as for models of torch: RecipeError for a rule that matches nothing and for a calibration that serves
    nothing, FormatShapeError and FormatValueError naming the path, PromiseError, CalibrationError; and RecipeError for
    parts of a recipe that functions of JAX do not have yet.
    """
    recipe = QuantConfig.of(quant)
    _activations(recipe)
    files = files if files is not None else InMemory()
    try:
        return _Quantiser(exported, recipe, valued, files, floats).run()
    finally:
        files.abandon()


def _activations(recipe: QuantConfig) -> Activations | None:
    """RecipeError for what functions of JAX do not have."""
    if recipe.algorithm not in ("nearest", "gptq"):
        raise RecipeError(
            f"algorithm={recipe.algorithm!r} chooses codes of exported graphs of torch; functions of JAX take "
            "algorithm='gptq', or nearest codes: leave `algorithm` out"
        )
    rewrites = [
        name
        for name in ("rotate", "rotate_online", "equalise", "correct_bias", "rounded_inputs", "tune_scales")
        if getattr(recipe, name)
    ]
    if rewrites or recipe.smooth is not None:
        raise RecipeError(f"{(rewrites or ['smooth'])[0]}: this is for exported graphs of torch only; leave it out")
    return recipe.inputs


@dataclass
class _Quantiser:
    exported: Exported
    recipe: QuantConfig
    valued: bool
    files: WeightFiles
    floats: FloatRun | None = None
    store: WeightStore = field(default_factory=lambda: WeightStore({}))  # no rewrite moves an array of a function
    rows: list[LedgerRow] = field(default_factory=list)
    keys: dict[int, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    read: set[Value] = field(default_factory=set)
    """What live nodes read, and results."""
    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    packed: dict[str, PackedTensor] = field(default_factory=dict)
    """Codes that are known before weights are stored."""
    by_data: set[str] = field(default_factory=set)
    """The paths of weights whose codes are chosen by data."""
    decisions: list[tuple[str, str, str]] = field(default_factory=list)

    def run(self) -> Quantized:
        uses = find_uses(self.exported.graph)
        arrays = dict(zip(self.exported.graph.leaves, self.exported.leaves, strict=True))
        graph = self.exported.graph
        self.read = set(graph.returned) | {value for node in graph.live() for value in node.operands}
        weights = [w for leaf in arrays for w in self._weights_of(leaf, uses)]
        eligible = [w for w in weights if w.matrix is not None]
        modules = _modules([w.path for w in weights])
        self.recipe.check_rules([w.path for w in eligible], modules)
        described = {w.path: Described((w.path,), w.kind, w.stored_shape, w.shape) for w in eligible}
        chooser = FormatChooser(self.recipe, None, list(described.values()))
        for weight in eligible:
            weight.format, weight.why = chooser.choose(described[weight.path])
        for weight in weights:
            with _naming_errors(weight):
                self._row(weight)
        ledger = Ledger(tuple(self.rows), self.recipe.preset, chooser.promise(self.rows), len(chooser.later))
        ledger.check_promise()
        self._calibrate(weights, arrays)
        self._store(weights, arrays)
        made = Quantized(
            self.exported, uses, self.keys, self.store, ledger.remarked(self.lost), self.valued, self.files,
            (*chooser.decisions, *self.decisions), {"bf16": "bf16", "exact": "f32"}.get(self.recipe.compute or ""),  # type: ignore[arg-type]
            _activations(self.recipe), self._clips(),
        )  # fmt: skip
        made.decisions += self._decisions(made)
        return made

    def _decisions(self, made: Quantized) -> tuple[tuple[str, str, str], ...]:
        """What the report says of activations. RecipeError if there is no linear for them."""
        kind = made.activations
        if kind is None:
            return ()
        done: dict[str, str] = {}
        for use in made.uses.uses.values():
            for matrix in use.matrices if use.kind == "linear" else ():
                way = made.way(matrix)
                if way.quantised is not None:
                    how = f"multiplied in floating point: {way.obstacle}" if way.obstacle else "multiplied as integers"
                    clip = made.clips.get(made.key(matrix))
                    scale = f" {clip / CODE:.3g}" if clip is not None else ""
                    done[made.key(matrix)] = f"{kind.text}{scale}; {how}"
        if not done:
            raise RecipeError(
                f"the recipe quantises inputs of linears ({kind.text}), and no linear has a quantised weight: "
                "choose a format for linears, or leave out `activations` and compute='int8'"
            )
        why = "not quantised: convolutions of functions of JAX multiply in floating point"
        for use in made.uses.uses.values():
            kept = [made.key(matrix) for matrix in use.matrices if use.kind == "conv"]
            done.update({key: why for key in kept if made.weights[key].format is not None})
        return tuple(("activations", path, what) for path, what in done.items())

    def _weights_of(self, leaf: Value, uses: Uses) -> list[_Weight]:
        matrices = [m for m in uses.matrices.values() if m.leaf is leaf]
        shape = tuple(int(size) for size in leaf.shape)
        if not matrices:
            return [_Weight(leaf.name, leaf, shape, leaf.type, why=self._why_kept(leaf, uses))]
        found = []
        for matrix in matrices:
            path = leaf.name + matrix.suffix
            self.keys[id(matrix)] = path
            found.append(_Weight(path, leaf, matrix.shape, leaf.type, matrix))
        return found

    def _why_kept(self, leaf: Value, uses: Uses) -> str:
        if leaf not in self.read:
            return "not used by the function"
        if leaf.rank < 2:
            return "fewer than two dimensions"
        if leaf.type not in TYPES:
            return "formats store float32, bfloat16 and float16"
        return uses.elsewhere.get(leaf, "not the weight of a linear, a convolution or an embedding")

    def _row(self, weight: _Weight) -> None:
        dtype = _DTYPES.get(weight.dtype, weight.dtype)
        before = int(np.prod(weight.shape)) * NUMPY_DTYPES[weight.leaf.dtype].itemsize
        unused = weight.why == "not used by the function"
        after = 0 if unused else weight.nbytes
        stored = format_text(parse_format(weight.format)) if weight.format is not None else ""
        counts = len(weight.shape) >= 2 and weight.leaf.floating and not unused
        self.rows.append(LedgerRow((weight.path,), weight.shape, dtype, stored, weight.why, before, after, counts))

    # --- calibration ---

    def _calibrate(self, weights: Sequence[_Weight], arrays: dict[Value, Any]) -> None:
        """Chooses codes by the inputs of `calibrate`, and measures the importance of the columns of other linears."""
        by_data = self.recipe.algorithm == "gptq"
        static = self.recipe.inputs is not None and self.recipe.inputs.kind == "tensor"
        if self.floats is None:
            needs = [f"activations={self.recipe.activations!r}"] * static + ["algorithm='gptq'"] * by_data
            if needs:
                raise RecipeError(f"{needs[0]} needs calibration data: qcompile(…, calibrate=[inputs])")
            return
        by_path = {weight.path: weight for weight in weights}

        def plain(path: str) -> Array | None:
            weight = by_path.get(path)
            if weight is None:  # a constant of the graph itself
                return None
            array = self.exported.values(arrays[weight.leaf], path)
            return weight.matrix.values(array) if weight.matrix is not None else _stored(array)

        if by_data:
            self._choose_codes(weights, self.floats, plain)
        read = [w for w in weights if w.is_linear and w.path in self.floats.reads]
        chosen = [w for w in read if static or self._weighs_columns(w)]
        if not chosen and self.by_data:
            return
        if not chosen or not self.valued:
            raise RecipeError(
                "`calibrate` was given, and nothing here uses it: "
                + ("the weights have no values" if chosen else _NO_IMPORTANCE)
            )
        cols = {weight.path: weight.stored_shape[1] for weight in chosen}
        self.inputs = self.floats.measure(cols, plain, magnitudes=static)
        for path, found in self.inputs.items():
            weighs = self._weighs_columns(by_path[path])
            kinds = " and ".join(["importance of columns"] * weighs + ["range"] * static)
            dead = "; all of them are zero: encoded without it" if weighs and found.importance is None else ""
            self.decisions.append(("calibrate", path, f"{kinds}, of {counted(found.rows, 'row')}{dead}"))

    def _weighs_columns(self, weight: _Weight) -> bool:
        """Whether it is encoded with an importance of columns."""
        return weight.takes_importance and weight.path not in self.by_data

    def _clips(self) -> dict[str, float]:
        found = {path: each.magnitudes for path, each in self.inputs.items()}
        return {path: each.clip(self.recipe.observer) for path, each in found.items() if each is not None}

    def _choose_codes(self, weights: Sequence[_Weight], floats: FloatRun, plain: Values) -> None:
        """GPTQ's codes of linears, in the order of the graph, each for the inputs that it gets when all weights before
        it are quantised."""
        quantised = {w.path: w for w in weights if w.format is not None and w.matrix is not None}
        unread = {path: "" if path in floats.reads else "no product of the graph reads it" for path in quantised}
        whys = {path: weight.why_nearest or unread[path] for path, weight in quantised.items()}
        chosen = {path: weight for path, weight in quantised.items() if not whys[path]}
        if not chosen or not self.valued:
            why = "the weights have no values" if chosen else "no linear has codes that it could choose"
            raise RecipeError(f"algorithm='gptq' serves nothing here: {why}")
        said: dict[str, str] = {}
        last = Moments()

        def value(path: str) -> Array | None:
            packed = self.packed.get(path)
            if packed is None and path in quantised and whys[path]:
                values = plain(path)
                assert values is not None
                with _naming_errors(quantised[path]):
                    packed = self.packed[path] = encode(resolve_format(quantised[path].format or ""), values)
            return plain(path) if packed is None else packed.format.decode(packed)

        with Progress("choosing codes (gptq)", sum(w.wide_bytes for w in chosen.values())) as progress:

            def see(path: str, x: list[Array]) -> None:
                if path in self.packed:  # a weight that several linears read
                    return
                weight, values = chosen[path], plain(path)
                assert values is not None
                fmt, uses = resolve_format(weight.format or ""), len(floats.reads[path])
                with _naming_errors(weight):
                    solved, said[path] = choose_codes(path, fmt, values.astype(np.float32), last.of(path, x), uses=uses)
                self.packed[path] = solved.packed
                progress.step(weight.wide_bytes)

            floats.together(floats.hold(), chosen, value, see)
        self.by_data = set(said)
        for path, why in whys.items():
            self.decisions.append(("codes", path, said[path] if not why else f"nearest codes: {why}"))

    def _importance(self, weight: _Weight) -> npt.NDArray[np.float32] | None:
        found = self.inputs.get(weight.path)
        return found.importance if found is not None and self._weighs_columns(weight) else None

    # --- storage ---

    def _store(self, weights: Sequence[_Weight], arrays: dict[Value, Any]) -> None:
        coded = [w for w in weights if w.format is not None and self.valued]
        self.files.begin([self._entry(w) for w in coded], sum(w.nbytes for w in weights if w.format is None))
        with Progress("packing weights", sum(w.plain_bytes for w in coded)) as progress:
            for weight in weights:
                if weight.format is not None:
                    self._encode(weight, arrays[weight.leaf], progress)
                elif weight.why != "not used by the function":
                    self._keep(weight, arrays[weight.leaf])
        self.files.finish()

    def _entry(self, weight: _Weight) -> Entry:
        assert weight.matrix is not None and weight.format is not None
        text = format_text(parse_format(weight.format))
        return Entry(weight.path, text, _dtype(weight.matrix), weight.stored_shape, weight.nbytes, "jax")

    def _encode(self, weight: _Weight, leaf: Any, progress: Progress) -> None:
        matrix, ref = weight.matrix, parse_format(weight.format or "")
        assert matrix is not None
        fmt = resolve_format(weight.format or "")

        def fill(out: Bytes) -> None:
            values = matrix.values(self.exported.values(leaf, weight.path))
            packed, importance = self.packed.get(weight.path), self._importance(weight)
            if packed is None or importance is not None:
                with _naming_errors(weight):
                    step = lambda n: progress.step(n * values.itemsize)  # noqa: E731
                    packed = encode(fmt, values, out=out, importance=importance, step=step)
            else:
                out[...] = packed.data
                progress.step(weight.plain_bytes)
            share = lost_share(fmt, values, packed)
            if share:
                self.lost[weight.path] = describe(share)

        def identity() -> dict[str, Any]:
            values = matrix.values(self.exported.values(leaf, weight.path))
            found = {"sha256": hashlib.sha256(values.tobytes()).hexdigest(), "dtype": str(values.dtype)}
            if weight.path in self.by_data:
                codes = self.packed[weight.path].data
                return {**found, "codes": hashlib.sha256(codes.tobytes()).hexdigest()}
            importance = self._importance(weight)
            if importance is None:
                return found
            return {**found, "importance": hashlib.sha256(importance.tobytes()).hexdigest()}

        data = self.files.store(self._entry(weight), identity, fill) if self.valued else NoBytes(weight.nbytes)
        self.store.add(
            StoredTensor(weight.path, _dtype(matrix), weight.stored_shape, data, ref, "canonical", (weight.path,))
        )

    def _keep(self, weight: _Weight, leaf: Any) -> None:
        """A float matrix in the order of its product, or the array as it is."""
        dtype = _dtype(weight.matrix) if weight.matrix is not None else weight.leaf.dtype
        shape = weight.stored_shape
        if not self.valued:
            self.store.add(StoredTensor(weight.path, dtype, shape, NoBytes(weight.nbytes), parameters=(weight.path,)))
            return
        array = self.exported.values(leaf, weight.path)
        values = weight.matrix.values(array) if weight.matrix is not None else _stored(array)
        self.store.add_array(weight.path, values.astype(NUMPY_DTYPES[dtype], order="C"), (weight.path,))


def _dtype(matrix: Matrix) -> DType:
    """The type that the function multiplies in: that of a conversion behind the weight."""
    return matrix.dtype  # type: ignore[return-value]


def _stored(array: Array) -> Array:
    """Unsigned integers as signed ones of the same bits."""
    if array.dtype in DTYPE_NAMES:
        return array
    return array.view(array.dtype.str.replace("u", "i")) if array.dtype.kind == "u" else array


@contextlib.contextmanager
def _naming_errors(weight: _Weight) -> Iterator[None]:
    """Adds the path and the way out to a format's errors."""
    shape, module = " x ".join(map(str, weight.stored_shape)), weight.path.rpartition(".")[0] or weight.path
    try:
        yield
    except FormatShapeError as error:
        raise FormatShapeError(
            f"parameter '{weight.path}' ({shape}): {error}. Choose another format for it: rules={{{module!r}: 'int8'}}"
            f", or keep it: rules={{{module!r}: None}}; a text such as 'q4_K, else int8' names an alternative"
        ) from error
    except FormatValueError as error:
        raise FormatValueError(f"parameter '{weight.path}' ({shape}): {error}") from error


def _modules(paths: Sequence[str]) -> list[str]:
    """Every path that holds an array, and its parents."""
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")[:-1]
        for end in range(1, len(parts) + 1):
            found[".".join(parts[:end])] = None
    return list(found)
