/* A pretended libcuda.so.1: device memory is host memory. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ledger.h"

struct access {
    int location_type, location_id, flags;
};

/* Each block remembers its size in front of it. */
#define HEAD 4096

int cuMemAlloc_v2(uint64_t *memory, size_t bytes) {
    char *block;
    if (!bytes) return 1;
    if (posix_memalign((void **)&block, HEAD, HEAD + bytes)) return 2;
    *(size_t *)block = bytes;
    ledger_live(block + HEAD, bytes);
    *memory = (uint64_t)(uintptr_t)(block + HEAD);
    return 0;
}

int cuMemFree_v2(uint64_t memory) {
    char *block = (char *)(uintptr_t)memory - HEAD;
    if (!memory) return 1;
    ledger_gone(block + HEAD, *(size_t *)block);
    free(block);
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = ledger_context;
    return 0;
}

int cuCtxSetCurrent(void *context) {
    ledger_context = context;
    return 0;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int was = ledger_capture_mode;
    ledger_capture_mode = *mode;
    *mode = was;
    return 0;
}

int cuMemAddressReserve(uint64_t *start, size_t bytes, size_t alignment, uint64_t hint, unsigned long long flags) {
    (void)alignment, (void)hint, (void)flags;
    void *range = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return 2;
    *start = (uint64_t)(uintptr_t)range;
    return 0;
}

int cuMemAddressFree(uint64_t start, size_t bytes) {
    return munmap((void *)(uintptr_t)start, bytes) ? 1 : 0;
}

int cuMemMap(uint64_t start, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)start, (void)bytes, (void)offset, (void)flags;
    return handle == 1 ? 0 : 1;
}

/* The mappings here are as long as the program's pages of memory. */
#define MAPPING (size_t)(2 << 20)

int cuMemSetAccess(uint64_t start, size_t bytes, const struct access *access, size_t count) {
    if (!count || !access[0].flags) return 0;
    if (mprotect((void *)(uintptr_t)start, bytes, PROT_READ | PROT_WRITE)) return 1;
    for (size_t done = 0; done < bytes; done += MAPPING) ledger_live((void *)(uintptr_t)(start + done), MAPPING);
    return 0;
}

int cuMemUnmap(uint64_t start, size_t bytes) {
    ledger_gone((void *)(uintptr_t)start, bytes);
    return mprotect((void *)(uintptr_t)start, bytes, PROT_NONE) ? 1 : 0;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *found);

static const struct {
    const char *name;
    void *function;
} table[] = {
    {"cuMemAlloc", cuMemAlloc_v2},
    {"cuMemFree", cuMemFree_v2},
    {"cuMemAddressReserve", cuMemAddressReserve},
    {"cuMemAddressFree", cuMemAddressFree},
    {"cuMemMap", cuMemMap},
    {"cuMemSetAccess", cuMemSetAccess},
    {"cuMemUnmap", cuMemUnmap},
    {"cuGetProcAddress", cuGetProcAddress_v2},
};

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *found) {
    (void)version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(symbol, table[i].name)) *function = table[i].function;
    if (found) *found = *function ? 0 : 1;
    return *function ? 0 : 500;
}
