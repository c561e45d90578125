/* Saves that go on in a thread. The tensors were copied; the thread has a group of its own, so that its collectives do not
 * mix with those of the program. One at a time is under way in a process: the next one waits for it. */
#include "base/fail.h"
#include "base/option_rules.h"
#include "base/thread.h"
#include "checkpoint/sharded.h"

#include <stdlib.h>
#include <string.h>

struct td_async_save {
    struct td__sharded_save save;
    td_group *group; /* NULL: one rank */
    unsigned generation;
    int owners; /* guarded by `lock`, as the following */
    bool complete;
    td_status status;
    struct td__error error;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int under_way;
static unsigned under_way_generation; /* td__fork_generation() of these */

static void init(void)
{
    td__cond_init(&changed);
}

void td__async_await_turn(void)
{
    pthread_once(&once, init);
    pthread_mutex_lock(&lock);
    while (under_way > 0 && under_way_generation == td__fork_generation())
        td__cond_wait(&changed, &lock, TD__NEVER);
    pthread_mutex_unlock(&lock);
}

/* Drops a reference; `lock` is held. */
static void release(struct td_async_save *async)
{
    if (--async->owners == 0)
        free(async);
}

static void *run(void *arg)
{
    struct td_async_save *async = arg;
    struct td__error error = {0};
    td_status status = td__sharded_finish(&async->save);
    if (status)
        td__error_save(&error);
    td_group_destroy(async->group);
    pthread_mutex_lock(&lock);
    async->status = status;
    async->error = error;
    async->complete = true;
    under_way--;
    pthread_cond_broadcast(&changed);
    release(async);
    pthread_mutex_unlock(&lock);
    return NULL;
}

td_status td__async_create(const char *call, const struct td__coordinator *coordinator,
                           td_async_save **handle)
{
    struct td_async_save *async = calloc(1, sizeof *async);
    if (!async)
        return td__fail_nomem(call);
    async->owners = 2;
    async->generation = td__fork_generation();
    td_status status = td__same_ranks(call, coordinator, &async->group);
    if (status)
        free(async);
    else
        *handle = async;
    return status;
}

void td__async_cancel(td_async_save *async)
{
    td_group_destroy(async->group);
    free(async);
}

void td__async_start(td_async_save *async, const struct td__sharded_save *save)
{
    pthread_t thread;
    async->save = *save;
    async->save.coordinator.group = async->group;
    pthread_mutex_lock(&lock);
    if (under_way_generation != td__fork_generation())
        under_way = 0;
    under_way_generation = td__fork_generation();
    under_way++;
    pthread_mutex_unlock(&lock);
    if (td__thread_start(&thread, "td-save", run, async))
        run(async); /* the other ranks have begun theirs: this one takes part all the same */
    else
        pthread_detach(thread);
}

td_status td_async_save_wait(td_async_save *save, int64_t timeout_ms)
{
    static const char call[] = "td_async_save_wait";
    if (!save)
        return td__fail_null(call);
    TD_TRY(td__check_timeout(call, timeout_ms));
    if (save->generation != td__fork_generation())
        return td_fail(TD_ERR_STATE, "%s: the save is another process's", call);
    td__deadline deadline = timeout_ms == 0        ? TD__NEVER
                            : timeout_ms == TD_NOW ? 0
                                                   : td__deadline_in_ms(timeout_ms);
    pthread_mutex_lock(&lock);
    while (!save->complete && !td__deadline_passed(deadline))
        td__cond_wait(&changed, &lock, deadline);
    bool complete = save->complete;
    pthread_mutex_unlock(&lock);
    if (!complete)
        return td_fail(TD_ERR_TIMEOUT, "%s: the checkpoint is still being written", call);
    return save->status ? td__error_restore(&save->error) : TD_OK;
}

bool td_async_save_test(td_async_save *save)
{
    if (!save)
        return true;
    pthread_mutex_lock(&lock);
    bool complete = save->complete;
    pthread_mutex_unlock(&lock);
    return complete;
}

void td_async_save_release(td_async_save *save)
{
    if (!save)
        return;
    pthread_mutex_lock(&lock);
    release(save);
    pthread_mutex_unlock(&lock);
}
