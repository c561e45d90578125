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

/* ---- Outlets --------------------------------------------------------------------------------- */

/* The thread takes the whole queue at once and leaves an empty one, so that many lines are one write() when
 * there are many. */
static void *write_on(void *arg)
{
    struct td__outlet *outlet = arg;
    pthread_mutex_lock(&outlet->lock);
    for (;;) {
        while (!outlet->queue.size && !outlet->closing)
            td__cond_wait(&outlet->changed, &outlet->lock, TD__NEVER);
        if (!outlet->queue.size)
            break;
        struct td__buffer taken = outlet->queue;
        outlet->queue = (struct td__buffer){0};
        outlet->in_hand = taken.size;
        pthread_mutex_unlock(&outlet->lock);
        int error = td__file_write_all(outlet->fd, taken.data, taken.size);
        td__buffer_free(&taken);
        pthread_mutex_lock(&outlet->lock);
        outlet->in_hand = 0;
        if (error) {
            outlet->error = error;
            td__buffer_free(&outlet->queue);
        }
        pthread_mutex_unlock(&outlet->lock);
        outlet->console->notify(outlet->console->arg);
        pthread_mutex_lock(&outlet->lock);
    }
    pthread_mutex_unlock(&outlet->lock);
    return NULL;
}

static void put(struct td__outlet *outlet, const void *data, size_t size)
{
    pthread_mutex_lock(&outlet->lock);
    if (!outlet->started && !outlet->error) {
        int error = td__thread_start(&outlet->thread, "td-console", write_on, outlet);
        outlet->started = !error;
        outlet->error = error;
    }
    if (!outlet->error) {
        td__buffer_put(&outlet->queue, data, size);
        if (outlet->queue.failed) {
            outlet->error = ENOMEM;
            td__buffer_free(&outlet->queue);
        }
        pthread_cond_signal(&outlet->changed);
    }
    pthread_mutex_unlock(&outlet->lock);
}

static void close_outlet(struct td__outlet *outlet)
{
    pthread_mutex_lock(&outlet->lock);
    outlet->closing = true;
    pthread_cond_signal(&outlet->changed);
    pthread_mutex_unlock(&outlet->lock);
    if (outlet->started)
        pthread_join(outlet->thread, NULL);
    td__buffer_free(&outlet->queue);
    pthread_cond_destroy(&outlet->changed);
    pthread_mutex_destroy(&outlet->lock);
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
    *console = (struct td__console){
        .colour = wants_colour(), .name = "tdrun", .notify = notify, .arg = arg};
    for (int i = 0; i < 2; i++) {
        struct td__outlet *outlet = &console->outlets[i];
        outlet->console = console;
        outlet->fd = STDOUT_FILENO + i;
        outlet->terminal = isatty(outlet->fd);
        pthread_mutex_init(&outlet->lock, NULL);
        td__cond_init(&outlet->changed);
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
        put(outlet, "\n", 1);
    put(outlet, data, size);
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
    size_t size = (size_t)snprintf(text, sizeof text, "%s: ", console->name);
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text + size, sizeof text - size, format, args);
    va_end(args);
    if (length < 0)
        return;
    bool fits = size + (size_t)length + 1 < sizeof text;
    strcpy(text + (fits ? size + (size_t)length : sizeof text - 5), fits ? "\n" : "...\n");
    struct td__outlet *outlet = console->to[TD__ERR];
    if (outlet->mid_line)
        put(outlet, "\n", 1);
    outlet->mid_line = false;
    td__console_write(console, TD__ERR, NULL, text, strlen(text));
}

size_t td__console_backlog(struct td__console *console, int which)
{
    struct td__outlet *outlet = console->to[which];
    pthread_mutex_lock(&outlet->lock);
    size_t backlog = outlet->queue.size + outlet->in_hand;
    pthread_mutex_unlock(&outlet->lock);
    return backlog;
}

bool td__console_is_full(struct td__console *console, int which)
{
    return td__console_backlog(console, which) > FULL;
}

int td__console_error(struct td__console *console, int which)
{
    struct td__outlet *outlet = &console->outlets[which];
    pthread_mutex_lock(&outlet->lock);
    int error = outlet->error;
    pthread_mutex_unlock(&outlet->lock);
    return error;
}

void td__console_close(struct td__console *console)
{
    close_outlet(&console->outlets[TD__OUT]);
    close_outlet(&console->outlets[TD__ERR]);
}
