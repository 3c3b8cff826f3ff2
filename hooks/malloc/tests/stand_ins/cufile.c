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
static atomic_int down, under_way;
static void *bounce;
static pid_t owner;

/* Like the real library, this one is taken down when the process ends; calls then and after that are wrong. */
static void take_down(void) {
    down = 1;
    if (under_way && owner == getpid()) abort();
}

__attribute__((constructor)) static void put_up(void) {
    owner = getpid();
    atexit(take_down);
}

static outcome leave(int code) {
    under_way--;
    return (outcome){code, 0};
}

static int refuses(size_t bytes) {
    const char *what = getenv("STAND_IN_REFUSES");
    if (!what) return 0;
    return !strcmp(what, "all") || (!strcmp(what, "large") && bytes > (1 << 20));
}

outcome cuFileDriverOpen(void) {
    opened++;
    under_way++;
    if (down) abort();
    ledger_pass();
    if (getenv("STAND_IN_OPENS_SLOWLY")) usleep(100 * 1000);
    atexit(take_down);
    return leave(getenv("STAND_IN_HAS_NO_DRIVER") ? 5001 : cudaMalloc(&bounce, 1 << 16));
}

outcome cuFileBufRegister(const void *memory, size_t bytes, int flags) {
    void *own = NULL;
    (void)flags;
    asked++;
    under_way++;
    if (down) abort();
    ledger_pass();
    if (cudaMalloc(&own, 4096) || cudaFree(own)) return leave(5030);
    if (refuses(bytes)) return leave(5036);
    return leave(ledger_register((void *)memory, bytes));
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
