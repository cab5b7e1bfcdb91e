// The attention kernel in plain C.
#include "fused_kernel.h"
#include "fused_mass.h"

const struct pykv_attn_kernel pykv_attn_portable = {"portable", cells, mass};
