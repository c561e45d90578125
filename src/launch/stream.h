/* One of a worker's two output streams, on its way to the console, to a file, and to the report.
 *
 *     worker ── channel ──> read ──┬── tail          all bytes
 *                                  ├── log file      all bytes, as they come
 *                                  └── console       line by line
 */
#ifndef TD_LAUNCH_STREAM_H
#define TD_LAUNCH_STREAM_H

#include "launch/channel.h"
#include "launch/console.h"
#include "launch/logs.h"
#include "launch/tail.h"

#include <uv.h>

/* How a stream appears on the console. */
enum td__stream_style {
    TD__STYLE_HIDDEN, /* not at all */
    TD__STYLE_RAW,    /* bytes as they come: one worker on a terminal */
    TD__STYLE_LINES,  /* whole lines, a long one in pieces of 64 KiB */
    TD__STYLE_SCREEN, /* lines of several workers on one terminal; those that end with a carriage
                         return, and unfinished ones, appear as well */
};

struct td__stream {
    struct td__channel channel;
    struct td__console *console;
    int which; /* TD__OUT or TD__ERR */
    enum td__stream_style style;
    char prefix[300]; /* in front of each line */
    struct td__log_file log;
    struct td__tail tail;

    /* Called when the log file cannot be written to, once. */
    void (*on_log_error)(struct td__stream *stream);
    void *data; /* the owner's */

    struct td__buffer line; /* what is not a whole line yet */
    bool line_begun;        /* a piece of the present line was shown already */
    bool paused;            /* not read from, until the console has caught up */
    uv_poll_t poll;
    uv_timer_t patience; /* SCREEN: when it is over, an unfinished line is shown */
    bool watched;        /* the handles are in use */
};

/** Opens the channel and begins to watch it; channel.write_end is for the worker, and closed by the
 *  caller when the worker has it. All but the last block of fields is set by the caller. */
td_status td__stream_start(struct td__stream *stream, uv_loop_t *loop);

/** The worker has ended: takes what is there, without waiting for more, and shows a line that was not
 *  finished. Other processes may still hold the channel. */
void td__stream_settle(struct td__stream *stream);

/** Goes on reading when it was paused and the console has caught up. */
void td__stream_resume(struct td__stream *stream);

/** Settles, and closes everything but the tail. The handles are closed once the loop has run again. */
void td__stream_finish(struct td__stream *stream);

#endif
