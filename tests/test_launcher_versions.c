/* Launchers of different versions of Tandem notice each other. */
#include "runner.h"

#include "base/buffer.h"
#include "base/host.h"
#include "launch/roster.h"
#include "os/orders.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct td__introduction introduce(const char *host, const char *version)
{
    struct td__introduction read, written = {.nnodes = 2, .min_nodes = 2, .node = {.nproc = 4}};
    struct td__buffer bytes = {0};
    snprintf(written.node.host, sizeof written.node.host, "%s", host);
    snprintf(written.version, sizeof written.version, "%s", version);
    td__introduction_put(&bytes, &written);
    struct td__reader reader = td__reader_of(bytes.data, bytes.size);
    CHECK(td__introduction_read(&reader, &read));
    td__buffer_free(&bytes);
    return read;
}

TEST(different_versions_of_launchers)
{
    struct td__introduction a = introduce("a", "0.1.0"), b = introduce("b", "0.2.0"),
                            same = introduce("c", "0.1.0");
    CHECK_STR(a.version, "0.1.0");
    CHECK_OK(td__introduction_check(&same, 1, &a));
    CHECK_FAILS(
        td__introduction_check(&b, 1, &a), TD_ERR_MISMATCH,
        "node 0 (on a) has Tandem 0.1.0, node 1 (on b) has 0.2.0: install the same version");
}

/* Of another version only the name of its host and the version are read. */
TEST(an_introduction_that_goes_on_differently)
{
    struct td__introduction read, own = introduce("a", td__job_version);
    struct td__buffer bytes = {0};
    td__buffer_put_string(&bytes, "9.9.9", 5);
    td__buffer_put_string(&bytes, "b", 1);
    td__buffer_put_u8(&bytes, 7);
    struct td__reader reader = td__reader_of(bytes.data, bytes.size);
    CHECK(td__introduction_read(&reader, &read));
    td__buffer_free(&bytes);
    CHECK_FAILS(td__introduction_check(&read, 1, &own), TD_ERR_MISMATCH, "node 1 (on b) has 9.9.9");
}

/* Which part of a network that was cut goes on. */
TEST(quorum)
{
    static const struct {
        int nodes;
        uint8_t lost[5];
        bool quorum;
    } cases[] = {
        {3, {0, 0, 1}, true},        {3, {1, 0, 0}, true},       {3, {0, 1, 1}, false},
        {2, {0, 1}, true},           {2, {1, 0}, false},         {2, {2, 0}, true},
        {4, {0, 1, 1, 0}, true},     {4, {1, 0, 0, 1}, false},   {4, {2, 0, 0, 1}, true},
        {5, {2, 2, 0, 1, 1}, false}, {5, {2, 2, 2, 0, 1}, true}, {1, {0}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td__roster roster = {.count = cases[i].nodes};
        CHECK(td__roster_has_quorum(&roster, cases[i].lost) == cases[i].quorum);
    }
}

/* A roster goes from launcher to launcher as it is, and bytes that are none are refused. */
TEST(roster)
{
    struct td__roster_node nodes[2] = {
        {.id = 4, .node_rank = 0, .nproc = 2, .host = "a", .role = "x"},
        {.id = 7, .node_rank = 1, .rank = 2, .nproc = 3, .host = "b", .role = "y", .port = 99}};
    struct td__roster sent = {.version = 3, .round = 2, .store_port = 5, .at = nodes, .count = 2};
    struct td__roster got = {0};
    struct td__buffer bytes = {0};
    struct td__node_world world;
    td__roster_put(&bytes, &sent);
    for (size_t size = 0; size < bytes.size; size++) {
        struct td__reader part = td__reader_of(bytes.data, size);
        CHECK(!td__roster_take(&part, &got) && !got.count);
    }
    struct td__reader reader = td__reader_of(bytes.data, bytes.size);
    CHECK(td__roster_take(&reader, &got));
    CHECK(got.count == 2 && got.round == 2 && got.at[1].port == 99);
    td__roster_world(&got, 7, &world);
    CHECK(world.node_rank == 1 && world.rank == 2 && world.size == 5 && world.nodes == 2);
    CHECK(world.role_rank == 0 && world.role_size == 3 && world.round == 2);
    td__roster_free(&got);
    td__buffer_free(&bytes);
}

/* A worker sees what its launcher orders. */
TEST(orders)
{
    struct td__orders *orders;
    char number[16];
    int fd;
    CHECK_OK(td__orders_open(&orders, &fd));
    snprintf(number, sizeof number, "%d", fd);
    setenv(TD__ORDERS_VARIABLE, number, 1);
    const struct td__orders *seen = td__orders_find();
    CHECK(seen && seen != orders && !seen->leave && !seen->version);
    td__orders_leave(orders);
    CHECK(seen->leave == 1 && seen->version == 1);
    td__orders_close(orders, fd);
}
