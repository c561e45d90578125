/* Values: making, reading and printing them, their scopes and threads, and what is refused. */
#include "runner.h"

#include <tandem/ops.h>
#include <tandem/rpc.h>

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A call that returns NULL, with a status and a part of its text. */
#define CHECK_NULL(call, status, part)                                                             \
    do {                                                                                           \
        CHECK(!(call));                                                                            \
        CHECK_EQ(td_last_status(), status);                                                        \
        CHECK_CONTAINS(td_last_error(), part);                                                     \
    } while (0)

static void check_print(const td_value *value, const char *expected)
{
    td_bytes text = {0};
    CHECK_OK(td_value_print(value, &text));
    CHECK_STR((const char *)text.data, expected);
    CHECK_EQ(text.size, strlen(expected));
    td_bytes_free(&text);
}

static int64_t int_of(const td_value *value)
{
    int64_t result = 0;
    CHECK_OK(td_value_int(value, &result));
    return result;
}

static double float_of(const td_value *value)
{
    double result = 0;
    CHECK_OK(td_value_float(value, &result));
    return result;
}

TEST(scalars)
{
    TD_SCOPE;
    bool truth = false;
    CHECK_EQ(td_value_kind_of(td_value_nil()), TD_VALUE_NIL);
    CHECK_EQ(td_value_kind_of(NULL), TD_VALUE_NIL);
    CHECK_OK(td_value_bool(td_value_from_bool(true), &truth));
    CHECK(truth);
    CHECK_EQ(int_of(td_value_from_int(INT64_MIN)), INT64_MIN);
    CHECK_EQ(int_of(td_value_from_unsigned(INT64_MAX)), INT64_MAX);
    CHECK(float_of(td_value_from_float(-0.5)) == -0.5);
    CHECK(float_of(td_value_from_int(3)) == 3);
    CHECK_NULL(td_value_from_unsigned((uint64_t)INT64_MAX + 1), TD_ERR_INVALID,
               "9223372036854775808 is above");
}

TEST(texts_and_bytes)
{
    TD_SCOPE;
    size_t size = 9;
    char text[] = "gr\xc3\xbc\xc3\x9f";
    td_value *value = td_value_from_text(text);
    text[0] = 'X'; /* it was copied */
    CHECK_STR(td_value_text(value), "gr\xc3\xbc\xc3\x9f");
    CHECK_STR(td_value_text(td_value_from_text("")), "");
    const void *bytes = td_value_bytes(td_value_from_bytes("a\0b", 3), &size);
    CHECK_EQ(size, 3);
    CHECK_MEM(bytes, "a\0b", 3);
    CHECK(td_value_bytes(td_value_from_bytes(NULL, 0), &size));
    CHECK_EQ(size, 0);
    CHECK_NULL(td_value_from_text("\xff"), TD_ERR_INVALID, "not UTF-8");
    CHECK_NULL(td_value_from_text("\xc3"), TD_ERR_INVALID, "not UTF-8");
    CHECK_NULL(td_value_from_text(NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_bytes(NULL, 1), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_bytes("", SIZE_MAX), TD_ERR_NOMEM, "memory");
    CHECK_NULL(td_value_from_bytes("", SIZE_MAX - 8), TD_ERR_NOMEM, "memory");
}

TEST(kind_names)
{
    static const char *const names[] = {"nil",   "bool",   "int",   "float",  "text",
                                        "bytes", "list",   "map",   "tensor", "module",
                                        "rref",  "future", "object"};
    for (int kind = TD_VALUE_NIL; kind <= TD_VALUE_OBJECT; kind++)
        CHECK_STR(td_value_kind_name((td_value_kind)kind), names[kind]);
    CHECK_STR(td_value_kind_name((td_value_kind)99), "unknown");
    CHECK_STR(td_value_kind_name((td_value_kind)-1), "unknown");
}

TEST(lists)
{
    TD_SCOPE;
    td_value *list = td_value_list(TD_VALUES(td_value_of(1), td_value_of("two"), td_value_nil()));
    CHECK_EQ(td_value_count(list), 3);
    CHECK_EQ(int_of(td_value_at(list, 0)), 1);
    CHECK_STR(td_value_text(td_value_at(list, 1)), "two");
    CHECK_NULL(td_value_at(list, 3), TD_ERR_INVALID, "no element 3 of 3");
    CHECK_NULL(td_value_at(list, -1), TD_ERR_INVALID, "no element -1 of 3");
    CHECK_EQ(td_value_count(TD_NO_ARGS), 0);
    CHECK_EQ(td_value_count(td_value_of(5)), 0);
    CHECK_EQ(td_value_count(NULL), 0);
    CHECK_NULL(td_value_list(NULL, 1), TD_ERR_INVALID, "values are NULL");
    CHECK_NULL(td_value_list(NULL, -1), TD_ERR_INVALID, "negative");
    CHECK_NULL(td_value_list((td_value *[]){NULL}, 1), TD_ERR_INVALID, "NULL");
}

TEST(the_first_failure_stays)
{
    TD_SCOPE;
    CHECK_NULL(td_value_set(td_value_map(), "x", td_value_list(TD_VALUES(td_value_of("\xff")))),
               TD_ERR_INVALID, "td_value_from_text");
}

TEST(maps)
{
    TD_SCOPE;
    td_value *map = td_value_set(td_value_set(td_value_map(), "b", td_value_of(1)), "a",
                                 td_value_of(2.5));
    CHECK_EQ(td_value_count(map), 2);
    CHECK_STR(td_value_key(map, 0), "b");
    CHECK_STR(td_value_key(map, 1), "a");
    CHECK(td_value_at(map, 1) == td_value_get(map, "a"));
    CHECK(td_value_set(map, "b", td_value_get(map, "b")) == map); /* the one that is there */
    CHECK_EQ(int_of(td_value_get(map, "b")), 1);
    CHECK(td_value_set(map, "b", td_value_of(7)) == map);
    CHECK_EQ(td_value_count(map), 2);
    CHECK_EQ(int_of(td_value_get(map, "b")), 7);
    CHECK(!td_value_get(map, "c"));
    CHECK_NULL(td_value_key(map, 2), TD_ERR_INVALID, "no element 2 of 2");
    CHECK_NULL(td_value_key(td_value_of(1), 0), TD_ERR_INVALID, "of kind int, not map");
    CHECK_NULL(td_value_get(td_value_of(1), "x"), TD_ERR_INVALID, "of kind int, not map");
    CHECK_NULL(td_value_set(TD_NO_ARGS, "x", map), TD_ERR_INVALID, "not a map");
    CHECK_NULL(td_value_set(map, "\xff", map), TD_ERR_INVALID, "itself");
    CHECK_NULL(td_value_set(map, "\xff", td_value_nil()), TD_ERR_INVALID, "key is not UTF-8");
    CHECK_NULL(td_value_set(map, NULL, map), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_set(NULL, "x", map), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_set(map, "x", NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_get(map, NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_get(NULL, "x"), TD_ERR_INVALID, "NULL");
}

TEST(large_maps)
{
    enum { KEYS = 20000 };
    td_value *map = td_value_map();
    char key[32];
    for (int round = 0; round < 2; round++) /* the second one replaces */
        for (int i = 0; i < KEYS; i++) {
            TD_SCOPE;
            snprintf(key, sizeof key, "layer.%d", i);
            CHECK(td_value_set(map, key, td_value_of(i + round)));
        }
    CHECK_EQ(td_value_count(map), KEYS);
    for (int i = 0; i < KEYS; i++) {
        snprintf(key, sizeof key, "layer.%d", i);
        CHECK_STR(td_value_key(map, i), key);
        CHECK_EQ(int_of(td_value_get(map, key)), i + 1);
    }
    CHECK(!td_value_get(map, "layer"));
    td_value_release(map);
}

/* A map that is an element cannot change: else values could hold themselves, which are never freed. */
TEST(elements_do_not_change)
{
    TD_SCOPE;
    td_value *inner = td_value_map(), *outer = td_value_map();
    CHECK(td_value_set(outer, "inner", inner));
    CHECK_NULL(td_value_set(inner, "outer", outer), TD_ERR_INVALID, "element of another value");
    td_value *listed = td_value_map();
    td_value_list(TD_VALUES(listed));
    CHECK_NULL(td_value_set(listed, "x", td_value_nil()), TD_ERR_INVALID, "fill it first");
    CHECK_NULL(td_value_set(outer, "x", outer), TD_ERR_INVALID, "itself");
    CHECK(td_value_set(outer, "inner", td_value_nil()));
}

TEST(depth_is_bounded)
{
    TD_SCOPE;
    td_value *list = TD_NO_ARGS, *map = td_value_map();
    for (int depth = 2; depth <= TD_VALUE_MAX_DEPTH; depth++) {
        list = td_value_list(TD_VALUES(td_value_nil(), list));
        map = td_value_set(td_value_map(), "x", map);
        CHECK(list && map);
    }
    CHECK_NULL(td_value_list(TD_VALUES(list)), TD_ERR_INVALID, "deeper than 64");
    CHECK_NULL(td_value_set(td_value_map(), "x", map), TD_ERR_INVALID, "deeper than 64");
    td_value *parent = td_value_set(td_value_map(), "x", td_value_nil());
    CHECK_NULL(td_value_set(parent, "x", list), TD_ERR_INVALID, "deeper than 64");
    CHECK_EQ(td_value_kind_of(td_value_get(parent, "x")), TD_VALUE_NIL);
}

TEST(wrong_kinds)
{
    TD_SCOPE;
    td_value *text = td_value_of("x"), *number = td_value_of(1);
    bool truth;
    int64_t integer;
    double real;
    size_t size;
    CHECK_FAILS(td_value_bool(number, &truth), TD_ERR_INVALID,
                "td_value_bool: the value is of kind int, not bool");
    CHECK_FAILS(td_value_int(text, &integer), TD_ERR_INVALID, "text, not int");
    CHECK_FAILS(td_value_int(td_value_of(1.0), &integer), TD_ERR_INVALID, "float, not int");
    CHECK_FAILS(td_value_float(text, &real), TD_ERR_INVALID, "text, not float");
    CHECK_NULL(td_value_text(number), TD_ERR_INVALID, "int, not text");
    CHECK_NULL(td_value_bytes(text, &size), TD_ERR_INVALID, "text, not bytes");
    CHECK_NULL(td_value_tensor(text), TD_ERR_INVALID, "text, not tensor");
    CHECK_NULL(td_value_module(text), TD_ERR_INVALID, "text, not module");
    CHECK_NULL(td_value_rref(text), TD_ERR_INVALID, "text, not rref");
    CHECK_NULL(td_value_future(text), TD_ERR_INVALID, "text, not future");
    CHECK_NULL(td_value_object(text, NULL), TD_ERR_INVALID, "text, not object");
    CHECK_NULL(td_value_at(text, 0), TD_ERR_INVALID, "text, not list");
}

TEST(null_arguments)
{
    TD_SCOPE;
    td_bytes text;
    td_value *number = td_value_of(1);
    bool truth;
    CHECK_FAILS(td_value_bool(NULL, &truth), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_value_bool(td_value_from_bool(true), NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_value_int(number, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_value_float(number, NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_bytes(td_value_from_bytes("", 0), NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_text(NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_at(NULL, 0), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_key(NULL, 0), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_tensor(NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_module(NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_rref(NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_future(NULL), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_object(NULL, &truth), TD_ERR_INVALID, "NULL");
    CHECK_NULL(td_value_from_object("x", NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_value_print(NULL, &text), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_value_print(number, NULL), TD_ERR_INVALID, "NULL");
    CHECK(!td_value_retain(NULL));
    CHECK(!td_value_return(NULL));
    CHECK(!td_value_same(NULL));
    td_value_release(NULL);
}

/* ---- What values hold ------------------------------------------------------------------------ */

static atomic_int freed;

static void count_free(void *data, void *arg)
{
    (void)data;
    (void)arg;
    freed++;
}

static float memory[4];

/* A tensor whose release is counted. */
static td_tensor *counted(void)
{
    td_tensor *tensor = td_from_blob(memory, TD_SHAPE(4), NULL, TD_F32, NULL, count_free, NULL);
    CHECK(tensor);
    return tensor;
}

TEST(tensors_are_retained)
{
    td_tensor *tensor = counted();
    td_value *value = td_value_of(tensor);
    CHECK(td_value_tensor(value) == tensor);
    td_tensor_release(tensor);
    CHECK_EQ(freed, 0);
    td_value_release(value);
    CHECK_EQ(freed, 1);
}

TEST(modules_are_taken_over)
{
    td_module *module = td_linear(2, 2);
    td_value *value = td_value_of(module);
    CHECK(td_value_module(value) == module);
    check_print(value, "module");
    td_value_release(value); /* a sanitizer sees a module that stays */
}

TEST(futures)
{
    td_future *future = td_future_create();
    td_value *value = td_value_of(future);
    CHECK(td_value_future(value) == future);
    td_future_release(future);
    CHECK(!td_future_test(td_value_future(value)));
    check_print(value, "future");
    td_value_release(value);
}

static void destroy_object(void *object)
{
    free(object);
    freed++;
}

TEST(objects)
{
    CHECK_OK(td_rpc_register_class(
        &(td_rpc_class){.signature = "Point(x: int)", .destroy = destroy_object}));
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "Plain()"}));
    void *object = malloc(8);
    td_value *value = td_value_from_object("Point", object);
    CHECK(td_value_object(value, "Point") == object);
    CHECK(td_value_object(value, NULL) == object);
    CHECK_NULL(td_value_object(value, "Net"), TD_ERR_INVALID, "is a Point, not a Net");
    check_print(value, "Point");
    CHECK_OK(td_rpc_unregister("Point")); /* the object keeps its class */
    CHECK(td_value_object(value, "Point") == object);
    CHECK_NULL(td_value_from_object("Point", memory), TD_ERR_INVALID, "no class \"Point\"");
    td_value_release(value);
    CHECK_EQ(freed, 1);
    value = td_value_from_object("Plain", memory); /* nothing to free */
    CHECK(value);
    td_value_release(value);
    CHECK_OK(td_rpc_unregister("Plain"));
}

/* ---- Scopes ---------------------------------------------------------------------------------- */

static td_value *returned(void)
{
    TD_SCOPE;
    td_value *list = td_value_list(TD_VALUES(td_value_of(counted()), td_value_of(2)));
    return td_value_return(list);
}

TEST(scopes)
{
    td_value *kept;
    {
        TD_SCOPE;
        td_value *outer = td_value_of(counted());
        {
            TD_SCOPE;
            td_value_list(TD_VALUES(outer, td_value_of(td_zeros(TD_SHAPE(2), TD_F32, NULL))));
            td_value_of(counted());
        }
        CHECK_EQ(freed, 1); /* the inner one */
        kept = td_value_retain(td_value_list(TD_VALUES(outer)));
        td_value *list = returned();
        CHECK_EQ(freed, 1); /* the list of `returned` is this scope's */
        CHECK_EQ(int_of(td_value_at(list, 1)), 2);
    }
    CHECK_EQ(freed, 2);
    td_value_release(kept);
    CHECK_EQ(freed, 3);
    td_value *mine = returned(); /* no scope around it: the caller's */
    CHECK_EQ(freed, 3);
    td_value_release(mine);
    CHECK_EQ(freed, 4);
}

/* ---- Threads --------------------------------------------------------------------------------- */

enum { THREADS = 4, TURNS = 20000 };

static void *use(void *arg)
{
    td_value *shared = arg;
    for (int i = 0; i < TURNS; i++) {
        TD_SCOPE;
        td_value *list = td_value_list(
            TD_VALUES(td_value_retain(shared), td_value_get(shared, "x")));
        CHECK_EQ(int_of(td_value_at(list, 1)), 5);
        td_value_release(shared);
    }
    td_value_release(shared);
    return NULL;
}

TEST(threads_share_values)
{
    pthread_t threads[THREADS];
    td_tensor *tensor = counted();
    td_value *shared = td_value_map(), *five = td_value_of(5), *held = td_value_of(tensor);
    CHECK(td_value_set(td_value_set(shared, "x", five), "t", held));
    td_value_release(five);
    td_value_release(held);
    td_tensor_release(tensor);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, use, td_value_retain(shared)), 0);
    td_value_release(shared);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(freed, 1);
}

/* ---- Printing and C types -------------------------------------------------------------------- */

TEST(printing)
{
    TD_SCOPE;
    check_print(td_value_nil(), "nil");
    check_print(td_value_from_bool(false), "false");
    check_print(td_value_of(INT64_MIN), "-9223372036854775808");
    check_print(td_value_of(1.0), "1.0");
    check_print(td_value_of(-0.0), "-0.0");
    check_print(td_value_of(0.1), "0.1");
    check_print(td_value_of(1.0 / 3), "0.3333333333333333");
    check_print(td_value_of(1e300), "1e+300");
    check_print(td_value_of((double)INFINITY), "inf");
    check_print(td_value_of((double)NAN), "nan");
    check_print(td_value_of("a\"b\\c\n\x1b\xc3\xbc"), "\"a\\\"b\\\\c\\n\\x1b\xc3\xbc\"");
    check_print(td_value_from_bytes("abc", 3), "3 bytes");
    check_print(TD_NO_ARGS, "[]");
    check_print(td_value_map(), "{}");
    td_value *map = td_value_set(td_value_map(), "x", TD_ARGS(1, 2.5, "a"));
    td_value_set(map, "w", td_value_of(td_zeros(TD_SHAPE(2, 3), TD_F32, NULL)));
    check_print(map, "{\"x\": [1, 2.5, \"a\"], \"w\": tensor f32 [2, 3]}");
    check_print(td_value_of(td_zeros(TD_SHAPE(1, 1, 1, 1, 1, 1, 1, 1), TD_COMPLEX128, NULL)),
                "tensor complex128 [1, 1, 1, 1, 1, 1, 1, 1]");
}

TEST(c_types)
{
    TD_SCOPE;
    bool truth = true;
    char c = 'a', *text = (char[]){"mutable"};
    const char *constant = "constant";
    td_value *nil = td_value_nil();
    CHECK_EQ(td_value_kind_of(td_value_of(truth)), TD_VALUE_BOOL);
    CHECK_EQ(int_of(td_value_of(c)), 'a');
    CHECK_EQ(int_of(td_value_of((signed char)-1)), -1);
    CHECK_EQ(int_of(td_value_of((unsigned char)255)), 255);
    CHECK_EQ(int_of(td_value_of((short)-2)), -2);
    CHECK_EQ(int_of(td_value_of((unsigned short)65535)), 65535);
    CHECK_EQ(int_of(td_value_of(-3)), -3);
    CHECK_EQ(int_of(td_value_of(UINT_MAX)), UINT_MAX);
    CHECK_EQ(int_of(td_value_of(LONG_MIN)), LONG_MIN);
    CHECK_EQ(int_of(td_value_of(LLONG_MAX)), LLONG_MAX);
    CHECK_EQ(int_of(td_value_of(4ul)), 4);
    CHECK_EQ(int_of(td_value_of(5ull)), 5);
    CHECK_NULL(td_value_of(ULLONG_MAX), TD_ERR_INVALID, "above 2^63 - 1");
    CHECK(float_of(td_value_of(0.5f)) == 0.5);
    CHECK_STR(td_value_text(td_value_of(text)), "mutable");
    CHECK_STR(td_value_text(td_value_of(constant)), "constant");
    CHECK(td_value_of(nil) == nil);
    CHECK_EQ(td_value_count(TD_ARGS(1)), 1);
    td_value *all = TD_ARGS(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, "twelve");
    CHECK_EQ(td_value_count(all), 12);
    CHECK_EQ(int_of(td_value_at(all, 10)), 11);
    CHECK_STR(td_value_text(td_value_at(all, 11)), "twelve");
}

/* An argument of TD_ARGS() is evaluated once. */
TEST(arguments_are_evaluated_once)
{
    TD_SCOPE;
    int i = 0;
    td_value *args = TD_ARGS(++i, 10);
    CHECK_EQ(int_of(td_value_at(args, 0)), 1);
    CHECK_EQ(i, 1);
}
