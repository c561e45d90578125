/* Bytes from another rank, instead of a frame of a collective: the header alone, and the bytes that a rank receives
 * during a call.
 *
 *     byte 0    the kind of the call, and its number of elements
 *     byte 1    odd: the expected header is received first; the other bits: how many bytes are received at a time
 *     the rest  the received bytes */
#include "fuzz.h"
#include "memory_socket.h"

#include "tcp/tcp_layout.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LONGEST = 4096, COUNT = 100 };

static int link_fd;

static void check(bool condition)
{
    if (!condition)
        abort();
}

static void check_header(const uint8_t *bytes)
{
    struct td__call_header header, mine = {.type = TD__HEADER_DATA, .kind = TD_OP_BARRIER};
    uint8_t again[TD__HEADER_BYTES];
    char text[256];
    if (!td__header_read(bytes, &header))
        return;
    check(header.type != TD__HEADER_FAILURE || header.payload <= TD__FAILURE_TEXT);
    td__header_write(&header, again);
    check(!memcmp(again, bytes, TD__HEADER_BYTES));
    td__header_describe(&header, text, sizeof text);
    check(strlen(text) < sizeof text - 1);
    struct td__operation operation = {.call.kind = TD_OP_BARRIER, .group = "fuzz"};
    check(td__header_mismatch(&operation, &mine, "rank 0", &header, "rank 1") == TD_ERR_MISMATCH);
}

static td_status give_link(void *arg, int peer, int *fd)
{
    (void)arg;
    (void)peer;
    *fd = link_fd;
    link_fd = -1;
    return *fd >= 0 ? TD_OK : TD_ERR_TIMEOUT;
}

static td_status connect_link(void *arg, int peer, bool briefly, td__deadline deadline, int *fd)
{
    (void)briefly;
    (void)deadline;
    return give_link(arg, peer, fd);
}

static const char *describe(void *arg, int peer)
{
    (void)arg;
    return peer ? "rank 1" : "rank 0";
}

static void ignore_listen(void *arg, td__link_fn fn, void *fn_arg)
{
    (void)arg;
    (void)fn;
    (void)fn_arg;
}

/* Rank 0 of two makes a call; `data` is what rank 1 sends before it closes. */
static void make_call(uint8_t what, uint8_t how, const uint8_t *data, size_t size)
{
    static const struct td__link_source source = {.connect = connect_link,
                                                  .accept = give_link,
                                                  .describe = describe,
                                                  .listen = ignore_listen};
    static float input[2 * COUNT], output[2 * COUNT];
    struct td__tcp_comm *comm;
    uint8_t right[TD__HEADER_BYTES];
    check(!td__tcp_comm_create_over(&source, &link_fd, 2, 0, NULL, &comm));
    struct td__operation operation = {
        .call.kind = what % TD__COLLECTIVES,
        .call.input = input,
        .call.output = output,
        .call.count = what / TD__COLLECTIVES,
        .call.sequence = 1,
        .deadline = td__now_ns(),
        .group = "fuzz",
    };
    link_fd = memory_socket(NULL, 0, how / 2);
    int link = link_fd;
    if (how & 1) {
        struct td__run run;
        size_t elements = operation.call.count;
        check(!td__tcp_comm_begin(comm, &operation, elements * sizeof(float), &run));
        run.call.header.turn = comm->turn + 1;
        run.call.header.payload = elements * sizeof(float);
        td__header_write(&run.call.header, right);
        memory_socket_more(link, right, sizeof right);
    }
    memory_socket_more(link, data, size);
    memory_socket_end(link);
    td_status status = td__tcp_comm_run(comm, &operation);
    check(!status || strlen(td_last_error()) > 0);
    td__tcp_comm_destroy(comm);
    if (link_fd >= 0)
        close(link_fd);
    check(memory_socket_reset() == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > LONGEST)
        return 0;
    if (size >= 2 + TD__HEADER_BYTES)
        check_header(data + 2);
    memory_clock(true);
    make_call(data[0], data[1], data + 2, size - 2);
    memory_clock(false);
    return 0;
}
