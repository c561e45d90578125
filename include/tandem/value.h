/* Values: what remote calls (rpc.h) take and return.
 *
 *     td_value *v = td_value_list(TD_VALUES(td_value_of(1), td_value_of("two"), td_value_of(tensor)));
 *     int64_t first;
 *     td_value_int(td_value_at(v, 0), &first);
 *
 * A value is nil, a bool, an integer (64 bits), a float, a text (UTF-8), bytes, a list, a map from
 * texts to values, a tensor, a module, a remote reference, a future, or an object of a class
 * (td_rpc_register_class()).
 *
 * Ownership. A value never changes, except that td_value_set() fills a new map. It is
 * reference-counted, and belongs to the innermost TD_SCOPE or to the caller, as a tensor does. It
 * retains what it holds.
 *
 * Errors. A function that makes a value returns NULL on failure; a NULL argument gives NULL, and
 * the last error stays that of the call that failed first. So an expression needs one check.
 *
 * Threads. Any number of threads may use a value. */
#ifndef TANDEM_VALUE_H
#define TANDEM_VALUE_H

#include <tandem/nn.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct td_value td_value;
typedef struct td_rref td_rref;
typedef struct td_future td_future;

typedef enum td_value_kind {
    TD_VALUE_NIL,
    TD_VALUE_BOOL,
    TD_VALUE_INT,
    TD_VALUE_FLOAT,
    TD_VALUE_TEXT,
    TD_VALUE_BYTES,
    TD_VALUE_LIST,
    TD_VALUE_MAP,
    TD_VALUE_TENSOR,
    TD_VALUE_MODULE,
    TD_VALUE_RREF,
    TD_VALUE_FUTURE,
    TD_VALUE_OBJECT,
} td_value_kind;

/** The deepest nesting of lists and maps. */
enum { TD_VALUE_MAX_DEPTH = 64 };

/* ---- Making ------------------------------------------------------------------------------------- */

/** nil, a bool, an integer and a float. nil, false and true are each always the same value, in no scope. */
TD_API td_value *td_value_nil(void);
TD_API td_value *td_value_from_bool(bool value);
TD_API td_value *td_value_from_int(int64_t value);
/** TD_ERR_INVALID above INT64_MAX. */
TD_API td_value *td_value_from_unsigned(uint64_t value);
TD_API td_value *td_value_from_float(double value);

/** Copies the text, which ends with a NUL; and `size` bytes. TD_ERR_INVALID for text that is not
 *  UTF-8. */
TD_API td_value *td_value_from_text(const char *text);
TD_API td_value *td_value_from_bytes(const void *data, size_t size);

/** Retains the tensor. */
TD_API td_value *td_value_from_tensor(td_tensor *tensor);

/** Takes the module over, and destroys it with the value; also if this fails. It is sent by its kind, options and
 *  tensors: td_register_module() in nn.h. */
TD_API td_value *td_value_from_module(td_module *module);

/** Retains the reference. */
TD_API td_value *td_value_from_rref(td_rref *rref);

/** The result of a function that answers later: the answer is sent once the future is complete. It cannot be
 *  sent itself. */
TD_API td_value *td_value_from_future(td_future *future);

/** An object of a registered class. Takes `object` over, also if this fails; except TD_ERR_INVALID, if there is no class
 *  of this name to destroy it. */
TD_API td_value *td_value_from_object(const char *class_name, void *object);

/** A list of values, td_value_list(TD_VALUES(a, b)): NULL if one of them is. */
TD_API td_value *td_value_list(td_value *const *values, int64_t count);
#define TD_VALUES(...) TD_LIST(td_value *, __VA_ARGS__)

/** An empty map; and sets `key` of a map that no other thread uses yet, over what was there. Returns
 *  the map, so that calls can be nested; NULL if `value` is NULL, and TD_ERR_INVALID if `map` is none, or has become
 *  an element of a list or map, or if the key is not UTF-8. */
TD_API td_value *td_value_map(void);
TD_API td_value *td_value_set(td_value *map, const char *key, td_value *value);

/** Adds a reference, which is the caller's in any scope; drops one. NULL is fine. */
TD_API td_value *td_value_retain(td_value *value);
TD_API void td_value_release(td_value *value);

/** Keeps a value for the scope around the innermost one, as td_scope_return() does: the result of a function with a
 *  TD_SCOPE of its own, return td_value_return(td_value_of(y)). It retains what it holds. NULL for NULL. */
TD_API td_value *td_value_return(td_value *value);

/* ---- Reading ------------------------------------------------------------------------------------
 *
 * Of a value of another kind: TD_ERR_INVALID, with both kinds in the error. */

/** The kind; TD_VALUE_NIL for NULL. And its name, such as "tensor". */
TD_API td_value_kind td_value_kind_of(const td_value *value);
TD_API const char *td_value_kind_name(td_value_kind kind);

/** Its bool, its integer. */
TD_API td_status td_value_bool(const td_value *value, bool *result);
TD_API td_status td_value_int(const td_value *value, int64_t *result);
/** Of an integer, too. */
TD_API td_status td_value_float(const td_value *value, double *result);

/** What it holds, which belongs to the value; NULL on failure. A text ends with a NUL. */
TD_API const char *td_value_text(const td_value *value);
TD_API const void *td_value_bytes(const td_value *value, size_t *size);
TD_API td_tensor *td_value_tensor(const td_value *value);
TD_API td_module *td_value_module(const td_value *value);
TD_API td_rref *td_value_rref(const td_value *value);
TD_API td_future *td_value_future(const td_value *value);
/** Of an object of this class; of any class if `class_name` is NULL. */
TD_API void *td_value_object(const td_value *value, const char *class_name);

/** The number of elements of a list or map; 0 for others. */
TD_API int64_t td_value_count(const td_value *value);
/** Element `index` of a list, or of a map in the order of its keys' insertion; NULL, with TD_ERR_INVALID, outside of it. */
TD_API td_value *td_value_at(const td_value *value, int64_t index);
/** The key of element `index` of a map. */
TD_API const char *td_value_key(const td_value *value, int64_t index);
/** The element of a key; NULL if there is none, which is no error. */
TD_API td_value *td_value_get(const td_value *map, const char *key);

/** The value for people: {"x": [1, 2.5, "a"], "w": tensor f32 [2, 3]}. A float has the digits that tell it from
 *  others, and a point or an exponent. For td_bytes_free(). */
TD_API td_status td_value_print(const td_value *value, td_bytes *text);

/* ---- From C types -------------------------------------------------------------------------------
 *
 *     td_value_of(1)   td_value_of(0.5)   td_value_of("text")   td_value_of(tensor)   td_value_of(value)
 *     TD_ARGS(1, 0.5, tensor)             a list of such values, at most 12
 *
 * In C11, `true`, `false` and comparisons are of type int; td_value_from_bool(true) makes a bool of them, in C++ and C23
 * td_value_of(true) does. */

/** Returns its argument. */
TD_API td_value *td_value_same(td_value *value);

#ifndef __cplusplus /* C++ has its own at the end of this header */
#define td_value_of(x)                                                                             \
    _Generic((x),                                                                                  \
        bool: td_value_from_bool,                                                                  \
        char: td_value_from_int,                                                                   \
        signed char: td_value_from_int,                                                            \
        unsigned char: td_value_from_int,                                                          \
        short: td_value_from_int,                                                                  \
        unsigned short: td_value_from_int,                                                         \
        int: td_value_from_int,                                                                    \
        unsigned: td_value_from_int,                                                               \
        long: td_value_from_int,                                                                   \
        long long: td_value_from_int,                                                              \
        unsigned long: td_value_from_unsigned,                                                     \
        unsigned long long: td_value_from_unsigned,                                                \
        float: td_value_from_float,                                                                \
        double: td_value_from_float,                                                               \
        char *: td_value_from_text,                                                                \
        const char *: td_value_from_text,                                                          \
        td_tensor *: td_value_from_tensor,                                                         \
        td_module *: td_value_from_module,                                                         \
        td_rref *: td_value_from_rref,                                                             \
        td_future *: td_value_from_future,                                                         \
        td_value *: td_value_same)(x)
#endif

#define TD_NO_ARGS td_value_list(NULL, 0)
#define TD_ARGS(...)                                                                               \
    td_value_list(TD_VALUES(TD_ARGS_JOIN(TD_ARGS_, TD_ARGS_COUNT(__VA_ARGS__))(__VA_ARGS__)))
#define TD_ARGS_COUNT(...) TD_ARGS_TWELFTH(__VA_ARGS__, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define TD_ARGS_TWELFTH(a, b, c, d, e, f, g, h, i, j, k, l, count, ...) count
#define TD_ARGS_JOIN(name, count) TD_UNIQUE_JOIN(name, count)
#define TD_ARGS_1(x) td_value_of(x)
#define TD_ARGS_2(x, ...) td_value_of(x), TD_ARGS_1(__VA_ARGS__)
#define TD_ARGS_3(x, ...) td_value_of(x), TD_ARGS_2(__VA_ARGS__)
#define TD_ARGS_4(x, ...) td_value_of(x), TD_ARGS_3(__VA_ARGS__)
#define TD_ARGS_5(x, ...) td_value_of(x), TD_ARGS_4(__VA_ARGS__)
#define TD_ARGS_6(x, ...) td_value_of(x), TD_ARGS_5(__VA_ARGS__)
#define TD_ARGS_7(x, ...) td_value_of(x), TD_ARGS_6(__VA_ARGS__)
#define TD_ARGS_8(x, ...) td_value_of(x), TD_ARGS_7(__VA_ARGS__)
#define TD_ARGS_9(x, ...) td_value_of(x), TD_ARGS_8(__VA_ARGS__)
#define TD_ARGS_10(x, ...) td_value_of(x), TD_ARGS_9(__VA_ARGS__)
#define TD_ARGS_11(x, ...) td_value_of(x), TD_ARGS_10(__VA_ARGS__)
#define TD_ARGS_12(x, ...) td_value_of(x), TD_ARGS_11(__VA_ARGS__)

#ifdef __cplusplus
}

/* Smaller integers are promoted to int, and float to double. */
inline td_value *td_value_of(bool value)
{
    return td_value_from_bool(value);
}

inline td_value *td_value_of(int value)
{
    return td_value_from_int(value);
}

inline td_value *td_value_of(unsigned value)
{
    return td_value_from_int(value);
}

inline td_value *td_value_of(long value)
{
    return td_value_from_int(value);
}

inline td_value *td_value_of(long long value)
{
    return td_value_from_int(value);
}

inline td_value *td_value_of(unsigned long value)
{
    return td_value_from_unsigned(value);
}

inline td_value *td_value_of(unsigned long long value)
{
    return td_value_from_unsigned(value);
}

inline td_value *td_value_of(double value)
{
    return td_value_from_float(value);
}

inline td_value *td_value_of(const char *text)
{
    return td_value_from_text(text);
}

inline td_value *td_value_of(char *text)
{
    return td_value_from_text(text);
}

inline td_value *td_value_of(td_tensor *tensor)
{
    return td_value_from_tensor(tensor);
}

inline td_value *td_value_of(td_module *module)
{
    return td_value_from_module(module);
}

inline td_value *td_value_of(td_rref *rref)
{
    return td_value_from_rref(rref);
}

inline td_value *td_value_of(td_future *future)
{
    return td_value_from_future(future);
}

inline td_value *td_value_of(td_value *value)
{
    return value;
}

/* Any other pointer would become a bool. */
template <typename type> td_value *td_value_of(type *pointer) = delete;
#endif

#endif
