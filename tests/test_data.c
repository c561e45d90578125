/* Datasets of tensors and user-defined ones, loaders, and what they do with memory and errors. */
#include "runner.h"

#include "data/loader.h"
#include "tensor/tensor_internal.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* ---- Datasets of tensors --------------------------------------------------------------------- */

TEST(rows_of_tensors)
{
    td_tensor *input = td_empty((int64_t[]){4, 2, 3}, 3, TD_F32, NULL);
    td_tensor *target = td_zeros((int64_t[]){4}, 1, TD_I64, NULL);
    float *data = td_tensor_data(input), row[6];
    int64_t *classes = td_tensor_data(target), label;
    for (int i = 0; i < 24; i++)
        data[i] = (float)i;
    for (int i = 0; i < 4; i++)
        classes[i] = 10 * i;
    td_dataset *dataset = td_tensor_dataset(input, target);
    CHECK_EQ(td_dataset_size(dataset), 4);
    CHECK_OK(td_dataset_read(dataset, 2, row, &label));
    CHECK(label == 20 && row[0] == 12 && row[5] == 17);
    data[12] = 99; /* they are not copied */
    CHECK_OK(td_dataset_read(dataset, 2, row, &label));
    CHECK(row[0] == 99);
    td_dataset_release(dataset);

    /* Strides of all kinds: samples are columns, and every second one. */
    td_tensor *columns = td_transpose(input, 0, 2), *some = td_slice(columns, 0, 0, 3, 2);
    dataset = td_tensor_dataset(some, NULL);
    CHECK_EQ(td_dataset_size(dataset), 2);
    float column[8];
    CHECK_OK(td_dataset_read(dataset, 1, column, NULL));
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 4; k++)
            CHECK(column[4 * i + k] == data[6 * k + 3 * i + 2]);
    td_tensor_release(input);
    td_tensor_release(columns);
    td_tensor_release(some);
    CHECK_OK(td_dataset_read(dataset, 0, column, NULL)); /* the dataset keeps it */
    td_dataset_release(dataset);
    td_tensor_release(target);
}

TEST(tensors_that_do_not_fit)
{
    td_tensor *four = td_zeros((int64_t[]){4, 2}, 2, TD_F32, NULL),
              *five = td_zeros((int64_t[]){5}, 1, TD_I64, NULL);
    td_tensor *one = td_zeros(NULL, 0, TD_F32, NULL);
    CHECK(!td_tensor_dataset(four, five));
    CHECK_CONTAINS(td_last_error(), "the input has the shape [4, 2], the target [5]");
    CHECK(!td_tensor_dataset(one, NULL));
    CHECK(!td_tensor_dataset(four, one));
    CHECK(!td_tensor_dataset(NULL, five));
    td_dataset *dataset = td_tensor_dataset(four, NULL);
    float row[2];
    CHECK_FAILS(td_dataset_read(dataset, 4, row, NULL), TD_ERR_INVALID,
                "no sample 4 in a dataset of 4");
    CHECK_FAILS(td_dataset_read(dataset, -1, row, NULL), TD_ERR_INVALID, "no sample -1");
    CHECK_FAILS(td_dataset_read(dataset, 0, NULL, NULL), TD_ERR_INVALID, "input is NULL");
    CHECK_FAILS(td_dataset_read(NULL, 0, row, NULL), TD_ERR_INVALID,
                "td_dataset_read: an argument is NULL");
    CHECK_EQ(td_dataset_size(NULL), -1);
    td_dataset_release(dataset);
    td_dataset_release(NULL);
    td_tensor_release(four);
    td_tensor_release(five);
    td_tensor_release(one);
}

TEST(subsets)
{
    td_tensor *tensor = td_empty((int64_t[]){5}, 1, TD_I64, NULL);
    for (int64_t i = 0; i < 5; i++)
        ((int64_t *)td_tensor_data(tensor))[i] = 100 + i;
    td_dataset *whole = td_tensor_dataset(tensor, tensor);
    td_dataset *part = td_subset(whole, (int64_t[]){4, 4, 0}, 3);
    td_dataset *part_of_part = td_subset(part, (int64_t[]){2, 1}, 2),
               *none = td_subset(whole, NULL, 0);
    td_dataset_release(whole);
    td_dataset_release(part);
    int64_t input, target;
    CHECK_EQ(td_dataset_size(part_of_part), 2);
    CHECK_OK(td_dataset_read(part_of_part, 0, &input, &target));
    CHECK(input == 100 && target == 100);
    CHECK_OK(td_dataset_read(part_of_part, 1, &input, &target));
    CHECK(input == 104);
    CHECK_EQ(td_dataset_size(none), 0);
    CHECK(!td_subset(part_of_part, (int64_t[]){0, 2}, 2));
    CHECK_CONTAINS(td_last_error(), "index 1 of the list is 2; the dataset has 2 samples");
    CHECK(!td_subset(part_of_part, NULL, 2) && !td_subset(part_of_part, NULL, -1));
    CHECK(!td_subset(NULL, NULL, 0));
    td_dataset_release(part_of_part);
    td_dataset_release(none);
    td_tensor_release(tensor);
}

/* ---- A user-defined dataset ------------------------------------------------------------------- */

struct own {
    int64_t size, fails_at; /* -1: none */
    int64_t also_fails_at;
    td_sample_spec input, target;
    atomic_int reads, destroyed, inside, most_inside;
    bool slow;
};

static int64_t own_size(void *self)
{
    return ((struct own *)self)->size;
}

static void own_describe(void *self, td_sample_spec *input, td_sample_spec *target)
{
    struct own *own = self;
    CHECK(input->dtype == TD_F32 && input->ndim == 0 && target->ndim == 0);
    *input = own->input;
    *target = own->target;
}

/* The input is the index, three times; the target its double. */
static td_status own_read(void *self, int64_t index, void *input, void *target)
{
    struct own *own = self;
    int inside = atomic_fetch_add(&own->inside, 1) + 1, most = atomic_load(&own->most_inside);
    while (inside > most && !atomic_compare_exchange_weak(&own->most_inside, &most, inside))
        ;
    if (own->slow)
        td__sleep_ns(200000);
    atomic_fetch_add(&own->reads, 1);
    for (int i = 0; i < 3; i++)
        ((float *)input)[i] = (float)index;
    *(int64_t *)target = 2 * index;
    atomic_fetch_sub(&own->inside, 1);
    if (index == own->fails_at || index == own->also_fails_at)
        return td_fail(TD_ERR_SYSTEM, "picture %d is not there", (int)index);
    return TD_OK;
}

static void own_destroy(void *self)
{
    atomic_fetch_add(&((struct own *)self)->destroyed, 1);
}

static const td_dataset_ops own_ops = {
    .size = own_size, .describe = own_describe, .read = own_read, .destroy = own_destroy};

static struct own make_own(int64_t size)
{
    return (struct own){.size = size,
                        .fails_at = -1,
                        .also_fails_at = -1,
                        .input = {.dtype = TD_F32, .ndim = 1, .shape = {3}},
                        .target = {.dtype = TD_I64}};
}

/* The samples of one epoch in order, in batches of `batch`. */
static void check_epoch(td_loader *loader, int64_t size, int64_t batch, bool drop_last)
{
    int64_t at = 0;
    for (td_batch b; td_loader_next(loader, &b); at += b.size) {
        CHECK(td_tensor_ndim(b.input) == 2 && td_tensor_size(b.input, 1) == 3);
        CHECK(td_tensor_size(b.input, 0) == b.size && td_tensor_size(b.target, 0) == b.size);
        CHECK_EQ(b.size, size - at < batch ? size - at : batch);
        const float *input = td_tensor_data(b.input);
        const int64_t *target = td_tensor_data(b.target);
        for (int64_t i = 0; i < b.size; i++) {
            CHECK(input[3 * i] == (float)(at + i) && input[3 * i + 2] == (float)(at + i));
            CHECK_EQ(target[i], 2 * (at + i));
        }
    }
    CHECK_OK(td_loader_status(loader));
    CHECK_EQ(at, drop_last ? size / batch * batch : size);
}

TEST(batches)
{
    int64_t sizes[] = {0, 1, 5, 6, 7, 64}, batches[] = {1, 3, 7, 1000};
    for (int s = 0; s < 6; s++)
        for (int b = 0; b < 4; b++)
            for (int workers = 0; workers < 4; workers++)
                for (int drop_last = 0; drop_last < 2; drop_last++) {
                    struct own own = make_own(sizes[s]);
                    td_dataset *dataset = td_dataset_create(&own_ops, &own);
                    td_loader_options options = {.batch_size = batches[b],
                                                 .workers = workers,
                                                 .drop_last = drop_last,
                                                 .prefetch = workers == 3 ? 1 : 0};
                    td_loader *loader = td_loader_create(dataset, &options);
                    CHECK(loader);
                    td_dataset_release(dataset);
                    for (int epoch = 0; epoch < 3; epoch++)
                        check_epoch(loader, sizes[s], batches[b], drop_last);
                    int64_t expected = sizes[s] / batches[b] +
                                       (!drop_last && sizes[s] % batches[b] != 0);
                    CHECK_EQ(td_loader_batches(loader), expected);
                    CHECK_EQ(own.destroyed, 0);
                    td_loader_destroy(loader);
                    CHECK_EQ(own.destroyed, 1);
                }
}

TEST(workers_read_at_once)
{
    struct own own = make_own(400);
    own.slow = true;
    td_dataset *dataset = td_dataset_create(&own_ops, &own);
    td_loader_options options = {.batch_size = 8, .workers = 4};
    td_loader *loader = td_loader_create(dataset, &options);
    check_epoch(loader, 400, 8, false);
    CHECK(own.most_inside > 1);
    CHECK_EQ(own.reads, 400);
    td_loader_destroy(loader);
    td_dataset_release(dataset);
}

/* They stop at the batches that were asked for: the one that the user has, and those ahead of it. */
TEST(prefetch)
{
    struct own own = make_own(1000);
    td_dataset *dataset = td_dataset_create(&own_ops, &own);
    td_loader_options options = {.batch_size = 10, .workers = 2, .prefetch = 3};
    td_loader *loader = td_loader_create(dataset, &options);
    td_batch batch;
    CHECK_EQ(own.reads, 0);
    CHECK(td_loader_next(loader, &batch));
    CHECK_SOON(own.reads == 40);
    td__sleep_ns(20000000);
    CHECK_EQ(own.reads, 40);
    CHECK(td_loader_next(loader, &batch));
    CHECK_SOON(own.reads == 50);
    td_loader_destroy(loader);
    td_dataset_release(dataset);
}

TEST(destroying_in_the_middle)
{
    for (int workers = 0; workers < 4; workers++)
        for (int taken = 0; taken < 4; taken++) {
            struct own own = make_own(100);
            own.slow = workers > 1;
            td_dataset *dataset = td_dataset_create(&own_ops, &own);
            td_loader_options options = {.batch_size = 10, .workers = workers};
            td_loader *loader = td_loader_create(dataset, &options);
            td_batch batch;
            for (int i = 0; i < taken; i++)
                CHECK(td_loader_next(loader, &batch));
            td_loader_destroy(loader);
            td_dataset_release(dataset);
            CHECK_EQ(own.destroyed, 1);
            CHECK_EQ(own.inside, 0);
        }
    td_loader_destroy(NULL);
}

TEST(resetting_in_the_middle)
{
    for (int workers = 0; workers < 4; workers++) {
        struct own own = make_own(100);
        td_dataset *dataset = td_dataset_create(&own_ops, &own);
        td_loader_options options = {.batch_size = 7, .workers = workers};
        td_loader *loader = td_loader_create(dataset, &options);
        td_batch batch;
        for (int i = 0; i < 5; i++)
            CHECK(td_loader_next(loader, &batch));
        td_loader_reset(loader);
        check_epoch(loader, 100, 7, false);
        td_loader_reset(loader);
        check_epoch(loader, 100, 7, false);
        td_loader_destroy(loader);
        td_dataset_release(dataset);
    }
    td_loader_reset(NULL);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

TEST(memory_is_used_again_unless_it_is_held)
{
    struct own own = make_own(1000);
    td_dataset *dataset = td_dataset_create(&own_ops, &own);
    td_loader *loader = td_loader_create(dataset, &(td_loader_options){.batch_size = 2});
    td_batch batch;
    CHECK(td_loader_next(loader, &batch));
    void *input = td_tensor_data(batch.input), *target = td_tensor_data(batch.target);
    CHECK(td_loader_next(loader, &batch));
    CHECK(td_tensor_data(batch.input) == input && td_tensor_data(batch.target) == target);

    td_tensor *kept = td_tensor_retain(batch.input);
    float before[6], *after = td_tensor_data(kept);
    memcpy(before, after, sizeof before);
    CHECK(td_loader_next(loader, &batch));
    CHECK(td_tensor_data(batch.input) != input && td_tensor_data(batch.target) == target);
    CHECK_MEM(before, after, sizeof before);

    /* A view holds it as well, longer than the loader is there. */
    td_tensor *row = td_select(batch.target, 0, 1);
    CHECK(td_loader_next(loader, &batch));
    CHECK(td_tensor_data(batch.target) != target);
    td_loader_destroy(loader);
    td_dataset_release(dataset);
    CHECK_EQ(*(int64_t *)td_tensor_data(row), 10);
    CHECK_MEM(before, after, sizeof before);
    td_tensor_release(row);
    td_tensor_release(kept);
}

TEST(held_batches_with_workers)
{
    enum { KEPT = 60 };
    td_tensor *kept[KEPT];
    struct own own = make_own(2 * KEPT);
    td_dataset *dataset = td_dataset_create(&own_ops, &own);
    td_loader *loader = td_loader_create(dataset,
                                         &(td_loader_options){.batch_size = 2, .workers = 2});
    int count = 0;
    for (td_batch b; td_loader_next(loader, &b); count++)
        kept[count] = td_tensor_retain(b.target);
    CHECK_EQ(count, KEPT);
    td_loader_destroy(loader);
    for (int i = 0; i < KEPT; i++) {
        const int64_t *target = td_tensor_data(kept[i]);
        CHECK(target[0] == 4 * i && target[1] == 4 * i + 2);
        td_tensor_release(kept[i]);
    }
    td_dataset_release(dataset);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

TEST(a_sample_that_fails)
{
    for (int workers = 0; workers < 4; workers++) {
        struct own own = make_own(50);
        own.fails_at = 23;
        own.also_fails_at = 21;
        td_dataset *dataset = td_dataset_create(&own_ops, &own);
        td_loader_options options = {.batch_size = 4, .workers = workers};
        td_loader *loader = td_loader_create(dataset, &options);
        td_batch batch = {.size = -5};
        for (int i = 0; i < 5; i++)
            CHECK(td_loader_next(loader, &batch));
        CHECK_OK(td_loader_status(loader));
        batch.size = -5;
        CHECK(!td_loader_next(loader, &batch));
        CHECK_EQ(batch.size, -5);
        CHECK_EQ(td_loader_status(loader), TD_ERR_SYSTEM);
        CHECK_STR(td_last_error(),
                  "loader: sample 21, number 21 of the epoch: picture 21 is not there");
        own.fails_at = own.also_fails_at = -1;
        check_epoch(loader, 50, 4, false); /* another epoch begins */
        td_loader_destroy(loader);
        td_dataset_release(dataset);
    }
}

static void use_in_a_fork(void *arg)
{
    td_batch batch;
    CHECK(!td_loader_next(arg, &batch));
    CHECK_EQ(td_loader_status(arg), TD_ERR_STATE);
    CHECK_CONTAINS(td_last_error(), "parent process");
    td_loader_destroy(arg);
}

TEST(workers_stay_with_the_parent)
{
    struct own own = make_own(50);
    td_dataset *dataset = td_dataset_create(&own_ops, &own);
    td_loader *loader = td_loader_create(dataset, &(td_loader_options){.workers = 2});
    td_batch batch;
    CHECK(td_loader_next(loader, &batch));
    struct td_test_child child = td_test_fork(use_in_a_fork, loader);
    CHECK_EQ(child.status, 0);
    free(child.output);
    CHECK(td_loader_next(loader, &batch));
    td_loader_destroy(loader);
    td_dataset_release(dataset);
}

TEST(refused_loaders)
{
    struct own own = make_own(5);
    td_dataset *dataset = td_dataset_create(&own_ops, &own);
    td_sampler *sampler = td_sequential_sampler(dataset);
    td_batch batch;
    CHECK(!td_loader_create(NULL, NULL));
    CHECK(!td_loader_create(dataset, &(td_loader_options){.batch_size = -1}));
    CHECK_CONTAINS(td_last_error(), "the batch size is -1");
    CHECK(!td_loader_create(dataset, &(td_loader_options){.batch_size = INT64_MAX / 2}));
    CHECK_CONTAINS(td_last_error(), "too large");
    CHECK(!td_loader_create(dataset, &(td_loader_options){.sampler = sampler, .shuffle = true}));
    CHECK_CONTAINS(td_last_error(), "sampler and shuffle are both set");
    CHECK(!td_loader_create(dataset, &(td_loader_options){.workers = -1}));
    CHECK(!td_loader_create(dataset, &(td_loader_options){.workers = 1 << 20}));
    CHECK(!td_loader_create(dataset, &(td_loader_options){.workers = 1, .prefetch = -1}));
    CHECK(!td_loader_next(NULL, &batch));
    CHECK_EQ(td_loader_status(NULL), TD_ERR_INVALID);
    CHECK_EQ(td_loader_batches(NULL), -1);
    td_loader *loader = td_loader_create(dataset, NULL); /* one at a time */
    CHECK_EQ(td_loader_batches(loader), 5);
    CHECK(!td_loader_next(loader, NULL));
    CHECK_EQ(td_loader_status(loader), TD_ERR_INVALID);
    check_epoch(loader, 5, 1, false);
    td_loader_destroy(loader);
    td_sampler_release(sampler);
    td_dataset_release(dataset);
}

TEST(refused_datasets)
{
    CHECK(!td_dataset_create(NULL, NULL));
    CHECK(!td_dataset_create(&(td_dataset_ops){.size = own_size}, NULL));
    CHECK_CONTAINS(td_last_error(), "size, describe and read");
    struct own own = make_own(-3);
    CHECK(!td_dataset_create(&own_ops, &own));
    CHECK_CONTAINS(td_last_error(), "-3 samples");
    own = make_own(3);
    own.input.ndim = TD_MAX_DIMS;
    CHECK(!td_dataset_create(&own_ops, &own));
    CHECK_CONTAINS(td_last_error(), "the input of a sample has 0 to 7 dimensions, not 8");
    own.input.ndim = -1;
    CHECK(!td_dataset_create(&own_ops, &own));
    own = make_own(3);
    own.target.dtype = (td_dtype)77;
    CHECK(!td_dataset_create(&own_ops, &own));
    CHECK_CONTAINS(td_last_error(), "77 is not a dtype (see td_dtype), for the target of a sample");
    own = make_own(3);
    own.input.shape[0] = -2;
    CHECK(!td_dataset_create(&own_ops, &own));
    CHECK_CONTAINS(td_last_error(), "negative");
    CHECK_EQ(own.destroyed, 0); /* it stays the caller's */
}
