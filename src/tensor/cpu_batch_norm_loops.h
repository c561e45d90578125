/* The loops of cpu_batch_norm.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. Those over
 * channels and lines are ranges for td__parallel_for(). */

/* first[c] += the sum of x - from[c], second[c] += that of its square, over all lines of a channel;
 * from is NULL for 0. */
TD__VECTOR
static void NAME(channel_moments)(void *arg, int64_t begin, int64_t end)
{
    const struct batch_norm *k = arg;
    const double *from = k->from;
    double *first = k->first, *second = k->second;
    if (k->s < LONG_LINE) {
        const REAL *x = k->x;
        for (int64_t n = 0; n < k->n; n++)
            for (int64_t s = 0; s < k->s; s++)
                for (int64_t c = begin; c < end; c++) {
                    double d = (double)x[(n * k->c + c) * k->s + s] - (from ? from[c] : 0);
                    first[c] += d;
                    second[c] += d * d;
                }
        return;
    }
    for (int64_t n = 0; n < k->n; n++)
        for (int64_t c = begin; c < end; c++) {
            const REAL *x = (const REAL *)k->x + (n * k->c + c) * k->s;
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
static void NAME(channel_products)(void *arg, int64_t begin, int64_t end)
{
    const struct batch_norm *k = arg;
    double *restrict first = k->first, *restrict second = k->second;
    const REAL *mean = k->mean;
    if (k->s < LONG_LINE) {
        const REAL *x = k->x, *gy = k->grad_y;
        for (int64_t n = 0; n < k->n; n++)
            for (int64_t s = 0; s < k->s; s++)
                for (int64_t c = begin; c < end; c++) {
                    int64_t at = (n * k->c + c) * k->s + s;
                    first[c] += (double)gy[at];
                    second[c] += (double)gy[at] * ((double)x[at] - (double)mean[c]);
                }
        return;
    }
    for (int64_t n = 0; n < k->n; n++)
        for (int64_t c = begin; c < end; c++) {
            int64_t at = (n * k->c + c) * k->s;
            const REAL *x = (const REAL *)k->x + at, *gy = (const REAL *)k->grad_y + at;
            for (int64_t i = 0; i < k->s; i += PIECE) {
                int64_t count = k->s - i < PIECE ? k->s - i : PIECE;
                first[c] += (double)NAME(sum)(gy + i, count);
                second[c] += (double)NAME(shifted_dot)(gy + i, x + i, mean[c], count);
            }
        }
}

/* y = (x - mean[c]) factor[c] + shift[c], for lines; where they have one number each, for rows of
 * channels. */
TD__VECTOR
static void NAME(channel_apply)(void *arg, int64_t begin, int64_t end)
{
    const struct batch_norm *k = arg;
    const REAL *restrict mean = k->factors, *restrict factor = mean + k->c,
                         *restrict shift = factor + k->c;
    int64_t length = k->s == 1 ? k->c : k->s;
    const REAL *restrict x = (const REAL *)k->x + begin * length;
    REAL *restrict y = (REAL *)k->y + begin * length;
    if (k->s == 1) {
        for (int64_t n = begin; n < end; n++, x += k->c, y += k->c)
            for (int64_t c = 0; c < k->c; c++)
                y[c] = (x[c] - mean[c]) * factor[c] + shift[c];
        return;
    }
    int64_t c = begin % k->c;
    for (int64_t line = begin; line < end; line++, x += k->s, y += k->s) {
        REAL m = mean[c], f = factor[c], b = shift[c];
        for (int64_t i = 0; i < k->s; i++)
            y[i] = (x[i] - m) * f + b;
        c = c + 1 < k->c ? c + 1 : 0;
    }
}

/* grad_x = grad_y factor[c] - shift[c] - (x - mean[c]) slope[c], for the same. */
TD__VECTOR
static void NAME(channel_grad)(void *arg, int64_t begin, int64_t end)
{
    const struct batch_norm *k = arg;
    const REAL *restrict factor = k->factors, *restrict shift = factor + k->c,
                         *restrict slope = shift + k->c, *restrict mean = k->mean;
    int64_t length = k->s == 1 ? k->c : k->s;
    const REAL *restrict x = (const REAL *)k->x + begin * length;
    const REAL *restrict gy = (const REAL *)k->grad_y + begin * length;
    REAL *restrict gx = (REAL *)k->grad_x + begin * length;
    if (k->s == 1) {
        for (int64_t n = begin; n < end; n++, x += k->c, gy += k->c, gx += k->c)
            for (int64_t c = 0; c < k->c; c++)
                gx[c] = gy[c] * factor[c] - shift[c] - (x[c] - mean[c]) * slope[c];
        return;
    }
    int64_t c = begin % k->c;
    for (int64_t line = begin; line < end; line++, x += k->s, gy += k->s, gx += k->s) {
        REAL f = factor[c], b = shift[c], m = mean[c], d = slope[c];
        for (int64_t i = 0; i < k->s; i++)
            gx[i] = gy[i] * f - b - (x[i] - m) * d;
        c = c + 1 < k->c ? c + 1 : 0;
    }
}

/* Puts the mean of each channel into mean[], in f64, and returns 1 / sqrt(variance + eps) in rstd[].
 * Updates the running statistics. */
static void NAME(batch_statistics)(struct batch_norm *k, double *mean, double *rstd)
{
    double count = (double)(k->n * k->s);
    over_channels(k, NAME(channel_moments), NULL, mean, rstd);
    double *first = k->sums + 2 * k->c, *second = k->sums + 3 * k->c;
    for (int64_t c = 0; c < k->c; c++)
        mean[c] = (double)(REAL)(mean[c] / count); /* first[] has the rounding error */
    over_channels(k, NAME(channel_moments), mean, first, second);
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

static void NAME(batch_norm)(struct batch_norm *k)
{
    double *mean = k->sums, *rstd = k->sums + k->c;
    const REAL *weight = k->weight, *bias = k->bias;
    if (k->training && k->n &&
        k->s) { /* without elements they are 0, and the running ones unchanged */
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
    over_lines(k, NAME(channel_apply));
}

/* With M numbers in a channel: grad_x = w rstd (grad_y - sum grad_y / M - z sum(grad_y z) / M); with constant
 * statistics only the first term. */
static void NAME(batch_norm_grad)(struct batch_norm *k)
{
    double *sum = k->sums, *product = k->sums + k->c, count = (double)(k->n * k->s);
    const REAL *rstd = k->rstd, *weight = k->weight;
    if (k->training || k->grad_weight || k->grad_bias)
        over_channels(k, NAME(channel_products), NULL, sum, product);
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
        over_lines(k, NAME(channel_grad));
}
