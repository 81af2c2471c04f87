"""What edits change. An input is a folder of files; an edit is a JSON list: its kind, a file, and arguments.

    ["json", file, path, action, text]      action: set, delete, rename, twice, repeat.  In a .qca file the JSON is
                                            program.json, in a .safetensors file the header
    ["member", file, name, field, value]    the zip of a .qca file: a field of a member's records, or of the end records
    ["gguf", file, part, index, field, value]
    ["tensor", file, name, dtype, shape, fill]   a safetensors tensor, well-formed, of another type or shape
    ["length", file, value]                 the length that a safetensors file claims for its header
    ["array", file, member, field, text]    the header of a NumPy array
    ["tokens", file, at, count, text]       IR text
    ["bytes", file, at, count, hex, times]  any file, after all other edits
    ["file", name, action, argument]        delete, link, write, copy

A text is a list of [string, times], so that an input of a megabyte is a line.  Checksums and digests that the writer
would compute are computed again after edits of a structure (sealed), so that an edit gets behind them.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Edit = list[Any]
Text = Sequence[Sequence[Any]]
Files = dict[str, bytes | str]
"""Contents by name; a str is the target of a symbolic link."""

MAX_INPUT = 32 << 20


def text_of(text: Text) -> str:
    return "".join(part * times for part, times in text)[:MAX_INPUT]


# --- JSON ------------------------------------------------------------------------------------------------------------


class Json:
    """A JSON value in which edits put raw text, which may be no JSON at all."""

    def __init__(self, raw: bytes) -> None:
        self.value = json.loads(raw)
        self.raw: list[str] = []

    def _placed(self, text: str) -> str:
        self.raw.append(text)
        return f"@raw{len(self.raw) - 1}@"

    def edit(self, path: Sequence[Any], action: str, text: Text | None) -> None:
        if not path:
            assert action == "set" and text is not None
            self.value = self._placed(text_of(text))
            return
        owner = self.value
        for step in path[:-1]:
            owner = owner[step]
        key = path[-1]
        if action == "set":
            assert text is not None
            owner[key] = self._placed(text_of(text))
        elif action == "delete":
            del owner[key]
        elif action == "rename":
            assert text is not None
            owner[self._placed(text_of(text))] = owner.pop(key)
        elif action == "twice":
            assert text is not None
            owner[self._placed(json.dumps(key))] = self._placed(text_of(text))
        elif action == "repeat":
            assert text is not None
            owner[key] = [item for item in owner[key] for _ in range(int(text[0][1]))]
        else:
            raise ValueError(action)

    def bytes(self) -> bytes:
        text = json.dumps(self.value, ensure_ascii=False)
        for number, raw in reversed(list(enumerate(self.raw))):
            text = text.replace(f'"@raw{number}@"', raw)
        return text.encode("utf-8", "surrogatepass")


# --- the program file ------------------------------------------------------------------------------------------------

LOCAL = {"signature": 0, "flags": 2, "method": 3, "crc": 6, "packed": 7, "size": 8, "name_size": 9, "extra_size": 10}
CENTRAL = {
    "signature": 0, "flags": 3, "method": 4, "crc": 7, "packed": 8, "size": 9, "name_size": 10, "extra_size": 11,
    "comment_size": 12, "header": 16,
}  # fmt: skip
WIDE = ("wide_size", "wide_packed", "wide_header")
END64 = {"signature": 0, "count": 7, "size": 8, "start": 9}
LOCATOR = {"signature": 0, "end64": 2}
END = {"signature": 0, "count": 4, "size": 5, "start": 6}
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END64, _LOCATOR, _END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")


def _overridden(fields: list[Any], names: dict[str, int], changes: dict[str, Any], layout: struct.Struct) -> bytes:
    for name, value in changes.items():
        if name not in names:
            continue
        if name == "signature":
            fields[names[name]] = b"PKxx"
        else:
            code = list(re.sub(r"(\d+)([HIQ])", lambda m: int(m[1]) * m[2], layout.format[1:].replace("4s", "s")))
            fields[names[name]] = int(value) % (1 << {"H": 16, "I": 32, "Q": 64}[code[names[name]]])
    return layout.pack(*fields)


def _named(changes: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}


class Program:
    """A .qca file as its members; written with right checksums, offsets and digests but for what edits change."""

    def __init__(self, raw: bytes) -> None:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            self.members = [(info.filename, archive.read(info)) for info in archive.infolist()]
        self.json = Json(dict(self.members)["program.json"])
        self.changes: dict[str, dict[str, Any]] = {}
        self.twice: list[str] = []

    def change(self, name: str, field: str, value: Any) -> None:
        if field == "delete":
            self.members = [member for member in self.members if member[0] != name]
        elif field == "twice":
            self.twice.append(name)
        elif field == "cut":
            self.members = [(n, d[: int(value)] if n == name else d) for n, d in self.members]
        elif field == "deflate":
            self.members = [(n, zlib.compress(bytes(int(value)))[2:-4] if n == name else d) for n, d in self.members]
            self.changes.setdefault(name, {}).update(method=8)
        elif field == "content":
            self.members = [(n, text_of(value).encode() if n == name else d) for n, d in self.members]
        else:
            self.changes.setdefault(name, {})[field] = value

    def bytes(self) -> bytes:
        program = self.json.bytes()
        for name, data in self.members:  # digests of texts and builds stand in program.json
            before = hashlib.sha256(self._original(name)).hexdigest().encode()
            program = program.replace(before, hashlib.sha256(data).hexdigest().encode())
        out, central = bytearray(), bytearray()
        members = [(name, program if name == "program.json" else data) for name, data in self.members]
        members += [member for member in members if member[0] in self.twice]
        for name, data in members:
            central += self._member(out, name, data)
        start, end = len(out), self.changes.get("", {})
        out += central
        at, count = len(out), len(members)
        out += _overridden([b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, count, count, len(central), start], END64,
                           _named(end, "wide_"), _END64)  # fmt: skip
        out += _overridden([b"PK\6\7", 0, at, 1], LOCATOR, end, _LOCATOR)
        few = min(count, 0xFFFF)
        out += _overridden([b"PK\5\6", 0, 0, few, few, 0xFFFFFFFF, 0xFFFFFFFF, 0], END, end, _END)
        return bytes(out)

    _originals: dict[str, bytes] | None = None

    def _original(self, name: str) -> bytes:
        if self._originals is None:
            self._originals = dict(self.members)
        return self._originals.get(name, b"")

    def _member(self, out: bytearray, name: str, data: bytes) -> bytes:
        changes = self.changes.get(name, {})
        stored = str(changes.get("name", name)).encode("utf-8", "surrogatepass")
        header, crc, size = len(out), zlib.crc32(data), len(data)
        extra = struct.pack("<HHQQ", 1, 16, size, size)
        if name == "weights.safetensors":
            padding = -(header + _LOCAL.size + len(stored) + len(extra)) % 4096
            padding += 4096 if 0 < padding < 4 else 0
            extra += struct.pack("<HH", 0x5143, padding - 4) + bytes(padding - 4) if padding else b""
        method = int(changes.get("method", 0)) % (1 << 16)
        fields: list[Any] = [b"PK\3\4", 45, 0x800, method, 0, 33, crc, 0xFFFFFFFF, 0xFFFFFFFF,
                             len(stored), len(extra)]  # fmt: skip
        local = _named(changes, "local_")
        out += _overridden(fields, LOCAL, local, _LOCAL) + stored + extra + data
        wide = [int(changes.get(key, value)) % (1 << 64) for key, value in zip(WIDE, (size, size, header), strict=True)]
        extra = struct.pack("<HHQQQ", 1, 24, *wide)
        if "extra" in changes:
            extra = bytes.fromhex(changes["extra"])
        fields = [b"PK\1\2", 45, 45, 0x800, method, 0, 33, crc, 0xFFFFFFFF, 0xFFFFFFFF,
                  len(stored), len(extra), 0, 0, 0, 0, 0xFFFFFFFF]  # fmt: skip
        return _overridden(fields, CENTRAL, changes, _CENTRAL) + stored + extra


# --- GGUF ------------------------------------------------------------------------------------------------------------

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Gguf:
    """A GGUF file as header fields, keys (name, type, raw value), tensors (name, sizes, type, offset) and data."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 4
        self.head = {"magic": b"GGUF", "version": self._take("I"), "tensors": self._take("Q"), "keys": self._take("Q")}
        self.keys = [[self._string(), *self._value()] for _ in range(self.head["keys"])]
        self.tensors = [self._tensor() for _ in range(self.head["tensors"])]
        self.data = raw[-(-self.at // 32) * 32 :]

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.raw, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def _string(self) -> bytes:
        size = self._take("Q")
        self.at += size
        return self.raw[self.at - size : self.at]

    def _value(self) -> tuple[int, bytes]:
        kind, start = self._take("I"), self.at + 4
        start = self.at
        self._skip(kind)
        return kind, self.raw[start : self.at]

    def _skip(self, kind: int) -> None:
        if kind == 8:
            self._string()
        elif kind == 9:
            inner, count = self._take("I"), self._take("Q")
            for _ in range(count):
                self._skip(inner)
        else:
            self._take(SCALARS[kind])

    def _tensor(self) -> dict[str, Any]:
        name, dims = self._string(), self._take("I")
        sizes = [self._take("Q") for _ in range(dims)]
        return {"name": name, "dims": dims, "sizes": sizes, "type": self._take("I"), "offset": self._take("Q")}

    def edit(self, part: str, index: int, field: str, value: Any) -> None:
        if part == "head":
            self.head[field] = int(value)
            return
        items: list[Any] = self.keys if part == "key" else self.tensors
        if field == "delete":
            del items[index]
            self.head["keys" if part == "key" else "tensors"] -= 1
        elif field == "twice":
            items.append(items[index])
            self.head["keys" if part == "key" else "tensors"] += 1
        elif part == "tensor":
            self.tensors[index] = {**self.tensors[index], field: value}
            if field == "sizes":
                self.tensors[index]["dims"] = len(value)
        else:
            key = list(self.keys[index])
            if field == "list":  # [type of the elements, their number, the bytes of one in hex]
                key[1], key[2] = 9, struct.pack("<IQ", value[0], value[1]) + bytes.fromhex(value[2]) * value[1]
                self.keys[index] = key
                return
            place = {"name": 0, "type": 1, "raw": 2}[field]
            key[place] = bytes.fromhex(value) if field == "raw" else value
            self.keys[index] = key

    def bytes(self) -> bytes:
        out = bytearray(b"GGUF")
        out += struct.pack(
            "<IQQ", self.head["version"] % (1 << 32), *(self.head[n] % (1 << 64) for n in ("tensors", "keys"))
        )
        for name, kind, raw in self.keys:
            out += self._named(name) + struct.pack("<I", int(kind) % (1 << 32)) + raw
        for tensor in self.tensors:
            out += self._named(tensor["name"]) + struct.pack("<I", int(tensor["dims"]) % (1 << 32))
            out += b"".join(struct.pack("<Q", int(size) % (1 << 64)) for size in tensor["sizes"])
            out += struct.pack("<IQ", int(tensor["type"]) % (1 << 32), int(tensor["offset"]) % (1 << 64))
        return bytes(out + bytes(-len(out) % 32) + self.data)

    @staticmethod
    def _named(name: bytes | Text) -> bytes:
        raw = name if isinstance(name, bytes) else text_of(name).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(raw)) + raw


# --- safetensors, arrays, text ---------------------------------------------------------------------------------------

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
         "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip


class Safetensors:
    """A safetensors file as its header and data."""

    def __init__(self, raw: bytes) -> None:
        count = struct.unpack_from("<Q", raw)[0]
        self.json, self.data = Json(raw[8 : 8 + count]), bytearray(raw[8 + count :])
        self.length: int | None = None

    def retype(self, name: str, dtype: str, shape: Sequence[int], fill: int | str) -> None:
        """The tensor anew, well-formed, behind all others, with all bytes `fill`, or with a text's bytes."""
        nbytes = SIZES[dtype]
        for size in shape:
            nbytes *= size
        start = len(self.data)
        self.data += fill.encode().ljust(nbytes)[:nbytes] if isinstance(fill, str) else bytes([fill]) * nbytes
        self.json.value[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + nbytes]}

    def bytes(self) -> bytes:
        header = self.json.bytes()
        count = len(header) if self.length is None else self.length % (1 << 64)
        return struct.pack("<Q", count) + header + bytes(self.data)


class Arrays:
    """A .npy file, or the arrays of a .npz file, as header texts and data."""

    def __init__(self, raw: bytes) -> None:
        self.zipped = raw.startswith(b"PK")
        self.members: dict[str, list[Any]] = {}
        self.deflated: dict[str, int] = {}
        if self.zipped:
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                for name in archive.namelist():
                    self.members[name] = self._split(archive.read(name))
        else:
            self.members[""] = self._split(raw)
        self.twice: list[str] = []

    @staticmethod
    def _split(raw: bytes) -> list[Any]:
        size = struct.unpack_from("<H", raw, 8)[0]
        fields = ast.literal_eval(raw[10 : 10 + size].decode("latin1"))
        return [{key: repr(value) for key, value in fields.items()}, raw[10 + size :]]

    def edit(self, member: str, field: str, text: Any) -> None:
        if field == "deflate":
            self.deflated[member] = int(text)
        elif field == "twice":
            self.twice.append(member)
        elif field == "delete":
            del self.members[member]
        elif field == "rename":
            self.members[text_of(text)] = self.members.pop(member)
        else:
            self.members[member][0][field] = text_of(text)

    def _joined(self, member: str) -> bytes:
        fields, data = self.members[member]
        text = "{" + ", ".join(f"{key!r}: {value}" for key, value in fields.items()) + ", }"
        header = text.encode("latin1", "replace")
        header += b" " * (-(len(header) + 11) % 64) + b"\n"
        if len(header) > 0xFFFF:
            return b"\x93NUMPY\2\0" + struct.pack("<I", len(header)) + header + data
        return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data

    def bytes(self) -> bytes:
        if not self.zipped:
            return self._joined("")
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name in [*self.members, *(name for name in self.twice if name in self.members)]:
                data, kind = self._joined(name), zipfile.ZIP_STORED
                if name in self.deflated:
                    data, kind = data + bytes(self.deflated[name]), zipfile.ZIP_DEFLATED
                archive.writestr(zipfile.ZipInfo(name), data, kind)
        return stream.getvalue()


TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[A-Za-z_][\w.$]*|\d+(?:\.\d+(?:[eE][+-]?\d+)?)?|->|//[^\n]*|\s+|.', re.DOTALL)


class Tokens:
    """IR text as tokens."""

    def __init__(self, raw: bytes) -> None:
        self.tokens: list[str] = TOKEN.findall(raw.decode())
        self.changes: list[tuple[int, int, str]] = []

    def edit(self, at: int, count: int, text: Text) -> None:
        self.changes.append((at, count, text_of(text)))

    def bytes(self) -> bytes:
        tokens = list(self.tokens)
        for at, count, text in sorted(self.changes, key=lambda change: -change[0]):
            tokens[at : at + count] = [text]
        return "".join(tokens).encode("utf-8", "surrogatepass")


class JsonFile:
    def __init__(self, raw: bytes) -> None:
        self.json = Json(raw)

    def bytes(self) -> bytes:
        return self.json.bytes()


DOCUMENTS: dict[str, Callable[[bytes], Any]] = {
    ".qca": Program, ".gguf": Gguf, ".safetensors": Safetensors, ".npz": Arrays, ".npy": Arrays, ".mlir": Tokens,
    ".json": JsonFile,
}  # fmt: skip


def document(name: str, raw: bytes) -> Any:
    return DOCUMENTS["." + name.rpartition(".")[2]](raw)


# --- applying --------------------------------------------------------------------------------------------------------


def apply(files: Files, edits: Sequence[Edit]) -> Files:
    """The files of a seed after edits. KeyError, IndexError, ValueError or TypeError for an edit that does not fit."""
    made, open_files = dict(files), dict[str, Any]()
    for kind, name, *arguments in edits:
        if kind in ("bytes", "file"):
            continue
        if name not in open_files:
            raw = files[name]
            assert isinstance(raw, bytes)
            open_files[name] = document(name, raw)
        _structural(open_files[name], kind, arguments)
    for name, opened in open_files.items():
        made[name] = opened.bytes()
    for kind, name, *arguments in edits:
        if kind == "bytes":
            made[name] = _bytes(made[name], *arguments)
        elif kind == "file":
            _file(made, name, *arguments)
    return made


def _structural(opened: Any, kind: str, arguments: list[Any]) -> None:
    if kind == "json":
        opened.json.edit(*arguments)
    elif kind == "member":
        opened._original("")
        opened.change(*arguments)
    elif kind in ("gguf", "array", "tokens"):
        opened.edit(*arguments)
    elif kind == "tensor":
        opened.retype(*arguments)
    elif kind == "length":
        opened.length = arguments[0]
    else:
        raise ValueError(kind)


def _bytes(raw: bytes | str, at: int, count: int, inserted: str, times: int = 1) -> bytes:
    assert isinstance(raw, bytes)
    at = min(at, len(raw))
    return raw[:at] + (bytes.fromhex(inserted) * times)[:MAX_INPUT] + raw[at + count :]


def _file(files: Files, name: str, action: str, argument: Any = None) -> None:
    if action == "delete":
        del files[name]
    elif action == "link":
        files[name] = str(argument)
    elif action == "write":
        files[name] = text_of(argument).encode("utf-8", "surrogatepass")
    elif action == "copy":
        files[str(argument)] = files[name]
    else:
        raise ValueError(action)
