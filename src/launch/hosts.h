/* tdrun --hosts: the launchers of other hosts, started from here.
 *
 *     tdrun --hosts a:8,b:8 ./train
 *       ├── ssh a "exec /path/tdrun serve" ──── tdrun on a: 8 workers
 *       └── ssh b "exec /path/tdrun serve" ──── tdrun on b: 8 workers
 *
 * To the agent here the launchers are its workers, with the difference that a signal to one goes over its standard
 * input, its control pipe:
 *
 *     here -> there   a line "tandem VERSION SIZE", SIZE bytes of a message (td__host_message_put()), then a byte for each
 *                     signal, its number; the end of the pipe is the end of this tdrun: all is killed there
 *     there -> here   standard output and error of the workers, each line with host and rank in front, so that no other
 *                     line begins as control lines do (on standard error): "\1tandem VERSION" at once, "\1fail TEXT"
 *                     when it cannot begin, "\1bye CODE" in the end
 *
 * So the secret is in the message only. Whatever ends between the two, ssh too, ends the pipes. */
#ifndef TD_LAUNCH_HOSTS_H
#define TD_LAUNCH_HOSTS_H

#include "base/buffer.h"
#include "launch/options.h"

struct td__worker;

/** Adds the hosts of --hosts, "a:8,user@b,[fe80::1]:4". TD_ERR_INVALID says what is wrong with the list. */
td_status td__hosts_parse(const char *list, struct td__hosts *hosts);

/** Adds those of a file: a line for each, "a:8", "a slots=8" or "a"; # begins a comment. */
td_status td__hosts_read(const char *path, struct td__hosts *hosts);

void td__hosts_free(struct td__hosts *hosts);

/* ---- Here ------------------------------------------------------------------------------------ */

/** The arguments of the program that starts tdrun on a host, ended by NULL, in one piece of memory for free(); its file in
 *  `path`. TD_ERR_INVALID: there is no such program, or it cannot pass on the message. */
td_status td__hosts_command(const struct td__run_options *options, int index, char path[PATH_MAX],
                            char ***argv);

/** The line and the message for a host. `secret` is "" where the environment has it. */
td_status td__hosts_put_message(const struct td__run_options *options, int index,
                                const char *secret, struct td__buffer *message);

/** Takes a control line, without its first byte and its end. */
void td__hosts_take_control(struct td__worker *worker, const char *line, size_t size);

/** One sentence on how the launcher of a host has ended. */
void td__hosts_describe(const struct td__worker *worker, const struct td__run_options *options,
                        char *text, size_t room);

/** For a signal to the launcher there; it does not wait. */
void td__hosts_signal(struct td__worker *worker, int signal);

/** Closes the control pipe: everything ends there at once. */
void td__hosts_hang_up(struct td__worker *worker);

/* ---- There: tdrun serve ---------------------------------------------------------------------- */

struct td__served {
    char host[256]; /* this one, as the other side calls it */
    int argc;
    char **argv; /* the command line to be run; like all of this, kept until the end */
};

/** Says hello, reads the message from standard input, and makes its environment and working directory this process's. */
td_status td__hosts_serve(struct td__served *served);

/** Tells the other side, in a control line, that this one cannot begin, … */
void td__hosts_tell_failure(const char *text);

/** … or how it has ended. */
void td__hosts_tell_end(int code);

#endif
