/* Remote calls: workers, arguments, results and errors. */
#include "process_counts.h"
#include "rpc_world.h"

#include "base/clock.h"

#include <tandem/group.h>
#include <tandem/ops.h>
#include <tandem/store.h>

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* ---- Workers --------------------------------------------------------------------------------- */

TEST(init_errors)
{
    char long_name[TD_RPC_MAX_NAME + 2] = {0};
    memset(long_name, 'a', sizeof long_name - 1);
    const char *bad[] = {NULL, "", "a b", "a\n", "ä", long_name};
    td_rpc_options one = {.world_size = 1};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_FAILS(td_init_rpc(bad[i], &one), TD_ERR_INVALID, "name");
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.backend = "gloo"}), TD_ERR_INVALID, "gloo");
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.threads = -1}), TD_ERR_INVALID, "threads");
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.timeout_ms = -1}), TD_ERR_INVALID,
                "timeout_ms");
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.reserved = {&one}}), TD_ERR_INVALID,
                "reserved");
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.max_message = 8}), TD_ERR_INVALID,
                "max_message");
    td_store *store = NULL;
    CHECK_OK(td_hash_store_open(&store));
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.store = store, .rank = 1, .world_size = 1}),
                TD_ERR_INVALID, "rank 1 of 1");
    CHECK_FAILS(td_init_rpc("a", &(td_rpc_options){.store = store, .init_method = "env://"}),
                TD_ERR_INVALID, "both");
    td_worker_info info;
    CHECK_FAILS(td_worker_find(NULL, &info), TD_ERR_STATE, "td_init_rpc()");
    CHECK(!td_worker_name(0));
    CHECK_FAILS(td_rpc_shutdown(NULL), TD_ERR_STATE, "no worker");
    CHECK_OK(td_store_close(store));
}

/* A world of one, in a store of the program's; the longest name, and all characters that it can have. */
TEST(alone_and_again)
{
    TD_SCOPE;
    char name[TD_RPC_MAX_NAME + 1] = "AZaz09_-.:/";
    memset(name + strlen(name), 'x', TD_RPC_MAX_NAME - strlen(name));
    struct counts before = {0};
    td_store *store = NULL;
    CHECK_OK(td_hash_store_open(&store));
    for (int i = 0; i < 5; i++) {
        td_rpc_options options = {.store = store, .world_size = 1};
        CHECK_OK(td_init_rpc(name, &options));
        CHECK_FAILS(td_init_rpc("other", &options), TD_ERR_STATE, name);
        td_worker_info info;
        CHECK_OK(td_worker_find(NULL, &info));
        CHECK_STR(info.name, name);
        CHECK_EQ(info.rank, 0);
        CHECK_STR(td_worker_name(0), name);
        rpc_check_fails(name, "missing", TD_NO_ARGS, NULL, TD_ERR_INVALID, "\"missing\"");
        CHECK_OK(td_rpc_shutdown(i % 2 ? NULL : &(td_rpc_shutdown_options){.now = true}));
        CHECK_FAILS(td_rpc_shutdown(NULL), TD_ERR_STATE, "no worker");
        rpc_check_fails(name, "missing", TD_NO_ARGS, NULL, TD_ERR_STATE, "td_init_rpc()");
        struct counts after = counts_now();
        if (i == 0)
            before = after; /* what the first one starts for good */
        CHECK_EQ(after.descriptors, before.descriptors);
        CHECK_EQ(after.threads, before.threads);
    }
    CHECK_OK(td_store_close(store));
}

RANKS(duplicate_names, .ranks = 3)
{
    CHECK_FAILS(td_init_rpc(td_test_rank() == 1 ? "other" : "same", NULL), TD_ERR_MISMATCH,
                "ranks 0 and 2 both have the name \"same\"");
    rpc_begin(NULL);
    rpc_end();
}

ALL_WAYS(names, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(NULL);
    for (int r = 0; r < 4; r++) {
        td_worker_info info;
        CHECK_OK(td_worker_find(rpc_name(r), &info));
        CHECK_EQ(info.rank, r);
        CHECK_STR(info.name, rpc_name(r));
        CHECK_STR(td_worker_name(r), rpc_name(r));
        td_value *from = td_rpc_sync(td_worker_name(r), "from", TD_NO_ARGS, NULL);
        CHECK(from);
        CHECK_STR(td_value_text(from), rpc_name(td_test_rank()));
    }
    td_worker_info info;
    CHECK_FAILS(td_worker_find("nobody", &info), TD_ERR_INVALID, "\"nobody\"");
    CHECK(!td_worker_name(4) && !td_worker_name(-1));
    CHECK_CONTAINS(td_last_error(), "4 workers");
    rpc_end();
}

/* Encrypted, between two hosts. */
RANKS(tls, .ranks = 4, .arg = &mixed)
{
    TD_SCOPE;
    setenv("TANDEM_TLS", "1", 1);
    rpc_begin(NULL);
    for (int i = 0; i < 4 * 20; i++)
        CHECK_EQ(rpc_int(rpc_name(i % 4), "add", TD_ARGS(i, 1)), i + 1);
    td_tensor *x = td_full(TD_SHAPE(300000), 3, TD_F32, NULL);
    td_value *back = td_rpc_sync(rpc_name((td_test_rank() + 2) % 4), "echo", TD_ARGS(x), NULL);
    CHECK(back);
    CHECK_MEM(td_tensor_data(td_value_tensor(back)), td_tensor_data(x), 300000 * 4);
    rpc_end();
}

/* ---- Arguments and results -------------------------------------------------------------------- */

static void check_echo(const char *to, td_value *value)
{
    td_value *back = td_rpc_sync(to, "echo", TD_ARGS(value), NULL);
    if (!back)
        FAIL("echo: %s", td_last_error());
    td_bytes a, b;
    CHECK_OK(td_value_print(value, &a));
    CHECK_OK(td_value_print(back, &b));
    CHECK_STR(b.data, a.data);
    td_bytes_free(&a);
    td_bytes_free(&b);
}

ALL_WAYS(results_of_all_kinds, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(NULL);
    for (int r = 0; r < 4; r++) {
        const char *to = rpc_name(r);
        check_echo(to, td_value_nil());
        check_echo(to, td_value_of((bool)true));
        check_echo(to, td_value_of(INT64_MIN));
        check_echo(to, td_value_of(0.1));
        check_echo(to, td_value_of(""));
        check_echo(to, td_value_of("grüße"));
        check_echo(to, td_value_from_bytes("\0\xff", 2));
        check_echo(to, TD_NO_ARGS);
        check_echo(to, TD_ARGS(1, "two", TD_ARGS(3.5)));
        check_echo(to, td_value_set(td_value_map(), "key", TD_ARGS(1, 2)));
        check_echo(to, td_value_of(td_full(TD_SHAPE(2, 3), 7, TD_F64, NULL)));
        check_echo(to, td_value_of(td_full(TD_SHAPE(1000, 300), 7, TD_F32, NULL)));
        check_echo(to, td_value_of(td_full(TD_SHAPE(0, 3), 7, TD_I64, NULL)));
    }
    rpc_end();
}

RANKS(arguments, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(NULL);
    const char *to = rpc_name(!td_test_rank());
    CHECK_EQ(rpc_int(to, "add", TD_ARGS(1)), 11);
    CHECK_EQ(rpc_int(to, "add", TD_ARGS(1, 2)), 3);
    td_rpc_call_options named = {.kwargs = td_value_set(td_value_map(), "y", td_value_of(5))};
    CHECK_EQ(rpc_value_int(td_rpc_sync(to, "add", TD_ARGS(1), &named)), 6);
    named.kwargs = td_value_set(named.kwargs, "x", td_value_of(7));
    CHECK_EQ(rpc_value_int(td_rpc_sync(to, "add", TD_NO_ARGS, &named)), 12);
    rpc_check_fails(to, "add", TD_ARGS(1), &named, TD_ERR_INVALID, "x");
    rpc_check_fails(to, "add", TD_NO_ARGS, NULL, TD_ERR_INVALID, "takes 1 to 2 arguments");
    rpc_check_fails(to, "add", TD_ARGS("1"), NULL, TD_ERR_INVALID, "text");
    rpc_check_fails(to, "add", TD_ARGS(1, 2, 3), NULL, TD_ERR_INVALID, to);
    named.kwargs = td_value_set(td_value_map(), "z", td_value_of(5));
    rpc_check_fails(to, "add", TD_ARGS(1), &named, TD_ERR_INVALID, "z");

    rpc_check_fails(to, "add", td_value_of(1), NULL, TD_ERR_INVALID, "not a list");
    rpc_check_fails(to, "add", NULL, NULL, TD_ERR_INVALID, "NULL");
    rpc_check_fails(to, NULL, TD_NO_ARGS, NULL, TD_ERR_INVALID, "NULL");
    rpc_check_fails(NULL, "add", TD_NO_ARGS, NULL, TD_ERR_INVALID, "NULL");
    rpc_check_fails("nobody", "add", TD_NO_ARGS, NULL, TD_ERR_INVALID, "\"nobody\"");
    rpc_check_fails(to, "nothing", TD_NO_ARGS, NULL, TD_ERR_INVALID, "no function \"nothing\"");
    rpc_check_fails(to, "add", TD_NO_ARGS, &(td_rpc_call_options){.kwargs = td_value_of(1)},
                    TD_ERR_INVALID, "not a map");
    rpc_check_fails(to, "add", TD_NO_ARGS, &(td_rpc_call_options){.timeout_ms = -5}, TD_ERR_INVALID,
                    "-5 ms");
    CHECK_EQ(rpc_int(to, "add", TD_ARGS(1)), 11);
    rpc_end();
}

RANKS(errors_of_functions, .ranks = 2)
{
    TD_SCOPE;
    rpc_begin(NULL);
    for (int r = 0; r < 2; r++)
        for (int status = TD_OK + 1; status <= TD_ERR_ABORTED; status++) {
            char part[64];
            snprintf(part, sizeof part, "worker \"w%d\": no luck %d", r, status);
            rpc_check_fails(rpc_name(r), "fail", TD_ARGS(status, strstr(part, "no")), NULL,
                            (td_status)status, part);
        }
    rpc_end();
}

/* ---- Limits ---------------------------------------------------------------------------------- */

/* Rank 1 takes larger messages than rank 0. What is too large fails where it is noticed, and the link goes on. */
ALL_WAYS(oversized, .ranks = 4)
{
    TD_SCOPE;
    bool small = td_test_rank() % 2 == 0;
    rpc_begin(&(td_rpc_options){.max_message = small ? 100000 : 1000000});
    const char *to = rpc_name(td_test_rank() ^ 1);
    char *zeros = calloc(1, 500000);
    td_value *bytes = td_value_from_bytes(zeros, 500000);
    free(zeros);
    td_tensor *tensor = td_full(TD_SHAPE(500), 1, TD_F32, NULL);
    if (small) {
        rpc_check_fails(to, "echo", TD_ARGS(bytes), NULL, TD_ERR_INVALID, "max_message");
        rpc_check_fails(to, "huge", TD_ARGS(500000), NULL, TD_ERR_INVALID, "the limit is 100000");
        rpc_check_fails(to, "huge", TD_ARGS(5000000), NULL, TD_ERR_INVALID, to);
    } else {
        rpc_check_fails(to, "echo", TD_ARGS(bytes), NULL, TD_ERR_INVALID, "the limit is 100000");
        rpc_check_fails(to, "echo", TD_ARGS(TD_ARGS(bytes, tensor)),
                        &(td_rpc_call_options){.copy = true}, TD_ERR_INVALID,
                        "the limit is 100000");
        rpc_check_fails(to, "huge", TD_ARGS(500000), NULL, TD_ERR_INVALID, "max_message");
    }
    CHECK_EQ(rpc_int(to, "add", TD_ARGS(1)), 11);
    CHECK_EQ(rpc_int(rpc_name(td_test_rank()), "add", TD_ARGS(1)), 11);
    rpc_end();
}

ALL_WAYS(nesting, .ranks = 4, .deadline_s = 40)
{
    TD_SCOPE;
    rpc_begin(&(td_rpc_options){.threads = 2});
    if (td_test_rank() == 0) {
        td_value *to = TD_ARGS("w1", "w0", "w2");
        CHECK_EQ(rpc_int("w1", "bounce", TD_ARGS(to, 255)), 255);
        rpc_check_fails("w1", "bounce", TD_ARGS(to, 256), NULL, TD_ERR_INVALID,
                        "nested deeper than 256");
        CHECK_EQ(rpc_int("w1", "bounce", TD_ARGS(to, 100)), 100);
    }
    rpc_end();
}

/* ---- Idle, and the end ------------------------------------------------------------------------ */

static double processor_ms(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
}

ALL_WAYS(idle_costs_nothing, .ranks = 4)
{
    TD_SCOPE;
    rpc_begin(NULL);
    for (int r = 0; r < 4; r++)
        CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(1)), 11);
    td_test_barrier();
    td__sleep_ns(50000000);
    double before = processor_ms();
    td__sleep_ns(1000000000);
    double used = processor_ms() - before;
    if (used > 50 * td_test_slowness())
        FAIL("an idle worker has used %.1f ms of processor time in a second", used);
    CHECK_EQ(rpc_int(rpc_name(!td_test_rank()), "add", TD_ARGS(1)), 11);
    rpc_end();
}

/* Several workers in one process, one after another: nothing is left. */
ALL_WAYS(again_and_again, .ranks = 4)
{
    struct counts before = {0};
    for (int i = 0; i < 4; i++) {
        rpc_begin(NULL);
        {
            TD_SCOPE;
            for (int r = 0; r < 4; r++)
                CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(i, r)), i + r);
        }
        rpc_end();
        struct counts after = counts_now();
        if (i == 0)
            before = after;
        CHECK_EQ(after.descriptors, before.descriptors);
        CHECK_EQ(after.threads, before.threads);
    }
}

/* The workers' store is in rank 0, not in a launcher: it may be the first one to be done. */
RANKS(store_of_rank_0, .ranks = 3)
{
    unsetenv("TANDEM_AGENT_STORE");
    char method[600];
    snprintf(method, sizeof method, "file://%s/store", td_test_temp_dir());
    for (int i = 0; i < 3; i++) {
        rpc_begin(&(td_rpc_options){
            .init_method = method, .rank = td_test_rank(), .world_size = td_test_size()});
        TD_SCOPE;
        for (int r = 0; r < 3; r++)
            CHECK_EQ(rpc_int(rpc_name(r), "add", TD_ARGS(1)), 11);
        rpc_end();
    }
}

/* ---- Beside process groups -------------------------------------------------------------------- */

ALL_WAYS(beside_collectives, .ranks = 4)
{
    TD_SCOPE;
    take_way(td_test_arg());
    CHECK_OK(td_init_process_group(NULL));
    rpc_begin(NULL);
    td_future *answers[50];
    for (int i = 0; i < 50; i++) {
        answers[i] = td_rpc_async(rpc_name(i % 4), "add", TD_ARGS(i), NULL);
        CHECK(answers[i]);
        CHECK_EQ((int)sum_on(NULL), 4);
    }
    for (int i = 0; i < 50; i++)
        CHECK_EQ(rpc_value_int(td_future_wait(answers[i], 0)), i + 10);
    rpc_end();
    CHECK_EQ((int)sum_on(NULL), 4);
    CHECK_OK(td_destroy_process_group());
}

/* ---- Results of functions with scopes ---------------------------------------------------------- */

static td_value *sum_in_a_scope(td_rpc_call *call, td_value *const *args, int count)
{
    TD_SCOPE;
    (void)call;
    int64_t sum = 0;
    for (int i = 0; i < count; i++) {
        TD_SCOPE;
        int64_t n;
        CHECK_OK(td_value_int(args[i], &n));
        sum += n;
    }
    td_tensor *ones = td_full(TD_SHAPE(2000), 1, TD_F32, NULL);
    return td_value_return(TD_ARGS(sum, td_mul_scalar(ones, (double)sum)));
}

static td_value *later_in_a_scope(td_rpc_call *call, td_value *const *args, int count)
{
    TD_SCOPE;
    (void)call, (void)count;
    return td_value_return(td_value_of(td_rpc_async(rpc_name(0), "echo", TD_ARGS(args[0]), NULL)));
}

/* nil and bools need no td_value_return(). */
static td_value *constant_in_a_scope(td_rpc_call *call, td_value *const *args, int count)
{
    TD_SCOPE;
    (void)call, (void)count;
    int64_t which;
    CHECK_OK(td_value_int(args[0], &which));
    return which == 0 ? td_value_nil() : td_value_from_bool(which == 1);
}

RANKS(results_of_functions_with_scopes, .ranks = 2)
{
    CHECK_OK(td_rpc_register("sum_in_a_scope(n...: int)", sum_in_a_scope, NULL));
    CHECK_OK(td_rpc_register("later_in_a_scope(x)", later_in_a_scope, NULL));
    CHECK_OK(td_rpc_register("constant_in_a_scope(which: int)", constant_in_a_scope, NULL));
    rpc_begin(NULL);
    if (td_test_rank() == 0) {
        TD_SCOPE;
        const char *to = rpc_name(1);
        td_value *sum = td_rpc_sync(to, "sum_in_a_scope", TD_ARGS(1, 2, 3), NULL);
        CHECK_EQ(rpc_value_int(td_value_at(sum, 0)), 6);
        CHECK_EQ(((float *)td_tensor_data(td_value_tensor(td_value_at(sum, 1))))[1999], 6);
        CHECK_EQ(rpc_int(to, "later_in_a_scope", TD_ARGS(7)), 7);
        td_value *constants[3];
        for (int i = 0; i < 3; i++)
            CHECK(constants[i] = td_rpc_sync(to, "constant_in_a_scope", TD_ARGS(i), NULL));
        bool is = false, is_not = true;
        CHECK_EQ(td_value_kind_of(constants[0]), TD_VALUE_NIL);
        CHECK_OK(td_value_bool(constants[1], &is));
        CHECK_OK(td_value_bool(constants[2], &is_not));
        CHECK(is && !is_not);
        td_value_release(td_value_retain(td_value_nil()));
        td_value_release(td_value_nil()); /* there is no last reference */
        CHECK_EQ(td_value_kind_of(td_value_nil()), TD_VALUE_NIL);
    }
    rpc_end();
}
