// The attention kernel in AVX2.
#define PYKV_ISA_AVX2
#include "fused_kernel.h"
#include "fused_mass.h"

const struct pykv_attn_kernel pykv_attn_avx2 = {"avx2", cells, mass};
