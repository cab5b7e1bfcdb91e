// The two inner loops, each for every type and for tiles of one to four queries: the scores of sixteen
// cells, and the weighted sum of their V. Sizes are constants in each copy, so that sums stay in registers.
#pragma once

#include "fused_codes.h"

enum {
    TILE = 4,      // queries of a tile, at most
    CELLS = 16,    // cells of one call: sums are loaded and stored once for all
    DOT_CELLS = 4, // of which so many are multiplied at the same time, at most
};

// What a call reads: `width` values at `offset` of each of CELLS rows. While it works, it asks for as many bytes from
// `ahead` on, so that the memory is never idle and never asked for much at a time.
struct heads {
    const char * const * rows;
    size_t offset;
    int width;
    uintptr_t ahead;
    int again; // so many bytes before, ask once more
};

// scores[query * BLOCK + cell] = q · K; queries are int16_t where reads_codes(), else float
typedef void (*dot_fn)(const struct heads * k, const void * const * q, float * scores);
// sums[query] += V · weights[query * BLOCK + cell]
typedef void (*add_fn)(const struct heads * v, const float * weights, float * const * sums);
typedef void (*decode_fn)(const char * row, int width, float * out, uintptr_t ahead, int again);

// add the products of one vector of plain numbers
INLINE void dot_vector(const enum pykv_attn_type type, const int nq, const int nc, const char * const * rows, int e,
                       const void * const * q, vf sum[TILE][DOT_CELLS]) {
    vf x[TILE];
    UNROLL
    for (int i = 0; i < nq; ++i) x[i] = vf_load((const float *) q[i] + e);
    UNROLL
    for (int c = 0; c < nc; ++c) {
        const struct sixteen s = open16(type, rows[c], e, 0);
        const vf k = part16(type, &s, 0);
        UNROLL
        for (int i = 0; i < nq; ++i) sum[i][c] = vf_fma(k, x[i], sum[i][c]);
    }
}

// scores of four cells from codes: products are added up to one sum a query before they are scaled
INLINE uintptr_t dot_codes(const enum pykv_attn_type type, const int nq, const struct heads * k, int first,
                              const void * const * q, float * scores, uintptr_t ahead) {
    const char * const * rows = k->rows + first;
    vf sum[TILE];
    UNROLL
    for (int i = 0; i < nq; ++i) sum[i] = vf_zero();
    for (int e = 0; e < k->width; e += 32) {
        const size_t offset = k->offset + (size_t) (e / 32) * (size_t) bytes_of_32(type);
        const vf scale = vf_repeat4_f16(rows, offset);
        codes32 x[4];
        ahead = fetch(ahead, 4 * bytes_of_32(type), k->again);
        UNROLL
        for (int c = 0; c < 4; ++c) x[c] = open_codes(type, rows[c] + offset);
        UNROLL
        for (int i = 0; i < nq; ++i) sum[i] = vf_fma(codes_dot4(x, (const int16_t *) q[i] + e), scale, sum[i]);
    }
    UNROLL
    for (int i = 0; i < nq; ++i) vf_store_sum4(scores + i * PYKV_ATTN_BLOCK + first, sum[i]);
    return ahead;
}

// scores of `nc` cells from plain numbers
INLINE uintptr_t dot_cells(const enum pykv_attn_type type, const int nq, const int nc, const struct heads * k,
                              int first, const void * const * q, float * scores, uintptr_t ahead) {
    // with few cells more vectors a turn, so that a turn reads about a cache line
    const int n_vectors = nc == 4 || W == 16 ? 1 : 2, step = n_vectors * W, width = k->width;
    const char * rows[DOT_CELLS];
    vf sum[TILE][DOT_CELLS];
    UNROLL
    for (int c = 0; c < nc; ++c) {
        rows[c] = k->rows[first + c] + k->offset;
        UNROLL
        for (int i = 0; i < nq; ++i) sum[i][c] = vf_zero();
    }
    for (int e = 0; e < width; e += step) {
        ahead = fetch(ahead, nc * step * bytes_of_32(type) / 32, k->again);
        UNROLL
        for (int i = 0; i < n_vectors; ++i) dot_vector(type, nq, nc, rows, e + i * W, q, sum);
    }
    UNROLL
    for (int i = 0; i < nq; i += nc == 4 ? 1 : 2) {
        float * to = scores + i * PYKV_ATTN_BLOCK + first;
        if (nc == 4) {
            vf_sum4(sum[i][0], sum[i][1], sum[i][2], sum[i][3], to, to + 2);
        } else {
            vf_sum4(sum[i][0], sum[i][1], sum[i + 1][0], sum[i + 1][1], to, to + PYKV_ATTN_BLOCK);
        }
    }
    return ahead;
}

INLINE void dot_tile(const enum pykv_attn_type type, const int nq, const struct heads * k, const void * const * all_q,
                     float * scores) {
    const void * q[TILE];
    uintptr_t ahead = k->ahead;
    UNROLL
    for (int i = 0; i < nq; ++i) q[i] = all_q[i];
    // as many sums as leave registers for K and the queries
    const int nc = nq * 4 + nq <= N_REGISTERS ? 4 : 2;
    if (reads_codes(type)) {
        for (int c = 0; c < CELLS; c += 4) ahead = dot_codes(type, nq, k, c, q, scores, ahead);
    } else {
        for (int c = 0; c < CELLS; c += nc) ahead = dot_cells(type, nq, nc, k, c, q, scores, ahead);
    }
}

// what each of a call's cells counts for each query
struct weights {
    const float * first;
    int stride; // from one query to the next
};

// add to `steps` times sixteen values of each sum; a single step says which half of a block it is
INLINE uintptr_t add_steps(const enum pykv_attn_type type, const int nq, const int steps, const int first_half,
                              const struct heads * v, int e, struct weights w, float * const * sums,
                              uintptr_t ahead) {
    vf sum[TILE][4 * V16];
    const int bytes = steps * bytes_of_32(type) / 2; // of a cell
    if (is_blocked(type)) fetch(ahead, CELLS * bytes, 0);
    UNROLL
    for (int i = 0; i < nq; ++i) {
        UNROLL
        for (int j = 0; j < steps * V16; ++j) sum[i][j] = vf_load(sums[i] + e + W * j);
    }
    for (int c = 0; c < CELLS; ++c) {
        vf weight[TILE];
        // where a line begins
        if (!is_blocked(type) && ahead && (c * bytes & 63) < bytes) {
            fetch(ahead + (uintptr_t) (c * bytes), bytes, v->again);
        }
        UNROLL
        for (int i = 0; i < nq; ++i) weight[i] = vf_set1(w.first[i * w.stride + c]);
        UNROLL
        for (int step = 0; step < steps; ++step) {
            const struct sixteen s = open16(type, v->rows[c] + v->offset, e + 16 * step, (first_half + step) & 1);
            UNROLL
            for (int part = 0; part < V16; ++part) {
                const vf x = is_blocked(type) ? code16(type, &s, part) : part16(type, &s, part);
                const int j = step * V16 + part;
                UNROLL
                for (int i = 0; i < nq; ++i) sum[i][j] = vf_fma(weight[i], x, sum[i][j]);
            }
        }
    }
    UNROLL
    for (int i = 0; i < nq; ++i) {
        UNROLL
        for (int j = 0; j < steps * V16; ++j) vf_store(sums[i] + e + W * j, sum[i][j]);
    }
    return ahead ? ahead + (uintptr_t) (CELLS * bytes) : 0;
}

INLINE void add_numbers(const enum pykv_attn_type type, const int nq, const struct heads * v, struct weights w,
                        float * const * sums) {
    // four steps or two, as many sums as leave registers for one V vector and the weights
    const int steps = 4 * nq * V16 + nq < N_REGISTERS ? 4 : 2 * nq * V16 + nq < N_REGISTERS ? 2 : 1;
    const int width = v->width;
    uintptr_t ahead = v->ahead;
    int e = 0;
    for (; e + 16 * steps <= width; e += 16 * steps) {
        ahead = add_steps(type, nq, steps, 0, v, e, w, sums, ahead);
    }
    for (; e < width; e += 16) ahead = add_steps(type, nq, 1, 0, v, e, w, sums, ahead);
}

typedef float block_weights[TILE][CELLS];

// scaled[block][query][cell] = the cell's weight times the scale of its block
static void scale_weights(const struct heads * v, int block_bytes, int nq, const float * weights,
                          block_weights * scaled) {
    for (int b = 0; b < v->width / 32; ++b) {
        for (int c = 0; c < CELLS; c += W) {
            const vf scale = vf_gather_f16(v->rows + c, v->offset + (size_t) (b * block_bytes));
            for (int i = 0; i < nq; ++i) {
                vf_store(&scaled[b][i][c], vf_mul(vf_load(weights + i * PYKV_ATTN_BLOCK + c), scale));
            }
        }
    }
}

// a block's scale goes into the weights of its cell: one product for 32 codes
INLINE void add_codes(const enum pykv_attn_type type, const int nq, const struct heads * v, const float * weights,
                      float * const * sums) {
    block_weights scaled[PYKV_ATTN_MAX_HEAD / 32];
    uintptr_t ahead = v->ahead;
    scale_weights(v, bytes_of_32(type), nq, weights, scaled);
    for (int e = 0; e < v->width; e += 32) {
        const struct weights w = {scaled[e / 32][0], CELLS};
        if (2 * nq * V16 + nq < N_REGISTERS) {
            ahead = add_steps(type, nq, 2, 0, v, e, w, sums, ahead);
        } else {
            ahead = add_steps(type, nq, 1, 0, v, e, w, sums, ahead);
            ahead = add_steps(type, nq, 1, 1, v, e + 16, w, sums, ahead);
        }
    }
}

INLINE void add_tile(const enum pykv_attn_type type, const int nq, const struct heads * v, const float * weights,
                     float * const * sums) {
    if (is_blocked(type)) {
        add_codes(type, nq, v, weights, sums);
    } else {
        add_numbers(type, nq, v, (struct weights) {weights, PYKV_ATTN_BLOCK}, sums);
    }
}

// The types that the loops read as they are stored. Of the others a head is converted to floats first, and of all but
// f32 where many queries share it: then it is converted once for all of them.
#if defined(PYKV_ISA_AVX512) || defined(PYKV_ISA_AVX2) || defined(PYKV_ISA_NEON)
#define EACH_DIRECT(f) f(F32) f(F16) f(BF16) f(Q8_0) f(Q4_0)
#else
#define EACH_DIRECT(f) f(F32)
#endif
#define EACH_TYPE(f) f(F32) f(F16) f(BF16) f(Q8_0) f(Q4_0) f(Q4_1) f(Q5_0) f(Q5_1) f(IQ4_NL)

#define DEFINE_TILE(type, nq)                                                                                         \
    static void dot_##type##_##nq(const struct heads * k, const void * const * q, float * scores) {                   \
        dot_tile(PYKV_ATTN_##type, nq, k, q, scores);                                                                 \
    }                                                                                                                 \
    static void add_##type##_##nq(const struct heads * v, const float * weights, float * const * sums) {              \
        add_tile(PYKV_ATTN_##type, nq, v, weights, sums);                                                             \
    }
#define DEFINE_TILES(type) DEFINE_TILE(type, 1) DEFINE_TILE(type, 2) DEFINE_TILE(type, 3) DEFINE_TILE(type, 4)
#define DEFINE_DECODE(type)                                                                                           \
    static void decode_##type(const char * row, int width, float * out, uintptr_t ahead, int again) {              \
        decode_row(PYKV_ATTN_##type, row, width, out, ahead, again);                                                  \
    }
EACH_DIRECT(DEFINE_TILES)
EACH_TYPE(DEFINE_DECODE)

#define DOTS(type) [PYKV_ATTN_##type] = {dot_##type##_1, dot_##type##_2, dot_##type##_3, dot_##type##_4},
#define ADDS(type) [PYKV_ATTN_##type] = {add_##type##_1, add_##type##_2, add_##type##_3, add_##type##_4},
#define DECODE(type) [PYKV_ATTN_##type] = decode_##type,

static const dot_fn dot_fns[PYKV_ATTN_N_TYPES][TILE] = {EACH_DIRECT(DOTS)};
static const add_fn add_fns[PYKV_ATTN_N_TYPES][TILE] = {EACH_DIRECT(ADDS)};
static const decode_fn decode_fns[PYKV_ATTN_N_TYPES] = {EACH_TYPE(DECODE)};

// so many queries of one KV head may read its K, or V, as it is stored
static int most_queries_direct(enum pykv_attn_type type, bool is_v) {
    if (type == PYKV_ATTN_F32) return PYKV_ATTN_SLAB;
    if (!dot_fns[type][0]) return 0;
    return is_v && is_blocked(type) ? TILE : 2 * TILE;
}
