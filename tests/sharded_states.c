#include "sharded_states.h"

#include "runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MOST = 16, UNTOUCHED = 0x5a };

static const struct {
    td_dtype dtype;
    int ndim;
    int64_t shape[3];
    bool whole, big;
} tensors[] = {
    {TD_F32, 2, {30, 41}, false, false},   {TD_F64, 1, {3}, false, false},
    {TD_F16, 1, {0}, false, false},        {TD_BF16, 3, {5, 1, 7}, false, false},
    {TD_I64, 0, {0}, true, false},         {TD_I32, 2, {4, 9}, true, false},
    {TD_I16, 1, {1}, false, false},        {TD_I8, 1, {1000}, false, false},
    {TD_U8, 1, {999}, true, false},        {TD_BOOL, 2, {50, 3}, false, false},
    {TD_U32, 1, {17}, false, false},       {TD_U64, 1, {2}, false, false},
    {TD_COMPLEX64, 1, {33}, false, false}, {TD_F32, 2, {0, 5}, true, false},
    {TD_F32, 2, {300, 401}, false, true},  {TD_F32, 1, {123457}, true, true},
    {TD_BF16, 1, {200003}, false, true},   {TD_F64, 0, {0}, false, false},
};
enum { COUNT = sizeof tensors / sizeof tensors[0] };

static uint8_t byte_of(int number, uint64_t at, int value, td_dtype dtype)
{
    uint64_t mixed = (at + 1) * 2654435761u + (uint64_t)number * 97 + (uint64_t)value * 40503;
    mixed ^= mixed >> 13;
    return dtype == TD_BOOL ? mixed & 1 : (uint8_t)mixed;
}

static int64_t numel_of(int number)
{
    int64_t numel = 1;
    for (int d = 0; d < tensors[number].ndim; d++)
        numel *= tensors[number].shape[d];
    return numel;
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* The cuts of a tensor, the same on all ranks; several may be the same. */
static void cut(const struct cut_plan *plan, int number, int64_t cuts[RANKS_MOST + 1])
{
    unsigned seed = plan->seed * 31 + (unsigned)number;
    int64_t numel = numel_of(number);
    for (int r = 1; r < plan->ranks; r++)
        cuts[r] = rand_r(&seed) % (numel + 1);
    cuts[0] = 0;
    cuts[plan->ranks] = numel;
    qsort(cuts + 1, (size_t)plan->ranks - 1, sizeof cuts[0], compare);
}

static td_tensor *make(const struct cut_plan *plan, int number, int rank, bool fill)
{
    int64_t cuts[RANKS_MOST + 1];
    cut(plan, number, cuts);
    bool whole = plan->whole || tensors[number].whole;
    td_shard shard = {.ndim = tensors[number].ndim, .offset = cuts[rank]};
    memcpy(shard.shape, tensors[number].shape, sizeof tensors[number].shape);
    int64_t count = cuts[rank + 1] - cuts[rank];
    td_tensor *tensor = whole ? td_empty(shard.shape, shard.ndim, tensors[number].dtype, NULL)
                              : td_empty(&count, 1, tensors[number].dtype, NULL);
    if (!whole)
        CHECK_OK(td_tensor_set_shard(tensor, &shard));
    uint64_t width = td_dtype_size(tensors[number].dtype);
    uint64_t first = whole ? 0 : (uint64_t)cuts[rank] * width;
    uint8_t *data = td_tensor_data(tensor);
    for (uint64_t i = 0; i < td_tensor_nbytes(tensor); i++)
        data[i] = fill ? byte_of(number, first + i, plan->value, tensors[number].dtype) : UNTOUCHED;
    return tensor;
}

td_state *sharded_state(const struct cut_plan *plan, int rank, bool fill)
{
    td_state *state = td_state_create();
    for (int i = 0; i < COUNT; i++) {
        char name[32];
        if (tensors[i].big && !plan->big)
            continue;
        snprintf(name, sizeof name, "tensor.%d", i);
        td_tensor *tensor = make(plan, i, rank, fill);
        CHECK_OK(td_state_add(state, name, tensor));
        td_tensor_release(tensor);
    }
    return state;
}

void check_sharded_state(const td_state *state, int value)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *tensor = td_state_tensor(state, i);
        const td_shard *shard = td_tensor_shard(tensor);
        int number = atoi(td_state_name(state, i) + strlen("tensor."));
        td_dtype dtype = td_tensor_dtype(tensor);
        uint64_t first = shard ? (uint64_t)shard->offset * td_dtype_size(dtype) : 0;
        const uint8_t *data = td_tensor_data(tensor);
        for (uint64_t k = 0; k < td_tensor_nbytes(tensor); k++)
            if (data[k] != byte_of(number, first + k, value, dtype))
                FAIL("byte %llu of %s differs", (unsigned long long)k, td_state_name(state, i));
    }
}

void check_untouched_state(const td_state *state)
{
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *tensor = td_state_tensor(state, i);
        const uint8_t *data = td_tensor_data(tensor);
        for (uint64_t k = 0; k < td_tensor_nbytes(tensor); k++)
            CHECK_EQ(data[k], UNTOUCHED);
    }
}

size_t state_bytes(const td_state *state)
{
    size_t bytes = 0;
    for (int i = 0; i < td_state_count(state); i++)
        bytes += td_tensor_nbytes(td_state_tensor(state, i));
    return bytes;
}

td_group *first_ranks(int count)
{
    int ranks[RANKS_MOST];
    td_group *group = NULL;
    for (int r = 0; r < count; r++)
        ranks[r] = r;
    CHECK_OK(td_new_group(ranks, count, NULL, &group));
    return group;
}
