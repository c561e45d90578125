/* The loops of cpu_batch_norm.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

/* first[c] += the sum of x - from[c], second[c] += that of its square, over all lines of a channel;
 * from is NULL for 0. */
TD__VECTOR
static void NAME(channel_moments)(const struct batch_norm *k, const double *from, double *first,
                                  double *second)
{
    const REAL *x = k->x;
    if (k->s < LONG_LINE) {
        for (int64_t n = 0; n < k->n; n++)
            for (int64_t s = 0; s < k->s; s++)
                for (int64_t c = 0; c < k->c; c++) {
                    double d = (double)x[(n * k->c + c) * k->s + s] - (from ? from[c] : 0);
                    first[c] += d;
                    second[c] += d * d;
                }
        return;
    }
    for (int64_t line = 0; line < k->n * k->c; line++, x += k->s) {
        int64_t c = line % k->c;
        REAL base = from ? (REAL)from[c] : 0;
        for (int64_t i = 0; i < k->s; i += PIECE) {
            REAL sum, squares;
            NAME(moments)(x + i, k->s - i < PIECE ? k->s - i : PIECE, base, &sum, &squares);
            first[c] += (double)sum;
            second[c] += (double)squares;
        }
    }
}

/* first[c] += the sum of grad_y, second[c] += that of grad_y (x - mean[c]). */
TD__VECTOR
static void NAME(channel_products)(const struct batch_norm *k, double *restrict first,
                                   double *restrict second)
{
    const REAL *x = k->x, *gy = k->grad_y, *mean = k->mean;
    if (k->s < LONG_LINE) {
        for (int64_t n = 0; n < k->n; n++)
            for (int64_t s = 0; s < k->s; s++)
                for (int64_t c = 0; c < k->c; c++) {
                    int64_t at = (n * k->c + c) * k->s + s;
                    first[c] += (double)gy[at];
                    second[c] += (double)gy[at] * ((double)x[at] - (double)mean[c]);
                }
        return;
    }
    for (int64_t line = 0; line < k->n * k->c; line++, x += k->s, gy += k->s) {
        int64_t c = line % k->c;
        for (int64_t i = 0; i < k->s; i += PIECE) {
            int64_t n = k->s - i < PIECE ? k->s - i : PIECE;
            first[c] += (double)NAME(sum)(gy + i, n);
            second[c] += (double)NAME(shifted_dot)(gy + i, x + i, mean[c], n);
        }
    }
}

/* y = (x - mean[c]) factor[c] + shift[c]. */
TD__VECTOR
static void NAME(channel_apply)(const struct batch_norm *k, const REAL *restrict mean,
                                const REAL *restrict factor, const REAL *restrict shift)
{
    const REAL *restrict x = k->x;
    REAL *restrict y = k->y;
    if (k->s == 1) {
        for (int64_t n = 0; n < k->n; n++, x += k->c, y += k->c)
            for (int64_t c = 0; c < k->c; c++)
                y[c] = (x[c] - mean[c]) * factor[c] + shift[c];
        return;
    }
    for (int64_t n = 0; n < k->n; n++)
        for (int64_t c = 0; c < k->c; c++, x += k->s, y += k->s) {
            REAL m = mean[c], f = factor[c], b = shift[c];
            for (int64_t i = 0; i < k->s; i++)
                y[i] = (x[i] - m) * f + b;
        }
}

/* grad_x = grad_y factor[c] - shift[c] - (x - mean[c]) slope[c]. */
TD__VECTOR
static void NAME(channel_grad)(const struct batch_norm *k, const REAL *restrict factor,
                               const REAL *restrict shift, const REAL *restrict slope)
{
    const REAL *restrict x = k->x, *restrict gy = k->grad_y, *restrict mean = k->mean;
    REAL *restrict gx = k->grad_x;
    if (k->s == 1) {
        for (int64_t n = 0; n < k->n; n++, x += k->c, gy += k->c, gx += k->c)
            for (int64_t c = 0; c < k->c; c++)
                gx[c] = gy[c] * factor[c] - shift[c] - (x[c] - mean[c]) * slope[c];
        return;
    }
    for (int64_t n = 0; n < k->n; n++)
        for (int64_t c = 0; c < k->c; c++, x += k->s, gy += k->s, gx += k->s) {
            REAL f = factor[c], b = shift[c], m = mean[c], d = slope[c];
            for (int64_t i = 0; i < k->s; i++)
                gx[i] = gy[i] * f - b - (x[i] - m) * d;
        }
}

/* Puts the mean of each channel into mean[], in f64, and returns 1 / sqrt(variance + eps) in rstd[].
 * The running statistics move along. */
static void NAME(batch_statistics)(const struct batch_norm *k, double *mean, double *rstd)
{
    double count = (double)(k->n * k->s);
    NAME(channel_moments)(k, NULL, mean, rstd);
    double *first = k->sums + 2 * k->c, *second = k->sums + 3 * k->c;
    for (int64_t c = 0; c < k->c; c++)
        mean[c] = (double)(REAL)(mean[c] / count); /* what is rounded off comes back with first[] */
    NAME(channel_moments)(k, mean, first, second);
    REAL *running_mean = k->running_mean, *running_var = k->running_var;
    for (int64_t c = 0; c < k->c; c++) {
        double rest = first[c] / count;
        mean[c] += rest;
        double squares = second[c] - first[c] * rest;
        squares = squares < 0 ? 0 : squares;
        rstd[c] = 1 / sqrt(squares / count + k->eps);
        if (running_mean)
            running_mean[c] = (REAL)(k->momentum * mean[c] +
                                     (1 - k->momentum) * (double)running_mean[c]);
        if (running_var)
            running_var[c] = (REAL)(k->momentum * (squares / (count - 1)) +
                                    (1 - k->momentum) * (double)running_var[c]);
    }
}

static void NAME(batch_norm)(const struct batch_norm *k)
{
    double *mean = k->sums, *rstd = k->sums + k->c;
    const REAL *weight = k->weight, *bias = k->bias;
    if (k->training && k->n && k->s) { /* of nothing they are 0, and the running ones stay */
        NAME(batch_statistics)(k, mean, rstd);
    } else if (!k->training) {
        for (int64_t c = 0; c < k->c; c++) {
            mean[c] = (double)((const REAL *)k->running_mean)[c];
            rstd[c] = 1 / sqrt((double)((const REAL *)k->running_var)[c] + k->eps);
        }
    }
    if (k->mean && k->training)
        for (int64_t c = 0; c < k->c; c++)
            ((REAL *)k->mean)[c] = (REAL)mean[c];
    if (k->rstd && k->training)
        for (int64_t c = 0; c < k->c; c++)
            ((REAL *)k->rstd)[c] = (REAL)rstd[c];

    REAL *near = k->factors, *factor = near + k->c, *shift = factor + k->c;
    for (int64_t c = 0; c < k->c; c++) {
        double f = weight ? (double)weight[c] * rstd[c] : rstd[c];
        near[c] = (REAL)mean[c];
        factor[c] = (REAL)f;
        shift[c] = (REAL)((bias ? (double)bias[c] : 0) - (mean[c] - (double)near[c]) * f);
    }
    NAME(channel_apply)(k, near, factor, shift);
}

/* With M numbers in a channel: grad_x = w rstd (grad_y - sum grad_y / M - z sum(grad_y z) / M); where
 * the statistics are constants only the first of the three is left. */
static void NAME(batch_norm_grad)(const struct batch_norm *k)
{
    double *sum = k->sums, *product = k->sums + k->c, count = (double)(k->n * k->s);
    const REAL *rstd = k->rstd, *weight = k->weight;
    if (k->training || k->grad_weight || k->grad_bias)
        NAME(channel_products)(k, sum, product);
    REAL *factor = k->factors, *shift = factor + k->c, *slope = shift + k->c;
    for (int64_t c = 0; c < k->c; c++) {
        double r = (double)rstd[c], f = weight ? r * (double)weight[c] : r;
        if (k->grad_weight)
            ((REAL *)k->grad_weight)[c] = (REAL)(product[c] * r);
        if (k->grad_bias)
            ((REAL *)k->grad_bias)[c] = (REAL)sum[c];
        factor[c] = (REAL)f;
        shift[c] = k->training ? (REAL)(sum[c] / count * f) : 0;
        slope[c] = k->training ? (REAL)(product[c] / count * r * r * f) : 0;
    }
    if (k->grad_x)
        NAME(channel_grad)(k, factor, shift, slope);
}
