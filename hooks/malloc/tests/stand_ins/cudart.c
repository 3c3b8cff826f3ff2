/* A pretended libcudart.so.13. Like the real one it calls the driver by addresses of its own, so what it does inside is not seen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static void *driver(const char *name) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

static int allocate(void **memory, size_t bytes) {
    int (*allocate)(uint64_t *, size_t) = driver("cuMemAlloc_v2");
    uint64_t start = 0;
    int status = allocate(&start, bytes);
    if (!status) *memory = (void *)(uintptr_t)start;
    return status;
}

static int release(void *memory) {
    int (*release)(uint64_t) = driver("cuMemFree_v2");
    return memory ? release((uint64_t)(uintptr_t)memory) : 0;
}

int cudaMalloc(void **memory, size_t bytes) { return allocate(memory, bytes); }

int cudaFree(void *memory) { return release(memory); }

/* A stream is captured if it is this one. */
#define CAPTURED ((void *)7)

int cudaStreamIsCapturing(void *stream, int *status) {
    *status = stream == CAPTURED;
    return 0;
}

int cudaMallocAsync(void **memory, size_t bytes, void *stream) {
    (void)stream;
    return allocate(memory, bytes);
}

int cudaMallocFromPoolAsync(void **memory, size_t bytes, void *pool, void *stream) {
    (void)pool, (void)stream;
    return allocate(memory, bytes);
}

int cudaFreeAsync(void *memory, void *stream) {
    (void)stream;
    return release(memory);
}

static int find(const char *symbol, void **function, unsigned version, unsigned long long flags, int *found) {
    int (*lookup)(const char *, void **, int, uint64_t, int *) = driver("cuGetProcAddress_v2");
    int status = lookup(symbol, function, (int)version, flags, found);
    return status == 500 ? 0 : status; /* as the real one: success, and no function */
}

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *found) {
    return find(symbol, function, version, flags, found);
}

int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *found) {
    return find(symbol, function, 13000, flags, found);
}
