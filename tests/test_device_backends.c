/* The backends of a group: one for each kind of device, chosen or by default; those that start calls and complete them
 * later. */
#include "base/fail.h"
#include "runner.h"
#include "toy_device.h"

#include <tandem/tandem.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static td_device *toy(void)
{
    return td_device_get("toy:0");
}

/* ---- Backends of kinds ---------------------------------------------------------------------------- */

/* One that starts calls: of all_reduce, which it makes of one rank's tensor, doubling nothing: it fills with the number
 * of ranks. Everything else it does not have. */
static atomic_int submitted, batches, created;

static td_status mine_create(const td_backend_context *context, void *arg, void **self)
{
    (void)arg;
    created++;
    *self = (void *)context;
    return TD_OK;
}

static void mine_destroy(void *self)
{
    (void)self;
    created--;
}

static td_status mine_submit(void *self, const td_call *call, td_work *work)
{
    const td_backend_context *context = self;
    if (call->kind != TD_OP_ALL_REDUCE && call->kind < TD_OP_SEND)
        return td_fail(TD_ERR_UNSUPPORTED, "mine has no %s", td_op_kind_name(call->kind));
    CHECK(call->device && call->stream);
    submitted++;
    const td_device_ops *ops = toy_ops();
    if (call->kind == TD_OP_ALL_REDUCE)
        TD_TRY(ops->fill(td_device_self(call->device), td_stream_self(call->stream), call->output,
                         (unsigned char)context->size, call->count));
    td_work_complete(work, TD_OK, call->peer, 0);
    return TD_OK;
}

static td_status mine_begin(void *self)
{
    (void)self;
    batches++;
    return TD_OK;
}

static td_status mine_end(void *self)
{
    (void)self;
    batches += 100;
    return TD_OK;
}

static const char *const mine_devices[] = {"toy", NULL};
static const td_backend_ops mine = {.create = mine_create,
                                    .destroy = mine_destroy,
                                    .submit = mine_submit,
                                    .batch_begin = mine_begin,
                                    .batch_end = mine_end,
                                    .devices = mine_devices};

static void use_mine(td_group *group)
{
    TD_SCOPE;
    td_tensor *x = td_zeros(TD_SHAPE(7), TD_U8, toy()), *y = td_ones(TD_SHAPE(7), TD_I32, NULL);
    td_work *works[2] = {0};
    int before = submitted, peer = 1 - td_get_rank(NULL);
    CHECK_OK(td_all_reduce(x, TD_SUM, group, NULL));
    CHECK_OK(td_all_reduce(x, TD_SUM, group, &works[0]));
    CHECK_OK(td_work_synchronize(works[0], 0));
    td_work_release(works[0]);
    CHECK_EQ(submitted, before + 2);
    CHECK_EQ(td_item(td_select(x, 0, 6)), 2);
    CHECK_FAILS(td_broadcast(x, 0, group, NULL), TD_ERR_UNSUPPORTED, "mine has no broadcast");
    td_p2p_op ops[2] = {{TD_P2P_ISEND, x, peer, 0, group, {0}},
                        {TD_P2P_IRECV, x, peer, 0, group, {0}}};
    batches = 0;
    CHECK_OK(td_batch_isend_irecv(ops, 2, works));
    CHECK_EQ(batches, 101);
    CHECK_OK(td_work_wait_all(works, 2, 0));
    td_work_release(works[0]);
    td_work_release(works[1]);
    CHECK_OK(td_all_reduce(y, TD_SUM, group, NULL)); /* the host's */
    CHECK_EQ(td_item(td_select(y, 0, 6)), 2);
    CHECK_OK(td_barrier(group, NULL));
}

RANKS(a_backend_for_each_kind, .ranks = 2)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_register_backend("mine", &mine, NULL));
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "cpu:native,toy:mine"}));
    CHECK_STR(td_get_backend(NULL), "cpu:native,toy:mine");
    CHECK_EQ(created, 1);
    use_mine(NULL);
    td_group *group;
    CHECK_OK(td_new_group(NULL, 0, NULL, &group));
    CHECK_EQ(created, 2);
    use_mine(group);
    CHECK_OK(td_group_destroy(group));
    CHECK_EQ(created, 1);
    CHECK_OK(td_group_split(NULL, 0, 0, NULL, &group));
    use_mine(group);
    td_group *rest;
    CHECK_OK(td_group_shrink(group, NULL, &rest));
    CHECK_STR(td_get_backend(rest), "cpu:native,toy:mine");
    use_mine(rest);
    CHECK_OK(td_destroy_process_group());
    CHECK_EQ(created, 0);
    CHECK_OK(td_group_destroy(group));
    CHECK_OK(td_group_destroy(rest));
}

RANKS(a_backend_by_its_name, .ranks = 2)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_register_backend("mine", &mine, NULL));
    CHECK_OK(
        td_init_process_group(&(td_init_options){.backend = "mine"})); /* the host has native */
    CHECK_STR(td_get_backend(NULL), "mine");
    use_mine(NULL);
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_init_process_group(NULL)); /* it is registered for the kind */
    CHECK_STR(td_get_backend(NULL), "native");
    use_mine(NULL);
    CHECK_OK(td_destroy_process_group());
}

RANKS(a_default_that_differs, .ranks = 2)
{
    if (td_test_rank() == 0)
        CHECK_OK(td_register_backend("mine", &mine, NULL));
    CHECK_OK(toy_register());
    CHECK_OK(td_init_process_group(NULL));
    td_tensor *x = td_zeros(TD_SHAPE(7), TD_U8, toy());
    if (td_test_rank() == 0) {
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
        CHECK_OK(td_barrier(NULL, NULL));
    } else {
        CHECK_OK(td_barrier(NULL, NULL));
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_MISMATCH,
                    "has backend \"native\" for toy, but rank 0 has \"mine\"");
    }
    td_tensor_release(x);
    td_destroy_process_group(); /* the ranks have made different calls */
}

TEST(lists_that_are_none)
{
    CHECK_OK(toy_register());
    static const char *const bad[][2] = {
        {"cpu:native,", "an entry is empty"},
        {"native,tcp", "an entry has no kind of device"},
        {"cpu:,toy:native", "an entry has no backend"},
        {":native", "an entry has no kind"},
        {"cpu:native,cpu:tcp", "names the kind cpu twice"},
        {"cpu:native,quantum:native", "\"quantum\" is not known"},
        {"cpu:native,toy:nothing", "there is no backend \"nothing\""},
        {"cpu:tcp,toy:native", "and a group has one of them; write \"cpu:tcp,toy:tcp\""},
        {"cpu:tcp,*:native", "write \"cpu:tcp,*:tcp\""},
        {"cpu:a:b", "an entry is not a kind and a name"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(td_init_process_group(&(td_init_options){.backend = bad[i][0]}), TD_ERR_INVALID,
                    bad[i][1]);
}

static const td_backend_ops host_only = {.create = mine_create, .destroy = mine_destroy};

TEST(a_kind_without_a_backend)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_register_backend("host-only", &host_only, NULL));
    CHECK_FAILS(td_init_process_group(&(td_init_options){.backend = "cpu:native,toy:host-only"}),
                TD_ERR_INVALID, "\"host-only\" does not take memory of toy, but of cpu");
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "host-only"}));
    td_tensor *x = td_zeros(TD_SHAPE(7), TD_F32, toy());
    CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_INVALID,
                "no backend of group \"world\" takes memory of the kind toy");
    CHECK_CONTAINS(td_last_error(), "\"cpu:host-only,toy:native\" would take it");
    td_tensor_release(x);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Calls that complete later --------------------------------------------------------------------- */

enum { LATER_MOST = 16 };

/* Carries out calls in a thread of its own, in their order, while `open`. */
struct later {
    const td_backend_context *context;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const td_call *calls[LATER_MOST];
    td_work *works[LATER_MOST];
    int count;
    bool open, stops, aborted;
};

static struct later *latest; /* of the group that was created last */

/* An all_reduce fills the buffer with the number of ranks. On a device, the thread enqueues that. */
static td_status fill_later(const struct later *later, const td_call *call)
{
    unsigned char value = (unsigned char)later->context->size;
    if (call->count == 13)
        return td_fail(TD_ERR_SYSTEM, "later: 13 elements");
    if (call->device)
        return toy_ops()->fill(td_device_self(call->device), td_stream_self(call->stream),
                               call->output, value, call->count);
    memset(call->output, value, call->count);
    return TD_OK;
}

static void *run_later(void *arg)
{
    struct later *later = arg;
    pthread_mutex_lock(&later->lock);
    for (;;) {
        bool ready = later->count && (later->open || later->aborted || later->stops);
        if (!ready && later->stops)
            break;
        if (!ready) {
            pthread_cond_wait(&later->changed, &later->lock);
            continue;
        }
        const td_call *call = later->calls[0];
        td_work *work = later->works[0];
        later->count--;
        memmove(later->calls, later->calls + 1, sizeof later->calls - sizeof later->calls[0]);
        memmove(later->works, later->works + 1, sizeof later->works - sizeof later->works[0]);
        bool aborted = later->aborted;
        pthread_mutex_unlock(&later->lock);
        td_status status = aborted ? td_fail(TD_ERR_ABORTED, "later: aborted")
                                   : fill_later(later, call);
        td_work_complete(work, status, -1, 0);
        pthread_mutex_lock(&later->lock);
    }
    pthread_mutex_unlock(&later->lock);
    return NULL;
}

static td_status later_create(const td_backend_context *context, void *arg, void **self)
{
    struct later *later = latest = calloc(1, sizeof *later);
    (void)arg;
    later->context = context;
    pthread_mutex_init(&later->lock, NULL);
    pthread_cond_init(&later->changed, NULL);
    CHECK_EQ(pthread_create(&later->thread, NULL, run_later, later), 0);
    *self = later;
    return TD_OK;
}

static void later_set(struct later *later, bool *flag, bool value)
{
    pthread_mutex_lock(&later->lock);
    *flag = value;
    pthread_cond_broadcast(&later->changed);
    pthread_mutex_unlock(&later->lock);
}

static void later_destroy(void *self)
{
    struct later *later = self;
    later_set(later, &later->stops, true);
    pthread_join(later->thread, NULL);
    pthread_cond_destroy(&later->changed);
    pthread_mutex_destroy(&later->lock);
    free(later);
}

static void later_abort(void *self)
{
    struct later *later = self;
    later_set(later, &later->aborted, true);
}

static td_status later_submit(void *self, const td_call *call, td_work *work)
{
    struct later *later = self;
    if (call->kind != TD_OP_ALL_REDUCE)
        return td_fail(TD_ERR_UNSUPPORTED, "later has no %s", td_op_kind_name(call->kind));
    pthread_mutex_lock(&later->lock);
    CHECK(later->count < LATER_MOST);
    later->calls[later->count] = call;
    later->works[later->count++] = work;
    pthread_cond_broadcast(&later->changed);
    pthread_mutex_unlock(&later->lock);
    return TD_OK;
}

static const char *const later_devices[] = {"cpu", "toy", NULL};
static const td_backend_ops later_ops = {.create = later_create,
                                         .destroy = later_destroy,
                                         .submit = later_submit,
                                         .abort = later_abort,
                                         .devices = later_devices};

static void begin_later(void)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_register_backend("later", &later_ops, NULL));
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = "later"}));
}

static void check_value(td_tensor *x, int value)
{
    TD_SCOPE;
    CHECK_EQ(td_item(td_select(x, 0, 6)), value);
}

static void call_later(td_device *device)
{
    td_work *works[4];
    td_tensor *x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = td_zeros(TD_SHAPE(7), TD_U8, device);
        CHECK_OK(td_all_reduce(x[i], TD_SUM, NULL, &works[i]));
        CHECK(!td_work_test(works[i]));
    }
    CHECK_FAILS(td_work_wait(works[0], 5), TD_ERR_TIMEOUT, "not complete after 5 ms");
    CHECK_FAILS(td_work_synchronize(works[1], TD_NOW), TD_ERR_TIMEOUT, "not complete yet");
    check_value(x[0], 0);
    later_set(latest, &latest->open, true);
    for (int i = 3; i >= 0; i--) {
        CHECK_OK(i % 2 ? td_work_wait(works[i], 0) : td_work_synchronize(works[i], 60000));
        check_value(x[i], td_get_world_size(NULL));
        td_work_release(works[i]);
        CHECK_OK(td_fill_(x[i], 0));
        CHECK_OK(td_all_reduce(x[i], TD_SUM, NULL, NULL)); /* blocking */
        check_value(x[i], td_get_world_size(NULL));
        td_tensor_release(x[i]);
    }
    later_set(latest, &latest->open, false);
}

RANKS(a_backend_that_completes_later, .ranks = 2)
{
    begin_later();
    call_later(td_device_get("cpu"));
    call_later(toy());
    CHECK_OK(td_destroy_process_group());
}

/* Works that fail in the other thread: the group is broken with the reason. */
RANKS(a_failure_that_comes_later, .ranks = 1)
{
    for (int i = 0; i < 2; i++) {
        begin_later();
        td_work *work;
        td_tensor *x = td_zeros(TD_SHAPE(13), TD_U8, i ? toy() : NULL);
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &work));
        later_set(latest, &latest->open, true);
        CHECK_FAILS(td_work_wait(work, 0), TD_ERR_SYSTEM, "later: 13 elements");
        CHECK_FAILS(td_all_reduce(x, TD_SUM, NULL, NULL), TD_ERR_SYSTEM, "later: 13 elements");
        td_work_release(work);
        td_tensor_release(x);
        td_destroy_process_group();
        CHECK_OK(td_register_backend("later", NULL, NULL));
    }
}

RANKS(an_abort_of_calls_that_complete_later, .ranks = 1)
{
    begin_later();
    td_work *works[2];
    td_tensor *x = td_zeros(TD_SHAPE(7), TD_U8, toy()), *y = td_zeros(TD_SHAPE(7), TD_U8, NULL);
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, &works[0]));
    CHECK_OK(td_all_reduce(y, TD_SUM, NULL, &works[1]));
    CHECK_OK(td_group_abort(NULL));
    for (int i = 0; i < 2; i++) {
        CHECK_FAILS(td_work_wait(works[i], 0), TD_ERR_ABORTED, "aborted");
        td_work_release(works[i]);
    }
    td_tensor_release(x);
    td_tensor_release(y);
    td_destroy_process_group();
}

/* ---- Groups that shrink and grow ------------------------------------------------------------------- */

enum { SURVIVORS = 2, DYING = 1 };

static void live_through(bool *died)
{
    CHECK_OK(toy_register());
    CHECK_OK(td_register_backend("mine", &mine, NULL));
    CHECK_OK(td_init_process_group(
        &(td_init_options){.backend = "cpu:native,toy:mine", .timeout_ms = 60000}));
    td_tensor *x = td_zeros(TD_SHAPE(7), TD_U8, toy());
    if (!*died) {
        CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
        CHECK_OK(td_barrier(NULL, NULL));
        if (td_get_rank(NULL) == DYING) {
            *died = true;
            raise(SIGKILL);
        }
        while (td_barrier(NULL, NULL) == TD_OK)
            ;
        td_group *rest, *grown;
        CHECK_OK(td_group_shrink(NULL, NULL, &rest));
        CHECK_STR(td_get_backend(rest), "cpu:native,toy:mine");
        CHECK_OK(td_all_reduce(x, TD_SUM, rest, NULL));
        check_value(x, SURVIVORS);
        CHECK_OK(td_group_grow(rest, NULL, &grown));
        CHECK_OK(td_group_destroy(rest));
        CHECK_OK(td_group_destroy(grown));
    }
    CHECK_STR(td_get_backend(NULL), "cpu:native,toy:mine");
    int before = submitted;
    CHECK_OK(td_all_reduce(x, TD_SUM, NULL, NULL));
    CHECK_EQ(submitted, before + 1);
    check_value(x, SURVIVORS + 1);
    CHECK_OK(td_barrier(NULL, NULL));
    td_tensor_release(x);
    CHECK_OK(td_destroy_process_group());
}

/* As a launcher would, starts the rank again when it has been killed. */
RANKS(a_list_survives_shrinking_and_growing, .ranks = SURVIVORS + 1)
{
    int status;
    bool *died = mmap(NULL, sizeof *died, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                      0);
    CHECK(died != MAP_FAILED);
    do {
        pid_t pid = fork();
        if (!pid) {
            live_through(died);
            exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid);
    } while (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK_EQ(status, 0);
}
