"""Attention of a single query: keys and values are read once, in place.

A task owns one key/value head of one batch entry and all query heads that share it, so grouped-query attention reads
the cache once. Keys are processed in blocks of `BLOCK`: one dot product per key, then the online softmax of
`attention`.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.attention_operands import (
    head_pointers,
    operand,
    operand_names,
    score_lines,
    seen_keys,
)
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

BLOCK = 64
LANES = 16


def fits(body: AttentionKernel) -> bool:
    return body.q_len == 1


def _columns(body: AttentionKernel) -> int:
    return -(-body.value_dim // LANES) * LANES


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """The scores of one block, and for each query head of a group its sums, maximum and total."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    group = body.heads // body.kv_heads
    return 4 * (BLOCK + group * (_columns(body) + 2))


def emit(spec: KernelSpec, isa: str) -> str:
    body = spec.body
    assert isinstance(body, AttentionKernel)
    head = header_comment(spec, f"one query: keys read in place, {BLOCK} at a time, once for each group of query heads")
    launch = [
        f"qc_run(ctx, op, sym, {c_dim(body.batch)} * {body.kv_heads}, qk_{spec.name}_task);",
    ]
    return "\n".join([head, task_function(spec, _task(spec, body)), entry_function(spec, launch)])


def _task(spec: KernelSpec, body: AttentionKernel) -> list[str]:
    names, group, columns = operand_names(spec), body.heads // body.kv_heads, _columns(body)
    stride_k, stride_v = (c_dim(operand(spec, name).strides[2]) for name in ("k", "v"))
    per_head = [
        f"const int64_t h = kv_h * {group} + g;",
        *head_pointers(spec, ("q", "mask")),
        f"float* const sum = sums + g * {columns};",
        "for (int64_t j = 0; j < count; j++) {",
        f"    const auto key = k_head + (k0 + j) * {stride_k};",
        f"    scores[j] = qc_sum_columns({body.head_dim}, [&](int64_t d, int n) QC_BODY {{",
        "        return vload_upto(q_head + d, n) * vload_upto(key + d, n);",
        "    });",
        "}",
        *_softmax(spec, columns),
        "for (int64_t j = 0; j < count; j++) {",
        f"    const auto value = v_head + (k0 + j) * {stride_v};",
        "    const vf w = vset(scores[j]);",
        f"    qc_columns({body.value_dim}, [&](int64_t c, int n) QC_BODY {{",
        "        vstore(sum + c, vfma(w, vload_upto(value + c, n), vload(sum + c)));",
        "    });",
        "}",
    ]
    finish = [
        f"const int64_t h = kv_h * {group} + g;",
        *head_pointers(spec, ("out",)),
        "const vf scale = vset(total[g] == 0.0f ? 0.0f : 1.0f / total[g]);  // no key seen: zeros",
        f"qc_columns({body.value_dim}, [&](int64_t c, int n) QC_BODY {{",
        f"    vstore_upto(out_head + c, vload(sums + g * {columns} + c) * scale, n);",
        "});",
    ]
    return [
        *(pointer(o, i, name, "call->op") for i, (name, o) in enumerate(zip(names, spec.operands, strict=True))),
        f"const int64_t b = task / {body.kv_heads}, kv_h = task % {body.kv_heads}, kv_len = {c_dim(body.kv_len)};",
        *seen_keys(spec, "0", "1"),
        *head_pointers(spec, ("k", "v")),
        "float* const scores = (float*)scratch;",
        f"float* const sums = scores + {BLOCK};",
        f"float* const top = sums + {group * columns};",
        f"float* const total = top + {group};",
        f"memset(sums, 0, sizeof(float) * {group * columns});",
        f"for (int64_t g = 0; g < {group}; g++) top[g] = -INFINITY, total[g] = 0.0f;",
        f"for (int64_t k0 = first; k0 < seen; k0 += {BLOCK}) {{",
        f"    const int64_t count = qc_min({BLOCK}, seen - k0);",
        f"    for (int64_t g = 0; g < {group}; g++) {{",
        *indent(per_head, 2),
        "    }",
        "}",
        f"for (int64_t g = 0; g < {group}; g++) {{",
        *indent(finish),
        "}",
    ]


def _softmax(spec: KernelSpec, columns: int) -> list[str]:
    return [
        "vf best = vset(-INFINITY);",
        "qc_columns(count, [&](int64_t j, int n) QC_BODY {",
        *indent(score_lines(spec, "scores + j", "0", "k0 + j")),
        "    s = vsel(vfirst(n), s, vset(-INFINITY));",
        "    vstore(scores + j, s);",
        "    best = vmax(s, best);",
        "});",
        "const float before = top[g], now = fmaxf(before, vmaxlane(best));",
        "const vf shift = vset(now == -INFINITY ? 0.0f : now);",
        "vf part = vzero();",
        f"for (int64_t j = 0; j < count; j += {LANES}) {{",
        "    const vf w = vexp(vload(scores + j) - shift);",
        "    vstore(scores + j, w);",
        "    part = part + w;",
        "}",
        "if (now != before && before != -INFINITY) {",
        "    const float fade = qc_exp(before - now);",
        "    total[g] *= fade;",
        f"    for (int64_t c = 0; c < {columns}; c += {LANES}) vstore(sum + c, vload(sum + c) * vset(fade));",
        "}",
        "top[g] = now;",
        "total[g] += vsum(part);",
    ]
