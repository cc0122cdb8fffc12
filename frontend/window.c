#include "window.h"

void phos_window_before(struct phos_touches *touches)
{
    (void)touches;
}

void phos_window_after(struct phos_touches *touches, CUresult result)
{
    (void)touches;
    (void)result;
}
