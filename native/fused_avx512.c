// The attention kernel in AVX-512.
#define PYKV_ISA_AVX512
#include "fused_kernel.h"
#include "fused_mass.h"

const struct pykv_attn_kernel pykv_attn_avx512 = {"avx512", cells, mass};
