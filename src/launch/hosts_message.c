/* What the two sides of tdrun --hosts tell each other; see hosts.h. */
#include "launch/hosts.h"

#include "base/fail.h"
#include "base/number.h"
#include "base/text.h"
#include "launch/worker.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { MESSAGE_LIMIT = 900 << 10, MOST_TEXTS = 1 << 16, TEXT_LIMIT = 1 << 20, LINE_ROOM = 128 };

/* ---- Here: the message ----------------------------------------------------------------------- */

/* The variables that workers here would find and that make a difference to them; those of the host itself stay. */
static bool is_passed_on(const char *variable)
{
    static const char *const prefixes[] = {
        "TANDEM_", "OMP_",         "MKL_",  "OPENBLAS_",        "PYTHON", "NCCL_",    "CUDA_",
        "UCX_",    "VIRTUAL_ENV=", "PATH=", "LD_LIBRARY_PATH=", "PET_",   "NO_COLOR="};
    if (!strncmp(variable, "TANDEM_SECRET=", 14) || !strncmp(variable, "TANDEM_RSH=", 11))
        return false;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(variable, prefixes[i], strlen(prefixes[i])))
            return true;
    return false;
}

/* Those of --export: "NAME", or "NAME=VALUE". */
static void put_exported(struct td__buffer *body, uint32_t *count, const char *list)
{
    char item[4096];
    while (list && *list) {
        size_t size = strcspn(list, ",");
        snprintf(item, sizeof item, "%.*s", (int)(size < sizeof item ? size : sizeof item - 1),
                 list);
        const char *value = strchr(item, '=') ? "" : getenv(item);
        if (value && !strchr(item, '='))
            snprintf(item + strlen(item), sizeof item - strlen(item), "=%s", value);
        if (value) {
            td__buffer_put_string(body, item, strlen(item));
            ++*count;
        }
        list += size + (list[size] == ',');
    }
}

static void put_environment(struct td__buffer *message, const struct td__run_options *options)
{
    struct td__buffer body = {0};
    uint32_t count = 0;
    for (char **at = environ; *at; at++) {
        if (!is_passed_on(*at))
            continue;
        td__buffer_put_string(&body, *at, strlen(*at));
        count++;
    }
    put_exported(&body, &count, options->exported);
    td__buffer_put_u32(message, count);
    td__buffer_put(message, body.data, body.size);
    message->failed = message->failed || body.failed;
    td__buffer_free(&body);
}

static void put_text(struct td__buffer *buffer, const char *text)
{
    td__buffer_put_string(buffer, text, strlen(text));
}

/* The flags that were given, and behind them, so that they count, those that make this host a node of the job. */
static void put_command_line(struct td__buffer *message, const struct td__run_options *options,
                             int index)
{
    const struct td__host *host = &options->hosts.at[index];
    char own[10][320];
    int count = 0, programs = 0;
    snprintf(own[count++], sizeof own[0], "--hosts=");
    snprintf(own[count++], sizeof own[0], "--hostfile=");
    snprintf(own[count++], sizeof own[0], "--nnodes=%d", options->hosts.count);
    snprintf(own[count++], sizeof own[0], "--node-rank=%d", index);
    snprintf(own[count++], sizeof own[0], "--master-addr=%s", options->hosts_master);
    snprintf(own[count++], sizeof own[0], "--master-port=%d", options->hosts_port);
    if (host->slots[0])
        snprintf(own[count++], sizeof own[0], "--nproc-per-node=%s", host->slots);
    snprintf(own[count++], sizeof own[0], "--");
    while (options->program[programs])
        programs++;
    td__buffer_put_u32(message, (uint32_t)(1 + options->flag_count + count + programs));
    put_text(message, "tdrun");
    for (int i = 0; i < options->flag_count; i++)
        put_text(message, options->flags[i]);
    for (int i = 0; i < count; i++)
        put_text(message, own[i]);
    for (int i = 0; i < programs; i++)
        put_text(message, options->program[i]);
}

td_status td__hosts_put_message(const struct td__run_options *options, int index,
                                const char *secret, struct td__buffer *message)
{
    struct td__buffer body = {0};
    char directory[PATH_MAX], line[LINE_ROOM];
    if (!getcwd(directory, sizeof directory))
        return td_fail(TD_ERR_SYSTEM, "the working directory has no name: %s",
                       td__errno_text(errno));
    const char *given = getenv("TANDEM_SECRET");
    put_text(&body, given && *given ? given : secret);
    put_text(&body, options->hosts.at[index].address);
    put_text(&body, directory);
    put_environment(&body, options);
    put_command_line(&body, options, index);
    int size = snprintf(line, sizeof line, "tandem %s %zu\n", td_version(), body.size);
    td__buffer_put(message, line, (size_t)size);
    td__buffer_put(message, body.data, body.size);
    bool failed = body.failed || message->failed;
    td__buffer_free(&body);
    if (failed)
        return td__fail_nomem("hosts");
    return message->size <= MESSAGE_LIMIT
               ? TD_OK
               : td_fail(TD_ERR_INVALID,
                         "the command line and the environment for other hosts have %zu bytes; at "
                         "most %d can be sent",
                         message->size, MESSAGE_LIMIT);
}

/* ---- Here: control lines --------------------------------------------------------------------- */

void td__hosts_take_control(struct td__worker *worker, const char *line, size_t size)
{
    char text[1000];
    snprintf(text, sizeof text, "%.*s", (int)(size < sizeof text ? size : sizeof text - 1), line);
    const char *host = worker->host->address;
    if (!strncmp(text, "tandem ", 7)) {
        worker->greeted = true;
        worker->streams[TD__ERR].muted = false;
        if (strcmp(text + 7, td_version()) != 0)
            snprintf(
                worker->refusal, sizeof worker->refusal,
                "host %s has Tandem %.40s, this host %s: install the same version on all hosts",
                host, text + 7, td_version());
    } else if (!strncmp(text, "fail ", 5) && !worker->refusal[0]) {
        snprintf(worker->refusal, sizeof worker->refusal, "host %s: %s", host, text + 5);
    } else if (!strncmp(text, "note ", 5)) {
        if (!worker->note[0])
            snprintf(worker->note, sizeof worker->note, "%s", text + 5);
    } else if (!strncmp(text, "bye ", 4)) {
        worker->parted = true;
    }
}

/* The last line that ssh, or the shell there, has written. */
static void find_last_line(const struct td__worker *worker, char *line, size_t room)
{
    struct td__buffer lines = {0};
    line[0] = '\0';
    if (td__tail_print(&worker->streams[TD__ERR].tail, "", &lines) && lines.size) {
        size_t end = lines.size - 1, begin = end;
        while (begin && lines.data[begin - 1] != '\n')
            begin--;
        snprintf(line, room, ": %.*s", (int)(end - begin), (const char *)lines.data + begin);
        line[strcspn(line, "\r")] = '\0';
    }
    td__buffer_free(&lines);
}

void td__hosts_describe(const struct td__worker *worker, const struct td__run_options *options,
                        char *text, size_t room)
{
    char how[64], line[256];
    const char *host = worker->host->address;
    const char *agent = options->launch_agent ? options->launch_agent : "ssh";
    int agent_size = (int)strcspn(agent, " "), code = td__exit_code(worker->status);
    td__describe_status(worker->status, how, sizeof how);
    find_last_line(worker, line, sizeof line);
    if (worker->refusal[0])
        snprintf(text, room, "%s", worker->refusal);
    else if (worker->note[0])
        snprintf(text, room, "the job has failed: %s", worker->note);
    else if (worker->parted && !WIFSIGNALED(worker->status))
        snprintf(text, room, "the job has failed on host %s with %s", host, how);
    else if (worker->greeted)
        snprintf(text, room,
                 "host %s: the connection was lost, or tdrun was killed there (%.*s ended with %s)",
                 host, agent_size, agent, how);
    else if (code == 127 || code == 126)
        snprintf(text, room,
                 "host %s: tdrun cannot be started there%s; install Tandem there at the same place "
                 "as here, or say with --remote-tdrun where it is",
                 host, line);
    else
        snprintf(text, room, "host %s: %.*s could not start tdrun there (%s)%s", host, agent_size,
                 agent, how, line);
}

/* ---- There ----------------------------------------------------------------------------------- */

static void tell(const char *what, const char *text)
{
    char line[1024];
    int size = snprintf(line, sizeof line, "\1%s %.900s", what, text);
    for (int i = 0; i < size; i++)
        if (line[i] == '\n')
            line[i] = ' ';
    line[size++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, (size_t)size);
    (void)written; /* without a reader there is none to be told */
}

void td__hosts_tell_failure(const char *text)
{
    tell("fail", text);
}

void td__hosts_tell_end(int code)
{
    char text[16];
    snprintf(text, sizeof text, "%d", code);
    tell("bye", text);
}

/* Signals follow the message, so no byte more than wanted is read. */
static td_status read_exactly(void *data, size_t size)
{
    for (char *at = data; size;) {
        ssize_t got = read(STDIN_FILENO, at, size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return td_fail(TD_ERR_PEER, "the tdrun that has started this one has ended");
        at += got;
        size -= (size_t)got;
    }
    return TD_OK;
}

static td_status read_line(char line[LINE_ROOM])
{
    for (size_t i = 0; i < LINE_ROOM; i++) {
        TD_TRY(read_exactly(&line[i], 1));
        if (line[i] != '\n')
            continue;
        line[i] = '\0';
        return TD_OK;
    }
    return td_fail(TD_ERR_INVALID, "what is read is no message of tdrun");
}

static char *read_text(struct td__reader *reader)
{
    struct td__span span = td__reader_string(reader, TEXT_LIMIT);
    return reader->failed ? NULL : td__text_copy(span.data, span.size);
}

/* The first of the texts of a list goes to fn(), until one is not accepted. */
static td_status take_environment(struct td__reader *reader)
{
    uint32_t count = td__reader_u32(reader);
    for (uint32_t i = 0; i < count && !reader->failed && count <= MOST_TEXTS; i++) {
        char *variable = read_text(reader);
        if (variable && strchr(variable, '=') && putenv(variable)) /* it is kept */
            return td__fail_nomem("environment");
    }
    return TD_OK;
}

static td_status take_command_line(struct td__reader *reader, struct td__served *served)
{
    uint32_t count = td__reader_u32(reader);
    if (reader->failed || count > MOST_TEXTS)
        return TD_OK; /* which the caller reports */
    served->argv = calloc((size_t)count + 1, sizeof *served->argv);
    if (!served->argv)
        return td__fail_nomem("arguments");
    for (; served->argc < (int)count && !reader->failed; served->argc++)
        served->argv[served->argc] = read_text(reader);
    return TD_OK;
}

static td_status take_message(const char *data, size_t size, struct td__served *served)
{
    struct td__reader reader = td__reader_of(data, size);
    char *secret = read_text(&reader);
    struct td__span host = td__reader_string(&reader, sizeof served->host - 1);
    if (secret && *secret)
        setenv("TANDEM_SECRET", secret, 1);
    free(secret);
    snprintf(served->host, sizeof served->host, "%.*s", (int)host.size, host.data);
    char *directory = read_text(&reader);
    TD_TRY(take_environment(&reader));
    TD_TRY(take_command_line(&reader, served));
    if (!td__reader_done(&reader) || !directory) {
        free(directory);
        return td_fail(TD_ERR_INVALID, "the message of tdrun is malformed");
    }
    int error = chdir(directory) ? errno : 0;
    td_status status = TD_OK;
    if (error)
        status = td_fail(TD_ERR_INVALID, "cannot go to the working directory %s: %s", directory,
                         td__errno_text(error));
    free(directory);
    return status;
}

td_status td__hosts_serve(struct td__served *served)
{
    char line[LINE_ROOM], version[64];
    size_t size;
    tell("tandem", td_version());
    TD_TRY(read_line(line));
    if (sscanf(line, "tandem %63s %zu", version, &size) != 2 || size > MESSAGE_LIMIT)
        return td_fail(TD_ERR_INVALID, "what is read is no message of tdrun");
    if (strcmp(version, td_version()) != 0)
        return td_fail(TD_ERR_MISMATCH,
                       "it has Tandem %s, the host that starts the job has %s: install the same "
                       "version on all hosts",
                       td_version(), version);
    char *data = malloc(size + 1);
    if (!data)
        return td__fail_nomem("message");
    td_status status = read_exactly(data, size);
    if (!status)
        status = take_message(data, size, served);
    memset(data, 0, size); /* the secret is in it */
    free(data);
    return status;
}
