/* Cases of collectives; see collective_cases.h. */
#include "collective_cases.h"

#include "collective_reference.h"
#include "guarded_memory.h"
#include "runner.h"
#include "thread_sanitizer.h"
#include "ways.h"

#include <malloc.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- Processors ------------------------------------------------------------------------------ */

static int pretended;

/* Replaces the function of the C library, so that the paths for a processor a rank can be tested anywhere, if
 * slowly. */
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
    if (!pretended) {
        memset(set, 0, size);
        return syscall(SYS_sched_getaffinity, pid, size, set) < 0 ? -1 : 0;
    }
    CPU_ZERO_S(size, set);
    for (int i = 0; i < pretended; i++)
        CPU_SET_S((size_t)i, size, set);
    return 0;
}

/* ---- Worlds ---------------------------------------------------------------------------------- */

static void own_fn(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    (void)arg;
    own_combine(acc, other, count, dtype);
}

struct scene scene_open(const struct setup *setup)
{
    take_way(&(struct way){setup->transport, setup->hosts});
    pretended = setup->processors;
    /* The same memory again and again, instead of fresh pages for every case. */
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    CHECK_OK(td_init_process_group(&(td_init_options){.backend = setup->backend,
                                                      .backend_options = setup->options,
                                                      .timeout_ms = 30000 * td_test_slowness()}));
    struct scene scene = {
        .rank = td_get_rank(NULL),
        .size = td_get_world_size(NULL),
        .hosts = setup->hosts,
        .any_order = setup->any_order,
    };
    CHECK_EQ(scene.rank, td_test_rank());
    CHECK_EQ(scene.size, td_test_size());
    CHECK_OK(td_reduce_op_create(own_fn, NULL, &scene.own_op));
    CHECK_OK(td_reduce_op_create_premul_sum(factor_of(scene.rank), &scene.scaled_op));
    return scene;
}

void scene_close(struct scene *scene)
{
    td_reduce_op_destroy(scene->own_op);
    td_reduce_op_destroy(scene->scaled_op);
    CHECK_OK(td_destroy_process_group());
}

struct scene scene_of(const struct scene *world, td_group *group)
{
    struct scene scene = *world;
    scene.group = group;
    scene.rank = td_get_rank(group);
    scene.size = td_get_world_size(group);
    return scene;
}

struct scene scene_reversed(const struct scene *world)
{
    int ranks[64];
    td_group *group;
    for (int i = 0; i < world->size; i++)
        ranks[i] = world->size - 1 - i;
    CHECK_OK(td_new_group(ranks, world->size, NULL, &group));
    return scene_of(world, group);
}

bool is_rooted(td_op_kind kind)
{
    return kind == TD_OP_BROADCAST || kind == TD_OP_REDUCE || kind == TD_OP_SCATTER ||
           kind == TD_OP_GATHER;
}

bool is_reduction(td_op_kind kind)
{
    return kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE || kind == TD_OP_REDUCE_SCATTER;
}

bool is_supported(td_dtype dtype, td_reduce_op op)
{
    if (op == OWN_OP)
        return dtype == TD_F32 || dtype == TD_I64 || dtype == TD_U8 || dtype == TD_F16;
    struct td__reduction reduction = {
        .dtype = dtype, .op = op == SCALED_SUM ? TD_PREMUL_SUM : op, .factor = 1};
    return td__reduction_check(&reduction) == TD_OK;
}

bool scene_supports(const struct scene *scene, int dtype, int op)
{
    return is_supported((td_dtype)dtype, (td_reduce_op)op) &&
           !((td_reduce_op)op == OWN_OP && scene->any_order);
}

/* ---- Cases ----------------------------------------------------------------------------------- */

struct flight {
    const struct scene *scene;
    struct collective_case what;
    uint64_t number;
    struct guarded in, out; /* in place: `out` has no block, and `in` is the larger of the two */
    char *input, *output;   /* as they were passed; NULL where this rank has none */
    size_t input_size, output_size;
    size_t counts[64]; /* of uneven parts */
    td_work *work;
    char text[200];
};

/* Part `part`, and where it begins in the whole; in elements. */
static size_t part_count(const struct flight *flight, int part)
{
    return flight->what.counts ? flight->counts[part] : flight->what.count;
}

static size_t part_start(const struct flight *flight, int part)
{
    size_t start = 0;
    for (int i = 0; i < part; i++)
        start += part_count(flight, i);
    return start;
}

/* The part of this rank. */
static size_t part_bytes(const struct flight *flight)
{
    return part_count(flight, flight->scene->rank) * td_dtype_size(flight->what.dtype);
}

static char *part_at(const struct flight *flight, int part)
{
    return flight->output + part_start(flight, part) * td_dtype_size(flight->what.dtype);
}

static bool chooses_arena(const struct flight *flight, int which)
{
    if (flight->what.memory != IN_BOTH)
        return flight->what.memory == IN_ARENA;
    return (flight->number * 7 + (uint64_t)flight->scene->rank * 3 + (uint64_t)which * 5) / 2 % 2;
}

static void describe(struct flight *flight)
{
    static const char *const memories[] = {"arena", "heap", "both"};
    const struct collective_case *what = &flight->what;
    const char *op = what->op == OWN_OP       ? "own"
                     : what->op == SCALED_SUM ? "scaled"
                                              : td_reduce_op_name(what->op);
    snprintf(flight->text, sizeof flight->text,
             "case %llu: %s of %zu%s %s, %s, root %d, %s, %s, rank %d of %d",
             (unsigned long long)flight->number, td_op_kind_name(what->kind),
             part_count(flight, flight->scene->rank), what->counts ? " (uneven)" : "",
             td_dtype_name(what->dtype), is_reduction(what->kind) ? op : "-", what->root,
             what->in_place ? "in place" : "out of place", memories[what->memory],
             flight->scene->rank, flight->scene->size);
}

/* How many bytes this rank gives and gets. */
static void find_sizes(struct flight *flight)
{
    td_op_kind kind = flight->what.kind;
    bool is_root = flight->scene->rank == flight->what.root;
    size_t one = part_bytes(flight);
    size_t all = part_start(flight, flight->scene->size) * td_dtype_size(flight->what.dtype);
    bool gives_all = kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER ||
                     kind == TD_OP_ALL_TO_ALL;
    bool gets_all = kind == TD_OP_GATHER || kind == TD_OP_ALL_GATHER || kind == TD_OP_ALL_TO_ALL;
    flight->input_size = gives_all ? all : one;
    flight->output_size = gets_all ? all : one;
    if (kind == TD_OP_SCATTER && !is_root)
        flight->input_size = 0;
    if ((kind == TD_OP_GATHER || kind == TD_OP_REDUCE) && !is_root)
        flight->output_size = 0;
    if (kind == TD_OP_BARRIER)
        flight->input_size = flight->output_size = 0;
}

static void make_buffers(struct flight *flight)
{
    size_t shift = flight->number % 3 * td_dtype_size(flight->what.dtype);
    size_t own = part_start(flight, flight->scene->rank) * td_dtype_size(flight->what.dtype);
    size_t in = flight->input_size, out = flight->output_size;
    bool together = (flight->what.in_place && in && out) || flight->what.kind == TD_OP_BROADCAST;
    if (together) {
        flight->in = guarded_make(in > out ? in : out, shift, chooses_arena(flight, 0));
        flight->input = flight->in.data + (in < out ? own : 0);
        flight->output = flight->in.data + (out < in ? own : 0);
        return;
    }
    flight->in = guarded_make(in, shift, chooses_arena(flight, 0));
    flight->input = flight->in.data;
    if (out || flight->number % 2) { /* some ranks without an output pass NULL */
        size_t unused = out ? out : part_bytes(flight);
        flight->out = guarded_make(unused, shift, chooses_arena(flight, 1));
        flight->output = flight->out.data;
    }
    if (!in && flight->number % 2)
        flight->input = NULL;
    if (!in && !out && flight->number % 4 == 1)
        flight->input = flight->output = NULL;
}

static td_status call(struct flight *flight, td_work **work)
{
    const struct collective_case *w = &flight->what;
    const struct scene *scene = flight->scene;
    td_group *g = scene->group;
    const void *in = flight->input;
    void *out = flight->output;
    int root = td_get_global_rank(g, w->root);
    td_reduce_op op = w->op == OWN_OP       ? scene->own_op
                      : w->op == SCALED_SUM ? scene->scaled_op
                                            : w->op;
    if (w->counts) { /* in a list that need not outlive the call */
        size_t counts[64];
        memcpy(counts, flight->counts, sizeof counts);
        td_status status = w->kind == TD_OP_ALL_GATHER
                               ? td_group_all_gather_v(out, in, counts, w->dtype, g, work)
                               : td_group_reduce_scatter_v(out, in, counts, w->dtype, op, g, work);
        memset(counts, 0xff, sizeof counts);
        return status;
    }
    switch (w->kind) {
    case TD_OP_BROADCAST:
        return td_group_broadcast(out, w->count, w->dtype, root, g, work);
    case TD_OP_REDUCE:
        return td_group_reduce(out, in, w->count, w->dtype, root, op, g, work);
    case TD_OP_ALL_REDUCE:
        return td_group_all_reduce(out, in, w->count, w->dtype, op, g, work);
    case TD_OP_SCATTER:
        return td_group_scatter(out, in, w->count, w->dtype, root, g, work);
    case TD_OP_GATHER:
        return td_group_gather(out, in, w->count, w->dtype, root, g, work);
    case TD_OP_ALL_GATHER:
        return td_group_all_gather(out, in, w->count, w->dtype, g, work);
    case TD_OP_REDUCE_SCATTER:
        return td_group_reduce_scatter(out, in, w->count, w->dtype, op, g, work);
    case TD_OP_ALL_TO_ALL:
        return td_group_all_to_all(out, in, w->count, w->dtype, g, work);
    default:
        return td_group_barrier(g, work);
    }
}

struct flight *case_start(struct scene *scene, const struct collective_case *what, bool async)
{
    struct flight *flight = calloc(1, sizeof *flight);
    CHECK(flight);
    flight->scene = scene;
    flight->what = *what;
    flight->number = ++scene->number;
    if (what->counts)
        memcpy(flight->counts, what->counts, (size_t)scene->size * sizeof *what->counts);
    describe(flight);
    find_sizes(flight);
    make_buffers(flight);
    bool gives = what->kind != TD_OP_BROADCAST || what->root == scene->rank;
    if (gives && flight->input_size)
        fill_input(what->dtype, flight->number, scene->rank, 0, flight->input_size, flight->input);
    td_status status = call(flight, async ? &flight->work : NULL);
    if (status)
        FAIL("%s: %s: %s", flight->text, td_status_name(status), td_last_error());
    return flight;
}

td_work *flight_work(const struct flight *flight)
{
    return flight->work;
}

/* ---- The expected results -------------------------------------------------------------------- */

/* The same bits on all ranks, whatever the order of the reduction. */
static void check_same(const struct flight *flight)
{
    const struct scene *scene = flight->scene;
    uint64_t own = hash_bytes(flight->output, flight->output_size), all[64];
    CHECK_OK(td_group_all_gather(all, &own, 1, TD_U64, scene->group, NULL));
    for (int i = 0; i < scene->size; i++)
        if (all[i] != own)
            FAIL("%s: other bits than on rank %d", flight->text, i);
}

static void check_reduced(const struct flight *flight)
{
    const struct scene *scene = flight->scene;
    const struct collective_case *what = &flight->what;
    struct reference reference = {
        .reduction = {.dtype = what->dtype,
                      .op = what->op == SCALED_SUM ? TD_PREMUL_SUM : what->op,
                      .user = what->op == OWN_OP ? own_fn : NULL,
                      .factor = 1},
        .scaled = what->op == SCALED_SUM,
        .size = scene->size,
        .group = scene->group,
        .number = flight->number,
        .first = what->kind == TD_OP_REDUCE_SCATTER ? part_start(flight, scene->rank) : 0,
        .count = part_count(flight, scene->rank),
        /* Two levels are used where an operation has them. */
        .hosts = scene->hosts,
    };
    char *expected = malloc(flight->output_size + 1);
    reference_expect(&reference, expected);
    if (scene->any_order && !is_exact(&reference.reduction)) {
        if (!is_close(what->dtype, flight->output, expected, reference.count))
            FAIL("%s: far from what it should be", flight->text);
    } else if (memcmp(flight->output, expected, flight->output_size) != 0) {
        size_t at = 0;
        while (flight->output[at] == expected[at])
            at++;
        FAIL("%s: element %zu is wrong", flight->text, at / td_dtype_size(what->dtype));
    }
    free(expected);
}

/* Part `part` of the input of `rank` (a rank in the group), as large as the part of `like`, is at `at`. */
static void check_part(const struct flight *flight, int rank, int part, int like, const char *at)
{
    size_t bytes = part_count(flight, like) * td_dtype_size(flight->what.dtype), wrong;
    if (!is_input(flight->what.dtype, flight->number, rank, bytes * (size_t)part, bytes, at,
                  &wrong))
        FAIL("%s: element %zu of what came from rank %d is wrong", flight->text,
             wrong / td_dtype_size(flight->what.dtype), rank);
}

static void check_output(const struct flight *flight)
{
    const struct scene *scene = flight->scene;
    int root = flight->what.root;
    switch (flight->what.kind) {
    case TD_OP_BROADCAST:
        check_part(flight, root, 0, root, flight->output);
        break;
    case TD_OP_SCATTER:
        check_part(flight, root, scene->rank, root, flight->output);
        break;
    case TD_OP_GATHER:
    case TD_OP_ALL_GATHER:
        for (int i = 0; i < scene->size; i++)
            check_part(flight, i, 0, i, part_at(flight, i));
        break;
    case TD_OP_ALL_TO_ALL:
        for (int i = 0; i < scene->size; i++)
            check_part(flight, i, scene->rank, i, part_at(flight, i));
        break;
    default:
        check_reduced(flight);
    }
}

static void check(const struct flight *flight)
{
    size_t wrong;
    if (!guarded_is_whole(&flight->in) || !guarded_is_whole(&flight->out))
        FAIL("%s: wrote beside its buffer", flight->text);
    if (flight->what.kind != TD_OP_BARRIER && flight->output_size)
        check_output(flight);
    else if (flight->out.block && !guarded_is_empty(&flight->out))
        FAIL("%s: wrote to the output of a rank that gets nothing", flight->text);
    if (flight->scene->any_order && flight->what.kind == TD_OP_ALL_REDUCE)
        check_same(flight);
    bool kept = flight->in.data != flight->output && flight->input == flight->in.data;
    if (kept && flight->input_size && flight->what.kind != TD_OP_BROADCAST &&
        (flight->out.block || !flight->output) &&
        !is_input(flight->what.dtype, flight->number, flight->scene->rank, 0, flight->input_size,
                  flight->input, &wrong))
        FAIL("%s: changed its input", flight->text);
}

void flight_finish(struct flight *flight)
{
    if (flight->work) {
        td_status status = td_work_wait(flight->work, 0);
        if (status)
            FAIL("%s: %s: %s", flight->text, td_status_name(status), td_last_error());
        td_work_release(flight->work);
    }
    check(flight);
    guarded_free(&flight->in);
    guarded_free(&flight->out);
    free(flight);
}

void flights_finish(struct flight **flights, size_t count)
{
    while (count-- > 0)
        flight_finish(flights[count]);
}

/* Under ThreadSanitizer one case of five is run, of long ones one of fifteen, chosen by chance, so that
 * every size, root and kind of memory has its turn, and the same ones on all ranks. */
static bool is_left_out(struct scene *scene, const struct collective_case *what)
{
    size_t elements = what->count * (size_t)scene->size;
    for (int i = 0; what->counts && i < scene->size; i++)
        elements += what->counts[i];
    size_t bytes = elements * td_dtype_size(what->dtype);
    if (!UNDER_TSAN || hash_word(scene->number + 1) % (bytes > 100000 ? 15 : 5) == 0)
        return false;
    scene->number++;
    return true;
}

void run_case(struct scene *scene, const struct collective_case *what)
{
    if (is_left_out(scene, what))
        return;
    flight_finish(case_start(scene, what, false));
}

/* ---- Uneven parts ---------------------------------------------------------------------------- */

/* How many elements `from` sends to `to`. */
static size_t uneven_count(uint64_t number, int from, int to, size_t most)
{
    uint64_t random = hash_word(number * 64 + (uint64_t)from * 8 + (uint64_t)to);
    return random % 4 ? random / 4 % (most + 1) : 0;
}

void run_uneven(struct scene *scene, td_dtype dtype, size_t most, enum memory memory, bool async)
{
    uint64_t number = ++scene->number;
    size_t element = td_dtype_size(dtype), inputs = 0, outputs = 0, wrong;
    size_t in_counts[64], out_counts[64];
    for (int i = 0; i < scene->size; i++) {
        inputs += in_counts[i] = uneven_count(number, scene->rank, i, most);
        outputs += out_counts[i] = uneven_count(number, i, scene->rank, most);
    }
    bool in_arena = memory == IN_BOTH ? (uint64_t)scene->rank % 2 == 0 : memory == IN_ARENA;
    bool out_in_arena = memory == IN_BOTH ? !in_arena : in_arena;
    struct guarded in = guarded_make(inputs * element, element, in_arena);
    struct guarded out = guarded_make(outputs * element, 0, out_in_arena);
    td_work *work = NULL;
    fill_input(dtype, number, scene->rank, 0, inputs * element, in.data);
    CHECK_OK(td_group_all_to_all_v(out.data, in.data, out_counts, in_counts, dtype, scene->group,
                                   async ? &work : NULL));
    memset(in_counts, 0xff, sizeof in_counts); /* the lists need not outlive the call */
    if (work)
        CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    char *at = out.data;
    for (int i = 0; i < scene->size; i++) {
        size_t before = 0, bytes = out_counts[i] * element;
        for (int k = 0; k < scene->rank; k++)
            before += uneven_count(number, i, k, most);
        if (!is_input(dtype, number, i, before * element, bytes, at, &wrong))
            FAIL("uneven all_to_all %llu of up to %zu %s: element %zu from rank %d is wrong",
                 (unsigned long long)number, most, td_dtype_name(dtype), wrong / element, i);
        at += bytes;
    }
    CHECK(guarded_is_whole(&in) && guarded_is_whole(&out));
    CHECK(is_input(dtype, number, scene->rank, 0, inputs * element, in.data, &wrong));
    guarded_free(&in);
    guarded_free(&out);
}
