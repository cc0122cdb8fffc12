/* Finding the libraries' own functions (library.h says why each step is as it is).
 *
 * No lock of ours is held over a dl* function: those take the dynamic linker's lock, which another thread may hold while
 * it runs a constructor that calls a wrapper. Two threads may find the same thing at once; the first to publish wins.
 *
 * Calls of dlvsym(RTLD_NEXT) must not be tail calls: what comes next depends on who asks. */
#include "library.h"
#include "cleanup.h"
#include "log.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

_Atomic int phos_library_setting;

int phos_library_ask_setting(void)
{
    const char *setting = getenv("PHOS_LIBRARIES");
    int answer = setting && !strcmp(setting, "off") ? 2 : 1;
    atomic_store_explicit(&phos_library_setting, answer, memory_order_relaxed);
    return answer;
}

/* ---- objects in this process */

/* The object that holds an address, or NULL. */
static struct link_map *object_of(const void *address, void **base)
{
    Dl_info info;
    struct link_map *map = NULL;
    if (!address || !dladdr1(address, &info, (void **)&map, RTLD_DL_LINKMAP) || !map)
        return NULL;
    if (base)
        *base = info.dli_fbase;
    return map;
}

static void *base_of(const void *address)
{
    void *base = NULL;
    return object_of(address, &base) ? base : NULL;
}

static bool is_ours(const void *address)
{
    return base_of(address) == base_of((void *)is_ours);
}

static const char *soname_of(const struct link_map *map)
{
    const char *strings = NULL;
    const ElfW(Dyn) *soname = NULL;
    for (const ElfW(Dyn) *entry = map->l_ld; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB) /* glibc relocates it in place on every machine we run on */
            strings = (const char *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_SONAME)
            soname = entry;
    }
    return strings && soname ? strings + soname->d_un.d_val : "";
}

/* A reference to a loaded object; its own name is "" for the program. */
static void *reopen(const char *name)
{
    return dlopen(*name ? name : NULL, RTLD_LAZY | RTLD_NOLOAD);
}

static void *next_definition(const char *function)
{
    void *volatile found = phos_resolve_dlsym(RTLD_NEXT, function);
    return found;
}

/* Whether the function at this address is known to the dynamic linker without a version. */
static bool has_no_version(const void *address)
{
    Dl_info info;
    const ElfW(Sym) *symbol = NULL, *symbols = NULL;
    const ElfW(Half) *versions = NULL;
    struct link_map *map = object_of(address, NULL);
    if (!map || !dladdr1(address, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol || info.dli_saddr != address)
        return false;
    for (const ElfW(Dyn) *entry = map->l_ld; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
        else if (entry->d_tag == DT_VERSYM)
            versions = (const ElfW(Half) *)entry->d_un.d_ptr;
    }
    return symbols && (!versions || (versions[symbol - symbols] & 0x7fff) <= VER_NDX_GLOBAL);
}

/* Moves whenever an object comes or goes. */
static int read_changes(struct dl_phdr_info *info, size_t size, void *changes)
{
    (void)size;
    *(uint64_t *)changes = info->dlpi_adds + info->dlpi_subs;
    return 1;
}

static uint64_t changes_now(void)
{
    uint64_t changes = 0;
    dl_iterate_phdr(read_changes, &changes);
    return changes;
}

/* ---- libraries whose symbols have versions */

static void *versioned_symbol(void *handle, const struct phos_library_entry *entry)
{
    void *volatile found = dlvsym(handle, entry->function, entry->library->soname);
    return found;
}

static void settle(struct phos_library_entry *entry, void *real)
{
    atomic_store_explicit(&entry->real, real, memory_order_release);
    if (!entry->library->always || !phos_library_enabled()) /* else its calls go through the wrapper, window or not */
        atomic_store_explicit(&entry->target, real, memory_order_release);
}

/* Binds the library to one of the objects of its name: the one that the dynamic linker would have taken for callers
 * that name the library as a dependency. That is what the global scope has, or else the first one loaded: dependencies
 * on a name that is loaded already never load a second object. */
static bool bind_versioned(struct phos_library *library, const struct phos_library_entry *entry, const struct link_map *global)
{
    if (atomic_load_explicit(&library->handle, memory_order_acquire))
        return true;
    void *handle = global ? reopen(global->l_name) : dlopen(library->soname, RTLD_LAZY | RTLD_NOLOAD);
    void *found = handle ? versioned_symbol(handle, entry) : NULL;
    if (!found || is_ours(found)) {
        if (handle)
            dlclose(handle);
        return false;
    }
    void *none = NULL;
    if (atomic_compare_exchange_strong(&library->base, &none, base_of(found)) || none == base_of(found))
        atomic_store_explicit(&library->handle, handle, memory_order_release);
    else
        dlclose(handle); /* another thread was faster, and saw another world: its answer stands, and comes at once */
    return atomic_load_explicit(&library->handle, memory_order_acquire) != NULL;
}

static void *real_versioned(struct phos_library_entry *entry)
{
    struct phos_library *library = entry->library;
    void *global = next_definition(entry->function);
    if (global && !is_ours(global) && has_no_version(global)) {
        /* Somebody else stands in front of this function, and comes after us: a second preloaded library, say. The
         * dynamic linker takes a definition without a version for any. */
        struct link_map *map = object_of(global, NULL);
        if (map && reopen(map->l_name)) {
            settle(entry, global);
            return global;
        }
    }
    global = versioned_symbol(RTLD_NEXT, entry);
    struct link_map *map = global && !is_ours(global) ? object_of(global, NULL) : NULL;
    if (!bind_versioned(library, entry, map))
        return NULL;
    void *found = versioned_symbol(atomic_load(&library->handle), entry);
    if (!found || base_of(found) != atomic_load(&library->base))
        return NULL;
    settle(entry, found);
    return found;
}

/* ---- callers of a library without versions */

enum { MOST_OBJECTS = 4096, MOST_DEFINITIONS = 8 };

struct names {
    char *list[MOST_OBJECTS];
    size_t count;
};

static int note_name(struct dl_phdr_info *info, size_t size, void *cookie)
{
    (void)size;
    struct names *names = cookie;
    char *name = names->count < MOST_OBJECTS ? strdup(info->dlpi_name) : NULL;
    if (name)
        names->list[names->count++] = name;
    return 0;
}

/* Every definition of a name in the process, ours left out. */
static size_t definitions(const char *function, void *found[MOST_DEFINITIONS])
{
    struct names *names = calloc(1, sizeof *names);
    size_t count = 0;
    if (!names)
        return 0;
    dl_iterate_phdr(note_name, names); /* the names first: opening an object in there could wait for ourselves */
    for (size_t i = 0; i < names->count; i++) {
        void *handle = reopen(names->list[i]);
        void *symbol = handle ? phos_resolve_dlsym(handle, function) : NULL;
        bool known = !symbol || is_ours(symbol) || count == MOST_DEFINITIONS;
        for (size_t j = 0; j < count && !known; j++)
            known = found[j] == symbol;
        if (!known)
            found[count++] = symbol;
        if (handle)
            dlclose(handle);
        free(names->list[i]);
    }
    free(names);
    return count;
}

/* As the dynamic linker binds a caller's reference: the global scope, then the caller and its dependencies. */
static void *definition_for(struct phos_library_entry *entry, const void *caller, void *found[], size_t count)
{
    void *global = next_definition(entry->function);
    if (global && !is_ours(global))
        return global;
    struct link_map *map = caller && !is_ours(caller) ? object_of(caller, NULL) : NULL;
    void *handle = map ? reopen(map->l_name) : NULL;
    void *own = handle ? phos_resolve_dlsym(handle, entry->function) : NULL;
    if (handle)
        dlclose(handle);
    if (own && !is_ours(own))
        return own;
    for (size_t i = 0; i < count; i++) {
        struct link_map *holder = object_of(found[i], NULL);
        if (holder && !strcmp(soname_of(holder), entry->library->soname))
            return found[i];
    }
    return count ? found[0] : NULL;
}

/* What this thread found last: (entry, caller) to function, while no object comes or goes. */
struct memory {
    struct phos_library_entry *entry;
    const void *caller;
    uint64_t changes;
    void *real;
};
static __thread struct memory memory[16] __attribute__((tls_model("initial-exec")));

static void *real_plain(struct phos_library_entry *entry, const void *caller)
{
    uint64_t changes = changes_now();
    struct memory *last = &memory[((uintptr_t)entry / sizeof *entry + (uintptr_t)caller / 4) % 16];
    if (last->entry == entry && last->caller == caller && last->changes == changes)
        return last->real;
    void *found[MOST_DEFINITIONS];
    size_t count = definitions(entry->function, found);
    if (!count)
        return NULL;
    void *real = count == 1 ? found[0] : definition_for(entry, caller, found, count);
    void *global = next_definition(entry->function);
    struct link_map *map = object_of(real, NULL);
    if (count == 1 && real == global && map && reopen(map->l_name)) {
        /* In the global scope, and the only one: whatever is loaded later, every caller is bound to it. */
        settle(entry, real);
        return real;
    }
    *last = (struct memory){entry, caller, changes_now(), real};
    if (last->changes != changes) /* something came or went while we looked: use it, but look again */
        last->entry = NULL;
    return real;
}

/* ---- what the wrappers ask */

void *phos_library_find(struct phos_library_entry *entry, const void *caller)
{
    void *real = NULL;
    if (entry->library->linked)
        real = entry->library->versioned ? real_versioned(entry) : real_plain(entry, caller);
    if (!real)
        phos_warn_once("%s was called, but %s is not loaded: the call fails", entry->function, entry->library->soname);
    return real;
}

struct sibling {
    const void *real;
    const char *name;
    void *found;
};
static pthread_mutex_t siblings_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sibling siblings[64]; /* under siblings_lock; an older one makes room */
static size_t sibling_count;

void *phos_library_sibling(const void *real, const char *name)
{
    {
        PHOS_LOCKED(&siblings_lock);
        for (size_t i = 0; i < sibling_count && i < 64; i++)
            if (siblings[i].real == real && siblings[i].name == name)
                return siblings[i].found;
    }
    void *base;
    struct link_map *map = object_of(real, &base);
    void *handle = map ? reopen(map->l_name) : NULL;
    void *found = handle ? phos_resolve_dlsym(handle, name) : NULL;
    if (found && base_of(found) != base)
        found = NULL; /* a dependency's, of another version perhaps */
    if (handle)
        dlclose(handle);
    PHOS_LOCKED(&siblings_lock);
    siblings[sibling_count++ % 64] = (struct sibling){real, name, found};
    return found;
}

/* ---- dlsym */

bool phos_library_named(const char *name)
{
    size_t low = 0, high = phos_library_function_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        int order = strcmp(name, phos_library_functions[middle]);
        if (!order)
            return true;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return false;
}

static void *answer(const char *name, void *found)
{
    void *base;
    struct link_map *map = object_of(found, &base);
    if (!map || !phos_library_enabled() || is_ours(found))
        return found;
    const char *soname = soname_of(map);
    for (size_t i = 0; i < phos_library_entry_count; i++) {
        struct phos_library_entry *entry = &phos_library_entries[i];
        struct phos_library *library = entry->library;
        if (library->linked != library->versioned || strcmp(library->soname, soname) || strcmp(entry->function, name))
            continue;
        void *real = NULL;
        if (library->versioned) {
            real = atomic_load_explicit(&entry->real, memory_order_acquire);
            if (!real)
                real = real_versioned(entry);
        } else {
            void *handle = reopen(map->l_name), *none = NULL;
            bool first = handle && atomic_compare_exchange_strong(&library->base, &none, base);
            if (handle && !first)
                dlclose(handle);
            if (!first && none != base)
                return found; /* a second copy: its functions are its own */
            settle(entry, found);
            real = found;
        }
        return real == found ? entry->hook : found;
    }
    return found;
}

void *phos_library_answer(const char *name, void *found)
{
    void *chosen = answer(name, found);
    dlerror(); /* dlsym succeeded: a caller who asks dlerror must not hear of what we tried after it */
    return chosen;
}
