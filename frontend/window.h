/* The window of a concurrent checkpoint: from the moment the application runs on until all of its memory is saved. In it
 * every call that touches device memory comes through here first (gate.h: PHOS_GATE_TRACED). */
#pragma once
#include "touch.h"

/* Before the call: makes sure that what it is about to write has been saved, or is copied aside first. */
void phos_window_before(struct phos_touches *touches);
/* After it, whatever its result. */
void phos_window_after(struct phos_touches *touches, CUresult result);
