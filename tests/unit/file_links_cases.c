/*
 * criu_plugin/file_links.c: which links it makes. file_links_cases NAMES FOLDER NAME: makes a link to a file that is
 * open and lies in FOLDER, as CRIU does, and removes it. Prints after each whether the link is there.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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
	int root, file, made, removed;

	if (count != 4)
		return 1;
	names = atoi(words[1]);
	root = open("/", O_RDONLY | O_DIRECTORY);
	file = open(words[2], O_TMPFILE | O_RDWR, 0600);
	if (root < 0 || file < 0)
		return 1;
	made = linkat(file, "", root, words[3], AT_EMPTY_PATH);
	if (made) { /* somebody else's: it is not to be removed */
		printf("%s\n", errno == EEXIST ? "exists" : "failed");
		return 0;
	}
	printf("%d\n", there(root, words[3]));
	removed = unlinkat(root, words[3], 0);
	printf("%d %d\n", removed, there(root, words[3]));
	return 0;
}
