/* What native code of phosd's does with the chunk table of a window (chunk_table.c). */
#pragma once
#include <stdint.h>

struct phos_chunk_table;

/* From now on anybody may write to the chunk. */
void phos_chunks_saved(struct phos_chunk_table *table, uint32_t chunk);
