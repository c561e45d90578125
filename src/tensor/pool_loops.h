/* The loops of pooling over one image, for one type of elements: the includer defines REAL and NAMED(). See
 * cpu_pool.c. */

/* The maximum of each window: NaN is greatest, of equal elements the first counts. A window outside of the
 * image has -infinity, and the index -1. `indices` may be NULL. */
static void NAMED(max_any)(const struct pool *pool, const REAL *x, REAL *out, int32_t *indices)
{
    for (int64_t oy = 0; oy < pool->out[0]; oy++)
        for (int64_t ox = 0; ox < pool->out[1]; ox++) {
            struct range rows = range_at(pool, 0, oy), columns = range_at(pool, 1, ox);
            REAL greatest = -(REAL)INFINITY;
            int64_t where = -1;
            for (int64_t y = rows.start; y < rows.end; y += rows.step)
                for (int64_t at = columns.start; at < columns.end; at += columns.step) {
                    REAL value = x[y * pool->in[1] + at];
                    if (where < 0 || value > greatest || (value != value && greatest == greatest)) {
                        greatest = value;
                        where = y * pool->in[1] + at;
                    }
                }
            *out++ = greatest;
            if (indices)
                *indices++ = (int32_t)where;
        }
}

/* The same for windows of 2 x 2 with stride 2, without a branch: first the maxima of vertical pairs, for as
 * many rows as ELEMENTS allows, then the maxima of two of these. */
TD__VECTOR static void NAMED(max_pairs)(const struct pool *pool, const REAL *restrict x,
                                        REAL *restrict out, int32_t *restrict indices)
{
    enum { ELEMENTS = 1024 };
    REAL values[ELEMENTS];
    int32_t argmax[ELEMENTS];
    const int32_t width = (int32_t)pool->in[1], used = 2 * (int32_t)pool->out[1];
    const int32_t rows = (int32_t)pool->out[0], most = ELEMENTS / used;
    for (int32_t y0 = 0; y0 < rows; y0 += most) {
        const int32_t end = y0 + most < rows ? y0 + most : rows;
        for (int32_t y = y0; y < end; y++) {
            const int32_t first = 2 * y * width;
            const REAL *upper = x + first, *lower = upper + width;
            REAL *value = values + (y - y0) * used;
            int32_t *row_argmax = argmax + (y - y0) * used;
            for (int32_t i = 0; i < used; i++) {
                REAL a = upper[i], b = lower[i];
                bool below = !(a >= b) & (a == a);
                value[i] = below ? b : a;
                row_argmax[i] = first + i + (below ? width : 0);
            }
        }
        const int32_t pairs = (end - y0) * used / 2;
        for (int32_t i = 0; i < pairs; i++) {
            REAL a = values[2 * i], b = values[2 * i + 1];
            int32_t left = argmax[2 * i], right = argmax[2 * i + 1];
            bool same = (a == b) | ((a != a) & (b != b));
            bool other = (!(a >= b) & (a == a)) | (same & (right < left));
            out[i] = other ? b : a;
            indices[i] = other ? right : left;
        }
        out += pairs;
        indices += pairs;
    }
}

static void NAMED(max_grad)(const struct pool *pool, const REAL *grad_y, const int32_t *indices,
                            REAL *grad_x)
{
    memset(grad_x, 0, (size_t)(pool->in[0] * pool->in[1]) * sizeof *grad_x);
    for (int64_t i = 0; i < pool->out[0] * pool->out[1]; i++)
        if (indices[i] >= 0)
            grad_x[indices[i]] += grad_y[i];
}

static void NAMED(average)(const struct pool *pool, const REAL *x, REAL *out)
{
    for (int64_t oy = 0; oy < pool->out[0]; oy++)
        for (int64_t ox = 0; ox < pool->out[1]; ox++) {
            struct range rows = range_at(pool, 0, oy), columns = range_at(pool, 1, ox);
            REAL sum = 0;
            for (int64_t y = rows.start; y < rows.end; y++)
                for (int64_t at = columns.start; at < columns.end; at++)
                    sum += x[y * pool->in[1] + at];
            bool empty = rows.start >= rows.end || columns.start >= columns.end;
            *out++ = empty ? 0 : sum / (REAL)(rows.divisor * columns.divisor);
        }
}

static void NAMED(average_grad)(const struct pool *pool, const REAL *grad_y, REAL *grad_x)
{
    memset(grad_x, 0, (size_t)(pool->in[0] * pool->in[1]) * sizeof *grad_x);
    for (int64_t oy = 0; oy < pool->out[0]; oy++)
        for (int64_t ox = 0; ox < pool->out[1]; ox++) {
            struct range rows = range_at(pool, 0, oy), columns = range_at(pool, 1, ox);
            REAL share = *grad_y++ / (REAL)(rows.divisor * columns.divisor);
            for (int64_t y = rows.start; y < rows.end; y++)
                for (int64_t at = columns.start; at < columns.end; at++)
                    grad_x[y * pool->in[1] + at] += share;
        }
}

#undef REAL
#undef NAMED
