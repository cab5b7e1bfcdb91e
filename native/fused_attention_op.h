// The fused attention kernel as ggml custom operations.
#pragma once

#include <ggml.h>

#include <stdbool.h>

// What the operations are given besides their tensors. It must outlive every run of the graph.
struct pykv_attn_params {
    float scale;
    float softcap;     // 0 = none
    float max_bias;    // ALiBi; 0 = none
    bool keep_weights; // so that pykv_attn_build_mass can follow
};

// Which part of the attention to add up; like the above it must outlive the graph.
struct pykv_attn_mass_params {
    struct pykv_attn_params attention; // as given to pykv_attn_build
    int first_row, end_row;            // query rows of each stream
    bool largest;                      // the largest share instead of the sum
    bool all_heads;                    // all KV heads together
};

// What the share of a head and of a row counts; NULL = 1.
struct pykv_attn_weights {
    struct ggml_tensor * head; // [H], f32
    struct ggml_tensor * row;  // [n_rows, S], f32
};

// The tensors of one attention.
struct pykv_attn_tensors {
    struct ggml_tensor * q;     // [Dk, H, n_rows, S], f32
    struct ggml_tensor * k;     // [Dk, Hk, n_kv, S]
    struct ggml_tensor * v;     // [Dv, Hk, n_kv, S], may be a view of k's first elements
    struct ggml_tensor * mask;  // [n_kv, >= n_rows, 1, S], f16 or f32, or NULL
    struct ggml_tensor * sinks; // [H], f32, or NULL
};

// Return NULL if the kernel covers these tensors, else what it does not cover.
const char * pykv_attn_misfit(const struct pykv_attn_tensors * t, const struct pykv_attn_params * params);

// Add the two operations, or one for more than PYKV_ATTN_FEW_ROWS; return the output [Dv, H, n_rows, S]. Of two, its
// first operand is the scratch tensor.
struct ggml_tensor * pykv_attn_build(struct ggml_context * ctx, const struct pykv_attn_tensors * t,
                                     struct pykv_attn_params * params);

// Return NULL if pykv_attn_build_mass takes these weights and rows, else what is wrong.
const char * pykv_attn_mass_misfit(const struct pykv_attn_tensors * t, const struct pykv_attn_weights * weights,
                                   const struct pykv_attn_mass_params * params);

// Add the third operation to an output of pykv_attn_build that keeps weights: the attention that each cell received,
// [n_kv, Hk or 1, S].
struct ggml_tensor * pykv_attn_build_mass(struct ggml_context * ctx, const struct pykv_attn_tensors * t,
                                          struct ggml_tensor * out, const struct pykv_attn_weights * weights,
                                          struct pykv_attn_mass_params * params);
