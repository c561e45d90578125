/* A link outlives its socket: a connection that the network has reset, or that was cut for a while, is replaced by another
 * one, and the streams of bytes go on where they were. Nothing is lost, and no call fails.
 *
 *     the thread that leads    finds the end of the socket, and suspends the link: it is not read, and messages wait
 *     the opener               connects again, and sends HELLO with the number of the link and the bytes that it has
 *                              received. The other worker answers with its own count. Each drops the messages that the
 *                              other one has, and writes again what it lacks. Rings in shared memory stay as they are
 *     the other worker         waits for that, and after a moment asks the opener by a HELLO of its own: perhaps only one
 *                              of them has noticed the end
 *
 * This goes on until it succeeds, the other worker does not know the link (it was ended by bytes that are not valid), or
 * the failure detector reports the other worker lost. */
#include "base/fail.h"
#include "os/socket.h"
#include "os/tls.h"
#include "rpc/rpc_agent.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    ANSWER_SIZE = 12,
    PATIENCE_MS = 100, /* of the worker that is not the opener */
    PAUSE_NS = 500000,
};

/* Answers to TD__HELLO_RESUME, with the bytes received after them. */
enum answer { RESUMED = 1, UNKNOWN, OPENER_RESUMES };

void td__hello_write(uint8_t hello[TD__LINK_HELLO_SIZE], enum td__hello kind, uint64_t number,
                     uint32_t attempt, uint64_t received)
{
    td__store_u32(hello, TD__LINK_HELLO);
    td__store_u32(hello + 4, kind | attempt << 8);
    td__store_u64(hello + 8, number);
    td__store_u64(hello + 16, received);
}

/* ---- What the other worker has --------------------------------------------------------------- */

/* Takes the messages that end within the first `bytes` bytes out of a list. With write_lock held. */
static struct td__message *take_received(struct td__message **first, uint64_t bytes)
{
    struct td__message *taken = *first, **end = &taken;
    while (*end && (*end)->start + (*end)->size <= bytes)
        end = &(*end)->next;
    *first = *end;
    *end = NULL;
    return taken;
}

void td__link_acked(struct td__rpc_link *link, uint64_t bytes)
{
    pthread_mutex_lock(&link->write_lock);
    struct td__message *received = take_received(&link->unacked, bytes);
    if (!link->unacked)
        link->last_unacked = &link->unacked;
    pthread_mutex_unlock(&link->write_lock);
    td__messages_free(received);
}

/* All messages wait again, from the first byte that the other worker lacks. False if it has bytes that were not written,
 * or lacks some that it has acknowledged. */
static bool rewind_to(struct td__rpc_link *link, uint64_t bytes)
{
    pthread_mutex_lock(&link->write_lock);
    *link->last_unacked = link->first;
    struct td__message *all = link->unacked;
    struct td__message *received = take_received(&all, bytes);
    bool valid = all ? all->start <= bytes : bytes == link->end;
    link->first = all;
    link->last = &link->first;
    for (struct td__message *message = all; message; message = message->next) {
        message->written = message->start < bytes ? (size_t)(bytes - message->start) : 0;
        link->last = &message->next;
    }
    link->unacked = NULL;
    link->last_unacked = &link->unacked;
    atomic_store(&link->blocked, all != NULL);
    pthread_mutex_unlock(&link->write_lock);
    td__messages_free(received);
    return valid;
}

/* It has received nothing if it is the opener, and its handshake has failed. */
bool td__link_close(struct td__rpc_link *link, struct td__message **unsent)
{
    pthread_mutex_lock(&link->write_lock);
    link->stopped = true; /* what is sent from now on waits with the others */
    pthread_mutex_unlock(&link->write_lock);
    bool none = !link->opener && !link->local && !link->received && rewind_to(link, 0);
    pthread_mutex_lock(&link->write_lock);
    none |= !link->opener && link->local && link->unready;
    link->closed = true;
    link->forwards = none;
    *unsent = none ? link->first : NULL;
    if (none) {
        link->first = NULL;
        link->last = &link->first;
    }
    pthread_mutex_unlock(&link->write_lock);
    return none;
}

/* ---- The handshake --------------------------------------------------------------------------- */

/* The descriptor stays the same, so that threads may use it meanwhile. */
static td_status take_socket(struct td__rpc_link *link, int fd, uint64_t received)
{
    if (!link->local && !rewind_to(link, received))
        return td_fail(TD_ERR_STATE, "the other worker has received another number of bytes");
    pthread_mutex_lock(&link->write_lock);
    bool taken = dup3(fd, link->fd, O_CLOEXEC) >= 0;
    int error = errno;
    if (taken) {
        td__tls_move(fd, link->fd);
        link->stopped = link->unready = false;
    }
    pthread_mutex_unlock(&link->write_lock);
    if (!taken)
        return td_fail(TD_ERR_SYSTEM, "the socket of a link: dup3: %s", td__errno_text(error));
    link->broken = false;
    td__link_watch(link);
    atomic_store(&link->hup, !link->local); /* there may be something to read … */
    atomic_store(&link->suspended, false);
    td__link_flush(link);
    td__io_wake(link->agent); /* … also in a ring */
    return TD_OK;
}

static td_status failed(int error)
{
    return td_fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER, "the handshake failed: %s",
                   error == ENODATA ? "it closed the connection" : td__errno_text(error));
}

/* One HELLO and its answer. */
static td_status ask(struct td__rpc_link *link, int fd, td__deadline deadline, enum answer *answer,
                     uint64_t *received)
{
    uint8_t hello[TD__LINK_HELLO_SIZE], bytes[ANSWER_SIZE];
    if (link->opener)
        link->attempts++;
    /* Of the other side only the number counts: the opener may be resuming the link at this moment. */
    td__hello_write(hello, TD__HELLO_RESUME, link->number, link->opener ? link->attempts : 0,
                    link->opener ? link->received : 0);
    int error = td__send_all(fd, hello, sizeof hello, deadline);
    if (!error)
        error = td__recv_all(fd, bytes, sizeof bytes, deadline);
    if (error)
        return failed(error);
    *answer = (enum answer)td__load_u32(bytes);
    *received = td__load_u64(bytes + 4);
    return *answer == UNKNOWN ? td_fail(TD_ERR_STATE, "the other worker has ended the link")
                              : TD_OK;
}

/* Whether the opener has resumed the link within a moment. */
static bool await_opener(struct td__rpc_link *link)
{
    td__deadline deadline = td__deadline_in_ms(PATIENCE_MS);
    while (atomic_load(&link->suspended) && !td__deadline_passed(deadline))
        td__sleep_ns(PAUSE_NS);
    return !atomic_load(&link->suspended);
}

/* One attempt. The opener makes one at a time: the count of bytes that it sends must not change until the answer. */
static td_status try_to_resume(struct td__rpc_link *link, td__deadline deadline)
{
    struct td__rpc_agent *agent = link->agent;
    struct td__handshake handshake;
    enum answer answer;
    uint64_t received;
    int fd;
    if (!atomic_load(&link->suspended))
        return TD_OK;
    TD_TRY(td__worker_connect(agent, link->rank, deadline, &fd));
    td__handshake_begin(agent, &handshake, fd);
    td_status status = ask(link, fd, deadline, &answer, &received);
    td__handshake_end(agent, &handshake);
    if (!status && link->opener)
        status = answer == RESUMED ? take_socket(link, fd, received)
                                   : td_fail(TD_ERR_PEER, "it does not resume the link");
    td__sock_close(fd);
    return status;
}

td_status td__link_resume(struct td__rpc_link *link, td__deadline deadline)
{
    if (!link->opener)
        return await_opener(link) ? TD_OK : try_to_resume(link, deadline);
    pthread_mutex_lock(&link->resume_lock);
    td_status status = try_to_resume(link, deadline);
    pthread_mutex_unlock(&link->resume_lock);
    return status;
}

/* ---- On the other worker --------------------------------------------------------------------- */

/* The link of a number, with a reference. */
static struct td__rpc_link *find_link(struct td__rpc_agent *agent, int rank, uint64_t number)
{
    struct td__rpc_link *found = NULL;
    pthread_mutex_lock(&agent->lock);
    for (uint64_t i = 0; i < agent->id_count && !found; i++) {
        struct td__rpc_link *link = agent->by_id[i];
        if (link && link->rank == rank && link->number == number)
            found = link;
    }
    if (found)
        td__link_retain(found);
    pthread_mutex_unlock(&agent->lock);
    return found;
}

/* The thread that leads reads what has come, and suspends the link. False if it ends instead. */
static bool await_suspended(struct td__rpc_link *link, td__deadline deadline)
{
    if (!atomic_load(&link->suspended))
        shutdown(link->fd, SHUT_RDWR);
    while (!atomic_load(&link->suspended)) {
        pthread_mutex_lock(&link->write_lock);
        bool closed = link->closed;
        pthread_mutex_unlock(&link->write_lock);
        if (closed || td__deadline_passed(deadline))
            return false;
        td__sleep_ns(PAUSE_NS);
    }
    return !atomic_load(&link->dead);
}

static td_status send_answer(int fd, enum answer answer, uint64_t received, td__deadline deadline)
{
    uint8_t bytes[ANSWER_SIZE];
    td__store_u32(bytes, answer);
    td__store_u64(bytes + 4, received);
    int error = td__send_all(fd, bytes, sizeof bytes, deadline);
    return error ? failed(error) : TD_OK;
}

td_status td__link_accept_resume(struct td__rpc_agent *agent, int rank, int fd, uint64_t number,
                                 uint32_t attempt, uint64_t received, td__deadline deadline)
{
    struct td__rpc_link *link = find_link(agent, rank, number);
    td_status status;
    if (!link) {
        status = send_answer(fd, UNKNOWN, 0, deadline);
    } else if (link->opener) {
        if (!atomic_load(&link->suspended))
            shutdown(link->fd, SHUT_RDWR); /* it has not noticed yet */
        status = send_answer(fd, OPENER_RESUMES, 0, deadline);
    } else {
        pthread_mutex_lock(&link->resume_lock);
        if (attempt <= link->attempts) /* the opener has given it up, and received more meanwhile */
            status = td_fail(TD_ERR_STATE, "there was a later attempt");
        else if (!await_suspended(link, deadline))
            status = td_fail(TD_ERR_STATE, "the link ends");
        else
            status = send_answer(fd, RESUMED, link->received, deadline);
        link->attempts = attempt > link->attempts ? attempt : link->attempts;
        if (!status && (status = take_socket(link, fd, received))) {
            atomic_store(&link->dead, true);
            td__io_wake(agent);
        }
        pthread_mutex_unlock(&link->resume_lock);
    }
    td__sock_close(fd);
    if (link)
        td__link_release(link);
    return status;
}
