/* The rules of each call on a store, from one thread. */
#include "store_conformance.h"

#include "runner.h"

#include <stdio.h>
#include <string.h>

/* ---- The frame ------------------------------------------------------------------------------- */

struct combination {
    const struct store_factory *factory;
    const struct store_case *test_case;
    struct td_test test;
    char name[128];
};

const struct store_factory *store_factory_of_test(void)
{
    return ((const struct combination *)td_test_arg())->factory;
}

static void run_combination(void)
{
    const struct combination *combination = td_test_arg();
    td_store *a = combination->factory->open();
    td_store *b = combination->factory->open_again ? combination->factory->open_again() : a;
    combination->test_case->run(a, b);
    if (b != a)
        CHECK_OK(td_store_close(b));
    CHECK_OK(td_store_close(a));
}

static void register_cases(const struct store_factory *factory, const struct store_case *cases)
{
    for (; cases->name; cases++) {
        struct combination *combination = calloc(1, sizeof *combination);
        combination->factory = factory;
        combination->test_case = cases;
        snprintf(combination->name, sizeof combination->name, "%s/%s", factory->name, cases->name);
        combination->test = (struct td_test){.name = combination->name,
                                             .run = run_combination,
                                             .arg = combination,
                                             .deadline_s = cases->deadline_s};
        td_test_register(&combination->test);
    }
}

void store_conformance_register(const struct store_factory *factory)
{
    register_cases(factory, store_rule_cases);
    register_cases(factory, store_refusal_cases);
    register_cases(factory, store_model_cases);
    register_cases(factory, store_thread_cases);
}

void store_expect(td_store *store, const char *key, const void *value, size_t size)
{
    td_bytes got = {0};
    CHECK_OK(td_store_get(store, key, 10000, &got));
    CHECK_EQ(got.size, size);
    CHECK(got.data != NULL);
    if (size) /* a NULL value of no bytes is fine */
        CHECK_MEM(got.data, value, size);
    CHECK_EQ(got.data[size], '\0');
    td_bytes_free(&got);
    CHECK(got.data == NULL);
    CHECK_EQ(got.size, 0);
}

void store_expect_text(td_store *store, const char *key, const char *value)
{
    td_bytes got = {0};
    CHECK_OK(td_store_get(store, key, 10000, &got));
    CHECK_STR(got.data, value);
    CHECK_EQ(got.size, strlen(value));
    td_bytes_free(&got);
}

void store_set_text(td_store *store, const char *key, const char *value)
{
    CHECK_OK(td_store_set(store, key, value, strlen(value)));
}

void store_settle(td_store *store)
{
    const char *key = "";
    bool there;
    CHECK_OK(
        td_store_check(store, &key, 1, &there)); /* is answered, and after what was set before it */
}

void store_expect_count(td_store *store, int64_t expected)
{
    int64_t count = -1;
    if (store_factory_of_test()->minimal)
        CHECK_FAILS(td_store_num_keys(store, &count), TD_ERR_UNSUPPORTED, "num_keys()");
    else
        CHECK_EQ(store_count(store), expected);
}

int64_t store_count(td_store *store)
{
    int64_t count = -1;
    CHECK_OK(td_store_num_keys(store, &count));
    return count;
}

void store_pattern(void *data, size_t size, uint32_t seed)
{
    uint32_t state = seed * 2654435761u + 1;
    for (size_t i = 0; i < size; i++) {
        state = state * 1664525u + 1013904223u;
        ((uint8_t *)data)[i] = (uint8_t)(state >> 24);
    }
}

static bool exists(td_store *store, const char *key)
{
    bool there;
    CHECK_OK(td_store_check(store, &key, 1, &there));
    return there;
}

/* ---- set and get ----------------------------------------------------------------------------- */

static void set_and_get(td_store *a, td_store *b)
{
    store_set_text(a, "key", "value");
    store_expect_text(a, "key", "value");
    store_expect_text(b, "key", "value");

    CHECK_OK(td_store_set(a, "empty", "", 0));
    store_expect(a, "empty", "", 0);
    store_expect(b, "empty", "", 0);
    CHECK_OK(td_store_set(a, "null", NULL, 0));
    store_expect(b, "null", NULL, 0);

    static const char binary[] = {0, 1, 0, (char)255, '\n', 0};
    CHECK_OK(td_store_set(a, "binary", binary, sizeof binary));
    store_expect(a, "binary", binary, sizeof binary);
    store_expect(b, "binary", binary, sizeof binary);

    store_set_text(b, "other way", "back");
    store_expect_text(a, "other way", "back");
}

static void odd_keys(td_store *a, td_store *b)
{
    static const char *const keys[] = {"",     "/",    "a/b/c", "a b",  "%s%n", "\"quoted\"",
                                       "../x", "\xff", "ü",     "a\nb", "a\tb"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char value[32];
        snprintf(value, sizeof value, "value %zu", i);
        store_set_text(a, keys[i], value);
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char value[32];
        snprintf(value, sizeof value, "value %zu", i);
        store_expect_text(b, keys[i], value);
    }
    store_expect_count(a, (int64_t)(sizeof keys / sizeof *keys));
}

static void overwriting(td_store *a, td_store *b)
{
    static const size_t sizes[] = {5, 1, 0, 300, 299, 64, 100000, 7, 100001, 2, 65, 66};
    char *data = malloc(200000);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        store_pattern(data, sizes[i], (uint32_t)i);
        CHECK_OK(td_store_set(a, "key", data, sizes[i]));
        store_expect(a, "key", data, sizes[i]);
        store_expect(b, "key", data, sizes[i]);
    }
    store_expect_count(b, 1);
    free(data);
}

static void large_values(td_store *a, td_store *b)
{
    static const size_t sizes[] = {1 << 20, (20 << 20) + 1, 1 << 16, 3};
    char *data = malloc(sizes[1]);
    CHECK(data != NULL);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        store_pattern(data, sizes[i], 77 + (uint32_t)i);
        CHECK_OK(td_store_set(a, "large", data, sizes[i]));
        store_settle(a);
        store_expect(b, "large", data, sizes[i]);
        store_expect(a, "large", data, sizes[i]);
    }
    free(data);
}

/* ---- add ------------------------------------------------------------------------------------- */

static void adding(td_store *a, td_store *b)
{
    int64_t sum = 0;
    CHECK_OK(td_store_add(a, "n", 5, &sum));
    CHECK_EQ(sum, 5);
    CHECK_OK(td_store_add(b, "n", -12, &sum));
    CHECK_EQ(sum, -7);
    store_expect_text(a, "n", "-7");
    store_expect_text(b, "n", "-7");
    CHECK_OK(td_store_add(a, "n", 0, NULL));
    store_expect_text(b, "n", "-7");
    CHECK_OK(td_store_add(a, "zero", 0, &sum));
    CHECK_EQ(sum, 0);
    store_expect_text(a, "zero", "0"); /* it exists now */

    store_set_text(a, "text", "41");
    CHECK_OK(td_store_add(a, "text", 1, &sum));
    CHECK_EQ(sum, 42);
    store_expect_text(b, "text", "42");
}

static void adding_at_the_limits(td_store *a, td_store *b)
{
    int64_t sum = 0;
    CHECK_OK(td_store_add(a, "high", INT64_MAX, &sum));
    CHECK_EQ(sum, INT64_MAX);
    CHECK_OK(td_store_add(a, "low", INT64_MIN, &sum));
    CHECK_EQ(sum, INT64_MIN);
    sum = 99;
    CHECK_FAILS(td_store_add(a, "high", 1, &sum), TD_ERR_INVALID, "high");
    CHECK_FAILS(td_store_add(a, "low", -1, &sum), TD_ERR_INVALID, "low");
    CHECK_FAILS(td_store_add(a, "high", INT64_MAX, NULL), TD_ERR_INVALID, "high");
    CHECK_EQ(sum, 99);
    store_expect_text(b, "high", "9223372036854775807");
    store_expect_text(b, "low", "-9223372036854775808");
    CHECK_OK(td_store_add(b, "high", INT64_MIN, &sum));
    CHECK_EQ(sum, -1);
    CHECK_OK(td_store_add(b, "low", INT64_MAX, &sum));
    CHECK_EQ(sum, -1);
}

static void adding_to_no_number(td_store *a, td_store *b)
{
    static const char *const texts[] = {
        "hello", "", " 1", "1 ", "+1", "1.5", "0x10", "-", "1e3", "--1", "9223372036854775808"};
    int64_t sum = 99;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        store_set_text(a, "the key", texts[i]);
        CHECK_FAILS(td_store_add(a, "the key", 1, &sum), TD_ERR_INVALID, "the key");
        CHECK_CONTAINS(td_last_error(), texts[i]);
        CHECK_CONTAINS(td_last_error(), "not a number");
        store_expect_text(b, "the key", texts[i]);
    }
    CHECK_OK(td_store_set(a, "the key", "1\0", 2));
    CHECK_FAILS(td_store_add(a, "the key", 1, &sum), TD_ERR_INVALID, "not a number");
    CHECK_EQ(sum, 99);
    store_set_text(a, "the key", "-0");
    CHECK_OK(td_store_add(a, "the key", 1, &sum));
    CHECK_EQ(sum, 1);
}

/* ---- compare_set ----------------------------------------------------------------------------- */

static void compare_set(td_store *store, const char *key, const char *expected, const char *desired,
                        const char *result)
{
    td_bytes value = {0};
    CHECK_OK(td_store_compare_set(store, key, expected, strlen(expected), desired, strlen(desired),
                                  &value));
    CHECK_STR(value.data, result);
    CHECK_EQ(value.size, strlen(result));
    td_bytes_free(&value);
}

static void comparing_and_setting(td_store *a, td_store *b)
{
    compare_set(a, "k", "wrong", "new", "wrong"); /* absent, expected not empty: as expected */
    CHECK(!exists(a, "k"));
    compare_set(a, "k", "", "first", "first"); /* absent, expected empty: set */
    store_expect_text(b, "k", "first");
    compare_set(b, "k", "other", "new", "first"); /* different: what is there */
    store_expect_text(a, "k", "first");
    compare_set(b, "k", "", "new", "first"); /* present: an empty one is different, too */
    compare_set(b, "k", "firs", "new", "first");
    compare_set(b, "k", "first!", "new", "first");
    compare_set(b, "k", "first", "second, and longer", "second, and longer"); /* equal: swapped */
    store_expect_text(a, "k", "second, and longer");
    compare_set(a, "k", "second, and longer", "", ""); /* to an empty value, which still exists */
    CHECK(exists(b, "k"));
    store_expect(b, "k", "", 0);
    compare_set(b, "k", "", "third", "third"); /* equal: both are empty */
    store_expect_text(a, "k", "third");

    td_bytes value = {0};
    CHECK_OK(td_store_compare_set(a, "null", NULL, 0, NULL, 0, &value));
    CHECK_EQ(value.size, 0);
    CHECK(value.data && !*value.data);
    td_bytes_free(&value);
    CHECK(exists(b, "null"));

    static const char one[] = {0, 1, 0}, two[] = {0, 2};
    CHECK_OK(td_store_set(a, "binary", one, sizeof one));
    CHECK_OK(td_store_compare_set(a, "binary", two, sizeof two, "x", 1, &value));
    CHECK_EQ(value.size, sizeof one);
    CHECK_MEM(value.data, one, sizeof one);
    td_bytes_free(&value);
    CHECK_OK(td_store_compare_set(a, "binary", one, sizeof one, two, sizeof two, &value));
    CHECK_EQ(value.size, sizeof two);
    CHECK_MEM(value.data, two, sizeof two);
    td_bytes_free(&value);

    store_set_text(a, "number", "9"); /* add and compare_set see the same text */
    CHECK_OK(td_store_add(a, "number", 1, NULL));
    compare_set(b, "number", "10", "done", "done");
}

/* ---- The others ------------------------------------------------------------------------------ */

static void checking(td_store *a, td_store *b)
{
    const char *keys[] = {"one", "two", "one"};
    bool all = false;
    CHECK_OK(td_store_check(a, keys, 0, &all));
    CHECK(all);
    CHECK_OK(td_store_check(a, NULL, 0, &all));
    CHECK_OK(td_store_wait(a, keys, 0, 1));
    CHECK_OK(td_store_check(a, keys, 3, &all));
    CHECK(!all);
    store_set_text(a, "one", "");
    CHECK_OK(td_store_check(a, keys, 1, &all));
    CHECK(all);
    CHECK_OK(td_store_check(b, keys, 3, &all));
    CHECK(!all);
    store_set_text(a, "two", "");
    store_settle(a);
    CHECK_OK(td_store_check(b, keys, 3, &all));
    CHECK(all);
}

static void deleting(td_store *a, td_store *b)
{
    bool deleted = true;
    td_bytes value = {0};
    CHECK_OK(td_store_delete_key(a, "k", &deleted));
    CHECK(!deleted);
    store_set_text(a, "k", "1");
    CHECK_OK(td_store_delete_key(a, "k", &deleted));
    CHECK(deleted);
    CHECK_OK(td_store_delete_key(b, "k", &deleted));
    CHECK(!deleted);
    CHECK(!exists(a, "k"));
    CHECK(!exists(b, "k"));
    CHECK_FAILS(td_store_get(a, "k", 20, &value), TD_ERR_TIMEOUT, "k"); /* it waits again */
    CHECK_FAILS(td_store_get(b, "k", 20, &value), TD_ERR_TIMEOUT, "k");
    int64_t sum;
    CHECK_OK(td_store_add(b, "k", 3, &sum));
    CHECK_EQ(sum, 3);
    CHECK_OK(td_store_delete_key(a, "k", NULL));
    CHECK_OK(td_store_append(a, "k", "x", 1));
    store_expect_text(b, "k", "x");
}

static void counting_keys(td_store *a, td_store *b)
{
    store_expect_count(a, 0);
    store_set_text(a, "one", "1");
    store_set_text(a, "one", "again");
    CHECK_OK(td_store_add(a, "two", 1, NULL));
    CHECK_OK(td_store_append(a, "three", "x", 1));
    store_set_text(a, "", "the empty key");
    store_expect_count(a, 4);
    store_expect_count(b, 4);
    CHECK_OK(td_store_delete_key(b, "two", NULL));
    store_expect_count(a, 3);
    if (!store_factory_of_test()->prefix_size) {
        store_set_text(a, "\1internal", "x"); /* what begins so is Tandem's own */
        store_set_text(a, "\1", "x");
        store_expect_count(a, 3);
        store_expect_count(b, 3);
        store_expect_text(b, "\1internal", "x");
    }
    store_set_text(a, "not\1internal", "x");
    store_expect_count(a, 4);
}

static void appending(td_store *a, td_store *b)
{
    CHECK_OK(td_store_append(a, "log", "", 0)); /* makes it */
    store_expect(b, "log", "", 0);
    CHECK_OK(td_store_append(a, "log", NULL, 0));
    CHECK_OK(td_store_append(a, "log", "ab", 2));
    CHECK_OK(td_store_append(a, "log", "\0c", 2));
    store_expect(a, "log", "ab\0c", 4);
    store_expect(b, "log", "ab\0c", 4);

    char *all = malloc(500 * 37);
    store_pattern(all, 500 * 37, 3);
    for (size_t i = 0; i < 500; i++)
        CHECK_OK(td_store_append(a, "many", all + i * 37, 37));
    store_settle(a);
    store_expect(b, "many", all, 500 * 37);
    store_set_text(a, "many", "short");
    CHECK_OK(td_store_append(a, "many", "er", 2));
    store_expect_text(a, "many", "shorter");
    free(all);

    store_set_text(a, "number", "4");
    CHECK_OK(td_store_append(a, "number", "2", 1));
    int64_t sum;
    CHECK_OK(td_store_add(a, "number", 0, &sum));
    CHECK_EQ(sum, 42);
}

/* ---- Many keys ------------------------------------------------------------------------------- */

static void many_keys(td_store *a, td_store *b, int count)
{
    size_t size = (size_t)count;
    char(*names)[32] = calloc(size, sizeof *names);
    const char **keys = calloc(size, sizeof *keys);
    td_bytes *values = calloc(size, sizeof *values);
    for (int i = 0; i < count; i++) {
        snprintf(names[i], sizeof names[i], "key %d", i);
        keys[i] = names[i];
        values[i] = (td_bytes){names[i], i % 7 ? strlen(names[i]) : 0};
    }
    CHECK_OK(td_store_multi_set(a, keys, values, count));
    store_expect_count(a, count);
    store_expect_count(b, count);
    CHECK_OK(td_store_wait(b, keys, count, 10000));

    td_bytes *got = calloc(size, sizeof *got);
    CHECK_OK(td_store_multi_get(b, keys, count, 10000, got));
    for (int i = 0; i < count; i++) {
        CHECK_EQ(got[i].size, values[i].size);
        CHECK_MEM(got[i].data, values[i].data, got[i].size);
        CHECK_EQ(got[i].data[got[i].size], '\0');
        td_bytes_free(&got[i]);
    }
    free(got);
    free(values);
    free(keys);
    free(names);
}

static void few_at_once(td_store *a, td_store *b)
{
    CHECK_OK(td_store_multi_set(a, NULL, NULL, 0));
    CHECK_OK(td_store_multi_get(a, NULL, 0, 1, NULL));
    store_expect_count(a, 0);
    many_keys(a, b, 1);
}

static void a_thousand_at_once(td_store *a, td_store *b)
{
    many_keys(a, b, 1000);
}

static void the_most_at_once(td_store *a, td_store *b)
{
    many_keys(a, b, TD_STORE_MAX_KEYS);
}

static void several_sizes_at_once(td_store *a, td_store *b)
{
    static const size_t sizes[] = {0, 1, 3 << 20, 100, 70000, 0, 65536};
    enum { COUNT = sizeof sizes / sizeof *sizes };
    static const char *const keys[COUNT] = {"a", "b", "c", "d", "e", "f", "g"};
    td_bytes values[COUNT], got[COUNT] = {{0}};
    for (int i = 0; i < COUNT; i++) {
        values[i] = (td_bytes){sizes[i] ? malloc(sizes[i]) : NULL, sizes[i]};
        store_pattern(values[i].data, sizes[i], (uint32_t)i);
    }
    CHECK_OK(td_store_multi_set(a, keys, values, COUNT));
    store_settle(a);
    CHECK_OK(td_store_multi_get(b, keys, COUNT, 10000, got));
    for (int i = 0; i < COUNT; i++) {
        CHECK_EQ(got[i].size, sizes[i]);
        CHECK_MEM(got[i].data, values[i].data, sizes[i]);
        td_bytes_free(&got[i]);
        free(values[i].data);
    }
}

static void the_same_key_twice(td_store *a, td_store *b)
{
    const char *keys[] = {"k", "other", "k", "k"};
    const td_bytes values[] = {{"first", 5}, {"x", 1}, {"second", 6}, {"last", 4}};
    td_bytes got[4] = {{0}};
    CHECK_OK(td_store_multi_set(a, keys, values, 4));
    store_expect_count(a, 2);
    CHECK_OK(td_store_multi_get(b, keys, 4, 10000, got));
    for (int i = 0; i < 4; i++) {
        CHECK_STR(got[i].data, i == 1 ? "x" : "last");
        td_bytes_free(&got[i]); /* each has its own copy */
    }
}

static void a_failing_step_sets_nothing(td_store *a, td_store *b)
{
    char *long_key = calloc(1, TD_STORE_MAX_KEY + 2);
    memset(long_key, 'x', TD_STORE_MAX_KEY + 1);
    const char *keys[] = {"good", long_key};
    const td_bytes values[] = {{"1", 1}, {"2", 1}};
    CHECK_FAILS(td_store_multi_set(a, keys, values, 2), TD_ERR_INVALID, "longer than");
    CHECK(!exists(a, "good"));
    CHECK(!exists(b, "good"));
    free(long_key);
}

/* ---- Handles --------------------------------------------------------------------------------- */

static void closing_a_handle_keeps_its_keys(td_store *a, td_store *b)
{
    const struct store_factory *factory = store_factory_of_test();
    if (!factory->open_again)
        td_test_skip("a %s store has one handle", factory->name);
    char *large = malloc(4 << 20);
    store_pattern(large, 4 << 20, 5);
    td_store *third = factory->open_again();
    store_set_text(third, "small", "1");
    CHECK_OK(td_store_set(third, "large", large, 4 << 20));
    CHECK_OK(td_store_append(third, "small", "2", 1));
    CHECK_OK(td_store_close(third)); /* at once after it was set */
    store_expect_text(a, "small", "12");
    store_expect(b, "large", large, 4 << 20);
    free(large);

    td_store *late = factory->open_again(); /* a later handle sees what was set before */
    store_expect_text(late, "small", "12");
    CHECK_OK(td_store_close(late));
}

const struct store_case store_rule_cases[] = {
    {"set_and_get", set_and_get, 0},
    {"odd_keys", odd_keys, 0},
    {"overwriting", overwriting, 0},
    {"large_values", large_values, 0},
    {"adding", adding, 0},
    {"adding_at_the_limits", adding_at_the_limits, 0},
    {"adding_to_no_number", adding_to_no_number, 0},
    {"comparing_and_setting", comparing_and_setting, 0},
    {"checking", checking, 0},
    {"deleting", deleting, 0},
    {"counting_keys", counting_keys, 0},
    {"appending", appending, 0},
    {"few_at_once", few_at_once, 0},
    {"a_thousand_at_once", a_thousand_at_once, 0},
    {"the_most_at_once", the_most_at_once, 0},
    {"several_sizes_at_once", several_sizes_at_once, 0},
    {"the_same_key_twice", the_same_key_twice, 0},
    {"a_failing_step_sets_nothing", a_failing_step_sets_nothing, 0},
    {"closing_a_handle_keeps_its_keys", closing_a_handle_keeps_its_keys, 0},
    {NULL, NULL, 0},
};
