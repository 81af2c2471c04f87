"""The `qc` op that calls torch: `fallback="torch"`."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr, StringAttr, TensorType
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import AnyAttr, irdl_op_definition, prop_def, traits_def, var_operand_def, var_result_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from qcompiler.errors import DimError, PlanError
from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.region_text import attribute_of, region_of
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.torch_regions import TorchRegion, check_region, operators


@irdl_op_definition
class TorchCallOp(QCOp):
    """A region of torch operators without a lowering, allowed only with `fallback="torch"` (plan/torch_regions.py).

    `target` lists its operators for readers, `region` is the region (region_text.py), and `sizes` are the sizes that it
    uses.
    """

    name = "qc.torch_call"
    target = prop_def(StringAttr)
    region = prop_def(DictionaryAttr)
    sizes = prop_def(ArrayAttr[StringAttr])
    inputs = var_operand_def(AnyAttr())
    outputs = var_result_def(AnyAttr())
    traits = traits_def(Pure())

    def __init__(
        self, region: TorchRegion, inputs: Sequence[SSAValue], types: Sequence[Attribute], sizes: Sequence[Dim] = ()
    ) -> None:
        properties: dict[str, Attribute | None] = {
            "target": StringAttr(", ".join(dict.fromkeys(operators(region)))),
            "region": attribute_of(region),
            "sizes": ArrayAttr(StringAttr(str(dim(size))) for size in sizes),
        }
        super().__init__(operands=[list(inputs)], properties=properties, result_types=[list(types)])

    @property
    def record(self) -> TorchRegion:
        """The region; PlanError if the attribute is not a region."""
        return region_of(self.region)

    @property
    def size_dims(self) -> tuple[Dim, ...]:
        return tuple(dim(size.data).to_dim() for size in self.sizes)

    def verify_op(self) -> None:
        try:
            check_region(self.record, len(self.inputs), len(self.outputs), len(self.size_dims))
        except (PlanError, DimError) as error:
            raise VerifyException(str(error)) from error
        for value in (*self.inputs, *self.outputs):
            self.expect(
                isinstance(value.type, TensorType), f"{value.type} is not a tensor: torch takes and gives tensors only"
            )
