/*
 * Links that CRIU would make to files that have lost the name they are mapped by, and have another one (--link-remap): in
 * the same directory, called by a number that the next dump uses as well, so that two dumps at a time are in each other's
 * way. Every POSIX semaphore in /dev/shm is such a file. phosd has it restored by a name that it still has
 * (gpu_engine/named_memory.py), so the link is never used: here it is not made, if the launcher has preloaded this library
 * into CRIU, and not removed either, as it may be another's by then. phosd is told which file it would have been for.
 *
 * It is the launcher that has CRIU make links, where a task has such memory. All other links are then refused, as CRIU
 * refuses them without that option: they would stay on a file system of the user's, or be gone when they are needed.
 *
 * CRIU dumps with one thread: no lock.
 */
#include "phos_plugin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOLDER "/dev/shm"
#define NAME "link_remap." /* create_link_remap() in criu/files-reg.c, CRIU 4.1.1 */
#define LINK "." FOLDER "/" NAME

static struct {
	struct phos_link *links;
	size_t count;
} spared;

size_t phos_spared_links(const struct phos_link **links)
{
	*links = spared.links;
	return spared.count;
}

/* The files that lay in the folder when it was looked at last, in order: there may be thousands, and as many links. */
static struct {
	ino_t *inodes;
	size_t count, room;
} named;

static int compare(const void *one, const void *other)
{
	ino_t a = *(const ino_t *)one, b = *(const ino_t *)other;

	return a < b ? -1 : a > b;
}

static void look(void)
{
	struct dirent *entry;
	DIR *entries = opendir(FOLDER);

	named.count = 0;
	while (entries && (entry = readdir(entries))) {
		if (!strncmp(entry->d_name, NAME, strlen(NAME))) /* a link of CRIU's */
			continue;
		if (named.count == named.room) {
			size_t room = named.room * 2 + 256;
			ino_t *grown = realloc(named.inodes, room * sizeof(*grown));

			if (!grown)
				break;
			named.inodes = grown;
			named.room = room;
		}
		named.inodes[named.count++] = entry->d_ino;
	}
	if (entries)
		closedir(entries);
	if (named.count)
		qsort(named.inodes, named.count, sizeof(*named.inodes), compare);
}

static bool was_there(ino_t inode)
{
	return named.count && bsearch(&inode, named.inodes, named.count, sizeof(inode), compare);
}

/* Whether it lies in the folder itself, by some name that is no link of CRIU's. */
static bool has_a_name(const struct stat *file)
{
	struct stat folder;

	if (stat(FOLDER, &folder) || file->st_dev != folder.st_dev)
		return false;
	if (was_there(file->st_ino))
		return true;
	look();
	return was_there(file->st_ino);
}

/* Returns whether it could be noted. */
static bool spare(const char *name, uint64_t inode)
{
	struct phos_link *links = realloc(spared.links, (spared.count + 1) * sizeof(*links));

	if (!links)
		return false;
	spared.links = links;
	links[spared.count] = (struct phos_link){ .path = strdup(name + 1), .inode = inode };
	return links[spared.count].path && ++spared.count;
}

__attribute__((visibility("default"))) int linkat(int from, const char *old, int to, const char *new, int flags)
{
	const char *asked = getenv("PHOS_LINKS"), *last = strrchr(new, '/');
	struct stat file;

	if (!(flags & AT_EMPTY_PATH) || *old || !last || strncmp(last + 1, NAME, strlen(NAME)) || fstat(from, &file))
		return syscall(SYS_linkat, from, old, to, new, flags);
	if (phos_link_sees_to_names() && !strncmp(new, LINK, strlen(LINK)) && has_a_name(&file) && spare(new, file.st_ino))
		return 0;
	if (!asked || strcmp(asked, "ours"))
		return syscall(SYS_linkat, from, old, to, new, flags);
	pr_err("a file in the directory of %s has lost the name it is used by: CRIU needs --link-remap, and a link there\n", new + 1);
	errno = ENOTSUP;
	return -1;
}

__attribute__((visibility("default"))) int unlinkat(int folder, const char *name, int flags)
{
	for (size_t i = 0; i < spared.count; i++)
		if (*name == '.' && !strcmp(spared.links[i].path, name + 1))
			return 0;
	return syscall(SYS_unlinkat, folder, name, flags);
}
