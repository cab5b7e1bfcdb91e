// How the work of the attention kernel is cut up, and where each piece leaves what.
//
// A query is one head of one row. The queries of a stream are numbered [n_head_kv][n_rows][group], so that those that
// read the same K lie side by side.
//
// scratch: partials [n_stream][n_chunks][n_queries] of `partial_stride` floats: V sum, largest score, weights' sum.
// With keep_weights then [n_stream][n_blocks][n_queries] largest scores, and as many runs of PYKV_ATTN_BLOCK weights
// exp(score - largest); the weights of a block whose largest score is -inf are not written.
#pragma once

#include "fused_attention.h"

#include <math.h>

enum {
    MAX_CHUNKS = 32,       // enough to share among threads, few enough that merging costs nothing
    MIN_CHUNK_CELLS = 128, // below this a piece's partial is no longer small beside its cells
    PARTIAL_EXTRA = 16,    // floats beside the V sum: a cache line of its own
};

struct pieces {
    int chunk_cells, n_chunks; // of a stream's cells
    int n_blocks;              // of a stream's cells
    int group;                 // query heads of a KV head
    int per_head;              // queries of a KV head
    int n_queries;             // of a stream
    int slab_heads;            // KV heads of a slab
    int slab_queries;          // queries of one KV head in a slab
    int head_slabs, query_slabs;
    size_t partial_stride;
};

static inline int ceil_div(int a, int b) { return a / b + (a % b != 0); }

static inline int min_int(int a, int b) { return a < b ? a : b; }

static inline struct pieces cut(const struct pykv_attn * a) {
    struct pieces p;
    const int share = ceil_div(a->n_kv, MAX_CHUNKS), least = share > MIN_CHUNK_CELLS ? share : MIN_CHUNK_CELLS;
    p.chunk_cells = ceil_div(least, PYKV_ATTN_BLOCK) * PYKV_ATTN_BLOCK;
    p.n_chunks = ceil_div(a->n_kv, p.chunk_cells);
    p.n_blocks = ceil_div(a->n_kv, PYKV_ATTN_BLOCK);
    p.group = a->n_head / a->n_head_kv;
    p.n_queries = a->n_rows * a->n_head;
    p.per_head = a->n_rows * p.group;
    p.slab_queries = min_int(p.per_head, PYKV_ATTN_SLAB);
    p.slab_heads = min_int(PYKV_ATTN_SLAB / p.slab_queries, a->n_head_kv);
    p.head_slabs = ceil_div(a->n_head_kv, p.slab_heads);
    p.query_slabs = ceil_div(p.per_head, p.slab_queries);
    p.partial_stride = (size_t) a->head_v + PARTIAL_EXTRA;
    return p;
}

static inline float * partial_at(const struct pykv_attn * a, const struct pieces * p, int stream, int chunk,
                                 int query) {
    const size_t index = ((size_t) stream * p->n_chunks + chunk) * p->n_queries + query;
    return a->scratch + index * p->partial_stride;
}

static inline size_t n_block_queries(const struct pykv_attn * a, const struct pieces * p) {
    return (size_t) a->n_stream * p->n_blocks * p->n_queries;
}

static inline float * largest_at(const struct pykv_attn * a, const struct pieces * p, int stream, int block) {
    const size_t index = ((size_t) stream * p->n_blocks + block) * p->n_queries;
    return partial_at(a, p, a->n_stream, 0, 0) + index;
}

static inline float * weights_at(const struct pykv_attn * a, const struct pieces * p, int stream, int block) {
    const size_t index = ((size_t) stream * p->n_blocks + block) * p->n_queries;
    return largest_at(a, p, a->n_stream, 0) + index * PYKV_ATTN_BLOCK;
}

static inline int head_of(const struct pieces * p, int query) {
    return query / p->per_head * p->group + query % p->group;
}

static inline int row_of(const struct pieces * p, int query) { return query % p->per_head / p->group; }

// ALiBi: heads up to the largest power of two take the powers of 2^(-max_bias / that power), the others those in
// between
static inline float slope_of(const struct pykv_attn * a, int head) {
    if (!(a->max_bias > 0)) return 1.0f;
    int power = 1;
    while (2 * power <= a->n_head) power *= 2;
    const double exponent = head < power ? (head + 1) : (2 * (head - power) + 1) * 0.5;
    return (float) exp2(-(double) a->max_bias / power * exponent);
}

struct pykv_attn_kernel {
    const char * name;
    void (*cells)(const struct pykv_attn * a, int ith, int nth);
};

extern const struct pykv_attn_kernel pykv_attn_avx512, pykv_attn_avx2, pykv_attn_neon, pykv_attn_portable;
