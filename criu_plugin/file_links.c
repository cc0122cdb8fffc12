/*
 * Links that CRIU would make in /dev/shm. What a task has mapped by a name that is gone, and that has another one, CRIU
 * dumps by making one more link in the same directory (--link-remap), called by a number that the next dump uses as well:
 * two dumps at a time are in each other's way. Every POSIX semaphore is such a mapping. phosd has such a file restored by
 * the name that it still has (gpu_engine/named_memory.py), so the link is never used: here it is not made, if the launcher
 * has preloaded this library into CRIU, and not removed either, as it may be another's by then. Where phosd cannot name
 * the file, it finds no link, and gives the dump up.
 *
 * CRIU dumps with one thread: no lock.
 */
#include "phos_plugin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FOLDER "/dev/shm"
#define LINK "." FOLDER "/link_remap." /* create_link_remap() in criu/files-reg.c, CRIU 4.1.1 */

struct spared {
	struct spared *next;
	char *name;
};

static struct spared *spared;

static bool lies_in_folder(int file)
{
	struct stat folder, found;

	return !stat(FOLDER, &folder) && !fstat(file, &found) && found.st_dev == folder.st_dev;
}

/* Whether it could be noted. */
static bool spare(const char *name)
{
	struct spared *link = malloc(sizeof(*link));

	if (!link || !(link->name = strdup(name))) {
		free(link);
		return false;
	}
	link->next = spared;
	spared = link;
	return true;
}

__attribute__((visibility("default"))) int linkat(int from, const char *old, int to, const char *new, int flags)
{
	if (phos_link_sees_to_names() && (flags & AT_EMPTY_PATH) && !*old && !strncmp(new, LINK, strlen(LINK)) &&
	    lies_in_folder(from) && spare(new))
		return 0;
	return syscall(SYS_linkat, from, old, to, new, flags);
}

__attribute__((visibility("default"))) int unlinkat(int folder, const char *name, int flags)
{
	for (const struct spared *link = spared; link; link = link->next)
		if (!strcmp(link->name, name))
			return 0;
	return syscall(SYS_unlinkat, folder, name, flags);
}
