/* The worker threads of numbered devices. A worker is a thread with a queue, started by the first job. A forked child
 * has the devices but not their threads, and starts new ones. */
#include "device/device_internal.h"

#include "base/fail.h"
#include "base/thread.h"

#include <stdio.h>
#include <stdlib.h>

struct job {
    struct job *next;
    void (*fn)(void *);
    void *arg;
};

struct td__device_worker {
    td_device *device;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a job was submitted, or the last one is done */
    struct job *first, **last;
    bool busy;
    unsigned fork_generation;
};

static pthread_mutex_t start_lock =
    PTHREAD_MUTEX_INITIALIZER; /* guards the workers of all devices */
static _Thread_local const struct td__device_worker *this_worker;

static void *work(void *arg)
{
    struct td__device_worker *worker = arg;
    this_worker = worker;
    td_set_device(worker->device);
    pthread_mutex_lock(&worker->lock);
    for (;;) {
        while (!worker->first)
            pthread_cond_wait(&worker->changed, &worker->lock);
        struct job *job = worker->first;
        worker->first = job->next;
        if (!worker->first)
            worker->last = &worker->first;
        worker->busy = true;
        pthread_mutex_unlock(&worker->lock);
        job->fn(job->arg);
        free(job);
        pthread_mutex_lock(&worker->lock);
        worker->busy = false;
        if (!worker->first)
            pthread_cond_broadcast(&worker->changed);
    }
    return NULL;
}

static td_status start_worker(td_device *device)
{
    struct td__device_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return td__fail_nomem("device");
    worker->device = device;
    pthread_mutex_init(&worker->lock, NULL);
    td__cond_init(&worker->changed);
    worker->last = &worker->first;
    worker->fork_generation = td__fork_generation();
    char name[16];
    pthread_t thread;
    snprintf(name, sizeof name, "td-%.11s", device->name);
    int error = td__thread_start(&thread, name, work, worker);
    if (error) {
        free(worker);
        return td_fail(TD_ERR_SYSTEM, "device %s: cannot start its worker thread: %s", device->name,
                       td__errno_text(error));
    }
    pthread_detach(thread);
    device->worker = worker;
    return TD_OK;
}

static bool is_stale(const struct td__device_worker *worker)
{
    return !worker || worker->fork_generation != td__fork_generation();
}

/* The worker of a numbered device; starts a new one after a fork. */
static td_status find_worker(td_device *device, struct td__device_worker **worker)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&start_lock);
    if (is_stale(device->worker))
        status = start_worker(device);
    *worker = device->worker;
    pthread_mutex_unlock(&start_lock);
    return status;
}

td_status td__device_submit(td_device *device, void (*fn)(void *), void *arg)
{
    struct td__device_worker *worker;
    TD_TRY(find_worker(device, &worker));
    struct job *job = malloc(sizeof *job);
    if (!job)
        return td__fail_nomem("device");
    *job = (struct job){.fn = fn, .arg = arg};
    pthread_mutex_lock(&worker->lock);
    *worker->last = job;
    worker->last = &job->next;
    pthread_cond_broadcast(&worker->changed);
    pthread_mutex_unlock(&worker->lock);
    return TD_OK;
}

bool td__device_is_here(const td_device *device)
{
    return this_worker && device->worker == this_worker;
}

td_status td_device_submit(td_device *device, void (*fn)(void *), void *arg)
{
    device = td__use_device("td_device_submit", device);
    if (!device)
        return td__error_status();
    if (!fn)
        return td_fail(TD_ERR_INVALID, "td_device_submit: the function is NULL");
    if (device->index >= 0)
        return td__device_submit(device, fn, arg);
    fn(arg);
    return TD_OK;
}

td_status td__worker_drain(td_device *device)
{
    pthread_mutex_lock(&start_lock);
    struct td__device_worker *worker = is_stale(device->worker) ? NULL : device->worker;
    pthread_mutex_unlock(&start_lock);
    if (!worker)
        return TD_OK;
    if (worker == this_worker)
        return td_fail(TD_ERR_STATE,
                       "td_device_synchronize: the worker of %s cannot wait for itself",
                       device->name);
    pthread_mutex_lock(&worker->lock);
    while (worker->first || worker->busy)
        pthread_cond_wait(&worker->changed, &worker->lock);
    pthread_mutex_unlock(&worker->lock);
    return TD_OK;
}
