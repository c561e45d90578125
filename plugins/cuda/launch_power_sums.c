/* Launches the kernels of power_sums.cu: many tensors a launch, and one launch more for their trees. */
#include "cuda/cuda_kernels.h"
#include "cuda/cuda_launch.h"
#include "cuda/power_sums_args.h"

#include <tandem/tensor.h>

_Static_assert(sizeof(struct strided_sums_args) <= 4096, "the arguments of a kernel");

static struct cuda_kernel sum_list = TD__CUDA_KERNEL(power_sums, "sum_list"),
                          sum_strided = TD__CUDA_KERNEL(power_sums, "sum_strided"),
                          sum_tree = TD__CUDA_KERNEL(power_sums, "sum_tree"),
                          norm_end = TD__CUDA_KERNEL(power_sums, "norm_end");

static int32_t chunks_of(int64_t count)
{
    return (int32_t)((count + SUM_CHUNK - 1) / SUM_CHUNK);
}

static struct cuda_grid grid_of(int32_t blocks, unsigned threads)
{
    return (struct cuda_grid){.blocks = {(unsigned)blocks}, .threads = threads};
}

/* The entries that were collected, of `blocks` chunks. */
static td_status launch_list(const td_tensor *out, struct power_sums_args *args, int32_t *blocks)
{
    td_status status = TD_OK;
    if (*blocks)
        status = td__cuda_launch(&sum_list, out, grid_of(*blocks, SUM_THREADS), args);
    if (args->entries && !status)
        status = td__cuda_launch(&sum_tree, out, grid_of(args->entries, TREE_THREADS), args);
    args->chunks += *blocks;
    args->sums += args->entries;
    args->entries = *blocks = 0;
    return status;
}

static td_status launch_strided(const td_tensor *out, const struct cuda_space *space,
                                struct power_sums_args *list, const struct list_entry *entry)
{
    struct strided_sums_args args = {.space = *space, .list = *list};
    args.list.entry[0] = list->entry[0] = *entry;
    args.list.entries = list->entries = 1;
    int32_t blocks = chunks_of(entry->count);
    td_status status = td__cuda_launch(&sum_strided, out, grid_of(blocks, SUM_THREADS), &args);
    if (!status)
        status = td__cuda_launch(&sum_tree, out, grid_of(1, TREE_THREADS), list);
    list->chunks += blocks;
    list->sums++;
    list->entries = 0;
    return status;
}

/* The sums of all tensors, with memory of the caller's scope for those of the chunks. */
static td_status launch_sums(const td_tensor *out, double *sums, td_tensor *const *x, int count,
                             double power)
{
    int64_t chunks = 0;
    for (int i = 0; i < count; i++)
        chunks += chunks_of(td_tensor_numel(x[i]));
    td_tensor *memory = td__cuda_workspace(out, (size_t)(chunks + 1) * sizeof(double));
    if (!memory)
        return td_last_status();
    struct power_sums_args args = {.chunks = td_tensor_data(memory), .sums = sums, .power = power};
    int32_t blocks = 0;
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++) {
        struct cuda_space space = td__cuda_space((const td_tensor *[]){x[i]}, 1, true);
        bool plain = space.plain || !space.count;
        if (args.entries == LIST_ENTRIES || !plain)
            status = launch_list(out, &args, &blocks);
        struct list_entry entry = {.x = td_tensor_data(x[i]),
                                   .count = space.count,
                                   .first_block = blocks,
                                   .dtype = (int16_t)td_tensor_dtype(x[i]),
                                   .aligned = (uintptr_t)td_tensor_data(x[i]) % 16 == 0};
        if (!plain && !status) {
            status = launch_strided(out, &space, &args, &entry);
        } else if (plain) {
            args.entry[args.entries++] = entry;
            blocks += chunks_of(space.count);
        }
    }
    return status ? status : launch_list(out, &args, &blocks);
}

td_status td__cuda_power_sums(td_tensor *out, td_tensor *const *x, int count, double power)
{
    TD_SCOPE;
    return launch_sums(out, td_tensor_data(out), x, count, power);
}

td_status td__cuda_norm(td_tensor *out, td_tensor *const *x, int count, double power)
{
    TD_SCOPE;
    td_tensor *sums = td__cuda_workspace(out, (size_t)(count + 1) * sizeof(double));
    if (!sums)
        return td_last_status();
    struct norm_args end = {.sums = td_tensor_data(sums),
                            .count = count,
                            .power = power,
                            .out = td_tensor_data(out),
                            .wide = td_tensor_dtype(out) == TD_F64};
    td_status status = launch_sums(out, td_tensor_data(sums), x, count, power);
    return status ? status : td__cuda_launch(&norm_end, out, grid_of(1, SUM_THREADS), &end);
}
