/* Values as bytes: each form of msgpack in both directions, round trips of all kinds, and malformed bytes. */
#include "runner.h"

#include "base/fail.h"
#include "rpc/codec.h"

#include <tandem/ops.h>
#include <tandem/rpc.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* ---- What is beside the bytes ---------------------------------------------------------------- */

struct beside {
    td_tensor *tensors[4];
    uint32_t count;
    td_rref *rref;
};

static td_status put_tensor(void *arg, td_tensor *tensor, uint32_t *number)
{
    struct beside *beside = arg;
    if (beside->count == 4)
        return td_fail(TD_ERR_INVALID, "more than 4 tensors");
    *number = beside->count;
    beside->tensors[beside->count++] = tensor;
    return TD_OK;
}

static td_tensor *get_tensor(void *arg, uint32_t number)
{
    struct beside *beside = arg;
    if (number < beside->count)
        return td_tensor_retain(beside->tensors[number]);
    td_fail(TD_ERR_INVALID, "there is no tensor %u", number);
    return NULL;
}

static td_status put_rref(void *arg, td_rref *rref, struct td__buffer *bytes)
{
    struct beside *beside = arg;
    beside->rref = rref;
    td__buffer_put(bytes, "rref", 4);
    return TD_OK;
}

static td_rref *get_rref(void *arg, const void *bytes, size_t size)
{
    struct beside *beside = arg;
    if (size == 4 && !memcmp(bytes, "rref", 4) && beside->rref)
        return td_rref_retain(beside->rref);
    td_fail(TD_ERR_INVALID, "there is no such reference");
    return NULL;
}

static const td__codec_fns fns = {put_tensor, put_rref, get_tensor, get_rref};

/* Objects of the class "Box" hold the value that they are packed as; see also box_pack_self(). */
static td_value *box_pack(void *object)
{
    return object;
}

static void *box_unpack(td_value *packed)
{
    if (td_value_kind_of(packed) != TD_VALUE_BOOL)
        return td_value_retain(packed);
    bool truth;
    CHECK_OK(td_value_bool(packed, &truth));
    return truth ? (td_fail(TD_ERR_STATE, "the box is closed"), NULL) : NULL;
}

static void box_destroy(void *object)
{
    td_value_release(object);
}

static void register_box(void)
{
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){
        .signature = "Box()", .pack = box_pack, .unpack = box_unpack, .destroy = box_destroy}));
}

static td_value *box(td_value *value)
{
    td_value *made = td_value_from_object("Box", td_value_retain(value));
    CHECK(made);
    return made;
}

static char *print(const td_value *value)
{
    td_bytes text = {0};
    CHECK_OK(td_value_print(value, &text));
    char *copy = strdup((const char *)text.data);
    td_bytes_free(&text);
    return copy;
}

/* ---- Golden bytes ---------------------------------------------------------------------------- */

struct golden {
    const char *bytes;
    size_t size;
    const char *text; /* as td_value_print() has it */
};
#define BYTES(literal) "" literal, sizeof(literal) - 1

/* What the encoder writes, which the decoder reads. */
static const struct golden written[] = {
    {BYTES("\xc0"), "nil"},
    {BYTES("\xc2"), "false"},
    {BYTES("\xc3"), "true"},
    {BYTES("\x00"), "0"},
    {BYTES("\x7f"), "127"},
    {BYTES("\xff"), "-1"},
    {BYTES("\xe0"), "-32"},
    {BYTES("\xcc\x80"), "128"},
    {BYTES("\xcc\xff"), "255"},
    {BYTES("\xcd\x01\x00"), "256"},
    {BYTES("\xcd\xff\xff"), "65535"},
    {BYTES("\xce\x00\x01\x00\x00"), "65536"},
    {BYTES("\xce\xff\xff\xff\xff"), "4294967295"},
    {BYTES("\xcf\x00\x00\x00\x01\x00\x00\x00\x00"), "4294967296"},
    {BYTES("\xcf\x7f\xff\xff\xff\xff\xff\xff\xff"), "9223372036854775807"},
    {BYTES("\xd0\xdf"), "-33"},
    {BYTES("\xd0\x80"), "-128"},
    {BYTES("\xd1\xff\x7f"), "-129"},
    {BYTES("\xd1\x80\x00"), "-32768"},
    {BYTES("\xd2\xff\xff\x7f\xff"), "-32769"},
    {BYTES("\xd2\x80\x00\x00\x00"), "-2147483648"},
    {BYTES("\xd3\xff\xff\xff\xff\x7f\xff\xff\xff"), "-2147483649"},
    {BYTES("\xd3\x80\x00\x00\x00\x00\x00\x00\x00"), "-9223372036854775808"},
    {BYTES("\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"), "0.5"},
    {BYTES("\xcb\xff\xf0\x00\x00\x00\x00\x00\x00"), "-inf"},
    {BYTES("\xa0"), "\"\""},
    {BYTES("\xa2hi"), "\"hi\""},
    {BYTES("\xc4\x00"), "0 bytes"},
    {BYTES("\xc4\x02\x00\xff"), "2 bytes"},
    {BYTES("\x90"), "[]"},
    {BYTES("\x93\x01\xcb\x40\x00\x00\x00\x00\x00\x00\x00\xa1x"), "[1, 2.0, \"x\"]"},
    {BYTES("\x80"), "{}"},
    {BYTES("\x82\xa1z\x01\xa1"
           "a\x91\xc0"),
     "{\"z\": 1, \"a\": [nil]}"},
    {BYTES("\xd6\x01\x00\x00\x00\x00"), "tensor f32 [2]"},
    {BYTES("\xc7\x06\x04\x92\xa3"
           "Box\x07"),
     "Box"},
};

/* What only the decoder knows: forms that are longer than need be. */
static const struct golden accepted[] = {
    {BYTES("\xcc\x01"), "1"},
    {BYTES("\xcd\x00\x01"), "1"},
    {BYTES("\xce\x00\x00\x00\x01"), "1"},
    {BYTES("\xcf\x00\x00\x00\x00\x00\x00\x00\x01"), "1"},
    {BYTES("\xd0\x01"), "1"},
    {BYTES("\xd1\xff\xff"), "-1"},
    {BYTES("\xd2\xff\xff\xff\xff"), "-1"},
    {BYTES("\xd3\xff\xff\xff\xff\xff\xff\xff\xff"), "-1"},
    {BYTES("\xca\x3f\x80\x00\x00"), "1.0"},
    {BYTES("\xd9\x01x"), "\"x\""},
    {BYTES("\xda\x00\x01x"), "\"x\""},
    {BYTES("\xdb\x00\x00\x00\x01x"), "\"x\""},
    {BYTES("\xc5\x00\x01x"), "1 bytes"},
    {BYTES("\xc6\x00\x00\x00\x01x"), "1 bytes"},
    {BYTES("\xdc\x00\x01\x05"), "[5]"},
    {BYTES("\xdd\x00\x00\x00\x01\x05"), "[5]"},
    {BYTES("\xde\x00\x01\xd9\x01k\x05"), "{\"k\": 5}"},
    {BYTES("\xdf\x00\x00\x00\x02\xda\x00\x01k\x05\xdb\x00\x00\x00\x01j\x06"),
     "{\"k\": 5, \"j\": 6}"},
    {BYTES("\xc7\x04\x01\x00\x00\x00\x00"), "tensor f32 [2]"},
    {BYTES("\xc8\x00\x04\x01\x00\x00\x00\x00"), "tensor f32 [2]"},
    {BYTES("\xc9\x00\x00\x00\x04\x01\x00\x00\x00\x00"), "tensor f32 [2]"},
    {BYTES("\xd8\x04\x92\xa3"
           "Box\xd9\x08"
           "abcdefgh\x00"
           "x"),
     NULL}, /* 16 bytes, but more than the pair */
    {BYTES("\xd7\x04\x92\xa3"
           "Box\xcd\x00\x01"),
     "Box"},
};

static td_value *decode_golden(const struct golden *golden, struct beside *beside)
{
    uint8_t *exact = malloc(golden->size ? golden->size
                                         : 1); /* a sanitizer sees a step past its end */
    memcpy(exact, golden->bytes, golden->size);
    td_value *value = td__decode(exact, golden->size, &fns, beside);
    free(exact);
    return value;
}

static void check_golden(const struct golden *golden, bool back)
{
    TD_SCOPE;
    struct beside beside = {.tensors = {td_zeros(TD_SHAPE(2), TD_F32, NULL)}, .count = 1};
    struct td__buffer bytes = {0};
    td_value *value = decode_golden(golden, &beside);
    if (!golden->text) {
        CHECK(!value);
        return;
    }
    if (!value)
        FAIL("%s: %s", golden->text, td_last_error());
    char *text = print(value);
    CHECK_STR(text, golden->text);
    beside.count = 0;
    CHECK_OK(td__encode(value, &fns, &beside, &bytes));
    if (back) {
        CHECK_EQ(bytes.size, golden->size);
        CHECK_MEM(bytes.data, golden->bytes, golden->size);
    }
    free(text);
    td__buffer_free(&bytes);
    td_value_release(value);
}

TEST(golden_bytes)
{
    register_box();
    for (size_t i = 0; i < sizeof written / sizeof written[0]; i++)
        check_golden(&written[i], true);
    for (size_t i = 0; i < sizeof accepted / sizeof accepted[0]; i++)
        check_golden(&accepted[i], false);
}

/* Heads by size: at both sides of each limit. */
static void check_head(const td_value *value, const char *head, size_t head_size, size_t size)
{
    struct td__buffer bytes = {0};
    CHECK_OK(td__encode(value, &fns, NULL, &bytes));
    CHECK_MEM(bytes.data, head, head_size);
    CHECK_EQ(bytes.size, size);
    td_value *back = td__decode(bytes.data, bytes.size, &fns, NULL);
    CHECK_EQ(td_value_count(back), td_value_count(value));
    CHECK_EQ(td_value_kind_of(back), td_value_kind_of(value));
    td_value_release(back);
    td__buffer_free(&bytes);
}

static td_value *text_of(size_t size)
{
    char *text = malloc(size + 1);
    memset(text, 'x', size);
    text[size] = 0;
    td_value *value = td_value_from_text(text);
    free(text);
    return value;
}

static td_value *list_of(int64_t size)
{
    td_value **items = malloc(sizeof *items * (size_t)size), *nil = td_value_nil();
    for (int64_t i = 0; i < size; i++)
        items[i] = nil;
    td_value *list = td_value_list(items, size);
    free(items);
    return list;
}

static td_value *map_of(int count)
{
    td_value *map = td_value_map(), *nil = td_value_nil();
    for (int i = 0; i < count; i++) {
        char key[16];
        snprintf(key, sizeof key, "%05d", i);
        CHECK(td_value_set(map, key, nil));
    }
    return map;
}

TEST(heads_by_size)
{
    TD_SCOPE;
    static uint8_t zeros[65536];
    check_head(text_of(31), "\xbf", 1, 32);
    check_head(text_of(32), "\xd9\x20", 2, 34);
    check_head(text_of(255), "\xd9\xff", 2, 257);
    check_head(text_of(256), "\xda\x01\x00", 3, 259);
    check_head(text_of(65535), "\xda\xff\xff", 3, 65538);
    check_head(text_of(65536), "\xdb\x00\x01\x00\x00", 5, 65541);
    check_head(td_value_from_bytes(zeros, 255), "\xc4\xff", 2, 257);
    check_head(td_value_from_bytes(zeros, 256), "\xc5\x01\x00", 3, 259);
    check_head(td_value_from_bytes(zeros, 65535), "\xc5\xff\xff", 3, 65538);
    check_head(td_value_from_bytes(zeros, 65536), "\xc6\x00\x01\x00\x00", 5, 65541);
    check_head(list_of(15), "\x9f", 1, 16);
    check_head(list_of(16), "\xdc\x00\x10", 3, 19);
    check_head(list_of(65535), "\xdc\xff\xff", 3, 65538);
    check_head(list_of(65536), "\xdd\x00\x01\x00\x00", 5, 65541);
    check_head(map_of(15), "\x8f", 1, 1 + 15 * 7);
    check_head(map_of(16), "\xde\x00\x10", 3, 3 + 16 * 7);
    check_head(map_of(65536), "\xdf\x00\x01\x00\x00", 5, 5 + 65536 * 7);
}

/* ---- Round trips ----------------------------------------------------------------------------- */

static td_value *round_trip(const td_value *value, struct beside *beside)
{
    struct td__buffer bytes = {0};
    CHECK_OK(td__encode(value, &fns, beside, &bytes));
    td_value *back = td__decode(bytes.data, bytes.size, &fns, beside);
    if (!back)
        FAIL("%s", td_last_error());
    char *before = print(value), *after = print(back);
    CHECK_STR(after, before);
    free(before);
    free(after);
    td__buffer_free(&bytes);
    return back;
}

TEST(round_trips_of_all_kinds)
{
    TD_SCOPE;
    register_box();
    struct beside beside = {0};
    td_tensor *x = td_zeros(TD_SHAPE(2, 3), TD_F32, NULL), *y = td_zeros(TD_SHAPE(1), TD_I64, NULL);
    td_value *map = td_value_set(td_value_map(), "k", TD_ARGS(td_value_from_bool(true), x));
    td_value *value = TD_ARGS(td_value_nil(), -7, 0.1, "text", td_value_from_bytes("\0\1", 2), map,
                              y, box(TD_ARGS(x, box(td_value_of(1)))));
    td_value *back = round_trip(value, &beside);
    CHECK_EQ(beside.count, 3);
    CHECK(td_value_tensor(td_value_at(back, 6)) == y);
    CHECK(td_value_tensor(td_value_at(td_value_get(td_value_at(back, 5), "k"), 1)) == x);
    td_value *inner = td_value_object(td_value_at(back, 7), "Box");
    CHECK(td_value_tensor(td_value_at(inner, 0)) == x);
    td_value_release(back);
}

TEST(not_a_number_keeps_its_bits)
{
    TD_SCOPE;
    double nan = -NAN, result = 0;
    td_value *back = round_trip(td_value_of(nan), NULL);
    CHECK_OK(td_value_float(back, &result));
    CHECK_MEM(&result, &nan, sizeof nan);
    td_value_release(back);
}

TEST(references)
{
    CHECK_OK(td_init_rpc("solo", &(td_rpc_options){.rank = 0, .world_size = 1}));
    {
        TD_SCOPE;
        struct beside beside = {0};
        td_rref *rref = td_rref_create(td_value_of(5));
        td_value *value = td_value_of(rref);
        CHECK(td_value_rref(value) == rref);
        td_value *back = round_trip(TD_ARGS(value), &beside);
        CHECK(td_value_rref(td_value_at(back, 0)) == rref);
        char *text = print(back);
        CHECK_STR(text, "[reference on \"solo\"]");
        free(text);
        td_value_release(back);
    }
    CHECK_OK(td_rpc_shutdown(NULL));
}

TEST(deepest_values)
{
    TD_SCOPE;
    td_value *lists = TD_NO_ARGS, *maps = td_value_map();
    for (int depth = 2; depth <= TD_VALUE_MAX_DEPTH; depth++) {
        lists = TD_ARGS(lists, depth);
        maps = td_value_set(td_value_map(), "x", maps);
    }
    td_value_release(round_trip(lists, NULL));
    td_value_release(round_trip(maps, NULL));
}

static bool fails_at(const td_value *value, td_status status, const char *text)
{
    struct td__buffer bytes = {0};
    struct beside beside = {0};
    CHECK_EQ(td__encode(value, &fns, &beside, &bytes), status);
    td__buffer_free(&bytes);
    CHECK_STR(td_last_error(), text);
    return true;
}

static td_value *pack_self(void *object)
{
    return td_value_from_object("Endless", object);
}

static td_value *pack_nothing(void *object)
{
    (void)object;
    return NULL;
}

static void *unpack_nothing(td_value *packed)
{
    (void)packed;
    return NULL;
}

TEST(values_that_cannot_be_sent)
{
    TD_SCOPE;
    td_future *future = td_future_create();
    td_value *x = td_value_set(td_value_map(), "x", td_value_of(future));
    fails_at(td_value_of(future), TD_ERR_INVALID, "a future cannot be sent");
    fails_at(TD_ARGS(1, 2, x), TD_ERR_INVALID, "[2][\"x\"]: a future cannot be sent");
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "Sealed()"}));
    fails_at(TD_ARGS(td_value_from_object("Sealed", future)), TD_ERR_UNSUPPORTED,
             "[0]: an object of class \"Sealed\" cannot be sent: the class has no pack(); send a "
             "reference");
    CHECK_OK(td_rpc_register_class(
        &(td_rpc_class){.signature = "Empty()", .pack = pack_nothing, .unpack = unpack_nothing}));
    fails_at(td_value_from_object("Empty", future), TD_ERR_INVALID,
             "pack() of class \"Empty\" returned NULL without an error");
    CHECK_OK(td_rpc_register_class(
        &(td_rpc_class){.signature = "Endless()", .pack = pack_self, .unpack = unpack_nothing}));
    fails_at(td_value_from_object("Endless", future), TD_ERR_INVALID,
             "the values are nested deeper than 64");
    td_tensor *t = td_zeros(TD_SHAPE(1), TD_F32, NULL);
    fails_at(TD_ARGS(t, t, t, t, t), TD_ERR_INVALID, "[4]: more than 4 tensors");
}

/* Objects count twice in the depth, for themselves and their pair: the encoder refuses what the decoder would. */
TEST(depth_of_objects)
{
    TD_SCOPE;
    register_box();
    td_value *value = td_value_of(1);
    for (int i = 0; i < TD_VALUE_MAX_DEPTH / 2; i++)
        value = box(value);
    td_value_release(round_trip(value, NULL));
    fails_at(box(value), TD_ERR_INVALID, "the values are nested deeper than 64");
    fails_at(TD_ARGS(value), TD_ERR_INVALID, "[0]: the values are nested deeper than 64");
}

/* ---- Malformed bytes ------------------------------------------------------------------------- */

struct malformed {
    const char *bytes;
    size_t size;
    const char *why;
};

static const struct malformed malformed[] = {
    {BYTES(""), "cut off"},
    {BYTES("\xcc"), "cut off"},
    {BYTES("\xcd\x01"), "cut off"},
    {BYTES("\xd3\x01\x01\x01\x01\x01\x01\x01"), "cut off"},
    {BYTES("\xcb\x01"), "cut off"},
    {BYTES("\xa2x"), "cut off"},
    {BYTES("\xd9"), "cut off"},
    {BYTES("\xdb\xff\xff\xff\xff"), "cut off"},
    {BYTES("\xc4\x01"), "cut off"},
    {BYTES("\xc6\xff\xff\xff\xff\x01"), "cut off"},
    {BYTES("\x91"), "cut off"},
    {BYTES("\x92\x91\x01"), "cut off"},
    {BYTES("\xdd\xff\xff\xff\xff\xc0"), "cut off"},
    {BYTES("\x81\xa1x"), "cut off"},
    {BYTES("\xdf\xff\xff\xff\xff\xa0\xc0"), "cut off"},
    {BYTES("\x81\xda\x00"), "cut off"},
    {BYTES("\x81\xa5xy"), "cut off"},
    {BYTES("\xd6"), "cut off"},
    {BYTES("\xd6\x01\x00"), "cut off"},
    {BYTES("\xc7\x04"), "cut off"},
    {BYTES("\xcf\x80\x00\x00\x00\x00\x00\x00\x00"), "above 2^63 - 1"},
    {BYTES("\xa1\xff"), "a text is not UTF-8"},
    {BYTES("\xa1\x00"), "a text is not UTF-8"}, /* a text ends with a NUL */
    {BYTES("\xa2\xc0\x80"), "a text is not UTF-8"},
    {BYTES("\x81\xa1\xff\xc0"), "a key is not UTF-8"},
    {BYTES("\x81\x01\xc0"), "a key is not a text"},
    {BYTES("\x81\xc4\x01x\xc0"), "a key is not a text"},
    {BYTES("\x82\xa1x\x01\xa1x\x02"), "a map has a key twice"},
    {BYTES("\xc1"), "an unknown form"},
    {BYTES("\xd4\x00\x00"), "an unknown extension"},
    {BYTES("\xd4\x7f\x00"), "an unknown extension"},
    {BYTES("\xd4\x01\x00"), "a tensor has 4 bytes"},
    {BYTES("\xd6\x01\x05\x00\x00\x00"), "there is no tensor 5"},
    {BYTES("\xd6\x02xxxx"), "there is no such reference"},
    {BYTES("\xd4\x04\xc0"), "a list of a name and a value"},
    {BYTES("\xd5\x04\x91\xc0"), "a list of a name and a value"},
    {BYTES("\xc7\x03\x04\x92\x01\x02"), "a list of a name and a value"},
    {BYTES("\xc7\x04\x04\x92\xa0\x02\x03"), "a list of a name and a value"},
    {BYTES("\xc7\x04\x03\x92\xa1x\x02"), "a list of a name and a value"}, /* a module has no name */
    {BYTES("\xc7\x02\x04\x92\xa0"), "cut off"},
    {BYTES("\xc7\x04\x04\x92\xa1x\x02"), "there is no class \"x\""},
    {BYTES("\xc7\x06\x04\x92\xa3"
           "Box\xc2"),
     "unpack() of class \"Box\" returned NULL without an error"},
    {BYTES("\xc0\xc0"), "bytes behind it"},
};

TEST(malformed_bytes)
{
    register_box();
    for (size_t i = 0; i < sizeof malformed / sizeof malformed[0]; i++) {
        struct golden golden = {malformed[i].bytes, malformed[i].size, NULL};
        struct beside beside = {0};
        CHECK(!decode_golden(&golden, &beside));
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        CHECK_CONTAINS(td_last_error(), malformed[i].why);
    }
    CHECK(!td__decode("\xc7\x06\x04\x92\xa3"
                      "Box\xc3",
                      9, &fns, NULL));
    CHECK_EQ(td_last_status(), TD_ERR_STATE); /* what unpack() says */
    CHECK_STR(td_last_error(), "the box is closed");
}

/* Each beginning of valid bytes is refused, and nothing of it stays. */
TEST(every_cut_is_refused)
{
    TD_SCOPE;
    register_box();
    struct beside beside = {0};
    struct td__buffer bytes = {0};
    td_value *value = TD_ARGS(map_of(40), box(TD_ARGS("a", td_zeros(TD_SHAPE(1), TD_F32, NULL))), 1e9);
    CHECK_OK(td__encode(value, &fns, &beside, &bytes));
    for (size_t size = 0; size < bytes.size; size++) {
        struct golden golden = {(const char *)bytes.data, size, NULL};
        CHECK(!decode_golden(&golden, &beside));
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
    }
    td__buffer_free(&bytes);
}

TEST(too_deep_bytes)
{
    uint8_t bytes[100000];
    memset(bytes, 0x91, sizeof bytes);
    CHECK(!td__decode(bytes, sizeof bytes, &fns, NULL));
    CHECK_CONTAINS(td_last_error(), "nested too deep");
    bytes[TD_VALUE_MAX_DEPTH] = 0x90; /* an empty list in 64 lists */
    CHECK(!td__decode(bytes, TD_VALUE_MAX_DEPTH + 1, &fns, NULL));
    CHECK_CONTAINS(td_last_error(), "deeper than 64");
    bytes[TD_VALUE_MAX_DEPTH] = 0xc0;
    td_value *value = td__decode(bytes, TD_VALUE_MAX_DEPTH + 1, &fns, NULL);
    CHECK(value);
    td_value_release(value);
}

/* Lets the process get `more` bytes from now on. A sanitizer needs too much memory for that. */
static void limit_memory(size_t more)
{
    unsigned long long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file);
    CHECK_EQ(fscanf(file, "%llu", &pages), 1);
    fclose(file);
    rlim_t limit = pages * (unsigned long long)sysconf(_SC_PAGESIZE) + more;
    if (td_test_slowness() == 1)
        CHECK_EQ(setrlimit(RLIMIT_AS, &(struct rlimit){limit, limit}), 0);
}

/* Lists that promise as many elements as there are bytes, in one another, get memory only for what is there. */
TEST(promises_cost_nothing)
{
    enum { LEVELS = 60, SIZE = 16 << 20 };
    uint8_t *bytes = malloc(SIZE);
    memset(bytes, 0xc0, SIZE);
    for (int i = 0; i < LEVELS; i++) {
        uint32_t count = SIZE - 5 * LEVELS;
        uint8_t head[5] = {0xdd, (uint8_t)(count >> 24), (uint8_t)(count >> 16),
                           (uint8_t)(count >> 8), (uint8_t)count};
        memcpy(bytes + 5 * i, head, 5);
    }
    bytes[5 * LEVELS] = 0xc1; /* not a value */
    limit_memory(1 << 30);    /* 60 times 128 MiB are more */
    CHECK(!td__decode(bytes, SIZE, &fns, NULL));
    CHECK_CONTAINS(td_last_error(), "unknown form");
    free(bytes);
}
