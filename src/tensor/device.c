/* Devices and their workers; see device.h. The table of devices only grows, so that pointers to devices stay
 * valid; a lock protects it. A worker is a thread with a queue, started by the first job. A forked child has
 * the devices but not their threads, and starts new ones. */
#include "tensor/device_internal.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/thread.h"
#include "tensor/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEVICES = 64, ALIGNMENT = 64 };

/* ---- The host's memory ------------------------------------------------------------------------ */

static void free_private(void *data, void *arg)
{
    (void)arg;
    free(data);
}

static void free_shared(void *data, void *arg)
{
    (void)arg;
    td_free(data);
}

static void *alloc_host(struct td__device *device, size_t bytes, void (**free_fn)(void *, void *))
{
    (void)device;
    bool shared = bytes >= TD__STORAGE_SHARED_FROM;
    *free_fn = shared ? free_shared : free_private;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (shared)
        return td_alloc(bytes);
    void *memory = rounded < bytes ? NULL : aligned_alloc(ALIGNMENT, rounded);
    if (!memory)
        td__fail_nomem("host memory");
    return memory;
}

static td_status copy_host(struct td__device *device, void *to, const void *from, size_t bytes)
{
    (void)device;
    memcpy(to, from, bytes);
    return TD_OK;
}

static const struct td__device_kind cpu_kind = {
    .name = "cpu",
    .kernels = &td__cpu_kernels,
    .alloc = alloc_host,
    .to_host = copy_host,
    .from_host = copy_host,
    .is_host_memory = true,
};

/* ---- The table --------------------------------------------------------------------------------- */

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER; /* innermost */
static struct td__device host = {
    .name = "cpu", .index = -1, .kind = &cpu_kind, .kernels = &td__cpu_kernels};
static struct td__device *numbered[MOST_DEVICES];

struct td__device *td__host_device(void)
{
    return &host;
}

static struct td__device *find_numbered(const char *call, const struct td__device_kind *kind,
                                        int index)
{
    pthread_mutex_lock(&table_lock);
    struct td__device *device = numbered[index];
    if (!device) {
        device = numbered[index] = calloc(1, sizeof *device);
        if (device) {
            snprintf(device->name, sizeof device->name, "%s:%d", kind->name, index);
            device->index = index;
            device->kind = kind;
            device->kernels = kind->kernels;
        }
    }
    pthread_mutex_unlock(&table_lock);
    if (!device)
        td__fail_nomem(call);
    return device;
}

struct td__device *td__find_device(const char *call, const char *name)
{
    int index;
    if (!name || !strcmp(name, "cpu"))
        return &host;
    if (!strncmp(name, "cpu:", 4) && td__parse_int(name + 4, 0, MOST_DEVICES - 1, &index))
        return find_numbered(call, &cpu_kind, index);
    td_fail(TD_ERR_INVALID, "%s: there is no device \"%.40s\"; there are cpu, and cpu:0 to cpu:%d",
            call, name, MOST_DEVICES - 1);
    return NULL;
}

bool td_device_exists(const char *device)
{
    int index;
    return device &&
           (!strcmp(device, "cpu") || (!strncmp(device, "cpu:", 4) &&
                                       td__parse_int(device + 4, 0, MOST_DEVICES - 1, &index)));
}

int td_device_count(const char *kind)
{
    return kind && !strcmp(kind, "cpu") ? MOST_DEVICES : 0;
}

/* ---- Workers ----------------------------------------------------------------------------------- */

struct job {
    struct job *next;
    void (*fn)(void *);
    void *arg;
};

struct td__device_worker {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a job was submitted, or the last one is done */
    struct job *first, **last;
    bool busy;
    unsigned fork_generation;
};

static _Thread_local const struct td__device_worker *this_worker;

static void *work(void *arg)
{
    struct td__device_worker *worker = arg;
    this_worker = worker;
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

static td_status start_worker(struct td__device *device)
{
    struct td__device_worker *worker = calloc(1, sizeof *worker);
    if (!worker)
        return td__fail_nomem("device");
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

/* The worker of a numbered device; starts a new one after a fork. */
static td_status find_worker(struct td__device *device, struct td__device_worker **worker)
{
    td_status status = TD_OK;
    pthread_mutex_lock(&table_lock);
    if (!device->worker || device->worker->fork_generation != td__fork_generation())
        status = start_worker(device);
    *worker = device->worker;
    pthread_mutex_unlock(&table_lock);
    return status;
}

td_status td__device_submit(struct td__device *device, void (*fn)(void *), void *arg)
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

bool td__device_is_here(const struct td__device *device)
{
    return this_worker && device->worker == this_worker;
}

td_status td_device_submit(const char *name, void (*fn)(void *), void *arg)
{
    struct td__device *device = td__find_device("td_device_submit", name);
    if (!device)
        return TD_ERR_INVALID;
    if (!fn)
        return td_fail(TD_ERR_INVALID, "td_device_submit: the function is NULL");
    if (device->index >= 0)
        return td__device_submit(device, fn, arg);
    fn(arg);
    return TD_OK;
}

td_status td_device_synchronize(const char *name)
{
    struct td__device *device = td__find_device("td_device_synchronize", name);
    if (!device)
        return TD_ERR_INVALID;
    struct td__device_worker *worker;
    if (device->index < 0 || !device->worker)
        return TD_OK;
    TD_TRY(find_worker(device, &worker));
    if (worker == this_worker)
        return td_fail(TD_ERR_STATE,
                       "td_device_synchronize: the worker of %s cannot wait for itself", name);
    pthread_mutex_lock(&worker->lock);
    while (worker->first || worker->busy)
        pthread_cond_wait(&worker->changed, &worker->lock);
    pthread_mutex_unlock(&worker->lock);
    return TD_OK;
}
