/* The messages of the toy backend.
 *
 * The sender draws a number in the mailbox of the receiver, and puts the letter there.
 *
 *     m/<to>/count           letters so far
 *     m/<to>/<number>        from, tag, data    set by the sender, removed by the receiver
 *
 * The receiver takes its letters in order, and keeps those for which it has no recv yet. */
#include "toy_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* From and tag. */
#define LETTER_HEAD (2 * sizeof(int32_t))

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool fits(const struct pending *pending, const struct letter *letter)
{
    const td_call *call = &pending->call;
    return (call->peer == TD_ANY_SOURCE || call->peer == letter->from) &&
           ((call->tag == TD_ANY_TAG && letter->tag >= 0) || call->tag == letter->tag);
}

/* Takes the recvs that have their letter, or whose time is over, out of the list. Each letter goes
 * to the first recv that fits, and each recv gets the first letter. Called with the lock. */
static struct pending *take_done(struct toy *toy)
{
    struct pending *done = NULL, **end = &done;
    for (struct pending **at = &toy->pending; *at;) {
        struct pending *pending = *at;
        struct letter **found = &toy->letters;
        while (*found && !fits(pending, *found))
            found = &(*found)->next;
        if (!*found && now_ms() < pending->deadline_ms) {
            at = &pending->next;
            continue;
        }
        pending->letter = *found;
        if (*found)
            *found = (*found)->next;
        *at = pending->next;
        pending->next = NULL;
        *end = pending;
        end = &pending->next;
    }
    return done;
}

static void complete(const struct toy *toy, struct pending *pending)
{
    const td_call *call = &pending->call;
    const struct letter *letter = pending->letter;
    if (!letter) {
        td_status status = td_fail(TD_ERR_TIMEOUT,
                                   "recv on group \"%s\": no message with tag %d came in "
                                   "%lld ms",
                                   toy->context->name, call->tag, (long long)call->timeout_ms);
        td_work_complete(pending->work, status, -1, 0);
        return;
    }
    size_t room = call->count * td_dtype_size(call->dtype);
    size_t bytes = letter->value.size - LETTER_HEAD;
    td_status status = TD_OK;
    if (bytes > room)
        status = td_fail(TD_ERR_MISMATCH,
                         "recv on group \"%s\": rank %d sent %zu bytes, the buffer has %zu",
                         toy->context->name, toy->context->global_ranks[letter->from], bytes, room);
    else if (bytes)
        memcpy(call->output, letter->value.data + LETTER_HEAD, bytes);
    td_work_complete(pending->work, status, letter->from, bytes);
}

/* Completes what take_done() gave, without the lock: it may call functions of the user's. */
static void complete_all(const struct toy *toy, struct pending *done)
{
    for (struct pending *next; done; done = next) {
        next = done->next;
        complete(toy, done);
        if (done->letter)
            td_bytes_free(&done->letter->value);
        free(done->letter);
        free(done);
    }
}

static td_status send_letter(struct toy *toy, const td_call *call, td_work *work)
{
    const td_backend_context *context = toy->context;
    size_t bytes = call->count * td_dtype_size(call->dtype);
    int32_t head[2] = {context->rank, call->tag};
    char *value = malloc(LETTER_HEAD + bytes), key[64];
    if (!value)
        return td_fail(TD_ERR_NOMEM, "toy: no memory for %zu bytes", bytes);
    memcpy(value, head, LETTER_HEAD);
    if (bytes)
        memcpy(value + LETTER_HEAD, call->input, bytes);
    int64_t number;
    snprintf(key, sizeof key, "m/%d/count", call->peer);
    td_status status = td_store_add(context->store, key, 1, &number);
    if (!status) {
        snprintf(key, sizeof key, "m/%d/%lld", call->peer, (long long)number);
        status = td_store_set(context->store, key, value, LETTER_HEAD + bytes);
    }
    free(value);
    if (!status)
        td_work_complete(work, TD_OK, -1, 0);
    return status;
}

td_status toy_post(void *self, const td_call *call, td_work *work)
{
    struct toy *toy = self;
    if (call->kind == TD_OP_SEND)
        return send_letter(toy, call, work);
    struct pending *pending = calloc(1, sizeof *pending);
    if (!pending)
        return td_fail(TD_ERR_NOMEM, "toy: out of memory");
    pending->work = work;
    pending->call = *call;
    pending->deadline_ms = now_ms() + call->timeout_ms;

    pthread_mutex_lock(&toy->lock);
    struct pending **end = &toy->pending;
    while (*end)
        end = &(*end)->next;
    *end = pending;
    struct pending *done = take_done(toy);
    pthread_mutex_unlock(&toy->lock);
    complete_all(toy, done);
    return TD_OK;
}

/* Takes the next letter out of the mailbox, where one arrives within `wait_ms`. */
static struct letter *open_mailbox(struct toy *toy, int64_t wait_ms)
{
    char key[64];
    const char *keys[1] = {key};
    bool there = false;
    struct letter *letter;
    snprintf(key, sizeof key, "m/%d/%lld", toy->context->rank, (long long)toy->read + 1);
    if (wait_ms <= 0 && (td_store_check(toy->context->store, keys, 1, &there) || !there))
        return NULL;
    if (!(letter = calloc(1, sizeof *letter)))
        return NULL;
    if (td_store_get(toy->context->store, key, wait_ms > 0 ? wait_ms : 0, &letter->value)) {
        free(letter);
        return NULL;
    }
    td_store_delete_key(toy->context->store, key, NULL);
    int32_t head[2];
    memcpy(head, letter->value.data, LETTER_HEAD);
    letter->from = head[0];
    letter->tag = head[1];
    return letter;
}

static bool is_pending(const struct toy *toy, const td_work *work)
{
    for (const struct pending *pending = toy->pending; pending; pending = pending->next)
        if (pending->work == work)
            return true;
    return false;
}

/* One thread looks into the mailbox, in short turns, so that it notices when the time of a recv is
 * over; others sleep meanwhile. */
void toy_progress(void *self, td_work *work, int64_t timeout_ms)
{
    struct toy *toy = self;
    int64_t deadline = now_ms() + (timeout_ms == TD_NOW ? 0 : timeout_ms), left;
    do {
        left = deadline - now_ms();
        int64_t turn = left < 50 ? left : 50;
        struct letter *letter = NULL;
        pthread_mutex_lock(&toy->lock);
        bool mine = !toy->reading;
        toy->reading = true;
        pthread_mutex_unlock(&toy->lock);
        if (mine)
            letter = open_mailbox(toy, turn);
        else if (left > 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);

        pthread_mutex_lock(&toy->lock);
        if (mine)
            toy->reading = false;
        if (letter) {
            toy->read++;
            struct letter **end = &toy->letters;
            while (*end)
                end = &(*end)->next;
            *end = letter;
        }
        struct pending *done = take_done(toy);
        pthread_mutex_unlock(&toy->lock);
        complete_all(toy, done);

        pthread_mutex_lock(&toy->lock);
        bool goes_on = is_pending(toy, work);
        pthread_mutex_unlock(&toy->lock);
        if (!goes_on)
            return;
    } while (left > 0);
}
