/* The table of access descriptors that phosd hands a frontend, in a memfd: what each kernel does through the addresses
 * among its arguments (gpu_engine/spec/descriptor.py has the meaning, gpu_engine/spec/table.py writes it). Little-endian,
 * the arrays follow the header in this order, each record 8-byte aligned. */
#pragma once
#include <stdint.h>

#define PHOS_ACCESS_MAGIC 0x31434341534f4850ull /* "PHOSACC1" */

enum phos_access_kind { PHOS_FIELD_POINTER = 0, PHOS_FIELD_SCAN = 1, PHOS_FIELD_TENSOR_MAP = 2, PHOS_FIELD_TABLE = 3 };
enum { PHOS_READS = 1, PHOS_WRITES = 2 };

struct phos_access_header {
    uint64_t magic;
    uint32_t kernels, parameters, fields;
    uint32_t zero;
};

struct phos_access_kernel { /* sorted by module, then name_hash */
    uint64_t module;    /* the number under which the frontend told of the module */
    uint64_t name_hash; /* FNV-1a, 64 bits, of the name without its terminator */
    uint32_t first_parameter, parameters;
    uint32_t first_field, fields;
    uint32_t block_size; /* bytes of the parameter block */
    uint8_t indirect;    /* PHOS_READS | PHOS_WRITES through addresses that are not among the arguments */
    uint8_t source;      /* Source in descriptor.py */
    uint8_t guessed;     /* 1: its code cannot be followed; what it does beyond its arguments is not known */
    uint8_t zero;
};

struct phos_access_parameter {
    uint32_t offset, size;
};

struct phos_access_field {
    uint32_t offset, size;
    uint8_t access; /* PHOS_READS | PHOS_WRITES */
    uint8_t kind;   /* enum phos_access_kind */
    uint16_t zero;
    uint32_t zero2;
};
