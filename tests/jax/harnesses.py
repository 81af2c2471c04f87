"""JAX's own cases of its primitives as the yardstick: the interpreter's results beside `jax.jit`'s.

    .venv/bin/python -P tests/jax/harnesses.py --page docs/jax-primitives.md     # all of them
    .venv/bin/python -P tests/jax/harnesses.py --groups gather pad               # some, with what differs

JAX tests that its primitives can be translated with `jax._src.internal_test_util.test_harnesses`: about 5,600 functions
of one primitive each, over types, shapes and parameters.  Each ends in one of four classes: `equal`, `refused` (a
QCompilerError, which a user can read), `wrong`, and `error` (any other exception).  Those that `jax.jit` itself refuses
on a CPU are not counted.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax._src.internal_test_util import test_harnesses

from qcompiler.errors import QCompilerError
from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.ir.interpreter import run

TOLERANCES = {"float64": (1e-9, 1e-10), "float32": (1e-4, 1e-5), "float16": (4e-3, 2e-3), "bfloat16": (2e-2, 1e-2)}
"""By type: relative to each number, and to the largest of the result, since sums that cancel are as good as terms."""
DIFFERS = {
    "top_k_sort_inf_nan_inshape_float32_5_k_5": (
        "XLA puts a NaN whose sign is set behind -inf; programs take every NaN as the largest number"
    ),
}
"""Cases whose results differ by a choice of the project, with the reason. They are not counted."""
ANY_BITS = ("rng_bit_generator",)
"""Primitives whose results JAX leaves to the backend: shapes and types are compared."""


def harnesses(groups: Iterable[str] = ()) -> list[Any]:
    """JAX's cases that a CPU runs, of some groups or of all."""
    chosen = set(groups)
    found = [h for h in test_harnesses.all_harnesses if h.filter("cpu") and (not chosen or h.group_name in chosen)]
    return sorted(found, key=lambda each: (each.group_name, each.fullname))


@dataclass
class Judged:
    """What became of a case; "" if JAX does not run it itself."""

    group: str
    name: str
    outcome: str
    detail: str = ""


def judge(harness: Any) -> Judged:
    """Runs one case by `jax.jit` and by the interpreter."""
    done = Judged(harness.group_name, harness.fullname, "")
    args = jax.tree_util.tree_map(_as_jax_has_it, harness.dyn_args_maker(np.random.RandomState(0)))
    kinds = [getattr(leaf, "dtype", None) for leaf in jax.tree_util.tree_leaves(args)]

    def function(_: Any, *given: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(given)
        leaves = [_viewed(leaf, kind) for leaf, kind in zip(leaves, kinds, strict=True)]
        return jax.tree_util.tree_map(_signed, harness.dyn_fun(*jax.tree_util.tree_unflatten(tree, leaves)))

    given = jax.tree_util.tree_map(_signed, args)
    arrays = [leaf for leaf in jax.tree_util.tree_leaves(given) if hasattr(leaf, "dtype")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = jax.tree_util.tree_leaves(jax.tree_util.tree_map(_signed, jax.jit(harness.dyn_fun)(*args)))
        except Exception:
            return done
        try:
            result = import_jax(function, ((), *given))
            found = run(result.module, result.weights, [np.asarray(each) for each in arrays], states={})
        except QCompilerError as error:
            done.outcome, done.detail = "refused", f"{type(error).__name__}: {error}"
            return done
        except Exception as error:
            done.outcome, done.detail = "error", f"{type(error).__name__}: {error}"[:400]
            return done
    if harness.group_name == "sort" and not harness.params.get("is_stable", True):
        wanted, found = _in_one_order(wanted), _in_one_order(found)
    bad = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not same(harness.group_name, a, b)]
    if harness.fullname in DIFFERS:
        assert bad, f"{harness.fullname} is equal now: take it out of DIFFERS"
        return done
    done.outcome = "wrong" if bad else "equal"
    if bad:
        done.detail = f"result {bad[0]}: {np.asarray(wanted[bad[0]])!s:.150} but {np.asarray(found[bad[0]])!s:.150}"
    return done


def _as_jax_has_it(leaf: Any) -> Any:
    """An array in the types that JAX computes in: int32 for NumPy's int64."""
    return np.asarray(jnp.asarray(leaf)) if hasattr(leaf, "dtype") else leaf


def _signed(leaf: Any) -> Any:
    """Unsigned integers as the signed ones of the same bits: programs take and return no others."""
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.unsignedinteger):
        return leaf
    kind = np.dtype(f"int{8 * leaf.dtype.itemsize}")
    return leaf.view(kind) if isinstance(leaf, np.ndarray) else lax.bitcast_convert_type(leaf, kind)


def _viewed(leaf: Any, kind: Any) -> Any:
    """The inverse of `_signed`, in a function."""
    unsigned = kind is not None and jnp.issubdtype(kind, jnp.unsignedinteger)
    return lax.bitcast_convert_type(leaf, kind) if unsigned else leaf


def _in_one_order(results: Sequence[Any]) -> list[Any]:
    """Vectors that were sorted together, with rows of equal keys in an order of their own: a sort may leave it open."""
    if any(np.asarray(each).ndim != 1 for each in results):
        return list(results)
    order = np.lexsort([np.asarray(each) for each in reversed(results)])
    return [np.asarray(each)[order] for each in results]


def same(group: str, wanted: Any, found: Any) -> bool:
    """Equal in shape, type and value; floats within a few roundings of their type."""
    wanted, found = np.asarray(wanted), np.asarray(found)
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    if group in ANY_BITS:
        return True
    if wanted.dtype.name not in TOLERANCES:
        return bool(np.array_equal(wanted, found))
    relative, of_largest = TOLERANCES[wanted.dtype.name]
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    least = float(ml_dtypes.finfo(wanted.dtype).tiny)  # XLA may flush what is smaller
    largest = float(finite.max()) if finite.size else 0.0
    return bool(np.allclose(b, a, rtol=relative, atol=of_largest * largest + least, equal_nan=True))


def reason(detail: str) -> str:
    """What is refused, without the place and the sizes of the case."""
    line = detail.partition("\n")[0].partition(": ")[2]
    line = re.sub(r" \([^ ]*\.py:.*", "", line)  # the line of this module, which is no user's
    return re.sub(r"\d+(\.\d+)?", "…", line)[:150]


def page(judged: Sequence[Judged]) -> str:
    """docs/jax-primitives.md."""
    kinds = ("equal", "refused", "wrong", "error")
    counted = [each for each in judged if each.outcome]
    total = Counter(each.outcome for each in counted)
    reasons = Counter(reason(each.detail) for each in counted if each.outcome == "refused")
    groups: dict[str, Counter[str]] = {}
    for each in counted:
        groups.setdefault(each.group, Counter())[each.outcome] += 1
    rows = [f"| `{g}` | {sum(c.values())} | {' | '.join(str(c[k]) for k in kinds)} |" for g, c in groups.items()]
    why = [f"| {text.replace('|', chr(92) + '|')} | {number} |" for text, number in reasons.most_common()]
    numbers = ", ".join(f"{total[kind]} {kind}" for kind in kinds)
    return PAGE.format(
        summary=f"{len(groups)} groups, {len(counted)} cases: {numbers}.", rows="\n".join(rows), why="\n".join(why)
    )


PAGE = """# JAX's primitives

Generated by `tests/jax/harnesses.py --page docs/jax-primitives.md`. JAX has a list of cases by which it tests that its
primitives can be translated (`jax._src.internal_test_util.test_harnesses`): functions of one primitive each, over
types, shapes and parameters. Each goes through `jax.export` and the [door for JAX](doors.md); the interpreter, which
defines the meaning of the IR, runs it, and the results are compared with those of `jax.jit`. *Equal*: floats within a
few roundings of their type, everything else exactly. *Refused*: an error that says why. *Wrong* and *error* (Python
exceptions that do not help a user) must be 0. `tests/jax/test_harnesses.py` runs all of them in the full run, and a few
in every run. Cases that `jax.jit` itself refuses on a CPU are not counted, nor is one that differs by a choice: in
`top_k` XLA puts a NaN whose sign is set behind -inf, and programs take every NaN as the largest number.

{summary}

## What is refused

| reason | cases |
|---|---|
{why}

## Primitives

| primitive | cases | equal | refused | wrong | error |
|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="*", default=[], help="primitives; all without it")
    parser.add_argument("--part", default="1/1", help="k/n: the k-th of n parts")
    parser.add_argument("--page", type=Path, help="write the page")
    options = parser.parse_args()
    k, n = map(int, options.part.split("/"))
    judged = []
    for harness in harnesses(options.groups)[k - 1 :: n]:
        judged.append(judge(harness))
        if judged[-1].outcome in ("wrong", "error"):
            print(f"{judged[-1].outcome}  {judged[-1].name}: {judged[-1].detail}", flush=True)
    counts = Counter(each.outcome for each in judged)
    print(dict(counts))
    if options.page is not None:
        options.page.write_text(page(judged))
    else:
        for text, number in Counter(reason(e.detail) for e in judged if e.outcome == "refused").most_common():
            print(f"{number:5}  {text}")


if __name__ == "__main__":
    main()
