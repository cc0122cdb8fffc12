/* Physical memory of the simulated GPUs: memfds, and the machine-wide account of them.
 *
 * A block of device memory is a memfd named "softgpu-<GPU>-<bytes>@<machine>", the last part being SOFTGPU_MACHINE: with it,
 * test runs side by side simulate machines of their own. A block lives while any handle, mapping or descriptor of any
 * process does: the kernel counts, so nothing leaks when a process is killed. The used memory of a GPU is the sum over the
 * distinct memfds found open or mapped in /proc; a process of another user, whose entries cannot be read, does not count. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "softgpu.h"

#define PREFIX "/memfd:softgpu-"
#define CACHE_NS 50000000u /* how long a scan of /proc is believed */

/* ---- descriptors of ours ---- */
#define MAX_FDS 65536
static _Atomic uint64_t owned[MAX_FDS / 64]; /* a bit per descriptor; atomic, because the child of fork may take no lock */

void sg_fd_own(int fd)
{
    if (fd >= 0 && fd < MAX_FDS)
        atomic_fetch_or(&owned[fd / 64], (uint64_t)1 << (fd % 64));
}

void sg_fd_disown(int fd)
{
    if (fd >= 0 && fd < MAX_FDS)
        atomic_fetch_and(&owned[fd / 64], ~((uint64_t)1 << (fd % 64)));
}

void sg_fd_close(int fd)
{
    if (fd < 0)
        return;
    sg_fd_disown(fd);
    close(fd);
}

void sg_fd_close_all(void)
{
    for (int i = 0; i < MAX_FDS / 64; i++) {
        uint64_t bits = atomic_exchange(&owned[i], 0);
        for (; bits; bits &= bits - 1)
            close(i * 64 + __builtin_ctzll(bits));
    }
}

/* ---- the account ---- */
static pthread_mutex_t account_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t account_used[SG_MAX_DEVICES]; /* by physical GPU; under account_lock, like the two below */
static uint64_t account_time;
static bool account_stale; /* this process freed memory since the scan */
struct seen {
    uint64_t *inodes; /* open addressing, 0 = free */
    size_t capacity, count;
    uint64_t used[SG_MAX_DEVICES];
};

static bool seen_add(struct seen *seen, uint64_t inode)
{
    if (seen->count * 2 >= seen->capacity) {
        size_t capacity = seen->capacity ? seen->capacity * 2 : 256;
        uint64_t *grown = calloc(capacity, sizeof(*grown));
        if (!grown)
            return false;
        for (size_t i = 0; i < seen->capacity; i++)
            if (seen->inodes[i]) {
                size_t at = seen->inodes[i] * 0x9E3779B97F4A7C15u >> 20;
                while (grown[at & (capacity - 1)])
                    at++;
                grown[at & (capacity - 1)] = seen->inodes[i];
            }
        free(seen->inodes);
        seen->inodes = grown;
        seen->capacity = capacity;
    }
    size_t at = inode * 0x9E3779B97F4A7C15u >> 20;
    while (seen->inodes[at & (seen->capacity - 1)]) {
        if (seen->inodes[at & (seen->capacity - 1)] == inode)
            return false;
        at++;
    }
    seen->inodes[at & (seen->capacity - 1)] = inode;
    seen->count++;
    return true;
}

/* "/memfd:softgpu-<GPU>-<bytes>@<machine>…" → GPU and size. Host memory ("softgpu-host") is nobody's. */
static bool parse_name(const char *path, int *physical, uint64_t *size, bool *ours)
{
    if (strncmp(path, PREFIX, sizeof(PREFIX) - 1))
        return false;
    char *end;
    const char *text = path + sizeof(PREFIX) - 1;
    if (!isdigit((unsigned char)*text))
        return false;
    *physical = (int)strtol(text, &end, 10);
    if (*end != '-' || *physical < 0 || *physical >= SG_MAX_DEVICES)
        return false;
    *size = strtoull(end + 1, &end, 10);
    *ours = *end == '@' && !strncmp(end + 1, sg_settings()->machine, strlen(sg_settings()->machine)) &&
            strchr(" \n", end[1 + strlen(sg_settings()->machine)]);
    return true;
}

static void count(struct seen *seen, const char *path, uint64_t inode)
{
    int physical;
    uint64_t size;
    bool ours;
    if (parse_name(path, &physical, &size, &ours) && ours && seen_add(seen, inode))
        seen->used[physical] += size;
}

static void scan_maps(struct seen *seen, const char *pid)
{
    char path[288];
    snprintf(path, sizeof(path), "/proc/%s/maps", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, file) > 0) {
        const char *name = strstr(line, PREFIX);
        unsigned long inode;
        if (name && sscanf(line, "%*s %*s %*s %*s %lu", &inode) == 1)
            count(seen, name, inode);
    }
    free(line);
    fclose(file);
}

static void scan_fds(struct seen *seen, const char *pid)
{
    char path[288], target[256];
    snprintf(path, sizeof(path), "/proc/%s/fd", pid);
    DIR *folder = opendir(path);
    if (!folder)
        return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        ssize_t length = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
        struct stat status;
        if (length < (ssize_t)sizeof(PREFIX) || strncmp(target, PREFIX, sizeof(PREFIX) - 1))
            continue;
        target[length] = 0;
        if (fstatat(dirfd(folder), entry->d_name, &status, 0) == 0)
            count(seen, target, status.st_ino);
    }
    closedir(folder);
}

/* Under account_lock. */
static void account_scan(void)
{
    struct seen seen = {0};
    uint64_t begun = sg_now_ns(); /* what others did while it went on may have been missed */
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && (entry = readdir(proc));)
        if (isdigit((unsigned char)entry->d_name[0])) {
            scan_maps(&seen, entry->d_name);
            scan_fds(&seen, entry->d_name);
        }
    if (proc)
        closedir(proc);
    free(seen.inodes);
    memcpy(account_used, seen.used, sizeof(account_used));
    account_time = begun;
    account_stale = false;
}

static uint64_t used_locked(int physical)
{
    if (sg_now_ns() - account_time > CACHE_NS)
        account_scan();
    return account_used[physical];
}

uint64_t sg_used(int device)
{
    int physical = sg_device(device)->physical;
    pthread_mutex_lock(&account_lock);
    if (account_stale)
        account_scan();
    uint64_t used = used_locked(physical);
    pthread_mutex_unlock(&account_lock);
    return used;
}

/* This process freed memory: what it freed need not be the last reference, so look again at the next question. An allocation
 * does not wait for that: too high a figure is looked into before it refuses anything. */
static void account_forget(void)
{
    pthread_mutex_lock(&account_lock);
    account_stale = true;
    pthread_mutex_unlock(&account_lock);
}

void sg_used_changed(int device, int64_t change)
{
    (void)device;
    (void)change;
    account_forget();
}

/* ---- memory ---- */

int sg_memfd(int device, size_t size, CUresult *error)
{
    char name[160];
    if (device < 0) {
        snprintf(name, sizeof(name), "softgpu-host-%zu", size);
    } else {
        int physical = sg_device(device)->physical;
        snprintf(name, sizeof(name), "softgpu-%d-%zu@%s", physical, size, sg_settings()->machine);
        uint64_t total = sg_settings()->memory;
        pthread_mutex_lock(&account_lock);
        uint64_t used = used_locked(physical);
        if (size > total || used > total - size) {
            account_scan(); /* another process may have freed some since */
            used = account_used[physical];
        }
        bool room = size <= total && used <= total - size;
        if (room)
            account_used[physical] += size;
        pthread_mutex_unlock(&account_lock);
        if (!room) {
            *error = CUDA_ERROR_OUT_OF_MEMORY;
            return -1;
        }
    }
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    /* A GPU's memory cannot be shortened either: whoever maps it, in whatever process, relies on that. */
    if (fd >= 0 &&
        (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))) {
        close(fd);
        fd = -1;
    }
    if (fd < 0) {
        sg_log("cannot make a memfd of %zu bytes: %s", size, strerror(errno));
        account_forget();
        *error = errno == EMFILE || errno == ENFILE ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_OUT_OF_MEMORY;
        return -1;
    }
    sg_fd_own(fd);
    return fd;
}

int sg_memfd_device(int fd)
{
    char path[288], target[256];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(path, target, sizeof(target) - 1);
    if (length <= 0)
        return -2;
    target[length] = 0;
    int physical;
    uint64_t size;
    if (!strncmp(target, PREFIX "host-", sizeof(PREFIX "host-") - 1))
        return -1;
    bool ours;
    if (!parse_name(target, &physical, &size, &ours))
        return -2;
    for (int i = 0; sg_device(i); i++)
        if (sg_device(i)->physical == physical)
            return i;
    return -2;
}

struct sg_physical *sg_physicals;

static struct sg_physical *physical_new(int fd, int device, size_t size)
{
    struct sg_physical *physical = calloc(1, sizeof(*physical));
    if (!physical || !sg_handle_add(physical, SG_PHYSICAL)) {
        free(physical);
        return NULL;
    }
    physical->references = 1;
    physical->handles = 1;
    physical->fd = fd;
    physical->device = device;
    physical->size = size;
    pthread_mutex_lock(&sg_map_lock);
    physical->next = sg_physicals;
    if (sg_physicals)
        sg_physicals->previous = physical;
    sg_physicals = physical;
    pthread_mutex_unlock(&sg_map_lock);
    return physical;
}

CUresult sg_physical_create(int device, size_t size, struct sg_physical **out)
{
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    int fd = sg_memfd(device, size, &error);
    if (fd < 0)
        return error;
    *out = physical_new(fd, device, size);
    if (*out)
        return CUDA_SUCCESS;
    sg_fd_close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sg_physical_wrap(int fd, struct sg_physical **out)
{
    struct stat status;
    int device = sg_memfd_device(fd);
    if (device < -1 || fstat(fd, &status) || status.st_size <= 0) {
        sg_fd_close(fd);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *out = physical_new(fd, device, (size_t)status.st_size);
    if (!*out) {
        sg_fd_close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    (*out)->imported = true;
    return CUDA_SUCCESS;
}

void sg_physical_unreference(struct sg_physical *physical)
{
    if (atomic_fetch_sub(&physical->references, 1) != 1)
        return;
    pthread_mutex_lock(&sg_map_lock);
    if (physical->previous)
        physical->previous->next = physical->next;
    else
        sg_physicals = physical->next;
    if (physical->next)
        physical->next->previous = physical->previous;
    pthread_mutex_unlock(&sg_map_lock);
    sg_fd_close(physical->fd);
    account_forget();
    free(physical);
}

void *sg_reserve(size_t size, size_t alignment, uint64_t hint)
{
    if (alignment < SG_GRANULARITY)
        alignment = SG_GRANULARITY;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint && hint % alignment == 0) {
        void *at = mmap((void *)(uintptr_t)hint, size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (at == (void *)(uintptr_t)hint)
            return at;
        if (at != MAP_FAILED)
            munmap(at, size); /* a kernel before 4.17 takes the address for a wish */
    }
    if (size + alignment < size)
        return NULL;
    char *wide = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
    if (wide == MAP_FAILED)
        return NULL;
    uintptr_t begin = ((uintptr_t)wide + alignment - 1) / alignment * alignment;
    if (begin > (uintptr_t)wide)
        munmap(wide, begin - (uintptr_t)wide);
    munmap((void *)(begin + size), (uintptr_t)wide + alignment - begin);
    return (void *)begin;
}
