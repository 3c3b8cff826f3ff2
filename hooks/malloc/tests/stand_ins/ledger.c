#include "ledger.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

#define SLOTS 8192

struct range {
    uintptr_t start, end;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range live[SLOTS], registered[SLOTS];
static long registrations, violations;

static int meet(struct range *range, uintptr_t start, uintptr_t end) {
    return range->end && range->start < end && start < range->end;
}

static void add(struct range *ranges, uintptr_t start, uintptr_t end) {
    for (int i = 0; i < SLOTS; i++) {
        if (!ranges[i].end) {
            ranges[i].start = start;
            ranges[i].end = end;
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
    int in_live = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++) {
        if (meet(&registered[i], start, start + bytes)) violation("registered twice", start);
        if (live[i].end && live[i].start <= start && start + bytes <= live[i].end) in_live = 1;
    }
    if (!in_live) violation("registered without memory", start);
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
