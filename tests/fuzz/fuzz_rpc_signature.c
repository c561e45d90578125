/* The signature of a function and the arguments of a call.
 *
 *     up to the first NUL   the signature
 *     the rest              the bytes of a list: of the arguments, and of a map with those that are named
 *
 * A signature is parsed, or refused with its text. The arguments are bound, all of them, or the refusal names the
 * function. */
#include "base/text.h"
#include "fuzz.h"

#include "rpc/codec.h"
#include "rpc/signature.h"

#include <tandem/rpc.h>

#include <stdlib.h>
#include <string.h>

static void check(bool condition)
{
    if (!condition)
        abort();
}

static td_tensor *get_tensor(void *arg, uint32_t number)
{
    (void)arg;
    td_fail(TD_ERR_INVALID, "a tensor %u", number);
    return NULL;
}

static td_rref *get_rref(void *arg, const void *bytes, size_t size)
{
    (void)arg;
    (void)bytes;
    td_fail(TD_ERR_INVALID, "a reference of %zu bytes", size);
    return NULL;
}

static const td__codec_fns fns = {.get_tensor = get_tensor, .get_rref = get_rref};

static td_value *argument(const td_value *call, int64_t number, td_value_kind kind)
{
    td_value *value = td_value_count(call) > number ? td_value_at(call, number) : NULL;
    return td_value_kind_of(value) == kind ? value : NULL;
}

static void bind(const struct td__signature *signature, const td_value *call)
{
    td_value *args = argument(call, 0, TD_VALUE_LIST), *kwargs = argument(call, 1, TD_VALUE_MAP);
    struct td__bound bound;
    if (td__signature_bind(signature, args, kwargs, &bound)) {
        check(td_last_status() == TD_ERR_INVALID &&
              !strncmp(td_last_error(), td__signature_name(signature),
                       strnlen(td__signature_name(signature), 100)));
        return;
    }
    check(bound.count >= td_value_count(args));
    for (int i = 0; i < bound.count; i++)
        check(bound.values[i]);
    td__bound_free(&bound);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct td__signature *signature;
    char *text = td__text_copy(data, size);
    size_t length = strlen(text);
    if (td__signature_parse(text, &signature)) {
        check(td_last_status() == TD_ERR_INVALID && strstr(td_last_error(), "expected"));
    } else {
        check(strstr(text, td__signature_name(signature)));
        td_value *call = length < size
                             ? td__decode(data + length + 1, size - length - 1, &fns, NULL)
                             : NULL;
        bind(signature, call);
        td_value_release(call);
        td__signature_free(signature);
    }
    free(text);
    return 0;
}
