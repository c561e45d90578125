/* Workers that come and go: names, ranks, references between workers that do not know each other, and deaths. */
#include "process_counts.h"
#include "rpc_world.h"

#include "base/clock.h"
#include "rpc/rpc_agent.h"

#include <tandem/dist_autograd.h>
#include <tandem/ops.h>

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const td_rpc_options dynamic = {.dynamic = true, .timeout_ms = 60000};

static _Atomic(td_rref *) kept;
static td_tensor *weight;

static td_value *keep(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    td_rref_release(atomic_exchange(&kept, td_rref_retain(td_value_rref(args[0]))));
    return td_value_nil();
}

/* The owner of the reference that was kept, and its value. */
static td_value *use(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_rref *rref = atomic_load(&kept);
    td_value *value = td_rref_to_here(rref, 0);
    return value ? TD_ARGS(td_rref_owner(rref), value) : NULL;
}

static td_value *drop(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)args, (void)count;
    td_rref_release(atomic_exchange(&kept, NULL));
    return td_value_nil();
}

/* x times the weight of this worker, on the workers `to`, `to` + 1, … up to `last`. */
static td_value *chain(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    int64_t to, last;
    CHECK_OK(td_value_int(args[1], &to));
    CHECK_OK(td_value_int(args[2], &last));
    td_tensor *y = td_mul(td_value_tensor(args[0]), weight);
    return to > last ? td_value_of(y)
                     : td_rpc_sync(rpc_name((int)to), "chain", TD_ARGS(y, to + 1, last), NULL);
}

static td_value *grad(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call, (void)count;
    int64_t context;
    CHECK_OK(td_value_int(args[0], &context));
    return td_value_of(td_item(td_sum(td_dist_autograd_grad((uint64_t)context, weight))));
}

static void begin(void)
{
    CHECK_OK(td_rpc_register("keep(x: rref)", keep, NULL));
    CHECK_OK(td_rpc_register("use()", use, NULL));
    CHECK_OK(td_rpc_register("drop()", drop, NULL));
    CHECK_OK(td_rpc_register("chain(x: tensor, to: int, last: int)", chain, NULL));
    CHECK_OK(td_rpc_register("grad(context: int)", grad, NULL));
    rpc_begin(&dynamic);
}

static void end(void)
{
    td_test_barrier();
    rpc_end();
}

static int own_rank(void)
{
    td_worker_info info;
    CHECK_OK(td_worker_find(NULL, &info));
    return info.rank;
}

/* Each joins after all others have found it missing, and leaves under the eyes of the others. */
ALL_WAYS(come_and_go, .ranks = 4)
{
    TD_SCOPE;
    int rank = td_test_rank();
    td_worker_info info;
    for (int r = 0; r < 4; r++) {
        if (r < rank) /* this worker has not joined */
            td_test_barrier();
        else if (r == rank)
            td_test_barrier(), begin();
        else {
            CHECK_FAILS(td_worker_find(rpc_name(r), &info), TD_ERR_INVALID, "no worker");
            rpc_check_fails(rpc_name(r), "add", TD_ARGS(1), NULL, TD_ERR_INVALID, "no worker");
            td_test_barrier();
        }
        td_test_barrier();
        for (int s = 0; s <= r && r >= rank; s++) {
            TD_SCOPE;
            td_value *from = td_rpc_sync(rpc_name(s), "from", TD_NO_ARGS, NULL);
            if (!from)
                FAIL("%s", td_last_error());
            CHECK_STR(td_value_text(from), rpc_name(rank));
            CHECK_OK(td_worker_find(rpc_name(s), &info));
            CHECK_STR(td_worker_name(info.rank), rpc_name(s));
        }
        td_test_barrier();
    }
    CHECK_FAILS(td_init_rpc("again", &dynamic), TD_ERR_STATE, rpc_name(rank));
    for (int r = 0; r < 3; r++) {
        if (r == rank)
            rpc_end();
        td_test_barrier();
        if (rank > r) {
            rpc_check_fails(rpc_name(r), "add", TD_ARGS(1), NULL, TD_ERR_PEER, "has left");
            CHECK_EQ(rpc_int("w3", "add", TD_ARGS(1)), 11);
        }
        td_test_barrier();
    }
    if (rank == 3)
        rpc_end();
}

/* A worker that leaves and joins again has the same name, another rank, and new links. */
ALL_WAYS(one_returns_often, .ranks = 4, .deadline_s = 60)
{
    TD_SCOPE;
    enum { TIMES = 20 };
    struct counts first = {0};
    int last = -1;
    if (td_test_rank() > 0)
        begin();
    td_test_barrier();
    for (int i = 0; i < TIMES; i++) {
        if (td_test_rank() == 0) {
            if (i == 0)
                begin();
            else
                rpc_begin(&dynamic);
            CHECK(own_rank() > last);
            last = own_rank();
            CHECK_EQ(rpc_int("w1", "add", TD_ARGS(i)), i + 10);
        }
        td_test_barrier();
        if (td_test_rank() > 0)
            CHECK_EQ(rpc_int("w0", "add", TD_ARGS(i)), i + 10);
        td_test_barrier();
        if (td_test_rank() == 0)
            rpc_end();
        td_test_barrier();
        if (td_test_rank() > 0)
            rpc_check_fails("w0", "add", TD_ARGS(1), NULL, TD_ERR_PEER, "has left");
        if (i == 2)
            first = counts_now();
        td_test_barrier();
    }
    if (td_test_rank() > 0) {
        CHECK_SOON(counts_now().descriptors <= first.descriptors);
        end();
    } else {
        td_test_barrier();
    }
}

/* A reference goes from its owner over a second worker to a third one, which has never heard of the owner. */
ALL_WAYS(references_to_strangers, .ranks = 4)
{
    TD_SCOPE;
    begin();
    td_test_barrier();
    if (td_test_rank() == 1) {
        td_tensor *large = td_full(TD_SHAPE(100000), 5, TD_F32, NULL);
        td_rref *own = td_rref_create(td_value_of(large));
        CHECK(td_rpc_sync("w2", "keep", TD_ARGS(own), NULL));
    }
    td_test_barrier();
    if (td_test_rank() == 2) {
        CHECK(td_rpc_sync("w3", "keep", TD_ARGS(atomic_load(&kept)), NULL));
        td_rref_release(atomic_exchange(&kept, NULL));
    }
    td_test_barrier();
    if (td_test_rank() == 0) {
        td_value *used = td_rpc_sync("w3", "use", TD_NO_ARGS, NULL);
        if (!used)
            FAIL("%s", td_last_error());
        CHECK_STR(td_value_text(td_value_at(used, 0)), "w1");
        CHECK_EQ(td_item(td_sum(td_value_tensor(td_value_at(used, 1)))), 500000);
        CHECK(td_rpc_sync("w3", "drop", TD_NO_ARGS, NULL));
    }
    end();
}

/* The root of a backward pass does not know the workers behind the first one. */
ALL_WAYS(gradients_of_strangers, .ranks = 4)
{
    TD_SCOPE;
    weight = td_full(TD_SHAPE(3), td_test_rank() + 2, TD_F32, NULL);
    CHECK_OK(td_tensor_set_requires_grad(weight, true));
    begin();
    td_test_barrier();
    if (td_test_rank() == 0) {
        TD_DIST_AUTOGRAD(context);
        td_value *y = td_rpc_sync("w1", "chain", TD_ARGS(weight, 2, 3), NULL);
        if (!y)
            FAIL("%s", td_last_error());
        td_tensor *loss = td_sum(td_value_tensor(y));
        CHECK_OK(td_dist_backward(context, &loss, 1, NULL));
        double product = 3 * 2 * 3 * 4 * 5;
        CHECK_EQ(td_item(td_sum(td_dist_autograd_grad(context, weight))), product / 2);
        for (int r = 1; r < 4; r++) {
            double g;
            td_value *got = td_rpc_sync(rpc_name(r), "grad", TD_ARGS((int64_t)context), NULL);
            CHECK_OK(td_value_float(got, &g));
            CHECK_EQ(g, product / (r + 2));
        }
    }
    end();
}

/* Marks in the store of the test, for tests in which a rank dies. */
static void post(const char *mark)
{
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    CHECK_OK(td_store_set(store, mark, "", 0));
    CHECK_OK(td_store_close(store));
}

static void await(const char *mark)
{
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 60000, &store));
    CHECK_OK(td_store_wait(store, &mark, 1, 0));
    CHECK_OK(td_store_close(store));
}

/* A worker is killed; its name is free for another one, and calls by name reach that. */
ALL_WAYS(a_name_is_inherited, .ranks = 4, .may_die = 8)
{
    TD_SCOPE;
    int rank = td_test_rank();
    if (rank != 2)
        begin();
    if (rank == 0) {
        await("3 is there");
        td_future *held = td_rpc_async("w3", "hold", TD_NO_ARGS, NULL);
        CHECK_EQ(rpc_int("w3", "add", TD_ARGS(1)), 11);
        int64_t since = td__now_ns();
        td_test_kill(3, SIGKILL);
        rpc_check_failed(held, TD_ERR_PEER, "hold() on worker \"w3\": it ");
        CHECK_PROMPT(since);
        rpc_check_fails("w3", "add", TD_ARGS(1), NULL, TD_ERR_PEER, "\"w3\"");
        post("3 is dead");
        await("2 is 3");
        CHECK_EQ(rpc_int("w3", "add", TD_ARGS(3)), 13);
        post("done");
    } else if (rank == 2) {
        rpc_prepare();
        await("3 is dead");
        CHECK_OK(td_init_rpc("w3", &dynamic));
        post("2 is 3");
        await("done");
    } else if (rank == 3) {
        post("3 is there");
        pause();
    } else {
        await("done");
    }
    rpc_end();
}

/* The name of a worker that is there, and of one that is stopped, cannot be taken. */
RANKS(names_are_unique, .ranks = 2)
{
    TD_SCOPE;
    rpc_prepare();
    td_worker_info info;
    if (td_test_rank() == 0)
        CHECK_OK(td_init_rpc("same", &dynamic));
    td_test_barrier();
    if (td_test_rank() == 1) {
        CHECK_FAILS(td_init_rpc("same", &dynamic), TD_ERR_MISMATCH,
                    "the worker \"same\" is there already: rank 0 (on ");
        CHECK_OK(td_init_rpc("other", &dynamic));
        CHECK_EQ(own_rank(), 2);
        CHECK_OK(td_worker_find("same", &info));
        CHECK_EQ(info.rank, 0);
        CHECK(!td_worker_name(1));
        CHECK_CONTAINS(td_last_error(), "rank 1 has left");
        CHECK(!td_worker_name(7));
        CHECK_EQ(rpc_int("same", "add", TD_ARGS(1)), 11);
    }
    end();
}

RANKS(all_are_dynamic_or_none, .ranks = 2)
{
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    rpc_prepare();
    td_rpc_options fixed = {.store = store, .world_size = 1},
                   open = {.store = store, .dynamic = true};
    if (td_test_rank() == 0)
        CHECK_OK(td_init_rpc("a", &open));
    td_test_barrier();
    if (td_test_rank() == 1)
        CHECK_FAILS(td_init_rpc("b", &fixed), TD_ERR_MISMATCH, "dynamic");
    td_test_barrier();
    if (td_test_rank() == 0)
        rpc_end();
    CHECK_FAILS(td_init_rpc("c", &(td_rpc_options){.dynamic = true, .world_size = 2}),
                TD_ERR_INVALID, "dynamic");
    CHECK_OK(td_store_close(store));
}

/* Without a launcher: the first one hosts the store, and leaves last. */
static void meet_at(const char *url)
{
    TD_SCOPE;
    td_rpc_options options = {.dynamic = true, .init_method = url};
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    rpc_prepare();
    CHECK_OK(td_init_rpc(rpc_name(td_test_rank()), &options));
    td_test_barrier();
    for (int r = 0; r < 3; r++)
        CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(r)), r + 10);
    td_test_barrier();
    rpc_end();
}

RANKS(meet_at_a_file, .ranks = 3)
{
    char url[300];
    snprintf(url, sizeof url, "file://%s/store", td_test_temp_dir());
    meet_at(url);
}

/* All at once: whichever is first hosts the store. A port that is free now may not be in a moment; so several are tried. */
RANKS(meet_at_a_port, .ranks = 3)
{
    char path[300], url[64];
    snprintf(path, sizeof path, "%s/port", td_test_temp_dir());
    if (td_test_rank() == 0) {
        td_store *store;
        CHECK_OK(td_tcp_store_open("127.0.0.1", 0, &(td_tcp_store_options){.host_server = true},
                                   &store));
        FILE *file = fopen(path, "w");
        fprintf(file, "%d", td_tcp_store_port(store));
        fclose(file);
        CHECK_OK(td_store_close(store));
    }
    td_test_barrier();
    FILE *file = fopen(path, "r");
    int port = 0;
    CHECK_EQ(fscanf(file, "%d", &port), 1);
    fclose(file);
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    meet_at(url);
}

/* Two processes with the same rank in a store of the program's: the second one fails, the first one goes on. */
RANKS(the_same_rank_twice, .ranks = 3)
{
    TD_SCOPE;
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    rpc_prepare();
    int rank = td_test_rank();
    td_rpc_options options = {.store = store, .rank = rank % 2, .world_size = 2};
    if (rank < 2)
        CHECK_OK(td_init_rpc(rpc_name(rank), &options));
    td_test_barrier();
    if (rank == 2)
        CHECK_FAILS(td_init_rpc("second", &options), TD_ERR_MISMATCH, "is rank 0 of this store");
    td_test_barrier();
    if (rank < 2) {
        CHECK_EQ(rpc_int(rpc_name(!rank), "add", TD_ARGS(1)), 11);
        rpc_end();
    }
    CHECK_OK(td_store_close(store));
}

/* A worker that ends before all have joined is named at once. */
RANKS(death_before_all_have_joined, .ranks = 2, .may_die = 2)
{
    rpc_prepare();
    td_store *store;
    CHECK_OK(td_rendezvous_store(NULL, 0, &store));
    int64_t since = td__now_ns();
    td_rpc_options options = {.store = store, .rank = td_test_rank(), .world_size = 3};
    if (td_test_rank() == 1)
        alarm(1); /* kills it while it waits */
    CHECK_FAILS(td_init_rpc(rpc_name(td_test_rank()), &options), TD_ERR_PEER, "rank 1 (on ");
    CHECK_CONTAINS(td_last_error(), "was killed by SIGALRM before all ranks had joined");
    CHECK_PROMPT(since);
    CHECK_OK(td_store_close(store));
}
