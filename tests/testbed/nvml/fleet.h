/* The parsed configuration file; see standin.c for its directives. */
#ifndef FLEET_H
#define FLEET_H
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15, UNKNOWN = 999 };
enum { GPUS = 32, LINKS = 36, PROCESSES = 64, RULES = 128, SLICES = 8, XIDS = 16384, NAMES = 64 };
typedef unsigned long long u64;
typedef void *handle;

struct process { int kind, slice; unsigned pid; long mib; }; /* kind: 0 compute, 1 graphics, 2 mps; slice: -1 none */
struct slice { char uuid[96], name[96]; u64 mib, used_mib; unsigned gpu_slices, compute_slices; };
struct gpu {
    char uuid[96], name[96], pci[32];
    u64 memory_mib, used_mib, energy_mj;
    unsigned util, util_mem, power_mw, limit_mw, temperature, sm, mem_clock, fan, minor, remap_failed, remap_pending, retiring, recovery, events, cc;
    int numa, mig, lost, link[LINKS]; /* link: 0 down, -1 switch, J + 1 */
    int processes, slices;
    struct process process[PROCESSES];
    struct slice slice[SLICES];
};
struct rule { char function[64]; int code, gpu; double seconds; };
struct fleet {
    int gpus, rules, xids, names, topology, cuda;
    long cost_ns;
    char driver[80], print[96];
    struct gpu gpu[GPUS];
    struct rule rule[RULES];
    struct { int gpu; u64 type, data; unsigned gi, ci; } xid[XIDS];
    struct { unsigned pid; char name[256]; } name[NAMES];
};

/* Two, used alternately: a thread that reads one while the file is parsed into the other sees complete values. */
static struct fleet fleets[2], *current = fleets;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int delivered;
static u64 registered[GPUS]; /* the types of events */
static int undefined; /* set by an UNKNOWN error: the event set can then only be freed */

static void decoded(char *to, const char *from, size_t size) {
    size_t n = 0;
    unsigned byte;
    while (*from && *from != '\n' && n + 1 < size) {
        if (from[0] == '\\' && from[1] == 'x' && sscanf(from + 2, "%2x", &byte) == 1) {
            to[n++] = (char)byte;
            from += 4;
        } else {
            to[n++] = *from++;
        }
    }
    to[n] = 0;
}

static void plausible(struct gpu *gpu, int i) {
    memset(gpu, 0, sizeof *gpu);
    snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-00000000-0000-4000-8000-%012d", i);
    snprintf(gpu->name, sizeof gpu->name, "NVIDIA H100 80GB HBM3");
    snprintf(gpu->pci, sizeof gpu->pci, "00000000:%02X:00.0", 0x19 + 8 * i);
    gpu->memory_mib = 81559; gpu->used_mib = 1024; gpu->util = 37; gpu->util_mem = 12;
    gpu->power_mw = 123456; gpu->limit_mw = 700000; gpu->temperature = 41; gpu->sm = 1980; gpu->mem_clock = 2619;
    gpu->fan = 30; gpu->energy_mj = 987654321; gpu->minor = i; gpu->numa = i / 4; gpu->cc = 90; gpu->events = 0xff9f;
}

static void set(struct gpu *gpu, const char *key, const char *value) {
    struct { const char *key; unsigned *at; } numbers[] = {
        {"util", &gpu->util}, {"util_mem", &gpu->util_mem}, {"power_mw", &gpu->power_mw},
        {"limit_mw", &gpu->limit_mw}, {"temperature", &gpu->temperature}, {"sm", &gpu->sm},
        {"mem_clock", &gpu->mem_clock}, {"fan", &gpu->fan}, {"minor", &gpu->minor},
        {"numa", (unsigned *)&gpu->numa}, {"mig", (unsigned *)&gpu->mig}, {"cc", &gpu->cc},
        {"remap_failed", &gpu->remap_failed}, {"remap_pending", &gpu->remap_pending},
        {"retiring", &gpu->retiring}, {"events", &gpu->events}, {"recovery", &gpu->recovery}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(key, numbers[i].key)) *numbers[i].at = (unsigned)atoi(value);
    if (!strcmp(key, "memory_mib")) gpu->memory_mib = strtoull(value, 0, 10);
    if (!strcmp(key, "used_mib")) gpu->used_mib = strtoull(value, 0, 10);
    if (!strcmp(key, "energy_mj")) gpu->energy_mj = strtoull(value, 0, 10);
    if (!strcmp(key, "uuid")) decoded(gpu->uuid, value, sizeof gpu->uuid);
    if (!strcmp(key, "name")) decoded(gpu->name, value, sizeof gpu->name);
    if (!strcmp(key, "pci")) decoded(gpu->pci, value, sizeof gpu->pci);
}

static int kind_of(const char *word) {
    return !strcmp(word, "graphics") ? 1 : !strcmp(word, "mps") ? 2 : 0;
}

static void announce(struct fleet *f, int gpu, u64 type, u64 data, unsigned gi, unsigned ci, int times) {
    while (times-- > 0 && f->xids < XIDS) {
        f->xid[f->xids].gpu = gpu;
        f->xid[f->xids].type = type;
        f->xid[f->xids].data = data;
        f->xid[f->xids].gi = gi;
        f->xid[f->xids++].ci = ci;
    }
}

static void directive(struct fleet *f, const char *line) {
    char word[96], other[96];
    int i, n, at = 0;
    unsigned gi = ~0u, ci = ~0u;
    long number;
    double seconds;
    struct rule rule = {.gpu = -1};
    if (sscanf(line, "gpus %d", &n) == 1)
        for (f->gpus = n, i = 0; i < n; i++) plausible(&f->gpu[i], i);
    else if (sscanf(line, "set %d %95s %n", &i, word, &at) == 2)
        set(&f->gpu[i], word, line + at);
    else if (sscanf(line, "process %d %95s %d %ld", &i, word, &n, &number) == 4) {
        struct gpu *gpu = &f->gpu[i];
        gpu->process[gpu->processes++] = (struct process){kind_of(word), -1, (unsigned)n, number};
    } else if (sscanf(line, "slice_process %d %d %d %ld", &i, &at, &n, &number) == 4) {
        struct gpu *gpu = &f->gpu[i];
        gpu->process[gpu->processes++] = (struct process){0, at, (unsigned)n, number};
    } else if (sscanf(line, "slice_used %d %d %ld", &i, &n, &number) == 3) {
        f->gpu[i].slice[n].used_mib = (u64)number;
    } else if (sscanf(line, "slice_parts %d %d %d %ld", &i, &n, &at, &number) == 4) {
        f->gpu[i].slice[n].gpu_slices = (unsigned)at;
        f->gpu[i].slice[n].compute_slices = (unsigned)number;
    } else if (sscanf(line, "process_name %d %n", &n, &at) == 1) {
        f->name[f->names].pid = (unsigned)n;
        decoded(f->name[f->names++].name, line + at, 256);
    } else if (sscanf(line, "slice %d %95s %ld %n", &i, word, &number, &at) == 3) {
        struct slice *slice = &f->gpu[i].slice[f->gpu[i].slices++];
        strcpy(slice->uuid, word);
        slice->mib = (u64)number;
        decoded(slice->name, line + at, sizeof slice->name);
    } else if (sscanf(line, "nvlink %d %d %95s", &i, &n, other) == 3)
        f->gpu[i].link[n] = strcmp(other, "switch") ? atoi(other) + 1 : -1;
    else if ((at = sscanf(line, "xid %d %ld %u %u", &i, &number, &gi, &ci)) >= 2) {
        announce(f, i, 8, (u64)number, gi, ci, 1);
    } else if (sscanf(line, "xids %d %ld %d", &i, &number, &n) == 3) {
        announce(f, i, 8, (u64)number, gi, ci, n);
    } else if (sscanf(line, "event %d %d %ld", &i, &n, &number) == 3) {
        announce(f, i, (u64)n, (u64)number, gi, ci, 1);
    } else if (sscanf(line, "error %63s %d %d", rule.function, &rule.code, &rule.gpu) >= 2)
        f->rule[f->rules++] = rule;
    else if (sscanf(line, "hang %63s %lf %d", rule.function, &seconds, &rule.gpu) >= 2) {
        rule.seconds = seconds;
        f->rule[f->rules++] = rule;
    } else if (sscanf(line, "lost %d", &i) == 1)
        f->gpu[i].lost = 1;
    else if (sscanf(line, "driver %79s", word) == 1)
        strcpy(f->driver, word);
    else if (!strncmp(line, "print ", 6))
        decoded(f->print, line + 6, sizeof f->print);
    else if (sscanf(line, "topology %d", &f->topology) != 1 && sscanf(line, "cuda %d", &f->cuda) != 1)
        sscanf(line, "cost_ns %ld", &f->cost_ns);
}

static void reload(const char *path) {
    struct fleet *next = current == fleets ? fleets + 1 : fleets;
    char line[512];
    FILE *file = fopen(path, "r");
    if (!file) return;
    memset(next, 0, sizeof *next);
    strcpy(next->driver, "580.95.05");
    next->cuda = 13000;
    next->topology = 40;
    while (fgets(line, sizeof line, file)) directive(next, line);
    fclose(file);
    current = next;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void refresh(void) {
    static struct stat loaded;
    struct stat file;
    const char *path = getenv("NVIDIA_NVML_STANDIN");
    if (!path || stat(path, &file)) return;
    if (file.st_ino == loaded.st_ino && file.st_size == loaded.st_size &&
        file.st_mtim.tv_nsec == loaded.st_mtim.tv_nsec && file.st_mtim.tv_sec == loaded.st_mtim.tv_sec)
        return;
    loaded = file;
    reload(path);
}

#endif
