#include "access.h"
#include "phos_api.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TABLE_MOST ((size_t)1 << 30)
#define BLOCK_MOST ((uint32_t)1 << 16) /* kernels take 32764 bytes of arguments at most, so far */
#define ALL (PHOS_READS | PHOS_WRITES)

static bool kernel_sound(const struct phos_access_table *table, const struct phos_access_header *header, uint32_t index)
{
    const struct phos_access_kernel *kernel = &table->kernels[index];
    if (kernel->first_parameter > header->parameters ||
        kernel->parameters > header->parameters - kernel->first_parameter || kernel->first_field > header->fields ||
        kernel->fields > header->fields - kernel->first_field || kernel->block_size > BLOCK_MOST || kernel->indirect & ~ALL)
        return false;
    uint32_t end = 0;
    for (uint32_t i = 0; i < kernel->parameters; i++) {
        const struct phos_access_parameter *p = &table->parameters[kernel->first_parameter + i];
        if (p->offset < end || p->offset > kernel->block_size || p->size > kernel->block_size - p->offset)
            return false;
        end = p->offset + p->size;
    }
    for (uint32_t i = 0; i < kernel->fields; i++) {
        const struct phos_access_field *f = &table->fields[kernel->first_field + i];
        if (f->offset > kernel->block_size || f->size > kernel->block_size - f->offset || f->access & ~ALL ||
            f->kind > PHOS_FIELD_TABLE ||
            ((f->kind == PHOS_FIELD_POINTER || f->kind == PHOS_FIELD_TABLE) && f->size != 8) ||
            (f->kind == PHOS_FIELD_TENSOR_MAP && f->size != sizeof(CUtensorMap)))
            return false;
    }
    if (!index)
        return true;
    const struct phos_access_kernel *former = kernel - 1;
    return former->module < kernel->module ||
           (former->module == kernel->module && former->name_hash < kernel->name_hash);
}

static const char *table_check(struct phos_access_table *table, size_t size)
{
    struct phos_access_header header;
    if (size < sizeof header)
        return "the table is shorter than its header";
    memcpy(&header, table->memory, sizeof header);
    if (header.magic != PHOS_ACCESS_MAGIC)
        return "it is not a table of access descriptors";
    /* 32 bits each: the sum cannot overflow. */
    size_t kernels = (size_t)header.kernels * sizeof *table->kernels;
    size_t parameters = (size_t)header.parameters * sizeof *table->parameters;
    size_t fields = (size_t)header.fields * sizeof *table->fields;
    if (sizeof header + kernels + parameters + fields != size)
        return "the table's size is not what its header says";
    const char *start = table->memory;
    table->count = header.kernels;
    table->kernels = (const void *)(start + sizeof header);
    table->parameters = (const void *)(start + sizeof header + kernels);
    table->fields = (const void *)(start + sizeof header + kernels + parameters);
    for (uint32_t i = 0; i < header.kernels; i++)
        if (!kernel_sound(table, &header, i))
            return "a record of the table is out of bounds or out of order";
    return NULL;
}

const char *phos_access_read(int descriptor, struct phos_access_table *table)
{
    struct stat status;
    *table = (struct phos_access_table){0};
    if (descriptor < 0)
        return "no table came with the message";
    if (fstat(descriptor, &status) || status.st_size < 0 || (size_t)status.st_size > TABLE_MOST)
        return "the table cannot be read or is too large";
    size_t size = (size_t)status.st_size, done = 0;
    if (!(table->memory = malloc(size + 1)))
        return "there is no host memory for the table";
    const char *problem = NULL;
    while (done < size && !problem) {
        ssize_t got = pread(descriptor, (char *)table->memory + done, size - done, (off_t)done);
        if (got > 0)
            done += (size_t)got;
        else if (got == 0 || errno != EINTR)
            problem = "the table could not be read to its end";
    }
    if (!problem)
        problem = table_check(table, size);
    if (problem)
        phos_access_free(table);
    return problem;
}

void phos_access_free(struct phos_access_table *table)
{
    free(table->memory);
    *table = (struct phos_access_table){0};
}

const struct phos_access_kernel *phos_access_find(const struct phos_access_table *table, uint64_t module, uint64_t hash)
{
    uint32_t low = 0, high = table->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct phos_access_kernel *k = &table->kernels[middle];
        if (k->module == module && k->name_hash == hash)
            return k;
        if (k->module < module || (k->module == module && k->name_hash < hash))
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}
