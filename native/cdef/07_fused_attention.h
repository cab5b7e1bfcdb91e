#define PYKV_ATTN_FEW_ROWS ...

struct pykv_attn_params { float scale; float softcap; float max_bias; bool keep_weights; };

struct pykv_attn_tensors {
    struct ggml_tensor * q;
    struct ggml_tensor * k;
    struct ggml_tensor * v;
    struct ggml_tensor * mask;
    struct ggml_tensor * sinks;
};

const char * pykv_attn_misfit(const struct pykv_attn_tensors * t, const struct pykv_attn_params * params);
struct ggml_tensor * pykv_attn_build(struct ggml_context * ctx, const struct pykv_attn_tensors * t,
                                     struct pykv_attn_params * params);

struct pykv_attn_mass_params {
    struct pykv_attn_params attention;
    int first_row;
    int end_row;
    bool largest;
    bool all_heads;
};

struct pykv_attn_weights {
    struct ggml_tensor * head;
    struct ggml_tensor * row;
};

const char * pykv_attn_mass_misfit(const struct pykv_attn_tensors * t, const struct pykv_attn_weights * weights,
                                   const struct pykv_attn_mass_params * params);
struct ggml_tensor * pykv_attn_build_mass(struct ggml_context * ctx, const struct pykv_attn_tensors * t,
                                          struct ggml_tensor * out, const struct pykv_attn_weights * weights,
                                          struct pykv_attn_mass_params * params);

const char * pykv_attn_isa(void);
bool pykv_attn_use_isa(const char * name);
