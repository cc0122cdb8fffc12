/*
 * The private memory of frozen tasks, copied into files by several threads.
 *
 * The threads are there before the tasks are frozen, and belong to the pool: a task that is small, or whose pages have not
 * been found yet, keeps none of them from another. The thread that begins with a task finds its pages, and the others copy
 * what has been found so far. Everything that two threads use is guarded by the pool's lock, but for the runs of pages that
 * have been shown: these stay as they are.
 */
#include "page_copy.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "page_find.h"

#define SHARE (1u << 20) /* of the file, which a thread takes at once */
#define STACK (256u << 10)

#define EXPORT __attribute__((visibility("default")))

enum search { TO_BEGIN, UNDER_WAY, OVER };

struct phos_page_copy {
	struct phos_page_pool *pool;
	struct phos_page_copy *next;
	int pid, file;
	char *place;
	uint64_t mapped;
	struct phos_mapping *mappings;
	long mapping_count;
	struct phos_found found;

	/* With the pool's lock: */
	enum search search;
	int search_error; /* -errno */
	char *own_place; /* a mapping of the same file that was made here, as the other was too small; or NULL */
	uint64_t runs, end; /* of what may be copied: found, and there is room for it in the file */
	uint64_t begun, run; /* up to where in the file it has been begun with, and the run of pages there */
	int busy; /* threads that find its pages, or copy some */
	int error; /* errno of the first copy that failed */
	uint64_t failed_at;
	bool dropped;
};

struct phos_page_pool {
	pthread_mutex_t lock;
	pthread_cond_t work, done;
	struct phos_page_copy *copies;
	bool ends;
	long count;
	pthread_t threads[];
};

/* What one thread copies at once: of the file [begin, end), which begins in a run of pages. */
struct share {
	uint64_t run, begin, end;
	char *place;
};

/* Copies what of [address, address + size) there is; an errno, and where, if something cannot be copied. */
static int copy_range(const struct phos_page_copy *copy, uint64_t address, uint64_t size, char *place, uint64_t *failed_at)
{
	while (size) {
		struct iovec to = { .iov_base = place, .iov_len = size };
		struct iovec from = { .iov_base = (void *)(uintptr_t)address, .iov_len = size };
		ssize_t read = process_vm_readv(copy->pid, &to, 1, &from, 1, 0);

		if (read <= 0) {
			*failed_at = address;
			return read ? errno : EIO;
		}
		address += read;
		place += read;
		size -= read;
	}
	return 0;
}

static int copy_share(const struct phos_page_copy *copy, const struct share *share, uint64_t *failed_at)
{
	uint64_t at = share->begin;

	for (uint64_t number = share->run; at < share->end; number++) {
		const struct phos_pages *pages = phos_found_at(&copy->found, number);
		uint64_t end = pages->offset + pages->size < share->end ? pages->offset + pages->size : share->end;
		uint64_t address = pages->address + (at - pages->offset);
		int error = pages->copied ? copy_range(copy, address, end - at, share->place + at, failed_at) : 0;

		if (error)
			return error;
		at = end;
	}
	return 0;
}

/* What is behind the end of the file gets room in it, and, if it needs one, another place. Returns 0 or -errno. */
static int extend(const struct phos_page_copy *copy, char **own_place)
{
	struct stat status;
	void *place;

	if (fstat(copy->file, &status) || ((uint64_t)status.st_size < copy->found.end && ftruncate(copy->file, copy->found.end)))
		return -errno;
	if (copy->found.end <= copy->mapped)
		return 0;
	place = mmap(NULL, copy->found.end, PROT_READ | PROT_WRITE, MAP_SHARED, copy->file, 0);
	if (place == MAP_FAILED)
		return -errno;
	*own_place = place;
	return 0;
}

/* More has been found; the file is as large as that already, or there will be no more, and it has been made so. */
static int show(void *of)
{
	struct phos_page_copy *copy = of;
	struct stat status;
	uint64_t room;
	int error;

	if (fstat(copy->file, &status))
		return -errno;
	room = (uint64_t)status.st_size < copy->mapped ? (uint64_t)status.st_size : copy->mapped;
	pthread_mutex_lock(&copy->pool->lock);
	error = copy->dropped ? -ECANCELED : 0;
	if (!error && copy->found.end <= room) {
		copy->runs = copy->found.count;
		copy->end = copy->found.end;
		pthread_cond_broadcast(&copy->pool->work);
	}
	pthread_mutex_unlock(&copy->pool->lock);
	return error;
}

/* With the lock, as all below that are not exported. */
static void find(struct phos_page_copy *copy)
{
	struct phos_page_pool *pool = copy->pool;
	char *own_place = NULL;
	int error;

	copy->search = UNDER_WAY;
	copy->busy++;
	pthread_mutex_unlock(&pool->lock);
	error = phos_find_pages(copy->pid, copy->mappings, copy->mapping_count, &copy->found, SHARE, show, copy);
	if (!error)
		error = extend(copy, &own_place);
	pthread_mutex_lock(&pool->lock);
	copy->own_place = own_place;
	copy->search = OVER;
	copy->search_error = error;
	if (!error) {
		copy->runs = copy->found.count;
		copy->end = copy->found.end;
	}
	copy->busy--;
	pthread_cond_broadcast(&pool->work);
	pthread_cond_broadcast(&pool->done);
}

static bool is_wanted(const struct phos_page_copy *copy)
{
	return !copy->dropped && !copy->error && !copy->search_error;
}

/* Only whole shares are taken while more is being found. */
static bool has_share(const struct phos_page_copy *copy)
{
	return is_wanted(copy) && copy->begun < copy->end && (copy->search == OVER || copy->end - copy->begun >= SHARE);
}

static void copy_next(struct phos_page_copy *copy)
{
	struct phos_page_pool *pool = copy->pool;
	uint64_t left = copy->end - copy->begun, failed_at = 0;
	struct share share = { .run = copy->run, .begin = copy->begun, .end = copy->begun + (left < SHARE ? left : SHARE) };
	int error;

	share.place = copy->own_place ? copy->own_place : copy->place;
	copy->begun = share.end;
	while (copy->run < copy->runs) {
		const struct phos_pages *pages = phos_found_at(&copy->found, copy->run);

		if (pages->offset + pages->size > share.end)
			break;
		copy->run++;
	}
	copy->busy++;
	pthread_mutex_unlock(&pool->lock);
	error = copy_share(copy, &share, &failed_at);
	pthread_mutex_lock(&pool->lock);
	copy->busy--;
	if (error && !copy->error) {
		copy->error = error;
		copy->failed_at = failed_at;
	}
	if (!copy->busy)
		pthread_cond_broadcast(&pool->done);
}

static void *work(void *of)
{
	struct phos_page_pool *pool = of;

	pthread_mutex_lock(&pool->lock);
	for (;;) {
		struct phos_page_copy *copy = pool->copies;

		while (copy && (copy->search != TO_BEGIN || copy->dropped))
			copy = copy->next;
		if (copy) {
			find(copy);
			continue;
		}
		copy = pool->copies;
		while (copy && !has_share(copy))
			copy = copy->next;
		if (copy)
			copy_next(copy);
		else if (pool->ends)
			break;
		else
			pthread_cond_wait(&pool->work, &pool->lock);
	}
	pthread_mutex_unlock(&pool->lock);
	return NULL;
}

/* Without any signals, which are for the threads that were there before. Returns an errno. */
static int start_thread(struct phos_page_pool *pool)
{
	pthread_attr_t attributes;
	sigset_t all, before;
	int error = pthread_attr_init(&attributes);

	if (error)
		return error;
	pthread_attr_setstacksize(&attributes, STACK);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	error = pthread_create(&pool->threads[pool->count], &attributes, work, pool);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	if (error)
		return error;
	pthread_setname_np(pool->threads[pool->count++], "copy-pages");
	return 0;
}

EXPORT int phos_page_pool_open(long threads, struct phos_page_pool **opened)
{
	struct phos_page_pool *pool = calloc(1, sizeof(*pool) + threads * sizeof(pool->threads[0]));
	int error = 0;

	if (!pool)
		return -ENOMEM;
	pthread_mutex_init(&pool->lock, NULL);
	pthread_cond_init(&pool->work, NULL);
	pthread_cond_init(&pool->done, NULL);
	while (pool->count < threads && !error)
		error = start_thread(pool);
	if (!pool->count) {
		phos_page_pool_close(pool);
		return -error;
	}
	*opened = pool;
	return 0;
}

EXPORT void phos_page_pool_close(struct phos_page_pool *pool)
{
	pthread_mutex_lock(&pool->lock);
	pool->ends = true;
	pthread_cond_broadcast(&pool->work);
	pthread_mutex_unlock(&pool->lock);
	for (long i = 0; i < pool->count; i++)
		pthread_join(pool->threads[i], NULL);
	pthread_cond_destroy(&pool->done);
	pthread_cond_destroy(&pool->work);
	pthread_mutex_destroy(&pool->lock);
	free(pool);
}

static void free_copy(struct phos_page_copy *copy)
{
	if (copy->own_place)
		munmap(copy->own_place, copy->found.end);
	phos_found_free(&copy->found);
	free(copy->mappings);
	free(copy);
}

EXPORT int phos_page_copy_begin(struct phos_page_pool *pool, int pid, int file, char *place, uint64_t mapped,
				struct phos_page_copy **begun)
{
	struct phos_page_copy *copy = calloc(1, sizeof(*copy));
	int error;

	if (!copy)
		return -ENOMEM;
	*copy = (struct phos_page_copy){ .pool = pool, .pid = pid, .file = file, .place = place, .mapped = mapped };
	error = phos_found_init(&copy->found);
	if (!error)
		copy->mapping_count = phos_read_mappings(pid, &copy->mappings);
	if (!error && copy->mapping_count < 0)
		error = copy->mapping_count;
	if (error) {
		free_copy(copy);
		return error;
	}
	pthread_mutex_lock(&pool->lock);
	copy->next = pool->copies;
	pool->copies = copy;
	pthread_cond_broadcast(&pool->work);
	pthread_mutex_unlock(&pool->lock);
	*begun = copy;
	return 0;
}

EXPORT long phos_page_copy_mappings(const struct phos_page_copy *copy, struct phos_mapping *mappings, long room)
{
	for (long i = 0; i < copy->mapping_count && i < room; i++)
		mappings[i] = copy->mappings[i];
	return copy->mapping_count;
}

/* Runs that were cut, so that the first part could be copied, are one again. */
static long join_runs(const struct phos_page_copy *copy, struct phos_pages *joined, long room)
{
	struct phos_pages last = { 0 };
	long count = 0;

	for (uint64_t i = 0; i < copy->found.count; i++) {
		struct phos_pages pages = *phos_found_at(&copy->found, i);

		if (count && last.address + last.size == pages.address && last.copied == pages.copied) {
			last.size += pages.size;
		} else {
			count++;
			last = pages;
		}
		if (count <= room)
			joined[count - 1] = last;
	}
	return count;
}

EXPORT long phos_page_copy_found(struct phos_page_copy *copy, struct phos_pages *found, long room)
{
	int error;

	pthread_mutex_lock(&copy->pool->lock);
	while (copy->search != OVER)
		pthread_cond_wait(&copy->pool->done, &copy->pool->lock);
	error = copy->search_error;
	pthread_mutex_unlock(&copy->pool->lock);
	return error ? error : join_runs(copy, found, room);
}

EXPORT int phos_page_copy_wait(struct phos_page_copy *copy, uint64_t *failed_at)
{
	int error;

	pthread_mutex_lock(&copy->pool->lock);
	while (copy->busy || copy->search != OVER || has_share(copy))
		pthread_cond_wait(&copy->pool->done, &copy->pool->lock);
	error = copy->search_error ? 0 : copy->error; /* then it is for CRIU to copy */
	*failed_at = copy->failed_at;
	pthread_mutex_unlock(&copy->pool->lock);
	return error;
}

EXPORT void phos_page_copy_drop(struct phos_page_copy *copy)
{
	struct phos_page_copy **at = &copy->pool->copies;

	pthread_mutex_lock(&copy->pool->lock);
	copy->dropped = true;
	while (copy->busy)
		pthread_cond_wait(&copy->pool->done, &copy->pool->lock);
	while (*at != copy)
		at = &(*at)->next;
	*at = copy->next;
	pthread_mutex_unlock(&copy->pool->lock);
	free_copy(copy);
}
