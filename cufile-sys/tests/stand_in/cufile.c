/* A stand-in for libcufile.so.0, for tests alone: it has cuFile's functions over plain files and host memory.
 *
 * "Device pointers" are host memory, transfers are pread and pwrite on the registered descriptor. The functions stand_in_* below control it. Every copy of the library has a state of its own. A function is
 * left out by -DcuFileX=left_out_cuFileX. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { NOT_OPEN = 5001, BAD_FLAGS = 5019, INVALID = 5022, TWICE = 5023, ALREADY_OPEN = 5026, NO_FILE = 5027, NO_NAME = 5031, FULL = 5037 };
enum { MANY = 256 };
/* What ends the process in the middle of a call instead of a status. */
enum { KILLED = -9 };

struct status { unsigned err, cu; };
struct descriptor { unsigned type; union { int fd; void *handle; } handle; const void *operations; };

struct file { int fd; bool live; };
struct buffer { const void *base; size_t len; };
struct function { char name[64]; int code, detail; long calls; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct function functions[128];
static struct file files[MANY];
static struct buffer buffers[MANY];
static int used_files;
static long users, misuse, waiting;
static size_t most = SIZE_MAX;
static bool holding;
static int version = 1150, level;
static uint64_t read_ops, write_ops, read_bytes, write_bytes;
static size_t numbers[12];
static bool switches[12];
static char texts[3][256];

static const struct status GOOD = {0, 0};

static struct function *function(const char *name) {
    for (int i = 0; i < 128; i++) {
        if (!functions[i].name[0]) snprintf(functions[i].name, sizeof functions[i].name, "%s", name);
        if (!strcmp(functions[i].name, name)) return &functions[i];
    }
    abort();
}

/* Counts the call, with the lock held, and says whether it is to fail. */
static struct status enter(const char *name, bool needs_driver) {
    struct function *called = function(name);
    called->calls++;
    if (called->code == KILLED) raise(SIGKILL);
    if (called->code) {
        errno = called->detail;
        return (struct status){(unsigned)called->code, called->code == 5011 ? (unsigned)called->detail : 0};
    }
    if (needs_driver && !users) return (struct status){NOT_OPEN, 0};
    return GOOD;
}

#define CALL(needs_driver)                                       \
    pthread_mutex_lock(&lock);                                   \
    struct status status = enter(__func__, needs_driver);        \
    if (status.err) return pthread_mutex_unlock(&lock), status;

static struct status leave(unsigned err) {
    pthread_mutex_unlock(&lock);
    return (struct status){err, 0};
}

/* One transfer, with the lock held. */
static ssize_t transfer(const char *name, bool write, struct file *file, char *base, size_t size, off_t file_offset, off_t memory_offset) {
    struct function *run = function(name);
    if (run->code) {
        errno = run->detail;
        return run->code < 0 ? run->code : -run->code;
    }
    if (!users) return -NOT_OPEN;
    if (!file->live) {
        misuse++;
        return -NO_FILE;
    }
    if (size > most) size = most;
    ssize_t bytes = write ? pwrite(file->fd, base + memory_offset, size, file_offset)
                          : pread(file->fd, base + memory_offset, size, file_offset);
    if (bytes >= 0 && write) write_ops++, write_bytes += bytes;
    if (bytes >= 0 && !write) read_ops++, read_bytes += bytes;
    return bytes;
}

/* ---- The controls ---- */

/* Makes calls of a function fail: with a status; or with -1, and `detail` as errno. With KILLED, they end the process. 0 ends that. */
void stand_in_fail(const char *name, int code, int detail) {
    pthread_mutex_lock(&lock);
    function(name)->code = code;
    function(name)->detail = detail;
    pthread_mutex_unlock(&lock);
}

/* Transfers no more than so many bytes at a time. */
void stand_in_shorten(size_t bytes) {
    pthread_mutex_lock(&lock);
    most = bytes;
    pthread_mutex_unlock(&lock);
}

/* From now on transfers wait for stand_in_release. */
void stand_in_hold(void) {
    pthread_mutex_lock(&lock);
    holding = true;
    pthread_mutex_unlock(&lock);
}

void stand_in_release(void) {
    pthread_mutex_lock(&lock);
    holding = false;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Sleeps until so many transfers are held. */
void stand_in_wait_held(long count) {
    pthread_mutex_lock(&lock);
    while (waiting < count) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

/* Closes the driver, whoever has it open. */
void stand_in_close(void) {
    pthread_mutex_lock(&lock);
    users = 0;
    pthread_mutex_unlock(&lock);
}

void stand_in_version(int number) {
    pthread_mutex_lock(&lock);
    version = number;
    pthread_mutex_unlock(&lock);
}

static long live(const char *what) {
    long count = 0;
    for (int i = 0; i < MANY; i++) {
        if (!strcmp(what, "files")) count += files[i].live;
        if (!strcmp(what, "buffers")) count += buffers[i].base != NULL;
    }
    return count;
}

/* How many there are: "users" of the driver, "files", "buffers", transfers "held", cases of "misuse", or calls of the function of this name. */
long stand_in_count(const char *what) {
    pthread_mutex_lock(&lock);
    long count = !strcmp(what, "users")     ? users
                 : !strcmp(what, "held")    ? waiting
                 : !strcmp(what, "misuse")  ? misuse
                 : !strncmp(what, "cu", 2)  ? function(what)->calls
                                            : live(what);
    pthread_mutex_unlock(&lock);
    return count;
}

/* Faults from the environment, for programs that a test starts: STAND_IN_FAIL=cuFileDriverOpen=5001,cuFileRead=-1:5 */
__attribute__((constructor)) static void from_environment(void) {
    const char *list = getenv("STAND_IN_FAIL");
    char name[64];
    int code, detail, length;
    while (list && sscanf(list, "%63[^=]=%d%n", name, &code, &length) == 2) {
        list += length;
        detail = 0;
        if (*list == ':' && sscanf(list, ":%d%n", &detail, &length) == 1) list += length;
        if (*list == ',') list++;
        stand_in_fail(name, code, detail);
    }
}

/* ---- The driver ---- */

struct status cuFileDriverOpen(void) {
    CALL(false)
    users++;
    return leave(0);
}

struct status cuFileDriverClose_v2(void) {
    CALL(true)
    users--;
    if (!users && (live("files") || live("buffers"))) misuse++;
    return leave(0);
}

struct status cuFileDriverClose(void) {
    pthread_mutex_lock(&lock);
    enter(__func__, false);
    pthread_mutex_unlock(&lock);
    return cuFileDriverClose_v2();
}

long cuFileUseCount(void) { return users; }

struct status cuFileGetVersion(int *number) {
    CALL(false)
    *number = version;
    return leave(0);
}

struct properties { struct { unsigned major, minor; size_t poll, direct; unsigned status, control; } nvfs; unsigned rest[6]; };
static struct properties properties = {{2, 25, 4, 16384, 1 << 4, 1 << 1}, {1 << 1 | 1 << 2, 131072, 1024, 33554432, 128, 0}};

struct status cuFileDriverGetProperties(struct properties *place) {
    CALL(true)
    *place = properties;
    return leave(0);
}

struct status cuFileDriverSetPollMode(bool poll, size_t kib) {
    CALL(true)
    properties.nvfs.poll = kib;
    properties.nvfs.control = (properties.nvfs.control & ~1u) | poll;
    return leave(0);
}

struct status cuFileDriverSetMaxDirectIOSize(size_t kib) {
    CALL(true)
    properties.nvfs.direct = kib;
    return leave(0);
}

struct status cuFileDriverSetMaxCacheSize(size_t kib) {
    CALL(true)
    properties.rest[1] = kib;
    return leave(0);
}

struct status cuFileDriverSetMaxPinnedMemSize(size_t kib) {
    CALL(true)
    properties.rest[3] = kib;
    return leave(0);
}

struct status cuFileGetBARSizeInKB(int gpu, size_t *size) {
    CALL(true)
    if (gpu) return leave(INVALID);
    *size = 1 << 20;
    return leave(0);
}

/* ---- Registrations ---- */

struct status cuFileHandleRegister(void **handle, struct descriptor *descriptor) {
    CALL(true)
    if (descriptor->type != 1 || descriptor->operations || used_files == MANY) return leave(INVALID);
    for (int i = 0; i < used_files; i++)
        if (files[i].live && files[i].fd == descriptor->handle.fd) return leave(5028);
    /* It opens the file again by its name. Files in memory, which have none, are let through, since tests fill and seal them. */
    struct stat about;
    bool in_memory = fcntl(descriptor->handle.fd, F_GET_SEALS) >= 0;
    if (fcntl(descriptor->handle.fd, F_GETFL) & (O_TMPFILE & ~O_DIRECTORY)) return leave(BAD_FLAGS);
    if (fstat(descriptor->handle.fd, &about) || (!about.st_nlink && !in_memory)) return leave(NO_NAME);
    files[used_files] = (struct file){descriptor->handle.fd, true};
    *handle = &files[used_files++];
    return leave(0);
}

void cuFileHandleDeregister(void *handle) {
    pthread_mutex_lock(&lock);
    struct file *file = handle;
    /* The descriptor must still be open here. */
    if (!file->live || lseek(file->fd, 0, SEEK_CUR) < 0) misuse++;
    file->live = false;
    pthread_mutex_unlock(&lock);
}

struct status cuFileBufRegister(const void *base, size_t len, int flags) {
    CALL(true)
    if (!base || !len || flags) return leave(INVALID);
    struct buffer *place = NULL;
    for (int i = 0; i < MANY; i++) {
        if (buffers[i].base == base) return leave(TWICE);
        if (!buffers[i].base) place = &buffers[i];
    }
    *place = (struct buffer){base, len};
    return leave(0);
}

struct status cuFileBufDeregister(const void *base) {
    CALL(true)
    for (int i = 0; i < MANY; i++)
        if (base && buffers[i].base == base) {
            buffers[i].base = NULL;
            return leave(0);
        }
    misuse++;
    return leave(INVALID);
}

/* ---- Transfers ---- */

static ssize_t wait_and_transfer(const char *name, bool write, void *file, void *base, size_t size, off_t file_offset, off_t memory_offset) {
    pthread_mutex_lock(&lock);
    function(name)->calls++;
    waiting++;
    pthread_cond_broadcast(&changed);
    while (holding) pthread_cond_wait(&changed, &lock);
    waiting--;
    ssize_t bytes = transfer(name, write, file, base, size, file_offset, memory_offset);
    pthread_mutex_unlock(&lock);
    return bytes;
}

ssize_t cuFileRead(void *file, void *base, size_t size, off_t file_offset, off_t memory_offset) {
    return wait_and_transfer("cuFileRead", false, file, base, size, file_offset, memory_offset);
}

ssize_t cuFileWrite(void *file, const void *base, size_t size, off_t file_offset, off_t memory_offset) {
    return wait_and_transfer("cuFileWrite", true, file, (void *)base, size, file_offset, memory_offset);
}

/* ---- Parameters and statistics ---- */

#define PARAMETER(limit)                            \
    CALL(false)                                     \
    if (parameter >= (limit)) return leave(INVALID);
#define SET_PARAMETER(limit) PARAMETER(limit) if (users) return leave(ALREADY_OPEN);

struct status cuFileGetParameterSizeT(unsigned parameter, size_t *value) {
    PARAMETER(12)
    *value = numbers[parameter];
    return leave(0);
}

struct status cuFileGetParameterBool(unsigned parameter, bool *value) {
    PARAMETER(12)
    *value = switches[parameter];
    return leave(0);
}

struct status cuFileGetParameterString(unsigned parameter, char *text, int room) {
    PARAMETER(3)
    strncpy(text, texts[parameter], room);
    return leave(0);
}

struct status cuFileGetParameterMinMaxValue(unsigned parameter, size_t *least, size_t *largest) {
    PARAMETER(12)
    *least = 1;
    *largest = 256;
    return leave(0);
}

struct status cuFileSetParameterSizeT(unsigned parameter, size_t value) {
    SET_PARAMETER(12)
    numbers[parameter] = value;
    return leave(0);
}

struct status cuFileSetParameterBool(unsigned parameter, bool value) {
    SET_PARAMETER(12)
    switches[parameter] = value;
    return leave(0);
}

struct status cuFileSetParameterString(unsigned parameter, const char *text) {
    SET_PARAMETER(3)
    snprintf(texts[parameter], sizeof texts[parameter], "%s", text);
    return leave(0);
}

struct status cuFileSetStatsLevel(int number) {
    CALL(true)
    level = number;
    return leave(0);
}

struct status cuFileGetStatsLevel(int *number) {
    CALL(true)
    *number = level;
    return leave(0);
}

struct status cuFileStatsStart(void) {
    CALL(true)
    return leave(level ? 0 : INVALID);
}

struct status cuFileStatsStop(void) {
    CALL(true)
    return leave(0);
}

struct status cuFileStatsReset(void) {
    CALL(true)
    read_ops = write_ops = read_bytes = write_bytes = 0;
    return leave(0);
}

/* In words of 8 bytes: level 1 has 64 in cuFile 1.15, and 14 more in 1.20. */
static void count(uint64_t *words) {
    words[0] = read_ops;
    words[2] = write_ops;
    words[12] = read_bytes;
    words[13] = write_bytes;
    if (version > 1150) memset(words + 64, 0xff, 14 * sizeof *words);
}

struct status cuFileGetStatsL1(uint64_t *words) {
    CALL(true)
    if (level < 1) return leave(INVALID);
    count(words);
    return leave(0);
}

struct status cuFileGetStatsL2(uint64_t *words) {
    CALL(true)
    if (level < 2) return leave(INVALID);
    count(words);
    words[64] = read_ops;
    return leave(0);
}

struct status cuFileGetStatsL3(uint64_t *words) {
    CALL(true)
    if (level < 3) return leave(INVALID);
    count(words);
    *(uint32_t *)&words[128] = 1;
    return leave(0);
}
