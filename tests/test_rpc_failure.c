/* Remote calls to workers that die, stop, leave, or send garbage; and shutdown in all situations. */
#include "forks.h"
#include "rpc_world.h"

#include "base/clock.h"
#include "peer/endpoint_internal.h"
#include "os/process.h"
#include "rpc/rpc_agent.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FAR_MS = 120000, PENDING = 20 };

static const td_rpc_options far = {.timeout_ms = FAR_MS};

/* ---- Death ----------------------------------------------------------------------------------- */

/* The last rank dies under the calls of all others. */
ALL_WAYS(killed, .ranks = 4, .may_die = 8)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() == 3) {
        CHECK_SOON(atomic_load(&rpc_held) == 3);
        raise(SIGKILL);
    }
    td_future *held = td_rpc_async("w3", "hold", TD_NO_ARGS, NULL), *pending[PENDING];
    for (int i = 0; i < PENDING; i++)
        CHECK((pending[i] = td_rpc_async("w3", "gate", TD_NO_ARGS, NULL)));
    td_value *lost = td_future_wait(held, 0);
    int64_t since = td__now_ns();
    CHECK(!lost);
    CHECK_EQ(td_last_status(), TD_ERR_PEER);
    CHECK_CONTAINS(td_last_error(), "hold() on worker \"w3\": it was killed by SIGKILL");
    for (int i = 0; i < PENDING; i++)
        rpc_check_failed(pending[i], TD_ERR_PEER, "gate() on worker \"w3\": it was killed");
    rpc_check_fails("w3", "add", TD_ARGS(1), NULL, TD_ERR_PEER, "was killed by SIGKILL");
    for (int r = 0; r < 3; r++)
        CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(1)), 11);
    CHECK_PROMPT(since);
    rpc_end();
}

/* Of a worker that nobody has called yet. */
ALL_WAYS(killed_before_the_first_call, .ranks = 4, .may_die = 8)
{
    TD_SCOPE;
    rpc_begin(&far);
    td_test_barrier();
    if (td_test_rank() == 3)
        raise(SIGKILL);
    int64_t since = td__now_ns();
    rpc_check_fails("w3", "hold", TD_NO_ARGS, NULL, TD_ERR_PEER, "\"w3\"");
    rpc_check_fails("w3", "add", TD_ARGS(1), NULL, TD_ERR_PEER, "\"w3\"");
    CHECK_PROMPT(since);
    for (int r = 0; r < 3; r++)
        CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(1)), 11);
    rpc_end();
}

/* The calls that a dead worker had made are cancelled. */
ALL_WAYS(caller_is_killed, .ranks = 4, .may_die = 8)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() == 3) {
        for (int r = 0; r < 3; r++)
            CHECK(td_rpc_async(rpc_name(r), "hold", TD_NO_ARGS, NULL));
        td_test_barrier();
        raise(SIGKILL);
    }
    CHECK_SOON(atomic_load(&rpc_held) == 1);
    td_test_barrier();
    CHECK_SOON(atomic_load(&rpc_cancelled) == 1);
    rpc_end();
}

ALL_WAYS(stopped, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() < 3)
        CHECK_EQ(rpc_int("w3", "add", TD_ARGS(1)), 11);
    td_test_barrier();
    if (td_test_rank() == 0) {
        td_test_kill(3, SIGSTOP);
        int64_t since = td__now_ns();
        CHECK_SOON(!td_rpc_sync("w3", "add", TD_ARGS(1), &(td_rpc_call_options){.timeout_ms = 50}));
        for (int i = 0; i < 3; i++)
            rpc_check_fails("w3", "add", TD_ARGS(1), &(td_rpc_call_options){.timeout_ms = 50},
                            TD_ERR_TIMEOUT, "\"w3\" has not answered within 50 ms");
        CHECK_EQ(rpc_int("w1", "add", TD_ARGS(1)), 11);
        CHECK_PROMPT(since);
        td_test_kill(3, SIGCONT);
        CHECK_EQ(rpc_int("w3", "add", TD_ARGS(1)), 11);
    }
    rpc_end();
}

static int count_links(int rank)
{
    int count = 0;
    struct td__rpc_agent *agent = td__agent_hold();
    CHECK(agent);
    pthread_mutex_lock(&agent->lock);
    for (uint64_t i = 0; i < agent->id_count; i++)
        count += agent->by_id[i] && agent->by_id[i]->rank == rank;
    pthread_mutex_unlock(&agent->lock);
    td__agent_leave(agent);
    return count;
}

static void report_cut_off(int rank)
{
    struct td__rpc_agent *agent = td__agent_hold();
    CHECK(agent);
    td__presence_settle(agent->endpoint, rank, TD__CUT_OFF, TD__STATUS_UNKNOWN);
    td__agent_leave(agent);
}

/* The failure detector reports a worker whose connections do not end: its links do, and keep no messages. */
ALL_WAYS(cut_off, .ranks = 4, .may_die = 8)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() < 3)
        CHECK_EQ(rpc_int("w3", "add", TD_ARGS(1)), 11);
    td_test_barrier();
    if (td_test_rank() == 0) {
        td_test_kill(3, SIGSTOP);
        int64_t since = td__now_ns();
        td_tensor *x = td_full(TD_SHAPE(1 << 20), 1, TD_F32, NULL);
        td_future *lost = td_rpc_async("w3", "echo", TD_ARGS(x), NULL);
        CHECK(count_links(3) > 0);
        report_cut_off(3);
        rpc_check_failed(lost, TD_ERR_PEER, "echo() on worker \"w3\": it does not answer");
        CHECK_SOON(!count_links(3));
        rpc_check_fails("w3", "add", TD_ARGS(1), NULL, TD_ERR_PEER, "does not answer any more");
        CHECK_EQ(rpc_int("w1", "add", TD_ARGS(1)), 11);
        CHECK_PROMPT(since);
        td_test_kill(3, SIGKILL);
    }
    rpc_end();
}

/* ---- Links ----------------------------------------------------------------------------------- */

/* Writes bytes that are no message into the link to a worker. */
static void send_garbage(int rank)
{
    char garbage[200];
    memset(garbage, 0xa5, sizeof garbage);
    struct td__rpc_agent *agent = td__agent_hold();
    CHECK(agent);
    pthread_mutex_lock(&agent->lock);
    struct td__rpc_link *link = agent->workers[rank]->link;
    CHECK(link);
    td__link_retain(link);
    pthread_mutex_unlock(&agent->lock);
    pthread_mutex_lock(&link->write_lock);
    if (link->local) {
        td__byte_ring_write(&link->rings.out, garbage, sizeof garbage);
        td__byte_ring_publish(&link->rings.out);
    } else {
        send(link->fd, garbage, sizeof garbage, MSG_NOSIGNAL);
    }
    pthread_mutex_unlock(&link->write_lock);
    if (link->local)
        td__io_ring(link);
    td__link_release(link);
    td__agent_leave(agent);
}

/* The link ends, its calls fail, and the next call opens another one. */
ALL_WAYS(garbage, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&far);
    int to = td_test_arg() == &mixed ? 3 : 1;
    if (td_test_rank() == 0) {
        int64_t since = td__now_ns();
        CHECK_EQ(rpc_int(rpc_name(to), "add", TD_ARGS(1)), 11);
        td_future *held = td_rpc_async(rpc_name(to), "hold", TD_NO_ARGS, NULL);
        CHECK_EQ(rpc_int(rpc_name(to), "add", TD_ARGS(1)), 11);
        send_garbage(to);
        rpc_check_failed(held, TD_ERR_PEER, "closed the connection");
        CHECK_EQ(rpc_int(rpc_name(to), "add", TD_ARGS(1)), 11);
        CHECK_PROMPT(since);
    } else if (td_test_rank() == to) {
        CHECK_SOON(atomic_load(&rpc_cancelled) == 1);
    }
    rpc_end();
}

/* Calls over the next link are not failed by the end of the one before, which is examined for a while. */
RANKS(next_link, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() == 0) {
        CHECK_EQ(rpc_int("w1", "add", TD_ARGS(1)), 11);
        send_garbage(1);
        int64_t since = td__now_ns();
        td_value *value = NULL;
        while (!(value = td_rpc_sync("w1", "pause", TD_ARGS(1500), NULL)))
            CHECK_EQ(td_last_status(), TD_ERR_PEER); /* it was sent by the broken link */
        CHECK_PROMPT(since);
    }
    rpc_end();
}

/* ---- Forks ----------------------------------------------------------------------------------- */

static void in_child(void *arg)
{
    (void)arg;
    TD_SCOPE;
    td_worker_info info;
    rpc_check_fails("w0", "add", TD_ARGS(1), NULL, TD_ERR_STATE, "no worker");
    CHECK_FAILS(td_worker_find(NULL, &info), TD_ERR_STATE, "no worker");
    CHECK_FAILS(td_rpc_shutdown(NULL), TD_ERR_STATE, "no worker");
/* The former forbids new threads in a child; the latter's allocator may stay locked there, by a thread of the parent. */
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
    td_store *store = NULL;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_OK(td_init_rpc("child", &(td_rpc_options){.store = store, .world_size = 1}));
    CHECK_EQ(rpc_int("child", "add", TD_ARGS(1)), 11);
    CHECK_OK(td_rpc_shutdown(NULL));
    CHECK_OK(td_store_close(store));
#endif
    _exit(0); /* with what was the parent's */
}

static void *wait_in_parent(void *future)
{
    td_value_release(td_future_wait(future, 0));
    return NULL;
}

RANKS(forked, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(&far);
    td_future *gate = td_rpc_async("w0", "gate", TD_NO_ARGS, NULL);
    pthread_t thread; /* is inside the agent when the process is forked */
    CHECK_EQ(pthread_create(&thread, NULL, wait_in_parent, gate), 0);
    CHECK_EQ(rpc_int(rpc_name(!td_test_rank()), "add", TD_ARGS(1)), 11);
    fork_join(fork_start(in_child, NULL));
    CHECK_EQ(rpc_int(rpc_name(!td_test_rank()), "add", TD_ARGS(1)), 11);
    td_future_cancel(gate);
    pthread_join(thread, NULL);
    rpc_end();
}

/* ---- Shutdown -------------------------------------------------------------------------------- */

static const td_rpc_shutdown_options now = {.now = true};

/* One leaves at once: calls to it fail, the others go on. */
ALL_WAYS(leaves_now, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() == 3) {
        CHECK_SOON(atomic_load(&rpc_held) == 3);
        td_future *own = td_rpc_async("w0", "gate", TD_NO_ARGS, NULL);
        CHECK(td_rpc_async("w3", "gate", TD_NO_ARGS, NULL)); /* answers later: never */
        CHECK_EQ(rpc_int("w0", "add", TD_ARGS(1)), 11);
        int64_t since = td__now_ns();
        td_test_barrier();
        CHECK_OK(td_rpc_shutdown(&now));
        CHECK_PROMPT(since);
        rpc_check_failed(own, TD_ERR_ABORTED, "gate() on worker \"w0\": this worker was shut down");
        rpc_check_fails("w0", "add", TD_ARGS(1), NULL, TD_ERR_STATE, "td_init_rpc()");
        return;
    }
    td_future *held = td_rpc_async("w3", "hold", TD_NO_ARGS, NULL);
    td_test_barrier();
    int64_t since = td__now_ns();
    rpc_check_failed(held, TD_ERR_PEER, "hold() on worker \"w3\": it has left");
    CHECK_SOON(!td_rpc_sync("w3", "add", TD_ARGS(1), NULL));
    rpc_check_fails("w3", "add", TD_ARGS(1), NULL, TD_ERR_PEER, "\"w3\" has left");
    for (int r = 0; r < 3; r++)
        CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(1)), 11);
    rpc_end();
    CHECK_PROMPT(since);
}

static td_value *gate_there(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return td_rpc_sync(td_value_text(args[0]), "gate", TD_NO_ARGS, NULL);
}

/* The threads of functions that wait for other calls serve calls meanwhile; and calls arrive until the end. */
ALL_WAYS(leaves_now_with_nested_calls, .ranks = 4)
{
    enum { CALLS = 24 };
    TD_SCOPE;
    CHECK_OK(td_rpc_register("gate_there(to: text)", gate_there, NULL));
    rpc_begin(&far);
    if (td_test_rank() == 3) {
        CHECK_SOON(atomic_load(&rpc_held) >= 10);
        int64_t since = td__now_ns();
        CHECK_OK(td_rpc_shutdown(&now));
        CHECK_PROMPT(since);
        return;
    }
    td_future *calls[CALLS];
    for (int i = 0; i < CALLS; i++)
        calls[i] = i % 3
                       ? td_rpc_async("w3", "hold", TD_NO_ARGS, NULL)
                       : td_rpc_async("w3", "gate_there", TD_ARGS(rpc_name(td_test_rank())), NULL);
    for (int i = 0; i < CALLS; i++) {
        CHECK(!td_future_wait(calls[i], 0));
        CHECK_CONTAINS(td_last_error(), "\"w3\"");
    }
    rpc_end();
}

/* Calls of the program that nobody waits for are made before all leave; and those that they make. */
ALL_WAYS(graceful_with_calls, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.threads = 2});
    td_value *to = TD_ARGS("w0", "w2", "w1", "w3");
    td_future *last[10];
    for (int i = 0; i < 10; i++)
        CHECK((last[i] = td_rpc_async(rpc_name(i % 4), "bounce", TD_ARGS(to, 30), NULL)));
    rpc_end();
    for (int i = 0; i < 10; i++) {
        CHECK(td_future_test(last[i]));
        CHECK_EQ(rpc_value_int(td_future_wait(last[i], 0)), 30);
    }
}

static void keep_warning(td_log_level level, const char *line, void *arg)
{
    if (level == TD_LOG_WARN)
        snprintf(arg, 300, "%s", line);
}

ALL_WAYS(dies_during_the_shutdown, .ranks = 4, .may_die = 4)
{
    TD_SCOPE;
    rpc_begin(&far);
    for (int r = 0; r < 4; r++)
        CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(1)), 11);
    if (td_test_rank() == 2) {
        td__sleep_ns(100000000);
        raise(SIGKILL);
    }
    char warning[300] = "";
    td_log_set_sink(keep_warning, warning);
    int64_t since = td__now_ns();
    CHECK_OK(td_rpc_shutdown(NULL));
    CHECK_PROMPT(since);
    td_log_set_sink(NULL, NULL);
    CHECK_CONTAINS(warning, "without worker \"w2\", which was killed by SIGKILL");
}

RANKS(shutdown_times_out, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(&far);
    if (td_test_rank() == 0) {
        td_future *gate = td_rpc_async("w1", "gate", TD_NO_ARGS, NULL);
        td_rpc_shutdown_options options = {.timeout_ms = 50};
        CHECK_FAILS(td_rpc_shutdown(&options), TD_ERR_TIMEOUT, "not complete");
        rpc_check_failed(gate, TD_ERR_ABORTED, "shut down");
        CHECK_FAILS(td_rpc_shutdown(&options), TD_ERR_STATE, "no worker");
        td_test_barrier();
        return;
    }
    td_test_barrier();
    rpc_end();
}

RANKS(shutdown_names_the_others, .ranks = 2)
{
    rpc_begin(&far);
    if (td_test_rank() == 0)
        CHECK_FAILS(td_rpc_shutdown(&(td_rpc_shutdown_options){.timeout_ms = 50}), TD_ERR_TIMEOUT,
                    "\"w1\"");
    td_test_barrier();
    if (td_test_rank() == 1)
        rpc_end();
}

static td_value *shut_down(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_rpc_shutdown(&now) ? NULL : td_value_nil();
}

RANKS(shutdown_in_a_function, .ranks = 2)
{
    TD_SCOPE;
    CHECK_OK(td_rpc_register("shut_down()", shut_down, NULL));
    rpc_begin(&far);
    for (int r = 0; r < 2; r++)
        rpc_check_fails(rpc_name(r), "shut_down", TD_NO_ARGS, NULL, TD_ERR_STATE,
                        "called by a function");
    rpc_end();
}

/* Threads that wait for calls, or for a future that is nobody's, do not keep the worker from leaving. */
static void *wait_for_call(void *arg)
{
    TD_SCOPE;
    CHECK(!td_rpc_sync(arg, "gate", TD_NO_ARGS, NULL));
    CHECK(td_last_status() == TD_ERR_ABORTED || td_last_status() == TD_ERR_PEER);
    return NULL;
}

RANKS(shutdown_under_threads, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(&far);
    pthread_t threads[3], waits;
    td_future *own = td_future_create();
    char *to[3] = {"w0", "w1", "w0"};
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, wait_for_call, to[i]), 0);
    CHECK_EQ(pthread_create(&waits, NULL, wait_in_parent, own), 0);
    for (int64_t opened = 0; !opened;) {
        td__sleep_ns(5000000);
        struct td__rpc_agent *agent = td__agent_hold();
        pthread_mutex_lock(&agent->calls_lock);
        opened = agent->pending_count == 3;
        pthread_mutex_unlock(&agent->calls_lock);
        td__agent_leave(agent);
    }
    td_test_barrier();
    int64_t since = td__now_ns();
    CHECK_OK(td_rpc_shutdown(&now));
    CHECK_PROMPT(since);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    CHECK_OK(td_future_set(own, td_value_of(1)));
    pthread_join(waits, NULL);
}

static td_future *never;
static atomic_int waiting, aborted;

static td_value *wait_for_never(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    atomic_fetch_add(&waiting, 1);
    for (int i = 0; i < 3; i++) /* also again */
        if (!td_future_wait(never, 0) && td_last_status() == TD_ERR_ABORTED)
            atomic_fetch_add(&aborted, 1);
    return NULL;
}

/* Functions that wait for futures of the program's own do not keep the worker from leaving. */
RANKS(shutdown_under_functions, .ranks = 2)
{
    TD_SCOPE;
    never = td_future_create();
    CHECK_OK(td_rpc_register("wait_for_never()", wait_for_never, NULL));
    rpc_begin(&far);
    for (int i = 0; i < 6; i++)
        CHECK(td_rpc_async(rpc_name(i % 2), "wait_for_never", TD_NO_ARGS, NULL));
    CHECK_SOON(atomic_load(&waiting) == 6);
    td_test_barrier();
    int64_t since = td__now_ns();
    CHECK_OK(td_rpc_shutdown(&now));
    CHECK_EQ(atomic_load(&aborted), 18);
    CHECK(!td_future_test(never));
    CHECK_PROMPT(since);
    td_test_barrier();
}

/* Nor do links that are being opened, to a worker that does not answer. */
RANKS(shutdown_under_handshakes, .ranks = 3)
{
    TD_SCOPE;
    rpc_begin(&far);
    td_test_barrier();
    if (td_test_rank() == 0) {
        td_test_kill(2, SIGSTOP);
        td_future *future = td_rpc_async("w2", "add", TD_ARGS(1), NULL);
        td__sleep_ns(20000000);
        int64_t since = td__now_ns();
        CHECK_OK(td_rpc_shutdown(&now));
        CHECK(td__now_ns() - since < INT64_C(8000000000) * td_test_slowness());
        rpc_check_failed(future, TD_ERR_ABORTED, "shut down");
        td_test_kill(2, SIGCONT);
    }
    td_test_barrier();
    if (td_test_rank())
        CHECK_OK(td_rpc_shutdown(&now));
}
