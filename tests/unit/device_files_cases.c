/*
 * criu_plugin/device_files.c: which files it lets CRIU leave out. device_files_cases BEGIN... : how such files' names begin.
 * Prints what it makes of /dev/zero, of a memfd and of a closed descriptor, and what a task gets in place of such a file.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "criu_log.h"
#include "phos_plugin.h"

int main(int count, char **words)
{
	int device = open("/dev/zero", O_RDWR), memory = memfd_create("dev", 0), restored;
	struct stat null, got;
	bool open_, mapped;

	if (phos_device_files_begin(words + 1, (size_t)count - 1))
		return 1;
	for (int i = 1; i < count; i++)
		words[i][0] = '?'; /* its own copies are what counts */
	printf("%d %d %d\n", phos_dump_device_file(memory), phos_dump_device_file(-1), phos_leave_out_mapping(memory));
	phos_device_files_found(&open_, &mapped);
	printf("%d %d\n", open_, mapped);
	printf("%d\n", phos_dump_device_file(device));
	phos_device_files_found(&open_, &mapped);
	printf("%d %d\n", open_, mapped);
	printf("%d\n", phos_leave_out_mapping(device));
	phos_device_files_found(&open_, &mapped);
	printf("%d %d\n", open_, mapped);
	restored = phos_restore_device_file();
	printf("%d\n", !stat("/dev/null", &null) && !fstat(restored, &got) && null.st_rdev == got.st_rdev &&
			       (fcntl(restored, F_GETFL) & O_ACCMODE) == O_RDWR);
	return 0;
}
