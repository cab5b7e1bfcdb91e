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

// queries of a stream over one chunk of its cells: `per_head` of each of some KV heads, from `first` on; of several
// heads all
struct span {
    int stream, chunk, first_head, n_heads, first, per_head;
};

struct slab {
    const struct pykv_attn * a;
    const struct pieces * p;
    struct span at;
    int first_query, n;          // of the stream's queries
    int first_row, n_rows;
    bool direct_k, direct_v;     // read as stored, not converted to floats before
    int ahead;                   // rows to fetch ahead
    int again;                   // bytes before those, to fetch a second time
    const void * q[SLAB];        // floats or codes
    float q_step[SLAB];          // what one step of them is worth
    float * sum[SLAB];           // head_v floats
    float largest[SLAB];         // score so far
    float total[SLAB];           // of weights
    float slope[SLAB];
    int mask_row[SLAB];          // of the slab's rows
};

static void choose_reading(struct slab * s) {
    const struct pykv_attn * a = s->a;
    const int per_head = s->at.per_head, row_bytes = s->at.n_heads * a->head_k * bytes_of_32(a->k.type) / 32;
    const int groups = AHEAD_BYTES / CELLS / row_bytes;
    s->ahead = groups < 1 ? CELLS : min_int(groups * CELLS, MAX_AHEAD);
    s->again = s->ahead * row_bytes / 2;
    s->direct_k = per_head <= most_queries_direct(a->k.type, false);
    s->direct_v = per_head <= most_queries_direct(a->v.type, true);
    if (s->p->is_final && reads_codes(a->k.type)) s->direct_k = false; // no room for the queries' codes
}

static void open_query(struct slab * s, int i) {
    const struct pykv_attn * a = s->a;
    const int query = s->first_query + i, head = head_of(s->p, query), row = row_of(s->p, query);
    const char * q = (const char *) a->q + s->at.stream * a->q_stream + row * a->q_row + head * a->q_head;
    s->q[i] = q, s->q_step[i] = 1;
    s->slope[i] = slope_of(a, head);
    s->mask_row[i] = a->mask ? row - s->first_row : 0;
    s->largest[i] = -INFINITY, s->total[i] = 0;
    if (s->p->is_final) {
        s->sum[i] = out_at(a, s->p, s->at.stream, query);
    } else {
        s->sum[i] = partial_at(a, s->p, s->at.stream, s->at.chunk, query);
        if (s->direct_k && reads_codes(a->k.type)) {
            int16_t * codes = (int16_t *) (void *) (s->sum[i] + s->p->codes);
            s->q_step[i] = query_to_codes((const float *) (const void *) q, a->head_k, codes);
            s->q[i] = codes;
        }
    }
    memset(s->sum[i], 0, (size_t) a->head_v * sizeof(float));
}

static void open_slab(struct slab * s, const struct pykv_attn * a, const struct pieces * p, struct span at) {
    s->a = a, s->p = p, s->at = at;
    s->n = at.n_heads * at.per_head;
    s->first_query = at.first_head * p->per_head + at.first;
    s->first_row = at.first / p->group;
    s->n_rows = (at.first + at.per_head - 1) / p->group + 1 - s->first_row;
    choose_reading(s);
    for (int i = 0; i < s->n; ++i) open_query(s, i);
}

static bool is_finite(const struct slab * s) {
    vf spoiled = vf_zero();
    for (int i = 0; i < s->n; ++i) {
        for (int e = 0; e < s->a->head_v; e += W) spoiled = vf_fma(vf_load(s->sum[i] + e), vf_zero(), spoiled);
    }
    return !vf_any_nan(spoiled);
}

// turn a query's sum over all cells into its output
static void finish_query(const struct slab * s, int i) {
    const struct pykv_attn * a = s->a;
    const float sink = a->sinks ? a->sinks[head_of(s->p, s->first_query + i)] : -INFINITY;
    const float largest = larger(sink, s->largest[i]);
    if (largest == -INFINITY) return;
    const float own = expf(s->largest[i] - largest);
    const vf share = vf_set1(own / (s->total[i] * own + expf(sink - largest)));
    for (int e = 0; e < a->head_v; e += W) vf_store(s->sum[i] + e, vf_mul(vf_load(s->sum[i] + e), share));
}

static void close_slab(const struct slab * s) {
    for (int i = 0; i < s->n; ++i) {
        if (s->p->is_final) {
            finish_query(s, i);
        } else {
            s->sum[i][s->a->head_v] = s->largest[i];
            s->sum[i][s->a->head_v + 1] = s->total[i];
        }
    }
}

// ---- a block of cells ----------------------------------------------------------------------------------------------

struct block {
    int first, n;         // first cell; visible cells
    int n_padded;         // with copies of the last one that nobody sees, to whole vectors
    uint8_t index[BLOCK]; // which cells are visible
    float mask[SLAB_ROWS][BLOCK];
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
    const char * from = (const char *) a->mask + s->at.stream * a->mask_stream + b->first * size;
    from += s->first_row * a->mask_row;
    uint64_t bits = 0;
    for (int r = 0; r < s->n_rows; ++r) bits |= read_mask(a, from + r * a->mask_row, n, b->mask[r]);
    return bits;
}

// list the visible cells and move their masks together, so that the others are neither read nor computed
static void list_cells(const struct slab * s, struct block * b, uint64_t bits) {
    const int pad = PADDING, n_masks = s->a->mask ? s->n_rows : 1;
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
    return (const char *) x->data + s->at.stream * x->stream + cell * x->cell + s->at.first_head * x->head;
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
static uintptr_t ahead_of(const struct slab * s, const struct block * b, int row, int head) {
    const int to = row + s->ahead;
    const bool is_v = to >= b->n_padded && to < 2 * b->n_padded;
    const struct pykv_attn_store * x = is_v ? &s->a->v : &s->a->k;
    const int64_t bytes = (is_v ? s->a->head_v : s->a->head_k) * bytes_of_32(x->type) / 32;
    const bool heads_apart = x->head > 2 * bytes;
    return (uintptr_t) b->row[to] + (uintptr_t) (heads_apart ? head * x->head : CELLS * bytes * head);
}

static void open_operand(struct operand * o, const struct slab * s, const struct block * b, bool is_v, int cell,
                         int head) {
    const struct pykv_attn_store * x = is_v ? &s->a->v : &s->a->k;
    const int row = is_v ? b->n_padded + cell : cell;
    uintptr_t ahead = ahead_of(s, b, row, head);
    o->type = x->type;
    o->at.rows = b->row + row;
    o->at.offset = (size_t) (head * x->head);
    o->at.width = is_v ? s->a->head_v : s->a->head_k;
    o->at.ahead = ahead, o->at.again = s->again;
    if (is_v ? s->direct_v : s->direct_k) return;
    for (int i = 0; i < CELLS; ++i) {
        decode_fns[x->type](o->at.rows[i] + o->at.offset, o->at.width, o->decoded[i], ahead, s->again);
        ahead += (uintptr_t) (o->at.width * bytes_of_32(x->type) / 32);
        o->decoded_row[i] = (const char *) o->decoded[i];
    }
    o->type = PYKV_ATTN_F32;
    o->at.rows = o->decoded_row;
    o->at.offset = 0;
    o->at.ahead = 0; // fetched by now
}

// queries of the next tile, so that tiles are about equal
INLINE int tile_of(int left) { return ceil_div(left, ceil_div(left, TILE)); }

static void score(const struct slab * s, const struct block * b, float * scores) {
    struct operand k;
    for (int c = 0; c < b->n_padded; c += CELLS) {
        for (int h = 0; h < s->at.n_heads; ++h) {
            open_operand(&k, s, b, false, c, h);
            for (int i = 0, n; i < s->at.per_head; i += n) {
                const int query = h * s->at.per_head + i;
                n = tile_of(s->at.per_head - i);
                dot_fns[k.type][n - 1](&k.at, s->q + query, scores + query * BLOCK + c);
                k.at.ahead = 0;
            }
        }
    }
}

static void add_values(const struct slab * s, const struct block * b, const float * weights) {
    struct operand v;
    for (int c = 0; c < b->n_padded; c += CELLS) {
        for (int h = 0; h < s->at.n_heads; ++h) {
            open_operand(&v, s, b, true, c, h);
            for (int i = 0, n; i < s->at.per_head; i += n) {
                const int query = h * s->at.per_head + i;
                n = tile_of(s->at.per_head - i);
                add_fns[v.type][n - 1](&v.at, weights + query * BLOCK + c, s->sum + query);
                v.at.ahead = 0;
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
        largest = vf_max(y, largest); // in this order: NaN is passed over
    }
    return vf_reduce_max(largest);
}

static bool has_nan(const float * x, int n) {
    for (int i = 0; i < n; i += W) {
        if (vf_any_nan(vf_load(x + i))) return true;
    }
    return false;
}

// bring a query's sums to a new largest score
static void rescale(struct slab * s, int query, float largest) {
    float shrink[W];
    const vf factor = vf_exp(vf_set1(s->largest[query] - largest));
    vf_store(shrink, factor);
    for (int i = 0; i < s->a->head_v; i += W) {
        vf_store(s->sum[query] + i, vf_mul(vf_load(s->sum[query] + i), factor));
    }
    s->largest[query] = largest;
    s->total[query] *= shrink[0];
}

// turn a query's dot products into weights relative to the largest score so far, and return that
static float weigh(struct slab * s, const struct block * b, int query, float * x) {
    const float here = finish_scores(s, query, b->mask[s->mask_row[query]], b->n_padded, x);
    float largest = larger(here, s->largest[query]);
    if (largest == -INFINITY && has_nan(x, b->n_padded)) largest = NAN; // one NaN spoils what its query gets
    if (largest == -INFINITY) {
        memset(x, 0, (size_t) b->n_padded * sizeof *x);
        return largest;
    }
    if (largest != s->largest[query]) rescale(s, query, largest);
    vf total = vf_zero();
    for (int i = 0; i < b->n_padded; i += W) {
        const vf weight = vf_exp(vf_sub(vf_load(x + i), vf_set1(largest)));
        vf_store(x + i, weight);
        total = vf_add(total, weight);
    }
    s->total[query] += vf_reduce_add(total);
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

static void do_block(struct slab * s, struct block * b, int first) {
    const struct pykv_attn * a = s->a;
    const bool keep = a->keep_weights;
    float on_stack[SLAB * BLOCK], ignored[SLAB];
    const int index = first / BLOCK, stream = s->at.stream;
    float * largest = keep ? largest_at(a, s->p, stream, index) + s->first_query : ignored;
    float * weights = keep ? weights_at(a, s->p, stream, index) + (size_t) s->first_query * BLOCK : on_stack;
    if (!open_block(s, b, first)) {
        for (int i = 0; i < s->n; ++i) largest[i] = -INFINITY;
        return;
    }
    score(s, b, weights);
    for (int i = 0; i < s->n; ++i) largest[i] = weigh(s, b, i, weights + i * BLOCK);
    add_values(s, b, weights);
    for (int i = 0; keep && i < s->n; ++i) spread(b, weights + i * BLOCK);
}

static void do_cells(struct slab * s) {
    struct block b;
    const int first = s->at.chunk * s->p->chunk_cells, end = min_int(first + s->p->chunk_cells, s->a->n_kv);
    for (int cell = first; cell < end; cell += BLOCK) do_block(s, &b, cell);
}

// Do each row by itself, which never touches what it does not see: the weight 0 times NaN is NaN.
static void do_rows(struct slab * s, const struct pykv_attn * a, const struct pieces * p, struct span all) {
    const int end = all.first + all.per_head;
    for (int head = 0; head < all.n_heads; ++head) {
        for (int first = all.first, next; first < end; first = next) {
            next = min_int((first / p->group + 1) * p->group, end);
            open_slab(s, a, p, (struct span) {all.stream, all.chunk, all.first_head + head, 1, first, next - first});
            do_cells(s);
            close_slab(s);
        }
    }
}

static void do_piece(const struct pykv_attn * a, const struct pieces * p, int64_t index) {
    const int n_slabs = p->head_slabs * p->query_slabs, slab = (int) (index % n_slabs);
    const int first_head = slab / p->query_slabs * p->slab_heads, first = slab % p->query_slabs * p->slab_queries;
    const struct span at = {
        .stream = (int) (index / n_slabs / p->n_chunks),
        .chunk = (int) (index / n_slabs % p->n_chunks),
        .first_head = first_head,
        .n_heads = min_int(p->slab_heads, a->n_head_kv - first_head),
        .first = first,
        .per_head = min_int(p->slab_queries, p->per_head - first),
    };
    struct slab s;
    open_slab(&s, a, p, at);
    do_cells(&s);
    if (s.n_rows == 1 || !a->mask || is_finite(&s)) {
        close_slab(&s);
    } else {
        do_rows(&s, a, p, at);
    }
}

static void cells(const struct pykv_attn * a, int ith, int nth) {
    const struct pieces p = cut(a);
    const int64_t n = (int64_t) a->n_stream * p.n_chunks * p.head_slabs * p.query_slabs;
    if (!p.is_final) {
        for (int64_t i = n * ith / nth; i < n * (ith + 1) / nth; ++i) do_piece(a, &p, i);
        return;
    }
    // Later rows of a prompt see more: threads take turns, each time in the opposite order.
    for (int64_t turn = 0; turn * nth < n; ++turn) {
        const int64_t i = turn * nth + (turn % 2 ? nth - 1 - ith : ith);
        if (i < n) do_piece(a, &p, i);
    }
}
