#include "ledger.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

#define SLOTS 8192

struct range {
    uintptr_t start, end;
    void *context;
};

__thread void *ledger_context;
__thread int ledger_capture_mode;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range live[SLOTS], registered[SLOTS];
static long registrations, violations;

static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long held, passes;
static int holds;

static int meet(struct range *range, uintptr_t start, uintptr_t end) {
    return range->end && range->start < end && start < range->end;
}

static void add(struct range *ranges, uintptr_t start, uintptr_t end) {
    for (int i = 0; i < SLOTS; i++) {
        if (!ranges[i].end) {
            ranges[i].start = start;
            ranges[i].end = end;
            ranges[i].context = ledger_context;
            return;
        }
    }
}

static void violation(const char *what, uintptr_t start) {
    violations++;
    fprintf(stderr, "ledger: %s %p\n", what, (void *)start);
}

void ledger_live(void *memory, size_t bytes) {
    uintptr_t start = (uintptr_t)memory;
    pthread_mutex_lock(&lock);
    add(live, start, start + bytes);
    pthread_mutex_unlock(&lock);
}

void ledger_gone(void *memory, size_t bytes) {
    uintptr_t start = (uintptr_t)memory;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++) {
        if (meet(&registered[i], start, start + bytes)) violation("freed while registered", start);
        if (meet(&live[i], start, start + bytes)) live[i].end = 0;
    }
    pthread_mutex_unlock(&lock);
}

int ledger_register(void *memory, size_t bytes) {
    uintptr_t start = (uintptr_t)memory;
    struct range *in = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++) {
        if (meet(&registered[i], start, start + bytes)) violation("registered twice", start);
        if (live[i].end && live[i].start <= start && start + bytes <= live[i].end) in = &live[i];
    }
    if (!in) violation("registered without memory", start);
    else if (in->context != ledger_context) violation("registered in another context", start);
    if (!ledger_capture_mode) violation("registered in the way of captures", start);
    add(registered, start, start + bytes);
    registrations++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int ledger_deregister(void *memory) {
    int status = 1;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS && status; i++) {
        if (registered[i].end && registered[i].start == (uintptr_t)memory) {
            registered[i].end = 0;
            registrations--;
            status = 0;
        }
    }
    if (status) violation("deregistered what is not registered", (uintptr_t)memory);
    pthread_mutex_unlock(&lock);
    return status;
}

void ledger_hold(void) {
    pthread_mutex_lock(&lock);
    holds = 1;
    pthread_mutex_unlock(&lock);
}

void ledger_let_go(long more) {
    pthread_mutex_lock(&lock);
    passes += more;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void ledger_await_held(void) {
    pthread_mutex_lock(&lock);
    while (!held) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

void ledger_pass(void) {
    pthread_mutex_lock(&lock);
    if (holds) {
        held++;
        pthread_cond_broadcast(&changed);
        while (!passes) pthread_cond_wait(&changed, &lock);
        passes--;
        held--;
    }
    pthread_mutex_unlock(&lock);
}

long ledger_registered(void) {
    pthread_mutex_lock(&lock);
    long now = registrations;
    pthread_mutex_unlock(&lock);
    return now;
}

long ledger_violations(void) {
    pthread_mutex_lock(&lock);
    long now = violations;
    pthread_mutex_unlock(&lock);
    return now;
}
