/* The store's server; see store_engine.h.
 *
 * The listener (os/auth_listener.h) passes on a connection that has proven the job's secret. It has a session
 * of the engine from then on, and its bytes are cut into frames.
 *
 *     socket -> read_buffer (shared) -> [in: the part of a frame that is not whole yet] -> engine
 *     engine -> session.out -> socket -> [what did not fit: a write request of libuv]
 *
 * Answers that come up while input is handled are sent together at its end. A client that does not
 * read its answers is not read from either, so that it cannot make the server hold more than
 * TD__SESSION_OUT_LIMIT for it, plus one answer.
 *
 * After a request the loop yields for a while before it sleeps (base/wait.h): waking a sleeping thread costs
 * several times a round trip. */
#include "base/fail.h"
#include "base/thread.h"
#include "base/wait.h"
#include "os/loop.h"
#include "os/socket.h"
#include "os/tls.h"
#include "store/store_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    READ_SIZE = 256 << 10,
    FLUSH_MS = 2000,
    SEND_AT_ONCE = 64 << 10,
};

struct connection {
    union {
        uv_handle_t handle;
        uv_stream_t stream;
        uv_tcp_t tcp;
        uv_pipe_t pipe;
    };
    struct td__tcp_server *server;
    bool is_tcp;
    bool closing;
    struct td__session session;
    struct td__buffer in;
    bool paused; /* it is not read from, or not all of `in` was handled yet */
    bool dirty;  /* on the list of those with something to send */
    SLIST_ENTRY(connection) dirty_link;
    TAILQ_ENTRY(connection) client_link;
};

struct td__tcp_server {
    struct td__loop loop;
    struct td__loop_listener accepting;
    char *path;      /* of a unix socket in the file system, to be removed */
    uv_timer_t rest; /* for sending what clients are still owed at the end */
    uv_idle_t spin;
    struct td__backoff backoff; /* begun with the last request */
    bool closing;               /* clients are only sent what they are owed */
    struct td__secret secret;
    struct td__engine engine;
    TAILQ_HEAD(, connection) clients;
    SLIST_HEAD(, connection) dirty;
    char read_buffer[READ_SIZE];

    pthread_mutex_t lock; /* protects `empty` and `stopping`; no other lock is taken under it */
    pthread_cond_t left;
    bool stopping;
    bool empty; /* no client is left */
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

static void on_closed(uv_handle_t *handle)
{
    struct connection *connection = handle->data;
    td__buffer_free(&connection->in);
    free(connection);
}

/* With `reset` the other side sees a reset instead of an orderly end. */
static void close_connection(struct connection *connection, bool reset)
{
    struct td__tcp_server *server = connection->server;
    if (connection->closing)
        return;
    TAILQ_REMOVE(&server->clients, connection, client_link);
    connection->closing = true;
    if (reset && connection->is_tcp)
        uv_tcp_close_reset(&connection->tcp, on_closed);
    else
        uv_close(&connection->handle, on_closed);
    td__session_end(&connection->session);
    tell_when_empty(server);
}

/* ---- Sending --------------------------------------------------------------------------------- */

struct write {
    uv_write_t request;
    struct td__buffer bytes;
};

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer);
static void on_read(uv_stream_t *stream, ssize_t size, const uv_buf_t *buffer);
static bool receive(struct connection *connection, const uint8_t *data, size_t size);
static void on_output(struct td__session *session);
static void flush_all(struct td__tcp_server *server);

static void on_written(uv_write_t *request, int error)
{
    struct write *write = TD__CONTAINER(request, struct write, request);
    struct connection *connection = request->handle->data;
    connection->session.in_flight -= write->bytes.size;
    td__buffer_free(&write->bytes);
    free(write);
    if (error)
        close_connection(connection, false);
    else
        on_output(&connection->session); /* there may be more, or room for more */
    flush_all(connection->server);
}

/* Sends what the socket takes now, and leaves the rest to libuv. */
static void flush(struct connection *connection)
{
    struct td__buffer *out = &connection->session.out;
    if (connection->closing || !out->size)
        return;
    if (out->failed) {
        close_connection(connection, true);
        return;
    }
    /* Much is left to libuv also where the socket would take it: that the rest of it, and what it makes
     * room for, waits for the next turn of the loop keeps one client from starving others. */
    if (!connection->session.in_flight && out->size <= SEND_AT_ONCE) {
        uv_buf_t buffer = uv_buf_init((char *)out->data, (unsigned)out->size);
        int sent = uv_try_write(&connection->stream, &buffer, 1);
        if (sent == (int)out->size) {
            out->size = 0;
            return;
        }
        if (sent > 0)
            td__buffer_consume(out, (size_t)sent);
    }
    struct write *write = calloc(1, sizeof *write);
    if (!write) {
        close_connection(connection, true);
        return;
    }
    write->bytes = *out;
    *out = (struct td__buffer){0};
    connection->session.in_flight += write->bytes.size;
    uv_buf_t buffer = uv_buf_init((char *)write->bytes.data, (unsigned)write->bytes.size);
    if (uv_write(&write->request, &connection->stream, &buffer, 1, on_written)) {
        td__buffer_free(&write->bytes);
        free(write);
        close_connection(connection, false);
    } else if (td__session_is_full(&connection->session)) {
        connection->paused = true;
        uv_read_stop(&connection->stream);
    }
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
        uv_read_start(&connection->stream, on_alloc, on_read); /* no-op when it reads already */
    else
        close_connection(connection, false);
}

static void flush_all(struct td__tcp_server *server)
{
    while (!SLIST_EMPTY(&server->dirty)) {
        struct connection *connection = SLIST_FIRST(&server->dirty);
        SLIST_REMOVE_HEAD(&server->dirty, dirty_link);
        connection->dirty = false;
        flush(connection); /* closing one may carry out its will, and make others dirty */
        bool waits = connection->paused || connection->session.owes_answers;
        if (!connection->closing && waits && !server->closing &&
            !td__session_is_full(&connection->session))
            go_on(connection);
    }
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

static void on_read(uv_stream_t *stream, ssize_t size, const uv_buf_t *buffer)
{
    struct connection *connection = stream->data;
    struct td__tcp_server *server = connection->server;
    if (size > 0 && receive(connection, (const uint8_t *)buffer->base, (size_t)size)) {
        flush_all(server);
        keep_awake(server);
    } else if (size != 0) {
        if (size > 0)
            td_log(TD_LOG_WARN, "store server: a client sent something that is no request; its "
                                "connection is closed");
        flush(connection); /* what was right before the mistake is answered */
        close_connection(connection, false);
        flush_all(server);
    }
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
    (void)suggested;
    struct connection *connection = handle->data;
    *buffer = uv_buf_init(connection->server->read_buffer, READ_SIZE);
}

/* ---- Accepting ------------------------------------------------------------------------------- */

static void on_accepted(void *arg, int fd, bool local, const uint8_t *request)
{
    struct td__tcp_server *server = arg;
    struct connection *connection = calloc(1, sizeof *connection);
    (void)request;
    td__tls_set_owner(fd, server);
    if (!connection) {
        close(fd);
        return;
    }
    connection->is_tcp = !local && !server->secret.tls;
    if (connection->is_tcp)
        uv_tcp_init(&server->loop.uv, &connection->tcp);
    else
        uv_pipe_init(&server->loop.uv, &connection->pipe, 0);
    connection->handle.data = connection;
    connection->server = server;
    connection->session = (struct td__session){.engine = &server->engine, .on_output = on_output};
    TAILQ_INSERT_TAIL(&server->clients, connection, client_link);
    tell_when_empty(server);

    int error = connection->is_tcp ? uv_tcp_open(&connection->tcp, fd)
                                   : uv_pipe_open(&connection->pipe, fd);
    if (error)
        close(fd);
    if (error || uv_read_start(&connection->stream, on_alloc, on_read))
        close_connection(connection, false);
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

/* ---- Starting and stopping ------------------------------------------------------------------- */

struct start {
    struct td__tcp_server *server;
    int fd, shortcut;
};

/* A client cannot be accepted, and the waits of others are most likely for it. */
static void on_full(void *arg, int error)
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

static td_status start_on_loop(void *arg)
{
    struct start *start = arg;
    struct td__tcp_server *server = start->server;
    struct td__auth_listener_options options = {.secret = &server->secret,
                                                .purpose = "store",
                                                .fn = on_accepted,
                                                .full = on_full,
                                                .arg = server};
    uv_timer_init(&server->loop.uv, &server->rest);
    server->rest.data = server;
    uv_idle_init(&server->loop.uv, &server->spin);
    server->spin.data = server;
    return td__loop_listen(&server->loop, start->fd, start->shortcut, &options, &server->accepting);
}

static void stop_accepting(void *arg)
{
    struct td__tcp_server *server = arg;
    if (server->accepting.listener)
        td__loop_unlisten(&server->accepting);
    if (server->path)
        unlink(server->path);
    pthread_mutex_lock(&server->lock);
    server->stopping = true;
    server->empty = TAILQ_EMPTY(&server->clients);
    pthread_mutex_unlock(&server->lock);
}

static void close_what_is_left(uv_timer_t *timer)
{
    struct td__tcp_server *server = timer->data;
    while (!TAILQ_EMPTY(&server->clients))
        close_connection(TAILQ_FIRST(&server->clients), false);
    flush_all(server);
    uv_close((uv_handle_t *)&server->rest, NULL);
}

static void on_shut_down(uv_shutdown_t *request, int error)
{
    (void)error;
    struct connection *connection = request->handle->data;
    struct td__tcp_server *server = connection->server;
    free(request);
    close_connection(connection, false);
    flush_all(server);
    if (TAILQ_EMPTY(&server->clients) && !uv_is_closing((uv_handle_t *)&server->rest))
        close_what_is_left(&server->rest);
}

/* Each client is closed once what was still to be sent to it is sent. */
static void close_clients(void *arg)
{
    struct td__tcp_server *server = arg;
    server->closing = true;
    flush_all(server);
    for (struct connection *connection = TAILQ_FIRST(&server->clients), *next; connection;
         connection = next) {
        next = TAILQ_NEXT(connection, client_link);
        uv_read_stop(&connection->stream);
        uv_shutdown_t *request = connection->session.in_flight ? malloc(sizeof *request) : NULL;
        if (!request || uv_shutdown(request, &connection->stream, on_shut_down)) {
            free(request);
            close_connection(connection, false);
        }
    }
    flush_all(server); /* wills */
    uv_close((uv_handle_t *)&server->spin, NULL);
    if (!TAILQ_EMPTY(&server->clients))
        uv_timer_start(&server->rest, close_what_is_left, FLUSH_MS, 0);
    else
        close_what_is_left(&server->rest);
}

static char *path_of(int fd)
{
    struct td__address address;
    td__local_address(fd, &address);
    bool in_files = address.any.sa_family == AF_UNIX && address.local.sun_path[0];
    return in_files ? strdup(address.local.sun_path) : NULL;
}

td_status td__tcp_server_start(int fd, int shortcut, const struct td__secret *secret,
                               struct td__tcp_server **server_out)
{
    td_status status = td__fail_nomem("store server");
    struct td__tcp_server *server = calloc(1, sizeof *server);
    if (!server)
        goto close_sockets;
    server->path = path_of(fd);
    server->secret = *secret;
    server->empty = true;
    TAILQ_INIT(&server->clients);
    pthread_mutex_init(&server->lock, NULL);
    td__cond_init(&server->left);
    status = td__loop_start(&server->loop, "td-store");
    if (status)
        goto free_server;

    struct start start = {.server = server, .fd = fd, .shortcut = shortcut};
    status = td__loop_try(&server->loop, start_on_loop, &start);
    if (status) {
        struct td__error error;
        td__error_save(&error);
        td__tcp_server_stop(server, 0);
        return td__error_restore(&error);
    }
    *server_out = server;
    return TD_OK;

free_server:
    pthread_cond_destroy(&server->left);
    pthread_mutex_destroy(&server->lock);
    free(server->path);
    free(server);
close_sockets:
    close(fd);
    if (shortcut >= 0)
        close(shortcut);
    return status;
}

void td__tcp_server_stop(struct td__tcp_server *server, td__deadline deadline)
{
    td__loop_run(&server->loop, stop_accepting, server);
    pthread_mutex_lock(&server->lock);
    while (!server->empty && td__cond_wait(&server->left, &server->lock, deadline))
        ;
    pthread_mutex_unlock(&server->lock);
    td__loop_run(&server->loop, close_clients, server);
    td__loop_stop(&server->loop);
    td__tls_drain(server, td__deadline_in_ms(FLUSH_MS));
    td__engine_free(&server->engine);
    pthread_cond_destroy(&server->left);
    pthread_mutex_destroy(&server->lock);
    free(server->path);
    free(server);
}

void td__tcp_server_abandon(struct td__tcp_server *server)
{
    td__auth_listener_abandon(server->accepting.listener);
}
