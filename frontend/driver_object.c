/* See driver_object.h. Names are those of the ELF specification and its supplements for each processor. */
#define _GNU_SOURCE
#include "driver_object.h"
#include "runtime.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#define IS_SLOT(type) false
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards `found` until it is set; constant afterwards */
static struct phos_driver_object found;

static int look_at(struct dl_phdr_info *info, size_t ignored, void *cookie)
{
    (void)ignored;
    uintptr_t inside = *(uintptr_t *)cookie;
    struct phos_driver_object object = {.begin = UINTPTR_MAX, .base = info->dlpi_addr};
    bool is_it = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + segment->p_vaddr, end = start + segment->p_memsz;
        if (segment->p_type == PT_DYNAMIC)
            object.dynamic = (const ElfW(Dyn) *)start;
        if (segment->p_type == PT_GNU_RELRO) {
            object.relro_begin = start;
            object.relro_end = end & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1); /* what shares its last page with data is left */
        }
        if (segment->p_type != PT_LOAD)
            continue;
        object.begin = start < object.begin ? start : object.begin;
        object.end = end > object.end ? end : object.end;
        is_it |= inside >= start && inside < end;
    }
    if (!is_it)
        return 0;
    found = object;
    return 1;
}

const struct phos_driver_object *phos_driver_object(void)
{
    uintptr_t inside = (uintptr_t)phos_real.cuMemCreate;
    pthread_mutex_lock(&lock);
    bool known = found.end || (inside && dl_iterate_phdr(look_at, &inside));
    pthread_mutex_unlock(&lock);
    return known ? &found : NULL;
}

/* The dynamic linker has made addresses of these, but not on every processor. */
static uintptr_t address_of(const struct phos_driver_object *driver, const ElfW(Dyn) *entry)
{
    uintptr_t value = entry->d_un.d_ptr;
    return value < driver->base ? driver->base + value : value;
}

size_t phos_driver_slots(const struct phos_driver_object *driver, const char *name, void **slots[PHOS_SLOTS])
{
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL}; /* of functions, and of all else */
    size_t sizes[2] = {0, 0}, relative = 0, count = 0;
    bool with_addends = true;
    for (const ElfW(Dyn) *entry = driver->dynamic; entry && entry->d_tag != DT_NULL; entry++)
        switch (entry->d_tag) {
        case DT_SYMTAB: symbols = (const ElfW(Sym) *)address_of(driver, entry); break;
        case DT_STRTAB: names = (const char *)address_of(driver, entry); break;
        case DT_JMPREL: tables[0] = (const ElfW(Rela) *)address_of(driver, entry); break;
        case DT_PLTRELSZ: sizes[0] = entry->d_un.d_val; break;
        case DT_PLTREL: with_addends = entry->d_un.d_val == DT_RELA; break;
        case DT_RELA: tables[1] = (const ElfW(Rela) *)address_of(driver, entry); break;
        case DT_RELASZ: sizes[1] = entry->d_un.d_val; break;
        case DT_RELACOUNT: relative = entry->d_un.d_val; break; /* those first ones are of no symbol */
        default: break;
        }
    if (!symbols || !names || !with_addends)
        return 0;
    for (int table = 0; table < 2; table++)
        for (size_t i = table ? relative : 0; tables[table] && i < sizes[table] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Rela) *r = &tables[table][i];
            if (!IS_SLOT(ELF64_R_TYPE(r->r_info)) || strcmp(names + symbols[ELF64_R_SYM(r->r_info)].st_name, name))
                continue;
            if (count < PHOS_SLOTS)
                slots[count] = (void **)(driver->base + r->r_offset);
            count++;
        }
    return count;
}
