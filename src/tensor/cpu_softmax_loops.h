/* The loops of cpu_softmax.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

/* One row of `n`. */
TD__INLINE void NAME(softmax_row)(REAL *y, const REAL *x, int64_t n, bool logarithm)
{
    REAL most = NAME(max)(x, n);
    for (int64_t i = 0; i < n; i++)
        y[i] = REAL_EXP(x[i] - most);
    REAL sum = NAME(sum)(y, n);
    if (logarithm) {
        /* Not x - (most + log): that sum would be rounded at the magnitude of `most`. */
        REAL log_sum = REAL_LOG(sum);
        for (int64_t i = 0; i < n; i++)
            y[i] = x[i] - most - log_sum;
    } else {
        REAL factor = 1 / sum;
        for (int64_t i = 0; i < n; i++)
            y[i] *= factor;
    }
}

TD__VECTOR
static void NAME(softmax_rows)(REAL *restrict y, const REAL *restrict x, int64_t rows, int64_t n,
                               bool logarithm)
{
    for (int64_t r = 0; r < rows; r++)
        NAME(softmax_row)(y + r * n, x + r * n, n, logarithm);
}

/* `width` columns, at most COLUMNS, of n rows that are `pitch` apart. */
TD__VECTOR
static void NAME(softmax_columns)(REAL *restrict y, const REAL *restrict x, int64_t n,
                                  int64_t pitch, int64_t width, bool logarithm)
{
    REAL most[COLUMNS], sum[COLUMNS];
    for (int64_t j = 0; j < width; j++) {
        most[j] = -INFINITY;
        sum[j] = 0;
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < width; j++)
            most[j] = x[i * pitch + j] > most[j] ? x[i * pitch + j] : most[j];
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < width; j++) {
            REAL e = REAL_EXP(x[i * pitch + j] - most[j]);
            y[i * pitch + j] = e;
            sum[j] += e;
        }
    }
    for (int64_t j = 0; j < width; j++)
        sum[j] = logarithm ? REAL_LOG(sum[j]) : 1 / sum[j];
    for (int64_t i = 0; i < n; i++) {
        if (logarithm) {
            for (int64_t j = 0; j < width; j++)
                y[i * pitch + j] = x[i * pitch + j] - most[j] - sum[j];
        } else {
            for (int64_t j = 0; j < width; j++)
                y[i * pitch + j] *= sum[j];
        }
    }
}

/* gx may be gy. */
TD__VECTOR
static void NAME(softmax_grad_rows)(REAL *gx, const REAL *gy, const REAL *restrict y, int64_t rows,
                                    int64_t n, bool logarithm)
{
    for (int64_t r = 0; r < rows; r++, gx += n, gy += n, y += n) {
        if (logarithm) {
            REAL sum = NAME(sum)(gy, n);
            TD__INDEPENDENT
            for (int64_t i = 0; i < n; i++)
                gx[i] = gy[i] - REAL_EXP(y[i]) * sum;
        } else {
            REAL sum = NAME(dot)(gy, y, n);
            TD__INDEPENDENT
            for (int64_t i = 0; i < n; i++)
                gx[i] = y[i] * (gy[i] - sum);
        }
    }
}

TD__VECTOR
static void NAME(softmax_grad_columns)(REAL *gx, const REAL *gy, const REAL *restrict y, int64_t n,
                                       int64_t pitch, int64_t width, bool logarithm)
{
    REAL sum[COLUMNS] = {0};
    for (int64_t i = 0; i < n; i++) {
        if (logarithm) {
            for (int64_t j = 0; j < width; j++)
                sum[j] += gy[i * pitch + j];
        } else {
            for (int64_t j = 0; j < width; j++)
                sum[j] += gy[i * pitch + j] * y[i * pitch + j];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i * pitch;
        if (logarithm) {
            TD__INDEPENDENT
            for (int64_t j = 0; j < width; j++)
                gx[at + j] = gy[at + j] - REAL_EXP(y[at + j]) * sum[j];
        } else {
            TD__INDEPENDENT
            for (int64_t j = 0; j < width; j++)
                gx[at + j] = y[at + j] * (gy[at + j] - sum[j]);
        }
    }
}

/* Where block `unit` of columns begins; *width gets their number. */
static int64_t NAME(columns_at)(const struct softmax *k, int64_t unit, int64_t *width)
{
    int64_t j = unit % k->blocks * COLUMNS;
    *width = k->inner - j < COLUMNS ? k->inner - j : COLUMNS;
    return unit / k->blocks * k->n * k->inner + j;
}

static void NAME(softmax)(void *arg, int64_t begin, int64_t end)
{
    const struct softmax *k = arg;
    REAL *y = k->to;
    const REAL *x = k->from;
    if (k->inner == 1) {
        NAME(softmax_rows)(y + begin * k->n, x + begin * k->n, end - begin, k->n, k->logarithm);
        return;
    }
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t width, at = NAME(columns_at)(k, unit, &width);
        NAME(softmax_columns)(y + at, x + at, k->n, k->inner, width, k->logarithm);
    }
}

static void NAME(softmax_grad)(void *arg, int64_t begin, int64_t end)
{
    const struct softmax *k = arg;
    REAL *gx = k->to;
    const REAL *gy = k->from, *y = k->y;
    if (k->inner == 1) {
        int64_t at = begin * k->n;
        NAME(softmax_grad_rows)(gx + at, gy + at, y + at, end - begin, k->n, k->logarithm);
        return;
    }
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t width, at = NAME(columns_at)(k, unit, &width);
        NAME(softmax_grad_columns)(gx + at, gy + at, y + at, k->n, k->inner, width, k->logarithm);
    }
}
