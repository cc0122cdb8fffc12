/*
 * Device files of the GPU's driver that tasks have open or mapped when CRIU dumps them. The driver has closed its own in
 * the processes that it has saved (phosd looks). What is left is of children that were forked after CUDA had been
 * initialised, as PyTorch's DataLoader forks its workers: they have all that their parent had, and no CUDA, as the driver
 * answers them nothing. Descriptors are restored as /dev/null, under their numbers. Mappings are not
 * restored: CRIU is told to leave them to a plugin, and phosd takes them out of the image (images/criu_mappings.py).
 * Mapping something else in a restore (UPDATE_VMA_MAP) would leak a descriptor into the task: open_filemap() of
 * files-reg.c, CRIU 4.1.1, takes one only for the first of neighbouring mappings.
 */
#include "descriptor_name.h"
#include "phos_plugin.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* CRIU's main thread only. */
static struct {
	char **begins; /* how links to such files begin */
	size_t count;
	bool open, mapped; /* what CRIU has come across */
} files;

int phos_device_files_begin(char **begins, size_t count)
{
	if (!count)
		return 0;
	files.begins = calloc(count, sizeof(*files.begins));
	for (; files.begins && files.count < count; files.count++)
		if (!(files.begins[files.count] = strdup(begins[files.count])))
			break;
	if (files.count == count)
		return 0;
	pr_err("no memory to note what device files are called\n");
	return -1;
}

static bool is_ours(int fd)
{
	char name[PATH_MAX];

	if (!files.count || !phos_name_of(fd, name, sizeof(name)))
		return false;
	for (size_t i = 0; i < files.count; i++)
		if (!strncmp(name, files.begins[i], strlen(files.begins[i])))
			return true;
	return false;
}

int phos_dump_device_file(int fd)
{
	if (!is_ours(fd))
		return -ENOTSUP;
	files.open = true;
	return 0;
}

int phos_leave_out_mapping(int fd)
{
	if (!is_ours(fd))
		return -ENOTSUP;
	files.mapped = true;
	return 0;
}

void phos_device_files_found(bool *open, bool *mapped)
{
	*open = files.open;
	*mapped = files.mapped;
}

int phos_restore_device_file(void)
{
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		pr_err("/dev/null cannot be opened: %s\n", strerror(errno));
	return fd;
}
