/* The loop over tensors; see cpu_each.h.
 *
 * Axes are sorted by the strides of the result and merged where all tensors allow it, so that contiguous
 * tensors of any number of dimensions are one row. Then the loop runs
 *
 *     by rows      along the innermost axis; a tensor that has no gaps there is used as it is,
 *                  another one goes through its buffer
 *     by blocks    where rows are short: a block takes in many of them, through the buffers
 *
 * The buffer of an operand with stride 0, one element for the whole row, is filled once. All buffers are on
 * the stack.
 *
 * Threads share the elements in the order of the axes, in ranges that may begin anywhere in a row. */
#include "tensor/cpu_each.h"

#include "tensor/cpu_convert.h"
#include "tensor/parallel_for.h"
#include "tensor/vector.h"

#include <string.h>

#define BUFFER 4096
#define SHORT_ROW 48
#define REFILLED 256 /* elements of a buffer that is refilled for every row */

struct array {
    char *data;       /* of the element at the current index */
    int64_t element;  /* bytes */
    td_dtype dtype;   /* in memory */
    bool convert;     /* f16 or bf16, which the kernel gets as f32 */
    bool constant;    /* one element for the whole row, or, for blocks, for all */
    bool plain;       /* no gaps in a row, or, for blocks, none anywhere */
    bool single;      /* a constant that the kernel takes as one element */
    const char *held; /* the constant that fills the buffer, up to held_count */
    int64_t held_count;
    int64_t strides[TD_MAX_DIMS]; /* in bytes */
};

struct loop {
    int ndim;
    int count; /* of arrays */
    int64_t sizes[TD_MAX_DIMS];
    int64_t index[TD_MAX_DIMS];
    struct array arrays[TD__EACH_ARRAYS];
    _Alignas(64) char buffers[TD__EACH_ARRAYS][BUFFER];
    _Alignas(64) char halves[BUFFER / 2];
};

struct td__each_array td__each_array(const td_tensor *tensor)
{
    return (struct td__each_array){td_tensor_data(tensor), tensor->layout.dtype,
                                   tensor->layout.strides};
}

struct td__each_array td__each_scalar(const void *element, td_dtype dtype)
{
    return (struct td__each_array){(char *)element, dtype, NULL};
}

/* ---- Axes ------------------------------------------------------------------------------------ */

/* Leaves out sizes of 1, and sorts by the result's strides, the largest first. */
static void sort_axes(struct loop *loop, const struct td__layout *shape,
                      const struct td__each_array *from)
{
    loop->ndim = 0;
    for (int d = 0; d < shape->ndim; d++) {
        if (shape->shape[d] == 1)
            continue;
        int at = loop->ndim++;
        int64_t stride = from[0].strides[d] * loop->arrays[0].element;
        for (; at > 0 && loop->arrays[0].strides[at - 1] < stride; at--) {
            loop->sizes[at] = loop->sizes[at - 1];
            for (int k = 0; k < loop->count; k++)
                loop->arrays[k].strides[at] = loop->arrays[k].strides[at - 1];
        }
        loop->sizes[at] = shape->shape[d];
        for (int k = 0; k < loop->count; k++)
            loop->arrays[k].strides[at] = from[k].strides
                                              ? from[k].strides[d] * loop->arrays[k].element
                                              : 0;
    }
}

/* Whether axis `outer` goes on where axis `inner` ends, in all arrays. */
static bool may_merge(const struct loop *loop, int outer, int inner)
{
    for (int k = 0; k < loop->count; k++)
        if (loop->arrays[k].strides[outer] != loop->arrays[k].strides[inner] * loop->sizes[inner])
            return false;
    return true;
}

static void merge_axes(struct loop *loop)
{
    int last = 0;
    for (int d = 1; d < loop->ndim; d++) {
        bool merge = may_merge(loop, last, d);
        int64_t size = merge ? loop->sizes[last] * loop->sizes[d] : loop->sizes[d];
        last += !merge;
        loop->sizes[last] = size;
        for (int k = 0; k < loop->count; k++)
            loop->arrays[k].strides[last] = loop->arrays[k].strides[d];
    }
    if (loop->ndim == 0) { /* a single element is a row of one */
        loop->sizes[0] = 1;
        for (int k = 0; k < loop->count; k++)
            loop->arrays[k].strides[0] = loop->arrays[k].element;
    }
    loop->ndim = last + 1;
}

static void set_up(struct loop *loop, const struct td__layout *shape,
                   const struct td__each_array *from, int count, bool raw)
{
    loop->count = count;
    for (int k = 0; k < count; k++) {
        struct array *array = &loop->arrays[k];
        array->data = from[k].data;
        array->dtype = from[k].dtype;
        array->element = (int64_t)td_dtype_size(from[k].dtype);
        array->convert = !raw && td__is_half(from[k].dtype);
        array->held = NULL;
        array->held_count = 0;
    }
    sort_axes(loop, shape, from);
    merge_axes(loop);
    memset(loop->index, 0, sizeof loop->index);
}

/* How many elements fit the buffers. */
static int64_t block_of(const struct loop *loop)
{
    int64_t widest = 4;
    for (int k = 0; k < loop->count; k++)
        if (loop->arrays[k].element > widest)
            widest = loop->arrays[k].element;
    return BUFFER / widest;
}

/* ---- Copies to and from the buffers ------------------------------------------------------------ */

#define COPY_STEPS(T)                                                                              \
    do {                                                                                           \
        for (int64_t i = 0; i < count; i++)                                                        \
            memcpy(dst + i * to_step, src + i * from_step, sizeof(T));                             \
    } while (0)

#define COPY_FROM(T)                                                                               \
    do {                                                                                           \
        if (to_step == (int64_t)sizeof(T) && from_step == 0) {                                     \
            T value;                                                                               \
            memcpy(&value, src, sizeof value);                                                     \
            for (int64_t i = 0; i < count; i++)                                                    \
                memcpy(dst + i * (int64_t)sizeof(T), &value, sizeof(T));                           \
        } else if (to_step == (int64_t)sizeof(T)) {                                                \
            for (int64_t i = 0; i < count; i++)                                                    \
                memcpy(dst + i * (int64_t)sizeof(T), src + i * from_step, sizeof(T));              \
        } else {                                                                                   \
            COPY_STEPS(T);                                                                         \
        }                                                                                          \
    } while (0)

struct pair {
    uint64_t half[2];
};

TD__VECTOR void td__copy_steps(void *to, int64_t to_step, const void *from, int64_t from_step,
                               int64_t count, size_t size)
{
    char *restrict dst = to;
    const char *restrict src = from;
    if (to_step == (int64_t)size && from_step == (int64_t)size) {
        memcpy(dst, src, (size_t)count * size);
        return;
    }
    switch (size) {
    case 1:
        COPY_FROM(uint8_t);
        break;
    case 2:
        COPY_FROM(uint16_t);
        break;
    case 4:
        COPY_FROM(uint32_t);
        break;
    case 8:
        COPY_FROM(uint64_t);
        break;
    default:
        COPY_FROM(struct pair);
    }
}

/* Moves `count` elements from the current index on between `flat` and the tensor, along as many
 * rows as they take. */
static void move_block(const struct loop *loop, struct array *array, char *flat, int64_t count,
                       bool to_tensor)
{
    int inner = loop->ndim - 1;
    int64_t index[TD_MAX_DIMS];
    memcpy(index, loop->index, sizeof index);
    char *data = array->data;
    int64_t step = array->strides[inner], element = array->element;
    while (count > 0) {
        int64_t left = loop->sizes[inner] - index[inner];
        int64_t n = left < count ? left : count;
        if (to_tensor)
            td__copy_steps(data, step, flat, element, n, (size_t)element);
        else
            td__copy_steps(flat, element, data, step, n, (size_t)element);
        flat += n * element;
        count -= n;
        data += n * step;
        index[inner] += n;
        for (int d = inner; d > 0 && index[d] == loop->sizes[d]; d--) {
            data += array->strides[d - 1] - loop->sizes[d] * array->strides[d];
            index[d] = 0;
            index[d - 1]++;
        }
    }
}

/* The operand's elements as the kernel takes them. */
static void *fetch(struct loop *loop, int k, int64_t count)
{
    struct array *array = &loop->arrays[k];
    char *buffer = loop->buffers[k];
    if (array->single) {
        count = 1;
        if (!array->convert)
            return array->data;
    }
    if (!array->convert && array->plain)
        return array->data;
    if (array->constant && array->held == array->data && array->held_count >= count)
        return buffer;
    const char *from = array->data;
    char *to = array->convert ? loop->halves : buffer;
    if (!array->plain) {
        move_block(loop, array, to, count, false);
        from = to;
    }
    if (array->convert)
        td__convert_half((float *)(void *)buffer, from, array->dtype, count);
    array->held = array->data;
    array->held_count = count;
    return buffer;
}

/* Where the kernel writes the result; stored to the tensor afterwards if it is a buffer. */
static void *result_buffer(struct loop *loop)
{
    struct array *array = &loop->arrays[0];
    return !array->convert && array->plain ? array->data : loop->buffers[0];
}

static void put_back(struct loop *loop, int64_t count)
{
    struct array *array = &loop->arrays[0];
    if (!array->convert && array->plain)
        return;
    char *from = loop->buffers[0];
    if (array->convert) {
        char *to = array->plain ? array->data : loop->halves;
        td__convert_to_half(to, array->dtype, (const float *)(const void *)from, count);
        from = to;
    }
    if (!array->plain)
        move_block(loop, array, from, count, true);
}

/* What td__each_run() or td__each_pair() was called with. */
struct call {
    const struct td__layout *shape;
    const struct td__each_array *arrays;
    int count;
    bool raw;
    td__each_fn fn;
    td__each_pair_fn pair_fn; /* instead of fn */
    const void *arg;
};

/* ---- The loop ---------------------------------------------------------------------------------- */

/* `rows` of them along axis `outer`. */
static void run_pairs(const struct loop *loop, void *const arrays[], int64_t count, int64_t rows,
                      int outer, const struct call *call)
{
    const struct array *all = loop->arrays;
    struct td__pairs pairs = {.out = arrays[0],
                              .a = arrays[1],
                              .b = arrays[2],
                              .a_step = !all[1].single,
                              .b_step = !all[2].single,
                              .count = count,
                              .rows = rows};
    if (rows > 1) {
        pairs.out_row = all[0].strides[outer];
        pairs.a_row = all[1].strides[outer];
        pairs.b_row = all[2].strides[outer];
    }
    call->pair_fn(&pairs, call->arg);
}

static void run_chunk(struct loop *loop, int64_t count, const struct call *call)
{
    void *arrays[TD__EACH_ARRAYS] = {result_buffer(loop)};
    for (int k = 1; k < loop->count; k++)
        arrays[k] = fetch(loop, k, count);
    if (call->pair_fn)
        run_pairs(loop, arrays, count, 1, 0, call);
    else
        call->fn(arrays, count, call->arg);
    put_back(loop, count);
}

/* Advances all arrays by `count` along axis `d`, at most to its end, and there to the next axis. */
static void move_along(struct loop *loop, int d, int64_t count)
{
    loop->index[d] += count;
    for (int k = 0; k < loop->count; k++)
        loop->arrays[k].data += count * loop->arrays[k].strides[d];
    for (; d > 0 && loop->index[d] == loop->sizes[d]; d--) {
        for (int k = 0; k < loop->count; k++) {
            struct array *array = &loop->arrays[k];
            array->data += array->strides[d - 1] - loop->sizes[d] * array->strides[d];
        }
        loop->index[d] = 0;
        loop->index[d - 1]++;
    }
}

/* Advances all arrays by `count` elements. */
static void move_on(struct loop *loop, int64_t count)
{
    int inner = loop->ndim - 1;
    while (count > 0) {
        int64_t left = loop->sizes[inner] - loop->index[inner];
        int64_t n = left < count ? left : count;
        count -= n;
        move_along(loop, inner, n);
    }
}

/* Moves all arrays from the first element to number `at`. */
static void seek(struct loop *loop, int64_t at)
{
    for (int d = loop->ndim; d-- > 0; at /= loop->sizes[d]) {
        loop->index[d] = at % loop->sizes[d];
        for (int k = 0; k < loop->count; k++)
            loop->arrays[k].data += loop->index[d] * loop->arrays[k].strides[d];
    }
}

/* Whether the array, read along all axes, has no gaps (for `stride` the size of an element), or is
 * one element (for 0). */
static bool has_strides(const struct loop *loop, const struct array *array, int64_t stride)
{
    for (int d = loop->ndim; d-- > 0; stride *= loop->sizes[d])
        if (array->strides[d] != stride)
            return false;
    return true;
}

/* Whole rows of arrays that the kernel takes as they are, from the current one to the end of the next
 * axis, at most `total` elements. Returns how many they were. */
static int64_t run_plane(struct loop *loop, int64_t total, const struct call *call)
{
    int outer = loop->ndim - 2;
    int64_t row = loop->sizes[outer + 1], rows = loop->sizes[outer] - loop->index[outer];
    rows = rows < total / row ? rows : total / row;
    void *arrays[TD__EACH_ARRAYS];
    for (int k = 0; k < loop->count; k++)
        arrays[k] = loop->arrays[k].data;
    if (call->pair_fn)
        run_pairs(loop, arrays, row, rows, outer, call);
    for (int64_t r = 0; r < rows && !call->pair_fn; r++) {
        call->fn(arrays, row, call->arg);
        for (int k = 0; k < loop->count; k++)
            arrays[k] = (char *)arrays[k] + loop->arrays[k].strides[outer];
    }
    move_along(loop, outer, rows);
    return rows * row;
}

static void run_rows(struct loop *loop, int64_t total, const struct call *call)
{
    int inner = loop->ndim - 1;
    int64_t block = loop->sizes[inner];
    bool direct = true;
    for (int k = 0; k < loop->count; k++) {
        struct array *array = &loop->arrays[k];
        array->plain = array->strides[inner] == array->element;
        array->constant = array->strides[inner] == 0;
        array->single = k > 0 && array->constant && call->pair_fn;
        bool refilled = array->constant && !has_strides(loop, array, 0);
        int64_t most = refilled ? REFILLED : block_of(loop);
        if (!array->single && (!array->plain || array->convert) && block > most)
            block = most;
        direct &= (array->plain || array->single) && !array->convert;
    }
    for (int64_t n; total > 0; total -= n) {
        int64_t left = loop->sizes[inner] - loop->index[inner];
        n = left < block ? left : block;
        n = n < total ? n : total;
        if (direct && n == block && n < total) {
            n = run_plane(loop, total, call);
        } else {
            run_chunk(loop, n, call);
            move_along(loop, inner, n);
        }
    }
}

static void run_blocks(struct loop *loop, int64_t total, const struct call *call)
{
    for (int k = 0; k < loop->count; k++) {
        struct array *array = &loop->arrays[k];
        array->plain = has_strides(loop, array, array->element);
        array->constant = has_strides(loop, array, 0);
        array->single = k > 0 && array->constant && call->pair_fn;
    }
    int64_t block = block_of(loop);
    for (int64_t n; total > 0; total -= n) {
        n = total < block ? total : block;
        run_chunk(loop, n, call);
        move_on(loop, n);
    }
}

static void run_range(void *arg, int64_t begin, int64_t end)
{
    const struct call *call = arg;
    struct loop loop;
    set_up(&loop, call->shape, call->arrays, call->count, call->raw);
    seek(&loop, begin);
    if (loop.ndim > 1 && loop.sizes[loop.ndim - 1] < SHORT_ROW)
        run_blocks(&loop, end - begin, call);
    else
        run_rows(&loop, end - begin, call);
}

void td__each_run(const struct td__layout *shape, const struct td__each_array *arrays, int count,
                  bool raw, td__each_fn fn, const void *arg)
{
    struct call call = {shape, arrays, count, raw, fn, NULL, arg};
    td__parallel_for(shape->numel, TD__GRAIN, run_range, &call);
}

void td__each_pair(const struct td__layout *shape, const struct td__each_array arrays[3], bool raw,
                   td__each_pair_fn fn, const void *arg)
{
    struct call call = {shape, arrays, 3, raw, NULL, fn, arg};
    td__parallel_for(shape->numel, TD__GRAIN, run_range, &call);
}

void td__each_tensors(td_tensor *out, const td_tensor *a, const td_tensor *b, const td_tensor *c,
                      td__each_fn fn, const void *arg)
{
    const td_tensor *tensors[TD__EACH_ARRAYS] = {out, a, b, c};
    struct td__each_array arrays[TD__EACH_ARRAYS];
    int count = 0;
    while (count < TD__EACH_ARRAYS && tensors[count]) {
        arrays[count] = td__each_array(tensors[count]);
        count++;
    }
    td__each_run(&out->layout, arrays, count, false, fn, arg);
}
