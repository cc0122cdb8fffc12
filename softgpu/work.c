/* What a stream, or a graph, can be told to do: copying such an order, dropping it, carrying it out. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "op.h"

bool sg_work_copy(struct sg_work *to, const struct sg_work *from)
{
    *to = *from;
    switch (from->type) {
    case SG_WORK_KERNEL:
        if (!from->kernel.params_size)
            return true;
        to->kernel.params = malloc(from->kernel.params_size);
        if (!to->kernel.params)
            return false;
        memcpy(to->kernel.params, from->kernel.params, from->kernel.params_size);
        return true;
    case SG_WORK_COPY: {
        size_t size = from->copy.width * from->copy.height * from->copy.depth;
        if (!from->copy.staging)
            return true;
        to->copy.staging = malloc(size);
        if (!to->copy.staging)
            return false;
        memcpy(to->copy.staging, from->copy.staging, size);
        return true;
    }
    case SG_WORK_BATCH:
        to->batch.ops = malloc(from->batch.count * sizeof(*to->batch.ops));
        if (!to->batch.ops)
            return false;
        memcpy(to->batch.ops, from->batch.ops, from->batch.count * sizeof(*to->batch.ops));
        return true;
    case SG_WORK_RECORD:
    case SG_WORK_WAIT:
        atomic_fetch_add(&from->event->references, 1);
        return true;
    case SG_WORK_CHILD:
        to->child = sg_graph_copy(from->child);
        return to->child != NULL;
    case SG_WORK_GRAPH:
        sg_exec_reference(from->exec);
        to->marks = NULL;
        return true;
    default:
        return true;
    }
}

void sg_work_clear(struct sg_work *work)
{
    switch (work->type) {
    case SG_WORK_KERNEL:
        free(work->kernel.params);
        break;
    case SG_WORK_COPY:
        free(work->copy.staging);
        break;
    case SG_WORK_BATCH:
        free(work->batch.ops);
        break;
    case SG_WORK_RECORD:
    case SG_WORK_WAIT:
        sg_event_unreference(work->event);
        break;
    case SG_WORK_CHILD:
        sg_graph_free(work->child);
        break;
    case SG_WORK_GRAPH:
        sg_marks_free(work->marks);
        sg_exec_unreference(work->exec);
        break;
    default:
        break;
    }
    work->type = SG_WORK_EMPTY;
}

static bool holds(const struct sg_memory_op *op, uint64_t now)
{
    uint64_t value = op->value;
    if (!op->wide) {
        now = (uint32_t)now;
        value = (uint32_t)value;
    }
    switch (op->flags & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ:
        return op->wide ? (int64_t)(now - value) >= 0 : (int32_t)((uint32_t)now - (uint32_t)value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
        return now == value;
    case CU_STREAM_WAIT_VALUE_AND:
        return (now & value) != 0;
    default: /* NOR */
        return op->wide ? ~(now | value) != 0 : (uint32_t) ~(now | value) != 0;
    }
}

static CUresult memory_op(const struct sg_memory_op *op)
{
    for (uint64_t pause = 5000;;) {
        sg_use_begin();
        bool ok = sg_accessible(NULL, op->address, op->wide ? 8 : 4, !op->wait);
        bool over = true;
        if (ok && op->wide) {
            _Atomic uint64_t *word = (_Atomic uint64_t *)(uintptr_t)op->address;
            if (op->wait)
                over = holds(op, atomic_load(word));
            else
                atomic_store(word, op->value);
        } else if (ok) {
            _Atomic uint32_t *word = (_Atomic uint32_t *)(uintptr_t)op->address;
            if (op->wait)
                over = holds(op, atomic_load(word));
            else
                atomic_store(word, (uint32_t)op->value);
        }
        sg_use_end();
        if (!ok)
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        if (over)
            return CUDA_SUCCESS;
        sg_sleep_ns(pause);
        if (pause < 1000000)
            pause *= 2;
    }
}

static void host_function(const struct sg_host_work *work, struct sg_context *context)
{
    sg_thread.in_callback = true;
    if (work->callback)
        work->callback(work->stream, (CUresult)atomic_load(&context->sticky), work->data);
    else
        work->function(work->data);
    sg_thread.in_callback = false;
}

CUresult sg_work_run(struct sg_work *work, struct sg_context *context)
{
    CUresult result = CUDA_SUCCESS;
    struct sg_op *op;
    switch (work->type) {
    case SG_WORK_KERNEL:
        return sg_kernel_work_run(&work->kernel, context);
    case SG_WORK_COPY:
        return sg_copy_run(&work->copy, context);
    case SG_WORK_FILL:
        return sg_fill_run(&work->fill, context);
    case SG_WORK_HOST:
        host_function(&work->host, context);
        return CUDA_SUCCESS;
    case SG_WORK_RECORD:
        op = sg_op_finished();
        if (op)
            sg_event_set(work->event, op);
        return op ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    case SG_WORK_WAIT:
        op = sg_event_op(work->event);
        sg_op_wait(op);
        sg_op_unreference(op);
        return CUDA_SUCCESS;
    case SG_WORK_BATCH:
        for (unsigned i = 0; i < work->batch.count && result == CUDA_SUCCESS; i++)
            result = memory_op(&work->batch.ops[i]);
        return result;
    case SG_WORK_FREE:
        /* In a graph that is launched again the memory is already gone, or was never: not a fault. */
        sg_free(work->address, NULL);
        return CUDA_SUCCESS;
    case SG_WORK_GRAPH:
        return sg_exec_run(work->exec, work->marks, context);
    case SG_WORK_CHILD: /* a node: exec.c's */
    case SG_WORK_ALLOC:
    case SG_WORK_EMPTY:
        break;
    }
    return CUDA_SUCCESS;
}
