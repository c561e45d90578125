/* A sharded model is divided anew, from the mirrors of its shards (fsdp_mirror.h).
 *
 *     rank 0      | A . . . . . . |           three ranks, of which rank 1 has died. The new rank 0 takes its part of A from its
 *     rank 1      | . . . B . . . |           own mirror, and that of B from what it can read of rank 1's mirror, or from the
 *     rank 2      | . . . . . C . |           message of the first rank that can
 *                 |               |
 *     new rank 0  | A A B . . . . |
 *     new rank 1  | . . . B C C C |
 *
 * Each old rank had a copy of a range of each flat, and several of them that of the same elements, where ranks have the same
 * shard. So a new rank takes what it needs from left to right: the next piece is from an old rank whose range has the next
 * element, and whose copy it can read, or another one can.
 *
 * All ranks know the old and the new ranges, and which of them can read which mirror, so that each knows what all send: no
 * request is made, and only bytes that change their place between memories are sent. The tables are small; the bytes of a model
 * go in one all_to_all. */
#include "parallel/fsdp_mirror.h"

#include "base/fail.h"
#include "device/device_internal.h"
#include "group/process_group.h"
#include "optim/optimizer.h"
#include "parallel/fsdp_slices.h"
#include "tensor/file_memory.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* What the ranks of the new group know of each other. */
struct reshard {
    struct td__fsdp *fsdp;
    td_optimizer *optimizer;
    td_group *group;
    struct td__mirror *mirror; /* NULL: a newcomer */
    int former;                /* size of the former group */
    int root;                  /* the first survivor */
    int32_t *names;            /* of each new rank: what it was in the former group; -1: nothing */
    int64_t version;           /* the step + 1 that is restored */
    int64_t
        *table; /* of each new rank: the steps + 1 of the slots of each old one that it can read */
    int *readers; /* of each old rank: the first that can read its copy of this version; or -1 */
    struct td__mirror_place *old_places, *new_places;
    int old_shards;
    struct td__mirror_layout before;
    struct td__mirror_layout after;
    td_bytes rest;
    int planes;
};

/* ---- Who was there ----------------------------------------------------------------------------------------------- */

/* Finds the first survivor, and what each rank was. */
static td_status share_names(struct reshard *reshard)
{
    int size = reshard->group->size;
    const struct td__mirror *mirror = reshard->mirror;
    int32_t mine[3] = {-1, 0, 0};
    if (mirror) {
        mine[0] = td__mirror_rank(mirror);
        mine[1] = td__mirror_layout(mirror)->size;
        mine[2] = td__mirror_shards(mirror);
    }
    int32_t(*all)[3] = calloc((size_t)size, sizeof *all);
    reshard->names = calloc((size_t)size, sizeof *reshard->names);
    if (!all || !reshard->names) {
        free(all);
        return td__fail_nomem("td_fsdp");
    }
    td_status status = td_group_all_gather(all, mine, 3, TD_I32, reshard->group, NULL);
    reshard->root = -1;
    for (int r = size - 1; r >= 0 && !status; r--) {
        reshard->names[r] = all[r][0];
        if (all[r][0] < 0)
            continue;
        reshard->root = r;
        reshard->former = all[r][1];
        reshard->old_shards = all[r][2];
    }
    free(all);
    TD_TRY(status);
    return reshard->root >= 0
               ? TD_OK
               : td_fail(TD_ERR_INVALID, "td_fsdp: no rank of the group has a mirror");
}

/* What each old rank had a copy of. */
static td_status share_places(struct reshard *reshard)
{
    size_t count = (size_t)reshard->former, width = sizeof *reshard->old_places;
    reshard->old_places = calloc(count, width);
    if (!reshard->old_places)
        return td__fail_nomem("td_fsdp");
    if (reshard->mirror)
        memcpy(reshard->old_places, td__mirror_layout(reshard->mirror)->places, count * width);
    TD_TRY(td_group_broadcast(reshard->old_places, count * width, TD_U8,
                              td_get_global_rank(reshard->group, reshard->root), reshard->group,
                              NULL));
    return td__mirror_lay_out(reshard->fsdp, reshard->old_places, reshard->former,
                              reshard->old_shards, &reshard->before);
}

/* Which copies each rank can read. */
static td_status share_table(struct reshard *reshard)
{
    size_t each = (size_t)reshard->former * TD__MIRROR_SLOTS;
    reshard->table = calloc((size_t)reshard->group->size * each, sizeof *reshard->table);
    reshard->readers = calloc((size_t)reshard->former, sizeof *reshard->readers);
    int64_t *own = calloc(each, sizeof *own);
    td_status status = TD_OK;
    if (!reshard->table || !reshard->readers || !own)
        status = td__fail_nomem("td_fsdp");
    for (int old = 0; own && reshard->mirror && old < reshard->former; old++)
        for (int s = 0; s < TD__MIRROR_SLOTS; s++)
            own[old * TD__MIRROR_SLOTS + s] = td__mirror_step(reshard->mirror, old, s);
    if (!status)
        status = td_group_all_gather(reshard->table, own, each, TD_I64, reshard->group, NULL);
    free(own);
    return status;
}

/* ---- Which state, and who has it ----------------------------------------------------------------------------- */

static bool serves(const struct reshard *reshard, int rank, int old)
{
    const int64_t *slots =
        &reshard->table[((int64_t)rank * reshard->former + old) * TD__MIRROR_SLOTS];
    return slots[0] == reshard->version || slots[1] == reshard->version;
}

static void find_readers(struct reshard *reshard)
{
    for (int old = 0; old < reshard->former; old++) {
        reshard->readers[old] = -1;
        for (int r = reshard->group->size - 1; r >= 0; r--)
            if (serves(reshard, r, old))
                reshard->readers[old] = r;
    }
}

static bool has_element(const struct reshard *reshard, int old, int flat, int64_t element)
{
    int64_t first, count = td__mirror_range(&reshard->before, old, flat, &first);
    return element >= first && element < first + count;
}

/* The old rank from whose copy a new one gets an element, and who reads it: itself, or the first that can; -1: nobody. */
static int source(const struct reshard *reshard, int rank, int flat, int64_t element, int *reader)
{
    int found = -1;
    for (int old = 0; old < reshard->former; old++) {
        if (reshard->readers[old] < 0 || !has_element(reshard, old, flat, element))
            continue;
        if (serves(reshard, rank, old)) {
            *reader = rank;
            return old;
        }
        if (found < 0) {
            found = old;
            *reader = reshard->readers[old];
        }
    }
    return found;
}

/* An old rank that had an element which nobody has; -1: there is none. */
static int find_lost(const struct reshard *reshard)
{
    for (int f = 0; f < reshard->before.flat_count; f++)
        for (int64_t at = 0, first; at < reshard->before.flats[f]->numel;) {
            int reader, old = source(reshard, 0, f, at, &reader);
            if (old < 0) {
                for (old = 0; !has_element(reshard, old, f, at);)
                    old++;
                return old;
            }
            at = td__mirror_range(&reshard->before, old, f, &first);
            at += first;
        }
    return -1;
}

/* Survivors go back from their own copies: what is beside the shards is in no other. */
static bool survivors_have(const struct reshard *reshard)
{
    for (int r = 0; r < reshard->group->size; r++)
        if (reshard->names[r] >= 0 && !serves(reshard, r, reshard->names[r]))
            return false;
    return true;
}

/* The newest state that is whole. */
static td_status choose(struct reshard *reshard)
{
    int64_t best = 0;
    int lost = 0;
    size_t count = (size_t)reshard->group->size * (size_t)reshard->former * TD__MIRROR_SLOTS;
    for (size_t i = 0; i < count; i++) {
        reshard->version = reshard->table[i];
        if (reshard->version <= best || !survivors_have(reshard))
            continue;
        find_readers(reshard);
        int missing = find_lost(reshard);
        if (missing < 0)
            best = reshard->version;
        else
            lost = missing;
    }
    reshard->version = best;
    find_readers(reshard);
    return best ? TD_OK
                : td_fail(
                      TD_ERR_PEER,
                      "td_fsdp: no rank that is left has a whole copy of the shards that rank %d "
                      "of the former group had",
                      lost);
}

/* This rank's slot of the state, of an old rank. */
static int slot_for(const struct reshard *reshard, int old)
{
    return td__mirror_step(reshard->mirror, old, 0) == reshard->version ? 0 : 1;
}

static td_status share_rest(struct reshard *reshard)
{
    bool sends = reshard->group->rank == reshard->root;
    td_bytes rest = {0};
    if (sends)
        rest = td__mirror_rest(reshard->mirror,
                               slot_for(reshard, td__mirror_rank(reshard->mirror)));
    TD_TRY(td_broadcast_object_list(&rest, 1, td_get_global_rank(reshard->group, reshard->root),
                                    reshard->group));
    if (sends) {
        char *copy = malloc(rest.size + 1);
        if (!copy)
            return td__fail_nomem("td_fsdp");
        rest.data = memcpy(copy, rest.data, rest.size);
    }
    reshard->rest = rest;
    return td__mirror_read_planes(rest, &reshard->planes);
}

/* ---- Pieces ------------------------------------------------------------------------------------------------------- */

/* A range of a flat, in one plane, that an old rank had and a new one gets. */
struct piece {
    int old, plane, flat;
    int64_t first, count; /* elements of the flat */
    size_t bytes;
};

struct cursor {
    int rank, from; /* the new ranks that get it, and have it */
    int flat, plane;
    int64_t done; /* elements of the flat */
};

/* The next range of the cursor's flat, whoever has it, of which *reader reads a copy. */
static bool cut_piece(const struct reshard *reshard, const struct cursor *at, struct piece *piece,
                      int *reader)
{
    int64_t first, left = td__mirror_range(&reshard->after, at->rank, at->flat, &first) - at->done;
    if (left <= 0)
        return false;
    first += at->done;
    int old = source(reshard, at->rank, at->flat, first, reader);
    int64_t begin, has = td__mirror_range(&reshard->before, old, at->flat, &begin);
    has += begin - first;
    *piece = (struct piece){.old = old,
                            .plane = at->plane,
                            .flat = at->flat,
                            .first = first,
                            .count = has < left ? has : left};
    piece->bytes = (size_t)piece->count * td_dtype_size(reshard->before.flats[at->flat]->dtype);
    return true;
}

/* The next piece that goes from one new rank to another, in an order that both know. */
static bool next_piece(const struct reshard *reshard, struct cursor *at, struct piece *piece)
{
    int reader;
    for (; at->flat < reshard->before.flat_count; at->flat++, at->done = 0) {
        int planes = td__mirror_planes(reshard->before.flats[at->flat], reshard->planes);
        while (cut_piece(reshard, at, piece, &reader)) {
            if (reader == at->from && at->plane < planes) {
                at->plane++;
                return true;
            }
            at->done += piece->count;
            at->plane = 0;
        }
    }
    return false;
}

static size_t bytes_between(const struct reshard *reshard, int rank, int from)
{
    struct cursor at = {.rank = rank, .from = from};
    struct piece piece;
    size_t bytes = 0;
    while (rank != from && next_piece(reshard, &at, &piece))
        bytes += piece.bytes;
    return bytes;
}

/* Where this rank has a piece. */
static const char *place_of(const struct reshard *reshard, const struct piece *piece)
{
    const struct td__mirror_layout *before = &reshard->before;
    int64_t first;
    td__mirror_range(before, piece->old, piece->flat, &first);
    return td__mirror_slot(reshard->mirror, piece->old, slot_for(reshard, piece->old)) +
           td__mirror_offset(before, piece->old, piece->plane, piece->flat) +
           (size_t)(piece->first - first) * td_dtype_size(before->flats[piece->flat]->dtype);
}

/* To elements of a storage, of any device. */
static td_status put_elements(struct td__storage *storage, int64_t first, int64_t count,
                              td_dtype dtype, const char *data)
{
    int64_t width = (int64_t)td_dtype_size(dtype);
    struct td__place to = td__storage_place(storage, first * width);
    struct td__place from = {.device = td__host_device(), .data = (void *)data};
    return td__copy_between("td_fsdp", &to, &from, (size_t)(count * width), false);
}

/* The parts of a piece that parameters have go to their buffers; padding has none. */
static td_status put_in_buffers(const struct reshard *reshard, const struct piece *piece,
                                const char *data)
{
    struct td__fsdp_flat *flat = reshard->after.flats[piece->flat];
    size_t width = td_dtype_size(flat->dtype);
    for (int i = 0; i < flat->count; i++) {
        const struct td__fsdp_param *param = &flat->params[i];
        int64_t begin = param->offset + param->first, end = begin + param->count;
        int64_t first = piece->first > begin ? piece->first : begin;
        int64_t last = piece->first + piece->count < end ? piece->first + piece->count : end;
        if (last <= first)
            continue;
        const td_tensor *buffer =
            td__mirror_parameter(reshard->optimizer, param->tensor)->buffers[piece->plane - 1];
        TD_TRY(put_elements(buffer->storage, buffer->offset + first - begin, last - first,
                            flat->dtype, data + (size_t)(first - piece->first) * width));
    }
    return TD_OK;
}

static td_status put(const struct reshard *reshard, const struct piece *piece, const char *data)
{
    struct td__fsdp_flat *flat = reshard->after.flats[piece->flat];
    if (piece->plane)
        return put_in_buffers(reshard, piece, data);
    return put_elements(flat->shard, piece->first - flat->cuts[flat->unit->ranks->rank],
                        piece->count, flat->dtype, data);
}

/* What comes from a rank, in `data`; from this one, out of its mirrors. */
static td_status put_all(const struct reshard *reshard, int from, const char *data)
{
    struct cursor at = {.rank = reshard->group->rank, .from = from};
    struct piece piece;
    while (next_piece(reshard, &at, &piece)) {
        TD_TRY(put(reshard, &piece, from == at.rank ? place_of(reshard, &piece) : data));
        data += from == at.rank ? 0 : piece.bytes;
    }
    return TD_OK;
}

static char *pack_for(const struct reshard *reshard, int rank, char *data)
{
    struct cursor at = {.rank = rank, .from = reshard->group->rank};
    struct piece piece;
    while (rank != at.from && next_piece(reshard, &at, &piece)) {
        memcpy(data, place_of(reshard, &piece), piece.bytes);
        data += piece.bytes;
    }
    return data;
}

static td_status send_pieces(const struct reshard *reshard)
{
    int size = reshard->group->size, self = reshard->group->rank;
    size_t *from = calloc(2 * (size_t)size, sizeof *from), *to = from + size, in = 0, out = 0;
    if (!from)
        return td__fail_nomem("td_fsdp");
    for (int r = 0; r < size; r++) {
        in += from[r] = bytes_between(reshard, self, r);
        out += to[r] = bytes_between(reshard, r, self);
    }
    char *received = malloc(in + 1), *sent = malloc(out + 1), *end = sent;
    td_status status = received && sent ? TD_OK : td__fail_nomem("td_fsdp");
    for (int r = 0; r < size && !status; r++)
        end = pack_for(reshard, r, end);
    if (!status)
        status = td_group_all_to_all_v(received, sent, from, to, TD_U8, reshard->group, NULL);
    const char *at = received;
    for (int r = 0; r < size && !status; at += from[r], r++)
        status = put_all(reshard, r, at);
    free(received);
    free(sent);
    free(from);
    return status;
}

/* ---- The model and the optimizer --------------------------------------------------------------------------------- */

/* Memory for the state of the new shards; what it had is in the mirror. */
static td_status remake_buffers(const struct reshard *reshard)
{
    for (int i = 0; i < reshard->optimizer->count; i++) {
        struct td__parameter *parameter = &reshard->optimizer->parameters[i];
        for (int b = 0; b < TD__BUFFERS_MOST; b++) {
            td_tensor *former = parameter->buffers[b];
            if (former && former->shard)
                former->shard->sharding = NULL; /* that of ranks which are no more */
            td_tensor_release(former);
            parameter->buffers[b] = NULL;
        }
    }
    for (int i = 0; i < reshard->optimizer->count; i++) {
        struct td__parameter *parameter = &reshard->optimizer->parameters[i];
        for (int b = 0; b + 1 < reshard->planes; b++) {
            parameter->buffers[b] = td__empty_beside(parameter->tensor);
            if (!parameter->buffers[b])
                return td__error_status();
            TD_TRY(td__tensor_copy_shard(parameter->buffers[b], parameter->tensor));
        }
    }
    return TD_OK;
}

/* The buffers of the former shards refer to their ranks, which end. */
static void forget_ranks(const td_optimizer *optimizer)
{
    for (int i = 0; i < optimizer->count; i++)
        for (int b = 0; b < TD__BUFFERS_MOST; b++) {
            td_tensor *buffer = optimizer->parameters[i].buffers[b];
            if (buffer && buffer->shard)
                buffer->shard->sharding = NULL;
        }
}

/* The shards of the new ranks. */
static td_status lay_out_new(struct reshard *reshard)
{
    struct td__fsdp_ranks *ranks = reshard->fsdp->units[0]->ranks;
    int size = reshard->group->size;
    TD_TRY(td__fsdp_find_places(ranks));
    const int32_t(*places)[2] = (const void *)ranks->places;
    reshard->new_places = calloc((size_t)size, sizeof *reshard->new_places);
    if (!reshard->new_places)
        return td__fail_nomem("td_fsdp");
    for (int r = 0; r < size; r++)
        reshard->new_places[r] = (struct td__mirror_place){.shard = places[r][0], .parts = 1};
    return td__mirror_lay_out(reshard->fsdp, reshard->new_places, size, ranks->size,
                              &reshard->after);
}

static td_status restore(struct reshard *reshard)
{
    forget_ranks(reshard->optimizer);
    TD_TRY(td__fsdp_remake(reshard->fsdp, reshard->group));
    TD_TRY(lay_out_new(reshard));
    TD_TRY(remake_buffers(reshard));
    TD_TRY(send_pieces(reshard));
    for (int i = 0; i < reshard->after.flat_count; i++) {
        struct td__fsdp_flat *flat = reshard->after.flats[i];
        for (int k = 0; k < flat->count; k++)
            td__tensor_bump_version(flat->params[k].tensor);
    }
    TD_TRY(td__mirror_set_rest(reshard->fsdp, reshard->optimizer, reshard->rest));
    return td__fsdp_slices_remake(reshard->fsdp, reshard->root);
}

/* All of them have their shards, or none goes on. */
static td_status agree(const struct reshard *reshard, td_status status)
{
    struct td__error error;
    td__error_save(&error);
    int32_t failed = status ? reshard->group->rank + 1 : 0;
    td_status agreed = td_group_all_reduce(&failed, &failed, 1, TD_I32, TD_MAX, reshard->group,
                                           NULL);
    if (status)
        return td__error_restore(&error);
    if (agreed)
        return agreed;
    return failed
               ? td_fail(TD_ERR_ABORTED,
                         "td_fsdp: rank %d could not make its new shards, and its error says why",
                         td_get_global_rank(reshard->group, failed - 1))
               : TD_OK;
}

td_status td__fsdp_reshard(td_module *module, td_optimizer *optimizer, td_group *group,
                           struct td__mirror *mirror, int64_t *step)
{
    struct reshard reshard = {.fsdp = td__fsdp_of(module),
                              .optimizer = optimizer,
                              .group = td__group_enter(group, "td_fsdp"),
                              .mirror = mirror};
    if (!reshard.group)
        return td__error_status();
    struct td__error before;
    td__error_save(&before);
    if (mirror && td__mirror_wait(mirror)) /* the copy of the ranks that are left, or none */
        td__error_undo(&before);
    td_status status = share_names(&reshard);
    if (!status)
        status = share_places(&reshard);
    if (!status)
        status = share_table(&reshard);
    if (!status)
        status = choose(&reshard);
    if (!status)
        status = share_rest(&reshard);
    if (!status)
        status = agree(&reshard, restore(&reshard));
    if (!status)
        *step = reshard.version - 1;
    td__mirror_layout_free(&reshard.before);
    td__mirror_layout_free(&reshard.after);
    td_bytes_free(&reshard.rest);
    free(reshard.old_places);
    free(reshard.new_places);
    free(reshard.names);
    free(reshard.readers);
    free(reshard.table);
    return status;
}

td_status td__fsdp_reshard_blank(td_module *module, td_optimizer *optimizer, td_group *group)
{
    struct reshard reshard = {.fsdp = td__fsdp_of(module),
                              .optimizer = optimizer,
                              .group = td__group_enter(group, "td_fsdp"),
                              .planes = 1};
    if (!reshard.group)
        return td__error_status();
    forget_ranks(optimizer);
    TD_TRY(td__fsdp_remake(reshard.fsdp, reshard.group));
    TD_TRY(remake_buffers(&reshard));
    for (int i = 0; i < optimizer->count; i++)
        optimizer->parameters[i].steps = 0;
    return td__fsdp_slices_remake(reshard.fsdp, 0);
}
