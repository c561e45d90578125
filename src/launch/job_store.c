/* The secret and the store of a job; see node.h. */
#include "launch/node.h"

#include "base/auth.h"
#include "base/fail.h"
#include "os/address.h"
#include "os/socket.h"
#include "store/slurm.h"
#include "store/tcp_replica.h"

#include <string.h>
#include <unistd.h>

enum { HOST_MS = 30000, LINGER_MS = 5000, MOVED_MS = 500 };

td_status td__job_secret_find(const struct td__run_options *options, struct td__job_secret *secret)
{
    struct td__secret given;
    secret->made = false;
    secret->text[0] = '\0';
    TD_TRY(td__secret_load(NULL, &given));
    if (given.given)
        return TD_OK;
    if (options->nnodes == 1) {
        TD_TRY(td__secret_make(secret->text));
        secret->made = true;
        return TD_OK;
    }
    if (td__host_is_loopback(options->host) || given.insecure)
        return TD_OK;
    TD_TRY(td__slurm_adopt_secret(secret->text));
    secret->made = secret->text[0] != '\0';
    if (secret->made)
        return TD_OK;
    return td_fail(TD_ERR_AUTH,
                   "nodes on several hosts need the job's secret: set TANDEM_SECRET (or "
                   "TANDEM_SECRET_FILE) to the same text on every node, or TANDEM_INSECURE=1 on a "
                   "network without other users");
}

static td_status open_at(const struct td__run_options *options, const struct td__job_secret *secret,
                         int port, bool host, td_store **store)
{
    int64_t join_ms = (int64_t)(options->join_timeout_s * 1000);
    td_tcp_store_options store_options = {
        .host_server = host,
        .timeout_ms = host          ? HOST_MS
                      : join_ms > 0 ? join_ms
                                    : 1,
        .linger_ms = options->nnodes > 1 ? LINGER_MS : 0,
        .secret = secret->made && options->nnodes == 1 ? secret->text
                                                       : NULL, /* or it was adopted */
    };
    TD_TRY(td_tcp_store_open(options->host, port, &store_options, store));
    td_store_set_timeout(*store, HOST_MS);
    return TD_OK;
}

/* Connects to the one of several endpoints at which the store is. */
static td_status join_any(const struct td__run_options *options, int first, int64_t timeout_ms,
                          td_store **store)
{
    char text[TD__MAX_ENDPOINTS][300];
    const char *addresses[TD__MAX_ENDPOINTS];
    int count = options->endpoint_count - first;
    td_tcp_store_options store_options = {.timeout_ms = timeout_ms > 0 ? timeout_ms : 1};
    for (int i = 0; i < count; i++) {
        const struct td__store_endpoint *endpoint = &options->endpoints[first + i];
        td__endpoint_text(endpoint->host, endpoint->port, text[i], sizeof text[i]);
        addresses[i] = text[i];
    }
    TD_TRY(td__tcp_store_open_any(addresses, count, &store_options, store));
    return td_store_set_timeout(*store, HOST_MS);
}

/* Whether the endpoint of the store is an address of this host. --local-addr decides where that cannot be seen from
 * here, behind address translation. */
static bool owns_endpoint(const struct td__run_options *options)
{
    if (options->local_addr) {
        char ours[512], theirs[512];
        td__endpoint_text(options->local_addr, 0, ours, sizeof ours);
        td__endpoint_text(options->host, 0, theirs, sizeof theirs);
        return !strcmp(ours, theirs);
    }
    return td__host_is_here(options->host, td__deadline_in_ms(HOST_MS));
}

/* Hosts the store when this host owns the endpoint and no launcher here was faster. Where there are several, it may have
 * moved to another one since. */
static td_status host_or_join(const struct td__run_options *options,
                              const struct td__job_secret *secret, int *node_rank, td_store **store)
{
    *node_rank = -1;
    if (options->endpoint_count > 1) {
        struct td__error error;
        td__error_save(&error);
        if (!join_any(options, 1, MOVED_MS, store))
            return TD_OK;
        td__error_undo(&error);
    }
    if (options->is_host >= 0 ? options->is_host : owns_endpoint(options)) {
        td_status status = open_at(options, secret, options->port, true, store);
        if (status != TD_ERR_SYSTEM) {
            *node_rank = 0;
            return status;
        }
    }
    if (options->endpoint_count > 1)
        return join_any(options, 0, (int64_t)(options->join_timeout_s * 1000), store);
    return open_at(options, secret, options->port, false, store);
}

td_status td__job_store_open(const struct td__run_options *options,
                             const struct td__job_secret *secret, int *node_rank, td_store **store)
{
    if (options->node_rank < 0)
        return host_or_join(options, secret, node_rank, store);
    *node_rank = options->node_rank;
    td_status status = open_at(options, secret, options->port, options->node_rank == 0, store);
    if (status == TD_ERR_SYSTEM && options->port_free)
        status = open_at(options, secret, 0, true, store);
    return status;
}
