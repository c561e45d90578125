/* The order of samples, compared with what reference/record_data.py has recorded of PyTorch; and the
 * position of samplers. */
#include "runner.h"

#include "base/host.h"
#include "tensor/random_internal.h"

#include <tandem/tandem.h>

#include <string.h>

struct recorded_list {
    int64_t count;
    uint32_t checksum;
    int64_t first[3];
};

struct recorded_loader {
    int64_t size, batch;
    bool shuffle, drop_last;
    int64_t epoch;
    struct recorded_list order;
    uint64_t following;
};

struct recorded_share {
    int64_t size;
    int replicas, rank;
    bool shuffle, drop_last;
    uint64_t seed;
    int64_t epoch;
    struct recorded_list order;
};

struct recorded_part {
    int64_t size;
    int count, which;
    double fractions[4];
    uint64_t seed;
    struct recorded_list order;
};

#include "reference/data_vectors.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

static uint32_t crc32_of(const void *data, size_t size)
{
    uint32_t crc = ~0u;
    for (const unsigned char *at = data, *end = at + size; at < end; at++) {
        crc ^= *at;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (-(crc & 1u) & 0xedb88320u);
    }
    return ~crc;
}

static void check_list(const char *what, size_t index, const int64_t *list, int64_t count,
                       const struct recorded_list *recorded)
{
    if (count != recorded->count)
        FAIL("%s %zu: %lld indices, recorded are %lld", what, index, (long long)count,
             (long long)recorded->count);
    for (int64_t i = 0; i < 3 && i < count; i++)
        if (list[i] != recorded->first[i])
            FAIL("%s %zu: index %lld is %lld, recorded is %lld", what, index, (long long)i,
                 (long long)list[i], (long long)recorded->first[i]);
    if (crc32_of(list, (size_t)count * sizeof *list) != recorded->checksum)
        FAIL("%s %zu: another order", what, index);
}

/* A dataset whose samples are their own indices, without a target. */
static td_dataset *numbers(int64_t size)
{
    td_tensor *tensor = td_empty(&size, 1, TD_I64, NULL);
    int64_t *data = td_tensor_data(tensor);
    for (int64_t i = 0; i < size; i++)
        data[i] = i;
    td_dataset *dataset = td_tensor_dataset(tensor, NULL);
    CHECK(dataset);
    td_tensor_release(tensor);
    return dataset;
}

/* ---- Against the recording ------------------------------------------------------------------- */

/* All epochs of one loader, which is recorded from `index` on. */
static size_t compare_loader(size_t index, int workers)
{
    const struct recorded_loader *recorded = &recorded_loaders[index];
    td_dataset *dataset = numbers(recorded->size);
    td_loader_options options = {.batch_size = recorded->batch,
                                 .shuffle = recorded->shuffle,
                                 .drop_last = recorded->drop_last,
                                 .workers = workers};
    td_loader *loader = td_loader_create(dataset, &options);
    CHECK(loader);
    td_manual_seed(1234);
    int64_t *order = malloc((size_t)recorded->size * sizeof *order);
    do {
        int64_t count = 0, batches = 0;
        for (td_batch b; td_loader_next(loader, &b); batches++) {
            CHECK(!b.target && td_tensor_numel(b.input) == b.size);
            memcpy(order + count, td_tensor_data(b.input), td_tensor_nbytes(b.input));
            count += b.size;
        }
        CHECK_OK(td_loader_status(loader));
        CHECK_EQ(batches, td_loader_batches(loader));
        check_list("loader", index, order, count, &recorded->order);
        unsigned char state[TD_GENERATOR_STATE_SIZE];
        td_generator_get_state(NULL, state, sizeof state);
        CHECK_EQ(td__generator_seed(NULL), recorded->following);
        CHECK_OK(td_generator_set_state(NULL, state, sizeof state));
        index++;
        recorded++;
    } while (index < COUNT(recorded_loaders) && recorded->epoch > 0);
    free(order);
    td_loader_destroy(loader);
    td_dataset_release(dataset);
    return index;
}

TEST(recorded_loaders)
{
    for (int workers = 0; workers < 4; workers++)
        for (size_t i = 0; i < COUNT(recorded_loaders);)
            i = compare_loader(i, workers);
}

TEST(recorded_shares)
{
    for (size_t i = 0; i < COUNT(recorded_shares); i++) {
        const struct recorded_share *recorded = &recorded_shares[i];
        td_dataset *dataset = numbers(recorded->size);
        td_sampler_options options = {.no_shuffle = !recorded->shuffle,
                                      .drop_last = recorded->drop_last,
                                      .seed = recorded->seed,
                                      .num_replicas = recorded->replicas,
                                      .rank = recorded->rank};
        td_sampler *sampler = td_distributed_sampler(dataset, &options);
        CHECK(sampler);
        td_sampler_set_epoch(sampler, recorded->epoch);
        int64_t size = td_sampler_size(sampler), count = 0;
        CHECK_EQ(size, recorded->order.count);
        int64_t *order = malloc((size_t)(size + 1) * sizeof *order);
        for (int64_t index; td_sampler_next(sampler, &index); count++) {
            CHECK(count < size);
            order[count] = index;
        }
        CHECK_OK(td_sampler_status(sampler));
        check_list("share", i, order, count, &recorded->order);
        free(order);
        td_sampler_release(sampler);
        td_dataset_release(dataset);
    }
}

TEST(recorded_parts)
{
    for (size_t i = 0; i < COUNT(recorded_parts); i++) {
        const struct recorded_part *recorded = &recorded_parts[i];
        td_dataset *dataset = numbers(recorded->size);
        td_partition_options options = {.count = recorded->count,
                                        .which = recorded->which,
                                        .fractions = recorded->fractions,
                                        .seed = recorded->seed == 1234 ? 0 : recorded->seed};
        td_dataset *part = td_partition_dataset(dataset, &options);
        CHECK(part);
        td_dataset_release(dataset); /* the part keeps it */
        int64_t size = td_dataset_size(part);
        int64_t *order = malloc((size_t)(size + 1) * sizeof *order);
        for (int64_t k = 0; k < size; k++)
            CHECK_OK(td_dataset_read(part, k, &order[k], NULL));
        check_list("part", i, order, size, &recorded->order);
        free(order);
        td_dataset_release(part);
    }
}

/* ---- The world ------------------------------------------------------------------------------- */

/* The order of a share; for free(). */
static int64_t *share_of(td_dataset *dataset, const td_sampler_options *options)
{
    td_sampler *sampler = td_distributed_sampler(dataset, options);
    CHECK(sampler);
    int64_t *order = malloc((size_t)td_sampler_size(sampler) * sizeof *order);
    int64_t count = 0;
    for (int64_t index; td_sampler_next(sampler, &index);)
        order[count++] = index;
    CHECK_EQ(count, td_sampler_size(sampler));
    td_sampler_release(sampler);
    return order;
}

/* All zero is PyTorch's default: shuffled, and rank and number of replicas from the world; of a rank
 * and a number that are given one by one, the other one is taken from there. */
RANKS(defaults_of_shares, .ranks = 3)
{
    static const td_sampler_options same[] = {{0},
                                              {.rank = -1, .num_replicas = -1},
                                              {.num_replicas = 3},
                                              {.num_replicas = 3, .rank = -1},
                                              {.rank = -1},
                                              {.num_replicas = -1}};
    enum { SIZE = 30, SHARE = SIZE / 3 };
    td_dataset *dataset = numbers(SIZE);
    CHECK_OK(td_init_process_group(NULL));
    int64_t *whole = share_of(dataset, &(td_sampler_options){.num_replicas = 1}), ordered = 0;
    int64_t *mine = share_of(dataset, NULL), *other;
    for (int i = 0; i < SHARE; i++)
        CHECK_EQ(mine[i], whole[td_test_rank() + 3 * i]);
    for (int i = 0; i < SIZE; i++)
        ordered += whole[i] == i;
    CHECK(ordered < SIZE / 2); /* it is shuffled */
    for (size_t i = 0; i < COUNT(same); i++) {
        other = share_of(dataset, &same[i]);
        CHECK_MEM(other, mine, SHARE * sizeof *mine);
        free(other);
    }
    other = share_of(dataset, &(td_sampler_options){.rank = 2}); /* of the world's three */
    CHECK_EQ(other[1], whole[2 + 3]);
    free(other);
    other = share_of(dataset, &(td_sampler_options){.num_replicas = 6}); /* no world of six */
    CHECK_EQ(other[1], whole[6]);
    free(other);
    CHECK_OK(td_destroy_process_group());
    free(whole);
    free(mine);
    td_dataset_release(dataset);
}

RANKS(ranks_of_the_world, .ranks = 3)
{
    td_dataset *dataset = numbers(10);
    CHECK(!td_distributed_sampler(dataset, NULL));
    CHECK_CONTAINS(td_last_error(), "there is no world");
    CHECK(!td_partition_dataset(dataset, NULL));
    CHECK_CONTAINS(td_last_error(), "there is no world");

    CHECK_OK(td_init_process_group(NULL));
    td_sampler *sampler = td_distributed_sampler(dataset,
                                                 &(td_sampler_options){.no_shuffle = true});
    CHECK(sampler);
    int64_t index, expected = td_test_rank();
    for (; td_sampler_next(sampler, &index); expected += 3)
        CHECK_EQ(index, expected % 10);
    CHECK_EQ(expected, td_test_rank() + 12);
    td_dataset *part = td_partition_dataset(dataset, NULL);
    CHECK_EQ(td_dataset_size(part), 3);
    td_partition_options options = {.count = 3, .which = td_test_rank()};
    td_dataset *same = td_partition_dataset(dataset, &options);
    for (int64_t i = 0; i < 3; i++) {
        int64_t a, b;
        CHECK_OK(td_dataset_read(part, i, &a, NULL));
        CHECK_OK(td_dataset_read(same, i, &b, NULL));
        CHECK_EQ(a, b);
    }
    CHECK_OK(td_destroy_process_group());
    CHECK(!td_distributed_sampler(dataset, NULL));
    td_dataset_release(part);
    td_dataset_release(same);
    td_sampler_release(sampler);
    td_dataset_release(dataset);
}

static void look_from_a_fork(void *arg)
{
    int rank, size;
    (void)arg;
    CHECK(!td__identity(&rank, &size));
}

TEST(a_fork_has_no_world)
{
    int rank = -1, size = -1;
    CHECK(!td__identity(&rank, &size));
    td__identity_set(3, 8);
    CHECK(td__identity(&rank, &size));
    CHECK(rank == 3 && size == 8);
    struct td_test_child child = td_test_fork(look_from_a_fork, NULL);
    CHECK_EQ(child.status, 0);
    free(child.output);
    td__identity_set(0, 0);
    CHECK(!td__identity(&rank, &size));
}

TEST(refused_shares)
{
    td_dataset *dataset = numbers(10);
    CHECK(!td_distributed_sampler(NULL, NULL) && !td_random_sampler(NULL));
    CHECK(!td_distributed_sampler(dataset, &(td_sampler_options){.num_replicas = 3, .rank = 3}));
    CHECK_CONTAINS(td_last_error(), "rank 3 is outside the interval [0, 2]");
    CHECK(!td_distributed_sampler(dataset, &(td_sampler_options){.num_replicas = 3, .rank = -2}));
    CHECK_CONTAINS(td_last_error(), "rank -2 is outside the interval [0, 2]");
    CHECK(!td_distributed_sampler(dataset, &(td_sampler_options){.num_replicas = 3, .rank = -1}));
    CHECK_EQ(td_last_status(), TD_ERR_STATE);
    CHECK_CONTAINS(td_last_error(), "no world, so the rank must be set");
    CHECK(!td_distributed_sampler(dataset, &(td_sampler_options){.num_replicas = -3}));
    CHECK_CONTAINS(td_last_error(), "-3 replicas");
    CHECK(!td_distributed_sampler(dataset, &(td_sampler_options){.rank = 2}));
    CHECK_EQ(td_last_status(), TD_ERR_STATE);
    CHECK_CONTAINS(td_last_error(), "no world, so num_replicas must be set");

    CHECK(!td_partition_dataset(NULL, NULL));
    CHECK(!td_partition_dataset(dataset, &(td_partition_options){.count = 2, .which = 2}));
    CHECK_CONTAINS(td_last_error(), "there is no part 2 of 2");
    CHECK(!td_partition_dataset(dataset, &(td_partition_options){.which = 1}));
    CHECK(!td_partition_dataset(
        dataset, &(td_partition_options){.count = 2, .fractions = (double[]){0.7, 0.7}}));
    CHECK_CONTAINS(td_last_error(), "more than 1");
    CHECK(!td_partition_dataset(
        dataset, &(td_partition_options){.count = 2, .fractions = (double[]){0.7, -1}}));
    CHECK_CONTAINS(td_last_error(), "fraction 1 is -1");
    td_dataset_release(dataset);
}

/* ---- Position -------------------------------------------------------------------------------- */

/* Takes `count` batches and writes their samples to `order`, from `at` on. */
static int64_t take(td_loader *loader, int64_t *order, int64_t at, int count)
{
    for (td_batch b; count > 0 && td_loader_next(loader, &b); count--) {
        memcpy(order + at, td_tensor_data(b.input), td_tensor_nbytes(b.input));
        at += b.size;
    }
    CHECK_OK(td_loader_status(loader));
    return at;
}

/* Two and a half epochs at once, and with a checkpoint after `before` batches. */
static void check_resume(td_sampler *(*make)(td_dataset *), int before, int workers)
{
    int64_t straight[100], resumed[100];
    td_dataset *dataset = numbers(10);
    td_sampler *sampler = make(dataset);
    td_loader_options options = {.batch_size = 3, .sampler = sampler, .workers = workers};
    td_loader *loader = td_loader_create(dataset, &options);
    td_manual_seed(5);
    int64_t all = 0, some = 0;
    for (int i = 0; i < 12; i++)
        all = take(loader, straight, all, 1);
    td_loader_destroy(loader);
    td_sampler_release(sampler);

    sampler = options.sampler = make(dataset);
    loader = td_loader_create(dataset, &options);
    td_manual_seed(5);
    for (int i = 0; i < before; i++)
        some = take(loader, resumed, some, 1);
    td_sampler_position position;
    unsigned char state[TD_GENERATOR_STATE_SIZE];
    td_sampler_get_position(sampler, &position);
    td_generator_get_state(NULL, state, sizeof state);
    td_loader_destroy(loader);
    td_sampler_release(sampler);

    sampler = options.sampler = make(dataset);
    loader = td_loader_create(dataset, &options);
    td_manual_seed(77);
    CHECK_OK(td_sampler_set_position(sampler, &position));
    CHECK_OK(td_generator_set_state(NULL, state, sizeof state));
    td_sampler_position again;
    td_sampler_get_position(sampler, &again);
    CHECK(again.epoch == position.epoch && again.taken == position.taken &&
          again.seed == position.seed && again.begun == position.begun);
    for (int i = before; i < 12; i++)
        some = take(loader, resumed, some, 1);
    CHECK_EQ(some, all);
    CHECK_MEM(straight, resumed, (size_t)all * sizeof *straight);
    td_loader_destroy(loader);
    td_sampler_release(sampler);
    td_dataset_release(dataset);
}

static td_sampler *make_share(td_dataset *dataset)
{
    td_sampler_options options = {.num_replicas = 1};
    td_sampler *sampler = td_distributed_sampler(dataset, &options);
    td_sampler_set_epoch(sampler, 4);
    return sampler;
}

TEST(positions)
{
    for (int before = 0; before <= 11; before++)
        for (int workers = 0; workers < 3; workers++) {
            check_resume(td_random_sampler, before, workers);
            check_resume(td_sequential_sampler, before, workers);
            check_resume(make_share, before, workers);
        }
}

TEST(an_epoch_number_that_does_not_fit_drops_the_position)
{
    td_dataset *dataset = numbers(6);
    td_sampler *sampler = td_sequential_sampler(dataset);
    td_sampler_position position = {.epoch = 2, .taken = 4, .begun = true};
    int64_t index;
    CHECK_OK(td_sampler_set_position(sampler, &position));
    td_sampler_set_epoch(sampler, 2);
    CHECK(td_sampler_next(sampler, &index));
    CHECK_EQ(index, 4);
    CHECK_OK(td_sampler_set_position(sampler, &position));
    td_sampler_set_epoch(sampler, 3);
    CHECK(td_sampler_next(sampler, &index));
    CHECK_EQ(index, 0);
    td_sampler_release(sampler);
    td_dataset_release(dataset);
}

TEST(refused_positions)
{
    td_dataset *dataset = numbers(6);
    td_sampler *sampler = td_sequential_sampler(dataset);
    td_sampler_position position = {.taken = 7, .begun = true};
    CHECK_FAILS(td_sampler_set_position(sampler, &position), TD_ERR_INVALID, "an epoch has 6");
    position.taken = -1;
    CHECK_FAILS(td_sampler_set_position(sampler, &position), TD_ERR_INVALID, "-1 indices");
    position = (td_sampler_position){.taken = 1};
    CHECK_FAILS(td_sampler_set_position(sampler, &position), TD_ERR_INVALID, "not begun");
    CHECK_FAILS(td_sampler_set_position(NULL, &position), TD_ERR_INVALID, "sampler is NULL");
    CHECK_FAILS(td_sampler_set_position(sampler, NULL), TD_ERR_INVALID, "position is NULL");

    td_loader_options options = {.batch_size = 2, .sampler = sampler};
    td_loader *loader = td_loader_create(dataset, &options), *other;
    other = td_loader_create(dataset, &options);
    td_batch batch;
    int64_t index;
    position = (td_sampler_position){0};
    CHECK(td_loader_next(loader, &batch));
    CHECK_FAILS(td_sampler_set_position(sampler, &position), TD_ERR_STATE, "td_loader_reset()");
    CHECK(!td_sampler_next(sampler, &index));
    CHECK_EQ(td_sampler_status(sampler), TD_ERR_STATE);
    CHECK(!td_loader_next(other, &batch));
    CHECK_EQ(td_loader_status(other), TD_ERR_STATE);
    CHECK_CONTAINS(td_last_error(), "another loader is in the middle");
    CHECK(td_loader_next(loader, &batch)); /* the other one changed nothing */
    CHECK_EQ(*(int64_t *)td_tensor_data(batch.input), 2);
    td_loader_reset(loader);
    CHECK_OK(td_sampler_set_position(sampler, &position));
    CHECK(td_loader_next(other, &batch));
    CHECK_EQ(*(int64_t *)td_tensor_data(batch.input), 0);
    td_loader_destroy(loader);
    td_loader_destroy(other);
    td_sampler_release(sampler);
    td_dataset_release(dataset);
}

/* ---- A user-defined sampler ------------------------------------------------------------------- */

struct backwards {
    int64_t size;
    bool fails;
    int *destroyed;
};

static int64_t backwards_size(void *self)
{
    return ((struct backwards *)self)->size;
}

static td_status backwards_order(void *self, int64_t epoch, uint64_t seed, int64_t *indices)
{
    struct backwards *backwards = self;
    if (backwards->fails)
        return td_fail(TD_ERR_SYSTEM, "no order for epoch %d", (int)epoch);
    CHECK_EQ(seed, 0);
    for (int64_t i = 0; i < backwards->size; i++)
        indices[i] = backwards->size - 1 - i + epoch;
    return TD_OK;
}

static void backwards_destroy(void *self)
{
    ++*((struct backwards *)self)->destroyed;
}

TEST(a_user_defined_sampler)
{
    static const td_sampler_ops ops = {
        .size = backwards_size, .order = backwards_order, .destroy = backwards_destroy};
    int destroyed = 0;
    struct backwards backwards = {.size = 4, .destroyed = &destroyed};
    td_sampler *sampler = td_sampler_create(&ops, &backwards);
    int64_t index;
    CHECK(td_sampler_next(sampler, &index));
    CHECK_EQ(index, 3);
    td_sampler_retain(sampler);
    td_sampler_release(sampler);
    CHECK_EQ(destroyed, 0);
    while (td_sampler_next(sampler, &index))
        ;
    CHECK_EQ(index, 0);

    backwards.fails = true;
    CHECK(!td_sampler_next(sampler, &index));
    CHECK_EQ(td_sampler_status(sampler), TD_ERR_SYSTEM);
    CHECK_STR(td_last_error(), "no order for epoch 0");
    backwards.fails = false;

    /* What it returns is not trusted: index 4 is not in the dataset. */
    td_dataset *dataset = numbers(4);
    td_loader *loader = td_loader_create(dataset,
                                         &(td_loader_options){.batch_size = 3, .sampler = sampler});
    td_batch batch;
    td_sampler_set_epoch(sampler, 1);
    CHECK(!td_loader_next(loader, &batch));
    CHECK_EQ(td_loader_status(loader), TD_ERR_INVALID);
    CHECK_CONTAINS(td_last_error(), "there is no sample 4 in a dataset of 4");
    td_loader_destroy(loader);
    td_dataset_release(dataset);
    td_sampler_release(sampler);
    CHECK_EQ(destroyed, 1);

    CHECK(!td_sampler_create(NULL, NULL));
    CHECK(!td_sampler_create(&(td_sampler_ops){.size = backwards_size}, NULL));
    CHECK_CONTAINS(td_last_error(), "size and order");
    CHECK_EQ(td_sampler_size(NULL), -1);
    CHECK(!td_sampler_next(NULL, &index));
    td_sampler_set_epoch(NULL, 1);
    td_sampler_release(NULL);
}
