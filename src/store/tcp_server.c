/* The store's server; see store_engine.h.
 *
 * The listener (os/auth_listener.h) passes on a connection that has proven the job's secret. It has a session
 * of the engine from then on, and its bytes are cut into frames.
 *
 *     socket -> read_buffer (shared) -> [in: the part of a frame that is not whole yet] -> engine
 *     engine -> session.out -> socket -> [what did not fit: a list of writes]
 *
 * libuv only reports when a socket is ready: it may be encrypted (os/tls.h).
 *
 * Answers that come up while input is handled are sent together at its end. A client that does not
 * read its answers is not read from either, so that it cannot make the server hold more than
 * TD__SESSION_OUT_LIMIT for it, plus one answer.
 *
 * After a request the loop yields for a while before it sleeps (base/wait.h): waking a sleeping thread costs
 * several times a round trip. */
#include "base/fail.h"
#include "os/socket.h"
#include "os/tls.h"
#include "store/tcp_server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    READ_SIZE = TD__SERVER_READ_SIZE,
    SEND_AT_ONCE = 64 << 10,
    WRITE_AT_ONCE = 1 << 20,
};

/* ---- Closing --------------------------------------------------------------------------------- */

static void tell_when_empty(struct td__tcp_server *server)
{
    pthread_mutex_lock(&server->lock);
    server->empty = TAILQ_EMPTY(&server->clients);
    if (server->stopping && server->empty)
        pthread_cond_signal(&server->left);
    pthread_mutex_unlock(&server->lock);
}

/* Removes the first one. */
static void end_write(struct connection *connection)
{
    struct write *write = STAILQ_FIRST(&connection->writes);
    STAILQ_REMOVE_HEAD(&connection->writes, link);
    connection->session.in_flight -= write->bytes.size;
    td__buffer_free(&write->bytes);
    free(write);
}

static void on_closed(uv_handle_t *handle)
{
    struct connection *connection = handle->data;
    while (!STAILQ_EMPTY(&connection->writes))
        end_write(connection);
    td__buffer_free(&connection->in);
    free(connection);
}

/* With `reset` the other side sees a reset instead of an orderly end. */
void td__connection_close(struct connection *connection, bool reset)
{
    struct td__tcp_server *server = connection->server;
    if (connection->closing)
        return;
    TAILQ_REMOVE(&server->clients, connection, client_link);
    if (connection->holding)
        LIST_REMOVE(connection, holding_link);
    connection->closing = true;
    uv_close(&connection->handle, on_closed);
    if (reset) {
        struct linger linger = {.l_onoff = 1, .l_linger = 0};
        setsockopt(connection->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    }
    td__sock_close(connection->fd);
    td__session_end(&connection->session);
    tell_when_empty(server);
}

/* ---- Sending --------------------------------------------------------------------------------- */

static bool receive(struct connection *connection, const uint8_t *data, size_t size);
static void on_output(struct td__session *session);
static void flush_all(struct td__tcp_server *server);
static void on_ready(uv_poll_t *poll, int error, int events);
static void on_silence(uv_timer_t *timer);
static void follow_replica(struct td__tcp_server *server);
static bool replica_has_news(const struct td__tcp_server *server);

/* Whether the first write that waits may be sent. */
static bool may_send(const struct connection *connection)
{
    const struct write *write = STAILQ_FIRST(&connection->writes);
    return write && write->after <= connection->server->confirmed;
}

/* Which events are waited for: input where the client is read from, and room where writes wait. */
void td__connection_watch(struct connection *connection)
{
    struct td__tcp_server *server = connection->server;
    bool reads = !server->closing && !td__session_is_full(&connection->session);
    int events = (reads ? UV_READABLE : 0) | (may_send(connection) ? UV_WRITABLE : 0);
    if (connection->closing || events == connection->events)
        return;
    connection->events = events;
    if (events ? uv_poll_start(&connection->poll, events, on_ready)
               : uv_poll_stop(&connection->poll))
        td__connection_close(connection, false);
}

/* Bytes that the socket has taken, 0 where it has no room; or -1. */
static ssize_t send_some(const struct connection *connection, const uint8_t *data, size_t size)
{
    ssize_t sent;
    do
        sent = td__sock_send(connection->fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? 0 : sent;
}

/* There is room: sends what waits, some of it at a time, so that one client does not starve others. */
static void send_waiting(struct connection *connection)
{
    for (size_t total = 0; total < WRITE_AT_ONCE && may_send(connection);) {
        struct write *write = STAILQ_FIRST(&connection->writes);
        ssize_t sent = send_some(connection, write->bytes.data + write->sent,
                                 write->bytes.size - write->sent);
        if (sent < 0) {
            td__connection_close(connection, false);
            return;
        }
        write->sent += (size_t)sent;
        total += (size_t)sent;
        if (write->sent < write->bytes.size)
            break;
        end_write(connection);
        on_output(&connection->session); /* there may be more, or room for more */
    }
    if (connection->ends && STAILQ_EMPTY(&connection->writes))
        td__connection_close(connection, false);
}

static void hold(struct connection *connection, uint64_t after)
{
    if (after <= connection->server->confirmed || connection->holding)
        return;
    connection->holding = true;
    LIST_INSERT_HEAD(&connection->server->holding, connection, holding_link);
}

/* The latest change that is in what the client is to be sent, where not all standbys have it; else 0. */
static uint64_t sequence_to_wait_for(const struct connection *connection)
{
    struct td__tcp_server *server = connection->server;
    const struct td__replica *replica = server->engine.replica;
    if (!replica || connection->session.standby)
        return 0;
    uint64_t confirmed = td__replica_confirmed(&server->engine);
    if (confirmed > server->confirmed)
        server->confirmed = confirmed;
    return replica->sequence > server->confirmed ? replica->sequence : 0;
}

/* Sends what the socket takes now; the rest waits for room. */
static void flush(struct connection *connection)
{
    struct td__buffer *out = &connection->session.out;
    if (connection->closing || !out->size)
        return;
    if (out->failed) {
        td__connection_close(connection, true);
        return;
    }
    uint64_t after = sequence_to_wait_for(connection);
    /* Much waits also where the socket would take it: that the rest of it, and what it makes
     * room for, waits for the next turn of the loop keeps one client from starving others. */
    if (!after && !connection->session.in_flight && out->size <= SEND_AT_ONCE) {
        ssize_t sent = send_some(connection, out->data, out->size);
        if (sent == (ssize_t)out->size) {
            out->size = 0;
            return;
        }
        if (sent > 0)
            td__buffer_consume(out, (size_t)sent);
    }
    struct write *write = calloc(1, sizeof *write);
    if (!write) {
        td__connection_close(connection, true);
        return;
    }
    write->bytes = *out;
    write->after = after;
    *out = (struct td__buffer){0};
    connection->session.in_flight += write->bytes.size;
    hold(connection, after);
    STAILQ_INSERT_TAIL(&connection->writes, write, link);
    if (td__session_is_full(&connection->session))
        connection->paused = true;
    td__connection_watch(connection);
}

static void on_output(struct td__session *session)
{
    struct connection *connection = TD__CONTAINER(session, struct connection, session);
    if (connection->dirty)
        return;
    connection->dirty = true;
    SLIST_INSERT_HEAD(&connection->server->dirty, connection, dirty_link);
}

/* A client that was full has taken what it was sent: goes on with what it is owed, and with what has
 * come from it meanwhile. */
static void go_on(struct connection *connection)
{
    connection->paused = false;
    td__session_resume(&connection->session);
    if (receive(connection, NULL, 0))
        td__connection_watch(connection);
    else
        td__connection_close(connection, false);
}

/* The engine wants it to end. The client is read from until it closes its end, or a reset would overtake what it
 * was sent. */
static void end_session(struct connection *connection)
{
    if (connection->session.end == TD__SESSION_ENDS_NOW) {
        td__connection_close(connection, false);
    } else if (!connection->shut && STAILQ_EMPTY(&connection->writes)) {
        connection->shut = true;
        td__sock_shutdown(connection->fd, SHUT_WR);
    }
}

static void flush_all(struct td__tcp_server *server)
{
    uint64_t quarter_ms = (uint64_t)td__heartbeat_ms() / 4;
    bool watched = server->closing || uv_is_active((uv_handle_t *)&server->silence);
    if (!SLIST_EMPTY(&server->dirty) && !watched)
        uv_timer_start(&server->silence, on_silence, quarter_ms, quarter_ms);
    do {
        if (server->engine.replica)
            follow_replica(server);
        while (!SLIST_EMPTY(&server->dirty)) {
            struct connection *connection = SLIST_FIRST(&server->dirty);
            SLIST_REMOVE_HEAD(&server->dirty, dirty_link);
            connection->dirty = false;
            flush(connection); /* closing one may carry out its will, and make others dirty */
            if (connection->session.end && !connection->closing)
                end_session(connection);
            bool waits = connection->paused || connection->session.owes_answers;
            if (!connection->closing && waits && !server->closing &&
                !td__session_is_full(&connection->session))
                go_on(connection);
        }
    } while (server->engine.replica && (replica_has_news(server) || !SLIST_EMPTY(&server->dirty)));
}

void td__tcp_server_flush(struct td__tcp_server *server)
{
    flush_all(server);
}

/* ---- Standbys -------------------------------------------------------------------------------- */

/* Tells every client who the members are, before all that it was not sent yet. */
static void tell_members(struct td__tcp_server *server)
{
    struct td__replica *replica = server->engine.replica;
    struct connection *connection;
    TAILQ_FOREACH (connection, &server->clients, client_link) {
        struct td__session *session = &connection->session;
        struct write *write = session->known ? calloc(1, sizeof *write) : NULL;
        if (!write)
            continue;
        td__replica_put_state(&server->engine, session, &write->bytes);
        if (write->bytes.failed) {
            free(write);
            continue;
        }
        write->after = replica->members_sequence;
        session->in_flight += write->bytes.size;
        hold(connection, UINT64_MAX); /* whatever is confirmed already, it is sent below */
        struct write *first = STAILQ_FIRST(&connection->writes);
        if (first && first->sent)
            STAILQ_INSERT_AFTER(&connection->writes, first, write, link);
        else
            STAILQ_INSERT_HEAD(&connection->writes, write, link);
    }
}

/* All but one that is sent in part. */
static void forget_writes(struct connection *connection)
{
    struct write *first = STAILQ_FIRST(&connection->writes);
    struct write *part = first && first->sent ? first : NULL;
    if (part)
        STAILQ_REMOVE_HEAD(&connection->writes, link);
    while (!STAILQ_EMPTY(&connection->writes))
        end_write(connection);
    if (part)
        STAILQ_INSERT_HEAD(&connection->writes, part, link);
}

/* This server is not the primary any more. A deposed one forgets answers that are not confirmed. */
static void send_clients_away(struct td__tcp_server *server)
{
    bool deposed = server->engine.replica->role == TD__REPLICA_DEPOSED;
    struct connection *connection;
    TAILQ_FOREACH (connection, &server->clients, client_link) {
        struct td__session *session = &connection->session;
        if (deposed) {
            forget_writes(connection);
            session->out.size = 0;
        }
        if (session->standby && deposed)
            session->end = TD__SESSION_ENDS_NOW;
        if (session->end != TD__SESSION_ENDS_NOW)
            td__replica_refuse(session);
        on_output(session);
    }
}

/* Sends what the standbys have confirmed. */
static void release(struct td__tcp_server *server)
{
    struct connection *connection, *next;
    for (connection = LIST_FIRST(&server->holding); connection; connection = next) {
        next = LIST_NEXT(connection, holding_link);
        if (!may_send(connection) && !STAILQ_EMPTY(&connection->writes))
            continue;
        LIST_REMOVE(connection, holding_link);
        connection->holding = false;
        send_waiting(connection);
        struct write *first = STAILQ_FIRST(&connection->writes);
        if (!connection->closing && first)
            hold(connection, first->after);
        td__connection_watch(connection);
    }
}

static bool replica_has_news(const struct td__tcp_server *server)
{
    const struct td__replica *replica = server->engine.replica;
    return replica->role != server->told_role || replica->term != server->told_term ||
           replica->copy_version != server->told_version;
}

static void follow_replica(struct td__tcp_server *server)
{
    const struct td__replica *replica = server->engine.replica;
    bool led = server->told_role == TD__REPLICA_PRIMARY, news = replica_has_news(server);
    bool new_members = replica->term != server->told_term ||
                       replica->copy_version != server->told_version;
    server->told_role = replica->role;
    server->told_term = replica->term;
    server->told_version = replica->copy_version;
    td__tcp_server_beat(server);
    if (led && replica->role != TD__REPLICA_PRIMARY)
        send_clients_away(server);
    else if (replica->role == TD__REPLICA_PRIMARY && new_members)
        tell_members(server);
    if (news)
        td__tcp_replica_publish(server);

    uint64_t confirmed = td__replica_confirmed(&server->engine);
    bool clogged = td__replica_is_clogged(&server->engine);
    bool goes_on = server->clogged && !clogged;
    if (confirmed > server->confirmed || new_members) {
        server->confirmed = confirmed > server->confirmed ? confirmed : server->confirmed;
        release(server);
    }
    server->clogged = clogged;
    struct connection *connection;
    TAILQ_FOREACH (connection, &server->clients, client_link) {
        if (!goes_on)
            break;
        on_output(&connection->session);
        td__connection_watch(connection);
    }
}

/* Closes the connections to hosts that are cut off. Without this the kernel would send again for a quarter of an hour
 * before it lets one fail to which something was under way. */
static void on_silence(uv_timer_t *timer)
{
    struct td__tcp_server *server = timer->data;
    bool some_await = false;
    for (struct connection *at = TAILQ_FIRST(&server->clients), *next; at; at = next) {
        next = TAILQ_NEXT(at, client_link);
        if (td__cut_off(at->fd))
            td__connection_close(at, true);
        else
            some_await = some_await || td__awaits_acknowledgement(at->fd);
    }
    if (!some_await)
        uv_timer_stop(timer);
    flush_all(server); /* wills */
}

/* ---- Receiving ------------------------------------------------------------------------------- */

/* Handles one frame at the front of `data`: the bytes used, 0 when more are needed, -1 when it is none. */
static ssize_t frame(struct connection *connection, const uint8_t *data, size_t size)
{
    struct td__wire_header header;
    if (size < TD__WIRE_HEADER)
        return 0;
    if (!td__wire_read_header(data, &header))
        return -1;
    if (size - TD__WIRE_HEADER < header.body_size)
        return 0;
    if (!td__engine_execute(&connection->session, &header, data + TD__WIRE_HEADER))
        return -1;
    return (ssize_t)(TD__WIRE_HEADER + header.body_size);
}

/* Handles all that is whole in `data`; returns how much that was, -1 when the connection must end. */
static ssize_t handle_bytes(struct connection *connection, const uint8_t *data, size_t size)
{
    size_t used = 0;
    while (used < size && !td__session_is_full(&connection->session)) {
        ssize_t step = frame(connection, data + used, size - used);
        if (step < 0)
            return -1;
        if (step == 0)
            break;
        used += (size_t)step;
        if (connection->session.out.size > TD__SESSION_OUT_LIMIT)
            flush(connection);
        if (connection->closing)
            return -1;
    }
    if (used < size && td__session_is_full(&connection->session))
        connection->paused = true;
    return (ssize_t)used;
}

/* New bytes, none when the connection goes on after a pause. False when it must end. */
static bool receive(struct connection *connection, const uint8_t *data, size_t size)
{
    struct td__buffer *in = &connection->in;
    if (in->size) {
        td__buffer_put(in, data, size);
        if (in->failed)
            return false;
        ssize_t used = handle_bytes(connection, in->data, in->size);
        if (used < 0)
            return false;
        td__buffer_consume(in, (size_t)used);
        if (!in->size && in->capacity > READ_SIZE)
            td__buffer_free(in);
        return true;
    }
    ssize_t used = handle_bytes(connection, data, size);
    if (used < 0)
        return false;
    td__buffer_put(in, data + used, size - (size_t)used);
    return !in->failed;
}

static void keep_awake(struct td__tcp_server *server);

/* The end of a connection, or something that is no request. */
static void end_connection(struct connection *connection, bool invalid)
{
    struct td__tcp_server *server = connection->server;
    if (invalid)
        td_log(TD_LOG_WARN, "store server: a client sent something that is no request; its "
                            "connection is closed");
    flush(connection); /* what was right before the mistake is answered */
    td__connection_close(connection, false);
    flush_all(server);
}

static void read_some(struct connection *connection)
{
    struct td__tcp_server *server = connection->server;
    uint8_t *bytes = (uint8_t *)server->read_buffer;
    ssize_t size = td__sock_recv(connection->fd, bytes, READ_SIZE, MSG_DONTWAIT);
    if (size > 0 && receive(connection, bytes, (size_t)size)) {
        flush_all(server);
        keep_awake(server);
    } else if (size >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
        end_connection(connection, size > 0);
    }
}

static void on_ready(uv_poll_t *poll, int error, int events)
{
    struct connection *connection = poll->data;
    struct td__tcp_server *server = connection->server;
    if (error) {
        events = UV_READABLE;   /* reading finds the reason … */
        connection->events = 0; /* … perhaps at the next turn: libuv has stopped to watch */
    }
    if (events & UV_WRITABLE) {
        send_waiting(connection);
        flush_all(server);
    }
    if (events & UV_READABLE && !connection->closing && !server->closing)
        read_some(connection);
    td__connection_watch(connection);
    if (server->closing && TAILQ_EMPTY(&server->clients) &&
        !uv_is_closing((uv_handle_t *)&server->rest))
        td__tcp_server_close_rest(&server->rest);
}

/* ---- Accepting ------------------------------------------------------------------------------- */

void td__tcp_server_accept(void *arg, int fd, bool local, const uint8_t *request)
{
    struct td__tcp_server *server = arg;
    struct connection *connection = calloc(1, sizeof *connection);
    (void)request;
    (void)local;
    if (!connection || uv_poll_init(&server->loop.uv, &connection->poll, fd)) {
        td__sock_close(fd);
        free(connection);
        return;
    }
    connection->handle.data = connection;
    connection->fd = fd;
    STAILQ_INIT(&connection->writes);
    connection->server = server;
    connection->session = (struct td__session){.engine = &server->engine, .on_output = on_output};
    TAILQ_INSERT_TAIL(&server->clients, connection, client_link);
    tell_when_empty(server);

    td__connection_watch(connection);
    keep_awake(server);
}

static void on_spin(uv_idle_t *spin)
{
    struct td__tcp_server *server = spin->data;
    if (!td__backoff(&server->backoff, true))
        uv_idle_stop(spin);
}

static void keep_awake(struct td__tcp_server *server)
{
    server->backoff.begun = td__now_ns();
    uv_idle_start(&server->spin, on_spin); /* no-op when it runs already */
}

/* A client cannot be accepted, and the waits of others are most likely for it. */
void td__tcp_server_full(void *arg, int error)
{
    struct td__tcp_server *server = arg;
    char text[256];
    snprintf(text, sizeof text, "the store's server (process %d) cannot accept more clients: %s",
             (int)getpid(), td__errno_text(error));
    for (struct connection *at = TAILQ_FIRST(&server->clients); at;
         at = TAILQ_NEXT(at, client_link))
        td__session_fail_waits(&at->session, TD_ERR_SYSTEM, text);
    flush_all(server);
}
