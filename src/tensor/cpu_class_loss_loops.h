/* The loops of cpu_class_loss.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

static void NAME(nll_loss)(struct class_loss *k)
{
    const REAL *x = k->x, *weight = k->weight;
    REAL *out = k->out;
    double total = 0;
    for (int64_t n = 0; n < k->n; n++)
        for (int64_t s = 0; s < k->s; s++) {
            int64_t i = n * k->s + s, t = k->target[i];
            if (t == k->ignore_index) {
                out[i] = 0;
                continue;
            }
            REAL w = weight ? weight[t] : 1;
            out[i] = -w * x[(n * k->c + t) * k->s + s];
            total += (double)w;
        }
    k->total = total;
}

/* The gradient of a target's loss, times its weight: 0 where it is ignored. */
TD__INLINE REAL NAME(target_grad)(const struct class_loss *k, int64_t i)
{
    int64_t t = k->target[i];
    if (t == k->ignore_index)
        return 0;
    REAL g = ((const REAL *)k->grad_y)[k->grad_each ? i : 0] * (REAL)k->scale;
    return k->weight ? g * ((const REAL *)k->weight)[t] : g;
}

static void NAME(nll_loss_grad)(void *arg, int64_t begin, int64_t end)
{
    const struct class_loss *k = arg;
    REAL *out = k->out;
    int64_t size = k->c * k->s;
    if (size)
        memset(out + begin * size, 0, (size_t)((end - begin) * size) * sizeof *out);
    for (int64_t n = begin; n < end; n++)
        for (int64_t s = 0; s < k->s; s++) {
            int64_t i = n * k->s + s, t = k->target[i];
            if (t != k->ignore_index)
                out[(n * k->c + t) * k->s + s] = -NAME(target_grad)(k, i);
        }
}

/* ---- Cross entropy of logits ------------------------------------------------------------------------ */

/* `count` logits from element `at` on: those of the tensor, or halves that were converted into `buffer`. */
TD__INLINE const REAL *NAME(logits)(const struct class_loss *k, int64_t at, int64_t count,
                                    void *buffer)
{
    if (!k->half)
        return (const REAL *)k->x + at;
    td__convert_half(buffer, (const uint16_t *)k->x + at, k->dtype, count);
    return buffer;
}

TD__INLINE REAL NAME(logit)(const struct class_loss *k, int64_t at)
{
    if (!k->half)
        return ((const REAL *)k->x)[at];
    uint16_t half = ((const uint16_t *)k->x)[at];
    return k->dtype == TD_F16 ? td__f16_to_f32(half) : td__bf16_to_f32(half);
}

/* The sum of the weights of the targets' classes. */
static double NAME(weights)(const struct class_loss *k)
{
    double total = 0;
    for (int64_t i = 0; i < k->n * k->s; i++)
        if (k->target[i] != k->ignore_index)
            total += k->weight ? (double)((const REAL *)k->weight)[k->target[i]] : 1;
    return total;
}

/* The loss of target i, which is s of n, and its statistics; 0 where it is ignored. */
TD__INLINE void NAME(put_loss)(const struct class_loss *k, int64_t n, int64_t s, REAL most,
                               REAL log_sum)
{
    int64_t i = n * k->s + s, t = k->target[i];
    bool ignored = t == k->ignore_index;
    REAL *statistics = (REAL *)k->statistics + 2 * i;
    statistics[0] = ignored ? 0 : most;
    statistics[1] = ignored ? 0 : log_sum;
    REAL loss = 0;
    if (!ignored) {
        REAL w = k->weight ? ((const REAL *)k->weight)[t] : 1;
        /* Not x - (most + log_sum): that sum would be rounded at the magnitude of `most`. */
        loss = -w * (NAME(logit)(k, (n * k->c + t) * k->s + s) - most - log_sum);
    }
    ((REAL *)k->out)[i] = loss;
}

TD__INLINE REAL NAME(greatest_logit)(const struct class_loss *k, int64_t begin, REAL *buffer)
{
    if (!k->half)
        return NAME(max)((const REAL *)k->x + begin, k->c);
    REAL most = -INFINITY;
    for (int64_t at = 0; at < k->c; at += CHUNK) {
        int64_t count = k->c - at < CHUNK ? k->c - at : CHUNK;
        REAL part = NAME(max)(NAME(logits)(k, begin + at, count, buffer), count);
        most = part > most ? part : most;
    }
    return most;
}

/* The sum of e^(x - most) over a row, added up in the order of sum(). */
TD__INLINE REAL NAME(sum_of_exponentials)(const struct class_loss *k, int64_t begin, REAL most,
                                          REAL *buffer)
{
    NAME(lanes) a = {0}, b = {0};
    REAL rest = 0;
    for (int64_t at = 0; at < k->c; at += CHUNK) {
        int64_t count = k->c - at < CHUNK ? k->c - at : CHUNK, i = 0;
        const REAL *x = NAME(logits)(k, begin + at, count, buffer);
        TD__INDEPENDENT
        for (int64_t j = 0; j < count; j++)
            buffer[j] = REAL_EXP(x[j] - most);
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            a += NAME(load)(buffer + i);
            b += NAME(load)(buffer + i + LANES);
        }
        if (i + LANES <= count) {
            a += NAME(load)(buffer + i);
            i += LANES;
        }
        for (; i < count; i++)
            rest += buffer[i];
    }
    return k->c < LANES ? rest : NAME(fold_sum)(a + b) + rest;
}

TD__VECTOR
static void NAME(cross_entropy_rows)(const struct class_loss *k, int64_t begin, int64_t end)
{
    REAL buffer[CHUNK];
    for (int64_t n = begin; n < end; n++) {
        REAL most = 0, log_sum = 0;
        if (k->target[n] != k->ignore_index) {
            most = NAME(greatest_logit)(k, n * k->c, buffer);
            log_sum = REAL_LOG(NAME(sum_of_exponentials)(k, n * k->c, most, buffer));
        }
        NAME(put_loss)(k, n, 0, most, log_sum);
    }
}

/* The targets n * s + from to + width - 1, at most COLUMNS, with s > 1. */
TD__VECTOR
static void NAME(cross_entropy_columns)(const struct class_loss *k, int64_t n, int64_t from,
                                        int64_t width)
{
    REAL most[COLUMNS], sum[COLUMNS], buffer[COLUMNS];
    int64_t begin = n * k->c * k->s + from;
    for (int64_t j = 0; j < width; j++) {
        most[j] = -INFINITY;
        sum[j] = 0;
    }
    for (int64_t c = 0; c < k->c; c++) {
        const REAL *x = NAME(logits)(k, begin + c * k->s, width, buffer);
        for (int64_t j = 0; j < width; j++)
            most[j] = x[j] > most[j] ? x[j] : most[j];
    }
    for (int64_t c = 0; c < k->c; c++) {
        const REAL *x = NAME(logits)(k, begin + c * k->s, width, buffer);
        for (int64_t j = 0; j < width; j++)
            sum[j] += REAL_EXP(x[j] - most[j]);
    }
    for (int64_t j = 0; j < width; j++)
        sum[j] = REAL_LOG(sum[j]);
    for (int64_t j = 0; j < width; j++)
        NAME(put_loss)(k, n, from + j, most[j], sum[j]);
}

/* The columns of a block; returns their number. */
TD__INLINE int64_t NAME(block_of_columns)(const struct class_loss *k, int64_t unit, int64_t *from)
{
    *from = unit % k->blocks * COLUMNS;
    return k->s - *from < COLUMNS ? k->s - *from : COLUMNS;
}

static void NAME(cross_entropy)(void *arg, int64_t begin, int64_t end)
{
    const struct class_loss *k = arg;
    if (k->s == 1) {
        NAME(cross_entropy_rows)(k, begin, end);
        return;
    }
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t from, width = NAME(block_of_columns)(k, unit, &from);
        NAME(cross_entropy_columns)(k, unit / k->blocks, from, width);
    }
}

/* ---- … and its gradient ------------------------------------------------------------------------------- */

/* Where `count` elements of the gradient are computed: in the tensor, or in `buffer`, from which they are rounded. */
TD__INLINE REAL *NAME(grads)(const struct class_loss *k, int64_t at, REAL *buffer)
{
    return k->half ? buffer : (REAL *)k->out + at;
}

TD__INLINE void NAME(put_grads)(const struct class_loss *k, int64_t at, int64_t count,
                                const void *grads)
{
    if (k->half)
        td__convert_to_half((uint16_t *)k->out + at, k->dtype, grads, count);
}

TD__VECTOR
static void NAME(cross_entropy_grad_rows)(const struct class_loss *k, int64_t begin, int64_t end)
{
    REAL buffer[CHUNK];
    const size_t size = k->half ? sizeof(uint16_t) : sizeof(REAL);
    for (int64_t n = begin; n < end; n++) {
        int64_t row = n * k->c, t = k->target[n];
        if (t == k->ignore_index) {
            memset((char *)k->out + (size_t)row * size, 0, (size_t)k->c * size);
            continue;
        }
        REAL g = NAME(target_grad)(k, n);
        REAL most = ((const REAL *)k->statistics)[2 * n];
        REAL log_sum = ((const REAL *)k->statistics)[2 * n + 1];
        for (int64_t at = 0; at < k->c; at += CHUNK) {
            int64_t count = k->c - at < CHUNK ? k->c - at : CHUNK;
            const REAL *x = NAME(logits)(k, row + at, count, buffer);
            REAL *out = NAME(grads)(k, row + at, buffer);
            TD__INDEPENDENT
            for (int64_t i = 0; i < count; i++)
                out[i] = REAL_EXP(x[i] - most - log_sum) * g;
            if (t >= at && t < at + count)
                out[t - at] -= g;
            NAME(put_grads)(k, row + at, count, out);
        }
    }
}

/* The targets of one line of gradients, that of class c: halves are finished before they are rounded. */
TD__INLINE void NAME(finish_line)(const struct class_loss *k, REAL *line, const int64_t *target,
                                  const REAL *g, int64_t c, int64_t width)
{
    for (int64_t j = 0; j < width; j++) {
        line[j] = target[j] == k->ignore_index ? 0 : line[j];
        line[j] -= target[j] == c ? g[j] : 0;
    }
}

/* The targets of all lines of a block that was computed in the tensor. */
TD__INLINE void NAME(finish_block)(const struct class_loss *k, REAL *out, const int64_t *target,
                                   const REAL *g, int64_t width)
{
    for (int64_t j = 0; j < width; j++) {
        if (target[j] != k->ignore_index) {
            out[target[j] * k->s + j] -= g[j];
            continue;
        }
        for (int64_t c = 0; c < k->c; c++)
            out[c * k->s + j] = 0;
    }
}

TD__VECTOR
static void NAME(cross_entropy_grad_columns)(const struct class_loss *k, int64_t n, int64_t from,
                                             int64_t width)
{
    REAL g[COLUMNS], most[COLUMNS], log_sum[COLUMNS], buffer[COLUMNS];
    const int64_t *target = k->target + n * k->s + from;
    const REAL *statistics = (const REAL *)k->statistics + 2 * (n * k->s + from);
    int64_t begin = n * k->c * k->s + from;
    for (int64_t j = 0; j < width; j++) {
        g[j] = NAME(target_grad)(k, n * k->s + from + j);
        most[j] = statistics[2 * j];
        log_sum[j] = statistics[2 * j + 1];
    }
    for (int64_t c = 0; c < k->c; c++) {
        int64_t at = begin + c * k->s;
        const REAL *x = NAME(logits)(k, at, width, buffer);
        REAL *out = NAME(grads)(k, at, buffer);
        TD__INDEPENDENT
        for (int64_t j = 0; j < width; j++)
            out[j] = REAL_EXP(x[j] - most[j] - log_sum[j]) * g[j];
        if (k->half)
            NAME(finish_line)(k, out, target, g, c, width);
        NAME(put_grads)(k, at, width, out);
    }
    if (!k->half)
        NAME(finish_block)(k, (REAL *)k->out + begin, target, g, width);
}

static void NAME(cross_entropy_grad)(void *arg, int64_t begin, int64_t end)
{
    const struct class_loss *k = arg;
    if (k->s == 1) {
        NAME(cross_entropy_grad_rows)(k, begin, end);
        return;
    }
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t from, width = NAME(block_of_columns)(k, unit, &from);
        NAME(cross_entropy_grad_columns)(k, unit / k->blocks, from, width);
    }
}
