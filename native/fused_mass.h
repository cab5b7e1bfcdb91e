// The third phase of the attention kernel, compiled once for each instruction set like the first.
#include "fused_pieces.h"
#include "fused_simd.h"

enum { MASS_QUERIES = 256 };

// queries of a stream that are looked at together, and whose shares go to one place
struct mass_run {
    int stream, first, n;
    float * out;
    float largest[MASS_QUERIES + W];
    float share[MASS_QUERIES + W]; // what 1 of its weights counts; 0 = does not count
};

static float share_of(const struct pykv_attn * a, const struct pieces * p, const struct pykv_attn_mass * what,
                      int stream, int query) {
    const int row = row_of(p, query);
    float counts = row >= what->first_row && row < what->end_row;
    if (what->head_weight) counts *= what->head_weight[head_of(p, query)];
    if (what->row_weight) counts *= what->row_weight[(size_t) stream * a->n_rows + row];
    return counts == 0.0f ? 0.0f : counts * total_at(a, p, stream, query)->share;
}

static void open_run(struct mass_run * r, const struct pykv_attn * a, const struct pieces * p,
                     const struct pykv_attn_mass * what) {
    memset(r->largest, 0, sizeof r->largest);
    memset(r->share, 0, sizeof r->share);
    for (int i = 0; i < r->n; ++i) {
        r->largest[i] = total_at(a, p, r->stream, r->first + i)->largest;
        r->share[i] = share_of(a, p, what, r->stream, r->first + i);
    }
}

// factors[query] = what the weights in a block count, 0 where there are none
static void weigh_block(const struct mass_run * r, const float * largest, float * factors) {
    for (int i = 0; i < r->n; i += W) {
        const vf here = vf_load(largest + i), factor = vf_exp(vf_sub(here, vf_load(r->largest + i)));
        const vf share = vf_mul(factor, vf_load(r->share + i));
        vf_store(factors + i, vf_if_less(vf_set1(-INFINITY), here, share, vf_zero()));
    }
}

// add the weights of a block to the shares of its 64 cells, or take the largest
INLINE void add_weights(const int take_largest, const float * weights, const float * factors, int n, float * out) {
    vf sum[PYKV_ATTN_BLOCK / W];
    UNROLL
    for (int j = 0; j < PYKV_ATTN_BLOCK / W; ++j) sum[j] = vf_load(out + W * j);
    for (int i = 0; i < n; ++i, weights += PYKV_ATTN_BLOCK) {
        if (factors[i] == 0.0f) continue;
        const vf factor = vf_set1(factors[i]);
        UNROLL
        for (int j = 0; j < PYKV_ATTN_BLOCK / W; ++j) {
            const vf x = vf_load(weights + W * j);
            sum[j] = take_largest ? vf_max(vf_mul(x, factor), sum[j]) : vf_fma(x, factor, sum[j]);
        }
    }
    UNROLL
    for (int j = 0; j < PYKV_ATTN_BLOCK / W; ++j) vf_store(out + W * j, sum[j]);
}

static void mass_of_block(const struct pykv_attn * a, const struct pieces * p, const struct mass_run * r,
                          bool take_largest, int block) {
    float factors[MASS_QUERIES + W], copy[PYKV_ATTN_BLOCK] = {0};
    const float * weights = weights_at(a, p, r->stream, block) + (size_t) r->first * PYKV_ATTN_BLOCK;
    const int first = block * PYKV_ATTN_BLOCK, n = min_int(PYKV_ATTN_BLOCK, a->n_kv - first);
    float * out = r->out + first, * to = n < PYKV_ATTN_BLOCK ? memcpy(copy, out, (size_t) n * sizeof *out) : out;
    weigh_block(r, largest_at(a, p, r->stream, block) + r->first, factors);
    if (take_largest) {
        add_weights(1, weights, factors, r->n, to);
    } else {
        add_weights(0, weights, factors, r->n, to);
    }
    if (to == copy) memcpy(out, copy, (size_t) n * sizeof *out);
}

// add up the blocks from `first` to `end` for the `n` queries from `r->first` on
static void mass_of_queries(const struct pykv_attn * a, const struct pieces * p, const struct pykv_attn_mass * what,
                            struct mass_run * r, int n, int first, int end) {
    const int first_cell = first * PYKV_ATTN_BLOCK, end_cell = min_int(end * PYKV_ATTN_BLOCK, a->n_kv);
    memset(r->out + first_cell, 0, (size_t) (end_cell - first_cell) * sizeof(float));
    for (; n > 0; n -= r->n, r->first += r->n) {
        r->n = min_int(n, MASS_QUERIES);
        open_run(r, a, p, what);
        for (int block = first; block < end; ++block) mass_of_block(a, p, r, what->largest, block);
    }
}

static void mass(const struct pykv_attn * a, const struct pykv_attn_mass * what, int ith, int nth) {
    const struct pieces p = cut(a);
    const int first = (int) ((int64_t) p.n_blocks * ith / nth), end = (int) ((int64_t) p.n_blocks * (ith + 1) / nth);
    const int n_runs = what->all_heads ? 1 : a->n_head_kv, n = p.n_queries / n_runs;
    struct mass_run r;
    for (int i = 0; i < a->n_stream * n_runs && first < end; ++i) {
        r.stream = i / n_runs, r.first = i % n_runs * n;
        r.out = what->out + (size_t) i * (size_t) a->n_kv;
        mass_of_queries(a, &p, what, &r, n, first, end);
    }
}
