"""Tensors of a folder under the names of transformers' model: published names and layouts are often others.

    model.layers.3.block_sparse_moe.gate.weight              model.layers.3.mlp.gate.weight
    model.layers.3.block_sparse_moe.experts.0.w1.weight …    model.layers.3.mlp.experts.gate_up_proj

transformers lists the conversions of each model (`conversion_mapping`): names that change, and tensors that are
stacked, joined, cut or turned.  This module applies that list.  A conversion is computed when its parameter is read, so
that one parameter is in memory at a time.  Some conversions move whole rows, as where experts are stacked.  Converting
the numbers of the rows shows where each row goes; values are then written once, to their places, and codes are stacked
without being decoded.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from qcompiler.errors import WeightsError
from qcompiler.formats import Format, PackedTensor
from qcompiler.frontends.checkpoints.checkpoint import CodesInFile, Order, ValuesInFile
from qcompiler.frontends.weights.weight_source import InFile, StoredCodes
from qcompiler.units import counted


def under_the_models_names(module: Any, items: Mapping[str, InFile]) -> dict[str, InFile]:
    """The tensors of a folder by the names of `module`, a model of transformers, whose parameters may be empty.

    Names that the model does not have stay, unless the model ignores them.  WeightsError for codes that a conversion
    would cut into pieces, and for tensors that do not fit one another.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = module.state_dict()
    entries = get_model_conversion_mapping(module)
    renamings = [each for each in entries if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in entries if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    ignored = [re.compile(each) for each in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    found: dict[str, InFile] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(items, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, module.base_model_prefix, known)
        if new not in known and name in known:
            new, pattern = name, None
        if new not in known:
            if not any(each.search(name) or each.search(new) for each in ignored):
                found[name] = items[name]
        elif pattern is None:
            found[new] = items[name]
        else:
            made = conversions.setdefault(new, _Conversion(new, of_pattern[pattern], module))
            made.sources.setdefault(pattern, []).append(items[name])
    for conversion in conversions.values():
        found.update(conversion.parameters())
    return found


@dataclass
class _Conversion:
    """A conversion of transformers for one parameter, or for those that one tensor holds; its tensors by pattern."""

    first: str
    converter: Any
    module: nn.Module
    sources: dict[str, list[InFile]] = field(default_factory=dict)

    @property
    def _items(self) -> list[InFile]:
        return [item for items in self.sources.values() for item in items]

    def parameters(self) -> dict[str, InFile]:
        """The parameters that are made, without their values."""
        if any(item.codes is not None for item in self._items):
            return {self.first: self._codes()}
        shapes = self._converted({
            pattern: [torch.empty(item.shape, dtype=item.dtype, device="meta") for item in items]
            for pattern, items in self.sources.items()
        })  # fmt: skip
        return {name: self._values(name, shape) for name, shape in shapes.items()}

    def _converted(self, tensors: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What the conversion makes of tensors in the places of the sources. WeightsError if they do not fit."""
        converter = copy.deepcopy(self.converter)
        converter.collected_tensors.update(tensors)
        try:
            with torch.no_grad():
                made = converter.convert(self.first, model=self.module, config=self.module.config)
        except Exception as error:  # whatever torch raises
            text = " ".join(str(error).split())[:200]
            raise WeightsError(
                f"'{self.first}' of the model consists of {counted(len(self._items), 'tensor')} of the folder "
                f"({self._where()}), which do not fit one another: {text}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _where(self) -> str:
        items = self._items
        return items[0].name if len(items) == 1 else f"'{items[0].name}' … '{items[-1].name}'"

    def _values(self, name: str, like: torch.Tensor) -> ValuesInFile:
        def make() -> torch.Tensor:
            items = self._items
            moved = self._moved([math.prod(item.shape[:-1]) for item in items]) if like.ndim > 1 else None
            if moved is not None and {item.shape[-1:] for item in items} == {(like.shape[-1],)}:
                return _placed(tuple(like.shape), like.dtype, items, moved[1])
            return self._converted(
                {pattern: [item.view() for item in items] for pattern, items in self.sources.items()}
            )[name]

        return ValuesInFile(
            name, tuple(like.shape), like.dtype, make, self._identity, self._release, is_made=True
        )  # fmt: skip

    def _codes(self) -> CodesInFile:
        """Codes whose rows the conversion moves as they are."""
        items = self._items
        codes = [item.codes for item in items]
        kinds = {None if each is None else (each.format, each.cols) for each in codes}
        orders = {None if each is None or each.permutation is None else each.permutation.tobytes() for each in codes}
        if None in kinds or len(kinds) > 1 or len(orders) > 1:
            raise WeightsError(
                f"'{self.first}' of the model consists of {counted(len(items), 'tensor')} of the folder "
                f"({self._where()}), which are codes of different formats, or in different orders of columns: give the "
                "folder in floating point"
            )
        held: list[StoredCodes] = [each for each in codes if each is not None]
        fmt, cols = by_rows(held[0].format), held[0].cols
        shape, order = self._rows(held)
        unit = unit_of(fmt, cols)
        if unit is None or any(each.rows % unit for each in held) or not _moves_units(order, unit):
            raise WeightsError(
                f"'{self.first}' of the model would be a stack of {counted(len(items), 'matrix', 'matrices')} in "
                f"{held[0].format} ({self._where()}), in which rows of different ones would share scales: give the "
                "folder in floating point"
            )

        def read() -> PackedTensor:
            return stacked([with_scales_of_rows(each.read()) for each in held], order)

        where = f"{held[0].where} and {len(held) - 1} more"
        stored = StoredCodes(where, fmt, len(order), cols, read, permutation=held[0].permutation)
        return CodesInFile(self.first, (*shape, cols), stored, self._identity, self._release)

    def _rows(self, codes: Sequence[StoredCodes]) -> tuple[tuple[int, ...], Order]:
        """As `_moved`, of codes. WeightsError for a conversion that cuts rows."""
        found = self._moved([each.rows for each in codes])
        if found is None:
            raise WeightsError(
                f"'{self.first}' of the model is made of codes ({self._where()}) by a conversion that does not move "
                "whole rows: give the folder in floating point"
            )
        return found

    def _moved(self, rows: Sequence[int]) -> tuple[tuple[int, ...], Order] | None:
        """The sizes before the columns, and which of all sources' rows each row is: their numbers are converted. None
        for a conversion that does not move whole rows into one tensor."""
        starts = np.cumsum([0, *rows])
        numbers = iter(torch.arange(start, start + count) for start, count in zip(starts, rows, strict=False))
        made = self._converted({
            pattern: [next(numbers).reshape(*item.shape[:-1], 1) for item in items]
            for pattern, items in self.sources.items()
        })  # fmt: skip
        found = made.get(self.first)
        if len(made) > 1 or found is None or found.shape[-1:] != (1,):
            return None
        order: Order = found.reshape(-1).numpy()
        is_each_once = np.array_equal(np.sort(order), np.arange(starts[-1]))
        return (tuple(found.shape[:-1]), order) if is_each_once else None

    def _identity(self) -> dict[str, Any]:
        return {"parts": [item.identity() for item in self._items], "operations": repr(self.converter.operations)}

    def _release(self) -> None:
        for item in self._items:
            item.release()


def _placed(shape: tuple[int, ...], dtype: torch.dtype, items: Sequence[InFile], order: Order) -> torch.Tensor:
    """A tensor whose row i is row `order[i]` of the rows of all items: nothing else takes memory."""
    made = torch.empty(shape, dtype=dtype)
    rows, places, first = made.reshape(-1, shape[-1]), np.argsort(order), 0
    for item in items:
        values = item.view().reshape(-1, shape[-1])
        rows[torch.from_numpy(places[first : first + len(values)])] = values.to(dtype)
        first += len(values)
    return made


# --- rows of codes ----------------------------------------------------------------------------------------------------

_UNITS = (1, 128)
"""How many rows may share data: one, or those of a block of scales in fp8."""


def unit_of(fmt: Format, cols: int) -> int | None:
    """How many rows share data in a format, so that a matrix may be put together from others by so many rows; None if
    rows of the whole matrix do."""
    for unit in _UNITS:
        one = [each.nbytes for each in fmt.sections(unit, cols)]
        if all([n * each for each in one] == [each.nbytes for each in fmt.sections(n * unit, cols)] for n in (2, 3)):
            return unit
    return None


def _moves_units(order: Order, unit: int) -> bool:
    """Whether an order of rows keeps each `unit` of them together."""
    units = order.reshape(-1, unit)
    return bool((units[:, 0] % unit == 0).all() and (units == units[:, :1] + np.arange(unit)).all())


def by_rows(fmt: Format) -> Format:
    """The format in which matrices of `fmt` are stacked: one scale for a matrix becomes one for each row."""
    return type(fmt)(per="row") if fmt.params.get("per") == "tensor" else fmt


def with_scales_of_rows(packed: PackedTensor) -> PackedTensor:
    """The same values in `by_rows` of the format."""
    fmt = by_rows(packed.format)
    if fmt == packed.format:
        return packed
    made = fmt.allocate(packed.rows, packed.cols)
    made.section("codes")[...] = packed.section("codes")
    made.section("scales")[...] = packed.section("scales")
    return made


def stacked(parts: Sequence[PackedTensor], order: Order) -> PackedTensor:
    """One matrix whose row i is row `order[i]` of the rows of all parts, which have one format and one `unit_of`."""
    fmt, cols = parts[0].format, parts[0].cols
    unit = unit_of(fmt, cols)
    assert unit is not None
    made = fmt.allocate(len(order), cols)
    units = order.reshape(-1, unit)[:, 0] // unit
    for section in fmt.sections(len(order), cols):
        rows = np.concatenate([part.section(section.name).reshape(part.rows // unit, -1) for part in parts])
        made.section(section.name).reshape(len(units), -1)[...] = rows[units]
    return made


__all__ = ["by_rows", "stacked", "under_the_models_names", "unit_of", "with_scales_of_rows"]
