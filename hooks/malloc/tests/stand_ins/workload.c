/* Allocates and frees at random on several threads, and says what the hook and the pretended cuFile have counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger.h"
#include "ssdtrain_malloc_hook.h"

#define THREADS 4
#define ROUNDS 250
#define KEPT 32
#define MAPPING (size_t)(2 << 20)

struct access {
    int location_type, location_id, flags;
};

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMallocAsync(void **, size_t, void *);
int cudaMallocFromPoolAsync(void **, size_t, void *, void *);
int cudaFreeAsync(void *, void *);
int cudaGetDriverEntryPoint(const char *, void **, unsigned long long, int *);
int cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);
int cuMemAlloc_v2(uint64_t *, size_t);
int cuMemFree_v2(uint64_t);
int cuCtxSetCurrent(void *);
int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);

typedef int (*reserve_fn)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
typedef int (*map_fn)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
typedef int (*set_access_fn)(uint64_t, size_t, const struct access *, size_t);
typedef int (*unmap_fn)(uint64_t, size_t);
typedef int (*lookup_fn)(const char *, void **, int, uint64_t, int *);

static const char *mode;
static void *kept[THREADS][KEPT];
static uint64_t reserved[THREADS];
static map_fn map_memory;
static set_access_fn set_access;
static unmap_fn unmap_memory;

static void check(int failed, const char *what) {
    if (failed) {
        fprintf(stderr, "workload: %s failed with %d\n", what, failed);
        exit(3);
    }
}

static unsigned draw(unsigned *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

static int is(const char *name) { return !strcmp(mode, name); }

static void *take(size_t bytes) {
    void *memory = NULL;
    uint64_t start = 0;
    if (is("driver")) {
        check(cuMemAlloc_v2(&start, bytes), "cuMemAlloc");
        memory = (void *)(uintptr_t)start;
    } else if (is("pool")) {
        check(bytes % 2 ? cudaMallocAsync(&memory, bytes, NULL) : cudaMallocFromPoolAsync(&memory, bytes, NULL, NULL),
              "cudaMallocAsync");
    } else {
        check(cudaMalloc(&memory, bytes), "cudaMalloc");
    }
    memset(memory, 1, bytes < 64 ? bytes : 64);
    return memory;
}

static void give(void *memory) {
    if (is("driver")) check(cuMemFree_v2((uint64_t)(uintptr_t)memory), "cuMemFree");
    else if (is("pool")) check(cudaFreeAsync(memory, NULL), "cudaFreeAsync");
    else check(cudaFree(memory), "cudaFree");
}

/* As an expandable segment does: maps piece by piece, grants access to them together, and again for a peer. */
static void map_pieces(uint64_t base, unsigned first, unsigned last, void **pieces) {
    struct access none = {1, 0, 0}, own = {1, 0, 3}, both[2] = {{1, 0, 3}, {1, 1, 3}};
    for (unsigned i = first; i < last; i++) {
        check(map_memory(base + i * MAPPING, MAPPING, 0, 1, 0), "cuMemMap");
        pieces[i] = (void *)(uintptr_t)(base + i * MAPPING);
    }
    uint64_t start = base + first * MAPPING;
    size_t bytes = (last - first) * MAPPING;
    check(set_access(start, bytes, &none, 1), "cuMemSetAccess");
    check(set_access(start, bytes, &own, 1), "cuMemSetAccess");
    check(set_access(start, bytes, both, 2), "cuMemSetAccess");
}

static void *work(void *argument) {
    unsigned thread = (unsigned)(uintptr_t)argument, seed = 77 + thread;
    void **mine = kept[thread];
    cuCtxSetCurrent((void *)(uintptr_t)(1 + thread % 2)); /* two devices, say */
    for (int round = 0; round < ROUNDS; round++) {
        unsigned at = draw(&seed) % KEPT;
        if (map_memory) {
            unsigned last = at;
            if (mine[at]) {
                while (last < KEPT && mine[last] && last - at < 4) mine[last++] = NULL;
                check(unmap_memory(reserved[thread] + at * MAPPING, (last - at) * MAPPING), "cuMemUnmap");
            } else {
                while (last < KEPT && !mine[last] && last - at < 4) last++;
                map_pieces(reserved[thread], at, last, mine);
            }
        } else if (mine[at]) {
            give(mine[at]);
            mine[at] = NULL;
        } else {
            mine[at] = take(1 + draw(&seed) % (draw(&seed) % 8 ? 1 << 16 : 1 << 21));
        }
    }
    return NULL;
}

static void *lookup(const char *name) {
    void *function = NULL, *getter = NULL;
    int found = -1;
    if (is("by_version")) check(cudaGetDriverEntryPointByVersion(name, &function, 12000, 0, &found), name);
    else if (is("by_name")) check(cudaGetDriverEntryPoint(name, &function, 0, &found), name);
    else if (is("by_driver")) check(cuGetProcAddress_v2(name, &function, 12000, 0, &found), name);
    else {
        check(cudaGetDriverEntryPointByVersion("cuGetProcAddress", &getter, 12000, 0, &found), "cuGetProcAddress");
        check(((lookup_fn)getter)(name, &function, 12000, 0, &found), name);
    }
    check(!function || found, name);
    return function;
}

static long count_of(const char *name) {
    void *library = dlopen("libcufile.so.0", RTLD_NOW | RTLD_NOLOAD);
    long (*count)(void) = library ? dlsym(library, name) : NULL;
    return count ? count() : 0;
}

/* What is live is registered, or was refused. */
static void say(const char *when) {
    int (*wait)(void) = dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_wait");
    void (*read)(struct ssdtrain_malloc_hook_stats *, size_t) = dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_stats");
    int (*find)(const void *, size_t, void **) = dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_find");
    struct ssdtrain_malloc_hook_stats it = {0};
    long live = 0, found = 0;
    printf("%s.waited=%d\n", when, wait ? wait() : -2);
    for (int thread = 0; thread < THREADS; thread++)
        for (int i = 0; i < KEPT; i++) {
            void *start = NULL;
            live += kept[thread][i] != NULL;
            found += kept[thread][i] && find && find((char *)kept[thread][i] + 1, 1, &start) == 1 && start == kept[thread][i];
        }
    if (read) read(&it, sizeof it);
    printf("%s.really_live=%ld\n%s.really_registered=%ld\n%s.violations=%ld\n", when, live, when, ledger_registered(),
           when, ledger_violations());
    printf("%s.allocations=%ld\n%s.frees=%ld\n%s.unknown_frees=%ld\n", when, (long)it.allocations, when,
           (long)it.frees, when, (long)it.unknown_frees);
    printf("%s.registrations=%ld\n%s.deregistrations=%ld\n%s.refusals=%ld\n", when, (long)it.registrations, when,
           (long)it.deregistrations, when, (long)it.refusals);
    printf("%s.live=%ld\n%s.registered=%ld\n%s.last_error=%ld\n", when, (long)it.live_segments, when,
           (long)it.registered_segments, when, (long)it.last_error);
    printf("%s.found=%ld\n", when, found);
    printf("%s.asked=%ld\n%s.opened=%ld\n", when, count_of("stand_in_asked"), when, count_of("stand_in_opened"));
}

static void everyone(void) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) check(pthread_create(&threads[i], NULL, work, (void *)i), "pthread_create");
    for (int i = 0; i < THREADS; i++) check(pthread_join(threads[i], NULL), "pthread_join");
}

static int turn(int on) {
    int (*enable)(int) = dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_enable");
    return enable ? enable(on) : -2;
}

/* A child frees what it has inherited. Prints whether that has reached cuFile in the child. */
static void fork_and_free(void) {
    int status = 1;
    pid_t child = fork();
    if (!child) {
        long before = ledger_registered();
        for (int i = 0; i < KEPT; i++)
            if (kept[0][i]) give(kept[0][i]);
        _exit(ledger_registered() != before);
    }
    waitpid(child, &status, 0);
    printf("child=%d\n", status);
}

int workload(int count, char **arguments) {
    mode = count > 1 ? arguments[1] : "plain";
    int switches = is("switched");
    cuCtxSetCurrent((void *)1);
    if (!strncmp(mode, "by_", 3)) {
        reserve_fn reserve = (reserve_fn)lookup("cuMemAddressReserve");
        map_memory = (map_fn)lookup("cuMemMap");
        set_access = (set_access_fn)lookup("cuMemSetAccess");
        unmap_memory = (unmap_fn)lookup("cuMemUnmap");
        for (int i = 0; i < THREADS; i++)
            check(reserve(&reserved[i], KEPT * MAPPING, 0, 0, 0), "cuMemAddressReserve");
    }
    check(cudaFree(NULL), "cudaFree");
    if (map_memory) {
        map_pieces(reserved[0], 0, 1, kept[0]);
        check(unmap_memory(reserved[0], MAPPING), "cuMemUnmap");
        kept[0][0] = NULL;
    }
    everyone();
    say("first");
    if (switches) {
        printf("was=%d\n", turn(1));
        say("on");
        everyone();
        say("second");
        printf("was_on=%d\n", turn(0));
        say("off");
    }
    if (is("forks")) fork_and_free();
    if (is("captured")) {
        void *memory = NULL;
        check(cudaMallocAsync(&memory, 4096, (void *)7), "cudaMallocAsync");
        say("captured");
        check(cudaFreeAsync(memory, (void *)7), "cudaFreeAsync");
    }
    for (int thread = 0; thread < THREADS; thread++) {
        for (int i = 0; i < KEPT; i++) {
            if (!kept[thread][i]) continue;
            if (map_memory) check(unmap_memory((uint64_t)(uintptr_t)kept[thread][i], MAPPING), "cuMemUnmap");
            else give(kept[thread][i]);
            kept[thread][i] = NULL;
        }
    }
    say("last");
    if (is("leaves")) { /* memory that is live at the end, and is freed by a destructor */
        kept[0][0] = take(4096);
        say("end");
    }
    fflush(stdout);
    return 0;
}

__attribute__((destructor)) static void end(void) {
    if (kept[0][0]) cudaFree(kept[0][0]);
}
