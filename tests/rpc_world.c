/* See rpc_world.h. */
#include "rpc_world.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

atomic_int rpc_held, rpc_cancelled;

static int64_t int_of(const td_value *value)
{
    int64_t result = 0;
    CHECK_OK(td_value_int(value, &result));
    return result;
}

static td_value *echo(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    CHECK_EQ(count, 1);
    return args[0];
}

static td_value *add(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    CHECK_EQ(count, 2);
    return td_value_of(int_of(args[0]) + int_of(args[1]));
}

static td_value *from(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    return td_value_of(td_rpc_call_from(call));
}

static td_value *fail(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_fail((td_status)int_of(args[0]), "%s", td_value_text(args[1]));
    return NULL;
}

static td_value *pause_function(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td__sleep_ns(int_of(args[0]) * 1000000);
    return args[0];
}

static td_value *bounce(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    int64_t left = int_of(args[1]);
    if (!left)
        return td_value_of(0);
    const char *to = td_value_text(td_value_at(args[0], left % td_value_count(args[0])));
    td_value *below = td_rpc_sync(to, "bounce", TD_ARGS(args[0], left - 1), NULL);
    return below ? td_value_of(int_of(below) + 1) : NULL;
}

static td_value *hold(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    atomic_fetch_add(&rpc_held, 1);
    while (!td_rpc_call_is_cancelled(call))
        td__sleep_ns(1000000);
    atomic_fetch_add(&rpc_cancelled, 1);
    return td_value_nil();
}

struct late {
    td_future *future;
    int64_t ms;
};

static void *complete_later(void *arg)
{
    struct late *late = arg;
    TD_SCOPE;
    td__sleep_ns(late->ms * 1000000);
    td_future_set(late->future, td_value_of(late->ms));
    td_future_release(late->future);
    free(late);
    return NULL;
}

static td_value *later(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    struct late *late = malloc(sizeof *late);
    pthread_t thread;
    td_future *future = td_future_create();
    *late = (struct late){.future = td_future_retain(future), .ms = int_of(args[0])};
    CHECK_EQ(pthread_create(&thread, NULL, complete_later, late), 0);
    pthread_detach(thread);
    return td_value_from_future(future);
}

enum { GATES = 64 };
static pthread_mutex_t gate_lock = PTHREAD_MUTEX_INITIALIZER;
static td_future *gates[GATES];
static int gate_count;

static td_value *gate(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_future *future = td_future_create();
    pthread_mutex_lock(&gate_lock);
    CHECK(gate_count < GATES);
    gates[gate_count++] = td_future_retain(future);
    pthread_mutex_unlock(&gate_lock);
    return td_value_from_future(future);
}

/* Brief, unless it is to wait for unblock(). */
static atomic_bool blocked;

static td_value *block(td_rpc_call *call, td_value *const *args, int count)
{
    bool waits = int_of(args[0]);
    (void)count;
    if (waits)
        atomic_store(&blocked, true);
    while (waits && atomic_load(&blocked) && !td_rpc_call_is_cancelled(call))
        usleep(100);
    return td_value_of((int)waits);
}

static td_value *unblock(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_of((int)atomic_exchange(&blocked, false));
}

static td_value *open_gate(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    pthread_mutex_lock(&gate_lock);
    int opened = gate_count;
    for (int i = 0; i < gate_count; i++) {
        td_future_set(gates[i], td_value_of("open"));
        td_future_release(gates[i]);
    }
    gate_count = 0;
    pthread_mutex_unlock(&gate_lock);
    return td_value_of(opened);
}

static td_value *huge(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    size_t size = (size_t)int_of(args[0]);
    char *bytes = calloc(size, 1);
    td_value *value = td_value_from_bytes(bytes, size);
    free(bytes);
    return value;
}

static td_value *held(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_of(atomic_load(&rpc_held));
}

static td_value *cancelled(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return td_value_of(atomic_load(&rpc_cancelled));
}

void rpc_prepare(void)
{
    static bool registered;
    if (td_test_arg())
        take_way(td_test_arg());
    if (registered)
        return;
    registered = true;
    CHECK_OK(td_rpc_register("echo(x)", echo, NULL));
    CHECK_OK(td_rpc_register("add(x: int, y: int = 10)", add, NULL));
    CHECK_OK(td_rpc_register("from()", from, NULL));
    CHECK_OK(td_rpc_register("fail(status: int, text: text)", fail, NULL));
    CHECK_OK(td_rpc_register("pause(ms: int)", pause_function, NULL));
    CHECK_OK(td_rpc_register("bounce(to: list, left: int)", bounce, NULL));
    CHECK_OK(td_rpc_register("hold()", hold, NULL));
    CHECK_OK(td_rpc_register("later(ms: int)", later, NULL));
    CHECK_OK(td_rpc_register("gate()", gate, NULL));
    CHECK_OK(td_rpc_register("open_gate()", open_gate, NULL));
    CHECK_OK(td_rpc_register("block(wait: int)", block, NULL));
    CHECK_OK(td_rpc_register("unblock()", unblock, NULL));
    CHECK_OK(td_rpc_register("huge(bytes: int)", huge, NULL));
    CHECK_OK(td_rpc_register("held()", held, NULL));
    CHECK_OK(td_rpc_register("cancelled()", cancelled, NULL));
}

void rpc_begin(const td_rpc_options *options)
{
    rpc_prepare();
    CHECK_OK(td_init_rpc(rpc_name(td_test_rank()), options));
}

void rpc_end(void)
{
    CHECK_OK(td_rpc_shutdown(&(td_rpc_shutdown_options){.timeout_ms = 60000}));
}

const char *rpc_name(int rank)
{
    static _Thread_local char names[8][16];
    static _Thread_local unsigned next;
    char *name = names[next++ % 8];
    snprintf(name, sizeof names[0], "w%d", rank);
    return name;
}

int64_t rpc_value_int(td_value *value)
{
    if (!value)
        FAIL("a call has failed: %s", td_last_error());
    return int_of(value);
}

int64_t rpc_int(const char *to, const char *function, td_value *args)
{
    TD_SCOPE;
    return rpc_value_int(td_rpc_sync(to, function, args, NULL));
}

static td_status status_of(td_value *value)
{
    return value ? TD_OK : td_last_status();
}

void rpc_check_fails(const char *to, const char *function, td_value *args,
                     const td_rpc_call_options *options, td_status status, const char *part)
{
    TD_SCOPE;
    CHECK_FAILS(status_of(td_rpc_sync(to, function, args, options)), status, part);
}

void rpc_check_failed(td_future *future, td_status status, const char *part)
{
    TD_SCOPE;
    CHECK(future);
    CHECK_FAILS(status_of(td_future_wait(future, 30000)), status, part);
}
