/* The hash of a chunk; chunk_hash.c has its formula. */
#pragma once
#include <stdint.h>

#define PHOS_HASH_SIZE 16

void phos_chunk_hash(const unsigned char *data, uint64_t bytes, uint64_t sums[2]);
