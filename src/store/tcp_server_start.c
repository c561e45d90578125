/* Starting and stopping the store's server; see tcp_server.c. */
#include "base/fail.h"
#include "os/socket.h"
#include "store/tcp_server.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FLUSH_MS = 2000 };

struct start {
    struct td__tcp_server *server;
    int fd, shortcut;
};

static td_status start_on_loop(void *arg)
{
    struct start *start = arg;
    struct td__tcp_server *server = start->server;
    struct td__auth_listener_options options = {.secret = &server->secret,
                                                .purpose = "store",
                                                .fn = td__tcp_server_accept,
                                                .full = td__tcp_server_full,
                                                .arg = server};
    uv_timer_init(&server->loop.uv, &server->rest);
    server->rest.data = server;
    uv_timer_init(&server->loop.uv, &server->silence);
    server->silence.data = server;
    uv_timer_init(&server->loop.uv, &server->beat);
    server->beat.data = server;
    uv_idle_init(&server->loop.uv, &server->spin);
    server->spin.data = server;
    return td__loop_listen(&server->loop, start->fd, start->shortcut, &options, &server->accepting);
}

static void stop_accepting(void *arg)
{
    struct td__tcp_server *server = arg;
    if (server->accepting.listener)
        td__loop_unlisten(&server->accepting);
    if (server->second.listener)
        td__loop_unlisten(&server->second);
    if (server->path)
        unlink(server->path);
    pthread_mutex_lock(&server->lock);
    server->stopping = true;
    server->empty = TAILQ_EMPTY(&server->clients);
    pthread_mutex_unlock(&server->lock);
}

void td__tcp_server_close_rest(uv_timer_t *timer)
{
    struct td__tcp_server *server = timer->data;
    while (!TAILQ_EMPTY(&server->clients))
        td__connection_close(TAILQ_FIRST(&server->clients), false);
    td__tcp_server_flush(server);
    uv_close((uv_handle_t *)&server->rest, NULL);
    uv_close((uv_handle_t *)&server->beat, NULL);
}

/* Each client is closed once what was still to be sent to it is sent. */
static void close_clients(void *arg)
{
    struct td__tcp_server *server = arg;
    struct td__replica *replica = server->engine.replica;
    td__tcp_replica_unlink(server);
    server->closing = true;
    if (replica && replica->role == TD__REPLICA_PRIMARY)
        replica->role = TD__REPLICA_ENDED;
    td__tcp_server_flush(server);
    for (struct connection *connection = TAILQ_FIRST(&server->clients), *next; connection;
         connection = next) {
        next = TAILQ_NEXT(connection, client_link);
        connection->ends = true;
        if (STAILQ_EMPTY(&connection->writes))
            td__connection_close(connection, false);
        else
            td__connection_watch(connection);
    }
    td__tcp_server_flush(server); /* wills */
    uv_close((uv_handle_t *)&server->spin, NULL);
    uv_close((uv_handle_t *)&server->silence, NULL);
    if (!TAILQ_EMPTY(&server->clients))
        uv_timer_start(&server->rest, td__tcp_server_close_rest, FLUSH_MS, 0);
    else
        td__tcp_server_close_rest(&server->rest);
}

static char *path_of(int fd, int *port)
{
    struct td__address address;
    td__local_address(fd, &address);
    *port = td__address_port(&address);
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
    server->path = path_of(fd, &server->port);
    server->secret = *secret;
    server->empty = true;
    TAILQ_INIT(&server->clients);
    pthread_mutex_init(&server->lock, NULL);
    td__cond_init(&server->left);
    td__cond_init(&server->changes);
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
    pthread_cond_destroy(&server->changes);
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
    td__engine_free(&server->engine);
    pthread_cond_destroy(&server->left);
    pthread_cond_destroy(&server->changes);
    pthread_mutex_destroy(&server->lock);
    free(server->path);
    free(server);
}

void td__tcp_server_abandon(struct td__tcp_server *server)
{
    td__auth_listener_abandon(server->accepting.listener);
    if (server->second.listener)
        td__auth_listener_abandon(server->second.listener);
}
