/* What PyTorch's allocator reports, as it was written down: parts.c puts it into its table. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct phos_part_report {
    uint64_t address; /* 0: of a capture, which begins (size 1) or has ended (-1) */
    int64_t size;     /* below 0: it came back */
};

void phos_part_reports_note(struct phos_part_report report);
/* Whether a sheet is full. */
bool phos_part_reports_waiting(void);
/* What is on a full sheet, or, with `all`, on the other one; NULL: nothing. It stays so until phos_part_reports_taken(). One caller at
 * a time. */
const struct phos_part_report *phos_part_reports_take(bool all, size_t *count);
void phos_part_reports_taken(void);
/* In a forked child: another thread may have been in the middle of one. */
void phos_part_reports_forked(void);
