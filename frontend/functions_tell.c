/* Telling phosd the names of kernels. */
#include "functions_private.h"
#include "cleanup.h"

#include <string.h>

#define NAMES_MOST 256 /* a packet */
#define NAME_BYTES_MOST 32768

static uint64_t kernels_told; /* names, over this connection */

bool phos_kernels_tell(uint64_t upto, bool (*send)(uint64_t module, const char *const *names, size_t count))
{
    /* Records are never freed, and only this thread marks them; the lock guards the links. */
    pthread_mutex_lock(&phos_function_lock);
    struct phos_kernel *start = phos_kernels_untold ? phos_kernels : NULL;
    phos_kernels_untold = false;
    bool left = false;
    for (bool more = true; more;) {
        const char *names[NAMES_MOST];
        struct phos_kernel *chosen[NAMES_MOST];
        size_t count = 0, bytes = 0;
        uint64_t module = 0;
        more = false;
        for (struct phos_kernel *k = start; k; k = k->next) {
            if (k->told || !k->module || !k->name) {
                if (k == start)
                    start = k->next;
                continue;
            }
            if (k->module > upto) {
                left = true; /* its module comes first */
                continue;
            }
            size_t length = strlen(k->name) + 8;
            if (module && (k->module != module || count == NAMES_MOST || bytes + length > NAME_BYTES_MOST)) {
                more = true;
                continue;
            }
            if (length > NAME_BYTES_MOST) { /* no packet holds it: its layout will do */
                k->told = true;
                continue;
            }
            module = k->module;
            bytes += length;
            chosen[count] = k;
            names[count++] = k->name;
        }
        if (!count)
            break;
        pthread_mutex_unlock(&phos_function_lock);
        bool sent = send(module, names, count);
        pthread_mutex_lock(&phos_function_lock);
        if (!sent) {
            phos_kernels_untold = true;
            pthread_mutex_unlock(&phos_function_lock);
            return false;
        }
        for (size_t i = 0; i < count; i++)
            chosen[i]->told = true;
        kernels_told += count;
    }
    phos_kernels_untold |= left;
    pthread_mutex_unlock(&phos_function_lock);
    return true;
}

void phos_kernels_untell(void)
{
    PHOS_LOCKED(&phos_function_lock);
    for (struct phos_kernel *k = phos_kernels; k; k = k->next)
        k->told = false;
    phos_kernels_untold = phos_kernels != NULL;
    kernels_told = 0;
}

bool phos_kernels_count(uint64_t *count, uint64_t *told)
{
    PHOS_LOCKED(&phos_function_lock);
    bool all = true;
    *count = 0;
    for (struct phos_kernel *k = phos_kernels; k; k = k->next) {
        *count += k->module && k->name;
        all &= k->told || !k->module || !k->name;
    }
    *told = kernels_told;
    return all;
}
