"""A random list of edits for a seed. The same random numbers give the same edits of the same seed."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

from filefuzz import documents
from filefuzz.documents import Edit, Files, Text

INTEGERS = (
    -1, 0, 1, 2, 3, 7, 63, 64, 255, 4095, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53 + 1, 2**62,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400, -(2**31), -(2**63), -(2**64),
)  # fmt: skip
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "1e308", "-0.0", "0.5", "1e-320", "true", "false", "null", "[]", "{}",
       "[[]]", '{"a": 1}', '"', "nul", "01", '"\\ud800"', '"\\u0000"')  # fmt: skip
STRINGS = (
    "", " ", "\0", "a\nb", "../../etc/passwd", "/etc/passwd", "..", "/dev/zero", "/dev/stdin", "\x1b[31m", "*/", "\\",
    "é\u202e", "s", "s + 1", "s*s*s*s*s", "1+1", "s//0", "(((", "min(s, max(", "nan", "0x", "-1", "1" * 5000, "%s%n{0}",
    "re:(a+)+$", "re:(", "re:" + "(.*)*" * 8 + "x", "float64", "complex64", "load", "__class__", "LlamaModel",
    "AutoModel", "pipeline", "bert", "F64", "F8_E8M0", "U8", "F4", "gptq", "awq", "sim", "cuda", "cpu", "x86-64",
)  # fmt: skip
LONG = (
    ("a", 100_000), ("[", 100_000), ("1+", 3000), ("(", 3000), ("s*", 200), ("(s+1)*", 30), ("\\u0000", 3000),
    ("9", 5000),
)  # fmt: skip


def edits(random_: random.Random, files: Files) -> list[Edit]:
    """One to four edits, most of them of one kind of thing."""
    made = [_one(random_, files) for _ in range(random_.choice((1, 1, 1, 2, 2, 3, 4)))]
    return [edit for edit in made if edit is not None]


def _one(random_: random.Random, files: Files) -> Edit | None:
    name = random_.choice(sorted(files))
    raw = files[name]
    assert isinstance(raw, bytes)
    choice = random_.random()
    if choice < 0.12:
        return _bytes(random_, name, raw)
    if len(files) > 1 and choice < 0.18:
        return _file(random_, name, files)
    kind = name.rpartition(".")[2]
    return OF[kind](random_, name, raw)


@functools.lru_cache(512)
def _opened(name: str, raw: bytes) -> Any:
    """A seed's file as a document, which is only read here."""
    return documents.document(name, raw)


# --- any file --------------------------------------------------------------------------------------------------------


def _bytes(random_: random.Random, name: str, raw: bytes) -> Edit:
    size = len(raw)
    at = random_.choice(
        (random_.randrange(size), min(random_.randrange(400), size - 1), max(size - 1 - random_.randrange(200), 0))
    )
    match random_.randrange(6):
        case 0:
            return ["bytes", name, at, 1, bytes([raw[at] ^ 1 << random_.randrange(8)]).hex(), 1]
        case 1:
            return ["bytes", name, at, size - at, "", 1]  # cut off
        case 2:
            width = random_.choice((1, 2, 4, 8, 64))
            return ["bytes", name, at, width, random_.choice(("00", "ff", "7f", "80", "41")), width]
        case 3:
            start, count = random_.randrange(size), random_.choice((1, 4, 8, 32, 256))
            return ["bytes", name, at, count, raw[start : start + count].hex(), 1]
        case 4:
            return [
                "bytes",
                name,
                at,
                0,
                bytes(random_.randbytes(random_.choice((1, 4, 16)))).hex(),
                random_.choice((1, 1, 100)),
            ]
        case _:
            return ["bytes", name, size, 0, "00", random_.choice((1, 100, 1 << 16))]


def _file(random_: random.Random, name: str, files: Files) -> Edit:
    match random_.randrange(5):
        case 0:
            return ["file", name, "delete"]
        case 1:
            return ["file", name, "link", random_.choice(("/etc/passwd", "/dev/null", "nowhere", name, "..", "/"))]
        case 2:
            return [
                "file",
                name,
                "write",
                [[random_.choice(("", "{}", "[]", "null", "1", '"a"', "\ufeff{}", "\0")), 1]],
            ]
        case 3:
            return ["file", name, "copy", random_.choice(sorted(files))]
        case _:
            return [
                "file",
                name,
                "copy",
                random_.choice(("more.safetensors", "a.safetensors.index.json", "tokenizer.json")),
            ]


# --- JSON ------------------------------------------------------------------------------------------------------------


def _walk(random_: random.Random, value: Any) -> list[Any]:
    """A random path: down, a random child each time, and rarely not to the end."""
    path: list[Any] = []
    while isinstance(value, dict | list) and value and (not path or random_.random() > 0.12):
        key = random_.choice(sorted(value)) if isinstance(value, dict) else random_.randrange(len(value))
        path.append(key)
        value = value[key]
    return path


def _at(value: Any, path: list[Any]) -> Any:
    for step in path:
        value = value[step]
    return value


def _value(random_: random.Random, old: Any, root: Any) -> Text:
    """A new value as text: of the same type most of the time."""
    choice = random_.random()
    if choice < 0.15:
        return [[random_.choice(RAW), 1]]
    if choice < 0.25:
        return [[json.dumps(_at(root, _walk(random_, root))), 1]]  # another part of the same document
    if choice < 0.30:
        unit, times = random_.choice(LONG)
        return [["[", times], ["]", times]] if unit == "[" else [['"', 1], [unit, times], ['"', 1]]
    if isinstance(old, bool):
        return [["false" if old else "true", 1]]
    if isinstance(old, int | float):
        near = [old + 1, old - 1, old * 2, -old, old * 1000] if abs(old) < 1e300 else []
        return [[json.dumps(random_.choice([*INTEGERS, *near])), 1]]
    if isinstance(old, str):
        return [[json.dumps(random_.choice((*STRINGS, old + "x", old[:-1], old * 2))), 1]]
    if isinstance(old, list) and random_.random() < 0.7:
        items = [json.dumps(item) for item in old]
        random_.shuffle(items)
        items = random_.choice((items, items[:-1], items * 2, items[:1] * 2000, [*items, "1"]))
        return [["[" + ", ".join(items) + "]", 1]]
    return [[json.dumps(random_.choice((*STRINGS, *INTEGERS))), 1]]


def _json_of(random_: random.Random, name: str, value: Any) -> Edit:
    path = _walk(random_, value)
    old = _at(value, path)
    match random_.randrange(10) if path else 9:
        case 0:
            return ["json", name, path, "delete", None]
        case 1 if isinstance(path[-1], str):
            return ["json", name, path, "rename", [[json.dumps(random_.choice(STRINGS)), 1]]]
        case 2 if isinstance(path[-1], str):
            return ["json", name, path, "twice", _value(random_, old, value)]
        case 3 if isinstance(old, list):
            return ["json", name, path, "repeat", [["", random_.choice((0, 2, 1000))]]]
        case _:
            return ["json", name, path, "set", _value(random_, old, value)]


def _json(random_: random.Random, name: str, raw: bytes) -> Edit:
    return _json_of(random_, name, _opened(name, raw).json.value)


# --- containers ------------------------------------------------------------------------------------------------------


def _program(random_: random.Random, name: str, raw: bytes) -> Edit:
    opened = _opened(name, raw)
    if random_.random() < 0.75:
        return _json_of(random_, name, opened.json.value)
    member = random_.choice([n for n, _ in opened.members])
    wide = random_.choice((*INTEGERS, len(raw), len(raw) - 22, 4096))
    match random_.randrange(8):
        case 0:
            return ["member", name, member, random_.choice(("delete", "twice")), None]
        case 1:
            return ["member", name, member, "cut", random_.choice((0, 1, 8, 4096))]
        case 2:
            return ["member", name, member, "deflate", random_.choice((10, 1 << 20, 1 << 24))]
        case 3:
            return ["member", name, member, "name", random_.choice((*STRINGS, "program.json", "ir/x", "native/a.so"))]
        case 4:
            extra = random_.choice(("", "01000800" + "00" * 8, "0100ffff", "01000000", "99990400" + "00" * 4, "01"))
            return ["member", name, member, "extra", extra]
        case 5:
            fields = {**documents.END, **documents.LOCATOR, **{f"wide_{k}": 0 for k in documents.END64}}
            return ["member", name, "", random_.choice(sorted(fields)), wide]
        case 6:
            text = random_.choice(([["x", 1 << 20]], [["\x1b[2J", 3]], [["\0", 9]]))
            return [
                "member",
                name,
                random_.choice([n for n, _ in opened.members if "/" in n] or [member]),
                "content",
                text,
            ]
        case _:
            fields = {
                **documents.CENTRAL,
                **dict.fromkeys(documents.WIDE),
                **{f"local_{k}": 0 for k in documents.LOCAL},
            }
            return ["member", name, member, random_.choice(sorted(fields)), wide]


def _gguf(random_: random.Random, name: str, raw: bytes) -> Edit:
    opened = _opened(name, raw)
    wide = random_.choice(INTEGERS)
    match random_.randrange(9):
        case 0:
            return ["gguf", name, "head", 0, random_.choice(("version", "tensors", "keys")), wide]
        case 1 | 2 | 3:
            index = random_.randrange(len(opened.keys))
            field = random_.choice(("name", "type", "raw", "raw", "raw", "raw", "delete", "twice"))
            return ["gguf", name, "key", index, field, _gguf_key(random_, field, opened.keys[index])]
        case _:
            index = random_.randrange(len(opened.tensors))
            field = random_.choice(("name", "dims", "sizes", "sizes", "sizes", "type", "offset", "delete", "twice"))
            return ["gguf", name, "tensor", index, field, _gguf_tensor(random_, field, opened.tensors[index], wide)]


def _gguf_key(random_: random.Random, field: str, key: list[Any]) -> Any:
    if field == "name":
        other = random_.choice((*STRINGS, "general.alignment", "llama.attention.sliding_window", "llama.expert_count"))
        return [[other, 1]]
    if field == "type":
        return random_.choice((*range(14), 255, 2**31))
    if field != "raw":
        return None
    import struct

    kind, old = key[1], key[2]
    if kind in documents.SCALARS and random_.random() < 0.9:
        code = documents.SCALARS[kind]
        if code in "fd":
            return struct.pack("<" + code, random_.choice((0.0, -1.0, 1e30, float("nan"), float("inf"), 1e-40))).hex()
        bits = 8 * struct.calcsize(code)
        return (random_.choice(INTEGERS) % (1 << bits)).to_bytes(bits // 8, "little").hex()
    if kind == 8:
        text = random_.choice(STRINGS).encode("utf-8", "surrogatepass")
        size = random_.choice((len(text), len(text), random_.choice(INTEGERS) % (1 << 64)))
        return (struct.pack("<Q", size) + text).hex()
    inner, count = random_.choice((*range(13), 99)), random_.choice(INTEGERS) % (1 << 64)
    return random_.choice(
        (old[:4] + struct.pack("<Q", count) + old[12:], struct.pack("<IQ", inner, 2) + old[12:], old[:-1])
    ).hex()


def _gguf_tensor(random_: random.Random, field: str, tensor: dict[str, Any], wide: int) -> Any:
    sizes = list(tensor["sizes"])
    if field == "name":
        return [[random_.choice((*STRINGS, "output.weight", "blk.0.attn_q.weight", "rope_freqs.weight")), 1]]
    if field == "dims":
        return random_.choice((0, 1, 3, 4, 5, 100, 2**31))
    if field == "type":
        return random_.choice((*range(42), 2**31, tensor["type"]))
    if field == "offset":
        return random_.choice((wide, tensor["offset"] + 1, tensor["offset"] + 32, 0))
    if field != "sizes":
        return None
    match random_.randrange(5):
        case 0:
            sizes[random_.randrange(len(sizes))] = wide
        case 1:
            sizes = sizes[::-1]
        case 2:
            sizes = [2**32, 2**32, *sizes][:4]
        case 3:
            sizes = random_.choice(([0], [0, 2**62], [], [1], [1, 1, 1, 1], [32, 1], [2**62, 0], [sizes[0]]))
        case _:
            sizes = [*sizes, 1]
    return sizes


def _safetensors(random_: random.Random, name: str, raw: bytes) -> Edit:
    opened = _opened(name, raw)
    choice = random_.random()
    if choice < 0.05:
        return ["length", name, random_.choice((*INTEGERS, len(raw), len(raw) - 8, len(raw) - 7))]
    if choice < 0.5:
        return _json_of(random_, name, opened.json.value)
    tensor = random_.choice([key for key in opened.json.value if key != "__metadata__"])
    facts = opened.json.value[tensor]
    dtype, shape = facts["dtype"], list(facts["shape"])
    match random_.randrange(5):
        case 0:
            dtype = random_.choice(sorted(documents.SIZES))
        case 1:
            shape = random_.choice((shape[::-1], [], [0], [1], [*shape, 1], shape[1:], [0, *shape], [1, 1]))
        case 2:
            place = random_.randrange(max(len(shape), 1))
            shape[place : place + 1] = [random_.choice((0, 1, 7, 32, 33, 1024))]
        case 3:
            tensor = random_.choice(
                (tensor + "x", tensor.rpartition(".")[0], tensor.replace(".0.", ".1."), *opened.json.value)
            )
        case _:
            pass  # the same type and shape, other values
    if any(size > 1 << 16 for size in shape):
        shape = [1]
    return ["tensor", name, tensor, dtype, shape, random_.choice((0, 0, 255, 127, 1))]


def _arrays(random_: random.Random, name: str, raw: bytes) -> Edit:
    opened = _opened(name, raw)
    member = random_.choice(sorted(opened.members))
    field = random_.choice(
        (
            "descr",
            "shape",
            "shape",
            "fortran_order",
            "more",
            *(("deflate", "twice", "delete", "rename") if opened.zipped else ()),
        )
    )
    if field == "deflate":
        return ["array", name, member, field, random_.choice((0, 1 << 20, 1 << 24))]
    if field == "rename":
        return ["array", name, member, field, [[random_.choice((*STRINGS, "ids", "shift.npy", "a.txt")), 1]]]
    if field in ("twice", "delete"):
        return ["array", name, member, field, None]
    texts = {
        "descr": ("'|O'", "'<f8'", "'>i8'", "'<c16'", "'<U1000000'", "'|V0'",
                  "'<M8[s]'", "[('a', '<i4')]", "'<i3'", "1", "'<f4,<f4'"),
        "shape": ("(2, 5, 1)", "(10,)", "()", "(0,)", "(-1,)", "(2**40,)",
                  f"({2**62}, 4)", f"({2**63},)", "'a'", "(1,)*64", "(2.0, 5)", "[2, 5]"),
        "fortran_order": ("True", "1", "None", "'x'"),
        "more": ("1", "'" + "a" * 20000 + "'", "(" * 200 + ")" * 200, "-" * 5000 + "1"),
    }  # fmt: skip
    return ["array", name, member, field, [[random_.choice(texts[field]), 1]]]


@functools.cache
def _passes() -> list[str]:
    from qcompiler.passes.pipeline import ALL_PASSES

    return sorted(ALL_PASSES)


def _tokens(random_: random.Random, name: str, raw: bytes) -> Edit:
    tokens = _opened(name, raw).tokens
    kept = [i for i, token in enumerate(tokens) if token.strip() and not token.startswith("//")]
    at = random_.choice(kept)
    other = tokens[random_.choice(kept)]
    token = tokens[at]
    choice = random_.randrange(10)
    if choice > 7 and tokens[0].startswith("// passes"):
        passes = [random_.choice(_passes()) for _ in range(random_.choice((1, 2, 3, 8)))]
        return ["tokens", name, 0, 1, [[f"// passes: {','.join(passes)}", 1]]]
    if choice == 0:
        return ["tokens", name, at, random_.choice((1, 1, 2, 5)), []]
    if choice == 1:
        return ["tokens", name, at, 1, [[token, random_.choice((2, 3, 1000))]]]
    if choice == 2:
        return ["tokens", name, at, 1, [[other, 1]]]
    if choice == 3:
        long = [[[unit, 5000]] for unit in ("<", "(", "[", "{", "tensor<", "1+", "-")]
        text = random_.choice(([['"', 1], ["a", 60]], *long, [['"\\', 1]], [["\0", 1]], [["é", 1]], [["//", 1]]))
        return ["tokens", name, at, 0, text]
    if token.startswith('"'):
        text = random_.choice((*STRINGS, "1+" * 2000 + "1", "s*" * 60 + "s", "(" * 2000, "s//s", "nf4", "f32", "main"))
        return ["tokens", name, at, 1, [[json.dumps(text), 1]]]
    if token[0].isdigit():
        return ["tokens", name, at, 1, [[str(random_.choice((*INTEGERS, 1.5, "0x1F", "1e999"))), 1]]]
    words = ("i1", "f32", "f64", "bf16", "i64", "index", "?", "x", "none", "true", "tensor<1xf32>", "!qc.x",
             "#qc.dims<[]>", "%0", "@main", "^bb0", "memref<4xf32>", "tensor<*xf32>", "vector<4xf32>", "f8E4M3FN",
             "i99999999999", "complex<f32>")  # fmt: skip
    return ["tokens", name, at, 1, [[random_.choice((*words, other)), 1]]]


OF: dict[str, Callable[[random.Random, str, bytes], Edit]] = {
    "json": _json, "qca": _program, "gguf": _gguf, "safetensors": _safetensors, "npz": _arrays, "npy": _arrays,
    "mlir": _tokens,
}  # fmt: skip
