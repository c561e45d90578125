/* Bits that are flipped on request, to see that the hashes find them:
 *
 *     TANDEM_FLIP=parameter:RANK:STEP[:BIT]     before the step is computed, a bit of the parameters of this rank of the world
 *     TANDEM_FLIP=gradient:RANK:STEP[:BIT]      when the gradients of the step are reduced, a bit of them on that rank alone
 *
 * Once in a process: where the step is repeated, its gradients are right, as after a fault that was no lasting one. */
#include "base/fail.h"
#include "elastic/elastic_internal.h"
#include "tensor/tensor_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {"", "parameter", "gradient"};

/* A number of TANDEM_FLIP, up to `end`. */
static bool read_number(const char **text, char end, int64_t most, int64_t *number)
{
    char *after;
    if (**text < '0' || **text > '9')
        return false;
    errno = 0;
    *number = strtoll(*text, &after, 10);
    if (errno || *number > most || (*after && *after != end))
        return false;
    *text = *after ? after + 1 : after;
    return !*after || *(after + 1);
}

static bool read_flip(const char *text, struct td__flip *flip)
{
    size_t name = strcspn(text, ":");
    int64_t rank;
    flip->kind = TD__FLIP_NONE;
    for (int kind = TD__FLIP_PARAMETER; kind <= TD__FLIP_GRADIENT; kind++)
        if (strlen(names[kind]) == name && !strncmp(text, names[kind], name))
            flip->kind = (enum td__flip_kind)kind;
    text += name;
    if (!flip->kind || *text++ != ':' || !read_number(&text, ':', INT32_MAX, &rank) || !*text ||
        !read_number(&text, ':', INT64_MAX, &flip->step))
        return false;
    flip->rank = (int)rank;
    flip->bit = -1;
    return !*text || (read_number(&text, 0, INT64_MAX, &flip->bit) && !*text);
}

td_status td__flip_read(td_elastic *elastic)
{
    const char *text = getenv("TANDEM_FLIP");
    if (!text || !*text)
        return TD_OK;
    if (!read_flip(text, &elastic->flip))
        return td_fail(TD_ERR_INVALID,
                       "td_elastic_create: TANDEM_FLIP is \"%.80s\"; it is parameter:RANK:STEP or "
                       "gradient:RANK:STEP, and may end with :BIT",
                       text);
    if (elastic->options.fsdp)
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "td_elastic_create: TANDEM_FLIP is set, and with `fsdp` no rank has a second "
            "copy of a shard that it could be compared with");
    return TD_OK;
}

/* The byte at `at` of a piece. */
static td_status flip_byte(const struct td__elastic_replica_piece *piece, size_t at,
                           unsigned char mask)
{
    if (!piece->tensor) {
        ((unsigned char *)piece->data)[at] ^= mask;
        return TD_OK;
    }
    if (td__on_host(piece->tensor)) {
        TD_TRY(td__prepare_write(piece->tensor));
        ((unsigned char *)td_tensor_data(piece->tensor))[at] ^= mask;
    } else {
        TD_SCOPE;
        size_t each = td_dtype_size(td_tensor_dtype(piece->tensor));
        int64_t all = td_tensor_numel(piece->tensor);
        td_tensor *element = td_narrow(td_reshape(piece->tensor, TD_SHAPE(all)), 0,
                                       (int64_t)(at / each), 1);
        td_tensor *here = td_tensor_to(element, td_device_get("cpu"));
        if (!here)
            return td__error_status();
        ((unsigned char *)td_tensor_data(here))[at % each] ^= mask;
        TD_TRY(td__tensor_copy(element, here));
    }
    td__tensor_bump_version(piece->tensor);
    return TD_OK;
}

/* Parameters come before buffers, and gradients before the buffers for after the step. */
static td_status flip_bit(struct td__flip *flip, const struct td__elastic_replica_pieces *list)
{
    size_t total = 0, at;
    int count = 0;
    while (count < list->count && !list->pieces[count].moves)
        total += list->pieces[count++].bytes;
    int64_t bits = 8 * (int64_t)total, bit = flip->bit < 0 ? bits / 2 : flip->bit;
    if (bit >= bits)
        return td_fail(TD_ERR_INVALID,
                       "td_elastic: TANDEM_FLIP names bit %" PRId64 ", and there are %" PRId64, bit,
                       bits);
    flip->bit = bit;
    at = (size_t)bit / 8;
    for (int i = 0; i < count; at -= list->pieces[i++].bytes)
        if (at < list->pieces[i].bytes)
            return flip_byte(&list->pieces[i], at, (unsigned char)(1u << bit % 8));
    return TD_OK;
}

td_status td__flip_at(td_elastic *elastic, enum td__flip_kind moment)
{
    struct td__flip *flip = &elastic->flip;
    if (flip->kind != moment || flip->step != td__elastic_committed(elastic) ||
        flip->rank != elastic->ranks[elastic->rank] || !elastic->established)
        return TD_OK;
    struct td__elastic_replica_pieces list = {0};
    TD_NO_GRAD;
    flip->kind = TD__FLIP_NONE;
    td_status status = elastic->replica->ops->list(
        elastic->replica, moment == TD__FLIP_PARAMETER ? TD__PIECES_WEIGHTS : TD__PIECES_OUTCOME,
        &list);
    if (!status)
        status = flip_bit(flip, &list);
    td__pieces_free(&list);
    if (!status)
        td_log(TD_LOG_WARN,
               "td_elastic: TANDEM_FLIP: bit %" PRId64 " of the %ss of rank %d was flipped in step "
               "%" PRId64,
               flip->bit, names[moment], flip->rank, flip->step);
    return status;
}
