"""Convolutions from torch to the IR: every form against eager torch, weights as matrices, batch norms folded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qcompiler.config import QuantConfig, resolve_format
from qcompiler.errors import FormatShapeError, PromiseError, RecipeError, UnsupportedOperatorError
from qcompiler.frontends.quantise.choose_formats import Described, FormatChooser
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.frontends.torch.importer import ImportResult
from qcompiler.ir import qc

aten = torch.ops.aten
IMAGE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(6, 5, 3),
    "padded": lambda: nn.Conv2d(6, 4, 3, padding=1, bias=False),
    "first layer": lambda: nn.Conv2d(6, 4, 7, 2, 3),
    "even kernel, same": lambda: nn.Conv2d(6, 4, (2, 4), padding="same"),
    "uneven": lambda: nn.Conv2d(6, 4, (1, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)),
    "one pixel": lambda: nn.Conv2d(6, 7, 1),
    "one pixel, stride": lambda: nn.Conv2d(6, 7, 1, stride=2),
    "one pixel, padded": lambda: nn.Conv2d(6, 3, 1, padding=1),
    "patches": lambda: nn.Conv2d(6, 8, 4, stride=4),
    "patches that leave a rest": lambda: nn.Conv2d(6, 8, (2, 3), stride=(2, 3)),
    "gaps": lambda: nn.Conv2d(6, 4, 2, stride=3),
    "groups": lambda: nn.Conv2d(6, 9, 3, padding=1, groups=3),
    "groups of a dilated one": lambda: nn.Conv2d(6, 4, 3, stride=2, dilation=2, groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "depthwise, three each": lambda: nn.Conv2d(6, 18, 5, stride=2, padding=2, groups=6, bias=False),
    "wraps around": lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 3),
    "transposed, doubled": lambda: nn.ConvTranspose2d(6, 5, 2, stride=2),
    "transposed, everything": lambda: nn.ConvTranspose2d(6, 4, (4, 3), (3, 2), (1, 2), (2, 1), dilation=(1, 2)),
    "transposed, padded beyond its kernel": lambda: nn.ConvTranspose2d(6, 4, 2, stride=3, padding=3, bias=False),
}
LINE: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv1d(6, 5, 3, padding=1),
    "stride": lambda: nn.Conv1d(6, 4, 3, 2, 1),
    "dilated": lambda: nn.Conv1d(6, 4, 3, dilation=3, bias=False),
    "one": lambda: nn.Conv1d(6, 4, 1),
    "patches": lambda: nn.Conv1d(6, 4, 5, stride=5),
    "groups": lambda: nn.Conv1d(6, 4, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv1d(6, 6, 4, padding=2, groups=6),
    "transposed": lambda: nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1),
}


class Table(nn.Module):
    """Every layer of a table on one input."""

    def __init__(self, table: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(make() for make in table.values())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


class Function(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


DYNAMIC = {"image": {0: ("b", 1, 4), 2: ("h", 8, 30), 3: ("w", 8, 30)}, "line": {0: ("b", 1, 4), 2: ("n", 10, 30)}}


@pytest.mark.parametrize(
    ("kind", "dynamic", "dtype"),
    [
        ("line", True, torch.float16),
        pytest.param("image", True, torch.float32, marks=pytest.mark.slow),
        pytest.param("image", False, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("line", False, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_every_form_computes_what_torch_does(kind, dynamic, dtype, interpreted):
    table = IMAGE if kind == "image" else LINE
    sizes = (13, 11) if kind == "image" else (17,)
    model, x = Table(table).eval().to(dtype), torch.randn(3, 6, *sizes).to(dtype)
    example = torch.randn(2, 6, *(n + 4 for n in sizes)).to(dtype) if dynamic else x
    result = import_torch(model, (example,), dynamic_shapes={"x": DYNAMIC[kind]} if dynamic else None)
    assert not [op for op in result.module.walk() if isinstance(op, qc.TorchCallOp)]
    bound = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}[dtype]
    with torch.no_grad():
        wanted = model.float()(x.float())
    for name, found, truth in zip(table, interpreted(result, x), wanted, strict=True):
        assert found.shape == truth.shape, name
        assert (found.float() - truth).norm() <= bound * truth.norm(), name


def test_an_image_without_a_batch_dimension(interpreted):
    layer, x = nn.Conv2d(6, 5, 3, padding=1).eval(), torch.randn(6, 9, 8)
    (found,) = interpreted(import_torch(layer, (x,)), x)
    torch.testing.assert_close(found, layer(x).detach(), rtol=1e-5, atol=1e-5)


def test_what_has_no_lowering_says_where_and_why():
    x = torch.randn(1, 4, 6, 6, 6)
    with pytest.raises(UnsupportedOperatorError, match=r"a convolution over 3 dimensions.*test_conv\.py:\d+"):
        import_torch(Function(lambda x: F.conv3d(x, torch.ones(2, 4, 3, 3, 3))), (x,))
    with pytest.raises(UnsupportedOperatorError, match=r"a transposed convolution of 2 groups"):
        import_torch(nn.ConvTranspose2d(4, 4, 3, groups=2), (x[:, :, 0],))
    with pytest.raises(UnsupportedOperatorError, match=r"whose weight is not a parameter of its own"):
        import_torch(Function(lambda x: F.conv_transpose2d(x, x[:1].expand(4, 4, 6, 6).sigmoid())), (x[:, :, 0],))


# --- weights ---------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A first layer of 27 columns, a middle one of 576, one for each channel, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.body = nn.Conv2d(64, 64, 3, padding=1)
        self.each = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.head = nn.Conv2d(64, 32, 1)
        self.again = nn.Conv2d(64, 32, 1)
        self.again.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.each(torch.relu(self.body(torch.relu(self.stem(x)))))
        return self.head(x) * self.again(x)


PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def small(quant: Any) -> ImportResult:
    return import_torch(Small().eval(), (PIXELS,), quant=quant)


def test_a_weight_is_stored_as_the_matrix_its_product_reads():
    result = small(QuantConfig("nf4", promise_bits=None))
    rows = {row.parameters[0]: row for row in result.ledger}
    assert rows["stem.weight"].shape == (64, 3, 3, 3) and rows["stem.weight"].format == "nf4:block=64"
    assert result.weights["stem.weight"].shape == (64, 27) and result.weights["body.weight"].shape == (64, 576)
    assert rows["head.weight"].parameters == ("head.weight", "again.weight")
    assert rows["each.weight"].format == "" and "grouped convolution" in rows["each.weight"].reason
    assert rows["each.weight"].counts and rows["each.weight"].bytes_after == 64 * 9 * 4
    first = Small().body.weight.detach()[0, :, 0, 0]  # all channels of the first tap share a block
    from qcompiler import formats

    stored = result.weights["body.weight"]
    fmt = formats.get("nf4", block=64)
    decoded = fmt.decode(formats.from_bytes(fmt, 64, 576, stored.data))[0, :64]
    assert abs(decoded).max() == pytest.approx(first.abs().max().item(), rel=1e-6)


def test_the_rewritten_graph_is_the_oracle_of_the_interpreter(interpreted):
    for quant in ("nf4", "int8", QuantConfig("int4", promise_bits=None)):
        recipe = QuantConfig(quant, promise_bits=None) if isinstance(quant, str) else quant
        result = small(recipe)
        with torch.no_grad():
            wanted = result.quantized.module(PIXELS)
        (found,) = interpreted(result, PIXELS)
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
        assert (wanted - Small()(PIXELS)).norm() >= 1e-3 * wanted.norm(), "nothing was quantised"


def test_columns_that_no_block_divides_are_int8_and_the_ledger_says_so():
    rows = {row.parameters[0]: row for row in small(QuantConfig("int4", promise_bits=None)).ledger}
    assert rows["stem.weight"].format == "int8"
    assert "does not divide its 27 columns (9 taps of 3 channels)" in rows["stem.weight"].reason
    assert rows["body.weight"].format.startswith("int4")


@pytest.mark.parametrize(
    ("text", "channels", "taps", "format"),
    [
        ("int4", 64, 9, "int4"), ("int4", 32, 9, "int4"), ("int4", 24, 9, "int8:group=row"),
        ("int4", 40, 1, "int8:group=row"), ("int4, else nf4", 24, 9, "nf4"), ("nf4", 24, 9, "nf4"),
        ("q4_K", 24, 9, "int8:group=row"), ("q4_K", 256, 1, "q4_K"),
    ],
)  # fmt: skip
def test_blocks_lie_along_the_taps_and_channels_of_a_convolution(text, channels, taps, format):
    """What docs/quantisation.md says of narrow convolutions. Linears behave likewise."""
    columns = channels * taps
    weight = Described(("c.weight",), "conv", (8, columns), (8, channels, taps, 1), taps)
    chosen, why = FormatChooser(QuantConfig(text), None, [weight]).choose(weight)
    assert resolve_format(str(chosen)) == resolve_format(format)
    assert ("does not divide" in why) == (resolve_format(format) != resolve_format(text.partition(",")[0]))


def test_rules_reach_convolutions_by_their_module():
    rules = {"stem": None, "b*": "int8"}
    rows = {row.parameters[0]: row for row in small(QuantConfig("nf4", rules=rules, promise_bits=None)).ledger}
    assert rows["stem.weight"].format == "" and rows["stem.weight"].reason == "rule 'stem'"
    assert rows["body.weight"].format == "int8" and rows["head.weight"].format == "nf4:block=64"
    with pytest.raises(RecipeError, match=r"hold no weight of a linear, a convolution or an embedding"):
        small(QuantConfig("nf4", rules={"each": "int8"}))
    with pytest.raises(FormatShapeError, match=r"parameter 'stem\.weight' \(64 x 27\).*rules=\{'stem': 'int8'\}"):
        small(QuantConfig("nf4", rules={"stem": "int4"}, promise_bits=None))


def test_the_promise_counts_convolutions():
    with pytest.raises(PromiseError, match=r"each\.weight at 32\.00 bits \(weight of a grouped convolution"):
        small(QuantConfig("nf4", promise_bits=4.6))


# --- batch norms -----------------------------------------------------------------------------------------------------


def normed(layer: nn.Module, norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.3, 2.0)
        if norm.affine:
            norm.weight.normal_()
            norm.bias.normal_()
    return nn.Sequential(layer, norm).eval()


FOLDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: normed(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), (2, 4, 7, 7)),
    "conv2d with a bias": (lambda: normed(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), (2, 4, 7, 7)),
    "no affine": (lambda: normed(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), (2, 4, 7, 7)),
    "groups": (lambda: normed(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (2, 4, 7, 7)),
    "depthwise": (lambda: normed(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4)), (2, 4, 7, 7)),
    "conv1d": (lambda: normed(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (2, 4, 9)),
    "linear": (lambda: normed(nn.Linear(4, 6), nn.BatchNorm1d(6)), (5, 4)),
}


def norms_left(result: ImportResult) -> int:
    target = aten._native_batch_norm_legit_no_training.default
    return sum(node.target is target for node in result.quantized.exported.graph.nodes)


@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_batch_norm_becomes_part_of_the_weight_before_it(name, dtype, interpreted):
    make, shape = FOLDS[name]
    model, x = make().to(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
    result = import_torch(model, (x,))
    assert norms_left(result) == 0
    with torch.no_grad():
        oracle = result.quantized.module(x)
    bound = 1e-6 if dtype == torch.float32 else 1e-2
    for found in (oracle, *interpreted(result, x)):
        assert found.dtype == dtype
        assert (found.double() - truth).norm() <= bound * truth.norm()
    rows = {row.parameters[0]: row for row in result.ledger}
    assert rows["1.running_mean"].reason == "folded into 0.weight" and rows["1.running_mean"].bytes_after == 0
    assert rows["0.bias"].bytes_after == rows["0.bias"].elements * dtype.itemsize


def test_a_fold_comes_before_the_encoding():
    model = normed(nn.Conv2d(64, 32, 3, bias=False), nn.BatchNorm2d(32))
    x = torch.randn(2, 64, 6, 6)
    plain = import_torch(model, (x,)).quantized.module(x)
    result = import_torch(model, (x,), quant=QuantConfig("int8", promise_bits=None))
    rounded = result.quantized.module(x)
    assert 0 < (rounded - plain).norm() <= 0.01 * plain.norm()
    scale = model[1].weight / (model[1].running_var + 1e-5).sqrt()
    largest = (model[0].weight * scale[:, None, None, None]).abs().amax(dim=(1, 2, 3)) / 127
    from qcompiler import formats

    fmt = formats.get("int8")
    packed = formats.from_bytes(fmt, 32, 576, result.weights["0.weight"].data)
    assert abs(fmt.decode(packed)).max(1) == pytest.approx((127 * largest).detach().numpy(), rel=1e-5)


class Shared(nn.Module):
    """Norms that must stay: one layer twice, a result read twice, a norm in front, a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.read, self.tied = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.other = nn.Conv2d(4, 4, 3, padding=1)
        self.other.weight = self.tied.weight
        self.norms = nn.ModuleList(normed(nn.Identity(), nn.BatchNorm2d(4))[1] for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](x)
        x = self.norms[1](self.twice(x)) + self.norms[2](self.twice(x.relu()))
        y = self.read(x)
        x = self.norms[3](y) + y
        return self.norms[4](self.tied(x)) + self.other(x)


def test_a_batch_norm_stays_where_folding_it_would_change_something_else(interpreted):
    model, x = Shared().eval(), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
    result = import_torch(model, (x,))
    assert norms_left(result) == 5
    (found,) = interpreted(result, x)
    assert (found.double() - truth).norm() <= 1e-6 * truth.norm()
