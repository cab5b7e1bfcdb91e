// How the work of the attention kernel is cut up, and where each piece leaves what.
//
// A query is one head of one row. The queries of a stream are numbered [n_head_kv][n_rows][group], so that those that
// read the same K lie side by side.
//
// A piece is one run of cells (a chunk) and one slab of queries. With few rows the cells of a stream are cut into many
// chunks, because there are no other pieces to share among threads. With more rows than PYKV_ATTN_FEW_ROWS there are
// slabs enough: a stream is one chunk, and its results are final.
//
// scratch, of few rows: [n_stream][n_chunks][n_queries] partials of `partial_stride` floats: V sum, largest score,
// weights' sum, at `codes` the query as codes where K is read so. With keep_weights then [n_stream][n_queries] totals,
// [n_stream][n_blocks][n_queries] largest scores, and as many runs of PYKV_ATTN_BLOCK weights exp(score - largest); the
// weights of a block whose largest score is -inf are not written.
#pragma once

#include "fused_attention.h"

#include <math.h>

enum {
    MAX_CHUNKS = 32,       // enough to share among threads, few enough that merging costs nothing
    MIN_CHUNK_CELLS = 128, // below this a piece's partial is no longer small beside its cells
    PARTIAL_EXTRA = 16,    // floats beside the V sum: a cache line of its own
    SLAB_ROWS = 32,        // rows of a slab, at most: their masks lie on the stack
};

struct pieces {
    int chunk_cells, n_chunks; // of a stream's cells
    int n_blocks;              // of a stream's cells
    int group;                 // query heads of a KV head
    int per_head;              // queries of a KV head
    int n_queries;             // of a stream
    int slab_heads;            // KV heads of a slab
    int slab_queries;          // queries of one KV head in a slab: whole rows, unless a row is more than a slab
    int head_slabs, query_slabs;
    bool is_final;             // one chunk, which writes `out`
    size_t codes;              // where a query's codes lie in its partial
    size_t partial_stride;
};

static inline int ceil_div(int a, int b) { return a / b + (a % b != 0); }

static inline int min_int(int a, int b) { return a < b ? a : b; }

// whether scores over K of the type are computed from codes, for few queries
static inline bool reads_codes(enum pykv_attn_type type) { return type == PYKV_ATTN_Q8_0 || type == PYKV_ATTN_Q4_0; }

static inline int most_slab_queries(const struct pykv_attn * a, int group) {
    if (group >= PYKV_ATTN_SLAB) return PYKV_ATTN_SLAB;
    const int most = min_int(PYKV_ATTN_SLAB / group, SLAB_ROWS), n_slabs = ceil_div(a->n_rows, most);
    return ceil_div(a->n_rows, n_slabs) * group; // about as many rows in each
}

static inline struct pieces cut(const struct pykv_attn * a) {
    struct pieces p;
    p.is_final = a->n_rows > PYKV_ATTN_FEW_ROWS;
    const int share = ceil_div(a->n_kv, MAX_CHUNKS), least = share > MIN_CHUNK_CELLS ? share : MIN_CHUNK_CELLS;
    p.chunk_cells = ceil_div(least, PYKV_ATTN_BLOCK) * PYKV_ATTN_BLOCK;
    if (p.is_final) p.chunk_cells = a->n_kv;
    p.n_chunks = ceil_div(a->n_kv, p.chunk_cells);
    p.n_blocks = ceil_div(a->n_kv, PYKV_ATTN_BLOCK);
    p.group = a->n_head / a->n_head_kv;
    p.n_queries = a->n_rows * a->n_head;
    p.per_head = a->n_rows * p.group;
    p.slab_queries = most_slab_queries(a, p.group);
    const bool has_all = p.slab_queries == p.per_head; // of a head
    p.slab_heads = has_all ? min_int(PYKV_ATTN_SLAB / p.slab_queries, a->n_head_kv) : 1;
    p.head_slabs = ceil_div(a->n_head_kv, p.slab_heads);
    p.query_slabs = ceil_div(p.per_head, p.slab_queries);
    p.codes = (size_t) a->head_v + PARTIAL_EXTRA;
    p.partial_stride = p.codes + (reads_codes(a->k.type) ? (size_t) a->head_k / 2 : 0);
    return p;
}

static inline float * partial_at(const struct pykv_attn * a, const struct pieces * p, int stream, int chunk,
                                 int query) {
    const size_t index = ((size_t) stream * p->n_chunks + chunk) * p->n_queries + query;
    return a->scratch + index * p->partial_stride;
}

// the largest score of a query over all cells, and 1 / the sum of its weights
struct total {
    float largest, share;
};

static inline struct total * total_at(const struct pykv_attn * a, const struct pieces * p, int stream, int query) {
    struct total * first = (struct total *) (void *) partial_at(a, p, a->n_stream, 0, 0);
    return first + (size_t) stream * p->n_queries + query;
}

static inline float * largest_at(const struct pykv_attn * a, const struct pieces * p, int stream, int block) {
    const size_t index = ((size_t) stream * p->n_blocks + block) * p->n_queries;
    return &total_at(a, p, a->n_stream, 0)->largest + index;
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

static inline float * out_at(const struct pykv_attn * a, const struct pieces * p, int stream, int query) {
    const size_t row = (size_t) stream * a->n_rows + row_of(p, query);
    return a->out + (row * a->n_head + head_of(p, query)) * a->head_v;
}

// the larger one, NaN if either is
static inline float larger(float a, float b) { return b > a || b != b ? b : a; }

struct pykv_attn_kernel {
    const char * name;
    void (*cells)(const struct pykv_attn * a, int ith, int nth);
    void (*mass)(const struct pykv_attn * a, const struct pykv_attn_mass * what, int ith, int nth);
};

extern const struct pykv_attn_kernel pykv_attn_avx512, pykv_attn_avx2, pykv_attn_neon, pykv_attn_portable;
