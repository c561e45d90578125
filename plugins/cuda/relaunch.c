/* Launches that a stream has made before; see relaunch.h. */
#include "cuda/relaunch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A launch stands in one of PROBES places behind its hash; of those that have no graph yet the rarest gives way. */
enum { PLACES = 512, PROBES = 4, MOST_GRAPHS = 128, OFTEN_BY_DEFAULT = 16, BETWEEN_MARKS = 32 };

struct relaunch {
    struct cuda_launch launch;
    unsigned count; /* 0: the place is free */
    bool refused;   /* the driver has not made a graph */
    CUgraph graph;  /* NULL: it has none; else it has all three */
    CUgraphNode node;
    CUgraphExec exec;
};

struct cuda_relaunches {
    pthread_mutex_t lock; /* who does not get it launches as ever */
    unsigned often;
    int graphs;
    CUevent mark; /* recorded every BETWEEN_MARKS launches; NULL: not yet */
    unsigned launches;
    bool device_waits; /* it had reached a mark before the next one was recorded */
    struct relaunch places[PLACES];
};

static _Atomic(int) pauses;

void td__cuda_relaunch_pause(void)
{
    atomic_fetch_add(&pauses, 1);
}

void td__cuda_relaunch_resume(void)
{
    atomic_fetch_sub(&pauses, 1);
}

struct cuda_relaunches *td__cuda_relaunches_create(void)
{
    const char *text = getenv("TANDEM_CUDA_RELAUNCH");
    long often = text && *text ? strtol(text, NULL, 10) : OFTEN_BY_DEFAULT;
    struct cuda_relaunches *relaunches = often > 0 ? calloc(1, sizeof *relaunches) : NULL;
    if (!relaunches)
        return NULL;
    pthread_mutex_init(&relaunches->lock, NULL);
    relaunches->often = often < 1 << 30 ? (unsigned)often : 1u << 30;
    return relaunches;
}

static void drop_graph(struct relaunch *relaunch)
{
    if (!relaunch->graph)
        return;
    td__cuda.cuGraphExecDestroy(relaunch->exec); /* what was launched still runs */
    td__cuda.cuGraphDestroy(relaunch->graph);
}

void td__cuda_relaunches_free(struct cuda_relaunches *relaunches)
{
    if (!relaunches)
        return;
    for (int i = 0; i < PLACES; i++)
        drop_graph(&relaunches->places[i]);
    if (relaunches->mark)
        td__cuda.cuEventDestroy_v2(relaunches->mark);
    pthread_mutex_destroy(&relaunches->lock);
    free(relaunches);
}

/* ---- Places ------------------------------------------------------------------------------------------------------- */

static bool is_same(const struct cuda_launch *a, const struct cuda_launch *b)
{
    return a->function == b->function && a->threads == b->threads && a->shared == b->shared &&
           !memcmp(a->blocks, b->blocks, sizeof a->blocks);
}

static size_t hash(const struct cuda_launch *launch)
{
    uint64_t h = (uintptr_t)launch->function;
    const unsigned numbers[] = {launch->blocks[0], launch->blocks[1], launch->blocks[2],
                                launch->threads, launch->shared};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        h = (h ^ numbers[i]) * 0x9e3779b97f4a7c15u;
    return (size_t)(h >> 40);
}

/* The place of a launch, which it may have got just now; NULL: there is none for it. */
static struct relaunch *place_of(struct cuda_relaunches *relaunches,
                                 const struct cuda_launch *launch)
{
    size_t at = hash(launch);
    struct relaunch *rarest = NULL;
    for (size_t i = 0; i < PROBES; i++) {
        struct relaunch *place = &relaunches->places[(at + i) % PLACES];
        if (place->count && is_same(&place->launch, launch))
            return place;
        if (!place->graph && (!rarest || place->count < rarest->count))
            rarest = place;
    }
    if (rarest)
        *rarest = (struct relaunch){.launch = *launch};
    return rarest;
}

/* ---- Launching ---------------------------------------------------------------------------------------------------- */

static CUDA_KERNEL_NODE_PARAMS node_of(const struct cuda_launch *launch, void **params)
{
    return (CUDA_KERNEL_NODE_PARAMS){.func = launch->function,
                                     .gridDimX = launch->blocks[0],
                                     .gridDimY = launch->blocks[1],
                                     .gridDimZ = launch->blocks[2],
                                     .blockDimX = launch->threads,
                                     .blockDimY = 1,
                                     .blockDimZ = 1,
                                     .sharedMemBytes = launch->shared,
                                     .kernelParams = params};
}

static bool make_graph(struct cuda_relaunches *relaunches, struct relaunch *relaunch,
                       const CUDA_KERNEL_NODE_PARAMS *node)
{
    CUgraph graph;
    relaunch->refused = true; /* it is not tried again, unless all of this works */
    if (relaunches->graphs == MOST_GRAPHS || td__cuda.cuGraphCreate(&graph, 0))
        return false;
    if (td__cuda.cuGraphAddKernelNode_v2(&relaunch->node, graph, NULL, 0, node) ||
        td__cuda.cuGraphInstantiateWithFlags(&relaunch->exec, graph, 0)) {
        td__cuda.cuGraphDestroy(graph);
        return false;
    }
    relaunches->graphs++;
    relaunch->graph = graph;
    relaunch->refused = false;
    return true;
}

/* Finds out whether the device waits for the host. */
static void look_at_device(struct cuda_relaunches *relaunches, CUstream stream)
{
    if (relaunches->mark)
        relaunches->device_waits = !td__cuda.cuEventQuery(relaunches->mark);
    else if (td__cuda.cuEventCreate(&relaunches->mark, CU_EVENT_DISABLE_TIMING))
        relaunches->mark = NULL;
    if (relaunches->mark && td__cuda.cuEventRecord(relaunches->mark, stream))
        relaunches->device_waits = false;
}

static bool launch_again(struct cuda_relaunches *relaunches, struct relaunch *relaunch,
                         CUstream stream, void *args)
{
    void *params[] = {args};
    CUDA_KERNEL_NODE_PARAMS node = node_of(&relaunch->launch, params);
    if (relaunch->count < relaunches->often)
        relaunch->count++;
    if (relaunch->count < relaunches->often || relaunch->refused || !relaunches->device_waits)
        return false;
    bool ready = relaunch->graph ? !td__cuda.cuGraphExecKernelNodeSetParams_v2(
                                       relaunch->exec, relaunch->node, &node)
                                 : make_graph(relaunches, relaunch, &node);
    return ready && !td__cuda.cuGraphLaunch(relaunch->exec, stream);
}

bool td__cuda_relaunch(struct cuda_relaunches *relaunches, CUstream stream,
                       const struct cuda_launch *launch, void *args)
{
    if (!relaunches || atomic_load_explicit(&pauses, memory_order_relaxed) ||
        pthread_mutex_trylock(&relaunches->lock))
        return false;
    if (relaunches->launches++ % BETWEEN_MARKS == 0)
        look_at_device(relaunches, stream);
    struct relaunch *relaunch = place_of(relaunches, launch);
    bool launched = relaunch && launch_again(relaunches, relaunch, stream, args);
    pthread_mutex_unlock(&relaunches->lock);
    return launched;
}
