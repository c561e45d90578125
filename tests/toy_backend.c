/* The toy backend.
 *
 * A collective: every rank stores its data under a key of its own, and reads the keys of all.
 *
 *     c/<sequence>/<rank>    label, data        set by each rank, read by all
 *
 * A rank that has read all keys of one collective knows that all ranks have begun it, and so have read
 * those of the one before: only then it removes its own former key. The last rank to leave the
 * group removes the rest.
 *
 * toy_p2p.c has the messages. */
#include "toy_backend.h"

#include "toy_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The label in front of a rank's data, by which the others notice a different call. Its size keeps the data
 * behind it aligned. User-defined operations have other numbers on other ranks, and count as one. */
struct label {
    int32_t kind, dtype, op, root;
    uint64_t count;
    uint64_t reserved;
};

/* ---- Life ------------------------------------------------------------------------------------ */

static td_status toy_create(const td_backend_context *context, void *arg, void **self)
{
    (void)arg;
    if (context->options && strstr(context->options, "refuse"))
        return td_fail(TD_ERR_UNSUPPORTED, "toy: asked to refuse group \"%s\"", context->name);
    struct toy *toy = calloc(1, sizeof *toy);
    if (!toy)
        return td_fail(TD_ERR_NOMEM, "toy: out of memory");
    toy->context = context;
    pthread_mutex_init(&toy->lock, NULL);
    *self = toy;
    return TD_OK;
}

/* Removes what rank `rank` has put for the collective before. */
static void remove_last(const struct toy *toy, int rank)
{
    char key[64];
    snprintf(key, sizeof key, "c/%llu/%d", (unsigned long long)toy->last, rank);
    td_store_delete_key(toy->context->store, key, NULL);
}

/* What is not needed when all have left. */
static void remove_leftovers(const struct toy *toy)
{
    td_store *store = toy->context->store;
    for (int r = 0; r < toy->context->size; r++) {
        char key[64];
        int64_t sent = 0, read = 0;
        remove_last(toy, r);
        snprintf(key, sizeof key, "m/%d/count", r);
        td_store_add(store, key, 0, &sent);
        td_store_delete_key(store, key, NULL);
        snprintf(key, sizeof key, "m/%d/read", r);
        td_store_add(store, key, 0, &read);
        td_store_delete_key(store, key, NULL);
        for (int64_t n = read + 1; n <= sent; n++) {
            snprintf(key, sizeof key, "m/%d/%lld", r, (long long)n);
            td_store_delete_key(store, key, NULL);
        }
    }
    td_store_delete_key(store, "left", NULL);
}

static void toy_destroy(void *self)
{
    struct toy *toy = self;
    char key[64];
    int64_t left = 0;
    while (toy->pending) { /* no rank will send to them any more */
        struct pending *next = toy->pending->next;
        td_work_complete(toy->pending->work,
                         td_fail(TD_ERR_STATE, "group \"%s\" was destroyed", toy->context->name),
                         -1, 0);
        free(toy->pending);
        toy->pending = next;
    }
    snprintf(key, sizeof key, "m/%d/read", toy->context->rank);
    td_store_add(toy->context->store, key, toy->read, NULL);
    if (!td_store_add(toy->context->store, "left", 1, &left) && left == toy->context->size)
        remove_leftovers(toy);
    for (struct letter *next, *letter = toy->letters; letter; letter = next) {
        next = letter->next;
        td_bytes_free(&letter->value);
        free(letter);
    }
    pthread_mutex_destroy(&toy->lock);
    free(toy);
}

/* ---- Collectives ----------------------------------------------------------------------------- */

/* All ranks' values of one collective, while it runs. */
struct round {
    struct toy *toy;
    const td_call *call;
    size_t element;
    td_bytes *values;
};

static const char *data_of(const struct round *round, int rank)
{
    return round->values[rank].data + sizeof(struct label);
}

static td_status check_labels(const struct round *round, const struct label *mine)
{
    const td_backend_context *context = round->toy->context;
    for (int r = 0; r < context->size; r++) {
        struct label other;
        memcpy(&other, round->values[r].data, sizeof other);
        if (memcmp(&other, mine, sizeof other) == 0)
            continue;
        return td_fail(
            TD_ERR_MISMATCH,
            "%s #%llu on group \"%s\": rank %d called it with %llu %s, rank %d called %s with %llu "
            "%s; every rank must call the same, with the same arguments",
            td_op_kind_name(round->call->kind), (unsigned long long)round->call->sequence,
            context->name, context->global_ranks[context->rank], (unsigned long long)mine->count,
            td_dtype_name(round->call->dtype), context->global_ranks[r],
            td_op_kind_name((td_op_kind)other.kind), (unsigned long long)other.count,
            td_dtype_name((td_dtype)other.dtype));
    }
    return TD_OK;
}

static td_status read_all(struct round *round, const struct label *label)
{
    const td_backend_context *context = round->toy->context;
    size_t size = (size_t)context->size;
    char(*names)[64] = calloc(size, sizeof *names);
    const char **keys = calloc(size, sizeof *keys);
    round->values = calloc(size, sizeof *round->values);
    td_status status = TD_OK;
    if (!names || !keys || !round->values)
        status = td_fail(TD_ERR_NOMEM, "toy: out of memory");
    for (size_t r = 0; !status && r < size; r++) {
        snprintf(names[r], sizeof names[r], "c/%llu/%zu", (unsigned long long)round->call->sequence,
                 r);
        keys[r] = names[r];
    }
    if (!status)
        status = td_store_multi_get(context->store, keys, context->size, round->call->timeout_ms,
                                    round->values);
    if (!status) {
        remove_last(round->toy, context->rank);
        round->toy->last = round->call->sequence;
        status = check_labels(round, label);
    }
    free(keys);
    free(names);
    return status;
}

/* Puts `count` elements of `data` under this rank's key, behind `front` bytes of `table`, and reads
 * the values of all. end_round() in any case. */
static td_status begin_round(struct round *round, void *self, const td_call *call, const void *data,
                             size_t count, const void *table, size_t front)
{
    *round = (struct round){.toy = self, .call = call, .element = td_dtype_size(call->dtype)};
    const td_backend_context *context = round->toy->context;
    struct label label = {
        .kind = (int32_t)call->kind,
        .dtype = (int32_t)call->dtype,
        .op = (int32_t)(call->op < TD_REDUCE_OP_OWN ? call->op : TD_REDUCE_OP_OWN),
        .root = call->root,
        .count = call->count};
    size_t bytes = count * round->element, size = sizeof label + front + bytes;
    char *value = malloc(size), key[64];
    if (!value)
        return td_fail(TD_ERR_NOMEM, "toy: no memory for %zu bytes", size);
    memcpy(value, &label, sizeof label);
    if (front)
        memcpy(value + sizeof label, table, front);
    if (bytes)
        memcpy(value + sizeof label + front, data, bytes);
    if (call->kind == TD_OP_REDUCE || call->kind == TD_OP_ALL_REDUCE ||
        call->kind == TD_OP_REDUCE_SCATTER)
        td_reduce_begin(call, value + sizeof label, count);

    snprintf(key, sizeof key, "c/%llu/%d", (unsigned long long)call->sequence, context->rank);
    td_status status = td_store_set(context->store, key, value, size);
    free(value);
    return status ? status : read_all(round, &label);
}

static td_status end_round(struct round *round, td_status status)
{
    for (int r = 0; round->values && r < round->toy->context->size; r++)
        td_bytes_free(&round->values[r]);
    free(round->values);
    return status;
}

/* Copies `count` elements, from element `from` of rank r's data to element `to` of the output. */
static void copy(const struct round *round, int r, size_t from, size_t to, size_t count)
{
    if (count)
        memcpy((char *)round->call->output + to * round->element,
               data_of(round, r) + from * round->element, count * round->element);
}

/* Reduces the elements from `from` on of all ranks, in the order of ranks. */
static void reduce(const struct round *round, size_t from)
{
    const td_call *call = round->call;
    int size = round->toy->context->size;
    copy(round, 0, from, 0, call->count);
    for (int r = 1; call->count && r < size; r++)
        td_reduce_combine(call, call->output, data_of(round, r) + from * round->element,
                          call->count);
    if (call->count)
        td_reduce_end(call, call->output, call->count, size);
}

static bool is_root(void *self, const td_call *call)
{
    return ((struct toy *)self)->context->rank == call->root;
}

static td_status toy_broadcast(void *self, const td_call *call)
{
    struct round round;
    size_t own = is_root(self, call) ? call->count : 0;
    td_status status = begin_round(&round, self, call, call->input, own, NULL, 0);
    if (!status && !is_root(self, call))
        copy(&round, call->root, 0, 0, call->count);
    return end_round(&round, status);
}

static td_status toy_reduce(void *self, const td_call *call)
{
    struct round round;
    td_status status = begin_round(&round, self, call, call->input, call->count, NULL, 0);
    if (!status && (call->kind == TD_OP_ALL_REDUCE || is_root(self, call)))
        reduce(&round, 0);
    return end_round(&round, status);
}

static td_status toy_scatter(void *self, const td_call *call)
{
    struct round round;
    const td_backend_context *context = ((struct toy *)self)->context;
    size_t own = is_root(self, call) ? call->count * (size_t)context->size : 0;
    td_status status = begin_round(&round, self, call, call->input, own, NULL, 0);
    if (!status)
        copy(&round, call->root, call->count * (size_t)context->rank, 0, call->count);
    return end_round(&round, status);
}

static td_status toy_gather(void *self, const td_call *call)
{
    struct round round;
    td_status status = begin_round(&round, self, call, call->input, call->count, NULL, 0);
    bool gets = call->kind == TD_OP_ALL_GATHER || is_root(self, call);
    for (int r = 0; !status && gets && r < round.toy->context->size; r++)
        copy(&round, r, 0, call->count * (size_t)r, call->count);
    return end_round(&round, status);
}

static td_status toy_reduce_scatter(void *self, const td_call *call)
{
    struct round round;
    const td_backend_context *context = ((struct toy *)self)->context;
    td_status status = begin_round(&round, self, call, call->input,
                                   call->count * (size_t)context->size, NULL, 0);
    if (!status)
        reduce(&round, call->count * (size_t)context->rank);
    return end_round(&round, status);
}

/* In front of the data is a table: how many elements go to each rank. */
static td_status take_parts(const struct round *round)
{
    const td_backend_context *context = round->toy->context;
    const td_call *call = round->call;
    size_t size = (size_t)context->size, to = 0;
    for (size_t s = 0; s < size; s++) {
        const uint64_t *table = (const uint64_t *)(const void *)data_of(round, (int)s);
        size_t count = table[context->rank], from = 0;
        size_t expected = call->output_counts ? call->output_counts[s] : call->count;
        if (count != expected)
            return td_fail(
                TD_ERR_MISMATCH,
                "all_to_all #%llu on group \"%s\": rank %d sends %zu elements to rank %d, which "
                "expects %zu",
                (unsigned long long)call->sequence, context->name, context->global_ranks[s], count,
                context->global_ranks[context->rank], expected);
        for (int r = 0; r < context->rank; r++)
            from += table[r];
        if (count)
            memcpy((char *)call->output + to * round->element,
                   (const char *)(table + size) + from * round->element, count * round->element);
        to += count;
    }
    return TD_OK;
}

static td_status toy_all_to_all(void *self, const td_call *call)
{
    const td_backend_context *context = ((struct toy *)self)->context;
    size_t size = (size_t)context->size, total = 0;
    uint64_t *table = calloc(size, sizeof *table);
    if (!table)
        return td_fail(TD_ERR_NOMEM, "toy: out of memory");
    for (size_t r = 0; r < size; r++) {
        table[r] = call->input_counts ? call->input_counts[r] : call->count;
        total += table[r];
    }
    struct round round;
    td_status status = begin_round(&round, self, call, call->input, total, table,
                                   size * sizeof *table);
    free(table);
    if (!status)
        status = take_parts(&round);
    return end_round(&round, status);
}

static td_status toy_barrier(void *self, const td_call *call)
{
    struct round round;
    return end_round(&round, begin_round(&round, self, call, NULL, 0, NULL, 0));
}

/* ---- The tables ------------------------------------------------------------------------------ */

static const td_backend_ops toy_ops = {
    .create = toy_create,
    .destroy = toy_destroy,
    .broadcast = toy_broadcast,
    .reduce = toy_reduce,
    .all_reduce = toy_reduce,
    .scatter = toy_scatter,
    .gather = toy_gather,
    .all_gather = toy_gather,
    .reduce_scatter = toy_reduce_scatter,
    .all_to_all = toy_all_to_all,
    .barrier = toy_barrier,
    .post = toy_post,
    .progress = toy_progress,
};

const td_backend_ops *toy_backend_ops(void)
{
    return &toy_ops;
}

static td_backend_ops partial_ops;

td_status toy_backend_register(void)
{
    partial_ops = toy_ops;
    partial_ops.all_to_all = NULL;
    td_status status = td_register_backend("toy", &toy_ops, NULL);
    return status ? status : td_register_backend("toy-partial", &partial_ops, NULL);
}

void toy_backend_unregister(void)
{
    td_register_backend("toy", NULL, NULL);
    td_register_backend("toy-partial", NULL, NULL);
}
