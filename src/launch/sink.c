/* A descriptor with a thread that writes; see console.h. The thread takes the whole queue at once and
 * leaves an empty one, so that many lines are one write() when there are many. */
#include "launch/console.h"

#include "base/file_limit.h"
#include "base/thread.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

/* 0, or an errno. */
static int write_all(int fd, const uint8_t *data, size_t size)
{
    while (size) {
        ssize_t written = td__file_write(fd, data, size);
        if (written >= 0) {
            data += written;
            size -= (size_t)written;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            /* Another process that shares it has set it non-blocking. */
            struct pollfd writable = {.fd = fd, .events = POLLOUT};
            poll(&writable, 1, -1);
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

static void *write_on(void *arg)
{
    struct td__sink *sink = arg;
    pthread_mutex_lock(&sink->lock);
    for (;;) {
        while (!sink->queue.size && !sink->closing)
            td__cond_wait(&sink->changed, &sink->lock, TD__NEVER);
        if (!sink->queue.size)
            break;
        struct td__buffer taken = sink->queue;
        sink->queue = (struct td__buffer){0};
        sink->in_hand = taken.size;
        pthread_mutex_unlock(&sink->lock);
        int error = write_all(sink->fd, taken.data, taken.size);
        td__buffer_free(&taken);
        pthread_mutex_lock(&sink->lock);
        sink->in_hand = 0;
        if (error) {
            sink->error = error;
            td__buffer_free(&sink->queue);
        }
        pthread_mutex_unlock(&sink->lock);
        sink->notify(sink->arg);
        pthread_mutex_lock(&sink->lock);
    }
    pthread_mutex_unlock(&sink->lock);
    return NULL;
}

void td__sink_init(struct td__sink *sink, int fd, void (*notify)(void *), void *arg)
{
    *sink = (struct td__sink){.fd = fd, .notify = notify, .arg = arg};
    pthread_mutex_init(&sink->lock, NULL);
    td__cond_init(&sink->changed);
}

void td__sink_write(struct td__sink *sink, const void *data, size_t size)
{
    pthread_mutex_lock(&sink->lock);
    if (!sink->started && !sink->error) {
        int error = td__thread_start(&sink->thread, "td-console", write_on, sink);
        sink->started = !error;
        sink->error = error;
    }
    if (!sink->error) {
        td__buffer_put(&sink->queue, data, size);
        if (sink->queue.failed) {
            sink->error = ENOMEM;
            td__buffer_free(&sink->queue);
        }
        pthread_cond_signal(&sink->changed);
    }
    pthread_mutex_unlock(&sink->lock);
}

size_t td__sink_backlog(struct td__sink *sink)
{
    pthread_mutex_lock(&sink->lock);
    size_t backlog = sink->queue.size + sink->in_hand;
    pthread_mutex_unlock(&sink->lock);
    return backlog;
}

int td__sink_error(struct td__sink *sink)
{
    pthread_mutex_lock(&sink->lock);
    int error = sink->error;
    pthread_mutex_unlock(&sink->lock);
    return error;
}

void td__sink_close(struct td__sink *sink)
{
    pthread_mutex_lock(&sink->lock);
    sink->closing = true;
    pthread_cond_signal(&sink->changed);
    pthread_mutex_unlock(&sink->lock);
    if (sink->started)
        pthread_join(sink->thread, NULL);
    td__buffer_free(&sink->queue);
    pthread_cond_destroy(&sink->changed);
    pthread_mutex_destroy(&sink->lock);
}
