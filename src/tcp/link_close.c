/* Goodbyes; see links.h.
 *
 * A member that fails says goodbye on every link: a header and one sentence, which the others hand
 * on. So all members give the same reason, whoever noticed it first. A goodbye stands between two
 * messages; a link in the middle of one is shut instead.
 *
 * Whoever cannot be told on its link is told on the side; whoever links up later finds a goodbye. */
#include "base/fail.h"
#include "tcp/links.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    REST_MS = 500,   /* for the rest of a goodbye that has begun to come */
    REASON_MS = 500, /* for what explains the end of a link */
};

/* ---- Saying ---------------------------------------------------------------------------------- */

/* Small, and nothing else is on its way: what does not go out at once will not go out. */
static void send_goodbye(const struct td__links *links, int fd)
{
    ssize_t sent = send(fd, links->goodbye, links->goodbye_size, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)sent;
    shutdown(fd, SHUT_WR);
}

/* On the endpoint's thread: somebody came too late. */
static void on_late_link(void *arg, int rank, int fd)
{
    (void)rank;
    send_goodbye(arg, fd);
    close(fd);
}

void td__links_say_goodbye(struct td__links *links, const struct td__operation *operation,
                           td_status status, const char *reason)
{
    size_t size = strnlen(reason, TD__GOODBYE_TEXT);
    if (links->goodbye)
        return;
    links->goodbye = malloc(TD__HEADER_BYTES + size);
    if (links->goodbye) {
        struct td__call_header header = td__header_of(operation, operation->call.count, 0, 0);
        header.type = TD__HEADER_GOODBYE;
        header.op = (uint16_t)status;
        header.payload = size;
        td__header_write(&header, links->goodbye);
        memcpy(links->goodbye + TD__HEADER_BYTES, reason, size);
        links->goodbye_size = TD__HEADER_BYTES + size;
    }
    for (int i = 0; i < links->size; i++) {
        struct td__tcp_link *link = &links->at[i];
        if (link->fd >= 0 && links->goodbye && !link->sending)
            send_goodbye(links, link->fd);
        else if (link->fd >= 0)
            shutdown(link->fd, SHUT_WR);
        if (link->side >= 0 && links->goodbye)
            send_goodbye(links, link->side);
    }
    if (links->goodbye)
        links->source->listen(links->arg, on_late_link, links);
}

void td__links_reach(struct td__links *links, int peer, td__deadline deadline)
{
    struct td__tcp_link *link = &links->at[peer];
    bool told = (link->fd >= 0 && !link->sending) || link->side >= 0;
    bool gone = links->source->exit_reason && links->source->exit_reason(links->arg, peer);
    if (!links->goodbye || peer == links->index || told || gone)
        return;
    if (links->source->approach(links->arg, peer, deadline, &link->side))
        link->side = -1;
    else
        send_goodbye(links, link->side);
}

/* ---- Hearing --------------------------------------------------------------------------------- */

/* Fails as `peer` has. The rest of the text is still in the link. */
static td_status take_goodbye(struct td__links *links, int peer, int fd,
                              const struct td__operation *operation,
                              const struct td__call_header *header, const void *text, size_t size)
{
    char reason[TD__GOODBYE_TEXT + 1];
    size_t all = (size_t)header->payload;
    if (size > all)
        size = all;
    memcpy(reason, text, size);
    links->heard = true;
    if (size < all && td__recv_all(fd, reason + size, all - size, td__deadline_in_ms(REST_MS)))
        all = size;
    reason[all] = '\0';
    for (size_t i = 0; i < all; i++)
        if ((unsigned char)reason[i] < ' ')
            reason[i] = ' ';
    td_status status = (td_status)header->op;
    if (all && (status == TD_ERR_MISMATCH || status == TD_ERR_PEER || status == TD_ERR_TIMEOUT ||
                status == TD_ERR_ABORTED))
        return td_fail(status, "%s", reason);
    return td_fail(TD_ERR_PEER, "%s: %s has failed: %s", td__operation_describe(operation),
                   links->source->describe(links->arg, peer), reason);
}

td_status td__links_judge(struct td__links *links, int peer, int fd,
                          const struct td__operation *operation, const struct td__call_header *mine,
                          const struct td__call_header *theirs, const void *text, size_t size)
{
    if (theirs->type == TD__HEADER_GOODBYE)
        return take_goodbye(links, peer, fd, operation, theirs, text, size);

    /* Who waited in an earlier turn has gone on since. */
    if (theirs->type == TD__HEADER_CALL &&
        (theirs->turn < mine->turn || td__header_same_call(theirs, mine)))
        return TD_OK;
    if (!td__header_differs(theirs, mine) && theirs->past != mine->past && links->source->recall)
        TD_TRY(links->source->recall(links->arg, peer, operation));
    char me[256];
    strncpy(me, links->source->describe(links->arg, links->index), sizeof me - 1);
    me[sizeof me - 1] = '\0';
    return td__header_mismatch(operation, mine, me, theirs,
                               links->source->describe(links->arg, peer));
}

td_status td__links_fail_noise(struct td__links *links, int peer,
                               const struct td__operation *operation)
{
    return td_fail(TD_ERR_MISMATCH,
                   "%s: what %s sent is no message of a collective; all ranks must run the same "
                   "version of Tandem",
                   td__operation_describe(operation), links->source->describe(links->arg, peer));
}

/* Fails where a member has ended, or says why it has failed. A peer that has only left has perhaps done so because of
 * that, and this rank may not know it yet: waits for REASON_MS. `peer` is -1 where nothing needs to be waited for. */
static td_status await_cause(struct td__links *links, const struct td__operation *operation,
                             const struct td__call_header *mine, int peer)
{
    td__deadline deadline = td__deadline_earlier(operation->deadline,
                                                 td__deadline_in_ms(REASON_MS));
    td__links_watch(links);
    for (;;) {
        struct pollfd none[1];
        bool woken;
        td__deadline next = deadline;
        TD_TRY(td__links_look_around(links, operation, mine, &next));
        if (peer < 0 || td__deadline_passed(deadline) ||
            (!links->outside && td__links_exit_reason(links, peer)))
            return TD_OK;
        td__links_sleep(links, none, 0, next, &woken);
    }
}

td_status td__links_find_cause(struct td__links *links, int peer,
                               const struct td__operation *operation,
                               const struct td__call_header *mine)
{
    struct td__error error;
    td__error_save(&error);
    td_status cause = await_cause(links, operation, mine, peer);
    return cause ? cause : td__error_restore(&error);
}

td_status td__links_fail_end(struct td__links *links, int peer,
                             const struct td__operation *operation,
                             const struct td__call_header *mine, int error)
{
    /* What TLS found is certain, while the other rank may only seem to have gone because of it. */
    const char *complaint = error == EBADMSG ? TD__TLS_CHANGED
                                             : td__tls_complaint(links->at[peer].fd);
    td__links_exit_reason(links, peer); /* watches it */
    TD_TRY(await_cause(links, operation, mine, complaint ? -1 : peer));
    const char *exit_reason = complaint ? complaint : td__links_exit_reason(links, peer);
    if (exit_reason)
        return td_fail(TD_ERR_PEER, "%s: %s %s", td__operation_describe(operation),
                       links->source->describe(links->arg, peer), exit_reason);
    const char *what = "closed its connection: ", *reason = "it has ended, or left the group";
    if (error == ETIMEDOUT || error == EHOSTUNREACH) {
        what = "does not answer any more: ";
        reason = "its host is down, or cut off";
    } else if (error && error != ECONNRESET && error != EPIPE) {
        what = "cannot be reached any more: ";
        reason = td__errno_text(error);
    }
    return td_fail(TD_ERR_PEER, "%s: %s %s%s", td__operation_describe(operation),
                   links->source->describe(links->arg, peer), what, reason);
}
