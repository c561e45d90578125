/* Primaries that are killed at random moments while clients change the store: each change that was confirmed is there
 * afterwards, and each was carried out once. And what becomes of wills. */
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

/* ---- Load ------------------------------------------------------------------------------------ */

enum { CLIENTS = 3, THREADS = 2 * CLIENTS, TOKEN = 8 };

/* A thread that changes the store; two share a client. */
struct worker {
    pthread_t thread;
    td_store *store;
    int number;
    atomic_bool *stop;
    atomic_int rounds; /* completed */
};

static void *work(void *arg)
{
    struct worker *worker = arg;
    char key[32], token[16];
    int64_t sum, last = 0;
    bool deleted;
    td_bytes value;
    for (int i = 0; !atomic_load(worker->stop); i++) {
        snprintf(key, sizeof key, "latest %d", worker->number);
        snprintf(token, sizeof token, "%07d.", i);
        CHECK_OK(td_store_set(worker->store, key, token, TOKEN));
        snprintf(key, sizeof key, "list %d", worker->number);
        CHECK_OK(td_store_append(worker->store, key, token, TOKEN));
        CHECK_OK(td_store_add(worker->store, "sum", 1, &sum));
        CHECK(sum > last);
        last = sum;
        /* A counter of this thread alone, by the other calls. */
        snprintf(key, sizeof key, "count %d", worker->number);
        char before[16], after[16];
        snprintf(before, sizeof before, "%d", i);
        snprintf(after, sizeof after, "%d", i + 1);
        CHECK_OK(td_store_compare_set(worker->store, key, before, i ? strlen(before) : 0, after,
                                      strlen(after), &value));
        CHECK_EQ(value.size, strlen(after));
        CHECK_MEM(value.data, after, value.size);
        td_bytes_free(&value);
        snprintf(key, sizeof key, "brief %d", worker->number);
        CHECK_OK(td_store_set(worker->store, key, "x", 1));
        CHECK_OK(td_store_delete_key(worker->store, key, &deleted));
        CHECK(deleted);
        atomic_fetch_add(&worker->rounds, 1);
    }
    return NULL;
}

static int all_rounds(struct worker *workers)
{
    int sum = 0;
    for (int i = 0; i < THREADS; i++)
        sum += atomic_load(&workers[i].rounds);
    return sum;
}

static void check_all(td_store *store, struct worker *workers)
{
    char key[32], text[32];
    td_bytes value;
    snprintf(text, sizeof text, "%d", all_rounds(workers));
    store_expect_text(store, "sum", text);
    for (int w = 0; w < THREADS; w++) {
        int rounds = atomic_load(&workers[w].rounds);
        snprintf(key, sizeof key, "list %d", w);
        CHECK_OK(td_store_get(store, key, 0, &value));
        CHECK_EQ(value.size, rounds * TOKEN);
        for (int i = 0; i < rounds; i++) {
            snprintf(text, sizeof text, "%07d.", i);
            CHECK_MEM((char *)value.data + i * TOKEN, text, TOKEN);
        }
        td_bytes_free(&value);
        snprintf(key, sizeof key, "latest %d", w);
        snprintf(text, sizeof text, "%07d.", rounds - 1);
        store_expect_text(store, key, text);
    }
}

static void load(struct replica_node *nodes, int count)
{
    struct worker workers[THREADS] = {0};
    td_store *stores[CLIENTS];
    atomic_bool stop = false;
    replica_start_all(nodes, count);
    for (int i = 0; i < CLIENTS; i++)
        stores[i] = replica_open(nodes, count);
    for (int i = 0; i < THREADS; i++) {
        workers[i].store = stores[i % CLIENTS];
        workers[i].number = i;
        workers[i].stop = &stop;
        CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int primary = 0; primary + 1 < count; primary++) {
        int before = all_rounds(workers);
        CHECK_SOON(all_rounds(workers) > before + 20);
        usleep((useconds_t)(td__now_ns() % 20000));
        replica_kill(&nodes[primary]);
        CHECK_OK(replica_promote(&nodes[primary + 1], primary + 2));
        for (int i = primary + 2; i < count; i++)
            CHECK_OK(replica_attach(&nodes[i], &nodes[primary + 1]));
    }
    int before = all_rounds(workers);
    CHECK_SOON(all_rounds(workers) > before + 20);
    atomic_store(&stop, true);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_join(workers[i].thread, NULL), 0);
    check_all(stores[0], workers);
    for (int i = 0; i < CLIENTS; i++)
        CHECK_OK(td_store_close(stores[i]));
    replica_close(&nodes[count - 1]);
}

TEST(every_change_is_carried_out_once, .deadline_s = 60)
{
    struct replica_node nodes[3];
    for (int i = 0; i < (td_test_is_long() ? 100 : 3); i++)
        load(nodes, 3);
}

TEST(every_change_is_carried_out_once_over_tcp, .deadline_s = 60)
{
    struct replica_node nodes[3];
    replica_over_tcp = true;
    load(nodes, 3);
}

TEST(every_change_is_carried_out_once_over_tls, .deadline_s = 60)
{
    struct replica_node nodes[3];
    replica_over_tcp = true;
    setenv("TANDEM_TLS", "1", 1);
    load(nodes, 3);
}

/* ---- Sets that nobody waits for --------------------------------------------------------------- */

TEST(sets_that_were_not_confirmed_are_sent_again, .deadline_s = 40)
{
    enum { SETS = 3000, LARGE = 100000 };
    struct replica_node nodes[2];
    char key[32], *large = calloc(1, LARGE);
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    replica_stop(&nodes[0]);
    CHECK_OK(td_store_append(store, "list", "x", 1));
    for (int i = 0; i < 100; i++) { /* no answer comes */
        snprintf(key, sizeof key, "key %d", i);
        store_set_text(store, key, key);
    }
    replica_kill(&nodes[0]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    for (int i = 100; i < SETS; i++) {
        snprintf(key, sizeof key, "key %d", i);
        store_set_text(store, key, key);
    }
    for (int i = 0; i < 60; i++) /* more than is kept */
        CHECK_OK(td_store_set(store, "large", large, LARGE));
    CHECK_EQ(store_count(store), SETS + 2);
    store_expect_text(store, "list", "x");
    store_expect(store, "large", large, LARGE);
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
    free(large);
}

/* A failure that nobody waits for is not lost with the server that has found it. */
TEST(a_failure_is_reported_by_the_next_primary)
{
    struct replica_node nodes[2];
    int64_t sum;
    replica_start_all(nodes, 2);
    td_store *store = replica_open(nodes, 2);
    store_set_text(store, "text", "no number");
    CHECK_FAILS(td_store_add(store, "text", 1, &sum), TD_ERR_INVALID, "is not a number");
    replica_kill(&nodes[0]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    CHECK_FAILS(td_store_add(store, "text", 1, &sum), TD_ERR_INVALID, "is not a number");
    CHECK_OK(td_store_add(store, "sum", 1, &sum));
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
}

/* ---- Wills ----------------------------------------------------------------------------------- */

struct testator {
    const struct replica_node *nodes;
    atomic_bool *ready;
    const char *key;
    bool leaves;
};

static void leave_will(void *arg)
{
    struct testator *testator = arg;
    td_store *store = replica_open(testator->nodes, 2);
    CHECK_OK(td__tcp_store_set_will(store, testator->key, "dead", 4));
    CHECK_OK(td_store_add(store, "arrived", 1, NULL));
    atomic_store(testator->ready, true);
    if (testator->leaves) {
        CHECK_OK(td_store_close(store));
        return;
    }
    const char *never = "never";
    td_store_wait(store, &never, 1, 0);
    FAIL("the wait has ended: %s", td_last_error());
}

TEST(the_next_primary_carries_out_wills, .deadline_s = 40)
{
    struct replica_node nodes[2];
    setenv("TANDEM_HEARTBEAT", "1", 1);
    replica_start_all(nodes, 2);
    const char *keys[] = {"dies with the primary", "dies later", "stays", "has left"};
    pid_t pids[4];
    struct testator testators[4];
    atomic_bool *ready = fork_shared(4 * sizeof *ready);
    for (int i = 0; i < 4; i++) {
        testators[i] = (struct testator){nodes, &ready[i], keys[i], i == 3};
        pids[i] = fork_start(leave_will, &testators[i]);
    }
    for (int i = 0; i < 4; i++)
        CHECK_SOON(atomic_load(&ready[i]));
    fork_join(pids[3]);
    td_store *store = replica_open(nodes, 2);
    CHECK_OK(td_store_add(store, "sum", 1, NULL));
    replica_stop(&nodes[0]); /* so that it does not notice the death of the client */
    fork_kill(pids[0], SIGKILL);
    replica_kill(&nodes[0]);
    CHECK_OK(replica_promote(&nodes[1], 2));
    store_expect_text(store, keys[0], "dead");
    fork_kill(pids[1], SIGKILL);
    store_expect_text(store, keys[1], "dead");
    CHECK_EQ(store_count(store), 4); /* arrived, sum, two wills */
    fork_kill(pids[2], SIGKILL);
    store_expect_text(store, keys[2], "dead");
    CHECK_OK(td_store_close(store));
    replica_close(&nodes[1]);
}
