"""Makes an exported graph callable in eager torch.

A graph is traced with fake tensors, whose layout follows torch's rules for fake tensors.  In eager torch an operator
may lay out its result differently: a convolution of a transposed image gives channels-last.  The model's decisions
about layout (`x if x.is_contiguous() else x.contiguous()` in a group norm) were made while tracing, and a later
operator of the graph would refuse such a tensor.  So results that were contiguous in the trace are made contiguous
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram


def runnable(program: ExportedProgram) -> fx.GraphModule:
    """`program.module()`, whose operators give results with the layout of the trace."""
    module: fx.GraphModule = program.module(check_guards=False)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _lays_out(node):
            with module.graph.inserting_after(node):
                same = module.graph.call_method("contiguous", (node,))
            same.meta = dict(node.meta)
            node.replace_all_uses_with(same, delete_user_cb=lambda user, own=same: user is not own)
    module.recompile()
    return module


def _lays_out(node: fx.Node) -> bool:
    """Whether a node makes a new tensor that is contiguous in the trace and that another node reads."""
    value = node.meta.get("val")
    schema = getattr(node.target, "_schema", None)
    if not isinstance(value, torch.Tensor) or schema is None or not node.users:
        return False
    if any(argument.alias_info is not None for argument in (*schema.arguments, *schema.returns)):
        return False  # a view, or an operator that writes in place
    contiguous: Callable[..., Any] = torch._prims_common.is_contiguous_or_false
    return bool(contiguous(value))
