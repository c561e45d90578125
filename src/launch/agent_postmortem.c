/* The postmortem that tdrun prints, once an attempt: after the first failure, or when tdrun is signalled to
 * end, before it signals the workers. With --keep-going also at each failure, of the worker that failed. */
#include "base/fail.h"
#include "base/file_limit.h"
#include "launch/agent_state.h"
#include "launch/postmortem.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static bool write_all(int fd, const uint8_t *data, size_t size)
{
    while (size) {
        ssize_t written = td__file_write(fd, data, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return false;
        data += written;
        size -= (size_t)written;
    }
    return true;
}

/* Written to another name first: a program must not read half a postmortem. */
static void remove_half(const char *path, int fd)
{
    struct stat info;
    if (!fstat(fd, &info) && S_ISREG(info.st_mode))
        unlink(path);
}

static void keep(struct td__agent *agent, const struct td__postmortem *postmortem)
{
    const char *path = agent->options->postmortem_file;
    struct td__buffer text = {0};
    td__postmortem_print_json(postmortem, true, &text);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool kept = fd >= 0 && !text.failed && write_all(fd, text.data, text.size);
    int error = text.failed ? ENOMEM : errno;
    if (fd >= 0 && !kept)
        remove_half(path, fd);
    if (fd >= 0 && close(fd) && kept) {
        kept = false;
        error = errno;
    }
    if (!kept)
        td__console_say(&agent->console, "tdrun: --postmortem-file %s: %s\n", path,
                        td__errno_text(error));
    td__buffer_free(&text);
}

/* Takes a postmortem now; false, with a message to the user, where that fails. */
static bool take(struct td__agent *agent, const struct td__worker *first,
                 struct td__postmortem *postmortem)
{
    td__attempt_note_ends(&agent->attempt);
    if (!td__postmortem_of_book(&agent->attempt.book, first ? first->local_rank : -1, postmortem))
        return true;
    td__console_say(&agent->console, "tdrun: %s\n", td_last_error());
    return false;
}

static void tell(struct td__agent *agent, const struct td__worker *first, bool kept)
{
    struct td__postmortem postmortem;
    struct td__buffer text = {0};
    if (agent->postmortem_reported || !agent->attempt.count || !agent->attempt.book.map)
        return;
    agent->postmortem_reported = true;
    if (!take(agent, first, &postmortem))
        return;
    if (td__postmortem_has_any(&postmortem)) {
        td__postmortem_print(&postmortem, "  ", &text);
        td__console_say(&agent->console, "tdrun: where the workers were, the worst first:\n");
        td__console_write(&agent->console, TD__ERR, NULL, text.data, text.size);
        td__buffer_free(&text);
    }
    if (kept && agent->options->postmortem_file)
        keep(agent, &postmortem);
    td__postmortem_free(&postmortem);
}

void td__agent_report_postmortem(struct td__agent *agent, const struct td__worker *first)
{
    tell(agent, first, true);
}

void td__agent_show_postmortem(struct td__agent *agent, const struct td__worker *first)
{
    tell(agent, first, false);
}

void td__agent_describe_place(struct td__agent *agent, const struct td__worker *worker, char *text,
                              size_t room)
{
    struct td__postmortem postmortem;
    text[0] = 0;
    if (!agent->attempt.book.map || !take(agent, worker, &postmortem))
        return;
    for (int i = 0; i < postmortem.count && td__postmortem_has_any(&postmortem); i++)
        if (postmortem.ranks[i].slot == worker->local_rank)
            td__postmortem_where(&postmortem, i, text, room);
    if (agent->options->postmortem_file)
        keep(agent, &postmortem);
    td__postmortem_free(&postmortem);
}
