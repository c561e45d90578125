/* The collectives in every kind of world: over sockets only, on several hosts (simulated by TANDEM_HOST_ID), with
 * other names of the backend, and with a chosen algorithm. A smaller matrix than that of test_collectives.c; what
 * a reduction gives is the same bits here as there. */
#include "collective_cases.h"

#include "reduction_reference.h"
#include "runner.h"

#include <stdio.h>

static const td_op_kind kinds[] = {
    TD_OP_BROADCAST,  TD_OP_REDUCE,         TD_OP_ALL_REDUCE, TD_OP_SCATTER, TD_OP_GATHER,
    TD_OP_ALL_GATHER, TD_OP_REDUCE_SCATTER, TD_OP_ALL_TO_ALL, TD_OP_BARRIER,
};

/* Sizes of the whole, in bytes: around the changes of algorithms, and of what hosts do inside. */
static const size_t sizes[] = {
    0,
    4,
    8,
    12,
    60,
    1020,
    2048 * 4,
    8 << 10,
    (8 << 10) + 4,
    32768,
    (32 << 10) + 8,
    64 << 10,
    100004,
    262144,
    262148,
    524288,
    (1 << 20) + 20,
};

static void run_sizes(struct scene *scene)
{
    static const td_dtype dtypes[] = {TD_F32, TD_F64, TD_F16, TD_I32};
    size_t n = (size_t)scene->size;
    for (size_t s = 0; s < LENGTH(sizes); s++)
        for (size_t k = 0; k < LENGTH(kinds); k++)
            for (int way = 0; way < 2 * MEMORIES; way++) {
                td_dtype dtype = dtypes[(s + k + (size_t)way) % LENGTH(dtypes)];
                size_t count = sizes[s] / td_dtype_size(dtype);
                if (sizes[s] > 70000 && way != (int)(s + k) % (2 * MEMORIES))
                    continue;
                if (kinds[k] != TD_OP_BROADCAST && !(kinds[k] == TD_OP_ALL_REDUCE) &&
                    kinds[k] != TD_OP_REDUCE)
                    count = (count + n - 1) / n;
                run_case(scene, &(struct collective_case){
                                    .kind = kinds[k],
                                    .dtype = dtype,
                                    .op = TD_SUM,
                                    .count = count,
                                    .root = (int)(scene->number % n),
                                    .in_place = way % 2,
                                    .memory = (enum memory)(way / 2),
                                });
            }
}

static void run_operations(struct scene *scene)
{
    static const td_op_kind reductions[] = {TD_OP_ALL_REDUCE, TD_OP_REDUCE, TD_OP_REDUCE_SCATTER};
    static const size_t counts[] = {1, 37, 5003};
    for (int dtype = TD_F32; dtype <= TD_COMPLEX128; dtype++)
        for (int op = (int)SCALED_SUM; op <= TD_PREMUL_SUM; op++)
            for (size_t i = 0; i < 9 && scene_supports(scene, dtype, op); i++)
                run_case(scene, &(struct collective_case){
                                    .kind = reductions[i % 3],
                                    .dtype = (td_dtype)dtype,
                                    .op = (td_reduce_op)op,
                                    .count = counts[i / 3],
                                    .root = (int)(scene->number % (uint64_t)scene->size),
                                    .in_place = (i + (size_t)op) % 2,
                                    .memory = (enum memory)(scene->number % MEMORIES),
                                });
}

static void run_roots(struct scene *scene)
{
    static const size_t counts[] = {0, 1, 300, 20001};
    for (size_t k = 0; k < LENGTH(kinds); k++)
        for (int root = 0; root < scene->size && is_rooted(kinds[k]); root++)
            for (size_t c = 0; c < LENGTH(counts); c++)
                run_case(scene, &(struct collective_case){
                                    .kind = kinds[k],
                                    .dtype = TD_F32,
                                    .op = TD_MIN,
                                    .count = counts[c],
                                    .root = root,
                                    .in_place = scene->number / 2 % 2,
                                    .memory = (enum memory)(scene->number % MEMORIES),
                                });
}

/* Several at once, waited for from the last to the first. */
static void run_together(struct scene *scene)
{
    struct flight *flights[LENGTH(kinds) * 3];
    for (size_t i = 0; i < LENGTH(flights); i++)
        flights[i] = case_start(scene,
                                &(struct collective_case){
                                    .kind = kinds[i % LENGTH(kinds)],
                                    .dtype = TD_BF16,
                                    .op = TD_AVG,
                                    .count = i * i * i,
                                    .root = (int)(i % (size_t)scene->size),
                                    .memory = (enum memory)(i % MEMORIES),
                                },
                                true);
    flights_finish(flights, LENGTH(flights));
}

static void run_world(void)
{
    const struct setup *setup = td_test_arg();
    struct scene scene = scene_open(setup);
    if (setup->backend)
        CHECK_STR(td_get_backend(NULL), strcmp(setup->backend, "gloo") ? setup->backend : "native");
    run_sizes(&scene);
    run_operations(&scene);
    run_roots(&scene);
    run_together(&scene);
    for (size_t i = 0; i < 6; i++)
        run_uneven(&scene, i % 2 ? TD_F32 : TD_U8, i < 3 ? 10 : 30000, (enum memory)(i % MEMORIES),
                   i % 2);

    /* A group of the same ranks in another order, and one of every second rank. */
    int ranks[64], every_second = (scene.size + 1) / 2;
    td_group *half;
    for (int i = 0; i < every_second; i++)
        ranks[i] = 2 * i;
    CHECK_OK(td_new_group(ranks, every_second, NULL, &half));
    struct scene other = scene_reversed(&scene);
    run_roots(&other);
    other = scene_of(&scene, half);
    if (scene.rank % 2 == 0)
        run_roots(&other);

    /* All but the first and the last: parts of uneven hosts. */
    td_group *inner = NULL;
    for (int i = 1; i < scene.size - 1; i++)
        ranks[i - 1] = i;
    if (scene.size > 3)
        CHECK_OK(td_new_group(ranks, scene.size - 2, NULL, &inner));
    other = scene_of(&scene, inner);
    if (scene.size > 3 && scene.rank > 0 && scene.rank < scene.size - 1) {
        if (setup->hosts && !strcmp(setup->hosts, "011222"))
            run_sizes(&other);
        run_roots(&other);
    }
    scene_close(&scene);
}

WORLD(shared_memory, 4, .transport = "shm")
WORLD(processors_enough, 3, .processors = 3)
WORLD(processors_galore, 6, .processors = 64)
WORLD(processors_too_few, 2, .processors = 1)
WORLD(tcp_1, 1, .transport = "tcp")
WORLD(tcp_2, 2, .transport = "tcp")
WORLD(tcp_3, 3, .transport = "tcp")
WORLD(tcp_5, 5, .transport = "tcp")
WORLD(tcp_8, 8, .transport = "tcp")
WORLD(sixteen, 16)
WORLD(sixteen_tcp, 16, .transport = "tcp")
WORLD(sixteen_on_hosts, 16, .hosts = "0000111122223333")
WORLD(backend_gloo, 3, .backend = "gloo")
WORLD(backend_tcp, 4, .backend = "tcp")
WORLD(option_tcp, 3, .options = "transport=tcp")
WORLD(ring, 5, .options = "transport=tcp algorithm=ring", .any_order = true)
WORLD(ring_of_hosts, 6, .hosts = "001122", .options = "algorithm=ring", .any_order = true)
WORLD(hosts_2_2, 4, .hosts = "0011")
WORLD(hosts_4_4, 8, .hosts = "00001111")
WORLD(hosts_3_2, 5, .hosts = "00011")
WORLD(hosts_1_3, 4, .hosts = "0111")
WORLD(hosts_2_2_1, 5, .hosts = "00112")
WORLD(hosts_1_2_3, 6, .hosts = "011222")
WORLD(hosts_1_1_1, 3, .hosts = "012")
WORLD(hosts_in_turns, 6, .hosts = "010101")
WORLD(hosts_mixed, 7, .hosts = "0120210")
