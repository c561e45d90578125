/* How long a rank has been silent: stopped, or cut off. A rank that only computes is not silent, however busy.
 *
 *     a process of this machine     /proc says whether it is stopped: then it is silent since that was first seen
 *     another one                   a pulse: a connection to its listener with the hello of a handshake (base/auth.h), which
 *                                   its thread answers, whatever its program does. The rank is silent since a pulse was
 *                                   sent that has no answer yet
 *
 * A pulse is not given up: an answer that comes late shows that the process lives, so a slow process counts as silent
 * only as long as it takes to answer once. The next pulse is sent with the call after the answer, so a caller that asks
 * again and again learns of a silence as much later as the time between its calls. */
#include "peer/endpoint_internal.h"

#include "base/fail.h"
#include "os/socket.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CONNECT_MS = 50 };

static int64_t silent_ms(int64_t since)
{
    return since ? (td__now_ns() - since) / 1000000 : 0;
}

void td__pulse_end(struct td__card *peer)
{
    if (peer->pulse >= 0)
        close(peer->pulse);
    peer->pulse = -1;
    peer->silent_from = 0;
}

static void send_pulse(const struct td__endpoint *endpoint, struct td__card *peer)
{
    const struct td__secret *secret = &endpoint->domain->secret;
    bool near = peer->host == td__peer(endpoint, endpoint->rank)->host;
    struct td__auth auth = {.secret = *secret, .purpose = "link", .tls = secret->tls && !near};
    uint8_t hello[TD__HELLO_SIZE];
    struct td__address_list list;
    struct td__error error;
    bool retry;
    td__deadline deadline = td__deadline_in_ms(CONNECT_MS);
    if (!peer->silent_from)
        peer->silent_from = td__now_ns();
    memcpy(auth.identity, peer->identity, sizeof auth.identity);
    td__error_save(&error);
    if (!td__resolve(near ? peer->local : peer->address, near ? 0 : peer->port, deadline, &list,
                     &retry) &&
        !td__auth_hello(&auth, hello)) {
        int fd = td__connect_to(&list.at[0], deadline);
        if (fd >= 0 && td__send_all(fd, hello, sizeof hello, deadline)) {
            close(fd);
            fd = -1;
        }
        peer->pulse = fd >= 0 ? fd : -1; /* without one the next call tries again */
    }
    td__error_undo(&error);
}

/* Reads the answer: any byte, or the end of the connection, which only a process causes. If the host has not answered, TCP
 * has given up, and another pulse takes its place. */
static void read_answer(struct td__card *peer)
{
    char byte;
    bool read = recv(peer->pulse, &byte, 1, MSG_DONTWAIT) >= 0;
    if (!read && (errno == EAGAIN || errno == EINTR))
        return;
    bool silent = !read && (errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH);
    int64_t from = silent ? peer->silent_from : 0;
    td__pulse_end(peer);
    peer->silent_from = from;
}

static int64_t pulse(const struct td__endpoint *endpoint, struct td__card *peer)
{
    if (peer->pulse >= 0)
        read_answer(peer);
    if (peer->pulse < 0)
        send_pulse(endpoint, peer);
    return silent_ms(peer->silent_from);
}

int64_t td__endpoint_silence_ms(struct td__endpoint *endpoint, int rank)
{
    struct td__card *peer = td__peer(endpoint, rank);
    int64_t silence;
    if (rank == endpoint->rank)
        return 0;
    pthread_mutex_lock(&endpoint->pulse_lock);
    if (!td__is_neighbour(endpoint, peer)) {
        silence = pulse(endpoint, peer);
    } else {
        if (!td__endpoint_is_stopped(endpoint, rank))
            peer->silent_from = 0;
        else if (!peer->silent_from)
            peer->silent_from = td__now_ns();
        silence = silent_ms(peer->silent_from);
    }
    pthread_mutex_unlock(&endpoint->pulse_lock);
    return silence;
}
