// Attention in double precision, one cell after the other: slow, obvious, only for tests.
#pragma once

#include "fused_attention.h"

// out [head_v, n_head, n_rows, n_stream]; share, where not NULL, [n_kv, n_head, n_rows, n_stream]
void reference_attention(const struct pykv_attn * a, double * out, double * share);

// value `i` of a row that is stored in the type
double reference_value(enum pykv_attn_type type, const void * row, int i);

double reference_half(uint16_t bits);
