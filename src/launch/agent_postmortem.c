/* The postmortem that tdrun prints, once an attempt: after the first failure, or when tdrun is signalled to
 * end, before it signals the workers. Where the others go on (--on-failure) also at each failure, of the worker that failed. */
#include "base/fail.h"
#include "base/file_limit.h"
#include "launch/agent.h"
#include "launch/postmortem.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static void keep(struct td__agent *agent, const struct td__postmortem *postmortem)
{
    const char *path = agent->options->postmortem_file;
    struct td__buffer text = {0};
    struct stat info;
    td__postmortem_print_json(postmortem, true, &text);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    int error = fd < 0        ? errno
                : text.failed ? ENOMEM
                              : td__file_write_all(fd, text.data, text.size);
    if (fd >= 0 && error && !fstat(fd, &info) && S_ISREG(info.st_mode))
        unlink(path); /* a program must not read half a postmortem */
    if (fd >= 0 && close(fd) && !error)
        error = errno;
    if (error)
        td__console_say(&agent->console, "--postmortem-file %s: %s", path, td__errno_text(error));
    td__buffer_free(&text);
}

/* Takes a postmortem now; false, with a message to the user, where that fails. */
static bool take(struct td__agent *agent, const struct td__worker *first,
                 struct td__postmortem *postmortem)
{
    td__attempt_note_ends(agent);
    if (!td__postmortem_of_book(&agent->attempt.book, first ? first->slot : -1, postmortem))
        return true;
    td__console_say(&agent->console, "%s", td__error_text());
    return false;
}

void td__agent_report_postmortem(struct td__agent *agent, const struct td__worker *first, bool kept)
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
        td__console_say(&agent->console, "where the workers were, the worst first:");
        td__console_write(&agent->console, TD__ERR, NULL, text.data, text.size);
        td__buffer_free(&text);
    }
    if (kept && agent->options->postmortem_file)
        keep(agent, &postmortem);
    td__postmortem_free(&postmortem);
}

void td__agent_describe_place(struct td__agent *agent, const struct td__worker *worker, char *text,
                              size_t room)
{
    struct td__postmortem postmortem;
    text[0] = 0;
    if (!agent->attempt.book.map || !take(agent, worker, &postmortem))
        return;
    const struct td__postmortem_rank *rank = td__postmortem_rank_of(&postmortem, worker->slot);
    if (rank && td__postmortem_has_any(&postmortem))
        td__postmortem_where(rank, text, room);
    if (agent->options->postmortem_file)
        keep(agent, &postmortem);
    td__postmortem_free(&postmortem);
}
