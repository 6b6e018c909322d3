// kernels/cpu/grids.c - the tables of common/grids.h, which the compiler makes of the packed ones.
#include "kernels/cpu/common/grids.h"

#include "kernels/cpu/common/gguf.h"

#define IQ2(entry, i)     ((uint64_t)GGUF_IQ2_CODE((entry) >> 2 * i & 3) << 8 * i)
#define IQ1(entry, i)     ((uint64_t)(129 + GGUF_IQ1_CODE((entry) >> 2 * i & 3)) << 8 * i)
#define IQ3_XXS(entry, i) ((uint32_t)GGUF_IQ3_XXS_CODE((entry) >> 4 * i & 15) << 8 * i)
#define IQ3_S(entry, i)   ((uint32_t)GGUF_IQ3_S_CODE((entry) >> 4 * i & 15) << 8 * i)
#define FOUR(OF, e)       OF(e, 0) | OF(e, 1) | OF(e, 2) | OF(e, 3)
#define EIGHT(OF, e)      FOUR(OF, e) | OF(e, 4) | OF(e, 5) | OF(e, 6) | OF(e, 7)
#define IQ2_ENTRY(e)      EIGHT(IQ2, e),
#define IQ1_ENTRY(e)      EIGHT(IQ1, e),
#define IQ3_XXS_ENTRY(e)  FOUR(IQ3_XXS, e),
#define IQ3_S_ENTRY(e)    FOUR(IQ3_S, e),

const uint64_t td_grid_iq2_xxs[256] = {GGUF_IQ2_XXS_GRID(IQ2_ENTRY)};
const uint64_t td_grid_iq2_xs[512] = {GGUF_IQ2_XS_GRID(IQ2_ENTRY)};
const uint64_t td_grid_iq2_s[1024] = {GGUF_IQ2_S_GRID(IQ2_ENTRY)};
const uint64_t td_grid_iq1[2048] = {GGUF_IQ1_GRID(IQ1_ENTRY)};
const uint32_t td_grid_iq3_xxs[256] = {GGUF_IQ3_XXS_GRID(IQ3_XXS_ENTRY)};
const uint32_t td_grid_iq3_s[512] = {GGUF_IQ3_S_GRID(IQ3_S_ENTRY)};
