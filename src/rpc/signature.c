/* Signatures of functions: parsing them, and binding the arguments of a call. */
#include "rpc/signature.h"

#include "base/fail.h"
#include "rpc/rpc_registry.h"

#include <errno.h>
#include <math.h>
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

static void skip_space(struct parser *parser)
{
    while (*parser->at == ' ' || *parser->at == '\t' || *parser->at == '\n')
        parser->at++;
}

static td_status wrong(struct parser *parser, const char *expected)
{
    skip_space(parser);
    return td_fail(TD_ERR_INVALID, "the signature \"%.200s\" is wrong at \"%.20s\": expected %s",
                   parser->text, parser->at, expected);
}

/* A mistake in what was just read, from `at` on. */
static td_status wrong_at(struct parser *parser, const char *at, const char *expected)
{
    parser->at = at;
    return wrong(parser, expected);
}

static bool take(struct parser *parser, const char *token)
{
    skip_space(parser);
    if (strncmp(parser->at, token, strlen(token)) != 0)
        return false;
    parser->at += strlen(token);
    return true;
}

/* Not those of <ctype.h>, which depend on the locale. */
static bool is_letter(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* A name: a letter or '_', then letters and digits; where `dots`, several of these with a '.' between them. For
 * free(). `expected` is for the error. */
static td_status take_name(struct parser *parser, bool dots, const char *expected, char **name)
{
    skip_space(parser);
    const char *start = parser->at;
    if (!is_letter(*start))
        return wrong(parser, expected);
    while (is_letter(*parser->at) || is_digit(*parser->at) ||
           (dots && *parser->at == '.' && is_letter(parser->at[1])))
        parser->at++;
    *name = strndup(start, (size_t)(parser->at - start));
    return *name ? TD_OK : td__fail_nomem("rpc");
}

static td_status parse_type(struct parser *parser, struct parameter *parameter)
{
    char *type = NULL;
    TD_TRY(take_name(parser, true, "a type", &type));
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

static td_status parse_number(struct parser *parser, td_value **value)
{
    char *end_int, *end_float;
    const char *digits = parser->at + (*parser->at == '-' || *parser->at == '+');
    if (!is_digit(*digits) && *digits != '.') /* strtod() takes "nan" and others, too */
        return wrong(parser, "nil, true, false, a number or a \"text\"");
    errno = 0;
    long long integer = strtoll(parser->at, &end_int, 10);
    bool fits = !errno;
    double number = strtod(parser->at, &end_float);
    if (end_float == parser->at || !isfinite(number))
        return wrong(parser, "a number that a double can hold");
    bool is_int = end_int == end_float && fits;
    parser->at = end_float;
    *value = td__value_create(is_int ? TD_VALUE_INT : TD_VALUE_FLOAT, 0);
    if (*value && is_int)
        (*value)->integer = integer;
    else if (*value)
        (*value)->number = number;
    return TD_OK;
}

static td_status parse_text(struct parser *parser, td_value **value)
{
    const char *start = parser->at, *end = strchr(start, '"');
    if (!end)
        return wrong(parser, "'\"' at the end of a text");
    if (!td__is_utf8(start, (size_t)(end - start)))
        return wrong(parser, "a text in UTF-8");
    parser->at = end + 1;
    *value = td__value_new_bytes(TD_VALUE_TEXT, start, (size_t)(end - start));
    return TD_OK;
}

/* One of the words that are values. */
static bool take_word(struct parser *parser, const char *word)
{
    const char *start = parser->at;
    if (take(parser, word) && !is_letter(*parser->at) && !is_digit(*parser->at))
        return true;
    parser->at = start;
    return false;
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
    skip_space(parser);
    const char *start = parser->at;
    bool truth = take_word(parser, "true");
    td_value *value = NULL;
    if (truth || take_word(parser, "false")) {
        value = td__value_create(TD_VALUE_BOOL, 0);
        if (value)
            value->boolean = truth;
    } else if (take_word(parser, "nil")) {
        value = td__value_create(TD_VALUE_NIL, 0);
        parameter->optional = true;
    } else if (take(parser, "\"")) {
        TD_TRY(parse_text(parser, &value));
    } else {
        TD_TRY(parse_number(parser, &value));
    }
    if (!value)
        return TD_ERR_NOMEM;
    parameter->preset = value;
    return is_of(parameter, value) ? TD_OK
                                   : wrong_at(parser, start, "a default of the parameter's type");
}

static td_status parse_parameter(struct parser *parser, struct td__signature *signature)
{
    if (signature->count == MAX_PARAMETERS)
        return wrong(parser, "at most 64 parameters");
    if (signature->rest)
        return wrong(parser, "no parameter after one with \"...\"");
    skip_space(parser);
    const char *start = parser->at;
    struct parameter *parameter = &signature->parameters[signature->count++];
    parameter->kind = ANY;
    TD_TRY(take_name(parser, false, "the name of a parameter", &parameter->name));
    for (int i = 0; i < signature->count - 1; i++)
        if (!strcmp(signature->parameters[i].name, parameter->name))
            return wrong_at(parser, start, "a name that no other parameter has");
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
            return wrong_at(parser, start, "a default, since the parameter before has one");
        signature->required++;
    }
    return TD_OK;
}

static td_status parse(struct parser *parser, struct td__signature *signature)
{
    TD_TRY(take_name(parser, true, "the name of a function", &signature->name));
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
    bool truth = parameter->kind == TD_VALUE_BOOL && value->kind == TD_VALUE_INT;
    return td_fail(TD_ERR_INVALID, "%s(): argument %d (%s) is of type %s, not %s%s%s",
                   signature->name, number, parameter->name, kind_of(value),
                   parameter->kind == CLASS ? parameter->class_name
                                            : td_value_kind_name((td_value_kind)parameter->kind),
                   parameter->optional ? " or nil" : "",
                   truth ? "; td_value_from_bool(true) makes a bool" : "");
}

static td_status wrong_count(const struct td__signature *signature, int64_t given)
{
    char range[48];
    int least = signature->required, most = signature->count;
    if (signature->rest)
        snprintf(range, sizeof range, "at least %d", least);
    else if (least == most)
        snprintf(range, sizeof range, "%d", most);
    else
        snprintf(range, sizeof range, "%d to %d", least, most);
    bool one = least == 1 && (most == 1 || signature->rest);
    return td_fail(TD_ERR_INVALID, "%s() takes %s argument%s, not %lld", signature->name, range,
                   one ? "" : "s", (long long)given);
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
                             const td_value *kwargs, struct td__bound *bound)
{
    int64_t given = args ? args->count : 0;
    int fixed = signature->count - signature->rest;
    if ((given > fixed && !signature->rest) || given > INT32_MAX)
        return wrong_count(signature, given);
    int count = given > fixed ? (int)given : fixed;
    bool few = (size_t)count <= sizeof bound->few / sizeof *bound->few;
    *bound = (struct td__bound){.values = bound->few, .count = count};
    if (!few && !(bound->values = calloc((size_t)count, sizeof *bound->values)))
        return td__fail_nomem("rpc");
    td_status status = bind(signature, args, kwargs, bound->values, count);
    if (status)
        td__bound_free(bound);
    return status;
}

void td__bound_free(struct td__bound *bound)
{
    for (int i = 0; i < bound->count; i++)
        td_value_release(bound->values[i]);
    if (bound->values != bound->few)
        free(bound->values);
}
