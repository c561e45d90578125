/* The stores: which kinds pass the conformance suite, prefixes, files, and several processes at one
 * store. Only TCP: test_tcp_store.c. */
#include "runner.h"
#include "store_conformance.h"
#include "store_kinds.h"

#include <tandem/store.h>

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static const struct store_factory factories[] = {
    {.name = "hash", .open = open_hash},
    {.name = "file", .open = open_file, .open_again = open_file},
    {.name = "tcp", .open = open_tcp, .open_again = open_tcp_again},
    {.name = "unix", .open = open_unix, .open_again = open_unix_again},
    {.name = "replicated", .open = open_replicated, .open_again = open_tcp_again},
    {.name = "tls", .open = open_tls, .open_again = open_tls_again},
    {.name = "prefix_hash", .open = open_prefix_hash, .prefix_size = 4},
    {.name = "prefix_tcp",
     .open = open_prefix_tcp,
     .open_again = open_prefix_tcp_again,
     .prefix_size = 4},
};

__attribute__((constructor)) static void register_kinds(void)
{
    for (size_t i = 0; i < sizeof factories / sizeof *factories; i++)
        store_conformance_register(&factories[i]);
}

/* ---- Prefix stores --------------------------------------------------------------------------- */

TEST(prefixes_nest)
{
    td_store *base = open_hash(), *outer, *inner, *sibling;
    CHECK_OK(td_prefix_store_open("outer", base, &outer));
    CHECK_OK(td_prefix_store_open("inner", outer, &inner));
    CHECK_OK(td_prefix_store_open("inne", outer, &sibling));
    store_set_text(inner, "k", "1");
    store_set_text(outer, "k", "2");
    store_set_text(base, "k", "3");
    store_set_text(sibling, "r/k", "4");
    store_expect_text(base, "outer/inner/k", "1");
    store_expect_text(outer, "inner/k", "1");
    store_expect_text(base, "outer/k", "2");
    store_expect_text(base, "outer/inne/r/k", "4");
    CHECK_EQ(store_count(inner), 1);
    CHECK_EQ(store_count(sibling), 1);
    CHECK_EQ(store_count(outer), 3);
    CHECK_EQ(store_count(base), 4);
    store_set_text(base, "outer/inner/direct", "5");
    store_expect_text(inner, "direct", "5");

    td_bytes value = {0};
    CHECK_FAILS(td_store_get(inner, "missing", 10, &value), TD_ERR_TIMEOUT, "missing");
    CHECK_OK(td_store_close(base));
    CHECK_OK(td_store_close(outer)); /* the base before the stores over it, twice */
    store_expect_text(inner, "k", "1");
    CHECK_OK(td_store_close(inner));
    store_expect_text(sibling, "r/k", "4");
    CHECK_OK(td_store_close(sibling));
}

TEST(prefixes_of_all_kinds)
{
    td_store *base = open_hash(), *empty, *slash, *internal, *store;
    CHECK_OK(td_prefix_store_open("", base, &empty));
    store_set_text(empty, "k", "1");
    store_expect_text(base, "/k", "1");
    CHECK_EQ(store_count(empty), 1);
    CHECK_OK(td_prefix_store_open("a/", base, &slash));
    store_set_text(slash, "k", "2");
    store_expect_text(base, "a//k", "2");
    CHECK_OK(td_prefix_store_open("\1own", base, &internal)); /* Tandem's own do not count … */
    store_set_text(internal, "k", "3");
    CHECK_EQ(store_count(base), 2);
    CHECK_EQ(store_count(internal), 1); /* … except through that prefix */

    CHECK_FAILS(td_prefix_store_open(NULL, base, &store), TD_ERR_INVALID, "prefix is NULL");
    CHECK_FAILS(td_prefix_store_open("p", NULL, &store), TD_ERR_INVALID, "base store is NULL");
    CHECK_FAILS(td_prefix_store_open("p", base, NULL), TD_ERR_INVALID, "output is NULL");
    CHECK_OK(td_store_close(internal));
    CHECK_OK(td_store_close(slash));
    CHECK_OK(td_store_close(empty));
    CHECK_OK(td_store_close(base));
}

TEST(a_prefix_shortens_the_longest_key)
{
    td_store *base = open_hash(), *outer = NULL;
    char *prefix = calloc(1, TD_STORE_MAX_KEY + 1);
    memset(prefix, 'p', TD_STORE_MAX_KEY);
    CHECK_FAILS(td_prefix_store_open(prefix, base, &outer), TD_ERR_INVALID, "4096");
    CHECK(outer == NULL);
    prefix[TD_STORE_MAX_KEY - 6] = '\0';
    CHECK_OK(td_prefix_store_open(prefix, base, &outer));
    store_set_text(outer, "12345", "fits");
    CHECK_FAILS(td_store_set(outer, "123456", "x", 1), TD_ERR_INVALID, "longer than 4096");

    CHECK_EQ(store_count(base), 1);
    CHECK_OK(td_store_close(outer));
    CHECK_OK(td_store_close(base));
    free(prefix);
}

TEST(nested_prefixes_shorten_the_longest_key)
{
    td_store *base = open_hash(), *outer = NULL, *inner;
    char *prefix = calloc(1, TD_STORE_MAX_KEY + 1);
    memset(prefix, 'p', TD_STORE_MAX_KEY - 6);
    CHECK_OK(td_prefix_store_open(prefix, base, &outer));
    CHECK_OK(td_prefix_store_open("in", outer, &inner));
    store_set_text(inner, "ab", "fits");
    store_expect_text(outer, "in/ab", "fits");
    CHECK_EQ(td_store_set(inner, "abc", "x", 1), TD_ERR_INVALID);
    CHECK_EQ(store_count(base), 1);
    CHECK_OK(td_store_close(inner));
    CHECK_OK(td_store_close(outer));
    CHECK_OK(td_store_close(base));
    free(prefix);
}

TEST(a_prefix_store_has_its_own_timeout)
{
    td_store *base = open_hash(), *store;
    CHECK_OK(td_store_set_timeout(base, 1234));
    CHECK_OK(td_prefix_store_open("p", base, &store));
    CHECK_EQ(td_store_timeout(store), 1234);
    CHECK_OK(td_store_set_timeout(store, 5));
    CHECK_EQ(td_store_timeout(base), 1234);
    td_bytes value = {0};
    CHECK_FAILS(td_store_get(store, "k", 0, &value), TD_ERR_TIMEOUT, "k");
    CHECK_OK(td_store_close(store));
    CHECK_OK(td_store_close(base));
}

/* ---- Only file ------------------------------------------------------------------------------- */

static int entries_in(const char *path)
{
    DIR *directory = opendir(path);
    CHECK(directory != NULL);
    int count = -2; /* without . and .. */
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

TEST(file_leaves_nothing)
{
    td_store *first = open_file(), *second = open_file();
    store_set_text(first, "k", "v");
    CHECK_OK(td_store_close(first));
    store_expect_text(second, "k", "v");
    CHECK_OK(td_store_close(second));
    CHECK_EQ(entries_in(td_test_temp_dir()), 0);
    first = open_file(); /* nothing of it is left: it starts empty */
    CHECK_EQ(store_count(first), 0);
    CHECK_OK(td_store_close(first));
    CHECK_EQ(entries_in(td_test_temp_dir()), 0);
}

static void write_and_die(void *arg)
{
    (void)arg;
    td_store *store = open_file();
    store_set_text(store, "stale", "from an earlier job");
    raise(SIGKILL);
}

TEST(file_of_an_earlier_job_is_emptied)
{
    struct td_test_child child = td_test_fork(write_and_die, NULL);
    CHECK_EQ(child.status, SIGKILL);
    free(child.output);
    CHECK(entries_in(td_test_temp_dir()) > 0); /* it was left behind */
    td_store *store = open_file();
    CHECK_EQ(store_count(store), 0);
    store_set_text(store, "k", "v");
    CHECK_OK(td_store_close(store));
    CHECK_EQ(entries_in(td_test_temp_dir()), 0);
}

TEST(file_that_is_something_else)
{
    td_store *store = NULL;
    char path[600];
    CHECK_FAILS(td_file_store_open(NULL, &store), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_file_store_open(file_path(), NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_file_store_open("", &store), TD_ERR_INVALID, "");
    snprintf(path, sizeof path, "%s/no/such/directory", td_test_temp_dir());
    CHECK_FAILS(td_file_store_open(path, &store), TD_ERR_SYSTEM, path);
    CHECK_FAILS(td_file_store_open(td_test_temp_dir(), &store), TD_ERR_INVALID, "directory");
    CHECK(store == NULL);
}

/* ---- Several processes ----------------------------------------------------------------------- */

/* A token goes round: rank r adds its number to what it got from rank r-1. */
static void go_round(td_store *store, int round)
{
    int rank = td_test_rank(), size = td_test_size();
    char mine[64], from[64], text[64];
    int64_t sum = 0;
    snprintf(mine, sizeof mine, "ring %d/%d", round, rank);
    snprintf(from, sizeof from, "ring %d/%d", round, (rank + size - 1) % size);
    if (rank != 0) {
        td_bytes value = {0};
        CHECK_OK(td_store_get(store, from, 60000, &value));
        sum = atoll(value.data);
        td_bytes_free(&value);
    }
    snprintf(text, sizeof text, "%lld", (long long)sum + rank);
    store_set_text(store, mine, text);
    if (rank == 0) {
        snprintf(text, sizeof text, "%d", size * (size - 1) / 2);
        store_expect_text(store, from, text);
    }
}

static void work_together(const char *kind)
{
    td_store *store = open_of_ranks(kind);
    int rank = td_test_rank(), size = td_test_size();
    for (int i = 0; i < 50; i++)
        CHECK_OK(td_store_add(store, "sum", rank, NULL));
    for (int round = 0; round < 10; round++) {
        count_in(store, round);
        go_round(store, round);
    }
    count_in(store, 10);
    int64_t sum;
    CHECK_OK(td_store_add(store, "sum", 0, &sum));
    CHECK_EQ(sum, 50 * size * (size - 1) / 2);

    char key[64], *large = malloc(1 << 20);
    snprintf(key, sizeof key, "large %d", rank);
    store_pattern(large, 1 << 20, (uint32_t)rank);
    CHECK_OK(td_store_set(store, key, large, 1 << 20));
    int next = (rank + 1) % size;
    snprintf(key, sizeof key, "large %d", next);
    store_pattern(large, 1 << 20, (uint32_t)next);
    store_expect(store, key, large, 1 << 20);
    free(large);
    CHECK_OK(td_store_append(store, "roll", "x", 1));
    count_in(store, 11);
    td_bytes roll = {0};
    CHECK_OK(td_store_get(store, "roll", 60000, &roll));
    CHECK_EQ(roll.size, size);
    td_bytes_free(&roll);
    CHECK_OK(td_store_close(store));
    td_test_barrier();
    if (!strcmp(kind, "file"))
        CHECK_EQ(entries_in(td_test_temp_dir()), 0);
}

RANKS(tcp_4_ranks, .ranks = 4)
{
    work_together("tcp");
}

RANKS(tcp_8_ranks, .ranks = 8)
{
    work_together("tcp");
}

RANKS(prefix_4_ranks, .ranks = 4)
{
    work_together("prefix");
}

RANKS(file_4_ranks, .ranks = 4)
{
    work_together("file");
}

RANKS(file_8_ranks, .ranks = 8)
{
    work_together("file");
}

/* A process that dies while it uses the file blocks no other, and the last one still removes it. */
RANKS(file_user_dies, .ranks = 4, .may_die = 1 << 3)
{
    td_store *store = open_of_ranks("file");
    count_in(store, 0);
    if (td_test_rank() == 3)
        for (;;)
            CHECK_OK(td_store_add(store, "busy", 1, NULL));
    if (td_test_rank() == 0) {
        CHECK_OK(td_store_wait(store, &(const char *){"busy"}, 1, 60000));
        td_test_kill(3, SIGKILL);
    }
    for (int i = 0; i < 20; i++)
        CHECK_OK(td_store_add(store, "sum", 1, NULL));
    CHECK_OK(td_store_add(store, "done", 1, NULL));
    int64_t done = 0;
    CHECK_SOON((CHECK_OK(td_store_add(store, "done", 0, &done)), done == 3));
    store_expect_text(store, "sum", "60");
    CHECK_OK(td_store_close(store));
}
