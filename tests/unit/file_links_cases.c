/*
 * criu_plugin/file_links.c: which links it makes. file_links_cases NAMES FILE LINK: makes a link to a file that is open, as
 * CRIU does, and removes it. Prints after each whether the link is there, and which links were not made.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "criu_log.h"
#include "phos_plugin.h"

static bool names;

bool phos_link_sees_to_names(void)
{
	return names;
}

static int there(int root, const char *name)
{
	return !faccessat(root, name, F_OK, AT_SYMLINK_NOFOLLOW);
}

int main(int count, char **words)
{
	const struct phos_link *links;
	int root, file, made, removed;

	if (count != 4)
		return 1;
	names = atoi(words[1]);
	root = open("/", O_RDONLY | O_DIRECTORY);
	file = open(words[2], O_RDWR);
	if (root < 0 || file < 0)
		return 1;
	made = linkat(file, "", root, words[3], AT_EMPTY_PATH);
	if (made) {
		printf("%s\n", strerror(errno));
		return 0;
	}
	printf("%d\n", there(root, words[3]));
	removed = unlinkat(root, words[3], 0);
	printf("%d %d\n", removed, there(root, words[3]));
	for (size_t i = phos_spared_links(&links); i-- > 0;)
		printf("%s %lu\n", links[i].path, links[i].inode);
	return 0;
}
