/* The frontend's one error type: a sentence, and the driver's code where there is one. */
#pragma once
#include "phos_api.h"
#include <stdbool.h>
#include <stdio.h>

struct phos_error {
    CUresult code; /* CUDA_SUCCESS if the driver is not the cause */
    char text[240];
};

#define PHOS_CHECKED __attribute__((warn_unused_result))

/* Sets *error unless it is set already (the first failure is the cause) and answers false, to be returned.
 * Of a driver that has shut down it says that the process is exiting. */
__attribute__((format(printf, 3, 4))) bool phos_fail(struct phos_error *error, CUresult code, const char *format, ...);
/* "out of memory (2)" and the like, from the driver. */
const char *phos_result_text(CUresult result, char buffer[64]);
