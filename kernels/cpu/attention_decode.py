"""Attention of a single query: keys and values are read once, in place.

A task owns one key/value head of one batch entry and the query heads that share it, so grouped-query attention reads
the cache once. Where these tasks are too few for the threads, a task owns some of the query heads: each head is
computed in the same way, so the results do not change. How many keys are seen is known when the kernel begins; an
attention to few keys runs on the calling thread.

Keys are processed in blocks of `BLOCK`: one dot product per key, then the online softmax of `attention`.
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

COST = 2
"""Element operations for each element of a key or value and each query head: a dot product of one query with one key
ends in a sum over SIMD lanes, so 64 k elements take 4 us, twice as long as a loop over them (benchmarks/profile_cpu.py,
hidden 256)."""


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
    cut = f"qk_{spec.name}_cut"
    struct = (
        f"struct {cut} {{\n    qc_call call;\n    int64_t pieces;  // tasks that share the query heads of a group\n}};"
    )
    return "\n".join(
        [head, struct, task_function(spec, _task(spec, body)), entry_function(spec, _launch(spec, body, cut))]
    )


def _launch(spec: KernelSpec, body: AttentionKernel, cut: str) -> list[str]:
    """Cuts the work: two tasks for each thread if the keys that are seen are worth them."""
    last = [pointer(operand(spec, "last"), operand_names(spec).index("last"), "last")] if body.last else []
    dims = body.head_dim + body.value_dim
    return [
        *last,
        f"const int64_t kv_len = {c_dim(body.kv_len)}, batch = {c_dim(body.batch)}, units = batch * {body.kv_heads};",
        "double keys = 0;",
        "for (int64_t b = 0; b < batch; b++) {",
        *indent([*seen_keys(spec, "0", "1"), "keys += (double)qc_max(0, seen - first);"]),
        "}",
        f"const double worth = keys * {body.heads} * {dims * COST} / QC_TASK_COST;",
        f"{cut} cut = {{{{ctx, op, sym}}, 1}};",
        "if (worth < 2 || ctx->num_threads < 2) {",
        f"    for (int64_t task = 0; task < units; task++) qk_{spec.name}_task(&cut, task, ctx->scratch);",
        "    return;",
        "}",
        "const int64_t most = 2 * (int64_t)ctx->num_threads, wanted = worth < (double)most ? (int64_t)worth : most;",
        f"cut.pieces = qc_min({body.heads // body.kv_heads}, (wanted + units - 1) / units);",
        f"ctx->parallel(ctx, units * cut.pieces, qk_{spec.name}_task, &cut);",
    ]


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
        f"const int64_t pieces = ((const qk_{spec.name}_cut*)arg)->pieces;",
        "const int64_t piece = task % pieces, unit = task / pieces;",
        f"const int64_t b = unit / {body.kv_heads}, kv_h = unit % {body.kv_heads}, kv_len = {c_dim(body.kv_len)};",
        f"const int64_t begin = qc_share({group}, piece, pieces), end = qc_share({group}, piece + 1, pieces);",
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
        "    for (int64_t g = begin; g < end; g++) {",
        *indent(per_head, 2),
        "    }",
        "}",
        "for (int64_t g = begin; g < end; g++) {",
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
