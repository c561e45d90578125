/* The TCP store: each slot is a request to the server, which runs in this process where asked for.
 * The connection is tcp_client.c's, the protocol store_wire.h's. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "os/socket.h"
#include "os/trust.h"
#include "store/store_engine.h"
#include "store/store_ops.h"
#include "store/tcp_client.h"
#include "store/tcp_replica.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct tcp_store {
    td_store head;
    int port;
    struct td__tcp_client client;
    struct td__tcp_server *server; /* where it runs in this process */
    int64_t linger_ms;
};

static struct td__tcp_client *client_of(td_store *store)
{
    return &((struct tcp_store *)store)->client;
}

static td_status malformed(struct td__tcp_client *client)
{
    char where[TD__REPLICA_ADDRESS];
    td__tcp_client_where(client, where);
    return td_fail(TD_ERR_PEER, "tcp store at %s: the server's answer is malformed", where);
}

/* Asks for one number: an i64, or a u8 when `byte` is true. */
static td_status ask_number(struct td__tcp_client *client, struct td__buffer *frame,
                            td__deadline deadline, bool byte, int64_t *number)
{
    struct td__buffer body = {0};
    TD_TRY(td__tcp_client_ask(client, frame, deadline, NULL, &body));
    struct td__reader reader = td__reader_of(body.data, body.size);
    int64_t value = byte ? td__reader_u8(&reader) : (int64_t)td__reader_u64(&reader);
    bool whole = td__reader_done(&reader);
    td__buffer_free(&body);
    if (!whole)
        return malformed(client);
    *number = value;
    return TD_OK;
}

static td_status take_values(struct td__tcp_client *client, const struct td__buffer *body,
                             size_t count, td_bytes *values)
{
    struct td__reader reader = td__reader_of(body->data, body->size);
    td_status status = TD_OK;
    size_t taken = 0;
    while (!status && taken < count && !reader.failed) {
        struct td__span value = td__reader_string(&reader, TD_STORE_MAX_VALUE);
        status = td_bytes_copy(value.data, value.size, &values[taken]);
        taken += !status;
    }
    if (!status && !td__reader_done(&reader))
        status = malformed(client);
    while (status && taken)
        td_bytes_free(&values[--taken]);
    return status;
}

/* ---- The slots ------------------------------------------------------------------------------- */

static void put_key(struct td__buffer *frame, struct td__span key)
{
    td__buffer_put_string(frame, key.data, key.size);
}

static void put_keys(struct td__buffer *frame, const struct td__span *keys, size_t count)
{
    td__buffer_put_u32(frame, (uint32_t)count);
    for (size_t i = 0; i < count; i++)
        put_key(frame, keys[i]);
}

static td_status tcp_set(td_store *base, const struct td__span *keys, const struct td__span *values,
                         size_t count, td__deadline deadline)
{
    struct td__buffer frame = td__tcp_frame(TD__WIRE_SET);
    td__buffer_put_u32(&frame, (uint32_t)count);
    for (size_t i = 0; i < count; i++) {
        put_key(&frame, keys[i]);
        put_key(&frame, values[i]);
    }
    return td__tcp_client_tell(client_of(base), &frame, *keys, deadline);
}

static td_status tcp_append(td_store *base, struct td__span key, struct td__span value,
                            td__deadline deadline)
{
    struct td__buffer frame = td__tcp_frame(TD__WIRE_APPEND);
    put_key(&frame, key);
    put_key(&frame, value);
    return td__tcp_client_tell(client_of(base), &frame, key, deadline);
}

static td_status tcp_get(td_store *base, const struct td__span *keys, size_t count,
                         td__deadline deadline, td_bytes *values)
{
    struct td__tcp_client *client = client_of(base);
    struct td__buffer frame = td__tcp_frame(values ? TD__WIRE_GET : TD__WIRE_WAIT), body = {0};
    put_keys(&frame, keys, count);
    TD_TRY(td__tcp_client_ask(client, &frame, td__store_answer_deadline(base, deadline), &deadline,
                              &body));
    td_status status = take_values(client, &body, values ? count : 0, values);
    td__buffer_free(&body);
    return status;
}

static td_status tcp_check(td_store *base, const struct td__span *keys, size_t count,
                           td__deadline deadline, bool *all_exist)
{
    struct td__buffer frame = td__tcp_frame(TD__WIRE_CHECK);
    int64_t answer = 0;
    put_keys(&frame, keys, count);
    TD_TRY(ask_number(client_of(base), &frame, deadline, true, &answer));
    *all_exist = answer;
    return TD_OK;
}

static td_status tcp_add(td_store *base, struct td__span key, int64_t amount, td__deadline deadline,
                         int64_t *result)
{
    struct td__buffer frame = td__tcp_frame(TD__WIRE_ADD);
    put_key(&frame, key);
    td__buffer_put_u64(&frame, (uint64_t)amount);
    return ask_number(client_of(base), &frame, deadline, false, result);
}

static td_status tcp_compare_set(td_store *base, struct td__span key, struct td__span expected,
                                 struct td__span desired, td__deadline deadline, td_bytes *value)
{
    struct td__tcp_client *client = client_of(base);
    struct td__buffer frame = td__tcp_frame(TD__WIRE_COMPARE_SET), body = {0};
    put_key(&frame, key);
    put_key(&frame, expected);
    put_key(&frame, desired);
    TD_TRY(td__tcp_client_ask(client, &frame, deadline, NULL, &body));
    td_status status = take_values(client, &body, 1, value);
    td__buffer_free(&body);
    return status;
}

static td_status tcp_delete(td_store *base, struct td__span key, td__deadline deadline,
                            bool *deleted)
{
    struct td__buffer frame = td__tcp_frame(TD__WIRE_DELETE);
    int64_t answer = 0;
    put_key(&frame, key);
    TD_TRY(ask_number(client_of(base), &frame, deadline, true, &answer));
    *deleted = answer;
    return TD_OK;
}

static td_status tcp_num_keys(td_store *base, struct td__span prefix, td__deadline deadline,
                              int64_t *count)
{
    struct td__buffer frame = td__tcp_frame(TD__WIRE_NUM_KEYS);
    put_key(&frame, prefix);
    return ask_number(client_of(base), &frame, deadline, false, count);
}

/* ---- Opening and closing --------------------------------------------------------------------- */

static td_status tcp_close(td_store *base)
{
    struct tcp_store *store = (struct tcp_store *)base;
    bool inherited = store->client.fork_generation != td__fork_generation();
    td_status status = td__tcp_client_close(&store->client,
                                            td__deadline_in_ms(td_store_timeout(base)));
    if (store->server && inherited)
        td__tcp_server_abandon(store->server);
    else if (store->server)
        td__tcp_server_stop(store->server, td__deadline_in_ms(store->linger_ms));
    free(store);
    return status;
}

static void tcp_address(td_store *store, char *text, size_t room)
{
    struct td__tcp_client *client = client_of(store);
    struct td__address own;
    pthread_mutex_lock(&client->lock);
    td__local_address(client->fd, &own);
    pthread_mutex_unlock(&client->lock);
    td__address_host(&own, text, room);
    if (!*text)
        snprintf(text, room, "127.0.0.1");
}

static const struct td__store_ops tcp_store_ops = {
    .kind = "tcp",
    .set = tcp_set,
    .append = tcp_append,
    .get = tcp_get,
    .check = tcp_check,
    .add = tcp_add,
    .compare_set = tcp_compare_set,
    .delete_key = tcp_delete,
    .num_keys = tcp_num_keys,
    .address = tcp_address,
    .close = tcp_close,
};

static td_status check_arguments(const char *host, int port, const td_tcp_store_options *options,
                                 td_store **out)
{
    if (!host || !out)
        return td_fail(TD_ERR_INVALID, "td_tcp_store_open: the %s is NULL",
                       host ? "output" : "host");
    bool local = !strncmp(host, "unix:", 5);
    bool any_port = local || options->host_server;
    if (port < 0 || port > 65535 || (port == 0 && !any_port))
        return td_fail(TD_ERR_INVALID, "tcp store at %s: port %d is outside %d to 65535", host,
                       port, !any_port);
    TD_TRY(td__check_kept_timeout("td_tcp_store_open", "timeout_ms", options->timeout_ms));
    TD_TRY(td__check_kept_timeout("td_tcp_store_open", "linger_ms", options->linger_ms));
    return td__check_reserved("td_tcp_store_open", options->reserved);
}

static td_status start_server(struct tcp_store *store, const char *host, struct td__secret *secret,
                              td__deadline deadline)
{
    int listener;
    TD_TRY(
        td__listen_trusted(host, store->port, "store", secret, deadline, &listener, &store->port));
    int shortcut = td__listen_shortcut(listener, "store");
    return td__tcp_server_start(listener, shortcut, secret, &store->server);
}

/* The server's first client is in its own process: where there are no descriptors for both ends, it would wait
 * for itself. */
static td_status check_room(const char *host)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
        return td_fail(TD_ERR_SYSTEM, "tcp store at %s: cannot connect to its server: %s", host,
                       td__errno_text(errno));
    close(ends[0]);
    close(ends[1]);
    return TD_OK;
}

static td_status create(const td_tcp_store_options *options, const struct td__secret *secret,
                        struct tcp_store **out)
{
    struct tcp_store *store = calloc(1, sizeof *store);
    if (!store)
        return td__fail_nomem("tcp store");
    td__store_init(&store->head, &tcp_store_ops, options->timeout_ms);
    store->linger_ms = options->linger_ms;
    td_status status = td__tcp_client_init(&store->client, secret);
    if (status)
        free(store);
    else
        *out = store;
    return status;
}

/* Frees one that is not open; keeps the last error. */
static void discard(struct tcp_store *store)
{
    struct td__error error;
    td__error_save(&error);
    td__tcp_client_close(&store->client, 0);
    if (store->server)
        td__tcp_server_stop(store->server, 0);
    free(store);
    td__error_restore(&error);
}

td_status td_tcp_store_open(const char *host, int port, const td_tcp_store_options *options,
                            td_store **out)
{
    static const td_tcp_store_options defaults = {0};
    struct td__secret secret;
    struct tcp_store *store = NULL;
    if (!options)
        options = &defaults;
    TD_TRY(check_arguments(host, port, options, out));
    TD_TRY(td__secret_load(options->secret, &secret));
    TD_TRY(td__heartbeat_read());
    TD_TRY(create(options, &secret, &store));
    store->port = port;

    int fd;
    td__deadline deadline = td__deadline_in_ms(td_store_timeout(&store->head));
    td_status status = options->host_server ? start_server(store, host, &secret, deadline) : TD_OK;
    if (!status && options->host_server)
        status = check_room(host);
    if (!status)
        status = td__connect_trusted(host, store->port, "store", NULL, &secret, deadline, &fd);
    if (status) {
        discard(store);
        return status;
    }
    td__tcp_client_start(&store->client, fd, host, store->port);
    *out = &store->head;
    return TD_OK;
}

td_status td__tcp_store_open_any(const char *const *addresses, int count,
                                 const struct td_tcp_store_options *options, td_store **out)
{
    static const td_tcp_store_options defaults = {0};
    struct td__secret secret;
    struct tcp_store *store = NULL;
    char host[TD__REPLICA_ADDRESS];
    if (!options)
        options = &defaults;
    if (count < 1 || count > TD__REPLICA_MOST)
        return td_fail(TD_ERR_INVALID, "tcp store: %d addresses; there must be 1 to %d", count,
                       TD__REPLICA_MOST);
    TD_TRY(td__secret_load(options->secret, &secret));
    TD_TRY(td__heartbeat_read());
    TD_TRY(create(options, &secret, &store));
    struct td__replica_list *list = &store->client.at.members;
    td_status status = TD_OK;
    for (int i = 0; i < count && !status; i++) {
        if (!td__replica_split_address(addresses[i], host, &store->port))
            status = td_fail(TD_ERR_INVALID, "tcp store: \"%.80s\" is not an address",
                             addresses[i]);
        list->at[i].number = (uint32_t)i;
        snprintf(list->at[i].address, sizeof list->at[i].address, "%s", addresses[i]);
        list->count = i + 1;
    }
    if (!status)
        status = td__tcp_client_find(&store->client,
                                     td__deadline_in_ms(td_store_timeout(&store->head)));
    if (status) {
        discard(store);
        return status;
    }
    td__replica_split_address(store->client.where, host, &store->port);
    *out = &store->head;
    return TD_OK;
}

struct td__tcp_server *td__tcp_store_server(td_store *base)
{
    return base->ops == &tcp_store_ops ? ((struct tcp_store *)base)->server : NULL;
}

int td_tcp_store_port(const td_store *base)
{
    if (!base || base->ops != &tcp_store_ops)
        return -1;
    return ((const struct tcp_store *)base)->port;
}

td_status td__tcp_store_set_will(td_store *base, const char *key, const void *value, size_t size)
{
    if (base->ops != &tcp_store_ops)
        return td_fail(TD_ERR_UNSUPPORTED, "a %s store carries out no will", base->ops->kind);
    struct td__buffer frame = td__tcp_frame(TD__WIRE_WILL);
    struct td__span k = {key, strlen(key)};
    put_key(&frame, k);
    td__buffer_put_string(&frame, value, size);
    return td__tcp_client_tell(client_of(base), &frame, k,
                               td__deadline_in_ms(td_store_timeout(base)));
}

void td__tcp_store_set_linger(td_store *base, int64_t linger_ms)
{
    if (base->ops == &tcp_store_ops)
        ((struct tcp_store *)base)->linger_ms = linger_ms;
}
