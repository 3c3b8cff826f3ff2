/* The GPU memory hook: see the documentation of the package ssdtrain-malloc-hook.
 *
 * The library is preloaded, not linked. Find its functions with dlsym(RTLD_DEFAULT, "..."): they are not there without it. */
#ifndef SSDTRAIN_MALLOC_HOOK_H
#define SSDTRAIN_MALLOC_HOOK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* New fields are added at the end. */
struct ssdtrain_malloc_hook_stats {
    uint64_t allocations;         /* segments allocated or mapped while the hook was on */
    uint64_t frees;               /* segments of those that were freed or unmapped */
    uint64_t unknown_frees;       /* frees of memory that the hook does not know */
    uint64_t registrations;       /* registrations that cuFile accepted */
    uint64_t deregistrations;     /* registrations that were undone */
    uint64_t refusals;            /* registrations that cuFile refused */
    uint64_t live_segments;       /* segments that are live now */
    uint64_t live_bytes;          /* their bytes */
    uint64_t registered_segments; /* segments that are registered now */
    uint64_t registered_bytes;    /* their bytes */
    int64_t last_error;           /* cuFile's last error; -1 if it was not found; -2 if the hook's thread could not be
                                     started; 0 if there was none */
};

/* Turns the hook on (1) or off (0). Returns what it was, or -1 if called from within cuFile, from a fork, or when the process ends.
 * Off, all registrations are undone on return. */
int ssdtrain_malloc_hook_enable(int on);

/* Memory is registered by a thread of the hook some time after it was allocated. Waits until all that is live is registered or was
 * refused; call it before counters are compared. Returns 0, or -1 at once while the hook is off or if called from within cuFile. */
int ssdtrain_malloc_hook_wait(void);

/* Writes the counters into the first size bytes of out; pass sizeof(struct ssdtrain_malloc_hook_stats). */
void ssdtrain_malloc_hook_stats(struct ssdtrain_malloc_hook_stats *out, size_t size);

/* Whether these bytes are all in one segment that is registered now: 1, and where that starts is written to *start; 0 if they are not;
 * -1 while the hook is off. */
int ssdtrain_malloc_hook_find(const void *address, size_t bytes, void **start);

/* Prints one line of counters to standard error. */
void ssdtrain_malloc_hook_print(void);

#ifdef __cplusplus
}
#endif

#endif
