/* The connection to the store's server; see tcp_client.h.
 *
 * One connection serves all threads. A call puts itself on the list of calls and sends its request;
 * then one of the waiting threads reads for all: it hands each answer to the call that it belongs
 * to, and when its own has come, leaves the reading to another. So a thread that waits for a key
 * does not keep the others from the store, and a single thread pays for no hand-over.
 *
 * set, append and will are sent without waiting. Answers come in the order of requests, so the next
 * answer confirms them; when the connection breaks first, every later call says what may be lost.
 *
 * Reading yields for a while before it sleeps (base/wait.h): most answers are there by then, and waking a
 * sleeper costs more than the round trip. */
#include "store/tcp_client.h"

#include "os/socket.h"
#include "os/tls.h"
#include "store/store_ops.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    GRACE_MS = 5000, /* for the server's answer to a call that has timed out */
    READ_SIZE = 64 << 10,
    FULL_MS = 20,         /* how long a sender waits for room before it reads what has come */
    KEPT_BYTES = 4 << 20, /* unconfirmed changes, from which on a set waits for the server */
};

/* ---- The connection is lost ------------------------------------------------------------------ */

void td__tcp_client_break(struct td__tcp_client *client, const char *reason)
{
    struct td__error *broken = &client->broken;
    if (broken->status)
        return;
    broken->status = TD_ERR_PEER;
    int length = snprintf(broken->text, sizeof broken->text,
                          "tcp store at %s: the connection to the server is lost (%s)",
                          client->where, reason);
    if (client->unconfirmed)
        snprintf(broken->text + length, sizeof broken->text - (size_t)length,
                 "; what was set last may be lost with it: %zu call%s without an answer, the first "
                 "for key \"%s\"",
                 client->unconfirmed, client->unconfirmed == 1 ? "" : "s", client->unconfirmed_key);
    pthread_cond_broadcast(&client->answered);
    pthread_cond_broadcast(&client->sendable);
}

void td__tcp_client_lose(struct td__tcp_client *client, const char *reason)
{
    if (client->broken.status || client->lost)
        return;
    if (!client->replicated) {
        td__tcp_client_break(client, reason);
        return;
    }
    client->lost = true;
    client->lost_at = td__now_ns();
    client->attempt_ms = 0;
    snprintf(client->lost_text, sizeof client->lost_text, "%s", reason);
    td__sock_shutdown(client->fd, SHUT_RDWR); /* wakes a thread that reads or sends */
    pthread_cond_broadcast(&client->answered);
    pthread_cond_broadcast(&client->sendable);
}

static td_status fail_broken(struct td__tcp_client *client)
{
    client->unconfirmed = 0; /* reported */
    return td__error_restore(&client->broken);
}

static td_status fail_late(const struct td__tcp_client *client)
{
    return td_fail(client->late.status, "an earlier call failed: %s", client->late.text);
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* Waits for input. Where the server's host was cut off and has not acknowledged what it was sent, the kernel would send that
 * again for a quarter of an hour: as long as something is not acknowledged, this looks now and then. */
static int wait_for_input(int fd, td__deadline deadline)
{
    for (;;) {
        bool looks = td__awaits_acknowledgement(fd);
        td__deadline slice = td__deadline_in_ms(td__heartbeat_ms() / 4);
        int error = td__wait_fd(fd, POLLIN, looks ? td__deadline_earlier(deadline, slice) : deadline);
        if (error != ETIMEDOUT || !looks || td__deadline_passed(deadline))
            return error;
        if (td__cut_off(fd))
            return EHOSTUNREACH;
    }
}

/* One read. 0, or an errno: ENODATA at the end of the stream, ETIMEDOUT. */
static int read_some(int fd, struct td__buffer *in, struct td__backoff *backoff,
                     td__deadline deadline)
{
    if (!td__buffer_reserve(in, READ_SIZE))
        return ENOMEM;
    backoff->begun = 0;
    for (;;) {
        ssize_t got = td__sock_recv(fd, in->data + in->size, in->capacity - in->size, MSG_DONTWAIT);
        if (got > 0) {
            in->size += (size_t)got;
            return 0;
        }
        if (got == 0)
            return ENODATA;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return errno;
        if (td__backoff(backoff, true))
            continue;
        int error = wait_for_input(fd, deadline);
        if (error)
            return error;
    }
}

static void take_answer(struct td__tcp_client *client, const struct td__wire_header *header,
                        const uint8_t *body)
{
    td_status status = header->code <= TD_ERR_ABORTED ? (td_status)header->code : TD_ERR_PEER;
    if (header->id == 0 && header->code == TD__REPLICA_STATE) {
        td__tcp_take_state(client, body, header->body_size);
        return;
    }
    if (header->id == 0) {
        struct td__reader reader = td__reader_of(body, header->body_size);
        struct td__span text = td__reader_string(&reader, header->body_size);
        client->late.status = status;
        snprintf(client->late.text, sizeof client->late.text, "%.*s", (int)text.size, text.data);
        return;
    }
    struct td__tcp_call *call = LIST_FIRST(&client->calls);
    while (call && call->id != header->id)
        call = LIST_NEXT(call, link);
    if (!call)
        return; /* it has timed out */
    LIST_REMOVE(call, link);
    if (call->sequence > client->unconfirmed_last)
        client->unconfirmed = client->silent_not_kept = 0;
    td__tcp_confirm(client, call->sequence);
    td__buffer_put(&call->body, body, header->body_size);
    call->status = call->body.failed ? TD_ERR_NOMEM : status;
    call->done = true;
}

/* Hands out all answers that are whole. */
static void take_answers(struct td__tcp_client *client)
{
    size_t used = 0;
    while (client->in.size - used >= TD__WIRE_HEADER) {
        struct td__wire_header header;
        const uint8_t *frame = client->in.data + used;
        if (!td__wire_read_header(frame, &header)) {
            td__tcp_client_lose(client, "the server sent something that is no answer");
            return;
        }
        if (client->in.size - used - TD__WIRE_HEADER < header.body_size)
            break;
        take_answer(client, &header, frame + TD__WIRE_HEADER);
        used += TD__WIRE_HEADER + header.body_size;
    }
    td__buffer_consume(&client->in, used);
    pthread_cond_broadcast(&client->answered);
}

/* Reads once, and hands out what came. Holds the lock, except while it reads. False when the
 * deadline passed with nothing there. */
static bool read_for_all(struct td__tcp_client *client, td__deadline deadline)
{
    client->reading = true;
    pthread_mutex_unlock(&client->lock);
    int error = read_some(client->fd, &client->in, &client->backoff, deadline);
    const char *complaint = error ? td__tls_complaint(client->fd) : NULL;
    pthread_mutex_lock(&client->lock);
    client->reading = false;
    if (!error)
        take_answers(client);
    else if (error == ETIMEDOUT)
        pthread_cond_broadcast(&client->answered); /* another may read on */
    else
        td__tcp_client_lose(client, complaint          ? complaint
                                    : error == ENODATA ? "it has ended"
                                                       : td__errno_text(error));
    if (client->lost)
        pthread_cond_broadcast(&client->answered); /* whoever looks for the next server */
    return error != ETIMEDOUT;
}

/* Waits until `call` is done, reading for all calls when no other thread does: false when the
 * deadline came first. Holds the lock, except while it reads or sleeps. */
static bool await(struct td__tcp_client *client, struct td__tcp_call *call, td__deadline deadline)
{
    while (!call->done && !client->broken.status) {
        bool in_time = client->lost      ? td__tcp_fail_over(client, deadline)
                       : client->reading ? td__cond_wait(&client->answered, &client->lock, deadline)
                                         : read_for_all(client, deadline);
        if (!in_time && !call->done && !client->broken.status)
            return false;
    }
    return true;
}

/* ---- Sending --------------------------------------------------------------------------------- */

/* What has come meanwhile is read by a sender that cannot go on: the server may be waiting for just
 * that. When another thread reads, it does this already. */
static void read_while_sending(struct td__tcp_client *client)
{
    pthread_mutex_lock(&client->lock);
    if (!client->reading)
        read_for_all(client, 0);
    pthread_mutex_unlock(&client->lock);
}

int td__tcp_client_send(struct td__tcp_client *client, const uint8_t *data, size_t size,
                        td__deadline deadline)
{
    while (size) {
        ssize_t sent = td__sock_send(client->fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            data += sent;
            size -= (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            td__deadline soon = td__deadline_earlier(deadline, td__deadline_in_ms(FULL_MS));
            int error = td__wait_fd(client->fd, POLLOUT, soon);
            if (error && (error != ETIMEDOUT || td__deadline_passed(deadline)))
                return error;
            if (error)
                read_while_sending(client);
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

/* The other side has closed, or has reported a failure: noticed before more is sent. */
static void check_connection(struct td__tcp_client *client)
{
    char byte;
    if (client->reading || client->lost)
        return;
    ssize_t got = td__sock_recv(client->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        read_for_all(client, 0);
}

static td_status fail_silent(const struct td__tcp_client *client)
{
    return td_fail(TD_ERR_TIMEOUT, "tcp store: the server at %s does not answer", client->where);
}

/* Waits until this thread may send a request: no other one does, there is a connection, and for one that changes the store
 * and has an answer, no more than the server remembers are on their way. False when the deadline came first. Holds
 * the lock, except while it waits. */
static bool take_turn(struct td__tcp_client *client, uint8_t op, td__deadline deadline)
{
    bool counts = td__wire_is_change(op) && !td__wire_is_silent(op), in_time = true;
    for (;;) {
        bool full = counts && client->kept_answers >= TD__REPLICA_WINDOW;
        if (client->broken.status)
            return true;
        if (!client->sending && !client->lost && !full) {
            client->sending = true;
            return true;
        }
        if (!in_time)
            return false;
        if (client->sending)
            in_time = td__cond_wait(&client->sendable, &client->lock, deadline);
        else if (client->lost)
            in_time = td__tcp_fail_over(client, deadline);
        else if (client->reading)
            in_time = td__cond_wait(&client->answered, &client->lock, deadline);
        else
            in_time = read_for_all(client, deadline);
    }
}

/* Puts down what is to be sent: a change gets its number. Returns the bytes to send, of `frame` or of the change that is
 * kept. Holds the lock. */
static const struct td__buffer *put_down(struct td__tcp_client *client, struct td__buffer *frame,
                                         const struct td__span *key, struct td__tcp_call *call)
{
    uint8_t op = frame->data[8];
    client->sent++;
    if (call)
        call->sequence = client->sent;
    if (key && !client->unconfirmed++)
        snprintf(client->unconfirmed_key, sizeof client->unconfirmed_key, "%.*s", (int)key->size,
                 key->data);
    if (key)
        client->unconfirmed_last = client->sent;
    if (call)
        call->frame = frame;
    if (!td__wire_is_change(op))
        return frame;
    client->changes++;
    if (call)
        call->number = client->changes;
    client->going_out = client->replicated ? td__tcp_keep(client, frame, client->sent) : NULL;
    if (client->going_out && call)
        call->kept = true;
    if (client->going_out)
        return &client->going_out->frame;
    if (td__wire_is_silent(op))
        client->silent_not_kept = client->changes;
    return frame;
}

/* Sends a frame, whose id is filled in here; a request without an answer has id 0 and is put down as
 * unconfirmed under `key`. `call` is NULL where nobody waits for an answer. */
static td_status transmit(struct td__tcp_client *client, struct td__buffer *frame, uint32_t id,
                          const struct td__span *key, td__deadline deadline,
                          struct td__tcp_call *call)
{
    if (frame->failed)
        return td__fail_nomem("tcp store");
    if (frame->size - TD__WIRE_HEADER > TD__WIRE_MAX_BODY)
        return td_fail(TD_ERR_INVALID,
                       "tcp store: one call cannot carry %zu bytes; the most is %zu", frame->size,
                       TD__WIRE_MAX_BODY);
    td__store_u32(frame->data, (uint32_t)(frame->size - TD__WIRE_HEADER));
    td__store_u32(frame->data + 4, id);

    pthread_mutex_lock(&client->lock);
    td_status status = TD_OK;
    if (!take_turn(client, frame->data[8], deadline)) {
        status = fail_silent(client);
        pthread_mutex_unlock(&client->lock);
        return status;
    }
    bool broken = client->broken.status;
    if (broken) {
        status = fail_broken(client);
    } else {
        const struct td__buffer *bytes = put_down(client, frame, key, call);
        bool again = bytes != frame || call;
        pthread_mutex_unlock(&client->lock);
        int error = td__tcp_client_send(client, bytes->data, bytes->size, deadline);
        pthread_mutex_lock(&client->lock);
        client->sending = false;
        struct td__tcp_kept *kept = client->going_out;
        client->going_out = NULL;
        if (client->going_out_confirmed)
            td__tcp_confirm(client, kept->sequence);
        client->going_out_confirmed = false;
        if (error && error != ETIMEDOUT && !client->reading)
            read_for_all(client, 0); /* the server's last words may say more */
        if (error)
            td__tcp_client_lose(client, error == ETIMEDOUT ? "it takes no more bytes"
                                                           : td__errno_text(error));
        if (error && (client->broken.status || !again))
            status = client->broken.status ? fail_broken(client) : fail_silent(client);
    }
    pthread_cond_signal(&client->sendable);
    if (client->lost)
        pthread_cond_broadcast(&client->answered);
    pthread_mutex_unlock(&client->lock);
    return status;
}

/* Begins a call: fails when the connection is lost, or an earlier call that was not waited for was
 * not carried out. */
static td_status enter(struct td__tcp_client *client, bool look)
{
    if (client->fork_generation != td__fork_generation())
        return td_fail(TD_ERR_STATE,
                       "tcp store at %s was opened before fork(); the child opens its own",
                       client->where);
    td_status status = TD_OK;
    pthread_mutex_lock(&client->lock);
    if (look)
        check_connection(client);
    if (client->broken.status)
        status = fail_broken(client);
    else if (client->late.status)
        status = fail_late(client);
    client->late.status = TD_OK;
    pthread_mutex_unlock(&client->lock);
    return status;
}

struct td__buffer td__tcp_frame(uint8_t op)
{
    struct td__buffer frame = {0};
    td__wire_begin(&frame, 0, op);
    return frame;
}

/* So that what is kept for the next server has a bound, a client waits for the present one now and then. */
static td_status make_room(struct td__tcp_client *client, td__deadline deadline)
{
    pthread_mutex_lock(&client->lock);
    bool full = client->kept_bytes > KEPT_BYTES;
    pthread_mutex_unlock(&client->lock);
    if (!full)
        return TD_OK;
    struct td__buffer frame = td__tcp_frame(TD__WIRE_SYNC), body = {0};
    td_status status = td__tcp_client_ask(client, &frame, deadline, NULL, &body);
    td__buffer_free(&body);
    return status;
}

td_status td__tcp_client_tell(struct td__tcp_client *client, struct td__buffer *frame,
                              struct td__span key, td__deadline deadline)
{
    td_status status = enter(client, true);
    if (!status)
        status = make_room(client, deadline);
    if (!status)
        status = transmit(client, frame, 0, &key, deadline, NULL);
    td__buffer_free(frame);
    return status;
}

/* The time of `call` is over. The server says so too, and which key was missing; when it does not
 * even do that, it is the server that is missing. Holds the lock, except while it sends or waits. */
static td_status give_up(struct td__tcp_client *client, struct td__tcp_call *call,
                         bool waits_for_key)
{
    if (waits_for_key) {
        struct td__buffer frame = td__tcp_frame(TD__WIRE_CANCEL);
        td__buffer_put_u32(&frame, call->id);
        td__deadline grace = td__deadline_in_ms(GRACE_MS);
        pthread_mutex_unlock(&client->lock);
        td_status status = transmit(client, &frame, 0, NULL, grace, NULL);
        pthread_mutex_lock(&client->lock);
        td__buffer_free(&frame);
        if (status || await(client, call, grace))
            return status;
    }
    return fail_silent(client);
}

/* Turns a failure that the server reported into one of this thread. */
static td_status reported(struct td__tcp_call *call)
{
    struct td__reader reader = td__reader_of(call->body.data, call->body.size);
    struct td__span text = td__reader_string(&reader, call->body.size);
    if (call->status == TD_ERR_NOMEM)
        return td__fail_nomem("tcp store");
    if (call->status == TD_ERR_TIMEOUT)
        return td__fail_missing_key("tcp", text);
    return td_fail(call->status, "%.*s", (int)text.size, text.data);
}

td_status td__tcp_client_ask(struct td__tcp_client *client, struct td__buffer *frame,
                             td__deadline deadline, const td__deadline *key_deadline,
                             struct td__buffer *body)
{
    struct td__tcp_call call = {0};
    td_status status = enter(client, false);
    if (status)
        goto free_frame;
    pthread_mutex_lock(&client->lock);
    call.id = ++client->last_id ? client->last_id : ++client->last_id; /* 0 is not an id */
    LIST_INSERT_HEAD(&client->calls, &call, link);
    pthread_mutex_unlock(&client->lock);
    status = transmit(client, frame, call.id, NULL, deadline, &call);

    pthread_mutex_lock(&client->lock);
    if (!status && !await(client, &call, key_deadline ? *key_deadline : deadline))
        status = give_up(client, &call, key_deadline != NULL);
    if (!call.done)
        LIST_REMOVE(&call, link); /* its memory is about to go */
    if (!status && !call.done)
        status = fail_broken(client);
    else if (!status && call.status)
        status = reported(&call);
    pthread_mutex_unlock(&client->lock);
free_frame:
    td__buffer_free(frame);
    if (status)
        td__buffer_free(&call.body);
    else
        *body = call.body;
    return status;
}

/* ---- Opening and closing --------------------------------------------------------------------- */

td_status td__tcp_client_init(struct td__tcp_client *client, const struct td__secret *secret)
{
    *client = (struct td__tcp_client){
        .fd = -1, .fork_generation = td__fork_generation(), .secret = *secret};
    TD_TRY(td__random(&client->id, sizeof client->id));
    client->id |= 1; /* 0 is nobody */
    STAILQ_INIT(&client->kept);
    pthread_mutex_init(&client->lock, NULL);
    td__cond_init(&client->answered);
    td__cond_init(&client->sendable);
    return TD_OK;
}

void td__tcp_client_start(struct td__tcp_client *client, int fd, const char *host, int port)
{
    struct td__buffer frame = {0};
    client->fd = fd;
    td__endpoint_text(host, port, client->where, sizeof client->where);
    td__tcp_put_hello(&frame, client, client->id, 1, false);
    if (!frame.failed) /* the first call notices a failure */
        td__send_all(fd, frame.data, frame.size, td__deadline_in_ms(GRACE_MS));
    td__buffer_free(&frame);
}

td_status td__tcp_client_find(struct td__tcp_client *client, td__deadline deadline)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&client->lock);
    client->replicated = client->lost = true;
    client->lost_at = td__now_ns();
    snprintf(client->lost_text, sizeof client->lost_text, "there was none yet");
    while (client->lost && !client->broken.status && td__tcp_fail_over(client, deadline))
        ;
    if (client->broken.status)
        status = td__error_restore(&client->broken);
    else if (client->lost)
        status = td_fail(TD_ERR_TIMEOUT, "tcp store: no primary was found in time: tried%s",
                         client->tried);
    pthread_mutex_unlock(&client->lock);
    return status;
}

void td__tcp_client_where(struct td__tcp_client *client, char text[TD__REPLICA_ADDRESS])
{
    pthread_mutex_lock(&client->lock);
    memcpy(text, client->where, TD__REPLICA_ADDRESS);
    pthread_mutex_unlock(&client->lock);
}

/* Makes sure that all that was set has arrived, and sends BYE. */
static td_status say_bye(struct td__tcp_client *client, td__deadline deadline)
{
    td_status status = TD_OK;
    if (client->broken.status)
        return client->unconfirmed ? fail_broken(client) : TD_OK;
    if (client->unconfirmed) {
        struct td__buffer frame = td__tcp_frame(TD__WIRE_SYNC), body = {0};
        status = td__tcp_client_ask(client, &frame, deadline, NULL, &body);
        td__buffer_free(&body);
    }
    if (!status && client->late.status)
        status = fail_late(client);
    struct td__buffer bye = td__tcp_frame(TD__WIRE_BYE);
    if (!client->broken.status)
        transmit(client, &bye, 0, NULL, deadline, NULL);
    td__buffer_free(&bye);
    return status;
}

td_status td__tcp_client_close(struct td__tcp_client *client, td__deadline deadline)
{
    td_status status = TD_OK;
    if (client->fork_generation == td__fork_generation())
        status = say_bye(client, deadline);
    if (client->fd >= 0)
        td__sock_close(client->fd);
    td__tcp_drop_kept(client);
    td__buffer_free(&client->in);
    pthread_cond_destroy(&client->answered);
    pthread_cond_destroy(&client->sendable);
    pthread_mutex_destroy(&client->lock);
    return status;
}
