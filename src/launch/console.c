/* The user's side of the output; see console.h. */
#include "launch/console.h"

#include "base/file_limit.h"
#include "base/thread.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FULL = 1 << 20 };

/* ---- Sinks ----------------------------------------------------------------------------------- */

/* The thread takes the whole queue at once and leaves an empty one, so that many lines are one write() when
 * there are many. */
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
        int error = td__file_write_all(sink->fd, taken.data, taken.size);
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

/* ---- The console ----------------------------------------------------------------------------- */

static bool same_file(int a, int b)
{
    struct stat left, right;
    return !fstat(a, &left) && !fstat(b, &right) && left.st_dev == right.st_dev &&
           left.st_ino == right.st_ino && left.st_rdev == right.st_rdev;
}

/* no-color.org, and terminals without colours. */
static bool wants_colour(void)
{
    const char *no_color = getenv("NO_COLOR"), *terminal = getenv("TERM");
    return !(no_color && *no_color) && !(terminal && !strcmp(terminal, "dumb"));
}

void td__console_open(struct td__console *console, void (*notify)(void *), void *arg)
{
    *console = (struct td__console){.colour = wants_colour()};
    for (int i = 0; i < 2; i++) {
        struct td__outlet *outlet = &console->outlets[i];
        int fd = STDOUT_FILENO + i;
        td__sink_init(&outlet->sink, fd, notify, arg);
        outlet->terminal = isatty(fd);
        console->to[i] = outlet;
    }
    if (same_file(STDOUT_FILENO, STDERR_FILENO))
        console->to[TD__ERR] = console->to[TD__OUT];
}

void td__console_write(struct td__console *console, int which, const void *owner, const void *data,
                       size_t size)
{
    struct td__outlet *outlet = console->to[which];
    if (!size)
        return;
    if (outlet->terminal && outlet->mid_line && outlet->owner != owner)
        td__sink_write(&outlet->sink, "\n", 1);
    td__sink_write(&outlet->sink, data, size);
    outlet->mid_line = ((const char *)data)[size - 1] != '\n';
    outlet->owner = owner;
}

bool td__console_owns_line(const struct td__console *console, int which, const void *owner)
{
    const struct td__outlet *outlet = console->to[which];
    return outlet->mid_line && outlet->owner == owner;
}

void td__console_say(struct td__console *console, const char *format, ...)
{
    char text[4096];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (length < 0)
        return;
    if (length >= (int)sizeof text)
        length = snprintf(text + sizeof text - 5, 5, "...\n") + (int)sizeof text - 5;
    struct td__outlet *outlet = console->to[TD__ERR];
    if (outlet->mid_line)
        td__sink_write(&outlet->sink, "\n", 1);
    outlet->mid_line = false;
    td__console_write(console, TD__ERR, NULL, text, (size_t)length);
}

bool td__console_is_full(struct td__console *console, int which)
{
    return td__sink_backlog(&console->to[which]->sink) > FULL;
}

bool td__console_is_idle(struct td__console *console)
{
    return !td__sink_backlog(&console->outlets[TD__OUT].sink) &&
           !td__sink_backlog(&console->outlets[TD__ERR].sink);
}

void td__console_close(struct td__console *console)
{
    td__sink_close(&console->outlets[TD__OUT].sink);
    td__sink_close(&console->outlets[TD__ERR].sink);
}
