/* The norm of gradients has the same bits however they are divided among ranks: threads are the ranks of a sharding. */
#include "host_data.h"
#include "runner.h"

#include "tensor/tensor_internal.h"

#include <tandem/optim.h>

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { PARAMETERS = 9, RANKS_MOST = 8, SEEDS = 2 };

static const int64_t sizes[PARAMETERS] = {1025,           0, 1, 1023, 1024, 40000, 3 * 1024,
                                          70 * 1024 + 17, 5};

/* ---- Ranks that are threads ------------------------------------------------------------------------------- */

struct world {
    pthread_barrier_t barrier;
    const void *mine[RANKS_MOST];
};

struct thread_sharding {
    struct td__sharding base;
    struct world *world;
};

static td_status all_gather(const struct td__sharding *base, const void *mine, size_t bytes,
                            void *all)
{
    struct world *world = ((const struct thread_sharding *)base)->world;
    world->mine[base->rank] = mine;
    pthread_barrier_wait(&world->barrier);
    for (int r = 0; r < base->size; r++)
        memcpy((char *)all + (size_t)r * bytes, world->mine[r], bytes);
    pthread_barrier_wait(&world->barrier);
    return TD_OK;
}

/* ---- Gradients ---------------------------------------------------------------------------------------------- */

struct job {
    td_tensor *wholes[PARAMETERS]; /* values of gradients */
    double power;
    int cuts[PARAMETERS][RANKS_MOST + 1]; /* in blocks */
    int ranks;
    bool mixed;           /* parameters with odd numbers are whole on all ranks */
    bool backwards;       /* the first shard is the last rank's */
    int without, lacking; /* parameter and rank without a gradient; -1: none */
    struct world world;
    double norms[RANKS_MOST];
    td_status statuses[RANKS_MOST];
    char texts[RANKS_MOST][256];
    td_tensor *clipped[RANKS_MOST][PARAMETERS];
};

struct rank {
    struct job *job;
    int number;
};

static td_tensor *leaf_with_grad(td_tensor *grad)
{
    td_tensor *leaf = td_zeros(td_tensor_shape(grad), td_tensor_ndim(grad), td_tensor_dtype(grad),
                               td_device_get("cpu"));
    CHECK_OK(td_tensor_set_requires_grad(leaf, true));
    CHECK_OK(td_tensor_set_grad(leaf, grad));
    return leaf;
}

static td_tensor *values_of(int64_t count, td_dtype dtype, double bad)
{
    td_tensor *values = host_randn((int64_t[]){count}, 1, dtype);
    if (bad != 0 && count > 7)
        CHECK_OK(td_fill_(td_select(values, 0, count / 2), bad));
    return values;
}

static int blocks_of(int64_t count)
{
    return (int)((count + TD__SHARD_BLOCK - 1) / TD__SHARD_BLOCK);
}

/* Some cuts, in order; several may be the same. */
static void cut(struct job *job)
{
    for (int p = 0; p < PARAMETERS; p++) {
        int blocks = blocks_of(sizes[p]);
        for (int r = 0; r <= job->ranks; r++)
            job->cuts[p][r] = r == 0 ? 0 : r == job->ranks ? blocks : rand() % (blocks + 1);
        for (int r = 1; r < job->ranks; r++)
            for (int k = r; k > 1 && job->cuts[p][k] < job->cuts[p][k - 1]; k--) {
                int swapped = job->cuts[p][k];
                job->cuts[p][k] = job->cuts[p][k - 1];
                job->cuts[p][k - 1] = swapped;
            }
    }
}

static int64_t begin_of(const struct job *job, int p, int shard)
{
    int64_t at = (int64_t)job->cuts[p][shard] * TD__SHARD_BLOCK;
    return at < sizes[p] ? at : sizes[p];
}

static void *run_rank(void *arg)
{
    const struct rank *rank = arg;
    struct job *job = rank->job;
    struct thread_sharding sharding = {
        .base = {.rank = rank->number, .size = job->ranks, .all_gather = all_gather},
        .world = &job->world};
    td_tensor *parameters[PARAMETERS];
    int shard = job->backwards ? job->ranks - 1 - rank->number : rank->number;
    for (int p = 0; p < PARAMETERS; p++) {
        TD_SCOPE;
        if (job->mixed && p % 2) {
            parameters[p] = leaf_with_grad(td_clone(job->wholes[p]));
        } else {
            int64_t begin = begin_of(job, p, shard), end = begin_of(job, p, shard + 1);
            td_shard whole = {.ndim = 1, .shape = {sizes[p]}, .offset = begin};
            parameters[p] = leaf_with_grad(
                td_clone(td_narrow(job->wholes[p], 0, begin, end - begin)));
            CHECK_OK(td__tensor_set_shard(parameters[p], &whole, &sharding.base));
        }
        if (p == job->without && (job->lacking < 0 || job->lacking == rank->number))
            CHECK_OK(td_tensor_set_grad(parameters[p], NULL));
        td_tensor_retain(parameters[p]);
    }
    td_clip_options options = {.norm_type = job->power};
    int n = rank->number;
    job->statuses[n] = td_clip_grad_norm_of_(parameters, PARAMETERS, 1, &options, &job->norms[n]);
    snprintf(job->texts[n], sizeof job->texts[n], "%s", td_last_error());
    for (int p = 0; p < PARAMETERS; p++) {
        td_tensor *grad = td_tensor_grad(parameters[p]);
        job->clipped[n][p] = grad ? td_tensor_retain(grad) : NULL;
        td_tensor_release(parameters[p]);
    }
    return NULL;
}

static void run_ranks(struct job *job)
{
    pthread_t threads[RANKS_MOST];
    struct rank ranks[RANKS_MOST];
    CHECK(!pthread_barrier_init(&job->world.barrier, NULL, (unsigned)job->ranks));
    for (int r = 0; r < job->ranks; r++) {
        ranks[r] = (struct rank){job, r};
        CHECK(!pthread_create(&threads[r], NULL, run_rank, &ranks[r]));
    }
    for (int r = 0; r < job->ranks; r++)
        CHECK(!pthread_join(threads[r], NULL));
    pthread_barrier_destroy(&job->world.barrier);
}

static void free_clipped(struct job *job)
{
    for (int r = 0; r < job->ranks; r++)
        for (int p = 0; p < PARAMETERS; p++)
            td_tensor_release(job->clipped[r][p]);
}

/* ---- The whole ------------------------------------------------------------------------------------------------ */

static double clip_whole(const struct job *job, td_tensor **parameters)
{
    double norm = -1;
    for (int p = 0; p < PARAMETERS; p++) {
        TD_SCOPE;
        parameters[p] = leaf_with_grad(td_clone(job->wholes[p]));
        if (p == job->without)
            CHECK_OK(td_tensor_set_grad(parameters[p], NULL));
        td_tensor_retain(parameters[p]);
    }
    td_clip_options options = {.norm_type = job->power};
    CHECK_OK(td_clip_grad_norm_of_(parameters, PARAMETERS, 1, &options, &norm));
    return norm;
}

static void check_elements(const struct job *job, td_tensor **parameters, int rank)
{
    int shard = job->backwards ? job->ranks - 1 - rank : rank;
    for (int p = 0; p < PARAMETERS; p++) {
        td_tensor *grad = td_tensor_grad(parameters[p]), *mine = job->clipped[rank][p];
        CHECK(!grad == !mine);
        if (!grad)
            continue;
        bool whole = job->mixed && p % 2;
        size_t size = td_dtype_size(td_tensor_dtype(grad));
        const char *expected = (const char *)host_data(grad) +
                               (size_t)(whole ? 0 : begin_of(job, p, shard)) * size;
        CHECK(!td_tensor_numel(mine) || !memcmp(host_data(mine), expected, td_tensor_nbytes(mine)));
    }
}

static void compare(struct job *job)
{
    td_tensor *parameters[PARAMETERS];
    double expected = clip_whole(job, parameters);
    cut(job);
    run_ranks(job);
    for (int r = 0; r < job->ranks; r++) {
        if (job->statuses[r] || memcmp(&expected, &job->norms[r], sizeof expected))
            FAIL("power %g, rank %d of %d: %a instead of %a (%s)", job->power, r, job->ranks,
                 job->norms[r], expected, job->texts[r]);
        check_elements(job, parameters, r);
    }
    for (int p = 0; p < PARAMETERS; p++)
        td_tensor_release(parameters[p]);
    free_clipped(job);
}

TEST(shards_have_the_norm_of_wholes)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_BF16};
    static const double powers[] = {2, 1, 3, INFINITY}, bads[] = {0, NAN, INFINITY};
    static const int ranks[] = {1, 2, 3, 4, 8};
    srand(7);
    for (int n = 0; n < 4 * 4 * 5; n++) {
        TD_SCOPE;
        struct job *job = calloc(1, sizeof *job);
        CHECK(job);
        *job = (struct job){.power = powers[n / 4 % 4],
                            .ranks = ranks[n / 16],
                            .mixed = n % 3 == 1,
                            .backwards = n % 2,
                            .without = n % 5 == 2 ? 5 : -1,
                            .lacking = -1};
        for (int p = 0; p < PARAMETERS; p++)
            job->wholes[p] = values_of(sizes[p], dtypes[n % 4],
                                       n % 7 < 5 || p != 7 ? 0 : bads[n % 7 - 4]);
        compare(job);
        free(job);
    }
}

TEST(a_gradient_that_one_rank_lacks)
{
    TD_SCOPE;
    struct job *job = calloc(1, sizeof *job);
    CHECK(job);
    *job = (struct job){.power = 2, .ranks = 3, .without = 7, .lacking = 1};
    for (int p = 0; p < PARAMETERS; p++)
        job->wholes[p] = values_of(sizes[p], TD_F32, 0);
    cut(job);
    for (int r = 0; r <= 3; r++)
        job->cuts[7][r] = 71 * r / 3;
    run_ranks(job);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(job->statuses[r], TD_ERR_MISMATCH);
        CHECK(strstr(job->texts[r], "parameter 7 has a gradient on rank 0, and none on rank 1"));
    }
    free_clipped(job);
    free(job);
}

TEST(shards_without_ranks_are_refused)
{
    TD_SCOPE;
    td_tensor *x = leaf_with_grad(host_randn((int64_t[]){2048}, 1, TD_F32));
    td_shard shard = {.ndim = 2, .shape = {4, 1024}, .offset = 1024};
    CHECK_OK(td_tensor_set_shard(x, &shard));
    CHECK_FAILS(td_clip_grad_norm_of_(&x, 1, 1, NULL, NULL), TD_ERR_STATE,
                "parameter 0 is a shard of a tensor of the shape [4, 1024]");
    struct td__sharding sharding = {.size = 1, .all_gather = all_gather};
    shard.offset = 1000;
    CHECK_OK(td__tensor_set_shard(x, &shard, &sharding));
    CHECK_FAILS(td_clip_grad_norm_of_(&x, 1, 1, NULL, NULL), TD_ERR_INVALID,
                "the shard from element 1000 to 3048");
}

/* The definition of kernels.h, written as it stands there. */
static double reference_sum(const double *x, int64_t count, double power)
{
    int64_t blocks = blocks_of(count);
    double *sums = calloc((size_t)blocks + 1, sizeof *sums);
    CHECK(sums);
    for (int64_t b = 0; b < blocks; b++) {
        double parts[256] = {0};
        for (int64_t i = b * 1024; i < count && i < (b + 1) * 1024; i++)
            parts[i % 256] += power == 2 ? x[i] * x[i] : fabs(x[i]);
        for (int half = 128; half; half /= 2)
            for (int k = 0; k < half; k++)
                parts[k] += parts[k + half];
        sums[b] = parts[0];
    }
    for (; blocks > 1; blocks = (blocks + 1) / 2)
        for (int64_t b = 0; b < (blocks + 1) / 2; b++)
            sums[b] = 2 * b + 1 < blocks ? sums[2 * b] + sums[2 * b + 1] : sums[2 * b];
    double sum = sums[0];
    free(sums);
    return sum;
}

TEST(sums_are_those_of_the_definition)
{
    static const int64_t counts[] = {0, 1, 255, 257, 1024, 1025, 5000, 33 * 1024, 99999, 300000};
    for (int n = 0; n < 20; n++) {
        TD_SCOPE;
        double power = n % 2 ? 2 : 1;
        td_tensor *x = host_randn((int64_t[]){counts[n / 2]}, 1, TD_F64);
        td_tensor *sum = td_zeros(TD_SHAPE(1), TD_F64, td_device_get("cpu"));
        CHECK_OK(td_host_kernels()->power_sums(sum, &x, 1, power));
        double expected = reference_sum(host_data(x), counts[n / 2], power);
        CHECK(*(const double *)td_tensor_data(sum) == expected);
    }
}
