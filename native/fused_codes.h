// Products of 32 stored codes, a block of a quantised K, with a query in 16-bit integers: half the work of converting
// the codes to floats, and still a thousand times more exact than the codes themselves.
//
// codes_dot4 multiplies the blocks of four cells with one of a query: the product with x[i] is the sum of every fourth
// lane from lane i on, as vf_repeat4_f16 lays out the cells' scales and vf_store_sum4 adds up.
#pragma once

#include "fused_decode.h"

#if defined(PYKV_ISA_AVX512) // -----------------------------------------------------------------------------------

typedef __m512i codes32;
INLINE codes32 codes_load(const void * p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(p)); }
INLINE codes32 codes_join(b16 low, b16 high, int minus) {
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    return _mm512_cvtepi8_epi16(_mm256_sub_epi8(both, _mm256_set1_epi8((char) minus)));
}
INLINE __m512i pair_sums(__m512i a, __m512i b) {
    const __m512 swapped = _mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), 0x4e);
    return _mm512_add_epi32(_mm512_mask_blend_epi32(0xcccc, a, b), _mm512_castps_si512(swapped));
}
INLINE vf codes_dot4(const codes32 * x, const int16_t * q) {
    const __m512i y = _mm512_loadu_si512(q);
    const __m512 ab = _mm512_castsi512_ps(pair_sums(_mm512_madd_epi16(x[0], y), _mm512_madd_epi16(x[1], y)));
    const __m512 cd = _mm512_castsi512_ps(pair_sums(_mm512_madd_epi16(x[2], y), _mm512_madd_epi16(x[3], y)));
    const __m512i even = _mm512_castps_si512(_mm512_shuffle_ps(ab, cd, 0x88));
    const __m512i odd = _mm512_castps_si512(_mm512_shuffle_ps(ab, cd, 0xdd));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
}

#elif defined(PYKV_ISA_AVX2) // -----------------------------------------------------------------------------------

typedef struct {
    __m256i half[2];
} codes32;
INLINE codes32 codes_load(const void * p) {
    const __m128i * at = p;
    return (codes32) {{_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))}};
}
INLINE codes32 codes_join(b16 low, b16 high, int minus) {
    const __m128i m = _mm_set1_epi8((char) minus);
    return (codes32) {{_mm256_cvtepi8_epi16(_mm_sub_epi8(low, m)), _mm256_cvtepi8_epi16(_mm_sub_epi8(high, m))}};
}
INLINE __m256i products(const codes32 * x, const __m256i * q) {
    return _mm256_add_epi32(_mm256_madd_epi16(x->half[0], q[0]), _mm256_madd_epi16(x->half[1], q[1]));
}
INLINE __m256i pair_sums(__m256i a, __m256i b) {
    const __m256 swapped = _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x4e);
    return _mm256_add_epi32(_mm256_blend_epi32(a, b, 0xcc), _mm256_castps_si256(swapped));
}
INLINE vf codes_dot4(const codes32 * x, const int16_t * q) {
    const __m256i y[2] = {_mm256_loadu_si256((const void *) q), _mm256_loadu_si256((const void *) (q + 16))};
    const __m256 ab = _mm256_castsi256_ps(pair_sums(products(&x[0], y), products(&x[1], y)));
    const __m256 cd = _mm256_castsi256_ps(pair_sums(products(&x[2], y), products(&x[3], y)));
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(ab, cd, 0x88));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(ab, cd, 0xdd));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(even, odd));
}

#elif defined(PYKV_ISA_NEON) // -----------------------------------------------------------------------------------

typedef struct {
    int8x16_t half[2];
} codes32;
INLINE codes32 codes_load(const void * p) { return (codes32) {{b16_load(p), b16_load((const char *) p + 16)}}; }
INLINE codes32 codes_join(b16 low, b16 high, int minus) {
    const int8x16_t m = vdupq_n_s8((int8_t) minus);
    return (codes32) {{vsubq_s8(low, m), vsubq_s8(high, m)}};
}
INLINE int32x4_t dot_of_8(int32x4_t sum, int8x8_t x, const int16_t * q) {
    const int16x8_t wide = vmovl_s8(x), y = vld1q_s16(q);
    sum = vmlal_s16(sum, vget_low_s16(wide), vget_low_s16(y));
    return vmlal_s16(sum, vget_high_s16(wide), vget_high_s16(y));
}
INLINE int32x4_t products(const codes32 * x, const int16_t * q) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 2; ++i) {
        sum = dot_of_8(sum, vget_low_s8(x->half[i]), q + 16 * i);
        sum = dot_of_8(sum, vget_high_s8(x->half[i]), q + 16 * i + 8);
    }
    return sum;
}
INLINE vf codes_dot4(const codes32 * x, const int16_t * q) {
    const int32x4_t ab = vpaddq_s32(products(&x[0], q), products(&x[1], q));
    const int32x4_t cd = vpaddq_s32(products(&x[2], q), products(&x[3], q));
    return vcvtq_f32_s32(vpaddq_s32(ab, cd));
}

#else // plain C converts to floats instead ------------------------------------------------------------------------

typedef struct {
    char unused;
} codes32;
INLINE codes32 codes_load(const void * p) {
    (void) p;
    return (codes32) {0};
}
INLINE codes32 codes_join(b16 low, b16 high, int minus) {
    (void) low, (void) high, (void) minus;
    return (codes32) {0};
}
INLINE vf codes_dot4(const codes32 * x, const int16_t * q) {
    (void) x, (void) q;
    return vf_zero();
}

#endif

INLINE codes32 open_codes(const enum pykv_attn_type type, const char * block) {
    if (type == PYKV_ATTN_Q8_0) return codes_load(block + 2);
    const b16 packed = b16_load(block + 2);
    return codes_join(b16_low(packed), b16_high(packed), 8);
}

// Write a query as codes. Return what one step of a code is worth: NaN if a number of the query is not finite.
static float query_to_codes(const float * q, int width, int16_t * codes) {
    vf largest = vf_zero(), spoiled = vf_zero();
    for (int i = 0; i < width; i += W) {
        const vf x = vf_load(q + i);
        largest = vf_max(largest, vf_abs(x));
        spoiled = vf_fma(x, vf_zero(), spoiled);
    }
    const float step = vf_reduce_max(largest) / 32767;
    const vf inverse = vf_set1(step > 0 ? 1 / step : 0);
    for (int i = 0; i < width; i += W) vf_store_i16(codes + i, vf_mul(vf_load(q + i), inverse));
    return step + vf_reduce_add(spoiled);
}
