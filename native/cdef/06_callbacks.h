extern "Python+C" void pykv_log_to_python(enum ggml_log_level level, const char * text);
