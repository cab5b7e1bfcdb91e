#include "fused_pieces.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// ---- what is covered -----------------------------------------------------------------------------------------------

static bool is_block_type(enum pykv_attn_type type) { return type >= PYKV_ATTN_Q8_0; }

static const char * store_refusal(const struct pykv_attn_store * x, int width) {
    if ((unsigned) x->type >= PYKV_ATTN_N_TYPES) return "this type of K or V";
    if (width < 16 || width > PYKV_ATTN_MAX_HEAD) return "heads narrower than 16 or wider than 576";
    if (width % (is_block_type(x->type) ? 32 : 16)) {
        return "heads that are not a multiple of 16, or of 32 when quantised";
    }
    const int64_t size = x->type == PYKV_ATTN_F32 ? 4 : 2;
    if (x->cell % size || x->head % size || x->stream % size) return "K or V that is not aligned";
    return NULL;
}

const char * pykv_attn_refusal(const struct pykv_attn * a) {
    if (a->n_kv < 1 || a->n_stream < 1) return "an empty cache";
    if (a->n_rows < 1 || a->n_rows > PYKV_ATTN_MAX_ROWS) return "more than 16 rows of a stream";
    if (a->n_head < 1 || a->n_head_kv < 1 || a->n_head % a->n_head_kv) {
        return "query heads that are no multiple of KV heads";
    }
    if ((a->q_head | a->q_row | a->q_stream) % 4) return "queries that are not aligned";
    const char * refusal = store_refusal(&a->k, a->head_k);
    if (!refusal) refusal = store_refusal(&a->v, a->head_v);
    if (!refusal && !pykv_attn_scratch_floats(a)) refusal = "so large a batch";
    return refusal;
}

size_t pykv_attn_scratch_floats(const struct pykv_attn * a) {
    const struct pieces p = cut(a);
    const double partials = (double) a->n_stream * p.n_chunks * p.n_queries * (double) p.partial_stride;
    const double weights = a->keep_weights ? (double) n_block_queries(a, &p) * (1 + PYKV_ATTN_BLOCK) : 0;
    return partials + weights < (double) (SIZE_MAX / 16) ? (size_t) (partials + weights) : 0;
}

// ---- merging -------------------------------------------------------------------------------------------------------

struct total {
    float largest, sum;
};

static struct total total_of(const struct pykv_attn * a, const struct pieces * p, int stream, int query) {
    const float sink = a->sinks ? a->sinks[head_of(p, query)] : -INFINITY;
    struct total t = {sink, 0};
    for (int c = 0; c < p->n_chunks; ++c) {
        const float largest = partial_at(a, p, stream, c, query)[a->head_v];
        if (largest > t.largest) t.largest = largest;
    }
    if (t.largest == -INFINITY) return t;
    t.sum = expf(sink - t.largest);
    for (int c = 0; c < p->n_chunks; ++c) {
        const float * partial = partial_at(a, p, stream, c, query) + a->head_v;
        t.sum += partial[1] * expf(partial[0] - t.largest);
    }
    return t;
}

static void merge_query(const struct pykv_attn * a, const struct pieces * p, int stream, int query) {
    const struct total t = total_of(a, p, stream, query);
    const size_t row = (size_t) stream * a->n_rows + row_of(p, query);
    float * out = a->out + (row * a->n_head + head_of(p, query)) * a->head_v;
    memset(out, 0, (size_t) a->head_v * sizeof *out);
    for (int c = 0; c < p->n_chunks; ++c) {
        const float * partial = partial_at(a, p, stream, c, query);
        if (partial[a->head_v] == -INFINITY) continue;
        const float share = expf(partial[a->head_v] - t.largest) / t.sum;
        for (int i = 0; i < a->head_v; ++i) out[i] += partial[i] * share;
    }
}

void pykv_attn_merge(const struct pykv_attn * a, int ith, int nth) {
    const struct pieces p = cut(a);
    const int64_t n = (int64_t) a->n_stream * p.n_queries;
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
        merge_query(a, &p, (int) (i / p.n_queries), (int) (i % p.n_queries));
    }
}

// ---- attention mass ------------------------------------------------------------------------------------------------

// add a query's weights in one block, scaled to shares of the whole
static void add_share(const float * weights, float factor, bool largest, int n, float * out) {
    if (largest) {
        for (int i = 0; i < n; ++i) out[i] = weights[i] * factor > out[i] ? weights[i] * factor : out[i];
    } else {
        for (int i = 0; i < n; ++i) out[i] += weights[i] * factor;
    }
}

// queries of a KV head that are looked at together, of one stream
struct run {
    int stream, head_kv, first, n;
    struct total total[256];
    float share[256]; // what each counts
};

static void open_run(struct run * r, const struct pykv_attn * a, const struct pieces * p,
                     const struct pykv_attn_mass * what) {
    for (int i = 0; i < r->n; ++i) {
        const int query = r->head_kv * p->per_head + r->first + i;
        r->total[i] = total_of(a, p, r->stream, query);
        r->share[i] = what->head_weight ? what->head_weight[head_of(p, query)] : 1.0f;
        if (what->row_weight) r->share[i] *= what->row_weight[(size_t) r->stream * a->n_rows + row_of(p, query)];
    }
}

static float * mass_at(const struct pykv_attn * a, const struct pykv_attn_mass * what, int stream, int head_kv) {
    const size_t run = what->all_heads ? (size_t) stream : (size_t) stream * a->n_head_kv + head_kv;
    return what->out + run * a->n_kv;
}

static void mass_of_block(const struct pykv_attn * a, const struct pieces * p, const struct pykv_attn_mass * what,
                          const struct run * r, int block) {
    const int first = block * PYKV_ATTN_BLOCK, n = min_int(PYKV_ATTN_BLOCK, a->n_kv - first);
    const int first_query = r->head_kv * p->per_head + r->first;
    const float * largest = largest_at(a, p, r->stream, block) + first_query;
    const float * weights = weights_at(a, p, r->stream, block) + (size_t) first_query * PYKV_ATTN_BLOCK;
    float * out = mass_at(a, what, r->stream, r->head_kv) + first;
    for (int i = 0; i < r->n; ++i) {
        if (largest[i] == -INFINITY || r->share[i] == 0.0f) continue;
        const float factor = expf(largest[i] - r->total[i].largest) / r->total[i].sum * r->share[i];
        add_share(weights + (size_t) i * PYKV_ATTN_BLOCK, factor, what->largest, n, out);
    }
}

void pykv_attn_mass(const struct pykv_attn * a, const struct pykv_attn_mass * what, int ith, int nth) {
    enum { MOST = sizeof ((struct run *) 0)->share / sizeof(float) };
    const struct pieces p = cut(a);
    const int first = (int) ((int64_t) p.n_blocks * ith / nth), end = (int) ((int64_t) p.n_blocks * (ith + 1) / nth);
    const int first_cell = first * PYKV_ATTN_BLOCK, end_cell = min_int(end * PYKV_ATTN_BLOCK, a->n_kv);
    const int first_query = what->first_row * p.group, end_query = what->end_row * p.group;
    for (int i = 0; i < a->n_stream * a->n_head_kv && first_cell < end_cell; ++i) {
        struct run r = {.stream = i / a->n_head_kv, .head_kv = i % a->n_head_kv};
        if (r.head_kv == 0 || !what->all_heads) {
            float * out = mass_at(a, what, r.stream, r.head_kv) + first_cell;
            memset(out, 0, (size_t) (end_cell - first_cell) * sizeof *out);
        }
        for (r.first = first_query; r.first < end_query; r.first += MOST) {
            r.n = min_int(MOST, end_query - r.first);
            open_run(&r, a, &p, what);
            for (int block = first; block < end; ++block) mass_of_block(a, &p, what, &r, block);
        }
    }
}

// ---- the instruction set -------------------------------------------------------------------------------------------

#if defined(PYKV_ATTN_X86)
static bool has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// the best first
static const struct pykv_attn_kernel * kernel_named(const char * name) {
    const struct pykv_attn_kernel * all[4];
    int n = 0;
#if defined(PYKV_ATTN_X86)
    if (has_avx512()) all[n++] = &pykv_attn_avx512;
    if (has_avx2()) all[n++] = &pykv_attn_avx2;
#elif defined(PYKV_ATTN_ARM)
    all[n++] = &pykv_attn_neon;
#endif
    all[n++] = &pykv_attn_portable;
    for (int i = 0; i < n; ++i) {
        if (!name || !strcmp(all[i]->name, name)) return all[i];
    }
    return NULL;
}

static _Atomic(const struct pykv_attn_kernel *) chosen;

static const struct pykv_attn_kernel * kernel(void) {
    const struct pykv_attn_kernel * k = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (k) return k;
    k = kernel_named(getenv("PYKV_ATTENTION_ISA"));
    if (!k) k = kernel_named(NULL);
    atomic_store_explicit(&chosen, k, memory_order_relaxed); // every thread finds the same
    return k;
}

const char * pykv_attn_isa(void) { return kernel()->name; }

bool pykv_attn_use_isa(const char * name) {
    const struct pykv_attn_kernel * k = name ? kernel_named(name) : NULL;
    if (name && !k) return false;
    atomic_store_explicit(&chosen, k, memory_order_relaxed);
    return true;
}

void pykv_attn_cells(const struct pykv_attn * a, int ith, int nth) { kernel()->cells(a, ith, nth); }
