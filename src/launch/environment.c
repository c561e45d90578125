/* A worker's environment; see agent.h. */
#include "launch/agent.h"

#include "os/address.h"
#include "store/spare.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

enum { MAX_OWN = 32, OWN_ROOM = 4096 };

/* The variables that are set here, "NAME=value", one after another in `text`. */
struct own {
    char text[OWN_ROOM];
    size_t used;
    const char *at[MAX_OWN];
    int count;
};

static void add(struct own *own, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct own *own, const char *format, ...)
{
    size_t room = sizeof own->text - own->used;
    va_list args;
    va_start(args, format);
    int size = vsnprintf(own->text + own->used, room, format, args);
    va_end(args);
    if (size < 0 || (size_t)size >= room || own->count == MAX_OWN)
        abort(); /* names and numbers of bounded length */
    own->at[own->count++] = own->text + own->used;
    own->used += (size_t)size + 1;
}

static void describe_rank(struct own *own, const struct td__agent *agent,
                          const struct td__worker *worker)
{
    const struct td__node_world *world = &agent->world;
    add(own, "RANK=%d", worker->rank);
    add(own, "LOCAL_RANK=%d", worker->local_rank);
    bool adopted = worker->local_rank >= agent->options->nproc;
    add(own, "ROLE_RANK=%d", adopted ? worker->rank : world->role_rank + worker->local_rank);
    add(own, "TORCHELASTIC_RESTART_COUNT=%d", agent->attempt.restarts + worker->restarts);
    if (worker->restarts)
        add(own, "TANDEM_REJOIN=1");
    if (world->late)
        add(own, "TANDEM_JOIN=1");
}

static void describe(struct own *own, const struct td__agent *agent,
                     const struct td__worker *worker)
{
    const struct td__run_options *options = agent->options;
    const struct td__node_world *world = &agent->world;
    const char *address = world->address[0] ? world->address : options->host;
    const struct td__attempt *attempt = &agent->attempt;
    char endpoint[512], flight[64];
    td__endpoint_text(address, world->port, endpoint, sizeof endpoint);
    if (worker->spare < 0)
        describe_rank(own, agent, worker);
    else
        add(own, TD__SPARE_VARIABLE "=%d", worker->far_end);
    add(own, "WORLD_SIZE=%d", world->size);
    add(own, "LOCAL_WORLD_SIZE=%d",
        worker->local_rank < options->nproc ? options->nproc : worker->local_rank + 1);
    add(own, "GROUP_RANK=%d", world->node_rank);
    add(own, "GROUP_WORLD_SIZE=%d", world->nodes);
    add(own, "ROLE_NAME=%.255s", options->role);
    add(own, "ROLE_WORLD_SIZE=%d", world->role_size);
    add(own, "MASTER_ADDR=%s", address);
    add(own, "MASTER_PORT=%d", world->port);
    add(own, "TANDEM_ROUND=%d", attempt->number);
    add(own, "TORCHELASTIC_MAX_RESTARTS=%d", options->max_restarts);
    add(own, "TORCHELASTIC_RUN_ID=%.255s", options->run_id);
    add(own, "TANDEM_AGENT_STORE=%s", endpoint);
    if (world->standbys[0])
        add(own, "TANDEM_STANDBYS=%s", world->standbys);
    if (agent->orders)
        add(own, TD__ORDERS_VARIABLE "=%d", agent->orders_fd);
    if (attempt->book.map) {
        td__flight_book_place(&attempt->book, getpid(), worker->slot, flight, sizeof flight);
        add(own, TD__FLIGHT_VARIABLE "=%s", flight);
    }
    if (agent->job->secret->made)
        add(own, "TANDEM_SECRET=%s", agent->job->secret->text);
    /* A thread for each core in each worker slows all down. */
    int threads = options->threads ? options->threads : options->nproc > 1;
    if (threads && !getenv("OMP_NUM_THREADS"))
        add(own, "OMP_NUM_THREADS=%d", threads);
}

static bool is_set_here(const struct own *own, const char *variable)
{
    size_t size = strcspn(variable, "=") + 1;
    for (int i = 0; i < own->count; i++)
        if (!strncmp(own->at[i], variable, size))
            return true;
    return false;
}

/* What this launcher has because it is a worker itself, and this worker does not get. */
static bool is_another_ones(const struct td__worker *worker, const char *variable)
{
    static const char *const names[] = {TD__SPARE_VARIABLE "=",
                                        "RANK=", "LOCAL_RANK=", "ROLE_RANK="};
    size_t count = worker->spare < 0 ? 1 : sizeof names / sizeof *names;
    for (size_t i = 0; i < count; i++)
        if (!strncmp(variable, names[i], strlen(names[i])))
            return true;
    return false;
}

void td__environment_put(const struct td__agent *agent, const struct td__worker *worker,
                         struct td__buffer *variables)
{
    struct own own = {0};
    describe(&own, agent, worker);
    td__buffer_put(variables, own.text, own.used);
}

char **td__environment_make(const struct td__agent *agent, const struct td__worker *worker)
{
    struct own own = {0};
    describe(&own, agent, worker);
    size_t inherited = 0;
    while (environ[inherited])
        inherited++;
    size_t slots = inherited + (size_t)own.count + 1, filled = 0;
    char **variables = malloc(slots * sizeof *variables + own.used);
    if (!variables)
        return NULL;
    for (size_t i = 0; i < inherited; i++)
        if (!is_set_here(&own, environ[i]) && !is_another_ones(worker, environ[i]))
            variables[filled++] = environ[i];
    char *text = (char *)(variables + slots);
    memcpy(text, own.text, own.used);
    for (int i = 0; i < own.count; i++)
        variables[filled++] = text + (own.at[i] - own.text);
    variables[filled] = NULL;
    return variables;
}
