// Attention of query rows over a K/V cache. For a few rows each stored byte is read once; more rows go in slabs.
//
// The work is cut into pieces that depend on shapes alone, never on the number of threads, and the pieces are put
// together in a fixed order: results are the same bits for every number of threads. Three phases, with a barrier
// between them that the caller provides:
//
//   1. pykv_attn_cells   each piece of cells leaves its weighted sum of V, its largest score and its sum of weights
//   2. pykv_attn_merge   put the pieces of each head and row together
//   3. pykv_attn_mass    optional: how much attention each cell received
//
// With more than PYKV_ATTN_FEW_ROWS the first phase writes `out`, without scratch, and there are no others.
//
// Nothing here knows of ggml.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// how K and V are stored; the quantised types in blocks of 32, laid out as ggml's
enum pykv_attn_type {
    PYKV_ATTN_F32,
    PYKV_ATTN_F16,
    PYKV_ATTN_BF16,
    PYKV_ATTN_Q8_0,
    PYKV_ATTN_Q4_0,
    PYKV_ATTN_Q4_1,
    PYKV_ATTN_Q5_0,
    PYKV_ATTN_Q5_1,
    PYKV_ATTN_IQ4_NL,
    PYKV_ATTN_N_TYPES,
};

enum {
    PYKV_ATTN_FEW_ROWS = 16,   // up to so many query rows of a stream are few
    PYKV_ATTN_MAX_HEAD = 576,  // width of a head
    PYKV_ATTN_BLOCK = 64,      // cells that are looked at together
    PYKV_ATTN_SLAB = 64,       // queries (a head of a row) that are looked at together
};

// stored K or V; strides in bytes
struct pykv_attn_store {
    const void * data;
    enum pykv_attn_type type;
    int64_t cell, head, stream;
};

// Scores are softcap(q·k · scale) + mask · slope of the head.
struct pykv_attn {
    int n_kv, n_head, n_head_kv, head_k, head_v, n_rows, n_stream;
    float scale;
    float softcap;  // 0 = none
    float max_bias; // ALiBi; 0 = every slope is 1

    const float * q; // [head_k, n_head, n_rows, n_stream], strides in bytes
    int64_t q_head, q_row, q_stream;
    struct pykv_attn_store k, v;
    const void * mask; // [n_kv, n_rows, n_stream], -inf = invisible; NULL = every cell is visible
    bool mask_is_f16;  // else f32
    int64_t mask_row, mask_stream;
    const float * sinks; // [n_head] scores of a cell without content; NULL = none

    float * scratch;   // pykv_attn_scratch_floats() of them
    bool keep_weights; // for pykv_attn_mass; only with few rows
    float * out;       // [head_v, n_head, n_rows, n_stream], contiguous; rows that see no cell become 0
};

// Which part of the attention to add up for each cell.
struct pykv_attn_mass {
    int first_row, end_row;    // query rows of each stream
    const float * head_weight; // [n_head], what a head's share counts; NULL = 1 for all
    bool largest;              // the largest share instead of the sum
    float * out;               // [n_kv, n_head_kv or 1, n_stream], contiguous
    const float * row_weight;  // [n_rows, n_stream], what a row's share counts; NULL = 1 for all
    bool all_heads;            // all KV heads together: `out` has one run a stream
};

// Return NULL if the kernel covers the shapes, types and strides, else why it does not.
const char * pykv_attn_refusal(const struct pykv_attn * a);

// Return the size of `scratch` for the shapes and `keep_weights`, SIZE_MAX if it would not fit in memory. It does not
// shrink as n_kv grows.
size_t pykv_attn_scratch_floats(const struct pykv_attn * a);

// Do the share of thread `ith` of `nth`.
void pykv_attn_cells(const struct pykv_attn * a, int ith, int nth);
void pykv_attn_merge(const struct pykv_attn * a, int ith, int nth);
void pykv_attn_mass(const struct pykv_attn * a, const struct pykv_attn_mass * what, int ith, int nth);

// Return the name of the instruction set in use: the best that this machine has, or the one in the environment
// variable PYKV_ATTENTION_ISA.
const char * pykv_attn_isa(void);

// Take another one; false if this machine or build lacks it. NULL = choose again.
bool pykv_attn_use_isa(const char * name);
