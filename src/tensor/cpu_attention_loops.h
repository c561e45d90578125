/* The loops of cpu_attention.c for one type, with REAL and NAME() of real_f32.h or real_f64.h. */

/* x[j] += mask[row, column + j]; f16 and bf16 are converted to f32. */
TD__INLINE void NAME(add_mask)(REAL *restrict x, int64_t n, const struct attention *a, int64_t item,
                               int64_t row, int64_t column)
{
    int64_t step = a->mask_strides[3];
    int64_t at = item / a->heads * a->mask_strides[0] + item % a->heads * a->mask_strides[1] +
                 row * a->mask_strides[2] + column * step;
    const uint16_t *half = (const uint16_t *)(const void *)a->mask + at;
    const REAL *real = (const REAL *)(const void *)a->mask + at;
    if (a->mask_dtype == TD_F16)
        for (int64_t j = 0; j < n; j++)
            x[j] += (REAL)td__f16_to_f32(half[j * step]);
    else if (a->mask_dtype == TD_BF16)
        for (int64_t j = 0; j < n; j++)
            x[j] += (REAL)td__bf16_to_f32(half[j * step]);
    else if (step == 1)
        for (int64_t j = 0; j < n; j++)
            x[j] += real[j];
    else
        for (int64_t j = 0; j < n; j++)
            x[j] += real[j * step];
}

/* How many keys of the block its row i attends to. */
TD__INLINE int64_t NAME(keys_of)(const struct attention *a, const struct block *b, int64_t i)
{
    int64_t seen = b->first + i + 1 - b->from;
    if (!a->causal || seen > b->keys)
        return b->keys;
    return seen < 0 ? 0 : seen;
}

/* Whether each of the scores is -infinity, and none NaN. `most` is the greatest of them. */
TD__INLINE bool NAME(sees_nothing)(const REAL *x, int64_t n, REAL most)
{
    return most == -INFINITY && (n == 0 || NAME(sum)(x, n) == -INFINITY);
}

static void NAME(begin_rows)(const struct attention *a, const struct block *b)
{
    REAL *most = a->most, *sums = a->sums;
    for (int64_t i = 0; i < b->rows; i++) {
        most[i] = -INFINITY;
        sums[i] = 0;
    }
}

/* Replaces scores by e^(score - running maximum of the row), and rescales the rows of y to the same. */
TD__VECTOR
static void NAME(soften)(const struct attention *a, const struct block *b, void *y)
{
    REAL *most = a->most, *sums = a->sums;
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *restrict x = (REAL *)a->scores + i * b->keys;
        int64_t n = NAME(keys_of)(a, b, i);
        if (a->mask)
            NAME(add_mask)(x, n, a, b->item, b->first + i, b->from);
        REAL before = most[i], here = NAME(max)(x, n);
        REAL now = here > before ? here : before;
        if (NAME(sees_nothing)(x, n, now)) {
            memset(x, 0, (size_t)b->keys * sizeof *x);
            continue;
        }
        for (int64_t j = 0; j < n; j++)
            x[j] = REAL_EXP(x[j] - now);
        memset(x + n, 0, (size_t)(b->keys - n) * sizeof *x);
        REAL factor = before == now ? 1 : REAL_EXP(before - now);
        sums[i] = sums[i] * factor + NAME(sum)(x, n);
        most[i] = now;
        REAL *restrict row = (REAL *)y + i * a->y.row;
        if (b->from > 0 && factor != 1)
            for (int64_t j = 0; j < a->e; j++)
                row[j] *= factor;
    }
}

/* Divides the rows of y by their sums; a fully masked row is 0. */
TD__VECTOR
static void NAME(end_rows)(const struct attention *a, const struct block *b, void *y)
{
    const REAL *most = a->most, *sums = a->sums;
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *restrict row = (REAL *)y + i * a->y.row;
        REAL factor = 1 / sums[i];
        if (sums[i] == 0)
            for (int64_t j = 0; j < a->e; j++)
                row[j] = 0;
        else
            for (int64_t j = 0; j < a->e; j++)
                row[j] *= factor;
        if (a->lse)
            ((REAL *)a->lse)[b->item * a->l + b->first + i] = sums[i] == 0
                                                                  ? -INFINITY
                                                                  : most[i] + REAL_LOG(sums[i]);
    }
}

/* delta[i] = the sum of y and grad_y of row i, multiplied element by element. */
TD__VECTOR
static void NAME(row_products)(const struct attention *a, const struct block *b, const void *y,
                               const void *grad_y)
{
    for (int64_t i = 0; i < b->rows; i++)
        ((REAL *)a->delta)[i] = NAME(dot)((const REAL *)y + i * a->y.row,
                                          (const REAL *)grad_y + i * a->grad_y.row, a->e);
}

/* scores become p, the softmax; grad_scores, which are grad_y v^T, become the gradients of the scores. */
TD__VECTOR
static void NAME(grad_scores)(const struct attention *a, const struct block *b)
{
    for (int64_t i = 0; i < b->rows; i++) {
        REAL *restrict p = (REAL *)a->scores + i * b->keys;
        REAL *restrict ds = (REAL *)a->grad_scores + i * b->keys;
        REAL lse = ((const REAL *)a->lse)[b->item * a->l + b->first + i];
        REAL product = ((const REAL *)a->delta)[i];
        int64_t n = lse == -INFINITY ? 0 : NAME(keys_of)(a, b, i);
        if (a->mask)
            NAME(add_mask)(p, n, a, b->item, b->first + i, b->from);
        for (int64_t j = 0; j < n; j++) {
            p[j] = REAL_EXP(p[j] - lse);
            ds[j] = p[j] * (ds[j] - product);
        }
        memset(p + n, 0, (size_t)(b->keys - n) * sizeof *p);
        memset(ds + n, 0, (size_t)(b->keys - n) * sizeof *ds);
    }
}
