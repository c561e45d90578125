/* Shared descriptors: a rank offers its arena and the memory of groups to the other ranks of its host.
 *
 * A rank that leaves while other ranks may still fetch its descriptor hands a copy over to each of them, and their
 * endpoints keep it. So no rank has to wait for others before it leaves. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "os/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CHECK_MS = 50, HAND_OUT_MS = 1000, TAKE_MS = 200, VIEW_NUMBERS = 255 };

/* The arena of another process, mapped once for all endpoints of a domain. The identity of its listener names the
 * process. */
struct td__shared_view {
    LIST_ENTRY(td__shared_view) link;
    uint8_t identity[TD__IDENTITY_SIZE];
    int users;
    struct td__arena_view view;
};

#define ARENA_FD ((uint64_t)0)
#define WITHOUT_WAITING ((uint64_t)1) /* the value of a request that does not wait for the offer */

struct td__shared_fd {
    LIST_ENTRY(td__shared_fd) link;
    uint64_t group;
    int fd;
    bool handed_over; /* by a rank that has left: the endpoint owns the descriptor */
};

/* ---- Offering -------------------------------------------------------------------------------- */

static struct td__shared_fd *find_shared_fd(struct td__endpoint *endpoint, uint64_t group)
{
    struct td__shared_fd *shared_fd;
    LIST_FOREACH (shared_fd, &endpoint->shared_fds, link)
        if (shared_fd->group == group)
            break;
    return shared_fd;
}

/* Sends the descriptor, and closes the connection. */
static void hand_out(int connection, int fd)
{
    td__send_fd(connection, fd, "p", 1, td__deadline_in_ms(HAND_OUT_MS));
    close(connection);
}

bool td__shared_fd_hand_out(struct td__endpoint *endpoint, const struct td__request *request,
                            int connection)
{
    if (request->group == ARENA_FD) {
        struct td__arena *arena = td__arena_default();
        if (arena)
            hand_out(connection, td__arena_fd(arena));
        else
            close(connection);
        return true;
    }
    struct td__shared_fd *shared_fd = find_shared_fd(endpoint, request->group);
    if (shared_fd)
        hand_out(connection, shared_fd->fd);
    else if (request->value == WITHOUT_WAITING)
        close(connection);
    else
        return false;
    return true;
}

static bool add_shared_fd(struct td__endpoint *endpoint, uint64_t group, int fd, bool handed_over)
{
    struct td__shared_fd *shared_fd = malloc(sizeof *shared_fd);
    if (!shared_fd)
        return false;
    pthread_mutex_lock(&endpoint->lock);
    *shared_fd = (struct td__shared_fd){.group = group, .fd = fd, .handed_over = handed_over};
    LIST_INSERT_HEAD(&endpoint->shared_fds, shared_fd, link);
    int waiting, from;
    while ((waiting = td__take_arrival(endpoint, TD__WANT_SHARED_FD, -1, group, 0, &from)) >= 0)
        hand_out(waiting, fd);
    pthread_mutex_unlock(&endpoint->lock);
    return true;
}

td_status td__endpoint_offer(struct td__endpoint *endpoint, uint64_t group, int fd)
{
    return add_shared_fd(endpoint, group, fd, false) ? TD_OK : td__fail_nomem("endpoint");
}

void td__shared_fds_forget(struct td__endpoint *endpoint, uint64_t group, bool all)
{
    struct td__shared_fd *shared_fd, *next;
    for (shared_fd = LIST_FIRST(&endpoint->shared_fds); shared_fd; shared_fd = next) {
        next = LIST_NEXT(shared_fd, link);
        if (shared_fd->group != group && !all)
            continue;
        LIST_REMOVE(shared_fd, link);
        if (shared_fd->handed_over)
            close(shared_fd->fd);
        free(shared_fd);
    }
}

/* ---- Handing over ---------------------------------------------------------------------------- */

td_status td__endpoint_hand_over(struct td__endpoint *endpoint, int rank, uint64_t group, int fd,
                                 td__deadline deadline)
{
    struct td__request request = {.what = TD__WANT_HAND_OVER, .group = group};
    int connection;
    bool ended;
    TD_TRY(td__endpoint_reach(endpoint, rank, request, deadline, &connection));
    int error = td__send_fd(connection, fd, "p", 1, deadline);
    td_status status = error == ETIMEDOUT ? TD_ERR_TIMEOUT : error ? TD_ERR_PEER : TD_OK;
    if (error)
        td_fail(status, "%s", td__errno_text(error));
    else
        status = td__endpoint_await_reply(endpoint, rank, connection, deadline, &ended);
    close(connection);
    return status ? td_fail(status, "%s did not take the memory of a group: %s",
                            td__endpoint_describe(endpoint, rank), td__error_text())
                  : TD_OK;
}

/* The descriptor follows the request. */
void td__shared_fd_take_over(struct td__endpoint *endpoint, const struct td__request *request,
                             int connection)
{
    char byte;
    int fd;
    if (request->group != ARENA_FD &&
        !td__recv_fd(connection, &fd, &byte, 1, td__deadline_in_ms(TAKE_MS))) {
        if (add_shared_fd(endpoint, request->group, fd, true))
            td__reply(connection, TD__REPLY_ACCEPTED);
        else
            close(fd);
    }
    close(connection);
}

/* ---- Fetching -------------------------------------------------------------------------------- */

static bool has_handed_over(struct td__endpoint *endpoint, uint64_t group, int *fd)
{
    pthread_mutex_lock(&endpoint->lock);
    const struct td__shared_fd *shared_fd = group == ARENA_FD ? NULL
                                                              : find_shared_fd(endpoint, group);
    *fd = shared_fd ? fcntl(shared_fd->fd, F_DUPFD_CLOEXEC, 0) : -1;
    pthread_mutex_unlock(&endpoint->lock);
    return *fd >= 0;
}

/* Checks *given_up every CHECK_MS. */
static int wait_for_shared_fd(int connection, td__deadline deadline, const atomic_bool *given_up)
{
    int error = ETIMEDOUT;
    while (error == ETIMEDOUT && !td__deadline_passed(deadline)) {
        if (given_up && atomic_load(given_up))
            return ECANCELED;
        error = td__wait_fd(connection, POLLIN,
                            td__deadline_earlier(deadline, td__deadline_in_ms(CHECK_MS)));
    }
    return error;
}

static td_status request_fd(struct td__endpoint *endpoint, int rank, struct td__request request,
                            td__deadline deadline, const atomic_bool *given_up, int *fd_out)
{
    char byte;
    int connection, fd;
    td_status status = td__endpoint_reach(endpoint, rank, request, deadline, &connection);
    TD_TRY(td__endpoint_explain(endpoint, rank, status, deadline));
    int error = wait_for_shared_fd(connection, deadline, given_up);
    if (!error)
        error = td__recv_fd(connection, &fd, &byte, 1, deadline);
    close(connection);
    if (error == ECANCELED)
        return td_fail(TD_ERR_ABORTED, "the wait for %s was aborted",
                       td__endpoint_describe(endpoint, rank));
    if (error)
        return td_fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER,
                       "%s did not share its memory: %s", td__endpoint_describe(endpoint, rank),
                       error == ENODATA ? "it has left" : td__errno_text(error));
    *fd_out = fd;
    return TD_OK;
}

/* A rank that leaves instead of serving the request has handed its descriptor over before. */
static td_status fetch(struct td__endpoint *endpoint, int rank, uint64_t group, uint64_t value,
                       td__deadline deadline, const atomic_bool *given_up, int *fd)
{
    struct td__request request = {.what = TD__WANT_SHARED_FD, .group = group, .value = value};
    if (has_handed_over(endpoint, group, fd))
        return TD_OK;
    td_status status = request_fd(endpoint, rank, request, deadline, given_up, fd);
    return status == TD_ERR_PEER && has_handed_over(endpoint, group, fd) ? TD_OK : status;
}

td_status td__endpoint_fetch(struct td__endpoint *endpoint, int rank, uint64_t group,
                             td__deadline deadline, const atomic_bool *given_up, int *fd)
{
    return fetch(endpoint, rank, group, 0, deadline, given_up, fd);
}

td_status td__endpoint_fetch_now(struct td__endpoint *endpoint, int rank, uint64_t group,
                                 td__deadline deadline, int *fd)
{
    return fetch(endpoint, rank, group, WITHOUT_WAITING, deadline, NULL, fd);
}

/* ---- Mapping the arenas of others ------------------------------------------------------------ */

/* The callers of both hold the lock. */
static struct td__shared_view *find_view(struct td__domain *domain, const struct td__card *peer)
{
    struct td__shared_view *view;
    LIST_FOREACH (view, &domain->views, link)
        if (!memcmp(view->identity, peer->identity, sizeof view->identity))
            break;
    if (view)
        view->users++;
    return view;
}

/* Owns `fd`, also on failure. */
static td_status add_view(struct td__endpoint *endpoint, int rank, int fd)
{
    struct td__domain *domain = endpoint->domain;
    struct td__card *peer = td__peer(endpoint, rank);
    struct td__shared_view *view = calloc(1, sizeof *view);
    td_status status = view ? TD_OK : td__fail_nomem("endpoint");
    if (!status && td__arena_view_open(fd, 1 + (unsigned)rank % VIEW_NUMBERS, &view->view))
        status = td_fail(TD_ERR_PEER, "%s shares memory that cannot be mapped: %s",
                         td__endpoint_describe(endpoint, rank), td__error_text());
    if (status) {
        close(fd);
        free(view);
        return status;
    }
    memcpy(view->identity, peer->identity, sizeof view->identity);
    view->users = 1;
    LIST_INSERT_HEAD(&domain->views, view, link);
    peer->view = view;
    return TD_OK;
}

/* The caller holds the lock. */
static void release_view(struct td__card *peer)
{
    struct td__shared_view *view = peer->view;
    peer->view = NULL;
    if (!view || --view->users)
        return;
    LIST_REMOVE(view, link);
    td__arena_view_close(&view->view);
    free(view);
}

void td__views_close(struct td__endpoint *endpoint)
{
    struct td__domain *domain = endpoint->domain;
    struct td__card *peer;
    pthread_mutex_lock(&domain->view_lock);
    TD__PEER_FOREACH (peer, r, endpoint)
        release_view(peer);
    pthread_mutex_unlock(&domain->view_lock);
}

void td__endpoint_unmap(struct td__endpoint *endpoint, int rank)
{
    if (!endpoint->domain)
        return;
    pthread_mutex_lock(&endpoint->domain->view_lock);
    release_view(td__peer(endpoint, rank));
    pthread_mutex_unlock(&endpoint->domain->view_lock);
}

void td__endpoint_drop_pages(struct td__endpoint *endpoint)
{
    struct td__shared_view *view;
    if (!endpoint->domain)
        return;
    pthread_mutex_lock(&endpoint->domain->view_lock);
    LIST_FOREACH (view, &endpoint->domain->views, link)
        td__arena_view_drop_pages(&view->view);
    pthread_mutex_unlock(&endpoint->domain->view_lock);
}

td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address)
{
    struct td__domain *domain = endpoint->domain;
    struct td__card *peer = td__peer(endpoint, rank);
    pthread_mutex_lock(&domain->view_lock);
    if (!peer->view && !(peer->view = find_view(domain, peer))) {
        int fd;
        pthread_mutex_unlock(&domain->view_lock);
        TD_TRY(td__endpoint_fetch(endpoint, rank, ARENA_FD, deadline, NULL, &fd));
        pthread_mutex_lock(&domain->view_lock);
        td_status status = TD_OK;
        if (peer->view || (peer->view = find_view(domain, peer)))
            close(fd); /* another thread was first */
        else
            status = add_view(endpoint, rank, fd);
        if (status) {
            pthread_mutex_unlock(&domain->view_lock);
            return status;
        }
    }
    void *found = td__arena_view_at(&peer->view->view, offset, size);
    bool short_of_memory = !found && errno == ENOMEM;
    pthread_mutex_unlock(&domain->view_lock);
    if (short_of_memory)
        return td_fail(TD_ERR_NOMEM,
                       "no address space to map the memory of %s; is it limited (ulimit -v)?",
                       td__endpoint_describe(endpoint, rank));
    if (!found)
        return td_fail(TD_ERR_PEER, "%s named memory outside its arena",
                       td__endpoint_describe(endpoint, rank));
    *address = found;
    return TD_OK;
}
