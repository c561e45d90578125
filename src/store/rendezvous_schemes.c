/* env://, tcp:// and file://; see rendezvous_schemes.h. The clusters' are in rendezvous_cluster.c. */
#include "store/rendezvous_schemes.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/number.h"
#include "os/address.h"
#include "os/socket.h"
#include "store/peer_watch.h"
#include "store/slurm.h"
#include "store/store_ops.h"
#include "store/tcp_replica.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NEIGHBOUR_MS = 2000, BACK_EARLY_NS = 5000000, MOST_STANDBYS = 8, STANDBYS_ROOM = 1024 };

const char *td__env(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

td_status td__env_number(const char *name, int low, int *number, bool *found)
{
    const char *text = td__env(name);
    *found = text != NULL;
    if (text && !td__parse_int(text, low, INT_MAX, number))
        return td_fail(TD_ERR_INVALID,
                       "the variable %s is \"%.100s\"; it must be a number of at "
                       "least %d",
                       name, text, low);
    return TD_OK;
}

td_status td__rendezvous_check(const char *what, int rank, int world_size)
{
    if (world_size < 1)
        return td_fail(TD_ERR_INVALID, "%s: the world size is %d; it must be at least 1", what,
                       world_size);
    if (rank < 0 || rank >= world_size)
        return td_fail(TD_ERR_INVALID, "%s: rank %d is outside 0 to %d, the ranks of a world of %d",
                       what, rank, world_size - 1, world_size);
    return TD_OK;
}

td_status td__rendezvous_given(const struct td__url *url, const td_rendezvous_options *options,
                               int *rank, int *world_size)
{
    if (options->world_size < -1)
        return td_fail(TD_ERR_INVALID,
                       "rendezvous: the world size is %d; it must be at least 1 (0 and -1 take it "
                       "from the URL or the environment)",
                       options->world_size);
    if (options->rank < -1)
        return td_fail(TD_ERR_INVALID,
                       "rendezvous: the rank is %d; ranks begin at 0 (-1 takes it from the URL or "
                       "the environment)",
                       options->rank);
    *world_size = options->world_size > 0 ? options->world_size : url->world_size;
    *rank = options->rank > 0 ? options->rank : url->rank;
    if (options->world_size == 1 && options->rank == 0)
        *rank = 0; /* a world of one is asked for: whatever the environment says of another one */
    return TD_OK;
}

bool td__rendezvous_rank_0(const td_rendezvous_options *options)
{
    return options->world_size > 0 && options->rank == 0;
}

/* Rank 0 found the port taken. If a store of this job answers there, another process is rank 0: this one
 * goes on as a client, and the barrier fails on both. Otherwise the first failure stands. */
static td_status open_beside_another(const char *host, int port, td_tcp_store_options *options,
                                     td_store **store)
{
    struct td__error error;
    td__error_save(&error);
    options->host_server = false;
    options->timeout_ms = NEIGHBOUR_MS;
    if (td_tcp_store_open(host, port, options, store))
        return td__error_restore(&error);
    return TD_OK;
}

/* The store that rank 0 hosts holds its epoch. Another rank may connect before rank 0 has closed the store
 * of the last epoch, and would wait in the wrong one: it disconnects, and tries again until rank 0 hosts
 * the next. */
static const char epoch_key[] = TD__INTERNAL_KEY "rendezvous/epoch";

static td_status set_epoch(td_store *store, unsigned epoch)
{
    char text[16];
    int length = snprintf(text, sizeof text, "%u", epoch);
    return td_store_set(store, epoch_key, text, (size_t)length);
}

/* Rank 0 has a world open already, whose store it hosts here: remote calls beside a process group. All ranks of that
 * epoch have joined, so the store can serve the next one, too. */
static td_status go_on_to_epoch(td_store *store, unsigned epoch)
{
    td_bytes value;
    if (!epoch)
        return TD_OK;
    TD_TRY(td_store_get(store, epoch_key, NEIGHBOUR_MS, &value));
    bool ours = strtoul(value.data, NULL, 10) == epoch - 1;
    td_bytes_free(&value);
    return ours ? set_epoch(store, epoch) : TD_OK;
}

static td_status open_of_epoch(const char *host, int port, td_tcp_store_options *options,
                               unsigned epoch, td_store **store)
{
    td__deadline deadline = td__deadline_in_ms(options->timeout_ms);
    for (;;) {
        td_bytes value;
        TD_TRY(td_tcp_store_open(host, port, options, store));
        td_status status = td_store_get(*store, epoch_key, options->timeout_ms, &value);
        bool same = !status && strtoul(value.data, NULL, 10) == epoch;
        if (!status)
            td_bytes_free(&value);
        if (same)
            return TD_OK;
        struct td__error error;
        td__error_save(&error);
        td_store_close(*store);
        if (status &&
            status !=
                TD_ERR_PEER) /* the server of the last epoch has ended: the next one follows */
            return td__error_restore(&error);
        if (td__deadline_passed(deadline))
            return td_fail(TD_ERR_TIMEOUT,
                           "rendezvous at %s, port %d: rank 0 has not closed its last world there",
                           host, port);
        td__sleep_ns(BACK_EARLY_NS);
        int left = td__deadline_poll_ms(deadline);
        options->timeout_ms = left > 0 ? left : 1;
    }
}

/* Variables that tdrun sets for its workers. */
static td_status check_launcher(void)
{
    const char *rejoin = td__env("TANDEM_REJOIN"), *agent = td__env("TANDEM_AGENT_STORE");
    char host[256];
    int port = 0;
    if (rejoin && strcmp(rejoin, "0") != 0 && strcmp(rejoin, "1") != 0)
        return td_fail(TD_ERR_INVALID,
                       "the variable TANDEM_REJOIN is \"%.100s\"; it is 1 where a process comes "
                       "back into its job, otherwise 0 or not set (tdrun sets it)",
                       rejoin);
    if (agent && strncmp(agent, "unix:", 5) != 0 &&
        (!td__split_host_port(agent, host, sizeof host, &port) || !port))
        return td_fail(TD_ERR_INVALID,
                       "the variable TANDEM_AGENT_STORE is \"%.100s\"; it is written host:port, "
                       "where the launcher hosts the store (tdrun sets it)",
                       agent);
    return TD_OK;
}

/* Servers that the launchers have beside the one at `address`, one of which takes over from it when that is lost: TANDEM_STANDBYS, a
 * list with commas. Writes them behind the first address; 1 where there are none. */
static td_status find_standbys(const char *first, char text[STANDBYS_ROOM],
                               const char *addresses[MOST_STANDBYS + 1], int *count)
{
    const char *list = td__env("TANDEM_STANDBYS");
    char host[256];
    addresses[0] = first;
    *count = 1;
    if (!list)
        return TD_OK;
    if (strlen(list) >= STANDBYS_ROOM)
        return td_fail(TD_ERR_INVALID, "the variable TANDEM_STANDBYS is too long (tdrun sets it)");
    strcpy(text, list);
    for (char *rest = text, *address; (address = strtok_r(rest, ",", &rest));) {
        int port = 0;
        if (*count > MOST_STANDBYS || !td__split_host_port(address, host, sizeof host, &port) || !port)
            return td_fail(TD_ERR_INVALID,
                           "the variable TANDEM_STANDBYS is \"%.100s\"; it is a list of at most %d "
                           "host:port, with commas (tdrun sets it)",
                           list, MOST_STANDBYS);
        addresses[(*count)++] = address;
    }
    return TD_OK;
}

/* The store that the launcher hosts, wherever it is by now. */
static td_status open_hosted(const char *host, int port, const char *address,
                             const td_tcp_store_options *options, td_store **store)
{
    const char *addresses[MOST_STANDBYS + 1];
    char text[STANDBYS_ROOM];
    int count;
    TD_TRY(find_standbys(address, text, addresses, &count));
    return count == 1 ? td_tcp_store_open(host, port, options, store)
                      : td__tcp_store_open_any(addresses, count, options, store);
}

/* A world of one process needs no secret that others know. */
static td_status secret_of_one(char text[65], td_tcp_store_options *options)
{
    struct td__secret secret;
    TD_TRY(td__secret_load(NULL, &secret));
    if (secret.bound)
        return TD_OK;
    TD_TRY(td__secret_make(text));
    options->secret = text;
    return TD_OK;
}

td_status td__rendezvous_open(const char *host, int port, int rank, int world_size,
                              const td_rendezvous_options *options,
                              struct td__rendezvous_state *state)
{
    TD_TRY(check_launcher());
    td__endpoint_text(host, port, state->address, sizeof state->address);
    const char *agent = td__env("TANDEM_AGENT_STORE");
    bool hosted = agent && td__endpoint_is(state->address, agent);
    bool first = rank == 0 && !hosted;
    if (port == 0 && strncmp(host, "unix:", 5) != 0 && world_size > 1)
        return td_fail(TD_ERR_INVALID,
                       "rendezvous at %s: port 0 means any free port, and the other "
                       "ranks could not know which; give a port",
                       state->address);

    if (world_size > 1 && !td__host_is_loopback(host))
        TD_TRY(td__slurm_adopt_secret(NULL));

    int64_t timeout = options->timeout_ms ? options->timeout_ms : TD_STORE_DEFAULT_TIMEOUT_MS;
    td_tcp_store_options store_options = {.host_server = first, .timeout_ms = timeout};
    char alone[65];
    if (first)
        store_options.linger_ms = timeout;
    if (first && world_size == 1)
        TD_TRY(secret_of_one(alone, &store_options));
    td_store **store = &state->world.store;
    unsigned epoch = td__rendezvous_epoch(state->address);
    td_status status =
        hosted  ? open_hosted(host, port, state->address, &store_options, store)
        : first ? td_tcp_store_open(host, port, &store_options, store)
                : open_of_epoch(host, port, &store_options, epoch, store);
    if (!status && first) {
        status = set_epoch(*store, epoch);
        if (status)
            td_store_close(*store);
    } else if (status == TD_ERR_SYSTEM && first) {
        status = open_beside_another(host, port, &store_options, store);
        if (!status && (status = go_on_to_epoch(*store, epoch)))
            td_store_close(*store);
    }
    TD_TRY(status);
    td_store_set_timeout(state->world.store, timeout);
    state->world.rank = rank;
    state->world.world_size = world_size;
    return TD_OK;
}

td_status td__rendezvous_host(const char *host, const td_rendezvous_options *options,
                              struct td__rendezvous_state *state, int *port)
{
    int64_t timeout = options->timeout_ms ? options->timeout_ms : TD_STORE_DEFAULT_TIMEOUT_MS;
    td_tcp_store_options store_options = {
        .host_server = true, .timeout_ms = timeout, .linger_ms = timeout};
    td_store **store = &state->world.store;
    TD_TRY(td_tcp_store_open(host, 0, &store_options, store));
    td_status status = set_epoch(*store, 0);
    if (status) {
        td_store_close(*store);
        return status;
    }
    *port = td_tcp_store_port(*store);
    td__endpoint_text(host, *port, state->address, sizeof state->address);
    return td_store_set_timeout(*store, timeout);
}

/* ---- Without a rank -------------------------------------------------------------------------- */

/* The process that hosts the store may close it while another one connects; so both are tried in turns. */
td_status td__rendezvous_open_store(const char *host, int port, int64_t timeout_ms,
                                    td_store **store)
{
    char address[512];
    td__deadline deadline = td__deadline_in_ms(timeout_ms);
    td_tcp_store_options options = {.timeout_ms = timeout_ms};
    TD_TRY(check_launcher());
    td__endpoint_text(host, port, address, sizeof address);
    const char *agent = td__env("TANDEM_AGENT_STORE");
    bool hosted = agent && td__endpoint_is(address, agent);
    bool here = !hosted && td__host_is_here(host, deadline);
    if (port == 0)
        return td_fail(TD_ERR_INVALID,
                       "the store at %s: port 0 means any free port, and other processes could not "
                       "know which; give a port",
                       address);
    for (;;) {
        td_status status = TD_ERR_SYSTEM;
        options.host_server = here;
        options.linger_ms = here ? timeout_ms : 0;
        options.timeout_ms = timeout_ms;
        if (here)
            status = td_tcp_store_open(host, port, &options, store);
        if (status == TD_ERR_SYSTEM) {
            options.host_server = false;
            options.timeout_ms = here && NEIGHBOUR_MS < timeout_ms ? NEIGHBOUR_MS : timeout_ms;
            status = hosted ? open_hosted(host, port, address, &options, store)
                            : td_tcp_store_open(host, port, &options, store);
        }
        if (!status)
            return td_store_set_timeout(*store, timeout_ms);
        if (status != TD_ERR_TIMEOUT || !here || td__deadline_passed(deadline))
            return status;
    }
}

/* ---- env:// ---------------------------------------------------------------------------------- */

static td_status missing(const char *name, const char *meaning)
{
    return td_fail(TD_ERR_INVALID,
                   "env://: the variable %s is not set; it says %s (tdrun sets it for its workers)",
                   name, meaning);
}

static td_status rank_from_env(const td_rendezvous_options *options, int *rank)
{
    bool found = false;
    if (*rank < 0)
        TD_TRY(td__env_number("RANK", 0, rank, &found));
    if (*rank < 0 && td__rendezvous_rank_0(options))
        *rank = 0;
    return *rank >= 0 ? TD_OK : missing("RANK", "which of the processes this is, counted from 0");
}

static td_status number_from_env(const char *name, const char *meaning, int low, int *number)
{
    bool found;
    if (*number >= 0)
        return TD_OK; /* given by the options or the URL */
    TD_TRY(td__env_number(name, low, number, &found));
    return found ? TD_OK : missing(name, meaning);
}

td_status td__rendezvous_env_address(const char **host, int *port)
{
    *host = td__env("MASTER_ADDR");
    if (!*host)
        return missing("MASTER_ADDR", "on which host rank 0 is");
    const char *port_text = td__env("MASTER_PORT");
    if (!port_text)
        return missing("MASTER_PORT", "at which port of MASTER_ADDR the store is");
    if (!td__parse_int(port_text, INT_MIN, INT_MAX, port))
        return td_fail(TD_ERR_INVALID,
                       "env://: MASTER_PORT is \"%.100s\"; it must be a number from 0 to 65535",
                       port_text);
    if (*port < 0 || *port > 65535)
        return td_fail(TD_ERR_INVALID, "env://: MASTER_PORT is %d, which is outside 0 to 65535",
                       *port);
    return TD_OK;
}

td_status td__rendezvous_env(const struct td__url *url, const td_rendezvous_options *options,
                             struct td__rendezvous_state *state)
{
    int rank, world_size, port;
    const char *host;
    bool found;
    if (url->host[0] || url->port >= 0 || url->path[0])
        return td_fail(TD_ERR_INVALID, "env://: it takes no host, port or path; MASTER_ADDR and "
                                       "MASTER_PORT say where the store is");
    TD_TRY(td__rendezvous_given(url, options, &rank, &world_size));
    TD_TRY(rank_from_env(options, &rank));
    TD_TRY(number_from_env("WORLD_SIZE", "how many processes there are", 1, &world_size));
    TD_TRY(td__rendezvous_env_address(&host, &port));
    TD_TRY(td__rendezvous_check("env://", rank, world_size));
    TD_TRY(td__env_number("LOCAL_RANK", 0, &state->world.local_rank, &found));
    TD_TRY(td__env_number("LOCAL_WORLD_SIZE", 1, &state->world.local_world_size, &found));
    TD_TRY(td__env_number("TORCHELASTIC_RESTART_COUNT", 0, &state->restart_count, &found));
    /* Where nodes come and go, workers also start again without a failure. */
    TD_TRY(td__env_number("TANDEM_ROUND", 0, &state->restart_count, &found));
    if (td__rejoins())
        state->restart_count = 0; /* it rejoins the rendezvous of its predecessor */
    return td__rendezvous_open(host, port, rank, world_size, options, state);
}

/* ---- tcp:// and file:// ---------------------------------------------------------------------- */

static td_status given_or_fail(const struct td__url *url, const td_rendezvous_options *options,
                               int *rank, int *world_size)
{
    TD_TRY(td__rendezvous_given(url, options, rank, world_size));
    if (*rank < 0 && td__rendezvous_rank_0(options))
        *rank = 0;
    if (*rank < 0 || *world_size < 0)
        return td_fail(
            TD_ERR_INVALID,
            "%s://: the %s is missing; give it in the options or as ?rank=…&world_size=…",
            url->scheme, *rank < 0 ? "rank" : "world size");
    char what[64];
    snprintf(what, sizeof what, "%s://", url->scheme);
    return td__rendezvous_check(what, *rank, *world_size);
}

td_status td__rendezvous_check_tcp(const struct td__url *url)
{
    if (!url->host[0] || url->port < 0)
        return td_fail(TD_ERR_INVALID, "tcp://: the %s is missing; it is written tcp://host:port",
                       url->host[0] ? "port" : "host");
    if (url->path[0] && strcmp(url->path, "/") != 0)
        return td_fail(TD_ERR_INVALID, "tcp://%s:%d: it takes no path, but \"%.100s\" follows",
                       url->host, url->port, url->path);
    return TD_OK;
}

td_status td__rendezvous_tcp(const struct td__url *url, const td_rendezvous_options *options,
                             struct td__rendezvous_state *state)
{
    int rank = -1, world_size = -1;
    TD_TRY(td__rendezvous_check_tcp(url));
    TD_TRY(given_or_fail(url, options, &rank, &world_size));
    return td__rendezvous_open(url->host, url->port, rank, world_size, options, state);
}

td_status td__rendezvous_file(const struct td__url *url, const td_rendezvous_options *options,
                              struct td__rendezvous_state *state)
{
    td_world *world = &state->world;
    if (url->host[0] || url->port >= 0)
        return td_fail(TD_ERR_INVALID,
                       "file://: the path must begin with a slash, as in "
                       "file:///tmp/job; \"%s\" stands where a host would",
                       url->host);
    if (!url->path[0])
        return td_fail(TD_ERR_INVALID, "file://: the path is missing; it is written file:///path");
    TD_TRY(given_or_fail(url, options, &world->rank, &world->world_size));
    snprintf(state->address, sizeof state->address, "file %.500s", url->path);
    TD_TRY(td_file_store_open(url->path, &world->store));
    return td_store_set_timeout(world->store, options->timeout_ms);
}
