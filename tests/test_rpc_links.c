/* Links whose connections are cut while both workers live: they go on over other connections, and nothing is lost. */
#include "rpc_boxes.h"
#include "runner.h"
#include "ways.h"

#include "base/clock.h"
#include "rpc/rpc_agent.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LARGE = 1 << 16, ROUNDS = 120 };

static atomic_int calls; /* that this worker has served */

static td_value *count_call(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    atomic_fetch_add(&calls, 1);
    return args[0];
}

static td_value *count_of(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_from_int(atomic_load(&calls));
}

static void begin(void)
{
    CHECK_OK(td_rpc_register("count(x)", count_call, NULL));
    CHECK_OK(td_rpc_register("count_of()", count_of, NULL));
    if (td_test_arg())
        take_way(td_test_arg());
    boxes_begin();
}

/* ---- Cuts ------------------------------------------------------------------------------------ */

/* A reset loses what is in the buffers of the kernel, in both directions; a shutdown does not. Of a unix socket there is
 * only the latter. */
static void cut_socket(int fd, bool reset)
{
    struct sockaddr none = {.sa_family = AF_UNSPEC};
    /* Not connect(): for the thread sanitizer, that is a new descriptor, which all users race with. */
    if (!reset || syscall(SYS_connect, fd, &none, sizeof none))
        shutdown(fd, SHUT_RDWR);
}

/* Cuts all links that this worker has at the moment: how many. */
static int cut_all(bool reset)
{
    int count = 0;
    struct td__rpc_agent *agent = td__agent_hold();
    CHECK(agent);
    pthread_mutex_lock(&agent->lock);
    for (uint64_t i = 0; i < agent->id_count; i++) {
        struct td__rpc_link *link = agent->by_id[i];
        if (link && !atomic_load(&link->suspended)) {
            cut_socket(link->fd, reset);
            count++;
        }
    }
    pthread_mutex_unlock(&agent->lock);
    td__agent_leave(agent);
    return count;
}

static struct {
    atomic_bool stop;
    atomic_int cuts;
    pthread_t thread;
} cutter;

static void *cut_again_and_again(void *arg)
{
    (void)arg;
    for (int i = 0; !atomic_load(&cutter.stop); i++) {
        atomic_fetch_add(&cutter.cuts, cut_all(i % 2));
        td__sleep_ns(2000000 + (i % 7) * 1900000);
    }
    return NULL;
}

static void start_cutting(void)
{
    atomic_store(&cutter.stop, false);
    CHECK_EQ(pthread_create(&cutter.thread, NULL, cut_again_and_again, NULL), 0);
}

static void stop_cutting(void)
{
    atomic_store(&cutter.stop, true);
    CHECK_EQ(pthread_join(cutter.thread, NULL), 0);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Calls with references, and with tensors that are lent on one host; all succeed. */
static void exchange(int to, int third, int round, int *counted)
{
    TD_SCOPE;
    td_rref *box = td_remote(boxes_name(to), "Box", TD_ARGS(round), NULL);
    td_tensor *x = td_full(TD_SHAPE(LARGE), round, TD_F32, NULL);
    td_future *futures[4];
    CHECK((futures[0] = td_rpc_async(boxes_name(third), "echo", TD_ARGS(box), NULL)));
    CHECK((futures[1] = td_rpc_async(boxes_name(to), "count", TD_ARGS(x), NULL)));
    CHECK((futures[2] = td_rref_async(box, "add", TD_ARGS(1), NULL)));
    CHECK((futures[3] = td_rpc_async(boxes_name(to), "count", TD_ARGS(box), NULL)));
    *counted += 2;
    td_value *values[4];
    for (int i = 0; i < 4; i++)
        if (!(values[i] = td_future_wait(futures[i], 0)))
            FAIL("round %d, call %d: %s", round, i, td_last_error());
    td_tensor *back = td_value_tensor(values[1]);
    CHECK_EQ(((float *)td_tensor_data(back))[LARGE - 1], (float)round);
    CHECK_EQ(boxes_int(values[2]), round + 1);
    CHECK_EQ(boxes_int(td_rref_sync(td_value_rref(values[0]), "get", TD_NO_ARGS, NULL)), round + 1);
    CHECK(td_rref_confirmed_by_owner(td_value_rref(values[3])));
}

static void call_while_cut(void)
{
    int counted = 0, to = (td_test_rank() + 1) % td_test_size();
    begin();
    td_test_barrier();
    start_cutting();
    for (int i = 0; i < ROUNDS / td_test_slowness(); i++)
        exchange(to, (to + 1) % td_test_size(), i, &counted);
    td_test_barrier();
    stop_cutting();
    CHECK(atomic_load(&cutter.cuts) > 0);
    td_test_barrier();
    {
        TD_SCOPE; /* each call was served once */
        CHECK_EQ(boxes_int(td_rpc_sync(boxes_name(to), "count_of", TD_NO_ARGS, NULL)), counted);
    }
    boxes_end();
}

/* A message to another host is kept until it is known to have arrived, and a tensor with it: that one is lent by a worker
 * of this host, and must not stay so. */
RANKS(a_borrowed_tensor_goes_to_another_host, .ranks = 4, .arg = &mixed)
{
    TD_SCOPE;
    begin();
    if (td_test_rank() == 1)
        CHECK(td_rpc_sync("w1", "keep", TD_ARGS(td_full(TD_SHAPE(4096), 3, TD_F32, NULL)), NULL));
    td_test_barrier();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_value *borrowed = td_rpc_sync("w1", "kept", TD_NO_ARGS, NULL);
        CHECK(td_rpc_sync("w2", "echo", TD_ARGS(borrowed), NULL));
    }
    td_test_barrier();
    if (td_test_rank() == 1) {
        CHECK_SOON(boxes_leases() == 0);
        CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
    }
    td_test_barrier();
    boxes_end();
}

static td_value *leases_of(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_from_int(boxes_leases());
}

static bool lends_nothing(const char *worker)
{
    TD_SCOPE;
    return boxes_int(td_rpc_sync(worker, "leases", TD_NO_ARGS, NULL)) == 0;
}

/* The same for one that requires grad, to a worker that does not acknowledge it. */
RANKS(a_borrowed_tensor_that_requires_grad_waits_in_a_message, .ranks = 4, .arg = &mixed)
{
    TD_SCOPE;
    CHECK_OK(td_rpc_register("leases()", leases_of, NULL));
    begin();
    if (td_test_rank() == 1)
        CHECK(td_rpc_sync("w1", "keep", TD_ARGS(td_full(TD_SHAPE(4096), 3, TD_F32, NULL)), NULL));
    td_test_barrier();
    if (td_test_rank() == 0) {
        CHECK_EQ(boxes_int(td_rpc_sync("w2", "echo", TD_ARGS(1), NULL)), 1);
        td_test_kill(2, SIGSTOP);
        {
            TD_SCOPE;
            TD_DIST_AUTOGRAD(context);
            td_value *borrowed = td_rpc_sync("w1", "kept", TD_NO_ARGS, NULL);
            CHECK(!lends_nothing("w1"));
            CHECK_OK(td_tensor_set_requires_grad(td_value_tensor(borrowed), true));
            CHECK(td_rpc_async("w2", "echo", TD_ARGS(borrowed), NULL));
        }
        CHECK_SOON(lends_nothing("w1"));
        td_test_kill(2, SIGCONT);
        CHECK(td_rpc_sync("w1", "drop", TD_NO_ARGS, NULL));
    }
    td_test_barrier();
    boxes_end();
}

RANKS(cut_again_and_again_shm, .ranks = 3, .arg = &shm)
{
    call_while_cut();
}

RANKS(cut_again_and_again_tcp, .ranks = 3, .arg = &tcp)
{
    call_while_cut();
}

RANKS(cut_again_and_again_hosts, .ranks = 4, .arg = &mixed)
{
    call_while_cut();
}

/* A call that is under way is not failed; nor one that is made while there is no connection. */
RANKS(one_cut_tcp, .ranks = 2, .arg = &tcp)
{
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        int64_t since = td__now_ns();
        CHECK_EQ(boxes_int(td_rpc_sync("w1", "echo", TD_ARGS(1), NULL)), 1);
        for (int reset = 0; reset < 2; reset++) {
            td_future *slow = td_rpc_async("w1", "sleep", TD_ARGS(200, 7), NULL);
            CHECK_EQ(cut_all(reset), 1);
            CHECK_EQ(boxes_int(td_rpc_sync("w1", "echo", TD_ARGS(2), NULL)), 2);
            CHECK_EQ(boxes_int(td_future_wait(slow, 0)), 7);
        }
        CHECK_PROMPT(since);
    }
    boxes_end();
}

/* Tensors that are larger than all buffers, cut in the middle. */
RANKS(large_tensors_tcp, .ranks = 2, .arg = &tcp)
{
    enum { HUGE = 3 << 20 };
    begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_tensor *x = td_full(TD_SHAPE(HUGE), 0, TD_F32, NULL);
        float *at = td_tensor_data(x);
        for (int i = 0; i < HUGE; i++)
            at[i] = (float)i;
        CHECK_EQ(boxes_int(td_rpc_sync("w1", "echo", TD_ARGS(1), NULL)), 1);
        for (int i = 0; i < 6; i++) {
            TD_SCOPE;
            td_future *future = td_rpc_async("w1", "echo", TD_ARGS(x), NULL);
            for (int cut = 0; cut < 4; cut++) {
                td__sleep_ns(1000000 * i);
                cut_all(cut % 2);
            }
            td_tensor *back = td_value_tensor(td_future_wait(future, 0));
            CHECK(back);
            CHECK_MEM(td_tensor_data(back), at, sizeof *at * HUGE);
        }
    }
    boxes_end();
}

/* Tensors that wait in a queue: for the connection, and because all buffers are full. A later write does not reach them. */
static void write_after_sending(int64_t elements, int count)
{
    begin();
    td_test_barrier();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_future *futures[400];
        td_tensor *x = td_full(TD_SHAPE(elements), 0, TD_F32, NULL);
        for (int i = 0; i < count; i++) {
            CHECK((futures[i] = td_rpc_async("w1", "echo", TD_ARGS(x), NULL)));
            CHECK_OK(td_add_(x, td_full(TD_SHAPE(1), 1, TD_F32, NULL)));
        }
        for (int i = 0; i < count; i++) {
            td_tensor *back = td_value_tensor(td_future_wait(futures[i], 0));
            if (!back)
                FAIL("%s", td_last_error());
            CHECK_EQ(((float *)td_tensor_data(back))[0], i);
            CHECK_EQ(((float *)td_tensor_data(back))[elements - 1], i);
        }
        CHECK_EQ(((float *)td_tensor_data(x))[elements - 1], count);
    }
    boxes_end();
}

RANKS(written_after_it_was_sent_tcp, .ranks = 2, .arg = &tcp)
{
    write_after_sending(1 << 20, 12);
}

RANKS(small_ones_written_after_they_were_sent_tcp, .ranks = 2, .arg = &tcp)
{
    write_after_sending(900, 400);
}

RANKS(small_ones_written_after_they_were_sent_shm, .ranks = 2, .arg = &shm)
{
    write_after_sending(900, 400);
}
