/* The whole state of an optimizer of td_zero_optimizer(): that of the same optimizer without it. */
#include "parallel/zero.h"

#include "base/fail.h"

#include <stdio.h>
#include <stdlib.h>

#define CALL "td_zero_whole_state"

/* Entries of the state that are shards, and the wholes that they become. */
struct wholes {
    td_tensor **tensors, **flats; /* by entry; NULL: it is no shard */
    td_tensor **list;             /* the flats one after another, with their parameters */
    int *indices;
    int count;
};

static td_status make_whole(const struct td__zero *zero, td_tensor *shard, int index,
                            td_tensor **whole, td_tensor **flat)
{
    const struct td__zero_parameter *parameter = &zero->parameters[index];
    const struct td__layout *layout = &parameter->whole->layout;
    int64_t begin = parameter->cuts[zero->rank], end = parameter->cuts[zero->rank + 1];
    *whole = td__empty(CALL, layout->shape, layout->ndim, shard->layout.dtype,
                       shard->storage->device);
    *flat = td__reshape(*whole, &layout->numel, 1, NULL);
    td_tensor *mine = td__narrow(*flat, 0, begin, end - begin);
    td_status status = mine ? td__tensor_copy(mine, shard) : td__error_status();
    td_tensor_release(mine);
    return status;
}

static td_status make_wholes(const struct td__zero *zero, const td_state *state,
                             struct wholes *wholes)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *tensor = td_state_tensor(state, i);
        int index = -1;
        if (!td_tensor_shard(tensor))
            continue;
        if (sscanf(td_state_name(state, i), "state.%d.", &index) != 1 || index < 0 ||
            index >= zero->count)
            return td_fail(TD_ERR_STATE, CALL ": \"%s\" is a shard of no parameter",
                           td_state_name(state, i));
        TD_TRY(make_whole(zero, tensor, index, &wholes->tensors[i], &wholes->flats[i]));
        wholes->list[wholes->count] = wholes->flats[i];
        wholes->indices[wholes->count++] = index;
    }
    return TD_OK;
}

static td_status copy_state(const td_state *from, const struct wholes *wholes, td_state *to)
{
    for (int i = 0; i < td_state_count(from); i++) {
        td_tensor *tensor = wholes->tensors[i];
        TD_TRY(
            td_state_add(to, td_state_name(from, i), tensor ? tensor : td_state_tensor(from, i)));
    }
    return TD_OK;
}

td_state *td_zero_whole_state(td_optimizer *optimizer)
{
    struct td__zero *zero = td__zero_of(optimizer, __func__);
    if (!zero)
        return NULL;
    td_state *state = td_optimizer_state(optimizer), *whole = td_state_create();
    size_t count = state ? (size_t)td_state_count(state) : 0;
    struct wholes wholes = {.tensors = calloc(count + 1, sizeof *wholes.tensors),
                            .flats = calloc(count + 1, sizeof *wholes.flats),
                            .list = calloc(count + 1, sizeof *wholes.list),
                            .indices = calloc(count + 1, sizeof *wholes.indices)};
    td_status status = state && whole && wholes.tensors && wholes.flats && wholes.list &&
                               wholes.indices
                           ? TD_OK
                           : td__fail_nomem(CALL);
    if (!status)
        status = make_wholes(zero, state, &wholes);
    status = td__zero_agree(zero, CALL ": the call", status, NULL, 0, NULL);
    if (!status)
        status = td__zero_gather(zero, wholes.list, wholes.indices, wholes.count);
    if (!status)
        status = copy_state(state, &wholes, whole);
    for (size_t i = 0; i < count; i++) {
        td_tensor_release(wholes.tensors ? wholes.tensors[i] : NULL);
        td_tensor_release(wholes.flats ? wholes.flats[i] : NULL);
    }
    free(wholes.tensors);
    free(wholes.flats);
    free(wholes.list);
    free(wholes.indices);
    td_state_destroy(state);
    if (status) {
        td_state_destroy(whole);
        return NULL;
    }
    return whole;
}
