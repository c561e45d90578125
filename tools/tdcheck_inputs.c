/* Shapes, layouts and values of operands. */
#include "tdcheck.h"

#include "base/text.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Shapes ------------------------------------------------------------------------------------------- */

/* "2x3", "." or "-". */
static void read_shape(struct check_case *c, const char *at)
{
    int operand = c->count++;
    c->ndim[operand] = 0;
    c->is_null[operand] = *at == '-';
    while (isdigit((unsigned char)*at)) {
        char *end;
        c->shape[operand][c->ndim[operand]++] = strtoll(at, &end, 10);
        at = end + (*end == 'x');
    }
}

bool check_next_shapes(struct check_case *c, const char **text)
{
    const char *at = *text + strspn(*text, " ");
    bool numbers = false;
    c->count = c->number_count = 0;
    memset(c->numbers, 0, sizeof c->numbers);
    if (!*at)
        return false;
    for (; *at && *at != ';'; at += strspn(at, " ")) {
        if (*at == ':')
            numbers = true;
        else if (numbers)
            c->numbers[c->number_count++] = strtod(at, NULL);
        else
            read_shape(c, at);
        at += strcspn(at, " ;");
    }
    *text = *at ? at + 1 : at;
    return true;
}

/* ---- Numbers ------------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9;
    x ^= x >> 27;
    x *= 0x94d049bb133111eb;
    return x ^ x >> 31;
}

struct check_random check_random_of(uint64_t seed, const struct check_case *c)
{
    uint64_t state = mix(seed + 1);
    for (const char *at = c->row->name; *at; at++)
        state = mix(state ^ (unsigned char)*at);
    state = mix(state ^ (uint64_t)c->dtype << 32 ^ (uint64_t)c->number_of << 8 ^
                (uint64_t)c->layout);
    return (struct check_random){state};
}

double check_uniform(struct check_random *random)
{
    random->state += 0x9e3779b97f4a7c15;
    return (double)(mix(random->state) >> 11) * 0x1p-53;
}

static double number_of(struct check_random *random, char kind, int64_t range)
{
    double u = check_uniform(random);
    switch (kind) {
    case 'p':
        return 0.5 + 1.5 * u;
    case 'u':
        return u;
    case 'b':
        return u < 0.6;
    case 'c':
        return range ? floor(u * (double)range) : 0;
    case 'i':
        return floor(u * 5);
    default:
        return 4 * u - 2;
    }
}

static const double special_numbers[] = {NAN,      INFINITY,  -INFINITY, -0.0,  0,
                                         0x1p-149, -0x1p-140, 0x1.8p-24, 65504, -1e30};

td_tensor *check_numbers(struct check_random *random, const int64_t *shape, int ndim,
                         td_dtype dtype, char kind, int64_t range)
{
    td_dtype own = kind == 'c' ? TD_I64 : kind == 'b' ? TD_BOOL : dtype;
    bool is_complex = own == TD_COMPLEX64 || own == TD_COMPLEX128;
    bool is_float = BIT(own) & FLOATS;
    td_tensor *wide = td_empty(shape, ndim, is_complex ? TD_COMPLEX128 : TD_F64,
                               td_device_get("cpu"));
    double *to = td_tensor_data(wide);
    int64_t count = wide ? td_tensor_numel(wide) * (is_complex ? 2 : 1) : 0;
    for (int64_t i = 0; i < count; i++) {
        if (kind == 's')
            to[i] = check_uniform(random) < 0.3 ? special_numbers[(int)(check_uniform(random) * 10)]
                                                : number_of(random, 'n', 0);
        else
            to[i] = number_of(random, kind, range);
        if (!is_float && !is_complex && kind != 'b' && kind != 'c')
            to[i] = floor(own == TD_BOOL ? to[i] > 0 : own == TD_U8 ? fabs(3 * to[i]) : 3 * to[i]);
    }
    return td_to_dtype(wide, own);
}

/* ---- Layouts ------------------------------------------------------------------------------------------ */

enum check_layout check_layout_of(const struct check_case *c, int operand)
{
    if (c->layout == CHECK_CONTIGUOUS)
        return CHECK_CONTIGUOUS;
    bool in_place = (c->row->flags & CHECK_IN_PLACE) && operand == 0;
    int first = 1 + (c->layout - 1 + operand) % (CHECK_LAYOUTS - 1);
    if (first == CHECK_EXPANDED && (in_place || c->ndim[operand] == 0))
        return CHECK_STEPPED; /* a result has no stride of 0 */
    return (enum check_layout)first;
}

td_tensor *check_base(struct check_random *random, const struct check_case *c, int operand)
{
    int64_t shape[TD_MAX_DIMS];
    int ndim = c->ndim[operand];
    enum check_layout layout = check_layout_of(c, operand);
    for (int d = 0; d < ndim; d++) {
        int64_t size = c->shape[operand][layout == CHECK_TRANSPOSED ? ndim - 1 - d : d];
        shape[d] = layout == CHECK_STEPPED ? 2 * size + 1 : size;
    }
    if (layout == CHECK_EXPANDED && shape[0])
        shape[0] = 1;
    char kind = c->row->values[operand];
    return check_numbers(random, shape, ndim, c->dtype,
                         c->special && kind != 'b' && kind != 'c' ? 's' : kind,
                         (int64_t)c->numbers[0]);
}

td_tensor *check_view(td_tensor *base, const struct check_case *c, int operand)
{
    TD_NO_GRAD;
    int ndim = c->ndim[operand], reverse[TD_MAX_DIMS];
    td_tensor *view = base;
    switch (check_layout_of(c, operand)) {
    case CHECK_TRANSPOSED:
        for (int d = 0; d < ndim; d++)
            reverse[d] = ndim - 1 - d;
        view = td_permute(base, reverse, ndim);
        break;
    case CHECK_STEPPED:
        for (int d = 0; d < ndim; d++)
            view = td_slice(view, d, 1, INT64_MAX, 2);
        break;
    case CHECK_EXPANDED:
        view = td_expand(base, c->shape[operand], ndim);
        break;
    default:
        break;
    }
    return td_detach(view);
}

void check_describe(const struct check_case *c, td_tensor *const *x, char text[CHECK_TEXT])
{
    text[0] = '\0';
    for (int i = 0; i < c->count; i++) {
        td__text_add(text, CHECK_TEXT, "%s", i ? ", " : "");
        if (!x[i]) {
            td__text_add(text, CHECK_TEXT, "NULL");
            continue;
        }
        td__text_add(text, CHECK_TEXT, "%s [", td_dtype_name(td_tensor_dtype(x[i])));
        for (int d = 0; d < td_tensor_ndim(x[i]); d++)
            td__text_add(text, CHECK_TEXT, "%s%lld", d ? ", " : "",
                         (long long)td_tensor_size(x[i], d));
        td__text_add(text, CHECK_TEXT, "] strides [");
        for (int d = 0; d < td_tensor_ndim(x[i]); d++)
            td__text_add(text, CHECK_TEXT, "%s%lld", d ? ", " : "",
                         (long long)td_tensor_stride(x[i], d));
        td__text_add(text, CHECK_TEXT, "]");
    }
    for (int i = 0; i < c->number_count; i++)
        td__text_add(text, CHECK_TEXT, "%s%g", i ? " " : ", numbers ", c->numbers[i]);
    if (c->special)
        td__text_add(text, CHECK_TEXT, ", with NaN, infinities and denormals");
}
