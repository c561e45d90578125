/* Scopes, which own results. Each thread has one stack of the tensors that its scopes hold, and a stack of
 * marks: a scope holds the tensors from its mark to the next one.
 *
 *     held    a b c d e f g
 *     marks   0   2     5          three scopes: a b, c d e, f g
 *
 * Ending a scope also ends scopes inside it that were not ended (left by longjmp). A thread's stacks are
 * freed with its outermost scope. */
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
    td_tensor **held;
    size_t count, capacity;
    size_t *marks;
    size_t depth, mark_capacity;
} scopes;

static bool grow(void **list, size_t *capacity, size_t element)
{
    size_t larger = *capacity ? *capacity * 2 : 64;
    void *new = realloc(*list, larger * element);
    if (!new)
        return false;
    *list = new;
    *capacity = larger;
    return true;
}

td_scope td_scope_begin(void)
{
    td_scope scope = {.depth = scopes.depth + 1};
    if (scopes.depth == scopes.mark_capacity &&
        !grow((void **)&scopes.marks, &scopes.mark_capacity, sizeof scopes.marks[0]))
        return (td_scope){0}; /* results then belong to the enclosing scope */
    scopes.marks[scopes.depth++] = scopes.count;
    return scope;
}

void td_scope_end(td_scope *scope)
{
    if (scope->depth == 0) /* ended, or never begun */
        return;
    while (scopes.depth >= scope->depth) {
        size_t mark = scopes.marks[scopes.depth - 1];
        while (scopes.count > mark)
            td_tensor_release(scopes.held[--scopes.count]);
        scopes.depth--;
    }
    scope->depth = 0;
    if (scopes.depth == 0) {
        free(scopes.held);
        free(scopes.marks);
        memset(&scopes, 0, sizeof scopes);
    }
}

/* Inserts the tensor into the stack at `index`. */
static td_tensor *hold(td_tensor *tensor, size_t index)
{
    if (scopes.count == scopes.capacity &&
        !grow((void **)&scopes.held, &scopes.capacity, sizeof scopes.held[0])) {
        td_tensor_release(tensor);
        td__fail_nomem("td_scope");
        return NULL;
    }
    memmove(scopes.held + index + 1, scopes.held + index,
            (scopes.count - index) * sizeof scopes.held[0]);
    scopes.held[index] = tensor;
    scopes.count++;
    return tensor;
}

td_tensor *td__adopt(td_tensor *tensor)
{
    return tensor && scopes.depth ? hold(tensor, scopes.count) : tensor;
}

td_tensor *td_scope_return(td_tensor *tensor)
{
    if (!tensor)
        return NULL;
    td_tensor_retain(tensor);
    if (scopes.depth < 2)
        return tensor;
    tensor = hold(tensor, scopes.marks[scopes.depth - 1]);
    if (tensor)
        scopes.marks[scopes.depth - 1]++;
    return tensor;
}
