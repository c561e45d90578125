/* A store with standbys: its servers die, stop, come back and come late. */
#include "forks.h"
#include "replica_nodes.h"
#include "runner.h"
#include "store_conformance.h"

#include "base/clock.h"
#include "store/store_ops.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* The heartbeat's limit, for servers that are started afterwards. */
static void set_heartbeat(int seconds)
{
    char text[16];
    snprintf(text, sizeof text, "%d", seconds * td_test_slowness());
    setenv("TANDEM_HEARTBEAT", text, 1);
}

static int64_t add(td_store *store, const char *key, int64_t amount)
{
    int64_t sum = -1;
    CHECK_OK(td_store_add(store, key, amount, &sum));
    return sum;
}

/* ---- One failover ---------------------------------------------------------------------------- */

TEST(a_standby_has_what_was_confirmed)
{
    struct replica_node nodes[2];
    bool deleted;
    td_bytes value;
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    store_set_text(store, "text", "before");
    CHECK_OK(td_store_append(store, "list", "a", 1));
    CHECK_OK(td_store_append(store, "list", "b", 1));
    CHECK_EQ(add(store, "sum", 40), 40);
    CHECK_OK(td_store_compare_set(store, "swapped", "", 0, "x", 1, &value));
    td_bytes_free(&value);
    store_set_text(store, "gone", "x");
    CHECK_OK(td_store_delete_key(store, "gone", &deleted));
    CHECK(deleted);
    CHECK_OK(td_store_multi_set(store, (const char *const[]){"m1", "m2"},
                                (td_bytes[]){{"1", 1}, {"2", 1}}, 2));
    CHECK_EQ(add(store, "sum", 1), 41);

    replica_kill(&nodes[0]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    store_expect_text(store, "text", "before");
    store_expect_text(store, "list", "ab");
    store_expect_text(store, "swapped", "x");
    store_expect_text(store, "m1", "1");
    store_expect_text(store, "m2", "2");
    CHECK_EQ(add(store, "sum", 1), 42);
    CHECK_EQ(store_count(store), 6);
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
}

static void *wait_for_word(void *arg)
{
    td_bytes value;
    CHECK_OK(td_store_get(arg, "word", 0, &value));
    CHECK_EQ(value.size, 5);
    td_bytes_free(&value);
    return NULL;
}

TEST(waiters_go_on_waiting_at_the_next_primary)
{
    struct replica_node nodes[2];
    pthread_t threads[4];
    td_bytes value;
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2), *another = replica_open(nodes, 2);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, wait_for_word, i % 2 ? store : another), 0);
    CHECK_EQ(add(store, "sum", 1), 1);
    replica_kill(&nodes[0]);
    /* Nobody was promoted yet: a wait ends at its own deadline. */
    CHECK_EQ(td_store_get(another, "word", 300, &value), TD_ERR_TIMEOUT);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_FAILS(td_store_get(another, "other", 50, &value), TD_ERR_TIMEOUT, "key \"other\"");
    store_set_text(store, "word", "woken");
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(another));
    replica_close(&nodes[1]);
}

TEST(two_failovers_in_a_row)
{
    struct replica_node nodes[3];
    replica_start_all(nodes, 3);
    td_store *store = replica_open(nodes, 3);
    CHECK_EQ(add(store, "sum", 1), 1);
    replica_kill(&nodes[0]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_OK(replica_attach(&nodes[2], &nodes[1]));
    CHECK_EQ(add(store, "sum", 1), 2);
    store_set_text(store, "second", "life");
    CHECK_EQ(add(store, "sum", 1), 3);
    replica_kill(&nodes[1]);
    CHECK_OK(replica_promote(&nodes[2], 3));
    CHECK_EQ(add(store, "sum", 1), 4);
    store_expect_text(store, "second", "life");
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[2]);
}

TEST(a_late_standby_gets_all_that_is_there, .deadline_s = 40)
{
    struct replica_node nodes[2];
    enum { KEYS = 2000, LARGE = 3 << 20 };
    char key[32], *large = calloc(1, LARGE);
    replica_start(&nodes[0], 0);
    CHECK_OK(replica_promote(&nodes[0], 1));
    td_store *store = replica_open(nodes, 1);
    store_pattern(large, LARGE, 7);
    CHECK_OK(td_store_set(store, "large", large, LARGE));
    for (int i = 0; i < KEYS; i++) {
        snprintf(key, sizeof key, "key %d", i);
        store_set_text(store, key, key);
    }
    CHECK_EQ(add(store, "sum", 5), 5);
    replica_start(&nodes[1], 1);
    CHECK_OK(replica_attach(&nodes[1], &nodes[0]));
    CHECK_EQ(replica_members(&nodes[0]), 2);
    CHECK_EQ(add(store, "sum", 5), 10); /* the client learns of the standby with this answer */
    replica_kill(&nodes[0]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_EQ(add(store, "sum", 5), 15);
    CHECK_EQ(store_count(store), KEYS + 2);
    store_expect(store, "large", large, LARGE);
    store_expect_text(store, "key 1999", "key 1999");
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
    free(large);
}

TEST(a_store_of_a_program_can_have_standbys)
{
    struct td__tcp_server *server, *standby;
    struct td__tcp_replica_state state;
    td_store *store, *client;
    char address[32];
    CHECK_OK(td_tcp_store_open(
        "127.0.0.1", 0, &(td_tcp_store_options){.host_server = true, .secret = REPLICA_SECRET},
        &store));
    snprintf(address, sizeof address, "127.0.0.1:%d", td_tcp_store_port(store));
    CHECK_OK(td_tcp_store_open("127.0.0.1", td_tcp_store_port(store),
                               &(td_tcp_store_options){.secret = REPLICA_SECRET}, &client));
    server = td__tcp_store_server(store);
    CHECK(server != NULL && td__tcp_store_server(client) == NULL);
    CHECK_OK(td__tcp_replica_open(&(struct td__tcp_replica_options){.host = "127.0.0.1",
                                                                    .secret = REPLICA_SECRET,
                                                                    .number = 3},
                                  &standby));
    CHECK_EQ(add(client, "sum", 1), 1);
    CHECK_OK(td__tcp_replica_attach(standby, address, REPLICA_SECRET, td__deadline_in_ms(20000)));
    CHECK_EQ(add(client, "sum", 1), 2);
    td__tcp_replica_state(server, &state);
    CHECK_EQ(state.role, TD__REPLICA_PRIMARY);
    CHECK_EQ(state.term, 1);
    CHECK_EQ(state.members.count, 2);
    CHECK_EQ(state.members.at[1].number, 3);
    CHECK_OK(
        td__tcp_replica_depose(server, 2)); /* as by its launcher, which knows of another one */
    CHECK_OK(td__tcp_replica_promote(standby, 2));
    CHECK_EQ(add(client, "sum", 1), 3);
    CHECK_EQ(add(store, "sum", 1), 4); /* a client in the process of the old primary */
    CHECK_OK(td_store_close(client));
    CHECK_OK(td_store_close(store));
    td__tcp_replica_close(standby, 0);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

TEST(promotions_and_attachments_that_are_refused)
{
    struct replica_node nodes[3], twin;
    replica_start_all(nodes, 2);
    replica_start(&nodes[2], 2);
    CHECK_FAILS(replica_promote(&nodes[0], 5), TD_ERR_STATE,
                "it is the primary already, of term 1");
    CHECK_FAILS(replica_promote(&nodes[1], 1), TD_ERR_STATE, "term 1 is not higher than 1");
    CHECK_FAILS(replica_attach(&nodes[0], &nodes[1]), TD_ERR_STATE, "it is the primary of term 1");
    CHECK_FAILS(replica_attach(&nodes[2], &nodes[1]), TD_ERR_STATE, "it is a standby");
    replica_start(&twin, 0);
    CHECK_FAILS(replica_attach(&twin, &nodes[0]), TD_ERR_STATE, "it has a member of this number");
    CHECK_FAILS(replica_promote(&twin, 7), TD_ERR_STATE, "copy");
    CHECK_FAILS(replica_promote(&nodes[2], 7), TD_ERR_STATE, "copy"); /* it has seen term 1 */

    /* One that knows of a later term is not the standby of an earlier one, and deposes it. */
    CHECK_OK(replica_depose(&nodes[2], 4));
    CHECK_FAILS(replica_attach(&nodes[2], &nodes[0]), TD_ERR_STATE, "it was deposed");
    CHECK_EQ(replica_state(&nodes[0]).role, TD__REPLICA_DEPOSED);
    CHECK_EQ(replica_state(&nodes[0]).term, 4);
    CHECK_OK(replica_promote(&nodes[1], 5));
    for (int i = 0; i < 3; i++)
        replica_close(&nodes[i]);
    replica_close(&twin);
}

TEST(nobody_is_left)
{
    struct replica_node nodes[2];
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    CHECK_EQ(add(store, "sum", 1), 1);
    replica_kill(&nodes[1]);
    replica_kill(&nodes[0]);
    int64_t start = td__now_ns();
    td_status status = td_store_add(store, "sum", 1, NULL);
    CHECK_EQ(status, TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "the connection to the server is lost");
    CHECK_PROMPT(start);
    td_store_close(store);
}

TEST(what_was_tried_is_named)
{
    struct replica_node nodes[3];
    replica_start_all(nodes, 3);
    td_store *store = replica_open(nodes, 3);
    CHECK_EQ(add(store, "sum", 1), 1);
    for (int i = 0; i < 3; i++)
        replica_stop(&nodes[i]); /* so that nobody drops anybody */
    for (int i = 0; i < 3; i++)
        replica_kill(&nodes[i]);
    CHECK_EQ(td_store_add(store, "sum", 1, NULL), TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "no other server of the store has taken over: tried");
    for (int i = 0; i < 3; i++)
        CHECK_CONTAINS(td_last_error(), nodes[i].address);
    CHECK_CONTAINS(td_last_error(), "nothing listens there");
    td_store_close(store);
}

TEST(a_store_that_was_closed_has_no_successor)
{
    struct replica_node nodes[2];
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    CHECK_EQ(add(store, "sum", 1), 1);
    replica_close(&nodes[0]);
    CHECK_SOON(replica_state(&nodes[1]).ended);
    CHECK(!replica_state(&nodes[1]).primary_lost);
    CHECK_FAILS(td_store_add(store, "sum", 1, NULL), TD_ERR_PEER, "the store was closed");
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
}

/* ---- Servers that are slow ------------------------------------------------------------------- */

TEST(a_stopped_standby_is_dropped_and_may_come_again, .deadline_s = 40)
{
    struct replica_node nodes[2];
    set_heartbeat(1);
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    CHECK_EQ(add(store, "sum", 1), 1);
    replica_stop(&nodes[1]);
    CHECK_EQ(add(store, "sum", 1), 2); /* waits until the standby is dropped */
    CHECK_EQ(replica_members(&nodes[0]), 1);
    store_set_text(store, "word", "x");
    CHECK_EQ(add(store, "sum", 1), 3);
    replica_go_on(&nodes[1]);
    CHECK_SOON(replica_state(&nodes[1]).primary_lost);
    CHECK_OK(replica_attach(&nodes[1], &nodes[0]));
    CHECK(!replica_state(&nodes[1]).primary_lost);
    CHECK_EQ(add(store, "sum", 1), 4);
    replica_kill(&nodes[0]);
    CHECK_SOON(replica_state(&nodes[1]).primary_lost);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_EQ(add(store, "sum", 1), 5);
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
}

/* A standby that was dropped lacks what was confirmed since. It does not know that, but the clients do. */
TEST(a_standby_that_was_dropped_is_no_successor, .deadline_s = 40)
{
    struct replica_node nodes[2];
    set_heartbeat(1);
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    CHECK_EQ(add(store, "sum", 1), 1);
    replica_stop(&nodes[1]);
    CHECK_EQ(add(store, "sum", 1), 2);
    replica_kill(&nodes[0]);
    replica_go_on(&nodes[1]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_EQ(td_store_add(store, "sum", 1, NULL), TD_ERR_PEER);
    td_store_close(store);
    replica_close(&nodes[1]);
}

TEST(a_deposed_primary_that_comes_back_is_refused, .deadline_s = 60)
{
    struct replica_node nodes[3];
    int64_t sum = 0;
    set_heartbeat(1);
    replica_start_all(nodes, 3);
    td_store *store = replica_open(nodes, 3), *other = replica_open(nodes, 3);
    CHECK_EQ(add(store, "sum", 1), 1);
    CHECK_EQ(add(other, "sum", 1), 2);
    replica_stop(&nodes[0]);
    CHECK_SOON(replica_state(&nodes[1]).primary_lost && replica_state(&nodes[2]).primary_lost);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_OK(replica_attach(&nodes[2], &nodes[1]));
    td_store *fresh = replica_open(nodes, 3); /* finds the new one while the old one is stopped */
    CHECK_EQ(add(fresh, "sum", 1), 3);
    replica_go_on(&nodes[0]);
    CHECK_SOON(replica_state(&nodes[0]).role == TD__REPLICA_DEPOSED);
    CHECK_EQ(replica_state(&nodes[0]).term, 2);
    CHECK_OK(td_store_add(store, "sum", 1, &sum)); /* it was its client all the time */
    CHECK_EQ(sum, 4);
    CHECK_OK(replica_attach(&nodes[0], &nodes[1])); /* as a standby it is welcome */
    CHECK_EQ(add(other, "sum", 1), 5);
    replica_kill(&nodes[1]);
    CHECK_OK(replica_promote(&nodes[0], 3));
    CHECK_EQ(add(fresh, "sum", 1), 6);
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(other));
    CHECK_OK(td_store_close(fresh));
    replica_close(&nodes[0]);
    replica_close(&nodes[2]);
}
