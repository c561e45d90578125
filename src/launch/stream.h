/* One of a worker's two output streams, on its way to the console, to a file, and to the report.
 *
 *     worker ── channel ──> read ──┬── tail          all bytes
 *                                  ├── log file      all bytes, as they come
 *                                  └── console       line by line
 */
#ifndef TD_LAUNCH_STREAM_H
#define TD_LAUNCH_STREAM_H

#include "base/buffer.h"
#include "launch/console.h"

#include <tandem/base.h>

#include <limits.h>
#include <sys/types.h>
#include <uv.h>

/* ---- The last lines, for the report on how a worker ended ------------------------------------ */

enum { TD__TAIL_SIZE = 8192, TD__TAIL_LINES = 20 };

struct td__tail {
    char *bytes; /* TD__TAIL_SIZE, from the first output on */
    size_t size;
};

/** Appends the last lines to `text`, each after `margin` and ended. Of a line that was overwritten
 *  with carriage returns, what stands there last. False when there are none. */
bool td__tail_print(const struct td__tail *tail, const char *margin, struct td__buffer *text);

/* ---- Log files -------------------------------------------------------------------------------
 *
 *     DIR/<run id>/[node_<k>/ with several nodes]attempt_<n>/<local rank>/stdout.log, stderr.log
 *
 *  and spare_<k> instead of the local rank, of a spare that has none yet. */

struct td__logs {
    char directory[PATH_MAX]; /* down to the run id, or the node */
    char fresh[PATH_MAX];     /* the directory that was made for want of one; "" otherwise */
};

/** Makes the directory of this run. `directory` NULL: a fresh one in $TMPDIR, or /tmp. `node` is -1
 *  for a job of one node. */
td_status td__logs_open(struct td__logs *logs, const char *directory, const char *run_id, int node);

struct td__log_file {
    int fd; /* -1: none */
    char *path;
    int error; /* of the first write that failed; nothing is written after that */
};

/** Makes the file for a worker's stream, empty. `owner` is its local rank, or "spare_0"; `name` is "stdout" or "stderr". */
td_status td__log_file_open(struct td__log_file *file, const struct td__logs *logs, int attempt,
                            const char *owner, const char *name);

/** Writes; false when that fails for the first time. */
bool td__log_file_write(struct td__log_file *file, const void *data, size_t size);

/** Closes; false when the system reports only now that something could not be written. */
bool td__log_file_close(struct td__log_file *file);

/* ---- A stream -------------------------------------------------------------------------------- */

/* How a stream appears on the console. */
enum td__stream_style {
    TD__STYLE_HIDDEN, /* not at all */
    TD__STYLE_RAW,    /* bytes as they come: one worker on a terminal */
    TD__STYLE_LINES,  /* whole lines, a long one in pieces of 64 KiB */
    TD__STYLE_SCREEN, /* lines of several workers on one terminal; those that end with a carriage
                         return, and unfinished ones, appear as well */
};

struct td__stream {
    int read_end;  /* of a pipe or pseudo-terminal, non-blocking; -1 when there is none */
    int write_end; /* for the worker */
    struct td__console *console;
    int which; /* TD__OUT or TD__ERR */
    enum td__stream_style style;
    char prefix[300]; /* in front of each line */
    /* LINES: NULL, or takes lines that begin with '\1', without that and their end, instead of showing them. */
    void (*on_control)(void *arg, const char *line, size_t size);
    void *control_arg;
    bool muted; /* with on_control: nothing is shown, as long as on_control() does not change this */
    struct td__log_file log;
    struct td__tail tail;

    struct td__buffer line; /* what is not a whole line yet */
    bool line_begun;        /* a piece of the present line was shown already */
    bool paused;            /* not read from, until the console has caught up */
    uv_poll_t poll;
    uv_timer_t patience; /* SCREEN: when it is over, an unfinished line is shown */
    bool polled;         /* `poll` is in use: until the channel is closed */
    bool watched;        /* `patience` is */
};

/** Opens both ends and begins to watch; `write_end` is closed by the caller when the worker has it. The
 *  ends and the last block of fields are set here, the others by the caller. */
td_status td__stream_start(struct td__stream *stream, uv_loop_t *loop);

/** The worker has ended: takes what is there, without waiting for more, and shows a line that was not
 *  finished. Other processes may still hold its end. */
void td__stream_settle(struct td__stream *stream);

/** What is taken from now on belongs to another one: it has this style and this log file, whose contents are moved. The caller
 *  sets the prefix, and has settled the stream before. */
void td__stream_rename(struct td__stream *stream, enum td__stream_style style,
                       struct td__log_file *log);

/** Goes on reading when it was paused and the console has caught up. */
void td__stream_resume(struct td__stream *stream);

/** Settles, and closes everything. The handles are closed once the loop has run again. */
void td__stream_finish(struct td__stream *stream);

#endif
