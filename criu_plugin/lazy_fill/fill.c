/* A process's lazy pages, brought with several threads, straight from the image's file in memory. */
#include "lazy_fill.h"
#include "ranges.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif

#define PIECE ((uint64_t)1 << 20) /* copied by one call: who waits for a page of it waits for no more */
#define MOST_THREADS 8

/* By the system call: libc's name is ours (interpose.c). */
static int uffd_ioctl(int uffd, unsigned long request, void *argument)
{
	return (int)syscall(SYS_ioctl, uffd, request, argument);
}

__attribute__((visibility("default"))) int phos_lazy_copy(int uffd, uint64_t to, const void *from, uint64_t size, int64_t *copied)
{
	struct uffdio_range all = { .start = to, .len = size };
	bool there = false;
	uint64_t done = 0;
	int error = 0;

	while (done < size && !error) {
		struct uffdio_copy copy = { .dst = to + done, .src = (uintptr_t)from + done, .len = size - done };

		if (!uffd_ioctl(uffd, UFFDIO_COPY, &copy)) {
			done = size;
		} else if (copy.copy > 0) {
			done += (uint64_t)copy.copy;
		} else if (errno == EEXIST) {
			there = true;
			done += PAGE;
		} else {
			error = errno;
		}
	}
	if (there) /* who has asked for one of those is not forgotten */
		uffd_ioctl(uffd, UFFDIO_WAKE, &all);
	*copied = done || !error ? (int64_t)done : -error;
	errno = error;
	return error ? -1 : 0;
}

/* ---- the image ---- */

/* The folder that CRIU takes the image from, exported to its plugins (criu/plugin.c). Weak, as in interpose.c. */
extern int criu_get_image_dir(void) __attribute__((weak));

/* Opens a file of the image; -1: it cannot be, or is empty. */
static int open_file(int folder, const char *name, size_t *size)
{
	int file = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	struct stat status;

	if (file >= 0 && (fstat(file, &status) || !S_ISREG(status.st_mode) || status.st_size <= 0)) {
		close(file);
		return -1;
	}
	*size = file < 0 ? 0 : (size_t)status.st_size;
	return file;
}

/* Not mapped: whoever cuts the file off now would end this process. The caller frees it; NULL: it cannot be read. */
static void *read_file(int folder, const char *name, size_t *size)
{
	int file = open_file(folder, name, size);
	unsigned char *content = file < 0 ? NULL : malloc(*size);
	size_t done = 0;

	while (content && done < *size) {
		ssize_t count = pread(file, content + done, *size - done, (off_t)done);

		if (count <= 0) {
			free(content);
			content = NULL;
		} else {
			done += (size_t)count;
		}
	}
	if (file >= 0)
		close(file);
	return content;
}

/* Only the kernel reads what is mapped here: of a file that is cut off it says EFAULT. NULL: it does not lie in memory. */
static const unsigned char *map_pages(int folder, const char *name, size_t *size)
{
	int file = open_file(folder, name, size);
	void *mapped = MAP_FAILED;
	struct statfs mount;

	if (file >= 0 && !fstatfs(file, &mount) && mount.f_type == TMPFS_MAGIC)
		mapped = mmap(NULL, *size, PROT_READ, MAP_SHARED, file, 0);
	if (file >= 0)
		close(file);
	return mapped == MAP_FAILED ? NULL : mapped;
}

/* ---- the threads ---- */

struct fill {
	int uffd, images; /* the folder of the image */
	const unsigned char *pages;
	size_t pages_size;
	const struct phos_lazy_run *runs;
	size_t count;
	pthread_mutex_t lock; /* guards next_run, next_byte, filled and room */
	size_t next_run;
	uint64_t next_byte; /* of that run */
	atomic_bool stopped;
	struct phos_lazy_filled *filled;
	size_t room; /* for pieces of it */
};

static bool take(struct fill *fill, struct phos_lazy_run *piece)
{
	bool taken = false;

	pthread_mutex_lock(&fill->lock);
	if (fill->next_run < fill->count && !atomic_load(&fill->stopped)) {
		const struct phos_lazy_run *run = &fill->runs[fill->next_run];
		uint64_t left = run->size - fill->next_byte;

		*piece = (struct phos_lazy_run){ run->address + fill->next_byte, run->offset + fill->next_byte,
						 left < PIECE ? left : PIECE };
		fill->next_byte += piece->size;
		if (fill->next_byte == run->size) {
			fill->next_run++;
			fill->next_byte = 0;
		}
		taken = true;
	}
	pthread_mutex_unlock(&fill->lock);
	return taken;
}

static void note(struct fill *fill, uint64_t address, uint64_t size)
{
	struct phos_lazy_filled *filled = fill->filled;

	pthread_mutex_lock(&fill->lock);
	filled->bytes += size;
	if (filled->count == fill->room) {
		size_t more = fill->room ? 2 * fill->room : 1024;
		void *larger = realloc(filled->pieces, more * sizeof(*filled->pieces));

		if (larger) {
			filled->pieces = larger;
			fill->room = more;
		}
	}
	if (filled->count < fill->room) /* else CRIU will find that it is there */
		filled->pieces[filled->count++] = (struct phos_lazy_piece){ .address = address, .size = size };
	pthread_mutex_unlock(&fill->lock);
}

static void failed(struct fill *fill, int error)
{
	pthread_mutex_lock(&fill->lock);
	if (!fill->filled->error)
		fill->filled->error = error;
	pthread_mutex_unlock(&fill->lock);
}

/* Brings what can be brought of a range; whether more may be brought after that. */
static bool bring(struct fill *fill, uint64_t to, const unsigned char *from, uint64_t size)
{
	int64_t copied = 0;
	uint64_t done, half;

	if (!phos_lazy_copy(fill->uffd, to, from, size, &copied)) {
		note(fill, to, size);
		return true;
	}
	/* Not ENOENT, but EAGAIN above all: the process has changed its memory, and CRIU has to hear of that first. */
	if (errno != ENOENT) {
		failed(fill, errno);
		return false;
	}
	/* That memory is not (yet) CRIU's to bring, or part of it is another mapping than the rest. */
	done = copied > 0 ? (uint64_t)copied : 0;
	if (done)
		note(fill, to, done);
	if (size - done <= PAGE)
		return true;
	half = (size - done) / 2 / PAGE * PAGE;
	return bring(fill, to + done, from + done, half) && bring(fill, to + done + half, from + done + half, size - done - half);
}

static void *work(void *argument)
{
	struct fill *fill = argument;
	struct phos_lazy_run piece;

	while (take(fill, &piece)) {
		const unsigned char *from = fill->pages + piece.offset;

		if (piece.offset > fill->pages_size || piece.size > fill->pages_size - piece.offset) {
			atomic_store(&fill->stopped, true); /* CRIU will say so */
			break;
		}
		/* A page of the file that is not mapped here would be copied twice. */
		madvise((void *)from, piece.size, MADV_POPULATE_READ);
		if (!bring(fill, piece.address, from, piece.size))
			atomic_store(&fill->stopped, true);
	}
	return NULL;
}

static int by_address(const void *one, const void *other)
{
	uint64_t a = ((const struct phos_lazy_piece *)one)->address, b = ((const struct phos_lazy_piece *)other)->address;

	return (a > b) - (a < b);
}

/* The first piece that ends behind an address. */
static size_t first_behind(const struct phos_lazy_filled *filled, uint64_t address)
{
	return phos_first_behind(filled->pieces, sizeof(*filled->pieces), filled->count, address);
}

bool phos_lazy_has(const struct phos_lazy_filled *filled, uint64_t address, uint64_t size)
{
	uint64_t end = address + size;

	for (size_t i = first_behind(filled, address); address < end; i++) {
		const struct phos_lazy_piece *piece = &filled->pieces[i];

		if (i == filled->count || piece->address > address || piece->gone)
			return false;
		address = piece->address + piece->size;
	}
	return true;
}

void phos_lazy_gone(struct phos_lazy_filled *filled, uint64_t address, uint64_t size)
{
	for (size_t i = first_behind(filled, address); i < filled->count && filled->pieces[i].address < address + size; i++)
		filled->pieces[i].gone = true;
}

unsigned phos_lazy_threads(unsigned fewest)
{
	const char *said = getenv("PHOS_FILL_THREADS");
	unsigned wanted = 0;
	cpu_set_t cpus;

	if (said && *said)
		wanted = (unsigned)strtoul(said, NULL, 10);
	else if (!sched_getaffinity(0, sizeof(cpus), &cpus) && (unsigned)CPU_COUNT(&cpus) / 2 >= fewest)
		wanted = (unsigned)CPU_COUNT(&cpus) / 2;
	return wanted < MOST_THREADS ? wanted : MOST_THREADS;
}

static void *work_unless_in_the_way(void *argument)
{
	struct fill *fill = argument;

	return phos_pid_needed(fill->images, (pid_t)syscall(SYS_gettid)) ? NULL : work(fill);
}

static void run_threads(struct fill *fill, unsigned wanted)
{
	pthread_t threads[MOST_THREADS];
	unsigned started = 0;

	for (; started + 1 < wanted; started++)
		if (pthread_create(&threads[started], NULL, work_unless_in_the_way, fill))
			break;
	work(fill);
	while (started)
		pthread_join(threads[--started], NULL);
}

int phos_lazy_fill(int uffd, int pid, unsigned threads, struct phos_lazy_filled *filled)
{
	char name[32];
	size_t size = 0;
	void *pagemap;
	struct phos_lazy_pages lazy = { 0 };
	struct fill fill = {
		.uffd = uffd,
		.images = criu_get_image_dir ? criu_get_image_dir() : -1,
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.filled = filled,
	};
	int result = -1;

	*filled = (struct phos_lazy_filled){ 0 };
	if (fill.images < 0)
		return -1;
	snprintf(name, sizeof(name), "pagemap-%d.img", pid);
	pagemap = read_file(fill.images, name, &size);
	if (pagemap && !phos_lazy_decode(pagemap, size, &lazy)) {
		for (size_t i = 0; i < lazy.count; i++)
			filled->wanted += lazy.runs[i].size;
		snprintf(name, sizeof(name), "pages-%u.img", lazy.pages_id);
		fill.pages = map_pages(fill.images, name, &fill.pages_size);
		result = lazy.count ? -1 : 0;
	}
	free(pagemap);
	if (fill.pages) {
		fill.runs = lazy.runs;
		fill.count = lazy.count;
		run_threads(&fill, threads);
		qsort(filled->pieces, filled->count, sizeof(*filled->pieces), by_address);
		munmap((void *)fill.pages, fill.pages_size);
		result = 0;
	}
	free(lazy.runs);
	return result;
}
