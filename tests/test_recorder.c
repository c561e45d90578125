/* The recorder: what calls leave in the log of their root, and queries about them meanwhile. */
#include "runner.h"

#include "base/clock.h"
#include "group/process_group.h"
#include "os/flight_read.h"

#include <tandem/launch.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static struct td__flight_page page;

static struct td__root *root(void)
{
    return td__world()->root;
}

static void read_own_page(void)
{
    struct td__flight_now now;
    td__flight_now(&now);
    td__flight_log_read(root()->flight, &now, &page);
}

static const struct td__flight_call *last_call(void)
{
    read_own_page();
    CHECK(page.count > 0);
    return &page.calls[page.count - 1];
}

static void check_last(const char *text, enum td__flight_state state)
{
    char found[TD__FLIGHT_TEXT];
    const struct td__flight_call *call = last_call();
    td__flight_describe(call, found);
    CHECK_STR(found, text);
    CHECK_EQ(call->state, state);
}

RANKS(collectives_and_messages, .ranks = 2)
{
    int rank = td_test_rank();
    float x[8] = {0}, y[16];
    CHECK_OK(td_init_process_group(NULL));
    read_own_page();
    CHECK_EQ(page.phase, TD__FLIGHT_JOINED);
    CHECK_EQ(page.rank, rank);
    CHECK_STR(page.groups[0], "world");

    CHECK_OK(td_group_all_reduce(x, x, 8, TD_F32, TD_SUM, NULL, NULL));
    check_last("all_reduce #1 of 8 f32", TD__FLIGHT_DONE);
    CHECK_OK(td_group_barrier(NULL, NULL));
    check_last("barrier #2", TD__FLIGHT_DONE);
    td_set_call_label("a label that is far too long for its place");
    CHECK_OK(td_group_broadcast(x, 2, TD_F32, 1, NULL, NULL));
    check_last("broadcast #3 of 2 f32, root 1", TD__FLIGHT_DONE);
    CHECK_STR(last_call()->label, "a label that is far too");
    td_set_call_label(NULL);
    CHECK_OK(td_group_all_to_all_v(y, x, rank ? (size_t[]){2, 2} : (size_t[]){1, 1},
                                   (size_t[]){1, 2}, TD_F32, NULL, NULL));
    check_last("all_to_all #4 of 3 f32 in uneven parts", TD__FLIGHT_DONE);
    CHECK_STR(last_call()->label, "");
    CHECK_OK(td_group_all_gather_v(y, x, (size_t[]){2, 5}, TD_F32, NULL, NULL));
    check_last("all_gather #5 of 7 f32 in uneven parts", TD__FLIGHT_DONE);
    CHECK_OK(td_group_reduce_scatter_v(x, y, (size_t[]){4, 0}, TD_F32, TD_SUM, NULL, NULL));
    check_last("reduce_scatter #6 of 4 f32 in uneven parts", TD__FLIGHT_DONE);
    CHECK_OK(td_group_all_gather_v(y, x, (size_t[]){3, 3}, TD_F32, NULL, NULL));
    check_last("all_gather #7 of 3 f32", TD__FLIGHT_DONE);
    if (rank == 0) {
        CHECK_OK(td_group_send(x, 4, TD_F32, 1, 7, NULL, NULL));
        check_last("send of 4 f32 to rank 1, tag 7", TD__FLIGHT_DONE);
    } else {
        CHECK_OK(td_group_recv(x, 8, TD_F32, TD_ANY_SOURCE, TD_ANY_TAG, NULL, NULL));
        check_last("recv of up to 8 f32 from any rank", TD__FLIGHT_DONE);
    }
    CHECK_OK(td_group_monitored_barrier(NULL, 0, false, NULL, NULL));
    check_last("monitored_barrier #1", TD__FLIGHT_DONE);
    CHECK_OK(td_destroy_process_group());
}

RANKS(asynchronous_calls, .ranks = 2)
{
    int rank = td_test_rank(), x = 0;
    td_work *work;
    CHECK_OK(td_init_process_group(NULL));
    if (rank == 0) {
        CHECK_OK(td_group_recv(&x, 1, TD_I32, 1, 0, NULL, &work));
        CHECK_EQ(last_call()->state, TD__FLIGHT_RUNNING);
        CHECK(last_call()->posted && !last_call()->waited);
        CHECK_FAILS(td_work_wait(work, 20), TD_ERR_TIMEOUT, "recv");
        CHECK(last_call()->waited);
        td_test_barrier();
        CHECK_OK(td_work_wait(work, 0));
        CHECK_EQ(last_call()->state, TD__FLIGHT_DONE);
        td_work_release(work);
    } else {
        td_test_barrier();
        CHECK_OK(td_group_send(&x, 1, TD_I32, 0, 0, NULL, NULL));
    }
    CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_I32, TD_SUM, NULL, &work));
    CHECK_OK(td_work_wait(work, 0));
    td_work_release(work);
    check_last("all_reduce #1 of 1 i32", TD__FLIGHT_DONE);
    const struct td__flight_call *call = last_call(); /* times of one look can be compared */
    CHECK(call->posted && call->started_ns >= call->queued_ns);
    CHECK_OK(td_destroy_process_group());
}

/* The page has the last 256 of all groups together. */
RANKS(groups_in_turn, .ranks = 2)
{
    enum { GROUPS = 20, ROUNDS = 50 };
    td_group *groups[GROUPS];
    float x = 1;
    CHECK_OK(td_init_process_group(NULL));
    for (int g = 0; g < GROUPS; g++)
        CHECK_OK(td_new_group(NULL, 0, NULL, &groups[g]));
    read_own_page();
    uint64_t before = page.total;
    for (int i = 0; i < GROUPS * ROUNDS; i++)
        CHECK_OK(td_group_all_reduce(&x, &x, 1, TD_F32, TD_SUM, groups[i % GROUPS], NULL));
    read_own_page();
    CHECK_EQ(page.total, before + GROUPS * ROUNDS);
    CHECK_EQ(page.count, 256);
    for (int i = 0; i < 256; i++) {
        int number = GROUPS * ROUNDS - 256 + i;
        CHECK_EQ(page.calls[i].sequence, number / GROUPS + 1);
        CHECK_EQ(page.calls[i].group, groups[number % GROUPS]->trace.name_index);
    }
    CHECK_OK(td_destroy_process_group());
}

RANKS(failures, .ranks = 2)
{
    int rank = td_test_rank(), x = 0;
    CHECK_OK(td_init_process_group(NULL));
    if (rank == 0) {
        td_set_call_timeout(50);
        CHECK_FAILS(td_group_recv(&x, 1, TD_I32, 1, 0, NULL, NULL), TD_ERR_TIMEOUT, "recv");
        read_own_page();
        CHECK_EQ(page.failure, TD_ERR_TIMEOUT);
        CHECK_CONTAINS(page.sentence, "recv of up to 4 bytes");
        CHECK_EQ(page.failure_number, page.calls[0].number);
        CHECK_EQ(page.calls[0].state, TD__FLIGHT_FAILED);
        td_set_call_timeout(0);
    }
    td_test_barrier();
    td_status status = rank ? td_group_barrier(NULL, NULL)
                            : td_group_all_reduce(&x, &x, 1, TD_I32, TD_SUM, NULL, NULL);
    CHECK_EQ(status, TD_ERR_MISMATCH);
    read_own_page();
    CHECK_EQ(page.failure, TD_ERR_MISMATCH);
    uint64_t number = page.failure_number;
    CHECK_EQ(td_group_barrier(NULL, NULL), TD_ERR_MISMATCH); /* for a reason that is known */
    read_own_page();
    CHECK_EQ(page.failure_number, number);
    CHECK_EQ(page.calls[page.count - 1].state, TD__FLIGHT_FAILED);
    td_destroy_process_group();
}

static void *wait_in_barrier(void *group)
{
    CHECK_OK(td_group_barrier(group, NULL));
    return NULL;
}

/* Two worlds in a process share its log, and their groups of the same ranks have the same key: each finds its own. */
RANKS(two_worlds_in_one_log, .ranks = 2)
{
    td_store *store;
    td_group *opened;
    pthread_t thread;
    uint64_t key, sequence;
    int64_t age;
    char text[160], path[600];
    snprintf(path, sizeof path, "%s/flight", td_test_temp_dir());
    setenv(TD__FLIGHT_VARIABLE, path, 1);
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_tcp_store_open(getenv("MASTER_ADDR"), atoi(getenv("MASTER_PORT")), NULL, &store));
    CHECK_OK(
        td_group_open(store, td_test_rank(), 2, &(td_group_options){.name = "opened"}, &opened));
    CHECK_EQ(opened->key, td__world()->key);
    CHECK(opened->root->flight == root()->flight);
    if (td_test_rank() == 0) {
        CHECK_EQ(pthread_create(&thread, NULL, wait_in_barrier, opened), 0);
        CHECK_SOON(td__recorder_oldest_running(opened->root, &key, &sequence, &age, text));
        CHECK_STR(text, "barrier #1");
        CHECK(!td__recorder_oldest_running(root(), &key, &sequence, &age, text));
        td_test_barrier();
        pthread_join(thread, NULL);
    } else {
        td_test_barrier();
        CHECK_OK(td_group_barrier(opened, NULL));
    }
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_destroy(opened));
    CHECK_OK(td_store_close(store));
}

static bool has_group(const char *name)
{
    for (int i = 0; i < TD__FLIGHT_GROUPS; i++)
        if (page.keys[i] && !strcmp(page.groups[i], name))
            return true;
    return false;
}

/* Unnamed groups have different names in the log, too. */
RANKS(names_of_unnamed_groups, .ranks = 2)
{
    td_group *first, *second, *rest;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, NULL, &first));
    CHECK_OK(td_new_group(NULL, 0, NULL, &second));
    CHECK_OK(td_group_shrink(first, NULL, &rest));
    read_own_page();
    CHECK(has_group("world"));
    CHECK(has_group("0,1#1"));
    CHECK(has_group("0,1#2"));
    CHECK(has_group("0,1#1 shrink 1"));
    CHECK_OK(td_group_barrier(second, NULL));
    CHECK_STR(page.groups[last_call()->group], "0,1#2");
    CHECK_OK(td_destroy_process_group());
    CHECK_OK(td_group_destroy(first));
    CHECK_OK(td_group_destroy(second));
    CHECK_OK(td_group_destroy(rest));
}

/* ---- Asking ---------------------------------------------------------------------------------- */

RANKS(asking_for_the_last, .ranks = 2)
{
    struct td__flight_last last;
    uint64_t key, sequence;
    int64_t age;
    char text[160];
    td_group *other;
    pthread_t thread;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_new_group(NULL, 0, &(td_group_options){.name = "other"}, &other));
    td__recorder_last(root(), td__world()->key, &last);
    CHECK_EQ(last.started, 0);
    CHECK_STR(last.text, "");
    CHECK(!td__recorder_oldest_running(root(), &key, &sequence, &age, text));
    CHECK_OK(td_group_barrier(NULL, NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    td__recorder_last(root(), td__world()->key, &last);
    CHECK_EQ(last.started, 2);
    CHECK_EQ(last.done, 2);
    CHECK(!last.running);
    CHECK_STR(last.text, "barrier #2");
    CHECK_STR(last.now, "");
    if (td_test_rank() == 0) {
        CHECK_EQ(pthread_create(&thread, NULL, wait_in_barrier, other), 0);
        CHECK_SOON((td__recorder_last(root(), other->key, &last), last.started) == 1);
        td__sleep_ns(30000000);
        td__recorder_last(root(), other->key, &last);
        CHECK_EQ(last.done, 0);
        CHECK(last.running);
        CHECK_STR(last.text, "barrier #1");
        CHECK_STR(last.now, "barrier #1 on group \"other\"");
        CHECK(last.age_ms >= 29 && last.age_ms < 60000);
        td__recorder_last(root(), 12345, &last);
        CHECK_EQ(last.started, 0);
        CHECK_STR(last.now, "barrier #1 on group \"other\"");
        CHECK(td__recorder_oldest_running(root(), &key, &sequence, &age, text));
        CHECK_EQ(key, other->key);
        CHECK_EQ(sequence, 1);
        CHECK(age >= 29);
        CHECK_STR(text, "barrier #1");
        td_test_barrier();
        pthread_join(thread, NULL);
    } else {
        td_test_barrier();
        CHECK_OK(td_group_barrier(other, NULL));
    }
    td_group_destroy(other);
    CHECK_OK(td_destroy_process_group());
}

/* More groups than there are names: each is known all the same. */
RANKS(many_groups, .ranks = 2)
{
    enum { GROUPS = 50 };
    td_group *groups[GROUPS];
    struct td__flight_last last;
    CHECK_OK(td_init_process_group(NULL));
    for (int i = 0; i < GROUPS; i++)
        CHECK_OK(td_new_group(NULL, 0, NULL, &groups[i]));
    for (int i = 0; i < GROUPS; i++)
        for (int k = 0; k <= i % 3; k++)
            CHECK_OK(td_group_barrier(groups[i], NULL));
    for (int i = 0; i < GROUPS; i++) {
        td__recorder_last(root(), groups[i]->key, &last);
        CHECK_EQ(last.started, i % 3 + 1);
        CHECK_EQ(last.done, i % 3 + 1);
    }
    for (int i = 0; i < 300; i++)
        CHECK_OK(td_group_barrier(NULL, NULL));
    td__recorder_last(root(), groups[4]->key, &last);
    CHECK_STR(last.text, "collective #2"); /* its entry was overwritten */
    for (int i = 0; i < GROUPS; i++)
        td_group_destroy(groups[i]);
    CHECK_OK(td_destroy_process_group());
}

/* Ranks that are threads of one process have a log each. */
struct rank_thread {
    td_store *store;
    int rank;
};

static void *be_a_rank(void *arg)
{
    struct rank_thread *self = arg;
    struct td__flight_last last;
    td_group *group;
    CHECK_OK(td_group_open(self->store, self->rank, 2, NULL, &group));
    for (int i = 0; i < 20; i++)
        CHECK_OK(td_group_barrier(group, NULL));
    td__recorder_last(group->root, group->key, &last);
    CHECK_EQ(last.started, 20);
    td_group_destroy(group);
    return NULL;
}

TEST(ranks_that_are_threads)
{
    struct td__flight_book book;
    struct td__flight_job job = {.slots = 1, .nnodes = 1, .world_size = 2};
    struct rank_thread ranks[2] = {{.rank = 0}, {.rank = 1}};
    pthread_t threads[2];
    char text[64];
    CHECK_OK(td__flight_book_open(&job, &book));
    td__flight_book_place(&book, getpid(), 0, text, sizeof text);
    setenv("TANDEM_FLIGHT", text, 1);
    for (int again = 0; again < 2; again++) {
        CHECK_OK(td_hash_store_open(&ranks[0].store));
        ranks[1].store = ranks[0].store;
        for (int i = 0; i < 2; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, be_a_rank, &ranks[i]), 0);
        for (int i = 0; i < 2; i++)
            pthread_join(threads[i], NULL);
        td_store_close(ranks[0].store);
    }
    void *copy = td__flight_book_copy(&book);
    struct td__flight_now now;
    td__flight_now(&now);
    td__flight_read_log(copy, book.size, 0, &now, &page);
    CHECK_EQ(page.phase, TD__FLIGHT_LEFT);
    CHECK(page.count >= 20);
    free(copy);
    td__flight_book_close(&book);
}

/* ---- What td_spawn() says -------------------------------------------------------------------- */

static td_status die_in_a_call(int rank, void *arg)
{
    int x = 0;
    (void)arg;
    CHECK_OK(td_init_process_group(NULL));
    CHECK_OK(td_group_barrier(NULL, NULL));
    if (rank == 1) {
        td_work *work;
        td_set_call_label("halo");
        CHECK_OK(td_group_recv(&x, 1, TD_I32, 0, 5, NULL, &work));
        td_work_wait(work, 20);
        raise(SIGKILL);
    }
    td__sleep_ns(100000000000);
    return TD_OK;
}

TEST(a_spawned_rank_that_dies)
{
    for (td_spawn_method method = TD_SPAWN_FORK; method <= TD_SPAWN_EXEC; method++)
        CHECK_FAILS(td_spawn(die_in_a_call, NULL, 2, &(td_spawn_options){.method = method}),
                    TD_ERR_PEER,
                    "was killed by SIGKILL during recv of up to 1 i32 from rank 0, tag 5 on "
                    "\"world\" (halo), ");
}
