// What cffi cannot express: callbacks that ggml may call from any thread, and functions that ggml hands out by name.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>
#include <gguf.h>

// facts about the ggml that this extension was compiled against, compared with the loaded one at import
const char * pykv_built_ggml_version(void);
size_t pykv_built_tensor_overhead(void);

// a fatal ggml assertion: write the message to stderr and let the process die
void pykv_install_abort_hook(void);

// pass ggml's log lines to pykv_log_to_python, which cffi generates and Python implements
void pykv_install_log(void);
void pykv_remove_log(void);

// false where the backend has no such notion (only the CPU has)
bool pykv_backend_set_n_threads(ggml_backend_t backend, int n_threads);
bool pykv_backend_watch_cancel(ggml_backend_t backend, int32_t * flag);
void * pykv_threadpool_new(ggml_backend_t backend, int n_threads);
bool pykv_backend_set_threadpool(ggml_backend_t backend, void * pool);
void pykv_threadpool_free(ggml_backend_t backend, void * pool);

// the memory in which a device lays matrices out anew for its products; NULL where there is none
ggml_backend_buffer_type_t pykv_repack_type(ggml_backend_dev_t device);

// what the backend of a device was built with or found here, up to an entry without a name; NULL where it does not say
const struct ggml_backend_feature * pykv_features(ggml_backend_dev_t device);

// whether this ggml has the RPC backend; the devices of a server, NULL where there is no backend or no connection
bool pykv_rpc_is_built(void);
ggml_backend_reg_t pykv_rpc_add_server(const char * endpoint);
// lend devices to one client after the other, for good; returns only where the endpoint cannot be listened on
void pykv_rpc_serve(const char * endpoint, const char * cache, size_t n_threads, size_t n_devices,
                    ggml_backend_dev_t * devices);

// at which offsets a backend's operations take their operands: multiples, but for those operations that take any
struct pykv_offsets {
    size_t multiple;
    const bool * takes_any; // by operation
};
bool pykv_takes_offsets(const struct ggml_tensor * node, const struct pykv_offsets * offsets);

// return the first node, or operand of one, that none of the devices can run where its data lies; NULL if all fit
struct ggml_tensor * pykv_graph_misfit(struct ggml_cgraph * graph, ggml_backend_dev_t * devices,
                                       const struct pykv_offsets * offsets, int n_devices);

// find the nodes that attend to tensors of a memory or write their rows, and the tensor that each is about: K, or what
// is written. Both arrays have room for all nodes of the graph; returns how many there are
int pykv_graph_stored_ops(struct ggml_cgraph * graph, struct ggml_tensor ** nodes, struct ggml_tensor ** stored);

// make ready for several backends, the last one the CPU: it gets custom operations, and those whose operands lie at
// offsets that another one would die of. Among servers, no view is left to one that has not what it views
void pykv_sched_prepare(ggml_backend_sched_t sched, struct ggml_cgraph * graph, const struct pykv_offsets * offsets,
                        bool among_servers);

// hold back Ctrl-C while a batch is computed: it sets *flag instead; false where it is ignored or cannot be held.
// restore returns whether it came in between
bool pykv_interrupt_defer(int32_t * flag);
bool pykv_interrupt_restore(void);

// ask the system for large pages before memory is first touched: transposed V is read with long strides, a page each
void pykv_advise_large_pages(void * start, size_t n_bytes);

// copy a string array into `out`, one after the other, with the end offset of each in `ends`;
// returns the bytes needed, and copies nothing when `capacity` is smaller
int64_t pykv_gguf_join_strings(const struct gguf_context * ctx, int64_t key_id, char * out, int64_t * ends,
                               int64_t capacity);

// convert n elements (whole blocks); false where ggml has no conversion for the type
bool pykv_to_float(enum ggml_type type, const void * src, float * dst, int64_t n);
bool pykv_from_float(enum ggml_type type, const float * src, void * dst, int64_t n);
