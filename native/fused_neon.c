// The attention kernel in NEON.
#define PYKV_ISA_NEON
#include "fused_kernel.h"
#include "fused_mass.h"

const struct pykv_attn_kernel pykv_attn_neon = {"neon", cells, mass};
