/* Between stream.c and those who make operations by hand. */
#ifndef SOFTGPU_OP_H
#define SOFTGPU_OP_H
#include "softgpu.h"

extern atomic_int sg_captures; /* captures in progress, in the whole process: 0 makes every check of one cheap */
struct sg_op *sg_op_finished(void); /* an operation that ended now; null: out of memory */
CUresult sg_context_mark(struct sg_context *context, struct sg_op **out); /* done once all that was queued is */
void sg_event_set(struct sg_event *event, struct sg_op *op); /* takes the reference over */
struct sg_op *sg_event_op(struct sg_event *event);           /* a reference, or null if never recorded */
#endif
