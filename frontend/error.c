#include "error.h"

#include <stdarg.h>

const char *phos_result_text(CUresult result, char buffer[64])
{
    const char *name = NULL;
    if (!phos_real.cuGetErrorName || phos_real.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "error";
    snprintf(buffer, 64, "%s (%d)", name, (int)result);
    return buffer;
}

bool phos_fail(struct phos_error *error, CUresult code, const char *format, ...)
{
    if (error->text[0])
        return false;
    va_list arguments;
    va_start(arguments, format);
    int used = vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    error->code = code;
    if (code == CUDA_ERROR_DEINITIALIZED) { /* whatever was to be done, that is why it could not be */
        snprintf(error->text, sizeof error->text, "the process is exiting");
        return false;
    }
    char text[64];
    if (code != CUDA_SUCCESS && used > 0 && (size_t)used < sizeof error->text)
        snprintf(error->text + used, sizeof error->text - (size_t)used, ": %s", phos_result_text(code, text));
    return false;
}
