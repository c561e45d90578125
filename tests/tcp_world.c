/* Communicators among threads; see tcp_world.h. */
#include "tcp_world.h"

#include "base/fail.h"
#include "base/thread.h"
#include "runner.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

struct tcp_world {
    pthread_mutex_t lock;
    int links;
    int pending[MOST_RANKS][MOST_RANKS]; /* [to][from]: the accepting end, plus one */
    struct {
        bool there;
        td__link_fn fn; /* takes links that arrive late; NULL: they are closed */
        void *arg;
    } listeners[MOST_RANKS];
    seat_fn body;
    pthread_barrier_t end;
    struct seat *seats;
};

static void make_pair(int fds[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(listener >= 0);
    CHECK_EQ(bind(listener, (struct sockaddr *)&address, length), 0);
    CHECK_EQ(listen(listener, 1), 0);
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &length), 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(connect(fds[0], (struct sockaddr *)&address, length), 0);
    fds[1] = accept(listener, NULL, NULL);
    CHECK(fds[1] >= 0);
    close(listener);
    for (int i = 0; i < 2; i++) {
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
    }
}

static td_status seat_connect(void *arg, int peer, bool briefly, td__deadline deadline, int *fd)
{
    struct seat *seat = arg;
    struct tcp_world *world = seat->world;
    int fds[2];
    (void)briefly;
    (void)deadline;
    make_pair(fds);
    pthread_mutex_lock(&world->lock);
    td__link_fn fn = world->listeners[peer].fn;
    if (fn) {
        fn(world->listeners[peer].arg, seat->rank, fds[1]);
    } else if (world->listeners[peer].there) {
        close(fds[1]);
    } else {
        CHECK_EQ(world->pending[peer][seat->rank], 0);
        world->pending[peer][seat->rank] = fds[1] + 1;
        world->links++;
        td__tcp_comm_wake(world->seats[peer].comm);
    }
    pthread_mutex_unlock(&world->lock);
    *fd = fds[0];
    return TD_OK;
}

static td_status seat_accept(void *arg, int peer, int *fd)
{
    struct seat *seat = arg;
    struct tcp_world *world = seat->world;
    int *pending = &world->pending[seat->rank][peer];
    pthread_mutex_lock(&world->lock);
    int got = *pending;
    *pending = 0;
    pthread_mutex_unlock(&world->lock);
    if (!got)
        return td_fail(TD_ERR_TIMEOUT, "no link from %d", peer);
    *fd = got - 1;
    return TD_OK;
}

static const char *seat_describe(void *arg, int peer)
{
    static _Thread_local char text[32];
    (void)arg;
    snprintf(text, sizeof text, "rank %d (thread)", peer);
    return text;
}

static void seat_listen(void *arg, td__link_fn fn, void *fn_arg)
{
    struct seat *seat = arg;
    struct tcp_world *world = seat->world;
    pthread_mutex_lock(&world->lock);
    world->listeners[seat->rank].there = true;
    world->listeners[seat->rank].fn = fn;
    world->listeners[seat->rank].arg = fn_arg;
    for (int from = 0; from < seat->size; from++) {
        int *pending = &world->pending[seat->rank][from];
        if (*pending && fn)
            fn(fn_arg, from, *pending - 1);
        else if (*pending)
            close(*pending - 1);
        *pending = 0;
    }
    pthread_mutex_unlock(&world->lock);
}

static const struct td__link_source thread_source = {
    .connect = seat_connect,
    .accept = seat_accept,
    .describe = seat_describe,
    .listen = seat_listen,
};

static void *run_seat(void *arg)
{
    struct seat *seat = arg;
    seat->world->body(seat);
    pthread_barrier_wait(&seat->world->end);
    td__tcp_comm_destroy(seat->comm);
    return NULL;
}

void tcp_world_run(int size, const char *algorithm, seat_fn body, const void *arg)
{
    struct tcp_world world = {.lock = PTHREAD_MUTEX_INITIALIZER, .body = body};
    struct seat seats[MOST_RANKS];
    pthread_t threads[MOST_RANKS];
    CHECK(size <= MOST_RANKS);
    world.seats = seats;
    pthread_barrier_init(&world.end, NULL, (unsigned)size);
    for (int i = 0; i < size; i++) {
        seats[i] = (struct seat){.world = &world, .rank = i, .size = size, .arg = arg};
        CHECK_OK(td__tcp_comm_create_over(&thread_source, &seats[i], size, i, algorithm,
                                          &seats[i].comm));
    }
    for (int i = 0; i < size; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, run_seat, &seats[i]), 0);
    for (int i = 0; i < size; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&world.end);
}

struct td__operation seat_call(struct seat *seat, td_op_kind kind, size_t count, td_dtype dtype)
{
    return (struct td__operation){
        .call.kind = kind,
        .call.count = count,
        .reduction = {.dtype = dtype, .op = TD_SUM},
        .call.sequence = ++seat->sequence,
        .deadline = td__deadline_in_ms(20000 * td_test_slowness()),
        .group = "test",
    };
}

int tcp_world_links(struct seat *seat)
{
    pthread_mutex_lock(&seat->world->lock);
    int links = seat->world->links;
    pthread_mutex_unlock(&seat->world->lock);
    return links;
}
