/* Subsets by a list of indices, and partitions of a shuffled dataset. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/host.h"
#include "data/dataset.h"
#include "tensor/random_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct subset {
    td_dataset *whole;
    int64_t count;
    int64_t indices[];
};

static int64_t size_of(void *self)
{
    return ((struct subset *)self)->count;
}

static void describe(void *self, td_sample_spec *input, td_sample_spec *target)
{
    td_dataset_describe(((struct subset *)self)->whole, input, target);
}

static td_status read_sample(void *self, int64_t index, void *input, void *target)
{
    struct subset *subset = self;
    return td_dataset_read(subset->whole, subset->indices[index], input, target);
}

static void destroy(void *self)
{
    struct subset *subset = self;
    td_dataset_release(subset->whole);
    free(subset);
}

static const td_dataset_ops subset_ops = {
    .size = size_of, .describe = describe, .read = read_sample, .destroy = destroy};

static td_status check_indices(td_dataset *dataset, const int64_t *indices, int64_t count)
{
    if (count < 0 || (count > 0 && !indices))
        return td_fail(TD_ERR_INVALID, "td_subset: %" PRId64 " indices%s", count,
                       indices ? "" : ", which are NULL");
    for (int64_t i = 0; i < count; i++)
        if (indices[i] < 0 || indices[i] >= dataset->size)
            return td_fail(TD_ERR_INVALID,
                           "td_subset: index %" PRId64 " of the list is %" PRId64
                           "; the dataset has %" PRId64 " samples",
                           i, indices[i], dataset->size);
    return TD_OK;
}

td_dataset *td_subset(td_dataset *dataset, const int64_t *indices, int64_t count)
{
    if (!dataset)
        return td__null(__func__);
    if (check_indices(dataset, indices, count))
        return NULL;
    struct subset *self = NULL;
    if ((uint64_t)count < (SIZE_MAX - sizeof *self) / sizeof(int64_t))
        self = malloc(sizeof *self + (size_t)count * sizeof(int64_t));
    if (!self) {
        td__fail_nomem("td_subset");
        return NULL;
    }
    self->whole = td_dataset_retain(dataset);
    self->count = count;
    if (count)
        memcpy(self->indices, indices, (size_t)count * sizeof(int64_t));
    td_dataset *subset = td_dataset_create(&subset_ops, self);
    if (!subset)
        destroy(self);
    return subset;
}

/* ---- Partition -------------------------------------------------------------------------------- */

/* Python's random.getrandbits(), for up to 63 bits: each word gives its upper bits, the lower word
 * comes first. */
static uint64_t python_bits(struct td__mt19937 *engine, int bits)
{
    if (bits <= 32)
        return td__mt19937_u32(engine) >> (32 - bits);
    uint64_t low = td__mt19937_u32(engine);
    return (uint64_t)(td__mt19937_u32(engine) >> (64 - bits)) << 32 | low;
}

/* Python's random.Random(seed).shuffle() of the numbers from 0 to n - 1. */
static void python_shuffle(uint64_t seed, int64_t *numbers, int64_t n)
{
    struct td__mt19937 engine;
    uint32_t keys[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    td__mt19937_seed_array(&engine, keys, keys[1] ? 2 : 1);
    for (int64_t i = 0; i < n; i++)
        numbers[i] = i;
    for (int64_t i = n - 1; i >= 1; i--) {
        int bits = 64 - __builtin_clzll((unsigned long long)i + 1);
        uint64_t other;
        do
            other = python_bits(&engine, bits);
        while (other > (uint64_t)i);
        int64_t number = numbers[i];
        numbers[i] = numbers[other];
        numbers[other] = number;
    }
}

/* The start and the length of the part. */
static td_status find_part(int64_t size, const td_partition_options *options, int count, int which,
                           int64_t *start, int64_t *length)
{
    if (count < 1 || which < 0 || which >= count)
        return td_fail(TD_ERR_INVALID,
                       "td_partition_dataset: there is no part %d of %d; parts are counted from 0",
                       which, count);
    int64_t at = 0;
    for (int i = 0; i < count; i++) {
        double fraction = options->fractions ? options->fractions[i] : 1.0 / count;
        if (!(fraction >= 0 && fraction <= 1))
            return td_fail(TD_ERR_INVALID,
                           "td_partition_dataset: fraction %d is %g; it must be from 0 to 1", i,
                           fraction);
        int64_t part = (int64_t)(fraction * (double)size);
        if (part > size - at)
            return td_fail(TD_ERR_INVALID,
                           "td_partition_dataset: the fractions up to number %d sum to more than "
                           "1",
                           i);
        if (i == which) {
            *start = at;
            *length = part;
        }
        at += part;
    }
    return TD_OK;
}

td_dataset *td_partition_dataset(td_dataset *dataset, const td_partition_options *options)
{
    if (options && td__check_reserved(__func__, options->reserved))
        return NULL;
    td_partition_options none = {0};
    options = options ? options : &none;
    if (!dataset)
        return td__null(__func__);
    int count = options->count, which = options->which;
    if (count == 0 && (which != 0 || options->fractions)) {
        td_fail(TD_ERR_INVALID, "td_partition_dataset: %s, but count is 0",
                options->fractions ? "fractions are given" : "which is set");
        return NULL;
    }
    if (count == 0 && !td__identity(&which, &count)) {
        td_fail(TD_ERR_STATE,
                "td_partition_dataset: there is no world, so count and which must be set; or "
                "call td_init_process_group() first");
        return NULL;
    }
    int64_t start = 0, length = 0;
    if (find_part(dataset->size, options, count, which, &start, &length))
        return NULL;
    int64_t *order = NULL;
    if ((uint64_t)dataset->size < SIZE_MAX / sizeof *order)
        order = malloc(((size_t)dataset->size + 1) * sizeof *order);
    if (!order) {
        td__fail_nomem("td_partition_dataset");
        return NULL;
    }
    python_shuffle(options->seed ? options->seed : 1234, order, dataset->size);
    td_dataset *part = td_subset(dataset, order + start, length);
    free(order);
    return part;
}
