/* Bytes that come from another rank on a link for messages.
 *
 *     byte 0    bits 0 to 3: which receives are posted before they come; bit 4: this rank has opened
 *               the link, and two large sends are waiting for an answer
 *     byte 1    how many bytes come at a time; 0: all
 *     the rest  what comes
 *
 * Whatever comes, each recv gets at most what it has room for, and everything ends. */
#include "fuzz.h"
#include "memory_socket.h"

#include "group/work.h"
#include "p2p/p2p_link.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LONGEST = 200000, ROOM = 64, LARGE = TD__WIRE_EAGER + 1 };

/* ---- Instead of an endpoint and of works ----------------------------------------------------- */

static int link_fd;
static int complete;

static void check(bool condition)
{
    if (!condition)
        abort();
}

int td__endpoint_host(const struct td__endpoint *endpoint, int rank)
{
    (void)endpoint;
    return rank;
}

const char *td__endpoint_describe(const struct td__endpoint *endpoint, int rank)
{
    (void)endpoint;
    return rank ? "rank 1" : "rank 0";
}

enum td__presence td__endpoint_presence(const struct td__endpoint *endpoint, int rank)
{
    (void)endpoint;
    (void)rank;
    return TD__PRESENT;
}

const char *td__endpoint_exit_reason(const struct td__endpoint *endpoint, int rank)
{
    (void)endpoint;
    (void)rank;
    return NULL;
}

unsigned td__endpoint_losses(const struct td__endpoint *endpoint)
{
    (void)endpoint;
    return 0;
}

void td__endpoint_add_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter)
{
    (void)endpoint;
    (void)waiter;
}

void td__endpoint_remove_waiter(struct td__endpoint *endpoint, struct td__endpoint_waiter *waiter)
{
    (void)endpoint;
    (void)waiter;
}

void td__endpoint_wake_on(struct td__endpoint *endpoint, int fd)
{
    (void)endpoint;
    (void)fd;
}

void td__endpoint_watch(struct td__endpoint *endpoint, int rank)
{
    (void)endpoint;
    (void)rank;
}

void td__endpoint_listen(struct td__endpoint *endpoint, uint64_t group,
                         enum td__link_channel channel, td__link_fn fn, void *arg)
{
    (void)endpoint;
    (void)group;
    (void)channel;
    (void)fn;
    (void)arg;
}

td_status td__endpoint_connect(struct td__endpoint *endpoint, int rank, uint64_t group,
                               enum td__link_channel channel, td__deadline deadline, int *fd)
{
    (void)endpoint;
    (void)rank;
    (void)group;
    (void)channel;
    (void)deadline;
    *fd = link_fd;
    link_fd = -1;
    return *fd >= 0 ? TD_OK : TD_ERR_PEER;
}

td_status td__endpoint_map(struct td__endpoint *endpoint, int rank, size_t offset, size_t size,
                           td__deadline deadline, void **address)
{
    (void)endpoint;
    (void)rank;
    (void)offset;
    (void)size;
    (void)deadline;
    (void)address;
    return TD_ERR_PEER;
}

void td_work_complete(td_work *work, td_status status, int source, size_t received)
{
    (void)work;
    check(status || received <= ROOM || source < 0);
    complete++;
}

/* ---- The target ------------------------------------------------------------------------------ */

static void post(struct td__p2p *p2p, td_op_kind kind, void *data, size_t size, int tag)
{
    static td_work work;
    td_call call = {.kind = kind,
                    .input = data,
                    .output = data,
                    .count = size,
                    .dtype = TD_U8,
                    .peer = 1,
                    .tag = tag,
                    .timeout_ms = 1000};
    check(!td__p2p_post(p2p, &call, &work, &work.complete, NULL));
}

static void pump(struct td__p2p *p2p)
{
    for (int i = 0; i < 3; i++)
        td__p2p_progress(p2p, NULL, TD_ANY_SOURCE, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char large[LARGE];
    static const int ranks[2] = {0, 1};
    struct td__p2p_options options = {.world_ranks = ranks, .size = 2, .name = "fuzz"};
    struct td__p2p *p2p;
    int posted = 0;
    if (size < 2 || size > LONGEST)
        return 0;
    memory_clock(true);
    int link = memory_socket(data + 2, size - 2, data[1]);
    check(!td__p2p_create(&options, &p2p));
    p2p->stopping = true; /* no thread: this one does everything */
    char *buffers[4];
    complete = 0;
    for (int i = 0; i < 4; i++) {
        buffers[i] = malloc(ROOM); /* of exactly that size, for the sanitizer */
        if (data[0] & 1 << i) {
            post(p2p, TD_OP_RECV, buffers[i], ROOM, i ? i : TD_ANY_TAG);
            posted++;
        }
    }
    if (data[0] & 16) {
        link_fd = link;
        post(p2p, TD_OP_SEND, large, LARGE, 1);
        post(p2p, TD_OP_SEND, large, LARGE, 2);
        posted += 2;
        pthread_mutex_lock(&p2p->lock);
        td__p2p_tcp_connect(p2p);
        pthread_mutex_unlock(&p2p->lock);
    } else {
        td__p2p_tcp_accept(p2p, 1, link);
    }
    pump(p2p);
    memory_socket_end(link);
    pump(p2p);
    td__p2p_destroy(p2p);
    check(complete == posted);
    check(memory_socket_reset() == 0);
    memory_clock(false);
    for (int i = 0; i < 4; i++)
        free(buffers[i]);
    return 0;
}
