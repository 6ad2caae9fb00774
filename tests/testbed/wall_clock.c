/*
 * Shifts the wall clock of a process that preloads this library, by the number of seconds in the first 8 bytes
 * (int64_t) of the file $WALL_CLOCK_SHIFT. A test may change the number at any time. Other clocks and all
 * timed waits are unchanged, as on a machine whose clock is set.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift_s;

__attribute__((constructor)) static void map_shift(void)
{
    const char *path = getenv("WALL_CLOCK_SHIFT");
    if (path == NULL)
        return; /* a child process that did not inherit the variable keeps the true time */
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        abort();
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        abort();
    shift_s = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, at);
    if (failed == 0 && shift_s != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += *shift_s;
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    at->tv_sec = precise.tv_sec;
    at->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0)
        return -1;
    if (at != NULL)
        *at = precise.tv_sec;
    return precise.tv_sec;
}
