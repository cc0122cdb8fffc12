/* What an open file is called, by /proc. */
#pragma once

#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

/* Writes it into `name`, of `size` bytes, cut off if it is longer. False if there is no such file. */
static inline bool phos_name_of(int descriptor, char *name, size_t size)
{
	char link[sizeof("/proc/self/fd/") + 3 * sizeof(int)];
	ssize_t length;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
	length = readlink(link, name, size - 1);
	if (length < 0)
		return false;
	name[length] = '\0';
	return true;
}
