/* Values of flags that are more than a number or a text; see options.h. */
#include "launch/options.h"

#include "base/fail.h"
#include "base/number.h"
#include "launch/flags.h"
#include "launch/numa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td__take_nnodes(const char *text, int *least, int *most)
{
    char low[16] = "";
    const char *colon = strchr(text, ':');
    if (!colon) {
        if (!td__parse_int(text, 1, TD__MAX_NODES, least))
            return td_fail(TD_ERR_INVALID, "--nnodes: \"%s\" is not a number from 1 to %d", text,
                           TD__MAX_NODES);
        *most = *least;
        return TD_OK;
    }
    snprintf(low, sizeof low, "%.*s", (int)(colon - text), text);
    if (!td__parse_int(low, 1, TD__MAX_NODES, least) ||
        !td__parse_int(colon + 1, 1, TD__MAX_NODES, most))
        return td_fail(TD_ERR_INVALID, "--nnodes: \"%s\" is neither N nor MIN:MAX", text);
    if (*least > *most)
        return td_fail(TD_ERR_INVALID,
                       "--nnodes: \"%s\" has no number in it; the smaller one comes first", text);
    return TD_OK;
}

/* The GPUs that a worker will see; where there are none, the last error says why. */
static int count_gpus(void)
{
    struct td__gpus gpus;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    td__gpus_find("/dev", "/proc/driver/nvidia/gpus", &gpus);
    int visible = td__gpus_visible(&gpus, list);
    if (!gpus.count)
        td_fail(TD_ERR_INVALID,
                "--nproc-per-node gpu: there is no GPU here (no /dev/nvidia0); with cpu there is a "
                "worker for each processor");
    else if (!visible)
        td_fail(TD_ERR_INVALID,
                "--nproc-per-node gpu: CUDA_VISIBLE_DEVICES is \"%s\", which leaves none of the "
                "GPUs here, numbers 0 to %d",
                list, gpus.count - 1);
    return visible;
}

td_status td__take_nproc(const char *text, int *nproc)
{
    bool automatic = !strcmp(text, "auto"), gpu = !strcmp(text, "gpu");
    if (automatic || gpu) {
        *nproc = count_gpus();
        if (*nproc)
            return TD_OK;
        if (gpu)
            return TD_ERR_INVALID;
    }
    if (automatic || !strcmp(text, "cpu")) {
        struct td__cpus cpus;
        TD_TRY(td__cpus_allowed(&cpus));
        *nproc = td__cpus_count(&cpus);
        return TD_OK;
    }
    if (!td__parse_int(text, 1, TD__MAX_WORKERS, nproc))
        return td_fail(
            TD_ERR_INVALID,
            "--nproc-per-node: \"%s\" is neither a number from 1 to %d nor auto, cpu or gpu", text,
            TD__MAX_WORKERS);
    return TD_OK;
}

/* Cuts the next item off a list with commas; false at its end. */
static bool next_item(const char **list, char *item, size_t room)
{
    size_t size = strcspn(*list, ",");
    if (!**list)
        return false;
    snprintf(item, room, "%.*s", (int)(size < room ? size : room - 1), *list);
    *list += size + ((*list)[size] == ',');
    return true;
}

td_status td__take_conf(const char *list, struct td__rdzv_conf *conf)
{
    struct {
        const char *key;
        double *value;
    } known[] = {{"timeout", &conf->timeout},
                 {"join_timeout", &conf->join_timeout},
                 {"last_call_timeout", &conf->last_call_timeout},
                 {"close_timeout", &conf->unused},
                 {"read_timeout", &conf->unused},
                 {"keep_alive_interval", &conf->unused},
                 {"keep_alive_max_attempt", &conf->unused},
                 {"is_host", &conf->is_host}};
    const size_t count = sizeof known / sizeof *known;
    char item[128];
    while (next_item(&list, item, sizeof item)) {
        size_t key_size = strcspn(item, "="), i = 0;
        const char *value = item[key_size] ? item + key_size + 1 : "";
        while (i < count &&
               (strlen(known[i].key) != key_size || strncmp(known[i].key, item, key_size) != 0))
            i++;
        if (i == count)
            return td_fail(TD_ERR_INVALID,
                           "--rdzv-conf: there is no \"%.*s\"; known are timeout, join_timeout, "
                           "last_call_timeout, is_host, and, without effect, close_timeout, "
                           "read_timeout, keep_alive_interval and keep_alive_max_attempt",
                           (int)key_size, item);
        if (known[i].value == &conf->is_host) {
            bool yes = !strcmp(value, "1") || !strcmp(value, "true") || !strcmp(value, "True");
            if (!yes && strcmp(value, "0") != 0 && strcmp(value, "false") != 0 &&
                strcmp(value, "False") != 0)
                return td_fail(TD_ERR_INVALID, "--rdzv-conf: is_host is 1 or 0, but not \"%s\"",
                               value);
            conf->is_host = yes;
        } else if (!td__parse_seconds(value, known[i].value)) {
            return td_fail(TD_ERR_INVALID, "--rdzv-conf: %s needs a number of seconds: %s=60",
                           known[i].key, known[i].key);
        }
    }
    return TD_OK;
}

static const char *const on_failure_names[] = {"restart-all", "replace", "shrink"};

const char *td__on_failure_name(enum td__on_failure on_failure)
{
    return on_failure_names[on_failure];
}

td_status td__take_on_failure(const char *text, enum td__on_failure *on_failure)
{
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, on_failure_names[i]) != 0)
            continue;
        *on_failure = (enum td__on_failure)i;
        return TD_OK;
    }
    return td_fail(TD_ERR_INVALID,
                   "--on-failure: \"%s\" is none of restart-all (all workers start again), replace "
                   "(the one that failed does, and the others go on) and shrink (the others go on "
                   "without it)",
                   text);
}

td_status td__take_signals(const char *list, sigset_t *signals)
{
    char item[32];
    sigemptyset(signals);
    while (next_item(&list, item, sizeof item)) {
        int number = 1;
        while (number < NSIG && strcmp(td__signal_name(number), item) &&
               strcmp(td__signal_name(number) + 3, item))
            number++;
        if (number == NSIG)
            return td_fail(TD_ERR_INVALID, "--signals-to-handle: there is no signal \"%s\"", item);
        if (number == SIGKILL || number == SIGSTOP || number == SIGCHLD)
            return td_fail(TD_ERR_INVALID, "--signals-to-handle: %s cannot be handled", item);
        sigaddset(signals, number);
    }
    return TD_OK;
}

td_status td__take_streams(const char *flag, const char *text, int nproc, uint8_t *streams)
{
    int all, rank, choice;
    char item[32];
    if (td__parse_int(text, 0, 3, &all)) {
        memset(streams, all, (size_t)nproc);
        return TD_OK;
    }
    while (next_item(&text, item, sizeof item)) {
        char *colon = strchr(item, ':');
        if (colon)
            *colon = '\0';
        if (!colon || !td__parse_int(item, 0, TD__MAX_WORKERS, &rank) ||
            !td__parse_int(colon + 1, 0, 3, &choice))
            return td_fail(TD_ERR_INVALID,
                           "--%s: needs 0, 1, 2 or 3 (none, stdout, stderr, both), or one of them "
                           "for each local rank, as 0:3,1:1",
                           flag);
        if (rank >= nproc)
            return td_fail(TD_ERR_INVALID, "--%s: there is no local rank %d among %d workers", flag,
                           rank, nproc);
        streams[rank] = (uint8_t)choice;
    }
    return TD_OK;
}

td_status td__take_filter(const char *list, int nproc, bool *shown)
{
    char item[32];
    memset(shown, 0, (size_t)nproc);
    while (next_item(&list, item, sizeof item)) {
        int rank;
        if (!td__parse_int(item, 0, nproc - 1, &rank))
            return td_fail(TD_ERR_INVALID,
                           "--local-ranks-filter: \"%s\" is not a local rank from 0 to %d", item,
                           nproc - 1);
        shown[rank] = true;
    }
    return TD_OK;
}
