/* The loops of cpu_layer_norm.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

/* y, mean and rstd of one row. The rounding error of the mean is in the sum of the differences, and is
 * subtracted separately: with a large mean and a small variance it matters. */
TD__INLINE void NAME(layer_norm_row)(const struct layer_norm *k, int64_t r)
{
    int64_t n = k->n;
    const REAL *restrict x = (const REAL *)k->x + r * n, *restrict w = k->weight,
                         *restrict b = k->bias;
    REAL *restrict y = (REAL *)k->y + r * n;
    REAL mean = NAME(sum)(x, n) / (REAL)n, first, second;
    NAME(moments)(x, n, mean, &first, &second);
    REAL rest = first / (REAL)n;
    REAL variance = second / (REAL)n - rest * rest;
    variance = variance < 0 ? 0 : variance;
    REAL rstd = 1 / REAL_SQRT(variance + (REAL)k->eps);

    if (w && b)
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean - rest) * rstd * w[i] + b[i];
    else if (w)
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean - rest) * rstd * w[i];
    else if (b)
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean - rest) * rstd + b[i];
    else
        for (int64_t i = 0; i < n; i++)
            y[i] = (x[i] - mean - rest) * rstd;
    if (k->mean)
        ((REAL *)k->mean)[r] = mean + rest;
    if (k->rstd)
        ((REAL *)k->rstd)[r] = rstd;
}

TD__VECTOR
static void NAME(layer_norm_rows)(void *arg, int64_t begin, int64_t end)
{
    for (int64_t r = begin; r < end; r++)
        NAME(layer_norm_row)(arg, r);
}

/* grad_x of one row: rstd (g - mean(g) - z mean(g z)), where z = (x - mean) rstd and g = grad_y w. */
TD__INLINE void NAME(layer_norm_grad_row)(const struct layer_norm *k, int64_t r)
{
    int64_t n = k->n, i = 0;
    const REAL *restrict x = (const REAL *)k->x + r * n, *restrict w = k->weight;
    const REAL *restrict gy = (const REAL *)k->grad_y + r * n;
    REAL *restrict gx = (REAL *)k->grad_x + r * n;
    REAL mean = ((REAL *)k->mean)[r], rstd = ((REAL *)k->rstd)[r];
    NAME(lanes) s = {0}, t = {0};
    for (; i + LANES <= n; i += LANES) {
        NAME(lanes) g = NAME(load)(gy + i);
        if (w)
            g *= NAME(load)(w + i);
        s += g;
        t += g * (NAME(load)(x + i) - mean);
    }
    REAL sum = NAME(fold_sum)(s), product = NAME(fold_sum)(t);
    for (; i < n; i++) {
        REAL g = w ? gy[i] * w[i] : gy[i];
        sum += g;
        product += g * (x[i] - mean);
    }
    REAL shift = sum / (REAL)n, slope = product / (REAL)n * rstd * rstd;
    if (w)
        for (i = 0; i < n; i++)
            gx[i] = (gy[i] * w[i] - shift - (x[i] - mean) * slope) * rstd;
    else
        for (i = 0; i < n; i++)
            gx[i] = (gy[i] - shift - (x[i] - mean) * slope) * rstd;
}

TD__VECTOR
static void NAME(layer_norm_grad_rows)(void *arg, int64_t begin, int64_t end)
{
    for (int64_t r = begin; r < end; r++)
        NAME(layer_norm_grad_row)(arg, r);
}

/* The gradients of weight and bias: sums over all rows, WIDTH columns at a time in registers or L1, with
 * partial sums of BLOCK rows, so that errors do not accumulate. */
TD__VECTOR
static void NAME(layer_norm_grad_columns)(const struct layer_norm *k, int64_t from, int64_t width)
{
    REAL gw[WIDTH] = {0}, gb[WIDTH] = {0};
    for (int64_t start = 0; start < k->rows; start += BLOCK) {
        int64_t end = k->rows - start < BLOCK ? k->rows : start + BLOCK;
        REAL w[WIDTH] = {0}, b[WIDTH] = {0};
        for (int64_t r = start; r < end; r++) {
            const REAL *restrict x = (const REAL *)k->x + r * k->n + from;
            const REAL *restrict gy = (const REAL *)k->grad_y + r * k->n + from;
            REAL mean = ((REAL *)k->mean)[r], rstd = ((REAL *)k->rstd)[r];
            for (int64_t i = 0; i < width; i++) {
                w[i] += gy[i] * (x[i] - mean) * rstd;
                b[i] += gy[i];
            }
        }
        for (int64_t i = 0; i < width; i++) {
            gw[i] += w[i];
            gb[i] += b[i];
        }
    }
    if (k->grad_weight)
        memcpy((REAL *)k->grad_weight + from, gw, (size_t)width * sizeof(REAL));
    if (k->grad_bias)
        memcpy((REAL *)k->grad_bias + from, gb, (size_t)width * sizeof(REAL));
}

/* Blocks of WIDTH columns. */
static void NAME(layer_norm_grad_blocks)(void *arg, int64_t begin, int64_t end)
{
    const struct layer_norm *k = arg;
    for (int64_t from = begin * WIDTH; from < end * WIDTH && from < k->n; from += WIDTH) {
        int64_t width = k->n - from < WIDTH ? k->n - from : WIDTH;
        NAME(layer_norm_grad_columns)(k, from, width);
    }
}
