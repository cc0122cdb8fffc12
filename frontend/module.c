/* Modules as they are loaded. The driver gets the call first; then we note where the image is: in a loaded library's
 * file, which costs one walk over the loaded libraries, or in memory that the application may free, which costs a copy.
 * phosd is told by the control thread. */
#include "module.h"
#include "cleanup.h"
#include "control.h"
#include "functions.h"
#include "log.h"
#include "phos_api.h"

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Copies are kept until phosd has been told; where there is none, programs that compile without end must not fill the
 * memory. */
#define COPIES_MOST ((size_t)256 << 20)
#define IMAGE_MOST ((size_t)1 << 30)
/* Of PTX, which is short and cannot be had from the driver, copies are kept for good: a restore makes twins of its kernels. */
#define TEXTS_MOST ((size_t)16 << 20)

static pthread_mutex_t module_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list; taken last */
static struct phos_module *modules, *modules_last;
static size_t copied, texts_kept;
static uint64_t last_number;
static bool untold;
static uint64_t told_upto; /* the control thread's own */

struct fatbin_wrapper {
    uint32_t magic, version;
    const void *data;
    const void *other;
};
#define WRAPPER_MAGIC 0x466243b1u
#define CONTAINER_MAGIC 0xBA55ED50u

/* Bytes of the image that begins here, by its own headers; 0: unknown form. */
static uint64_t image_size(const void **image)
{
    uint32_t magic;
    memcpy(&magic, *image, sizeof magic);
    if (magic == WRAPPER_MAGIC) {
        struct fatbin_wrapper wrapper;
        memcpy(&wrapper, *image, sizeof wrapper);
        if (!wrapper.data)
            return 0;
        *image = wrapper.data;
        memcpy(&magic, *image, sizeof magic);
    }
    if (magic == CONTAINER_MAGIC) { /* u32 magic, u16 version, u16 header size, u64 size of what follows */
        uint16_t header;
        uint64_t rest;
        memcpy(&header, (const char *)*image + 6, sizeof header);
        memcpy(&rest, (const char *)*image + 8, sizeof rest);
        return header + rest;
    }
    if (!memcmp(*image, ELFMAG, SELFMAG)) {
        Elf64_Ehdr elf;
        memcpy(&elf, *image, sizeof elf);
        uint64_t end = elf.e_shoff + (uint64_t)elf.e_shnum * elf.e_shentsize;
        uint64_t segments = elf.e_phoff + (uint64_t)elf.e_phnum * elf.e_phentsize;
        return end > segments ? end : segments;
    }
    const unsigned char *text = *image;
    /* PTX begins with a comment, a directive or white space. */
    if (*text == '/' || *text == '.' || *text == ' ' || *text == '\n' || *text == '\t' || *text == '\r')
        return strlen((const char *)text) + 1;
    return 0;
}

struct place {
    uintptr_t address;
    char *path;
    uint64_t offset;
    struct phos_file file; /* the build ID alone */
};

/* ELF-64: u32 sizes of name and content, u32 type, then both, padded. */
static bool find_build_id(const char *notes, uint64_t size, uint64_t align, struct phos_file *file)
{
    for (uint64_t at = 0; at + sizeof(Elf64_Nhdr) <= size;) {
        Elf64_Nhdr note;
        memcpy(&note, notes + at, sizeof note);
        uint64_t name = at + sizeof note, content = at + (sizeof note + note.n_namesz + align - 1) / align * align;
        uint64_t next = content + (note.n_descsz + align - 1) / align * align;
        if (content > size || note.n_descsz > size - content)
            return false;
        if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && !memcmp(notes + name, "GNU", 4)) {
            file->build_id_size = note.n_descsz < PHOS_BUILD_ID_MOST ? note.n_descsz : PHOS_BUILD_ID_MOST;
            memcpy(file->build_id, notes + content, file->build_id_size);
            return true;
        }
        at = next;
    }
    return false;
}

/* Notes are looked at where they are mapped for reading only. */
static bool is_mapped(const struct dl_phdr_info *info, const ElfW(Phdr) *part)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type == PT_LOAD && segment->p_flags & PF_R && !(segment->p_flags & PF_W) &&
            part->p_vaddr >= segment->p_vaddr && part->p_vaddr - segment->p_vaddr <= segment->p_filesz &&
            part->p_filesz <= segment->p_filesz - (part->p_vaddr - segment->p_vaddr))
            return true;
    }
    return false;
}

static int find_place(struct dl_phdr_info *info, size_t size, void *cookie)
{
    (void)size;
    struct place *place = cookie;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + segment->p_vaddr;
        if (segment->p_type != PT_LOAD || place->address - start >= segment->p_filesz || segment->p_flags & PF_W)
            continue;
        char self[4096];
        const char *path = info->dlpi_name;
        if (!path || !*path) {
            ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
            self[length > 0 ? length : 0] = 0;
            path = self;
        }
        if (*path == '/')
            place->path = strdup(path);
        place->offset = segment->p_offset + (place->address - start);
        for (int j = 0; j < info->dlpi_phnum; j++) {
            const ElfW(Phdr) *part = &info->dlpi_phdr[j];
            if (part->p_type == PT_NOTE && is_mapped(info, part) &&
                find_build_id((const char *)info->dlpi_addr + part->p_vaddr, part->p_filesz, part->p_align == 8 ? 8 : 4,
                              &place->file))
                break;
        }
        return 1;
    }
    return 0;
}

/* Which file it is, as far as can be told; of a size that no file has if there is none (any more). */
static void identify(const char *path, struct phos_file *file)
{
    struct stat status;
    file->size = UINT64_MAX;
    if (!path || stat(path, &status))
        return;
    file->device = status.st_dev;
    file->inode = status.st_ino;
    file->mtime_ns = (uint64_t)status.st_mtim.tv_sec * 1000000000u + (uint64_t)status.st_mtim.tv_nsec;
    file->size = (uint64_t)status.st_size;
}

static bool same_file(const struct phos_file *one, const struct phos_file *other)
{
    if (one->inode && other->inode && (one->device != other->device || one->inode != other->inode))
        return false;
    return one->mtime_ns == other->mtime_ns && one->size == other->size && one->build_id_size == other->build_id_size &&
           !memcmp(one->build_id, other->build_id, one->build_id_size);
}

/* Two modules in memory are taken for the same if this and their sizes are; they differ by chance in all but one case in
 * 2^64. Not for adversaries: a program could only mislead the guesses about itself. */
static uint64_t digest_of(const void *bytes, uint64_t size)
{
    const uint64_t key = 0x9e3779b97f4a7c15ull;
    uint64_t sum = size, word, j = 0;
    for (; j < size / 8; j++) {
        memcpy(&word, (const char *)bytes + 8 * j, 8);
        uint64_t x = word ^ ((j + 1) * key);
        sum += word + (x & 0xffffffffu) * (x >> 32);
    }
    word = 0;
    memcpy(&word, (const char *)bytes + 8 * j, size - 8 * j);
    return sum + (word ^ key) * key;
}

/* With module_lock held: the record of these very bytes, of a file or in memory. */
static struct phos_module *known(const char *path, uint64_t offset, const struct phos_file *file, uint64_t digest,
                                 uint64_t size)
{
    for (struct phos_module *m = modules; m; m = m->next) {
        if (m->size != size || !m->path != !path)
            continue;
        if (path ? m->offset == offset && same_file(&m->file, file) && !strcmp(m->path, path)
                 : m->digest == digest)
            return m;
    }
    return NULL;
}

/* Puts a record on the list, unless there is one like it. Answers the module's number. */
static uint64_t note(struct phos_module *module)
{
    pthread_mutex_lock(&module_lock);
    struct phos_module *former = known(module->path, module->offset, &module->file, module->digest, module->size);
    uint64_t number;
    if (former)
        number = former->number;
    else {
        number = module->number = ++last_number;
        if (modules_last)
            modules_last->next = module;
        else
            modules = module;
        modules_last = module;
        copied += module->bytes ? module->size : 0;
        untold = true;
    }
    pthread_mutex_unlock(&module_lock);
    if (former) {
        free(module->path);
        free(module->bytes);
        free(module);
    } else
        phos_control_kick();
    return number;
}

/* A module in memory of which a copy must be kept. *number 0: none can be. Answers whether the copy must be made. */
static bool copy_wanted(uint64_t digest, uint64_t size, uint64_t *number)
{
    PHOS_LOCKED(&module_lock);
    struct phos_module *former = known(NULL, 0, NULL, digest, size);
    *number = former ? former->number : 0;
    return !former && copied + size <= COPIES_MOST;
}

static uint64_t note_image(const char *entry_point, const void *image)
{
    const void *start = image;
    uint64_t size = image ? image_size(&start) : 0, number = 0;
    if (!size || size > IMAGE_MOST)
        return 0;
    struct place place = {.address = (uintptr_t)start};
    dl_iterate_phdr(find_place, &place);
    void *bytes = NULL;
    uint64_t digest = 0;
    if (!place.path) {
        digest = digest_of(start, size);
        if (!copy_wanted(digest, size, &number) || !(bytes = malloc(size)))
            return number;
        memcpy(bytes, start, size);
    }
    struct phos_module *module = calloc(1, sizeof *module);
    if (!module) {
        free(place.path);
        free(bytes);
        return 0;
    }
    *module = (struct phos_module){
        .entry_point = entry_point, .path = place.path, .offset = place.offset, .size = size, .file = place.file,
        .digest = digest, .bytes = bytes};
    identify(module->path, &module->file);
    return note(module);
}

static uint64_t note_file(const char *entry_point, const char *path)
{
    struct stat status;
    struct phos_module *module = path && stat(path, &status) == 0 ? calloc(1, sizeof *module) : NULL;
    if (!module)
        return 0;
    module->entry_point = entry_point;
    module->path = realpath(path, NULL);
    module->size = (uint64_t)status.st_size;
    identify(module->path, &module->file);
    if (module->path)
        return note(module);
    free(module);
    return 0;
}

/* With module_lock held: whether a copy stays. */
static bool keep(const struct phos_module *module)
{
    const char *text = module->bytes;
    if (!text || module->size < 16 || text[module->size - 1] || texts_kept + module->size > TEXTS_MOST)
        return false;
    return *text == '/' || *text == '.' || *text == ' ' || *text == '\n' || *text == '\t' || *text == '\r';
}

static int memfd_of(const struct phos_module *module)
{
    int file = memfd_create("phos-module", MFD_CLOEXEC);
    for (size_t done = 0; file >= 0 && done < module->size;) {
        ssize_t wrote = write(file, (const char *)module->bytes + done, module->size - done);
        if (wrote < 0 && errno == EINTR)
            continue;
        if (wrote <= 0) {
            close(file);
            return -1;
        }
        done += (size_t)wrote;
    }
    return file;
}

bool phos_modules_tell(bool (*send)(const struct phos_module *module, int descriptor))
{
    pthread_mutex_lock(&module_lock);
    struct phos_module *module = untold ? modules : NULL;
    untold = false;
    pthread_mutex_unlock(&module_lock);
    /* Records are never freed and only this thread marks them; the lock guards the links. */
    while (module) {
        if (!module->told) {
            PHOS_CLOSES int file = module->bytes ? memfd_of(module) : -1;
            if (!(module->bytes && file < 0) && !send(module, file))
                return false;
            module->told = true;
            /* It has them now. Kept, they would be hundreds of megabytes of every dump; a phosd that comes later looks
             * for them by their digest, and if it has none takes such a module's kernels by their arguments' layout. */
            pthread_mutex_lock(&module_lock);
            if (!module->kept && keep(module)) {
                module->kept = true;
                texts_kept += module->size;
                copied -= module->size;
            } else if (!module->kept) {
                copied -= module->bytes ? module->size : 0;
                free(module->bytes);
                module->bytes = NULL;
            }
            pthread_mutex_unlock(&module_lock);
        }
        told_upto = module->number;
        pthread_mutex_lock(&module_lock);
        module = module->next;
        pthread_mutex_unlock(&module_lock);
    }
    return true;
}

uint64_t phos_modules_told(void)
{
    return told_upto;
}

void phos_modules_restored(void)
{
    PHOS_LOCKED(&module_lock);
    for (struct phos_module *m = modules; m; m = m->next)
        m->file.device = m->file.inode = 0;
}

void phos_modules_untell(void)
{
    PHOS_LOCKED(&module_lock);
    told_upto = 0;
    for (struct phos_module *m = modules; m; m = m->next)
        m->told = false;
    untold = modules != NULL;
}

CUresult serve_cuModuleLoad(CUmodule *module, const char *path)
{
    CUresult result = phos_real.cuModuleLoad(module, path);
    if (result == CUDA_SUCCESS)
        phos_functions_module(*module, note_file("cuModuleLoad", path));
    return result;
}

static CUresult loaded(CUresult result, const CUmodule *module, const char *entry_point, const void *image)
{
    if (result == CUDA_SUCCESS)
        phos_functions_module(*module, note_image(entry_point, image));
    return result;
}

CUresult serve_cuModuleLoadData(CUmodule *module, const void *image)
{
    return loaded(phos_real.cuModuleLoadData(module, image), module, "cuModuleLoadData", image);
}

CUresult serve_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                                  void **values)
{
    return loaded(phos_real.cuModuleLoadDataEx(module, image, count, options, values), module, "cuModuleLoadDataEx",
                  image);
}

CUresult serve_cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return loaded(phos_real.cuModuleLoadFatBinary(module, image), module, "cuModuleLoadFatBinary", image);
}

CUresult serve_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values,
                                 unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count)
{
    CUresult result =
        phos_real.cuLibraryLoadData(library, code, jit_options, jit_values, jit_count, options, values, count);
    if (result == CUDA_SUCCESS)
        phos_functions_library(*library, note_image("cuLibraryLoadData", code));
    return result;
}

CUresult serve_cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *jit_options, void **jit_values,
                                     unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count)
{
    CUresult result =
        phos_real.cuLibraryLoadFromFile(library, path, jit_options, jit_values, jit_count, options, values, count);
    if (result == CUDA_SUCCESS)
        phos_functions_library(*library, note_file("cuLibraryLoadFromFile", path));
    return result;
}

CUresult serve_cuLinkComplete(CUlinkState state, void **cubin, size_t *size)
{
    CUresult result = phos_real.cuLinkComplete(state, cubin, size);
    if (result == CUDA_SUCCESS && cubin)
        note_image("cuLinkComplete", *cubin);
    return result;
}
