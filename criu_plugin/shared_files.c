/*
 * What tasks share without a name that lasts: anonymous shared memory and memfds, and files whose name is gone. CRIU copies
 * both with one thread, while everything stands still. phosd copies them with several, beside whatever else CRIU does
 * (gpu_engine/shared_files.py). The launcher preloads this library into a CRIU that dumps (hidden_pages.c), so that these
 * calls come here first:
 *
 *   lseek(SEEK_DATA) of memory (next_data_segment() in criu/shmem.c): there is no data, is the answer. phosd has been given
 *   the file, and completes CRIU's image of it.
 *   sendfile() of a file's data (copy_chunk_from_file() in criu/files-reg.c): all has been sent, is the answer. phosd has been
 *   given both files, and writes it to where CRIU would have.
 *
 * CRIU dumps with one thread: no lock.
 */
#include "phos_plugin.h"

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptor_name.h"

#define LEAST ((off64_t)1 << 20) /* bytes: what is smaller CRIU has copied before phosd knows of it */
#define MOST_AT_ONCE ((size_t)1 << 30) /* CRIU takes what is returned for an int */
#define MEMORIES 256		 /* each is a file that phosd has open until the image is whole; the others are CRIU's */

static uint64_t taken[MEMORIES]; /* inodes */
static size_t taken_count;

/* The device that all memory without a name is on: the kernel has one file system for it. 0: not known. */
static dev_t memory_device(void)
{
	static dev_t device;
	struct stat status;
	int memory;

	if (device)
		return device;
	memory = memfd_create("phos-device", MFD_CLOEXEC);
	if (memory >= 0 && !fstat(memory, &status))
		device = status.st_dev;
	if (memory >= 0)
		close(memory);
	return device;
}

/* What CRIU calls by its inode. System V's, on the same device, it calls by their numbers. */
static bool goes_by_inode(int descriptor)
{
	char name[PATH_MAX];

	return phos_name_of(descriptor, name, sizeof(name)) &&
	       (!strncmp(name, "/memfd:", 7) || !strncmp(name, "/dev/zero", 9));
}

/* CRIU asks from the beginning on: what it has begun to copy it goes on with. See phos_link_take_memory(). */
static int take_memory(int descriptor, off64_t offset)
{
	struct stat status;
	int ret;

	if (fstat(descriptor, &status) || !S_ISREG(status.st_mode) || status.st_dev != memory_device() ||
	    !goes_by_inode(descriptor))
		return 1;
	for (size_t i = 0; i < taken_count; i++)
		if (taken[i] == status.st_ino)
			return 0;
	/* CRIU keeps the number in 32 bits, and with that variable copies what has changed, whatever is said here. */
	if (offset || status.st_size < LEAST || taken_count == MEMORIES || status.st_ino > UINT32_MAX ||
	    getenv("CRIU_TRACK_SHMEM"))
		return 1;
	ret = phos_link_take_memory(descriptor, status.st_ino);
	if (!ret)
		taken[taken_count++] = status.st_ino;
	return ret;
}

static off64_t seek(int descriptor, off64_t offset, int whence)
{
	return syscall(SYS_lseek, descriptor, offset, whence);
}

__attribute__((visibility("default"))) off64_t lseek64(int descriptor, off64_t offset, int whence)
{
	int taken_by = whence == SEEK_DATA ? take_memory(descriptor, offset) : 1;

	if (taken_by > 0)
		return seek(descriptor, offset, whence);
	errno = taken_by ? EIO : ENXIO;
	return -1;
}

/* Where CRIU writes next; the file is that much larger afterwards. -1: this is not for us. */
static off64_t make_place(int to, int from, size_t size)
{
	struct stat source, target;
	off64_t place;

	if (fstat(from, &source) || !S_ISREG(source.st_mode) || fstat(to, &target) || !S_ISREG(target.st_mode))
		return -1;
	place = seek(to, 0, SEEK_CUR);
	if (place < 0 || place < target.st_size) /* not at its end: nothing that we know */
		return -1;
	return ftruncate(to, place + (off64_t)size) ? -1 : place;
}

__attribute__((visibility("default"))) ssize_t sendfile64(int to, int from, off64_t *offset, size_t count)
{
	size_t size = count < MOST_AT_ONCE ? count : MOST_AT_ONCE;
	off64_t place = -1;

	if (offset && count >= (size_t)LEAST && (place = make_place(to, from, size)) >= 0) {
		int ret = phos_link_take_range(from, to, *offset, place, size);

		if (!ret) {
			seek(to, place + (off64_t)size, SEEK_SET);
			*offset += size;
			return (ssize_t)size;
		}
		if (ret < 0) {
			errno = EIO;
			return -1;
		}
		if (ftruncate(to, place)) /* what is there is written over; that it is too long would be read */
			return -1;
	}
	return syscall(SYS_sendfile, to, from, offset, count);
}
