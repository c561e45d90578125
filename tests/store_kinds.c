/* See store_kinds.h. */
#include "store_kinds.h"

#include "runner.h"
#include "store_conformance.h"

#include "store/tcp_replica.h"

#include <stdio.h>
#include <string.h>

td_store *open_hash(void)
{
    td_store *store = NULL;
    CHECK_OK(td_hash_store_open(&store));
    return store;
}

const char *file_path(void)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/store", td_test_temp_dir());
    return path;
}

td_store *open_file(void)
{
    td_store *store = NULL;
    CHECK_OK(td_file_store_open(file_path(), &store));
    return store;
}

int tcp_port;

td_store *open_server_at(const char *host)
{
    td_store *store = NULL;
    td_tcp_store_options options = {.host_server = true, .secret = "conformance"};
    CHECK_OK(td_tcp_store_open(host, 0, &options, &store));
    tcp_port = td_tcp_store_port(store);
    return store;
}

td_store *open_client_at(const char *host)
{
    td_store *store = NULL;
    td_tcp_store_options options = {.secret = "conformance"};
    CHECK_OK(td_tcp_store_open(host, tcp_port, &options, &store));
    return store;
}

td_store *open_tcp(void)
{
    return open_server_at("127.0.0.1");
}

td_store *open_tcp_again(void)
{
    return open_client_at("127.0.0.1");
}

static struct td__tcp_server *standby;

static void close_standby(void)
{
    td__tcp_replica_close(standby, 0);
}

td_store *open_replicated(void)
{
    td_store *store = open_tcp();
    char address[32];
    struct td__tcp_replica_options options = {
        .host = "127.0.0.1", .secret = "conformance", .number = 1};
    snprintf(address, sizeof address, "127.0.0.1:%d", tcp_port);
    CHECK_OK(td__tcp_replica_open(&options, &standby));
    atexit(close_standby);
    CHECK_OK(td__tcp_replica_attach(standby, address, "conformance", td__deadline_in_ms(20000)));
    return store;
}

td_store *open_unix(void)
{
    char host[600];
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    return open_server_at(host);
}

td_store *open_unix_again(void)
{
    char host[600];
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    return open_client_at(host);
}

/* Under addresses to which no unix socket belongs: on the way over TCP, which is encrypted. */
td_store *open_tls(void)
{
    setenv("TANDEM_TLS", "1", 1);
    return open_server_at("0.0.0.0");
}

td_store *open_tls_again(void)
{
    return open_client_at("127.0.0.2");
}

td_store *open_view_of(td_store *base)
{
    td_store *store = NULL;
    CHECK_OK(td_prefix_store_open("pre", base, &store));
    CHECK_OK(td_store_close(base));
    return store;
}

td_store *open_prefix_hash(void)
{
    td_store *base = open_hash();
    store_set_text(base, "outside", "is not seen");
    return open_view_of(base);
}

td_store *open_prefix_tcp(void)
{
    return open_view_of(open_tcp());
}

td_store *open_prefix_tcp_again(void)
{
    return open_view_of(open_tcp_again());
}

td_store *open_of_ranks(const char *kind)
{
    td_store *store = NULL;
    if (!strcmp(kind, "file")) {
        store = open_file();
        td_test_barrier(); /* else one may have closed it, and removed the file, before another opened it */
    } else {
        CHECK_OK(td_tcp_store_open("127.0.0.1", atoi(getenv("MASTER_PORT")), NULL, &store));
    }
    if (!strcmp(kind, "prefix"))
        store = open_view_of(store);
    return store;
}

void count_in(td_store *store, int round)
{
    char key[64];
    int64_t arrived = 0;
    snprintf(key, sizeof key, "barrier %d", round);
    CHECK_OK(td_store_add(store, key, 1, &arrived));
    CHECK(arrived >= 1 && arrived <= td_test_size());
    strcat(key, " is complete");
    if (arrived == td_test_size())
        store_set_text(store, key, "yes");
    store_expect_text(store, key, "yes");
}
