/* One address has many spellings: what they have in common, and ranks that use different ones. */
#include "forks.h"
#include "runner.h"
#include "worlds.h"

#include "os/address.h"
#include "os/socket.h"

#include <tandem/group.h>

#include <net/if.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *place_of(const char *host)
{
    static char text[512];
    td__endpoint_text(host, 29500, text, sizeof text);
    return text;
}

TEST(one_address_has_one_text)
{
    static const char *const places[][2] = {
        {"::1", "[::1]:29500"},
        {"[::1]", "[::1]:29500"},
        {"0:0:0:0:0:0:0:1", "[::1]:29500"},
        {"[0:0::0:1]", "[::1]:29500"},
        {"127.0.0.1", "127.0.0.1:29500"},
        {"::ffff:127.0.0.1", "127.0.0.1:29500"},
        {"[::FFFF:7f00:1]", "127.0.0.1:29500"},
        {"FD00:0::2", "[fd00::2]:29500"},
        {"Node-7.Example", "node-7.example:29500"},
        {"unix:@Name", "unix:@Name"},
    };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        CHECK_STR(place_of(places[i][0]), places[i][1]);
    char by_number[64], by_name[512];
    snprintf(by_number, sizeof by_number, "fe80::1%%%u", if_nametoindex("lo"));
    snprintf(by_name, sizeof by_name, "%s", place_of("fe80::1%lo"));
    CHECK_STR(place_of(by_number), by_name);
}

TEST(an_address_is_recognised_in_each_spelling)
{
    CHECK(td__endpoint_is("[::1]:29500", "[0:0:0:0:0:0:0:1]:29500"));
    CHECK(td__endpoint_is("127.0.0.1:29500", "[::ffff:127.0.0.1]:29500"));
    CHECK(td__endpoint_is("node:1", "NODE:1"));
    CHECK(td__endpoint_is("unix:@x", "unix:@x"));
    CHECK(!td__endpoint_is("[::1]:29500", "[::1]:29501"));
    CHECK(!td__endpoint_is("[::1]:29500", "[::2]:29500"));
    CHECK(!td__endpoint_is("[::1]:29500", "[::1]"));
    CHECK(!td__endpoint_is("[::1]:29500", "::1:29500")); /* an address with one group more */
    CHECK(!td__endpoint_is("unix:@x", "unix:@X"));
}

/* ---- Ranks ----------------------------------------------------------------------------------- */

static void need_ipv6(void)
{
    struct td__address_list list;
    bool retry;
    CHECK_OK(td__resolve("::1", 0, TD__NEVER, &list, &retry));
    int fd = td__listen_on(&list.at[0]);
    if (fd < 0)
        td_test_skip("this host has no ::1");
    close(fd);
}

struct spellings {
    bool url;
    int port;
    const char *const *hosts;
};

/* Each rank writes the address in another way, and the group does, too. */
static void meet_and_reduce(int rank, void *arg)
{
    const struct spellings *spellings = arg;
    char url[128];
    const char *host = spellings->hosts[rank];
    float sum = 1;
    td_init_options options = {.rank = rank, .world_size = 3, .timeout_ms = 30000};
    if (spellings->url) {
        snprintf(url, sizeof url, "tcp://%s:%d", host, spellings->port);
        options.init_method = url;
    } else {
        setenv("MASTER_ADDR", host, 1);
        set_number("MASTER_PORT", spellings->port);
        set_number("RANK", rank);
        set_number("WORLD_SIZE", 3);
        options.init_method = "env://";
    }
    CHECK_OK(td_init_process_group(&options));
    CHECK_OK(td_group_all_reduce(&sum, &sum, 1, TD_F32, TD_SUM, NULL, NULL));
    CHECK(sum == 3);
    CHECK_OK(td_destroy_process_group());
}

static void all_meet(const char *const hosts[3], bool url)
{
    struct spellings spellings = {.url = url, .port = reserve_port(), .hosts = hosts};
    fork_ranks(3, meet_and_reduce, &spellings);
}

TEST(ranks_meet_at_ipv6_addresses, .deadline_s = 60)
{
    need_ipv6();
    all_meet((const char *const[]){"::1", "[::1]", "0:0:0:0:0:0:0:1"}, false);
    all_meet((const char *const[]){"[::1]", "[0::1]", "[0:0:0:0:0:0:0:1]"}, true);
    setenv("TANDEM_TRANSPORT", "tcp", 1);
    all_meet((const char *const[]){"[0::0:1]", "::1", "[::1]"}, false);
}

TEST(ranks_meet_at_mapped_addresses, .deadline_s = 60)
{
    need_ipv6();
    all_meet((const char *const[]){"::ffff:127.0.0.1", "127.0.0.1", "[::ffff:7f00:1]"}, false);
    all_meet((const char *const[]){"127.0.0.1", "[::ffff:127.0.0.1]", "localhost"}, true);
}
