/* A slow disk for the processes that preload it: fsync and fdatasync end when a flush of SLOW_DISK_US microseconds has.
   The disk does one flush at a time; every flush that is asked for while one runs shares the next. Processes that map
   the same SLOW_DISK_FILE (8 bytes, made by who starts them) share the disk. Built by bench_ledger.py. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int (*sync_call)(int);

static _Atomic int64_t *planned; /* when the flush that was planned last begins, in nanoseconds */
static int64_t flush;            /* how long one lasts */
static sync_call real_fsync, real_fdatasync;

__attribute__((constructor)) static void open_disk(void)
{
    const char *file = getenv("SLOW_DISK_FILE"), *microseconds = getenv("SLOW_DISK_US");

    real_fsync = (sync_call)dlsym(RTLD_NEXT, "fsync");
    real_fdatasync = (sync_call)dlsym(RTLD_NEXT, "fdatasync");
    flush = microseconds ? atoll(microseconds) * 1000 : 0;
    int there = file ? open(file, O_RDWR) : -1;
    if (there < 0)
        return;
    void *page = mmap(NULL, sizeof *planned, PROT_READ | PROT_WRITE, MAP_SHARED, there, 0);
    planned = page == MAP_FAILED ? NULL : page;
    close(there);
}

static int64_t flush_for(int64_t asked)
{
    int64_t last = atomic_load(planned);

    while (last <= asked) { /* it runs or is over: plan the next one, unless another process is faster */
        int64_t next = last + flush > asked ? last + flush : asked;
        if (atomic_compare_exchange_weak(planned, &last, next))
            return next;
    }
    return last;
}

static int wait_for_disk(int result)
{
    struct timespec time;

    if (!planned)
        return result;
    clock_gettime(CLOCK_MONOTONIC, &time);
    int64_t end = flush_for(time.tv_sec * 1000000000LL + time.tv_nsec) + flush;
    time.tv_sec = end / 1000000000LL;
    time.tv_nsec = end % 1000000000LL;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL))
        ;
    return result;
}

int fsync(int file) { return wait_for_disk(real_fsync(file)); }

int fdatasync(int file) { return wait_for_disk(real_fdatasync(file)); }
