/* Remote references: what can be done with them, on the owner and elsewhere, and that values are freed. */
#include "base/clock.h"
#include "rpc/control.h"
#include "rpc/rref.h"
#include "rpc/rref_internal.h"
#include "rpc_boxes.h"
#include "runner.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHECK_FAILED(call, status, part)                                                           \
    CHECK_FAILS((call) ? TD_OK : td_last_status(), status, part)

static int next_rank(void)
{
    return (td_test_rank() + 1) % td_test_size();
}

/* ---- On the owner ------------------------------------------------------------------------------ */

RANKS(on_the_owner, .ranks = 1)
{
    boxes_begin();
    {
        TD_SCOPE;
        td_rref *rref = td_rref_create(td_value_from_int(7));
        CHECK(rref && td_rref_is_owner(rref) && td_rref_confirmed_by_owner(rref));
        CHECK_STR(td_rref_owner(rref), "w0");
        CHECK_EQ(boxes_int(td_rref_to_here(rref, 0)), 7);
        CHECK_EQ(boxes_int(td_rref_local_value(rref)), 7);
        CHECK(td_rref_to_here(rref, 0) == td_rref_local_value(rref));
        CHECK_FAILED(td_rref_sync(rref, "get", TD_NO_ARGS, NULL), TD_ERR_INVALID, "no methods");

        td_rref *box = td_remote("w0", "Box", TD_ARGS(5), NULL);
        CHECK(box && td_rref_is_owner(box));
        CHECK_EQ(boxes_int(td_rref_sync(box, "add", TD_ARGS(2), NULL)), 7);
        CHECK_EQ(boxes_int(td_future_wait(td_rref_async(box, "get", TD_NO_ARGS, NULL), 0)), 7);
        td_rref *sum = td_rref_remote(box, "add", TD_ARGS(3), NULL);
        CHECK_EQ(boxes_int(td_rref_local_value(sum)), 10);
        CHECK(td_value_object(td_rref_local_value(box), "Box"));
        CHECK_EQ(boxes_live(), 1);

        td_rref *back = td_value_rref(td_rpc_sync("w0", "echo", TD_ARGS(box), NULL));
        CHECK(back && back != box && td_rref_is_owner(back));
        CHECK_EQ(boxes_int(td_rref_sync(back, "get", TD_NO_ARGS, NULL)), 10);

        td_rref *bad = td_remote("w0", "Box", TD_ARGS("bad"), NULL);
        CHECK_FAILED(td_rref_to_here(bad, 0), TD_ERR_INVALID, "a bad box");
        td_rref *late = td_remote("w0", "sleep", TD_ARGS(200, 1), NULL);
        CHECK_FAILED(td_rref_to_here(late, 1), TD_ERR_TIMEOUT, "td_rref_to_here");
        CHECK_EQ(boxes_int(td_rref_to_here(late, 0)), 1);
        CHECK_FAILED(td_rref_to_here(late, -1), TD_ERR_INVALID, "timeout");
        CHECK_FAILED(td_rref_to_here(NULL, 0), TD_ERR_INVALID, "NULL");
        CHECK_FAILED(td_rref_create(NULL), TD_ERR_INVALID, "NULL");
        CHECK(!td_rref_owner(NULL) && !td_rref_is_owner(NULL) && !td_rref_confirmed_by_owner(NULL));
        td_rref_release(NULL);
    }
    boxes_end();
}

/* ---- Elsewhere --------------------------------------------------------------------------------- */

static void use_a_box(int owner)
{
    TD_SCOPE;
    td_rref *box = td_remote(boxes_name(owner), "Box", TD_ARGS(5), NULL);
    CHECK(box && !td_rref_is_owner(box));
    CHECK_STR(td_rref_owner(box), boxes_name(owner));
    td_rref *soon = td_rref_remote(box, "add", TD_ARGS(1), NULL); /* before there is a box */
    CHECK_EQ(boxes_int(td_rref_to_here(soon, 0)), 6);
    CHECK_EQ(boxes_int(td_rref_sync(box, "add", TD_ARGS(2), NULL)), 8);
    CHECK_EQ(boxes_int(td_future_wait(td_rref_async(box, "get", TD_NO_ARGS, NULL), 0)), 8);
    CHECK(td_rref_confirmed_by_owner(box));
    CHECK_FAILED(td_rref_local_value(box), TD_ERR_STATE, boxes_name(owner));
    CHECK_FAILED(td_rref_to_here(box, 0), TD_ERR_UNSUPPORTED, "Box");
    CHECK_FAILED(td_rref_sync(box, "fail", TD_NO_ARGS, NULL), TD_ERR_MISMATCH, "the box fails");
    CHECK_FAILED(td_rref_sync(box, "fly", TD_NO_ARGS, NULL), TD_ERR_INVALID, "fly");
    CHECK_FAILED(td_rref_sync(box, "add", TD_ARGS("x"), NULL), TD_ERR_INVALID, "n");
    td_value *named = td_value_set(td_value_map(), "n", td_value_of(4));
    CHECK_EQ(
        boxes_int(td_rref_sync(box, "add", TD_NO_ARGS, &(td_rpc_call_options){.kwargs = named})),
        12);
    td_rref *failing = td_rref_remote(box, "fail", TD_NO_ARGS, NULL);
    CHECK_FAILED(td_rref_to_here(failing, 0), TD_ERR_MISMATCH, "the box fails");
    CHECK_FAILED(td_rref_to_here(failing, 0), TD_ERR_MISMATCH, "the box fails");
}

static void use_what_fails(int owner)
{
    TD_SCOPE;
    const char *to = boxes_name(owner);
    td_rref *bad = td_remote(to, "Box", TD_ARGS("bad"), NULL);
    CHECK_FAILED(td_rref_to_here(bad, 0), TD_ERR_INVALID, "a bad box");
    CHECK_FAILED(td_rref_sync(bad, "get", TD_NO_ARGS, NULL), TD_ERR_INVALID, "a bad box");
    td_rref *of_bad = td_rref_remote(bad, "get", TD_NO_ARGS, NULL);
    CHECK(!of_bad || !td_rref_to_here(of_bad, 0));
    td_rref *none = td_remote(to, "nothing", TD_NO_ARGS, NULL);
    CHECK_FAILED(td_rref_to_here(none, 0), TD_ERR_INVALID, "nothing");
    CHECK_FAILED(td_remote("nobody", "Box", TD_NO_ARGS, NULL), TD_ERR_INVALID, "nobody");
    CHECK_FAILED(td_remote(to, "Box", NULL, NULL), TD_ERR_INVALID, "NULL");

    /* To give up waiting leaves the value as it is. */
    td_rref *late = td_remote(to, "sleep", TD_ARGS(200, 7), NULL);
    CHECK_FAILED(td_rref_to_here(late, 1), TD_ERR_TIMEOUT, to);
    CHECK_EQ(boxes_int(td_rref_to_here(late, 0)), 7);

    /* The call runs into its timeout, and the value is freed when it is there. */
    td_rref *slow = td_remote(to, "sleep", TD_ARGS(100, 7),
                              &(td_rpc_call_options){.timeout_ms = 10});
    CHECK_SOON(!td_rref_to_here(slow, 0));
    CHECK_FAILED(td_rref_to_here(slow, 0), TD_ERR_TIMEOUT, to);
}

/* Methods of a reference that was released meanwhile are served. */
static void release_at_once(int owner)
{
    TD_SCOPE;
    td_future *futures[100];
    for (int i = 0; i < 100; i++) {
        TD_SCOPE;
        td_rref *box = td_remote(boxes_name(owner), "Box", TD_ARGS(i), NULL);
        td_rref *next = td_rref_remote(box, "add", TD_ARGS(1), NULL);
        CHECK(next);
        futures[i] = td_future_retain(td_rref_async(box, "add", TD_ARGS(1), NULL));
    }
    for (int i = 0; i < 100; i++) {
        int64_t sum = boxes_int(td_future_wait(futures[i], 0));
        CHECK(sum == i + 1 || sum == i + 2);
        td_future_release(futures[i]);
    }
}

RANKS(on_a_user, .ranks = 2)
{
    boxes_begin();
    use_a_box(next_rank());
    use_what_fails(next_rank());
    release_at_once(next_rank());
    boxes_end();
}

RANKS(on_a_user_over_tcp, .ranks = 2)
{
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    boxes_begin();
    use_a_box(next_rank());
    release_at_once(next_rank());
    boxes_end();
}

RANKS(modules, .ranks = 2)
{
    boxes_begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_rref *net = td_remote("w1", "Net", TD_NO_ARGS, NULL);
        td_tensor *x = td_full(TD_SHAPE(1, 3), 2, TD_F32, NULL);
        td_tensor *y = td_value_tensor(td_rref_sync(net, "forward", TD_ARGS(x), NULL));
        CHECK_EQ(((float *)td_tensor_data(y))[0], 7);
        td_value *list = td_rref_sync(net, "parameters", TD_NO_ARGS, NULL);
        CHECK_EQ(td_value_count(list), 2);
        td_rref *weight = td_value_rref(td_value_at(list, 0));
        CHECK_EQ(td_tensor_numel(td_value_tensor(td_rref_to_here(weight, 0))), 6);
        td_value *state = td_rref_sync(net, "state", TD_NO_ARGS, NULL);
        CHECK_EQ(td_value_count(state), 2);
        CHECK_OK(td_fill_(td_value_tensor(td_value_get(state, "weight")), 0));
        CHECK(td_rref_sync(net, "load_state", TD_ARGS(state), NULL));
        y = td_value_tensor(td_rref_sync(net, "forward", TD_ARGS(x), NULL));
        CHECK_EQ(((float *)td_tensor_data(y))[0], 1);
        CHECK(td_rref_sync(net, "train", TD_ARGS(td_value_from_bool(false)), NULL));
        CHECK(td_rref_sync(net, "parameter", TD_ARGS("bias"), NULL));
        CHECK_FAILED(td_rref_sync(net, "backward", TD_NO_ARGS, NULL), TD_ERR_INVALID, "backward");
        td_rref *later = td_rref_remote(net, "forward", TD_ARGS(x), NULL);
        CHECK_EQ(((float *)td_tensor_data(td_value_tensor(td_rref_to_here(later, 0))))[1], 1);
    }
    boxes_end();
}

/* ---- Passing on -------------------------------------------------------------------------------- */

static void pass_on(void)
{
    TD_SCOPE;
    td_rref *box = td_remote("w1", "Box", TD_ARGS(1), NULL), *own = td_rref_create(td_value_of(2));
    td_rref *back = td_value_rref(td_rpc_sync("w1", "echo", TD_ARGS(box), NULL)); /* the owner */
    CHECK(back && td_rref_confirmed_by_owner(back) && !td_rref_is_owner(back));
    td_rref *other = td_value_rref(td_rpc_sync("w2", "echo", TD_ARGS(back), NULL)); /* a user */
    CHECK_EQ(boxes_int(td_rref_sync(other, "add", TD_ARGS(1), NULL)), 2);
    td_rref *same = td_value_rref(td_rpc_sync("w0", "echo", TD_ARGS(other), NULL)); /* itself */
    CHECK_EQ(boxes_int(td_rref_sync(same, "add", TD_ARGS(1), NULL)), 3);
    td_rref *home = td_value_rref(td_rpc_sync("w2", "echo", TD_ARGS(own), NULL));
    CHECK(home && td_rref_is_owner(home));
    CHECK_EQ(boxes_int(td_rref_to_here(home, 0)), 2);

    td_value *map = td_value_set(td_value_map(), "a", td_value_of(box));
    map = td_value_set(map, "list", td_value_list(TD_VALUES(td_value_of(own), td_value_of(box))));
    td_value *copy = td_rpc_sync("w2", "echo", TD_ARGS(map), NULL);
    td_rref *inner = td_value_rref(td_value_at(td_value_get(copy, "list"), 1));
    CHECK_EQ(boxes_int(td_rref_sync(inner, "get", TD_NO_ARGS, NULL)), 3);
    CHECK(td_rref_is_owner(td_value_rref(td_value_at(td_value_get(copy, "list"), 0))));

    /* A box on one worker holds a reference to one on another, and is the only one to do so. */
    td_rref *outer = td_remote("w2", "Box", TD_ARGS(td_remote("w1", "Box", TD_ARGS(9), NULL)),
                               NULL);
    td_value *held = td_rref_sync(outer, "get", TD_NO_ARGS, NULL);
    CHECK_EQ(boxes_int(td_rref_sync(td_value_rref(held), "get", TD_NO_ARGS, NULL)), 9);
}

RANKS(passed_on, .ranks = 3)
{
    boxes_begin();
    if (td_test_rank() == 0)
        pass_on();
    boxes_end();
}

/* Messages that carry references and are never decoded, or never sent. */
RANKS(messages_that_fail, .ranks = 3)
{
    boxes_begin();
    if (td_test_rank() == 0) {
        TD_SCOPE;
        td_rref *own = td_rref_create(td_value_of(1)),
                *box = td_remote("w1", "Box", TD_NO_ARGS, NULL);
        td_value *future = td_value_from_future(td_future_create());
        td_tensor *large = td_full(TD_SHAPE(4096), 1, TD_F32, NULL);
        CHECK_FAILED(td_rpc_sync("w2", "echo", TD_ARGS(own, box, large, future), NULL),
                     TD_ERR_INVALID, "future");
        CHECK_EQ(boxes_leases(), 0);
        CHECK_EQ(boxes_children(), 0);
        CHECK_FAILED(td_rpc_sync("w2", "nothing", TD_ARGS(own, box), NULL), TD_ERR_INVALID,
                     "nothing");
        CHECK_FAILED(td_rpc_sync("w2", "echo", TD_ARGS(own, box), NULL), TD_ERR_INVALID, "echo");
        /* Cancelled before they run, most of them. */
        for (int i = 0; i < 200; i++) {
            TD_SCOPE;
            td_future_cancel(td_rpc_async("w2", "echo", TD_ARGS(td_value_of(own)), NULL));
            td_future_cancel(td_rpc_async("w2", "echo", TD_ARGS(td_value_of(box)), NULL));
            td_future_cancel(td_rpc_async("w1", "echo", TD_ARGS(td_value_of(box)), NULL));
        }
        /* A call that makes a value cannot be decoded: it fails for those that have the reference, too. */
        td_rref *odd = td_remote("w1", "td.value", TD_ARGS("x"), NULL);
        CHECK_FAILED(td_rref_to_here(odd, 0), TD_ERR_INVALID, "");
    }
    boxes_end();
}

/* ---- Many -------------------------------------------------------------------------------------- */

static long resident_kib(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void make_and_drop(int count)
{
    for (int i = 0; i < count; i += 100) {
        TD_SCOPE;
        td_rref *last = NULL;
        for (int j = 0; j < 100; j++)
            CHECK(last = td_remote("w1", "Box", TD_ARGS(j), NULL));
        CHECK_EQ(boxes_int(td_rref_sync(last, "get", TD_NO_ARGS, NULL)), 99);
    }
}

RANKS(a_hundred_thousand, .ranks = 2, .deadline_s = 60)
{
    boxes_begin();
    int count = 100000 / td_test_slowness();
    if (td_test_rank() == 0)
        make_and_drop(count / 5);
    boxes_check_empty();
    long before = resident_kib();
    if (td_test_rank() == 0)
        make_and_drop(count);
    boxes_check_empty();
    if (td_test_slowness() == 1)
        CHECK(resident_kib() < before + 2048);
    boxes_end();
}

/* ---- Any order --------------------------------------------------------------------------------- */

enum { SLOTS = 24, STEPS = 2000 };

static struct {
    pthread_mutex_t lock;
    td_rref *slots[SLOTS];
    uint64_t random;
    td_future *calls[STEPS]; /* that nobody waited for */
    int call_count;
} store = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t draw(void)
{
    pthread_mutex_lock(&store.lock);
    store.random ^= store.random << 13;
    store.random ^= store.random >> 7;
    store.random ^= store.random << 17;
    uint64_t random = store.random;
    pthread_mutex_unlock(&store.lock);
    return random >> 20;
}

/* A reference of a random slot, with one reference; or NULL. */
static td_rref *pick(void)
{
    uint64_t slot = draw() % SLOTS;
    pthread_mutex_lock(&store.lock);
    td_rref *rref = td_rref_retain(store.slots[slot]);
    pthread_mutex_unlock(&store.lock);
    return rref;
}

static void put(td_rref *rref)
{
    uint64_t slot = draw() % SLOTS;
    pthread_mutex_lock(&store.lock);
    td_rref *old = store.slots[slot];
    store.slots[slot] = td_rref_retain(rref);
    pthread_mutex_unlock(&store.lock);
    td_rref_release(old);
}

static td_value *swap(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    for (int64_t i = 0; i < td_value_count(args[0]); i++)
        put(td_value_rref(td_value_at(args[0], i)));
    td_rref *mine = pick();
    td_value *value = mine ? td_value_from_rref(mine) : td_value_nil();
    td_rref_release(mine);
    return value;
}

static void one_step(void)
{
    TD_SCOPE;
    const char *to = boxes_name((int)(draw() % (uint64_t)td_test_size()));
    td_rref *a = pick(), *b = pick();
    switch (draw() % 8) {
    case 0:
    case 1:
        put(td_remote(to, "Box", TD_ARGS(0), NULL));
        break;
    case 2: /* passed on before the owner knows of it */
        CHECK(store.calls[store.call_count++] = td_future_retain(td_rpc_async(
                  to, "swap",
                  TD_ARGS(TD_ARGS(
                      td_remote(boxes_name((int)(draw() % 3)), "Box", TD_ARGS(0), NULL))),
                  NULL)));
        break;
    case 3:
    case 4:
    case 5:
        if (a && b) {
            td_value *got = td_rpc_sync(to, "swap", TD_ARGS(TD_ARGS(a, b)), NULL);
            CHECK(got);
            if (td_value_kind_of(got) == TD_VALUE_RREF)
                put(td_value_rref(got));
        }
        break;
    case 6:
        if (a)
            CHECK(boxes_int(td_rref_sync(a, "add", TD_ARGS(1), NULL)) > 0);
        break;
    case 7:
        put(NULL);
        break;
    }
    td_rref_release(a);
    td_rref_release(b);
}

static void walk(int steps, uint64_t seed)
{
    CHECK_OK(td_rpc_register("swap(x: list)", swap, NULL));
    store.random = seed * 77 + (uint64_t)td_test_rank() + 1;
    boxes_begin();
    boxes_delay(seed * 100 + (uint64_t)td_test_rank());
    for (int i = 0; i < steps; i++)
        one_step();
    for (int i = 0; i < store.call_count; i++) { /* those under way would fill slots again */
        TD_SCOPE;
        CHECK(td_future_wait(store.calls[i], 0));
        td_future_release(store.calls[i]);
    }
    td_test_barrier();
    pthread_mutex_lock(&store.lock); /* after the threads that have filled them */
    for (int i = 0; i < SLOTS; i++)
        td_rref_release(store.slots[i]);
    pthread_mutex_unlock(&store.lock);
    boxes_check_empty();
    boxes_delay_end();
    boxes_end();
}

RANKS(any_order_of_three, .ranks = 3, .deadline_s = 60)
{
    walk(STEPS / td_test_slowness(), 1);
}

RANKS(any_order_of_four, .ranks = 4, .deadline_s = 60)
{
    walk(1500 / td_test_slowness(), 2);
}

/* ---- Repetitions ------------------------------------------------------------------------------- */

static atomic_int controls; /* messages of the library's own that have come */

static bool count_controls(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    struct td__reader body = td__incoming_body(incoming);
    struct td__span function = td__reader_string(&body, 4096);
    (void)agent;
    if (function.size == 10 && !memcmp(function.data, "td.control", 10))
        atomic_fetch_add(&controls, 1);
    return false;
}

/* Repetitions of a message are not answered before the first one has taken effect, which takes long here: otherwise the
 * fork could be deleted before it is added. */
RANKS(repeated_before_it_takes_effect, .ranks = 3)
{
    boxes_begin();
    atomic_store(&td__control_answer_ms, 20);
    if (td_test_rank() == 1) {
        struct td__rpc_agent *agent = td__agent_hold();
        pthread_mutex_lock(&agent->rref_lock);
        atomic_store(&td__serve_delay, count_controls);
        td_test_barrier();
        CHECK_SOON(atomic_load(&controls) >= 5);
        td_test_barrier(); /* w2 looks at its fork */
        td_test_barrier();
        pthread_mutex_unlock(&agent->rref_lock);
        atomic_store(&td__serve_delay, NULL);
        td__agent_leave(agent);
    } else if (td_test_rank() == 0) {
        TD_SCOPE;
        td_test_barrier();
        td_rref *box = td_remote("w1", "Box", TD_ARGS(1), NULL);
        CHECK(td_rpc_sync("w2", "keep", TD_ARGS(box), NULL));
        td_test_barrier();
        td_test_barrier();
        CHECK_SOON(!boxes_children());
        CHECK(td_rpc_sync("w2", "drop", TD_NO_ARGS, NULL));
    } else {
        TD_SCOPE;
        td_test_barrier();
        td_test_barrier();
        td_value *kept = td_rpc_sync("w2", "kept", TD_NO_ARGS, NULL);
        CHECK(!td_rref_confirmed_by_owner(td_value_rref(kept)));
        td_test_barrier();
    }
    boxes_end();
    atomic_store(&td__control_answer_ms, 0);
}

/* ---- Ends -------------------------------------------------------------------------------------- */

RANKS(the_owner_dies, .ranks = 3, .may_die = 1 << 1)
{
    boxes_begin();
    if (td_test_rank() == 1) {
        td_test_barrier();
        pause();
    }
    {
        TD_SCOPE;
        td_rref *box = td_remote("w1", "Box", TD_ARGS(3), NULL);
        CHECK_EQ(boxes_int(td_rref_sync(box, "get", TD_NO_ARGS, NULL)), 3);
        td_future *waiting = td_rpc_async("w1", "sleep", TD_ARGS(60000, 1), NULL);
        td_test_barrier();
        if (td_test_rank() == 0)
            td_test_kill(1, SIGKILL);
        int64_t since = td__now_ns();
        CHECK_FAILED(td_future_wait(waiting, 0), TD_ERR_PEER, "\"w1\"");
        CHECK_FAILED(td_rref_sync(box, "get", TD_NO_ARGS, NULL), TD_ERR_PEER, "\"w1\"");
        CHECK_FAILED(td_rref_to_here(box, 0), TD_ERR_PEER, "\"w1\"");
        /* It can still be passed on; of no use. */
        const char *other = boxes_name(2 - td_test_rank());
        td_rref *copy = td_value_rref(td_rpc_sync(other, "echo", TD_ARGS(box), NULL));
        CHECK(copy && !td_rref_confirmed_by_owner(copy));
        CHECK_FAILED(td_rref_to_here(copy, 0), TD_ERR_PEER, "\"w1\"");
        CHECK_PROMPT(since);
    }
    CHECK_SOON(!boxes_children() && !boxes_entries());
    CHECK_OK(td_rpc_shutdown(NULL));
}

RANKS(a_user_dies, .ranks = 3, .may_die = 1 << 1)
{
    boxes_begin();
    td_test_barrier();
    if (td_test_rank() == 1) {
        for (int i = 0; i < 50; i++) {
            td_rref *box = td_rref_retain(td_remote("w0", "Box", TD_ARGS(i), NULL));
            CHECK(td_rpc_sync("w2", "keep", TD_ARGS(box), NULL));
            CHECK(td_rpc_sync("w2", "drop", TD_NO_ARGS, NULL));
        }
        td_test_barrier();
        pause();
    }
    td_test_barrier();
    if (td_test_rank() == 0) {
        CHECK_SOON(boxes_live() == 50);
        td_test_kill(1, SIGKILL);
    }
    CHECK_SOON(!boxes_live() && !boxes_entries() && !boxes_children());
    CHECK_OK(td_rpc_shutdown(NULL));
}

static bool has_no_forks(struct td__rpc_agent *agent, int rank)
{
    pthread_mutex_lock(&agent->rref_lock);
    bool ended = agent->workers[rank]->forks_ended;
    pthread_mutex_unlock(&agent->rref_lock);
    return ended;
}

/* A worker has died, and its last messages are served after that: no value is waited for that it was to make. */
RANKS(late_messages_of_a_dead_worker, .ranks = 2, .may_die = 1 << 1)
{
    enum { FORK = 12 };
    const uint64_t id = UINT64_C(1) << TD__ID_RANK_SHIFT | 77; /* of rank 1 */
    boxes_begin();
    td_test_barrier();
    if (td_test_rank() == 1)
        raise(SIGKILL);
    {
        TD_SCOPE;
        CHECK_SOON(!td_rpc_sync("w1", "echo", TD_ARGS(1), NULL));
        struct td__rpc_agent *agent = td__agent_hold();
        CHECK_SOON(has_no_forks(agent, 1));
        CHECK_OK(td__rref_fork_delete(agent, id, FORK, 1));
        CHECK_EQ(boxes_entries(), 0);
        td_future *value = td__rref_use(agent, id);
        CHECK_FAILED(td_future_wait(value, 0), TD_ERR_PEER, "\"w1\", which was to make the value");
        td_future_release(value);
        td_future_release(td__rref_begin(agent, id, FORK, 1, "echo"));
        td__agent_leave(agent);
    }
    CHECK_EQ(boxes_entries(), 0);
    CHECK_OK(td_rpc_shutdown(NULL));
}

/* What is still in use at the shutdown is reported on its owner. */
RANKS(leaks_are_reported, .ranks = 2)
{
    boxes_begin();
    td_rref *leaks[3] = {NULL};
    if (td_test_rank() == 0) {
        TD_SCOPE;
        leaks[0] = td_rref_retain(td_remote("w1", "Box", TD_ARGS(3), NULL));
        leaks[1] = td_rref_retain(td_rref_create(td_value_of("x")));
        leaks[2] = td_rref_retain(td_rref_remote(leaks[0], "get", TD_NO_ARGS, NULL));
    }
    CHECK_OK(td_rpc_shutdown(NULL));
    td_log_set_sink(NULL, NULL);
    CHECK_EQ(boxes_live(), 0);
    if (td_test_rank() == 0) {
        CHECK_CONTAINS(boxes_warnings(),
                       "a reference to text on worker \"w0\" is still in use at the "
                       "shutdown: by this worker");
        CHECK_FAILED(td_rref_to_here(leaks[0], 0), TD_ERR_STATE, "");
        for (int i = 0; i < 3; i++)
            td_rref_release(leaks[i]);
    } else {
        CHECK_CONTAINS(boxes_warnings(),
                       "a reference to Box on worker \"w1\" is still in use at the "
                       "shutdown: by \"w0\"");
        CHECK_CONTAINS(boxes_warnings(), "a reference to get on worker \"w1\"");
    }
}

static void *wait_for_value(void *rref)
{
    CHECK_FAILED(td_rref_to_here(rref, 0), TD_ERR_ABORTED, "shut down");
    return NULL;
}

RANKS(a_value_that_is_awaited_at_the_shutdown, .ranks = 1)
{
    boxes_begin();
    int64_t since = td__now_ns();
    td_future *never = td_future_create();
    pthread_t thread;
    {
        TD_SCOPE;
        td_rref *rref = td_rref_retain(td_rref_create(td_value_of(1)));
        td_rref *late = td_rref_retain(td_remote("w0", "sleep", TD_ARGS(300, 1), NULL));
        CHECK_EQ(pthread_create(&thread, NULL, wait_for_value, late), 0);
        td__sleep_ns(50000000);
        CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.now = true}));
        CHECK_EQ(pthread_join(thread, NULL), 0);
        td_rref_release(rref);
        td_rref_release(late);
    }
    td_future_release(never);
    CHECK_PROMPT(since);
}
