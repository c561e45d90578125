/* The server of a TCP store as a standby, and as the next primary; see tcp_replica.h.
 *
 * The link of a standby to its primary is one connection, which the calling thread opens and proves, and the server's loop
 * has from then on:
 *
 *     primary -> socket -> in -> td__replica_follow()        ACK of the latest sequence -> out -> socket -> primary
 *
 * After a promotion the link stays: DEPOSED is sent on it, what still comes is read and thrown away, and the other side
 * closes it. Closing it here could reset the connection, and DEPOSED would be lost with what was not read. */
#include "store/tcp_replica.h"

#include "base/fail.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"
#include "store/tcp_server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    READ_AT_ONCE = 4 << 20,
    HEADER_ROOM = 64, /* by which a CHANGE is longer than the request in it */
    ACK_BACKLOG = 4096,
};

struct td__replica_link {
    uv_poll_t poll;
    struct td__tcp_server *server;
    int fd;
    int events;
    char address[TD__REPLICA_ADDRESS];
    struct td__buffer in, out;
    bool followed; /* a snapshot was whole */
    bool fenced;   /* what comes is thrown away */
    int64_t heard;
    bool late;
};

/* ---- What others see ------------------------------------------------------------------------- */

void td__tcp_replica_publish(struct td__tcp_server *server)
{
    const struct td__replica *replica = server->engine.replica;
    pthread_mutex_lock(&server->lock);
    server->state = (struct td__tcp_replica_state){
        .role = replica->role,
        .term = replica->term,
        .copy_term = replica->copy_term,
        .copy_version = replica->copy_version,
        .whole = replica->whole || replica->role == TD__REPLICA_PRIMARY,
        .primary_lost = server->primary_lost,
        .ended = server->ended,
        .number = replica->number,
        .members = replica->members,
    };
    server->published++;
    pthread_cond_broadcast(&server->changes);
    pthread_mutex_unlock(&server->lock);
    if (server->changed)
        server->changed(server->changed_arg);
}

void td__tcp_replica_state(struct td__tcp_server *server, struct td__tcp_replica_state *state)
{
    pthread_mutex_lock(&server->lock);
    *state = server->state;
    pthread_mutex_unlock(&server->lock);
}

/* ---- The link -------------------------------------------------------------------------------- */

static void on_link_ready(uv_poll_t *poll, int error, int events);

static void on_link_closed(uv_handle_t *handle)
{
    struct td__replica_link *link = handle->data;
    td__buffer_free(&link->in);
    td__buffer_free(&link->out);
    free(link);
}

/* Ends it; `why` is NULL where this side wants it. */
static void end_link(struct td__replica_link *link, const char *why)
{
    struct td__tcp_server *server = link->server;
    if (server->link == link)
        server->link = NULL;
    if (why && !link->fenced) {
        snprintf(server->link_text, sizeof server->link_text, "%s", why);
        server->primary_lost |= link->followed && server->engine.replica->whole && !server->ended;
        if (server->primary_lost && link->followed)
            td_log(TD_LOG_INFO, "store server: the primary at %s is lost: %s", link->address, why);
        td__tcp_replica_publish(server);
    }
    uv_close((uv_handle_t *)&link->poll, on_link_closed);
    td__sock_close(link->fd);
}

void td__tcp_replica_unlink(struct td__tcp_server *server)
{
    struct td__replica_link *link = server->link;
    if (!link)
        return;
    size_t start = td__wire_begin(&link->out, 0, TD__WIRE_BYE);
    td__wire_end(&link->out, start);
    if (!link->out.failed)
        td__sock_send(link->fd, link->out.data, link->out.size, MSG_NOSIGNAL | MSG_DONTWAIT);
    end_link(link, NULL);
}

static void watch_link(struct td__replica_link *link)
{
    int events = UV_READABLE | (link->out.size ? UV_WRITABLE : 0);
    if (events != link->events)
        uv_poll_start(&link->poll, events, on_link_ready);
    link->events = events;
}

/* False when the connection has ended. */
static bool send_out(struct td__replica_link *link)
{
    if (link->out.failed)
        return false;
    if (!link->out.size)
        return true;
    ssize_t sent = td__sock_send(link->fd, link->out.data, link->out.size,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    td__buffer_consume(&link->out, (size_t)sent);
    return true;
}

static void put_number(struct td__buffer *out, uint8_t code, uint64_t number)
{
    size_t start = td__wire_begin(out, 0, code);
    td__buffer_put_u64(out, number);
    td__wire_end(out, start);
}

/* A STATE instead of a copy: the other side is not the primary, or not any more, or does not want this server. */
static const char *refusal(struct td__replica_link *link, const uint8_t *body, size_t size)
{
    static const char *const why[] = {
        [TD__REPLICA_PRIMARY] = "it has a member of this number, or as many as it can have",
        [TD__REPLICA_STANDBY] = "it is a standby",
        [TD__REPLICA_DEPOSED] = "it was deposed",
        [TD__REPLICA_ENDED] = "the store was closed",
    };
    struct td__replica_report report;
    if (!td__replica_read_state(body, size, &report))
        return "it has sent something that is malformed";
    link->server->refused = true;
    if (report.role == TD__REPLICA_ENDED) {
        link->server->ended = true;
        link->server->engine.replica->role = TD__REPLICA_ENDED;
    }
    td__replica_see_term(&link->server->engine, report.term);
    return why[report.role];
}

/* All frames that are whole. NULL, or why the link must end. */
static const char *follow_frames(struct td__replica_link *link)
{
    struct td__engine *engine = &link->server->engine;
    size_t used = 0;
    while (link->in.size - used >= TD__WIRE_HEADER) {
        const uint8_t *frame = link->in.data + used;
        struct td__wire_header header = {.body_size = td__load_u32(frame), .code = frame[8]};
        if (header.body_size > TD__WIRE_MAX_BODY + HEADER_ROOM)
            return "it has sent something that is malformed";
        if (link->in.size - used - TD__WIRE_HEADER < header.body_size)
            break;
        const uint8_t *body = frame + TD__WIRE_HEADER;
        if (header.code == TD__REPLICA_STATE)
            return refusal(link, body, header.body_size);
        if (!td__replica_follow(engine, &header, body))
            return engine->replica->copy_term < engine->replica->term && link->followed
                       ? "there is a primary of a later term"
                       : "it has sent something that cannot be carried out here";
        link->followed |= header.code == TD__REPLICA_SNAPSHOT_END;
        used += TD__WIRE_HEADER + header.body_size;
    }
    td__buffer_consume(&link->in, used);
    return NULL;
}

/* Reads what is there, carries it out, and confirms it. NULL, or why the link must end. */
static const char *read_link(struct td__replica_link *link)
{
    struct td__tcp_server *server = link->server;
    const char *why = NULL;
    ssize_t got = 1;
    for (size_t total = 0; !why && got > 0 && total < READ_AT_ONCE; total += (size_t)got) {
        got = td__sock_recv(link->fd, server->read_buffer, sizeof server->read_buffer,
                            MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            break;
        if (got <= 0)
            why = got ? td__errno_text(errno) : "its connection has ended";
        if (got <= 0)
            break;
        link->heard = td__now_ns();
        if (link->fenced)
            continue;
        td__buffer_put(&link->in, server->read_buffer, (size_t)got);
        const char *wrong = link->in.failed ? "memory is short here" : follow_frames(link);
        why = wrong;
    }
    if (!why && link->followed && !link->fenced && link->out.size < ACK_BACKLOG)
        put_number(&link->out, TD__WIRE_ACK, server->engine.replica->sequence);
    return why;
}

static void on_link_ready(uv_poll_t *poll, int error, int events)
{
    struct td__replica_link *link = poll->data;
    struct td__tcp_server *server = link->server;
    const char *why = NULL;
    if (error)
        link->events = 0; /* libuv has stopped to watch */
    if (error || events & UV_READABLE)
        why = read_link(link);
    if (!why && !send_out(link))
        why = "it takes no ACK";
    bool counts = link->followed && server->engine.replica->whole && !link->fenced;
    if (server->primary_lost && !why && counts) { /* it was only silent, or this is another one */
        server->primary_lost = false;
        td__tcp_replica_publish(server);
    }
    if (why)
        end_link(link, why);
    else
        watch_link(link);
    td__tcp_server_flush(server);
}

/* At two looks in a row, as in store_replica.c: this process may have been stopped. */
static void look_at_link(struct td__tcp_server *server, int64_t now, int64_t limit_ns)
{
    struct td__replica_link *link = server->link;
    if (!link || link->fenced || server->primary_lost)
        return;
    bool late = now - link->heard > limit_ns;
    if (late && link->late && server->engine.replica->whole) {
        server->primary_lost = true;
        td_log(TD_LOG_INFO, "store server: the primary at %s has been silent for %.3g s",
               link->address, (double)(now - link->heard) / 1e9);
        td__tcp_replica_publish(server);
    }
    link->late = late;
}

static void on_beat(uv_timer_t *timer)
{
    struct td__tcp_server *server = timer->data;
    int64_t now = td__now_ns(), limit_ns = td__heartbeat_ms() * 1000000;
    td__replica_tick(&server->engine, now, limit_ns);
    look_at_link(server, now, limit_ns);
    td__tcp_server_flush(server);
}

void td__tcp_server_beat(struct td__tcp_server *server)
{
    if (server->beats || server->closing)
        return;
    uint64_t quarter = (uint64_t)td__heartbeat_ms() / 4;
    server->beats = !uv_timer_start(&server->beat, on_beat, quarter, quarter);
}

/* ---- Attaching ------------------------------------------------------------------------------- */

struct adoption {
    struct td__tcp_server *server;
    struct td__replica_link *link;
};

static td_status give_up_leading(void *arg)
{
    struct td__tcp_server *server = arg;
    TD_TRY(td__replica_begin(&server->engine));
    struct td__replica *replica = server->engine.replica;
    if (replica->role == TD__REPLICA_PRIMARY)
        return td_fail(TD_ERR_STATE,
                       "store server: it is the primary of term %llu; only one that is deposed can "
                       "become a standby",
                       (unsigned long long)replica->term);
    td__tcp_replica_unlink(server);
    replica->role = TD__REPLICA_STANDBY;
    td__tcp_replica_publish(server);
    return TD_OK;
}

static td_status adopt_link(void *arg)
{
    struct adoption *adoption = arg;
    struct td__tcp_server *server = adoption->server;
    struct td__replica_link *link = adoption->link;
    struct td__replica *replica = server->engine.replica;
    if (replica->role == TD__REPLICA_PRIMARY)
        return td_fail(TD_ERR_STATE, "store server: it was promoted meanwhile");
    int error = uv_poll_init(&server->loop.uv, &link->poll, link->fd);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "store server: %s", td__errno_text(-error));
    link->poll.data = link;
    link->heard = td__now_ns();
    server->link = link;
    server->ended = server->refused = false;
    server->link_text[0] = '\0';
    size_t start = td__wire_begin(&link->out, 0, TD__WIRE_ATTACH);
    td__buffer_put_u64(&link->out, replica->term);
    td__buffer_put_u32(&link->out, replica->number);
    td__buffer_put_string(&link->out, replica->address, strlen(replica->address));
    td__wire_end(&link->out, start);
    send_out(link);
    watch_link(link);
    td__tcp_server_beat(server);
    td__tcp_replica_publish(server);
    return TD_OK;
}

struct outcome {
    struct td__tcp_server *server;
    struct td__replica_link *link;
    const char *address;
    bool whole;
};

static td_status look_at_attaching(void *arg)
{
    struct outcome *outcome = arg;
    struct td__tcp_server *server = outcome->server;
    if (server->link == outcome->link) {
        outcome->whole = outcome->link->followed && server->engine.replica->whole;
        return TD_OK;
    }
    return td_fail(server->refused ? TD_ERR_STATE : TD_ERR_PEER,
                   "store server: cannot be a standby of the one at %s: %s", outcome->address,
                   server->link_text);
}

static void stop_attaching(void *arg)
{
    struct outcome *outcome = arg;
    if (outcome->server->link == outcome->link)
        td__tcp_replica_unlink(outcome->server);
}

static td_status await_copy(struct outcome *outcome, td__deadline deadline)
{
    struct td__tcp_server *server = outcome->server;
    for (;;) {
        pthread_mutex_lock(&server->lock);
        uint64_t before = server->published;
        pthread_mutex_unlock(&server->lock);
        TD_TRY(td__loop_try(&server->loop, look_at_attaching, outcome));
        if (outcome->whole)
            return TD_OK;
        if (td__deadline_passed(deadline)) {
            td__loop_run(&server->loop, stop_attaching, outcome);
            return td_fail(TD_ERR_TIMEOUT,
                           "store server: the copy of the one at %s was not whole in time",
                           outcome->address);
        }
        pthread_mutex_lock(&server->lock);
        while (before == server->published &&
               td__cond_wait(&server->changes, &server->lock, deadline))
            ;
        pthread_mutex_unlock(&server->lock);
    }
}

td_status td__tcp_replica_attach(struct td__tcp_server *server, const char *address,
                                 const char *secret_text, td__deadline deadline)
{
    struct td__secret secret;
    char host[TD__REPLICA_ADDRESS];
    int port = 0, fd;
    if (strlen(address) >= TD__REPLICA_ADDRESS || !td__replica_split_address(address, host, &port))
        return td_fail(TD_ERR_INVALID, "store server: \"%.80s\" is not an address", address);
    TD_TRY(td__secret_load(secret_text, &secret));
    TD_TRY(td__loop_try(&server->loop, give_up_leading, server));
    TD_TRY(td__connect_trusted(host, port, "store", NULL, &secret, deadline, &fd));
    struct td__replica_link *link = calloc(1, sizeof *link);
    td_status status = link ? TD_OK : td__fail_nomem("store server");
    if (link) {
        link->server = server;
        link->fd = fd;
        snprintf(link->address, sizeof link->address, "%s", address);
        struct adoption adoption = {server, link};
        status = td__loop_try(&server->loop, adopt_link, &adoption);
    }
    if (status) {
        td__sock_close(fd);
        free(link);
        return status;
    }
    struct outcome outcome = {.server = server, .link = link, .address = address};
    return await_copy(&outcome, deadline);
}

/* ---- Promotion ------------------------------------------------------------------------------- */

struct promotion {
    struct td__tcp_server *server;
    uint64_t term;
};

static td_status promote(void *arg)
{
    struct promotion *promotion = arg;
    struct td__tcp_server *server = promotion->server;
    struct td__replica_link *link = server->link;
    TD_TRY(td__replica_promote(&server->engine, promotion->term));
    server->confirmed = 0;
    server->primary_lost = false;
    server->told_role = TD__REPLICA_PRIMARY;
    if (link) {
        link->fenced = true;
        td__buffer_free(&link->in);
        put_number(&link->out, TD__WIRE_DEPOSED, promotion->term);
        send_out(link);
        watch_link(link);
    }
    td__tcp_server_beat(server);
    td__tcp_server_flush(server);
    return TD_OK;
}

td_status td__tcp_replica_promote(struct td__tcp_server *server, uint64_t term)
{
    struct promotion promotion = {server, term};
    return td__loop_try(&server->loop, promote, &promotion);
}

static td_status depose(void *arg)
{
    struct promotion *promotion = arg;
    TD_TRY(td__replica_begin(&promotion->server->engine));
    td__replica_see_term(&promotion->server->engine, promotion->term);
    td__tcp_server_flush(promotion->server);
    return TD_OK;
}

td_status td__tcp_replica_depose(struct td__tcp_server *server, uint64_t term)
{
    struct promotion promotion = {server, term};
    return td__loop_try(&server->loop, depose, &promotion);
}

struct keeping {
    struct td__tcp_server *server;
    const uint32_t *numbers;
    int count;
};

static void keep(void *arg)
{
    const struct keeping *keeping = arg;
    if (!keeping->server->engine.replica)
        return;
    td__replica_keep(&keeping->server->engine, keeping->numbers, keeping->count);
    td__tcp_server_flush(keeping->server);
}

void td__tcp_replica_keep(struct td__tcp_server *server, const uint32_t *numbers, int count)
{
    struct keeping keeping = {server, numbers, count};
    td__loop_run(&server->loop, keep, &keeping);
}

/* ---- A second address ------------------------------------------------------------------------- */

struct listening {
    struct td__tcp_server *server;
    const struct td__secret *secret;
    int fd;
};

static td_status listen_too(void *arg)
{
    const struct listening *listening = arg;
    struct td__tcp_server *server = listening->server;
    if (server->second.listener) {
        close(listening->fd);
        return td_fail(TD_ERR_STATE, "store server: it has a second address already");
    }
    server->second_secret = *listening->secret;
    struct td__auth_listener_options options = {.secret = &server->second_secret,
                                                .purpose = "store",
                                                .fn = td__tcp_server_accept,
                                                .full = td__tcp_server_full,
                                                .arg = server};
    int shortcut = td__listen_shortcut(listening->fd, "store");
    return td__loop_listen(&server->loop, listening->fd, shortcut, &options, &server->second);
}

td_status td__tcp_replica_listen(struct td__tcp_server *server, const char *host, int port,
                                 const char *secret_text)
{
    struct td__secret secret;
    struct listening listening = {.server = server, .secret = &secret};
    TD_TRY(td__secret_load(secret_text, &secret));
    TD_TRY(td__listen_trusted(host, port, "store", &secret, td__deadline_in_ms(td__heartbeat_ms()),
                              &listening.fd, &port));
    return td__loop_try(&server->loop, listen_too, &listening);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

struct naming {
    struct td__tcp_server *server;
    const struct td__tcp_replica_options *options;
    bool standby;
};

static td_status name_server(void *arg)
{
    const struct naming *naming = arg;
    const struct td__tcp_replica_options *options = naming->options;
    struct td__tcp_server *server = naming->server;
    TD_TRY(td__replica_begin(&server->engine));
    struct td__replica *replica = server->engine.replica;
    if (!LIST_EMPTY(&replica->standbys))
        return td_fail(TD_ERR_STATE, "store server: it has standbys already");
    replica->number = options->number;
    snprintf(replica->address, sizeof replica->address, "%s",
             options->address ? options->address : "");
    server->changed = options->changed;
    server->changed_arg = options->arg;
    replica->members.at[0].number = replica->number;
    memcpy(replica->members.at[0].address, replica->address, sizeof replica->address);
    if (naming->standby) {
        replica->role = server->told_role = TD__REPLICA_STANDBY;
        replica->term = replica->copy_term = replica->copy_version = 0;
    }
    td__tcp_replica_publish(server);
    return TD_OK;
}

static td_status check_name(const char *address)
{
    char host[TD__REPLICA_ADDRESS];
    int port = 0;
    if (address && (strlen(address) >= TD__REPLICA_ADDRESS ||
                    !td__replica_split_address(address, host, &port)))
        return td_fail(TD_ERR_INVALID, "store server: \"%.80s\" is not an address", address);
    return TD_OK;
}

td_status td__tcp_replica_open(const struct td__tcp_replica_options *given,
                               struct td__tcp_server **out)
{
    struct td__tcp_replica_options options = *given;
    struct td__tcp_server *server;
    struct td__secret secret;
    char address[TD__REPLICA_ADDRESS];
    int fd, port;
    TD_TRY(check_name(options.address));
    TD_TRY(td__secret_load(options.secret, &secret));
    TD_TRY(td__heartbeat_read());
    TD_TRY(td__listen_trusted(options.host, options.port, "store", &secret,
                              td__deadline_in_ms(td__heartbeat_ms()), &fd, &port));
    int shortcut = td__listen_shortcut(fd, "store");
    TD_TRY(td__tcp_server_start(fd, shortcut, &secret, &server));
    if (!options.address) {
        td__endpoint_text(options.host, port, address, sizeof address);
        options.address = address;
    }
    struct naming naming = {server, &options, true};
    td_status status = td__loop_try(&server->loop, name_server, &naming);
    if (status) {
        struct td__error error;
        td__error_save(&error);
        td__tcp_server_stop(server, 0);
        return td__error_restore(&error);
    }
    *out = server;
    return TD_OK;
}

td_status td__tcp_replica_name(struct td__tcp_server *server, uint32_t number, const char *address,
                               void (*changed)(void *arg), void *arg)
{
    struct td__tcp_replica_options options = {
        .number = number, .address = address, .changed = changed, .arg = arg};
    struct naming naming = {server, &options, false};
    TD_TRY(check_name(address));
    return td__loop_try(&server->loop, name_server, &naming);
}

int td__tcp_replica_port(const struct td__tcp_server *server)
{
    return server->port;
}

void td__tcp_replica_close(struct td__tcp_server *server, td__deadline deadline)
{
    td__tcp_server_stop(server, deadline);
}
