// Stored K and V as vectors of floats, sixteen values at a time: half a block of a quantised type.
#pragma once

#include "fused_pieces.h"
#include "fused_simd.h"

enum { V16 = 16 / W }; // vectors of sixteen values

#if defined(__GNUC__) && !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

// sixteen values that are not converted yet: plain numbers at `at`, or codes · scale + offset
struct sixteen {
    const char * at;
    b16 codes;
    vf scale, offset;
};

static const int8_t q4_0_values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

INLINE int is_blocked(enum pykv_attn_type type) { return type >= PYKV_ATTN_Q8_0; }

INLINE int bytes_of_32(enum pykv_attn_type type) {
    switch (type) {
        case PYKV_ATTN_F32: return 128;
        case PYKV_ATTN_F16:
        case PYKV_ATTN_BF16: return 64;
        case PYKV_ATTN_Q8_0: return 34;
        case PYKV_ATTN_Q4_1: return 20;
        case PYKV_ATTN_Q5_0: return 22;
        case PYKV_ATTN_Q5_1: return 24;
        default: return 18;
    }
}

// a block's low nibbles are its first half
INLINE b16 nibbles(const char * packed, int half) {
    const b16 x = b16_load(packed);
    return half ? b16_high(x) : b16_low(x);
}

INLINE b16 codes_of_5_bits(const char * fifth_bits, const char * packed, int half) {
    return b16_fifth_bit(nibbles(packed, half), read_u16(fifth_bits + 2 * half));
}

// read from element `e` on, which is in that half of its block; type and half are known when this is compiled
INLINE struct sixteen open16(const enum pykv_attn_type type, const char * row, int e, const int half) {
    struct sixteen s = {row, b16_load(iq4_nl_values), vf_zero(), vf_zero()};
    const char * block = row + (size_t) (e / 32) * (size_t) bytes_of_32(type);
    if (!is_blocked(type)) {
        s.at = row + (size_t) e * (size_t) (bytes_of_32(type) / 32);
        return s;
    }
    s.scale = vf_set1_f16(block);
    if (type == PYKV_ATTN_Q8_0) {
        s.at = block + 2 + 16 * half;
    } else if (type == PYKV_ATTN_Q4_0) {
        s.codes = b16_table(nibbles(block + 2, half), q4_0_values);
    } else if (type == PYKV_ATTN_Q4_1) {
        s.codes = nibbles(block + 4, half);
        s.offset = vf_set1_f16(block + 2);
    } else if (type == PYKV_ATTN_Q5_0) {
        s.codes = codes_of_5_bits(block + 2, block + 6, half);
        s.offset = vf_mul(s.scale, vf_set1(-16.0f));
    } else if (type == PYKV_ATTN_Q5_1) {
        s.codes = codes_of_5_bits(block + 4, block + 8, half);
        s.offset = vf_set1_f16(block + 2);
    } else {
        s.codes = b16_table(nibbles(block + 2, half), iq4_nl_values);
    }
    return s;
}

// the codes of a block without an offset, before they are scaled
INLINE vf code16(const enum pykv_attn_type type, const struct sixteen * s, int part) {
    return type == PYKV_ATTN_Q8_0 ? vf_load_i8(s->at + W * part) : vf_from_b16(s->codes, part);
}

INLINE vf part16(const enum pykv_attn_type type, const struct sixteen * s, int part) {
    switch (type) {
        case PYKV_ATTN_F32: return vf_load((const float *) (const void *) s->at + W * part);
        case PYKV_ATTN_F16: return vf_load_f16(s->at + 2 * W * part);
        case PYKV_ATTN_BF16: return vf_load_bf16(s->at + 2 * W * part);
        case PYKV_ATTN_Q8_0:
        case PYKV_ATTN_Q4_0:
        case PYKV_ATTN_IQ4_NL: return vf_mul(code16(type, s, part), s->scale);
        default: return vf_fma(vf_from_b16(s->codes, part), s->scale, s->offset);
    }
}

INLINE void decode16(const enum pykv_attn_type type, const char * row, int e, const int half, float * out) {
    const struct sixteen s = open16(type, row, e, half);
    UNROLL
    for (int part = 0; part < V16; ++part) vf_store(out + e + W * part, part16(type, &s, part));
}

// Ask for about as many cache lines as n bytes are, and again for those `again` bytes before: a processor drops
// requests while too many are under way. Return where the bytes end. At 0 nothing is asked for.
INLINE uintptr_t fetch(uintptr_t at, const int n, int again) {
    const int n_lines = n < 96 ? 1 : (n + 32) / 64;
    if (!at) return 0;
    UNROLL
    for (int i = 0; i < n_lines; ++i) {
        PREFETCH(at + (uintptr_t) (64 * i));
        PREFETCH(at + (uintptr_t) (64 * i) - (uintptr_t) again);
    }
    return at + (uintptr_t) n;
}

INLINE void decode_row(const enum pykv_attn_type type, const char * row, int width, float * out, uintptr_t ahead,
                       int again) {
    for (int e = 0; e < width; e += is_blocked(type) ? 32 : 16) {
        ahead = fetch(ahead, bytes_of_32(type) / (is_blocked(type) ? 1 : 2), again);
        decode16(type, row, e, 0, out);
        if (is_blocked(type)) decode16(type, row, e + 16, 1, out);
    }
}
