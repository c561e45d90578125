/* The machine; see unpickle.h. What it may call is in pickle_calls.c. */
#include "checkpoint/unpickle.h"

#include "base/buffer.h"
#include "base/fail.h"
#include "base/text.h"
#include "checkpoint/pickle_machine.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Values -------------------------------------------------------------------------------------------- */

struct td__pickle_value *td__pickle_new(struct td__pickle_machine *machine,
                                        enum td__pickle_kind kind)
{
    struct td__pickle_value *value = calloc(1, sizeof *value);
    if (!value) {
        td__fail_nomem(machine->path);
        return NULL;
    }
    value->kind = kind;
    value->next = machine->pickle->all;
    machine->pickle->all = value;
    return value;
}

td_status td__pickle_append(struct td__pickle_machine *machine, struct td__pickle_value *list,
                            struct td__pickle_value *item)
{
    if (list->as.list.count == list->as.list.capacity) {
        size_t capacity = list->as.list.capacity ? list->as.list.capacity * 2 : 4;
        struct td__pickle_value **items = realloc(list->as.list.items, capacity * sizeof *items);
        if (!items)
            return td__fail_nomem(machine->path);
        list->as.list.items = items;
        list->as.list.capacity = capacity;
    }
    list->as.list.items[list->as.list.count++] = item;
    return TD_OK;
}

void td__pickle_free(struct td__pickle *pickle)
{
    for (struct td__pickle_value *value = pickle->all, *next; value; value = next) {
        next = value->next;
        if (value->kind == TD__PICKLE_LIST || value->kind == TD__PICKLE_DICT)
            free(value->as.list.items);
        else if (value->kind == TD__PICKLE_STRING || value->kind == TD__PICKLE_GLOBAL)
            free(value->as.text);
        free(value);
    }
    *pickle = (struct td__pickle){0};
}

/* ---- The stack ------------------------------------------------------------------------------------------ */

td_status td__pickle_damaged(const struct td__pickle_machine *machine, const char *what)
{
    return td_fail(TD_ERR_INVALID, "%s is damaged: byte %zu of its data.pkl: %s", machine->path,
                   (size_t)(machine->reader.at - machine->begin), what);
}

static td_status push(struct td__pickle_machine *machine, struct td__pickle_value *value)
{
    if (!value)
        return td__error_status();
    if (machine->depth == machine->capacity) {
        size_t capacity = machine->capacity ? machine->capacity * 2 : 64;
        struct td__pickle_value **stack = realloc(machine->stack, capacity * sizeof *stack);
        if (!stack)
            return td__fail_nomem(machine->path);
        machine->stack = stack;
        machine->capacity = capacity;
    }
    machine->stack[machine->depth++] = value;
    return TD_OK;
}

/* Whether `count` values are on top, none of them a mark. */
static bool has(const struct td__pickle_machine *machine, size_t count)
{
    if (machine->depth < count)
        return false;
    for (size_t i = 0; i < count; i++)
        if (machine->stack[machine->depth - 1 - i] == &machine->mark)
            return false;
    return true;
}

static struct td__pickle_value *pop(struct td__pickle_machine *machine)
{
    return machine->stack[--machine->depth];
}

/* The index of the first value above the topmost mark. */
static td_status find_mark(const struct td__pickle_machine *machine, size_t *first)
{
    for (size_t i = machine->depth; i > 0; i--)
        if (machine->stack[i - 1] == &machine->mark) {
            *first = i;
            return TD_OK;
        }
    return td__pickle_damaged(machine, "there is no mark on the stack");
}

/* ---- Reading operands ------------------------------------------------------------------------------------- */

static td_status take(struct td__pickle_machine *machine, size_t size, const uint8_t **data)
{
    if (size > (size_t)(machine->reader.end - machine->reader.at))
        return td__pickle_damaged(machine, "it is cut off");
    *data = machine->reader.at;
    machine->reader.at += size;
    return TD_OK;
}

/* An unsigned number of 1, 2, 4 or 8 bytes. */
static td_status take_number(struct td__pickle_machine *machine, int bytes, uint64_t *number)
{
    const uint8_t *data = NULL;
    TD_TRY(take(machine, (size_t)bytes, &data));
    *number = 0;
    for (int i = bytes; i-- > 0;)
        *number = *number << 8 | data[i];
    return TD_OK;
}

static td_status push_text(struct td__pickle_machine *machine, enum td__pickle_kind kind,
                           const void *data, size_t size)
{
    if (memchr(data, 0, size))
        return td__pickle_damaged(machine, "a text contains a byte of 0");
    struct td__pickle_value *value = td__pickle_new(machine, kind);
    if (value && !(value->as.text = td__text_copy(data, size)))
        return td__fail_nomem(machine->path);
    return push(machine, value);
}

/* A text behind its length of `bytes` bytes. */
static td_status read_text(struct td__pickle_machine *machine, int bytes)
{
    const uint8_t *data = NULL;
    uint64_t size = 0;
    TD_TRY(take_number(machine, bytes, &size));
    if (size > SIZE_MAX)
        return td__pickle_damaged(machine, "a text is too long");
    TD_TRY(take(machine, (size_t)size, &data));
    return push_text(machine, TD__PICKLE_STRING, data, (size_t)size);
}

static td_status push_int(struct td__pickle_machine *machine, enum td__pickle_kind kind,
                          int64_t number)
{
    struct td__pickle_value *value = td__pickle_new(machine, kind);
    if (value)
        value->as.number = number;
    return push(machine, value);
}

/* An integer of any length, in two's complement. */
static td_status read_long(struct td__pickle_machine *machine, int bytes)
{
    const uint8_t *data = NULL;
    uint64_t size = 0, number = 0;
    TD_TRY(take_number(machine, bytes, &size));
    if (size > 8)
        return td_fail(TD_ERR_UNSUPPORTED, "%s has an integer of more than 64 bits", machine->path);
    TD_TRY(take(machine, (size_t)size, &data));
    for (int i = 0; i < 8; i++) {
        uint8_t sign = size && data[size - 1] & 0x80 ? 0xff : 0;
        number |= (uint64_t)((uint64_t)i < size ? data[i] : sign) << (8 * i);
    }
    return push_int(machine, TD__PICKLE_INT, (int64_t)number);
}

static td_status read_float(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    const uint8_t *data = NULL;
    uint64_t bits = 0;
    TD_TRY(take(machine, 8, &data));
    for (int i = 0; i < 8; i++) /* big-endian */
        bits = bits << 8 | data[i];
    struct td__pickle_value *value = td__pickle_new(machine, TD__PICKLE_FLOAT);
    if (value)
        memcpy(&value->as.real, &bits, sizeof bits);
    return push(machine, value);
}

/* ---- Names -------------------------------------------------------------------------------------------------- */

static td_status push_name(struct td__pickle_machine *machine, const char *module,
                           size_t module_size, const char *name, size_t name_size)
{
    char text[256];
    if (module_size + name_size + 2 > sizeof text)
        return td__pickle_damaged(machine, "a name is too long");
    int size = snprintf(text, sizeof text, "%.*s.%.*s", (int)module_size, module, (int)name_size,
                        name);
    if (!td__pickle_knows(text))
        return td_fail(
            TD_ERR_UNSUPPORTED,
            "%s contains a Python object \"%s\"; only tensors, numbers, texts, lists and "
            "dictionaries are read: save these alone, such as module.state_dict()",
            machine->path, text);
    return push_text(machine, TD__PICKLE_GLOBAL, text, (size_t)size);
}

static td_status take_line(struct td__pickle_machine *machine, const char **line, size_t *size)
{
    const uint8_t *at = machine->reader.at;
    const uint8_t *end = memchr(at, '\n', (size_t)(machine->reader.end - at));
    if (!end)
        return td__pickle_damaged(machine, "it is cut off");
    *line = (const char *)at;
    *size = (size_t)(end - at);
    machine->reader.at = end + 1;
    return TD_OK;
}

static td_status read_global(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    const char *module = "", *name = "";
    size_t module_size = 0, name_size = 0;
    TD_TRY(take_line(machine, &module, &module_size));
    TD_TRY(take_line(machine, &name, &name_size));
    return push_name(machine, module, module_size, name, name_size);
}

static td_status stack_global(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    if (!has(machine, 2))
        return td__pickle_damaged(machine, "a name is missing");
    const struct td__pickle_value *name = pop(machine), *module = pop(machine);
    if (name->kind != TD__PICKLE_STRING || module->kind != TD__PICKLE_STRING)
        return td__pickle_damaged(machine, "a name is no text");
    return push_name(machine, module->as.text, strlen(module->as.text), name->as.text,
                     strlen(name->as.text));
}

/* ---- Containers ----------------------------------------------------------------------------------------------- */

/* Replaces all from `first` on by a tuple of them. */
static td_status push_tuple(struct td__pickle_machine *machine, size_t first, bool marked)
{
    struct td__pickle_value *tuple = td__pickle_new(machine, TD__PICKLE_LIST);
    if (!tuple)
        return td__error_status();
    for (size_t i = first; i < machine->depth; i++)
        TD_TRY(td__pickle_append(machine, tuple, machine->stack[i]));
    machine->depth = first - (marked ? 1 : 0);
    return push(machine, tuple);
}

static td_status read_tuple(struct td__pickle_machine *machine, int detail)
{
    size_t count = (size_t)detail;
    return has(machine, count) ? push_tuple(machine, machine->depth - count, false)
                               : td__pickle_damaged(machine, "a tuple lacks values");
}

static td_status read_marked_tuple(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    size_t first = 0;
    TD_TRY(find_mark(machine, &first));
    return push_tuple(machine, first, true);
}

/* Adds what is above `first` to the list or dict below it. */
static td_status extend(struct td__pickle_machine *machine, size_t first, size_t below,
                        enum td__pickle_kind kind)
{
    struct td__pickle_value *container = first >= below ? machine->stack[first - below] : NULL;
    if (!container || container == &machine->mark || container->kind != kind ||
        (kind == TD__PICKLE_DICT && (machine->depth - first) % 2))
        return td__pickle_damaged(machine, "values are added to what is no list or dictionary");
    for (size_t i = first; i < machine->depth; i++)
        TD_TRY(td__pickle_append(machine, container, machine->stack[i]));
    machine->depth = first - below + 1;
    return TD_OK;
}

static td_status append_one(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    return has(machine, 2) ? extend(machine, machine->depth - 1, 1, TD__PICKLE_LIST)
                           : td__pickle_damaged(machine, "a value is missing");
}

static td_status set_one(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    return has(machine, 3) ? extend(machine, machine->depth - 2, 1, TD__PICKLE_DICT)
                           : td__pickle_damaged(machine, "a value is missing");
}

static td_status extend_marked(struct td__pickle_machine *machine, int kind)
{
    size_t first = 0;
    TD_TRY(find_mark(machine, &first));
    return extend(machine, first, 2, (enum td__pickle_kind)kind);
}

/* ---- The memo --------------------------------------------------------------------------------------------------- */

static td_status remember(struct td__pickle_machine *machine, uint64_t index)
{
    if (!has(machine, 1))
        return td__pickle_damaged(machine, "there is nothing to remember");
    /* Python counts from 0, so that there are no more than there are bytes. */
    if (index >= (uint64_t)(machine->reader.end - machine->begin))
        return td__pickle_damaged(machine, "an index of the memo is too large");
    if (index >= machine->memo_size) {
        size_t size = machine->memo_size * 2 > index ? machine->memo_size * 2 : (size_t)index + 64;
        struct td__pickle_value **memo = realloc(machine->memo, size * sizeof *memo);
        if (!memo)
            return td__fail_nomem(machine->path);
        memset(memo + machine->memo_size, 0, (size - machine->memo_size) * sizeof *memo);
        machine->memo = memo;
        machine->memo_size = size;
    }
    machine->memo_count += machine->memo[index] == NULL;
    machine->memo[index] = machine->stack[machine->depth - 1];
    return TD_OK;
}

static td_status remember_at(struct td__pickle_machine *machine, int bytes)
{
    uint64_t index = 0;
    TD_TRY(take_number(machine, bytes, &index));
    return remember(machine, index);
}

static td_status recall(struct td__pickle_machine *machine, int bytes)
{
    uint64_t index = 0;
    TD_TRY(take_number(machine, bytes, &index));
    if (index >= machine->memo_size || !machine->memo[index])
        return td__pickle_damaged(machine, "it refers to a value that is not there");
    return push(machine, machine->memo[index]);
}

/* ---- Calls ---------------------------------------------------------------------------------------------------------- */

static td_status reduce(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    if (!has(machine, 2))
        return td__pickle_damaged(machine, "a call lacks its arguments");
    struct td__pickle_value *args = pop(machine), *function = pop(machine), *result = NULL;
    if (function->kind != TD__PICKLE_GLOBAL || args->kind != TD__PICKLE_LIST)
        return td__pickle_damaged(machine, "what is called is no function");
    TD_TRY(td__pickle_call(machine, function->as.text, args, &result));
    return push(machine, result);
}

/* Attributes of an object. Those of an ordered dictionary (state_dict()'s _metadata, versions of modules) are dropped. */
static td_status build(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    if (!has(machine, 2))
        return td__pickle_damaged(machine, "an object lacks its attributes");
    pop(machine);
    if (machine->stack[machine->depth - 1]->kind != TD__PICKLE_DICT)
        return td_fail(TD_ERR_UNSUPPORTED, "%s contains a Python object with attributes",
                       machine->path);
    return TD_OK;
}

static td_status persistent(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    struct td__pickle_value *storage = NULL;
    if (!has(machine, 1))
        return td__pickle_damaged(machine, "a reference to a storage is missing");
    TD_TRY(td__pickle_find_storage(machine, pop(machine), &storage));
    return push(machine, storage);
}

/* ---- Running ---------------------------------------------------------------------------------------------------------- */

/* What an instruction does; `detail` is the number of the table below. */

static td_status skip(struct td__pickle_machine *machine, int detail)
{
    const uint8_t *data = NULL;
    return take(machine, (size_t)detail, &data);
}

static td_status mark(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    return push(machine, &machine->mark);
}

static td_status drop(struct td__pickle_machine *machine, int to_mark)
{
    size_t first = machine->depth;
    if (to_mark)
        TD_TRY(find_mark(machine, &first));
    if (first == 0)
        return td__pickle_damaged(machine, "the stack is empty");
    machine->depth = first - 1;
    return TD_OK;
}

static td_status repeat(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    return has(machine, 1) ? push(machine, machine->stack[machine->depth - 1])
                           : td__pickle_damaged(machine, "the stack is empty");
}

static td_status push_new(struct td__pickle_machine *machine, int kind)
{
    return push(machine, td__pickle_new(machine, (enum td__pickle_kind)kind));
}

static td_status push_bool(struct td__pickle_machine *machine, int value)
{
    return push_int(machine, TD__PICKLE_BOOL, value);
}

static td_status read_int(struct td__pickle_machine *machine, int bytes)
{
    uint64_t number = 0;
    TD_TRY(take_number(machine, bytes, &number));
    return push_int(machine, TD__PICKLE_INT, bytes == 4 ? (int32_t)number : (int64_t)number);
}

static td_status remember_next(struct td__pickle_machine *machine, int detail)
{
    (void)detail;
    return remember(machine, machine->memo_count);
}

/* The instructions by their codes; pickletools of Python has their names. */
static const struct {
    td_status (*run)(struct td__pickle_machine *machine, int detail);
    int detail;
} instructions[256] = {
    [0x80] = {skip, 1}, /* PROTO */
    [0x95] = {skip, 8}, /* FRAME */
    ['('] = {mark, 0},
    ['0'] = {drop, false}, /* POP */
    ['1'] = {drop, true},  /* POP_MARK */
    ['2'] = {repeat, 0},   /* DUP */
    ['N'] = {push_new, TD__PICKLE_NONE},
    [']'] = {push_new, TD__PICKLE_LIST},
    ['}'] = {push_new, TD__PICKLE_DICT},
    [0x88] = {push_bool, true},
    [0x89] = {push_bool, false},
    ['K'] = {read_int, 1},
    ['M'] = {read_int, 2},
    ['J'] = {read_int, 4},
    [0x8a] = {read_long, 1},
    [0x8b] = {read_long, 4},
    ['G'] = {read_float, 0},
    ['U'] = {read_text, 1}, /* texts of Python 2 */
    ['T'] = {read_text, 4},
    [0x8c] = {read_text, 1},
    ['X'] = {read_text, 4},
    [0x8d] = {read_text, 8},
    [')'] = {read_tuple, 0},
    [0x85] = {read_tuple, 1},
    [0x86] = {read_tuple, 2},
    [0x87] = {read_tuple, 3},
    ['t'] = {read_marked_tuple, 0},
    ['a'] = {append_one, 0},
    ['e'] = {extend_marked, TD__PICKLE_LIST},
    ['s'] = {set_one, 0},
    ['u'] = {extend_marked, TD__PICKLE_DICT},
    ['q'] = {remember_at, 1},
    ['r'] = {remember_at, 4},
    [0x94] = {remember_next, 0}, /* MEMOIZE */
    ['h'] = {recall, 1},
    ['j'] = {recall, 4},
    ['c'] = {read_global, 0},
    [0x93] = {stack_global, 0},
    ['Q'] = {persistent, 0},
    ['R'] = {reduce, 0},
    [0x81] = {reduce, 0}, /* NEWOBJ: a call of a class */
    ['b'] = {build, 0},
};

static td_status step(struct td__pickle_machine *machine, uint8_t code)
{
    if (instructions[code].run)
        return instructions[code].run(machine, instructions[code].detail);
    return td_fail(TD_ERR_UNSUPPORTED,
                   "%s: byte %zu of its data.pkl is the instruction 0x%02x, which describes no "
                   "tensor, number, text, list or dictionary",
                   machine->path, (size_t)(machine->reader.at - machine->begin) - 1, code);
}

static td_status run(struct td__pickle_machine *machine)
{
    while (machine->reader.at < machine->reader.end) {
        uint8_t code = *machine->reader.at++;
        if (code == '.')
            return machine->depth == 1 && has(machine, 1)
                       ? TD_OK
                       : td__pickle_damaged(machine, "it ends without one result");
        TD_TRY(step(machine, code));
    }
    return td__pickle_damaged(machine, "it is cut off");
}

td_status td__unpickle(const char *path, const void *data, size_t size, struct td__pickle *pickle)
{
    *pickle = (struct td__pickle){0};
    struct td__pickle_machine machine = {
        .path = path, .pickle = pickle, .begin = data, .reader = td__reader_of(data, size)};
    td_status status = run(&machine);
    if (status)
        td__pickle_free(pickle);
    else
        pickle->root = machine.stack[0];
    free(machine.stack);
    free(machine.memo);
    return status;
}
