/* /proc/PID/maps, read for code: libc's, the driver's, the vDSO's, and any other. */
#include "code_map.h"
#include "phos_plugin.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool begins(const char *name, const char *with)
{
	return !strncmp(name, with, strlen(with));
}

static enum code code_of(const char *file)
{
	static const char *const libc[] = { "libc", "ld", "libpthread", "libdl", "libm", "librt" };
	const char *slash = strrchr(file, '/'), *name = slash ? slash + 1 : file;

	if (begins(name, "libcuda.so") || begins(name, "libnvidia-"))
		return DRIVER;
	if (!strcmp(name, "[vdso]"))
		return VDSO;
	/* libc.so.6, ld-linux-x86-64.so.2; before glibc 2.34 libc-2.31.so, ld-2.31.so */
	for (size_t i = 0; i < sizeof(libc) / sizeof(*libc); i++) {
		const char *rest = name + strlen(libc[i]);

		if (begins(name, libc[i]) && (begins(rest, ".so") || begins(rest, "-linux") || (*rest == '-' && isdigit(rest[1]))))
			return LIBC;
	}
	return ELSEWHERE;
}

int phos_read_code(int pid, struct code_map *map)
{
	unsigned long begin, end;
	char path[32], *line = NULL;
	size_t size = 0;
	FILE *maps;

	*map = (struct code_map){ 0 };
	snprintf(path, sizeof(path), "/proc/%d/maps", pid);
	maps = fopen(path, "re");
	if (!maps) {
		pr_err("%s cannot be read: %s\n", path, strerror(errno));
		return -1;
	}
	while (getline(&line, &size, maps) > 0) {
		struct range *grown;
		char access[8];
		int name = 0;

		if (sscanf(line, "%lx-%lx %7s %*s %*s %*s %n", &begin, &end, access, &name) < 3 || !name || access[2] != 'x')
			continue;
		/* A name may hold blanks, or be missing: of code that was made while the program runs. */
		line[strcspn(line, "\n")] = 0;
		grown = realloc(map->ranges, (map->count + 1) * sizeof(*grown));
		if (!grown) {
			pr_err("no memory to note where the code of process %d lies\n", pid);
			free(line);
			fclose(maps);
			return -1;
		}
		map->ranges = grown;
		map->ranges[map->count++] = (struct range){ .begin = begin, .end = end, .code = code_of(line + name) };
	}
	free(line);
	fclose(maps);
	return 0;
}

const struct range *phos_range_at(const struct code_map *map, uint64_t address)
{
	size_t low = 0, high = map->count;

	while (low < high) {
		size_t middle = (low + high) / 2;

		if (map->ranges[middle].end <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low < map->count && map->ranges[low].begin <= address ? &map->ranges[low] : NULL;
}

enum code phos_code_at(const struct code_map *map, uint64_t address)
{
	const struct range *range = phos_range_at(map, address);

	return range ? range->code : ELSEWHERE;
}

void phos_free_code(struct code_map *map)
{
	free(map->ranges);
	*map = (struct code_map){ 0 };
}
