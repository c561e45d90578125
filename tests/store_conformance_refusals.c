/* What a store refuses, and how it lets a wait go when its time is over. */
#include "store_conformance.h"

#include "runner.h"

#include "base/clock.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define MS ((int64_t)1000000)

static void key_lengths(td_store *a, td_store *b)
{
    size_t room = TD_STORE_MAX_KEY - (size_t)store_factory_of_test()->prefix_size;
    char *key = calloc(1, TD_STORE_MAX_KEY + 2);
    memset(key, 'k', room);
    store_set_text(a, key, "longest");
    store_expect_text(b, key, "longest");
    CHECK_OK(td_store_delete_key(a, key, NULL));

    for (int more = 0; more < 2; more++) { /* for a prefix store: too long inside, then outside */
        memset(key, 'k', more ? (size_t)TD_STORE_MAX_KEY + 1 : room + 1);
        const char *keys[] = {key};
        td_bytes value = {0};
        bool there = false;
        CHECK_FAILS(td_store_set(a, key, "x", 1), TD_ERR_INVALID, "longer than 4096");
        CHECK_FAILS(td_store_get(a, key, 10, &value), TD_ERR_INVALID, "kkkk");
        CHECK_FAILS(td_store_add(a, key, 1, NULL), TD_ERR_INVALID, "longer than 4096");
        CHECK_FAILS(td_store_append(a, key, "x", 1), TD_ERR_INVALID, "longer than 4096");
        CHECK_FAILS(td_store_delete_key(a, key, NULL), TD_ERR_INVALID, "longer than 4096");
        CHECK_FAILS(td_store_compare_set(a, key, "", 0, "x", 1, &value), TD_ERR_INVALID,
                    "longer than 4096");
        CHECK_FAILS(td_store_wait(a, keys, 1, 10), TD_ERR_INVALID, "longer than 4096");
        CHECK_FAILS(td_store_check(a, keys, 1, &there), TD_ERR_INVALID, "longer than 4096");
        CHECK_FAILS(td_store_multi_get(a, keys, 1, 10, &value), TD_ERR_INVALID, "longer than");
        CHECK_FAILS(td_store_multi_set(a, keys, &(td_bytes){"x", 1}, 1), TD_ERR_INVALID,
                    "longer than 4096");
        CHECK(value.data == NULL);
    }
    store_expect_count(a, 0);
    free(key);
}

/* ---- Wrong arguments ------------------------------------------------------------------------- */

static void wrong_arguments(td_store *a, td_store *b)
{
    (void)b;
    td_bytes value = {.data = (char *)1, .size = 99};
    int64_t number = 99;
    bool flag = true;
    const char *keys[] = {"x", NULL};
    const td_bytes values[] = {{"1", 1}, {NULL, 7}};

    CHECK_FAILS(td_store_set(NULL, "x", "1", 1), TD_ERR_INVALID, "td_store_set");
    CHECK_FAILS(td_store_get(NULL, "x", 1, &value), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_add(NULL, "x", 1, &number), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_append(NULL, "x", "1", 1), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_compare_set(NULL, "x", "", 0, "", 0, &value), TD_ERR_INVALID, "is NULL");
    CHECK_FAILS(td_store_delete_key(NULL, "x", &flag), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_wait(NULL, keys, 1, 1), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_check(NULL, keys, 1, &flag), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_multi_get(NULL, keys, 1, 1, &value), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_multi_set(NULL, keys, values, 1), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_num_keys(NULL, &number), TD_ERR_INVALID, "store is NULL");
    CHECK_FAILS(td_store_set_timeout(NULL, 1), TD_ERR_INVALID, "store is NULL");
    CHECK_OK(td_store_close(NULL));

    CHECK_FAILS(td_store_set(a, NULL, "1", 1), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_get(a, NULL, 1, &value), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_add(a, NULL, 1, &number), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_append(a, NULL, "1", 1), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_compare_set(a, NULL, "", 0, "", 0, &value), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_delete_key(a, NULL, &flag), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_wait(a, keys, 2, 1), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_check(a, keys, 2, &flag), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_multi_set(a, keys, values, 2), TD_ERR_INVALID, "key is NULL");
    CHECK_FAILS(td_store_wait(a, NULL, 1, 1), TD_ERR_INVALID, "list of keys is NULL");
    CHECK_FAILS(td_store_wait(a, keys, -1, 1), TD_ERR_INVALID, "-1 keys");
    CHECK_FAILS(td_store_check(a, keys, INT_MIN, &flag), TD_ERR_INVALID, "-2147483648 keys");
    CHECK_FAILS(td_store_multi_get(a, NULL, -3, 1, &value), TD_ERR_INVALID, "-3 keys");
    CHECK_FAILS(td_store_multi_set(a, keys, values, -1), TD_ERR_INVALID, "-1 keys");
    CHECK_FAILS(td_store_multi_set(a, NULL, values, 1), TD_ERR_INVALID, "list of keys is NULL");

    CHECK_FAILS(td_store_set(a, "x", NULL, 1), TD_ERR_INVALID, "value is NULL");
    CHECK_FAILS(td_store_append(a, "x", NULL, 1), TD_ERR_INVALID, "value is NULL");
    CHECK_FAILS(td_store_compare_set(a, "x", NULL, 1, "", 0, &value), TD_ERR_INVALID, "is NULL");
    CHECK_FAILS(td_store_compare_set(a, "x", "", 0, NULL, 1, &value), TD_ERR_INVALID, "is NULL");
    keys[1] = "y";
    CHECK_FAILS(td_store_multi_set(a, keys, values, 2), TD_ERR_INVALID, "\"y\"");
    CHECK_FAILS(td_store_multi_set(a, keys, NULL, 2), TD_ERR_INVALID, "values is NULL");
    CHECK_FAILS(td_store_set(a, "x", "1", TD_STORE_MAX_VALUE + 1), TD_ERR_INVALID, "268435457");
    CHECK_FAILS(td_store_append(a, "x", "1", TD_STORE_MAX_VALUE + 1), TD_ERR_INVALID, "268435457");

    CHECK_FAILS(td_store_get(a, "x", 1, NULL), TD_ERR_INVALID, "output is NULL");
    CHECK_FAILS(td_store_compare_set(a, "x", "", 0, "", 0, NULL), TD_ERR_INVALID, "output is NULL");
    CHECK_FAILS(td_store_check(a, keys, 1, NULL), TD_ERR_INVALID, "output is NULL");
    CHECK_FAILS(td_store_multi_get(a, keys, 1, 1, NULL), TD_ERR_INVALID, "output is NULL");
    CHECK_FAILS(td_store_num_keys(a, NULL), TD_ERR_INVALID, "output is NULL");

    CHECK_FAILS(td_store_get(a, "x", -2, &value), TD_ERR_INVALID, "-2 ms");
    CHECK_FAILS(td_store_wait(a, keys, 1, -5), TD_ERR_INVALID, "-5 ms");
    CHECK_FAILS(td_store_multi_get(a, keys, 1, INT64_MIN, &value), TD_ERR_INVALID, "negative");

    CHECK(value.data == (char *)1 && value.size == 99 && number == 99 && flag);
    store_expect_count(a, 0); /* nothing of all this was done */
}

static void too_many_keys(td_store *a, td_store *b)
{
    int count = TD_STORE_MAX_KEYS + 1;
    const char **keys = calloc((size_t)count, sizeof *keys);
    td_bytes *values = calloc((size_t)count, sizeof *values);
    bool flag = true;
    for (int i = 0; i < count; i++)
        keys[i] = "same";
    store_set_text(a, "same", "1");
    store_settle(a);
    CHECK_FAILS(td_store_wait(b, keys, count, 10), TD_ERR_INVALID, "65537 keys");
    CHECK_FAILS(td_store_check(b, keys, count, &flag), TD_ERR_INVALID, "65537 keys");
    CHECK_FAILS(td_store_multi_get(b, keys, count, 10, values), TD_ERR_INVALID, "65537 keys");
    CHECK_FAILS(td_store_multi_set(b, keys, values, count), TD_ERR_INVALID, "65537 keys");
    CHECK(flag && values[0].data == NULL);
    store_expect_text(b, "same", "1");
    free(values);
    free(keys);
}

/* ---- Timeouts -------------------------------------------------------------------------------- */

/* `since` is at least 50 ms ago (less the grain of a millisecond clock), and not for ever. */
static void check_waited(int64_t since)
{
    int64_t took = (td__now_ns() - since) / MS;
    if (took < 48)
        FAIL("a timeout of 50 ms took %" PRId64 " ms", took);
    CHECK_PROMPT(since);
}

static void timeouts(td_store *a, td_store *b)
{
    const char *keys[] = {"there", "missing key", "there too"};
    td_bytes values[3] = {{(char *)1, 1}, {(char *)2, 2}, {(char *)3, 3}};
    store_set_text(b, "there", "1");
    store_set_text(b, "there too", "2");
    store_settle(b);

    int64_t start = td__now_ns();
    CHECK_FAILS(td_store_get(a, "missing key", 50, &values[0]), TD_ERR_TIMEOUT, "missing key");
    check_waited(start);
    start = td__now_ns();
    CHECK_FAILS(td_store_wait(a, keys, 3, 50), TD_ERR_TIMEOUT, "missing key");
    CHECK(!strstr(td_last_error(), "there"));
    check_waited(start);
    start = td__now_ns();
    CHECK_FAILS(td_store_multi_get(a, keys, 3, 50, values), TD_ERR_TIMEOUT, "missing key");
    check_waited(start);
    for (int i = 0; i < 3; i++)
        CHECK(values[i].data == (char *)(intptr_t)(i + 1) && values[i].size == (size_t)i + 1);

    for (int i = 0; i < 20; i++) { /* the store is as good as before, also after many of them */
        CHECK_FAILS(td_store_get(a, "missing key", 1, &values[0]), TD_ERR_TIMEOUT, "missing key");
        store_expect_text(a, "there", "1");
    }
    store_set_text(a, "missing key", "late");
    store_expect_text(a, "missing key", "late");
    store_expect_text(b, "missing key", "late");
    CHECK_OK(td_store_wait(b, keys, 3, 10000));
}

/* TD_NOW looks once, for a store whose own timeout is long, and sees what another handle has just set. */
static void looking_without_waiting(td_store *a, td_store *b)
{
    const char *keys[] = {"there", "missing key"};
    td_bytes values[2] = {{(char *)1, 1}, {(char *)2, 2}};
    int64_t start = td__now_ns();
    CHECK_FAILS(td_store_get(a, "missing key", TD_NOW, values), TD_ERR_TIMEOUT, "missing key");
    store_set_text(b, "there", "1");
    store_settle(b);
    CHECK_FAILS(td_store_wait(a, keys, 2, TD_NOW), TD_ERR_TIMEOUT, "missing key");
    CHECK_FAILS(td_store_multi_get(a, keys, 2, TD_NOW, values), TD_ERR_TIMEOUT, "missing key");
    CHECK(values[0].data == (char *)1 && values[1].data == (char *)2);
    CHECK_PROMPT(start);

    store_set_text(b, "missing key", "late");
    store_settle(b);
    for (int i = 0; i < 100; i++) {
        CHECK_OK(td_store_multi_get(a, keys, 2, TD_NOW, values));
        CHECK_STR(values[0].data, "1");
        CHECK_STR(values[1].data, "late");
        td_bytes_free(&values[0]);
        td_bytes_free(&values[1]);
        CHECK_FAILS(td_store_get(a, "other", TD_NOW, values), TD_ERR_TIMEOUT, "other");
    }
    CHECK_OK(td_store_wait(a, keys, 2, TD_NOW));
    CHECK_OK(td_store_get(a, "there", TD_NOW, values));
    CHECK_STR(values[0].data, "1");
    td_bytes_free(&values[0]);
    CHECK_OK(td_store_delete_key(b, "there", NULL));
    CHECK_FAILS(td_store_get(a, "there", TD_NOW, values), TD_ERR_TIMEOUT, "there");
}

static void own_timeout(td_store *a, td_store *b)
{
    (void)b;
    td_bytes value = {0};
    const char *keys[] = {"missing"};
    CHECK_EQ(td_store_timeout(a), TD_STORE_DEFAULT_TIMEOUT_MS);
    CHECK_FAILS(td_store_set_timeout(a, TD_NOW), TD_ERR_INVALID, "TD_NOW");
    CHECK_FAILS(td_store_set_timeout(a, -7), TD_ERR_INVALID, "-7");
    CHECK_EQ(td_store_timeout(a), TD_STORE_DEFAULT_TIMEOUT_MS);

    CHECK_OK(td_store_set_timeout(a, 50));
    CHECK_EQ(td_store_timeout(a), 50);
    int64_t start = td__now_ns();
    CHECK_FAILS(td_store_get(a, "missing", 0, &value), TD_ERR_TIMEOUT, "missing");
    check_waited(start);
    CHECK_FAILS(td_store_wait(a, keys, 1, 0), TD_ERR_TIMEOUT, "missing");
    CHECK_FAILS(td_store_multi_get(a, keys, 1, 0, &value), TD_ERR_TIMEOUT, "missing");
    CHECK_OK(td_store_set_timeout(a, 10000));
    store_set_text(a, "missing", "x");
    CHECK_OK(td_store_get(a, "missing", 0, &value));
    td_bytes_free(&value);
    CHECK_OK(td_store_set_timeout(a, INT64_MAX));
    CHECK_EQ(td_store_timeout(a), INT64_MAX);
    CHECK_OK(td_store_get(a, "missing", 0, &value));
    td_bytes_free(&value);
    CHECK_OK(td_store_get(a, "missing", INT64_MAX, &value));
    td_bytes_free(&value);
    CHECK_OK(td_store_set_timeout(a, 0)); /* the default again */
    CHECK_EQ(td_store_timeout(a), TD_STORE_DEFAULT_TIMEOUT_MS);
}

const struct store_case store_refusal_cases[] = {
    {"key_lengths", key_lengths, 0},
    {"wrong_arguments", wrong_arguments, 0},
    {"too_many_keys", too_many_keys, 0},
    {"timeouts", timeouts, 0},
    {"looking_without_waiting", looking_without_waiting, 0},
    {"own_timeout", own_timeout, 0},
    {NULL, NULL, 0},
};
