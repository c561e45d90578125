/* Signatures of functions: parsing them, and binding the arguments of a call. */
#include "rpc/signature.h"

#include "base/fail.h"
#include "rpc/rpc_registry.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMETERS = 64, ANY = -1, CLASS = -2 };

struct parameter {
    char *name;
    int kind;         /* a td_value_kind, ANY or CLASS */
    char *class_name; /* CLASS */
    bool optional;    /* "?": may be nil */
    td_value *preset; /* of one that may be left out */
};

struct td__signature {
    char *name;
    struct parameter parameters[MAX_PARAMETERS];
    int count;
    int required; /* without a preset; those come first */
    bool rest;    /* the last one takes any number of arguments */
};

/* ---- Parsing --------------------------------------------------------------------------------- */

struct parser {
    const char *text, *at;
};

static td_status wrong(const struct parser *parser, const char *expected)
{
    return td_fail(TD_ERR_INVALID, "the signature \"%.200s\" is wrong at \"%.20s\": expected %s",
                   parser->text, parser->at, expected);
}

static void skip_space(struct parser *parser)
{
    while (*parser->at == ' ' || *parser->at == '\t' || *parser->at == '\n')
        parser->at++;
}

static bool take(struct parser *parser, const char *token)
{
    skip_space(parser);
    if (strncmp(parser->at, token, strlen(token)) != 0)
        return false;
    parser->at += strlen(token);
    return true;
}

/* A name: a letter or '_', then letters, digits, and '.' where `dots`. For free(). */
static char *take_name(struct parser *parser, bool dots)
{
    skip_space(parser);
    const char *start = parser->at;
    if (isalpha((unsigned char)*parser->at) || *parser->at == '_')
        while (isalnum((unsigned char)*parser->at) || *parser->at == '_' ||
               (dots && *parser->at == '.' && strncmp(parser->at, "...", 3) != 0))
            parser->at++;
    return parser->at > start ? strndup(start, (size_t)(parser->at - start)) : NULL;
}

static td_status parse_type(struct parser *parser, struct parameter *parameter)
{
    char *type = take_name(parser, true);
    if (!type)
        return wrong(parser, "a type");
    parameter->kind = CLASS;
    if (!strcmp(type, "any"))
        parameter->kind = ANY;
    for (int kind = TD_VALUE_NIL; kind <= TD_VALUE_RREF; kind++)
        if (!strcmp(type, td_value_kind_name((td_value_kind)kind)))
            parameter->kind = kind;
    if (parameter->kind == CLASS)
        parameter->class_name = type;
    else
        free(type);
    return TD_OK;
}

static td_value *number_value(struct parser *parser)
{
    char *end_int, *end_float;
    errno = 0;
    long long integer = strtoll(parser->at, &end_int, 10);
    bool fits = !errno;
    double number = strtod(parser->at, &end_float);
    if (end_float == parser->at)
        return NULL;
    bool is_int = end_int == end_float && fits;
    parser->at = end_float;
    td_value *value = td__value_create(is_int ? TD_VALUE_INT : TD_VALUE_FLOAT, 0);
    if (value && is_int)
        value->integer = integer;
    else if (value)
        value->number = number;
    return value;
}

static td_value *text_value(struct parser *parser)
{
    const char *start = parser->at, *end = strchr(start, '"');
    if (!end || !td__is_utf8(start, (size_t)(end - start)))
        return NULL;
    parser->at = end + 1;
    return td__value_new_bytes(TD_VALUE_TEXT, start, (size_t)(end - start));
}

static bool is_of(const struct parameter *parameter, const td_value *value)
{
    if (parameter->optional && value->kind == TD_VALUE_NIL)
        return true;
    if (parameter->kind == CLASS)
        return value->kind == TD_VALUE_OBJECT &&
               !strcmp(td__class_name(value->object_class), parameter->class_name);
    return parameter->kind == ANY || (int)value->kind == parameter->kind ||
           (parameter->kind == TD_VALUE_FLOAT && value->kind == TD_VALUE_INT);
}

static td_status parse_default(struct parser *parser, struct parameter *parameter)
{
    bool truth = take(parser, "true");
    td_value *value;
    if (truth || take(parser, "false")) {
        value = td__value_create(TD_VALUE_BOOL, 0);
        if (value)
            value->boolean = truth;
    } else if (take(parser, "nil")) {
        value = td__value_create(TD_VALUE_NIL, 0);
        parameter->optional = true;
    } else if (take(parser, "\"")) {
        value = text_value(parser);
    } else {
        value = number_value(parser);
    }
    if (!value)
        return wrong(parser, "nil, true, false, a number or a \"text\"");
    parameter->preset = value;
    return is_of(parameter, value) ? TD_OK : wrong(parser, "a default of the parameter's type");
}

static td_status parse_parameter(struct parser *parser, struct td__signature *signature)
{
    if (signature->count == MAX_PARAMETERS)
        return wrong(parser, "at most 64 parameters");
    if (signature->rest)
        return wrong(parser, "no parameter after one with \"...\"");
    struct parameter *parameter = &signature->parameters[signature->count++];
    parameter->kind = ANY;
    if (!(parameter->name = take_name(parser, false)))
        return wrong(parser, "the name of a parameter");
    for (int i = 0; i < signature->count - 1; i++)
        if (!strcmp(signature->parameters[i].name, parameter->name))
            return wrong(parser, "parameters with different names");
    signature->rest = take(parser, "...");
    if (take(parser, ":"))
        TD_TRY(parse_type(parser, parameter));
    parameter->optional = take(parser, "?");
    if (take(parser, "=")) {
        if (signature->rest)
            return wrong(parser, "no default of a parameter with \"...\"");
        TD_TRY(parse_default(parser, parameter));
    } else if (parameter->optional && !signature->rest) {
        parameter->preset = td__value_create(TD_VALUE_NIL, 0);
        if (!parameter->preset)
            return TD_ERR_NOMEM;
    }
    if (!parameter->preset && !signature->rest) {
        if (signature->required < signature->count - 1)
            return wrong(parser, "parameters without a default before those with one");
        signature->required++;
    }
    return TD_OK;
}

static td_status parse(struct parser *parser, struct td__signature *signature)
{
    if (!(signature->name = take_name(parser, true)))
        return wrong(parser, "the name of a function");
    if (!take(parser, "("))
        return wrong(parser, "\"(\"");
    if (!take(parser, ")")) {
        do
            TD_TRY(parse_parameter(parser, signature));
        while (take(parser, ","));
        if (!take(parser, ")"))
            return wrong(parser, "\",\" or \")\"");
    }
    skip_space(parser);
    return *parser->at ? wrong(parser, "the end") : TD_OK;
}

td_status td__signature_parse(const char *text, struct td__signature **signature_out)
{
    struct parser parser = {.text = text, .at = text};
    struct td__signature *signature = calloc(1, sizeof *signature);
    if (!signature)
        return td__fail_nomem("rpc");
    td_status status = parse(&parser, signature);
    if (status)
        td__signature_free(signature);
    else
        *signature_out = signature;
    return status;
}

void td__signature_free(struct td__signature *signature)
{
    if (!signature)
        return;
    for (int i = 0; i < signature->count; i++) {
        free(signature->parameters[i].name);
        free(signature->parameters[i].class_name);
        td_value_release(signature->parameters[i].preset);
    }
    free(signature->name);
    free(signature);
}

const char *td__signature_name(const struct td__signature *signature)
{
    return signature->name;
}

/* ---- Binding --------------------------------------------------------------------------------- */

static const char *kind_of(const td_value *value)
{
    return value->kind == TD_VALUE_OBJECT ? td__class_name(value->object_class)
                                          : td_value_kind_name(value->kind);
}

static td_status check(const struct td__signature *signature, int number, const td_value *value)
{
    int last = signature->count - 1;
    const struct parameter *parameter =
        &signature->parameters[number < last || !signature->rest ? number : last];
    if (is_of(parameter, value))
        return TD_OK;
    return td_fail(TD_ERR_INVALID, "%s(): argument %d (%s) is of type %s, not %s%s",
                   signature->name, number, parameter->name, kind_of(value),
                   parameter->kind == CLASS ? parameter->class_name
                                            : td_value_kind_name((td_value_kind)parameter->kind),
                   parameter->optional ? " or nil" : "");
}

static td_status wrong_count(const struct td__signature *signature, int64_t given)
{
    char range[48];
    int most = signature->count;
    if (signature->rest)
        snprintf(range, sizeof range, "at least %d", signature->required);
    else if (signature->required == most)
        snprintf(range, sizeof range, "%d", most);
    else
        snprintf(range, sizeof range, "%d to %d", signature->required, most);
    return td_fail(TD_ERR_INVALID, "%s() takes %s argument%s, not %lld", signature->name, range,
                   most == 1 && !signature->rest ? "" : "s", (long long)given);
}

static td_status bind_named(const struct td__signature *signature, const td_value *kwargs,
                            td_value **bound)
{
    int last = signature->count - signature->rest;
    for (int64_t i = 0; kwargs && i < kwargs->count; i++) {
        int number = 0;
        while (number < last && strcmp(signature->parameters[number].name, kwargs->keys[i]) != 0)
            number++;
        if (number == last)
            return td_fail(TD_ERR_INVALID, "%s() has no parameter %.100s%s", signature->name,
                           kwargs->keys[i], signature->rest ? " that can be named" : "");
        if (bound[number])
            return td_fail(TD_ERR_INVALID, "%s(): %s is given twice", signature->name,
                           signature->parameters[number].name);
        bound[number] = td_value_retain(kwargs->items[i]);
    }
    return TD_OK;
}

static td_status bind(const struct td__signature *signature, const td_value *args,
                      const td_value *kwargs, td_value **bound, int count)
{
    int given = args ? (int)args->count : 0;
    for (int i = 0; i < given; i++)
        bound[i] = td_value_retain(args->items[i]);
    TD_TRY(bind_named(signature, kwargs, bound));
    for (int i = 0; i < count; i++) {
        if (!bound[i] && signature->parameters[i].preset)
            bound[i] = td_value_retain(signature->parameters[i].preset);
        if (!bound[i] && !kwargs)
            return wrong_count(signature, given);
        if (!bound[i])
            return td_fail(TD_ERR_INVALID, "%s(): %s is missing", signature->name,
                           signature->parameters[i].name);
        TD_TRY(check(signature, i, bound[i]));
    }
    return TD_OK;
}

td_status td__signature_bind(const struct td__signature *signature, const td_value *args,
                             const td_value *kwargs, td_value ***bound_out, int *count_out)
{
    int64_t given = args ? args->count : 0;
    int fixed = signature->count - signature->rest;
    if ((given > fixed && !signature->rest) || given > INT32_MAX)
        return wrong_count(signature, given);
    int count = given > fixed ? (int)given : fixed;
    td_value **bound = calloc((size_t)count + 1, sizeof *bound);
    if (!bound)
        return td__fail_nomem("rpc");
    td_status status = bind(signature, args, kwargs, bound, count);
    if (status) {
        td__bound_free(bound, count);
        return status;
    }
    *bound_out = bound;
    *count_out = count;
    return TD_OK;
}

void td__bound_free(td_value **bound, int count)
{
    for (int i = 0; i < count; i++)
        td_value_release(bound[i]);
    free(bound);
}
