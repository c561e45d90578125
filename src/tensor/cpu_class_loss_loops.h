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

/* The targets n * s + from to + width - 1, at most COLUMNS, with s > 1. */
TD__INLINE void NAME(cross_entropy_columns)(const struct class_loss *k, int64_t n, int64_t from,
                                            int64_t width)
{
    const REAL *restrict x = (const REAL *)k->x + n * k->c * k->s + from;
    REAL *restrict out = (REAL *)k->out + n * k->c * k->s + from;
    REAL g[COLUMNS];
    for (int64_t j = 0; j < width; j++)
        g[j] = NAME(target_grad)(k, n * k->s + from + j);
    for (int64_t c = 0; c < k->c; c++)
        for (int64_t j = 0; j < width; j++)
            out[c * k->s + j] = REAL_EXP(x[c * k->s + j]) * g[j];
    for (int64_t j = 0; j < width; j++) {
        int64_t t = k->target[n * k->s + from + j];
        if (t != k->ignore_index)
            out[t * k->s + j] -= g[j];
    }
}

TD__VECTOR
static void NAME(cross_entropy_grad)(void *arg, int64_t begin, int64_t end)
{
    const struct class_loss *k = arg;
    if (k->s != 1) {
        for (int64_t n = begin; n < end; n++)
            for (int64_t from = 0; from < k->s; from += COLUMNS) {
                int64_t width = k->s - from < COLUMNS ? k->s - from : COLUMNS;
                NAME(cross_entropy_columns)(k, n, from, width);
            }
        return;
    }
    for (int64_t n = begin; n < end; n++) {
        const REAL *restrict x = (const REAL *)k->x + n * k->c;
        REAL *restrict out = (REAL *)k->out + n * k->c;
        REAL g = NAME(target_grad)(k, n);
        for (int64_t c = 0; c < k->c; c++)
            out[c] = REAL_EXP(x[c]) * g;
        if (k->target[n] != k->ignore_index)
            out[k->target[n]] -= g;
    }
}
