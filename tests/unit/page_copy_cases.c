/*
 * gpu_engine/page_copy.c and page_find.c on stopped children of this program. The kernel is slow, refuses or fails where a
 * case wants it to: three calls come here first (the linker's --wrap).
 */
#include "page_copy.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
#define HELD (40 * MIB)
#define ALONE 5000ul /* pages with a hole behind each: more runs than one block of them holds */
#define RUNS 20000l
#define NEVER (1l << 40)

/* How many calls there have been, of which some were let through, and from which on they wait, or fail. */
static _Atomic long scans, scans_wait = NEVER, scans_fail = NEVER;
static _Atomic long reads, reads_fail = NEVER, read_bytes;
static _Atomic long threads, threads_fail = NEVER;
static _Atomic int read_error;
static _Atomic bool slow;

static void nap(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
}

static void wait_for(_Atomic long *count, long least)
{
	for (int i = 0; atomic_load(count) < least; i++) {
		assert(i < 20000);
		nap();
	}
}

int __real_ioctl(int descriptor, unsigned long request, void *argument);
int __wrap_ioctl(int descriptor, unsigned long request, void *argument);
int __wrap_ioctl(int descriptor, unsigned long request, void *argument)
{
	long number = atomic_fetch_add(&scans, 1);

	while (number >= atomic_load(&scans_wait))
		nap();
	if (number >= atomic_load(&scans_fail)) {
		errno = ENOMEM;
		return -1;
	}
	return __real_ioctl(descriptor, request, argument);
}

ssize_t __real_process_vm_readv(pid_t pid, const struct iovec *to, unsigned long tos, const struct iovec *from,
				unsigned long froms, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const struct iovec *to, unsigned long tos, const struct iovec *from,
				unsigned long froms, unsigned long flags);
ssize_t __wrap_process_vm_readv(pid_t pid, const struct iovec *to, unsigned long tos, const struct iovec *from,
				unsigned long froms, unsigned long flags)
{
	ssize_t read;

	if (atomic_fetch_add(&reads, 1) >= atomic_load(&reads_fail)) {
		errno = atomic_load(&read_error);
		return -1;
	}
	if (atomic_load(&slow))
		nap();
	read = __real_process_vm_readv(pid, to, tos, from, froms, flags);
	if (read > 0)
		atomic_fetch_add(&read_bytes, read);
	return read;
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *of);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *of);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *of)
{
	if (atomic_fetch_add(&threads, 1) >= atomic_load(&threads_fail))
		return EAGAIN;
	return __real_pthread_create(thread, attributes, work, of);
}

static void fill(unsigned long size, unsigned long step)
{
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	assert(memory != MAP_FAILED && !madvise(memory, size, MADV_NOHUGEPAGE));
	for (unsigned long at = 0; at < size; at += step)
		memset(memory + at, 1 + (at / PAGE) % 251, PAGE);
}

static pid_t start_task(void)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		fill(HELD, PAGE);
		fill(ALONE * 2 * PAGE, 2 * PAGE);
		raise(SIGSTOP);
		_exit(1);
	}
	assert(pid > 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
	return pid;
}

static void end_task(pid_t pid)
{
	assert(!kill(pid, SIGKILL) && waitpid(pid, NULL, 0) == pid);
}

/* A file for its pages, of which so much is there and mapped before it is frozen. */
struct file {
	int descriptor;
	char *place;
	uint64_t mapped;
};

static struct file make_file(uint64_t size)
{
	struct file file = { .descriptor = memfd_create("pages", MFD_CLOEXEC), .mapped = size };

	assert(file.descriptor >= 0 && !ftruncate(file.descriptor, size));
	if (size) {
		file.place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor, 0);
		assert(file.place != MAP_FAILED);
	}
	return file;
}

static void remove_file(struct file *file)
{
	if (file->place)
		munmap(file->place, file->mapped);
	close(file->descriptor);
}

static struct phos_page_pool *open_pool(long count)
{
	struct phos_page_pool *pool;

	assert(!phos_page_pool_open(count, &pool));
	return pool;
}

static struct phos_page_copy *begin(struct phos_page_pool *pool, pid_t pid, const struct file *file)
{
	struct phos_page_copy *copy;

	assert(!phos_page_copy_begin(pool, pid, file->descriptor, file->place, file->mapped, &copy));
	return copy;
}

/* All that was found is in the file as it is in the task: how much. */
static uint64_t check(struct phos_page_copy *copy, pid_t pid, const struct file *file)
{
	static struct phos_pages runs[RUNS];
	static char there[MIB], here[MIB];
	long count = phos_page_copy_found(copy, runs, RUNS);
	uint64_t failed_at, whole = 0, offset = 0;
	char path[64];
	int memory;

	assert(count > (long)ALONE && count < RUNS && phos_page_copy_found(copy, runs, 1) == count);
	assert(!phos_page_copy_wait(copy, &failed_at) && !phos_page_copy_wait(copy, &failed_at));
	snprintf(path, sizeof(path), "/proc/%d/mem", pid);
	memory = open(path, O_RDONLY);
	assert(memory >= 0);
	for (long i = 0; i < count; i++) {
		const struct phos_pages *run = &runs[i];

		assert(run->offset == offset && run->size && !(run->size % PAGE));
		assert(!i || run[-1].address + run[-1].size < run->address || run[-1].copied != run->copied);
		offset += run->size;
		for (uint64_t at = 0; run->copied && at < run->size; at += MIB) {
			uint64_t size = run->size - at < MIB ? run->size - at : MIB;

			assert(pread(memory, there, size, run->address + at) == (ssize_t)size);
			assert(pread(file->descriptor, here, size, run->offset + at) == (ssize_t)size);
			assert(!memcmp(there, here, size));
			whole += size;
		}
	}
	close(memory);
	assert(whole >= HELD + ALONE * PAGE);
	return whole;
}

static void copy_whole(long count, uint64_t prepared)
{
	struct phos_page_pool *pool = open_pool(count);
	pid_t pid = start_task();
	struct file file = make_file(prepared);
	struct phos_page_copy *copy = begin(pool, pid, &file);

	check(copy, pid, &file);
	phos_page_copy_drop(copy);
	phos_page_pool_close(pool);
	remove_file(&file);
	end_task(pid);
}

/* What has been found is copied while the rest is looked for; if there is a place for it. */
static void copy_early(bool prepared)
{
	struct phos_page_pool *pool = open_pool(2);
	pid_t pid = start_task();
	struct file file = make_file(prepared ? 256 * MIB : 0);
	struct phos_page_copy *copy;
	struct phos_pages run;
	uint64_t failed_at;

	/* Each call finds 16 MiB at most. */
	copy = begin(pool, pid, &file);
	phos_page_copy_wait(copy, &failed_at);
	phos_page_copy_drop(copy);
	scans_wait = atomic_load(&scans) - 1; /* but for the last */
	scans = 0;
	read_bytes = 0;
	copy = begin(pool, pid, &file);
	wait_for(&scans, scans_wait + 1);
	if (prepared)
		wait_for(&read_bytes, HELD);
	for (int i = 0; !prepared && i < 100; i++)
		nap();
	assert(prepared || atomic_load(&read_bytes) < (long)PAGE); /* whether it can be read */
	scans_wait = NEVER;
	assert(phos_page_copy_found(copy, &run, 1) > 1);
	check(copy, pid, &file);
	phos_page_copy_drop(copy);
	phos_page_pool_close(pool);
	remove_file(&file);
	end_task(pid);
}

/* The search fails after `after` calls, or nothing can be read: the pages are another's business, and that is no failure. */
static void fail_to_find(long after, int error)
{
	struct phos_page_pool *pool = open_pool(3);
	pid_t pid = start_task();
	struct file file = make_file(256 * MIB);
	struct phos_page_copy *copy;
	struct phos_pages run;
	uint64_t failed_at;

	if (error == ENOMEM)
		scans_fail = after;
	else
		reads_fail = 0;
	read_error = error;
	copy = begin(pool, pid, &file);
	assert(phos_page_copy_found(copy, &run, 1) == -error);
	assert(!phos_page_copy_wait(copy, &failed_at));
	assert(error == ENOMEM || reads == 1);
	phos_page_copy_drop(copy);
	phos_page_pool_close(pool);
	remove_file(&file);
	end_task(pid);
}

static void fail_to_copy(void)
{
	struct phos_page_pool *pool = open_pool(3);
	pid_t pid = start_task();
	struct file file = make_file(256 * MIB);
	struct phos_page_copy *copy;
	struct phos_pages run;
	uint64_t failed_at = 0;

	reads_fail = 20;
	read_error = ESRCH;
	copy = begin(pool, pid, &file);
	assert(phos_page_copy_found(copy, &run, 1) > (long)ALONE);
	assert(phos_page_copy_wait(copy, &failed_at) == ESRCH && failed_at && !(failed_at % PAGE));
	assert(reads < 20 + 2 * 3); /* nobody begins with more */
	assert(phos_page_copy_wait(copy, &failed_at) == ESRCH);
	phos_page_copy_drop(copy);
	phos_page_pool_close(pool);
	remove_file(&file);
	end_task(pid);
}

/* It is no longer wanted: what is under way ends, and no more is begun. */
static void drop_while_copied(void)
{
	struct phos_page_pool *pool = open_pool(2);
	pid_t pid = start_task();
	struct file file = make_file(256 * MIB);
	struct phos_page_copy *copy;
	long before;

	slow = true;
	copy = begin(pool, pid, &file);
	wait_for(&reads, 8);
	before = reads;
	phos_page_copy_drop(copy);
	assert(atomic_load(&reads) <= before + 2 * 256 && atomic_load(&read_bytes) < (long)HELD);
	before = reads;
	for (int i = 0; i < 20; i++)
		nap();
	assert(atomic_load(&reads) == before);
	slow = false;
	copy = begin(pool, pid, &file); /* the pool is as good as before */
	check(copy, pid, &file);
	phos_page_copy_drop(copy);
	phos_page_pool_close(pool);
	remove_file(&file);
	end_task(pid);
}

static void *let_scan(void *unused)
{
	for (int i = 0; i < 50; i++)
		nap();
	scans_wait = NEVER;
	return unused;
}

static void drop_while_searched(void)
{
	struct phos_page_pool *pool = open_pool(2);
	pid_t pid = start_task();
	struct file file = make_file(256 * MIB);
	struct phos_page_copy *copy = begin(pool, pid, &file);
	pthread_t thread;
	uint64_t failed_at;
	long all;

	phos_page_copy_wait(copy, &failed_at);
	phos_page_copy_drop(copy);
	all = scans;
	for (long at = 1; at < all; at += all / 8) { /* wherever it stands */
		scans = 0;
		scans_wait = at;
		copy = begin(pool, pid, &file);
		wait_for(&scans, at + 1);
		assert(!__real_pthread_create(&thread, NULL, let_scan, NULL));
		phos_page_copy_drop(copy);
		assert(!pthread_join(thread, NULL));
		assert(scans <= all);
	}
	phos_page_pool_close(pool);
	remove_file(&file);
	end_task(pid);
}

static void too_few_threads(void)
{
	struct phos_page_pool *pool = NULL;

	threads_fail = 0;
	assert(phos_page_pool_open(4, &pool) == -EAGAIN && !pool && threads == 1);
	threads = 0;
	threads_fail = 1;
	copy_whole(4, 256 * MIB);
	assert(threads == 2);
}

#define TASKS 6

static void several_tasks(void)
{
	struct phos_page_pool *pool;
	struct phos_page_copy *copies[TASKS];
	struct file files[TASKS];
	pid_t pids[TASKS];

	for (int i = 0; i < TASKS; i++)
		pids[i] = start_task();
	pool = open_pool(4);
	for (int i = 0; i < TASKS; i++) {
		files[i] = make_file(i % 2 ? 256 * MIB : 0);
		copies[i] = begin(pool, pids[i], &files[i]);
	}
	phos_page_copy_drop(copies[2]);
	for (int i = 0; i < TASKS; i++)
		if (i != 2)
			check(copies[i], pids[i], &files[i]);
	for (int i = 0; i < TASKS; i++) {
		if (i != 2)
			phos_page_copy_drop(copies[i]);
		remove_file(&files[i]);
		end_task(pids[i]);
	}
	phos_page_pool_close(pool);
}

static void ended_task(void)
{
	struct phos_page_pool *pool = open_pool(2);
	pid_t pid = start_task();
	struct file file = make_file(0);
	struct phos_page_copy *copy = NULL;
	int error;

	end_task(pid);
	error = phos_page_copy_begin(pool, pid, file.descriptor, file.place, file.mapped, &copy);
	assert(error == -ENOENT && !copy);
	phos_page_pool_close(pool);
	remove_file(&file);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";

	if (!strcmp(name, "whole"))
		copy_whole(8, 256 * MIB);
	else if (!strcmp(name, "unprepared"))
		copy_whole(8, 0);
	else if (!strcmp(name, "grown"))
		copy_whole(8, 16 * MIB);
	else if (!strcmp(name, "early"))
		copy_early(true);
	else if (!strcmp(name, "not-early"))
		copy_early(false);
	else if (!strcmp(name, "search-fails"))
		fail_to_find(1, ENOMEM);
	else if (!strcmp(name, "search-fails-later"))
		fail_to_find(6, ENOMEM);
	else if (!strcmp(name, "unreadable"))
		fail_to_find(0, EPERM);
	else if (!strcmp(name, "copy-fails"))
		fail_to_copy();
	else if (!strcmp(name, "dropped"))
		drop_while_copied();
	else if (!strcmp(name, "dropped-while-searched"))
		drop_while_searched();
	else if (!strcmp(name, "too-few-threads"))
		too_few_threads();
	else if (!strcmp(name, "several"))
		several_tasks();
	else if (!strcmp(name, "ended"))
		ended_task();
	else
		return 2;
	puts("ok");
	return 0;
}
