"""PEFT's LoRA adapters: adapter_config.json and its tensors, read without torch or peft.

    delta W = scaling * B @ A        scaling = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora
    DoRA:  W' = m * (W + delta W) / ||W + delta W||, the norm per output row, m the trained magnitudes

Hu et al. 2021 (LoRA), Kalajdzievski 2023 (rsLoRA), Liu et al. 2024 (DoRA); names and files as peft 0.21 writes them.
Adapters that change a weight in another way, or change anything but weights, are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from qcompiler.errors import AdapterError
from qcompiler.formats.foreign.json_text import open_regular, read_json_object, shown
from qcompiler.formats.foreign.patterns import PatternError, compiled, matches

Values = npt.NDArray[np.float32]

_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PARTS = re.compile(
    r"^(?:base_model\.model\.)?(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector|lora_embedding_A|"
    r"lora_embedding_B)(?P<rest>(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?)$"
)
_REFUSED: dict[str, str] = {
    "use_qalora": "QALoRA pools the inputs of its products",
    "alora_invocation_tokens": "aLoRA applies to some tokens of a text, which a merged weight cannot",
    "use_bdlora": "BD-LoRA has block-diagonal factors",
    "kasa_config": "KaSA changes the base weights",
    "velora_config": "VeLoRA is not merged",
    "monteclora_config": "MonteCLoRA is not merged",
    "arrow_config": "Arrow chooses among adapters for each token",
    "layer_replication": "layers are replicated, which changes the model",
    "trainable_token_indices": "single rows of an embedding are replaced",
    "target_parameters": "adapters of parameters that are not a module's weight",
    "lora_bias": "the adapter holds biases",
    "modules_to_save": "whole modules are replaced by the adapter's",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "eva_base", "mica")
"""Initialisations that change the base weights: the update belongs to the changed weights, not to the stored ones."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("r", _is_rank, "rank"),
    ("lora_alpha", _is_number, "number"),
    ("use_dora", _is_flag, "flag"),
    ("use_rslora", _is_flag, "flag"),
    ("fan_in_fan_out", _is_flag, "flag"),
    ("rank_pattern", lambda value: isinstance(value, Mapping) and all(map(_is_rank, value.values())), "map to ranks"),
    ("alpha_pattern", lambda value: isinstance(value, Mapping) and all(map(_is_number, value.values())), "map to them"),
    ("init_lora_weights", lambda value: isinstance(value, bool | str), "name of an initialisation"),
)  # fmt: skip
"""Fields of a config that are read, and their required types."""


@dataclass(frozen=True)
class LoraLayer:
    """An adapter's update of one module's weight: ``scaling * b @ a``, (out, in), or its transpose.

    `a` is fp32 (r, in), `b` fp32 (out, r); an embedding's weight is (in, out), and so is that of a module with
    `transposed` (peft's fan_in_fan_out).  `magnitude` (out,) makes it DoRA.
    """

    path: str
    a: Values
    b: Values
    scaling: float
    transposed: bool = False
    embedding: bool = False
    magnitude: Values | None = None

    def shape(self, *, outputs_first: bool) -> tuple[int, int]:
        """The shape of the model's weight; with `outputs_first` a linear's is always (out, in)."""
        full = (self.b.shape[0], self.a.shape[1])
        return full[::-1] if self.is_transposed(outputs_first=outputs_first) else full

    def is_transposed(self, *, outputs_first: bool) -> bool:
        """Whether a row of the weight belongs to an input."""
        return self.embedding or (self.transposed and not outputs_first)

    def delta(self, *, outputs_first: bool) -> Callable[[int, int], npt.NDArray[np.float64]]:
        """Rows [first, stop) of ``scaling * b @ a``, or of its transpose, in fp64."""
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        left, right = (a.T, b.T) if self.is_transposed(outputs_first=outputs_first) else (b, a)
        left = left * self.scaling

        def rows(first: int, stop: int) -> npt.NDArray[np.float64]:
            found: npt.NDArray[np.float64] = left[first:stop] @ right
            return found

        return rows


def read_adapter(adapter: str | Path | Mapping[str, Any], config: Mapping[str, Any] | None) -> list[LoraLayer]:
    """The layers of an adapter: a folder as written by peft's `save_pretrained`, or its tensors with their `config`.

    Tensors may be NumPy's or torch's.  AdapterError if it is not a LoRA or DoRA; one AdapterError lists all tensors
    that are missing, have another shape, or do not belong to an adapter.
    """
    if isinstance(adapter, Mapping):
        if config is None:
            raise AdapterError(
                "an adapter given as tensors needs its config: config=json.load(open('adapter_config.json')), or "
                "dict(r=…, lora_alpha=…)"
            )
        tensors, where = dict(adapter), "the adapter"
    else:
        folder = Path(adapter)
        where = f"the adapter in {folder}"
        config = {**_read_config(folder / _CONFIG), **(config or {})}
        tensors = _read_tensors(folder / _TENSORS)
    _check_config(config, where)
    return _layers(tensors, config, where)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, AdapterError)
    except AdapterError as error:
        raise AdapterError(f"{error}; an adapter is a folder with {_CONFIG} and {_TENSORS}") from error


def _read_tensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with open_regular(path) as file:
            found = deserialize(file.read())  # type: ignore[no-untyped-call]
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(
            f"{path} cannot be read ({shown(error)}); peft writes it by save_pretrained(…, safe_serialization=True)"
        ) from error
    tensors = {}
    for name, each in sorted(found, key=lambda item: item[0]):  # deserialize has another order in every process
        if each["dtype"] not in _DTYPES:
            raise AdapterError(f"{path}: {shown(name)} is {each['dtype']}; adapters hold F32, F16, BF16 or F64")
        if len(each["shape"]) > 2 or not math.prod(each["shape"]):
            raise AdapterError(f"{path}: {shown(name)} has the shape {each['shape']}; factors are matrices")
        tensors[name] = np.frombuffer(each["data"], _DTYPES[each["dtype"]]).reshape(each["shape"])
    return tensors


def _check_config(config: Mapping[str, Any], where: str) -> None:
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2][:100]
    if kind != "LORA":
        raise AdapterError(
            f"{where} is a {kind}; only LoRA and DoRA are merged here; peft's own merge_and_unload merges others"
        )
    if config.get("lora_alpha") is None:
        raise AdapterError(f"{where} has no lora_alpha in its config, without which its scale is unknown")
    for key, why in _REFUSED.items():
        if config.get(key):
            raise AdapterError(
                f"{where} has {key}={shown(config[key])}: {why}, and only weights of linears and embeddings are "
                "merged. Merge it in floating point by peft, and quantise the result"
            )
    if str(config.get("bias", "none")) != "none":
        raise AdapterError(f"{where} has bias={shown(config['bias'])}: it replaces biases, and only weights are merged")
    for key, check, what in _FIELDS:
        if config.get(key) is not None and not check(config[key]):
            raise AdapterError(f"{where} has {key}={shown(config[key])}, which is no {what}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{where} has init_lora_weights={shown(start)}, which changed the base weights it was trained with: "
            "convert it with peft's save_pretrained(…, path_initial_model_for_weight_conversion=…), which writes a "
            "plain LoRA"
        )


# --- tensors to layers -----------------------------------------------------------------------------------------------


def _layers(tensors: Mapping[str, Any], config: Mapping[str, Any], where: str) -> list[LoraLayer]:
    parts: dict[str, dict[str, Values]] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        match = _PARTS.match(name)
        if match is None:
            problems.append(f"{shown(name)} is no factor of a LoRA")
            continue
        mine = parts.setdefault(match["path"], {})
        if match["part"] in mine:
            problems.append(f"'{name}' is a second {match['part']} of '{match['path']}': merge one adapter at a time")
        mine[match["part"]] = _values(tensor)
    layers = []
    for path, mine in parts.items():
        try:
            layers.append(_layer(path, mine, config))
        except AdapterError as error:
            problems.append(str(error))
    if not parts and not problems:
        problems.append("it holds no tensors")
    if problems:
        raise AdapterError(f"{where} cannot be merged: " + listed(problems))
    return layers


def _layer(path: str, parts: Mapping[str, Values], config: Mapping[str, Any]) -> LoraLayer:
    embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if missing := [name for name in names if name not in parts]:
        raise AdapterError(f"'{path}' has no {' and no '.join(missing)}")
    a, b = (parts[name] for name in names)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"'{path}' has A of {list(a.shape)} and B of {list(b.shape)}; a linear's are (r, in) and (out, r)"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise AdapterError(f"'{path}' holds NaN or infinity")
    rank, magnitude = a.shape[0], parts.get("lora_magnitude_vector")
    expected = _of_pattern(config.get("rank_pattern"), path, config.get("r", rank))
    if rank != expected:
        raise AdapterError(f"'{path}' has factors of rank {rank}, and its config says {expected}")
    if bool(config.get("use_dora")) != (magnitude is not None):
        said = "no lora_magnitude_vector" if magnitude is None else "a lora_magnitude_vector"
        raise AdapterError(f"'{path}' has {said}, and its config use_dora={bool(config.get('use_dora'))}")
    if magnitude is not None:
        if embedding:
            raise AdapterError(f"'{path}' is a DoRA of an embedding, which is not merged")
        magnitude = magnitude.reshape(-1)
        if magnitude.shape != (b.shape[0],) or not np.isfinite(magnitude).all():
            raise AdapterError(f"'{path}' has {magnitude.size} magnitudes for {b.shape[0]} outputs, or some not finite")
    alpha = float(_of_pattern(config.get("alpha_pattern"), path, config["lora_alpha"]))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraLayer(path, a, b, scaling, bool(config.get("fan_in_fan_out")), embedding, magnitude)


def _of_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """The value of the first pattern that is a suffix of the module's path, by whole names, as peft matches them."""
    for key, value in (patterns or {}).items():
        try:
            if matches(compiled(key, r"(.*\.)?(", ")$"), path):
                return value
        except PatternError as error:
            raise AdapterError(f"the pattern {shown(key)} of the adapter's config: {error}") from error
    return default


def _values(tensor: Any) -> Values:
    """The fp32 values of an array or a torch tensor."""
    if callable(getattr(tensor, "detach", None)):
        tensor = tensor.detach().cpu().float().numpy()
    found: Values = np.asarray(tensor).astype(np.float32)
    return found


def listed(problems: Iterable[str], most: int = 20) -> str:
    """Joins texts; of very many only the first."""
    problems = list(problems)
    return "; ".join(problems[:most]) + (f"; … ({len(problems)} in all)" if len(problems) > most else "")
