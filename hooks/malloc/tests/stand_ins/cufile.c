/* A pretended libcufile.so.0. It allocates device memory while it registers, as the real one does for its bounce buffers, and by
 * the program's own cudaMalloc, which the real one does not: the hook has to know its own calls. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ledger.h"

int cudaMalloc(void **memory, size_t bytes);
int cudaFree(void *memory);

typedef struct {
    int code, cuda;
} outcome;

static atomic_long asked, opened;
static atomic_int down;
static void *bounce;

/* Like the real library, this one is taken down when the process ends; calls after that are wrong. */
static void take_down(void) { down = 1; }

static int refuses(size_t bytes) {
    const char *what = getenv("STAND_IN_REFUSES");
    if (!what) return 0;
    return !strcmp(what, "all") || (!strcmp(what, "large") && bytes > (1 << 20));
}

outcome cuFileDriverOpen(void) {
    opened++;
    atexit(take_down);
    if (getenv("STAND_IN_OPENS_SLOWLY")) usleep(100 * 1000);
    return (outcome){getenv("STAND_IN_HAS_NO_DRIVER") ? 5001 : cudaMalloc(&bounce, 1 << 16), 0};
}

outcome cuFileBufRegister(const void *memory, size_t bytes, int flags) {
    void *own = NULL;
    (void)flags;
    asked++;
    if (down) abort();
    if (cudaMalloc(&own, 4096) || cudaFree(own)) return (outcome){5030, 0};
    if (refuses(bytes)) return (outcome){5036, 0};
    return (outcome){ledger_register((void *)memory, bytes), 0};
}

outcome cuFileBufDeregister(const void *memory) {
    void *own = NULL;
    if (down) abort();
    if (cudaMalloc(&own, 4096) || cudaFree(own)) return (outcome){5030, 0};
    return (outcome){ledger_deregister((void *)memory) ? 5024 : 0, 0};
}

/* For the test program. */
long stand_in_asked(void) { return asked; }
long stand_in_opened(void) { return opened; }
