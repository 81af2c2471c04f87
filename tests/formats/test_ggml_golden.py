"""GGUF's encoders against what ggml's C code wrote (golden/make_ggml.py says from which source, and how)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from qcompiler import formats

GOLDEN = Path(__file__).parent / "golden"


def _made_by() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_ggml", GOLDEN / "make_ggml.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _made_by()
BELOW_THE_STANDARD = {"mxfp4": ("tiny", "mixed")}
"""Cases with blocks below 2^-125, whose scale byte wraps in ggml: ours is 0 (test_ggml_encode.py)."""


def ours(name: str) -> formats.Format:
    return formats.get("mxfp4_ggml" if name == "mxfp4" else name)


@pytest.mark.parametrize("name", MADE.BLOCKS)
def test_small_matrices_have_ggmls_bytes(name: str) -> None:
    fmt, seen = ours(name), 0
    with np.load(GOLDEN / "ggml.npz") as golden:
        for case, weights, importance in MADE.cases(MADE.SMALL):
            if case in BELOW_THE_STANDARD.get(name, ()) or f"{name}/{case}" not in golden:
                continue
            expected = golden[f"{name}/{case}"].reshape(-1, fmt.declaration.record_bytes)
            np.testing.assert_array_equal(fmt.encode(weights).data.reshape(expected.shape), expected, err_msg=case)
            seen += 1
            if fmt.takes_importance:
                expected = golden[f"{name}/{case}/importance"].reshape(expected.shape)
                made = fmt.encode(weights, importance=importance).data.reshape(expected.shape)
                np.testing.assert_array_equal(made, expected, err_msg=f"{case} with importance")
                seen += 1
    assert seen == (8 if fmt.takes_importance else 2 if name == "mxfp4" else 4)


@pytest.mark.parametrize("name", MADE.BLOCKS)
def test_large_matrices_have_ggmls_bytes(name: str) -> None:
    fmt, digests = ours(name), json.loads((GOLDEN / "ggml.json").read_text())
    assert fmt.takes_importance == (f"{name}/bell/importance" in digests)
    for case, weights, importance in MADE.cases(MADE.LARGE):
        if case in BELOW_THE_STANDARD.get(name, ()):
            continue
        for given in (None, importance) if fmt.takes_importance else (None,):
            made = hashlib.sha256(fmt.encode(weights, importance=given).to_bytes()).hexdigest()
            assert made == digests[f"{name}/{case}" + ("" if given is None else "/importance")], case
