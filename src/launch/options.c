/* What tdrun was asked to do; see options.h.
 *
 * The flags are torchrun's. A flag whose meaning depends on another one is kept as text in `struct
 * raw` while the command line is read, and gets its meaning in the end. */
#include "launch/options.h"

#include "base/auth.h"
#include "base/fail.h"
#include "base/host.h"
#include "base/text.h"
#include "launch/flags.h"
#include "launch/hosts.h"
#include "os/address.h"

#include <stdlib.h>
#include <string.h>

enum { PORT_BASE = 15000, PORT_RANGE = 15000 }; /* below those that systems give away */
enum {
    REPLACEMENTS = 10
}; /* of each worker: for a long job, but not for a program that always fails */
enum {
    DEFAULT_PORT = 29500,
    JOIN_TIMEOUT_S = 600,
    LAST_CALL_TIMEOUT_S = 30,
    SHUTDOWN_TIMEOUT_S = 30
};

struct raw {
    struct td__run_options options; /* those that are final when they are read */
    const char *nnodes, *nproc, *master_addr, *backend, *endpoint, *conf;
    const char *hosts, *hostfile, *on_failure;
    const char *redirects, *tee, *filter, *signals, *numa;
    int node_rank, master_port; /* -1: not given */
    bool standalone;
    double monitor_interval;
};

/* ---- The table ------------------------------------------------------------------------------- */

/* --pass-local-rank[=NAME], and --use-env, which takes it back. */
static td_status set_local_rank(const struct td__flag *flag, const char *value, void *target)
{
    (void)flag;
    const char *name = value ? value + (strncmp(value, "--", 2) ? 0 : 2) : "local_rank";
    if (!*name || name[0] == '-' ||
        name[strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")])
        return td_fail(TD_ERR_INVALID,
                       "\"%s\" is not the name of an argument, as local_rank or local-rank is",
                       value);
    ((struct raw *)target)->options.local_rank_name = name;
    return TD_OK;
}

static td_status set_use_env(const struct td__flag *flag, const char *value, void *target)
{
    (void)flag;
    (void)value;
    ((struct raw *)target)->options.local_rank_name = NULL;
    return TD_OK;
}

/* Its former name. */
static td_status set_keep_going(const struct td__flag *flag, const char *value, void *target)
{
    (void)flag;
    (void)value;
    (void)target;
    return td_fail(TD_ERR_INVALID, "this is now --on-failure shrink, and with --max-restarts "
                                   "--on-failure replace");
}

static td_status set_filled_text(const struct td__flag *flag, const char *value, void *target)
{
    return *value ? td__flag_set_text(flag, value, target)
                  : td_fail(TD_ERR_INVALID, "the value is empty");
}

#define RAW(field) .offset = offsetof(struct raw, field)
#define OPTION(field) .offset = offsetof(struct raw, options.field)

static const struct td__flag flags[] = {
    {"nnodes", 0, "N|MIN:MAX", "nodes of the job (1)", td__flag_set_text, RAW(nnodes)},
    {"nproc-per-node", 0, "N|auto|cpu|gpu", "workers on this node (1)", td__flag_set_text,
     RAW(nproc)},
    {"node-rank", 0, "N", "number of this node among the nodes (0)", td__flag_set_int,
     RAW(node_rank), 0, TD__MAX_NODES - 1},
    {"master-addr", 0, "HOST", "node 0, as the other nodes reach it (127.0.0.1)", td__flag_set_text,
     RAW(master_addr)},
    {"master-port", 0, "PORT", "port of the store on node 0 (29500)", td__flag_set_int,
     RAW(master_port), 0, 65535},
    {"local-addr", 0, "HOST", "address of this node; tells whether it owns the endpoint",
     set_filled_text, OPTION(local_addr)},
    {"standalone", 0, NULL, "one node, with its store at a free port of this host",
     td__flag_set_bool, RAW(standalone)},
    {"rdzv-backend", 0, "static|c10d", "c10d: nodes are numbered as they arrive (static)",
     td__flag_set_text, RAW(backend)},
    {"rdzv-endpoint", 0, "HOST[:PORT]", "of the store, instead of --master-addr and -port; or several, with commas, where it may move to",
     td__flag_set_text, RAW(endpoint)},
    {"rdzv-id", 0, "ID", "name of the run (none)", set_filled_text, OPTION(run_id)},
    {"rdzv-conf", 0, "KEY=VALUE,...",
     "join_timeout: seconds for MIN nodes (600), last_call_timeout (30)", td__flag_set_text,
     RAW(conf)},
    {"hosts", 0, "HOST:N,...", "start on these hosts, each with so many workers, over ssh",
     td__flag_set_text, RAW(hosts)},
    {"hostfile", 0, "FILE", "the same from a file, a host a line", td__flag_set_text,
     RAW(hostfile)},
    {"launch-agent", 0, "COMMAND", "what reaches a host, instead of ssh ($TANDEM_RSH)",
     set_filled_text, OPTION(launch_agent)},
    {"remote-tdrun", 0, "PATH", "tdrun on those hosts (at the same place as here)", set_filled_text,
     OPTION(remote_tdrun)},
    {"export", 0, "NAME[=VALUE],...", "variables for workers there, with those of Tandem, PATH …",
     set_filled_text, OPTION(exported)},
    {"on-failure", 0, "restart-all|replace|shrink", "of a worker: what the others do (restart-all)",
     td__flag_set_text, RAW(on_failure)},
    {"max-restarts", 0, "N", "how often all workers start again (0); with replace, each one (10)",
     td__flag_set_int, OPTION(max_restarts), 0, 1 << 30},
    {"spares", 0, "N", "with replace: processes of this node that wait for a rank (0)", td__flag_set_int,
     OPTION(spares), 0, TD__MAX_WORKERS},
    {.name = "keep-going", .set = set_keep_going},
    {"monitor-interval", 0, "SECONDS", "accepted; failures are noticed at once",
     td__flag_set_seconds, RAW(monitor_interval)},
    {"role", 0, "NAME", "name of these workers (default)", set_filled_text, OPTION(role)},
    {"log-dir", 0, "DIR", "where -r and -t keep output (a fresh one in $TMPDIR)", set_filled_text,
     OPTION(log_dir)},
    {"redirects", 'r', "0|1|2|3|RANK:N,...", "output to a file: 1 stdout, 2 stderr, 3 both (0)",
     td__flag_set_text, RAW(redirects)},
    {"tee", 't', "0|1|2|3|RANK:N,...", "output to a file and to the console, likewise (0)",
     td__flag_set_text, RAW(tee)},
    {"local-ranks-filter", 0, "RANK,...", "show only these workers on the console (all)",
     td__flag_set_text, RAW(filter)},
    {"postmortem-file", 0, "FILE", "after a failure: the last operations of all workers, as JSON",
     set_filled_text, OPTION(postmortem_file)},
    {"signals-to-handle", 0, "SIG,...", "passed on to the workers (SIGTERM,SIGINT,SIGHUP,SIGQUIT)",
     td__flag_set_text, RAW(signals)},
    {"shutdown-timeout", 0, "SECONDS", "between asking a worker to end and killing it (30)",
     td__flag_set_seconds, OPTION(shutdown_timeout_s)},
    {"numa-binding", 0, "node|socket|exclusive|core-complex", "which CPUs a worker may use (all)",
     td__flag_set_text, RAW(numa)},
    {"module", 'm', NULL, "the program is a Python module: python3 -u -m NAME", td__flag_set_bool,
     OPTION(module)},
    {"run-path", 0, NULL, "the program is a Python script, whatever its name", td__flag_set_bool,
     OPTION(run_path)},
    {"no-python", 0, NULL, "execute the program as it is, a script *.py too", td__flag_set_bool,
     OPTION(no_python)},
    {.name = "pass-local-rank",
     .argument = "[=NAME]",
     .help = "give workers --local_rank=N (--NAME=N) as first argument",
     .set = set_local_rank},
    {.name = "use-env",
     .help = "do not; workers find it in LOCAL_RANK (the default)",
     .set = set_use_env},
    {"help", 'h', NULL, "print this", td__flag_set_bool, OPTION(help)},
    {"version", 'V', NULL, "print the version", td__flag_set_bool, OPTION(version)},
};

static const struct td__flag_table table = {flags, sizeof flags / sizeof *flags, "PET_"};

void td__run_options_help(FILE *out)
{
    fputs(
        "usage: tdrun [options] program [arguments]\n"
        "       tdrun [options] -m module [arguments]\n"
        "       tdrun status [--json] [--watch [SECONDS]] [PID]     what the jobs of this machine do\n"
        "       tdrun postmortem [--json] FILE...     the last operations in files of TANDEM_FLIGHT\n"
        "       tdrun drain HOST|NODE     move the workers of a node away, before maintenance\n"
        "       tdrun doctor [options]     what is wrong with this machine, or between nodes\n\n"
        "Starts a program in several processes, on one machine or on several (once on each), and\n"
        "watches over them: the first failure ends the others (but see --on-failure), and nothing\n"
        "outlives tdrun.\n\n"
        "    tdrun --standalone --nproc-per-node 4 ./train --epochs 10\n"
        "    tdrun --standalone --nproc-per-node 4 train.py --epochs 10\n"
        "    tdrun --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 8 ./train\n"
        "    tdrun --hosts host0:8,host1:8 ./train\n\n",
        out);
    td__flags_print(&table, out);
    fputs(
        "\nHyphens and underscores are the same, and PET_NPROC_PER_NODE=4 in the environment is\n"
        "the default of --nproc-per-node; likewise for the others. Nodes on several hosts prove to\n"
        "each other that they belong together: set TANDEM_SECRET to the same text everywhere.\n"
        "Under Slurm, srun --ntasks-per-node=1 tdrun needs none of these: the nodes, their numbers,\n"
        "the address of the first one and the secret are found by Slurm's variables.\n",
        out);
}

/* ---- Putting it together ----------------------------------------------------------------------- */

static void note(struct td__run_options *options, const char *text)
{
    td__text_add(options->notes, sizeof options->notes, "tdrun: %s\n", text);
}

static td_status finish_output(const struct raw *raw, struct td__run_options *options)
{
    size_t count = (size_t)options->nproc;
    options->redirect = calloc(count, sizeof *options->redirect);
    options->tee = calloc(count, sizeof *options->tee);
    options->shown = malloc(count * sizeof *options->shown);
    if (!options->redirect || !options->tee || !options->shown)
        return td__fail_nomem("options");
    memset(options->shown, true, count);
    if (raw->redirects)
        TD_TRY(td__take_streams("redirects", raw->redirects, options->nproc, options->redirect));
    if (raw->tee)
        TD_TRY(td__take_streams("tee", raw->tee, options->nproc, options->tee));
    if (raw->filter)
        TD_TRY(td__take_filter(raw->filter, options->nproc, options->shown));
    if (options->log_dir && !raw->redirects && !raw->tee)
        note(options, "--log-dir has no effect without --redirects or --tee");
    return TD_OK;
}

static td_status finish_failures(const struct raw *raw, struct td__run_options *options)
{
    if (raw->on_failure)
        TD_TRY(td__take_on_failure(raw->on_failure, &options->on_failure));
    if (options->on_failure == TD__SHRINK && options->max_restarts > 0)
        return td_fail(TD_ERR_INVALID,
                       "--on-failure shrink goes on without a worker that failed, so that "
                       "--max-restarts %d has no place there; replace starts it again",
                       options->max_restarts);
    if (options->spares && options->on_failure != TD__REPLACE)
        return td_fail(TD_ERR_INVALID,
                       "--spares %d: a spare takes the rank of a worker that has died while the others "
                       "go on; with --on-failure %s %s, so that it has no use: --on-failure replace",
                       options->spares, td__on_failure_name(options->on_failure),
                       options->on_failure == TD__SHRINK ? "no worker is replaced"
                                                         : "all workers end and start again");
    if (options->spares && options->local_rank_name)
        return td_fail(TD_ERR_INVALID,
                       "--spares %d: a spare does not know its local rank when it is started, so "
                       "that --pass-local-rank cannot put it among its arguments",
                       options->spares);
    if (options->max_restarts < 0)
        options->max_restarts = options->on_failure == TD__REPLACE ? REPLACEMENTS : 0;
    return TD_OK;
}

/* --hosts: what the flags say of workers is for the launchers there, this one only starts them. */
static td_status finish_hosts(const struct raw *raw, struct td__run_options *options)
{
    const char *rsh = getenv("TANDEM_RSH");
    uint16_t number;
    if (raw->hosts && *raw->hosts)
        TD_TRY(td__hosts_parse(raw->hosts, &options->hosts));
    if (raw->hostfile && *raw->hostfile)
        TD_TRY(td__hosts_read(raw->hostfile, &options->hosts));
    if (!options->hosts.count)
        return TD_OK;
    if (raw->standalone || raw->nnodes || raw->endpoint || raw->node_rank >= 0)
        return td_fail(
            TD_ERR_INVALID,
            "--hosts and --hostfile say how many nodes there are and which is which; "
            "--standalone, --nnodes, --node-rank and --rdzv-endpoint have no place there");
    if (!options->launch_agent && rsh && *rsh)
        options->launch_agent = rsh;
    const char *first = options->hosts.at[0].address;
    bool lonely = options->hosts.count == 1;
    snprintf(options->hosts_master, sizeof options->hosts_master, "%s",
             raw->master_addr                         ? raw->master_addr
             : td__host_is_loopback(first) && !lonely ? td__host_name()
                                                      : first);
    TD_TRY(td__random(&number, sizeof number));
    options->hosts_port = raw->master_port > 0 ? raw->master_port : PORT_BASE + number % PORT_RANGE;
    options->nproc = options->hosts.count;
    options->nnodes = options->min_nodes = 1;
    options->numa = TD__NUMA_NONE;
    options->max_restarts = 0; /* the launchers there start workers again … */
    options->spares = 0;       /* … and keep the spares */
    options->node_rank = options->port = 0;
    strcpy(options->host, "127.0.0.1");
    if (!options->run_id)
        options->run_id = "none";
    const struct raw nothing = {0};
    return finish_output(&nothing, options);
}

static td_status finish_standalone(const struct raw *raw, struct td__run_options *options)
{
    if (options->nnodes != 1)
        return td_fail(TD_ERR_INVALID, "--standalone is for one node, but --nnodes is %d",
                       options->nnodes);
    if (raw->master_addr || raw->master_port >= 0 || raw->endpoint)
        note(options, "--standalone takes a free port of this host; the address and port that "
                      "were given are not used");
    strcpy(options->host, "127.0.0.1");
    options->port = 0;
    options->node_rank = 0;
    if (!options->run_id) {
        char text[65];
        TD_TRY(td__secret_make(text)); /* random text; this one is no secret */
        snprintf(options->generated_id, sizeof options->generated_id, "%.16s", text);
        options->run_id = options->generated_id;
    }
    return TD_OK;
}

/* --rdzv-endpoint: the first one is where the store begins, the others where it may be later. */
static td_status take_endpoints(const struct raw *raw, struct td__run_options *options, int *port)
{
    for (const char *at = raw->endpoint; at; at = *at ? at + 1 : NULL) {
        char text[300];
        size_t size = strcspn(at, ",");
        struct td__store_endpoint *endpoint = &options->endpoints[options->endpoint_count];
        if (options->endpoint_count == TD__MAX_ENDPOINTS)
            return td_fail(TD_ERR_INVALID, "--rdzv-endpoint: more than %d are listed",
                           TD__MAX_ENDPOINTS);
        snprintf(text, sizeof text, "%.*s", (int)(size < sizeof text ? size : sizeof text - 1), at);
        endpoint->port = *port >= 0 ? *port : DEFAULT_PORT;
        if (!td__split_host_port(text, endpoint->host, sizeof endpoint->host, &endpoint->port))
            return td_fail(TD_ERR_INVALID, "--rdzv-endpoint: \"%s\" is not HOST or HOST:PORT", text);
        if (!options->endpoint_count++) {
            snprintf(options->host, sizeof options->host, "%s", endpoint->host);
            td__split_host_port(text, options->host, sizeof options->host, port);
        }
        at += size;
        if (!*at)
            return TD_OK;
    }
    return TD_OK;
}

static td_status finish_place(const struct raw *raw, struct td__run_options *options)
{
    bool c10d = raw->backend && !strcmp(raw->backend, "c10d");
    if (raw->backend && !c10d && strcmp(raw->backend, "static") != 0)
        return td_fail(TD_ERR_INVALID, "--rdzv-backend: \"%s\" is neither static nor c10d",
                       raw->backend);
    if (raw->standalone)
        return finish_standalone(raw, options);

    int port = raw->master_port;
    const char *host = raw->master_addr ? raw->master_addr : "127.0.0.1";
    if (!td__host_unbracket(host, options->host, sizeof options->host))
        return td_fail(TD_ERR_INVALID, "--master-addr: \"%.64s\" is not the name of a host", host);
    TD_TRY(take_endpoints(raw, options, &port));
    if (options->endpoint_count > 1 && !c10d)
        return td_fail(TD_ERR_INVALID, "--rdzv-endpoint: several of them are for nodes that come and "
                                       "go; that needs --rdzv-backend c10d");
    options->port = port >= 0 ? port : DEFAULT_PORT;
    options->node_rank = raw->node_rank;
    const struct td__given_place given = {.nnodes = raw->nnodes,
                                          .master_addr = raw->master_addr,
                                          .endpoint = raw->endpoint,
                                          .node_rank = raw->node_rank,
                                          .master_port = port,
                                          .numbered_on_arrival = c10d};
    TD_TRY(td__options_from_slurm(&given, options));
    options->port_free = port < 0 && options->nnodes == 1;
    if (options->nnodes > 1 && options->port == 0)
        return td_fail(TD_ERR_INVALID, "port 0 is a free port that the other nodes could not find; "
                                       "choose one with --master-port");
    if (!c10d && options->min_nodes < options->nnodes)
        return td_fail(TD_ERR_INVALID,
                       "--nnodes %s lets nodes come and go, so that they are numbered as they "
                       "arrive: that needs --rdzv-backend c10d",
                       raw->nnodes);
    if (options->min_nodes < options->nnodes && options->node_rank >= 0)
        return td_fail(TD_ERR_INVALID,
                       "--node-rank %d: with --nnodes %s the nodes are numbered as they arrive",
                       options->node_rank, raw->nnodes);
    if (options->node_rank < 0 && (!c10d || options->nnodes == 1))
        options->node_rank = 0;
    if (options->node_rank >= options->nnodes)
        return td_fail(TD_ERR_INVALID,
                       "--node-rank %d: the nodes are numbered from 0 to %d, as --nnodes is %d",
                       options->node_rank, options->nnodes - 1, options->nnodes);
    return TD_OK;
}

static td_status finish(const struct raw *raw, struct td__run_options *options)
{
    TD_TRY(td__take_signals(raw->signals ? raw->signals : "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
                            &options->signals));
    TD_TRY(finish_failures(raw, options));
    TD_TRY(finish_hosts(raw, options));
    if (options->hosts.count)
        return TD_OK;
    TD_TRY(td__take_nnodes(raw->nnodes ? raw->nnodes : "1", &options->min_nodes, &options->nnodes));
    TD_TRY(td__take_nproc(raw->nproc ? raw->nproc : "1", &options->nproc));
    if (options->spares > TD__MAX_WORKERS - options->nproc)
        return td_fail(TD_ERR_INVALID, "--spares %d: with %d workers a node has at most %d",
                       options->spares, options->nproc, TD__MAX_WORKERS - options->nproc);
    if (raw->numa && !td__numa_binding_parse(raw->numa, &options->numa))
        return td_fail(TD_ERR_INVALID,
                       "--numa-binding: \"%s\" is none of node, socket, exclusive and core-complex",
                       raw->numa);
    struct td__rdzv_conf conf = {
        .timeout = -1, .join_timeout = -1, .last_call_timeout = LAST_CALL_TIMEOUT_S, .is_host = -1};
    if (raw->conf)
        TD_TRY(td__take_conf(raw->conf, &conf));
    options->join_timeout_s = conf.join_timeout >= 0 ? conf.join_timeout
                              : conf.timeout >= 0    ? conf.timeout
                                                     : JOIN_TIMEOUT_S;
    options->last_call_timeout_s = conf.last_call_timeout;
    options->is_host = (int)conf.is_host;
    if (options->no_python && (options->module || options->run_path))
        return td_fail(TD_ERR_INVALID,
                       "--no-python and --%s exclude each other: a Python program needs its "
                       "interpreter",
                       options->module ? "module" : "run-path");
    TD_TRY(finish_place(raw, options));
    if (!options->run_id)
        options->run_id = "none";
    return finish_output(raw, options);
}

td_status td__run_options_parse(int argc, char **argv, struct td__run_options *options)
{
    struct raw raw = {
        .options = {.role = "default",
                    .shutdown_timeout_s = SHUTDOWN_TIMEOUT_S,
                    .max_restarts = -1},
        .node_rank = -1,
        .master_port = -1,
    };
    int rest;
    td_status status = td__flags_from_environment(&table, &raw);
    if (!status)
        status = td__flags_parse(&table, argc, argv, &raw, &rest);
    *options = raw.options;
    if (!status && (options->help || options->version))
        return TD_OK;
    if (!status)
        status = finish(&raw, options);
    if (!status && rest >= argc)
        status = td_fail(TD_ERR_INVALID, "there is no %s to start: tdrun [options] %s [arguments]",
                         options->module ? "module" : "program",
                         options->module ? "-m module" : "program");
    if (status) {
        td__run_options_free(options);
        return status;
    }
    options->program = argv + rest;
    options->flags = argv + 1;
    options->flag_count = rest - 1;
    if (rest > 1 && !strcmp(argv[rest - 1], "--"))
        options->flag_count--;
    return TD_OK;
}

void td__run_options_free(struct td__run_options *options)
{
    free(options->redirect);
    free(options->tee);
    free(options->shown);
    td__hosts_free(&options->hosts);
    options->redirect = options->tee = NULL;
    options->shown = NULL;
}

const char *td__this_host(const struct td__run_options *options)
{
    return options->local_addr ? options->local_addr : td__host_name();
}
