"""Hostile calls of the torch operators that a stranger's file may name: none may touch memory that is not its own.

    python tests/fallback/operatorfuzz/sweep.py --calls 400 [--ops unfold_backward grid_sampler_2d]

Sound calls come from PyTorch's own database of operators and are changed: sizes, ranks, dtypes, numbers, lists, words
and indices.  Each changed call runs twice in a forked child, with the guarded memory of guard.cpp under two fillings.
Findings are a child that ends by a signal, and results that differ between the fillings.  An error that torch raises is
what should come.  A call that takes more than SECONDS is counted and not judged.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import random
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 4
FILLINGS = (0x11, 0xEE)
FOUND = ("crash", "differs", "exit")
SAMPLES = 8
"""Sound calls that are kept for each overload, the first of their kinds."""


def build(folder: Path) -> Path:
    """The library that a sweep preloads."""
    library = folder / "libguard.so"
    compiler = os.environ.get("CXX") or "g++"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", library, HERE / "guard.cpp", "-ldl"], check=True
    )  # fmt: skip
    return library


def sweep(folder: Path, *arguments: str, timeout: float = 3600) -> subprocess.CompletedProcess[str]:
    """A sweep in a process that has the guarded memory."""
    environment = os.environ | {
        "LD_PRELOAD": str(build(folder)), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONMALLOC": "pymalloc",
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-P", str(HERE / "sweep.py"), "--inside", *arguments],
        env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


# --- sound calls -----------------------------------------------------------------------------------------------------

Call = tuple[tuple[Any, ...], dict[str, Any]]


def sound_calls(names: set[str], written: bool = False) -> dict[str, list[Call]]:
    """Calls that torch takes, by overload: `aten.add.Tensor`. `written`: without the database, which takes a minute."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sys.path.insert(0, str(HERE.parents[1] / "frontends"))
    from opinfo import database

    found: dict[str, dict[str, Call]] = defaultdict(dict)

    def keep(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        calls = found[str(overload)]
        if len(calls) < SAMPLES and all(t.numel() < 5000 for t in _tensors((args, kwargs))):
            calls.setdefault(_kind((args, kwargs)), (_copied(tuple(args)), _copied(kwargs)))

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            space, _, name = func._schema.name.partition("::")
            if space == "aten" and name in names:
                keep(func, args, kwargs)
            return func(*args, **kwargs)

    for info in [] if written else database():
        for dtype in (torch.float32, torch.int64, torch.complex64):
            if dtype not in info.dtypes:
                continue
            try:
                samples = list(_first(info.sample_inputs("cpu", dtype, requires_grad=False), 40))
            except Exception:
                continue
            for sample in samples:
                args = (sample.input, *sample.args)
                try:
                    with Recorder():
                        info.op(*args, **sample.kwargs)
                except Exception:
                    continue
                for overload in _overloads({info.name.rpartition(".")[2].lstrip("_"), info.aten_name} & names):
                    if len(found[str(overload)]) < SAMPLES:
                        try:
                            overload(*args, **sample.kwargs)
                        except Exception:
                            continue
                        keep(overload, args, sample.kwargs)
    for name, args, kwargs in written_calls():
        if name.split(".")[1] in names:
            packet, overload = name.split(".")[1:]
            getattr(getattr(torch.ops.aten, packet), overload)(*args, **kwargs)
            keep(name, args, kwargs)
    return {name: list(calls.values()) for name, calls in found.items() if calls}


def written_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Of operators that the database does not reach, and of those that were once found to leave their memory."""
    import torch
    from torch import arange, complex64, eye, ones, rand

    image, signal_, square = rand(2, 3, 8, 6), rand(2, 3, 9), rand(2, 4, 4) + 4 * eye(4)
    matrix = rand(4, 3)
    yield "aten._linalg_eigvals.default", (square,), {}
    channels = [rand(3) for _ in range(4)]
    yield "aten._native_batch_norm_legit_no_training.default", (image, *channels, 0.1, 1e-5), {}
    yield "aten._native_batch_norm_legit_no_training.default", (rand(4, 3), None, None, *channels[2:], 0.1, 1e-5), {}
    for name in ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "upsample_bilinear2d"):
        yield f"aten.{name}.default", (image, [4, 9], False), {}
        yield f"aten.{name}.default", (image, [4, 9], False, 0.5, 1.5), {}
        yield f"aten.{name}.vec", (image, None, True, [0.5, 1.5]), {}
    yield "aten.adaptive_max_pool1d.default", (signal_, [4]), {}
    yield "aten.affine_grid_generator.default", (rand(2, 2, 3), [2, 3, 5, 4], False), {}
    yield "aten.affine_grid_generator.default", (rand(2, 3, 4), [2, 3, 5, 4, 2], True), {}
    for name in ("bartlett_window", "blackman_window", "hamming_window", "hann_window"):
        yield f"aten.{name}.default", (7,), {}
        yield f"aten.{name}.periodic", (8, False), {}
    yield "aten.kaiser_window.beta", (8, True, 3.5), {}
    yield "aten.cdist.default", (rand(2, 5, 3), rand(2, 4, 3), 2.0), {}
    yield "aten.col2im.default", (rand(2, 12, 20), [5, 6], [2, 2], [1, 1], [0, 0], [1, 1]), {}
    yield "aten.col2im.default", (rand(12, 42), [6, 5], [2, 2], [1, 1], [1, 1], [1, 1]), {}
    yield "aten.fft_fftfreq.default", (9, 0.5), {}
    yield "aten.fft_rfftfreq.default", (8, 2.0), {}
    yield "aten.fft_fftshift.default", (signal_, [1, 2]), {}
    yield "aten.fft_ifftshift.default", (signal_,), {}
    yield "aten.ger.default", (rand(4), rand(3)), {}
    yield "aten.inverse.default", (square,), {}
    yield "aten.lift_fresh_copy.default", (signal_,), {}
    yield "aten.linalg_tensorinv.default", ((rand(4, 6) + 1).reshape(4, 6)[:, :4].reshape(2, 2, 4), 2), {}
    yield "aten.linalg_tensorsolve.default", (eye(6).reshape(2, 3, 6), ones(2, 3)), {}
    yield "aten.max_pool1d.default", (signal_, [3], [2], [1], [1], True), {}
    yield "aten.max_pool2d.default", (image, [3, 2], [2, 1], [1, 1], [1, 2], True), {}
    yield "aten.max_pool3d.default", (rand(1, 2, 5, 6, 7), [2, 2, 3], [2, 1, 2], [1, 1, 1], [1, 1, 1], False), {}
    yield "aten.orgqr.default", (matrix, rand(3)), {}
    yield "aten.ormqr.default", (matrix, rand(3), rand(4, 5), True, False), {}
    yield "aten.slice_scatter.default", (signal_, rand(2, 2, 9), 1, 0, 3, 2), {}
    yield "aten.swapaxes.default", (signal_, 0, -1), {}
    yield "aten.tensordot.default", (rand(3, 4, 5), rand(4, 3, 2), [1, 0], [0, 1]), {}
    yield "aten.gather.default", (matrix, 0, arange(3).reshape(1, 3)), {}
    yield "aten.median.dim", (matrix.expand(2, 4, 3), 1, True), {}
    waves = rand(3, 5, 8).to(complex64)
    yield "aten._fft_c2c.default", (waves, [0, 2], 1, True), {}
    yield "aten._fft_r2c.default", (rand(3, 5, 8), [1, 2], 0, True), {}
    yield "aten._fft_c2r.default", (waves, [0, 2], 2, 14), {}
    yield "aten.grid_sampler_2d.default", (image, rand(2, 4, 5, 2), 0, 0, False), {}
    yield "aten.grid_sampler_2d.default", (image, rand(2, 4, 5, 2), 2, 1, True), {}
    yield "aten.grid_sampler_3d.default", (image[:, None], rand(2, 4, 5, 2, 3), 0, 2, True), {}
    yield "aten.native_group_norm.default", (image, rand(3), rand(3), 2, 3, 48, 3, 1e-5), {}
    yield "aten.native_group_norm.default", (image, None, None, 2, 3, 48, 1, 1e-5), {}
    yield "aten.unfold_backward.default", (rand(2, 3, 4), [2, 10], 1, 4, 3), {}
    yield "aten.lu_unpack.default", tuple(torch.linalg.lu_factor(square)), {}
    yield "aten.linalg_ldl_solve.default", (*torch.linalg.ldl_factor(square + square.mT), square), {}


def _first(items: Any, count: int) -> Iterator[Any]:
    for _, item in zip(range(count), items, strict=False):
        yield item


def _overloads(names: set[str]) -> Iterator[Any]:
    """Those that write nothing, of these operators."""
    import torch

    for name in sorted(names):
        packet = getattr(torch.ops.aten, name, None)
        for each in packet.overloads() if packet else ():
            overload = getattr(packet, each)
            if not overload._schema.is_mutable and any("Tensor" in str(a.type) for a in overload._schema.arguments):
                yield overload


def _tensors(value: Any) -> Iterator[Any]:
    import torch
    import torch.utils._pytree as pytree

    yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _copied(value: Any) -> Any:
    import torch
    import torch.utils._pytree as pytree

    return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, value)


def _kind(value: Any) -> str:
    """Calls of one kind are as good as one: types of arguments, ranks and dtypes of tensors, words."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{value.dim()}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_kind, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_kind(v)}' for k, v in value.items())}}}"
    return repr(value) if isinstance(value, str | bool | None) else type(value).__name__


# --- changed calls ---------------------------------------------------------------------------------------------------

INTS = [*range(-3, 6), 7, 8, 16, 99, 1000, -1000, 65537]
INTS += [2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
FLOATS = (0.0, -0.0, -1.0, 0.5, 1e-45, 1e-7, 1e7, 3e38, -3e38, 1e300, float("inf"), float("-inf"), float("nan"))
WORDS = [
    "mean", "sum", "none", "reflect", "constant", "circular", "replicate", "linear", "nearest", "amax", "prod", "xx",
    "tanh", "ortho", "fro", "nuc", "floor", "trunc", "higher", "L", "left", "right", "full", "gelsd", "A",
]  # fmt: skip


class Changer:
    """Changes of a call, by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def call(self, call: Call) -> Call:
        """With one to three changes."""
        args, kwargs = call
        items: list[Any] = [*args, *kwargs.values()]
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            if items:
                at = self.random.randrange(len(items))
                items[at] = self.value(items[at])
        return tuple(items[: len(args)]), dict(zip(kwargs, items[len(args) :], strict=True))

    def value(self, value: Any) -> Any:
        import torch

        pick = self.random.choice
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return pick(INTS) if self.random.random() < 0.7 else value + pick((-2, -1, 1, 2))
        if isinstance(value, float):
            return pick(FLOATS)
        if isinstance(value, str):
            return pick(WORDS)
        if isinstance(value, list | tuple):
            return self.items(list(value))
        if isinstance(value, torch.dtype):
            return pick(
                (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.uint8, torch.complex64)
            )
        if value is None:
            return pick((None, 0, 1, -1, 2, 0.5, True, [1], [0, 1], torch.ones(3), torch.zeros(2, dtype=torch.int64)))
        return value

    def items(self, items: list[Any]) -> list[Any]:
        match self.random.randrange(5):
            case 0 if items:
                del items[self.random.randrange(len(items))]
            case 1:
                items.append(items[-1] if items else 1)
            case 2 if items:
                items = [self.value(item) for item in items]
            case _ if items:
                at = self.random.randrange(len(items))
                items[at] = self.value(items[at])
        return items

    def tensor(self, value: Any) -> Any:
        import torch

        pick = self.random.choice
        shape = list(value.shape)
        match self.random.randrange(9):
            case 0 | 1 if shape:  # another size
                at = self.random.randrange(len(shape))
                shape[at] = pick((0, 1, max(shape[at] - 1, 0), shape[at] + 1, 2 * shape[at], 33))
                return self.filled(shape, value)
            case 2:
                return self.filled([*shape, pick((0, 1, 2))], value)
            case 3 if shape:
                return self.filled(shape[1:], value)
            case 4:
                kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
                         torch.uint8, torch.bool, torch.complex64)  # fmt: skip
                return self.filled(shape, value.to(pick(kinds)))
            case 5 if shape:  # one row for all
                return value[:1].expand(value.shape) if shape[0] else value
            case 6 if len(shape) > 1:
                return value.transpose(0, -1)
            case 7 | 8:
                return self.hostile(value)
        return self.filled(pick(([], [0], [1], [5], [2, 3], [1, 1, 1], [2, 0, 3])), value)

    def filled(self, shape: Sequence[int], like: Any) -> Any:
        """Values of a tensor in another shape, repeated as needed."""
        import torch

        count = 1
        for size in shape:
            count *= size
        flat = like.reshape(-1) if like.numel() else torch.ones(1, dtype=like.dtype)
        return flat.repeat(-(-max(count, 1) // flat.numel()))[:count].reshape(list(shape))

    def hostile(self, value: Any) -> Any:
        """With some elements that are large, negative or no numbers."""
        import torch

        value = value.clone()
        flat = value.view(-1) if value.is_contiguous() else value.reshape(-1).clone()
        for _ in range(self.random.choice((1, 3, flat.numel()))):
            if flat.numel():
                at = self.random.randrange(flat.numel())
                if value.dtype.is_floating_point or value.dtype.is_complex:
                    flat[at] = torch.tensor(self.random.choice(FLOATS), dtype=torch.float64).to(value.dtype)
                elif value.dtype != torch.bool:
                    limits = torch.iinfo(value.dtype)
                    flat[at] = min(max(self.random.choice(INTS), limits.min), limits.max)
        return flat.view(value.shape)


def placed(value: Any) -> Any:
    """A call's tensors in the memory of this moment, with the strides that they had."""
    import torch
    import torch.utils._pytree as pytree

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.numel() and 0 in leaf.stride():
            base = leaf[tuple(slice(0, 1) if s == 0 else slice(None) for s in leaf.stride())]
            return base.contiguous().clone().expand(leaf.shape)
        if leaf.dim() > 1 and not leaf.is_contiguous() and leaf.transpose(0, -1).is_contiguous():
            return leaf.transpose(0, -1).clone().transpose(0, -1)
        return leaf.contiguous().clone()

    return pytree.tree_map(own, value)


# --- the judge -------------------------------------------------------------------------------------------------------


def outcome(overload: Any, call: Call, guard: Callable[[int], None], condition: Any) -> str:
    """What became of a call: refused, equal under both fillings, or differs."""
    seen: list[Any] = []
    for filling in FILLINGS:
        try:
            guard(filling)
            args, kwargs = placed(call)
            if condition is not None and not condition(args, kwargs):
                return "refused"
            results = overload(*args, **kwargs)
            seen.append([_bytes(result) for result in _tensors(results)] if results is not None else None)
            del args, kwargs, results
        except Exception as error:
            seen.append(type(error).__name__)
        finally:
            guard(-1)
    if seen[0] != seen[1]:
        return "differs"
    return "refused" if isinstance(seen[0], str) else "equal"


def _bytes(value: Any) -> bytes:
    import torch

    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    plain = plain.resolve_neg().contiguous()
    shape = str((value.dtype, tuple(value.shape))).encode()
    return shape + (plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")


def judge(
    name: str, overload: Any, calls: Sequence[Call], seeds: range, guard: Callable[[int], None], condition: Any
) -> Counter[str]:
    """Runs a changed call for each seed, in children that go on behind the one that ended."""
    counts: Counter[str] = Counter()
    at = seeds.start
    while at < seeds.stop:
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as log:
            pid = os.fork()
            if not pid:
                _child(overload, calls, range(at, seeds.stop), guard, condition, writer, log.fileno())
            os.close(writer)
            lines = _lines(reader, pid)
            _, status = os.waitpid(pid, 0)
            os.close(reader)
            log.seek(0)
            trace = log.read().decode("utf-8", "replace")
        for line in lines:
            seed, _, kind = line.partition(" ")
            if kind:
                counts[kind] += 1
                if kind == "differs":
                    print(f"FOUND differs {name} seed {seed}: {described(calls, int(seed))}", flush=True)
        at = seeds.stop
        if os.WIFSIGNALED(status):
            last = int(lines[-1].split(" ")[0]) if lines else seeds.start
            number = os.WTERMSIG(status)
            kind = "slow" if number in (signal.SIGALRM, signal.SIGKILL) else "crash"
            counts[kind] += 1
            if kind == "crash":
                text = trace.strip().splitlines()[0][:100] if trace.strip() else ""
                print(
                    f"FOUND {signal.Signals(number).name} {name} seed {last}: {described(calls, last)} {text}",
                    flush=True,
                )
            at = last + 1
        elif status:
            print(f"FOUND exit {name}: {trace[-2000:]}", flush=True)
            counts["exit"] += 1
    return counts


def described(calls: Sequence[Call], seed: int) -> str:
    import torch
    import torch.utils._pytree as pytree

    def short(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        strides = "" if leaf.is_contiguous() else f" by {list(leaf.stride())}"
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{strides}"

    return str(pytree.tree_map(short, changed(calls, seed)))[:400]


def changed(calls: Sequence[Call], seed: int) -> Call:
    return Changer(seed).call(calls[seed % len(calls)])


def _lines(reader: int, pid: int) -> list[str]:
    data = b""
    while True:
        ready, _, _ = select.select([reader], [], [], 60)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            break
        part = os.read(reader, 1 << 16)
        if not part:
            break
        data += part
    return data.decode().splitlines()


def _child(
    overload: Any, calls: Sequence[Call], seeds: range, guard: Any, condition: Any, writer: int, log: int
) -> None:
    status = 1
    try:
        os.dup2(log, 2)
        faulthandler.disable()
        for seed in seeds:
            os.write(writer, f"{seed}\n".encode())
            call = changed(calls, seed)
            signal.alarm(SECONDS)
            kind = outcome(overload, call, guard, condition)
            signal.alarm(0)
            os.write(writer, f"{seed} {kind}\n".encode())
        status = 0
    except BaseException:
        os.write(log, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _inside(options: argparse.Namespace) -> int:
    import torch

    from qcompiler.frontends.torch.capture.torch_guards import condition_of
    from qcompiler.plan.torch_operators import SAFE_OPERATORS

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    guard = ctypes.CDLL(None).guard_on
    names = set(options.ops or SAFE_OPERATORS) | set(options.also)
    calls = sound_calls(names, options.written)
    totals: Counter[str] = Counter()
    found_in = 0
    for name in sorted(calls):
        space, packet, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, space), packet), overload)
        condition = None if options.unconditioned else condition_of(found)
        seeds = range(options.seed, options.seed + options.calls)
        counts = judge(name, found, calls[name], seeds, guard, condition)
        totals += counts
        found_in += any(counts[kind] for kind in FOUND)
        if options.verbose:
            print(name, dict(counts), flush=True)
    print(f"{len(calls)} overloads; {dict(totals)}; found in {found_in}")
    if without := [] if options.written else sorted(names - {name.split(".")[1] for name in calls}):
        print(f"FOUND no sound call: {' '.join(without)}")
        return 1
    return int(found_in > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=200, help="changed calls of each overload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ops", nargs="*", help="operators, without their overloads; all that are listed by default")
    parser.add_argument("--also", nargs="*", default=[], help="operators beside the listed ones")
    parser.add_argument("--unconditioned", action="store_true", help="without the conditions of torch_guards.py")
    parser.add_argument("--written", action="store_true", help="only what written_calls() has")
    parser.add_argument("--verbose", action="store_true", help="a line for each overload")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _inside(options)
    with tempfile.TemporaryDirectory() as folder:
        done = sweep(Path(folder), *sys.argv[1:])
    print(done.stdout, end="")
    print(done.stderr[-3000:], end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    assert sysconfig.get_platform().startswith("linux")
    sys.exit(main())
