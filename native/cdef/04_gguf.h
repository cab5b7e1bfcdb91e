enum gguf_type {
    GGUF_TYPE_UINT8 = ..., GGUF_TYPE_INT8 = ..., GGUF_TYPE_UINT16 = ..., GGUF_TYPE_INT16 = ...,
    GGUF_TYPE_UINT32 = ..., GGUF_TYPE_INT32 = ..., GGUF_TYPE_FLOAT32 = ..., GGUF_TYPE_BOOL = ...,
    GGUF_TYPE_STRING = ..., GGUF_TYPE_ARRAY = ..., GGUF_TYPE_UINT64 = ..., GGUF_TYPE_INT64 = ...,
    GGUF_TYPE_FLOAT64 = ...,
    ...
};

struct gguf_context;
struct gguf_init_params { bool no_alloc; struct ggml_context ** ctx; };

struct gguf_context * gguf_init_from_file(const char * fname, struct gguf_init_params params);
void gguf_free(struct gguf_context * ctx);
uint32_t gguf_get_version(const struct gguf_context * ctx);
size_t gguf_get_alignment(const struct gguf_context * ctx);
size_t gguf_get_data_offset(const struct gguf_context * ctx);
int64_t gguf_get_n_kv(const struct gguf_context * ctx);
int64_t gguf_find_key(const struct gguf_context * ctx, const char * key);
const char * gguf_get_key(const struct gguf_context * ctx, int64_t key_id);
enum gguf_type gguf_get_kv_type(const struct gguf_context * ctx, int64_t key_id);
enum gguf_type gguf_get_arr_type(const struct gguf_context * ctx, int64_t key_id);
const char * gguf_get_val_str(const struct gguf_context * ctx, int64_t key_id);
const void * gguf_get_val_data(const struct gguf_context * ctx, int64_t key_id);
size_t gguf_get_arr_n(const struct gguf_context * ctx, int64_t key_id);
const void * gguf_get_arr_data(const struct gguf_context * ctx, int64_t key_id);
const char * gguf_get_arr_str(const struct gguf_context * ctx, int64_t key_id, size_t i);
int64_t gguf_get_n_tensors(const struct gguf_context * ctx);
size_t gguf_get_tensor_offset(const struct gguf_context * ctx, int64_t tensor_id);
const char * gguf_get_tensor_name(const struct gguf_context * ctx, int64_t tensor_id);
const int64_t * gguf_get_tensor_ne(const struct gguf_context * ctx, int64_t tensor_id);
enum ggml_type gguf_get_tensor_type(const struct gguf_context * ctx, int64_t tensor_id);
size_t gguf_get_tensor_size(const struct gguf_context * ctx, int64_t tensor_id);
