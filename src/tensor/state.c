/* States: an ordered list of entries, and a map from their names. Each entry is one block of memory with its
 * name after it, so that names and map nodes do not move when the list grows. */
#include "base/fail.h"
#include "base/map.h"
#include "tensor/tensor_internal.h"

#include <tandem/state.h>

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct td__map_node node;
    td_tensor *tensor;
    char name[];
};

struct td_state {
    struct td__map map;
    struct entry **entries;
    int count, capacity;
};

td_state *td_state_create(void)
{
    td_state *state = calloc(1, sizeof *state);
    if (!state)
        td__fail_nomem("td_state_create");
    return state;
}

/* Removes all entries after the first `count`. */
static void cut(td_state *state, int count)
{
    while (state->count > count) {
        struct entry *entry = state->entries[--state->count];
        td__map_remove(&state->map, &entry->node);
        td_tensor_release(entry->tensor);
        free(entry);
    }
}

void td_state_destroy(td_state *state)
{
    if (!state)
        return;
    cut(state, 0);
    td__map_free(&state->map);
    free(state->entries);
    free(state);
}

/* ---- Adding ------------------------------------------------------------------------------------- */

static td_status reserve(td_state *state)
{
    if (state->count < state->capacity)
        return TD_OK;
    int capacity = state->capacity > INT_MAX / 2 ? INT_MAX
                   : state->capacity             ? state->capacity * 2
                                                 : 16;
    struct entry **entries = capacity == INT_MAX
                                 ? NULL
                                 : realloc(state->entries, (size_t)capacity * sizeof entries[0]);
    if (!entries)
        return td__fail_nomem("td_state_add");
    state->entries = entries;
    state->capacity = capacity;
    return TD_OK;
}

/* The name is `prefix` and `name` together. */
static td_status add(td_state *state, const char *prefix, const char *name, td_tensor *tensor)
{
    size_t prefix_size = strlen(prefix), size = prefix_size + strlen(name);
    if (size == 0)
        return td_fail(TD_ERR_INVALID, "td_state_add: the name is empty");
    TD_TRY(reserve(state));
    struct entry *entry = malloc(sizeof *entry + size + 1);
    if (!entry)
        return td__fail_nomem("td_state_add");
    memcpy(entry->name, prefix, prefix_size);
    memcpy(entry->name + prefix_size, name, size - prefix_size + 1);
    entry->node.key = entry->name;
    entry->node.key_size = size;
    td_status status = TD_OK;
    if (td__map_find(&state->map, entry->name, size))
        status = td_fail(TD_ERR_INVALID,
                         "td_state_add: there is a tensor of the name \"%s\" already", entry->name);
    else if (!td__map_insert(&state->map, &entry->node))
        status = td__fail_nomem("td_state_add");
    if (status) {
        free(entry);
        return status;
    }
    entry->tensor = td_tensor_retain(tensor);
    state->entries[state->count++] = entry;
    return TD_OK;
}

td_status td_state_add(td_state *state, const char *name, td_tensor *tensor)
{
    if (!tensor)
        return td__fail_null(__func__);
    if (!state || !name)
        return td_fail(TD_ERR_INVALID, "td_state_add: the %s is NULL", state ? "name" : "state");
    return add(state, "", name, tensor);
}

static td_status add_scalar(td_state *state, const char *name, td_dtype dtype, const void *value)
{
    td_tensor *tensor = td__empty("td_state_add", NULL, 0, dtype, td__host_device());
    if (!tensor)
        return TD_ERR_NOMEM;
    memcpy(td_tensor_data(tensor), value, td_dtype_size(dtype));
    td_status status = td_state_add(state, name, tensor);
    td_tensor_release(tensor);
    return status;
}

td_status td_state_add_number(td_state *state, const char *name, double value)
{
    return add_scalar(state, name, TD_F64, &value);
}

td_status td_state_add_integer(td_state *state, const char *name, int64_t value)
{
    return add_scalar(state, name, TD_I64, &value);
}

td_status td_state_add_all(td_state *state, const char *prefix, const td_state *from)
{
    if (!state || !from)
        return td_fail(TD_ERR_INVALID, "td_state_add_all: the state %s is NULL",
                       state ? "to take from" : "to add to");
    int before = state->count, count = from->count;
    for (int i = 0; i < count; i++) {
        td_status status = add(state, prefix ? prefix : "", from->entries[i]->name,
                               from->entries[i]->tensor);
        if (status) {
            cut(state, before);
            return status;
        }
    }
    return TD_OK;
}

/* ---- Lookup ------------------------------------------------------------------------------------- */

int td_state_count(const td_state *state)
{
    return state ? state->count : 0;
}

const char *td_state_name(const td_state *state, int index)
{
    return index >= 0 && index < td_state_count(state) ? state->entries[index]->name : NULL;
}

td_tensor *td_state_tensor(const td_state *state, int index)
{
    return index >= 0 && index < td_state_count(state) ? state->entries[index]->tensor : NULL;
}

td_tensor *td_state_get(const td_state *state, const char *name)
{
    if (!state || !name)
        return NULL;
    struct td__map_node *node = td__map_find(&state->map, name, strlen(name));
    return node ? TD__CONTAINER(node, struct entry, node)->tensor : NULL;
}

/* The one element of a name, converted to `dtype`. */
static td_status get_scalar(const td_state *state, const char *name, td_dtype dtype, void *value)
{
    td_tensor *tensor = td_state_get(state, name);
    if (!tensor)
        return td_fail(TD_ERR_INVALID, "the state has no number \"%s\"", name ? name : "(NULL)");
    td_dtype from = tensor->layout.dtype;
    if (tensor->layout.numel != 1 || from == TD_COMPLEX64 || from == TD_COMPLEX128)
        return td_fail(TD_ERR_INVALID,
                       "\"%s\" is a tensor of %s %s in the state; it must be one number", name,
                       td_dtype_name(from), td__shape_of(tensor));
    td_tensor *one = td__empty("td_state_get_number", NULL, 0, dtype, td__host_device());
    td_tensor *here = one ? td__to_host("td_state_get_number", tensor) : NULL;
    td_tensor *flat = here ? td__reshape(here, NULL, 0, NULL) : NULL;
    td_status status = flat ? td__kernels_of(flat)->copy(one, flat) : td__error_status();
    if (!status)
        memcpy(value, td_tensor_data(one), td_dtype_size(dtype));
    td_tensor_release(flat);
    td_tensor_release(here);
    td_tensor_release(one);
    return status;
}

td_status td_state_get_number(const td_state *state, const char *name, double *value)
{
    return get_scalar(state, name, TD_F64, value);
}

td_status td_state_get_integer(const td_state *state, const char *name, int64_t *value)
{
    double number = 0;
    TD_TRY(get_scalar(state, name, TD_F64, &number));
    td_dtype dtype = td_state_get(state, name)->layout.dtype;
    bool is_float = dtype == TD_F32 || dtype == TD_F64 || dtype == TD_F16 || dtype == TD_BF16;
    if (is_float && (number != trunc(number) || fabs(number) > 0x1p53))
        return td_fail(TD_ERR_INVALID, "\"%s\" is %g in the state; it must be a whole number", name,
                       number);
    if (!is_float)
        return get_scalar(state, name, TD_I64, value);
    *value = (int64_t)number;
    return TD_OK;
}

/* ---- Copies ------------------------------------------------------------------------------------- */

td_state *td_state_part(const td_state *state, const char *prefix)
{
    td_state *part = state ? td_state_create() : NULL;
    size_t size = prefix ? strlen(prefix) : 0;
    for (int i = 0; part && i < state->count; i++) {
        const struct entry *entry = state->entries[i];
        if (entry->node.key_size <= size || (size && memcmp(entry->name, prefix, size) != 0))
            continue;
        if (add(part, "", entry->name + size, entry->tensor)) {
            td_state_destroy(part);
            return NULL;
        }
    }
    return part;
}

td_state *td_state_clone(const td_state *state)
{
    td_state *clone = state ? td_state_create() : NULL;
    for (int i = 0; clone && i < state->count; i++) {
        td_tensor *copy = td__clone(state->entries[i]->tensor);
        td_status status = copy ? add(clone, "", state->entries[i]->name, copy) : TD_ERR_NOMEM;
        td_tensor_release(copy);
        if (status) {
            td_state_destroy(clone);
            return NULL;
        }
    }
    return clone;
}
