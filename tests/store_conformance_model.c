/* Random calls on a store, compared with a naive model of it after each. */
#include "store_conformance.h"

#include "runner.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MODEL_KEYS = 6, MODEL_ROOM = 4096 };

struct model {
    struct {
        bool there;
        size_t size;
        char data[MODEL_ROOM];
    } at[MODEL_KEYS];
    uint32_t state;
};

static uint32_t random_below(struct model *model, uint32_t bound)
{
    model->state = model->state * 1664525u + 1013904223u;
    return (model->state >> 8) % bound;
}

static void model_set(struct model *model, int key, const char *data, size_t size)
{
    model->at[key].there = true;
    model->at[key].size = size;
    memmove(model->at[key].data, data, size);
}

static bool model_number(const struct model *model, int key, int64_t *number)
{
    char text[32];
    *number = 0;
    if (!model->at[key].there)
        return true;
    if (!model->at[key].size || model->at[key].size > 18)
        return false;
    snprintf(text, sizeof text, "%.*s", (int)model->at[key].size, model->at[key].data);
    return strlen(text) == model->at[key].size && strspn(text, "0123456789") == strlen(text) &&
           (*number = atoll(text), true);
}

static void model_compare_set(struct model *model, td_store *store, int key, const char *name,
                              const char *desired, size_t size)
{
    td_bytes got = {0};
    bool guess = random_below(model, 2); /* that it is what it is, or something else */
    char expected[MODEL_ROOM] = "x";
    size_t expected_size = 1;
    if (guess && model->at[key].there) {
        expected_size = model->at[key].size;
        memcpy(expected, model->at[key].data, expected_size);
    } else if (guess) {
        expected_size = 0;
    }
    bool same = model->at[key].there ? model->at[key].size == expected_size &&
                                           !memcmp(model->at[key].data, expected, expected_size)
                                     : expected_size == 0;
    CHECK_OK(td_store_compare_set(store, name, expected, expected_size, desired, size, &got));
    if (same)
        model_set(model, key, desired, size);
    const char *result = model->at[key].there ? model->at[key].data : expected;
    CHECK_EQ(got.size, model->at[key].there ? model->at[key].size : expected_size);
    CHECK_MEM(got.data, result, got.size);
    td_bytes_free(&got);
}

static void model_step(struct model *model, td_store *store)
{
    static const char *const names[MODEL_KEYS] = {"a", "b", "", "a/b", "aa", "c"};
    int key = (int)random_below(model, MODEL_KEYS);
    const char *name = names[key];
    char data[300];
    size_t size = random_below(model, random_below(model, 2) ? 300 : 5);
    int64_t sum, number, count = 0;
    bool flag;
    store_pattern(data, size, model->state);
    switch (random_below(model, 7)) {
    case 0:
        CHECK_OK(td_store_set(store, name, data, size));
        model_set(model, key, data, size);
        break;
    case 1:
        if (!model->at[key].there)
            model_set(model, key, "", 0);
        if (model->at[key].size + size > MODEL_ROOM)
            break;
        CHECK_OK(td_store_append(store, name, data, size));
        memcpy(model->at[key].data + model->at[key].size, data, size);
        model->at[key].size += size;
        break;
    case 2:
        if (!model_number(model, key, &number)) {
            CHECK_FAILS(td_store_add(store, name, 3, &sum), TD_ERR_INVALID, "not a number");
            CHECK_OK(td_store_set(store, name, "7", 1));
            model_set(model, key, "7", 1);
            break;
        }
        CHECK_OK(td_store_add(store, name, 3, &sum));
        CHECK_EQ(sum, number + 3);
        model_set(model, key, data, (size_t)snprintf(data, sizeof data, "%" PRId64, sum));
        break;
    case 3:
        CHECK_OK(td_store_delete_key(store, name, &flag));
        CHECK_EQ(flag, model->at[key].there);
        model->at[key].there = false;
        break;
    case 4:
        model_compare_set(model, store, key, name, data, size);
        break;
    case 5:
        CHECK_OK(td_store_check(store, &name, 1, &flag));
        CHECK_EQ(flag, model->at[key].there);
        break;
    default:
        if (model->at[key].there)
            store_expect(store, name, model->at[key].data, model->at[key].size);
        for (int i = 0; i < MODEL_KEYS; i++)
            count += model->at[i].there;
        store_expect_count(store, count);
    }
}

static void random_calls(td_store *a, td_store *b)
{
    static struct model model;
    model.state = 12345;
    for (int i = 0; i < 4000; i++)
        model_step(&model, (i / 100) % 2 && b != a ? (store_settle(a), b) : (store_settle(b), a));
}

const struct store_case store_model_cases[] = {
    {"random_calls", random_calls, 0},
    {NULL, NULL, 0},
};
