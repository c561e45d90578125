/* Pooling with windows of a fixed size, row by row of the output, for one type of elements: the includer
 * defines REAL and NAMED(). See cpu_pool.c.
 *
 * Rows of the image are copied into a row with padding, so that loops over output pixels need no bounds
 * checks and are vectorised. */

/* Whether b at index q comes before a at index p: greater, or NaN, or the same and first. */
#define BETTER(b, q, a, p)                                                                         \
    (((b) > (a)) | (((b) != (b)) & ((a) == (a))) |                                                 \
     ((((a) == (b)) | (((a) != (a)) & ((b) != (b)))) & ((q) < (p))))

/* The maximum over the rows of a window, for each column. */
TD__INLINE void NAMED(max_down)(const struct pool *pool, const struct range *rows, const REAL *x,
                                REAL *restrict values, int32_t *restrict argmax)
{
    const int64_t width = pool->in[1], left = pool->window->padding[1];
    values += left;
    argmax += left;
    for (int64_t i = 0; i < width; i++) {
        values[i] = -(REAL)INFINITY;
        argmax[i] = INT32_MAX;
    }
    for (int64_t y = rows->start; y < rows->end; y += rows->step) {
        const REAL *restrict row = x + y * width;
        const int32_t first = (int32_t)(y * width);
        for (int32_t i = 0; i < (int32_t)width; i++) {
            REAL a = values[i], b = row[i];
            const int32_t p = argmax[i], q = first + i;
            const bool better = BETTER(b, q, a, p);
            values[i] = better ? b : a;
            argmax[i] = better ? q : p;
        }
    }
}

/* Every `stride`-th of `count` windows takes one more column. */
TD__INLINE void NAMED(max_across)(const REAL *restrict values, const int32_t *restrict argmax,
                                  int64_t count, const int64_t stride, REAL *restrict out,
                                  int32_t *restrict where)
{
    for (int64_t i = 0; i < count; i++) {
        REAL a = out[i], b = values[i * stride];
        const int32_t p = where[i], q = argmax[i * stride];
        const bool better = BETTER(b, q, a, p);
        out[i] = better ? b : a;
        where[i] = better ? q : p;
    }
}

/* A plane; `scratch` has space for two rows with padding, and one of indices of the output. */
TD__VECTOR static void NAMED(max_rows)(const struct pool *pool, const REAL *x, REAL *out,
                                       int32_t *indices, void *scratch)
{
    const td_window *w = pool->window;
    const int64_t padded = padded_width(pool), count = pool->out[1];
    REAL *values = scratch;
    int32_t *argmax = (int32_t *)(values + padded), *spare = argmax + padded;
    for (int64_t i = 0; i < padded; i++) {
        values[i] = -(REAL)INFINITY;
        argmax[i] = INT32_MAX;
    }
    for (int64_t oy = 0; oy < pool->out[0]; oy++, out += count) {
        int32_t *where = indices ? indices + oy * count : spare;
        struct range rows = range_at(pool, 0, oy);
        NAMED(max_down)(pool, &rows, x, values, argmax);
        for (int64_t i = 0; i < count; i++) {
            out[i] = -(REAL)INFINITY;
            where[i] = INT32_MAX;
        }
        for (int64_t k = 0; k < w->kernel[1]; k++) {
            const int64_t at = k * w->dilation[1];
            if (w->stride[1] == 1)
                NAMED(max_across)(values + at, argmax + at, count, 1, out, where);
            else if (w->stride[1] == 2)
                NAMED(max_across)(values + at, argmax + at, count, 2, out, where);
            else
                NAMED(max_across)(values + at, argmax + at, count, w->stride[1], out, where);
        }
        for (int64_t i = 0; i < count && indices; i++)
            where[i] = where[i] == INT32_MAX ? -1 : where[i];
    }
}

TD__INLINE void NAMED(add_across)(const REAL *restrict row, int64_t count, const int64_t stride,
                                  REAL *restrict out)
{
    for (int64_t i = 0; i < count; i++)
        out[i] += row[i * stride];
}

/* What the sums of an output row are divided by; `scratch` has space for a row with padding and these. */
TD__INLINE void NAMED(divisors)(const struct pool *pool, REAL *restrict divisors)
{
    for (int64_t ox = 0; ox < pool->out[1]; ox++) {
        struct range columns = range_at(pool, 1, ox);
        divisors[ox] = columns.start >= columns.end ? 0 : (REAL)columns.divisor;
    }
}

/* Sums go through a window row by row. */
TD__VECTOR static void NAMED(average_rows)(const struct pool *pool, const REAL *x, REAL *out,
                                           void *scratch)
{
    const td_window *w = pool->window;
    const int64_t padded = padded_width(pool), count = pool->out[1], width = pool->in[1];
    REAL *row = scratch, *divisors = row + padded;
    for (int64_t i = 0; i < padded; i++)
        row[i] = 0;
    NAMED(divisors)(pool, divisors);
    for (int64_t oy = 0; oy < pool->out[0]; oy++, out += count) {
        struct range rows = range_at(pool, 0, oy);
        for (int64_t i = 0; i < count; i++)
            out[i] = 0;
        for (int64_t y = rows.start; y < rows.end; y++) {
            memcpy(row + w->padding[1], x + y * width, (size_t)width * sizeof *x);
            for (int64_t k = 0; k < w->kernel[1]; k++) {
                if (w->stride[1] == 1)
                    NAMED(add_across)(row + k, count, 1, out);
                else if (w->stride[1] == 2)
                    NAMED(add_across)(row + k, count, 2, out);
                else
                    NAMED(add_across)(row + k, count, w->stride[1], out);
            }
        }
        const REAL down = (REAL)rows.divisor;
        const bool empty = rows.start >= rows.end;
        for (int64_t i = 0; i < count; i++)
            out[i] = empty || divisors[i] == 0 ? 0 : out[i] / (down * divisors[i]);
    }
}

/* A pixel adds its gradients in the order of the windows: later columns of a window first, as these belong
 * to earlier windows. */
TD__VECTOR static void NAMED(average_rows_grad)(const struct pool *pool, const REAL *grad_y,
                                                REAL *grad_x, void *scratch)
{
    const td_window *w = pool->window;
    const int64_t padded = padded_width(pool), count = pool->out[1], width = pool->in[1];
    REAL *row = scratch, *divisors = row + padded, *shares = divisors + count;
    memset(grad_x, 0, (size_t)(pool->in[0] * width) * sizeof *grad_x);
    NAMED(divisors)(pool, divisors);
    for (int64_t oy = 0; oy < pool->out[0]; oy++, grad_y += count) {
        struct range rows = range_at(pool, 0, oy);
        const REAL down = (REAL)rows.divisor;
        for (int64_t i = 0; i < count; i++)
            shares[i] = divisors[i] == 0 ? 0 : grad_y[i] / (down * divisors[i]);
        for (int64_t y = rows.start; y < rows.end; y++) {
            memcpy(row + w->padding[1], grad_x + y * width, (size_t)width * sizeof *row);
            for (int64_t k = w->kernel[1]; k-- > 0;) {
                REAL *restrict to = row + k;
                if (w->stride[1] == 1)
                    for (int64_t i = 0; i < count; i++)
                        to[i] += shares[i];
                else
                    for (int64_t i = 0; i < count; i++)
                        to[i * w->stride[1]] += shares[i];
            }
            memcpy(grad_x + y * width, row + w->padding[1], (size_t)width * sizeof *row);
        }
    }
}

#undef BETTER
