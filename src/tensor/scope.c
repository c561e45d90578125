/* Scopes, which own results: tensors, and values and futures of remote calls. Each thread has one stack of the
 * objects that its scopes hold, and a stack of marks: a scope holds the objects from its mark to the next one.
 *
 *     held    a b c d e f g
 *     marks   0   2     5          three scopes: a b, c d e, f g
 *
 * Ending a scope also ends scopes inside it that were not ended (left by longjmp). Stacks that have grown are
 * freed with the thread's outermost scope; a few objects cost no allocation. */
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <stdlib.h>
#include <string.h>

struct held {
    void *object;
    td__release_fn release;
};

enum { FIRST_HELD = 8, FIRST_MARKS = 2 };

static _Thread_local struct {
    struct held *held;
    size_t count, capacity;
    size_t *marks;
    size_t depth, mark_capacity;
    struct held first_held[FIRST_HELD];
    size_t first_marks[FIRST_MARKS];
} scopes;

/* `first` is the memory before the first allocation. */
static bool grow(void **list, size_t *capacity, size_t element, const void *first)
{
    size_t larger = *capacity * 2 < 64 ? 64 : *capacity * 2;
    void *new = realloc(*list == first ? NULL : *list, larger * element);
    if (!new)
        return false;
    if (*list == first)
        memcpy(new, first, *capacity * element);
    *list = new;
    *capacity = larger;
    return true;
}

/* Before the outermost scope begins, and after it has ended. */
static void reset(void)
{
    if (scopes.held != scopes.first_held)
        free(scopes.held);
    if (scopes.marks != scopes.first_marks)
        free(scopes.marks);
    scopes.held = scopes.first_held;
    scopes.marks = scopes.first_marks;
    scopes.capacity = FIRST_HELD;
    scopes.mark_capacity = FIRST_MARKS;
}

td_scope td_scope_begin(void)
{
    td_scope scope = {.depth = scopes.depth + 1};
    if (!scopes.held)
        reset();
    if (scopes.depth == scopes.mark_capacity && !grow((void **)&scopes.marks, &scopes.mark_capacity,
                                                      sizeof scopes.marks[0], scopes.first_marks))
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
        while (scopes.count > mark) {
            struct held last = scopes.held[--scopes.count];
            last.release(last.object);
        }
        scopes.depth--;
    }
    scope->depth = 0;
    if (scopes.depth == 0)
        reset();
}

/* Inserts the object into the stack at `index`. */
static void *hold(void *object, td__release_fn release, size_t index)
{
    if (scopes.count == scopes.capacity &&
        !grow((void **)&scopes.held, &scopes.capacity, sizeof scopes.held[0], scopes.first_held)) {
        release(object);
        td__fail_nomem("td_scope");
        return NULL;
    }
    if (index < scopes.count)
        memmove(scopes.held + index + 1, scopes.held + index,
                (scopes.count - index) * sizeof scopes.held[0]);
    scopes.held[index] = (struct held){object, release};
    scopes.count++;
    return object;
}

void *td__scope_adopt(void *object, td__release_fn release)
{
    return object && scopes.depth ? hold(object, release, scopes.count) : object;
}

void *td__scope_return(void *object, td__release_fn release)
{
    if (!object || scopes.depth < 2)
        return object;
    object = hold(object, release, scopes.marks[scopes.depth - 1]);
    if (object)
        scopes.marks[scopes.depth - 1]++;
    return object;
}

static void release_tensor(void *tensor)
{
    td_tensor_release(tensor);
}

td_tensor *td__adopt(td_tensor *tensor)
{
    return td__scope_adopt(tensor, release_tensor);
}

td_tensor *td_scope_return(td_tensor *tensor)
{
    return td__scope_return(td_tensor_retain(tensor), release_tensor);
}
