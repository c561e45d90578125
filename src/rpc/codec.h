/* Values as bytes: msgpack, with extension types for what msgpack lacks.
 *
 *     nil, bool, int, float (64 bits), str, bin, array, map     the values of these kinds; keys of maps are str
 *     ext 1, tensor       u32 number of the tensor: the tensors themselves travel beside the bytes
 *     ext 2, rref         the bytes of td__codec_fns.put_rref: of a message, the u32 number of its record
 *     ext 3, module       msgpack of ["", what td__module_pack() makes of it]
 *     ext 4, object       msgpack of [the name of its class, the packed value]
 *
 * Bytes from outside are bounded: depth by TD_VALUE_MAX_DEPTH, and sizes by the bytes that are there, so that a
 * short message cannot make the reader allocate much memory. Numbers that do not fit (a u64 above INT64_MAX), texts
 * that are not UTF-8, duplicate keys, unknown extensions and bytes behind the value are errors. */
#ifndef TD_RPC_CODEC_H
#define TD_RPC_CODEC_H

#include "base/buffer.h"
#include "rpc/value_internal.h"

enum { TD__MAX_TENSORS = 65536 }; /* of one message */
enum { TD__EXT_TENSOR = 1, TD__EXT_RREF, TD__EXT_MODULE, TD__EXT_OBJECT };

/** What the codec does with the parts that are not bytes. */
typedef struct td__codec_fns {
    /** Adds a tensor to the message, and sets its number. */
    td_status (*put_tensor)(void *arg, td_tensor *tensor, uint32_t *number);
    /** Appends the bytes of a reference. */
    td_status (*put_rref)(void *arg, td_rref *rref, struct td__buffer *bytes);
    /** The tensor of a number, with one reference; NULL on failure. */
    td_tensor *(*get_tensor)(void *arg, uint32_t number);
    /** The reference of its bytes, with one reference; NULL on failure. */
    td_rref *(*get_rref)(void *arg, const void *bytes, size_t size);
} td__codec_fns;

/** Appends a value. TD_ERR_INVALID for one that cannot be sent (a future, a value that is nested too deep), and
 *  TD_ERR_UNSUPPORTED for an object without pack; the error begins with the place in a list or map: "[2]["x"]: a future
 *  cannot be sent". */
td_status td__encode(const td_value *value, const td__codec_fns *fns, void *arg,
                     struct td__buffer *bytes);

/** The value of `size` bytes, with one reference. NULL on failure; TD_ERR_INVALID if they are not valid. */
td_value *td__decode(const void *bytes, size_t size, const td__codec_fns *fns, void *arg);

/** A module as a value (its kind, options and state), which belongs to the scope; and back. NULL on failure. */
td_value *td__module_pack(td_module *module);
td_module *td__module_unpack(const td_value *packed);

#endif
