/* What NCCL does not compare: whether the sends of one rank are the receives of the other.
 *
 * NCCL has no tags, and matches the messages of a communicator in the order of the calls. Each side of a channel keeps its
 * last messages, with tag and size. When a message does not end, and when a rank leaves, it publishes them in the store,
 * and compares them with those that the other rank has published:
 *
 *     log/2-0/0    of the sender, rank 2: the number of messages, and the last ones, the oldest first
 *     log/2-0/1    of the receiver, rank 0
 *     wanted/2     rank 2 is to publish its logs: a message of another rank does not end. A rank that has no calls under
 *                  way looks for this once a second, if it has sent or received messages */
#include "nccl_backend.h"

#include <stdio.h>
#include <string.h>

struct published {
    uint64_t count; /* messages so far; the last ones of them stand here */
    struct nccl_logged last[NCCL_LOGGED];
};

static size_t entries(uint64_t count)
{
    return count < NCCL_LOGGED ? (size_t)count : NCCL_LOGGED;
}

static size_t bytes_of(uint64_t count)
{
    return sizeof(uint64_t) + entries(count) * sizeof(struct nccl_logged);
}

static void copy_log(struct nccl_channel *channel, struct published *log)
{
    pthread_mutex_lock(&channel->group->lock);
    log->count = channel->enqueued;
    for (size_t i = 0, n = entries(log->count); i < n; i++)
        log->last[i] = channel->log[(log->count - n + i) % NCCL_LOGGED];
    pthread_mutex_unlock(&channel->group->lock);
}

/* The entry of message `number`, from 0; NULL: it is not there any more, or not yet. */
static const struct nccl_logged *entry_of(const struct published *log, uint64_t number)
{
    uint64_t first = log->count - entries(log->count);
    return number >= first && number < log->count ? &log->last[number - first] : NULL;
}

static td_status compare(const struct nccl_channel *channel, const struct published *sent,
                         const struct published *received)
{
    const td_backend_context *context = channel->group->context;
    uint64_t end = sent->count < received->count ? sent->count : received->count;
    for (uint64_t i = end > NCCL_LOGGED ? end - NCCL_LOGGED : 0; i < end; i++) {
        const struct nccl_logged *a = entry_of(sent, i), *b = entry_of(received, i);
        if (!a || !b || (a->bytes == b->bytes && (a->tag == b->tag || b->tag == TD_ANY_TAG)))
            continue;
        return td_fail(TD_ERR_MISMATCH,
                       "message %llu from rank %d to rank %d on group \"%s\": rank %d sent %llu "
                       "bytes with tag %lld, rank %d received %llu bytes with tag %lld; backend "
                       "nccl matches messages in the order of the calls, and both sides must pass "
                       "the same size and tag",
                       (unsigned long long)i + 1, context->global_ranks[channel->source],
                       context->global_ranks[channel->target], context->name,
                       context->global_ranks[channel->source], (unsigned long long)a->bytes,
                       (long long)a->tag, context->global_ranks[channel->target],
                       (unsigned long long)b->bytes, (long long)b->tag);
    }
    return TD_OK;
}

/* Errors of the store are not those of the messages. */
td_status nccl_compare_messages(struct nccl_channel *channel)
{
    td_store *store = channel->group->context->store;
    struct published own = {0}, other = {0};
    char own_key[64], other_key[64];
    const char *keys[1] = {other_key};
    td_bytes value = {0};
    bool found = false;
    copy_log(channel, &own);
    snprintf(own_key, sizeof own_key, "log/%s/%d", channel->name, channel->rank);
    snprintf(other_key, sizeof other_key, "log/%s/%d", channel->name, 1 - channel->rank);
    if (td_store_set(store, own_key, &own, bytes_of(own.count)) ||
        td_store_check(store, keys, 1, &found) || !found ||
        td_store_get(store, other_key, 0, &value))
        return TD_OK;
    if (value.size >= sizeof other.count && value.size <= sizeof other)
        memcpy(&other, value.data, value.size);
    if (value.size != bytes_of(other.count))
        other.count = 0;
    td_bytes_free(&value);
    return channel->rank == 0 ? compare(channel, &own, &other) : compare(channel, &other, &own);
}

void nccl_request_log(const struct nccl_channel *channel)
{
    char key[32];
    snprintf(key, sizeof key, "wanted/%d", channel->rank == 0 ? channel->target : channel->source);
    td_store_set(channel->group->context->store, key, "", 0);
}

td_status nccl_answer_requests(struct nccl_group *group, struct nccl_channel *first)
{
    td_store *store = group->context->store;
    char key[32];
    const char *keys[1] = {key};
    bool wanted = false;
    td_status status = TD_OK;
    snprintf(key, sizeof key, "wanted/%d", group->context->rank);
    if (td_store_check(store, keys, 1, &wanted) || !wanted)
        return TD_OK;
    td_store_delete_key(store, key, NULL);
    for (struct nccl_channel *channel = first; channel && !status; channel = channel->next)
        if (channel->source >= 0)
            status = nccl_compare_messages(channel);
    return status;
}
