#define _DEFAULT_SOURCE // madvise

#include "shim.h"

#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifndef _WIN32
#include <sys/mman.h>
#include <unistd.h>
#endif

#ifndef PYKV_GGML_VERSION
#error "PYKV_GGML_VERSION comes from CMake"
#endif

// ggml_tensor_overhead() adds the size of a private header to each tensor: three words and a padded enum
#define PYKV_OBJECT_SIZE 32

const char * pykv_built_ggml_version(void) { return PYKV_GGML_VERSION; }

size_t pykv_built_tensor_overhead(void) { return PYKV_OBJECT_SIZE + sizeof(struct ggml_tensor); }

// ---- abort -------------------------------------------------------------------------------------------------------

static void on_abort(const char * message) {
    fprintf(stderr, "pykv: fatal error inside ggml, the process ends: %s\n", message);
    fflush(stderr);
}

void pykv_install_abort_hook(void) { ggml_set_abort_callback(on_abort); }

// ---- log ---------------------------------------------------------------------------------------------------------

// defined in the generated source; Python implements it
void pykv_log_to_python(enum ggml_log_level level, const char * text);

static void on_log(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    pykv_log_to_python(level, text);
}

static void drop_log(enum ggml_log_level level, const char * text, void * user) {
    (void) level;
    (void) text;
    (void) user;
}

void pykv_install_log(void) { ggml_log_set(on_log, NULL); }

void pykv_remove_log(void) { ggml_log_set(drop_log, NULL); }

// ---- threads and cancel ------------------------------------------------------------------------------------------

static void * proc(ggml_backend_t backend, const char * name) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    return dev ? ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), name) : NULL;
}

bool pykv_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_set_n_threads_t set = (ggml_backend_set_n_threads_t) proc(backend, "ggml_backend_set_n_threads");
    if (!set) return false;
    set(backend, n_threads);
    return true;
}

static bool is_cancelled(void * flag) { return *(volatile int32_t *) flag != 0; }

bool pykv_backend_watch_cancel(ggml_backend_t backend, int32_t * flag) {
    ggml_backend_set_abort_callback_t set =
        (ggml_backend_set_abort_callback_t) proc(backend, "ggml_backend_set_abort_callback");
    if (!set) return false;
    set(backend, flag ? is_cancelled : NULL, flag);
    return true;
}

typedef struct ggml_threadpool * (*threadpool_new_fn)(struct ggml_threadpool_params *);
typedef void (*threadpool_free_fn)(struct ggml_threadpool *);
typedef void (*set_threadpool_fn)(ggml_backend_t, struct ggml_threadpool *);

void * pykv_threadpool_new(ggml_backend_t backend, int n_threads) {
    threadpool_new_fn make = (threadpool_new_fn) proc(backend, "ggml_threadpool_new");
    if (!make || !proc(backend, "ggml_threadpool_free") || !proc(backend, "ggml_backend_cpu_set_threadpool")) {
        return NULL;
    }
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll = 1; // of 100: spin for about two milliseconds, which covers the time between two tokens, then sleep
    return make(&params);
}

bool pykv_backend_set_threadpool(ggml_backend_t backend, void * pool) {
    set_threadpool_fn set = (set_threadpool_fn) proc(backend, "ggml_backend_cpu_set_threadpool");
    if (!set) return false;
    set(backend, (struct ggml_threadpool *) pool);
    return true;
}

void pykv_threadpool_free(ggml_backend_t backend, void * pool) {
    threadpool_free_fn release = (threadpool_free_fn) proc(backend, "ggml_threadpool_free");
    if (release && pool) release((struct ggml_threadpool *) pool);
}

// ---- repacking ---------------------------------------------------------------------------------------------------

ggml_backend_buffer_type_t pykv_repack_type(ggml_backend_dev_t device) {
    ggml_backend_dev_get_extra_bufts_t list = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * type = list ? list(device) : NULL; type && *type; ++type) {
        // the others need more than they say: tiles that the system must grant first, or drivers
        if (strcmp(ggml_backend_buft_name(*type), "CPU_REPACK") == 0) return *type;
    }
    return NULL;
}

// ---- features ----------------------------------------------------------------------------------------------------

const struct ggml_backend_feature * pykv_features(ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    ggml_backend_get_features_t get = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(
        reg, "ggml_backend_get_features");
    return get ? get(reg) : NULL;
}

// ---- RPC ---------------------------------------------------------------------------------------------------------

typedef ggml_backend_reg_t (*rpc_add_server_fn)(const char *);

static rpc_add_server_fn rpc_add_server(void) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    return rpc ? (rpc_add_server_fn) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") : NULL;
}

bool pykv_rpc_is_built(void) { return rpc_add_server() != NULL; }

ggml_backend_reg_t pykv_rpc_add_server(const char * endpoint) {
    rpc_add_server_fn add = rpc_add_server();
    return add ? add(endpoint) : NULL;
}

typedef void (*rpc_serve_fn)(const char *, const char *, size_t, size_t, ggml_backend_dev_t *);

void pykv_rpc_serve(const char * endpoint, const char * cache, size_t n_threads, size_t n_devices,
                    ggml_backend_dev_t * devices) {
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    void * serve = rpc ? ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_start_server") : NULL;
    if (serve) ((rpc_serve_fn) serve)(endpoint, cache, n_threads, n_devices, devices);
}

// ---- graphs ------------------------------------------------------------------------------------------------------

static bool is_at_multiple(const struct ggml_tensor * tensor, size_t multiple) {
    const struct ggml_tensor * home = tensor->view_src ? tensor->view_src : tensor;
    // what has no memory yet will begin at a multiple: allocators keep to the backend's alignment
    const size_t start = home->buffer ? (uintptr_t) home->data : 0;
    return (start + tensor->view_offs) % multiple == 0;
}

bool pykv_takes_offsets(const struct ggml_tensor * node, const struct pykv_offsets * offsets) {
    if (offsets->multiple <= 1 || offsets->takes_any[node->op]) return true;
    bool all = is_at_multiple(node, offsets->multiple);
    for (int j = 0; j < GGML_MAX_SRC; ++j) {
        all = all && (!node->src[j] || is_at_multiple(node->src[j], offsets->multiple));
    }
    return all;
}

static bool fits(const struct ggml_tensor * tensor, ggml_backend_dev_t * devices, const struct pykv_offsets * offsets,
                 int n_devices) {
    const struct ggml_tensor * home = tensor->view_src ? tensor->view_src : tensor;
    ggml_backend_buffer_type_t kind = home->buffer ? ggml_backend_buffer_get_type(home->buffer) : NULL;
    for (int i = 0; i < n_devices; ++i) {
        if (kind && !ggml_backend_dev_supports_buft(devices[i], kind)) continue;
        if (ggml_backend_dev_supports_op(devices[i], tensor) && pykv_takes_offsets(tensor, offsets + i)) return true;
    }
    return false;
}

// a custom operation is a function of this process that reads through pointers; not every backend says that it has none
static bool custom_fits(const struct ggml_tensor * node, ggml_backend_dev_t * devices,
                        const struct pykv_offsets * offsets, int n_devices) {
    for (int i = 0; i < n_devices; ++i) {
        if (ggml_backend_dev_type(devices[i]) != GGML_BACKEND_DEVICE_TYPE_CPU) continue;
        bool all = true;
        for (int j = 0; j < GGML_MAX_SRC; ++j) {
            all = all && (!node->src[j] || fits(node->src[j], devices + i, offsets + i, 1));
        }
        if (all) return true;
    }
    return false;
}

struct ggml_tensor * pykv_graph_misfit(struct ggml_cgraph * graph, ggml_backend_dev_t * devices,
                                       const struct pykv_offsets * offsets, int n_devices) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n_nodes; ++i) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        for (int j = 0; j < GGML_MAX_SRC; ++j) {
            if (node->src[j] && !fits(node->src[j], devices, offsets, n_devices)) return node->src[j];
        }
        const bool is_custom = node->op == GGML_OP_CUSTOM;
        const bool ok = is_custom ? custom_fits(node, devices, offsets, n_devices)
                                  : fits(node, devices, offsets, n_devices);
        if (!ok) return node;
    }
    return NULL;
}

// return the tensor of a memory that an operand is read from, as it lies there or copied; NULL if it is none
static struct ggml_tensor * stored_behind(struct ggml_tensor * operand) {
    while (operand) {
        struct ggml_tensor * home = operand->view_src ? operand->view_src : operand;
        if (home->buffer) {
            return ggml_backend_buffer_get_usage(home->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS ? NULL : home;
        }
        switch (operand->op) {
            case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            case GGML_OP_CONT: case GGML_OP_CPY: case GGML_OP_DUP:
                operand = operand->src[0];
                break;
            default:
                return NULL;
        }
    }
    return NULL;
}

int pykv_graph_stored_ops(struct ggml_cgraph * graph, struct ggml_tensor ** nodes, struct ggml_tensor ** stored) {
    const int n_nodes = ggml_graph_n_nodes(graph);
    int n_found = 0;
    for (int i = 0; i < n_nodes; ++i) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        struct ggml_tensor * home = NULL;
        switch (node->op) {
            case GGML_OP_SET_ROWS:       home = stored_behind(node);         break;
            case GGML_OP_FLASH_ATTN_EXT: home = stored_behind(node->src[1]); break;
            case GGML_OP_MUL_MAT:        home = stored_behind(node->src[0]); break;
            default:                                                         break;
        }
        if (!home) continue;
        nodes[n_found] = node;
        stored[n_found++] = home;
    }
    return n_found;
}

static bool is_view_op(enum ggml_op op) {
    return op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

static bool all_take_offsets(ggml_backend_sched_t sched, const struct ggml_tensor * node,
                             const struct pykv_offsets * offsets) {
    const int n_backends = ggml_backend_sched_get_n_backends(sched);
    for (int i = 0; i < n_backends; ++i) {
        if (!pykv_takes_offsets(node, offsets + i)) return false;
    }
    return true;
}

// The scheduler leaves a view among whatever is computed around it, and a server ends its client when it is told of a
// tensor that lies elsewhere. A view of stored or given data becomes a node that does nothing and goes where the data
// is; one of a result moves right behind that.
static void place_view(ggml_backend_sched_t sched, struct ggml_cgraph * graph, int i, ggml_backend_t cpu) {
    struct ggml_tensor ** nodes = ggml_graph_nodes(graph);
    struct ggml_tensor * view = nodes[i], * home = view->view_src;
    if (home->buffer) {
        view->op = GGML_OP_NONE;
    } else if (home->flags & GGML_TENSOR_FLAG_INPUT) {
        view->op = GGML_OP_NONE;
        ggml_set_output(home); // the allocator does not count such a view, and would give the memory to others
        ggml_backend_sched_set_tensor_backend(sched, view, cpu);
    } else {
        int j = i - 1;
        while (j >= 0 && nodes[j] != view->src[0]) --j;
        if (j < 0) return;
        memmove(nodes + j + 2, nodes + j + 1, (size_t) (i - j - 1) * sizeof *nodes);
        nodes[j + 1] = view;
    }
}

void pykv_sched_prepare(ggml_backend_sched_t sched, struct ggml_cgraph * graph, const struct pykv_offsets * offsets,
                        bool among_servers) {
    ggml_backend_t cpu = ggml_backend_sched_get_backend(sched, ggml_backend_sched_get_n_backends(sched) - 1);
    const int n_nodes = ggml_graph_n_nodes(graph);
    for (int i = 0; i < n_nodes; ++i) {
        struct ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_CUSTOM || !all_take_offsets(sched, node, offsets)) {
            ggml_backend_sched_set_tensor_backend(sched, node, cpu);
        } else if (among_servers && is_view_op(node->op) && node->view_src) {
            place_view(sched, graph, i, cpu);
        }
    }
}

// ---- Ctrl-C ------------------------------------------------------------------------------------------------------

static volatile sig_atomic_t interrupted;
static int32_t * volatile interrupt_flag;

static void on_interrupt(int signum) {
    (void) signum;
    interrupted = 1;
    if (interrupt_flag) *(volatile int32_t *) interrupt_flag = 1;
}

#ifdef _WIN32
static void (*previous)(int);

static bool swap_in(void) {
    previous = signal(SIGINT, on_interrupt);
    return previous != SIG_ERR && previous != SIG_IGN;
}

static void swap_back(void) { signal(SIGINT, previous); }
#else
static struct sigaction previous;

static bool swap_in(void) {
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_handler = on_interrupt;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGINT, &ours, &previous) == 0 && previous.sa_handler != SIG_IGN;
}

static void swap_back(void) { sigaction(SIGINT, &previous, NULL); }
#endif

bool pykv_interrupt_defer(int32_t * flag) {
    interrupted = 0;
    interrupt_flag = flag;
    if (swap_in()) return true;
    swap_back();
    return false;
}

bool pykv_interrupt_restore(void) {
    swap_back();
    interrupt_flag = NULL;
    return interrupted != 0;
}

// ---- memory ------------------------------------------------------------------------------------------------------

void pykv_advise_large_pages(void * start, size_t n_bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t) start + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t) start + n_bytes) / page * page;
    if (first < end) madvise((void *) first, end - first, MADV_HUGEPAGE); // advice only: a refusal costs nothing
#else
    (void) start;
    (void) n_bytes;
#endif
}

// ---- gguf --------------------------------------------------------------------------------------------------------

int64_t pykv_gguf_join_strings(const struct gguf_context * ctx, int64_t key_id, char * out, int64_t * ends,
                               int64_t capacity) {
    const size_t n = gguf_get_arr_n(ctx, key_id);
    int64_t total = 0;
    for (size_t i = 0; i < n; ++i) total += (int64_t) strlen(gguf_get_arr_str(ctx, key_id, i));
    if (total > capacity) return total;
    int64_t at = 0;
    for (size_t i = 0; i < n; ++i) {
        const char * text = gguf_get_arr_str(ctx, key_id, i);
        const size_t length = strlen(text);
        memcpy(out + at, text, length);
        at += (int64_t) length;
        ends[i] = at;
    }
    return total;
}

// ---- types -------------------------------------------------------------------------------------------------------

bool pykv_to_float(enum ggml_type type, const void * src, float * dst, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(dst, src, (size_t) n * sizeof(float));
        return true;
    }
    const struct ggml_type_traits * traits = ggml_get_type_traits(type);
    if (!traits->to_float) return false;
    traits->to_float(src, dst, n);
    return true;
}

bool pykv_from_float(enum ggml_type type, const float * src, void * dst, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(dst, src, (size_t) n * sizeof(float));
        return true;
    }
    const struct ggml_type_traits * traits = ggml_get_type_traits(type);
    if (!traits->from_float_ref) return false;
    traits->from_float_ref(src, dst, n);
    return true;
}
