/* What a launch of a graph does with events. It is the launch that records an event of a node, and that a waiting node goes by,
 * as with cuEventRecord and cuStreamWaitEvent: the event waits for the node from then on, however long that takes. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "graph.h"

struct mark {
    const struct sg_node *node;
    struct sg_op *op; /* of a recording node: done when the node runs; of a waiting one: what it waits for */
};
struct sg_marks {
    size_t count, capacity;
    struct mark *list;
};

static bool add(struct sg_marks *marks, const struct sg_node *node, struct sg_op *op)
{
    if (marks->count == marks->capacity) {
        size_t capacity = marks->capacity ? marks->capacity * 2 : 4;
        struct mark *grown = realloc(marks->list, capacity * sizeof(*grown));
        if (!grown)
            return false;
        marks->list = grown;
        marks->capacity = capacity;
    }
    marks->list[marks->count++] = (struct mark){node, op};
    return true;
}

static bool collect(struct sg_marks *marks, const struct sg_graph *graph)
{
    bool ok = true;
    for (size_t i = 0; i < graph->count && ok; i++) {
        const struct sg_node *node = graph->nodes[i];
        struct sg_op *op = NULL;
        if (node->disabled)
            continue;
        if (node->work.type == SG_WORK_CHILD)
            ok = collect(marks, node->work.child);
        if (node->work.type == SG_WORK_RECORD && (op = calloc(1, sizeof(*op))))
            op->references = 1;
        if (node->work.type == SG_WORK_WAIT)
            op = sg_event_op(node->work.event); /* null: never recorded, nothing to wait for */
        if (node->work.type == SG_WORK_RECORD || (node->work.type == SG_WORK_WAIT && op))
            ok = op && add(marks, node, op);
    }
    return ok;
}

CUresult sg_marks_make(const struct sg_graph *graph, struct sg_marks **out)
{
    struct sg_marks *marks = calloc(1, sizeof(*marks));
    if (!marks || !collect(marks, graph)) {
        sg_marks_free(marks);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < marks->count; i++)
        if (marks->list[i].node->work.type == SG_WORK_RECORD)
            sg_event_set(marks->list[i].node->work.event, sg_op_reference(marks->list[i].op));
    *out = marks;
    return CUDA_SUCCESS;
}

static void happens(struct sg_op *op)
{
    op->finished = sg_now_ns();
    atomic_store_explicit(&op->done, 1, memory_order_release);
    syscall(SYS_futex, &op->done, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void sg_marks_pass(struct sg_marks *marks, const struct sg_node *node)
{
    for (size_t i = 0; marks && i < marks->count; i++) {
        if (marks->list[i].node != node)
            continue;
        if (node->work.type == SG_WORK_WAIT)
            sg_op_wait(marks->list[i].op);
        else
            happens(marks->list[i].op);
    }
}

void sg_marks_end(struct sg_marks *marks)
{
    for (size_t i = 0; marks && i < marks->count; i++)
        if (marks->list[i].node->work.type == SG_WORK_RECORD && !sg_op_done(marks->list[i].op))
            happens(marks->list[i].op);
}

void sg_marks_free(struct sg_marks *marks)
{
    if (!marks)
        return;
    sg_marks_end(marks);
    for (size_t i = 0; i < marks->count; i++)
        sg_op_unreference(marks->list[i].op);
    free(marks->list);
    free(marks);
}
