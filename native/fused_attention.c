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
    if (a->n_rows < 1) return "no rows";
    if (a->keep_weights && a->n_rows > PYKV_ATTN_FEW_ROWS) return "the mass of more than 16 rows of a stream";
    if (a->n_head < 1 || a->n_head_kv < 1 || a->n_head % a->n_head_kv) {
        return "query heads that are no multiple of KV heads";
    }
    if ((a->q_head | a->q_row | a->q_stream) % 4) return "queries that are not aligned";
    const char * refusal = store_refusal(&a->k, a->head_k);
    if (!refusal) refusal = store_refusal(&a->v, a->head_v);
    if (!refusal && pykv_attn_scratch_floats(a) == SIZE_MAX) refusal = "so large a batch";
    return refusal;
}

size_t pykv_attn_scratch_floats(const struct pykv_attn * a) {
    const struct pieces p = cut(a);
    if (p.is_final) return 0;
    // not n_chunks, which falls where a run of cells becomes longer
    const int most_chunks = min_int(MAX_CHUNKS, ceil_div(a->n_kv, MIN_CHUNK_CELLS));
    const double queries = (double) a->n_stream * p.n_queries;
    const double partials = queries * most_chunks * (double) p.partial_stride;
    const double weights = a->keep_weights ? queries * (2 + (double) p.n_blocks * (1 + PYKV_ATTN_BLOCK)) : 0;
    return partials + weights < (double) (SIZE_MAX / 16) ? (size_t) (partials + weights) : SIZE_MAX;
}

// ---- merging -------------------------------------------------------------------------------------------------------

static struct total total_of(const struct pykv_attn * a, const struct pieces * p, int stream, int query) {
    const float sink = a->sinks ? a->sinks[head_of(p, query)] : -INFINITY;
    struct total t = {sink, 0};
    for (int c = 0; c < p->n_chunks; ++c) t.largest = larger(t.largest, partial_at(a, p, stream, c, query)[a->head_v]);
    if (t.largest == -INFINITY) return t;
    float sum = expf(sink - t.largest);
    for (int c = 0; c < p->n_chunks; ++c) {
        const float * partial = partial_at(a, p, stream, c, query) + a->head_v;
        sum += partial[1] * expf(partial[0] - t.largest);
    }
    t.share = 1 / sum;
    return t;
}

static void merge_query(const struct pykv_attn * a, const struct pieces * p, int stream, int query) {
    const struct total t = total_of(a, p, stream, query);
    float * out = out_at(a, p, stream, query);
    memset(out, 0, (size_t) a->head_v * sizeof *out);
    for (int c = 0; c < p->n_chunks; ++c) {
        const float * partial = partial_at(a, p, stream, c, query);
        if (partial[a->head_v] == -INFINITY) continue;
        const float share = expf(partial[a->head_v] - t.largest) * t.share;
        for (int i = 0; i < a->head_v; ++i) out[i] += partial[i] * share;
    }
    if (a->keep_weights) *total_at(a, p, stream, query) = t;
}

void pykv_attn_merge(const struct pykv_attn * a, int ith, int nth) {
    const struct pieces p = cut(a);
    const int64_t n = (int64_t) a->n_stream * p.n_queries;
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth && !p.is_final; ++i) {
        merge_query(a, &p, (int) (i / p.n_queries), (int) (i % p.n_queries));
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

void pykv_attn_mass(const struct pykv_attn * a, const struct pykv_attn_mass * what, int ith, int nth) {
    kernel()->mass(a, what, ith, nth);
}
