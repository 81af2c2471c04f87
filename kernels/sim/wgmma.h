// Products of warpgroups. A product is computed when it is issued, and its sums arrive at the wait that covers its
// commit. Until then the accumulators hold NaNs, so that whoever reads them early gets NaNs. What a device would do
// wrong is a finding: operands without a fence, or changed while the product runs.
//
// Each warp multiplies its own 16 rows; finish_block compares what the four warps of a group have multiplied.
#pragma once
#include "check.h"

namespace qs {

constexpr int WARPGROUP = 4 * WARP;
constexpr uint32_t UNFINISHED = 0x7fffdead;  // a NaN

struct WarpgroupData {  // of a lane
    uint32_t a[4];
    float* sums;  // as the accumulators: four for each eight columns
};

inline int wgmma_columns(uint64_t detail) { return (int)(detail & 0x1ff); }
inline bool wgmma_bf16(uint64_t detail) { return detail >> 9 & 1; }
inline const char* wgmma_rows(uint64_t detail) { return (const char*)(uintptr_t)(detail >> 10); }
inline uint64_t wgmma_detail(const void* b, int columns, int bf16) {
    return (uint64_t)(uintptr_t)b << 10 | (uint64_t)(bf16 != 0) << 9 | (uint64_t)columns;
}

// Where half `half` (eight columns of 16) of row r of b lies.
inline const char* wgmma_piece(const char* b, int r, int half) {
    const uintptr_t at = (uintptr_t)b, place = at % 1024 / 16 + (uintptr_t)half;
    return (const char*)(at - at % 1024 + (uintptr_t)r * 128 + ((place ^ (uintptr_t)(r % 8)) * 16));
}

// Sums in the order of the depth, as perform_mma's.
void perform_wgmma(Warp& w) {
    typedef float Eight __attribute__((vector_size(32)));
    const uint64_t detail = w.arrivals[0].detail;
    const int columns = wgmma_columns(detail);
    const bool bf16 = wgmma_bf16(detail);
    uint16_t a16[16][16];
    float a[16][16], b[256][16];
    for (int lane = 0; lane < WARP; ++lane) {
        const auto& data = *(WarpgroupData*)w.arrivals[lane].data;
        const int g = lane / 4, t = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) {
            a16[g + i % 2 * 8][t + i / 2 * 8] = (uint16_t)data.a[i];
            a16[g + i % 2 * 8][t + i / 2 * 8 + 1] = (uint16_t)(data.a[i] >> 16);
        }
    }
    widen(a16[0], a[0], 256, bf16);
    for (int n = 0; n < columns; ++n) {
        uint16_t row[16];
        for (int half = 0; half < 2; ++half) memcpy(row + 8 * half, wgmma_piece(wgmma_rows(detail), n, half), 16);
        widen(row, b[n], 16, bf16);
    }
    for (int tile = 0; tile < columns / 8; ++tile) {
        Eight column[16];
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 8; ++n) column[k][n] = b[8 * tile + n][k];
        for (int i = 0; i < 16; ++i) {
            float* at[4];
            for (int t = 0; t < 4; ++t)
                at[t] = ((WarpgroupData*)w.arrivals[i % 8 * 4 + t].data)->sums + 4 * tile + i / 8 * 2;
            Eight sum;
            for (int n = 0; n < 8; ++n) sum[n] = at[n / 2][n % 2];
            for (int k = 0; k < 16; ++k) sum += a[i][k] * column[k];
            for (int n = 0; n < 8; ++n) at[n / 2][n % 2] = sum[n];
        }
    }
    const uint64_t offset = (uint64_t)(uintptr_t)wgmma_rows(detail) - S.shared_base;
    w.products = (w.products ^ offset ^ (detail & 0x3ff) << 32) * 0x9e3779b97f4a7c15ull + 1;
}

[[noreturn]] inline void wgmma_fails(int line, const char* why) {
    add_site(name_of(S.thread), 0, line);
    fail("wgmma-order", "%s: %s", name_of(S.thread), why);
}

// Whoever wrote the piece has made it visible to products since. What a reader has seen after a barrier carries no
// writer any more (plainly_right): thread 0 stands for it.
inline void check_proxy(const char* piece, int line) {
    const Block& b = *S.block;
    const Cell* cells = &b.shadow.words[((uintptr_t)piece - S.shared_base) / 4];
    for (int i = 0; i < 4; ++i) {
        const Stamp written = cells[i].written;
        if (serial_of(written) != b.serial) continue;  // access says what is missing
        const Thread& writer = b.thread[thread_of(written)];
        if (time_of(written) >= writer.fenced_async)
            wgmma_fails(line, text("a product reads %s, which %s wrote without fence.proxy.async behind it",
                                   describe_shared((uintptr_t)piece), name_of_thread(writer.id)));
    }
}

// This lane's share of the rows of b, checked as a read of now. The digest of its bytes.
inline uint64_t read_rows(const char* b, int columns, int line) {
    uint64_t digest = 0xcbf29ce484222325ull;
    for (int r = S.thread->lane; r < columns; r += WARP)
        for (int half = 0; half < 2; ++half) {
            const char* const piece = wgmma_piece(b, r, half);
            if (S.checked) {
                check_proxy(piece, line);
                access<READ>((uintptr_t)piece, 16, 0, line, true);
            }
            uint64_t words[2];
            memcpy(words, piece, 16);
            digest = ((digest ^ words[0]) * 0x100000001b3ull ^ words[1]) * 0x100000001b3ull;
        }
    return digest;
}

inline void issue_wgmma(int line, int bf16, int columns, const uint32_t* a, const void* b, float* d) {
    Thread* const t = S.thread;
    if ((t->id / WARPGROUP + 1) * WARPGROUP > S.block->threads)
        wgmma_fails(line, "a product takes four whole warps, the first one's number a multiple of four");
    if ((uintptr_t)b % 32 || (uintptr_t)b % 1024 >= 128)
        wgmma_fails(line, text("operand b, %s, is no multiple of 32 bytes in the first of eight rows, which begin at a "
                               "multiple of 1024", describe_shared((uintptr_t)b)));
    if (!t->fenced_wgmma) wgmma_fails(line, "no wgmma.fence between the product and what has made its operands");
    t->fenced_wgmma = false;
    PendingSums* sums = nullptr;
    for (PendingSums& each : t->sums)
        if (each.d == d && (int)each.values.size() == columns / 2) sums = &each;
    if (!sums) {
        t->sums.push_back({d, std::vector<float>(d, d + columns / 2), 0});
        sums = &t->sums.back();
    } else {
        for (int i = 0; i < columns / 2; ++i)
            if (as<uint32_t>(d[i]) != UNFINISHED) wgmma_fails(line, "accumulators are written while a product adds up");
    }
    sums->group = t->products_group;
    PendingProduct product = {a, {a[0], a[1], a[2], a[3]}, (const char*)b, columns, 0, t->products_group, line};
    product.digest = read_rows(product.b, columns, line);
    WarpgroupData data = {{a[0], a[1], a[2], a[3]}, sums->values.data()};
    arrive(WGMMA, line, ~0u, &data, wgmma_detail(b, columns, bf16));
    t->products.push_back(product);
    for (int i = 0; i < columns / 2; ++i) d[i] = as<float>(UNFINISHED);
}

// Until at most `groups` committed groups are under way.
inline void wait_wgmma(int groups) {
    Thread* const t = S.thread;
    const auto pending = [&](uint32_t group) { return group + (uint32_t)groups >= t->products_group; };
    size_t kept = 0;
    for (const PendingProduct& product : t->products) {
        if (pending(product.group)) {
            t->products[kept++] = product;
            continue;
        }
        if (memcmp(product.a, product.kept, sizeof product.kept))
            wgmma_fails(product.line, "operand a is written while a product reads it");
        if (read_rows(product.b, product.columns, product.line) != product.digest)
            wgmma_fails(product.line, "operand b is written while a product reads it");
    }
    t->products.resize(kept);
    kept = 0;
    for (PendingSums& sums : t->sums) {
        if (pending(sums.group)) {
            if (&t->sums[kept] != &sums) t->sums[kept] = std::move(sums);
            ++kept;
            continue;
        }
        memcpy(sums.d, sums.values.data(), sums.values.size() * sizeof(float));
    }
    t->sums.resize(kept);
}

// After a block: the warps of a warpgroup have multiplied the same.
inline void compare_warpgroups(const Block& b) {
    for (int w = 0; w + 3 < b.warps; w += 4)
        for (int i = 1; i < 4; ++i)
            if (b.warp[w + i].products != b.warp[w].products)
                record("wgmma-order", "%s: warps %d and %d of one warpgroup have issued different products",
                       name_of_block(b.number), w, w + i);
}

}  // namespace qs
