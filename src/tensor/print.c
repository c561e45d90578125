/* Tensors as text, the way PyTorch prints them.
 *
 *     tensor([[1.0000, 2.5000],         4 digits, or scientific where numbers are far apart
 *             [   nan,   -inf]])        one width for all, of the finite ones
 *
 * More than 1,000 elements are summarised: of each dimension of more than 6 the first three and the last
 * three are shown. Only the elements that are shown determine the format. Two passes find the format and the
 * width, then the elements are written. */
#include "base/buffer.h"
#include "base/fail.h"
#include "tensor/tensor_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIGITS 4
#define LINE 80
#define EDGE 3
#define SUMMARISED_ABOVE 1000
#define PREFIX "tensor("
#define LONGEST 400 /* characters of a number: a double without its exponent has 309 */

/* How the numbers of a tensor, or the real or imaginary parts of one, are written. */
struct format {
    bool whole; /* floats without a fraction */
    bool scientific;
    int width;
    double least;    /* of the magnitudes that are neither 0 nor infinite */
    double greatest; /* 0: there are none */
};

struct printer {
    struct td__buffer text;
    td_dtype dtype;
    int ndim;
    const int64_t *shape;
    const int64_t *strides;
    bool summarised;
    bool wrapped;             /* a suffix is on a line of its own */
    struct format formats[2]; /* the second one is of imaginary parts */
};

/* ---- Elements ---------------------------------------------------------------------------------- */

static bool is_complex(td_dtype dtype)
{
    return dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
}

static bool is_floating(td_dtype dtype)
{
    return dtype <= TD_BF16 || is_complex(dtype);
}

/* A float, or part 0 or 1 of a complex number. */
static double real_of(const char *element, td_dtype dtype, int part)
{
    switch (dtype) {
    case TD_F32:
    case TD_COMPLEX64:
        return ((const float *)(const void *)element)[part];
    case TD_F16:
        return td_f16_to_f32(*(const uint16_t *)(const void *)element);
    case TD_BF16:
        return td_bf16_to_f32(*(const uint16_t *)(const void *)element);
    default:
        return ((const double *)(const void *)element)[part];
    }
}

static int write_integer(char *text, const void *element, td_dtype dtype)
{
    switch (dtype) {
    case TD_BOOL:
        return sprintf(text, "%s", *(const uint8_t *)element ? "True" : "False");
    case TD_I8:
        return sprintf(text, "%d", *(const int8_t *)element);
    case TD_U8:
        return sprintf(text, "%d", *(const uint8_t *)element);
    case TD_I16:
        return sprintf(text, "%d", *(const int16_t *)element);
    case TD_I32:
        return sprintf(text, "%" PRId32, *(const int32_t *)element);
    case TD_U32:
        return sprintf(text, "%" PRIu32, *(const uint32_t *)element);
    case TD_U64:
        return sprintf(text, "%" PRIu64, *(const uint64_t *)element);
    default:
        return sprintf(text, "%" PRId64, *(const int64_t *)element);
    }
}

static int write_real(char *text, const struct format *format, double value)
{
    if (isnan(value))
        return sprintf(text, "nan");
    if (isinf(value))
        return sprintf(text, "%sinf", value < 0 ? "-" : "");
    if (format->scientific)
        return sprintf(text, "%.*e", DIGITS, value);
    if (format->whole)
        return sprintf(text, "%.0f.", value);
    return sprintf(text, "%.*f", DIGITS, value);
}

/* One number, filled up to the width of the format. */
static void put_number(struct printer *printer, const char *element, int part)
{
    char text[LONGEST];
    const struct format *format = &printer->formats[part];
    bool floating = is_floating(printer->dtype);
    int size = floating ? write_real(text, format, real_of(element, printer->dtype, part))
                        : write_integer(text, element, printer->dtype);
    if (part == 1) { /* behind the real part: with its sign, and without spaces */
        if (text[0] != '-')
            td__buffer_put(&printer->text, "+", 1);
    } else {
        for (int i = size; i < format->width; i++)
            td__buffer_put(&printer->text, " ", 1);
    }
    td__buffer_put(&printer->text, text, (size_t)size);
    if (part == 1)
        td__buffer_put(&printer->text, "j", 1);
}

static void put_element(struct printer *printer, const char *element)
{
    put_number(printer, element, 0);
    if (is_complex(printer->dtype))
        put_number(printer, element, 1);
}

/* ---- What is shown ----------------------------------------------------------------------------- */

/* The index behind `i` that is shown; *gap: whether some between them are not. */
static int64_t next_index(const struct printer *printer, int dim, int64_t i, bool *gap)
{
    int64_t size = printer->shape[dim];
    *gap = printer->summarised && size > 2 * EDGE && i == EDGE - 1;
    return *gap ? size - EDGE : i + 1;
}

static int64_t step_of(const struct printer *printer, int dim)
{
    return printer->strides[dim] * (int64_t)td_dtype_size(printer->dtype);
}

typedef void element_fn(struct printer *printer, const char *element);

/* Calls `fn` for each element that is shown. */
static void visit(struct printer *printer, int dim, const char *data, element_fn *fn)
{
    if (dim == printer->ndim) {
        fn(printer, data);
        return;
    }
    bool gap;
    for (int64_t i = 0; i < printer->shape[dim]; i = next_index(printer, dim, i, &gap))
        visit(printer, dim + 1, data + i * step_of(printer, dim), fn);
}

/* ---- The format -------------------------------------------------------------------------------- */

static void look_at_real(struct format *format, double value)
{
    double magnitude = fabs(value);
    if (!(magnitude > 0) || isinf(magnitude))
        return;
    if (format->greatest == 0 || magnitude < format->least)
        format->least = magnitude;
    if (magnitude > format->greatest)
        format->greatest = magnitude;
    if (value != ceil(value))
        format->whole = false;
}

static void look_at(struct printer *printer, const char *element)
{
    for (int part = 0; part <= (is_complex(printer->dtype) ? 1 : 0); part++)
        look_at_real(&printer->formats[part], real_of(element, printer->dtype, part));
}

static void measure(struct printer *printer, const char *element)
{
    char text[LONGEST];
    for (int part = 0; part <= (is_complex(printer->dtype) ? 1 : 0); part++) {
        struct format *format = &printer->formats[part];
        int size;
        if (is_floating(printer->dtype)) {
            double value = real_of(element, printer->dtype, part);
            if (value == 0 || !isfinite(value))
                continue;
            size = write_real(text, format, value);
        } else {
            size = write_integer(text, element, printer->dtype);
        }
        if (size > format->width)
            format->width = size;
    }
}

static void choose_formats(struct printer *printer, const char *data)
{
    for (int part = 0; part < 2; part++)
        printer->formats[part] = (struct format){.whole = true, .width = 1};
    if (is_floating(printer->dtype)) {
        visit(printer, 0, data, look_at);
        for (int part = 0; part < 2; part++) {
            struct format *format = &printer->formats[part];
            if (format->greatest > 0)
                format->scientific = format->greatest / format->least > 1000 ||
                                     format->greatest > 1e8 ||
                                     (!format->whole && format->least < 1e-4);
        }
    }
    visit(printer, 0, data, measure);
}

/* ---- The text ---------------------------------------------------------------------------------- */

static void put_text(struct printer *printer, const char *text)
{
    td__buffer_put(&printer->text, text, strlen(text));
}

static void put_lines(struct printer *printer, int lines, int indent)
{
    for (int i = 0; i < lines; i++)
        put_text(printer, "\n");
    for (int i = 0; i < indent; i++)
        put_text(printer, " ");
}

/* The elements of the last dimension, as many on a line as there is room for. */
static void put_row(struct printer *printer, int dim, const char *data, int indent)
{
    int length = printer->formats[0].width + 2;
    if (is_complex(printer->dtype))
        length += printer->formats[1].width + 1;
    int a_line = length < LINE - indent ? (LINE - indent) / length : 1;
    int on_line = 0;
    bool gap = false;
    put_text(printer, "[");
    for (int64_t i = 0; i < printer->shape[dim];) {
        if (on_line == a_line) {
            put_lines(printer, 1, indent + 1);
            on_line = 0;
        }
        if (gap) { /* counts as an element */
            put_text(printer, " ...");
            gap = false;
        } else {
            put_element(printer, data + i * step_of(printer, dim));
            i = next_index(printer, dim, i, &gap);
        }
        on_line++;
        if (i < printer->shape[dim])
            put_text(printer, on_line == a_line ? "," : ", ");
    }
    put_text(printer, "]");
}

static void put_dimension(struct printer *printer, int dim, const char *data, int indent)
{
    if (dim == printer->ndim) {
        put_element(printer, data);
        return;
    }
    if (dim == printer->ndim - 1) {
        put_row(printer, dim, data, indent);
        return;
    }
    int lines = printer->ndim - dim - 1;
    put_text(printer, "[");
    for (int64_t i = 0; i < printer->shape[dim];) {
        bool gap;
        put_dimension(printer, dim + 1, data + i * step_of(printer, dim), indent + 1);
        i = next_index(printer, dim, i, &gap);
        if (i < printer->shape[dim]) {
            put_text(printer, ",");
            put_lines(printer, lines, indent + 1);
        }
        if (gap) {
            put_text(printer, "...,");
            put_lines(printer, lines, indent + 1);
        }
    }
    put_text(printer, "]");
}

/* A suffix after the elements, on the same line if it fits. */
static void put_suffix(struct printer *printer, const char *suffix)
{
    size_t line = 0;
    const struct td__buffer *text = &printer->text;
    while (line < text->size && text->data[text->size - 1 - line] != '\n')
        line++;
    /* Counted as in PyTorch, which adds two characters to a line of elements. */
    bool fits = line + (printer->wrapped ? 0 : 2) + strlen(suffix) + 2 <= LINE;
    put_text(printer, fits ? ", " : ",\n       ");
    printer->wrapped = printer->wrapped || !fits;
    put_text(printer, suffix);
}

static void put_size(struct printer *printer)
{
    char text[TD_MAX_DIMS * 22 + 16] = "size=(";
    size_t at = strlen(text);
    for (int d = 0; d < printer->ndim; d++)
        at += (size_t)sprintf(text + at, "%s%" PRId64, d ? ", " : "", printer->shape[d]);
    strcpy(text + at, ")");
    put_suffix(printer, text);
}

static void put_suffixes(struct printer *printer, const td_tensor *tensor)
{
    char text[64];
    td_dtype dtype = printer->dtype;
    bool empty = tensor->layout.numel == 0;
    bool obvious = dtype == TD_F32 ||
                   (!empty && (dtype == TD_I64 || dtype == TD_BOOL || dtype == TD_COMPLEX64));
    const char *device = tensor->storage->device->name;
    if (strcmp(device, "cpu") != 0) {
        snprintf(text, sizeof text, "device='%s'", device);
        put_suffix(printer, text);
    }
    if (empty && printer->ndim != 1)
        put_size(printer);
    if (!obvious) {
        snprintf(text, sizeof text, "dtype=%s", td_dtype_name(dtype));
        put_suffix(printer, text);
    }
    if (tensor->node || atomic_load(&tensor->history) != atomic_load(&tensor->storage->history))
        put_suffix(printer, "requires_grad=True");
}

/* ---- The calls --------------------------------------------------------------------------------- */

td_bytes td_tensor_text(const td_tensor *tensor)
{
    td_bytes result = {0};
    if (!tensor) {
        td__fail_null(__func__);
        return result;
    }
    td_tensor *here = td__on_host(tensor) ? td_tensor_retain((td_tensor *)tensor)
                                          : td__to_host("td_tensor_text", (td_tensor *)tensor);
    if (!here)
        return result;
    struct printer printer = {.dtype = tensor->layout.dtype, .ndim = tensor->layout.ndim};
    const struct td__layout *layout = &here->layout;
    const char *data = td_tensor_data(here);
    printer.shape = layout->shape;
    printer.strides = layout->strides;
    printer.summarised = layout->numel > SUMMARISED_ABOVE;
    put_text(&printer, PREFIX);
    if (layout->numel == 0) {
        put_text(&printer, "[]");
    } else {
        choose_formats(&printer, data);
        put_dimension(&printer, 0, data, (int)strlen(PREFIX));
    }
    put_suffixes(&printer, tensor);
    td__buffer_put(&printer.text, ")", 2); /* with the NUL */
    if (printer.text.failed) {
        td__fail_nomem("td_tensor_text");
        goto release;
    }
    result = (td_bytes){.data = (char *)printer.text.data, .size = printer.text.size - 1};
    printer.text = (struct td__buffer){0};

release:
    td__buffer_free(&printer.text);
    td_tensor_release(here);
    return result;
}

td_status td_tensor_print(const td_tensor *tensor, FILE *stream)
{
    if (!tensor)
        return td__fail_null(__func__);
    td_bytes text = td_tensor_text(tensor);
    if (!text.data)
        return TD_ERR_NOMEM;
    int written = fprintf(stream, "%s\n", text.data);
    td_bytes_free(&text);
    if (written < 0)
        return td_fail(TD_ERR_SYSTEM, "td_tensor_print: writing to the stream failed");
    return TD_OK;
}
