/* Connections between nodes, in both directions, as the ranks of a job would make them: to any free port, proven by
 * the job's secret, encrypted where it is. A connection carries
 *
 *     client   PING_SIZE bytes                              server   its clock
 *     client   BULK bytes, in packets of full size          server   the same bytes
 *
 * so that a network which loses large packets is found, too. */
#include "doctor_internal.h"

#include "base/fail.h"
#include "base/thread.h"
#include "os/loop.h"
#include "os/socket.h"
#include "os/trust.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    CONNECT_MS = 5000, /* as long as an attempt of a job has */
    BULK_MS = 5000,
    AT_A_TIME = 16,
    PING_SIZE = 8,
    BULK = 256 << 10,
};

#define PURPOSE "doctor"

/* ---- The server --------------------------------------------------------------------------------- */

struct doctor_listener {
    struct td__secret secret;
    struct td__loop loop;
    struct td__loop_listener served;
    struct td__auth_listener_options options;
    int tcp_fd;
    pthread_mutex_t lock; /* protects `serving` */
    pthread_cond_t idle;
    int serving; /* threads */
};

struct visit {
    struct doctor_listener *listener;
    int fd;
};

/* What goes wrong here goes wrong for the client, too, which reports it. */
static void answer(int fd)
{
    uint8_t ping[PING_SIZE], clock[PING_SIZE];
    td__deadline deadline = td__deadline_in_ms(BULK_MS + 1000);
    uint8_t *bulk = malloc(BULK);
    if (!bulk || td__recv_all(fd, ping, sizeof ping, deadline))
        goto done;
    td__store_u64(clock, (uint64_t)td__wall_ns());
    if (td__send_all(fd, clock, sizeof clock, deadline) || td__recv_all(fd, bulk, BULK, deadline))
        goto done;
    td__send_all(fd, bulk, BULK, deadline);
done:
    free(bulk);
    close(fd);
}

static void leave(struct doctor_listener *listener)
{
    pthread_mutex_lock(&listener->lock);
    listener->serving--;
    pthread_cond_signal(&listener->idle);
    pthread_mutex_unlock(&listener->lock);
}

static void *serve(void *arg)
{
    struct visit visit = *(struct visit *)arg;
    free(arg);
    answer(visit.fd);
    leave(visit.listener);
    return NULL;
}

static void accept_client(void *arg, int fd, bool local, const uint8_t *request)
{
    (void)local;
    (void)request;
    struct doctor_listener *listener = arg;
    struct visit *visit = malloc(sizeof *visit);
    pthread_t thread;
    if (!visit) {
        close(fd);
        return;
    }
    *visit = (struct visit){listener, fd};
    pthread_mutex_lock(&listener->lock);
    listener->serving++;
    pthread_mutex_unlock(&listener->lock);
    if (td__thread_start(&thread, "td-doctor", serve, visit)) {
        close(fd);
        free(visit);
        leave(listener);
        return;
    }
    pthread_detach(thread);
}

static td_status listen_on_loop(void *arg)
{
    struct doctor_listener *listener = arg;
    return td__loop_listen(&listener->loop, listener->tcp_fd, -1, &listener->options,
                           &listener->served);
}

td_status doctor_listen(const char *address, struct doctor_node *node,
                        struct doctor_listener **listener_out)
{
    struct doctor_listener *listener = calloc(1, sizeof *listener);
    if (!listener)
        return td__fail_nomem("doctor");
    td_status status = td__random(node->identity, sizeof node->identity);
    if (!status)
        status = td__secret_load(NULL, &listener->secret);
    if (!status)
        status = td__listen_trusted(address, 0, PURPOSE, &listener->secret,
                                    td__deadline_in_ms(CONNECT_MS), &listener->tcp_fd, &node->port);
    if (status)
        goto free_listener;
    listener->options = (struct td__auth_listener_options){
        .secret = &listener->secret, .purpose = PURPOSE, .fn = accept_client, .arg = listener};
    memcpy(listener->options.identity, node->identity, sizeof node->identity);
    pthread_mutex_init(&listener->lock, NULL);
    td__cond_init(&listener->idle);
    status = td__loop_start(&listener->loop, "td-doctor");
    if (status) {
        close(listener->tcp_fd);
        goto destroy_lock;
    }
    status = td__loop_try(&listener->loop, listen_on_loop, listener);
    if (status)
        goto stop_loop;
    *listener_out = listener;
    return TD_OK;

stop_loop:
    td__loop_stop(&listener->loop);
destroy_lock:
    pthread_cond_destroy(&listener->idle);
    pthread_mutex_destroy(&listener->lock);
free_listener:
    free(listener);
    return status;
}

static void unlisten(void *arg)
{
    td__loop_unlisten(&((struct doctor_listener *)arg)->served);
}

void doctor_listener_close(struct doctor_listener *listener)
{
    td__loop_run(&listener->loop, unlisten, listener);
    td__loop_stop(&listener->loop);
    pthread_mutex_lock(&listener->lock);
    while (listener->serving) /* each thread has a deadline */
        td__cond_wait(&listener->idle, &listener->lock, TD__NEVER);
    pthread_mutex_unlock(&listener->lock);
    pthread_cond_destroy(&listener->idle);
    pthread_mutex_destroy(&listener->lock);
    free(listener);
}

/* ---- The client --------------------------------------------------------------------------------- */

static void give_up(struct doctor_link *link, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void give_up(struct doctor_link *link, const char *format, ...)
{
    va_list arguments;
    char reason[DOCTOR_VALUE];
    link->state = DOCTOR_BROKEN;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    link->reason = strdup(reason);
}

/* A plain connection first: what the network does to it shows in the errno. */
static bool reach(const struct doctor_node *node, struct doctor_link *link)
{
    struct td__address_list list;
    bool retry;
    if (td__resolve(node->address, node->port, td__deadline_in_ms(CONNECT_MS), &list, &retry)) {
        give_up(link, "%s", td__error_text());
        return false;
    }
    int fd = td__connect_to(&list.at[0], td__deadline_in_ms(CONNECT_MS));
    if (fd >= 0) {
        close(fd);
        return true;
    }
    switch (-fd) {
    case ETIMEDOUT:
        give_up(link, "no answer within %d s, as where a firewall drops packets",
                CONNECT_MS / 1000);
        break;
    case ECONNREFUSED:
        give_up(link, "refused, as by a firewall that rejects, or where the address leads to "
                      "another machine");
        break;
    case EHOSTUNREACH:
    case ENETUNREACH:
        give_up(link, "%s: there is no route, or a firewall rejects", td__errno_text(-fd));
        break;
    default:
        give_up(link, "%s", td__errno_text(-fd));
    }
    return false;
}

/* Packets of full size, which a part of the way may not carry. */
static bool move_bulk(int fd, struct doctor_link *link)
{
    td__deadline deadline = td__deadline_in_ms(BULK_MS);
    uint8_t *bulk = malloc(2 * BULK);
    if (!bulk) {
        give_up(link, "out of memory");
        return false;
    }
    for (size_t i = 0; i < BULK; i++)
        bulk[i] = (uint8_t)(i * 7 + i / 256);
    int error = td__send_all(fd, bulk, BULK, deadline);
    if (!error)
        error = td__recv_all(fd, bulk + BULK, BULK, deadline);
    if (error)
        give_up(
            link,
            "small messages pass, but %d KiB did not within %d s (%s): packets of full size are "
            "lost; is the MTU of an interface larger than what the network carries?",
            BULK >> 10, BULK_MS / 1000, td__errno_text(error));
    else if (memcmp(bulk, bulk + BULK, BULK) != 0)
        give_up(link, "bytes were changed on the way");
    bool moved = link->state != DOCTOR_BROKEN;
    free(bulk);
    return moved;
}

static void try_link(const struct doctor_node *node, const struct td__secret *secret,
                     struct doctor_link *link)
{
    uint8_t ping[PING_SIZE] = {0}, clock[PING_SIZE];
    int fd;
    if (!reach(node, link))
        return;
    td__deadline deadline = td__deadline_in_ms(CONNECT_MS);
    if (td__connect_trusted(node->address, node->port, PURPOSE, node->identity, secret, deadline,
                            &fd)) {
        give_up(link, "%s", td__error_text());
        return;
    }
    int64_t begun = td__now_ns(), wall = td__wall_ns();
    int error = td__send_all(fd, ping, sizeof ping, deadline);
    if (!error)
        error = td__recv_all(fd, clock, sizeof clock, deadline);
    if (error) {
        give_up(link, "the connection is made, and then carries nothing: %s",
                td__errno_text(error));
    } else {
        link->round_trip_ns = td__now_ns() - begun;
        link->clock_ns = (int64_t)td__load_u64(clock) - wall - link->round_trip_ns / 2;
        if (move_bulk(fd, link))
            link->state = DOCTOR_WORKS;
    }
    close(fd);
}

struct round {
    struct doctor_job *job;
    struct td__secret secret;
    atomic_int next;
};

static void *connect_some(void *arg)
{
    struct round *round = arg;
    struct doctor_job *job = round->job;
    for (int i; (i = atomic_fetch_add(&round->next, 1)) < job->size - 1;) {
        int other = (job->rank + 1 + i) % job->size; /* not all to the same one at once */
        const struct doctor_node *node = &job->nodes[other];
        if (node->present && node->readable)
            try_link(node, &round->secret, &job->nodes[job->rank].links[other]);
    }
    return NULL;
}

void doctor_connect(struct doctor_job *job)
{
    struct round round = {.job = job};
    pthread_t threads[AT_A_TIME];
    int started = 0;
    if (td__secret_load(NULL, &round.secret))
        return; /* which the listener has said */
    while (started < AT_A_TIME && started < job->size - 1 &&
           !td__thread_start(&threads[started], "td-doctor", connect_some, &round))
        started++;
    if (!started)
        connect_some(&round);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}

int64_t doctor_connect_ms(int nodes)
{
    int64_t rounds = (nodes + AT_A_TIME - 1) / AT_A_TIME;
    return rounds * (2 * CONNECT_MS + BULK_MS);
}
