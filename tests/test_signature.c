/* Signatures: each form, each mistake, and the binding of arguments; and the registry of functions and classes. */
#include "runner.h"

#include "rpc/rpc_registry.h"
#include "rpc/value_internal.h"

#include <tandem/ops.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char memory[8]; /* of objects that are only compared */

static struct td__signature *parse(const char *text)
{
    struct td__signature *signature = NULL;
    CHECK_OK(td__signature_parse(text, &signature));
    return signature;
}

/* The bound arguments as text, or the error. For free(). */
static char *bind(const char *text, td_value *args, td_value *kwargs)
{
    struct td__signature *signature = parse(text);
    struct td__bound bound;
    char *result;
    if (td__signature_bind(signature, args, kwargs, &bound)) {
        CHECK_EQ(td_last_status(), TD_ERR_INVALID);
        result = strdup(td_last_error());
    } else {
        td_bytes printed = {0};
        TD_SCOPE;
        CHECK_OK(td_value_print(td_value_list(bound.values, bound.count), &printed));
        result = strdup((const char *)printed.data);
        td_bytes_free(&printed);
        td__bound_free(&bound);
    }
    td__signature_free(signature);
    return result;
}

#define CHECK_BIND(signature, args, kwargs, expected)                                              \
    do {                                                                                           \
        TD_SCOPE;                                                                                  \
        char *result = bind(signature, args, kwargs);                                              \
        CHECK_STR(result, expected);                                                               \
        free(result);                                                                              \
    } while (0)

static td_value *named(const char *key, td_value *value)
{
    return td_value_set(td_value_map(), key, value);
}

/* ---- Forms ----------------------------------------------------------------------------------- */

TEST(defaults_and_names)
{
    static const char add[] = "add(x: int, y: int, alpha: float = 1)";
    CHECK_BIND(add, TD_ARGS(1, 2), NULL, "[1, 2, 1]");
    CHECK_BIND(add, TD_ARGS(1, 2, 0.5), NULL, "[1, 2, 0.5]");
    CHECK_BIND(add, TD_ARGS(1), named("y", td_value_of(5)), "[1, 5, 1]");
    CHECK_BIND(add, NULL, td_value_set(named("y", td_value_of(5)), "x", td_value_of(4)),
               "[4, 5, 1]");
    CHECK_BIND(add, TD_ARGS(1, 2), named("alpha", td_value_of(3)), "[1, 2, 3]");
    CHECK_BIND(add, TD_ARGS(1, 2, 3, 4), NULL, "add() takes 2 to 3 arguments, not 4");
    CHECK_BIND(add, TD_ARGS(1), NULL, "add() takes 2 to 3 arguments, not 1");
    CHECK_BIND(add, TD_ARGS(1), named("alpha", td_value_of(3)), "add(): y is missing");
    CHECK_BIND(add, TD_ARGS(1, "y"), NULL, "add(): argument 1 (y) is of type text, not int");
    CHECK_BIND(add, TD_ARGS(1, 2), named("z", td_value_of(3)), "add() has no parameter z");
    CHECK_BIND(add, TD_ARGS(1, 2), named("x", td_value_of(3)), "add(): x is given twice");
}

TEST(optional_parameters)
{
    static const char log[] = "log(level: int, message: text?)";
    CHECK_BIND(log, TD_ARGS(1), NULL, "[1, nil]");
    CHECK_BIND(log, TD_ARGS(1, td_value_nil()), NULL, "[1, nil]");
    CHECK_BIND(log, TD_ARGS(1, "m"), NULL, "[1, \"m\"]");
    CHECK_BIND(log, TD_ARGS(1, 2), NULL,
               "log(): argument 1 (message) is of type int, not text or nil");
    CHECK_BIND("f(x: int = nil)", TD_NO_ARGS, NULL, "[nil]");
    CHECK_BIND("f(x: int? = 3)", TD_NO_ARGS, NULL, "[3]");
    CHECK_BIND("f(x: int? = 3)", TD_ARGS(td_value_nil()), NULL, "[nil]");
    CHECK_BIND("f(x?)", TD_NO_ARGS, NULL, "[nil]");
}

TEST(any_number_of_arguments)
{
    static const char sum[] = "sum(values...: float)";
    CHECK_BIND(sum, TD_NO_ARGS, NULL, "[]");
    CHECK_BIND(sum, NULL, NULL, "[]");
    CHECK_BIND(sum, TD_ARGS(1, 2.5, 3), NULL, "[1, 2.5, 3]");
    CHECK_BIND(sum, TD_ARGS(1, "a"), NULL, "sum(): argument 1 (values) is of type text, not float");
    CHECK_BIND(sum, NULL, named("values", td_value_of(1)),
               "sum() has no parameter values that can be named");
    CHECK_BIND("f(a, rest...)", TD_ARGS(1, "x", td_value_nil()), NULL, "[1, \"x\", nil]");
    CHECK_BIND("f(a, rest...)", TD_NO_ARGS, NULL, "f() takes at least 1 argument, not 0");
    CHECK_BIND("f(a, b, rest...)", TD_NO_ARGS, NULL, "f() takes at least 2 arguments, not 0");
    CHECK_BIND("f(a = 1, rest...: int?)", TD_ARGS(2, td_value_nil()), NULL, "[2, nil]");
    CHECK_BIND("f(a = 1, rest...)", TD_NO_ARGS, NULL, "[1]");
}

TEST(few_parameters)
{
    CHECK_BIND("ping()", TD_NO_ARGS, NULL, "[]");
    CHECK_BIND("ping( )", TD_ARGS(1), NULL, "ping() takes 0 arguments, not 1");
    CHECK_BIND("echo(x)", TD_ARGS("a"), NULL, "[\"a\"]");
    CHECK_BIND("echo(x)", TD_ARGS(td_value_nil()), NULL, "[nil]");
    CHECK_BIND("echo(x)", TD_NO_ARGS, NULL, "echo() takes 1 argument, not 0");
    CHECK_BIND("echo(x = 1)", TD_ARGS(1, 2), NULL, "echo() takes 0 to 1 arguments, not 2");
    CHECK_BIND(" echo (\n\tx : int ) ", TD_ARGS(1), NULL, "[1]");
    struct td__signature *signature = parse("a.b_1.c(x)");
    CHECK_STR(td__signature_name(signature), "a.b_1.c");
    td__signature_free(signature);
    td__signature_free(NULL);
}

TEST(values_of_defaults)
{
    CHECK_BIND(
        "f(a = nil, b = true, c = false, d = -3, e = 2.5e1, g = \"text, )\", h = .5, i = +7)",
        TD_NO_ARGS, NULL, "[nil, true, false, -3, 25.0, \"text, )\", 0.5, 7]");
    CHECK_BIND("f(a = 9223372036854775807, b = 9223372036854775808)", TD_NO_ARGS, NULL,
               "[9223372036854775807, 9.223372036854776e+18]");
    CHECK_BIND("f(a: any = 1, b: text = \"\", c: float = 1, d: bool = false)", TD_NO_ARGS, NULL,
               "[1, \"\", 1, false]");
}

struct typed {
    const char *type;
    td_value *value;
};

TEST(types)
{
    TD_SCOPE;
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "Net()"}));
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "other.Net()"}));
    const struct typed values[] = {
        {"nil", td_value_nil()},
        {"bool", td_value_from_bool(true)},
        {"int", td_value_of(1)},
        {"float", td_value_of(0.5)},
        {"text", td_value_of("x")},
        {"bytes", td_value_from_bytes("", 0)},
        {"list", TD_NO_ARGS},
        {"map", td_value_map()},
        {"tensor", td_value_of(td_zeros(TD_SHAPE(1), TD_F32, NULL))},
        {"module", td_value_of(td_relu())},
        {"Net", td_value_from_object("Net", memory)},
        {"other.Net", td_value_from_object("other.Net", memory)},
    };
    enum { COUNT = sizeof values / sizeof values[0] };
    for (int p = 0; p < COUNT; p++) {
        char text[64];
        struct td__bound bound;
        snprintf(text, sizeof text, "f(x: %s)", values[p].type);
        struct td__signature *signature = parse(text);
        for (int v = 0; v < COUNT; v++) {
            bool fits = p == v ||
                        (!strcmp(values[p].type, "float") && !strcmp(values[v].type, "int"));
            td_status status = td__signature_bind(signature, TD_ARGS(values[v].value), NULL,
                                                  &bound);
            CHECK_EQ(status, fits ? TD_OK : TD_ERR_INVALID);
            if (fits)
                td__bound_free(&bound);
            else
                CHECK_CONTAINS(td_last_error(), values[v].type);
        }
        td__signature_free(signature);
    }
    CHECK_BIND(
        "f(x: bool)", TD_ARGS(1), NULL,
        "f(): argument 0 (x) is of type int, not bool; td_value_from_bool(true) makes a bool");
    CHECK_BIND("f(x: Net?)", TD_ARGS(1), NULL,
               "f(): argument 0 (x) is of type int, not Net or nil");
    CHECK_OK(td_rpc_unregister("Net"));
    CHECK_OK(td_rpc_unregister("other.Net"));
}

/* ---- Mistakes -------------------------------------------------------------------------------- */

static const struct {
    const char *signature, *at, *expected;
} mistakes[] = {
    {"", "", "the name of a function"},
    {"(x)", "(x)", "the name of a function"},
    {"1f(x)", "1f(x)", "the name of a function"},
    {"f", "", "\"(\""},
    {"f.(x)", ".(x)", "\"(\""},
    {"f..g(x)", "..g(x)", "\"(\""},
    {"f\xc3\xbc(x)", "\xc3\xbc(x)", "\"(\""},
    {"f(", "", "the name of a parameter"},
    {"f(x,)", ")", "the name of a parameter"},
    {"f(1)", "1)", "the name of a parameter"},
    {"f(x", "", "\",\" or \")\""},
    {"f(x y)", "y)", "\",\" or \")\""},
    {"f(x) y", "y", "the end"},
    {"f(x:)", ")", "a type"},
    {"f(x: 1)", "1)", "a type"},
    {"f(x = )", ")", "nil, true, false, a number or a \"text\""},
    {"f(x = nan)", "nan)", "nil, true, false, a number or a \"text\""},
    {"f(x = truely)", "truely)", "nil, true, false, a number or a \"text\""},
    {"f(x = -)", "-)", "nil, true, false, a number or a \"text\""},
    {"f(x = .)", ".)", "a number that a double can hold"},
    {"f(x = 1e999)", "1e999)", "a number that a double can hold"},
    {"f(x = \"a)", "a)", "'\"' at the end of a text"},
    {"f(x = \"\xff\")", "\xff\")", "a text in UTF-8"},
    {"f(x: int = \"a\")", "\"a\")", "a default of the parameter's type"},
    {"f(x: int = 1.5)", "1.5)", "a default of the parameter's type"},
    {"f(x: int = 9223372036854775808)", "9223372036854775808)",
     "a default of the parameter's type"},
    {"f(x: tensor = 1)", "1)", "a default of the parameter's type"},
    {"f(x: Net = 1)", "1)", "a default of the parameter's type"},
    {"f(x, y, x)", "x)", "a name that no other parameter has"},
    {"f(x = 1, y)", "y)", "a default, since the parameter before has one"},
    {"f(x?, y)", "y)", "a default, since the parameter before has one"},
    {"f(x..., y)", "y)", "no parameter after one with \"...\""},
    {"f(x... = 1)", "1)", "no default of a parameter with \"...\""},
};

TEST(mistakes_are_shown)
{
    for (size_t i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        struct td__signature *signature;
        char text[256];
        snprintf(text, sizeof text, "the signature \"%s\" is wrong at \"%.20s\": expected %s",
                 mistakes[i].signature, mistakes[i].at, mistakes[i].expected);
        CHECK_EQ(td__signature_parse(mistakes[i].signature, &signature), TD_ERR_INVALID);
        CHECK_STR(td_last_error(), text);
    }
}

TEST(number_of_parameters)
{
    char text[1024] = "f(p0";
    for (int i = 1; i < 65; i++) {
        struct td__signature *signature;
        size_t at = strlen(text);
        snprintf(text + at, sizeof text - at, ")");
        CHECK_OK(td__signature_parse(text, &signature));
        td__signature_free(signature);
        snprintf(text + at, sizeof text - at, ", p%d", i);
    }
    strcat(text, ")");
    struct td__signature *signature;
    CHECK_FAILS(td__signature_parse(text, &signature), TD_ERR_INVALID, "at most 64 parameters");
}

/* ---- The registry ---------------------------------------------------------------------------- */

static td_value *serve(td_rpc_call *call, td_value *const *args, int count)
{
    (void)call;
    return count ? args[0] : td_value_nil();
}

TEST(registering_functions)
{
    CHECK_OK(td_rpc_register("echo(x)", serve, NULL));
    CHECK_FAILS(td_rpc_register("echo()", serve, NULL), TD_ERR_STATE,
                "td_rpc_register: there is a function or class \"echo\" already");
    CHECK_FAILS(td_rpc_register("echo", serve, NULL), TD_ERR_INVALID,
                "td_rpc_register: the signature \"echo\" is wrong at \"\"");
    CHECK_FAILS(td_rpc_register("td.echo()", serve, NULL), TD_ERR_INVALID,
                "td_rpc_register: \"td.echo\": names that begin with \"td.\"");
    CHECK_FAILS(td_rpc_register("  td.echo()", serve, NULL), TD_ERR_INVALID, "begin with \"td.\"");
    CHECK_FAILS(td_rpc_register(NULL, serve, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_rpc_register("other()", NULL, NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_rpc_unregister("other"), TD_ERR_INVALID,
                "td_rpc_unregister: there is no function or class \"other\"");
    CHECK_FAILS(td_rpc_unregister("td.other"), TD_ERR_INVALID, "begin with \"td.\"");
    CHECK_FAILS(td_rpc_unregister(NULL), TD_ERR_INVALID, "NULL");
    CHECK_OK(td_rpc_unregister("echo"));
    CHECK_FAILS(td_rpc_unregister("echo"), TD_ERR_INVALID, "no function or class \"echo\"");
    CHECK_OK(td_rpc_register("echo(y)", serve, NULL));
    CHECK_OK(td_rpc_unregister("echo"));
}

TEST(a_function_in_use_stays)
{
    TD_SCOPE;
    CHECK_OK(td_rpc_register("echo(x)", serve, memory));
    struct td__function_entry *entry = td__function_find("echo", 4);
    CHECK(entry);
    CHECK(entry->arg == (void *)memory);
    CHECK_OK(td_rpc_unregister("echo"));
    CHECK(!td__function_find("echo", 4));
    td_value *one = td_value_of(1);
    CHECK(td__function_call(entry, NULL, &one, 1) == one);
    td__function_release(entry);
    td__function_release(NULL);
}

static int objects; /* that are there */

static void *create(td_rpc_call *call, td_value *const *args, int count)
{
    int64_t *object = malloc(sizeof *object);
    (void)call;
    CHECK_EQ(count, 1);
    CHECK_OK(td_value_int(args[0], object));
    objects++;
    return object;
}

static void destroy(void *object)
{
    free(object);
    objects--;
}

static td_value *pack(void *object)
{
    return td_value_from_int(*(int64_t *)object);
}

static void *unpack(td_value *packed)
{
    return create(NULL, &packed, 1);
}

static const td_rpc_method methods[] = {{"get()", serve}, {"set(x: int)", serve}, {0}};

static td_rpc_class counter(void)
{
    return (td_rpc_class){.signature = "Counter(start: int = 3)",
                          .create = create,
                          .destroy = destroy,
                          .methods = methods,
                          .pack = pack,
                          .unpack = unpack};
}

TEST(registering_classes)
{
    td_rpc_class given = counter();
    CHECK_OK(td_rpc_register_class(&given));
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_STATE,
                "td_rpc_register_class: there is a function or class \"Counter\" already");
    CHECK_FAILS(td_rpc_register("Counter()", serve, NULL), TD_ERR_STATE, "\"Counter\" already");
    struct td__rpc_class_entry *entry = td__class_find("Counter");
    CHECK(entry);
    CHECK_STR(td__class_name(entry), "Counter");
    CHECK(td__method_find(entry, "set"));
    CHECK(!td__method_find(entry, "add"));
    td__function_release(td__method_find(entry, "get")); /* belongs to the class */
    CHECK_OK(td_rpc_unregister("Counter"));
    CHECK(!td__class_find("Counter"));
    CHECK(td__method_find(entry, "get"));
    td__class_release(entry);
    td__class_release(NULL);
}

TEST(classes_that_are_refused)
{
    td_rpc_class given = counter();
    CHECK_FAILS(td_rpc_register_class(NULL), TD_ERR_INVALID, "NULL");
    CHECK_FAILS(td_rpc_register_class(&(td_rpc_class){0}), TD_ERR_INVALID, "NULL");
    given.signature = "Counter";
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID,
                "td_rpc_register_class: the signature \"Counter\" is wrong");
    given.signature = "td.Counter()";
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID, "begin with \"td.\"");
    given = counter();
    given.unpack = NULL;
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID, "only one of pack and unpack");
    given = counter();
    given.pack = NULL;
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID, "only one of pack and unpack");
    given = counter();
    given.reserved[0] = &given;
    CHECK_EQ(td_rpc_register_class(&given), TD_ERR_INVALID);
    given = counter();
    given.methods = (const td_rpc_method[]){{"a()", serve}, {"a(x)", serve}, {0}};
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID,
                "td_rpc_register_class: there are two methods \"a\"");
    given.methods = (const td_rpc_method[]){{"a()", serve}, {"b(", serve}, {0}};
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID, "the signature \"b(\" is wrong");
    given.methods = (const td_rpc_method[]){{"a()", NULL}, {0}};
    CHECK_FAILS(td_rpc_register_class(&given), TD_ERR_INVALID,
                "the method \"a()\" has no function");
    CHECK(!td__class_find("Counter"));
}

TEST(constructors)
{
    td_rpc_class given = counter();
    CHECK_OK(td_rpc_register_class(&given));
    struct td__function_entry *entry = td__function_find("Counter", 7);
    {
        TD_SCOPE;
        td_value *five = td_value_of(5);
        td_value *made = td__function_call(entry, NULL, &five, 1);
        CHECK_EQ(*(int64_t *)td_value_object(made, "Counter"), 5);
        CHECK_EQ(objects, 1);
    }
    CHECK_EQ(objects, 0);
    td__function_release(entry);
    CHECK_OK(td_rpc_unregister("Counter"));
    CHECK_OK(td_rpc_register_class(&(td_rpc_class){.signature = "Abstract()"}));
    entry = td__function_find("Abstract", 8);
    CHECK(!td__function_call(entry, NULL, NULL, 0));
    CHECK_EQ(td_last_status(), TD_ERR_UNSUPPORTED);
    CHECK_CONTAINS(td_last_error(), "\"Abstract\" cannot be made by a call: it has no create()");
    td__function_release(entry);
    CHECK_OK(td_rpc_unregister("Abstract"));
}

static void *look_up(void *arg)
{
    atomic_bool *stop = arg;
    while (!atomic_load(stop)) {
        TD_SCOPE;
        struct td__function_entry *entry = td__function_find("echo", 4);
        td_value *one = td_value_of(1);
        if (entry)
            CHECK(td__function_call(entry, NULL, &one, 1) == one);
        td__function_release(entry);
        td__class_release(td__class_find("Counter"));
    }
    return NULL;
}

TEST(registering_while_others_look_up)
{
    pthread_t threads[2];
    atomic_bool stop = false;
    td_rpc_class given = counter();
    for (int i = 0; i < 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, look_up, &stop), 0);
    for (int i = 0; i < 2000; i++) {
        CHECK_OK(td_rpc_register("echo(x)", serve, NULL));
        CHECK_OK(td_rpc_register_class(&given));
        CHECK_OK(td_rpc_unregister("echo"));
        CHECK_OK(td_rpc_unregister("Counter"));
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
}
