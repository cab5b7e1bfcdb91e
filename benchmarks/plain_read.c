// The limit of attention over a cache: read bytes and do nothing with them. Built by benchmarks/attention.py.
#include <stddef.h>
#include <stdint.h>

uint64_t plain_read(const uint64_t * from, size_t n_words) {
    uint64_t sum[32] = {0}, all = 0;
    for (size_t i = 0; i + 32 <= n_words; i += 32) {
        for (int j = 0; j < 32; ++j) sum[j] += from[i + j];
    }
    for (int j = 0; j < 32; ++j) all += sum[j];
    return all;
}
