/* Messages: MPI's requests.
 *
 * A message without a work is tested by the thread that waits for it. The others belong to one thread of the process,
 * which tests them all. It sleeps while there are none, and between its turns when nothing comes for long.
 *
 * TD_ANY_TAG must not match messages of the library, whose tags are negative: these have a communicator of their own. */
#include "mpi_backend.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHORTEST_PAUSE_NS 5000
#define LONGEST_PAUSE_NS 200000

struct message {
    struct message *next;
    struct mpi_group *group;
    td_call call;
    td_work *work; /* NULL: a thread waits for it itself */
    MPI_Request request;
    MPI_Status state;
    int64_t deadline_ns;
    td_status status;
};

/* Messages with a work. Guarded by `lock`, but for the members of a message, which are the thread's. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct message *added;
static bool is_running;
static pid_t runner;

/* ---- One message -------------------------------------------------------------------------------------- */

static td_status fail_alone(const struct mpi_group *group, const td_call *call)
{
    return td_fail(TD_ERR_INVALID, "%s: there is no other rank in group \"%s\"",
                   td_op_kind_name(call->kind), group->context->name);
}

static td_status start(struct message *message)
{
    struct mpi_group *group = message->group;
    const td_call *call = &message->call;
    size_t bytes = call->count * td_dtype_size(call->dtype);
    int peer = call->peer == TD_ANY_SOURCE ? MPI_ANY_SOURCE : call->peer;
    bool is_inner = call->tag < 0 && call->tag != TD_ANY_TAG;
    MPI_Comm comm = is_inner ? group->inner : group->comm;
    int tag = is_inner ? -call->tag : call->tag == TD_ANY_TAG ? MPI_ANY_TAG : call->tag;
    MPI_Datatype type = MPI_BYTE, pages = MPI_DATATYPE_NULL;
    if (group->context->size < 2)
        return fail_alone(group, call);
    if (tag > mpi.tag_limit)
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "%s on group \"%s\": tag %d is greater than %d, the limit of %s; the backend "
            "native has no limit",
            td_op_kind_name(call->kind), group->context->name, tag, mpi.tag_limit, mpi.name);
    int count = (int)bytes, result = MPI_SUCCESS;
    mpi_enter();
    if (bytes >
        INT_MAX) { /* all dtypes have at most 16 bytes, and 2^31 elements are more than memory has */
        result = MPI_Type_contiguous((int)td_dtype_size(call->dtype), MPI_BYTE, &pages);
        if (result == MPI_SUCCESS)
            result = MPI_Type_commit(&pages);
        type = pages;
        count = call->count > INT_MAX ? -1 : (int)call->count;
    }
    if (result == MPI_SUCCESS)
        result = call->kind == TD_OP_SEND
                     ? MPI_Isend(call->input, count, type, peer, tag, comm, &message->request)
                     : MPI_Irecv(call->output, count, type, peer, tag, comm, &message->request);
    if (pages != MPI_DATATYPE_NULL)
        MPI_Type_free(&pages);
    mpi_leave();
    return mpi_check(result, td_op_kind_name(call->kind), group->context->name);
}

/* MPI has ended it. */
static td_status result_of(const struct message *message, int result)
{
    const td_call *call = &message->call;
    int class = MPI_SUCCESS;
    if (result == MPI_SUCCESS)
        return TD_OK;
    MPI_Error_class(result, &class);
    if (class == MPI_ERR_TRUNCATE)
        return td_fail(TD_ERR_MISMATCH,
                       "recv on group \"%s\": rank %d sent more than the %zu bytes that the buffer "
                       "has",
                       message->group->context->name,
                       message->state.MPI_SOURCE >= 0
                           ? message->group->context->global_ranks[message->state.MPI_SOURCE]
                           : -1,
                       call->count * td_dtype_size(call->dtype));
    return mpi_check(result, td_op_kind_name(call->kind), message->group->context->name);
}

/* Whether it has ended; *status is its status then. */
static bool test(struct message *message, td_status *status)
{
    int done = 0;
    mpi_enter();
    int result = MPI_Test(&message->request, &done, &message->state);
    mpi_leave();
    if (!done && result == MPI_SUCCESS)
        return false;
    *status = result_of(message, result);
    return true;
}

/* Ends one that is late, or whose group has failed. A recv that has its message after all is complete. A send cannot be
 * cancelled: MPI may read its memory later. */
static bool cancel(struct message *message)
{
    int cancelled = 0, done = 0;
    if (atomic_load(&mpi.lost))
        return true;
    mpi_enter();
    if (message->call.kind == TD_OP_RECV) {
        MPI_Cancel(&message->request);
        for (int i = 0; i < 1000 && !done; i++)
            if (MPI_Test(&message->request, &done, &message->state) != MPI_SUCCESS)
                done = cancelled = 1;
        if (done && !cancelled)
            MPI_Test_cancelled(&message->state, &cancelled);
    } else {
        MPI_Request_free(&message->request);
        cancelled = 1;
    }
    mpi_leave();
    return cancelled || !done;
}

static td_status fail_late(const struct message *message)
{
    const td_call *call = &message->call;
    const td_backend_context *context = message->group->context;
    if (call->kind == TD_OP_SEND)
        return td_fail(TD_ERR_TIMEOUT,
                       "send on group \"%s\": rank %d has not received the message with tag %d "
                       "within %lld ms",
                       context->name, context->global_ranks[call->peer], call->tag,
                       (long long)call->timeout_ms);
    if (call->peer == TD_ANY_SOURCE)
        return td_fail(TD_ERR_TIMEOUT,
                       "recv on group \"%s\": no message with tag %d came within %lld ms",
                       context->name, call->tag, (long long)call->timeout_ms);
    return td_fail(TD_ERR_TIMEOUT,
                   "recv on group \"%s\": no message with tag %d came from rank %d within %lld ms",
                   context->name, call->tag, context->global_ranks[call->peer],
                   (long long)call->timeout_ms);
}

static td_status fail_lost(const struct mpi_group *group, const td_call *call)
{
    return td_fail(
        TD_ERR_STATE,
        "%s on group \"%s\": %s cannot be used any more in this process, since a call of "
        "it was abandoned when a rank was lost",
        td_op_kind_name(call->kind), group->context->name, mpi.name);
}

/* Whether it is over for another reason than MPI. */
static bool give_up(struct message *message, int64_t now, td_status *status)
{
    struct mpi_group *group = message->group;
    bool failed = atomic_load(&group->failed), lost = atomic_load(&mpi.lost);
    if (!failed && !lost && now < message->deadline_ns)
        return false;
    if (!cancel(message))
        *status = TD_OK;
    else if (failed)
        *status = mpi_failure(group);
    else
        *status = lost ? fail_lost(group, &message->call) : fail_late(message);
    return true;
}

static void init(struct message *message, struct mpi_group *group, const td_call *call)
{
    *message = (struct message){.group = group, .call = *call, .request = MPI_REQUEST_NULL};
    message->deadline_ns = mpi_now_ns() + call->timeout_ms * 1000000;
}

td_status mpi_run_message(void *self, const td_call *call)
{
    struct mpi_group *group = self;
    struct mpi_wait wait = {.spins = group->spins};
    struct message message;
    td_status status = mpi_failure(group);
    if (!status && atomic_load(&mpi.lost))
        status = fail_lost(group, call);
    if (status)
        return status;
    init(&message, group, call);
    status = start(&message);
    while (!status) {
        if (atomic_load_explicit(&mpi.lost, memory_order_relaxed) ? give_up(&message, 0, &status)
                                                                  : test(&message, &status))
            break;
        if (mpi_wait_turn(&wait) && give_up(&message, mpi_now_ns(), &status))
            break;
    }
    return status;
}

/* ---- The thread ------------------------------------------------------------------------------------------- */

static void complete(struct message *message, td_status status)
{
    struct mpi_group *group = message->group;
    int bytes = 0;
    if (message->call.kind == TD_OP_RECV && !status) {
        MPI_Count exact = 0;
        MPI_Get_elements_x(&message->state, MPI_BYTE, &exact);
        td_work_complete(message->work, TD_OK, message->state.MPI_SOURCE, (size_t)exact);
    } else {
        td_work_complete(message->work, status, -1, (size_t)bytes);
    }
    free(message);
    atomic_fetch_sub(&group->messages, 1);
}

/* Tests all; those that have ended are taken out, and completed. */
static bool turn(struct message **list)
{
    bool any = false;
    int64_t now = mpi_now_ns();
    for (struct message **at = list; *at;) {
        struct message *message = *at;
        td_status status = TD_OK;
        bool over = (!atomic_load(&mpi.lost) && test(message, &status)) ||
                    give_up(message, now, &status);
        if (!over) {
            at = &message->next;
            continue;
        }
        *at = message->next;
        complete(message, status);
        any = true;
    }
    return any;
}

/* New ones come behind the others, in their order. */
static void take_added(struct message **list)
{
    while (*list)
        list = &(*list)->next;
    *list = added;
    added = NULL;
}

static void *run_progress(void *arg)
{
    struct message *list = NULL;
    int64_t pause = 0;
    (void)arg;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!list && !added)
            pthread_cond_wait(&changed, &lock);
        if (added)
            pause = 0;
        take_added(&list);
        pthread_mutex_unlock(&lock);
        if (turn(&list))
            pause = 0;
        else if (pause >= SHORTEST_PAUSE_NS)
            nanosleep(&(struct timespec){.tv_nsec = pause}, NULL);
        pause = pause < LONGEST_PAUSE_NS ? pause + pause / 8 + 50 : pause;
    }
    return NULL;
}

/* With the lock. */
static td_status start_thread(void)
{
    pthread_t thread;
    sigset_t all, before;
    if (is_running && runner == getpid())
        return TD_OK;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, run_progress, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return td_fail(TD_ERR_SYSTEM, "backend mpi: no thread for messages: %s", strerror(error));
    pthread_detach(thread);
    is_running = true;
    runner = getpid();
    return TD_OK;
}

void mpi_progress_wake(void)
{
    pthread_mutex_lock(&lock);
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

td_status mpi_post(void *self, const td_call *call, td_work *work)
{
    struct mpi_group *group = self;
    td_status status = mpi_failure(group);
    if (!status && atomic_load(&mpi.lost))
        status = fail_lost(group, call);
    struct message *message = status ? NULL : malloc(sizeof *message);
    if (!status && !message)
        status = td_fail(TD_ERR_NOMEM, "backend mpi: out of memory");
    if (status)
        return status;
    init(message, group, call);
    message->work = work;
    pthread_mutex_lock(&lock);
    status = start_thread();
    pthread_mutex_unlock(&lock);
    if (!status)
        status = start(message);
    if (status) {
        free(message);
        return status;
    }
    atomic_fetch_add(&group->messages, 1);
    if (test(message, &status)) {
        complete(message, status);
        return TD_OK;
    }
    pthread_mutex_lock(&lock);
    struct message **end = &added;
    while (*end)
        end = &(*end)->next;
    *end = message;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    return TD_OK;
}

void mpi_messages_end(struct mpi_group *group)
{
    if (!atomic_load(&group->messages))
        return;
    td_fail(TD_ERR_STATE, "group \"%s\" was destroyed", group->context->name);
    mpi_note_failure(group, TD_ERR_STATE);
    mpi_progress_wake();
    while (atomic_load(&group->messages))
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
}
