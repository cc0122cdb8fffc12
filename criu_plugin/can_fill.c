/*
 * phos-can-fill IMAGES WORK: whether fill_server.c can bring what CRIU would restore from the folder IMAGES with WORK as its
 * working directory, and nobody would see a difference. Exit status 0: it can. 1: CRIU has to; why is printed.
 */
#include "lazy_fill/image_reader.h"
#include "lazy_fill/lazy_fill.h"
#include "lazy_socket.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define MM_MAGIC 0x57492820u /* mm-PID.img */
#define MM_VMAS 14 /* mm.proto, vma.proto */
enum { VMA_START = 1, VMA_END = 2, VMA_PROT = 5, VMA_FLAGS = 6, VMA_FIELDS = 7 };

static __attribute__((noreturn)) void no(const char *why)
{
	puts(why);
	exit(EXIT_FAILURE);
}

static void setting(const char *path, char *value, size_t size)
{
	FILE *file = fopen(path, "re");

	if (!file || !fgets(value, (int)size, file))
		*value = 0;
	if (file)
		fclose(file);
}

/* The one process that has memory; as the pid of its images. */
static int only_process(int images)
{
	int folder = openat(images, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), found = 0, pid;
	DIR *listed = folder < 0 ? NULL : fdopendir(folder);
	struct dirent *entry;
	char rest[8];

	while (listed && (entry = readdir(listed))) {
		if (!strncmp(entry->d_name, "userns-", 7))
			no("userfaultfd(2) is not allowed in a user namespace");
		if (sscanf(entry->d_name, "pagemap-%d.%4s", &pid, rest) != 2 || strcmp(rest, "img"))
			continue;
		if (found)
			no("processes share pages with their parents only if CRIU brings them");
		found = pid;
	}
	if (listed)
		closedir(listed);
	if (!found)
		no("there is no memory");
	return found;
}

/* A file of the image as the server would open it; *size: its bytes. */
static int open_image(int images, const char *format, int number, struct stat *status)
{
	char name[32];
	int file;

	snprintf(name, sizeof(name), format, number);
	file = openat(images, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (file < 0 || fstat(file, status) || !S_ISREG(status->st_mode))
		no("one of the image's files is none");
	return file;
}

static void *content(int images, const char *format, int number, size_t *size)
{
	struct stat status;
	int file = open_image(images, format, number, &status);
	void *all = malloc((size_t)status.st_size + 1);

	if (!all || pread(file, all, (size_t)status.st_size, 0) != status.st_size)
		no("one of the image's files cannot be read");
	close(file);
	*size = (size_t)status.st_size;
	return all;
}

/* Pages in memory, all of them: to read what a file of tmpfs does not hold would make it hold zeros. */
static void check_pages(int images, int pid)
{
	struct phos_lazy_pages lazy;
	struct statfs mount;
	struct stat status;
	size_t size;
	void *pagemap = content(images, "pagemap-%d.img", pid, &size);
	int file;

	if (phos_lazy_decode(pagemap, size, &lazy) || !lazy.count)
		no("the pagemap names nothing that may be lazy");
	file = open_image(images, "pages-%d.img", (int)lazy.pages_id, &status);
	if (fstatfs(file, &mount) || mount.f_type != TMPFS_MAGIC)
		no("the image does not lie in memory");
	if (status.st_blocks * 512 < status.st_size)
		no("the file of pages has holes");
	close(file);
	free(lazy.runs);
	free(pagemap);
}

/*
 * For a lazy restore CRIU maps everything private as if it could be written to (mem.c, premap_private_vma): what was only
 * reserved counts as memory then, and the kernel refuses more than there is at once. `most`: bytes of one mapping.
 */
static void check_reservations(int images, int pid, uint64_t most)
{
	size_t size;
	void *image = content(images, "mm-%d.img", pid, &size);
	struct reader reader = { image, (const unsigned char *)image + size };
	uint64_t tag, length, value, fields[VMA_FIELDS];
	uint32_t whole;

	if (!read_magic(&reader, MM_MAGIC) || !read_u32(&reader, &whole))
		no("the list of mappings is not understood");
	while (reader.at < reader.end) {
		struct reader message;

		if (!read_varint(&reader, &tag))
			no("the list of mappings is not understood");
		if ((tag & 7) == 0 && read_varint(&reader, &value))
			continue;
		if ((tag & 7) != 2 || !read_varint(&reader, &length) || length > (size_t)(reader.end - reader.at))
			no("the list of mappings is not understood");
		message = (struct reader){ reader.at, reader.at + length };
		reader.at += length;
		if (tag >> 3 != MM_VMAS)
			continue;
		if (!read_fields(message, fields, VMA_FIELDS))
			no("the list of mappings is not understood");
		if ((fields[VMA_FLAGS] & MAP_PRIVATE) && !(fields[VMA_FLAGS] & MAP_NORESERVE) && !(fields[VMA_PROT] & PROT_WRITE) &&
		    fields[VMA_END] - fields[VMA_START] > most)
			no("it has reserved more addresses than there is memory");
	}
	free(image);
}

int main(int count, char **words)
{
	char value[128];
	const char *threads = getenv("PHOS_FILL_THREADS");
	int images, work, pid, allowed;

	if (count != 3)
		no("phos-can-fill IMAGES WORK");
	if (threads && *threads && !strtoul(threads, NULL, 10))
		no("PHOS_FILL_THREADS is 0");
	images = open(words[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (images < 0)
		no("there is no such folder");
	if (!faccessat(images, "parent", F_OK, AT_SYMLINK_NOFOLLOW))
		no("pages are in another image as well");
	work = open(words[2], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (access(words[2], W_OK) || work < 0 ||
	    (!faccessat(work, PHOS_LAZY_SOCKET, F_OK, AT_SYMLINK_NOFOLLOW) && !phos_lazy_socket_left(work)))
		no("no server can listen in the working directory, or one does");
	allowed = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (allowed < 0)
		no("userfaultfd(2) is not allowed");
	close(allowed);
	setting("/sys/kernel/mm/transparent_hugepage/enabled", value, sizeof(value));
	if (strstr(value, "[always]"))
		no("memory is given in huge pages, which a userfaultfd does not get");
	pid = only_process(images);
	check_pages(images, pid);
	setting("/proc/sys/vm/overcommit_memory", value, sizeof(value));
	if (*value != '1')
		check_reservations(images, pid, *value == '0' ? (uint64_t)sysconf(_SC_PHYS_PAGES) * PAGE : 64 << 20);
	return EXIT_SUCCESS;
}
