// The first phase of the attention kernel, compiled once for each instruction set: the including file defines
// PYKV_ISA_* and PYKV_ATTN_KERNEL, the name of the table to fill.
//
// A piece of work is one run of cells and one slab of queries. It goes through the cells in blocks of 64: which are
// visible; scores of all queries, walking whole rows of K; weights; the weighted sum of V, walking whole rows again.
#include "fused_pieces.h"
#include "fused_tiles.h"

enum {
    BLOCK = PYKV_ATTN_BLOCK,
    SLAB = PYKV_ATTN_SLAB,
    AHEAD_BYTES = 8192, // are fetched before they are needed, in whole groups of rows
    MAX_AHEAD = 48,     // rows
    PADDING = (int) W > (int) CELLS ? (int) W : (int) CELLS, // of visible cells
};

// ---- exp, tanh -----------------------------------------------------------------------------------------------------

// e^x for x <= 0 to 2 ulp, but 0 below -60: too small to be seen beside the weight 1 of the largest score, and products
// with such numbers would be denormal, which is slow
INLINE vf vf_exp(vf x) {
    const vf n = vf_round(vf_mul(x, vf_set1(1.44269504f)));
    const vf r = vf_fma(n, vf_set1(-1.428606765e-6f), vf_fma(n, vf_set1(-0.693145752f), x));
    vf p = vf_set1(1.3814467e-3f); // minimax polynomial for (e^r - 1 - r) / r² on ±ln2/2
    p = vf_fma(p, r, vf_set1(8.3687808e-3f));
    p = vf_fma(p, r, vf_set1(4.16683927e-2f));
    p = vf_fma(p, r, vf_set1(1.66665196e-1f));
    p = vf_fma(p, r, vf_set1(4.99999940e-1f));
    const vf y = vf_add(vf_fma(vf_mul(r, r), p, r), vf_set1(1.0f));
    return vf_if_less(x, vf_set1(-60.0f), vf_zero(), vf_times_2_to(y, n));
}

INLINE vf vf_tanh(vf x) {
    const vf e = vf_exp(vf_mul(vf_abs(x), vf_set1(-2.0f)));
    const vf y = vf_div(vf_sub(vf_set1(1.0f), e), vf_add(vf_set1(1.0f), e));
    return vf_if_less(x, vf_zero(), vf_sub(vf_zero(), y), y);
}

// ---- a slab of queries ---------------------------------------------------------------------------------------------

struct slab {
    const struct pykv_attn * a;
    const struct pieces * p;
    int stream, first, n;        // of the stream's queries
    int first_head, n_heads;     // KV heads that they read
    int per_head;                // queries of each
    int ahead;                   // rows to fetch ahead
    int again;                   // bytes before those, to fetch a second time
    const void * q[SLAB];        // floats or codes
    float q_step[SLAB];          // what one step of them is worth
    int16_t codes[SLAB][PYKV_ATTN_MAX_HEAD];
    float * sum[SLAB];           // head_v floats, then the largest score and the sum of weights
    float slope[SLAB];
    int mask_row[SLAB];
};

static void open_slab(struct slab * s, const struct pykv_attn * a, const struct pieces * p, int stream, int chunk,
                      int index) {
    const int head_slab = index / p->query_slabs, query_slab = index % p->query_slabs;
    const int first = query_slab * p->slab_queries;
    s->a = a, s->p = p, s->stream = stream;
    s->first_head = head_slab * p->slab_heads;
    s->n_heads = min_int(p->slab_heads, a->n_head_kv - s->first_head);
    s->per_head = min_int(p->slab_queries, p->per_head - first);
    s->first = s->first_head * p->per_head + first;
    s->n = s->n_heads * s->per_head;
    const int row_bytes = s->n_heads * a->head_k * bytes_of_32(a->k.type) / 32;
    const int groups = AHEAD_BYTES / CELLS / row_bytes;
    s->ahead = groups < 1 ? CELLS : min_int(groups * CELLS, MAX_AHEAD);
    s->again = s->ahead * row_bytes / 2;
    const bool with_codes = reads_codes(a->k.type) && s->per_head <= most_queries_direct(a->k.type, false);
    for (int i = 0; i < s->n; ++i) {
        const int head = head_of(p, s->first + i), row = row_of(p, s->first + i);
        const char * q = (const char *) a->q + stream * a->q_stream + row * a->q_row + head * a->q_head;
        s->q[i] = q, s->q_step[i] = 1;
        if (with_codes) {
            s->q_step[i] = query_to_codes((const float *) (const void *) q, a->head_k, s->codes[i]);
            s->q[i] = s->codes[i];
        }
        s->sum[i] = partial_at(a, p, stream, chunk, s->first + i);
        s->slope[i] = slope_of(a, head);
        s->mask_row[i] = a->mask ? row : 0;
        memset(s->sum[i], 0, (size_t) a->head_v * sizeof(float));
        s->sum[i][a->head_v] = -INFINITY;
        s->sum[i][a->head_v + 1] = 0;
    }
}

// ---- a block of cells ----------------------------------------------------------------------------------------------

struct block {
    int first, n;         // first cell; visible cells
    int n_padded;         // with copies of the last one that nobody sees, to whole vectors
    uint8_t index[BLOCK]; // which cells are visible
    float mask[PYKV_ATTN_MAX_ROWS][BLOCK];
    // their rows of K, those of V, and a guess at the next block's K: the order in which memory is read
    const char * row[2 * BLOCK + MAX_AHEAD];
};

// convert one row's mask of n cells; return a bit for each visible one
static uint64_t read_mask(const struct pykv_attn * a, const char * from, int n, float * mask) {
    float copy[BLOCK]; // of the last cells, where a whole block would read too far
    const size_t size = a->mask_is_f16 ? 2 : 4;
    if (n < BLOCK) {
        static const uint16_t half = 0xfc00;
        static const float whole = -INFINITY;
        const void * invisible = a->mask_is_f16 ? (const void *) &half : &whole;
        for (int i = n; i < BLOCK; ++i) memcpy((char *) copy + i * size, invisible, size);
        from = memcpy(copy, from, (size_t) n * size);
    }
    uint64_t bits = 0;
    for (int i = 0; i < BLOCK; i += W) {
        const char * at = from + (size_t) i * size;
        const vf x = a->mask_is_f16 ? vf_load_f16(at) : vf_load((const float *) (const void *) at);
        vf_store(mask + i, x);
        bits |= vf_bits_less(vf_set1(-INFINITY), x) << i;
    }
    return bits;
}

static uint64_t read_masks(const struct slab * s, struct block * b, int n) {
    const struct pykv_attn * a = s->a;
    if (!a->mask) {
        memset(b->mask[0], 0, sizeof b->mask[0]);
        return n < BLOCK ? ((uint64_t) 1 << n) - 1 : ~(uint64_t) 0;
    }
    const int64_t size = a->mask_is_f16 ? 2 : 4;
    const char * from = (const char *) a->mask + s->stream * a->mask_stream + b->first * size;
    uint64_t bits = 0;
    for (int r = 0; r < a->n_rows; ++r) bits |= read_mask(a, from + r * a->mask_row, n, b->mask[r]);
    return bits;
}

// list the visible cells and move their masks together, so that the others are neither read nor computed
static void list_cells(const struct slab * s, struct block * b, uint64_t bits) {
    const int pad = PADDING, n_masks = s->a->mask ? s->a->n_rows : 1;
    b->n = 0;
    for (int i = 0; i < BLOCK; ++i) {
        b->index[b->n] = (uint8_t) i;
        b->n += (int) (bits >> i & 1);
        if (b->n == BLOCK) break;
    }
    b->n_padded = ceil_div(b->n, pad) * pad;
    for (int i = b->n; i < b->n_padded; ++i) b->index[i] = b->index[b->n - 1];
    for (int r = 0; b->n < BLOCK && r < n_masks; ++r) {
        for (int i = 0; i < b->n; ++i) b->mask[r][i] = b->mask[r][b->index[i]];
        for (int i = b->n; i < b->n_padded; ++i) b->mask[r][i] = -INFINITY;
    }
}

static const char * row_at(const struct slab * s, const struct pykv_attn_store * x, int cell) {
    return (const char *) x->data + s->stream * x->stream + cell * x->cell + s->first_head * x->head;
}

// return whether any row sees any cell of the block
static bool open_block(const struct slab * s, struct block * b, int first) {
    const struct pykv_attn * a = s->a;
    b->first = first;
    const uint64_t bits = read_masks(s, b, min_int(BLOCK, a->n_kv - first));
    if (!bits) return false;
    list_cells(s, b, bits);
    for (int i = 0; i < b->n_padded; ++i) {
        b->row[i] = row_at(s, &a->k, first + b->index[i]);
        b->row[b->n_padded + i] = row_at(s, &a->v, first + b->index[i]);
    }
    for (int i = 0; i < s->ahead; ++i) {
        b->row[2 * b->n_padded + i] = row_at(s, &a->k, min_int(first + BLOCK + i, a->n_kv - 1));
    }
    return true;
}

// ---- the three steps -----------------------------------------------------------------------------------------------

// what a call reads, converted to floats first if there are so many queries that this pays
struct operand {
    enum pykv_attn_type type;
    struct heads at;
    const char * decoded_row[CELLS];
    float decoded[CELLS][PYKV_ATTN_MAX_HEAD];
};

// where to fetch during the call for one head: some rows later, a share of them for each head
static const char * ahead_of(const struct slab * s, const struct block * b, int row, int head) {
    const int to = row + s->ahead;
    const bool is_v = to >= b->n_padded && to < 2 * b->n_padded;
    const struct pykv_attn_store * x = is_v ? &s->a->v : &s->a->k;
    const int64_t bytes = (is_v ? s->a->head_v : s->a->head_k) * bytes_of_32(x->type) / 32;
    const bool heads_apart = x->head > 2 * bytes;
    return b->row[to] + (heads_apart ? head * x->head : CELLS * bytes * head);
}

static void open_operand(struct operand * o, const struct slab * s, const struct block * b, bool is_v, int cell,
                         int head) {
    const struct pykv_attn_store * x = is_v ? &s->a->v : &s->a->k;
    const int row = is_v ? b->n_padded + cell : cell;
    const char * ahead = ahead_of(s, b, row, head);
    o->type = x->type;
    o->at.rows = b->row + row;
    o->at.offset = (size_t) (head * x->head);
    o->at.width = is_v ? s->a->head_v : s->a->head_k;
    o->at.ahead = ahead, o->at.again = s->again;
    if (s->per_head <= most_queries_direct(x->type, is_v)) return;
    for (int i = 0; i < CELLS; ++i) {
        decode_fns[x->type](o->at.rows[i] + o->at.offset, o->at.width, o->decoded[i], ahead, s->again);
        ahead += o->at.width * bytes_of_32(x->type) / 32;
        o->decoded_row[i] = (const char *) o->decoded[i];
    }
    o->type = PYKV_ATTN_F32;
    o->at.rows = o->decoded_row;
    o->at.offset = 0;
    o->at.ahead = o->decoded_row[0], o->at.again = 0;
}

// queries of the next tile, so that tiles are about equal
INLINE int tile_of(int left) { return ceil_div(left, ceil_div(left, TILE)); }

static void score(const struct slab * s, const struct block * b, float * scores) {
    struct operand k;
    for (int c = 0; c < b->n_padded; c += CELLS) {
        for (int h = 0; h < s->n_heads; ++h) {
            open_operand(&k, s, b, false, c, h);
            for (int i = 0, n; i < s->per_head; i += n) {
                const int query = h * s->per_head + i;
                n = tile_of(s->per_head - i);
                dot_fns[k.type][n - 1](&k.at, s->q + query, scores + query * BLOCK + c);
                k.at.ahead = k.at.rows[0], k.at.again = 0; // fetched by now
            }
        }
    }
}

static void add_values(const struct slab * s, const struct block * b, const float * weights) {
    struct operand v;
    for (int c = 0; c < b->n_padded; c += CELLS) {
        for (int h = 0; h < s->n_heads; ++h) {
            open_operand(&v, s, b, true, c, h);
            for (int i = 0, n; i < s->per_head; i += n) {
                const int query = h * s->per_head + i;
                n = tile_of(s->per_head - i);
                add_fns[v.type][n - 1](&v.at, weights + query * BLOCK + c, s->sum + query);
                v.at.ahead = v.at.rows[0], v.at.again = 0;
            }
        }
    }
}

// turn dot products into scores; return the largest
static float finish_scores(const struct slab * s, int query, const float * mask, int n, float * x) {
    const struct pykv_attn * a = s->a;
    const vf scale = vf_set1(s->q_step[query] * (a->softcap ? a->scale / a->softcap : a->scale));
    const vf minus_inf = vf_set1(-INFINITY), slope = vf_set1(s->slope[query]);
    vf largest = minus_inf;
    for (int i = 0; i < n; i += W) {
        const vf m = vf_load(mask + i);
        vf y = vf_mul(vf_load(x + i), scale);
        if (a->softcap) y = vf_mul(vf_tanh(y), vf_set1(a->softcap));
        // chosen, not added: a cell that is not to be seen may hold NaN
        y = vf_if_less(minus_inf, m, vf_fma(m, slope, y), minus_inf);
        vf_store(x + i, y);
        largest = vf_max(largest, y);
    }
    return vf_reduce_max(largest);
}

// turn a query's dot products into weights relative to the largest score so far, and return that
static float weigh(const struct slab * s, const struct block * b, int query, float * x) {
    const struct pykv_attn * a = s->a;
    float * sum = s->sum[query], * so_far = sum + a->head_v;
    const float here = finish_scores(s, query, b->mask[s->mask_row[query]], b->n_padded, x);
    const float largest = here > so_far[0] ? here : so_far[0];
    if (largest == -INFINITY) {
        memset(x, 0, (size_t) b->n_padded * sizeof *x);
        return largest;
    }
    if (largest > so_far[0]) {
        float shrink[W];
        const vf factor = vf_exp(vf_set1(so_far[0] - largest));
        vf_store(shrink, factor);
        for (int i = 0; i < a->head_v; i += W) vf_store(sum + i, vf_mul(vf_load(sum + i), factor));
        so_far[0] = largest;
        so_far[1] *= shrink[0];
    }
    vf total = vf_zero();
    for (int i = 0; i < b->n_padded; i += W) {
        const vf weight = vf_exp(vf_sub(vf_load(x + i), vf_set1(largest)));
        vf_store(x + i, weight);
        total = vf_add(total, weight);
    }
    so_far[1] += vf_reduce_add(total);
    return largest;
}

// ---- a piece of work -----------------------------------------------------------------------------------------------

// move the weights of the visible cells to their places
static void spread(const struct block * b, float * weights) {
    if (b->n == BLOCK) return;
    int i = b->n - 1;
    for (int cell = BLOCK - 1; cell >= 0; --cell) {
        const bool visible = i >= 0 && b->index[i] == cell;
        weights[cell] = visible ? weights[i--] : 0.0f;
    }
}

static void do_block(const struct slab * s, struct block * b, int first) {
    const struct pykv_attn * a = s->a;
    const bool keep = a->keep_weights;
    float on_stack[SLAB * BLOCK], ignored[SLAB];
    const int index = first / BLOCK;
    float * largest = keep ? largest_at(a, s->p, s->stream, index) + s->first : ignored;
    float * weights = keep ? weights_at(a, s->p, s->stream, index) + (size_t) s->first * BLOCK : on_stack;
    if (!open_block(s, b, first)) {
        for (int i = 0; i < s->n; ++i) largest[i] = -INFINITY;
        return;
    }
    score(s, b, weights);
    for (int i = 0; i < s->n; ++i) largest[i] = weigh(s, b, i, weights + i * BLOCK);
    add_values(s, b, weights);
    for (int i = 0; keep && i < s->n; ++i) spread(b, weights + i * BLOCK);
}

static void cells(const struct pykv_attn * a, int ith, int nth) {
    const struct pieces p = cut(a);
    const int n_slabs = p.head_slabs * p.query_slabs;
    const int64_t n = (int64_t) a->n_stream * p.n_chunks * n_slabs;
    struct slab s;
    struct block b;
    for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) {
        const int chunk = (int) (i / n_slabs % p.n_chunks), stream = (int) (i / n_slabs / p.n_chunks);
        open_slab(&s, a, &p, stream, chunk, (int) (i % n_slabs));
        const int end = min_int((chunk + 1) * p.chunk_cells, a->n_kv);
        for (int first = chunk * p.chunk_cells; first < end; first += BLOCK) do_block(&s, &b, first);
    }
}
