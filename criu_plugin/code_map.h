/* Whose code lies where in a process. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum code { ELSEWHERE, VDSO, LIBC, DRIVER };

struct range {
	uint64_t begin, end;
	enum code code;
};

struct code_map {
	struct range *ranges;
	size_t count;
};

/* All code of a process, by address. Returns 0, or -1 after it has logged why; to be freed in both cases. */
int phos_read_code(int pid, struct code_map *map);
void phos_free_code(struct code_map *map);

const struct range *phos_range_at(const struct code_map *map, uint64_t address);
enum code phos_code_at(const struct code_map *map, uint64_t address);
