/* See replica_nodes.h. */
#include "replica_nodes.h"

#include "forks.h"
#include "runner.h"

#include "base/fail.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum command { NOTHING, ATTACH, PROMOTE, DEPOSE, STATE, CLOSE };
enum { SERVER_MS = 20000 };

struct replica_node_page {
    atomic_int port; /* 0 until it serves */
    atomic_int command;
    int term;
    char address[32];
    td_status status;
    char text[1024];
    struct td__tcp_replica_state state;
};

bool replica_over_tcp;

static void carry_out(struct replica_node_page *page, struct td__tcp_server *server)
{
    td__deadline deadline = td__deadline_in_ms(SERVER_MS * td_test_slowness());
    page->status = TD_OK;
    switch (atomic_load(&page->command)) {
    case ATTACH:
        page->status = td__tcp_replica_attach(server, page->address, REPLICA_SECRET, deadline);
        break;
    case PROMOTE:
        page->status = td__tcp_replica_promote(server, (uint64_t)page->term);
        break;
    case DEPOSE:
        page->status = td__tcp_replica_depose(server, (uint64_t)page->term);
        break;
    case STATE:
        td__tcp_replica_state(server, &page->state);
        break;
    }
    if (page->status)
        snprintf(page->text, sizeof page->text, "%s", td_last_error());
}

static void serve(void *arg)
{
    struct replica_node *node = arg;
    struct td__tcp_server *server;
    struct td__tcp_replica_options options = {.host = replica_over_tcp ? "0.0.0.0" : "127.0.0.1",
                                              .secret = REPLICA_SECRET,
                                              .number = (uint32_t)node->number};
    CHECK_OK(td__tcp_replica_open(&options, &server));
    if (replica_over_tcp) { /* an address to which no unix socket belongs */
        char address[32];
        snprintf(address, sizeof address, "127.0.0.2:%d", td__tcp_replica_port(server));
        CHECK_OK(td__tcp_replica_name(server, options.number, address, NULL, NULL));
    }
    atomic_store(&node->page->port, td__tcp_replica_port(server));
    for (;;) {
        int command = atomic_load(&node->page->command);
        if (command == CLOSE)
            td__tcp_replica_close(server, 0);
        else if (command)
            carry_out(node->page, server);
        atomic_store(&node->page->command, NOTHING);
        if (command == CLOSE)
            return;
        usleep(200);
    }
}

void replica_start(struct replica_node *node, int number)
{
    node->number = number;
    node->page = fork_shared(sizeof *node->page);
    node->pid = fork_start(serve, node);
    CHECK_SOON(atomic_load(&node->page->port) || fork_has_ended(node->pid));
    CHECK(atomic_load(&node->page->port));
    snprintf(node->address, sizeof node->address, "127.0.0.%d:%d", replica_over_tcp ? 2 : 1,
             atomic_load(&node->page->port));
}

static td_status tell(struct replica_node *node, enum command command)
{
    atomic_store(&node->page->command, command);
    CHECK_SOON(!atomic_load(&node->page->command) || fork_has_ended(node->pid));
    CHECK(!atomic_load(&node->page->command));
    return node->page->status ? td_fail(node->page->status, "%s", node->page->text) : TD_OK;
}

td_status replica_attach(struct replica_node *node, const struct replica_node *primary)
{
    memcpy(node->page->address, primary->address, sizeof primary->address);
    return tell(node, ATTACH);
}

td_status replica_promote(struct replica_node *node, int term)
{
    node->page->term = term;
    return tell(node, PROMOTE);
}

td_status replica_depose(struct replica_node *node, int term)
{
    node->page->term = term;
    return tell(node, DEPOSE);
}

struct td__tcp_replica_state replica_state(struct replica_node *node)
{
    CHECK_OK(tell(node, STATE));
    return node->page->state;
}

int replica_members(struct replica_node *node)
{
    return replica_state(node).members.count;
}

void replica_close(struct replica_node *node)
{
    atomic_store(&node->page->command, CLOSE);
    fork_join(node->pid);
}

void replica_kill(struct replica_node *node)
{
    fork_kill(node->pid, SIGKILL);
}

void replica_stop(struct replica_node *node)
{
    char path[64], state = '?';
    kill(node->pid, SIGSTOP);
    snprintf(path, sizeof path, "/proc/%d/stat", (int)node->pid);
    while (state != 'T') {
        FILE *file = fopen(path, "re");
        CHECK(file != NULL);
        CHECK_EQ(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
        fclose(file);
    }
}

void replica_go_on(struct replica_node *node)
{
    kill(node->pid, SIGCONT);
}

void replica_start_all(struct replica_node *nodes, int count)
{
    for (int i = 0; i < count; i++)
        replica_start(&nodes[i], i);
    CHECK_OK(replica_promote(&nodes[0], 1));
    for (int i = 1; i < count; i++)
        CHECK_OK(replica_attach(&nodes[i], &nodes[0]));
}

td_store *replica_open(const struct replica_node *nodes, int count)
{
    const char *addresses[TD__REPLICA_MOST];
    td_store *store = NULL;
    for (int i = 0; i < count; i++)
        addresses[i] = nodes[i].address;
    CHECK_OK(td__tcp_store_open_any(
        addresses, count,
        &(td_tcp_store_options){.secret = REPLICA_SECRET,
                                .timeout_ms = SERVER_MS * td_test_slowness()},
        &store));
    return store;
}
