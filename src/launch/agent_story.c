/* What tdrun tells about the last operations of its workers, once a round: after the first failure, or
 * when it is told to end, before the workers are. */
#include "base/fail.h"
#include "launch/agent_state.h"
#include "launch/story.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

static bool write_all(int fd, const uint8_t *data, size_t size)
{
    while (size) {
        ssize_t written = write(fd, data, size);
        if (written < 0 && errno == EINTR)
            continue;
        if (written < 0)
            return false;
        data += written;
        size -= (size_t)written;
    }
    return true;
}

static void keep(struct td__agent *agent, const struct td__story *story)
{
    const char *path = agent->options->story_file;
    struct td__buffer text = {0};
    td__story_print_json(story, true, &text);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool kept = fd >= 0 && !text.failed && write_all(fd, text.data, text.size);
    int error = text.failed ? ENOMEM : errno;
    if (fd >= 0 && close(fd) && kept) {
        kept = false;
        error = errno;
    }
    if (!kept)
        td__console_say(&agent->console, "tdrun: --story-file %s: %s\n", path,
                        td__errno_text(error));
    td__buffer_free(&text);
}

void td__agent_tell_story(struct td__agent *agent, const struct td__worker *first)
{
    struct td__story story;
    struct td__buffer text = {0};
    if (agent->story_told || !agent->round.count || !agent->round.book.map)
        return;
    agent->story_told = true;
    td__round_note_ends(&agent->round);
    if (td__story_of_book(&agent->round.book, first ? first->local_rank : -1, &story)) {
        td__console_say(&agent->console, "tdrun: %s\n", td_last_error());
        return;
    }
    if (td__story_has_any(&story)) {
        td__story_print(&story, "  ", &text);
        td__console_say(&agent->console, "tdrun: where the workers were, the worst first:\n");
        td__console_write(&agent->console, TD__ERR, NULL, text.data, text.size);
        td__buffer_free(&text);
    }
    if (agent->options->story_file)
        keep(agent, &story);
    td__story_free(&story);
}
