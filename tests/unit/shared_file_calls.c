/*
 * criu_plugin/shared_files.c, called as CRIU calls it: what is given to phosd, what is answered then, and what is left to the
 * kernel. phosd is two functions here.
 */
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <unistd.h>

#include "phos_plugin.h"

#define MIB (1l << 20)

/* volatile: libc's headers say that these calls call nothing of ours (attribute leaf). */
static volatile bool refuses, gone;
static volatile unsigned memories, ranges;
static volatile uint64_t last[3]; /* offset, place, size */

int phos_link_take_memory(int descriptor, uint64_t inode)
{
	struct stat status;

	assert(!fstat(descriptor, &status) && status.st_ino == inode);
	memories++;
	return gone ? -1 : refuses;
}

int phos_link_take_range(int from, int to, uint64_t offset, uint64_t place, uint64_t size)
{
	assert(from != to);
	ranges++;
	last[0] = offset, last[1] = place, last[2] = size;
	return gone ? -1 : refuses;
}

static int memory_of(off64_t size)
{
	int memory = memfd_create("memory", 0);

	assert(memory >= 0 && !ftruncate(memory, size) && pwrite(memory, "x", 1, 0) == 1);
	assert(pwrite(memory, "x", 1, size - 1) == 1);
	return memory;
}

/* Asked as next_data_segment() does; whether the kernel has answered. */
static bool kernel_says(int memory, off64_t offset)
{
	off64_t data = lseek64(memory, offset, SEEK_DATA);

	assert(data == offset || (data == -1 && errno == ENXIO));
	return data >= 0;
}

/* The one mapping of that memory, as CRIU opens it. */
static int open_mapping(const void *memory)
{
	char path[300], begins[32];
	DIR *mappings = opendir("/proc/self/map_files");
	struct dirent *entry;
	int found = -1;

	assert(mappings);
	snprintf(begins, sizeof(begins), "%lx-", (unsigned long)memory);
	while ((entry = readdir(mappings)))
		if (!strncmp(entry->d_name, begins, strlen(begins))) {
			snprintf(path, sizeof(path), "/proc/self/map_files/%s", entry->d_name);
			found = open(path, O_RDONLY);
		}
	closedir(mappings);
	assert(found >= 0);
	return found;
}

static void memory_is_given(const char *disk)
{
	int memory = memory_of(3 * MIB), file, segment;
	void *anonymous, *attached;

	assert(!kernel_says(memory, 0) && memories == 1);
	assert(!kernel_says(memory, 2 * MIB) && memories == 1); /* what was taken is hidden whole, and given once */
	assert(lseek64(memory, 0, SEEK_HOLE) == 4096 && lseek64(memory, 7, SEEK_SET) == 7);
	anonymous = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memset(anonymous, 1, 2 * MIB);
	assert(!kernel_says(open_mapping(anonymous), 0) && memories == 2);

	/* What CRIU has begun to copy it goes on with. */
	memory = memory_of(2 * MIB);
	refuses = true;
	assert(kernel_says(memory, 0) && memories == 3);
	refuses = false;
	assert(kernel_says(memory, 2 * MIB - 4096) && memories == 3);

	assert(kernel_says(memory_of(MIB - 1), 0));
	file = open(disk, O_RDWR | O_CREAT, 0600);
	assert(file >= 0 && !ftruncate(file, 2 * MIB) && pwrite(file, "x", 1, 0) == 1 && kernel_says(file, 0));
	segment = shmget(IPC_PRIVATE, 2 * MIB, IPC_CREAT | 0600);
	attached = shmat(segment, NULL, 0);
	assert(segment >= 0 && attached != (void *)-1 && !shmctl(segment, IPC_RMID, NULL));
	memset(attached, 1, 2 * MIB);
	assert(kernel_says(open_mapping(attached), 0));
	setenv("CRIU_TRACK_SHMEM", "1", 1);
	assert(kernel_says(memory_of(2 * MIB), 0));
	unsetenv("CRIU_TRACK_SHMEM");
	assert(memories == 3);

	gone = true;
	assert(lseek64(memory_of(2 * MIB), 0, SEEK_DATA) == -1 && errno == EIO && memories == 4);
	gone = false;

	/* phosd has only so many files open. */
	for (int i = 2; i < 256; i++) {
		memory = memory_of(MIB);
		assert(!kernel_says(memory, 0));
		close(memory);
	}
	assert(kernel_says(memory_of(MIB), 0));
}

static off64_t size_of(int file)
{
	struct stat status;

	assert(!fstat(file, &status));
	return status.st_size;
}

static void data_is_given(const char *disk)
{
	int to = open(disk, O_WRONLY | O_CREAT | O_TRUNC, 0600), from = memory_of(5 * MIB), large = memory_of(3l << 30);
	off64_t offset = 4096;

	assert(to >= 0 && write(to, "head", 4) == 4);
	gone = true;
	assert(sendfile64(to, from, &offset, 2 * MIB) == -1 && errno == EIO && offset == 4096 && ranges == 1);
	gone = false;
	ranges = 0;
	assert(!ftruncate(to, 4));
	assert(sendfile64(to, from, &offset, 2 * MIB) == 2 * MIB && ranges == 1);
	assert(last[0] == 4096 && last[1] == 4 && last[2] == 2 * MIB);
	assert(offset == 4096 + 2 * MIB && size_of(to) == 4 + 2 * MIB && lseek(to, 0, SEEK_CUR) == 4 + 2 * MIB);

	/* Little, what goes on from where the file is read, and what is not written at the end, is sent at once. */
	assert(sendfile64(to, from, &offset, MIB - 1) == MIB - 1 && size_of(to) == 3 + 3 * MIB && ranges == 1);
	assert(lseek(from, 0, SEEK_SET) == 0 && sendfile64(to, from, NULL, MIB) == MIB && ranges == 1);
	assert(lseek(to, 10, SEEK_SET) == 10);
	offset = 0;
	assert(sendfile64(to, from, &offset, MIB) == MIB && ranges == 1 && size_of(to) == 3 + 4 * MIB);

	/* phosd is gone: CRIU copies, and the file is no longer than what it has written. */
	refuses = true;
	assert(lseek(to, 0, SEEK_END) == 3 + 4 * MIB);
	offset = 3 * MIB;
	assert(sendfile64(to, from, &offset, 4 * MIB) == 2 * MIB && ranges == 2 && size_of(to) == 3 + 6 * MIB);
	refuses = false;

	/* CRIU has an int for what comes back. */
	offset = 0;
	assert(sendfile64(to, large, &offset, 3ul << 30) == 1l << 30 && ranges == 3 && offset == 1l << 30);
}

int main(int count, char **words)
{
	assert(count == 2);
	memory_is_given(words[1]);
	data_is_given(words[1]);
	puts("right");
	return 0;
}
