/* A rank's place among the others; see endpoint.h.
 *
 * A request is one fixed block: what (LINK or PAPER), who asks, for which group and channel. What comes
 * before its counterpart here (a link to a group that is not made yet, a paper that is not laid out
 * yet) waits in a list; the lists are short, and searched from the front.
 *
 * Locks: endpoint->lock guards the three lists; map_lock guards the views of other ranks' arenas and the
 * watches over their processes, and is never held together with it. */
#include "transport/endpoint.h"

#include "base/arena.h"
#include "base/fail.h"
#include "base/host.h"
#include "base/thread.h"
#include "os/socket.h"
#include "os/trust.h"
#include "transport/reception.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LINK = 1, PAPER = 2 };
enum { CARD_MAGIC = 0x64740301, TEXT = 128, LOCAL_LIMIT_MS = 5000, REMOTE_LIMIT_MS = 15000 };

#define ARENA_PAPER ((uint64_t)0)

struct peer {
    char host_id[TEXT]; /* the same text: the same memory, and unix sockets in reach */
    char host_name[TEXT];
    char address[TEXT];
    char local[TEXT]; /* "unix:@name" */
    int port;
    int pid;
    uint64_t pid_space; /* the name space that the pid belongs to */
    int watch;          /* a pidfd; 0: not opened yet, -1: cannot be */
    bool shared;        /* it takes part in shared memory */
    int host;           /* its number */
    struct td__arena_view view;
    bool viewed;
};

struct arrival { /* a link, or a wish for a paper */
    struct arrival *next;
    int what;
    int rank;
    uint64_t group;
    uint32_t channel;
    int fd;
};

struct listener {
    struct listener *next;
    uint64_t group;
    enum td__channel channel;
    td__link_fn fn;
    void *arg;
};

struct paper {
    struct paper *next;
    uint64_t group;
    int fd;
};

struct td__endpoint {
    int rank, size;
    bool shared;
    struct td__secret secret;
    struct td__reception *reception;
    struct peer own;
    struct peer *peers;

    pthread_mutex_t lock;
    pthread_cond_t arrived;
    struct arrival *arrivals;
    struct listener *listeners;
    struct paper *papers;

    pthread_mutex_t map_lock;
};

/* ---- Who is where ---------------------------------------------------------------------------- */

static void read_line(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "re");
    if (!file || !fgets(text, (int)room, file))
        text[0] = 0;
    text[strcspn(text, "\n")] = 0;
    if (file)
        fclose(file);
}

/* What two ranks must have in common to share memory: the kernel, the network namespace (their unix
 * sockets are in it) and the user. */
static void find_host_id(char text[TEXT])
{
    const char *given = getenv("TANDEM_HOST_ID");
    char boot[64] = "";
    struct stat space = {0};
    if (given && *given) {
        snprintf(text, TEXT, "given:%.100s", given);
        return;
    }
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof boot);
    stat("/proc/self/ns/net", &space);
    snprintf(text, TEXT, "%s:%s:%llu:%u", *boot ? boot : "?", *boot ? "" : td__host_name(),
             (unsigned long long)space.st_ino, (unsigned)getuid());
}

void td__endpoint_card(const struct td__endpoint *endpoint, struct td__buffer *card)
{
    const struct peer *own = &endpoint->own;
    td__buffer_put_u32(card, CARD_MAGIC);
    td__buffer_put_u32(card, (uint32_t)own->pid);
    td__buffer_put_u32(card, (uint32_t)own->port);
    td__buffer_put_u8(card, endpoint->shared);
    td__buffer_put_u64(card, own->pid_space);
    td__buffer_put_string(card, own->host_id, strlen(own->host_id));
    td__buffer_put_string(card, own->host_name, strlen(own->host_name));
    td__buffer_put_string(card, own->address, strlen(own->address));
    td__buffer_put_string(card, own->local, strlen(own->local));
}

static void read_text(struct td__reader *reader, char text[TEXT])
{
    struct td__span span = td__reader_string(reader, TEXT - 1);
    if (span.size)
        memcpy(text, span.data, span.size);
    text[span.size] = 0;
}

static bool read_card(const td_bytes *card, struct peer *peer)
{
    struct td__reader reader = td__reader_of(card->data, card->size);
    bool known = td__reader_u32(&reader) == CARD_MAGIC;
    peer->pid = (int)td__reader_u32(&reader);
    peer->port = (int)td__reader_u32(&reader);
    peer->shared = td__reader_u8(&reader) == 1;
    peer->pid_space = td__reader_u64(&reader);
    read_text(&reader, peer->host_id);
    read_text(&reader, peer->host_name);
    read_text(&reader, peer->address);
    read_text(&reader, peer->local);
    return known && td__reader_done(&reader) && peer->port >= 0 && peer->port <= 65535;
}

/* A rank that does not share is a host of its own for everybody. Quadratic only in the number of
 * hosts. */
static td_status number_hosts(struct td__endpoint *endpoint)
{
    int hosts = 0, *first = malloc(sizeof *first * (size_t)endpoint->size);
    if (!first)
        return td__fail_nomem("endpoint");
    for (int r = 0; r < endpoint->size; r++) {
        struct peer *peer = &endpoint->peers[r];
        int host = peer->shared ? 0 : hosts;
        while (host < hosts && (!endpoint->peers[first[host]].shared ||
                                strcmp(endpoint->peers[first[host]].host_id, peer->host_id) != 0))
            host++;
        peer->host = host;
        if (host == hosts)
            first[hosts++] = r;
    }
    free(first);
    return TD_OK;
}

td_status td__endpoint_meet(struct td__endpoint *endpoint, const td_bytes *cards)
{
    for (int r = 0; r < endpoint->size; r++)
        if (!read_card(&cards[r], &endpoint->peers[r]))
            return td__fail(
                TD_ERR_MISMATCH,
                "rank %d describes itself in a way that rank %d does not understand: do "
                "all ranks use the same version of Tandem?",
                r, endpoint->rank);
    return number_hosts(endpoint);
}

int td__endpoint_rank(const struct td__endpoint *endpoint)
{
    return endpoint->rank;
}

int td__endpoint_size(const struct td__endpoint *endpoint)
{
    return endpoint->size;
}

int td__endpoint_host(const struct td__endpoint *endpoint, int rank)
{
    return endpoint->peers[rank].host;
}

int td__endpoint_pid(const struct td__endpoint *endpoint, int rank)
{
    return endpoint->peers[rank].pid;
}

/* Where the pid means the same here as there. */
static int open_watch(const struct td__endpoint *endpoint, const struct peer *peer)
{
    const struct peer *own = &endpoint->own;
    if (strcmp(peer->host_id, own->host_id) != 0 || peer->pid_space != own->pid_space ||
        peer->pid == own->pid)
        return -1;
    return (int)syscall(SYS_pidfd_open, peer->pid, 0);
}

bool td__endpoint_alive(struct td__endpoint *endpoint, int rank)
{
    struct peer *peer = &endpoint->peers[rank];
    pthread_mutex_lock(&endpoint->map_lock);
    if (!peer->watch)
        peer->watch = open_watch(endpoint, peer);
    struct pollfd watch = {.fd = peer->watch, .events = POLLIN};
    pthread_mutex_unlock(&endpoint->map_lock);
    return watch.fd < 0 || poll(&watch, 1, 0) <= 0;
}

const char *td__endpoint_describe(const struct td__endpoint *endpoint, int rank)
{
    static _Thread_local char text[TEXT + 64];
    const struct peer *peer = &endpoint->peers[rank];
    snprintf(text, sizeof text, "rank %d (on %s, pid %d)", rank, peer->host_name, peer->pid);
    return text;
}

/* ---- Being asked ----------------------------------------------------------------------------- */

static void put_request(uint8_t request[TD__REQUEST_SIZE], int what, int rank, uint64_t group,
                        uint32_t channel)
{
    memset(request, 0, TD__REQUEST_SIZE);
    td__store_u32(request, (uint32_t)what);
    td__store_u32(request + 4, (uint32_t)rank);
    td__store_u32(request + 8, (uint32_t)group);
    td__store_u32(request + 12, (uint32_t)(group >> 32));
    td__store_u32(request + 16, channel);
}

/* The descriptor goes, and the connection with it. */
static void hand_out(int connection, int fd)
{
    td__send_fd(connection, fd, "p", 1, td__deadline_in_ms(1000));
    close(connection);
}

static bool hand_out_if_there(struct td__endpoint *endpoint, uint64_t group, int connection)
{
    if (group == ARENA_PAPER) {
        struct td__arena *arena = td__arena_default();
        if (arena)
            hand_out(connection, td__arena_fd(arena));
        else
            close(connection);
        return true;
    }
    for (struct paper *paper = endpoint->papers; paper; paper = paper->next)
        if (paper->group == group) {
            hand_out(connection, paper->fd);
            return true;
        }
    return false;
}

static struct listener **find_listener(struct td__endpoint *endpoint, uint64_t group,
                                       uint32_t channel)
{
    struct listener **link = &endpoint->listeners;
    while (*link && ((*link)->group != group || (*link)->channel != channel))
        link = &(*link)->next;
    return link;
}

static void on_guest(void *arg, int fd, bool local, const uint8_t request[TD__REQUEST_SIZE])
{
    struct td__endpoint *endpoint = arg;
    struct arrival *arrival = malloc(sizeof *arrival);
    if (!arrival) {
        close(fd);
        return;
    }
    *arrival = (struct arrival){.what = (int)td__load_u32(request),
                                .rank = (int)td__load_u32(request + 4),
                                .group = td__load_u32(request + 8) |
                                         (uint64_t)td__load_u32(request + 12) << 32,
                                .channel = td__load_u32(request + 16),
                                .fd = fd};
    bool sound = arrival->rank >= 0 && arrival->rank < endpoint->size &&
                 (arrival->what == LINK || (arrival->what == PAPER && local));
    pthread_mutex_lock(&endpoint->lock);
    struct listener *listener = *find_listener(endpoint, arrival->group, arrival->channel);
    bool taken = true;
    if (!sound)
        close(fd);
    else if (arrival->what == LINK && listener && listener->fn)
        listener->fn(listener->arg, arrival->rank, fd);
    else if (arrival->what == LINK && listener)
        close(fd);
    else if (arrival->what == PAPER)
        taken = hand_out_if_there(endpoint, arrival->group, fd);
    else
        taken = false;
    if (taken) {
        free(arrival);
    } else {
        struct arrival **end = &endpoint->arrivals;
        while (*end)
            end = &(*end)->next;
        arrival->next = NULL;
        *end = arrival;
        pthread_cond_broadcast(&endpoint->arrived);
    }
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- Life ------------------------------------------------------------------------------------ */

/* A unix socket in the abstract name space, under a name that nobody can guess. */
static td_status listen_locally(char name[TEXT], int *fd)
{
    struct td__address_list list;
    uint8_t random[8];
    bool retry;
    TD_TRY(td__random(random, sizeof random));
    int length = snprintf(name, TEXT, "unix:@tandem-link-%d-", (int)getpid());
    for (size_t i = 0; i < sizeof random; i++)
        length += snprintf(name + length, TEXT - (size_t)length, "%02x", random[i]);
    TD_TRY(td__resolve(name, 0, TD__NEVER, &list, &retry));
    *fd = td__listen_on(&list.at[0]);
    if (*fd < 0)
        return td__fail(TD_ERR_SYSTEM, "cannot listen at %s: %s", name, td__errno_text(-*fd));
    return TD_OK;
}

td_status td__endpoint_open(int rank, int size, const char *host, bool shared,
                            struct td__endpoint **endpoint_out)
{
    struct td__endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (endpoint)
        endpoint->peers = calloc((size_t)size, sizeof *endpoint->peers);
    if (!endpoint || !endpoint->peers) {
        free(endpoint);
        return td__fail_nomem("endpoint");
    }
    endpoint->rank = rank;
    endpoint->size = size;
    endpoint->shared = shared;
    struct peer *own = &endpoint->own;
    struct stat space = {0};
    own->pid = (int)getpid();
    stat("/proc/self/ns/pid", &space);
    own->pid_space = space.st_ino;
    find_host_id(own->host_id);
    snprintf(own->host_name, TEXT, "%.100s", td__host_name());
    snprintf(own->address, TEXT, "%.100s", host);
    pthread_mutex_init(&endpoint->lock, NULL);
    pthread_mutex_init(&endpoint->map_lock, NULL);
    td__cond_init(&endpoint->arrived);

    int tcp_fd = -1, local_fd = -1;
    td_status status = td__secret_load(NULL, &endpoint->secret);
    if (!status)
        status = td__listen_trusted(host, 0, "link", &endpoint->secret, td__deadline_in_ms(10000),
                                    &tcp_fd, &own->port);
    if (!status)
        status = listen_locally(own->local, &local_fd);
    if (status) {
        if (tcp_fd >= 0)
            close(tcp_fd);
        goto free_endpoint;
    }
    status = td__reception_open(tcp_fd, local_fd, &endpoint->secret, on_guest, endpoint,
                                &endpoint->reception);
    if (status)
        goto free_endpoint;
    *endpoint_out = endpoint;
    return TD_OK;

free_endpoint:
    pthread_cond_destroy(&endpoint->arrived);
    pthread_mutex_destroy(&endpoint->map_lock);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint->peers);
    free(endpoint);
    return status;
}

void td__endpoint_close(struct td__endpoint *endpoint)
{
    td__reception_close(endpoint->reception);
    for (struct arrival *arrival = endpoint->arrivals, *next; arrival; arrival = next) {
        next = arrival->next;
        close(arrival->fd);
        free(arrival);
    }
    for (struct listener *listener = endpoint->listeners, *next; listener; listener = next) {
        next = listener->next;
        free(listener);
    }
    for (struct paper *paper = endpoint->papers, *next; paper; paper = next) {
        next = paper->next;
        free(paper);
    }
    for (int r = 0; r < endpoint->size; r++) {
        if (endpoint->peers[r].viewed)
            td__arena_view_close(&endpoint->peers[r].view);
        if (endpoint->peers[r].watch > 0)
            close(endpoint->peers[r].watch);
    }
    pthread_cond_destroy(&endpoint->arrived);
    pthread_mutex_destroy(&endpoint->map_lock);
    pthread_mutex_destroy(&endpoint->lock);
    free(endpoint->peers);
    free(endpoint);
}

/* ---- Links ----------------------------------------------------------------------------------- */

/* BBR, a common default, paces: on loopback that halves the speed, and there is nothing to pace for. */
static void tune(int fd)
{
    struct td__address peer;
    int on = 1;
    td__remote_address(fd, &peer);
    if (peer.any.sa_family == AF_UNIX)
        return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (td__address_is_local(&peer))
        setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
}

static td_status reach(struct td__endpoint *endpoint, int rank, bool locally,
                       const uint8_t request[TD__REQUEST_SIZE], td__deadline deadline, int *fd_out)
{
    const struct peer *peer = &endpoint->peers[rank];
    td__deadline limit = td__deadline_in_ms(locally ? LOCAL_LIMIT_MS : REMOTE_LIMIT_MS);
    bool ours = deadline < limit; /* the caller's time may be the one that runs out */
    int fd;
    td_status status = td__connect_trusted(locally ? peer->local : peer->address,
                                           locally ? 0 : peer->port, "link", &endpoint->secret,
                                           td__deadline_earlier(limit, deadline), &fd);
    if (status)
        return td__fail(status == TD_ERR_TIMEOUT && !ours ? TD_ERR_PEER : status,
                        "%s cannot be reached, it may have ended: %s",
                        td__endpoint_describe(endpoint, rank), td_last_error());
    tune(fd);
    int error = td__send_all(fd, request, TD__REQUEST_SIZE, deadline);
    if (error) {
        close(fd);
        return td__fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER,
                        "%s closed the connection: %s", td__endpoint_describe(endpoint, rank),
                        td__errno_text(error));
    }
    *fd_out = fd;
    return TD_OK;
}

static bool same_host(const struct td__endpoint *endpoint, int rank)
{
    return endpoint->peers[rank].host == endpoint->peers[endpoint->rank].host;
}

td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__channel channel, td__deadline deadline, int *fd)
{
    uint8_t request[TD__REQUEST_SIZE];
    put_request(request, LINK, endpoint->rank, group, channel);
    return reach(endpoint, rank, same_host(endpoint, rank), request, deadline, fd);
}

static int take_arrival(struct td__endpoint *endpoint, int what, int rank, uint64_t group,
                        uint32_t channel)
{
    struct arrival **link = &endpoint->arrivals;
    for (; *link; link = &(*link)->next) {
        struct arrival *arrival = *link;
        if (arrival->what == what && arrival->group == group && arrival->channel == channel &&
            (rank < 0 || arrival->rank == rank)) {
            int fd = arrival->fd;
            *link = arrival->next;
            free(arrival);
            return fd;
        }
    }
    return -1;
}

td_status td__endpoint_accept(struct td__endpoint *endpoint, int rank, uint64_t group,
                              enum td__channel channel, td__deadline deadline, int *fd_out)
{
    int fd;
    bool in_time = true;
    pthread_mutex_lock(&endpoint->lock);
    while ((fd = take_arrival(endpoint, LINK, rank, group, channel)) < 0 && in_time)
        in_time = td__cond_wait(&endpoint->arrived, &endpoint->lock, deadline);
    pthread_mutex_unlock(&endpoint->lock);
    if (fd < 0)
        return td__fail(TD_ERR_TIMEOUT, "%s has not connected in time",
                        td__endpoint_describe(endpoint, rank));
    tune(fd);
    *fd_out = fd;
    return TD_OK;
}

void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group, enum td__channel channel,
                         td__link_fn fn, void *arg)
{
    struct listener *added = calloc(1, sizeof *added);
    pthread_mutex_lock(&endpoint->lock);
    struct listener **link = find_listener(endpoint, group, channel);
    if (*link) {
        (*link)->fn = fn;
        (*link)->arg = arg;
    } else if (added) {
        *added = (struct listener){.group = group, .channel = channel, .fn = fn, .arg = arg};
        *link = added;
        added = NULL;
    }
    for (struct arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
        if (arrival->what != LINK || arrival->group != group || arrival->channel != channel) {
            at = &arrival->next;
            continue;
        }
        *at = arrival->next;
        if (fn)
            fn(arg, arrival->rank, arrival->fd);
        else
            close(arrival->fd);
        free(arrival);
    }
    pthread_mutex_unlock(&endpoint->lock);
    free(added);
}

void td__endpoint_forget(struct td__endpoint *endpoint, uint64_t group)
{
    pthread_mutex_lock(&endpoint->lock);
    for (struct arrival **at = &endpoint->arrivals, *arrival; (arrival = *at);) {
        if (arrival->group != group) {
            at = &arrival->next;
            continue;
        }
        *at = arrival->next;
        close(arrival->fd);
        free(arrival);
    }
    for (struct listener **at = &endpoint->listeners, *listener; (listener = *at);) {
        if (listener->group != group) {
            at = &listener->next;
            continue;
        }
        *at = listener->next;
        free(listener);
    }
    for (struct paper **at = &endpoint->papers, *paper; (paper = *at);) {
        if (paper->group != group) {
            at = &paper->next;
            continue;
        }
        *at = paper->next;
        free(paper);
    }
    pthread_mutex_unlock(&endpoint->lock);
}

/* ---- Shared memory --------------------------------------------------------------------------- */

td_status td__endpoint_offer(struct td__endpoint *endpoint, uint64_t group, int fd)
{
    struct paper *paper = malloc(sizeof *paper);
    if (!paper)
        return td__fail_nomem("endpoint");
    pthread_mutex_lock(&endpoint->lock);
    *paper = (struct paper){.next = endpoint->papers, .group = group, .fd = fd};
    endpoint->papers = paper;
    int waiting;
    while ((waiting = take_arrival(endpoint, PAPER, -1, group, 0)) >= 0)
        hand_out(waiting, fd);
    pthread_mutex_unlock(&endpoint->lock);
    return TD_OK;
}

td_status td__endpoint_fetch(struct td__endpoint *endpoint, int rank, uint64_t group,
                             td__deadline deadline, int *fd_out)
{
    uint8_t request[TD__REQUEST_SIZE];
    char byte;
    int connection, fd;
    put_request(request, PAPER, endpoint->rank, group, 0);
    TD_TRY(reach(endpoint, rank, true, request, deadline, &connection));
    int error = td__recv_fd(connection, &fd, &byte, 1, deadline);
    close(connection);
    if (error)
        return td__fail(error == ETIMEDOUT ? TD_ERR_TIMEOUT : TD_ERR_PEER,
                        "%s did not share its memory: %s", td__endpoint_describe(endpoint, rank),
                        error == ENODATA ? "it has left" : td__errno_text(error));
    *fd_out = fd;
    return TD_OK;
}

td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address)
{
    struct peer *peer = &endpoint->peers[rank];
    pthread_mutex_lock(&endpoint->map_lock);
    if (!peer->viewed) {
        int fd;
        pthread_mutex_unlock(&endpoint->map_lock);
        TD_TRY(td__endpoint_fetch(endpoint, rank, ARENA_PAPER, deadline, &fd));
        pthread_mutex_lock(&endpoint->map_lock);
        if (peer->viewed) {
            close(fd); /* another thread was first */
        } else if (td__arena_view_open(fd, &peer->view)) {
            pthread_mutex_unlock(&endpoint->map_lock);
            close(fd);
            return TD_ERR_PEER;
        }
        peer->viewed = true;
    }
    void *found = td__arena_view_at(&peer->view, offset, size);
    pthread_mutex_unlock(&endpoint->map_lock);
    if (!found)
        return td__fail(TD_ERR_PEER, "%s speaks of memory that it does not have",
                        td__endpoint_describe(endpoint, rank));
    *address = found;
    return TD_OK;
}
