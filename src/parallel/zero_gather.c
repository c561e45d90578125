/* How parameters are divided among the ranks of td_zero_optimizer(), and gathered.
 *
 * The shares are gathered in rounds through a buffer of limited size, so that it does not take the memory that the
 * division saves: in each round every rank puts the next part of its share there, wherever that is in its parameters,
 * one all_gather completes the buffer, and each rank copies the parts of the others out. */
#include "parallel/zero.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

#define ROUND_BYTES ((int64_t)16 << 20)

/* ---- Cuts ------------------------------------------------------------------------------------------------------- */

/* The place nearest to element `at`, 0 … numel, where a parameter may be cut. */
static int64_t place_near(int64_t at, int64_t numel)
{
    if (at <= 0 || at >= numel)
        return at <= 0 ? 0 : numel;
    int64_t below = at - at % TD__SHARD_BLOCK;
    int64_t above = below + TD__SHARD_BLOCK < numel ? below + TD__SHARD_BLOCK : numel;
    return at - below < above - at ? below : above;
}

td_status td__zero_cut(struct td__zero_parameter *parameters, int count, int ranks)
{
    int64_t total = 0, start = 0;
    for (int i = 0; i < count; i++)
        total += (int64_t)td_tensor_nbytes(parameters[i].whole);
    for (int i = 0; i < count; i++) {
        struct td__zero_parameter *parameter = &parameters[i];
        const struct td__layout *layout = &parameter->whole->layout;
        int64_t size = (int64_t)td_dtype_size(layout->dtype);
        parameter->cuts = calloc((size_t)ranks + 1, sizeof *parameter->cuts);
        if (!parameter->cuts)
            return td__fail_nomem("td_zero_optimizer");
        for (int r = 1; r < ranks; r++) {
            int64_t ideal = total / ranks * r + total % ranks * r / ranks; /* in bytes */
            parameter->cuts[r] = place_near((ideal - start) / size, layout->numel);
        }
        parameter->cuts[ranks] = layout->numel;
        start += layout->numel * size;
    }
    return TD_OK;
}

/* ---- Agreement -------------------------------------------------------------------------------------------------- */

td_status td__zero_agree(const struct td__zero *zero, const char *what, td_status status,
                         const uint64_t *words, int count, uint64_t *all)
{
    if (zero->size == 1) {
        if (count)
            memcpy(all, words, (size_t)count * sizeof *words);
        return status;
    }
    struct td__error cause;
    td__error_save(&cause);
    size_t length = 1 + (size_t)count;
    uint64_t *mine = calloc(length * ((size_t)zero->size + 1), sizeof *mine);
    uint64_t *records = mine ? mine + length : NULL;
    if (!mine) { /* the others wait: without memory for the record there is no other way to tell them */
        td_group_abort(zero->group);
        return status ? status : td__fail_nomem(what);
    }
    mine[0] = (uint64_t)status;
    if (count)
        memcpy(mine + 1, words, (size_t)count * sizeof *words);
    td_status gathered = td_group_all_gather(records, mine, length, TD_I64, zero->group, NULL);
    for (int r = 0; r < zero->size && !gathered && !status; r++)
        if (records[(size_t)r * length] != TD_OK)
            gathered = td_fail(TD_ERR_ABORTED, "%s has failed on rank %d, so no rank makes it",
                               what, td_get_global_rank(zero->group, r));
    for (int r = 0; r < zero->size && count; r++)
        memcpy(all + (size_t)r * (size_t)count, records + (size_t)r * length + 1,
               (size_t)count * sizeof *all);
    free(mine);
    if (!status)
        return gathered;
    td__error_restore(&cause);
    return status;
}

/* ---- Gathering -------------------------------------------------------------------------------------------------- */

/* Tensors of one dtype on one device. */
struct gathering {
    const struct td__zero *zero;
    td_tensor **flats;
    int *indices;
    int count;
    struct cursor {
        int member;   /* of the lists above */
        int64_t done; /* elements of the rank's share of it */
    } * cursors;      /* of each rank */
    td_tensor *buffer;
    td_tensor **parts; /* of the buffer, one for each rank */
};

static const int64_t *cuts_of(const struct gathering *gathering, int member, int rank)
{
    return gathering->zero->parameters[gathering->indices[member]].cuts + rank;
}

static int64_t share_of(const struct gathering *gathering, int rank)
{
    int64_t elements = 0;
    for (int m = 0; m < gathering->count; m++) {
        const int64_t *cuts = cuts_of(gathering, m, rank);
        elements += cuts[1] - cuts[0];
    }
    return elements;
}

static td_status copy_part(td_tensor *flat, int64_t from, td_tensor *part, int64_t at,
                           int64_t length, bool out)
{
    td_tensor *a = td__narrow(flat, 0, from, length), *b = td__narrow(part, 0, at, length);
    td_status status = a && b ? td__tensor_copy(out ? a : b, out ? b : a) : td__error_status();
    td_tensor_release(a);
    td_tensor_release(b);
    return status;
}

/* Copies the next elements of a rank's share from its part of the buffer (`out`), or to it. */
static td_status move_part(struct gathering *gathering, int rank, bool out)
{
    td_tensor *part = gathering->parts[rank];
    struct cursor *cursor = &gathering->cursors[rank];
    for (int64_t at = 0; at < part->layout.numel;) {
        const int64_t *cuts = cuts_of(gathering, cursor->member, rank);
        int64_t from = cuts[0] + cursor->done, length = cuts[1] - from;
        if (!length) {
            *cursor = (struct cursor){cursor->member + 1, 0};
            continue;
        }
        if (length > part->layout.numel - at)
            length = part->layout.numel - at;
        TD_TRY(copy_part(gathering->flats[cursor->member], from, part, at, length, out));
        at += length;
        cursor->done += length;
    }
    return TD_OK;
}

static void release_parts(struct gathering *gathering)
{
    for (int r = 0; r < gathering->zero->size; r++) {
        td_tensor_release(gathering->parts[r]);
        gathering->parts[r] = NULL;
    }
}

/* `left[r]` elements of rank r are not gathered yet. */
static td_status gather_round(struct gathering *gathering, int64_t *left, int64_t most)
{
    const struct td__zero *zero = gathering->zero;
    int64_t at = 0;
    for (int r = 0; r < zero->size; r++) {
        int64_t length = left[r] < most ? left[r] : most;
        gathering->parts[r] = td__narrow(gathering->buffer, 0, at, length);
        if (!gathering->parts[r])
            return td__error_status();
        at += length;
        left[r] -= length;
    }
    TD_TRY(move_part(gathering, zero->rank, false));
    TD_TRY(td_all_gather(gathering->parts, zero->size, gathering->parts[zero->rank], zero->group,
                         NULL));
    for (int r = 0; r < zero->size; r++)
        if (r != zero->rank)
            TD_TRY(move_part(gathering, r, true));
    return TD_OK;
}

static td_status gather_all(struct gathering *gathering, int64_t *left)
{
    const struct td__zero *zero = gathering->zero;
    const td_tensor *first = gathering->flats[0];
    int64_t size = (int64_t)td_dtype_size(first->layout.dtype), longest = 0, total = 0;
    int64_t most = ROUND_BYTES / size / zero->size;
    most = most > TD__SHARD_BLOCK ? most : TD__SHARD_BLOCK;
    for (int r = 0; r < zero->size; r++) {
        left[r] = share_of(gathering, r);
        longest = left[r] > longest ? left[r] : longest;
        total += left[r] < most ? left[r] : most;
    }
    gathering->buffer = td__empty("td_zero_optimizer", &total, 1, first->layout.dtype,
                                  first->storage->device);
    td_status status = gathering->buffer ? TD_OK : td__error_status();
    for (; longest > 0 && !status; longest -= most) {
        status = gather_round(gathering, left, most);
        release_parts(gathering);
    }
    td_tensor_release(gathering->buffer);
    return status;
}

static bool go_together(const td_tensor *a, const td_tensor *b)
{
    return a->layout.dtype == b->layout.dtype && a->storage->device == b->storage->device;
}

td_status td__zero_gather(const struct td__zero *zero, td_tensor *const *flats, const int *indices,
                          int count)
{
    if (zero->size == 1 || !count)
        return TD_OK;
    size_t members = (size_t)count, ranks = (size_t)zero->size;
    struct gathering gathering = {.zero = zero,
                                  .flats = calloc(members, sizeof *gathering.flats),
                                  .indices = calloc(members, sizeof *gathering.indices),
                                  .cursors = calloc(ranks, sizeof *gathering.cursors),
                                  .parts = calloc(ranks, sizeof *gathering.parts)};
    int64_t *left = calloc(ranks, sizeof *left);
    bool *done = calloc(members, sizeof *done);
    td_status status = gathering.flats && gathering.indices && gathering.cursors &&
                               gathering.parts && left && done
                           ? TD_OK
                           : td__fail_nomem("td_zero_optimizer");
    for (int first = 0; first < count && !status; first++) {
        if (done[first])
            continue;
        gathering.count = 0;
        memset(gathering.cursors, 0, ranks * sizeof *gathering.cursors);
        for (int i = first; i < count; i++) {
            if (done[i] || !go_together(flats[first], flats[i]))
                continue;
            done[i] = true;
            gathering.flats[gathering.count] = flats[i];
            gathering.indices[gathering.count++] = indices[i];
        }
        status = gather_all(&gathering, left);
    }
    free(gathering.flats);
    free(gathering.indices);
    free(gathering.cursors);
    free(gathering.parts);
    free(left);
    free(done);
    return status;
}
