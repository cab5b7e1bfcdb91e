const char * pykv_built_ggml_version(void);
size_t pykv_built_tensor_overhead(void);

void pykv_install_abort_hook(void);
void pykv_install_log(void);
void pykv_remove_log(void);

bool pykv_backend_set_n_threads(ggml_backend_t backend, int n_threads);
bool pykv_backend_watch_cancel(ggml_backend_t backend, int32_t * flag);
void * pykv_threadpool_new(ggml_backend_t backend, int n_threads);
bool pykv_backend_set_threadpool(ggml_backend_t backend, void * pool);
void pykv_threadpool_free(ggml_backend_t backend, void * pool);

ggml_backend_buffer_type_t pykv_repack_type(ggml_backend_dev_t device);

const struct ggml_backend_feature * pykv_features(ggml_backend_dev_t device);

bool pykv_rpc_is_built(void);
ggml_backend_reg_t pykv_rpc_add_server(const char * endpoint);
void pykv_rpc_serve(const char * endpoint, const char * cache, size_t n_threads, size_t n_devices,
                    ggml_backend_dev_t * devices);

struct pykv_offsets {
    size_t multiple;
    const bool * takes_any;
};
bool pykv_takes_offsets(const struct ggml_tensor * node, const struct pykv_offsets * offsets);
struct ggml_tensor * pykv_graph_misfit(struct ggml_cgraph * graph, ggml_backend_dev_t * devices,
                                       const struct pykv_offsets * offsets, int n_devices);
int pykv_graph_stored_ops(struct ggml_cgraph * graph, struct ggml_tensor ** nodes, struct ggml_tensor ** stored);
void pykv_sched_prepare(ggml_backend_sched_t sched, struct ggml_cgraph * graph, const struct pykv_offsets * offsets,
                        bool among_servers);

bool pykv_interrupt_defer(int32_t * flag);
bool pykv_interrupt_restore(void);

void pykv_advise_large_pages(void * start, size_t n_bytes);

int64_t pykv_gguf_join_strings(const struct gguf_context * ctx, int64_t key_id, char * out, int64_t * ends,
                               int64_t capacity);

bool pykv_to_float(enum ggml_type type, const void * src, float * dst, int64_t n);
bool pykv_from_float(enum ggml_type type, const float * src, void * dst, int64_t n);
