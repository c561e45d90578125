/* TANDEM_TLS: what it may be, what it needs, and what happens where two sides disagree about it. Servers
 * here listen on all addresses, and clients take one to which no unix socket belongs. */
#include "endpoint_world.h"
#include "raw_client.h"
#include "runner.h"

#include "base/clock.h"
#include "os/socket.h"
#include "os/tls.h"
#include "os/trust.h"

#include <tandem/store.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MS ((int64_t)1000000)

static void set_tls(const char *value)
{
    setenv("TANDEM_TLS", value, 1);
}

static td_status open_store(const char *host, int port, const char *secret, td_store **store)
{
    td_tcp_store_options options = {
        .host_server = port == 0, .secret = secret, .timeout_ms = 60000 * td_test_slowness()};
    return td_tcp_store_open(host, port, &options, store);
}

TEST(tls_is_0_or_1)
{
    static const char *const wrong[] = {"yes", "2", "true", "-1", " 1"};
    struct td__secret secret;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        td_store *store;
        set_tls(wrong[i]);
        CHECK_FAILS(td__secret_load("x", &secret), TD_ERR_INVALID, "TANDEM_TLS is \"");
        CHECK_FAILS(open_store("127.0.0.1", 0, "x", &store), TD_ERR_INVALID, wrong[i]);
    }
    static const char *const right[] = {"", "0", "1"};
    for (int i = 0; i < 3; i++) {
        set_tls(right[i]);
        CHECK_OK(td__secret_load("x", &secret));
        CHECK_EQ(secret.tls, i == 2);
    }
    unsetenv("TANDEM_TLS");
    CHECK_OK(td__secret_load("x", &secret));
    CHECK(!secret.tls);
}

TEST(tls_needs_a_secret)
{
    static const char *const hosts[] = {"127.0.0.1", "localhost", "0.0.0.0"};
    td_store *store;
    set_tls("1");
    setenv("TANDEM_INSECURE", "1", 1);
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        CHECK_FAILS(open_store(hosts[i], 0, "", &store), TD_ERR_AUTH, "TANDEM_TLS=1 needs");
        CHECK_FAILS(open_store(hosts[i], 1, "", &store), TD_ERR_AUTH, "TANDEM_TLS=1 needs");
    }
    /* A unix socket never leaves the host. */
    char host[600];
    snprintf(host, sizeof host, "unix:%s/socket", td_test_temp_dir());
    CHECK_OK(open_store(host, 0, "", &store));
    CHECK_OK(td_store_close(store));
}

/* Both ways: the client's error names the variable, at once, and the server goes on. */
TEST(both_sides_have_tls_or_none_has)
{
    for (int server_tls = 0; server_tls < 2; server_tls++) {
        td_store *server, *client;
        set_tls(server_tls ? "1" : "0");
        CHECK_OK(open_store("0.0.0.0", 0, "s", &server));
        int port = td_tcp_store_port(server);
        set_tls(server_tls ? "0" : "1");
        int64_t start = td__now_ns();
        CHECK_FAILS(open_store("127.0.0.2", port, "s", &client), TD_ERR_AUTH,
                    server_tls ? "TANDEM_TLS is not 1 here, but 1 there"
                               : "TANDEM_TLS is 1 here, but not 1 there");
        CHECK_PROMPT(start);
        /* A wrong secret is another matter, whatever the settings. */
        CHECK_FAILS(open_store("127.0.0.2", port, "t", &client), TD_ERR_AUTH, "TANDEM_SECRET");

        set_tls(server_tls ? "1" : "0");
        CHECK_OK(open_store("127.0.0.2", port, "s", &client));
        CHECK_OK(td_store_set(client, "key", "value", 5));
        CHECK_OK(td_store_close(client));
        CHECK_OK(td_store_close(server));
    }
}

/* The words of the server in a job that disagrees. */
static void disagree(void *arg)
{
    (void)arg;
    td_store *server, *client;
    set_tls("1");
    CHECK_OK(open_store("0.0.0.0", 0, "s", &server));
    set_tls("0");
    for (int i = 0; i < 3; i++)
        CHECK_FAILS(open_store("127.0.0.2", td_tcp_store_port(server), "s", &client), TD_ERR_AUTH,
                    "TLS");
    CHECK_OK(td_store_close(server));
}

TEST(the_server_warns_once_about_different_settings)
{
    struct td_test_child child = td_test_fork(disagree, NULL);
    CHECK_EQ(child.status, 0);
    char *first = strstr(child.output, "TANDEM_TLS is 1");
    CHECK(first);
    CHECK(!strstr(first + 1, "TANDEM_TLS is 1"));
    free(child.output);
}

/* Everything after the proof is encrypted: a client that sends plain bytes is not understood. */
TEST(a_server_with_tls_understands_nothing_else)
{
    td_store *server;
    set_tls("1");
    CHECK_OK(open_store("0.0.0.0", 0, RAW_SECRET, &server));
    struct td__auth auth = {.purpose = "store", .tls = true};
    uint8_t hello[TD__HELLO_SIZE], challenge[TD__CHALLENGE_SIZE], proof[TD__PROOF_SIZE];
    CHECK_OK(td__secret_load(RAW_SECRET, &auth.secret));
    CHECK_OK(td__auth_hello(&auth, hello));
    int fd = raw_connect(td_tcp_store_port(server));
    raw_send(fd, hello, sizeof hello);
    raw_receive(fd, challenge, sizeof challenge);
    CHECK(td__auth_check_challenge(&auth, challenge));
    td__auth_proof(&auth, proof);
    raw_send(fd, proof, sizeof proof);
    struct td__buffer request = raw_begin(1, TD__WIRE_SYNC);
    raw_finish(fd, &request);
    CHECK(raw_drain(fd) < 16); /* an alert at most */
    close(fd);
    CHECK_OK(td_store_close(server));
}

/* The addresses that a store reports are those of the connection, not of the plain end. */
TEST(links_over_tls)
{
    struct td__endpoint *e[2];
    struct td__address here, there;
    int a, b;
    char got[3];
    set_tls("1");
    setenv("TANDEM_HOST_ID", "one", 1);
    setenv("TANDEM_SECRET", ENDPOINT_SECRET, 1);
    CHECK_OK(td__endpoint_open(0, 2, "127.0.0.1", false, &e[0]));
    CHECK_OK(td__endpoint_open(1, 2, "127.0.0.1", false, &e[1]));
    meet_all(e, 2);
    CHECK_OK(td__endpoint_connect(e[1], 0, 50, TD__CHANNEL_COLLECTIVE, soon(), &a));
    CHECK_OK(td__endpoint_accept(e[0], 1, 50, TD__CHANNEL_COLLECTIVE, soon(), &b));
    td__remote_address(a, &here);
    td__local_address(b, &there);
    CHECK_EQ(here.any.sa_family != AF_UNIX, 1);
    CHECK_EQ(td__address_port(&here), endpoint_port(e[0]));
    CHECK_EQ(td__address_port(&there), endpoint_port(e[0]));
    CHECK_EQ(td__send_all(b, "abc", 3, soon()), 0);
    CHECK_EQ(td__recv_all(a, got, 3, soon()), 0);
    CHECK_MEM(got, "abc", 3);
    close(a);
    close(b);
    pair_close(e);
}
