/* The operations. In place where possible: all_reduce, broadcast and reduce use `out` alone, the others read
 * `in` and write `out`.
 *
 *                       input                       expected output
 *     all_reduce        out: the rank's values      out: reduced
 *     broadcast         out of the root             out: the root's
 *     reduce            out: the rank's values      out of the root: reduced
 *     all_gather        in: a part                  out: part r is rank r's
 *     reduce_scatter    in: the whole               out: part `rank`, reduced
 *     all_gather_v      the same with the uneven parts of --parts
 *     reduce_scatter_v  likewise
 *     all_to_all        in: the whole               out: part s is part `rank` of rank s
 *     gather            in: a part                  out of the root: part r is rank r's
 *     scatter           in of the root: the whole   out: part `rank` of the root
 *     sendrecv          in: the rank's values       out of ranks 0 and 1: the other's */
#include "tdbench.h"

#include "base/fail.h"

#include <ctype.h>
#include <string.h>

#define DTYPE (world->options->dtype)
#define OP (world->options->op)
#define ROOT (world->options->root)

static bool is_root(const struct bench_world *world)
{
    return world->rank == ROOT;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static td_status call_barrier(struct bench_world *world, size_t count, td_work **work)
{
    (void)world;
    (void)count;
    return td_group_barrier(NULL, work);
}

static td_status call_all_reduce(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_all_reduce(world->out, world->out, count, DTYPE, OP, NULL, work);
}

static td_status call_broadcast(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_broadcast(world->out, count, DTYPE, ROOT, NULL, work);
}

static td_status call_reduce(struct bench_world *world, size_t count, td_work **work)
{
    void *output = is_root(world) ? world->out : NULL;
    return td_group_reduce(output, world->out, count, DTYPE, ROOT, OP, NULL, work);
}

static td_status call_all_gather(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_all_gather(world->out, world->in, count, DTYPE, NULL, work);
}

static td_status call_reduce_scatter(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_reduce_scatter(world->out, world->in, count, DTYPE, OP, NULL, work);
}

/* If the root has all elements, they do what broadcast and reduce do, and are in place like these. */
static bool is_one(const struct bench_world *world)
{
    return !strcmp(world->options->parts, "one");
}

/* Uneven parts of a whole of `size` times `count` elements. The random ones have 0 to 99 shares each. */
static const size_t *uneven(struct bench_world *world, size_t count)
{
    size_t whole = count * (size_t)world->size, all = 1, before = 0, done = 0;
    if (world->counts_whole == whole)
        return world->counts;
    bool even = !strcmp(world->options->parts, "even"), one = is_one(world);
    for (int r = 0; r < world->size; r++)
        all += (size_t)r * 7919 % 100 + 1;
    for (int r = 0; r < world->size; r++) {
        before += (size_t)r * 7919 % 100 + 1 + (r == world->size - 1);
        size_t end = even  ? done + count
                     : one ? (r < ROOT ? 0 : whole)
                           : (size_t)((double)whole * ((double)before / (double)all));
        world->counts[r] = end - done;
        done = end;
    }
    world->counts_whole = whole;
    return world->counts;
}

static size_t uneven_start(struct bench_world *world, size_t count, int rank)
{
    size_t start = 0;
    for (int r = 0; r < rank; r++)
        start += uneven(world, count)[r];
    return start;
}

static td_status call_all_gather_v(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_all_gather_v(world->out, is_one(world) ? world->out : world->in,
                                 uneven(world, count), DTYPE, NULL, work);
}

static td_status call_reduce_scatter_v(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_reduce_scatter_v(world->out, is_one(world) ? world->out : world->in,
                                     uneven(world, count), DTYPE, OP, NULL, work);
}

static td_status call_all_to_all(struct bench_world *world, size_t count, td_work **work)
{
    return td_group_all_to_all(world->out, world->in, count, DTYPE, NULL, work);
}

static td_status call_gather(struct bench_world *world, size_t count, td_work **work)
{
    void *output = is_root(world) ? world->out : NULL;
    return td_group_gather(output, world->in, count, DTYPE, ROOT, NULL, work);
}

static td_status call_scatter(struct bench_world *world, size_t count, td_work **work)
{
    const void *input = is_root(world) ? world->in : NULL;
    return td_group_scatter(world->out, input, count, DTYPE, ROOT, NULL, work);
}

static td_status finish(td_status status, td_work **work)
{
    if (!status && *work)
        status = td_work_wait(*work, 0);
    td_work_release(*work);
    return status;
}

static td_status send_one(struct bench_world *world, size_t count, bool async)
{
    td_work *work = NULL;
    return finish(
        td_group_send(world->in, count, DTYPE, 1 - world->rank, 0, NULL, async ? &work : NULL),
        &work);
}

static td_status receive_one(struct bench_world *world, size_t count, bool async)
{
    td_work *work = NULL;
    return finish(
        td_group_recv(world->out, count, DTYPE, 1 - world->rank, 0, NULL, async ? &work : NULL),
        &work);
}

/* A round trip of ranks 0 and 1. The second message starts after the first has arrived, so this waits for
 * the work and returns none. */
static td_status call_sendrecv(struct bench_world *world, size_t count, td_work **work)
{
    if (world->rank > 1)
        return TD_OK;
    if (world->rank == 0)
        TD_TRY(send_one(world, count, work != NULL));
    TD_TRY(receive_one(world, count, work != NULL));
    return world->rank == 1 ? send_one(world, count, work != NULL) : TD_OK;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static void fill_out(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, world->out, count);
}

static void fill_in(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, world->in, count);
}

static void fill_in_uneven(struct bench_world *world, size_t count)
{
    size_t own = uneven(world, count)[world->rank];
    bench_fill(world, world->rank, 0, is_one(world) ? world->out : world->in, own);
}

static void fill_in_parts_uneven(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, is_one(world) ? world->out : world->in,
               count * (size_t)world->size);
}

static void fill_in_parts(struct bench_world *world, size_t count)
{
    bench_fill(world, world->rank, 0, world->in, count * (size_t)world->size);
}

static int64_t check_reduced(struct bench_world *world, size_t count)
{
    return bench_check_reduced(world, 0, world->out, count);
}

static int64_t check_reduced_at_root(struct bench_world *world, size_t count)
{
    return is_root(world) ? check_reduced(world, count) : 0;
}

static int64_t check_roots(struct bench_world *world, size_t count)
{
    return bench_check(world, ROOT, 0, world->out, count);
}

static int64_t check_gathered(struct bench_world *world, size_t count)
{
    size_t part = count * td_dtype_size(DTYPE);
    int64_t wrong = 0;
    for (int r = 0; r < world->size; r++)
        wrong += bench_check(world, r, 0, world->out + (size_t)r * part, count);
    return wrong;
}

static int64_t check_gathered_at_root(struct bench_world *world, size_t count)
{
    return is_root(world) ? check_gathered(world, count) : 0;
}

static int64_t check_reduced_part(struct bench_world *world, size_t count)
{
    return bench_check_reduced(world, (size_t)world->rank * count, world->out, count);
}

static int64_t check_gathered_uneven(struct bench_world *world, size_t count)
{
    size_t element = td_dtype_size(DTYPE);
    int64_t wrong = 0;
    for (int r = 0; r < world->size; r++)
        wrong += bench_check(world, r, 0, world->out + uneven_start(world, count, r) * element,
                             uneven(world, count)[r]);
    return wrong;
}

static int64_t check_reduced_uneven(struct bench_world *world, size_t count)
{
    return bench_check_reduced(world, uneven_start(world, count, world->rank), world->out,
                               uneven(world, count)[world->rank]);
}

static int64_t check_roots_part(struct bench_world *world, size_t count)
{
    return bench_check(world, ROOT, (size_t)world->rank * count, world->out, count);
}

static int64_t check_exchanged(struct bench_world *world, size_t count)
{
    size_t part = count * td_dtype_size(DTYPE), first = (size_t)world->rank * count;
    int64_t wrong = 0;
    for (int s = 0; s < world->size; s++)
        wrong += bench_check(world, s, first, world->out + (size_t)s * part, count);
    return wrong;
}

static int64_t check_message(struct bench_world *world, size_t count)
{
    return world->rank > 1 ? 0 : bench_check(world, 1 - world->rank, 0, world->out, count);
}

/* ---- The table ------------------------------------------------------------------------------- */

const struct bench_operation bench_operations[] = {
    {"barrier", .call = call_barrier},
    {"sendrecv", .needs_input = true, .call = call_sendrecv, .fill = fill_in,
     .check = check_message},
    {"all_reduce", .reduces = true, .call = call_all_reduce, .fill = fill_out,
     .check = check_reduced},
    {"broadcast", .call = call_broadcast, .fill = fill_out, .check = check_roots},
    {"reduce", .reduces = true, .call = call_reduce, .fill = fill_out,
     .check = check_reduced_at_root},
    {"all_gather", .parts = true, .needs_input = true, .call = call_all_gather, .fill = fill_in,
     .check = check_gathered},
    {"reduce_scatter", .parts = true, .needs_input = true, .reduces = true,
     .call = call_reduce_scatter, .fill = fill_in_parts, .check = check_reduced_part},
    {"all_gather_v", .parts = true, .needs_input = true, .call = call_all_gather_v,
     .fill = fill_in_uneven, .check = check_gathered_uneven},
    {"reduce_scatter_v", .parts = true, .needs_input = true, .reduces = true,
     .call = call_reduce_scatter_v, .fill = fill_in_parts_uneven, .check = check_reduced_uneven},
    {"all_to_all", .parts = true, .needs_input = true, .call = call_all_to_all,
     .fill = fill_in_parts, .check = check_exchanged},
    {"gather", .parts = true, .needs_input = true, .call = call_gather, .fill = fill_in,
     .check = check_gathered_at_root},
    {"scatter", .parts = true, .needs_input = true, .call = call_scatter, .fill = fill_in_parts,
     .check = check_roots_part},
    {.name = NULL},
};

double bench_bus_factor(const struct bench_operation *operation, int ranks)
{
    double others = (ranks - 1.0) / ranks;
    if (operation->call == call_barrier)
        return 0;
    if (operation->call == call_all_reduce)
        return 2 * others;
    return operation->parts ? others : 1;
}

/* ---- Names ----------------------------------------------------------------------------------- */

enum { NAME_ROOM = 32 };

/* Lower-case letters only, so that allreduce, All-Reduce and all_reduce are equal. */
static void plain(const char *name, char letters[NAME_ROOM])
{
    size_t used = 0;
    for (; *name && used < NAME_ROOM - 1; name++)
        if (*name != '_' && *name != '-')
            letters[used++] = (char)tolower((unsigned char)*name);
    letters[used] = '\0';
}

/* How many letters the two have in common in the same order. */
static size_t common(const char *a, const char *b)
{
    size_t row[NAME_ROOM] = {0}, width = strlen(b);
    for (; *a; a++) {
        size_t diagonal = 0;
        for (size_t j = 1; j <= width; j++) {
            size_t above = row[j];
            if (*a == b[j - 1])
                row[j] = diagonal + 1;
            else if (row[j - 1] > row[j])
                row[j] = row[j - 1];
            diagonal = above;
        }
    }
    return row[width];
}

const struct bench_operation *bench_operation_find(const char *name,
                                                   const struct bench_operation **nearest)
{
    char typed[NAME_ROOM], known[NAME_ROOM];
    size_t best = 0;
    plain(name, typed);
    *nearest = NULL;
    for (const struct bench_operation *at = bench_operations; at->name; at++) {
        plain(at->name, known);
        if (!strcmp(typed, known))
            return at;
        /* At least two thirds of the letters of both match. */
        size_t same = common(typed, known), all = strlen(typed) + strlen(known);
        if (6 * same >= 2 * all && 1000 * same / all > best) {
            best = 1000 * same / all;
            *nearest = at;
        }
    }
    return NULL;
}
