/* Received modules whose values were changed: each is an error, or a module that can be used without harm. Memory is
 * checked by the sanitizers, and by the size of the process. */
#include "runner.h"

#include "module_samples.h"

#include <tandem/tandem.h>

#include <math.h>
#include <string.h>
#include <sys/resource.h>

/* ---- Mutations ---------------------------------------------------------------------------------- */

enum { DROP = 0, TWICE, RENAME, REPLACE };

static td_value *replacement(int index)
{
    static const int64_t integers[] = {-1,        0,         1,         2,         3,
                                       5,         64,        4096,      INT32_MAX, 1LL << 31,
                                       1LL << 40, 1LL << 53, INT64_MIN, INT64_MAX};
    static const double floats[] = {NAN, INFINITY, -INFINITY, -1, 0, 0.5, 1, 1e300, 5e-324};
    static const char *const texts[] = {"",     ".",      "weight", "0",
                                        "Nope", "Linear", "Conv2d", "MultiheadAttention"};
    static const struct {
        int64_t shape[4];
        int ndim;
        td_dtype dtype;
    } tensors[] = {{{0}, 0, TD_F32},    {{0}, 0, TD_I64},          {{0}, 1, TD_F32},
                   {{3}, 1, TD_F32},    {{3}, 1, TD_I64},          {{6, 6}, 2, TD_F32},
                   {{8, 8}, 2, TD_F64}, {{1, 1, 1, 1}, 4, TD_F32}, {{0, 6}, 2, TD_F32},
                   {{3, 6}, 2, TD_BOOL}};
    enum {
        INTEGERS = sizeof integers / sizeof integers[0],
        FLOATS = sizeof floats / sizeof floats[0],
        TEXTS = sizeof texts / sizeof texts[0],
        TENSORS = sizeof tensors / sizeof tensors[0]
    };
    if (index < INTEGERS)
        return td_value_from_int(integers[index]);
    index -= INTEGERS;
    if (index < FLOATS)
        return td_value_from_float(floats[index]);
    index -= FLOATS;
    if (index < TEXTS)
        return td_value_from_text(texts[index]);
    index -= TEXTS;
    if (index < TENSORS)
        return td_value_from_tensor(
            td_zeros(tensors[index].shape, tensors[index].ndim, tensors[index].dtype, NULL));
    switch (index - TENSORS) {
    case 0:
        return td_value_nil();
    case 1:
        return td_value_from_bool(true);
    case 2:
        return td_value_from_bool(false);
    case 3:
        return TD_NO_ARGS;
    case 4:
        return td_value_map();
    case 5:
        return td_value_from_bytes("\0\1", 2);
    }
    return NULL;
}

/* A change of the node of a number, counted in the order of copy(). */
struct mutation {
    int target, what;
    int at; /* the node that is copied next */
};

static td_value *copy(const td_value *value, struct mutation *mutation);

static void add(td_value *parent, const char *key, td_value *item)
{
    if (parent->kind == TD_VALUE_MAP)
        CHECK(td_value_set(parent, key, item));
    else
        CHECK(td__value_append(parent, NULL, td_value_retain(item)));
}

static void copy_item(td_value *parent, const td_value *from, int64_t index,
                      struct mutation *mutation)
{
    bool here = mutation->at == mutation->target;
    const char *key = from->kind == TD_VALUE_MAP ? from->keys[index] : NULL;
    td_value *item = copy(from->items[index], mutation);
    if (here && mutation->what == DROP)
        return;
    if (here && mutation->what == TWICE)
        add(parent, "again", item);
    add(parent, here && key && mutation->what == RENAME ? "other" : key, item);
}

static td_value *copy(const td_value *value, struct mutation *mutation)
{
    bool here = mutation->at++ == mutation->target;
    if (here && mutation->what >= REPLACE)
        return replacement(mutation->what - REPLACE);
    if (value->kind != TD_VALUE_LIST && value->kind != TD_VALUE_MAP)
        return (td_value *)value;
    td_value *result = value->kind == TD_VALUE_MAP ? td_value_map() : TD_NO_ARGS;
    for (int64_t i = 0; i < value->count; i++)
        copy_item(result, value, i, mutation);
    return result;
}

static int node_count(const td_value *value)
{
    int count = 1;
    for (int64_t i = 0; i < td_value_count(value); i++)
        count += node_count(td_value_at(value, i));
    return count;
}

static int replacement_count(void)
{
    TD_SCOPE;
    int count = 0;
    while (replacement(count))
        count++;
    return count;
}

/* ---- Using them --------------------------------------------------------------------------------- */

struct outcome {
    int refused, made;
};

/* What a program does with a module, with inputs that may not fit. */
static void use(td_module *module)
{
    td_bytes text = td_module_text(module);
    td_bytes_free(&text);
    td_state_destroy(td_module_state(module));
    for (int mode = 0; mode < 2; mode++) {
        td_module_train(module, mode == 0);
        for (enum sample_input input = IMAGE; input < INPUTS; input++) {
            TD_SCOPE;
            td_tensor *y = td_forward(module, sample_input(input));
            if (y && td_tensor_requires_grad(y))
                td_backward(td_sum(y));
        }
    }
    td_module_destroy(td_module_clone(module));
}

static void receive(const td_value *packed, struct outcome *outcome)
{
    td_module *module = send_packed(packed);
    if (!module) {
        CHECK(td_last_status() != TD_OK && td_last_error()[0]);
        outcome->refused++;
        return;
    }
    use(module);
    td_module_destroy(module);
    outcome->made++;
}

static void check_memory(void)
{
    struct rusage usage;
    CHECK_EQ(getrusage(RUSAGE_SELF, &usage), 0);
    CHECK(usage.ru_maxrss < 2 * 1024 * 1024); /* KiB */
}

TEST(each_entry_changed, .host_only = "an index out of range fails an accelerator",
     .deadline_s = 120)
{
    int ways = REPLACE + replacement_count();
    for (int i = 0; i < sample_count; i++) {
        TD_SCOPE;
        td_module *module = samples[i].make();
        td_value *packed = td__module_pack(module);
        int nodes = node_count(packed);
        struct outcome outcome = {0};
        int step = nodes * ways / 2000 * 2 + 1; /* of large ones, some of the cases */
        for (int c = 0; c < nodes * ways; c += step) {
            TD_SCOPE;
            td_manual_seed(3);
            struct mutation mutation = {.target = c / ways, .what = c % ways};
            receive(copy(packed, &mutation), &outcome);
        }
        if (outcome.refused < outcome.made || !outcome.made)
            FAIL("%s: %d were refused, %d not", samples[i].name, outcome.refused, outcome.made);
        td_module_destroy(module);
    }
    check_memory();
}

TEST(several_entries_changed, .host_only = "an index out of range fails an accelerator",
     .deadline_s = 120)
{
    int ways = REPLACE + replacement_count();
    uint64_t random = 88172645463325252u;
    struct outcome outcome = {0};
    for (int c = 0; c < 3000; c++) {
        TD_SCOPE;
        td_manual_seed(3);
        td_module *module = samples[c % sample_count].make();
        td_value *packed = td__module_pack(module);
        for (int i = 0; i < 1 + c % 3 && packed; i++) {
            random ^= random << 13, random ^= random >> 7, random ^= random << 17;
            struct mutation mutation = {.target = (int)(random % (uint64_t)node_count(packed)),
                                        .what = (int)(random / 65536 % (uint64_t)ways)};
            packed = copy(packed, &mutation);
        }
        receive(packed, &outcome);
        td_module_destroy(module);
    }
    CHECK(outcome.refused > 1000 && outcome.made > 10);
    check_memory();
}

/* ---- Certain changes ---------------------------------------------------------------------------- */

/* A packed module of which entry `key` of module `index` is replaced. */
static td_value *with_entry(td_value *packed, int64_t index, const char *key, td_value *value)
{
    struct mutation none = {.target = -1};
    td_value *other = copy(packed, &none),
             *module = td_value_at(td_value_get(other, "modules"), index);
    int64_t at = 0;
    while (at < module->count && strcmp(module->keys[at], key) != 0)
        at++;
    CHECK(at < module->count);
    td_value_release(module->items[at]);
    module->items[at] = td_value_retain(value);
    return other;
}

static void check_refused(const td_value *packed, const char *part)
{
    td_module *module = send_packed(packed);
    CHECK(!module);
    CHECK_CONTAINS(td_last_error(), part);
}

TEST(errors_name_what_is_wrong)
{
    TD_SCOPE;
    td_module *module = td_sequential(td_linear(6, 3), td_dropout(0.5), NULL);
    td_value *packed = td__module_pack(module);
    check_refused(with_entry(packed, 1, "kind", td_value_of("Own2")), "\"Own2\"");
    check_refused(with_entry(packed, 1, "kind", td_value_of("DistributedDataParallel")),
                  "\"DistributedDataParallel\"");
    check_refused(
        with_entry(packed, 2, "options", td_value_set(td_value_map(), "p", td_value_of(1.5))),
        "the option \"p\" of a received Dropout is 1.5; it must be 0 to 1");
    check_refused(with_entry(packed, 2, "options", td_value_map()), "no option \"p\"");
    check_refused(
        with_entry(packed, 1, "options", td_value_set(td_value_map(), "p", td_value_of(1.5))),
        "a received Linear has 1 options; there are 0");
    check_refused(with_entry(packed, 1, "parameters", TD_NO_ARGS), "0 parameters");
    check_refused(with_entry(packed, 2, "parent", td_value_of(2)), "parent");
    check_refused(with_entry(packed, 2, "name", td_value_of("0")), "\"0\" already");
    check_refused(with_entry(packed, 2, "name", td_value_of("a.b")), "\"a.b\"");
    check_refused(with_entry(packed, 0, "training", td_value_of(1)), "\"training\"");
    check_refused(
        with_entry(packed, 1, "parameters", TD_ARGS(TD_ARGS("weight", 0), TD_ARGS("bias", 0))),
        "\"bias\"");
    check_refused(with_entry(packed, 1, "parameters", TD_ARGS(TD_ARGS("weight", 2))),
                  "number of no tensor");
    td_module_destroy(module);
}

/* A chain of modules, each the child of the one before. */
TEST(deep_and_wide_ones_are_refused)
{
    for (int wide = 0; wide < 2; wide++) {
        TD_SCOPE;
        td_module *module = td_sequential_of(NULL, 0);
        td_value *packed = td__module_pack(module);
        td_value *root = td_value_at(td_value_get(packed, "modules"), 0);
        td_value *modules = td__value_adopt(td__value_new_list(0));
        CHECK(td__value_append(modules, NULL, td_value_retain(root)));
        for (int i = 0; i < (wide ? 9000 : 65); i++) {
            char name[16];
            struct mutation none = {.target = -1};
            snprintf(name, sizeof name, "%d", i);
            td_value *child = copy(root, &none);
            CHECK(td_value_set(child, "parent", td_value_of(wide ? 0 : i)));
            CHECK(td_value_set(child, "name", td_value_of((const char *)name)));
            CHECK(td__value_append(modules, NULL, td_value_retain(child)));
        }
        td_value *tree = td_value_set(td_value_map(), "tensors", TD_NO_ARGS);
        check_refused(td_value_set(tree, "modules", modules), "nested too deep");
        td_module_destroy(module);
    }
}
