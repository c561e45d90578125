/* Reductions; see reduction.h. This file checks them, cuts the data into blocks that stay in L1, and calls the
 * kernels along the tree; the kernels loop over elements. */
#include "reduce/reduction.h"

#include "base/option_rules.h"
#include "collective/tree.h"
#include "reduce/reduce_kernels.h"
#include "reduce/reduce_method.h"

#include <string.h>

enum { BLOCK_BYTES = 4096, PAGE = 4096 }; /* of accumulators; 2 to 8 KiB are about as fast */

/* ---- Checks ---------------------------------------------------------------------------------- */

static bool is_f64(td_dtype dtype)
{
    return dtype == TD_F64 || dtype == TD_COMPLEX128;
}

td_status td__reduction_check(const struct td__reduction *reduction)
{
    td_dtype dtype = reduction->dtype;
    td_reduce_op op = reduction->op;
    TD_TRY(td__check_dtype("reduction", dtype));
    if (reduction->user)
        return TD_OK;
    if ((unsigned)op >= TD__REDUCE_OPS)
        return td_fail(TD_ERR_INVALID, "reduction of %s: %d is not an operation (see td_reduce_op)",
                       td_dtype_name(dtype), (int)op);

    bool is_complex = dtype == TD_COMPLEX64 || dtype == TD_COMPLEX128;
    bool has_bits = (dtype >= TD_I8 && dtype <= TD_U64) || dtype == TD_BOOL;
    const char *takes = NULL;
    if ((op == TD_MIN || op == TD_MAX) && is_complex)
        takes = "complex numbers have no order";
    else if ((op == TD_AVG || op == TD_PREMUL_SUM) && has_bits)
        takes = "it takes floating-point and complex types; use sum";
    else if ((op == TD_BAND || op == TD_BOR || op == TD_BXOR) && !has_bits)
        takes = "bitwise operations take integers and bool";
    if (takes)
        return td_fail(TD_ERR_INVALID, "reduction: there is no %s of %s: %s", td_reduce_op_name(op),
                       td_dtype_name(dtype), takes);
    return TD_OK;
}

td_dtype td__reduction_accumulator(const struct td__reduction *reduction)
{
    bool exact = reduction->user || reduction->op == TD_MIN || reduction->op == TD_MAX;
    bool is_half = reduction->dtype == TD_F16 || reduction->dtype == TD_BF16;
    return is_half && !exact ? TD_F32 : reduction->dtype;
}

/* A reduction, with what each call looks up once. */
struct work {
    const struct td__reduction *reduction;
    const struct td__reduce_kernels *kernels;
    td__fold_fn *fold;          /* NULL with a user's function */
    td__fold_fn *fold_elements; /* from elements to elements; may be NULL */
    size_t size;                /* of an element */
    size_t acc_size;            /* of its accumulator */
    size_t block;               /* elements whose accumulators fill a block */
    bool converts;              /* between f16 or bf16 and f32 */
    bool premultiplies;
    bool normalises; /* bool */
    bool averages;
    bool loads; /* elements must be converted to accumulators */
};

static struct work work_of(const struct td__reduction *reduction)
{
    td_dtype acc = td__reduction_accumulator(reduction);
    struct work work = {
        .reduction = reduction,
        .kernels = td__kernels(),
        .size = td_dtype_size(reduction->dtype),
        .acc_size = td_dtype_size(acc),
        .block = BLOCK_BYTES / td_dtype_size(acc),
        .converts = acc != reduction->dtype,
    };
    if (!reduction->user) {
        work.fold = work.kernels->fold[reduction->dtype][reduction->op];
        work.premultiplies = reduction->op == TD_PREMUL_SUM;
        work.normalises = reduction->dtype == TD_BOOL;
        work.averages = reduction->op == TD_AVG;
        work.loads = work.converts || work.premultiplies || work.normalises;
        if (!work.loads && !work.averages)
            work.fold_elements = work.fold;
        else if (work.averages && !work.converts)
            work.fold_elements = is_f64(reduction->dtype) ? work.kernels->f64_average
                                                          : work.kernels->f32_average;
        else if (reduction->dtype == TD_BF16 && reduction->op == TD_SUM)
            work.fold_elements = work.kernels->bf16_sum_elements;
    }
    return work;
}

/* ---- One block ------------------------------------------------------------------------------- */

static void load_block(const struct work *work, void *acc, const void *src, size_t count,
                       double factor)
{
    td_dtype dtype = work->reduction->dtype;
    size_t bytes = count * work->acc_size;
    if (dtype == TD_F16 && work->converts)
        work->kernels->f16_to_f32(acc, src, count);
    else if (work->converts)
        work->kernels->bf16_to_f32(acc, src, count);
    else if (acc != src)
        memcpy(acc, src, bytes);

    if (work->normalises)
        work->kernels->normalise_bool(acc, count);
    else if (work->premultiplies && is_f64(dtype))
        work->kernels->scale_f64(acc, factor, bytes / sizeof(double));
    else if (work->premultiplies)
        work->kernels->scale_f32(acc, factor, bytes / sizeof(float));
}

static void combine(const struct work *work, void *acc, const void *other, size_t count)
{
    const struct td__reduction *reduction = work->reduction;
    void *pair[] = {acc, (void *)other};
    if (work->fold)
        work->fold(acc, pair, 2, count * work->acc_size);
    else
        reduction->user(acc, other, count, reduction->dtype, reduction->user_arg);
}

/* Divides, for TD_AVG, in place. */
static void divide_block(const struct work *work, void *acc, size_t count, int ranks)
{
    size_t bytes = count * work->acc_size;
    if (is_f64(work->reduction->dtype))
        work->kernels->divide_f64(acc, ranks, bytes / sizeof(double));
    else
        work->kernels->divide_f32(acc, ranks, bytes / sizeof(float));
}

/* Rounds, or copies. */
static void store_block(const struct work *work, void *dst, const void *acc, size_t count)
{
    if (work->reduction->dtype == TD_F16 && work->converts)
        work->kernels->f32_to_f16(dst, acc, count);
    else if (work->converts)
        work->kernels->f32_to_bf16(dst, acc, count);
    else if (dst != acc)
        memcpy(dst, acc, count * work->acc_size);
}

/* ---- The three steps ------------------------------------------------------------------------- */

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

void td__reduce_load(const struct td__reduction *reduction, void *acc, const void *src,
                     size_t count)
{
    struct work work = work_of(reduction);
    for (size_t at = 0; at < count; at += work.block)
        load_block(&work, (char *)acc + at * work.acc_size, (const char *)src + at * work.size,
                   min_size(work.block, count - at), reduction->factor);
}

void td__reduce_combine(const struct td__reduction *reduction, void *acc, const void *other,
                        size_t count)
{
    struct work work = work_of(reduction);
    if (count)
        combine(&work, acc, other, count);
}

void td__reduce_store(const struct td__reduction *reduction, void *dst, const void *acc,
                      size_t count, int size)
{
    struct work work = work_of(reduction);
    for (size_t at = 0, part; at < count; at += part) {
        part = min_size(work.block, count - at);
        const void *from = (const char *)acc + at * work.acc_size;
        _Alignas(64) char quotient[BLOCK_BYTES];
        if (work.averages) {
            memcpy(quotient, from, part * work.acc_size);
            divide_block(&work, quotient, part, size);
            from = quotient;
        }
        store_block(&work, (char *)dst + at * work.size, from, part);
    }
}

/* ---- All three in one pass -------------------------------------------------------------------
 *
 * A block at a time: the sources' blocks are folded along the tree into one, which is then written
 * to each destination. So every source is read before any destination is written, and the two may
 * be the same memory.
 *
 *     src[0] |--|######|--------|  \
 *     src[1] |--|######|--------|   > value |######|  >  dst[0] |##|######|--------|
 *     src[2] |--|######|--------|  /                     dst[1] |##|######|--------|
 *
 * Subtrees of 2, 4 or 8 sources are folded in registers; sources that need conversion are loaded into `tiles`
 * first. If all sources are one such subtree, and the destinations are the sources, there are no blocks: the
 * registers are written back directly, if that is faster (reduce_method.h).
 *
 * Tried and dropped: prefetching the next block, which was slower everywhere; and non-temporal stores, which
 * halve the speed in place. They are 1.5 times as fast out of place when nothing fits into a cache, but no
 * collective calls this so. */

enum { WIDEST = 8 }; /* sources that are folded in registers, at most */

struct pass {
    const struct work *work;
    const void *const *src;
    char (*tiles)[BLOCK_BYTES];
    size_t at; /* first element of the block */
    size_t count;
};

static bool is_width(int n)
{
    return n == 2 || n == 4 || n == WIDEST;
}

/* The block of a source as accumulators, read-only: in its buffer, or in a tile. */
static void *source(const struct pass *pass, int index, int tile)
{
    const char *src = (const char *)pass->src[index] + pass->at * pass->work->size;
    if (!pass->work->loads)
        return (void *)src;
    const struct td__reduction *reduction = pass->work->reduction;
    load_block(pass->work, pass->tiles[tile], src, pass->count,
               reduction->factors ? reduction->factors[index] : reduction->factor);
    return pass->tiles[tile];
}

/* Reduces the tree's node over the `n` sources from `first` on into `out`. */
static void fold_node(const struct pass *pass, int first, int n, char *out)
{
    const struct work *work = pass->work;
    size_t bytes = pass->count * work->acc_size;
    if (n == 1) {
        memcpy(out, source(pass, first, 0), bytes);
    } else if (work->fold && is_width(n)) {
        void *parts[WIDEST];
        for (int i = 0; i < n; i++)
            parts[i] = source(pass, first + i, i);
        work->fold(out, parts, n, bytes);
    } else {
        int left = 1 << (td__tree_levels(n) - 1);
        fold_node(pass, first, left, out);
        if (n - left == 1) {
            combine(work, out, source(pass, first + left, 0), pass->count);
        } else {
            _Alignas(64) char right[BLOCK_BYTES];
            fold_node(pass, first + left, n - left, right);
            combine(work, out, right, pass->count);
        }
    }
}

static void reduce_blocks(const struct work *work, void *const *dst, int dst_count,
                          const void *const *src, int src_count, size_t count)
{
    _Alignas(64) char tiles[WIDEST][BLOCK_BYTES];
    _Alignas(64) char value[BLOCK_BYTES];
    struct pass pass = {.work = work, .src = src, .tiles = tiles};
    for (; pass.at < count; pass.at += pass.count) {
        pass.count = min_size(work->block, count - pass.at);
        fold_node(&pass, 0, src_count, value);
        if (work->averages)
            divide_block(work, value, pass.count, src_count);
        size_t offset = pass.at * work->size;
        store_block(work, (char *)dst[0] + offset, value, pass.count);
        for (int i = 1; i < dst_count; i++)
            memcpy((char *)dst[i] + offset, (char *)dst[0] + offset, pass.count * work->size);
    }
}

void td__reduce_accumulate(const struct td__reduction *reduction, void *acc, const void *const *src,
                           int src_count, size_t count)
{
    _Alignas(64) char tiles[WIDEST][BLOCK_BYTES];
    struct work work = work_of(reduction);
    struct pass pass = {.work = &work, .src = src, .tiles = tiles};
    for (; pass.at < count; pass.at += pass.count) {
        pass.count = min_size(work.block, count - pass.at);
        fold_node(&pass, 0, src_count, (char *)acc + pass.at * work.acc_size);
    }
}

/* All sources are one subtree, from elements to elements: no block is needed, since no source is read after a
 * write. */
static void reduce_at_once(const struct work *work, void *const *dst, int dst_count,
                           const void *const *src, int src_count, size_t count)
{
    size_t block = BLOCK_BYTES / work->size;
    for (size_t at = 0, part; at < count; at += part) {
        part = dst_count == 1 ? count : min_size(block, count - at);
        size_t offset = at * work->size, bytes = part * work->size;
        void *parts[WIDEST];
        for (int i = 0; i < src_count; i++)
            parts[i] = (char *)src[i] + offset;
        work->fold_elements((char *)dst[0] + offset, parts, src_count, bytes);
        for (int i = 1; i < dst_count; i++)
            memcpy((char *)dst[i] + offset, (char *)dst[0] + offset, bytes);
    }
}

static bool same_buffers(void *const *dst, int dst_count, const void *const *src, int src_count)
{
    for (int i = 0; i < dst_count && i < src_count; i++)
        if (dst[i] != src[i])
            return false;
    return dst_count == src_count;
}

/* ---- In place: the destinations are the sources ---------------------------------------------- */

static void offset_buffers(void *const *buffers, int n, size_t bytes, void **parts)
{
    for (int i = 0; i < n; i++)
        parts[i] = (char *)buffers[i] + bytes;
}

static bool is_page_staged(const struct work *work, void *const *buffers, int n, size_t at)
{
    void *parts[WIDEST] = {0};
    offset_buffers(buffers, n, at * work->size, parts);
    return td__reduce_is_staged(work->reduction->methods, n, td__reduce_clash(parts, n));
}

/* The first element after `at` that does not begin in the same page of `buffer`. */
static size_t next_page(const struct work *work, const void *buffer, size_t at)
{
    uintptr_t address = (uintptr_t)buffer + at * work->size;
    return at + (PAGE - address % PAGE + work->size - 1) / work->size;
}

/* Page by page, if the method depends on whether buffers clash: that may change from page to page. */
static void reduce_in_place(const struct work *work, void *const *buffers, int n, size_t count)
{
    uint32_t methods = work->reduction->methods;
    bool staged = td__reduce_is_staged(methods, n, false);
    bool varies = staged != td__reduce_is_staged(methods, n, true);
    void *parts[WIDEST] = {0};
    for (size_t at = 0, end; at < count; at = end) {
        end = count;
        if (varies) {
            staged = is_page_staged(work, buffers, n, at);
            end = next_page(work, buffers[0], at);
            while (end < count && is_page_staged(work, buffers, n, end) == staged)
                end = next_page(work, buffers[0], end);
            end = min_size(end, count);
        }
        offset_buffers(buffers, n, at * work->size, parts);
        if (staged)
            reduce_at_once(work, parts, n, (const void *const *)parts, n, end - at);
        else
            work->fold_elements(NULL, parts, n, (end - at) * work->size);
    }
}

void td__reduce_many(const struct td__reduction *reduction, void *const *dst, int dst_count,
                     const void *const *src, int src_count, size_t count)
{
    struct work work = work_of(reduction);
    if (dst_count == 0)
        return;
    if (!work.fold_elements || !is_width(src_count))
        reduce_blocks(&work, dst, dst_count, src, src_count, count);
    else if (same_buffers(dst, dst_count, src, src_count))
        reduce_in_place(&work, dst, src_count, count);
    else
        reduce_at_once(&work, dst, dst_count, src, src_count, count);
}
