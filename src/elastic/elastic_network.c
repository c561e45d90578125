/* A network that falls into parts: only one of them goes on.
 *
 * The ranks of a host that has become silent may live, in another part of the network, and take those of this part for
 * lost. So the part with more than half of the hosts goes on, or with half of them and the lowest one. A host whose ranks are
 * known to have ended, or to have left, does not count. The losses of a cut are noticed one after another: hosts that have
 * become silent not long ago still count. */
#include "elastic/elastic_internal.h"

#include "base/clock.h"
#include "base/fail.h"
#include "group/process_group.h"
#include "os/socket.h"
#include "peer/endpoint.h"

#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>

#define AFTERWARDS_NS INT64_C(5000000000)

struct td__lost_host {
    int host;
    int64_t lost_ns;
};

static int host_of(const td_elastic *elastic, int rank)
{
    return td__endpoint_host(elastic->all->root->endpoint, rank);
}

/* Whether one of `ranks` is on a host; *silent: whether one of those is. */
static bool is_among(const td_elastic *elastic, const int *ranks, int size, int host, bool *silent)
{
    bool found = false;
    for (int i = 0; i < size; i++) {
        if (host_of(elastic, ranks[i]) != host)
            continue;
        found = true;
        if (silent && td__endpoint_is_silent(elastic->all->root->endpoint, ranks[i]))
            *silent = true;
    }
    return found;
}

static bool is_noted(const td_elastic *elastic, int host)
{
    for (int i = 0; i < elastic->lost_host_count; i++)
        if (elastic->lost_hosts[i].host == host)
            return true;
    return false;
}

static void forget(td_elastic *elastic, int64_t now)
{
    int left = 0;
    int64_t since = now - AFTERWARDS_NS - 3 * td__heartbeat_ms() * 1000000;
    for (int i = 0; i < elastic->lost_host_count; i++)
        if (elastic->lost_hosts[i].lost_ns >= since)
            elastic->lost_hosts[left++] = elastic->lost_hosts[i];
    elastic->lost_host_count = left;
}

void td__network_note(td_elastic *elastic, const int *before, int before_size)
{
    int64_t now = td__now_ns();
    forget(elastic, now);
    size_t most = (size_t)(elastic->lost_host_count + before_size) * sizeof *elastic->lost_hosts;
    struct td__lost_host *hosts = realloc(elastic->lost_hosts, most);
    if (!hosts)
        return; /* then it counts as ended */
    elastic->lost_hosts = hosts;
    for (int i = 0; i < before_size; i++) {
        int host = host_of(elastic, before[i]);
        bool silent = false;
        is_among(elastic, before, before_size, host, &silent);
        if (silent && !is_noted(elastic, host) &&
            !is_among(elastic, elastic->ranks, elastic->size, host, NULL))
            hosts[elastic->lost_host_count++] = (struct td__lost_host){host, now};
    }
}

td_status td__network_check(const td_elastic *elastic)
{
    int here = 0, lost = elastic->lost_host_count, lowest = INT_MAX;
    for (int i = 0; i < elastic->size; i++) {
        int host = host_of(elastic, elastic->ranks[i]);
        here += !is_among(elastic, elastic->ranks, i, host, NULL);
        lowest = host < lowest ? host : lowest;
    }
    bool has_lowest = true;
    for (int i = 0; i < lost; i++)
        has_lowest = has_lowest && lowest < elastic->lost_hosts[i].host;
    if (here > lost || (here == lost && has_lowest))
        return TD_OK;
    return td_fail(TD_ERR_PEER,
                   "td_elastic_run: after step %" PRId64
                   " the ranks of %d of %d hosts can reach each other here, and the others may go on "
                   "without them: only the part of a network with more than half of the hosts goes "
                   "on, or with half of them and the lowest",
                   td__elastic_committed(elastic), here, here + lost);
}
