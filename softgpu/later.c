/* Graphs, modules and launches: not written yet. */
#include "op.h"
bool sg_capture_blocks(struct sg_context *c) { (void)c; return false; }
CUresult sg_capture_add(struct sg_stream *s, struct sg_work *w) { (void)s; (void)w; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult sg_capture_event_record(struct sg_stream *s, struct sg_event *e) { (void)s; (void)e; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult sg_capture_event_wait(struct sg_stream *s, struct sg_event *e, bool *h) { (void)s; (void)e; *h = false; return CUDA_SUCCESS; }
void sg_capture_forget_stream(struct sg_stream *s) { (void)s; }
CUresult sg_exec_run(struct sg_exec *e, struct sg_context *c) { (void)e; (void)c; return CUDA_ERROR_NOT_SUPPORTED; }
void sg_exec_reference(struct sg_exec *e) { (void)e; }
void sg_exec_unreference(struct sg_exec *e) { (void)e; }
struct sg_graph *sg_graph_copy(const struct sg_graph *g) { (void)g; return NULL; }
void sg_graph_free(struct sg_graph *g) { (void)g; }
CUresult sg_graph_run(struct sg_graph *g, struct sg_context *c) { (void)g; (void)c; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult sg_kernel_work_run(const struct sg_kernel_work *w, struct sg_context *c) { (void)w; (void)c; return CUDA_ERROR_NOT_SUPPORTED; }
void sg_module_destroy(struct sg_module *m) { (void)m; }
