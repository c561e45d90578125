/* A worker's output stream; see stream.h.
 *
 * What is shown by one call of td__console_write() stays together, and that is always whole lines,
 * except at the end, in lines longer than 64 KiB, and on a terminal. */
#include "launch/stream.h"

#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

enum {
    READ_SIZE = 64 << 10,
    LONGEST_LINE = 64 << 10,
    DRAIN_LIMIT = 1 << 20, /* more than a pipe holds; one that goes on writing does not keep us */
    PATIENCE_MS = 40,
};

/* ---- The last lines -------------------------------------------------------------------------- */

static void add_to_tail(struct td__tail *tail, const char *data, size_t size)
{
    if (!tail->bytes && !(tail->bytes = malloc(TD__TAIL_SIZE)))
        return; /* a report without it is still a report */
    if (size > TD__TAIL_SIZE) {
        data += size - TD__TAIL_SIZE;
        size = TD__TAIL_SIZE;
    }
    if (tail->size + size > TD__TAIL_SIZE) {
        size_t drop = tail->size + size - TD__TAIL_SIZE;
        memmove(tail->bytes, tail->bytes + drop, tail->size - drop);
        tail->size -= drop;
    }
    memcpy(tail->bytes + tail->size, data, size);
    tail->size += size;
}

/* Where the last lines begin: after the 20th line end from the back, not counting the last byte. */
static const char *first_line(const struct td__tail *tail)
{
    size_t at = tail->size - 1;
    for (int lines = 0; at > 0; at--)
        if (tail->bytes[at - 1] == '\n' && ++lines == TD__TAIL_LINES)
            break;
    return tail->bytes + at;
}

static void print_line(const char *line, size_t size, const char *margin, struct td__buffer *text)
{
    while (size && line[size - 1] == '\r')
        size--;
    const char *overwritten = memrchr(line, '\r', size);
    if (overwritten) {
        size -= (size_t)(overwritten + 1 - line);
        line = overwritten + 1;
    }
    td__buffer_put(text, margin, strlen(margin));
    td__buffer_put(text, line, size);
    td__buffer_put(text, "\n", 1);
}

bool td__tail_print(const struct td__tail *tail, const char *margin, struct td__buffer *text)
{
    if (!tail->size)
        return false;
    const char *end = tail->bytes + tail->size;
    for (const char *line = first_line(tail); line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        print_line(line, (size_t)((stop ? stop : end) - line), margin, text);
        line = stop ? stop + 1 : end;
    }
    return true;
}

/* ---- Onto the console ------------------------------------------------------------------------ */

/* Shows `size` bytes, each line after the prefix. */
static void show_plain_lines(struct td__stream *stream, const char *data, size_t size)
{
    if (!stream->prefix[0]) {
        td__console_write(stream->console, stream->which, stream, data, size);
        stream->line_begun = size && data[size - 1] != '\n';
        return;
    }
    struct td__buffer text = {0};
    for (const char *end = data + size; data < end;) {
        const char *newline = memchr(data, '\n', (size_t)(end - data));
        const char *stop = newline ? newline + 1 : end;
        if (!stream->line_begun)
            td__buffer_put(&text, stream->prefix, strlen(stream->prefix));
        td__buffer_put(&text, data, (size_t)(stop - data));
        stream->line_begun = !newline;
        data = stop;
    }
    td__console_write(stream->console, stream->which, stream, text.data, text.size);
    td__buffer_free(&text);
}

static void show_lines(struct td__stream *stream, const char *data, size_t size)
{
    const char *end = data + size, *shown = data;
    while (stream->on_control && data < end) {
        const char *newline = memchr(data, '\n', (size_t)(end - data));
        const char *stop = newline ? newline + 1 : end;
        if (*data == '\1' && newline && !(data == shown && stream->line_begun)) {
            if (data > shown && !stream->muted)
                show_plain_lines(stream, shown, (size_t)(data - shown));
            stream->on_control(stream->control_arg, data + 1, (size_t)(newline - data - 1));
            shown = stop;
        }
        data = stop;
    }
    if (shown < end && !stream->muted)
        show_plain_lines(stream, shown, (size_t)(end - shown));
}

/* Shows one piece of a line on a terminal that several workers share. After a carriage return the
 * line is written anew, so the prefix is as well; and so it is when another worker came between. */
static void show_on_screen(struct td__stream *stream, const char *data, size_t size)
{
    struct td__buffer text = {0};
    bool ends_line = size && data[size - 1] == '\n';
    bool ours = td__console_owns_line(stream->console, stream->which, stream);
    if (!(ours && (stream->line_begun || (ends_line && size == 1))))
        td__buffer_put(&text, stream->prefix, strlen(stream->prefix));
    td__buffer_put(&text, data, size);
    td__console_write(stream->console, stream->which, stream, text.data, text.size);
    stream->line_begun = size && !ends_line && data[size - 1] != '\r';
    td__buffer_free(&text);
}

/* Shows a line that is not finished. */
static void show_rest(struct td__stream *stream)
{
    if (stream->line.size && stream->style == TD__STYLE_SCREEN)
        show_on_screen(stream, (const char *)stream->line.data, stream->line.size);
    else if (stream->line.size)
        show_lines(stream, (const char *)stream->line.data, stream->line.size);
    stream->line.size = 0;
}

static void on_patience_over(uv_timer_t *timer)
{
    show_rest(timer->data);
}

/* Shows the pieces of stream->line that end with a line end or a carriage return. */
static void update_screen(struct td__stream *stream)
{
    const char *data = (const char *)stream->line.data;
    size_t begin = 0;
    for (size_t i = 0; i < stream->line.size; i++) {
        if (data[i] == '\n' || data[i] == '\r' || i + 1 - begin == LONGEST_LINE) {
            show_on_screen(stream, data + begin, i + 1 - begin);
            begin = i + 1;
        }
    }
    td__buffer_consume(&stream->line, begin);
    if (!stream->line.size)
        uv_timer_stop(&stream->patience);
    else if (!uv_is_active((uv_handle_t *)&stream->patience))
        uv_timer_start(&stream->patience, on_patience_over, PATIENCE_MS, 0);
}

/* Shows the whole lines in stream->line, and what is too long to wait for its end. */
static void update_lines(struct td__stream *stream)
{
    const char *data = (const char *)stream->line.data;
    const char *newline = stream->line.size ? memrchr(data, '\n', stream->line.size) : NULL;
    size_t ready = newline ? (size_t)(newline + 1 - data) : 0;
    while (stream->line.size - ready >= LONGEST_LINE)
        ready += LONGEST_LINE;
    if (ready)
        show_lines(stream, data, ready);
    td__buffer_consume(&stream->line, ready);
}

static void show(struct td__stream *stream, const char *data, size_t size)
{
    switch (stream->style) {
    case TD__STYLE_HIDDEN:
        break;
    case TD__STYLE_RAW:
        td__console_write(stream->console, stream->which, stream, data, size);
        break;
    case TD__STYLE_LINES:
        td__buffer_put(&stream->line, data, size);
        update_lines(stream);
        break;
    case TD__STYLE_SCREEN:
        td__buffer_put(&stream->line, data, size);
        update_screen(stream);
        break;
    }
}

/* ---- From the worker ------------------------------------------------------------------------- */

/* A worker whose output ends at a terminal gets a pseudo-terminal of the same size, so that it writes line by
 * line and in colour as it would there. It passes bytes on unchanged. */
static bool open_terminal(struct td__stream *stream, int terminal)
{
    char name[128];
    struct termios settings;
    struct winsize size;
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), slave = -1;
    if (master < 0)
        return false;
    if (!grantpt(master) && !unlockpt(master) && !ptsname_r(master, name, sizeof name))
        slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0 || tcgetattr(slave, &settings))
        goto fail;
    cfmakeraw(&settings);
    if (tcsetattr(slave, TCSANOW, &settings))
        goto fail;
    if (!ioctl(terminal, TIOCGWINSZ, &size))
        ioctl(slave, TIOCSWINSZ, &size);
    stream->read_end = master;
    stream->write_end = slave;
    return true;

fail:
    if (slave >= 0)
        close(slave);
    close(master);
    return false;
}

/* Opens a pseudo-terminal, or a pipe where the output goes elsewhere, and where there is none left. */
static td_status open_channel(struct td__stream *stream)
{
    int ends[2], fd = stream->which == TD__OUT ? STDOUT_FILENO : STDERR_FILENO;
    bool terminal = (stream->style == TD__STYLE_RAW || stream->style == TD__STYLE_SCREEN) &&
                    stream->console->to[stream->which]->terminal;
    if (terminal && open_terminal(stream, fd))
        return TD_OK;
    if (pipe2(ends, O_CLOEXEC))
        return td_fail(TD_ERR_SYSTEM, "cannot make a pipe for a worker's output: %s",
                       td__errno_text(errno));
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    stream->read_end = ends[0];
    stream->write_end = ends[1];
    return TD_OK;
}

/* First the handle: to close or stop it later would take another descriptor, which has got the number, out of the loop. */
static void close_channel(struct td__stream *stream)
{
    if (stream->polled)
        uv_close((uv_handle_t *)&stream->poll, NULL);
    stream->polled = false;
    if (stream->read_end >= 0)
        close(stream->read_end);
    stream->read_end = -1;
}

/* The log file cannot be written to; once. */
static void report_log_error(struct td__stream *stream)
{
    stream->console->output_lost = true;
    td__console_say(stream->console, "cannot write %s: %s; the rest is not kept there",
                    stream->log.path, td__errno_text(stream->log.error));
}

/* Takes up to READ_SIZE bytes that are there now; how many, or -1 at the end. */
static ssize_t take(struct td__stream *stream)
{
    char data[READ_SIZE];
    ssize_t size;
    do
        size = read(stream->read_end, data, sizeof data);
    while (size < 0 && errno == EINTR);
    if (size < 0 && errno == EAGAIN)
        return 0;
    if (size <= 0) { /* a pseudo-terminal ends with EIO: no process has the other side open */
        close_channel(stream);
        return -1;
    }
    add_to_tail(&stream->tail, data, (size_t)size);
    if (!td__log_file_write(&stream->log, data, (size_t)size))
        report_log_error(stream);
    show(stream, data, (size_t)size);
    return size;
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct td__stream *stream = poll->data;
    if (status < 0) {
        close_channel(stream);
        return;
    }
    if (take(stream) > 0 && stream->style != TD__STYLE_HIDDEN &&
        td__console_is_full(stream->console, stream->which)) {
        stream->paused = true;
        uv_poll_stop(poll);
    }
}

void td__stream_settle(struct td__stream *stream)
{
    size_t total = 0;
    while (stream->read_end >= 0 && total < DRAIN_LIMIT) {
        ssize_t size = take(stream);
        if (size <= 0)
            break;
        total += (size_t)size;
    }
    show_rest(stream);
}

void td__stream_rename(struct td__stream *stream, enum td__stream_style style,
                       struct td__log_file *log)
{
    if (!td__log_file_close(&stream->log))
        report_log_error(stream);
    free(stream->log.path);
    stream->log = *log;
    stream->style = style;
}

void td__stream_resume(struct td__stream *stream)
{
    if (!stream->paused || td__console_is_full(stream->console, stream->which))
        return;
    stream->paused = false;
    if (stream->read_end >= 0)
        uv_poll_start(&stream->poll, UV_READABLE, on_readable);
}

td_status td__stream_start(struct td__stream *stream, uv_loop_t *loop)
{
    TD_TRY(open_channel(stream));
    int error = uv_poll_init(loop, &stream->poll, stream->read_end);
    if (error) {
        close_channel(stream);
        close(stream->write_end);
        return td_fail(TD_ERR_SYSTEM, "cannot watch a worker's output: %s", td__errno_text(-error));
    }
    uv_timer_init(loop, &stream->patience);
    stream->poll.data = stream->patience.data = stream;
    stream->polled = stream->watched = true;
    uv_poll_start(&stream->poll, UV_READABLE, on_readable);
    return TD_OK;
}

void td__stream_finish(struct td__stream *stream)
{
    td__stream_settle(stream);
    close_channel(stream);
    if (stream->watched)
        uv_close((uv_handle_t *)&stream->patience, NULL);
    stream->watched = false;
    td__buffer_free(&stream->line);
    if (!td__log_file_close(&stream->log))
        report_log_error(stream);
    free(stream->log.path);
    stream->log.path = NULL;
    free(stream->tail.bytes);
    stream->tail = (struct td__tail){0};
}
