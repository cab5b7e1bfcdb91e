#include "fused_reference.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static uint16_t u16_at(const uint8_t * p) { return (uint16_t) (p[0] | p[1] << 8); }

double reference_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
}

// blocks of 32: scale (f16), for *_1 an offset (f16), for q5 the fifth bits (32 of them), then the codes
double reference_value(enum pykv_attn_type type, const void * row, int i) {
    static const int table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int size[] = {0, 0, 0, 34, 18, 20, 22, 24, 18};
    float f;
    if (type == PYKV_ATTN_F32) {
        memcpy(&f, (const char *) row + 4 * i, 4);
        return f;
    }
    if (type == PYKV_ATTN_F16) return reference_half(u16_at((const uint8_t *) row + 2 * i));
    if (type == PYKV_ATTN_BF16) {
        const uint32_t bits = (uint32_t) u16_at((const uint8_t *) row + 2 * i) << 16;
        memcpy(&f, &bits, 4);
        return f;
    }
    const uint8_t * block = (const uint8_t *) row + i / 32 * size[type];
    const int j = i % 32;
    const double scale = reference_half(u16_at(block)), offset = reference_half(u16_at(block + 2));
    if (type == PYKV_ATTN_Q8_0) return scale * (int8_t) block[2 + j];
    const uint8_t * packed = block + size[type] - 16;
    const int nibble = j < 16 ? packed[j] & 15 : packed[j - 16] >> 4;
    const bool has_fifth = type == PYKV_ATTN_Q5_0 || type == PYKV_ATTN_Q5_1;
    const int code = nibble + (has_fifth ? (packed[j / 8 - 4] >> j % 8 & 1) * 16 : 0);
    switch (type) {
        case PYKV_ATTN_Q4_0: return scale * (nibble - 8);
        case PYKV_ATTN_Q4_1: return scale * nibble + offset;
        case PYKV_ATTN_Q5_0: return scale * (code - 16);
        case PYKV_ATTN_Q5_1: return scale * code + offset;
        default: return scale * table[nibble];
    }
}

static double mask_at(const struct pykv_attn * a, int stream, int row, int cell) {
    if (!a->mask) return 0;
    const char * at = (const char *) a->mask + stream * a->mask_stream + row * a->mask_row;
    if (a->mask_is_f16) return reference_half(u16_at((const uint8_t *) at + 2 * cell));
    float f;
    memcpy(&f, at + 4 * cell, 4);
    return f;
}

static double slope_at(const struct pykv_attn * a, int head) {
    if (a->max_bias <= 0) return 1;
    const int power = 1 << (int) floor(log2(a->n_head));
    const double m0 = pow(2, -a->max_bias / power), m1 = pow(2, -a->max_bias / 2 / power);
    return head < power ? pow(m0, head + 1) : pow(m1, 2 * (head - power) + 1);
}

static const char * row_of_store(const struct pykv_attn_store * x, int stream, int head, int cell) {
    return (const char *) x->data + stream * x->stream + head * x->head + cell * x->cell;
}

static void one(const struct pykv_attn * a, int stream, int row, int head, double * score, double * out) {
    const int head_kv = head / (a->n_head / a->n_head_kv);
    const float * q =
        (const float *) (const void *) ((const char *) a->q + stream * a->q_stream + row * a->q_row + head * a->q_head);
    double largest = a->sinks ? a->sinks[head] : -INFINITY;
    for (int c = 0; c < a->n_kv; ++c) {
        const double mask = mask_at(a, stream, row, c);
        score[c] = -INFINITY;
        if (mask == -INFINITY) continue;
        double dot = 0;
        const char * k = row_of_store(&a->k, stream, head_kv, c);
        for (int i = 0; i < a->head_k; ++i) dot += q[i] * reference_value(a->k.type, k, i);
        score[c] = dot * a->scale;
        if (a->softcap) score[c] = a->softcap * tanh(score[c] / a->softcap);
        score[c] += mask * slope_at(a, head);
        if (score[c] > largest) largest = score[c];
    }
    double sum = a->sinks ? exp(a->sinks[head] - largest) : 0;
    for (int c = 0; c < a->n_kv; ++c) sum += score[c] == -INFINITY ? 0 : exp(score[c] - largest);
    for (int i = 0; i < a->head_v; ++i) out[i] = 0;
    for (int c = 0; c < a->n_kv; ++c) {
        score[c] = score[c] == -INFINITY ? 0 : exp(score[c] - largest) / sum;
        if (score[c] == 0) continue;
        const char * v = row_of_store(&a->v, stream, head_kv, c);
        for (int i = 0; i < a->head_v; ++i) out[i] += score[c] * reference_value(a->v.type, v, i);
    }
}

void reference_attention(const struct pykv_attn * a, double * out, double * share) {
    double * own = share ? NULL : malloc((size_t) a->n_kv * sizeof *own);
    size_t index = 0;
    for (int s = 0; s < a->n_stream; ++s) {
        for (int r = 0; r < a->n_rows; ++r) {
            for (int h = 0; h < a->n_head; ++h, ++index) {
                one(a, s, r, h, share ? share + index * a->n_kv : own, out + index * a->head_v);
            }
        }
    }
    free(own);
}
