#include "rpc_boxes.h"

#include "base/clock.h"
#include "rpc/control.h"
#include "rpc/lease.h"
#include "rpc/rref.h"
#include "runner.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

struct box {
    td_value *value;
};

static atomic_int live;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static td_value *kept;
static char warnings[4096];

/* ---- Functions ------------------------------------------------------------------------------- */

static void *box_create(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    if (td_value_kind_of(args[0]) == TD_VALUE_TEXT && !strcmp(td_value_text(args[0]), "bad")) {
        td_fail(TD_ERR_INVALID, "a bad box");
        return NULL;
    }
    struct box *box = malloc(sizeof *box);
    box->value = td_value_retain(args[0]);
    atomic_fetch_add(&live, 1);
    return box;
}

static void box_destroy(void *object)
{
    struct box *box = object;
    td_value_release(box->value);
    free(box);
    atomic_fetch_sub(&live, 1);
}

static td_value *box_get(td_rpc_call *call, td_value *const *args, int count)
{
    (void)args, (void)count;
    struct box *box = td_rpc_call_self(call);
    pthread_mutex_lock(&lock);
    td_value *value = box->value; /* held by the box while the call runs */
    pthread_mutex_unlock(&lock);
    return value;
}

static td_value *box_add(td_rpc_call *call, td_value *const *args, int count)
{
    (void)count;
    struct box *box = td_rpc_call_self(call);
    pthread_mutex_lock(&lock);
    td_value *old = box->value;
    box->value = td_value_retain(td_value_from_int(boxes_int(old) + boxes_int(args[0])));
    td_value *result = td_value_from_int(boxes_int(box->value));
    pthread_mutex_unlock(&lock);
    td_value_release(old);
    return result;
}

static td_value *fail(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    td_fail(TD_ERR_MISMATCH, "%s", count ? td_value_text(args[0]) : "the box fails");
    return NULL;
}

static td_value *echo(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    return args[0];
}

static td_value *keep(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    pthread_mutex_lock(&lock);
    td_value *old = kept;
    kept = count ? td_value_retain(args[0]) : NULL;
    pthread_mutex_unlock(&lock);
    td_value_release(old);
    return td_value_nil();
}

static td_value *get_kept(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    return kept ? kept : td_value_nil();
}

static td_value *wait_ms(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td__sleep_ns(boxes_int(args[0]) * 1000000);
    return args[1];
}

static td_value *net(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_module *linear = td_linear(3, 2);
    td_state *state = td_module_parameters(linear);
    for (int i = 0; i < td_state_count(state); i++) {
        td_tensor *parameter = td_state_tensor(state, i);
        float *at = td_tensor_data(parameter);
        for (int64_t j = 0; j < td_tensor_numel(parameter); j++)
            at[j] = 1;
    }
    td_state_destroy(state);
    return td_value_from_module(linear);
}

static const td_rpc_method box_methods[] = {
    {"get()", box_get}, {"add(n: int)", box_add}, {"fail()", fail}, {0}};

static void register_all(void)
{
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "Box(value = nil)",
                                                   .create = box_create,
                                                   .destroy = box_destroy,
                                                   .methods = box_methods}));
    CHECK_OK(td_rpc_register("echo(x)", echo, NULL));
    CHECK_OK(td_rpc_register("keep(x)", keep, NULL));
    CHECK_OK(td_rpc_register("drop()", keep, NULL));
    CHECK_OK(td_rpc_register("kept()", get_kept, NULL));
    CHECK_OK(td_rpc_register("sleep(ms: int, x)", wait_ms, NULL));
    CHECK_OK(td_rpc_register("fail(text: text)", fail, NULL));
    CHECK_OK(td_rpc_register("Net()", net, NULL));
}

/* ---- Workers --------------------------------------------------------------------------------- */

static void on_line(td_log_level level, const char *line, void *arg)
{
    (void)arg;
    size_t have = strlen(warnings);
    if (level <= TD_LOG_WARN)
        snprintf(warnings + have, sizeof warnings - have, "%s\n", line);
}

void boxes_begin(void)
{
    static bool registered;
    if (!registered)
        register_all();
    registered = true;
    warnings[0] = 0;
    td_log_set_sink(on_line, NULL);
    CHECK_OK(td_init_rpc(boxes_name(td_test_rank()), NULL));
}

static int count(int (*fn)(struct td__rpc_agent *agent))
{
    struct td__rpc_agent *agent = td__agent_hold();
    CHECK(agent);
    int result = fn(agent);
    td__agent_leave(agent);
    return result;
}

static int count_children(struct td__rpc_agent *agent)
{
    pthread_mutex_lock(&agent->rref_lock);
    int children = (int)agent->rref_children.size;
    pthread_mutex_unlock(&agent->rref_lock);
    return children;
}

int boxes_live(void)
{
    return atomic_load(&live);
}

int boxes_entries(void)
{
    return count(td__rref_entry_count);
}

int boxes_children(void)
{
    return count(count_children);
}

int boxes_leases(void)
{
    return count(td__rpc_lease_count);
}

void boxes_check_empty(void)
{
    td_test_barrier();
    CHECK_SOON(!boxes_live());
    CHECK_SOON(!boxes_entries());
    CHECK_SOON(!boxes_children());
    CHECK_SOON(!boxes_leases());
    td_test_barrier();
}

void boxes_end(void)
{
    boxes_check_empty();
    CHECK_OK(td_rpc_shutdown(NULL));
    td_log_set_sink(NULL, NULL);
    CHECK_STR(warnings, "");
}

const char *boxes_name(int rank)
{
    static _Thread_local char names[4][16];
    static _Thread_local int next;
    char *name = names[next++ % 4];
    snprintf(name, sizeof names[0], "w%d", rank);
    return name;
}

int64_t boxes_int(const td_value *value)
{
    int64_t number;
    CHECK_OK(td_value_int(value, &number));
    return number;
}

const char *boxes_warnings(void)
{
    return warnings;
}

/* ---- Delays ---------------------------------------------------------------------------------- */

enum { HELD = 64 };

static struct {
    pthread_mutex_t lock;
    uint64_t random;
    bool active;
    pthread_t thread;
    struct td__incoming *held[HELD];
    int count;
} late = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t next_random(void)
{
    late.random ^= late.random << 13;
    late.random ^= late.random >> 7;
    late.random ^= late.random << 17;
    return late.random;
}

static struct td__incoming *copy_of(const struct td__incoming *incoming)
{
    size_t size = (size_t)incoming->header.records + incoming->header.body;
    struct td__incoming *copy = malloc(sizeof *copy + size);
    CHECK(copy && !incoming->header.tensors && !incoming->header.rrefs);
    memcpy(copy, incoming, sizeof *copy + size);
    copy->bytes = (uint8_t *)(copy + 1);
    copy->capacity = size;
    return copy;
}

static bool hold_back(struct td__rpc_agent *agent, struct td__incoming *incoming)
{
    struct td__reader body = td__incoming_body(incoming);
    struct td__span function = td__reader_string(&body, 4096);
    bool control = function.size == 10 && !memcmp(function.data, "td.control", 10);
    (void)agent;
    if (incoming->status || function.size < 4 || memcmp(function.data, "td.", 3))
        return false;
    pthread_mutex_lock(&late.lock);
    int times = control && next_random() % 4 == 0 ? 2 : 1;
    bool hold = late.active && late.count + times <= HELD && next_random() % 8 != 0;
    if (hold && times == 2)
        late.held[late.count++] = copy_of(incoming);
    if (hold)
        late.held[late.count++] = incoming;
    pthread_mutex_unlock(&late.lock);
    return hold;
}

/* Delivers one of those that are held, at random; false if there is none. */
static bool deliver(struct td__rpc_agent *agent)
{
    struct td__incoming *incoming = NULL;
    pthread_mutex_lock(&late.lock);
    if (late.count) {
        int i = (int)(next_random() % (uint64_t)late.count);
        incoming = late.held[i];
        late.held[i] = late.held[--late.count];
    }
    pthread_mutex_unlock(&late.lock);
    if (!incoming)
        return false;
    td__serve_now(agent, incoming);
    td__io_wake(agent);
    return true;
}

static void *deliver_all(void *arg)
{
    struct td__rpc_agent *agent = arg;
    for (bool active = true; active;) {
        pthread_mutex_lock(&late.lock);
        active = late.active;
        uint64_t random = next_random();
        int left = late.count;
        pthread_mutex_unlock(&late.lock);
        if (left > 3 || random % 4 == 0)
            deliver(agent);
        if (random % 64 == 0)
            td__sleep_ns(2000000);
        else if (left < 8)
            td__sleep_ns(20000);
    }
    while (deliver(agent))
        continue;
    return NULL;
}

void boxes_delay(uint64_t seed)
{
    struct td__rpc_agent *agent = td__agent_hold();
    late.random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    late.active = true;
    atomic_store(&td__control_answer_ms, 30);
    CHECK_EQ(pthread_create(&late.thread, NULL, deliver_all, agent), 0);
    atomic_store(&td__serve_delay, hold_back);
    td__agent_leave(agent);
}

void boxes_delay_end(void)
{
    pthread_mutex_lock(&late.lock);
    late.active = false;
    pthread_mutex_unlock(&late.lock);
    CHECK_EQ(pthread_join(late.thread, NULL), 0);
    atomic_store(&td__serve_delay, NULL);
    atomic_store(&td__control_answer_ms, 0);
}
