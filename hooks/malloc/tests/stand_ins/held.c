/* Allocates, frees and ends while a registration is held, which goes on when this program says so. What hangs is ended by an alarm. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ledger.h"
#include "ssdtrain_malloc_hook.h"

int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cuCtxSetCurrent(void *);

static int (*enable)(int);
static int (*await)(void);
static void (*read_stats)(struct ssdtrain_malloc_hook_stats *, size_t);
static atomic_int done;

static void *take(void) {
    void *memory = NULL;
    if (cudaMalloc(&memory, 4096)) abort();
    return memory;
}

static void give(void *memory) {
    if (cudaFree(memory)) abort();
}

static void say(const char *when) {
    struct ssdtrain_malloc_hook_stats it = {0};
    read_stats(&it, sizeof it);
    printf("%s.live=%ld\n%s.registered=%ld\n%s.registrations=%ld\n", when, (long)it.live_segments, when,
           (long)it.registered_segments, when, (long)it.registrations);
    printf("%s.refusals=%ld\n%s.last_error=%ld\n", when, (long)it.refusals, when, (long)it.last_error);
    printf("%s.really_registered=%ld\n%s.violations=%ld\n", when, ledger_registered(), when, ledger_violations());
    fflush(stdout);
}

/* How the kernel schedules the hook's thread, or -1 if there is none of its name. */
static int policy_of_thread(void) {
    int policy = -1;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "r");
        if (!file) continue;
        if (fgets(name, sizeof name, file) && !strcmp(name, "ssdtrain-reg\n")) policy = sched_getscheduler(atoi(task->d_name));
        fclose(file);
    }
    if (tasks) closedir(tasks);
    return policy;
}

static int main_sleeps(void) {
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
    FILE *file = fopen(path, "r");
    if (!file || !fgets(line, sizeof line, file)) abort();
    fclose(file);
    return strrchr(line, ')')[2] == 'S';
}

/* Lets one registration go once the main thread waits for it. If that goes on instead, and is done, it goes after that, and the
 * ledger will say what was wrong. */
static void *let_one_go(void *unused) {
    while (!main_sleeps() && !done) sched_yield();
    ledger_let_go(1);
    return unused;
}

static void let_one_go_later(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, let_one_go, NULL) || pthread_detach(thread)) abort();
}

/* A child frees what it has inherited, and ends like any program. */
static int child_frees(void *first, void *second) {
    int status = 1;
    pid_t child = fork();
    if (!child) {
        alarm(4);
        give(first);
        give(second);
        exit(enable(1) != -1);
    }
    waitpid(child, &status, 0);
    return status;
}

/* There is no room for the stack of another thread, and then there is. */
static void run_out_of_threads(void) {
    struct rlimit was, now;
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld", &pages) != 1 || getrlimit(RLIMIT_AS, &was)) abort();
    fclose(file);
    now = was;
    now.rlim_cur = pages * sysconf(_SC_PAGESIZE) + (1 << 20);
    setrlimit(RLIMIT_AS, &now);
    void *first = take();
    printf("waited=%d\n", await());
    setrlimit(RLIMIT_AS, &was);
    say("without");
    void *second = take();
    await();
    say("with");
    give(first);
    give(second);
    say("last");
}

int main(int count, char **arguments) {
    const char *mode = count > 1 ? arguments[1] : "";
    alarm(60);
    enable = (int (*)(int))dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_enable");
    await = (int (*)(void))dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_wait");
    read_stats = (void (*)(struct ssdtrain_malloc_hook_stats *, size_t))dlsym(RTLD_DEFAULT, "ssdtrain_malloc_hook_stats");
    cuCtxSetCurrent((void *)1);

    if (!strcmp(mode, "threadless")) {
        run_out_of_threads();
        return 0;
    }
    int opens = !strncmp(mode, "open_", 5); /* what is held is the opening, not a registration */
    if (opens) mode += 5;
    else {
        void *early = take();
        await();
        give(early);
    }
    ledger_hold();
    void *first = take();
    ledger_await_held();
    void *second = take(), *third = take();
    say("held");
    printf("policy=%d\n", policy_of_thread());
    give(third);
    say("freed_one");

    if (!strcmp(mode, "free")) {
        if (!opens) let_one_go_later();
        give(first);
        done = 1;
        say("freed_two");
        ledger_let_go(9);
        printf("waited=%d\n", await());
        say("let_go");
        give(second);
    } else if (!strcmp(mode, "wait")) {
        ledger_let_go(1);
        let_one_go_later();
        printf("waited=%d\n", await());
        done = 1;
        say("waited");
        give(first);
        give(second);
    } else if (!strcmp(mode, "off")) {
        let_one_go_later();
        printf("was=%d\n", enable(0));
        done = 1;
        say("off");
        printf("waited=%d\n", await());
        give(first);
        give(second);
    } else if (!strcmp(mode, "fork")) {
        printf("child=%d\n", child_frees(first, second));
        ledger_let_go(9);
        await();
        give(first);
        give(second);
    } else if (!strcmp(mode, "exit")) {
        say("last");
        atexit(let_one_go_later); /* the newest handler runs first */
        return 0;
    }
    say("last");
    return 0;
}
