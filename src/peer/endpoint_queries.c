/* Queries, lifelines and loss reports, which the listener's thread serves independently of the program; see
 * endpoint.h and failure_detector.c.
 *
 * An answer is its length and its bytes. It fits into the socket's buffer, so that the listener's thread never waits
 * for the rank that sent the query. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "os/process.h"
#include "os/socket.h"
#include "os/tls.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* The endpoint's own topic; all others belong to the td__answer_fn. `value` is a rank. */
#define TOPIC_PRESENCE UINT32_MAX

/* ---- Sending --------------------------------------------------------------------------------- */

static td_status query(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                       uint64_t value, td__deadline deadline, struct td__buffer *answer)
{
    struct td__request request = {
        .what = TD__WANT_ANSWER, .group = group, .channel = topic, .value = value};
    uint8_t head[4], bytes[1024];
    int fd;
    TD_TRY(td__endpoint_reach(endpoint, rank, request, deadline, &fd));
    int error = td__recv_all(fd, head, sizeof head, deadline);
    size_t left = error ? 0 : td__load_u32(head);
    bool valid = left <= TD__ANSWER_LIMIT;
    while (!error && valid && left) {
        size_t part = left < sizeof bytes ? left : sizeof bytes;
        error = td__recv_all(fd, bytes, part, deadline);
        if (!error)
            td__buffer_put(answer, bytes, part);
        left -= part;
    }
    td__sock_close(fd);
    if (error || !valid)
        return td_fail(
            error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER, "%s does not answer: %s",
            td__endpoint_describe(endpoint, rank),
            valid ? td__errno_text(error)
                  : "its answer is too long; all ranks must run the same version of Tandem");
    return answer->failed ? td__fail_nomem("answer") : TD_OK;
}

td_status td__endpoint_query(struct td__endpoint *endpoint, int rank, uint32_t topic,
                             uint64_t group, uint64_t value, td__deadline deadline,
                             struct td__buffer *answer)
{
    td_status status = query(endpoint, rank, topic, group, value, deadline, answer);
    return td__endpoint_explain(endpoint, rank, status, deadline);
}

void td__endpoint_notify(struct td__endpoint *endpoint, int rank, uint32_t topic, uint64_t group,
                         uint64_t value, td__deadline deadline)
{
    struct td__buffer answer = {0};
    query(endpoint, rank, topic, group, value, deadline, &answer);
    td__buffer_free(&answer);
}

td_status td__endpoint_open_lifeline(struct td__endpoint *endpoint, int rank, td__deadline deadline,
                                     int *fd)
{
    struct td__request request = {.what = TD__WANT_LIFELINE};
    return td__endpoint_reach(endpoint, rank, request, deadline, fd);
}

void td__endpoint_report_loss(struct td__endpoint *endpoint, int to, int rank,
                              enum td__presence presence, int wait_status, td__deadline deadline)
{
    struct td__request request = {.what = TD__WANT_LOSS_REPORT,
                                  .group = (uint64_t)rank,
                                  .channel = presence,
                                  .value = (uint32_t)wait_status};
    int fd;
    if (!td__endpoint_reach(endpoint, to, request, deadline, &fd))
        td__sock_close(fd);
}

void td__endpoint_query_presence(struct td__endpoint *endpoint, int from, int rank,
                                 td__deadline deadline, enum td__presence *presence,
                                 int *wait_status)
{
    struct td__buffer answer = {0};
    if (!query(endpoint, from, TOPIC_PRESENCE, 0, (uint64_t)rank, deadline, &answer)) {
        struct td__reader reader = td__reader_of(answer.data, answer.size);
        uint32_t known = td__reader_u32(&reader), how = td__reader_u32(&reader);
        if (td__reader_done(&reader) && known > TD__PRESENT && known <= TD__CUT_OFF) {
            *presence = (enum td__presence)known;
            *wait_status = (int)how;
        }
    }
    td__buffer_free(&answer);
}

/* ---- Serving --------------------------------------------------------------------------------- */

void td__endpoint_answer(struct td__endpoint *endpoint, td__answer_fn fn, void *arg)
{
    pthread_mutex_lock(&endpoint->answer_lock);
    endpoint->answer = fn;
    endpoint->answer_arg = arg;
    pthread_mutex_unlock(&endpoint->answer_lock);
}

/* That others refuse this rank, which was excluded, says nothing of them. */
static void answer_presence(const struct td__endpoint *endpoint, uint64_t rank,
                            struct td__buffer *answer)
{
    if (rank >= (uint64_t)endpoint->capacity || !td__peer(endpoint, (int)rank))
        return;
    enum td__presence presence = td__endpoint_presence(endpoint, (int)rank);
    int wait_status = presence == TD__PRESENT ? TD__STATUS_UNKNOWN
                                              : td__endpoint_wait_status(endpoint, (int)rank);
    td__buffer_put_u32(answer, wait_status == TD__STATUS_REFUSES ? TD__PRESENT : presence);
    td__buffer_put_u32(answer, (uint32_t)wait_status);
}

/* The lock is held while the td__answer_fn runs, so that it does not run after td__endpoint_answer() has returned.
 * Without an answer the connection is closed after the reply. */
void td__endpoint_answer_query(struct td__endpoint *endpoint, const struct td__request *request,
                               int fd)
{
    struct td__buffer text = {0};
    uint8_t head[5] = {TD__REPLY_ACCEPTED};
    bool answered = true;
    if (request->channel == TOPIC_PRESENCE) {
        answer_presence(endpoint, request->value, &text);
    } else {
        pthread_mutex_lock(&endpoint->answer_lock);
        answered = endpoint->answer;
        if (answered)
            endpoint->answer(endpoint->answer_arg, request->rank, request->channel, request->group,
                             request->value, &text);
        pthread_mutex_unlock(&endpoint->answer_lock);
    }
    answered = answered && !text.failed && text.size <= TD__ANSWER_LIMIT;
    td__store_u32(head + 1, (uint32_t)text.size);
    struct iovec parts[2] = {{head, answered ? sizeof head : 1}, {text.data, text.size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = answered && text.size ? 2 : 1};
    ssize_t sent = td__sock_sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    (void)sent;
    td__buffer_free(&text);
    td__sock_close(fd);
}

/* Closes the lifelines of ranks that have left or ended; with `exclusion`, those of `rank`. */
static void close_watchers(struct td__endpoint *endpoint, int rank,
                           const struct td__exclusion *exclusion)
{
    struct td__watcher *watchers = (struct td__watcher *)endpoint->watchers.data;
    size_t count = endpoint->watchers.size / sizeof *watchers, kept = 0;
    for (size_t i = 0; i < count; i++) {
        struct pollfd poll_fd = {.fd = watchers[i].fd, .events = POLLIN};
        if (exclusion && watchers[i].rank == rank)
            td__exclusion_refuse(exclusion, watchers[i].fd);
        else if (poll(&poll_fd, 1, 0) > 0)
            td__sock_close(watchers[i].fd);
        else
            watchers[kept++] = watchers[i];
    }
    endpoint->watchers.size = kept * sizeof *watchers;
}

/* Keeps the connection open until this rank leaves or ends, which the other side detects. */
void td__endpoint_keep_watcher(struct td__endpoint *endpoint, int rank, int fd)
{
    struct td__watcher watcher = {fd, rank};
    pthread_mutex_lock(&endpoint->lock);
    close_watchers(endpoint, -1, NULL);
    if (td__buffer_reserve(&endpoint->watchers, sizeof watcher) &&
        td__reply(fd, TD__REPLY_ACCEPTED))
        td__buffer_put(&endpoint->watchers, &watcher, sizeof watcher);
    else
        td__sock_close(fd);
    pthread_mutex_unlock(&endpoint->lock);
}

void td__endpoint_dismiss_watcher(struct td__endpoint *endpoint, int rank,
                                  const struct td__exclusion *exclusion)
{
    close_watchers(endpoint, rank, exclusion);
}

void td__endpoint_leave(struct td__endpoint *endpoint)
{
    const struct td__watcher *watchers = (const struct td__watcher *)endpoint->watchers.data;
    for (size_t i = 0; i < endpoint->watchers.size / sizeof *watchers; i++) {
        td__reply(watchers[i].fd, TD__LEAVING);
        td__sock_close(watchers[i].fd);
    }
    td__buffer_free(&endpoint->watchers);
}
