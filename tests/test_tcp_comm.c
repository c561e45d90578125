/* Collectives over sockets: every operation, for 1 to 9 ranks, many counts, in place and not, every algorithm by
 * its name; compared bit for bit with td__reduce_many() over the inputs in the order of the ranks. Each rank is a
 * thread, knows the inputs of all, and computes the expected results. */
#include "tcp_world.h"

#include "reduction_reference.h"
#include "runner.h"
#include "thread_sanitizer.h"

#include <stdio.h>

enum { LARGEST = 9 };

/* ---- Inputs and expected results ------------------------------------------------------------- */

/* An element of whatever fits the type. */
static void make_element(td_dtype dtype, uint64_t random, void *to)
{
    double value = (double)(int64_t)random * 0x1p-61; /* -4 to 4 */
    float single = (float)value;
    uint16_t half = dtype == TD_F16 ? td_f32_to_f16(single) : td_f32_to_bf16(single);
    float singles[2] = {single, (float)(value * 3 - 1)};
    double doubles[2] = {value, value * 3 - 1};
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        memcpy(to, singles, td_dtype_size(dtype));
        break;
    case TD_F64:
    case TD_COMPLEX128:
        memcpy(to, doubles, td_dtype_size(dtype));
        break;
    case TD_F16:
    case TD_BF16:
        memcpy(to, &half, sizeof half);
        break;
    case TD_BOOL:
        *(uint8_t *)to = (uint8_t)(random >> 40 & 3);
        break;
    default:
        memcpy(to, &random, td_dtype_size(dtype));
    }
}

/* Elements of each type, made once: those of an input follow one another in here. */
enum { POOL = 4099 };

static char pools[TD_COMPLEX128 + 1][POOL * 16];

__attribute__((constructor)) static void fill_pools(void)
{
    uint64_t state = 1;
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (size_t i = 0; i < POOL; i++)
            make_element(dtype, next_random(&state), pools[dtype] + i * td_dtype_size(dtype));
}

/* The input of `rank` in call `sequence`: `count` elements, for free(). */
static void *make_input(uint64_t sequence, int rank, td_dtype dtype, size_t count)
{
    size_t element = td_dtype_size(dtype), at = (sequence * 131 + (size_t)rank * 977) % POOL, run;
    char *input = malloc(count * element + 1);
    for (size_t i = 0; i < count; i += run, at = 0) {
        run = POOL - at < count - i ? POOL - at : count - i;
        memcpy(input + i * element, pools[dtype] + at * element, run * element);
    }
    return input;
}

/* One kind of call in one way. */
struct variant {
    bool in_place;
    bool any_order; /* the algorithm is not ordered: only exact types are compared */
    int root;
};

/* The buffers of one call, in this thread. */
struct buffers {
    void *inputs[LARGEST]; /* of all ranks */
    char *mine;            /* a copy of this rank's, to see that it was not written to */
    char *output;
    char *expected;
    size_t input_count, output_count; /* elements */
};

static bool has_parts_in(td_op_kind kind)
{
    return kind == TD_OP_SCATTER || kind == TD_OP_REDUCE_SCATTER || kind == TD_OP_ALL_TO_ALL;
}

static bool has_parts_out(td_op_kind kind)
{
    return kind == TD_OP_GATHER || kind == TD_OP_ALL_GATHER || kind == TD_OP_ALL_TO_ALL;
}

static void expect_reduced(const struct td__operation *call, struct buffers *b, int size,
                           size_t first)
{
    const void *sources[LARGEST];
    void *target = b->expected;
    for (int i = 0; i < size; i++)
        sources[i] = (char *)b->inputs[i] + first * td__operation_element(call);
    td__reduce_many(&call->reduction, &target, 1, sources, size, call->call.count);
}

static void expect(const struct td__operation *call, struct buffers *b, const struct seat *seat)
{
    size_t part = call->call.count * td__operation_element(call), own = (size_t)seat->rank * part;
    switch (call->call.kind) {
    case TD_OP_BROADCAST:
        memcpy(b->expected, b->inputs[call->call.root], part);
        break;
    case TD_OP_REDUCE:
    case TD_OP_ALL_REDUCE:
        expect_reduced(call, b, seat->size, 0);
        break;
    case TD_OP_REDUCE_SCATTER:
        expect_reduced(call, b, seat->size, (size_t)seat->rank * call->call.count);
        break;
    case TD_OP_SCATTER:
        memcpy(b->expected, (char *)b->inputs[call->call.root] + own, part);
        break;
    case TD_OP_GATHER:
    case TD_OP_ALL_GATHER:
        for (int i = 0; i < seat->size; i++)
            memcpy(b->expected + (size_t)i * part, b->inputs[i], part);
        break;
    case TD_OP_ALL_TO_ALL:
        for (int i = 0; i < seat->size; i++)
            memcpy(b->expected + (size_t)i * part, (char *)b->inputs[i] + own, part);
        break;
    default:
        break;
    }
}

static void prepare(struct td__operation *call, struct buffers *b, const struct seat *seat,
                    const struct variant *variant)
{
    size_t size = (size_t)seat->size, element = td__operation_element(call);
    b->input_count = call->call.count * (has_parts_in(call->call.kind) ? size : 1);
    b->output_count = call->call.count * (has_parts_out(call->call.kind) ? size : 1);
    size_t in = b->input_count * element, out = b->output_count * element;
    size_t own = (size_t)seat->rank * call->call.count * element;
    for (int i = 0; i < seat->size; i++)
        b->inputs[i] = make_input(call->call.sequence, i, call->reduction.dtype, b->input_count);
    b->mine = malloc(in + out + 1);
    b->output = malloc(in + out + 1);
    b->expected = malloc(out + 1);
    memset(b->output, 0xee, in + out);
    memcpy(b->mine, b->inputs[seat->rank], in);
    call->call.root = call->called_root = variant->root;
    call->call.input = b->mine;
    call->call.output = b->output;
    expect(call, b, seat);
    if (call->call.kind == TD_OP_BROADCAST) {
        if (seat->rank == call->call.root)
            memcpy(b->output, b->mine, in);
        call->call.input = b->output;
    } else if (variant->in_place && in <= out) {
        memcpy(b->output + (in < out ? own : 0), b->mine, in);
        call->call.input = b->output + (in < out ? own : 0);
    } else if (variant->in_place) {
        memcpy(b->output, b->mine, in);
        call->call.input = b->output;
        call->call.output = b->output + own;
    }
}

static void check_outcome(const struct td__operation *call, const struct buffers *b,
                          const struct seat *seat, const struct variant *variant)
{
    size_t element = td__operation_element(call), in = b->input_count * element;
    bool rooted = call->call.kind == TD_OP_REDUCE || call->call.kind == TD_OP_GATHER;
    if (memcmp(b->mine, b->inputs[seat->rank], in) != 0)
        FAIL("%s changed its input", td__operation_describe(call));
    if (rooted && seat->rank != call->call.root)
        return;
    if (variant->any_order && call->reduction.dtype < TD_I8)
        return;
    if (memcmp(call->call.output, b->expected, b->output_count * element) != 0)
        FAIL("%s: wrong on rank %d of %d: %zu %s, %s, root %d, %s", td__operation_describe(call),
             seat->rank, seat->size, call->call.count, td_dtype_name(call->reduction.dtype),
             td_reduce_op_name(call->reduction.op), call->call.root,
             variant->in_place ? "in place" : "out of place");
}

/* Under ThreadSanitizer one call of five, of long ones one of fifteen, is made, chosen by chance: others
 * in each world, but alike on all ranks. */
static bool is_left_out(const struct seat *seat, const struct td__operation *call)
{
    const char *name = seat->arg ? seat->arg : "";
    uint64_t world = (uint64_t)seat->size << 8 | (unsigned char)*name;
    uint64_t state = (world << 32 | call->call.sequence) * 0x9e3779b97f4a7c15u + 1;
    next_random(&state);
    return UNDER_TSAN && next_random(&state) % (call->call.count > 20000 ? 15 : 5);
}

static void try_call(struct seat *seat, struct td__operation call, struct variant variant)
{
    struct buffers b;
    if (is_left_out(seat, &call))
        return;
    prepare(&call, &b, seat, &variant);
    CHECK_OK(td__tcp_comm_run(seat->comm, &call));
    check_outcome(&call, &b, seat, &variant);
    for (int i = 0; i < seat->size; i++)
        free(b.inputs[i]);
    free(b.mine);
    free(b.output);
    free(b.expected);
}

/* ---- All operations, counts and sizes -------------------------------------------------------- */

static void all_kinds(struct seat *seat, size_t count, td_dtype dtype, bool any_order)
{
    for (int kind = 0; kind < TD__COLLECTIVES; kind++)
        for (int in_place = 0; in_place < 2; in_place++) {
            struct variant variant = {.in_place = in_place,
                                      .any_order = any_order,
                                      .root = (int)(seat->sequence * 7 % (unsigned)seat->size)};
            try_call(seat, seat_call(seat, kind, kind == TD_OP_BARRIER ? 0 : count, dtype),
                     variant);
        }
}

static void many_counts(struct seat *seat)
{
    static const size_t counts[] = {0,  1,  2,  3,  5,    7,    8,    9,    15,   16,
                                    17, 63, 64, 65, 1000, 1023, 8191, 8192, 16385};
    for (size_t i = 0; i < LENGTH(counts); i++)
        all_kinds(seat, counts[i], TD_F32, false);
}

TEST(every_count, .deadline_s = 60)
{
    for (int size = 1; size <= LARGEST; size++)
        tcp_world_run(size, NULL, many_counts, NULL);
}

static void large_counts(struct seat *seat)
{
    all_kinds(seat, 100003, TD_F32, false);
    all_kinds(seat, 100003, TD_BF16, false);
    try_call(seat, seat_call(seat, TD_OP_ALL_REDUCE, 1500007, TD_F16), (struct variant){0});
    try_call(seat, seat_call(seat, TD_OP_REDUCE, 1500007, TD_F64), (struct variant){0});
    try_call(seat, seat_call(seat, TD_OP_REDUCE_SCATTER, 300007, TD_F64),
             (struct variant){.in_place = true});
    if (seat->size == 3) /* so long that it goes in several turns */
        try_call(seat, seat_call(seat, TD_OP_BROADCAST, ((size_t)16 << 20) + 7, TD_U8),
                 (struct variant){0});
}

TEST(large_counts, .deadline_s = 60)
{
    for (int size = 2; size <= LARGEST; size += 1 + (size > 4))
        tcp_world_run(size, NULL, large_counts, NULL);
}

static void larger(void *acc, const void *other, size_t count, td_dtype dtype, void *arg)
{
    const int32_t *from = other;
    int32_t *to = acc;
    CHECK(dtype == TD_I32 && !arg);
    for (size_t i = 0; i < count; i++)
        to[i] = from[i] > to[i] ? from[i] : to[i];
}

static void every_reduction(struct seat *seat)
{
    static const td_op_kind kinds[] = {TD_OP_ALL_REDUCE, TD_OP_REDUCE, TD_OP_REDUCE_SCATTER};
    static const size_t counts[] = {1, 17, 20011};
    for (size_t i = 0; i < LENGTH(counts); i++)
        for (size_t k = 0; k < LENGTH(kinds); k++) {
            struct variant variant = {.in_place = k % 2};
            for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
                for (int op = TD_SUM; op <= TD_PREMUL_SUM; op++) {
                    struct td__operation call = seat_call(seat, kinds[k], counts[i], dtype);
                    call.reduction.op = op;
                    call.reduction.factor = 0.3;
                    if (!td__reduction_check(&call.reduction))
                        try_call(seat, call, variant);
                }
            struct td__operation call = seat_call(seat, kinds[k], counts[i], TD_I32);
            call.reduction.user = larger;
            try_call(seat, call, variant);
        }
}

TEST(every_reduction, .deadline_s = 60)
{
    static const int sizes[] = {1, 2, 3, 4, 7};
    for (size_t i = 0; i < LENGTH(sizes); i++)
        tcp_world_run(sizes[i], NULL, every_reduction, NULL);
}

static void by_name(struct seat *seat)
{
    static const size_t counts[] = {0, 1, 5, 1000, 30011};
    bool any_order = !strcmp(seat->arg, "ring");
    for (size_t i = 0; i < LENGTH(counts); i++) {
        all_kinds(seat, counts[i], TD_F32, any_order);
        all_kinds(seat, counts[i], TD_I16, any_order);
    }
}

TEST(every_algorithm_by_its_name, .deadline_s = 60)
{
    static const char *const names[] = {"ring",     "tree",   "halving", "doubling", "bruck",
                                        "pairwise", "direct", "scatter", "chain"};
    static const int sizes[] = {2, 4, 5, 7};
    for (size_t i = 0; i < LENGTH(names); i++)
        for (size_t k = 0; k < LENGTH(sizes); k++)
            tcp_world_run(sizes[k], names[i], by_name, names[i]);
}

/* ---- Uneven parts ---------------------------------------------------------------------------- */

/* What rank `from` sends to rank `to`. */
static size_t uneven_count(int from, int to, int scale)
{
    return (size_t)((from * 5 + to * 3) % 7 * scale);
}

static void uneven_once(struct seat *seat, int scale)
{
    struct td__operation call = seat_call(seat, TD_OP_ALL_TO_ALL, 0, TD_I32);
    size_t in[LARGEST], out[LARGEST], all_in = 0, all_out = 0;
    for (int i = 0; i < seat->size; i++) {
        all_in += in[i] = uneven_count(seat->rank, i, scale);
        all_out += out[i] = uneven_count(i, seat->rank, scale);
    }
    int32_t *input = malloc((all_in + 1) * sizeof *input);
    int32_t *output = calloc(all_out + 1, sizeof *output);
    size_t at = 0;
    for (int i = 0; i < seat->size; i++)
        for (size_t k = 0; k < in[i]; k++)
            input[at++] = seat->rank * 1000000 + i * 100000 + (int)k;
    call.call.input = input;
    call.call.output = output;
    call.call.input_counts = in;
    call.call.output_counts = out;
    CHECK_OK(td__tcp_comm_run(seat->comm, &call));
    at = 0;
    for (int i = 0; i < seat->size; i++)
        for (size_t k = 0; k < out[i]; k++)
            CHECK_EQ(output[at++], i * 1000000 + seat->rank * 100000 + (int)k);
    free(input);
    free(output);
}

static void uneven(struct seat *seat)
{
    uneven_once(seat, 1);
    uneven_once(seat, 9001);
    uneven_once(seat, 0);
}

TEST(uneven_parts)
{
    for (int size = 1; size <= LARGEST; size++) {
        tcp_world_run(size, NULL, uneven, NULL);
        tcp_world_run(size, "pairwise", uneven, NULL);
        tcp_world_run(size, "bruck", uneven, NULL);
    }
}

/* ---- The inner part of a reduction ----------------------------------------------------------- */

static void combine(struct seat *seat)
{
    enum { COUNT = 5003 };
    for (int kind = TD_OP_REDUCE; kind <= TD_OP_ALL_REDUCE; kind++) {
        struct td__operation call = seat_call(seat, kind, COUNT, TD_BF16);
        const void *sources[LARGEST];
        float *inputs[LARGEST], *data = make_input(call.call.sequence, seat->rank, TD_F32, COUNT);
        float expected[COUNT];
        void *target = expected;
        for (int i = 0; i < seat->size; i++)
            sources[i] = inputs[i] = make_input(call.call.sequence, i, TD_F32, COUNT);
        call.reduction.op = TD_AVG;
        call.call.root = seat->size - 1;
        call.call.output = data;
        CHECK_OK(td__tcp_comm_combine(seat->comm, &call));
        struct td__reduction sum = {.dtype = TD_F32, .op = TD_SUM};
        td__reduce_many(&sum, &target, 1, sources, seat->size, COUNT);
        if (kind == TD_OP_ALL_REDUCE || seat->rank == call.call.root)
            CHECK_MEM(data, expected, sizeof expected);
        for (int i = 0; i < seat->size; i++)
            free(inputs[i]);
        free(data);
    }
}

TEST(combine_leaves_accumulators)
{
    for (int size = 1; size <= LARGEST; size++)
        tcp_world_run(size, NULL, combine, NULL);
}

/* ---- The choice ------------------------------------------------------------------------------ */

TEST(choices_exist_and_keep_the_order)
{
    for (int kind = 0; kind < TD__COLLECTIVES; kind++)
        for (int32_t size = 1; size < 3000; size += 1 + size / 3)
            for (size_t bytes = 0; bytes < (size_t)1 << 40; bytes = bytes * 2 + 1) {
                const char *name = td__select(kind, size, bytes);
                const struct td__algorithm *algorithm = td__algorithm_find(kind, name);
                CHECK(algorithm);
                if (kind == TD_OP_REDUCE || kind == TD_OP_ALL_REDUCE ||
                    kind == TD_OP_REDUCE_SCATTER)
                    CHECK(algorithm->ordered);
                bool parts = kind == TD_OP_ALL_TO_ALL || kind == TD_OP_ALL_GATHER ||
                             kind == TD_OP_REDUCE_SCATTER;
                for (size_t share = 1; parts && share <= 1024; share *= 2) {
                    algorithm = td__algorithm_find(
                        kind, td__select_uneven(kind, size, bytes, bytes / share));
                    CHECK(algorithm && (algorithm->ordered || kind != TD_OP_REDUCE_SCATTER));
                }
            }
}

/* ---- Links and programs ---------------------------------------------------------------------- */

static void few_links(struct seat *seat)
{
    for (int i = 0; i < 10; i++)
        try_call(seat, seat_call(seat, TD_OP_ALL_GATHER, 5000, TD_F32), (struct variant){0});
    try_call(seat, seat_call(seat, TD_OP_BARRIER, 0, TD_F32), (struct variant){0});
    try_call(seat, seat_call(seat, TD_OP_BARRIER, 0, TD_F32), (struct variant){0});
    int links = tcp_world_links(seat);
    CHECK(links >= seat->size && links <= 3 * seat->size);
}

TEST(links_are_opened_when_needed)
{
    tcp_world_run(9, "ring", few_links, NULL);
}

/* More roots than programs are kept. */
static void many_roots(struct seat *seat)
{
    for (int i = 0; i < 100; i++) {
        struct variant variant = {.root = i % seat->size};
        try_call(seat, seat_call(seat, i % 4 ? TD_OP_BROADCAST : TD_OP_SCATTER, 3, TD_I64),
                 variant);
        try_call(seat, seat_call(seat, i % 4 ? TD_OP_REDUCE : TD_OP_GATHER, 3, TD_I64), variant);
    }
}

TEST(many_programs)
{
    tcp_world_run(9, NULL, many_roots, NULL);
}
