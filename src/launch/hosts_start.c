/* Starting the launcher of another host, and talking to it while it runs; see hosts.h. */
#include "launch/agent.h"

#include "base/fail.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { PIPE_SIZE = 1 << 20 };

/* ssh gets the environment without the secret: it may be told to pass variables on. */
static char **environment_without_secret(void)
{
    size_t count = 0, kept = 0;
    while (environ[count])
        count++;
    char **copy = calloc(count + 1, sizeof *copy);
    for (size_t i = 0; copy && i < count; i++)
        if (strncmp(environ[i], "TANDEM_SECRET=", 14) != 0)
            copy[kept++] = environ[i];
    return copy;
}

/* A pipe that holds the whole message, so that nothing waits for ssh. Signals follow without waiting, too. */
static td_status open_control(const struct td__buffer *message, int ends[2])
{
    if (pipe2(ends, O_CLOEXEC))
        return td_fail(TD_ERR_SYSTEM, "cannot make a pipe: %s", td__errno_text(errno));
    if (message->size > 65536)
        fcntl(ends[1], F_SETPIPE_SZ, PIPE_SIZE);
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    ssize_t written = write(ends[1], message->data, message->size);
    if (written == (ssize_t)message->size)
        return TD_OK;
    close(ends[0]);
    close(ends[1]);
    return td_fail(TD_ERR_SYSTEM,
                   "the message for a host has %zu bytes, and a pipe here does not hold them; see "
                   "/proc/sys/fs/pipe-max-size",
                   message->size);
}

td_status td__hosts_start(struct td__agent *agent, struct td__worker *worker, int *exec_error)
{
    char path[PATH_MAX], **argv;
    int ends[2];
    const struct td__job_secret *secret = agent->job->secret;
    struct td__buffer message = {0};
    *exec_error = 0;
    TD_TRY(td__hosts_command(agent->options, worker->local_rank, path, &argv));
    td_status status = td__hosts_put_message(agent->options, worker->local_rank,
                                             secret->made ? secret->text : "", &message);
    if (!status)
        status = open_control(&message, ends);
    if (message.data)
        memset(message.data, 0, message.size);
    td__buffer_free(&message);
    char **envp = status ? NULL : environment_without_secret();
    if (!status && !envp)
        status = td__fail_nomem("hosts");
    if (!status) {
        struct td__child_spec spec = {
            .path = path,
            .argv = argv,
            .envp = envp,
            .standard = {ends[0]},
            .keep = {-1, -1},
            .mask = &agent->start->mask,
            .default_signals = &agent->start->ignored,
            .file_limit = agent->file_limit.rlim_max ? &agent->file_limit : NULL,
        };
        status = td__worker_start(worker, &agent->loop, &spec, exec_error);
        close(ends[0]);
        worker->control = ends[1];
        if (status)
            td__hosts_hang_up(worker);
    }
    free(envp);
    free(argv);
    return status;
}

void td__hosts_signal(struct td__worker *worker, int signal)
{
    uint8_t byte = (uint8_t)signal;
    ssize_t written = write(worker->control, &byte, 1);
    (void)written; /* a pipe without a reader: the launcher there has ended, or ends */
}

void td__hosts_hang_up(struct td__worker *worker)
{
    if (worker->control >= 0)
        close(worker->control);
    worker->control = -1;
}
