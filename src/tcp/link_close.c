/* Failure notices; see links.h.
 *
 * A member that fails sends a failure notice on every link: a header and the error text. The receivers fail with
 * that text and send it on, so all members report the same cause. A notice can only stand between two frames; a
 * link on which a frame has been sent in part is shut down instead.
 *
 * A member that cannot be notified on its link is notified by a side link. A member that connects later receives
 * the notice at once. */
#include "base/fail.h"
#include "tcp/links.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    REST_MS = 500,  /* the wait for the rest of a notice */
    CAUSE_MS = 500, /* the wait for the cause of the end of a link */
    NOTIFIED = 64,  /* the largest comm of which every member is notified of a failure */
};

/* ---- Sending --------------------------------------------------------------------------------- */

/* A notice is small, and nothing is queued before it: what cannot be sent at once will never be sent. */
static void send_notice(const struct td__links *links, int fd)
{
    ssize_t sent = td__sock_send(fd, links->failure_notice, links->failure_notice_size,
                        MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)sent;
    td__sock_shutdown(fd, SHUT_WR);
}

/* On the endpoint's thread: a member has connected after the failure. */
static void on_late_link(void *arg, int rank, int fd)
{
    (void)rank;
    send_notice(arg, fd);
    td__sock_close(fd);
}

void td__links_send_failure(struct td__links *links, const struct td__operation *operation,
                            td_status status, const char *reason)
{
    size_t size = strnlen(reason, TD__FAILURE_TEXT);
    if (links->failure_notice_size)
        return;
    struct td__call_header header = td__header_of(operation, operation->call.count, 0, 0);
    header.type = TD__HEADER_FAILURE;
    header.op = (uint16_t)status;
    header.payload = size;
    td__header_write(&header, links->failure_notice);
    memcpy(links->failure_notice + TD__HEADER_BYTES, reason, size);
    links->failure_notice_size = TD__HEADER_BYTES + size;
    for (int i = 0; i < links->size; i++) {
        struct td__tcp_link *link = &links->at[i];
        if (link->fd >= 0 && !link->sending)
            send_notice(links, link->fd);
        else if (link->fd >= 0)
            td__sock_shutdown(link->fd, SHUT_WR);
        if (link->side >= 0)
            send_notice(links, link->side);
    }
    links->source->listen(links->arg, on_late_link, links);
}

void td__links_send_failure_to(struct td__links *links, int peer, td__deadline deadline)
{
    struct td__tcp_link *link = &links->at[peer];
    bool notified = (link->fd >= 0 && !link->sending) || link->side >= 0;
    if (!links->failure_notice_size || peer == links->index || notified ||
        td__links_exit_reason(links, peer, false))
        return;
    if (links->source->connect(links->arg, peer, true, deadline, &link->side))
        link->side = -1;
    else
        send_notice(links, link->side);
}

void td__links_send_failure_to_all(struct td__links *links, td__deadline deadline)
{
    for (int i = 0; i < links->size && links->size <= NOTIFIED; i++)
        td__links_send_failure_to(links, i, deadline);
}

/* ---- Receiving ------------------------------------------------------------------------------- */

/* Fails with the status and text of `peer`. The rest of the text has not been received yet. */
static td_status take_notice(const struct td__link_call *call, int peer, int fd,
                             const struct td__call_header *header, const void *text, size_t size)
{
    struct td__links *links = call->links;
    char reason[TD__FAILURE_TEXT + 1];
    size_t all = (size_t)header->payload;
    if (size > all)
        size = all;
    memcpy(reason, text, size);
    links->failure_received = true;
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
    return td_fail(TD_ERR_PEER, "%s: %s has failed: %s", td__operation_describe(call->operation),
                   links->source->describe(links->arg, peer), reason);
}

td_status td__links_check_header(const struct td__link_call *call, int peer, int fd,
                                 const struct td__call_header *theirs, const void *text,
                                 size_t size)
{
    const struct td__links *links = call->links;
    const struct td__call_header *mine = &call->header;
    if (theirs->type == TD__HEADER_FAILURE)
        return take_notice(call, peer, fd, theirs, text, size);

    /* A peer that waited in an earlier turn waits no more. */
    if (theirs->type == TD__HEADER_CALL &&
        (theirs->turn < mine->turn || td__header_same_call(theirs, mine)))
        return TD_OK;
    if (!td__header_differs(theirs, mine) && theirs->past != mine->past &&
        links->callbacks.compare_calls)
        TD_TRY(links->callbacks.compare_calls(links->callbacks.arg, links->world_ranks[peer],
                                              call->operation));
    char me[256];
    snprintf(me, sizeof me, "%s", links->source->describe(links->arg, links->index));
    return td__header_mismatch(call->operation, mine, me, theirs,
                               links->source->describe(links->arg, peer));
}

td_status td__links_fail_invalid(const struct td__link_call *call, int peer)
{
    return td_fail(TD_ERR_MISMATCH,
                   "%s: %s has sent bytes that are not a frame of a collective; all ranks must run "
                   "the same version of Tandem",
                   td__operation_describe(call->operation),
                   call->links->source->describe(call->links->arg, peer));
}

/* Fails if a member has ended, or has sent a failure notice. A peer that has left may have left because of a failure
 * that this rank does not know yet, so this waits for CAUSE_MS; not if `peer` is -1. */
static td_status await_cause(const struct td__link_call *call, int peer)
{
    struct td__links *links = call->links;
    td__deadline deadline = td__deadline_earlier(call->operation->deadline,
                                                 td__deadline_in_ms(CAUSE_MS));
    td__links_watch(links);
    for (;;) {
        struct pollfd none[1];
        bool woken;
        td__deadline next = deadline;
        TD_TRY(td__links_check_all(call, &next));
        if (peer < 0 || td__deadline_passed(deadline) ||
            (!links->callbacks.check && td__links_exit_reason(links, peer, true)))
            return TD_OK;
        td__links_sleep(links, none, 0, next, &woken);
    }
}

td_status td__links_find_cause(const struct td__link_call *call, int peer)
{
    struct td__error error;
    td__error_save(&error);
    td_status cause = await_cause(call, peer);
    return cause ? cause : td__error_restore(&error);
}

td_status td__links_fail_end(const struct td__link_call *call, int peer, int error)
{
    const struct td__links *links = call->links;
    /* An error of TLS is the cause; the end of the connection is its consequence. */
    const char *complaint = error == EBADMSG ? TD__TLS_CHANGED
                                             : td__tls_complaint(links->at[peer].fd);
    td__links_exit_reason(links, peer, true);
    TD_TRY(await_cause(call, complaint ? -1 : peer));
    const char *what = complaint ? complaint : td__links_exit_reason(links, peer, true);
    const char *reason = "";
    if (!what) {
        what = "closed its connection: ";
        reason = "it has ended, or left the group";
        if (error == ETIMEDOUT || error == EHOSTUNREACH) {
            what = "does not answer any more: ";
            reason = "its host is down, or cut off";
        } else if (error && error != ECONNRESET && error != EPIPE) {
            what = "cannot be reached any more: ";
            reason = td__errno_text(error);
        }
    }
    return td_fail(TD_ERR_PEER, "%s: %s %s%s", td__operation_describe(call->operation),
                   links->source->describe(links->arg, peer), what, reason);
}
