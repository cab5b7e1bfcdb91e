// Random shapes through the attention kernel, compared with the reference. Usage: test_fused [seed [count]]
#include "fused_attention.h"
#include "fused_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;

static uint32_t next(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t) (state >> 16);
}

static int below(int n) { return (int) (next() % (uint32_t) n); }

static float uniform(void) { return (float) next() / 2147483648.0f - 1.0f; }

static int pick(const int * from, int n) { return from[below(n)]; }

static void fail(const char * what) {
    fprintf(stderr, "FAILED: %s\n", what);
    exit(1);
}

static uint16_t half_of(float x) { // truncates; only for values that need not be exact
    uint32_t u;
    memcpy(&u, &x, 4);
    const int exponent = (int) (u >> 23 & 255) - 112;
    const uint16_t sign = (uint16_t) (u >> 16 & 0x8000);
    if (x == -INFINITY) return 0xfc00;
    if (exponent <= 0) return sign | (uint16_t) (u >> 13 & 7); // a denormal, for their sake
    return (uint16_t) (sign | (uint32_t) exponent << 10 | (u >> 13 & 1023));
}

// ---- a case --------------------------------------------------------------------------------------------------------

static const int block_bytes[] = {128, 64, 64, 34, 18, 20, 22, 24, 18};

struct test {
    struct pykv_attn a;
    void * memory[4]; // q, k, v, mask
    bool * visible;   // [stream][cell]: to any row
};

static size_t head_bytes(enum pykv_attn_type type, int width) {
    return (size_t) width * (size_t) block_bytes[type] / 32;
}

static void fill_row(enum pykv_attn_type type, uint8_t * at, int width) {
    if (type == PYKV_ATTN_F32) {
        for (int i = 0; i < width; ++i) ((float *) (void *) at)[i] = uniform();
    } else if (type == PYKV_ATTN_F16 || type == PYKV_ATTN_BF16) {
        for (int i = 0; i < width; ++i) {
            const float x = uniform();
            uint32_t u;
            memcpy(&u, &x, 4);
            const uint16_t h = type == PYKV_ATTN_F16 ? half_of(x) : (uint16_t) (u >> 16);
            memcpy(at + 2 * i, &h, 2);
        }
    } else {
        const int n = block_bytes[type];
        const bool has_offset = type == PYKV_ATTN_Q4_1 || type == PYKV_ATTN_Q5_1;
        for (int b = 0; b < width / 32; ++b, at += n) {
            for (int i = 0; i < n; ++i) at[i] = (uint8_t) next();
            const uint16_t scale = half_of(uniform() / (type == PYKV_ATTN_Q8_0 || type == PYKV_ATTN_IQ4_NL ? 127 : 12));
            const uint16_t offset = half_of(uniform());
            memcpy(at, &scale, 2);
            if (has_offset) memcpy(at + 2, &offset, 2);
        }
    }
}

// lay out K or V with random padding, heads inside cells or cells inside heads; nothing behind the last byte
static void * make_store(struct pykv_attn * a, struct pykv_attn_store * x, int width) {
    const size_t bytes = head_bytes(x->type, width), unit = x->type == PYKV_ATTN_F32 ? 4 : 2;
    const size_t pad1 = unit * (size_t) (below(3) ? 0 : below(9)), pad2 = unit * (size_t) (below(3) ? 0 : below(33));
    if (below(4)) {
        x->head = (int64_t) (bytes + pad1);
        x->cell = (int64_t) ((bytes + pad1) * (size_t) a->n_head_kv + pad2);
    } else {
        x->cell = (int64_t) (bytes + pad1);
        x->head = (int64_t) ((bytes + pad1) * (size_t) a->n_kv + pad2);
    }
    x->stream = x->cell * (a->n_kv - 1) + x->head * (a->n_head_kv - 1) + (int64_t) bytes + (int64_t) pad2;
    if (x->type == PYKV_ATTN_F32) x->stream = (x->stream + 3) / 4 * 4;
    const int64_t last = x->stream * (a->n_stream - 1) + x->cell * (a->n_kv - 1) + x->head * (a->n_head_kv - 1);
    const size_t size = (size_t) last + bytes;
    uint8_t * data = malloc(size);
    memset(data, 0xff, size);
    for (int s = 0; s < a->n_stream; ++s) {
        for (int c = 0; c < a->n_kv; ++c) {
            uint8_t * cell = data + s * x->stream + c * x->cell;
            for (int h = 0; h < a->n_head_kv; ++h) fill_row(x->type, cell + h * x->head, width);
        }
    }
    x->data = data;
    return data;
}

// cells that no row sees hold what memory happened to hold
static void spoil(const struct pykv_attn * a, const struct pykv_attn_store * x, int width, const bool * visible) {
    for (int i = 0; i < a->n_stream * a->n_kv; ++i) {
        if (visible[i]) continue;
        for (int h = 0; h < a->n_head_kv; ++h) {
            memset((char *) x->data + i / a->n_kv * x->stream + i % a->n_kv * x->cell + h * x->head, 0xff,
                   head_bytes(x->type, width));
        }
    }
}

static float mask_value(int kind, const struct pykv_attn * a, int row, int cell) {
    switch (kind) {
        case 0: return below(3) ? 0 : -INFINITY;                                  // holes
        case 1: return cell > a->n_kv - a->n_rows + row ? -INFINITY : 0;          // causal
        case 2: return abs(cell - a->n_kv / 2 - row) > 40 ? -INFINITY : 0;        // a window
        case 3: return row % 2 ? -INFINITY : -(float) abs(cell - row) / 8;        // distances, and empty rows
        case 4: return -INFINITY;                                                 // nothing
        case 5: return cell % 7 == row % 7 ? uniform() * 4 : -INFINITY;           // interleaved sequences
        default: return cell / 64 % 3 == 1 ? 0 : -INFINITY;                       // whole blocks
    }
}

static void * make_mask(struct test * t) {
    struct pykv_attn * a = &t->a;
    t->visible = calloc((size_t) (a->n_stream * a->n_kv), sizeof(bool));
    if (!below(6)) {
        memset(t->visible, 1, (size_t) (a->n_stream * a->n_kv));
        return NULL;
    }
    const int size = a->mask_is_f16 ? 2 : 4, kind = below(7);
    a->mask_row = (a->n_kv + below(9)) * size;
    a->mask_stream = a->mask_row * a->n_rows + below(5) * size;
    const int64_t last_row = a->mask_stream * (a->n_stream - 1) + a->mask_row * (a->n_rows - 1);
    char * mask = malloc((size_t) (last_row + a->n_kv * size));
    for (int s = 0; s < a->n_stream; ++s) {
        for (int r = 0; r < a->n_rows; ++r) {
            for (int c = 0; c < a->n_kv; ++c) {
                const float x = mask_value(kind, a, r, c);
                const uint16_t h = half_of(x);
                char * to = mask + s * a->mask_stream + r * a->mask_row + c * size;
                memcpy(to, a->mask_is_f16 ? (const void *) &h : &x, (size_t) size);
                if (x != -INFINITY) t->visible[s * a->n_kv + c] = true;
            }
        }
    }
    a->mask = mask;
    return mask;
}

static float * make_q(struct pykv_attn * a) {
    a->q_head = 4 * (a->head_k + below(3));
    a->q_row = a->q_head * a->n_head + 4 * below(3);
    if (!below(3)) a->q_row = a->q_head, a->q_head = a->q_row * a->n_rows; // permuted
    a->q_stream = a->q_head * (a->n_head - 1) + a->q_row * (a->n_rows - 1) + 4 * a->head_k;
    const int64_t n = a->q_stream * a->n_stream / 4;
    float * q = malloc((size_t) n * 4);
    for (int64_t i = 0; i < n; ++i) q[i] = uniform() * 3;
    return q;
}

static void choose_shape(struct pykv_attn * a) {
    static const int widths[] = {16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 512, 576};
    static const int n_kvs[] = {1, 5, 63, 64, 65, 128, 200, 256, 300, 512, 777, 1100};
    static const int groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 48};
    a->k.type = (enum pykv_attn_type) below(PYKV_ATTN_N_TYPES);
    a->v.type = below(2) ? a->k.type : (enum pykv_attn_type) below(PYKV_ATTN_N_TYPES);
    a->head_k = pick(widths, 12);
    a->head_v = below(3) ? a->head_k : pick(widths, 12);
    if (a->k.type >= PYKV_ATTN_Q8_0) a->head_k = (a->head_k + 31) / 32 * 32;
    if (a->v.type >= PYKV_ATTN_Q8_0) a->head_v = (a->head_v + 31) / 32 * 32;
    a->n_kv = pick(n_kvs, 12);
    a->n_head_kv = 1 + below(4);
    a->n_head = a->n_head_kv * pick(groups, 12);
    a->n_rows = below(2) ? 1 : 1 + below(below(4) ? 16 : 200);
    a->n_stream = below(3) ? 1 : 1 + below(3);
    a->mask_is_f16 = below(2);
    a->scale = 1.0f / sqrtf((float) a->head_k);
    a->softcap = below(4) ? 0 : 5.0f;
    a->max_bias = below(4) ? 0 : 8.0f;
    a->keep_weights = a->n_rows <= PYKV_ATTN_FEW_ROWS;
}

static bool is_small(const struct pykv_attn * a) {
    return (double) a->n_kv * a->n_head * a->n_rows * a->n_stream * (a->head_k + a->head_v) < 1e7;
}

static void make(struct test * t) {
    struct pykv_attn * a = &t->a;
    do {
        memset(t, 0, sizeof *t);
        choose_shape(a);
    } while (!is_small(a));
    const bool is_mla = !below(6);
    if (is_mla) a->n_head_kv = 1, a->v.type = a->k.type, a->head_k = 576, a->head_v = 512;
    if (!is_small(a)) a->n_kv = 65, a->n_rows = 1;
    t->memory[0] = make_q(a);
    a->q = t->memory[0];
    t->memory[1] = make_store(a, &a->k, a->head_k);
    if (is_mla) {
        a->v = a->k;
    } else {
        t->memory[2] = make_store(a, &a->v, a->head_v);
    }
    t->memory[3] = make_mask(t);
    spoil(a, &a->k, a->head_k, t->visible);
    spoil(a, &a->v, a->head_v, t->visible);
    if (!below(4)) {
        float * sinks = malloc((size_t) a->n_head * sizeof *sinks);
        for (int i = 0; i < a->n_head; ++i) sinks[i] = uniform() * 3;
        a->sinks = sinks;
    }
}

static void drop(struct test * t) {
    for (int i = 0; i < 4; ++i) free(t->memory[i]);
    free(t->visible);
    free((void *) t->a.sinks);
}

// ---- running and comparing -----------------------------------------------------------------------------------------

static float * numbers(size_t n) {
    float * x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; ++i) x[i] = NAN; // whatever is not written shows
    return x;
}

static void run(struct pykv_attn * a, struct pykv_attn_mass * mass, int n_threads) {
    a->scratch = numbers(pykv_attn_scratch_floats(a));
    for (int i = n_threads - 1; i >= 0; --i) pykv_attn_cells(a, i, n_threads);
    for (int i = 0; i < n_threads; ++i) pykv_attn_merge(a, i, n_threads);
    for (int i = 0; a->keep_weights && i < n_threads; ++i) pykv_attn_mass(a, mass, i, n_threads);
    free(a->scratch);
}

static double nmse(const float * x, const double * y, size_t n, double * worst) {
    double error = 0, power = 0;
    *worst = 0;
    for (size_t i = 0; i < n; ++i) {
        if (!(fabs(x[i]) <= 1e30)) fail("a result is not finite");
        if (fabs(x[i] - y[i]) > *worst) *worst = fabs(x[i] - y[i]);
        error += (x[i] - y[i]) * (x[i] - y[i]), power += y[i] * y[i];
    }
    if (power == 0 && error != 0) fail("a result that should be zero is not");
    return power == 0 ? 0 : error / power;
}

static double * expected_mass(const struct pykv_attn * a, const struct pykv_attn_mass * what, const double * share) {
    const int group = a->n_head / a->n_head_kv;
    double * out = calloc((size_t) a->n_stream * (size_t) a->n_head_kv * (size_t) a->n_kv, sizeof *out);
    const int n_runs = what->all_heads ? 1 : a->n_head_kv;
    for (int s = 0; s < a->n_stream; ++s) {
        for (int r = what->first_row; r < what->end_row; ++r) {
            for (int h = 0; h < a->n_head; ++h) {
                for (int c = 0; c < a->n_kv; ++c) {
                    double * to = &out[((size_t) s * n_runs + h / group % n_runs) * a->n_kv + c];
                    const double x = share[(((size_t) s * a->n_rows + r) * a->n_head + h) * a->n_kv + c] *
                                     (what->head_weight ? what->head_weight[h] : 1) *
                                     (what->row_weight ? what->row_weight[s * a->n_rows + r] : 1);
                    *to = what->largest ? (x > *to ? x : *to) : *to + x;
                }
            }
        }
    }
    return out;
}

static double largest_error, largest_mass_error;

static void check(struct test * t, const char * isa) {
    struct pykv_attn * a = &t->a;
    const size_t n = (size_t) a->head_v * a->n_head * a->n_rows * a->n_stream;
    const size_t n_mass = (size_t) a->n_kv * a->n_head_kv * a->n_stream;
    float * out[2] = {numbers(n), numbers(n)}, * mass[2] = {numbers(n_mass), numbers(n_mass)};
    float * weight = numbers((size_t) a->n_head);
    double * truth = malloc(n * sizeof *truth);
    double * share = malloc(sizeof *share * a->n_kv * a->n_head * a->n_rows * a->n_stream);
    for (int i = 0; i < a->n_head; ++i) weight[i] = below(2) ? 1.0f : 0.0f;
    float * rows = numbers((size_t) (a->n_rows * a->n_stream));
    for (int i = 0; i < a->n_rows * a->n_stream; ++i) rows[i] = below(2) ? 1.0f : 0.0f;
    struct pykv_attn_mass what = {
        .first_row = below(a->n_rows),
        .end_row = a->n_rows,
        .head_weight = below(2) ? weight : NULL,
        .row_weight = below(2) ? rows : NULL,
        .largest = below(2),
        .all_heads = below(2),
    };
    const size_t n_counted = what.all_heads ? n_mass / (size_t) a->n_head_kv : n_mass;
    if (pykv_attn_refusal(a)) fail(pykv_attn_refusal(a));
    for (int i = 0; i < 2; ++i) {
        a->out = out[i], what.out = mass[i];
        run(a, &what, i ? 2 + below(15) : 1);
    }
    if (memcmp(out[0], out[1], n * sizeof **out)) fail("results differ with the number of threads");
    if (memcmp(mass[0], mass[1], n_counted * sizeof **mass)) fail("masses differ with the number of threads");
    const bool has_mass = a->keep_weights;
    a->keep_weights = false;
    a->scratch = numbers(pykv_attn_scratch_floats(a));
    pykv_attn_cells(a, 0, 1), pykv_attn_merge(a, 0, 1);
    free(a->scratch);
    a->keep_weights = has_mass;
    if (memcmp(out[0], out[1], n * sizeof **out)) fail("results differ when weights are kept");
    reference_attention(a, truth, share);
    double worst, worst_mass = 0, * masses = expected_mass(a, &what, share);
    const double error = nmse(out[0], truth, n, &worst);
    const double mass_error = has_mass ? nmse(mass[0], masses, n_counted, &worst_mass) : 0;
    if (error > largest_error) largest_error = error;
    if (mass_error > largest_mass_error) largest_mass_error = mass_error;
    // queries in 16 bits, where K is read as codes
    const double bound = a->k.type == PYKV_ATTN_Q8_0 || a->k.type == PYKV_ATTN_Q4_0 ? 5e-9 : 1e-11;
    if (error > bound || mass_error > bound) {
        fprintf(stderr, "%s K %d V %d Dk %d Dv %d H %d/%d n_kv %d rows %d S %d: ", isa, a->k.type, a->v.type, a->head_k,
                a->head_v, a->n_head, a->n_head_kv, a->n_kv, a->n_rows, a->n_stream);
        fprintf(stderr, "NMSE %g (%g), mass %g (%g)\n", error, worst, mass_error, worst_mass);
        fail("too far from the reference");
    }
    for (int i = 0; i < 2; ++i) free(out[i]), free(mass[i]);
    free(truth), free(share), free(masses), free(weight), free(rows);
}

// ---- numbers that are none -----------------------------------------------------------------------------------------

enum { SPOILED_CELLS = 150, SPOILED_WIDTH = 32 };

// f16 K and V of one head, rows that see every third cell: cell c belongs to row c % 3
struct spoiled {
    struct pykv_attn a;
    float q[20 * SPOILED_WIDTH], mask[20 * SPOILED_CELLS], out[20 * SPOILED_WIDTH];
    uint16_t k[SPOILED_CELLS * SPOILED_WIDTH], v[SPOILED_CELLS * SPOILED_WIDTH];
};

static void make_spoiled(struct spoiled * t, int n_rows, bool keep_weights) {
    const int64_t row = SPOILED_WIDTH * 2;
    memset(t, 0, sizeof *t);
    for (int i = 0; i < n_rows * SPOILED_WIDTH; ++i) t->q[i] = uniform();
    for (int i = 0; i < SPOILED_CELLS * SPOILED_WIDTH; ++i) t->k[i] = half_of(uniform()), t->v[i] = half_of(uniform());
    for (int r = 0; r < n_rows; ++r) {
        for (int c = 0; c < SPOILED_CELLS; ++c) t->mask[r * SPOILED_CELLS + c] = c % 3 == r % 3 ? 0 : -INFINITY;
    }
    const struct pykv_attn_store k = {t->k, PYKV_ATTN_F16, row, row, 0}, v = {t->v, PYKV_ATTN_F16, row, row, 0};
    t->a = (struct pykv_attn) {
        .n_kv = SPOILED_CELLS, .n_head = 1, .n_head_kv = 1, .head_k = SPOILED_WIDTH, .head_v = SPOILED_WIDTH,
        .n_rows = n_rows, .n_stream = 1, .scale = 0.2f, .q = t->q, .q_head = 2 * row, .q_row = 2 * row, .k = k, .v = v,
        .mask = t->mask, .mask_row = 4 * SPOILED_CELLS, .keep_weights = keep_weights, .out = t->out,
    };
}

static void check_spoiled(struct spoiled * t, int row_of_nan, const char * what) {
    double truth[20 * SPOILED_WIDTH], worst;
    t->a.scratch = numbers(pykv_attn_scratch_floats(&t->a));
    pykv_attn_cells(&t->a, 0, 1), pykv_attn_merge(&t->a, 0, 1);
    free(t->a.scratch);
    reference_attention(&t->a, truth, NULL);
    for (int r = 0; r < t->a.n_rows; ++r) {
        const float * out = t->out + r * SPOILED_WIDTH;
        if (r % 3 == row_of_nan) {
            for (int i = 0; i < SPOILED_WIDTH; ++i) {
                if (isfinite(out[i]) && (what[0] == 'K' || !isfinite(truth[r * SPOILED_WIDTH + i]))) fail(what);
            }
        } else if (nmse(out, truth + r * SPOILED_WIDTH, SPOILED_WIDTH, &worst) > 1e-11) {
            fail(what);
        }
    }
}

// what one row sees must be seen in its output, and in no other's
static void check_numbers_that_are_none(void) {
    static const uint16_t none[] = {0x7e00, 0x7c00}; // NaN, infinity
    struct spoiled t;
    for (int i = 0; i < 16; ++i) {
        const int n_rows = i & 1 ? 20 : 3, cell = i & 2 ? 3 : 130;
        make_spoiled(&t, n_rows, n_rows == 3 && i & 4);
        t.v[cell * SPOILED_WIDTH + 5] = none[i >> 3];
        check_spoiled(&t, cell % 3, "V of a cell spoils a row that does not see it, or not the one that does");
        make_spoiled(&t, n_rows, false);
        t.k[cell * SPOILED_WIDTH + 5] = none[0];
        check_spoiled(&t, cell % 3, "K of a cell spoils a row that does not see it, or not the one that does");
        // alone in its block
        for (int r = 0; r < n_rows; ++r) {
            for (int c = 0; c < 64; ++c) t.mask[r * SPOILED_CELLS + c] = -INFINITY;
        }
        t.mask[(cell % 3) * SPOILED_CELLS + 3] = t.mask[(cell % 3) * SPOILED_CELLS + 130] = 0;
        if (n_rows == 3) check_spoiled(&t, cell % 3, "K of the only cell of a block is not seen");
    }
}

// 4352 cells are cut into fewer runs than 4096, but must not have less room
static void check_sizes(void) {
    struct spoiled t;
    make_spoiled(&t, 3, false);
    size_t before = 0;
    for (int i = 0; i < 2 * 9000; i += 31) {
        t.a.n_kv = 1 + i % 9000;
        t.a.keep_weights = i >= 9000;
        const size_t size = pykv_attn_scratch_floats(&t.a);
        if (size < before) fail("more cells have less scratch");
        before = i < 9000 && i + 31 >= 9000 ? 0 : size;
    }
}

int main(int argc, char ** argv) {
    state = 1;
    static const char * const isas[] = {"portable", "avx2", "avx512", "neon"};
    const int seed = argc > 1 ? atoi(argv[1]) : 1, count = argc > 2 ? atoi(argv[2]) : 100;
    for (int i = 0; i < 4; ++i) {
        if (!pykv_attn_use_isa(isas[i])) continue;
        if (strcmp(pykv_attn_isa(), isas[i])) fail("the instruction set asked for is not in use");
        largest_error = largest_mass_error = 0;
        check_numbers_that_are_none();
        check_sizes();
        for (int j = 0; j < count; ++j) {
            struct test t;
            state = 0x9e3779b97f4a7c15ULL * (uint64_t) (seed + j + 1);
            for (int k = 0; k < 8; ++k) next();
            make(&t);
            check(&t, isas[i]);
            drop(&t);
        }
        printf("%s: %d cases, largest NMSE %.2g, of masses %.2g\n", isas[i], count, largest_error, largest_mass_error);
    }
    return 0;
}
