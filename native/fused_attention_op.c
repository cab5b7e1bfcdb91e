#include "fused_attention_op.h"

#include "fused_attention.h"

#include <limits.h>
#include <string.h>

// where the operands of each operation lie; those absent are NULL
enum { Q, K, V, MASK, SINKS, N_OPERANDS };
enum { SCRATCH, FIRST_OPERAND, HEAD_WEIGHT = FIRST_OPERAND + N_OPERANDS, ROW_WEIGHT, MERGED, N_MASS_OPERANDS };

static enum pykv_attn_type type_of(const struct ggml_tensor * x) {
    switch (x->type) {
        case GGML_TYPE_F32: return PYKV_ATTN_F32;
        case GGML_TYPE_F16: return PYKV_ATTN_F16;
        case GGML_TYPE_BF16: return PYKV_ATTN_BF16;
        case GGML_TYPE_Q8_0: return PYKV_ATTN_Q8_0;
        case GGML_TYPE_Q4_0: return PYKV_ATTN_Q4_0;
        case GGML_TYPE_Q4_1: return PYKV_ATTN_Q4_1;
        case GGML_TYPE_Q5_0: return PYKV_ATTN_Q5_0;
        case GGML_TYPE_Q5_1: return PYKV_ATTN_Q5_1;
        case GGML_TYPE_IQ4_NL: return PYKV_ATTN_IQ4_NL;
        default: return PYKV_ATTN_N_TYPES;
    }
}

static struct pykv_attn_store store_of(const struct ggml_tensor * x) {
    return (struct pykv_attn_store) {
        .data = x->data,
        .type = type_of(x),
        .cell = (int64_t) x->nb[2],
        .head = (int64_t) x->nb[1],
        .stream = (int64_t) x->nb[3],
    };
}

static struct pykv_attn describe(struct ggml_tensor * const * from, const struct pykv_attn_params * params) {
    const struct ggml_tensor * q = from[Q], * k = from[K], * v = from[V], * mask = from[MASK], * sinks = from[SINKS];
    struct pykv_attn a = {
        .n_kv = (int) k->ne[2],
        .n_head = (int) q->ne[1],
        .n_head_kv = (int) k->ne[1],
        .head_k = (int) k->ne[0],
        .head_v = (int) v->ne[0],
        .n_rows = (int) q->ne[2],
        .n_stream = (int) q->ne[3],
        .scale = params->scale,
        .softcap = params->softcap,
        .max_bias = params->max_bias,
        .q = q->data,
        .q_head = (int64_t) q->nb[1],
        .q_row = (int64_t) q->nb[2],
        .q_stream = (int64_t) q->nb[3],
        .k = store_of(k),
        .v = store_of(v),
        .sinks = sinks ? sinks->data : NULL,
        .keep_weights = params->keep_weights,
    };
    if (mask) {
        a.mask = mask->data;
        a.mask_is_f16 = mask->type == GGML_TYPE_F16;
        a.mask_row = (int64_t) mask->nb[1];
        a.mask_stream = mask->ne[3] > 1 ? (int64_t) mask->nb[3] : 0;
    }
    return a;
}

// ---- what is covered -----------------------------------------------------------------------------------------------

static const char * store_misfit(const struct ggml_tensor * x, const struct ggml_tensor * k) {
    for (int i = 1; i < 4; ++i) {
        if (x->ne[i] != k->ne[i]) return "K and V of different shape";
    }
    return x->nb[0] == ggml_type_size(x->type) ? NULL : "K or V whose heads are not stored as runs";
}

static const char * mask_misfit(const struct ggml_tensor * mask, const struct ggml_tensor * q,
                                const struct ggml_tensor * k) {
    if (!mask) return NULL;
    if (mask->type != GGML_TYPE_F16 && mask->type != GGML_TYPE_F32) return "a mask that is neither f16 nor f32";
    if (mask->nb[0] != ggml_type_size(mask->type)) return "a mask whose rows are not stored as runs";
    if (mask->ne[0] != k->ne[2] || mask->ne[1] < q->ne[2] || mask->ne[2] != 1) return "a mask of this shape";
    return mask->ne[3] == 1 || mask->ne[3] == q->ne[3] ? NULL : "a mask of this shape";
}

static bool is_run(const struct ggml_tensor * x, int64_t n) {
    return !x || (x->type == GGML_TYPE_F32 && x->ne[0] == n && ggml_nelements(x) == n && x->nb[0] == sizeof(float));
}

// the kernel counts in int, with some room
static bool fits_in_int(const struct ggml_tensor * x) {
    for (int i = 0; i < 4; ++i) {
        if (x->ne[i] > INT_MAX / 2) return false;
    }
    return true;
}

const char * pykv_attn_misfit(const struct pykv_attn_tensors * t, const struct pykv_attn_params * params) {
    const struct ggml_tensor * q = t->q, * k = t->k;
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float)) return "queries that are not runs of f32";
    if (q->ne[0] != k->ne[0] || q->ne[3] != k->ne[3]) return "queries that do not fit K";
    if (!fits_in_int(q) || !fits_in_int(k) || !fits_in_int(t->v)) return "so large a batch";
    if (q->ne[1] * q->ne[2] > INT_MAX / PYKV_ATTN_MAX_HEAD) return "so large a batch";
    const char * misfit = store_misfit(k, k);
    if (!misfit) misfit = store_misfit(t->v, k);
    if (!misfit) misfit = mask_misfit(t->mask, q, k);
    if (!misfit && !is_run(t->sinks, q->ne[1])) misfit = "sinks that are not one f32 a head";
    if (misfit) return misfit;
    struct ggml_tensor * const all[N_OPERANDS] = {t->q, t->k, t->v, t->mask, t->sinks};
    const struct pykv_attn a = describe(all, params);
    return pykv_attn_refusal(&a);
}

// ---- the operations ------------------------------------------------------------------------------------------------

static void run_cells(struct ggml_tensor * dst, int ith, int nth, void * params) {
    struct pykv_attn a = describe(dst->src, params);
    a.scratch = dst->data;
    pykv_attn_cells(&a, ith, nth);
}

static void run_whole(struct ggml_tensor * dst, int ith, int nth, void * params) {
    struct pykv_attn a = describe(dst->src, params);
    a.out = dst->data;
    pykv_attn_cells(&a, ith, nth);
}

static void run_merge(struct ggml_tensor * dst, int ith, int nth, void * params) {
    struct pykv_attn a = describe(dst->src + FIRST_OPERAND, params);
    a.scratch = dst->src[SCRATCH]->data;
    a.out = dst->data;
    pykv_attn_merge(&a, ith, nth);
}

static const float * data_of(const struct ggml_tensor * x) { return x ? x->data : NULL; }

static void run_mass(struct ggml_tensor * dst, int ith, int nth, void * user) {
    const struct pykv_attn_mass_params * params = user;
    struct pykv_attn a = describe(dst->src + FIRST_OPERAND, &params->attention);
    a.scratch = dst->src[SCRATCH]->data;
    const struct pykv_attn_mass what = {
        .first_row = params->first_row,
        .end_row = params->end_row,
        .head_weight = data_of(dst->src[HEAD_WEIGHT]),
        .row_weight = data_of(dst->src[ROW_WEIGHT]),
        .largest = params->largest,
        .all_heads = params->all_heads,
        .out = dst->data,
    };
    pykv_attn_mass(&a, &what, ith, nth);
}

struct ggml_tensor * pykv_attn_build(struct ggml_context * ctx, const struct pykv_attn_tensors * t,
                                     struct pykv_attn_params * params) {
    struct ggml_tensor * all[FIRST_OPERAND + N_OPERANDS] = {NULL, t->q, t->k, t->v, t->mask, t->sinks};
    const struct pykv_attn a = describe(all + FIRST_OPERAND, params);
    if (a.n_rows > PYKV_ATTN_FEW_ROWS) {
        return ggml_custom_4d(ctx, GGML_TYPE_F32, a.head_v, a.n_head, a.n_rows, a.n_stream, all + FIRST_OPERAND,
                              N_OPERANDS, run_whole, GGML_N_TASKS_MAX, params);
    }
    const int64_t n = (int64_t) pykv_attn_scratch_floats(&a);
    all[SCRATCH] = ggml_custom_4d(ctx, GGML_TYPE_F32, n, 1, 1, 1, all + FIRST_OPERAND, N_OPERANDS, run_cells,
                                  GGML_N_TASKS_MAX, params);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, a.head_v, a.n_head, a.n_rows, a.n_stream, all, FIRST_OPERAND + N_OPERANDS,
                          run_merge, GGML_N_TASKS_MAX, params);
}

const char * pykv_attn_mass_misfit(const struct pykv_attn_tensors * t, const struct pykv_attn_weights * weights,
                                   const struct pykv_attn_mass_params * params) {
    const struct ggml_tensor * q = t->q, * row = weights->row;
    if (params->first_row < 0 || params->first_row > params->end_row || params->end_row > q->ne[2]) return "these rows";
    if (!is_run(weights->head, q->ne[1])) return "weights that are not one f32 a head";
    if (row && (row->type != GGML_TYPE_F32 || row->ne[0] != q->ne[2] || row->ne[1] != q->ne[3] ||
                ggml_nelements(row) != q->ne[2] * q->ne[3] || !ggml_is_contiguous(row))) {
        return "weights that are not one f32 a row";
    }
    return NULL;
}

struct ggml_tensor * pykv_attn_build_mass(struct ggml_context * ctx, const struct pykv_attn_tensors * t,
                                          struct ggml_tensor * out, const struct pykv_attn_weights * weights,
                                          struct pykv_attn_mass_params * params) {
    // it reads nothing of `out`, but the totals that are left in scratch with it
    struct ggml_tensor * all[N_MASS_OPERANDS] = {out->src[SCRATCH], t->q,          t->k,         t->v, t->mask,
                                                 t->sinks,          weights->head, weights->row, out};
    return ggml_custom_4d(ctx, GGML_TYPE_F32, t->k->ne[2], params->all_heads ? 1 : t->k->ne[1], t->q->ne[3], 1, all,
                          N_MASS_OPERANDS, run_mass, GGML_N_TASKS_MAX, params);
}
