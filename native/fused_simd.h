// The few vector operations that the attention kernel is written in, once for each instruction set.
//
// vf is a vector of W floats, b16 sixteen signed bytes. Exactly one PYKV_ISA_* macro may be defined; with none of
// them plain C is used. All functions are for whole vectors: the kernel pads instead of handling tails.
//
//   vf_gather_f16   lane i is the number in row i
//   vf_repeat4_f16  lane i is the number in row i % 4; vf_store_sum4 is its counterpart: sums of every fourth lane
//   vf_store_i16    the nearest integers, kept within the range
//   vf_sum4         sums of all lanes of a, b and of c, d
//   vf_any_nan      whether a lane is NaN
//   vf_max          b where a is NaN
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(PYKV_ISA_AVX512) || defined(PYKV_ISA_AVX2)
#include <immintrin.h>
#elif defined(PYKV_ISA_NEON)
#include <arm_neon.h>
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline, unused))
#define PREFETCH(address) __builtin_prefetch((const void *) (address), 0, 3)
#else
#define INLINE static inline
#define PREFETCH(address) ((void) (address))
#endif

INLINE uint16_t read_u16(const void * p) {
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE float bits_to_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#if defined(PYKV_ISA_AVX512) || defined(PYKV_ISA_AVX2)

typedef __m128i b16;

INLINE b16 b16_load(const void * p) { return _mm_loadu_si128(p); }
INLINE b16 b16_low(b16 x) { return _mm_and_si128(x, _mm_set1_epi8(15)); }
INLINE b16 b16_high(b16 x) { return b16_low(_mm_srli_epi16(x, 4)); }
INLINE b16 b16_table(b16 x, const int8_t * table) { return _mm_shuffle_epi8(b16_load(table), x); }

// x + 16 where the lane's bit is set
INLINE b16 b16_fifth_bit(b16 x, uint16_t bits) {
    const b16 lane = _mm_set1_epi64x((long long) 0x8040201008040201ULL);
    const b16 spread = _mm_shuffle_epi8(_mm_cvtsi32_si128(bits), _mm_set_epi64x(0x0101010101010101LL, 0));
    const b16 is_set = _mm_cmpeq_epi8(_mm_and_si128(spread, lane), lane);
    return _mm_or_si128(x, _mm_and_si128(is_set, _mm_set1_epi8(16)));
}

INLINE __m128 repeat4_f16(const char * const * rows, size_t offset) {
    uint64_t x = 0;
    for (int i = 3; i >= 0; --i) x = x << 16 | read_u16(rows[i] + offset);
    return _mm_cvtph_ps(_mm_cvtsi64_si128((long long) x));
}

// the horizontal sums of four vectors of eight
INLINE __m128 sum4_of_8(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
    const __m256 cd = _mm256_add_ps(_mm256_blend_ps(c, d, 0xcc), _mm256_shuffle_ps(c, d, 0x4e));
    const __m256 sum = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
    return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}

INLINE void store_pairs(__m128 x, float * low, float * high) {
    _mm_storel_pi((__m64 *) low, x);
    _mm_storeh_pi((__m64 *) high, x);
}

#endif

#if defined(PYKV_ISA_AVX512) // -----------------------------------------------------------------------------------

enum { W = 16, N_REGISTERS = 32 };
typedef __m512 vf;

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float * p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float * p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_if_less(vf a, vf b, vf yes, vf no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
INLINE uint64_t vf_bits_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE int vf_any_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
INLINE float vf_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
INLINE float vf_reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
INLINE vf vf_times_2_to(vf a, vf n) { return _mm512_scalef_ps(a, n); }
INLINE vf vf_load_f16(const void * p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vf vf_set1_f16(const void * p) { return _mm512_cvtph_ps(_mm256_set1_epi16((short) read_u16(p))); }
INLINE vf vf_load_bf16(const void * p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE vf vf_load_i8(const void * p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
INLINE vf vf_gather_f16(const char * const * rows, size_t offset) {
#define AT(i) (short) read_u16(rows[i] + offset)
    return _mm512_cvtph_ps(_mm256_set_epi16(AT(15), AT(14), AT(13), AT(12), AT(11), AT(10), AT(9), AT(8), AT(7), AT(6),
                                            AT(5), AT(4), AT(3), AT(2), AT(1), AT(0)));
#undef AT
}
INLINE vf vf_repeat4_f16(const char * const * rows, size_t offset) {
    return _mm512_broadcast_f32x4(repeat4_f16(rows, offset));
}
INLINE void vf_store_i16(int16_t * p, vf a) {
    _mm256_storeu_si256((void *) p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}
INLINE vf vf_from_b16(b16 x, int part) {
    (void) part;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}
INLINE __m256 half_sum(vf a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float * low, float * high) {
    store_pairs(sum4_of_8(half_sum(a), half_sum(b), half_sum(c), half_sum(d)), low, high);
}
INLINE void vf_store_sum4(float * p, vf a) {
    const __m256 x = half_sum(a);
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

#elif defined(PYKV_ISA_AVX2) // -----------------------------------------------------------------------------------

enum { W = 8, N_REGISTERS = 16 };
typedef __m256 vf;

INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float * p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float * p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_if_less(vf a, vf b, vf yes, vf no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE uint64_t vf_bits_less(vf a, vf b) { return (uint64_t) _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE int vf_any_nan(vf a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
INLINE float vf_reduce_max(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
INLINE float vf_reduce_add(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE vf vf_times_2_to(vf a, vf n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
INLINE vf vf_load_f16(const void * p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE vf vf_set1_f16(const void * p) { return _mm256_cvtph_ps(_mm_set1_epi16((short) read_u16(p))); }
INLINE vf vf_load_bf16(const void * p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE vf vf_load_i8(const void * p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p))); }
INLINE vf vf_gather_f16(const char * const * rows, size_t offset) {
#define AT(i) (short) read_u16(rows[i] + offset)
    return _mm256_cvtph_ps(_mm_set_epi16(AT(7), AT(6), AT(5), AT(4), AT(3), AT(2), AT(1), AT(0)));
#undef AT
}
INLINE vf vf_repeat4_f16(const char * const * rows, size_t offset) {
    const __m128 x = repeat4_f16(rows, offset);
    return _mm256_set_m128(x, x);
}
INLINE void vf_store_i16(int16_t * p, vf a) {
    const __m256i x = _mm256_cvtps_epi32(a);
    _mm_storeu_si128((void *) p, _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
INLINE vf vf_from_b16(b16 x, int part) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part ? _mm_unpackhi_epi64(x, x) : x));
}
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float * low, float * high) {
    store_pairs(sum4_of_8(a, b, c, d), low, high);
}
INLINE void vf_store_sum4(float * p, vf a) {
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}

#elif defined(PYKV_ISA_NEON) // -----------------------------------------------------------------------------------

enum { W = 4, N_REGISTERS = 32 };
typedef float32x4_t vf;
typedef int8x16_t b16;

INLINE vf vf_zero(void) { return vdupq_n_f32(0); }
INLINE vf vf_set1(float x) { return vdupq_n_f32(x); }
INLINE vf vf_load(const float * p) { return vld1q_f32(p); }
INLINE void vf_store(float * p, vf x) { vst1q_f32(p, x); }
INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
INLINE vf vf_max(vf a, vf b) { return vmaxnmq_f32(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE vf vf_abs(vf a) { return vabsq_f32(a); }
INLINE vf vf_round(vf a) { return vrndnq_f32(a); }
INLINE vf vf_if_less(vf a, vf b, vf yes, vf no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
INLINE uint64_t vf_bits_less(vf a, vf b) {
    const uint32_t bits[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcltq_f32(a, b), vld1q_u32(bits)));
}
INLINE int vf_any_nan(vf a) { return vminvq_u32(vceqq_f32(a, a)) == 0; }
INLINE float vf_reduce_max(vf a) { return vmaxvq_f32(a); }
INLINE float vf_reduce_add(vf a) { return vaddvq_f32(a); }
INLINE vf vf_times_2_to(vf a, vf n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(vcvtnq_s32_f32(n), 23)));
}
INLINE vf vf_load_f16(const void * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
INLINE vf vf_set1_f16(const void * p) { return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(read_u16(p)))); }
INLINE vf vf_load_bf16(const void * p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
INLINE vf widen_i8(int8x8_t x, int upper) {
    const int16x8_t wide = vmovl_s8(x);
    return vcvtq_f32_s32(vmovl_s16(upper ? vget_high_s16(wide) : vget_low_s16(wide)));
}
INLINE vf vf_load_i8(const void * p) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return widen_i8(vcreate_s8(bytes), 0);
}
INLINE vf vf_gather_f16(const char * const * rows, size_t offset) {
    const uint16_t halves[4] = {read_u16(rows[0] + offset), read_u16(rows[1] + offset), read_u16(rows[2] + offset),
                                read_u16(rows[3] + offset)};
    return vf_load_f16(halves);
}
INLINE vf vf_repeat4_f16(const char * const * rows, size_t offset) { return vf_gather_f16(rows, offset); }
INLINE void vf_store_sum4(float * p, vf a) { vf_store(p, a); }
INLINE void vf_store_i16(int16_t * p, vf a) { vst1_s16(p, vqmovn_s32(vcvtnq_s32_f32(a))); }
INLINE vf vf_from_b16(b16 x, int part) { return widen_i8(part < 2 ? vget_low_s8(x) : vget_high_s8(x), part & 1); }
INLINE b16 b16_load(const void * p) { return vld1q_s8(p); }
INLINE b16 b16_low(b16 x) { return vandq_s8(x, vdupq_n_s8(15)); }
INLINE b16 b16_high(b16 x) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }
INLINE b16 b16_table(b16 x, const int8_t * table) { return vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s8(x)); }
INLINE b16 b16_fifth_bit(b16 x, uint16_t bits) {
    const uint8x16_t lane = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ULL));
    const uint8x16_t spread = vcombine_u8(vdup_n_u8((uint8_t) bits), vdup_n_u8((uint8_t) (bits >> 8)));
    return vorrq_s8(x, vreinterpretq_s8_u8(vandq_u8(vtstq_u8(spread, lane), vdupq_n_u8(16))));
}
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float * low, float * high) {
    const vf sum = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
    vst1_f32(low, vget_low_f32(sum));
    vst1_f32(high, vget_high_f32(sum));
}

#else // plain C, four lanes so that a compiler can use whatever vectors there are --------------------------------

enum { W = 4, N_REGISTERS = 16 };
typedef struct {
    float x[4];
} vf;
typedef struct {
    int8_t x[16];
} b16;

#define LANES(n, expression)                                                                                          \
    do {                                                                                                              \
        for (int i = 0; i < (n); ++i) expression;                                                                     \
    } while (0)

INLINE vf vf_set1(float x) { return (vf) {{x, x, x, x}}; }
INLINE vf vf_zero(void) { return vf_set1(0.0f); }
INLINE vf vf_load(const float * p) { return (vf) {{p[0], p[1], p[2], p[3]}}; }
INLINE void vf_store(float * p, vf a) { LANES(W, p[i] = a.x[i]); }
INLINE vf vf_add(vf a, vf b) {
    LANES(W, a.x[i] += b.x[i]);
    return a;
}
INLINE vf vf_sub(vf a, vf b) {
    LANES(W, a.x[i] -= b.x[i]);
    return a;
}
INLINE vf vf_mul(vf a, vf b) {
    LANES(W, a.x[i] *= b.x[i]);
    return a;
}
INLINE vf vf_div(vf a, vf b) {
    LANES(W, a.x[i] /= b.x[i]);
    return a;
}
INLINE vf vf_max(vf a, vf b) {
    LANES(W, a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]);
    return a;
}
INLINE vf vf_fma(vf a, vf b, vf c) {
    LANES(W, c.x[i] += a.x[i] * b.x[i]);
    return c;
}
INLINE vf vf_abs(vf a) {
    LANES(W, a.x[i] = fabsf(a.x[i]));
    return a;
}
// adding and taking away 1.5 * 2^23 leaves the nearest integer; right for |a| < 2^22, which is all that is asked
INLINE vf vf_round(vf a) {
    volatile float magic = 12582912.0f;
    const float m = magic;
    LANES(W, a.x[i] = (a.x[i] + m) - m);
    return a;
}
INLINE vf vf_if_less(vf a, vf b, vf yes, vf no) {
    LANES(W, no.x[i] = a.x[i] < b.x[i] ? yes.x[i] : no.x[i]);
    return no;
}
INLINE uint64_t vf_bits_less(vf a, vf b) {
    uint64_t bits = 0;
    LANES(W, bits |= (uint64_t) (a.x[i] < b.x[i]) << i);
    return bits;
}
INLINE int vf_any_nan(vf a) {
    int n = 0;
    LANES(W, n += a.x[i] != a.x[i]);
    return n != 0;
}
INLINE float vf_reduce_max(vf a) {
    const float low = a.x[0] > a.x[1] ? a.x[0] : a.x[1], high = a.x[2] > a.x[3] ? a.x[2] : a.x[3];
    return low > high ? low : high;
}
INLINE float vf_reduce_add(vf a) { return (a.x[0] + a.x[1]) + (a.x[2] + a.x[3]); }
INLINE vf vf_times_2_to(vf a, vf n) {
    // a lane that is far out of range is thrown away by the caller, but must not overflow here
    LANES(W, a.x[i] *= bits_to_float(n.x[i] >= -126 && n.x[i] <= 127 ? (uint32_t) ((int32_t) n.x[i] + 127) << 23 : 0));
    return a;
}
INLINE float f16_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t) (h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // move exponent and mantissa to their places, then let a multiplication correct the bias: exact, denormals too
    const float x = bits_to_float(magnitude << 13) * 0x1p112f;
    return sign ? -x : x;
}
INLINE vf vf_load_f16(const void * p) {
    vf a;
    LANES(W, a.x[i] = f16_to_float(read_u16((const char *) p + 2 * i)));
    return a;
}
INLINE vf vf_set1_f16(const void * p) { return vf_set1(f16_to_float(read_u16(p))); }
INLINE vf vf_load_bf16(const void * p) {
    vf a;
    LANES(W, a.x[i] = bits_to_float((uint32_t) read_u16((const char *) p + 2 * i) << 16));
    return a;
}
INLINE vf vf_load_i8(const void * p) {
    vf a;
    LANES(W, a.x[i] = ((const int8_t *) p)[i]);
    return a;
}
INLINE vf vf_gather_f16(const char * const * rows, size_t offset) {
    vf a;
    LANES(W, a.x[i] = f16_to_float(read_u16(rows[i] + offset)));
    return a;
}
INLINE vf vf_repeat4_f16(const char * const * rows, size_t offset) { return vf_gather_f16(rows, offset); }
INLINE void vf_store_sum4(float * p, vf a) { vf_store(p, a); }
INLINE void vf_store_i16(int16_t * p, vf a) { LANES(W, p[i] = (int16_t) lrintf(a.x[i])); }
INLINE vf vf_from_b16(b16 b, int part) { return vf_load_i8(b.x + W * part); }
INLINE b16 b16_load(const void * p) {
    b16 b;
    memcpy(&b, p, sizeof b);
    return b;
}
INLINE b16 b16_low(b16 b) {
    LANES(16, b.x[i] &= 15);
    return b;
}
INLINE b16 b16_high(b16 b) {
    LANES(16, b.x[i] = (int8_t) ((uint8_t) b.x[i] >> 4));
    return b;
}
INLINE b16 b16_table(b16 b, const int8_t * table) {
    LANES(16, b.x[i] = table[b.x[i]]);
    return b;
}
INLINE b16 b16_fifth_bit(b16 b, uint16_t bits) {
    LANES(16, b.x[i] = (int8_t) (b.x[i] | (bits >> i & 1) << 4));
    return b;
}
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float * low, float * high) {
    low[0] = vf_reduce_add(a), low[1] = vf_reduce_add(b);
    high[0] = vf_reduce_add(c), high[1] = vf_reduce_add(d);
}

#endif
