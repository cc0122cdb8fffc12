/* What a library is told in one call and uses in another: the pointers of cuDNN's variant packs, the workspaces of cuBLAS
 * handles. Kept by the object they were given to, from the call that gives them to the one that destroys the object. */
#pragma once
#include "library.h"

/* cudnnBackendSetAttribute succeeded: notes the pointers of a variant pack, and of anything else nothing. */
void phos_note_attribute(const void *descriptor, int attribute, int type, long long count, const void *elements);
/* cublasSetWorkspace succeeded. What cublasSetStream makes of it is not followed: the note outlives that, which costs
 * nothing but that a workspace no longer in use is taken for one. */
void phos_note_workspace(const void *handle, const void *workspace, size_t size);
/* Before the object is destroyed: another thread may be given the same address for one of its own. */
void phos_note_gone(const void *object);

/* Adds to what a call documents: the pointers of this variant pack, which are all that the call may touch. Which of them
 * it writes is in no documentation. */
void phos_note_document_pack(struct phos_library_scope *scope, const void *pack);
/* The same for the workspace of a cuBLAS handle: not all that the call may touch. */
void phos_note_document_workspace(struct phos_library_scope *scope, const void *handle);
