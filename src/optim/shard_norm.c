/* The sums of gradients that are divided among ranks. Each rank sums the complete nodes of the tree (tensor/norm_tree.h)
 * that its shards have. The ranks of a sharding exchange records of numbers, whose length the shapes of the wholes decide:
 *
 *     status | begin end sum sum … | begin end sum … | …        for each parameter: the blocks of the shard, its nodes
 *
 * A rank that fails says so in its record, so that no other rank waits for it. */
#include "optim/grad_norm.h"

#include "base/fail.h"
#include "optim/optimizer.h"
#include "tensor/norm_tree.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

_Static_assert(TD__SHARD_BLOCK % TD__NORM_BLOCK == 0, "shards consist of whole blocks");

#define CALL "td_clip_grad_norm_"

/* In the place of `begin`. */
enum { NO_GRAD = -1, EMPTY = -2 };

struct record {
    const struct td__sharding *sharding;
    int64_t length; /* of a rank's */
    double *mine, *all;
};

struct shard {
    int record;    /* -1: the parameter is whole */
    int64_t place; /* in the record */
    int64_t blocks;
    bool has_grad;
};

struct td__shard_norms {
    int count;
    struct shard *shards; /* one for each parameter */
    struct record *records;
    int record_count;
};

/* ---- The layout ----------------------------------------------------------------------------------------------- */

static int64_t whole_of(const td_shard *shard)
{
    int64_t numel = 1;
    for (int d = 0; d < shard->ndim; d++)
        numel *= shard->shape[d];
    return numel;
}

static int64_t blocks_of(int64_t elements)
{
    return elements / TD__NORM_BLOCK + (elements % TD__NORM_BLOCK != 0);
}

/* The most complete nodes that some of the blocks can be. */
static int64_t most_nodes(int64_t blocks)
{
    int64_t most = 0;
    for (; blocks; blocks /= 2)
        most += 2;
    return most;
}

static td_status check(const td_tensor *parameter, int index)
{
    const struct td__shard *shard = parameter->shard;
    int64_t end = shard->info.offset + parameter->layout.numel, whole = whole_of(&shard->info);
    if (!shard->sharding)
        return td_fail(TD_ERR_STATE,
                       CALL ": parameter %d is a shard of a tensor of the shape %s, and the ranks "
                            "with the other shards are not known",
                       index, td__shape_text(shard->info.shape, shard->info.ndim));
    if (parameter->layout.numel && /* an empty one may stand anywhere */
        (shard->info.offset % TD__SHARD_BLOCK || (end % TD__SHARD_BLOCK && end != whole)))
        return td_fail(TD_ERR_INVALID,
                       CALL ": parameter %d is the shard from element %" PRId64 " to %" PRId64
                            "; a shard begins and ends at a multiple of %d elements",
                       index, shard->info.offset, end, TD__SHARD_BLOCK);
    return TD_OK;
}

static int record_of(struct td__shard_norms *norms, const struct td__sharding *sharding)
{
    int r = 0;
    while (r < norms->record_count && norms->records[r].sharding != sharding)
        r++;
    if (r == norms->record_count)
        norms->records[norms->record_count++] = (struct record){.sharding = sharding, .length = 1};
    return r;
}

static td_status lay_out(struct td__shard_norms *norms, td_tensor *const *parameters)
{
    for (int i = 0; i < norms->count; i++) {
        norms->shards[i].record = -1;
        if (!parameters[i] || !parameters[i]->shard)
            continue;
        TD_TRY(check(parameters[i], i));
        int r = record_of(norms, parameters[i]->shard->sharding);
        int64_t blocks = blocks_of(whole_of(&parameters[i]->shard->info));
        norms->shards[i] = (struct shard){
            .record = r, .place = norms->records[r].length, .blocks = blocks};
        norms->records[r].length += 2 + most_nodes(blocks);
    }
    for (int r = 0; r < norms->record_count; r++) {
        struct record *record = &norms->records[r];
        size_t ranks = (size_t)record->sharding->size;
        record->mine = calloc((size_t)record->length * (ranks + 1), sizeof *record->mine);
        if (!record->mine)
            return td__fail_nomem(CALL);
        record->all = record->mine + record->length;
    }
    return TD_OK;
}

static void free_norms(struct td__shard_norms *norms)
{
    for (int r = 0; r < norms->record_count; r++)
        free(norms->records[r].mine);
    free(norms->records);
    free(norms->shards);
    free(norms);
}

/* ---- What this rank has --------------------------------------------------------------------------------------- */

static td_status add_nodes(struct td__shard_norms *norms, int index, td_tensor *parameter,
                           struct td__norm_pieces *pieces)
{
    const struct shard *shard = &norms->shards[index];
    double *words = norms->records[shard->record].mine + shard->place;
    td_tensor *grad = td_tensor_grad(parameter);
    int64_t offset = parameter->shard->info.offset, count = parameter->layout.numel;
    int64_t first = offset / TD__NORM_BLOCK, end = first + blocks_of(count);
    words[0] = !count ? EMPTY : !grad ? NO_GRAD : (double)first;
    words[1] = (double)end;
    if (grad && td__check_shard_grad(parameter, grad))
        return td_fail(TD_ERR_STATE, CALL ": parameter %d: %s", index, td__error_text());
    if (!count || !grad)
        return TD_OK;
    double *sum = words + 2;
    for (int64_t at = first, size; at < end; at += size) {
        size = td__norm_node(at, end);
        int64_t from = at * TD__NORM_BLOCK - offset, left = count - from;
        int64_t length = size * TD__NORM_BLOCK < left ? size * TD__NORM_BLOCK : left;
        TD_TRY(td__add_piece(pieces, td__narrow(grad, 0, from, length), sum++));
    }
    return TD_OK;
}

static bool has_shards(td_tensor *const *parameters, int count)
{
    for (int i = 0; i < count; i++)
        if (parameters[i] && parameters[i]->shard)
            return true;
    return false;
}

td_status td__shard_norms_begin(td_tensor *const *parameters, int count,
                                struct td__norm_pieces *pieces, struct td__shard_norms **norms_out)
{
    *norms_out = NULL;
    if (!has_shards(parameters, count))
        return TD_OK;
    struct td__shard_norms *norms = calloc(1, sizeof *norms);
    if (!norms)
        return td__fail_nomem(CALL);
    norms->count = count;
    norms->shards = calloc((size_t)count, sizeof *norms->shards);
    norms->records = calloc((size_t)count, sizeof *norms->records);
    td_status status = norms->shards && norms->records ? lay_out(norms, parameters)
                                                       : td__fail_nomem(CALL);
    if (status) {
        free_norms(norms);
        return status;
    }
    *norms_out = norms;
    for (int i = 0; i < count && !status; i++)
        if (norms->shards[i].record >= 0)
            status = add_nodes(norms, i, parameters[i], pieces);
    return status;
}

/* ---- What all ranks have ---------------------------------------------------------------------------------------- */

/* The shard of one rank: its blocks, and the sums of their nodes. */
struct range {
    int64_t begin, end;
    const double *sums;
};

static int compare_ranges(const void *a, const void *b)
{
    const struct range *one = a, *other = b;
    return one->begin < other->begin ? -1 : one->begin > other->begin;
}

/* The shards of parameter `index`; none if no rank has a gradient. */
static td_status find_ranges(const struct td__shard_norms *norms, int index, struct range *ranges,
                             int *count)
{
    const struct shard *shard = &norms->shards[index];
    const struct record *record = &norms->records[shard->record];
    int with = -1, without = -1;
    *count = 0;
    for (int rank = 0; rank < record->sharding->size; rank++) {
        const double *words = record->all + rank * record->length + shard->place;
        if (words[0] == EMPTY)
            continue;
        if (words[0] == NO_GRAD) {
            without = without < 0 ? rank : without;
            continue;
        }
        with = with < 0 ? rank : with;
        ranges[(*count)++] = (struct range){(int64_t)words[0], (int64_t)words[1], words + 2};
    }
    if (with >= 0 && without >= 0)
        return td_fail(TD_ERR_MISMATCH,
                       CALL ": parameter %d has a gradient on rank %d, and none on rank %d; all "
                            "ranks must have gradients of the same parameters",
                       index, with, without);
    qsort(ranges, (size_t)*count, sizeof *ranges, compare_ranges);
    int64_t at = 0;
    for (int r = 0; r < *count && at == ranges[r].begin; r++)
        at = ranges[r].end;
    if (*count && at != shard->blocks)
        return td_fail(TD_ERR_MISMATCH,
                       CALL ": the shards of parameter %d are not a whole: one ends at block "
                            "%" PRId64 " of %" PRId64 ", and none follows",
                       index, at, shard->blocks);
    return TD_OK;
}

static td_status combine(const struct td__shard_norms *norms, int index, struct range *ranges,
                         bool greatest, double *sum)
{
    int count;
    TD_TRY(find_ranges(norms, index, ranges, &count));
    struct td__norm_tree tree = {.greatest = greatest};
    for (int r = 0; r < count; r++) {
        const double *value = ranges[r].sums;
        for (int64_t at = ranges[r].begin, size; at < ranges[r].end; at += size) {
            size = td__norm_node(at, ranges[r].end);
            td__norm_push(&tree, at, size, *value++);
        }
    }
    *sum = td__norm_result(&tree);
    return TD_OK;
}

/* Every record is exchanged, whatever has failed: other ranks wait for it. */
static td_status exchange(struct td__shard_norms *norms, td_status status)
{
    for (int r = 0; r < norms->record_count; r++) {
        const struct record *record = &norms->records[r];
        struct td__error cause;
        td__error_save(&cause);
        record->mine[0] = status;
        td_status gathered = record->sharding->all_gather(
            record->sharding, record->mine, (size_t)record->length * sizeof *record->mine,
            record->all);
        if (status)
            td__error_restore(&cause);
        else
            status = gathered;
        for (int rank = 0; rank < record->sharding->size && !status; rank++)
            if ((status = (td_status)record->all[rank * record->length]))
                td_fail(status, CALL ": rank %d has failed to compute the norm of its gradients",
                        rank);
    }
    return status;
}

td_status td__shard_norms_end(struct td__shard_norms *norms, td_status status, bool greatest,
                              double *sums)
{
    if (!norms)
        return status;
    int most = 0;
    for (int r = 0; r < norms->record_count; r++)
        most = norms->records[r].sharding->size > most ? norms->records[r].sharding->size : most;
    struct range *ranges = calloc((size_t)most + 1, sizeof *ranges);
    if (!ranges && !status)
        status = td__fail_nomem(CALL);
    status = exchange(norms, status);
    for (int i = 0; i < norms->count && !status; i++)
        if (norms->shards[i].record >= 0)
            status = combine(norms, i, ranges, greatest, &sums[i]);
    free(ranges);
    free_norms(norms);
    return status;
}
